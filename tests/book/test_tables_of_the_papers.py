"""The page of the papers' tables: the numbers that were read out of the papers, what is made of a record beside them,
and that its cells show whatever a record holds."""
import ast
import copy
import math
from pathlib import Path

import pandas as pd
import pytest
import yaml
from execnb.nbio import read_nb
from IPython.display import Markdown

from benchmarks import recorder
from experiments import beside, paper_tables, santa_budgets
from sparse_nb.metrics import Interval, paired_interval

ROOT = Path(__file__).parents[2]
PAGE = read_nb(ROOT / "nbs/appendix/tables_of_the_papers.ipynb")
KEYS = {"number", "also", "text", "model", "task", "unit", "columns", "exact", "rows"}
NOT_A_PAPER = "SkyLight"


@pytest.fixture(scope="module")
def papers(): return yaml.safe_load(beside.PRINTED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def gallery():
    found = yaml.safe_load((ROOT / "nbs/gallery.yml").read_text(encoding="utf-8"))
    return {paper: {x["number"] for x in entries} for paper, entries in found.items()}


def faults(papers, gallery):
    "What is wrong with the file of numbers, a line for each fault."
    for paper, tables in papers.items():
        numbers = [x["number"] for x in tables]
        if len({*numbers}) < len(numbers): yield f"{paper}: one is there twice"
        for table in tables:
            say = lambda what: f"{paper}, {table['number']}: {what}"
            if table.keys() - KEYS or KEYS - {"also", "text", "exact"} - table.keys(): yield say(f"keys {[*table]}")
            for number in {table["number"], table.get("also", table["number"])} if paper != NOT_A_PAPER else ():
                if number not in gallery[paper]: yield say(f"{number} is not in the gallery")
            first = [row[0] for row in table["rows"]]
            if len({*first}) < len(first): yield say("a setting twice")
            if any(len(row) != len(table["columns"]) for row in table["rows"]): yield say("a row too long or too short")
            cells = [x for row in table["rows"] for x in row[1:] if x is not None] + [table.get("exact", 0)]
            if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in cells): yield say("not a number")
            elif not all(0 <= x <= 100 for x in cells): yield say("out of range")


def test_the_numbers_are_well_formed_and_in_the_gallery(papers, gallery):
    found = [*faults(papers, gallery)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("change, said", [
    (lambda p: p["SANTA"].append(p["SANTA"][0]), "SANTA: one is there twice"),
    (lambda p: p["SANTA"][0].pop("unit"), "SANTA, Table 12: keys"),
    (lambda p: p["SANTA"][0].update(also="Table 24"), "SANTA, Table 12: Table 24 is not in the gallery"),
    (lambda p: p["SAAP"][0]["rows"][0].pop(), "SAAP, Table 2: a row too long or too short"),
    (lambda p: p["SAAP"][0]["rows"].append(p["SAAP"][0]["rows"][0]), "SAAP, Table 2: a setting twice"),
    (lambda p: p["SANTA"][0]["rows"][0].__setitem__(1, "1.2±0.3"), "SANTA, Table 12: not a number"),
    (lambda p: p["SANTA"][0].update(exact=7806), "SANTA, Table 12: out of range"),
])
def test_a_fault_is_seen(papers, gallery, change, said):
    wrong = copy.deepcopy(papers)
    change(wrong)
    assert any(said in line for line in faults(wrong, gallery)), [*faults(wrong, gallery)]


def test_averages_that_the_papers_print_are_those_of_the_numbers():
    "So a digit that was read wrongly, or a column that slipped, is seen; one average is printed 0.012 too low."
    hard, of = beside.printed("vAttention", "Table 4").mean(axis=1), beside.printed("vAttention", "Table 5")
    assert (hard - of["hard tasks"]).abs().max() < 0.006
    assert (of["hard tasks"] == beside.printed("vAttention", "Table 1")["Llama-3.1-8B-Instruct"]).all()
    for number in ("Table 2", "Table 4", "Table 5"):
        table = beside.printed("Sketch&Walk", number)
        assert (table.drop(columns="average").mean(axis=1) - table.average).abs().max() < 0.0125, number


def test_dense_attention_is_the_same_in_all_tables_of_sketch_and_walk():
    for numbers in (("Table 4", "Table 5", "Table 2"), ("Table 3", "Table 1", "Table 6")):
        exact = [x[[name.endswith("exact") for name in x.index]].iloc[0] for x in (
            beside.printed("Sketch&Walk", number) for number in numbers)]
        assert all((x == exact[0]).all() for x in exact), numbers


def test_a_table_is_read_with_what_is_said_of_it():
    table = beside.printed("SANTA", "Table 12")
    assert table.loc[64, "systematic"] == 76.42 and table.index.name == "size" and table.attrs["exact"] == 78.06
    assert beside.printed("SkyLight", "raw data").loc[2].isna().sum() == 2
    with pytest.raises(ValueError, match=r"number must be one of \['Table 12'.* of SANTA, got 'Table 9'"):
        beside.printed("SANTA", "Table 9")
    with pytest.raises(ValueError, match=r"of Quest"): beside.printed("Quest", "Table 1")


def line(method, right, part="own", task="kv", first=0, seconds=1.0):
    return dict(part=part, model="m", task=task, length=8, seeds=[first, first + len(right)], method=method,
                right=right, seconds=seconds)


ROWS = [line("exact", [1, 0, 1, 1]), line("a-1", [1, 0, 0, 0]), line("b-1", [1, 1, 1, 0]), line("a-2", [1, 1, 1, 1]),
        line("b-2", [0, 1, 1, 1]), line("exact", [1, 1], first=4), line("a-1", [0, 1], first=4),
        line("exact", [1, 1, 1, 0, 0, 0], part="other"), line("a-1", [0, 0, 0, 0, 0, 0], part="other"),
        line("exact", [0, 0, 1], task="hard"), line("a-1", [1, 1, 1], task="hard"),
        line("exact", [0.25, 0.75], part="none", task="there"), line("a-1", [0.5, 0.5], part="lent", task="there"),
        line("a-1", [1], part="alone", task="nowhere")]


def test_outcomes():
    table = beside.outcomes(ROWS, "own", "kv")
    assert table.exact.tolist() == [1, 0, 1, 1, 1, 1] and table["a-1"].tolist() == [1, 0, 0, 0, 0, 1]
    assert table["b-1"].isna().tolist() == [False] * 4 + [True] * 2
    assert [*beside.outcomes(ROWS, "own").index.unique("task")] == ["hard", "kv"]
    assert [*beside.outcomes(ROWS, "own", least=0.5).index.unique("task")] == ["kv"]
    lent = beside.outcomes(ROWS, "lent")  # exact attention of another part, of the same task alone
    assert lent.exact.tolist() == [0.25, 0.75] and lent["a-1"].tolist() == [0.5, 0.5]
    for rows, part in ((ROWS, "alone"), (ROWS, "no such"), ([], "own")):
        assert beside.outcomes(rows, part).empty and "exact" in beside.outcomes(rows, part)
    longer = [*ROWS, line("exact", [1], part="long") | dict(length=16)]
    assert beside.outcomes(longer, "own").equals(beside.outcomes(ROWS, "own"))


def test_gap_is_paired():
    table = beside.outcomes(ROWS, "own", "kv")
    low, value, high = paired_interval([0, 0, -1, -1, -1, 0])
    assert beside.gap(table, "a-1") == Interval(100 * low, 100 * value, 100 * high)
    assert beside.gap(table, "b-1", "a-1").value == 50  # of the four prompts that both have
    assert beside.gap(table, ["a-1", "a-2"], ["b-1", "b-2"]).value == pytest.approx(100 * (0.5 - 0.5 - 0.5 + 0) / 4)
    assert beside.gap(table, "c") is None and beside.gap(table, ["a-1", "c"], "exact") is None
    assert beside.gap(beside.outcomes([], "own"), "exact") is None


@pytest.mark.parametrize("theirs, ours, says", [
    (10, (2, 8, 14), "same"), (10, (0.5, 1.5, 2.5), "same"), (-10, (-14, -8, -2), "same"),
    (10, (-14, -8, -2), "opposite"), (10, (-2.9, 0, 2.9), "only there"), (10, (-3.1, 0, 2.9), "open"),
    (10, (-8, 8, 24), "open"), (1, (-2.9, 0, 2.9), "same"), (-2.9, (0.5, 1.5, 2.5), "same"),
    (1, (3, 6, 9), "only here"), (1, (-9, -6, -3), "only here"), (1, (1, 6, 9), "open"), (1, (-8, 0, 8), "open"),
    (3, (-2.9, 0, 2.9), "only there"), (10, None, "not measured")])
def test_verdict(theirs, ours, says):
    assert beside.verdict(theirs, ours and Interval(*ours)) == says
    small = ours and Interval(*(x / 100 for x in ours))
    assert beside.verdict(theirs / 100, small, beside.ALIKE / 100) == says


def test_trends_are_shown_and_summed_up():
    table = beside.trends({"x": (10.0, Interval(2, 8, 14)), "y": (10.0, Interval(-14, -8, -2)), "z": (1, None)})
    assert table.verdict.tolist() == ["same", "opposite", "not measured"] and table.low["x"] == 2
    assert math.isnan(table.ours["z"]) and table.paper.tolist() == [10, 10, 1]
    assert beside.summary(table) == "Of 3 differences: 1 as in the paper (x), 1 against the paper (y), 1 not measured."
    words = {"same", "opposite", "only there", "only here", "open", "not measured"}
    every = pd.DataFrame({"verdict": [*words]}, [*words])
    assert beside.summary(every).count("1 ") == len(words)


def test_seconds_of_a_cell_count_once():
    rows = [line("exact", [1, 1], seconds=5.0), line("a", [0, 1], seconds=5.0), line("a", [1], first=2, seconds=2.4)]
    found = beside.measured(rows)
    assert found.loc[("own", "kv")].to_dict() == dict(tokens=8, prompts=3, seeds="0 to 2", methods=1, seconds=7)
    assert beside.measured(rows, ("method",)).seconds.tolist() == [12] and beside.measured([]).empty


def window(method, number, bits, long, tokens=beside.LONG):
    return dict(method=method, window=number, document=f"d{number}", perplexity=2 ** bits, long_tokens=tokens,
                long_bits=long * tokens)


TEXTS = [window("exact", i, 2 + i, 3.0, tokens) for i, tokens in enumerate((beside.LONG, 300, beside.LONG - 1))] + [
    window("cut", i, 3 + i, 5.0 + i, tokens) for i, tokens in enumerate((beside.LONG, 300, beside.LONG - 1))] + [
    window("mended", i, 2.5 + i, 4.0 + i, tokens) for i, tokens in enumerate((beside.LONG, 300, beside.LONG - 1))]


def test_text_costs():
    found = beside.text_costs(TEXTS, "cut")
    assert found["LongPPL", "windows"].tolist() == [2] * 3 and found["PPL", "windows"].tolist() == [3] * 3
    assert found.loc["cut", ("PPL", "value")] == 16 and found.loc["exact", ("LongPPL", "value")] == 8
    back = (2 ** 5.5 - 2 ** 4.5) / (2 ** 5.5 - 2 ** 3)
    assert found.loc["mended", ("LongPPL", "given back")] == pytest.approx(back, abs=5e-4)
    assert found["PPL", "given back"].loc[["cut", "exact"]].tolist() == [0, 1] and beside.text_costs(ROWS).empty
    for without in ("", "no such", "exact"):  # where nothing is lost nothing is given back
        assert beside.text_costs(TEXTS, without)["PPL", "given back"].isna().all()
    low, value, high = beside.bits_above(TEXTS, "LongPPL", "cut")
    assert found.loc["cut", ("LongPPL", "bits above exact")] == f"{value:.3f} [{low:.3f}, {high:.3f}]"


def test_texts_by_genre():
    assert beside.texts_of(ROWS).empty
    genres = [x | dict(genre="speeches" if x["window"] else "package") for x in TEXTS]
    found = beside.texts_of(genres)
    assert found.loc["speeches"].tolist() == [2, 1, 1, (300 + beside.LONG - 1) / 2]
    assert found.loc["package"].tolist() == [1, 1, 0, beside.LONG]


def test_bits_above():
    low, value, high = beside.bits_above(TEXTS, "LongPPL", "cut")
    assert low < 2.5 < high and value == pytest.approx(2.5)
    back = beside.bits_above(TEXTS, "LongPPL", "exact", "cut")
    assert (back.low, back.value, back.high) == pytest.approx((-high, -value, -low))
    assert beside.bits_above(TEXTS, "PPL", "mended") is None  # all alike: no interval
    assert beside.bits_above(TEXTS, "PPL", "no such") is None and beside.bits_above([], "PPL", "cut") is None
    assert beside.bits_above(TEXTS[::3], "LongPPL", "cut") is None  # of one text
    together = [x | dict(document="one") for x in TEXTS]
    assert beside.bits_above(together, "LongPPL", "cut") is None


def test_which_prompts_were_given():
    for numbers, said in (({}, ""), ({3}, "3 to 3"), ({0, 1, 2, 5, 6, 9}, "0 to 2, 5 to 6, 9 to 9")):
        assert beside.spans({*numbers}) == said
    row = dict(part="a", task="t", length=8, method="exact", seconds=1.0)
    rows = [row | dict(seeds=seeds) for seeds in ([0, 5], [10, 15])]
    assert beside.measured(rows).iloc[0].to_dict() | dict(tokens=8) == dict(
        tokens=8, prompts=10, seeds="0 to 4, 10 to 14", methods=0, seconds=2)


def record(path, experiment, part_of, few):
    "A record of some cells of an experiment, whose answers are invented: exact attention right three times in four."
    rows = []
    for cell in experiment.cells():
        if cell.part.split()[0] not in part_of or cell.seeds[0] >= few: continue
        about = dict(seeds=[cell.seeds[0], cell.seeds[-1] + 1], seconds=1.0)
        if experiment is santa_budgets: names = [name for some, _ in santa_budgets.asked(cell) for name in some]
        elif cell.part == "reads": names = [x for some in (*experiment.densities().values(), experiment.budgets())
                                            for x in some]
        else: names = ["exact"] * (cell.part not in paper_tables.GROUPS[1:]) + [*experiment.methods()[cell.part]]
        for i, name in enumerate(names):
            row = cell._asdict() | about | dict(method=name)
            if cell.part == "long_ppl":
                rows += [row | dict(window=x, document=f"d{x}", genre="speeches", perplexity=8.0 + i + x % 3,
                                    long_tokens=400, long_bits=400.0 * (3 + i + x % 2)) for x in cell.seeds]
                continue
            counted = dict(density=0.02 * (i % 7 + 1), error=0.1) if cell.part == "reads" else {}
            if cell.part == "qa": counted = dict(tokens=[cell.length - 2 * seed for seed in cell.seeds])
            rows.append(row | counted | dict(right=[int((7 * seed + i * (seed % 3)) % 8 > 1) for seed in cell.seeds]))
    recorder.write_record(path, dict(gpu="invented"), rows)


def execute(monkeypatch, folder):
    "Run the page's cells on the records of a folder: outputs of its cells, and its names."
    monkeypatch.setattr(recorder, "results", lambda: folder)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    names, outputs = {}, []
    for cell in (x for x in PAGE.cells if x.cell_type == "code"):
        tree = ast.parse(cell.source)
        value = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "page", "exec"), names)
        if value is not None: outputs.append(eval(compile(ast.Expression(value.value), "page", "eval"), names))
    return outputs, names


EVERY = "all", "reads", *dict.fromkeys(x.split()[0] for x in paper_tables.methods())

@pytest.mark.budget(40)
@pytest.mark.parametrize("parts", [(), ("density", "long_ppl"), EVERY],
                         ids=["little", "some", "all"])
def test_the_page_shows_whatever_a_record_holds(monkeypatch, tmp_path, parts):
    record(tmp_path / "nvidia_h200_santa_budgets.json", santa_budgets, ("written", *parts), 220)
    if parts: record(tmp_path / "nvidia_h200_paper_tables.json", paper_tables, parts, 10)
    outputs, names = execute(monkeypatch, tmp_path)
    missing = [x for x in outputs if isinstance(x, Markdown) and x.data == "*Not measured.*"]
    verdicts = [names[x].verdict for x in ("of_santa", "of_vattention", "of_delta", "of_saap", "of_sketch_walk")]
    measured = [sum(x != "not measured") for x in verdicts]
    assert measured[0] and [x > 0 for x in measured[1:]] == [part in parts for part in (
        "density", "delta", "saap", "sketch_walk")]
    assert len(missing) == {0: 18, 2: 12}.get(len(parts), 0)
