"""The one table: it is what the records say, its rows are the registry's, and README's default follows by its rule."""
import json
from collections import Counter
from statistics import mean

import pytest

from benchmarks import table
from benchmarks.configurations import DECODE, MODELS, PROMPT
from benchmarks.recorder import Recorder, read_record, results
from sparse_nb.core.registry import METHODS

FOUND = read_record(results() / "table.json")
ROWS = {row["name"]: row for row in FOUND["rows"]}
CELLS = [(name, column, row[column]) for name, row in ROWS.items() for column in FOUND["meta"]["columns"]
         if row[column]]


def test_it_is_what_the_records_give(tmp_path):
    recorder = Recorder("table", tmp_path / "table.json")
    table.table(recorder)
    made, stored = (path.read_text(encoding="utf-8") for path in (recorder.out, results() / "table.json"))
    assert made == stored, "run `make readme`"


def test_every_method_of_the_registry_has_one_row():
    assert Counter(row["method"] for row in ROWS.values() if not row["second"]) == Counter([*METHODS])
    assert DECODE.keys() & METHODS.keys() | PROMPT.keys() == METHODS.keys()
    assert all(row.keys() >= FOUND["meta"]["columns"].keys() for row in ROWS.values())
    assert {name for name, row in ROWS.items() if row["oracle"]} == {"topk", "topp", "oracle_blocks"}
    assert {name for name, row in ROWS.items() if row["evicts"]} == {"h2o", "snapkv"}


def test_every_number_names_its_record():
    for name, column, cell in CELLS:
        if column.startswith("index_"): continue  # of the method itself
        assert (results() / f"{cell['record']}.json").is_file() and cell["date"], (name, column)


def test_speed_and_answers_are_of_one_setting_unless_the_cell_says_so():
    seen = set()
    for name, column, cell in CELLS:
        line = DECODE.get(name)
        if not column.startswith("lost_") or "settings" in cell: continue
        model = column.removeprefix("lost_")
        used = {json.dumps(x.settings) for x in table.every() if (x.model, x.role) == (model, "decode")
                and table.has(line.settings, x.settings) and (own := table.lost(x)) and own.items() <= cell.items()}
        timed = table.timed(line, 131072, 1)
        if timed is None: continue
        timed = table.meant(json.loads(timed["method"]), "decode")
        for settings in map(json.loads, used):
            seen.add((name, model))
            assert all(settings[x] == timed[x] for x in settings.keys() & timed.keys() - {"refine", "tail"}), name
    assert seen >= {(name, "qwen") for name in ("santa", "sketch_walk", "quest", "adamas", "double_sparsity", "snapkv")}
    assert "settings" not in ROWS["magicpig"]["lost_qwen"] and ROWS["magicpig_6"]["model_131k"] is None
    assert "settings" not in ROWS["saap"]["lost_qwen"] and "settings" not in ROWS["saap"]["lost_pocket"]
    assert "settings" in ROWS["vattention"]["lost_qwen"] and "settings" in ROWS["sketch_walk"]["prompt_131k"]
    assert "settings" not in ROWS["sketch_walk"]["read_qwen"]


def test_answers_lost_are_counted_prompt_by_prompt():
    rows = [row for row in read_record(results() / "nvidia_h200_real_model.json")["rows"] if row["part"] == "answers"]
    right = {name: {(row["task"], row["seeds"][0] + i): x for row in rows if row["method"] == name
                    for i, x in enumerate(row["right"])} for name in ("exact", "adamas", "saap")}
    right["saap_10"] = right.pop("saap")
    able = [task for task in {task for task, _ in right["exact"]}
            if mean(x for (own, _), x in right["exact"].items() if own == task) >= 0.5]
    asked = [at for at in right["exact"] if at[0] in able]
    for name in "adamas", "saap_10":
        cell = ROWS[name]["lost_qwen"]
        gap = 100 * mean(right["exact"][at] - right[name][at] for at in asked)
        assert cell["value"] == pytest.approx(gap, abs=1e-3)
        assert (cell["prompts"], cell["tasks"]) == (len(asked), sorted(able))
        assert (cell["exact"], cell["right"]) == tuple(sum(right[x][at] for at in asked) for x in ("exact", name))


def test_times_are_those_of_the_records():
    rows = [row for row in read_record(results() / "nvidia_h200_choose.json")["rows"] if row["n"] == 131072]
    [step] = [row["median_us"] for row in rows if row["method"] == "Quest" and row["launch"] == "attend"]
    dense = min(row["median_us"] for row in rows if row["method"].startswith("sdpa"))
    assert ROWS["quest"]["kernel_131k"]["value"] == pytest.approx(dense / step, rel=1e-4)
    record = read_record(results() / "nvidia_h200_decode.json")["rows"]
    own = next(row for row in record if (row["method"], row["n"], row["mode"], row["H"], row["B"]) == (
        "santa_systematic", 131072, "graph", 32, 1))
    assert ROWS["santa"]["kernel_131k"]["value"] == pytest.approx(own["ratio_to_fastest_dense"], rel=1e-3)
    assert ROWS["exact"]["model_131k"]["value"] == 1
    assert ROWS["quest"]["index_bytes"]["value"] == 4 * 128 / 16 and ROWS["santa_int8"]["index_bytes"]["value"] == 132


# How a cell is chosen

def asked(name, prompts, settings, wrong=0, role="decode"):
    rows = [dict(model="m", task="t", length=64, method=method, seeds=[0, prompts], right=right) for method, right in (
        ("exact", [1] * prompts), (name, [0] * wrong + [1] * (prompts - wrong)))]
    return table.Asked("m", role, settings, name, f"of {prompts}", "today", rows, [])


@pytest.fixture
def records(monkeypatch):
    "Puts invented records in the place of all."
    return lambda *found: monkeypatch.setattr(table, "every", lambda: [*found])


def test_of_two_records_the_one_with_more_prompts_stands_and_its_own_settings_before_others(records):
    own, other = dict(method="Quest", budget=0.1, page=16), dict(method="Quest", budget=0.2, page=16)
    line = DECODE["quest"]._replace(asked=(dict(method="Quest", budget=0.2),))
    records(asked("a", 10, own), asked("b", 40, own, 4), asked("c", 400, other), asked("d", 99, own, role="prompt"))
    cell = table.answers(line, "decode", "m")
    assert cell["record"] == "of 40" and cell["value"] == pytest.approx(10) and "settings" not in cell
    assert [x["record"] for x in cell["also"]] == ["of 10"]
    records(asked("c", 400, other))
    assert table.answers(line, "decode", "m")["settings"] == "Quest(budget=0.2)"
    records(asked("c", 400, other | dict(budget=0.3)))
    assert table.answers(line, "decode", "m") is None


def test_settings_that_change_with_the_length_are_no_one_setting(records):
    line = DECODE["vattention"]._replace(asked=())
    records(asked("a", 10, line.settings | dict(eps=0.15)))
    assert table.answers(line, "decode", "m") is None and table.answers(line._replace(at={}), "decode", "m")


def test_what_none_means_to_sketch_walk():
    old, new = dict(method="SketchWalk", pool="mean"), dict(method="SketchWalk", pool=None, refine=None)
    assert table.meant(old, "decode")["pool"] == table.meant(new, "decode")["pool"] == "mean"
    assert (table.meant(new, "prompt")["pool"], table.meant(new, "prompt")["refine"]) == ("max", 2)
    assert table.meant(old, "prompt")["refine"] == 1


def test_a_new_row_of_a_whole_model_is_taken_up_and_the_newest_of_two_stands(monkeypatch):
    row = lambda date, ratio, **more: dict(way="Quest, 10 %", n=32768, batch=8, static=True, tuned=True, date=date,
                                           ratio=ratio, median_us=1000.0 / ratio, density=0.1, exact_layers=8,
                                           rival="exact kernel",
                                           method=json.dumps(dict(method="Quest", budget=0.1, page=16))) | more
    rows = [row("2026-01-02", 1.5), row("2026-01-01", 1.2), row("2026-01-03", 9, gpus=2), row("2026-01-03", 8, n=64)]
    exact = row("2026-01-02", 1, way="exact kernel")
    made = dict(meta=table.record("generate")["meta"] | dict(replaced=[exact]), rows=rows)
    monkeypatch.setattr(table, "record", lambda name: made)
    monkeypatch.setattr(table, "whole_models", table.whole_models.__wrapped__)
    cell = table.whole_model(DECODE["quest"], 32768, 8)
    assert cell["value"] == 1.5 and cell["density"] == 0.325  # 8 of 32 layers read all
    assert "alone" not in cell
    exact["date"] = "2026-01-01"
    assert table.whole_model(DECODE["quest"], 32768, 8)["alone"]
    assert table.whole_model(DECODE["quest"], 32768, 1) is None


def test_a_first_token_is_of_the_evaluated_settings_where_they_were_timed(monkeypatch):
    at = {"cuDNN": 8.0, "FlashAttention-2": 9.0, "Sketch&Walk 10%": 4.0}
    monkeypatch.setattr(table, "rows_of", lambda name: [dict(way=way, n=64, median_us=x) for way, x in at.items()])
    cell = table.first_token(PROMPT["sketch_walk"], 64)
    assert cell["value"] == 2 and "density=0.1" in cell["settings"]
    at["Sketch&Walk 20%, refined"] = 5.0
    cell = table.first_token(PROMPT["sketch_walk"], 64)
    assert cell["value"] == 1.6 and "settings" not in cell and table.first_token(PROMPT["hip"], 64) is None
    at.pop("FlashAttention-2"), at.pop("cuDNN")
    assert table.first_token(PROMPT["sketch_walk"], 64) is None


# The rule of the default

def invented(name, speed, lost, high, prompts=400, **more):
    cell = lost if lost is None else dict(value=lost, low=lost - 1, high=high, prompts=prompts, also=[])
    return dict(name=name, oracle=False, evicts=False, lost_qwen=cell, model_131k=speed and dict(value=speed)) | more


GOOD = invented("good", 1.5, 1.0, 3.0)


def naive(rows):
    "A rule that looks right: the fastest of those whose interval includes what the best one loses."
    best = min(row["lost_qwen"]["value"] for row in rows)
    fit = [row for row in rows if row["lost_qwen"]["low"] <= best or row["lost_qwen"]["value"] <= best]
    return max(fit, key=lambda row: row["model_131k"]["value"])["name"]


def test_what_was_asked_little_does_not_win_by_it():
    guess = invented("guess", 9.0, 8.0, 26.0, prompts=10, lost_qwen=dict(value=8.0, low=-10.0, high=26.0, prompts=10))
    assert naive([GOOD, guess]) == "guess" and table.default([GOOD, guess]) == "good"
    assert "may lose 26.0 points, by 10 prompts" in table.refusals(guess)


def test_ten_prompts_without_a_loss_are_too_few(records):
    records(asked("a", 10, dict(method="Quest", budget=0.1, page=16)))
    cell = table.answers(DECODE["quest"], "decode", "m")
    assert cell["value"] == 0 and table.default([GOOD, invented("a", 9.0, 0, 0, lost_qwen=cell)]) == "good"


@pytest.mark.parametrize("other, why", [
    (invented("x", 9.0, 1.0, 3.0, oracle=True), "oracle"), (invented("x", 9.0, 1.0, 3.0, evicts=True), "evicts"),
    (invented("x", 9.0, 4.0, 5.0), "may lose 5.0 points"), (invented("x", None, 0.0, 1.0), "not timed"),
    (invented("x", 9.0, None, None), "not evaluated"),
    (invented("x", 9.0, 1.0, 3.0, model_131k=dict(value=9.0, alone=True)), "in another run"),
    (invented("x", 9.0, 0, 0, lost_qwen=dict(value=0.0, low=-1.0, high=1.0, prompts=999, settings="X(2)",
                                               also=[])),
     "with other settings"),
    (invented("x", 9.0, 0, 0, lost_qwen=dict(value=0.0, low=-1.0, high=1.0, prompts=999, also=[dict(low=5.5)])),
     "in another record")])
def test_what_may_not_be_the_default(other, why):
    [said] = table.refusals(other)
    assert why in said and table.default([other, GOOD]) == "good" and table.default([other]) is None


def test_a_method_with_other_settings_may_lose_too_much_as_well():
    lost = dict(value=70.0, low=60.0, high=80.0, prompts=99, settings="X(2)")
    assert table.refusals(invented("x", 9.0, 0, 0, lost_qwen=lost)) == [
        "evaluated on the largest model with other settings", "may lose 80.0 points, by 99 prompts"]


def test_the_fastest_of_those_that_may_wins_and_none_where_none_is_faster_than_exact_attention():
    better = invented("better", 1.4, -1.0, 0.5)  # loses less, but both lose few enough
    assert table.default([better, GOOD]) == "good"
    slow = invented("slow", 1.0, 0.0, 1.0)
    assert table.refusals(slow) == ["not faster than exact attention at 131k keys"] and table.default([slow]) is None


def test_the_stored_default_is_the_rules():
    name = FOUND["meta"]["default"]
    fit = {x: row["model_131k"]["value"] for x, row in ROWS.items() if not row["oracle"] and not row["evicts"]
           and row["model_131k"] and (row["model_131k"]["value"] or 0) > 1 and row[f"lost_{[*MODELS][-1]}"]
           and "settings" not in row[f"lost_{[*MODELS][-1]}"] and row[f"lost_{[*MODELS][-1]}"]["high"] < table.MARGIN
           and not any(x["low"] > table.MARGIN for x in row[f"lost_{[*MODELS][-1]}"]["also"])}
    assert name == (max(fit, key=fit.get) if fit else None)
