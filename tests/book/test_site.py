"""The book as a visitor meets it: its pages, rendered once, and the notebooks and addresses behind them."""
import html
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from execnb.nbio import mk_cell, new_nb, read_nb
from nbdev.doclinks import nbglob
from nbdev.process import extract_directives

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tools import book, pages  # noqa: E402

SIDEBAR = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
PAGES = [Path(address) for _, address, _ in book.entries(SIDEBAR) if "#" not in address]
NOTEBOOKS = [page for page in PAGES if page.suffix == ".ipynb"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HEADINGS = {"h2", "h3", "h4", "h5", "h6"}


pytestmark = pytest.mark.xdist_group("site")  # one process renders the book and has its pages parsed


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    "The folder of the rendered book: 6 seconds of processor time."
    out = tmp_path_factory.mktemp("site")
    book.preview(out)
    return out


class Page(HTMLParser):
    """What a rendered page holds: ids and links; headings and contents as [level, text, id]; the code blocks, and which
    of them are folded; the text outside code; the links to near pages; how many pictures."""
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.headings, self.contents, self.code, self.near = [], [], [], [], [], {}
        self.folded, self.text, self.depth, self.inside, self.article, self.pictures = [], "", 0, [], False, 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "id" in attributes: self.ids.append(attributes["id"])
        self.links += [attributes[name] for name in ("href", "src") if name in attributes]
        if "rel" in attributes: self.near[attributes["rel"]] = attributes.get("href")
        if tag == "article": self.article = True
        if tag == "img": self.pictures += 1
        if tag == "nav": self.depth = 0
        if tag == "ul": self.depth += 1
        if tag == "pre":
            self.code.append("")
            self.folded.append("details" in self.inside)
        if tag in HEADINGS and self.article: self.headings.append([int(tag[1]), "", attributes.get("id")])
        if tag == "a" and not self.article and self.depth and attributes.get("href", "").startswith("#"):
            self.contents.append([self.depth + 1, "", attributes["href"][1:]])
        if tag in HEADINGS | {"pre", "code", "a", "annotation", "style", "details"}: self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag == "article": self.article = False
        if tag == "ul": self.depth -= 1
        if tag in self.inside: del self.inside[len(self.inside) - 1 - self.inside[::-1].index(tag):]

    def handle_data(self, data):
        if "annotation" in self.inside: return
        if "pre" in self.inside: self.code[-1] += data
        elif not {"code", "style"} & set(self.inside) and self.article: self.text += data
        if HEADINGS & set(self.inside) and self.headings and self.article: self.headings[-1][1] += data
        if "a" in self.inside and self.depth and not self.article and self.contents: self.contents[-1][1] += data


@cache
def parsed(path):
    return Page(path)


def rendered(page):
    "Where the book keeps `page` of the sidebar."
    return pages._nbpath2html(page) if page.suffix == ".ipynb" else page.with_suffix(".html")


def dead(path):
    "The links of the page at `path` that lead nowhere."
    for link in parsed(path).links:
        if re.match(r"[a-z]+:", link): continue
        file, _, fragment = link.partition("#")
        target = path.parent / unquote(file) if file else path
        if not target.is_file() or fragment and fragment not in parsed(target).ids: yield link


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links(site, page):
    assert not sorted(set(dead(site / rendered(page))))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_contents(site, page):
    shown = parsed(site / rendered(page))
    assert len(shown.ids) == len(set(shown.ids))
    assert all(ident for _, _, ident in shown.headings)
    levels = [level for level, _, _ in shown.headings]
    assert all(after <= before + 1 for before, after in zip([1, *levels], levels)), "a heading skips a level"
    assert shown.contents == shown.headings


def test_every_page_leads_on(site):
    assert rendered(PAGES[0]) == Path("index.html")
    where = lambda page, link: link and os.path.normpath((site / rendered(page)).parent / link)
    for before, page, after in zip([None, *PAGES], PAGES, [*PAGES[1:], None]):
        near = parsed(site / rendered(page)).near
        expected = {"home": PAGES[0], "prev": before, "next": after}
        assert {name: where(page, near.get(name)) for name in expected} == {
            name: there and str(site / rendered(there)) for name, there in expected.items()}, page


def test_sidebar_is_that_of_the_site(site):
    sidebar = (site / "index.html").read_text(encoding="utf-8").split('<nav class="book"')[1].split("</nav>")[0]
    shown = re.findall(r'<a href="([^"]*)"[^>]*>(.*)</a>', html.unescape(sidebar))
    entries = list(book.entries(SIDEBAR))
    assert len(shown) == len(entries)
    for (link, name), (_, address, title) in zip(shown, entries):
        path, _, fragment = address.partition("#")
        assert link == str(rendered(Path(path))) + (f"#{fragment}" if fragment else "")
        if address.endswith(".ipynb"): title = read_nb(ROOT / address).cells[0].source.splitlines()[0][2:]
        assert title in (None, name)
    sections = [part["section"] for part in SIDEBAR if "section" in part]
    assert re.findall("<h2>(.*)</h2>", html.unescape(sidebar)) == sections


def test_every_notebook_is_a_page():
    assert set(NOTEBOOKS) == {path.relative_to(ROOT) for path in nbglob(ROOT, as_path=True)}


@pytest.mark.parametrize("page", NOTEBOOKS, ids=str)
def test_exported_code_is_on_the_page(site, page):
    shown = parsed(site / rendered(page))
    folded = {code.strip(): folded for code, folded in zip(shown.code, shown.folded)}
    for cell in read_nb(ROOT / page).cells:
        if cell.cell_type != "code": continue
        options = extract_directives(cell, remove=False)
        source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M).strip()
        if options.keys() & {"export", "exports", "exporti"}:
            assert source in folded, source[:200]
            for name in re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", source, flags=re.M):
                assert any(ident.startswith("sparse_nb.") and ident.endswith(f".{name}") for ident in shown.ids), name
            kernel = re.search(r"^@\S*\bjit\b", source, flags=re.M)
            if kernel or "exports" in options: assert not folded[source], source[:200]
            elif "code-fold:" not in options and "\ndef " in f"\n{source}":
                assert folded[source] == (len(source.splitlines()) > pages.LONG), source[:200]
        if re.search(r"^claim\(", source, flags=re.M): assert folded[source], source[:200]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_markdown_or_tex_is_left(site, page):
    shown = parsed(site / rendered(page))
    text = (site / rendered(page)).read_text(encoding="utf-8")
    assert not re.findall(r".{0,40}\]\(.{0,40}|^:::.*", shown.text)
    assert not re.findall(r'<span\s+class="math[^>]*>.*?</span>', text), "pandoc could not read a formula"
    signatures = re.findall(r'<h\d class="definition".*</h\d>\s*<pre class="python"><code>([\s\S]*?)</code>', text)
    assert not [signature for signature in signatures if re.search(r"\]\([\w./]+\.(ipynb|html|md)", signature)]
    assert signatures or 'class="definition"' not in text


FACTS = """<script>
const wrong = [];
window.addEventListener("error", e => wrong.push(e.message || "cannot load " + (e.target.src || e.target.href)), true);
for (const kind of ["error", "warn"]) console[kind] = (...words) => wrong.push(words.join(" "));
window.addEventListener("load", () => {
  const size = node => { const box = node.getBoundingClientRect(); return Math.min(box.width, box.height) };
  document.querySelectorAll("details").forEach(part => part.open = true);
  document.body.dataset.facts = JSON.stringify({
    wrong, formulas: [...document.querySelectorAll("math")].filter(node => size(node) > 2).length,
    pictures: [...document.images].filter(node => node.complete && node.naturalWidth > 0 && size(node) > 50).length,
    rules: document.styleSheets[0].cssRules.length, wide: document.documentElement.scrollWidth - innerWidth,
    contents: size(document.getElementById("TOC"))})
});
</script>"""


def seen(path, folder):
    "What Chromium finds on the page at `path`, of which it opens a copy beside it that holds `FACTS`."
    copy = path.with_name(f"seen_{path.name}")
    copy.write_text(path.read_text(encoding="utf-8").replace("<head>", f"<head>{FACTS}", 1), encoding="utf-8")
    options = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
               "disable-component-update", "disable-sync", "allow-file-access-from-files", f"user-data-dir={folder}",
               "window-size=1280,900", "dump-dom")
    dom = subprocess.run([CHROMIUM, *(f"--{option}" for option in options), copy.as_uri()],
                         capture_output=True, text=True, timeout=120).stdout
    copy.unlink()
    return json.loads(html.unescape(re.search(r'<body data-facts="([^"]*)"', dom)[1]))


OPENED = [PAGES[0], *(Path(f"{name}.ipynb") for name in (
    "nbs/06_selection", "nbs/04_santa", "kernels/santa", "nbs/90_claims"))]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
@pytest.mark.parametrize("page", OPENED, ids=str)
def test_a_browser_shows(site, page, tmp_path):
    path = site / rendered(page)
    text, found = path.read_text(encoding="utf-8"), seen(path, tmp_path)
    assert found["wrong"] == []
    assert (found["formulas"], found["pictures"]) == (text.count("<math "), parsed(path).pictures)
    assert found["rules"] > 20 and found["contents"] > 20 and found["wide"] <= 0


def test_pages_that_a_browser_opens_have_formulas_and_pictures(site):
    assert len(OPENED) == 5
    texts = [(site / rendered(page)).read_text(encoding="utf-8") for page in OPENED]
    assert sum(text.count("<math ") > 0 for text in texts) >= 3 and sum("<img " in text for text in texts) >= 3


def test_no_notebook_is_too_large():
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in nbglob(ROOT, as_path=True)}
    assert not {path: size for path, size in sizes.items() if size > 1_500_000}


def test_code_in_colours_is_the_same_code():
    code = '@cache\ndef f(x: "a<b"):  # 2 & 3\n\n    return f"{x:.2f}" if x is not None else 1e-3'
    page = book.coloured(f'<p>def</p><pre class="python"><code>{html.escape(code, quote=False)}</code></pre>')
    assert html.unescape(re.sub("<.*?>", "", page)) == f"def{code}" and page.startswith("<p>def</p>")
    spans = re.findall(r'<span class="(\w+)">(.*?)</span>', page)
    for span in (("decorator", "@cache"), ("keyword", "def"), ("string", "a&lt;b"), ("comment", "# 2 &amp; 3"),
                 ("keyword", "return"), ("keyword", "is"), ("keyword", "None"), ("number", "1e-3")):
        assert span in spans
    assert {kind for kind, _ in spans} == {"decorator", "keyword", "string", "comment", "number"}


def test_pictures_are_saved_once():
    for path in nbglob(ROOT, as_path=True):
        for cell in read_nb(path).cells:
            for output in cell.get("outputs", []):
                kinds = [kind for kind in output.get("data", {}) if kind.startswith("image/")]
                page = "".join(output.get("data", {}).get("text/html", ""))
                assert len(kinds) + ("<img" in page or "<svg" in page) <= 1, f"{path.name}: {cell.source[:80]}"


KNOWN = {"nbdev.fast.ai", "quarto.org", "download.pytorch.org", "example.org", "arxiv.org",
         "import-linter.readthedocs.io"}
TEXTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md", "pyproject.toml", "settings.ini",
         "Makefile", "_quarto.yml"]


@pytest.mark.parametrize("name", TEXTS)
def test_addresses_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert set(re.findall(r"(?:https?|git|ssh)://([\w.-]+)", text)) <= KNOWN
    assert not re.findall(r"git\+|git@|\S+@(?!example\.org)\w+\.\w+", text)


# The rules of the pages, on a notebook made for it, and the checks above, shown to fail.

LAUNCHER = '''def launch(
    q,                     # queries, [B, H, Q, D] (see `a_helper`)
    samples: int = 128,    # draws | keys: 2**6 < 2^7
    scheme: str = "iid",   # one of `SCHEMES`
) -> int:                  # how many
    "Says `a_helper` twice, `launch` once."
''' + "".join(f"    step_{k} = {k}\n" for k in range(20)) + "    return 1"
KERNEL = "@triton.jit\ndef kernel(q):\n" + "".join(f"    step_{k} = {k}\n" for k in range(20)) + "    return 1"
CLASS = '''class Method(Base):
    "A method."
    samples: int = 3  # draws
    def run(self, q, *, deep=True):
        "Runs `a_helper`.

        At length."
''' + "".join(f"        step_{k} = {k}\n" for k in range(12)) + '''        return 1
    def _hidden(self): "Not shown."'''


@pytest.fixture
def processed(monkeypatch):
    "Cells of the page of `sparse_nb.toy`, processed; `helper` and `a_helper` are defined on another page."
    names = {"sparse_nb.toy.launch": Path("nbs/00_toy.ipynb"), "sparse_nb.tool.helper": Path("kernels/tool.ipynb"),
             "sparse_nb.tool.a_helper": Path("kernels/tool.ipynb")}
    monkeypatch.setattr(pages, "definitions", lambda: names)
    pages.full_name.cache_clear()
    def process(*cells):
        title, part = mk_cell("# Toy\n\n> What it says", "markdown"), mk_cell("## Part", "markdown")
        nb = new_nb([title, mk_cell("#| default_exp toy"), part, *cells])
        nb.path_ = ROOT / "nbs/00_toy.ipynb"
        book.FilterDefaults()(nb)
        return nb.cells[3:]
    yield process
    pages.full_name.cache_clear()


def test_a_long_function_is_folded_below_what_it_says(processed):
    said, code = processed(mk_cell(f"#| export\n{LAUNCHER}"))
    assert code.source == f'#| code-fold: true\n#| code-summary: "Code of launch: 27 lines"\n{LAUNCHER}'
    assert said.source == """### `launch` {#sparse_nb.toy.launch .definition}

```python
launch(q, samples=128, scheme='iid')
```

Says [`a_helper`](../kernels/tool.ipynb#sparse_nb.tool.a_helper) twice, `launch` once.

| parameter | type | default | meaning |
|-----------|-------|---------|HEAD|
| `q` |  |  | queries, [B, H, Q, D] (see [`a_helper`](../kernels/tool.ipynb#sparse_nb.tool.a_helper)) |
| `samples` | `int` | `128` | draws \\| keys: 2\\*\\*6 \\< 2\\^7 |
| `scheme` | `str` | `'iid'` | one of `SCHEMES` |
| returns | `int` |  | how many |""".replace("HEAD", re.search(r"-+(?=\|\n\| `q`)", said.source)[0])


def test_a_long_class_is_folded_below_its_settings_and_methods(processed):
    said, code = processed(mk_cell(f"#| export\n{CLASS}".replace('"Runs', '"""Runs').replace('length."', 'length."""')))
    assert "#| code-fold: true" in code.source
    assert "class Method(Base)" in said.source and "| `samples` | `int` | `3` | draws |" in said.source
    assert "| `run(q, *, deep=True)` | Runs [`a_helper`]" in said.source
    assert "At length" not in said.source and "hidden" not in said.source


def test_short_code_and_kernels_are_open(processed):
    head, code = processed(mk_cell("#| export\ndef launch(q): return q\ndef twice(q): return q\nLIMIT = 3"))
    assert head.source == "### `launch`, `twice` {#sparse_nb.toy.launch .definition}\n\n::: {#sparse_nb.toy.twice}\n:::"
    assert code.source.startswith("def launch")
    head, code = processed(mk_cell(f"#| export\n{KERNEL}"))
    assert head.source == "### `kernel` {#sparse_nb.toy.kernel .definition}" and code.source == KERNEL
    head, code = processed(mk_cell(f"#| exports\n{LAUNCHER}"))
    assert code.source == LAUNCHER and "| parameter" not in head.source
    [code] = processed(mk_cell("#| exporti\ndef _private(q): return q"))
    assert code.source.startswith("def _private")


def test_imports_claims_and_chosen_cells_are_folded(processed):
    folded = "import a\nfrom b import c", 'x = 1\nclaim("A-1", "holds")'
    shown = "#| code-fold: show\n" + LAUNCHER, "x = claim_of(1)"
    assert ["code-fold: true" in cell.source for cell in processed(*map(mk_cell, folded + shown))] == [1, 1, 0, 0]


def test_links_are_made_in_text_only(processed):
    text = "`a_helper` and `a_helper()`, `tool.a_helper`, `sparse_nb.tool.a_helper`\n\n" \
           "## `a_helper`\n\n[`a_helper`](x.md), $`a_helper`$, `` `a_helper` ``, `other`\n\n```\n`a_helper`\n```"
    [cell] = processed(mk_cell(text, "markdown"))
    assert cell.source.count("](../kernels/tool.ipynb#sparse_nb.tool.a_helper)") == 4
    assert cell.source.split("\n\n", 1)[1] == text.split("\n\n", 1)[1]
    [cell] = processed(mk_cell("`launch`", "markdown"))
    assert cell.source == "[`launch`](#sparse_nb.toy.launch)"


def test_a_plain_word_is_a_link_only_where_it_is_imported(processed):
    _, cell = processed(mk_cell("import sparse_nb.tool"), mk_cell("`helper`, `sparse_nb.tool.helper`", "markdown"))
    assert cell.source == "`helper`, [`sparse_nb.tool.helper`](../kernels/tool.ipynb#sparse_nb.tool.helper)"
    _, cell = processed(mk_cell("from sparse_nb.tool import helper"), mk_cell("`helper`", "markdown"))
    assert cell.source == "[`helper`](../kernels/tool.ipynb#sparse_nb.tool.helper)"


def test_a_name_of_two_pages_is_no_link(processed):
    pages.definitions()["sparse_nb.other.a_helper"] = Path("nbs/01_other.ipynb")
    [cell] = processed(mk_cell("`a_helper`", "markdown"))
    assert cell.source == "`a_helper`"


def test_the_heading_of_a_callout_is_its_title():
    box = "::: {.callout-tip}\n## You can\n\n- x\n:::\n\n## Next"
    assert book.boxed(box) == "::: {.callout-tip}\n[You can]{.callout-title}\n\n- x\n:::\n\n## Next"
    assert book.boxed(other := "::: {#id}\n## Part\n:::") == other


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html">1</a><a href="b.html#there">2</a><a href="#here">3</a><p id="here"><a href="c.html">4</a>'
        '<a href="b.html#gone">5</a><a href="#gone">6</a><img src="d.png"><a href="https://example.org">7</a>'
        '<a href=".">8</a>')
    (tmp_path / "b.html").write_text('<p id="there">')
    assert list(dead(tmp_path / "a.html")) == ["c.html", "b.html#gone", "#gone", "d.png", "."]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_a_browser_sees_what_is_wrong(tmp_path):
    (tmp_path / "style.css").write_text("body { margin: 0 }")
    (tmp_path / "a.html").write_text("""<!doctype html><html>
        <head><link rel="stylesheet" href="style.css"></head>
        <body><nav id="TOC"></nav><img src="gone.png" alt="a"><math style="display: none"><mi>x</mi></math>
        <div style="width: 3000px">wide</div><script>console.error("oh"); gone()</script></body></html>""")
    found = seen(tmp_path / "a.html", tmp_path / "profile")
    wrong = sorted(word.split(":")[0] for word in found["wrong"])
    assert wrong == ["Uncaught ReferenceError", "cannot load file", "oh"]
    assert (found["formulas"], found["pictures"], found["contents"]) == (0, 0, 0) and found["wide"] > 1000


def test_pictures_become_smaller_and_stay_the_same():
    import base64
    import io

    import numpy as np
    from PIL import Image
    ramp = np.linspace(0, 255, 600 * 800 * 3).reshape(600, 800, 3).astype(np.uint8)
    ramp[::7] = 255
    buffer = io.BytesIO()
    Image.fromarray(ramp).save(buffer, "png")
    before = base64.b64encode(buffer.getvalue()).decode()
    after = book.smaller(before)
    assert len(after) < len(before) and book.smaller(after) == after
    image = Image.open(io.BytesIO(base64.b64decode(after)))
    assert image.mode == "P" and image.size == (800, 600)
    assert np.abs(np.asarray(image.convert("RGB")).astype(int) - ramp).max() <= 16
