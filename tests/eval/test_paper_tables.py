"""The papers' tables of answers: every prompt once, rows that say what is right, tables that pair prompts"""
from collections import Counter

import pytest

from experiments import paper_tables as tables
from experiments.paper_tables import Cell


def test_cells_hold_each_prompt_once():
    found = Counter((x.part, x.task, x.length, seed) for x in tables.cells() for seed in x.seeds)
    assert {*found.values()} == {1}
    count, qa = Counter(key[:2] for key in found), Counter(key[1:3] for key in found if key[0] == "qa")
    assert qa == {(task, n): 20 for task in ("ruler_qa_1", "qasper") for n in (4096, 8192, 16384, 32768)} | {
        ("qasper", 4096): 10}
    assert all(count[part, task] == 30 for part, tasks in tables.TASKS.items() for task in tasks)
    assert count["long_ppl", "text"] == tables.WINDOWS
    assert {key[0] for key in found} == {"reads", *tables.methods()}


def test_prompts_and_steps_are_of_the_method_that_is_named():
    rows = tables.evaluate(Cell("sketch_walk", "pocket", "kv", 640, range(2)))
    assert {row["method"] for row in rows} == {"exact", *tables.methods()["sketch_walk"]}
    answers = {row["method"]: row["answers"] for row in rows}
    assert rows[0]["method"] == "exact" and rows[0]["right"] == [1, 1] and len({*map(tuple, answers.values())}) > 1


def test_questions_are_read_or_decoded_by_the_method_that_is_named(monkeypatch):
    given = []
    asked = lambda cell, methods, prefill=None: given.append((methods, prefill)) or []
    monkeypatch.setattr(tables, "_asked", asked)
    assert tables.evaluate(Cell("qa", "pocket", "kv", 640, range(2))) == []
    own = tables.methods()["qa"]
    assert given[:2] == [({x: None}, own[x]) for x in ("delta", "sketch_walk_prompt")]
    assert given[2:] == [({"exact": None} | {x: own[x] for x in ("santa", "vattention_adamas", "saap", "sketch_walk")},
                          None)]


def test_reads_are_counted():
    rows = {row["method"]: row for row in tables._asked(
        Cell("reads", "pocket", "kv", 640, range(2)), {"topk": tables.TopK(0.1)}, watch=True)}
    assert rows["topk"]["density"] == pytest.approx(0.1, abs=0.005) and 0 < rows["topk"]["error"] < 1


def test_a_text_says_what_methods_cost_where_context_matters(monkeypatch):
    words = [f"word{i % 97}" for i in range(4000)]
    monkeypatch.setattr(tables, "long_texts", lambda: iter([("package", "a", " ".join(words)), ("speeches", "b", "x"),
                                                          ("package", "c", " ".join(words[::-1]))]))
    tables.pieces.cache_clear()
    rows = tables.evaluate(Cell("long_ppl", "pocket", "text", 1024, range(2)))
    tables.pieces.cache_clear()
    assert [row["name"] for row in rows[::len(rows) // 2]] == ["a", "c"]  # what is too short is left out
    assert {row["method"] for row in rows} == {"exact", *tables.corrected()}
    assert all(row["tokens"] == 255 and row["bits"] > 0 and 0 <= row["long_tokens"] <= 255 for row in rows)


def test_groups_of_a_part_are_joined_where_all_have_a_prompt():
    rows = [dict(part=part, model="m", task="a", length=64, seeds=seeds, method=part, right=[1])
            for part, seeds in ((tables.GROUPS[0], [0, 5]), (tables.GROUPS[1], [0, 5]), (tables.GROUPS[2], [0, 5]),
                                (tables.GROUPS[1], [5, 10]), ("saap", [5, 10]))]
    found = [(row["part"], row["seeds"]) for row in tables.joined(rows)]
    assert found == 3 * [("density", [0, 5])] + [("saap", [5, 10])]


def test_the_table_pairs_prompts_and_leaves_out_what_exact_attention_cannot():
    row = dict(model="qwen", length=64)
    rows = [row | dict(part="saap", task=task, seeds=[0, 4], method=method, right=right) for task, method, right in (
        ("a", "exact", [1, 1, 1, 0]), ("a", "budget-0.1", [1, 0, 1, 1]), ("b", "exact", [0, 0, 1, 0]),
        ("b", "budget-0.1", [0, 0, 0, 0]))]
    read = row | dict(part="reads", seeds=[0, 2], method="budget-0.1", right=[1, 1])
    rows += [read | dict(task="a", density=0.2, error=0.3), read | dict(task="b", density=0.4, error=0.1)]
    found = tables.table_of(rows, "saap").loc["budget-0.1"]
    assert (found.prompts, found.exact, found.right, found.lost) == (4, 3, 3, 0)
    longer = [dict(x, length=128, right=[1, 0, 0, 0]) for x in rows if x["task"] == "a" and x["part"] == "saap"]
    assert tables.table_of(rows + longer, "saap").loc["budget-0.1", "prompts"] == 4  # the length is another prompt
    assert found.low < 0 < found.high and (found.density, found.error) == (pytest.approx(0.3), pytest.approx(0.2))
