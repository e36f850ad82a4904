"""Grids: the same rows here and on Ray, with workers that die; the command; prompts through a chat template"""
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import transformers

from sparse_nb import grid as room
from sparse_nb.attention import Exact, Streaming, TopK, Uniform
from sparse_nb.eviction import H2O, SnapKV
from sparse_nb.evaluate import accuracy, answers
from sparse_nb.grid import Grid, failures_of, frame_of, run, table
from sparse_nb.results import Job, read_results
from sparse_nb.pocket import byte_tokenizer
from benchmarks.recorder import read_record, run_record
from experiments.archive.santa_schedule import POCKET, learned_by_jobs, rewards_by_jobs
from sparse_nb.tasks import make, prompt_tokens
from commands import one_line, run as command
from models import methods_that, play_on_a_cpu, save_llama

TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return save_llama(tmp_path_factory.mktemp("tiny"))


def small(model, **more):
    return Grid(**dict(model=model, tasks=["needle", "kv"], lengths=[150, 200], decode={"topk": TopK(8)}, prompts=4,
                       batch=400) | more)


def rows_of(path): return sorted(str((x["job"], x["rows"])) for x in read_results(path)[1] if "rows" in x)


# on Ray

class Dying(room.Worker):
    """A worker whose process ends in the middle of the first job of the task kv, and in each try of another; a third it
    cannot do."""
    def work(self, job):
        deadly = (job.task, job.length, job.seeds[0]) == ("kv", 200, 2)
        if deadly or job.task == "kv" and not os.path.exists(os.environ["SPARSE_NB_TEST_MARK"]):
            with open(os.environ["SPARSE_NB_TEST_MARK"], "a") as mark: mark.write("deadly " * deadly)
            os._exit(1)
        if job.task == "needle" and job.length == 200 and 2 in job.seeds: raise MemoryError("no room")
        return super().work(job)


@pytest.mark.xdist_group("ray")  # one cluster at a time
@pytest.mark.budget(60)
def test_ray_gives_the_rows_of_this_process_although_a_worker_dies(tiny, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    here = small(tiny)
    assert run(here, tmp_path / "here.jsonl") == (8, 0)
    monkeypatch.setenv("SPARSE_NB_TEST_MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setattr(room, "Worker", Dying)
    monkeypatch.setattr(room, "TRIES", 2)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    seen = []
    done = run(here, tmp_path / "ray.jsonl", on="ray", workers=2, progress=lambda *x: seen.append(x))
    assert (tmp_path / "mark").read_text().count("deadly") == room.TRIES and done == (6, 2) and seen[-1] == (8, 8)
    ray_rows, here_rows = (lambda name=name: rows_of(tmp_path / name) for name in ("ray.jsonl", "here.jsonl"))
    (job, reason), (last, died) = failures_of(tmp_path / "ray.jsonl")
    assert (job["task"], job["length"], job["seeds"]) == ("needle", 200, [2, 3]) and "no room" in reason
    assert (last["task"], last["length"], last["seeds"]) == ("kv", 200, [2, 3]) and died.startswith("Actor")
    assert ray_rows() == [x for x in here_rows() if not x.startswith((f"({job}", f"({last}"))]
    # the next run, here, does what is left
    monkeypatch.undo()
    assert run(here, tmp_path / "ray.jsonl") == (2, 0)
    assert ray_rows() == here_rows() and not failures_of(tmp_path / "ray.jsonl")


class Telling(room.Worker):
    "A worker that says which process works at which length"
    def work(self, job):
        with open(os.environ["SPARSE_NB_TEST_MARK"], "a") as told: told.write(f"{job.length} {os.getpid()}\n")
        return super().work(job)


@pytest.mark.xdist_group("ray")  # one cluster at a time
@pytest.mark.slow
def test_a_crew_outlives_its_grids_and_a_process_of_its_own(tiny, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    model = shutil.copytree(tiny, tmp_path / "model")
    grids = {n: small(str(model), tasks=["needle"], lengths=[n]) for n in (150, 200, 250)}
    for n, grid in grids.items(): assert run(grid, tmp_path / f"here{n}.jsonl")[1] == 0
    monkeypatch.setenv("SPARSE_NB_TEST_MARK", str(tmp_path / "told"))
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setattr(room, "Worker", Telling)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def processes(n, name="ray"):
        "Those that a grid was worked on by, with the rows of one process."
        assert run(grids[n], tmp_path / f"{name}{n}.jsonl", on=hands)[1] == 0
        assert rows_of(tmp_path / f"{name}{n}.jsonl") == rows_of(tmp_path / f"here{n}.jsonl")
        told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
        return {int(process) for length, process in told if int(length) == n}

    with room.crew(workers=2) as hands:
        first = processes(150)
        model.rename(tmp_path / "away")  # what was loaded is not loaded again
        assert processes(200) == first and len(first) == 2 and os.getpid() not in first
        (tmp_path / "away").rename(model)
        os.kill(min(first), signal.SIGKILL)
        assert processes(250) & first == {max(first)} and len(processes(250)) == 2
        for wrong in dict(lengths=[10**6]), dict(model=str(tmp_path / "away")):
            with pytest.raises(ValueError, match="lengths must be at most|path must be a folder"):
                run(replace(grids[150], **wrong), tmp_path / "wrong.jsonl", on=hands)
        assert processes(150, "again") >= first - {min(first)} and not (tmp_path / "wrong.jsonl").exists()
    with pytest.raises(ValueError, match="on must be 'ray', an open crew or None, got <"):
        run(grids[150], tmp_path / "late.jsonl", on=hands)


@pytest.mark.parametrize("gpus, processors, workers, expected", [
    (1, 16, 4, (4, 1, 0.25)), (8, 64, None, (8, 1, 1)), (8, 64, 3, (3, 1, 1)), (2, 8, 3, (3, 1, 0.5)),
    (1, 8, 6, (6, 1, 0.1666)), (0, 2, None, (2, 1, 0)), (0, 2, 3, (3, 0.5, 0))])
def test_workers_share_what_there_is_too_little_of(monkeypatch, gpus, processors, workers, expected):
    asked, ended = [], []
    def remote(**options): return lambda kind: SimpleNamespace(remote=lambda worker: asked.append(options))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(
        init=lambda **options: None, shutdown=lambda: ended.append(True), remote=remote,
        cluster_resources=lambda: dict(GPU=float(gpus), CPU=float(processors))))
    with room.crew(workers=workers) as hands: assert len(hands.seats) == len(asked)
    assert (len(asked), asked[0]["num_cpus"], asked[0]["num_gpus"]) == expected and ended
    if gpus: assert -(-len(asked) // gpus) * asked[0]["num_gpus"] <= 1


def test_methods_in_jobs_of_their_own_have_the_same_rows(tiny, tmp_path):
    def rows(**more):
        grid = small(tiny, tasks=["needle"], decode={"topk": TopK(8), "drawn": Uniform(0.2)}, batch=800, **more)
        assert run(grid, path := tmp_path / f"{more}.jsonl")[1] == 0
        jobs = read_results(path)[1]
        return len(jobs), sorted((x["job"]["length"], *row.items()) for x in jobs for row in x["rows"])
    (whole, together), (parts, alone), (twos, by_two) = rows(), rows(together=1), rows(together=2)
    assert (whole, twos, parts) == (2, 4, 6) and together == alone == by_two and len(alone) == 2 * 3 * 4


def test_where_jobs_cannot_be_done(tiny, tmp_path, monkeypatch):
    grid, out = small(tiny), tmp_path / "out.jsonl"
    for on in 3, True, "slurm", run:
        with pytest.raises(ValueError, match="on must be 'ray', an open crew or None, got "): run(grid, out, on=on)
    for given in dict(workers=2), dict(address="auto"):
        with pytest.raises(ValueError, match="address and workers must be None unless on is 'ray'"):
            run(grid, out, **given)
    for workers, error in (0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError):
        with pytest.raises(error, match="workers must be"): run(grid, out, on="ray", workers=workers)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="the package ray is missing"): run(grid, out, on="ray")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_schedule_is_learned_on_ray_as_in_this_process(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    s = POCKET._replace(steps=2, each=4, length=512, mean=4)
    here, there = (learned_by_jobs(tmp_path / f"{on}", s, on, lambda line: None, workers=2) for on in (None, "ray"))
    assert here == there and {x["reward"] for x in here[1]} - {0.0, 1.0} and any(here[1][-1]["theta"])
    assert [len(read_results(tmp_path / "ray" / f"step{i}.jsonl")[1]) for i in range(2)] == [2, 2]


def test_rewards_wait_for_every_job(tiny, tmp_path, monkeypatch):
    given = dict(model=str(tiny), tasks=["needle"], lengths=[150], prompts=2, batch=150)
    want = rewards_by_jobs(tmp_path / "whole", **given)([[4, 4]], 0)
    ask, work = rewards_by_jobs(tmp_path / "cut", **given), room.Worker.work
    def breaks(self, job):
        if job.seeds == (1,): raise MemoryError("no room")
        return work(self, job)

    monkeypatch.setattr(room.Worker, "work", breaks)
    with pytest.raises(RuntimeError, match="step0.jsonl: MemoryError: no room"): ask([[4, 4]], 0)
    monkeypatch.undo()
    assert ask([[4, 4]], 0) == want


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.budget(300)
def test_smollm2_learns_by_jobs_in_the_quick_form(tmp_path):
    path = run_record("santa_schedule_smollm2_jobs", tmp_path / "x.json", quick=True, say=lambda line: None)
    meta, rows = read_record(path).values()
    assert (meta["model"], meta["on"], meta["workers"], sum(rows[-1]["samples"])) == ("smollm2", None, 11, 4 * 30)
    assert [x["part"] for x in rows] == ["training"] * 2 + ["forced"] * 4 + ["answers"] * 2 + ["schedules"]
    assert [len(read_results(x)[1]) for x in sorted(tmp_path.glob("x.steps/*"))] == [11, 11]


def test_a_model_that_was_not_fetched_learns_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_NB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="sparse-nb fetch smollm2"):
        run_record("santa_schedule_smollm2_jobs", tmp_path / "x.json", quick=True)
    assert not list(tmp_path.iterdir())


# the file

def test_a_run_cut_off_at_any_byte_of_a_line_goes_on(tiny, tmp_path):
    asked = small(tiny, tasks=["needle"], lengths=[150], prompts=2, batch=150)
    run(asked, whole := tmp_path / "whole.jsonl")
    data, cut = whole.read_bytes(), tmp_path / "cut.jsonl"
    ends = [i + 1 for i, b in enumerate(data) if b == ord("\n")]
    for stop in (0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[1] - 1, ends[1], len(data) - 1):
        cut.write_bytes(data[:stop])
        run(asked, cut)
        assert rows_of(cut) == rows_of(whole), stop


def test_more_methods_prompts_and_lengths_cost_only_themselves(tiny, tmp_path):
    out = tmp_path / "grown.jsonl"
    run(small(tiny, prompts=2), out)
    jobs = len(read_results(out)[1])
    more = small(tiny, prompts=3, decode={"topk": TopK(8), "window": Streaming(2, 9)})
    run(more, out)
    added = {(tuple(j.decode), tuple(j.seeds)) for j in (Job(**x["job"]) for x in read_results(out)[1][jobs:])}
    assert added == {(("window",), (0, 1)), (("exact", "topk", "window"), (2,))}
    frame = frame_of(out)
    assert len(frame) == 2 * 2 * 3 * 3 and not frame.duplicated([*room.CELL, "seed"]).any()


def test_a_file_of_other_weights_is_refused_and_left_alone(tiny, tmp_path):
    run(small(tiny, tasks=["kv"], lengths=[150], prompts=1), out := tmp_path / "out.jsonl")
    before = out.read_bytes()
    torch.manual_seed(3)
    other = save_llama(tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(ValueError, match="results with model = "): run(small(other), out)
    lines = before.splitlines(keepends=True)
    out.write_bytes(json.dumps(json.loads(lines[0]) | dict(weights="f00d")).encode() + b"\n" + b"".join(lines[1:]))
    with pytest.raises(ValueError, match="weights = .*, got 'f00d'"): run(small(tiny), out)


def test_a_file_of_other_versions_is_mixed_only_where_that_is_asked(tiny, tmp_path):
    one = small(tiny, tasks=["kv"], lengths=[150], prompts=1)
    run(one, out := tmp_path / "out.jsonl")
    header, *jobs = map(json.loads, out.read_text().splitlines())
    more = ["eval", "--model", tiny, "--tasks", "kv", "--lengths", 150, "--seeds", 2, "--decode", "TopK(budget=8)"]
    for name, version in dict(torch="1.0", transformers="1.0", sparse_nb="0.0", lacking=None).items():
        old = {x: y for x, y in header.items() if x != "torch"} if name == "lacking" else header | {name: version}
        out.write_text("".join(json.dumps(x) + "\n" for x in (old, *jobs)))
        before, name = out.read_bytes(), "torch" if name == "lacking" else name
        one_line(command(*more, "--out", out), f"--out must hold results with {name} = ", "unless --mix is given",
                 f"got {version!r} in ")
        assert out.read_bytes() == before
    assert command(*more, "--out", out, "--mix").returncode == 0
    (_, *mixed) = read_results(out)[1]
    assert mixed[-1]["versions"] == {"torch": torch.__version__} and len(frame_of(out)) == 2 * 2 + 1


@pytest.mark.slow
def test_one_run_at_a_time_writes_to_a_file(tiny, tmp_path, forked):
    run(one := small(tiny, tasks=["kv"], lengths=[150], prompts=1), out := tmp_path / "out.jsonl")
    before = out.read_bytes()
    with room.Results(out, room.Worker(one).header()):
        assert "one run at a time, got " in forked(refusal, one, out)
        one_line(command("eval", "--model", tiny, "--tasks", "kv", "--lengths", 150, "--seeds", 1, "--decode",
                         "TopK(budget=8)", "--out", out), "--out must be written by one run at a time")
    assert out.read_bytes() == before and [x.name for x in tmp_path.iterdir()] == ["out.jsonl"]
    assert run(one, out) == (0, 0)


def refusal(grid, out):
    with pytest.raises(ValueError) as refused: run(grid, out)
    return str(refused.value)


def test_rows_that_stand_twice_count_once(tiny, tmp_path):
    run(small(tiny, lengths=[150], prompts=2), out := tmp_path / "out.jsonl")
    once, lines = frame_of(out), out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines + lines[1:]))
    assert len(frame_of(out)) == len(once) and table(frame_of(out)).equals(table(once))


LINES = dict(number=3, list=[], text="job", empty={}, name={"job": 1}, lacking={"job": {"task": "kv"}, "rows": []},
             rows={"job": {}, "rows": [1]}, seedless={"rows": [{"decode": "exact"}]}, nothing={"rows": None},
             failed={"failed": 3}, header={"weights": "f00d"}, words=b"buy milk")

@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_that_is_no_job_is_named(tiny, tmp_path, line):
    job = dict(task="kv", length=150, prefill="exact", decode=["exact"], seeds=[0])
    good = dict(job=job, seconds=1.0, rows=[dict(decode="exact", seed=0, right=True, answer="1")])
    header = dict(weights="f00d", prefill={}, decode={})
    if isinstance(line, dict) and "job" not in line and {"rows", "failed"} & {*line}: line = dict(job=job) | line
    lines = [json.dumps(x).encode() for x in (header, good)] + [line if isinstance(line, bytes) else
                                                                json.dumps(line).encode()]
    (out := tmp_path / "out.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    for read in frame_of, failures_of, read_results:
        with pytest.raises(ValueError, match="out.jsonl must hold results of an .*, got .* in line 3"): read(out)
    one_line(command("eval", "--show", out), "in line 3")


def test_why_no_job_was_done_is_said(tiny, tmp_path, monkeypatch):
    def breaks(self, job): raise MemoryError("no room")
    monkeypatch.setattr(room.Worker, "work", breaks)
    said = command("eval", "--model", tiny, "--lengths", 150, "--seeds", 1, "--out", tmp_path / "out.jsonl")
    assert said.returncode == 2 and said.stdout == "" and "MemoryError: no room" in said.stderr.splitlines()[-1], said


def test_a_model_with_windows_is_refused_before_the_first_job(tmp_path):
    tokenizer = byte_tokenizer()
    config = transformers.MistralConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32,
                                        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                                        sliding_window=16, max_position_embeddings=4096)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = ["eval", "--model", tmp_path / "model", "--seeds", 1, "--out", tmp_path / "out.jsonl"]
    one_line(command(*asked, "--lengths", 150), "--model must keep every key in every layer, got a sliding window in "
             "mistral")
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "text").write_text("It rained all day. " * 30)
    said = command(*asked, "--tasks", "text", "--text", tmp_path / "text", "--lengths", 100)
    assert said.returncode == 0 and "text, 100 tokens" in said.stdout, said


def test_the_table_is_that_of_the_rows(tiny, tmp_path):
    run(small(tiny, prompts=6), out := tmp_path / "out.jsonl")
    frame, found = frame_of(out), table(frame_of(out))
    for (task, length), rows in frame.groupby(["task", "length"]):
        pair = rows.pivot(index="seed", columns="decode", values="right").astype(float)
        cell = found.loc[(task, length, "exact", "topk")]
        assert cell.gain == pytest.approx((pair.topk - pair.exact).mean())
        assert cell.gain_low <= cell.gain <= cell.gain_high
        text = rows.pivot(index="seed", columns="decode", values="answer")
        assert cell.same == (text.topk == text.exact).mean()
        assert cell.characters == rows[rows.decode == "topk"].characters.mean()
        assert 0.03 < cell.density < 0.08 and found.loc[(task, length, "exact", "exact")].error < 1e-5
    assert (table(frame.assign(characters=0.25)).characters == 0.25).all()


def test_answers_that_no_exact_row_stands_beside_are_not_the_same(tiny, tmp_path):
    run(small(tiny, tasks=["needle"], lengths=[150], prompts=1), out := tmp_path / "out.jsonl")
    lines = [json.loads(x) for x in out.read_text().splitlines()]
    lines[1]["rows"] = [row for row in lines[1]["rows"] if row["decode"] != "exact"]
    out.write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert not frame_of(out).same.any()


# chat templates

def test_a_chat_is_what_the_template_writes(tiny):
    model, tokenizer = room.load_named(tiny)
    tokenizer.chat_template = TEMPLATE
    example = make("multikey", 900, seed=2, tokenizer=tokenizer, chat=True)
    context, prompt = prompt_tokens(example, tokenizer, chat=True)
    text = tokenizer.decode(prompt)
    assert prompt[:len(context)] == context and text.startswith("<|user|>") and len(prompt) <= 900
    assert text.endswith(example.question.rpartition("? ")[2]) and text.count("<|assistant|>") == 1
    some = [make("multikey", 900, seed=s, tokenizer=tokenizer, chat=True) for s in range(3)]
    ask = lambda some: answers(model, tokenizer, some, {"topk": TopK(4)}, setup="B", chat=True)
    assert ask(some) == [row for e in some for row in ask([e])]


def test_a_chat_needs_a_template(tiny):
    model, tokenizer = room.load_named(tiny)
    with pytest.raises(ValueError, match="chat template"):
        accuracy(model, tokenizer, "needle", 300, {"exact": Exact()}, prompts=1, chat=True)


# the command

def test_the_command_runs_a_grid_shows_it_and_goes_on(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "out.jsonl"
    asked = ["eval", "--model", tiny, "--tasks", "needle,kv", "--lengths", "150", "--seeds", "3", "--decode",
             "TopK(budget=8)", "--decode", "Streaming(window=9)", "--prefill", "Streaming(window=20)", "--out", out]
    first = command(*asked)
    assert first.returncode == 0 and "needle, 150 tokens, 3 prompts" in first.stdout
    assert "4 jobs done, 0 failed" in first.stderr
    for name in "Streaming(window=20) | TopK(budget=8)", "Streaming(window=20) | exact", " TopK(budget=8) ":
        assert first.stdout.count(name) >= 2, (name, first.stdout)
    assert "0 jobs done" in command(*asked).stderr
    command("eval", "--show", out, "--out", tmp_path / "t.csv")
    assert len(pd.read_csv(tmp_path / "t.csv")) == 2 * 2 * 3
    assert command("eval", "--show", out, "--out", tmp_path / "t.png").returncode == 0
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_scores_a_text(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "text.txt").write_text("It rained on the harbour all day, and the boats stayed in. " * 30)
    shown = command("eval", "--model", tiny, "--tasks", "text", "--lengths", "200", "--seeds", "3", "--text",
                    tmp_path / "text.txt", "--decode", "TopK(budget=8)", "--long", "32", "--out", tmp_path / "o.jsonl")
    assert shown.returncode == 0 and "bits" in shown.stdout and "text, 200 tokens, 3 prompts" in shown.stdout, shown
    frame = frame_of(tmp_path / "o.jsonl")
    assert {"long_tokens", "long_bits"} <= {*frame} and (frame.groupby("seed").long_tokens.nunique() == 1).all()
    some = frame[frame.decode == "exact"]
    assert "long_perplexity" in shown.stdout and some.long_tokens.max() < some.tokens.min()


def test_eviction_answers_from_a_grid_and_from_the_command(tiny, tmp_path):
    asked = {"h2o": H2O(0.5), "snapkv": SnapKV(0.5, window=8)}
    for setup in "prompt", "context":
        file = tmp_path / f"{setup}.jsonl"
        assert run(Grid(tiny, ["needle"], [150], asked, prompts=2, setup=setup), file) == (1, 0)
        density = frame_of(file).groupby("decode").density.mean()
        assert density["exact"] == 1 and all(abs(density[name] - 0.5) < 0.15 for name in asked), (setup, density)
    said = command("eval", "--model", tiny, "--tasks", "needle", "--lengths", "150", "--seeds", "2", "--out",
                   tmp_path / "x.jsonl", "--decode", "H2O(budget=0.5, recent=0.4)", "--decode",
                   "SnapKV(budget=0.5, window=8)")
    assert said.returncode == 0 and all(x in said.stdout for x in ("H2O", "SnapKV")) and "0 failed" in said.stderr, said


KEPT = "Santa", "Quest", "H2O", "Saap", "SketchWalk", "Then"  # each with another kind of state


def test_the_command_asks_methods_of_every_kind_in_one_grid_as_on_a_gpu(tiny, tmp_path, monkeypatch):
    words = [repr(x) for name, x in methods_that("decode", 4, 16).items() if name in KEPT]
    assert len(words) == len(KEPT)
    play_on_a_cpu(monkeypatch)
    said = command("eval", "--model", tiny, "--lengths", 100, "--seeds", 1, "--setup", "context", "--out",
                   tmp_path / "x.jsonl", *[x for text in words for x in ("--decode", text)])
    assert said.returncode == 0 and "1 jobs done, 0 failed" in said.stderr, said
    assert {*frame_of(tmp_path / "x.jsonl").decode} == {"exact", *words}


def test_dense_layers_attend_exactly_in_every_arm(tiny, tmp_path):
    model = room.load_named(tiny)[0]
    layers, sparse = model.config.num_hidden_layers, dict(decode={"topk": TopK(4)}, prefill={"window": Streaming(2, 8)})
    whole = small(tiny, tasks=["needle"], lengths=[150], prompts=2, dense_layers=range(layers), **sparse)
    run(whole, tmp_path / "dense.jsonl")
    frame = frame_of(tmp_path / "dense.jsonl")
    assert frame.same.all() and frame.error.max() < 1e-5 and (frame.density == 1).all()
    last = replace(whole, dense_layers=[layers - 1])
    with pytest.raises(ValueError, match="dense_layers"): run(last, tmp_path / "dense.jsonl")
    run(last, tmp_path / "last.jsonl")
    frame = frame_of(tmp_path / "last.jsonl").groupby("decode").density.mean()
    run(replace(whole, dense_layers=()), tmp_path / "none.jsonl")
    lone = frame_of(tmp_path / "none.jsonl")
    share = 1 / layers
    expected = share + (1 - share) * lone.groupby("decode").density.mean()
    assert frame["topk"] == pytest.approx(expected["topk"], rel=1e-3)


def test_a_pooled_table_pairs_prompts_of_the_same_task_and_length(tiny, tmp_path):
    run(small(tiny, prompts=3), out := tmp_path / "out.jsonl")
    frame = frame_of(out)
    cells, pooled = table(frame), table(frame, pool=True)
    assert pooled.prompts.loc[("tasks", "exact", "topk")] == len(frame) / 2
    mean = cells.xs("topk", level="decode").gain.mean()
    assert pooled.gain.loc[("tasks", "exact", "topk")] == pytest.approx(mean)
    topk = frame[frame.decode == "topk"]
    assert topk.dense_bytes.nunique() > 1  # a prompt's bytes are a share of its own
    assert pooled.bytes.loc[("tasks", "exact", "topk")] == pytest.approx(
        sum(row.bytes / row.dense_bytes for row in topk.itertuples()) / len(topk), rel=1e-9)
    assert "tasks, " in command("eval", "--show", out, "--pool").stdout


BAD = [
    ([], ["--out must be given"]), (["--tasks", "haystack"], ["--tasks must be of", "haystack"]),
    (["--tasks", "needle,needle"], ["each once"]), (["--lengths", "many"], ["--lengths must be whole numbers"]),
    (["--lengths", "1k"], ["sparse-nb: --lengths must be whole numbers separated by commas, got '1k'"]),
    (["--lengths", "100000"], ["--lengths must be at most 4096"]),
    (["--lengths", "30"], ["--lengths must be enough for task 'needle', got 30 tokens", "the facts"]),
    (["--decode", "santal"], ["--decode: method must be one of", "santal"]),
    (["--decode", "TopK(budget=-1)"], ["--decode", "budget"]),
    (["--prefill", "nothing"], ["--prefill: method must be one of"]),
    (["--decode", "DoubleSparsity(channels=1000)"], ["--decode: channels must be", "1000"]),
    (["--tasks", "multikey:doors=2"], ["multikey has no such setting"]),
    (["--seeds", "0"], ["--seeds must mean at least one"]),
    (["--seeds", "a:b"], ["--seeds must be a number"]), (["--setup", "C"], ["--setup must be one of prompt, context"]),
    (["--text", "speeches"], ["--text must be given for the task text"]),
    (["--tasks", "text", "--text", __file__, "--decode", "h2o"], ["--decode must need no queries of a prompt", "h2o"]),
    (["--tasks", "text"], ["--text must be given"]), (["--batch", "0"], ["--batch must be at least 1"]),
    (["--tasks", "text", "--text", "/no/such"], ["--text: cannot read"]),
    (["--tasks", "text", "--text", "speeches:soon"], ["--text: speeches: must be followed by a year"]),
    (["--long", "0"], ["--long must be at least 1"]),
    (["--long", "64"], ["--long must be given with the task 'text' alone"]),
    (["--dense-layers", "0,x"], ["--dense-layers must be whole numbers"]),
    (["--dense-layers", "99"], ["--dense-layers must lie in 0 to", "99"]),
    (["--on", "slurm"], ["--on must be 'ray'"]), (["--workers", "2"], ["--workers", "--on ray"]),
    (["--address", "here"], ["--address needs --on ray"]), (["--model", "/no/such"], ["there is no folder"]),
    (["--show", "/no/such.jsonl"], ["--show: cannot read"]),
    (["--show", __file__], ["must hold results of an evaluation"]),
]

@pytest.mark.parametrize("options, words", BAD, ids=[" ".join(options) for options, _ in BAD])
def test_what_the_command_refuses(tiny, tmp_path, options, words):
    given = [] if not options or "--show" in options else ["--out", tmp_path / "out.jsonl"]
    model = [] if "--model" in options else ["--model", tiny]
    one_line(command("eval", *model, *given, *options), *words)
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_refuses_other_files_to_write(tiny, tmp_path):
    (tmp_path / "notes.jsonl").write_text("buy milk\n")
    asked = "eval", "--model", tiny, "--lengths", "150", "--out"
    one_line(command(*asked, tmp_path / "out.txt"), "--out must end in one of .jsonl")
    one_line(command(*asked, tmp_path / "notes.jsonl"), "must hold results")
    assert (tmp_path / "notes.jsonl").read_text() == "buy milk\n"
    one_line(command("eval", "--show", tmp_path / "notes.jsonl"), "must hold results")
