"""The committed notebooks: exported, clean, executed with every figure in place; that they run, `nbdev_test` tests.

Execution counts are not checked: nbdev_clean removes them."""
import ast
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from execnb.nbio import mk_cell, new_nb, read_nb, write_nb
from fastcore.basics import AttrDict
from fastcore.xtras import globtastic
from nbdev.process import extract_directives


ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

# what of pyplot and seaborn draws nothing
QUIET = re.compile(r"(light|dark|blend)_palette|set_|reset_|rc|style|color|palette|cm$|close|load_dataset|get_|"
                   r"axes_style|plotting_context|switch_|ion$|ioff$")


def files(root, pattern):
    "Paths relative to `root` that match, found as nbdev finds notebooks."
    return sorted(Path(p).relative_to(root) for p in
                  globtastic(root, file_glob=pattern, skip_folder_re="^[_.]", skip_file_re=r"^[.]|^_(?!_|modidx)"))


NOTEBOOKS = files(ROOT, "*.ipynb")


def rebuild(root, into):
    "What nbdev makes of the notebooks of `root`: exported and cleaned, below `into`."
    for path in [Path("settings.ini"), Path("sparse_nb/__init__.py"), *files(root, "*.ipynb")]:
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / path, into / path)
    for command in "nbdev_export", "nbdev_clean":
        subprocess.run([BIN / command], cwd=into, check=True)


def differences(root, rebuilt, folder, pattern):
    "Files below `folder` that are not the same in both trees."
    read = lambda path: path.read_bytes() if path.exists() else None
    paths = {folder / p for tree in (root, rebuilt) for p in files(tree / folder, pattern)}
    return sorted(str(p) for p in paths if read(root / p) != read(rebuilt / p))


def calls(tree):
    """Dotted names of the calls that running `tree` makes, without exception handlers and functions that it only
    defines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ExceptHandler)): continue
        if isinstance(node, ast.Call): yield ast.unparse(node.func)
        yield from calls(node)


def draws(tree, drawing=frozenset()):
    "Does running `tree` leave a figure? `drawing` are the names of functions that do."
    names = list(calls(tree))
    if any(n.endswith("plt.close") for n in names): return False
    return any(re.search(r"\bplot\b|(^|\.)plot_?\w*$", n) or n in drawing or
               re.match(r"(plt|sns|pyplot|seaborn)\.", n) and not QUIET.match(n.split(".", 1)[1]) for n in names)


def parse(cell):
    "The syntax tree of a code cell, without magics."
    return ast.parse(re.sub(r"^[%!].*", "", cell.source, flags=re.M))


def faults(nb):
    "What is wrong with the outputs of `nb`, a line for each."
    cells = [c for c in nb.cells if c.cell_type == "code"]
    functions = [f for c in cells for f in parse(c).body if isinstance(f, ast.FunctionDef)]
    drawing = set()
    while new := {f.name for f in functions if draws(f, drawing)} - drawing: drawing |= new
    for number, cell in enumerate(cells, 1):
        tree, options = parse(cell), extract_directives(cell, remove=False)
        say = lambda what: f"code cell {number}: {what}: {cell.source[:80]!r}"
        if any(o.output_type == "error" for o in cell.outputs): yield say("an error as output")
        said = "".join("".join(o.text) for o in cell.outputs if o.get("name") == "stderr")
        if "Warning: " in said: yield say("a warning as output")
        if options.get("eval:") == ["false"]: continue
        data = [(kind, "".join(text)) for o in cell.outputs for kind, text in o.get("data", {}).items()]
        picture = any(kind.startswith("image/") or kind == "text/html" and re.search("<(img|svg)", text)
                      for kind, text in data)
        if (draws(tree, drawing) or options.keys() & {"fig-alt:", "fig-cap:"}) and not picture: yield say("no picture")
        if cell.outputs or not tree.body or cell.source.rstrip().endswith(";"): continue
        last = tree.body[-1]
        shows = isinstance(last, ast.Expr) and not isinstance(last.value,
            (ast.Call, ast.Await)) and ast.unparse(last) != "None"
        if shows or {"print", "display"} & set(calls(tree)): yield say("no output")


def lacking(nb):
    "What the cells of `nb` import of the project that is not there: names of modules and of what they hold."
    trees = [parse(cell) for cell in nb.cells if cell.cell_type == "code"]
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        if node.level or node.module.partition(".")[0] not in ("sparse_nb", "benchmarks", "experiments"): continue
        try: module = import_module(node.module)
        except ModuleNotFoundError as error:  # a module that is there may import vLLM, which is not
            if error.name.partition(".")[0] != "vllm" or find_spec(node.module) is None: yield node.module
        else:
            below = getattr(module, "__path__", None)  # a package has modules, too
            yield from (f"{node.module}.{x.name}" for x in node.names if x.name != "*" and not hasattr(module, x.name)
                        and not (below and find_spec(f"{node.module}.{x.name}")))


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    into = tmp_path_factory.mktemp("rebuilt")
    rebuild(ROOT, into)
    return into


def test_modules_are_what_the_notebooks_export(rebuilt):
    assert not differences(ROOT, rebuilt, Path("sparse_nb"), "*.py"), "edit the notebook, then nbdev_export"


def test_notebooks_are_clean(rebuilt):
    assert NOTEBOOKS and not differences(ROOT, rebuilt, Path("."), "*.ipynb"), "run nbdev_clean"


def exports(nb):
    "Numbers of the cells that give code to the package."
    return [i for i, cell in enumerate(nb.cells)
            if cell.cell_type == "code" and {"export", "exports", "exporti", "default_exp"} & extract_directives(
                cell, remove=False).keys()]


@pytest.mark.parametrize("path", [x for x in NOTEBOOKS if x.parts[1] in ("appendix", "course")], ids=str)
def test_appendix_and_course_export_nothing(path): assert not exports(read_nb(ROOT / path)), "code is in nbs/library"


def test_an_export_is_seen():
    cells = "#| default_exp x", "#| export\nx = 1", "#| exports\nx = 1", "x = 1", "#| eval: false\nx = 2"
    assert exports(new_nb([mk_cell(x) for x in cells])) == [0, 1, 2]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_outputs(path):
    wrong = list(faults(read_nb(ROOT / path)))
    assert not wrong, "\n".join(["run `make notebooks`", *wrong])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_what_a_notebook_imports_is_there(path): assert not [*lacking(read_nb(ROOT / path))]


def test_an_import_of_what_is_not_there_is_seen():
    found = lambda text: [*lacking(new_nb([mk_cell(text)]))]
    assert not found("from sparse_nb.santa import Santa\nfrom sparse_nb.core import exact")
    assert found("from sparse_nb.santa import no_such") == ["sparse_nb.santa.no_such"]
    assert found("from sparse_nb.no_such import x") == ["sparse_nb.no_such"]
    assert found("from sparse_nb.core import no_such") == ["sparse_nb.core.no_such"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_title(path):
    assert re.fullmatch(r"# .+\n+> .+",
                        read_nb(ROOT / path).cells[0].source), "the site drops what else the title's cell holds"


# The checks above, shown to fail.

PICTURE = [dict(output_type="display_data", metadata={}, data={"image/png": "iVBORw0KGgo="})]
VALUE = [dict(output_type="execute_result", execution_count=None, metadata={}, data={"text/plain": ["4"]})]
ERROR = [dict(output_type="error", ename="ValueError", evalue="", traceback=[])]


def notebook(*cells):
    "A notebook of (source, outputs) pairs."
    nb = new_nb([mk_cell(source) for source, _ in cells])
    for cell, (_, outputs) in zip(nb.cells, cells): cell.outputs = [AttrDict(o) for o in outputs]
    return nb


@pytest.fixture
def project(tmp_path):
    "A small project in order: one notebook, exported and clean."
    for name in "source", "project": (tmp_path / name / "nbs").mkdir(parents=True)
    nb = notebook(("#| default_exp toy", []), ("#| export\ndef double(x): return 2 * x", []), ("double(2)", VALUE))
    write_nb(nb, tmp_path / "source/nbs/00_toy.ipynb")
    (tmp_path / "source/sparse_nb").mkdir()
    for name in "settings.ini", "sparse_nb/__init__.py": shutil.copy(ROOT / name, tmp_path / "source" / name)
    rebuild(tmp_path / "source", tmp_path / "project")
    return tmp_path / "project"


def complaints(project, into):
    "Modules and notebooks of `project` that are not as nbdev makes them."
    rebuild(project, into)
    return [differences(project, into, Path(folder), pattern) for folder, pattern in (("sparse_nb", "*.py"),
        (".", "*.ipynb"))]


def test_project_in_order(project, tmp_path):
    assert complaints(project, tmp_path / "again") == [[], []]


@pytest.mark.parametrize("name", ["toy.py", "_modidx.py", "__init__.py"])
def test_edited_module(project, tmp_path, name):
    path = project / "sparse_nb" / name
    path.write_text(path.read_text().replace("2 * x", "3 * x").replace("toy.html", "joy.html").replace("0.", "9."))
    assert complaints(project, tmp_path / "again") == [[f"sparse_nb/{name}"], []]


def test_module_without_notebook_and_notebook_without_module(project, tmp_path):
    (project / "sparse_nb/toy.py").rename(project / "sparse_nb/extra.py")
    assert complaints(project, tmp_path / "again")[0] == ["sparse_nb/extra.py", "sparse_nb/toy.py"]


def test_unclean_notebook(project, tmp_path):
    path = project / "nbs/00_toy.ipynb"
    path.write_text(path.read_text().replace('"execution_count": null', '"execution_count": 7', 1))
    assert complaints(project, tmp_path / "again") == [[], ["nbs/00_toy.ipynb"]]


@pytest.mark.parametrize("cell", [
    "plt.plot([1])", "ax.plot([1])", "fig, ax = plt.subplots()", "sns.lineplot(x=[1])", "df.plot.bar()",
    "frame['a'].plot()",
    "from m import plot_coverage\nplot_coverage(w)", "plots.plot_kept(w)", "[plt.hist(x) for x in xs]",
    "if True:\n    plt.imshow(x)", "show()", "show_twice();", "#| fig-alt: a line\ndraw_somehow()",
    "#| cuda\nplt.figure()",
    "%%time\nplt.figure()"], ids=repr)
def test_figure_without_picture(cell):
    before = ("def show(): plt.plot([1])", []), ("def show_twice():\n    show()\n    show()", [])
    assert not list(faults(notebook(*before, (cell, PICTURE))))
    assert ["no picture" in line for line in faults(notebook(*before, (cell, VALUE)))] == [True]


@pytest.mark.parametrize("cell", [
    "plt.rcParams.update({})", "sns.set_theme()", "plt.style.use('ggplot')", "plots.style()",
    "def show(): plt.plot([1])",
    "fails(lambda: plot_kept(None))", "fig = plot_kept(w)\nplt.close(fig)", "import matplotlib.pyplot as plt",
    "#| eval: false\nplt.plot([1])", "assert True", "x = 2", "try: import m\nexcept ImportError: print('no m')",
    "double(2);", "'silent';", "f()"], ids=repr)
def test_cell_that_needs_no_output(cell):
    assert not list(faults(notebook((cell, []))))


@pytest.mark.parametrize("cell", ["double(2) + 1", "x", "x.shape", "f'{x}'", "print(2)", "for i in x: print(i)",
                                  "display(x)"])
def test_missing_output(cell):
    assert not list(faults(notebook((cell, VALUE))))
    assert ["no output" in line for line in faults(notebook((cell, [])))] == [True]


@pytest.mark.parametrize("said, warns", [("m.py:3: UserWarning: old\n  x\n", True), ("saved out.json\n", False)])
def test_warning_as_output(said, warns):
    output = [dict(output_type="stream", name="stderr", text=said)]
    assert ["a warning" in line for line in faults(notebook(("assert True", output)))] == [True] * warns


@pytest.mark.parametrize("cell", ["double('a', 1)", "#| eval: false\nx"])
def test_error_output(cell):
    assert ["an error" in line for line in faults(notebook((cell, ERROR)))] == [True]
