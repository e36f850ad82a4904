"""What runs inside transformers, with the oldest and with the newest release that pyproject.toml allows, and kernels
with the oldest Triton; all other tests run with those in constraints.txt"""
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FILES = "tests/hf", "tests/eval/test_evaluate.py", "--ignore=tests/hf/test_releases.py"
RANGE = re.search(r'"(transformers>=([\d.]+),<\d+)"', (ROOT / "pyproject.toml").read_text())

def install(place, *what):
    "Put packages alone, without what they need, into a folder that stands before the environment."
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--upgrade", "--target", place, *what], check=True)

def unmet(place):
    "What the packages in the folder need and is neither there nor in the environment."
    installed = list(metadata.distributions(path=[str(place)]))
    versions = {x.name.lower(): x.version for x in installed}
    for text in [text for x in installed for text in x.requires or ()]:
        needs = Requirement(text)
        if needs.marker is not None and not needs.marker.evaluate(dict(extra="")): continue
        have = versions.get(needs.name.lower()) or metadata.version(needs.name)
        if not needs.specifier.contains(have, prereleases=True): yield f"{needs.name}{needs.specifier}"

@pytest.mark.slow
@pytest.mark.budget(3600)
@pytest.mark.parametrize("release", ["oldest", "newest"])
def test_inside_transformers(release):
    place = ROOT / ".cache" / f"transformers-{release}"
    install(place, f"transformers=={RANGE[2]}.*" if release == "oldest" else RANGE[1])
    if others := list(unmet(place)): install(place, *others)
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
                          *FILES], cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | dict(PYTHONPATH=str(place)))
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]

@pytest.mark.slow
@pytest.mark.budget(600)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_kernels_compile_with_the_oldest_triton():
    oldest = re.search(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
    place = ROOT / ".cache" / "triton-oldest"
    install(place, f"triton=={oldest}.*")
    code = ("import triton; from sparse_nb.kernels import exact, santa; print(triton.__version__); "
            "print(len(santa.resource_usage(90)), len(exact.resource_usage(90)))")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | dict(PYTHONPATH=f"{place}{os.pathsep}{ROOT}"))
    assert run.returncode == 0 and run.stdout.startswith(oldest), run.stdout[-2000:] + run.stderr[-5000:]
