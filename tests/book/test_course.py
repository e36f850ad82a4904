"""The course: minutes, questions and points add up, and the slides are whole, need no network and are not cut."""
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from execnb.nbio import read_nb

from browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tools import slides  # noqa: E402

LENGTH, SLIDES = 120, 14  # minutes of a session, slides of a deck
DECKS = slides.sessions()

pytestmark = [pytest.mark.xdist_group("slides"), pytest.mark.site]


def text_of(name):
    cells = read_nb(ROOT / f"nbs/course/{name}.ipynb").cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def sections(text):
    "Heading of the second rank -> what stands below it."
    _, *parts = re.split(r"^## (.+)$", text, flags=re.M)
    return dict(zip(parts[::2], parts[1::2]))


def rows(text):
    "Lines of the tables of a text, as lists of cells."
    return [[x.strip() for x in line.strip("| ").split(" | ")] for line in re.findall(r"^\|.+\|$", text, re.M)]


def sessions():
    "The part of the course's page on each session."
    found = {name: text for name, text in sections(text_of("course")).items() if name.startswith("Session ")}
    return {int(name.split()[1].rstrip(":")): (name.partition(": ")[2], text) for name, text in found.items()}


# The page, the exam and the project.

def test_every_session_is_as_long_as_the_page_says():
    assert f"A session takes {LENGTH} minutes" in text_of("course")
    assert list(sessions()) == list(DECKS) == [*range(1, 7)]
    for number, (_, text) in sessions().items():
        minutes = {row[1]: int(row[0]) for row in rows(text) if row[0].isdigit()}
        assert sum(minutes.values()) == LENGTH, number
        tasks = re.findall(r"^## \d\. .* \((\d+) minutes\)$", text_of(f"lab_{number}"), re.M)
        (lab,) = [x for name, x in minutes.items() if name == f"[lab {number}](lab_{number}.ipynb)"]
        assert lab == sum(map(int, tasks)), number
        (about,) = re.findall(r"in about (\d+) minutes", text_of(f"lab_{number}"))
        assert int(about) == lab, number


def test_page_and_decks_have_the_same_titles_and_aims():
    for number, (title, text) in sessions().items():
        aims = [x.rstrip(";.") for x in re.findall(r"^- (.+)$", text, re.M)]
        assert aims == DECKS[number]["aims"] and title == DECKS[number]["title"][0].lower() + DECKS[number]["title"][1:]


def test_the_twenty_questions_are_there_once_and_used():
    folded = r"\*\*Question (\d+)\.\*\*.+?<details><summary>Answer</summary>\n\n(.+?)\n\n</details>"
    questions = re.findall(folded, text_of("course"), re.S)
    assert [int(number) for number, _ in questions] == [*range(1, 21)]
    assert all(re.search(r"\(\[.+?\]\(\.\./.+?#.+?\)", answer) for _, answer in questions)  # where to read it
    kinds = "questions", "talk", "exit question"
    used = {int(x) for _, text in sessions().values() for row in rows(text) if len(row) == 3 and row[1] in kinds
            for x in re.findall(r"\b\d+\b", row[2])}
    assert used == {*range(1, 21)}


def test_every_page_that_is_named_exists():
    for name in ["course", "exam", "project", *(f"lab_{n}" for n in DECKS)]:
        links = re.findall(r"\]\(((?!http)[^)#]+)", text_of(name))
        assert not [x for x in links if not (ROOT / "nbs/course" / x).is_file()], name
        files = re.findall(r"`((?:solutions/)?\w+\.(?:py|yml|ipynb))`", text_of(name))
        assert not [x for x in files if not (ROOT / "nbs/course" / x).is_file()], name
    cells = read_nb(ROOT / "nbs/course/course.ipynb").cells
    read = re.findall(r'"(\d\d_\w+)"', "\n".join(cell.source for cell in cells if cell.cell_type == "code"))
    assert len(read) == 12 and all((ROOT / f"nbs/{name}.ipynb").is_file() for name in read)


def test_the_points_of_the_exam_add_up():
    text = text_of("exam")
    questions = re.findall(r"^\*\*Question (\d+)\*\* \((\d+) points\)\.(.+?)</details>", text, re.S | re.M)
    assert [int(number) for number, *_ in questions] == [*range(1, 13)]
    assert sum(int(points) for _, points, _ in questions) == 60 and "Twelve questions, 60 points" in text
    for number, points, body in questions:
        answer = body.partition("<details><summary>Answer</summary>")[2]
        given = [int(x) for x in re.findall(r"\((\d)(?: points?)?\)[.,;: ]|\((\d)\)$", answer) for x in x if x]
        assert sum(given) == int(points), (number, given)


def test_the_points_of_the_rubric_add_up():
    table = [row for row in rows(text_of("project")) if len(row) == 5 and row[1].isdigit()]
    assert len(table) == 6 and sum(int(row[1]) for row in table) == 100 and all(all(row) for row in table)
    assert "Six criteria, 100 points" in text_of("project")


# The slides.

class Deck(HTMLParser):
    "What a deck holds: its slides with their pictures and titles, and what it loads."
    def __init__(self, path):
        super().__init__()
        self.slides, self.loads, self.depth = [], [], 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "section":
            self.depth += 1
            if self.depth == 2: self.slides.append({"pictures": 0, "alt": [], "text": ""})
        if tag == "img":
            self.slides[-1]["pictures"] += attributes["src"].startswith("data:image/png;base64,iVBOR")
            self.slides[-1]["alt"].append(attributes.get("alt"))
        self.loads += [attributes[x] for x in ("src", "href") if x in attributes and tag != "a"]

    def handle_endtag(self, tag): self.depth -= tag == "section"

    def handle_data(self, data):
        if self.depth: self.slides[-1]["text"] += data


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    "The decks, built once: 8 seconds of processor time."
    return slides.build(tmp_path_factory.mktemp("slides"))


def test_each_deck_has_its_slides_and_figures(built):
    assert f"six decks of {SLIDES} slides" in text_of("course") and len(built) == 6
    for file, (number, content) in zip(built, DECKS.items()):
        deck = Deck(file)
        assert file.name == f"session_{number}.html" and len(deck.slides) == SLIDES == 1 + len(content["slides"])
        assert content["title"] in deck.slides[0]["text"]
        for shown, entry in zip(deck.slides[1:], content["slides"]):
            figures = sum("figure" in x for x in entry["show"])
            assert entry["title"] in shown["text"] and shown["pictures"] == len(shown["alt"]) == figures, entry["title"]
            assert all(alt and len(alt) > 40 for alt in shown["alt"]), entry["title"]
            assert not re.search(r"<!--|@eq-|\{#|^:::|#\||\bNaN\b", shown["text"], re.M), entry["title"]


def test_a_deck_loads_nothing_from_elsewhere(built):
    for file in built:
        for link in Deck(file).loads:
            assert link.startswith("data:") or (file.parent / link).is_file(), link


CUT = """(() => { const slide = Reveal.getCurrentSlide(), size = Reveal.getScale();
    const box = document.querySelector(".slides").getBoundingClientRect();
    const seen = [...slide.querySelectorAll("*:not(mjx-assistive-mml, mjx-assistive-mml *)")];
    const beyond = node => { const r = node.getBoundingClientRect();
        return r.width > 0 && (r.bottom > box.bottom + 1 || r.right > box.right + 1 || r.top < box.top - 1) };
    const wide = node => ["auto", "scroll", "hidden"].includes(getComputedStyle(node).overflowX)
        && node.scrollWidth > node.clientWidth + 2;
    const said = node => node.tagName + ": " + node.textContent.trim().slice(0, 40);
    return {title: slide.querySelector("h1, h2").textContent, cut: seen.filter(beyond).slice(0, 2).map(said),
            wide: seen.filter(wide).slice(0, 2).map(said), errors: slide.querySelectorAll("mjx-merror").length,
            unset: (slide.textContent.match(/\\$[^$ ]+\\$/g) || []).length,
            pictures: [...slide.querySelectorAll("img")].filter(x => !x.naturalWidth).length} })()"""


def test_no_slide_is_cut(built, tmp_path):
    if CHROMIUM is None: pytest.skip("no Chromium on the PATH")
    browser, wrong = Browser(tmp_path / "profile"), []
    ready = """new Promise(done => { let tries = 400; const look = () => window.Reveal && Reveal.isReady()
        ? done(Reveal.getTotalSlides()) : tries-- ? setTimeout(look, 25) : done(0); look() })"""
    for file in built:
        browser.open(file.as_uri(), slides.WIDTH, slides.HEIGHT)
        assert browser.value(ready) == SLIDES and browser.wrong() == []
        for place in range(SLIDES):
            facts = browser.value(f"(Reveal.slide({place}), {CUT})")
            if any(value for name, value in facts.items() if name != "title"): wrong.append((file.stem, place, facts))
    if not wrong:  # the check itself, shown to fail
        browser.value("Reveal.getCurrentSlide().insertAdjacentHTML('beforeend', '<p style=\"height: 900px\">x</p>')")
        assert browser.value(CUT)["cut"]
    browser.close()
    assert not wrong, wrong


@pytest.mark.parametrize("entry, said", [
    (dict(text="No paragraph begins so"), "0 places"), (dict(figure=99), "the page has"), (dict(formula="="), "places"),
    (dict(code="def gone("), "0 places"), (dict(picture=1), "is none of text")])
def test_a_part_that_is_not_there_is_an_error(entry, said):
    with pytest.raises(ValueError, match=said):
        slides.slide_of(dict(title="A", page="01_why_a_token_is_slow", show=[entry]))


def test_an_equation_that_is_named_elsewhere_has_no_place_on_a_slide():
    with pytest.raises(ValueError, match="@eq-cache means nothing"): slides.for_a_slide("By @eq-cache it follows.")
    assert slides.for_a_slide("See [this](x.ipynb#y) <!-- cell: a -->, [that](https://a.b).") == "See this, [that](https://a.b)."
