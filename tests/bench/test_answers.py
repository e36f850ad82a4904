"""`python -m benchmarks.run answers`: what is asked, how what is lost is counted, and work that was stopped."""
from pathlib import Path

import pytest
import torch

from benchmarks import answers, run, workers
from benchmarks.answers import ROLES, Cell, cells, columns, gains, methods_of, share_of_pairs, tasks_of
from benchmarks.recorder import Recorder
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


def test_every_prompt_is_asked_once_of_each_role():
    every = cells(["qwen", "pocket"])
    for role in ROLES:
        for model in "qwen", "pocket":
            for task, length in tasks_of(model):
                seeds = [s for c in every if c[:4] == (role, model, task, length) for s in c.seeds]
                assert sorted(seeds) == [*range(10 if role == "blocks" else answers.PROMPTS)], (role, model, task)
    assert not {*methods_of("decode")} & {*methods_of("prompt")} and "exact" not in methods_of("decode")


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
    assert share_of_pairs(Delta(window, sinks, 64, "none", tail=0), x) == pytest.approx(float(near))


def _double(cell):  # a worker imports it
    if cell.task == "bad": raise ValueError("no")
    if cell.task == "large" and not Path(cell.model).exists():  # a file that the first try of two leaves
        if "once" in cell.model: Path(cell.model).touch()
        raise torch.OutOfMemoryError("too large")
    return [dict(role=cell.role, model=cell.model, task=cell.task, length=cell.length,
                 seeds=[cell.seeds[0], cell.seeds[-1] + 1], right=[2 * s for s in cell.seeds])]


def test_what_was_stopped_goes_on(tmp_path):
    said, every = [], [Cell("decode", "m", task, 64, range(a, a + 2)) for task in ("x", "y") for a in (0, 2)]
    recorder = lambda: Recorder("answers", tmp_path / "x.json", say=said.append)
    workers.filled_in(recorder(), _double, every[:3], answers.of_cell, {})
    assert len(said) == 3
    last = recorder()
    workers.filled_in(last, _double, every, answers.of_cell, {})
    assert len(said) == 4 and sorted(map(answers.of_cell, last.rows)) == sorted(
        (*c[:4], c.seeds[0], c.seeds[-1] + 1) for c in every)
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
        clock[0] += each[cell.role]
    monkeypatch.setattr(answers, "evaluate", evaluate)
    every = [Cell(role, "m", "x", 64, range(a, a + n)) for role, n in (("decode", 10), ("listen", 4)) for a in (0, n)]
    assert answers.hours(every, 2) == pytest.approx((20 * 2 + 8 * 5) / 2 / 3600) and clock == [7.0]


def test_a_model_goes_with_answers_alone(capsys, tmp_path, monkeypatch):
    one_line(capsys, run.main, ["exact", "--quick", "--model", "pocket"], "--model goes with answers alone, got exact")
    monkeypatch.setattr(run, "run_record", lambda name, out, **given: (_ for _ in ()).throw(ValueError(given["model"])))
    one_line(capsys, run.main, ["answers", "--model", "/a/folder"], "/a/folder")
