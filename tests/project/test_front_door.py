"""`from sparse_nb import ...`: which names there are, what is behind them, and what the package imports for them."""
import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import sparse_nb
from sparse_nb.core.registry import CLASSES, method_class
from inputs import fast

ROOT = Path(__file__).parents[2]


def fresh(code):
    "What a new interpreter prints."
    run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_package_imports_nothing():
    code = "import sys; before = set(sys.modules); import sparse_nb; dir(sparse_nb); print(*set(sys.modules) - before)"
    more = set(fresh(code).split())
    assert "sparse_nb" in more and {x.split(".")[0] for x in more} <= {"sparse_nb", *sys.stdlib_module_names}
    assert {x for x in more if x.startswith("sparse_nb.")} == {"sparse_nb.core", "sparse_nb.core.registry"}  # a table


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_method_is_there(name):
    assert name in sparse_nb.__all__ and getattr(sparse_nb, name) is method_class(name)


@pytest.mark.parametrize("name", sparse_nb.__all__)
def test_every_name_is_public_where_it_lies_and_listed(name):
    found = getattr(sparse_nb, name)
    module = import_module(found.__module__)
    assert getattr(module, name) is found and name in module.__all__ and name in dir(sparse_nb)
    assert vars(sparse_nb)[name] is found  # no second search


def test_names_are_written_out_for_tools_and_no_name_hides_a_module():
    tree = ast.parse((ROOT / "sparse_nb/__init__.py").read_text(encoding="utf-8"))
    (names,) = [ast.literal_eval(x.value) for x in tree.body
                if isinstance(x, ast.Assign) and x.targets[0].id == "__all__"]
    assert names == sparse_nb.__all__ and len({*names}) == len(names)
    modules = {path.stem for path in (ROOT / "sparse_nb").iterdir()}
    assert not modules & {*names}


@pytest.mark.parametrize("name", fast(["pocket", "hf", "tasks", "attention", "core.method"], 4))
def test_modules_are_found_as_before(name):
    folder, _, module = f"sparse_nb.{name}".rpartition(".")
    assert fresh(f"from {folder} import {module}; print({module}.__name__)") == f"sparse_nb.{name}\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'sparse_nb' has no attribute 'Sparta'"): sparse_nb.Sparta
    assert not hasattr(sparse_nb, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'Sparta' from 'sparse_nb'"):
        from sparse_nb import Sparta  # noqa: F401


def test_what_readme_imports_from_the_package_is_there():
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    taken = [(node.module, x.name) for text in snippets for node in ast.walk(ast.parse(text))
             if isinstance(node, ast.ImportFrom) and node.module.startswith("sparse_nb") for x in node.names]
    assert {module for module, _ in taken} == {"sparse_nb"}
    modules = {path.stem for path in (ROOT / "sparse_nb").glob("*.py")}
    assert {name for _, name in taken} <= {*sparse_nb.__all__} | modules


def test_every_class_that_readme_names_is_there():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("## Methods")[1].split("## Chapters")[0].splitlines()
    named = {name for line in lines if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert named == CLASSES.keys() <= {*sparse_nb.__all__}
