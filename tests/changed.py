"""What a change can break beside the fast suite: `make test` runs this much of the notebooks and of the slow checks.

    python tests/changed.py       the notebooks, as a pattern for `nbdev_test --file_re`
    python tests/changed.py vllm  must the tests inside vLLM run? It says why, and exits with 1 where they need not

A change is what is not committed and what was committed since a base: the environment's BASE, or where the branch left
main. On main, without git or without a change, the five chapters of the methods are all. The tests inside vLLM have no
base: they run where a file that they are about is not as it was when they last passed, as `passed.json` has it.
"""
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHAPTERS = {"nbs/04_santa.ipynb", "nbs/06_vattention.ipynb", "nbs/10_delta.ipynb", "nbs/08_saap.ipynb",
            "nbs/11_sketch_walk.ipynb"}
PAGES = re.compile(r"nbs/|kernels/|tools/|tests/(book|browser)|_quarto|pyproject|constraints|\w+\.(md|qmd)")
# by Triton
COMPILED = re.compile(r"kernels/|sparse_nb/(kernels|core)/|tests/(kernels|interpreter|conftest|inputs|uniform)")


def git(*arguments, root=ROOT):
    "Lines that git says, none where it fails."
    try: done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError: return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def changed_files(base=None, root=ROOT):
    "Paths of files that differ from the base, relative to `root`."
    base = base or os.environ.get("BASE")
    for main in () if base else ("main", "origin/main"):
        if found := git("merge-base", "HEAD", main, root=root):
            base = found[0]
            break
    committed = git("diff", "--name-only", f"{base}...HEAD", root=root) if base else []
    status = [line[3:].split(" -> ")[-1].strip('"') for line in git("status", "--porcelain", "-uall", root=root)]
    return {*committed, *status}


def code_of(path):
    "The code of a module or of a notebook."
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py": return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return re.sub(r"^[%!].*", "pass", "\n".join("".join(cell["source"]) for cell in cells), flags=re.M)


@lru_cache(None)
def imported(path, package=()):
    "Modules that a file imports, wherever it does; `package`: the parts of the name of the package that it is in."
    found = set()
    for node in ast.walk(ast.parse(code_of(path))):
        if isinstance(node, ast.Import): found |= {x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[:len(package) + 1 - node.level] if node.level else ()
            name = ".".join([*above, *filter(None, [node.module])])
            found |= {name, *(f"{name}.{x.name}" for x in node.names)}
    return found


@lru_cache(None)
def modules(root=ROOT):
    "Name -> file, of all modules of the package, of benchmarks/ and of experiments/."
    files = [path for folder in ("sparse_nb", "benchmarks", "experiments") for path in (root / folder).rglob("*.py")]
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in files}


@lru_cache(None)
def door(root=ROOT):
    "What the names of the package stand for: sparse_nb.Santa -> sparse_nb.santa."
    path, registry = root / "sparse_nb/__init__.py", root / "sparse_nb/core/registry.py"
    found = re.findall(r'Entry\("([\w.]+):(\w+)"', registry.read_text(encoding="utf-8")) if registry.exists() else []
    found = {f"sparse_nb.{name}": module for module, name in found}
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "_FUNCTIONS":
            places = ast.literal_eval(node.value)
            found |= {f"sparse_nb.{name}": f"sparse_nb.{module}" for module, names in places.items() for name in names}
    return found


@lru_cache(None)
def exports(path):
    "The module that a notebook exports, or None."
    name = re.search(r"#\| default_exp ([\w.]+)", path.read_text(encoding="utf-8"))
    return name and f"sparse_nb.{name[1]}"


def depends(path, on, root=ROOT):
    "Does a notebook import one of the modules `on`, itself or through others?"
    ours = lambda names: {door(root).get(x, x) for x in names} & modules(root).keys()
    seen, names = set(), ours(imported(path))
    while names:
        if names & on: return True
        seen |= names
        names = ours(set().union(*(imported(modules(root)[x], tuple(x.split(".")[:-1])) for x in names))) - seen
    return False


def touched(changed, root=ROOT):
    "The modules whose file or notebook changed."
    notebooks = {exports(root / x) for x in changed if x.endswith(".ipynb") and (root / x).exists()} - {None}
    return notebooks | {name for name, path in modules(root).items() if path.relative_to(root).as_posix() in changed}


def notebooks(changed, root=ROOT):
    "The notebooks to run: the methods' chapters, those that changed, and those that import what changed."
    every = {p.relative_to(root).as_posix(): p for p in [*root.glob("nbs/**/*.ipynb"), *root.glob("kernels/*.ipynb")]}
    on = touched(changed, root)
    chosen = {name for name, path in every.items() if name in changed or on and depends(path, on, root)}
    return sorted((chosen | CHAPTERS) & every.keys())


def kernels(changed, root=ROOT):
    "Can a change break what Triton compiles or interprets?"
    return any(x.startswith("sparse_nb.core.") for x in touched(changed, root)) or any(map(COMPILED.match, changed))


def site(changed):
    "Can a change break a page of the site?"
    return any(map(PAGES.match, changed))


PASSED = "tests/vllm/passed.json"  # name of a file -> what it was when the tests inside vLLM last passed


def inside_vllm(root=ROOT):
    "Name -> SHA-256 of what the tests inside vLLM are about, and of the part of the kernels that reads pages."
    files = [*root.glob("sparse_nb/vllm/*.py"), *(root / "tests/vllm" / x for x in ("engine.py", "test_engine.py"))]
    texts = {x.relative_to(root).as_posix(): x.read_text(encoding="utf-8") for x in files if x.name != "cuda.py"}
    if (common := root / "sparse_nb/kernels/common.py").exists():
        code = common.read_text(encoding="utf-8")
        texts |= {f"{common.relative_to(root).as_posix()}: {node.name}": ast.get_source_segment(code, node)
                  for node in ast.parse(code).body if getattr(node, "name", None) == "PageTable"}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(texts.items())}


def not_passed(root=ROOT):
    "Names of what is not as it was when the tests inside vLLM last passed."
    path, now = root / PASSED, inside_vllm(root)
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return sorted(name for name in {*old, *now} if old.get(name) != now.get(name))


def say_vllm(root=ROOT):
    "Say whether the tests inside vLLM must run, and return that."
    if found := not_passed(root): print(f"the tests inside vLLM run, for these have changed: {', '.join(found)}")
    else: print("the tests inside vLLM are skipped: what they are about is as it was when they last passed")
    return bool(found)


if __name__ == "__main__":
    if sys.argv[1:] == ["vllm"]: sys.exit(not say_vllm())
    print("^(" + "|".join(re.escape(Path(x).name) for x in notebooks(changed_files())) + ")$")
