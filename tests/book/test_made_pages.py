"""Pages that are made from others: the reference of the API and the list of statements say what the code and the pages
say today."""
import json
import re
from pathlib import Path

import pytest

import sparse_nb

ROOT = Path(__file__).parents[2]
PAGES = "nbs/library/api.ipynb", "nbs/appendix/proofs.ipynb"


def made(page):
    "The saved Markdown of each cell that shows some, by its code, and the names that the page defines."
    shown, names = {}, {}
    for cell in json.loads((ROOT / page).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code": continue
        source = "".join(cell["source"])
        if not cell["outputs"]: exec(source, names)
        else: shown[source.replace("#| echo: false\n", "")] = "".join(cell["outputs"][0]["data"]["text/markdown"])
    return shown, names


@pytest.fixture(scope="module")
def reference(): return "\n".join(made(PAGES[0])[0].values())


@pytest.mark.parametrize("page", PAGES)
def test_it_is_of_today(page):
    shown, names = made(page)
    assert len(shown) > 1
    for code, saved in shown.items(): assert eval(code, names).data == saved, f"execute {page}: {code}"


def test_every_name_of_the_package_is_there_once(reference):
    assert all(reference.count(f"**`{name}`** ([source](") == 1 for name in sparse_nb.__all__)


def test_every_argument_is_described(reference):
    lines = [line for line in reference.splitlines() if line.startswith("| `")]
    assert len(lines) > 300 and not [line for line in lines if line.endswith("|  |")]


def test_a_statement_is_cut_where_it_ends():
    plain = made(PAGES[1])[1]["plain"]
    assert plain(" (new). *If $|x|<1$, then $y$.* More. *Proof.* So.") == r"(new). *If $\vert x\vert <1$, then $y$.*"
    assert plain(" bounds [the error](a.ipynb) by $t$. It is right.") == "bounds the error by $t$"


def test_every_statement_says_something():
    lines = [line for saved in made(PAGES[1])[0].values() for line in saved.splitlines()[2:]]
    assert len(lines) > 40 and not [line for line in lines if not re.search(r"\*\* .{10}", line)]
