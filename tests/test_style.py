"""Code that can be read in a diff: ruff's rules of pyproject.toml, in notebooks too, and short exported cells."""
import subprocess
import sys
from pathlib import Path

import pytest
from execnb.nbio import mk_cell, new_nb, read_nb, write_nb
from nbdev.process import extract_directives

ROOT = Path(__file__).parents[1]
FOLDERS = "tests", "tools", "nbs", "kernels"
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for kind in ("py", "ipynb")
               for path in (ROOT / folder).rglob(f"*.{kind}") if ".ipynb_checkpoints" not in path.parts)
NOTEBOOKS = [path for path in FILES if path.suffix == ".ipynb"]
LINES = 60  # of an exported cell, without its options


def ruff(path):
    "What ruff says of a file."
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", "--output-format=concise", "--config"]
    done = subprocess.run([*command, ROOT / "pyproject.toml", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode < 2, done.stderr
    return done.stdout


def long_cells(nb):
    "The exported cells of a notebook that are too long, and how long they are."
    for number, cell in enumerate(nb.cells):
        options = extract_directives(cell, remove=False) if cell.cell_type == "code" else {}
        lines = [line for line in cell.source.strip().splitlines() if not line.startswith("#|")]
        if {"export", "exports", "exporti"} & options.keys() and len(lines) > LINES: yield number, len(lines)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_ruff(path): assert ruff(path) == ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_exported_cells_are_short(path): assert not [*long_cells(read_nb(ROOT / path))]


# the checks above, shown to fail

@pytest.mark.parametrize("source, rule", [
    (f"x = '{120 * 'a'}'", "E501"), ("import os", "F401"), ("def f(): x = 1", "F841"), ("y = no_name", "F821"),
    ("def f(): pass\ndef f(): pass", "F811")])
@pytest.mark.parametrize("kind", ["py", "ipynb"])
def test_ruff_complains(tmp_path, kind, source, rule):
    path = tmp_path / f"new.{kind}"
    for text in source, "f = lambda x: x\nif f(1): y = 2; print(y)":  # the second is as this code is written
        path.write_text(text) if kind == "py" else write_nb(new_nb([mk_cell(text)]), path)
        assert rule in ruff(path) if text == source else ruff(path) == ""


def test_a_cell_is_too_long():
    long, code = "x = 1\n" * (LINES + 1), "x = 1\n" * LINES
    nb = new_nb([mk_cell(long), mk_cell("#| export\n" + code), mk_cell("#| exports\n#| code-fold: true\n" + long)])
    assert [*long_cells(nb)] == [(2, LINES + 1)]
