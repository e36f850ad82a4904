"""What is installed, what it needs, and whether the documents point at things that exist."""
import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparse_nb.core.registry import METHODS

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
POCKET = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
          "README.md", "scores.json"]


pytestmark = pytest.mark.xdist_group("wheel")  # one process builds it


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "The wheel that pip builds of this tree, opened."
    out = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, out / "tree", ignore=shutil.ignore_patterns(".*", "_proc", "_docs", "_site", "build",
        "*.egg-info"))
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out,
                    out / "tree"], check=True)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as opened: yield opened


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory):
    """Runs a command of an environment that holds the wheel, and what the tests' own has beside it, in a folder of its
    own: exit code, standard output and standard error."""
    folder = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    env = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"} | dict(COLUMNS="100")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index",
                    wheel.filename], check=True, env=env)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    beside = [x for x in sys.path if x.endswith("site-packages")]  # of them no .pth file is read: no editable install
    (packages / "others.pth").write_text("\n".join(beside))
    (folder / "empty").mkdir()
    def run(*args):
        return subprocess.run([folder / "env/bin" / args[0], *args[1:]], cwd=folder / "empty", env=env, text=True,
                              capture_output=True)
    return run


def member(wheel, name):
    (path,) = [p for p in wheel.namelist() if p.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(wheel.namelist())
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "sparse_nb").rglob("*.py")}
    data = {f"sparse_nb/pocket_model/{name}" for name in POCKET}  # one file of weights, as every loader wants it
    data |= {f"sparse_nb/pocket_methods/{name}.safetensors" for name in ("hash_attention", "saap")}
    assert {n for n in names if ".dist-info/" not in n} == modules | data
    assert "Apache License" in member(wheel, "licenses/LICENSE")


@pytest.mark.parametrize("check", [["twine", "check", "--strict"], ["check-wheel-contents"]], ids=" ".join)
def test_an_index_would_take_the_wheel(wheel, check):
    done = subprocess.run([BIN / check[0], *check[1:], wheel.filename], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_alone_lists_its_methods(elsewhere):
    found = elsewhere("sparse-nb", "methods")
    assert found.returncode == 0 and not found.stderr, found
    assert {row.path.partition(":")[2].lower() for row in METHODS.values()} <= {*found.stdout.lower().split()}


IN_A_WHEEL = """
import sys
from importlib.util import find_spec
from pathlib import Path
import sparse_nb
assert "torch" not in sys.modules and Path(sparse_nb.__file__).is_relative_to(sys.prefix), sparse_nb.__file__
assert find_spec("benchmarks") is find_spec("experiments") is None
from sparse_nb import *
from sparse_nb.santa import santa_decode
from sparse_nb import claims
for ask in claims.claims, claims.rows, claims.missing:
    try: ask()
    except ValueError as error: assert "source tree" in str(error), error
    else: raise AssertionError(ask)
for number, code in enumerate(sys.argv[1:]):
    exec(compile(code, f"snippet {number}", "exec"), {"__name__": "__main__"})
    if number == 0: print("END OF THE FIRST")
"""


@pytest.mark.budget(20)
def test_the_wheel_alone_has_the_front_door_runs_readme_and_says_what_needs_a_clone(elsewhere):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    found = elsewhere("python", "-W", "ignore", "-c", IN_A_WHEEL, *snippets)
    assert len(snippets) >= 2 and found.returncode == 0, found.stderr
    assert found.stdout.partition("END OF THE FIRST\n")[0] in text.replace("```text\n", "")


def test_pocket_model_is_small(wheel):
    assert wheel.getinfo("sparse_nb/pocket_model/model.safetensors").file_size <= 16 * 2**20


def test_one_version(wheel):
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini")
    head = HeaderParser().parsestr(member(wheel, "METADATA"))
    assert head["Version"] == settings["DEFAULT"]["version"]
    assert head["Requires-Python"] == ">=" + settings["DEFAULT"]["min_python"]
    assert head["License-Expression"] == "Apache-2.0"


def test_core_needs_torch_and_triton_on_linux_only(wheel):
    needs = [Requirement(r) for r in HeaderParser().parsestr(member(wheel, "METADATA")).get_all("Requires-Dist")]
    core = lambda system: {r.name for r in needs if not r.marker or r.marker.evaluate({"sys_platform": system,
        "extra": ""})}
    assert core("linux") == {"torch", "triton"}
    assert core("darwin") == {"torch"}


ALONE = """
import sys
sys.modules.update(dict.fromkeys(["numpy", "scipy", "pandas", "matplotlib", "seaborn", "safetensors", "transformers",
                                  "triton", "nbdev", "fastcore"]))  # not there
import torch
from sparse_nb.attention import METHODS, TopK
from sparse_nb.core.registry import method_class
from sparse_nb.santa import santa_decode

q, k, v = torch.randn(2, 4, 200, 64), torch.randn(2, 2, 200, 64), torch.randn(2, 2, 200, 64)
made = [santa_decode(q[:, :, -1:], k, v, samples=128), TopK(budget=0.1).decode(q[:, :, -1:], k, v)]
for row in METHODS.values():
    method = method_class(row.path.partition(":")[2])()
    if type(method).__name__ == "HashAttention": continue  # its networks lie in a file of safetensors
    made.append(method.prefill(q, k, v) if hasattr(method, "prefill") else method.decode(q[:, :, -1:], k, v))
for bound in ("clt", "bernstein"): made.append(santa_decode(q[:, :, -1:], k, v, eps=0.3, delta=0.1, bound=bound))
assert len(made) == len(METHODS) + 3 and all(x.isfinite().all() for x in made)
print(*sys.modules)
"""


def test_methods_need_torch_alone():
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], text=True, capture_output=True)
    assert said.returncode == 0, said.stderr
    assert "torch._dynamo" not in said.stdout.split()


@pytest.mark.parametrize("module, beyond", [
    ("sparse_nb.santa", "torch"), ("sparse_nb.kernels.santa", "torch, triton"),
    pytest.param("sparse_nb.hf", "transformers.models.llama.modeling_llama", marks=pytest.mark.slow)])
def test_an_import_brings_no_more_than_it_needs(module, beyond):
    "No compiler, statistics or tables: `import sparse_nb.santa` takes about as long as `import torch`."
    code = f"import sys, {beyond}; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    more = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert module in more and {x.split(".")[0] for x in more} - set(sys.stdlib_module_names) <= {"sparse_nb"}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_installs_no_development_set():
    plan = lambda *args: subprocess.check_output(["make", "--no-print-directory", "-Bn", *args], cwd=ROOT, text=True)
    demo, test = plan("demo", "TORCH_FLAGS=--index-url URL"), plan("test", "TORCH_FLAGS=")
    assert "--index-url URL --no-deps torch\n" in demo and "-e '.[cli]'\n" in demo and "[dev]" not in demo
    assert "-e '.[dev]'\n" in test and "--no-deps torch" not in test


def test_command_is_installed(wheel):
    assert "sparse-nb = sparse_nb.cli:main" in member(wheel, "entry_points.txt")


def test_constraints_pin_all_that_is_installed():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(Requirement(line).name) for line in lines}
    assert all(re.fullmatch(r"==[\w.]+", str(Requirement(line).specifier)) for line in lines)
    seen, todo = set(), [("sparse_nb", {"dev", "cli"})]
    while todo:
        name, extras = todo.pop()
        for need in map(Requirement, metadata.requires(name) or []):
            if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}): continue
            key = canonicalize_name(need.name), frozenset(need.extras)
            if key in seen or re.match("nvidia-|cuda-", key[0]): continue
            seen.add(key)
            todo.append(key)
    assert {name for name, _ in seen} - {"sparse-nb"} <= pins


def test_marks_are_known_without_plugins():
    "pytest-xdist knows its own mark, and need not be there."
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    known = set(re.findall(r'^    "(\w+)', settings.partition("markers = [")[2].partition("]\n")[0], re.M))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert set(re.findall(r"pytest\.mark\.(\w+)", tests)) - known <= {"filterwarnings", "parametrize", "skip", "skipif"}


def test_workshop_holds_no_python():
    assert not list((ROOT / "kernels").rglob("*.py")), "Hugging Face's package `kernels` would be shadowed"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md"])
def test_links(document):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text(encoding="utf-8"))
    assert not [link for link in links if not (ROOT / document).parent.joinpath(link).exists()]
