"""The wrong versions that `make wrong` tries can still be made, and name tests that are there."""
import pytest

from wrong_versions import ROOT, VERSIONS


@pytest.mark.parametrize("wrong", VERSIONS, ids=lambda x: x.name)
def test_a_wrong_version_can_be_made(wrong):
    assert (ROOT / "sparse_nb" / wrong.module).read_text().count(wrong.old) == 1
    file, _, name = wrong.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()

def test_names_are_their_own(): assert len({x.name for x in VERSIONS}) == len(VERSIONS)
