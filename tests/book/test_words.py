"""The field's words in what a reader reads on any page: prose, and what figures and cells say.

`phrases.txt` says which words are not, and what to write instead. Names in code, those of columns too, are not read."""
import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(str(path.relative_to(ROOT)) for folder in ("nbs", "nbs/library", "nbs/appendix", "nbs/course", "kernels")
               for path in (ROOT / folder).glob("*.ipynb"))
PHRASES = [line.rpartition(" -> ")[::2] for line in (ROOT / "tests/book/phrases.txt").read_text().splitlines()
           if not line.startswith("#")]
# calls whose texts a reader sees
SAYS = {"annotate", "legend", "plot", "print", "set", "set_title", "set_xlabel", "set_ylabel", "suptitle", "text"}


def source(cell): return "".join(cell["source"])


def plain(text):
    "Without what is not read as words: code, formulas, tags, addresses of links."
    text = re.sub(r"^```.*?^```", " ", text, flags=re.M | re.S)
    text = re.sub(r"\$\$.*?\$\$(?: \{#[\w-]+\})?|\$[^$\n]+\$|`[^`\n]+`|<!--.*?-->", " ", text, flags=re.S)
    return re.sub(r"\]\([^)]*\)", "]", text)


def texts(node):
    "Strings below a node, but for names in brackets: those of columns."
    if isinstance(node, ast.Constant) and isinstance(node.value, str): yield node.value
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Subscript) and child is node.slice): yield from texts(child)


def said(code):
    "What the code of a cell says: descriptions of its figures, their titles and labels, and what it prints."
    yield from re.findall(r"^#\| (?:fig-alt|fig-cap|tbl-cap|code-summary): (.*)", code, re.M)
    for node in ast.walk(ast.parse(re.sub(r"^[%!].*$", "", code, flags=re.M))):
        if not isinstance(node, ast.Call): continue
        if (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in SAYS:
            yield from (x for given in (*node.args, *(x.value for x in node.keywords)) for x in texts(given))


def foreign(cells):
    "Words that are not the field's, and what to write instead."
    read = [plain(source(x)) for x in cells if x["cell_type"] == "markdown"]
    read += [text for x in cells if x["cell_type"] == "code" for text in said(source(x))]
    return [f"{m[0]!r} in {x[max(0, m.start() - 30):m.end() + 30]!r}: {better}" for x in read
            for pattern, better in PHRASES for m in re.finditer(pattern, x, re.I)]


@pytest.mark.parametrize("page", PAGES)
def test_words_are_the_fields(page):
    found = foreign(json.loads((ROOT / page).read_text(encoding="utf-8"))["cells"])
    assert not found, "\n".join(found)


def test_a_wrong_word_is_seen():
    text, code = (lambda x, kind=kind: dict(cell_type=kind, source=x) for kind in ("markdown", "code"))
    assert len(foreign([text("We ask the rival how many rows it reads.")])) == 3
    assert not foreign([text("A query task is measured; `rows`, a row of the table, $row$ and [this](a_row.ipynb).")])
    for wrong in ('ax.set(title="A promise")', 'print(f"{n} rows")', '#| fig-alt: "Few heavy keys."\nplot()',
                  'ax.plot(x, label="rivals")', 'print("{} ms".format(table["rows"]), "rows")'):
        assert len(foreign([code(wrong)])) == 1, wrong
    for right in ('table["rows"]', 'print(table["rows"].sum())', '"a promise"', "%%time\nrow = 1"):
        assert not foreign([code(right)]), right


def test_every_folder_is_read():
    folders = {page.rpartition("/")[0] for page in PAGES}
    assert folders == {"nbs", "nbs/library", "nbs/appendix", "nbs/course", "kernels"} and len(PAGES) > 150
