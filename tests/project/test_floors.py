"""The floors of the package, and the checker shown to fail."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import house


def test_the_package_stands_on_its_floors():
    assert "\n".join(house.faults(ROOT)) == ""


def test_the_tables_agree():
    names = [room for rooms in house.HOUSE for room in rooms]
    assert len(set(names)) == len(names)
    for pattern, others in house.BESIDE.items():
        floors = {house.floor_of(room) for room in names
                  if house.fnmatch(room, pattern)} | {*map(house.floor_of, others)}
        assert len(floors) == 1 and None not in floors, pattern


GOOD = {  # a house in order
    "__init__": '__version__ = "1"', "core.__init__": "", "kernels.__init__": "",
    "kernels.common": "import math\nimport torch\nimport triton.language as tl",
    "kernels.santa": "from .common import LOG2E",
    "kernels.gather": "from sparse_nb.kernels import common\ncommon.LOG2E",
    "kernels.choose": "from .common import visible",
    "core.checks": "import torch\n_own = 1",
    "core.exact": "from .checks import check\nfrom . import checks\nchecks.check",
    "core.selection": "def f():\n    from ..kernels.gather import attend",
    "core.methods": "from .selection import take_rows as _take_rows",
    "santa": "from .core.methods import Method\nfrom .kernels import santa as kernels\nself._kernels = kernels.decode",
    "vattention": "import sparse_nb.core.checks\nsparse_nb.core.checks.check",
    "hash_attention": "def f():\n    from .kernels.choose import choose",
    "baselines": "from .hash_attention import bits", "compose": "from . import santa, vattention",
    "attention": "from .core.exact import attention\n_all_ = [attention]",
    "hf": "from . import __version__\nimport sparse_nb", "bench": "from .hf import sparsify",
    "saap_partition": "from .bench import x",
}


def faults_of(folder, rooms):
    for room, text in rooms.items():
        path = folder / "sparse_nb" / Path(*room.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [line.split(": ", 1)[1] for line in house.faults(folder)]


def test_a_house_in_order(tmp_path): assert faults_of(tmp_path, GOOD) == []


@pytest.mark.parametrize("room, text, fault", [
    ("core.exact", "from ..santa import Santa", "core.exact, on floor 2, imports santa, on floor 5"),
    ("core.exact", "def f():\n    if True: from sparse_nb import santa",
     "core.exact, on floor 2, imports santa, on floor 5"),
    ("core.checks", "import sparse_nb.core.methods as m", "core.checks, on floor 1, imports core.methods, on floor 4"),
    ("kernels.common", "from ..core.checks import check",
     "kernels.common, on floor 0, imports core.checks, on floor 1"),
    ("kernels.gather", "from .santa import decode", "kernels.gather, on floor 0, imports kernels.santa, on floor 0"),
    ("kernels.gather", "import pandas as pd", "kernels.gather imports pandas"),
    ("kernels.gather", "def f():\n    from scipy.stats import norm", "kernels.gather imports scipy"),
    ("core.methods", "from ..kernels.common import LOG2E",
     "core.methods, on floor 4, imports kernels.common, on floor 0"),
    ("santa", "from .kernels.gather import attend", "santa, on floor 5, imports kernels.gather, on floor 0"),
    ("santa", "from .kernels.choose import choose", "santa, on floor 5, imports kernels.choose, on floor 0"),
    ("santa", "from .vattention import VAttention", "santa, on floor 5, imports vattention, on floor 5"),
    ("hash_attention", "from .baselines import Quest", "hash_attention, on floor 5, imports baselines, on floor 5"),
    ("bench", "def f():\n    from .santa import Santa", "bench, on floor 8, imports santa, on floor 5"),
    ("hf", "from .saap_partition import x", "hf, on floor 7, imports saap_partition, on floor 9"),
    ("shed", "", "shed is on no floor"),
    ("core.shed", "", "core.shed is on no floor"),
    ("hf", "from .nowhere import x", "hf imports nowhere, which is no room"),
    ("core.__init__", "from .exact import attention", "core.__init__ imports core.exact, a package imports nothing"),
    ("santa", "from .core.checks import _own", "santa imports the private core.checks._own"),
    ("santa", "from sparse_nb.core import checks as c\nc._own", "santa uses the private core.checks._own"),
    ("santa", "def f():\n    from .core import checks\n    return checks._own()",
     "santa uses the private core.checks._own"),
    ("santa", "import sparse_nb.core.checks\nsparse_nb.core.checks._own", "santa uses the private core.checks._own"),
    ("attention", "def attention(): pass", "attention is a door, attention belongs to a room")])
def test_a_wrong_house(tmp_path, room, text, fault):
    assert fault in faults_of(tmp_path, GOOD | {room: text})


def test_a_circle(tmp_path):
    circle = {"compose": "from .santa import x", "santa": "from .compose import x"}
    assert any("compose" in line and "santa" in line for line in faults_of(tmp_path, GOOD | circle))


def test_the_house_is_shown(tmp_path, capsys):
    faults_of(tmp_path, GOOD)
    house.show(tmp_path)
    said = capsys.readouterr().out
    assert (said.index("floor 9") < said.index("floor 0") and "__init__" not in said
            and "  core.exact                3 lines  core.checks\n" in said and "compose" in said)
