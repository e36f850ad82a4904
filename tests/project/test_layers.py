"""Which module imports which: the contracts of pyproject.toml by import-linter, names with an underscore by us."""
import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "pyproject.toml"
linter = pytest.importorskip("importlinter.cli")


def lint(folder):
    "Exit code and output of import-linter for the package in `folder`."
    code = f"from importlinter.cli import lint_imports; raise SystemExit(lint_imports({str(CONFIG)!r}, no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder,
                          env=os.environ | {"PYTHONPATH": str(folder)})
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def private_names(folder):
    "Names with an underscore that a module of the package takes from another."
    for path in sorted((folder / "sparse_nb").rglob("*.py")):
        if path.stem == "_modidx": continue
        tree, modules = ast.parse(path.read_text(encoding="utf-8")), set()
        private = lambda name: name.startswith("_") and not name.endswith("__")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.level or node.module.split(".")[0] == "sparse_nb"):
                modules |= {x.asname or x.name for x in node.names}
                yield from (f"{path.stem} imports {x.name}" for x in node.names if private(x.name))
            if isinstance(node, ast.Import):
                modules |= {x.asname or x.name for x in node.names if x.name.split(".")[0] == "sparse_nb"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and private(node.attr) and ast.unparse(node.value) in modules:
                yield f"{path.stem} uses {ast.unparse(node)}"


def missing_modules(folder):
    "Modules of the package that a module, or a function in it, imports from, and that there are not."
    package = folder / "sparse_nb"
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom): continue
            parts = (node.module or "").split(".") if node.module else []
            if node.level: at = path.parents[node.level - 1]
            elif parts[0] == "sparse_nb": at, parts = package, parts[1:]
            else: continue
            wanted = at.joinpath(*parts)
            if not (wanted.is_dir() or wanted.with_suffix(".py").exists()):
                yield f"{path.relative_to(package)} imports from {wanted.relative_to(folder)}"


def test_modules_that_are_imported_from_are_there():
    assert [*missing_modules(ROOT)] == []


def test_a_missing_module_is_found(tmp_path):
    "A kernel is imported in the function that runs it, where no test without a GPU comes by."
    (tmp_path / "sparse_nb" / "methods").mkdir(parents=True)
    (tmp_path / "sparse_nb" / "core.py").write_text("")
    (tmp_path / "sparse_nb" / "methods" / "quest.py").write_text(
        "from ..core import x\nfrom sparse_nb.core import x\nimport math\ndef f():\n    from .kernels.quest import y\n")
    assert [*missing_modules(tmp_path)] == ["methods/quest.py imports from sparse_nb/methods/kernels/quest"]


def test_imports_keep_the_contracts():
    code, said = lint(ROOT)
    assert code == 0 and " 0 broken" in said, said


def test_names_with_an_underscore_stay_in_their_module():
    assert [*private_names(ROOT)] == []


WRONG = {  # module: a line that it must not hold, and what is said of it
    "core/exact": ("from ..santa import Santa", "sparse_nb.core is not allowed to import sparse_nb.santa"),
    "core/checks": ("def f():\n    import sparse_nb.core.method as m",
                    "sparse_nb.core.checks is not allowed to import sparse_nb.core.method"),
    "kernels/common": ("from ..core.checks import check_count",
                       "sparse_nb.kernels is not allowed to import sparse_nb.core"),
    "kernels/gather": ("from .santa import decode",
                       "sparse_nb.kernels.gather is not allowed to import sparse_nb.kernels.santa"),
    "kernels/host": ("def f():\n    import pandas as pd", "sparse_nb.kernels is not allowed to import pandas"),
    "models/cache": ("from . import replay", "sparse_nb.models.cache is not allowed to import sparse_nb.models.replay"),
    "models/plan": ("from .dispatch import Dispatch",
                    "sparse_nb.models.plan is not allowed to import sparse_nb.models.dispatch"),
    "models/counts": ("from .index import LayerIndex",
                      "sparse_nb.models.counts is not allowed to import sparse_nb.models.index"),
    "models/compiled": ("def f():\n    from .graphs import LayerGraphs",
                        "sparse_nb.models.compiled is not allowed to import sparse_nb.models.graphs"),
    "models/hooks": ("from ..hf import sparsify", "sparse_nb.models is not allowed to import sparse_nb.hf"),
    "text": ("from .models.dispatch import Dispatch", "sparse_nb.text -> sparse_nb.models.dispatch"),
    "vattention": ("from .delta import Delta", "sparse_nb.vattention is not allowed to import sparse_nb.delta"),
    "compose": ("from .santa import Santa", "sparse_nb.compose -> sparse_nb.santa"),
    "methods/santa": ("from .santa_variance import variance_trace",
                      "sparse_nb.methods.santa is not allowed to import sparse_nb.methods.santa_variance"),
    "saap": ("from .kernels.santa import decode", "sparse_nb.saap -> sparse_nb.kernels.santa"),
    "hf": ("from .kernels import gather", "sparse_nb.hf -> sparse_nb.kernels.gather"),
    "commands/options": ("from .generate import generate",
                         "sparse_nb.commands.options is not allowed to import sparse_nb.commands.generate"),
    "commands/tune": ("def f():\n    from ..cli import app",
                      "sparse_nb.commands is not allowed to import sparse_nb.cli"),
    "bench": ("from .compose import Then", "sparse_nb.bench is not allowed to import sparse_nb.compose"),
    "evaluate": ("from . import cli", "sparse_nb.evaluate is not allowed to import sparse_nb.cli"),
    "saap_partition": ("def f():\n    from benchmarks import run", "sparse_nb is not allowed to import benchmarks"),
    "shed": ("", "sparse_nb.shed"), "core/shed": ("", "sparse_nb.core.shed"),
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    "What is said of a package with all of WRONG."
    folder = tmp_path_factory.mktemp("wrong")
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "sparse_nb", folder / "sparse_nb", ignore=ignored)
    for name, (line, _) in WRONG.items():
        with (folder / "sparse_nb" / f"{name}.py").open("a", encoding="utf-8") as file: file.write(f"\n{line}\n")
    return lint(folder)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_import_breaks_a_contract(name, wrong):
    code, said = wrong
    assert code == 1 and WRONG[name][1] in said, said


@pytest.mark.parametrize("line, fault", [
    ("from .core.checks import _own", "santa imports _own"),
    ("def f():\n    from .core import checks as c\n    c._own()", "santa uses c._own"),
    ("import sparse_nb.core.checks\nsparse_nb.core.checks._own", "santa uses sparse_nb.core.checks._own"),
    ("import math\nmath._own\n_own = self._mine\nfrom .core.checks import check as _check", None),
    ("import sparse_nb.hf\nsparse_nb.hf.__doc__", None)])
def test_a_private_name_is_found(line, fault, tmp_path):
    (tmp_path / "sparse_nb").mkdir()
    (tmp_path / "sparse_nb" / "santa.py").write_text(line)
    assert [*private_names(tmp_path)] == [fault] * (fault is not None)
