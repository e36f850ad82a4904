"""A chapter is short, begins with a picture, and says where its numbers come from."""
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from test_words import plain, source

ROOT = Path(__file__).parents[2]
WRITTEN = ["01_why_a_token_is_slow", "02_softmax_in_pieces", "03_a_model_to_try", "04_santa", "05_how_many_draws",
           "06_vattention", "07_heavy_keys", "08_saap", "09_eviction", "10_delta", "11_sketch_walk", "12_patterns",
           "13_a_kernel_in_four_steps", "14_timing", "15_transformers_and_vllm", "16_which_method"]  # others wait
WORDS, LINES = 2500, 150
LETTERS = yaml.safe_load((ROOT / "nbs/notation.yml").read_text(encoding="utf-8"))
UNIT = r"(?:\s?%|\s(?:GB|MB|KiB|kB|TB|µs|us|ms|seconds|points?|operations)\b)"
MEASURED = re.compile(rf"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)(?={UNIT})|(?:factor|speedup) of (?:only |up to |at most )?"
                      r"(\d[\d,]*(?:\.\d+)?)")
TAG = re.compile(r"<!-- (cell|paper): ([^>]+?) -->")


def cells(name): return json.loads((ROOT / f"nbs/{name}.ipynb").read_text(encoding="utf-8"))["cells"]
def prose(cells): return [source(x) for x in cells if x["cell_type"] == "markdown"]


def visible(cell):
    "Lines of code that a reader sees: without directives, blank lines and what is folded."
    lines = [x for x in source(cell).splitlines() if x.strip()]
    options = [x for x in lines if x.startswith("#|")]
    if any(re.match(r"#\| (code-fold: true|hide\b|echo: false|include: false)", x) for x in options): return 0
    return len(lines) - len(options)


def outputs(cell):
    "What a cell has printed or shown, as text."
    shown = [x.get("text") or x.get("data", {}).get("text/plain", "") for x in cell.get("outputs", ())]
    return "\n".join("".join(x) for x in shown)


def letters(text):
    "Letters of the formulas of a text, Greek ones by name; words, operators and environments are none."
    found = set()
    for formula in re.findall(r"\$\$(.*?)\$\$|\$([^$\n]+)\$", text, re.S):
        formula = re.sub(rf"\\(?:{NAMED})\*?\{{[^}}]*\}}", " ", "".join(formula))
        found |= {x for x in re.findall(r"\\([a-zA-Z]+)", formula) if x.removeprefix("var") in GREEK}
        found |= set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", " ", formula)))
    return {x.removeprefix("var") for x in found}


NAMED = "text|mathrm|operatorname|mathbf|texttt|begin|end|label|tag"
GREEK = {"alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "kappa", "lambda", "mu", "nu", "xi", "pi", "rho",
         "sigma", "tau", "phi", "chi", "psi", "omega", "Delta", "Gamma", "Lambda", "Sigma", "Phi", "Psi", "Omega"}


def untagged(cells):
    "Measured numbers that no tag of their paragraph traces to a cell that shows them, or to a paper."
    labelled = {m[1]: outputs(cell) for cell in cells for m in re.finditer(r"^#\| label: (\S+)", source(cell), re.M)}
    lost = []
    for paragraph in (x for text in prose(cells) for x in re.split(r"\n\s*\n|\n(?=\d+\. |- )", text)):
        tags = TAG.findall(paragraph)
        known = " ".join(labelled.get(name, "") for kind, name in tags if kind == "cell")
        known = re.sub(r"(?<=\d),(?=\d{3})", "", known)
        lost += [f"no cell has the label {name}" for kind, name in tags if kind == "cell" and name not in labelled]
        if any(kind == "paper" for kind, _ in tags) or re.match(r"\d+\. ", paragraph): continue  # quoted, an exercise
        for found in MEASURED.finditer(plain(paragraph)):
            number = (found[1] or found[2]).replace(",", "")
            if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", known):
                lost.append(f"{number} in: {paragraph[:70]}")
    return lost


def size(cells):
    "Words of a chapter, and lines of its code that a reader sees."
    return (sum(len(plain(x).split()) for x in prose(cells)),
            sum(visible(x) for x in cells if x["cell_type"] == "code"))


def before_figure(cells):
    "Words before the first figure; a cell whose code is seen counts for a hundred."
    before = 0
    for cell in cells:
        if cell["cell_type"] == "markdown": before += len(plain(source(cell)).split())
        elif any("image/png" in x.get("data", {}) for x in cell["outputs"]): return before
        elif visible(cell): before += 100
    return math.inf


def named(cells, name, readme):
    "Are the title, the name of the file and the words of README's link to it the same?"
    title = source(cells[0]).splitlines()[0].removeprefix("# ")
    return (re.sub(r"\W+", "_", title.lower()) == name.partition("_")[2] and f"[{title}](nbs/{name}.ipynb)" in readme)


def long_cells(cells):
    return [source(x)[:60] for x in cells if x["cell_type"] == "code" and visible(x) > 20]


README = (ROOT / "README.md").read_text(encoding="utf-8")
chapters = pytest.mark.parametrize("name", WRITTEN)


@chapters
def test_length(name):
    words, lines = size(cells(name))
    assert words <= WORDS and lines <= LINES, (words, lines)


@chapters
def test_a_figure_stands_on_the_first_screen(name): assert before_figure(cells(name)) < 120


@chapters
def test_measured_numbers_come_from_a_cell(name):
    lost = untagged(cells(name))
    assert not lost, "\n".join(lost)


@chapters
def test_letters_mean_one_thing(name):
    text = "\n".join(prose(cells(name)))
    own = letters("\n".join(re.findall(r"^Letters of this chapter:.*", text, re.M)))
    assert letters(text) <= own | {str(x) for x in LETTERS}, letters(text) - own - {str(x) for x in LETTERS}


@chapters
def test_file_and_title_are_one_name(name): assert named(cells(name), name, README)


@chapters
def test_a_cell_is_one_idea(name): assert not long_cells(cells(name))


def test_a_wrong_chapter_is_seen():
    "The rules above, each tried on a text that breaks it."
    code = lambda text, said="": dict(cell_type="code", source=text, outputs=[dict(text=said)])
    text = lambda x: dict(cell_type="markdown", source=x)
    assert untagged([text("It reads 12 % of the keys.")]) and untagged([text("A speedup of 3.4.")])
    shown = code("#| label: read\nprint(1)", "0.12 or 12 %")
    assert not untagged([shown, text("It reads 12 % of the keys <!-- cell: read -->.")])
    assert untagged([shown, text("It reads 13 % of the keys <!-- cell: read -->.")])
    assert untagged([shown, text("It reads 2 % of the keys <!-- cell: read -->.")])
    assert untagged([text("It reads 12 % <!-- cell: nowhere -->.")])
    assert not untagged([text("They report 12 % <!-- paper: Table 2 -->.")])
    assert letters(r"$\frac{q}{\sqrt D}$ and $$\text{out} = \tau_x$$") == {"q", "D", "tau", "x"}
    assert visible(code("#| code-fold: true\nx = 1")) == 0 and visible(code("#| label: a\nx = 1\n\ny")) == 2
    assert plain("a `row` $row$ b <!-- cell: row -->").split() == ["a", "b"]
    picture = code("#| code-fold: true\nplot()") | dict(outputs=[dict(data={"image/png": "x"})])
    assert size([text("# One\n\ntwo `x` three"), code("x = 1\ny = 2"), picture]) == (4, 2)
    assert before_figure([text("one two"), picture]) == 2 and before_figure([code("x = 1"), picture]) == 100
    assert before_figure([text("one two")]) == math.inf
    assert named([text("# A b\n\nc")], "03_a_b", "[A b](nbs/03_a_b.ipynb)")
    assert not named([text("# A b")], "03_a_b", "[B](nbs/03_a_b.ipynb)")
    assert not named([text("# A c")], "03_a_b", "[A c](nbs/03_a_b.ipynb)")
    assert long_cells([code("x = 1\n" * 21)]) and not long_cells([code("x = 1\n" * 20)])
