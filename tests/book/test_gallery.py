"""The gallery, nbs/gallery.yml: every numbered figure and table of the papers once, beside what is there."""
import copy
import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from sparse_nb.claims import claims, rows

ROOT = Path(__file__).parents[2]
NUMBERED = {"SANTA": (10, 23), "vAttention": (15, 10), "Delta Attention": (15, 6), "SAAP": (11, 5),
            "Sketch&Walk": (6, 7)}  # the last Figure and the last Table that each paper's text names; none is left out
KEYS = {"number", "what", "status", "where", "claim", "why", "picture"}


@pytest.fixture(scope="module")
def gallery(): return yaml.safe_load((ROOT / "nbs/gallery.yml").read_text(encoding="utf-8"))


def expected(paper):
    figures, tables = NUMBERED[paper]
    return [f"Figure {n}" for n in range(1, figures + 1)] + [f"Table {n}" for n in range(1, tables + 1)]


@cache
def anchors(page):
    "Anchors of the sections of a notebook, as the site makes them."
    cells = json.loads((ROOT / "nbs" / page).read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    titles = [x for text in texts for x in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def dead(place):
    page, _, anchor = place.partition("#")
    return not (ROOT / "nbs" / page).is_file() or bool(anchor) and anchor not in anchors(page)


def has_figure(place):
    "Has a cell, `page#cell`, saved a figure?"
    page, _, id = place.partition("#")
    if not (ROOT / "nbs" / page).is_file(): return False
    cells = json.loads((ROOT / "nbs" / page).read_text(encoding="utf-8"))["cells"]
    return any("image/png" in x.get("data", {}) for cell in cells if cell["id"] == id for x in cell["outputs"])


def faults(gallery):
    "What is wrong with a gallery, a line for each fault."
    if list(gallery) != list(NUMBERED): yield f"papers: {list(gallery)}"
    for paper, entries in gallery.items():
        found = [entry["number"] for entry in entries]
        if sorted(found) != sorted(expected(paper)):
            yield f"{paper}: {sorted(set(found) ^ set(expected(paper))) or 'one is there twice'}"
        for entry in entries:
            say = lambda what: f"{paper}, {entry['number']}: {what}"
            has, status = {key for key in KEYS if entry.get(key)}, entry.get("status")
            if entry.keys() - KEYS: yield say(f"unknown {entry.keys() - KEYS}")
            if not {"number", "what"} <= has: yield say("what does it show?")
            needs = {"shown": {"where"}, "partly": {"where", "why"}, "not here": {"why"}}.get(status)
            if needs is None: yield say(f"status {status!r}")
            elif not needs <= has: yield say(f"{status} without {needs - has}")
            if status == "shown" and "why" in has: yield say("shown, and yet something is missing")
            if status == "not here" and "where" in has: yield say("not here, and yet a place")
            if "claim" in has and entry["claim"] not in claims(): yield say(f"no claim {entry['claim']}")
            if "picture" in has and not has_figure(entry["picture"]): yield say(f"no figure {entry['picture']}")
            yield from (say(f"leads nowhere: {place}") for place in entry.get("where", []) if dead(place))


def test_every_figure_and_table_is_there_once_with_a_place_or_a_reason(gallery):
    found = list(faults(gallery))
    assert not found, "\n".join(found)


def test_the_page_shows_the_list(gallery):
    cells = json.loads((ROOT / "nbs/appendix/gallery.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = "\n".join("".join(output["data"]["text/markdown"]) for cell in cells for output in cell.get("outputs", ())
                      if "text/markdown" in output.get("data", {}))
    for entry in (entry for entries in gallery.values() for entry in entries):
        assert f"| {entry['number']} | {entry['what']} | **{entry['status']}** |" in shown, entry
        assert all(f"](../{place})" in shown for place in entry.get("where", [])), entry
        assert entry.get("why", "") in shown, entry
        line = next(x for x in shown.splitlines() if x.startswith(f"| {entry['number']} | {entry['what']} |"))
        assert ("](data:image/png" in line) == ("picture" in entry), f"execute it: {entry['number']}"
        if claim := entry.get("claim"): assert f"<br>{claim}, {rows()[claim].verdict}" in shown, f"execute it: {claim}"


@pytest.mark.parametrize("change, said", [
    (lambda g: g["SAAP"].pop(3), "SAAP: ['Figure 4']"),
    (lambda g: g["SAAP"].append(g["SAAP"][0]), "SAAP: one is there twice"),
    (lambda g: g["SANTA"][0].update(number="Figure 24"), "SANTA: ['Figure 1', 'Figure 24']"),
    (lambda g: g.pop("vAttention"), "papers: "),
    (lambda g: g["SANTA"][0].update(where=[]), "SANTA, Figure 1: shown without {'where'}"),
    (lambda g: g["SANTA"][0].update(where=["04_santa.ipynb#no-such"]), "leads nowhere: 04_santa.ipynb#no-such"),
    (lambda g: g["SANTA"][0].update(where=["no_such.ipynb"]), "leads nowhere: no_such.ipynb"),
    (lambda g: g["SANTA"][0].update(status="not here", why="a GPU"), "not here, and yet a place"),
    (lambda g: g["SANTA"][0].update(status="some"), "status 'some'"),
    (lambda g: next(x for x in g["Delta Attention"] if x["number"] == "Table 3").pop("why"),
     "Delta Attention, Table 3: not here without {'why'}"),
    (lambda g: g["SANTA"][0].update(claim="SANTA-99"), "no claim SANTA-99"),
    (lambda g: g["SANTA"][0].update(picture="04_santa.ipynb#no-such"), "no figure 04_santa.ipynb#no-such"),
    (lambda g: g["SANTA"][0].update(what=""), "what does it show?"),
])
def test_a_fault_is_seen(gallery, change, said):
    wrong = copy.deepcopy(gallery)
    change(wrong)
    assert any(said in line for line in faults(wrong)), list(faults(wrong))
