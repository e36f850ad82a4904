"""`python -m benchmarks.run answers`: what is asked, how what is lost is counted, and work that was stopped."""
import json
from pathlib import Path

import pytest
import torch

from benchmarks import answers, run, workers
from benchmarks.answers import (
    ROLES, SMALL, Cell, by_setup, cells, columns, evaluate, gains, methods_of, methods_with, names_of, share_of_pairs,
    tasks_of)
from benchmarks.configurations import DECODE, PROMPT
from benchmarks.recorder import Recorder, read_record, results, write_record
from benchmarks.table import has, meant
from sparse_nb import Streaming
from sparse_nb.delta import Delta
from sparse_nb.models.capturing import Captured
from sparse_nb.sketch_walk import SketchWalk
from tests.bench.test_benchmarks_run import one_line


def row(method, task, right, first=0, **more):
    return dict(role="decode", model="m", task=task, length=64, seeds=[first, first + len(right)], method=method,
                right=right, answers=[""] * len(right)) | more


ROWS = [row("exact", "able", [1, 1, 0, 1]), row("exact", "able", [1, 1], 4), row("exact", "unable", [0, 0, 1]),
        row("a", "able", [0, 1, 1, 1], density=0.1, bytes=0.2, error=0.3), row("a", "able", [1, 0], 4),
        row("a", "unable", [1, 1, 1], density=0.3, bytes=0.2, error=0.1), row("b", "able", [0, 0, 0, 0]),
        row("exact", "able", [0] * 6) | dict(model="other")]


def test_only_what_exact_attention_can_do_counts():
    found = gains(ROWS, "m")
    assert {*found.task} == {"able"} and len(found) == 10
    a = columns(ROWS, "m").loc["a"]
    assert (a.prompts, a.exact, a.right) == (6, 5, 4) and a.lost == pytest.approx(100 / 6)
    assert (a.density, a.bytes, a.error) == pytest.approx((0.2, 0.2, 0.2)) and a.low < a.lost < a.high
    assert columns(ROWS, "m").loc["b"].lost == pytest.approx(75)  # of the four prompts that it was asked


def test_a_task_of_two_choices_counts_half_way_from_guessing():
    rows = lambda *right: [row(method, "qasper", right) for method in ("exact", "a")]
    assert answers.gains(rows(1, 1, 0, 0), "m").empty  # as one who says yes to all
    assert len(answers.gains(rows(1, 1, 1, 0), "m")) == 4
    assert len(answers.gains(rows(1, 0, 0, 0), "m", least=0)) == 4
    assert answers.scores(rows(1, 1, 0, 0), "m").note.tolist() == ["not counted"]


def test_every_prompt_is_asked_once_of_each_role():
    every = cells(["qwen", "pocket"])
    for role in ROLES:
        for model in "qwen", "pocket":
            for task, length in tasks_of(model):
                seeds = [s for c in every if c[:4] == (role, model, task, length) for s in c.seeds]
                few = role in ("blocks", "context")
                assert sorted(seeds) == [*range(10 if few else answers.PROMPTS)], (role, model, task)
    names = [name for role in ROLES for name in names_of(role)]
    assert len({*names}) == len(names) and names[0] == "exact"  # `gains` knows methods by their names alone


def test_small_models_come_before_large_ones_and_decoding_first():
    every = cells(["qwen", *SMALL])
    roles = [cell.role for cell in every]
    first, last = roles.count("decode"), roles.count("context")
    assert {*roles[:first]} == {"decode"} and {*roles[-last:]} == {"context"}
    models = [cell.model in SMALL for cell in every[first:-last]]
    assert models == sorted(models, reverse=True) and True in models and False in models


def test_what_is_timed_is_evaluated_with_the_same_settings():
    of = lambda role: [(x, json.loads(x.to_json())) for x in methods_of(role).values()]
    said = {"decode": [meant(x, "decode") for role in ("decode", "listen") for _, x in of(role)],
            "prompt": [meant(x, "prompt") for role in answers.READ for _, x in of(role)]}
    not_evaluated = {"exact",                   # what the others are compared with
                     "hash_attention_learned"}  # there are learned maps for the pocket model alone, in another record
    lines = [("decode", name, line) for name, line in DECODE.items()] + [
        ("prompt", name, line) for name, line in PROMPT.items()]
    for role, name, line in lines:
        at = getattr(line, "at", {}).get(32768, {})  # the length nearest to that of the prompts
        assert any(has(line.settings | at, x) for x in said[role]) != (name in not_evaluated), name
        assert not at or line.asked[0] == line.settings | at, name  # the table finds them


def test_names_of_the_record_stand_for_the_settings_of_today(tmp_path):
    path = results() / "nvidia_h200_answers.json"
    record, known = read_record(path), methods_with(path)
    assert all({row["method"] for row in record["rows"] if row["role"] == role} <= {"exact", *names}
               for role, names in known.items())
    assert "vattention_adamas" in known["decode"] and "magicpig_6" in known["decode"]  # the latter of the record alone
    record["meta"]["methods"]["blocks"]["xattention"] = "XAttention(threshold=0.2, density=None, stride=16, block=128)"
    other = write_record(tmp_path / "x.json", record["meta"], [])
    with pytest.raises(ValueError, match="x.json must have xattention of role blocks as .*density=0.2.*threshold=0.2"):
        methods_with(other)


def test_what_decodes_the_question_too_stands_beside_the_same_prompts():
    rows = [*ROWS, row("a_context", "able", [0, 0], 1, role="context")]
    found = by_setup(rows, "m").set_index(["method", "setup"])
    assert {*found.index} == {("a", "context"), ("a", "prompt")} and {*found.prompts} == {2}
    assert found.lost["a", "context"] == pytest.approx(50) and found.lost["a", "prompt"] == pytest.approx(-50)


def test_the_question_is_decoded_in_the_role_context_alone(monkeypatch):
    setups = {}
    def accuracy(model, tokenizer, task, length, methods, *, seed, prompts, setup="A", **more):
        setups[tuple(methods)] = setup
        return answers.pd.DataFrame([dict(method=name, exact=True, characters=1.0, answer="", seed=seed)
                                     for name in methods for _ in range(prompts)])
    monkeypatch.setattr(answers, "accuracy", accuracy)
    for role, names in ("decode", ("exact", "quest")), ("context", ("quest_context",)):
        found = evaluate(Cell(role, "pocket", "kv", 640, range(2, 4), names))
        assert [x["method"] for x in found] == [*names] and {*map(answers.of_cell, found)} == {
            (role, "pocket", "kv", 640, 2, 4)}
    assert setups == {("exact", "quest"): "A", ("quest_context",): "context"}


def test_random_networks_are_those_of_the_model():
    found = answers.methods_in(Cell("decode", "pocket", "kv", 640, range(2), ("vattention", "hash_attention", "exact")))
    assert found["exact"] is None
    for maps in found["hash_attention"].maps, found["vattention"].predictor.maps:
        assert maps == answers.networks("pocket") and Path(maps).exists()


def test_the_share_of_pairs_of_a_prompt():
    q, k, v = (torch.randn(1, heads, 512, 16) for heads in (2, 1, 1))
    x = Captured(5, q, k, v, q, torch.arange(512), torch.zeros(512, dtype=torch.int64), 0.25)
    assert share_of_pairs(SketchWalk(density=1.0), x) == pytest.approx(1)
    bare, with_tail = (share_of_pairs(SketchWalk(density=0.2, tail=n), x) for n in (0, 256))
    assert bare < 0.5 and with_tail > 0.75  # half of the rows hold three quarters of the pairs
    assert share_of_pairs(SketchWalk(density=0.2), Captured(1, *(getattr(x, f) for f in (
        "q", "k", "v", "out", "positions", "first", "scale")))) == 1
    sinks, window = 4, 64
    rows = torch.arange(1, 513.0)
    near = rows.clamp(max=sinks + window).sum() / rows.sum()
    for method in Delta(window, sinks, 64, "none", tail=0), Streaming(sinks, window):
        assert share_of_pairs(method, x) == pytest.approx(float(near))


def _double(cell):  # a worker imports it
    if cell.task == "bad": raise ValueError("no")
    if cell.task == "large" and not Path(cell.model).exists():  # a file that the first try of two leaves
        if "once" in cell.model: Path(cell.model).touch()
        raise torch.OutOfMemoryError("too large")
    return [dict(role=cell.role, model=cell.model, task=cell.task, length=cell.length,
                 seeds=[cell.seeds[0], cell.seeds[-1] + 1], right=[2 * s for s in cell.seeds],
                 **dict(names=[*cell.names], method=cell.names[0]) if cell.names else {})]


def test_what_was_stopped_goes_on(tmp_path):
    said, every = [], [Cell("decode", "m", task, 64, range(a, a + 2)) for task in ("x", "y") for a in (0, 2)]
    recorder = lambda: Recorder("answers", tmp_path / "x.json", say=said.append)
    workers.filled_in(recorder(), _double, every[:3], answers.of_cell, {})
    assert len(said) == 3
    last = recorder()
    workers.filled_in(last, _double, every, answers.of_cell, {})
    assert len(said) == 4 and sorted(map(answers.of_cell, last.rows)) == sorted(
        (*c[:4], c.seeds[0], c.seeds[-1] + 1) for c in every)
    added = lambda cell: ["old", "new"]
    for row in last.rows: row["method"] = "old"
    last.write()
    workers.filled_in(recorder(), _double, every, answers.of_cell, {})  # any row of a cell does
    assert len(said) == 4
    more = recorder()
    workers.filled_in(more, _double, every[:1], answers.of_cell, {}, added)
    assert [row["names"] for row in more.rows[4:]] == [["new"]] and "('new',)" in said[4]
    assert not workers.lacking(recorder(), every[:1], answers.of_cell, lambda cell: ["new"])
    pieces = workers.lacking(recorder(), every[:1], answers.of_cell, lambda cell: ["a", "new", "b", "c"], 2)
    assert [cell.names for cell in pieces] == [("a", "b"), ("c",)]
    fresh = every[0]._replace(task="another")
    pieces = workers.lacking(recorder(), [fresh], answers.of_cell, lambda cell: ["a", "b", "c"], 2)
    assert [cell.names for cell in pieces] == [("a", "b"), ("c",)]
    assert workers.lacking(recorder(), [fresh], answers.of_cell, lambda cell: ["a", "b"], 2) == [fresh]
    with pytest.raises(ValueError, match="^no$"):
        workers.filled_in(recorder(), _double, [Cell("decode", "m", "bad", 64, range(2))], answers.of_cell, {})


@pytest.mark.slow
def test_several_processes_give_every_cell_once(monkeypatch):
    monkeypatch.setattr(workers, "PER_GPU", 2)
    every = [Cell("decode", "m", "x", 64, range(a, a + 2)) for a in range(4)]
    found = {cell: rows for cell, rows, _ in workers.evaluated(_double, every, 1)}  # of a GPU that they do not ask
    assert found == {cell: _double(cell) for cell in every}
    found, bad = [], Cell("decode", "m", "bad", 64, range(2))
    with pytest.raises(RuntimeError, match="bad.*ValueError: no"):
        for cell, *_ in workers.evaluated(_double, [bad, *every], 1): found.append(cell)
    assert {*found} == {*every} and len(found) == len(every)  # those that can be done are


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_leaves_its_cell_to_the_others(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(workers, "PER_GPU", 2)
    large = Cell("decode", str(tmp_path / "once"), "large", 64, range(2))
    every = [large, *(Cell("decode", "m", "x", 64, range(a, a + 2)) for a in range(4))]
    assert {cell for cell, *_ in workers.evaluated(_double, every, 1)} == {*every}
    assert "1 processes go on, after too large" in capsys.readouterr().err
    found, never = [], large._replace(model=str(tmp_path / "never"))
    with pytest.raises(RuntimeError, match="never.*too large"):
        for cell, *_ in workers.evaluated(_double, [never, *every], 1): found.append(cell)
    assert {*found} == {*every}  # by one process, which begins anew after each try


def test_hours_are_said_beforehand(monkeypatch):
    clock, each = [0.0], dict(decode=2.0, prompt=3.0, listen=5.0)
    monkeypatch.setattr(answers.time, "monotonic", lambda: clock[0])
    def evaluate(cell):
        assert cell.seeds == range(1)
        clock[0] += each[cell.role] * len(cell.names or names_of(cell.role))
    monkeypatch.setattr(answers, "evaluate", evaluate)
    every = [Cell(role, "m", "x", 64, range(a, a + n)) for role, n in (("decode", 10), ("listen", 4)) for a in (0, n)]
    every[1] = every[1]._replace(names=("santa", "quest"))
    many = len(names_of("decode"))
    assert answers.hours(every, 2) == pytest.approx((10 * 2 * (many + 2) + 8 * 5 * 3) / 2 / 3600)
    assert clock == [2.0 * many + 5.0 * 3]


def test_fractions_of_answers_are_kept_and_tasks_that_exact_attention_cannot_do_are_named():
    rows = [row("exact", "able", [0.75, 0.5]), row("exact", "unable", [0.25, 0.5]), row("quest", "able", [0.5, 0.5])]
    rows = [x | dict(model="pocket") for x in rows]
    assert (columns(rows, "pocket").loc["quest", ["exact", "right"]] == [1.25, 1.0]).all()
    text = answers.printed(rows, "pocket")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["able"] == ["able", "64", "2", "0.625"] and lines["unable"][3:] == ["0.375", "not", "counted"]
    assert lines["quest"][-2:] == ["16.0", "0.062"]  # two corners of 64 bfloat16 numbers, of a page of 16 keys
    none = answers.printed(rows[1:2], "pocket")
    assert "no task counts" in none and "unable" in none


class Small:
    "A recorder of a model, whose words are kept."
    def __init__(self, path, model="pocket", quick=True):
        self.said = []
        self.recorder = Recorder("answers", path, say=self.said.append, model=model, quick=quick)
        self.recorder.gpu = False


def test_the_quick_form_asks_the_model_that_is_given(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(answers, "check_prompts", lambda every: asked.extend(every))
    monkeypatch.setattr(answers, "filled_in", lambda *given: None)
    monkeypatch.setattr(answers, "printed", lambda rows, model: model)
    for model in "a_folder", "":
        asked.clear()
        answers.answers(Small(tmp_path / "x.json", model).recorder)
        assert {cell.model for cell in asked} == {model or "pocket"} and {cell.role for cell in asked} == {*ROLES}


def test_prompts_that_cannot_be_made_are_named_before_all_else(monkeypatch, tmp_path, capsys):
    def broken(name, *given, **more):
        if name == "kv": raise FileNotFoundError("kv is not here")
        if name == "needle": raise ValueError("length must be more")
        return made(name, *given, **more)
    made = answers.make
    monkeypatch.setattr(answers, "make", broken)
    monkeypatch.setattr(answers, "filled_in", lambda *given: pytest.fail("worked before"))
    monkeypatch.setitem(SMALL, "pocket", (("kv", 640), ("needle", 640), ("multikey", 640)))
    monkeypatch.setattr(answers, "hours", lambda *given: pytest.fail("worked before"))
    args = ["answers", "--model", "pocket", "--out", str(tmp_path / "x.json")]
    one_line(capsys, run.main, args, "no prompt of pocket, kv at 640 tokens: kv is not here; pocket, needle at 640")
    assert not [*tmp_path.iterdir()]
    config = answers.loaded("pocket")[0].config
    monkeypatch.setattr(config, "max_position_embeddings", 100)
    with pytest.raises(ValueError, match="at most the 100 tokens that the model holds, got 6"):
        answers.check_prompts([Cell("decode", "pocket", "multikey", 640, range(2))])


def test_what_failed_is_said_after_the_table_and_hours_are_of_what_is_lacking(monkeypatch, tmp_path):
    def give_up(*given): raise workers.GivenUp("cell x")
    monkeypatch.setattr(answers, "filled_in", give_up)
    monkeypatch.setitem(SMALL, "pocket", (("kv", 640),))
    monkeypatch.setattr(answers, "hours", lambda every, processes: float(len(every)))
    path, every = tmp_path / "x.json", cells(["pocket"])
    done = [row("x", "kv", [1] * len(cell.seeds), cell.seeds[0], role=cell.role, model="pocket") | dict(
        length=640, method=name) for cell in every[3:] for name in names_of(cell.role)]
    write_record(path, {}, done + [row("exact", "kv", [1] * 10, model="pocket") | dict(length=640)])
    small = Small(path, quick=False)
    with pytest.raises(ValueError, match="^not evaluated: cell x$"): answers.answers(small.recorder)
    left, _, took, shown, _ = small.said
    pieces = 3 * -(-len(names_of("decode")) // answers.TOGETHER)  # one cell has exact attention's row alone
    assert left.startswith(f"{pieces} parts are left") and str(path) in left and took == f"about {pieces}.0 hours"
    assert "mean score of exact attention" in shown
    write_record(path, {}, [*done, *(row(name, "kv", [1] * 10, cell.seeds[0], model="pocket") | dict(length=640)
                                     for cell in every[:3] for name in names_of("decode"))])
    monkeypatch.setattr(answers, "hours", lambda *given: pytest.fail("nothing is lacking"))
    monkeypatch.setattr(answers, "filled_in", lambda *given: None)
    assert answers.answers(Small(path, quick=False).recorder)["methods"]["context"].keys() == {
        *methods_of("context")}


def test_a_model_goes_with_answers_alone(capsys, tmp_path, monkeypatch):
    one_line(capsys, run.main, ["exact", "--quick", "--model", "pocket"], "--model goes with answers alone, got exact")
    monkeypatch.setattr(run, "run_record", lambda name, out, **given: (_ for _ in ()).throw(ValueError(given["model"])))
    one_line(capsys, run.main, ["answers", "--model", "/a/folder"], "/a/folder")
