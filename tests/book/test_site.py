"""The book as a visitor meets it: the site, built once, read as HTML and in a browser, and the notebooks behind it."""
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from execnb.nbio import read_nb
from nbdev.doclinks import nbglob

from browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "site")]
from tools import book, contents  # noqa: E402
import shown_cells  # noqa: E402

PAGES = contents.pages()
NOTEBOOKS = [page for page in PAGES if page.endswith(".ipynb")]
PILOTS = re.compile(r"index|nbs/(library/attention|\w+_why_a_token_is_slow|\d+_santa|\d+_saap|appendix/ledger)\.")

pytestmark = [pytest.mark.xdist_group("site"), pytest.mark.site] # one process builds it and has a browser


def build(out):
    "The site, built below `out`: what Sphinx said, with a warning as an error."
    command = [Path(sys.executable).parent / "sphinx-build", "-q", "-W", "--keep-going", "-c", ROOT / "tools" / "site",
               "-d", out / "doctrees", ROOT, out / "site"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    "The folder of the site, whose pages are parsed: 45 seconds of processor time."
    out = tmp_path_factory.mktemp("built")
    done = build(out)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES: parsed(out / "site" / place(page))
    return out / "site"


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if CHROMIUM is None: pytest.skip("no Chromium on the PATH")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


class Page(HTMLParser):
    """What a page holds: ids and links; headings of the article, contents and menu as [text, address]; blocks of code
    as [code, is folded]; the text outside code; the pages before and after it; its title."""
    HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.headings, self.contents, self.menu, self.code, self.near = [], [], [], [], [], [], {}
        self.text, self.title, self.section, self.inside, self.around = "", "", None, [], Counter()
        self.feed(path.read_text(encoding="utf-8"))

    def within(self, name): return self.around[name] > 0

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "id" in attributes: self.ids.append(attributes["id"])
        self.links += [attributes[name] for name in ("href", "src") if name in attributes]
        if tag == "section": self.section = attributes.get("id")
        if tag == "link" and "rel" in attributes: self.near[attributes["rel"]] = attributes["href"]
        kinds = {tag, *("." + name for name in (attributes.get("class") or "").split())}
        if tag in self.HEADINGS and self.within("article"): self.headings.append(["", f"#{self.section}"])
        if tag == "pre": self.code.append(["", self.within(".hide")])
        if tag == "a" and self.within(".localtoc"): self.contents.append(["", attributes["href"]])
        if tag == "a" and self.within(".globaltoc"): self.menu.append(["", attributes["href"]])
        if tag not in {"meta", "link", "img", "input", "br", "hr", "col", "path"}:
            self.inside.append((tag, kinds))
            self.around.update(kinds)

    def handle_endtag(self, tag):
        places = [place for place, (name, _) in enumerate(self.inside) if name == tag]
        for _ in self.inside[places[-1]:] if places else (): self.around.subtract(self.inside.pop()[1])

    def handle_data(self, data):
        if self.within(".headerlink") or self.within("script"): return
        if self.within("title") and not self.within("svg"): self.title += data
        if self.within("pre"): self.code[-1][0] += data
        elif self.within("a") and self.within(".localtoc"): self.contents[-1][0] += data
        elif self.within("a") and self.within(".globaltoc"): self.menu[-1][0] += data
        elif self.within("article"):
            if any(map(self.within, self.HEADINGS)): self.headings[-1][0] += data
            if not any(map(self.within, ("code", "style", ".math", ".output", ".contents"))): self.text += data


@cache
def parsed(path):
    return Page(path)


def place(page):
    "Where the site keeps a page of the list."
    return Path(page).with_suffix(".html")


def title(page):
    "The title in the file of a page."
    if page.endswith(".ipynb"): return read_nb(ROOT / page).cells[0].source.splitlines()[0].removeprefix("# ")
    text = (ROOT / page).read_text(encoding="utf-8")
    if included := re.search(r"include (\S+) >", text): text = (ROOT / page).with_name(included[1]).read_text()
    return re.search(r"^# (.+)$", text, flags=re.M)[1]


# The list of pages.

def test_every_notebook_is_in_the_list_once():
    assert sorted(NOTEBOOKS) == sorted(path.relative_to(ROOT).as_posix() for path in nbglob(ROOT, as_path=True))
    assert len(PAGES) == len({*PAGES}) and all((ROOT / page).is_file() for page in PAGES)
    assert list(contents.parts())[:5] == ["I The problem", "II Decoding", "III Prompts", "IV Fast", "V The verdict"]


def test_the_sidebar_of_quarto_is_made_of_the_list():
    text = (ROOT / "_quarto.yml").read_text(encoding="utf-8")
    assert text == contents.quarto(text), "make contents"
    first, *parts = yaml.safe_load(text)["website"]["sidebar"]["contents"]
    assert first["href"] == PAGES[0] and {part["section"]: part["contents"] for part in parts} == contents.parts()
    assert contents.quarto(text.replace("          - nbs/appendix/ledger.ipynb\n", "")) == text  # one page was missing


def test_titles_are_equal_in_file_page_and_menu(site):
    titles = {page: title(page) for page in PAGES}
    for page in PAGES:
        shown = parsed(site / place(page))
        assert shown.headings[0][0] == titles[page] and shown.title.startswith(titles[page])
        menu = [[titles[other], os.path.relpath(place(other), place(page).parent)] for other in PAGES[1:]]
        here = [[name, link if link != "#" else place(page).name] for name, link in shown.menu]
        assert here == menu, page


def test_every_page_leads_on(site):
    where = lambda page, link: link and os.path.normpath(place(page).parent / link)
    for before, page, after in zip([None, *PAGES], PAGES, [*PAGES[1:], None]):
        near = parsed(site / place(page)).near
        assert [where(page, near.get(name)) for name in ("prev", "next")] == [
            there and str(place(there)) for there in (before, after)], page


# What the pages hold.

def dead(path):
    "The links of the page at `path` that lead nowhere."
    for link in parsed(path).links:
        if re.match(r"[a-z]+:", link): continue
        file, _, fragment = link.partition("#")
        target = path.parent / unquote(file.split("?")[0]) if file else path
        if not target.is_file() or fragment and fragment not in parsed(target).ids: yield link


@pytest.mark.parametrize("page", PAGES)
def test_links(site, page):
    assert not sorted(set(dead(site / place(page))))


def functions():
    "Names of what the library defines."
    names = {}
    exec((ROOT / "sparse_nb/_modidx.py").read_text(encoding="utf-8"), names)
    return {full.split(".")[-1] for module in names["d"]["syms"].values() for full in module}


@pytest.mark.parametrize("page", PAGES)
def test_contents_are_the_sections(site, page):
    shown = parsed(site / place(page))
    ids = [x for x in shown.ids if not x.startswith("equation-")]  # of an equation Sphinx sets the anchor twice
    assert len(ids) == len(set(ids))
    assert shown.contents == shown.headings[1:]
    assert not {name.strip("`() ") for name, _ in shown.contents} & {name for name in functions() if "_" in name}


@pytest.mark.parametrize("page", PAGES)
def test_no_markdown_or_tex_is_left(site, page):
    assert not re.findall(r".{0,40}\]\(.{0,40}|^:::.*|\$\$.*|#\|.*", parsed(site / place(page)).text, flags=re.M)


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_code_is_on_the_page_and_folded_by_rule(site, page):
    shown = {code.strip(): folded for code, folded in parsed(site / place(page)).code}
    for cell in read_nb(ROOT / page).cells:
        if cell.cell_type != "code": continue
        options, source = shown_cells.options_of(cell.source)
        if not source or options.get("echo") is False: continue
        assert source in shown, source[:200]
        assert shown[source] == bool(shown_cells.fold_of(options, source, cell.outputs)), source[:200]


def test_empty_cells_are_dashes(site):
    texts = [(site / place(page)).read_text(encoding="utf-8") for page in NOTEBOOKS]
    assert not [found for text in texts for found in re.findall(r"<t[dh][^>]*>\s*(?:NaN|nan|None)\s*</t", text)]
    assert sum(text.count("<td>–</td>") for text in texts) > 100


def test_nothing_but_what_is_read_is_copied(site):
    assert not list(site.rglob("*.ipynb")) and not list(site.rglob("jupyter_execute"))
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    assert size < 60e6


# The rules for a cell.

def fold(source, outputs=()):
    return shown_cells.fold_of(*shown_cells.options_of(source), outputs)


def test_the_algorithm_is_open():
    lines = "".join(f"    step_{k} = {k}\n" for k in range(50))
    assert fold("#| export\ndef f(q): return q") is None and fold(f"#| exports\ndef f(q):\n{lines}") is None
    assert fold(f"#| export\n@triton.jit\ndef f(q):\n{lines}") is None
    assert fold(f"#| export\ndef f(q):\n{lines}\ndef g(q): pass\nLIMIT = 3") == "Code of f, g, LIMIT: 54 lines"
    assert fold("out = f(q)\nout") is None and fold("x = 1\ny = 2\nassert x < y") is None
    assert fold("#| code-fold: show\nimport torch") is None


def test_tests_claims_imports_and_figures_are_folded():
    figure = [{"data": {"image/png": ""}}]
    assert fold("plot(x)", figure) == "Code of the figure" and fold("#| export\ndef f(q): return q", figure) is None
    assert fold("import a\nfrom b import c") == "Imports"
    assert fold("x = 1\nclaim('A-1', 'holds')") == "Code of the claim" and fold("x = claim_of(1)") is None
    assert fold("x = f(3)\ntest_eq(x, 9)\nfor y in x: assert y") == "Test"
    assert fold("test_fail(lambda: f(-1),\n    contains='q')") == "Test"
    assert fold("#| code-fold: true\n#| code-summary: 'Solution of 1'\nx = 1") == "Solution of 1"


def test_a_cell_becomes_what_myst_reads():
    code = dict(cell_type="code", metadata={}, source="#| echo: false\n#| fig-alt: 'a: b'\nf()", outputs=[
        dict(output_type="display_data", data={"text/html": "<style scoped>x</style>\n<td>NaN</td><td>3</td>"})])
    text = dict(cell_type="markdown", metadata={}, source="::: {.callout-tip}\n## You can\n\n- x\n:::\n\n## Next")
    empty = dict(cell_type="code", metadata={}, source="#| default_exp toy", outputs=[])
    one, two = json.loads(shown_cells.shown(json.dumps({"cells": [empty, code, text], "metadata": {}})))["cells"]
    assert one["metadata"] == {"tags": ["remove-input"], "mystnb": {"image": {"alt": "a: b"}}}
    assert one["source"] == "f()" and one["outputs"][0]["data"]["text/html"] == "<td>–</td><td>3</td>"
    assert two["source"] == "::::{admonition} You can\n:class: tip\n\n- x\n::::\n\n## Next"


# In a browser.

FACTS = """(async () => {
  if (document.querySelector("article .math")) await MathJax.startup.promise;
  await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
  const all = selector => [...document.querySelectorAll("article " + selector)], root = document.documentElement;
  const first = all("p").find(p => p.textContent.trim().length > 30 && !p.closest("details"));
  const facts = {top: first.getBoundingClientRect().top, unfolded: all("details[open]").length,
                 menu: document.getElementById("lside").getBoundingClientRect().right};
  all("details").forEach(part => part.open = true);
  const style = node => getComputedStyle(node);
  const said = node => node.tagName + ": " + node.textContent.trim().slice(0, 60);
  const boxes = node => { const found = [];
    for (let up = node; up !== document.body; up = up.parentElement)
      if (style(up).overflowX !== "visible") found.push(up);
    return found };
  const scrolls = node => ["auto", "scroll"].includes(style(node).overflowX);
  const right = node => node.getBoundingClientRect().right, wide = node => node.scrollWidth > node.clientWidth + 1;
  const seen = node => node.getBoundingClientRect().width > 2 && !node.closest("mjx-assistive-mml, .sr-only");
  const formulas = all("mjx-container"), codes = all(".highlight pre");
  const columns = code => Math.max(...code.textContent.split("\\n").map(line => line.length));
  const split = cell => { const range = document.createRange(); range.selectNodeContents(cell);
    const lines = new Set([...range.getClientRects()].map(box => Math.round(box.bottom / 6)));
    return cell.textContent.trim().length > 6 && lines.size > cell.textContent.trim().split(/[\\s\\/-]+/).length + 2 };
  return {...facts, sideways: root.scrollWidth - root.clientWidth,
    beyond: all(":not(mjx-container *)").filter(node => right(node) > root.clientWidth + 1 && seen(node)
      && !boxes(node).some(scrolls)).map(said),
    boxes: all(":not(span, mjx-container *)").filter(node => scrolls(node) && wide(node) && seen(node)
      && !node.matches("pre, mjx-container") && !node.querySelector("table, mjx-container, pre, img")).map(said),
    cut: formulas.filter(node => boxes(node).some(box => !scrolls(box) && right(node) > right(box) + 1)).map(said),
    unset: all(".math").filter(node => !node.querySelector("mjx-container")).concat(all("mjx-merror")).map(said),
    code: codes.filter(code => wide(code) && columns(code) <= 100).map(said),
    split: all("td, th").filter(cell => !cell.querySelector("mjx-container, br, li") && split(cell)).map(said),
    pictures: [...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)}
})()"""


def found_wrong(browser, path, width, height):
    "What is wrong with a page on a screen of so many pixels."
    browser.open(path.as_uri(), width, height)
    facts = browser.value(FACTS)
    wrong = {name: facts[name] for name in ("beyond", "boxes", "cut", "unset", "split", "pictures") if facts[name]}
    if facts["top"] > height - 40: wrong["top"] = facts["top"]
    if facts["unfolded"]: wrong["unfolded"] = facts["unfolded"]
    if facts["sideways"] > 0: wrong["sideways"] = facts["sideways"]
    if width < 768 and facts["menu"] > 0: wrong["menu"] = facts["menu"]
    if width >= 1280 and facts["code"]: wrong["code"] = facts["code"]
    return wrong | ({"said": browser.wrong()} if browser.wrong() else {})


@pytest.mark.parametrize("page", [pytest.param(page, marks=[] if PILOTS.search(page) else pytest.mark.slow)
                                  for page in PAGES])
def test_a_page_fits_a_phone_and_a_laptop(site, browser, page):
    screens = {"phone": (390, 844), "laptop": (1280, 800)}
    wrong = {name: found_wrong(browser, site / place(page), *size) for name, size in screens.items()}
    assert wrong == {"phone": {}, "laptop": {}}


def test_the_ledger_is_first_and_readable_on_a_phone(site, browser):
    path = site / place("nbs/appendix/ledger.ipynb")
    browser.open(path.as_uri(), 390, 844)
    box, top, columns = browser.value("""(() => { const table = document.querySelector("article table");
        const box = table.closest(".table-wrapper");
        return [box.scrollWidth - box.clientWidth, box.getBoundingClientRect().top, table.rows[0].cells.length] })()""")
    assert box <= 0 and top < 844 and columns == 4


def test_a_slider_moves_the_figure_and_one_picture_stands_still_without(site, browser):
    path = site / place("nbs/library/plots.ipynb")
    browser.open(path.as_uri(), 390, 844)
    seen = "[...document.querySelectorAll('.slider')].at(-1).querySelectorAll('img')"
    shown = f"[...{seen}].map(x => x.offsetWidth)"
    before = browser.value(shown)
    after = browser.value(f"""(() => {{ const box = [...document.querySelectorAll('.slider')].at(-1);
        const knob = box.querySelector('input'); knob.value = 3; knob.dispatchEvent(new Event('input'));
        return [box.querySelector('output').value, {shown}] }})()""")
    assert [x > 0 for x in before] == [False, True, False, False] and before[1] <= 390
    assert after[0] == "8" and [x > 0 for x in after[1]] == [False, False, False, True]


def test_the_search_finds_from_the_disk(site, browser):
    browser.open((site / "search.html").as_uri() + "?q=softmax", 1280, 800)
    found = browser.value("""new Promise(done => { let tries = 100; const look = () => {
        const links = document.querySelectorAll("#search-results li a").length;
        links > 10 || !tries-- ? done(links) : setTimeout(look, 50) }; look() })""")
    assert found > 10 and browser.wrong() == []


def test_a_dark_screen_gets_a_dark_page(site, browser):
    light = """(() => { const shade = getComputedStyle(document.documentElement).backgroundColor;
                        const [r, g, b] = shade.match(/[\\d.]+/g).map(Number);
                        return (r + g + b) / 765 })()"""
    shades = []
    for dark in False, True:
        browser.open((site / "index.html").as_uri(), 1280, 800, dark)
        shades.append(browser.value(light))
    assert shades[0] > 0.9 and shades[1] < 0.2


def test_a_browser_sees_what_is_wrong(browser, tmp_path):
    (tmp_path / "a.html").write_text("""<!doctype html><meta name="viewport" content="width=device-width"><body>
        <style>pre, .scrolls { overflow-x: auto } .cut { overflow-x: hidden } .cut { width: 50px }
        b, mjx-container { display: block }
        </style><div id="lside">menu</div><article><details open>x</details><div style="height: 900px"></div>
        <p>A paragraph that is long enough to be the first of the page.</p><img src="gone.png">
        <div style="width: 3000px">wide</div><div class="scrolls"><b style="width: 900px">b</b></div>
        <div class="highlight"><pre style="width: 90px">a line that is long, but not of 100 columns</pre></div>
        <div class="cut"><mjx-container style="width: 90px">f</mjx-container></div><mjx-merror>e</mjx-merror>
        <table><td style="width: 1px; word-break: break-all">letters</table></article>
        <script>console.error("oh"); gone()</script>""")
    wrong = found_wrong(browser, tmp_path / "a.html", 390, 844)
    assert wrong.keys() == {"beyond", "boxes", "cut", "unset", "split", "pictures", "top", "unfolded", "sideways",
                            "menu", "said"}
    assert len(wrong["said"]) == 3 and "code" in found_wrong(browser, tmp_path / "a.html", 1280, 800)


# The checks above, shown to fail, and the files behind the pages.

def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html">1</a><a href="b.html#there">2</a><a href="#here">3</a><p id="here"><a href="c.html">4</a>'
        '<a href="b.html#gone">5</a><a href="#gone">6</a><img src="d.png"><a href="https://example.org">7</a>'
        '<a href=".">8</a>')
    (tmp_path / "b.html").write_text('<p id="there">')
    assert list(dead(tmp_path / "a.html")) == ["c.html", "b.html#gone", "#gone", "d.png", "."]


def test_no_notebook_is_too_large():
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in nbglob(ROOT, as_path=True)}
    assert not {path: size for path, size in sizes.items() if size > 1_500_000}


def test_pictures_are_saved_once():
    "A slider's HTML has the picture that stands still once more."
    for path in nbglob(ROOT, as_path=True):
        for cell in read_nb(path).cells:
            for output in cell.get("outputs", []):
                kinds = [kind for kind in output.get("data", {}) if kind.startswith("image/")]
                page = "".join(output.get("data", {}).get("text/html", ""))
                shown = ("<img" in page or "<svg" in page) and not page.startswith('<div class="slider">')
                assert len(kinds) + shown <= 1, f"{path.name}: {cell.source[:80]}"


KNOWN = {"nbdev.fast.ai", "quarto.org", "download.pytorch.org", "example.org", "arxiv.org",
         "import-linter.readthedocs.io"}
TEXTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md", "pyproject.toml", "settings.ini",
         "Makefile", "_quarto.yml"]


@pytest.mark.parametrize("name", TEXTS)
def test_addresses_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert set(re.findall(r"(?:https?|git|ssh)://([\w.-]+)", text)) <= KNOWN
    assert not re.findall(r"git\+|git@|\S+@(?!example\.org)\w+\.\w+", text)


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
