"Tests that take more processor time than they may are named, and fail where it is twice as much."
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SPENT = """
import os
import time
import pytest

os.getloadavg = lambda: ({load}, 0, 0)

def spend(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass

@pytest.fixture
def slow(): spend(0.3)

@pytest.fixture(scope="module")
def shared(): spend(0.3)

@pytest.mark.budget(0.05)
def test_over(): spend(0.3)

@pytest.mark.budget(0.05)
def test_over_with_its_fixture(slow): pass

@pytest.mark.budget(0.05)
def test_others_share_the_fixture(shared): pass

def test_within(): spend(0.3)

@pytest.mark.budget(0.2)
def test_a_little_over(): spend(0.3)

@pytest.mark.budget(0.05)
@pytest.mark.slow
def test_slow(): spend(0.3)
"""


@pytest.mark.parametrize("load, failed", [(0, 2), (1000, 0)])
def test_a_test_over_its_time_fails(forked_pytest, tmp_path, load, failed):
    for name in "conftest.py", "covering.py": shutil.copy(HERE / name, tmp_path)
    (tmp_path / "test_time.py").write_text(SPENT.format(load=load))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    budget\n    slow\n    gpu\n    witness\n")
    code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", tmp_path, tmp_path)
    assert code == bool(failed) and f"{6 - failed} passed" in said, said
    for name in ("test_over", "test_over_with_its_fixture")[:failed]:
        assert f"s of processor time, {name} may take 0.05 s" in said, said
    assert ("test_a_little_over may take 0.2 s" in said) == bool(failed), said
