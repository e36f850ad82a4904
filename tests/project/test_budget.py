"Tests that take more processor time than they may are named, and fail where it is twice as much."
import shutil
from pathlib import Path

import pytest

from inputs import fast

HERE = Path(__file__).parents[1]
SPENT = """
import os
import time
import pytest

os.getloadavg = lambda: ({load}, 0, 0)

@pytest.fixture(autouse=True, scope="session")
def machine(request):
    for plugin in request.config.pluginmanager.get_plugins():
        if hasattr(plugin, "slowness"): plugin.slowness = lambda: {slower}

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


@pytest.mark.xdist_group("kept")
def test_groups_are_kept_together(request):
    "What several tests share is made in one process: pytest-xdist knows a group by the test's name."
    if getattr(request.config.option, "loadgroup", False): assert request.node.nodeid.endswith("@kept")


@pytest.mark.parametrize("load, slower, failed", fast([(0, 1, 2), (0, 10, 0), (1000, 1, 0)], 0))
def test_a_test_over_its_time_fails(forked_pytest, tmp_path, load, slower, failed):
    "But not on a machine that takes longer for all; on one with much other work it is not named either."
    for name in "conftest", "covering", "inputs", "changed": shutil.copy(HERE / f"{name}.py", tmp_path)
    (tmp_path / "test_time.py").write_text(SPENT.format(load=load, slower=slower))
    code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", tmp_path, tmp_path)
    assert code == bool(failed) and f"{6 - failed} passed" in said, said
    for name, seconds in (("test_over", 0.05), ("test_over_with_its_fixture", 0.05), ("test_a_little_over", 0.2)):
        assert (f"s of processor time, {name} may take {seconds} s" in said) == (load == 0), said
