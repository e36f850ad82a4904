"""Code that can be read in a diff: ruff's rules of pyproject.toml, in notebooks too, and short exported cells.
Pictures that can be read together: one palette, whose colours no other notebook makes for itself."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from execnb.nbio import mk_cell, new_nb, read_nb, write_nb
from matplotlib import colormaps
from matplotlib.colors import CSS4_COLORS, ListedColormap
from nbdev.process import extract_directives

ROOT = Path(__file__).parents[2]
FOLDERS = "tests", "tools", "benchmarks", "experiments", "nbs", "kernels"
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for kind in ("py", "ipynb")
               for path in (ROOT / folder).rglob(f"*.{kind}") if ".ipynb_checkpoints" not in path.parts)
NOTEBOOKS = [path for path in FILES if path.suffix == ".ipynb"]
LINES = 60  # of an exported cell, without its options

# the palette, and the table of methods with their colours
COLOURED = [Path("nbs/library/plots.ipynb"), Path("nbs/library/core_registry.ipynb")]
GREYS = {name for name in CSS4_COLORS if re.search("gr[ae]y", name)} | {"black"}  # guides and words, no line of many
NAMES = CSS4_COLORS.keys() - GREYS - {"white"} | {
    name for name, colours in colormaps.items() if isinstance(colours, ListedColormap) and colours.N <= 20}
HEX = re.compile(r"#([\da-fA-F]{3,4}|[\da-fA-F]{6}|[\da-fA-F]{8})\b")
CYCLE = re.compile(r"C(\d+|\{\})|(tab|xkcd):.*|#[\da-fA-F]*(\{\}[\da-fA-F]*)+")  # {} is a value of an f-string
FORMAT = re.compile(r"(?=.*[bgrcmy])[-.:,ov^<>1-48spP*hH+xXDd|_bgrcmykw]{1,4}")  # line, marker, letter of a colour
KEYS = re.compile(r"c|m?[ef]c|\w*colou?rs?|palette")
MAKERS = re.compile(r".*_palette|.*set_palette|(.*\.)?(get_cmap|cycler)|.*style\.use")
DRAWERS = re.compile(r".*\.(plot|semilog[xy]|loglog|errorbar|stem)")


def ruff(*paths):
    "What ruff says of files or folders."
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", "--output-format=concise", "--config"]
    done = subprocess.run([*command, ROOT / "pyproject.toml", *paths], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode < 2, done.stderr
    return done.stdout


def long_cells(nb):
    "The exported cells of a notebook that are too long, and how long they are; a class may have a cell to itself."
    for number, cell in enumerate(nb.cells):
        options = extract_directives(cell, remove=False) if cell.cell_type == "code" else {}
        lines = [line for line in cell.source.strip().splitlines() if not line.startswith("#|")]
        if not {"export", "exports", "exporti"} & options.keys() or len(lines) <= LINES: continue
        kinds = [type(x) for x in ast.parse("\n".join(lines)).body]
        if kinds != [ast.ClassDef]: yield number, len(lines)  # a class is as long as it is one thing


def is_own(value, key):
    "Is what an argument or entry `key` gets a colour in letters or numbers, or a palette by name?"
    if isinstance(value, ast.IfExp): return is_own(value.body, key) or is_own(value.orelse, key)
    if isinstance(value, ast.Constant): return isinstance(value.value, str) and (
        key == "palette" or value.value in set("bgrcmy"))
    if not isinstance(value, (ast.List, ast.Tuple)): return False
    numbers = [x for x in value.elts if isinstance(x, ast.Constant) and isinstance(x.value, (int, float))]
    rgb = isinstance(value, ast.Tuple) and len(numbers) == len(value.elts) in (3, 4)
    return rgb or any(is_own(x, key) for x in value.elts)


def given(node):
    "Names and values of a call's arguments or a dictionary's entries."
    if isinstance(node, ast.Call): return [(x.arg, x.value) for x in node.keywords if x.arg]
    if not isinstance(node, ast.Dict): return []
    return [(key.value, x) for key, x in zip(node.keys, node.values)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def makes_colours(call):
    "Does a call make a palette, or draw with a format that names a colour?"
    name = ast.unparse(call.func)
    texts = [x.value for x in [*call.args, *(x for key, x in given(call) if key == "fmt")]
             if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    return MAKERS.fullmatch(name) or DRAWERS.fullmatch(name) and any(map(FORMAT.fullmatch, texts))


def own_colours(source):
    "The expressions of a cell that give something a colour which is not the palette's."
    for node in ast.walk(ast.parse(re.sub(r"^[%!].*", "", source, flags=re.M))):
        own = any(KEYS.fullmatch(key) and is_own(x, key) for key, x in given(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            own = HEX.search(node.value) or node.value in NAMES or CYCLE.fullmatch(node.value)
        elif isinstance(node, ast.JoinedStr):
            own = CYCLE.fullmatch("".join(x.value if isinstance(x, ast.Constant) else "{}" for x in node.values))
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            own = any(isinstance(x, ast.Constant) and x.value in GREYS for x in node.elts)
        elif isinstance(node, ast.Attribute): own = node.attr in ("cm", "colormaps")
        elif isinstance(node, ast.alias): own = node.name in ("cm", "colormaps")
        elif isinstance(node, ast.Call): own = own or makes_colours(node)
        if own: yield ast.unparse(node)


def test_ruff(): assert ruff(*FOLDERS) == ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_exported_cells_are_short(path): assert not [*long_cells(read_nb(ROOT / path))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_a_chapter_has_at_most_a_hundred_cells_each_with_its_id(path):
    names = [cell.id for cell in read_nb(ROOT / path).cells]
    assert len({*names}) == len(names) <= 100


@pytest.mark.parametrize("path", sorted({*NOTEBOOKS} - {*COLOURED}), ids=str)
def test_colours_are_the_palettes(path):
    cells = [(i, cell.source) for i, cell in enumerate(read_nb(ROOT / path).cells) if cell.cell_type == "code"]
    assert not [(i, own) for i, source in cells for own in own_colours(source)], "take them from sparse_nb.plots"


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


@pytest.mark.parametrize("cell", [
    "'#5b6b7a'", "colour = '#fab'", "looks = {'lists': '#5B6B7A80'}", "page = f'<td style=\"color: #ddd\">{x}'",
    "ax.plot(x, y, color='red')", "ax.plot(x, y, color='tab:blue')", "ax.plot(x, y, c='xkcd:dust')",
    "looks = 'C3', 'o'",
    "ax.plot(x, y, color=f'C{i}')", "ax.bar(x, y, color=f'#{r:02x}00ff')", "ax.plot(x, y, color='r')",
    "ax.bar(x, y, color=['b', 'g'])", "ax.bar(x, y, color='r' if bad else '0.5')", "look = {'mfc': 'y'}",
    "look = dict(ecolor='m')", "ax.plot(x, y, 'ro-')", "ax.plot(x, y, '--g')", "ax.errorbar(x, y, e, fmt='oc')",
    "ax.axhline(1, color=(0.2, 0.4, 0.6))", "for name, colour in zip(names, ('0.5', 'orange')): print(name, colour)",
    "look = ('all', 'black', '*')", "look = ['grey', 'o']", "colours = sns.color_palette('deep', 3)",
    "from seaborn import husl_palette\nhusl_palette(3)", "sns.lineplot(t, hue='h', palette='colorblind')",
    "sns.set_palette(colours)", "plt.style.use('ggplot')", "plt.cm.viridis(0.3)", "from matplotlib import cm",
    "mpl.colormaps['magma']", "plt.get_cmap('magma')", "ax.imshow(x, cmap='tab10')",
    "%%time\nax.plot(x, 'b')"], ids=repr)
def test_a_colour_of_its_own(cell): assert [*own_colours(cell)]


@pytest.mark.parametrize("cell", [
    "ax.plot(x, y, color=METHOD_COLOURS['exact'])", "colours = palette('schemes') | series(names)", "ax.plot(x, y)",
    "ax.plot(x, y, 'o-', color=shades(3)[0], mec='white')", "ax.axhline(1, color='0.5', ls='--')",
    "ax.plot(x, y, 'k_', label='bandwidth')", "ax.text(x, y, 'exact', color='black' if light else 'white')",
    "ax.imshow(x, cmap='viridis')", "ax.scatter(x, y, c=[1, 2, 3])", "for name in ('k', 'v', 'g'): print(name)",
    "sns.stripplot(t, hue='method', palette=METHOD_COLOURS)", "print(f'#{i} of {n}')", "#| export\n# colour #123456",
    "ax.set_xticks([0.1, 1], ['0.1', '1'])", "ax.fill_between(x, y, color=look['c'])"], ids=repr)
def test_a_colour_of_the_palette(cell): assert not [*own_colours(cell)]
