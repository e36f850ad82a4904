"""The reference of the API, nbs/library/api.ipynb: it shows what the code says today, of every name of the package."""
import json
from pathlib import Path

import pytest

import sparse_nb

PAGE = Path(__file__).parents[2] / "nbs/library/api.ipynb"


@pytest.fixture(scope="module")
def page():
    "The saved Markdown of each cell that shows some, by its code, and the names that the page defines."
    shown, names = {}, {}
    for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code": continue
        source = "".join(cell["source"])
        if not cell["outputs"]: exec(source, names)
        else: shown[source.replace("#| echo: false\n", "")] = "".join(cell["outputs"][0]["data"]["text/markdown"])
    return shown, names


def test_it_is_made_from_this_code(page):
    shown, names = page
    assert len(shown) == 4
    for code, saved in shown.items(): assert eval(code, names).data == saved, f"execute it: {code}"


def test_every_name_of_the_package_is_there_once(page):
    text = "\n".join(page[0].values())
    assert all(text.count(f"**`{name}`** ([source](") == 1 for name in sparse_nb.__all__)


def test_every_argument_is_described(page):
    lines = [line for text in page[0].values() for line in text.splitlines() if line.startswith("| `")]
    assert len(lines) > 300 and not [line for line in lines if line.endswith("|  |")]
