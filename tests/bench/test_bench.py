"""The bench: its clock, its checks, its byte counts and its records; on a GPU also the kernels that it measures."""
import inspect
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_nb import bench
from sparse_nb.attention import assert_close, attention
from sparse_nb.methods.quest import Quest
from sparse_nb.bench import Protocol, Shape, cold_times, quartiles
from sparse_nb import Exact, Streaming
from sparse_nb.eviction import SnapKV
from sparse_nb.hash_attention import HashAttention
from benchmarks import decode, end_to_end, generate, recorder
from benchmarks.decode import add_ratios, bench_decode, contenders, measure, read
from benchmarks.recorder import Recorder, read_record, recorded, run_record, write_record
from benchmarks.registry import REGISTRY
from benchmarks.baselines import DENSE, Contender
from benchmarks.timing import (
    Case, Refused, bytes_needed, cache_bytes, check_dense, check_sampled, dense_bytes, exact_moments, flash_bytes,
    santa_bytes, worst_of_lists)
from sparse_nb.santa import SCHEMES, Santa, santa_decode, variance_trace

ROOT = Path(__file__).parents[2]
QUICK = Protocol(warmup=1, runs=3, buffer_mb=1)


def case(n=300, B=2, shape=Shape(6, 2, 16), **kwargs):
    return Case(shape, n, B, **dict(dtype=torch.float32, device="cpu") | kwargs)


def dense(run): return Contender(lambda c: {"": lambda: run(c)}, dense_bytes)


def exact(c): return attention(c.q, c.k, c.v)


# The clock.

def test_the_buffer_is_touched_before_every_call_and_outside_of_the_time():
    buffer, seen = torch.zeros(8), []
    def call():
        seen.append(float(buffer[0]))
        time.sleep(0.001)
    times = cold_times(call, Protocol(warmup=4, runs=6), buffer=buffer)
    assert seen == [float(i) for i in range(1, 11)] and len(times) == 6 and all(t >= 1000 for t in times)


class Memory(TorchDispatchMode):
    "Writes down which operations are given the memory of a tensor, and the shapes that they see it in."
    def __init__(self, tensor):
        super().__init__()
        self.at, self.found = tensor.untyped_storage().data_ptr(), []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if name in ("add_", "sum", "mm"):
            self.found += [(name, x.dtype, tuple(x.shape)) for x in (*args, *(kwargs or {}).values())
                           if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == self.at]
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("left, changed, used", [
    ("written", True, [("add_", torch.float32, (22,))]), ("read", False, [("sum", torch.float32, (22,))]),
    ("weights", False, [("mm", torch.bfloat16, (8, 4)), ("mm", torch.bfloat16, (8, 1))])])  # five rows of eight, 4 left
def test_the_whole_buffer_is_written_or_only_read(monkeypatch, left, changed, used):
    monkeypatch.setattr(bench, "_WEIGHTS", (8, 4))
    buffer, calls = torch.ones(22), []
    with Memory(buffer) as memory:
        cold_times(lambda: calls.append(len(memory.found)), Protocol(warmup=1, runs=2, left=left), buffer=buffer)
    assert memory.found == used * 3 and calls == [len(used) * i for i in (1, 2, 3)]
    assert torch.equal(buffer, torch.full((22,), 4.0 if changed else 1.0))


@pytest.mark.parametrize("left", bench.LEFT)
def test_a_buffer_of_any_size_leaves_something(left):
    protocol = Protocol(warmup=1, runs=2, buffer_mb=0, left=left)
    assert len(cold_times(lambda: None, protocol)) == 2
    for shape in (1,), (3, 5), (4097,): assert len(cold_times(lambda: None, protocol, buffer=torch.zeros(shape))) == 2


def test_warm_up_is_not_counted():
    delays = iter([0.05] * 2 + [0.0] * 20)
    assert max(cold_times(lambda: time.sleep(next(delays)), Protocol(warmup=2, runs=20, buffer_mb=0))) < 40_000


@pytest.mark.parametrize("times", [[1], [3, 1], [5, 2, 9, 1, 1], list(range(1, 41))])
def test_quartiles_are_numpys(times):
    import numpy as np
    assert quartiles(times) == tuple(np.quantile(times, [0.5, 0.25, 0.75]))


@pytest.mark.parametrize("times", [[], [0.0], [-1.0], [1, math.inf], [math.nan]])
def test_bad_times(times):
    with pytest.raises(ValueError, match="times must"): quartiles(times)


@pytest.mark.parametrize("settings", [dict(warmup=0), dict(runs=0), dict(fills=0), dict(buffer_mb=-1),
                                      dict(left="dirty"), dict(left=None)])
def test_bad_protocol(settings):
    with pytest.raises(ValueError, match=next(iter(settings))): Protocol(**settings)


# The bytes.

def test_bytes_of_the_targets():
    llama = dict(B=1, H=32, G=8, D=128, n=131072)
    assert dense_bytes(**llama) == 2 * 131072 * 8 * 256
    assert santa_bytes(**llama, samples=128) == 131072 * 8 * 256 + 128 * 32 * 256 + 2 * 32 * (131072 + 128 * 128)
    assert flash_bytes(**llama, samples=2048) == 131072 * 8 * 256 + 2 * 1024 * 32 * 256 + 2 * 4 * 32 * 1024 * 130


@pytest.mark.parametrize("count", [santa_bytes, flash_bytes])
def test_bytes_grow_with_everything_and_never_count_more_rows_than_there_are(count):
    base = dict(B=2, H=6, G=2, D=64, n=1000, itemsize=2, samples=16)
    for name, factor in dict(B=2, H=2, D=2, n=4, itemsize=2, samples=4).items():
        assert count(**base | {name: base[name] * factor}) > count(**base)
    assert count(**base | dict(B=6)) == 3 * count(**base)
    assert count(**base | dict(samples=10**6)) == count(**base | dict(samples=10**7)) <= dense_bytes(2, 6, 2, 64,
        1000) + 8 * 12 * (1000 + 8 * 66)


def test_bytes_of_an_odd_length():
    assert flash_bytes(1, 1, 1, 16, 129, 4, samples=1) == 129 * 16 * 4 + 2 * 16 * 4 + 2 * 4 * 2 * 18
    assert santa_bytes(1, 1, 1, 16, 1, 4, samples=8) == 2 * 16 * 4 + 2 * 2


# The truth and the checks.

def test_moments_are_those_of_the_chapter():
    c = case(shape=Shape(8, 2, 16))
    out, trace = exact_moments(c.q, c.k, c.v)
    assert_close(out, attention(c.q.double(), c.k.double(), c.v.double()), rtol=1e-12)
    assert_close(trace / 5, variance_trace(c.q.double(), c.k.double(), c.v.double(), samples=5,
                                           scheme="iid")[..., 0].double(), rtol=1e-9)


def test_inputs_are_fixed_and_differ_between_cases():
    assert torch.equal(case().k, case().k) and not torch.equal(case().k, case(seed=1).k)
    assert not torch.equal(case(n=300).k[:, :, :100], case(n=301).k[:, :, :100]) and not torch.equal(case().k, case().v)
    k, v = case().by_position
    assert k.is_contiguous() and torch.equal(k.transpose(1, 2), case().k) and torch.equal(v.transpose(1, 2), case().v)


@pytest.mark.parametrize("spoil", [lambda x: x * 1.01, lambda x: x.flip(1), lambda x: x.roll(1, -1),
                                   lambda x: x * math.nan, lambda x: x[:, :, 0], torch.zeros_like])
def test_wrong_dense_outputs_are_refused(spoil):
    c = case()
    assert check_dense(exact(c), c) < 1e-5
    with pytest.raises(Refused): check_dense(spoil(exact(c)), c)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_draws_pass_and_others_do_not(scheme, dtype):
    c = case(n=4096, B=1, shape=Shape(8, 4, 64), dtype=dtype)
    samples = 2048 if scheme == "flash" else 128
    draw = lambda seed, factor=1.0: santa_decode(c.q * factor, c.k, c.v, samples=samples, scheme=scheme, tile=128,
                                                 seed=seed, backend="torch")
    assert check_sampled(draw(0), c, samples, draw(0)) > 0.05
    for wrong in draw(1), draw(0, 3.0), draw(0, 0.0), exact(c), draw(0).flip(1), draw(0) * math.nan:
        with pytest.raises(Refused): check_sampled(wrong, c, samples, draw(0))
    with pytest.raises(Refused, match="independent samples"): check_sampled(draw(0), c, 16 * samples)


def test_the_worst_list_counts_and_what_is_no_number_is_refused():
    c = case(B=1, shape=Shape(8, 4, 16))  # of four groups the first and the last are looked at
    want = lambda wide: lambda i, heads: attention(
        c.q, c.k, c.v)[0, heads, 0].double() if heads == slice(i * wide, (i + 1) * wide) else None
    for wide in 1, 2: assert worst_of_lists(exact(c), c.shape, want(wide), wide) < 1e-5
    out = exact(c)
    out[0, 7] *= 1.005
    assert 1e-3 < worst_of_lists(out, c.shape, want(2), 2) < 0.005 < worst_of_lists(out, c.shape, want(1), 1) * 1.01
    for spoiled, factor in ((7, 1.1), (0, math.nan), (7, math.nan)):
        out = exact(c)
        out[0, spoiled] *= factor
        for wide in 1, 2:
            with pytest.raises(Refused, match="differs from the reference by"):
                worst_of_lists(out, c.shape, want(wide), wide)


def test_a_cache_is_as_large_as_its_keys_and_values():
    c = case(dtype=torch.bfloat16)
    assert cache_bytes(c) == c.k.nbytes + c.v.nbytes and bytes_needed(c) > 3e9 + 4 * cache_bytes(c)


# A measured case.

def test_rows_have_all_fields_and_ratios_follow():
    slow = lambda c: (time.sleep(0.02), exact(c))[1]
    rows = measure(case(), {"slow": dense(slow), "fast": dense(exact)}, QUICK, say=pytest.fail)
    assert [list(row) for row in rows] == [list(decode.FIELDS)] * 2
    slow, fast = rows
    assert (slow["method"], slow["mode"], slow["n"], slow["B"], slow["H"], slow["G"], slow["D"], slow["dtype"],
            slow["samples"], slow["checked"]) == ("slow", "eager", 300, 2, 6, 2, 16, "float32", None, True)
    assert slow["bytes"] == dense_bytes(2, 6, 2, 16, 300, 4) and fast["ratio_to_fastest_dense"] == 1
    assert slow["ratio_to_fastest_dense"] == round(fast["median_us"] / slow["median_us"], 4) < 0.7


def test_what_fails_is_said_and_not_timed():
    timed = []
    def wrong(c):
        timed.append(1)
        return exact(c) * 2
    def broken(c): raise RuntimeError("no kernel for this\nsecond line")
    said = []
    absent = Contender(lambda c: __import__("no_such_library"), dense_bytes)
    rows = measure(case(), {"wrong": dense(wrong), "broken": dense(broken), "absent": absent, "right": dense(exact)},
                   QUICK, say=said.append)
    assert [row["method"] for row in rows] == ["right"] and len(timed) == 1
    assert said == ["wrong, n=300, B=2: refused: relative error 1, allowed is 0.001",
                    "broken, n=300, B=2: RuntimeError: no kernel for this",
                    "absent, n=300, B=2: ModuleNotFoundError: No module named 'no_such_library'"]


def test_the_fastest_variant_that_is_right_is_kept():
    variants = {"slow": lambda c: (time.sleep(0.02), exact(c))[1], "fast": exact, "wrong": lambda c: c.q}
    said = []
    rows = measure(case(),
                   {"m": Contender(lambda c: {name: lambda run=run: run(c) for name, run in variants.items()},
                                   dense_bytes)}, QUICK, say=said.append)
    assert ([row["variant"] for row in rows] == ["fast"] and len(said) == 1
            and said[0].startswith("m (wrong), n=300, B=2: refused"))


def test_long_builds_are_cut():
    said, spent = [], {}
    slow = Contender(lambda c: (time.sleep(0.05), {"": lambda: exact(c)})[1], dense_bytes, compile_s=0.01)
    assert (len(measure(case(), {"slow": slow}, QUICK, say=said.append, spent=spent)) == 1 and not said
            and spent["slow"] >= 0.05)
    assert measure(case(), {"slow": slow}, QUICK, say=said.append, spent=spent) == [] and "its builds took" in said[0]


def test_a_sampling_method_is_compared_with_its_reference():
    c = case(n=1024)
    santa = lambda seed: lambda c: santa_decode(c.q, c.k, c.v, samples=32, seed=seed, backend="torch")
    method = lambda seed: Contender(lambda c: {"": lambda: santa(seed)(c)},
                                    lambda **sizes: santa_bytes(samples=32, **sizes), 32, santa(0))
    said = []
    rows = measure(c, {"same": method(0), "other": method(1), "exact": dense(exact)}, QUICK, say=said.append)
    assert ([row["method"] for row in rows] == ["same", "exact"]
            and "of the draws differ from the reference's" in said[0])
    assert (rows[0]["samples"] == 32 and rows[0]["ratio_to_fastest_dense"]
            == round(rows[1]["median_us"] / rows[0]["median_us"], 4))


def test_ratios_compare_only_what_is_comparable():
    row = lambda method, us, samples=None, **changes: dict(method=method, n=1, B=1, H=1, G=1, D=1, dtype="bfloat16",
                                                           samples=samples, mode="graph", median_us=us) | changes
    rows = add_ratios([row("a", 10.0), row("b", 20.0), row("s", 5.0, 128), row("s", 40.0, 128, mode="eager"),
                       row("a", 80.0, mode="eager"), row("s", 1.0, 128, n=2)])
    assert [r["ratio_to_fastest_dense"] for r in rows] == [1, 0.5, 2, 2, 1, None]


# The record.

def test_committed_records_are_sound():
    assert read()["rows"]
    for gpu, record in recorded("decode").items():
        known = {"gpu", "driver", "cuda", "torch", "triton", "flashinfer", "date", "copy_gb_s", "read_gb_s",
                 "protocol", "command"}
        assert known <= record["meta"].keys() and record["rows"], gpu
        for path in recorder.results().glob("*_decode.json"): assert read(path)["rows"]
        assert all(row["method"] in contenders() for row in record["rows"])
        assert all(row["bytes"] / row["median_us"] / 1e3 < 1.1 * record["meta"]["read_gb_s"]
                   for row in record["rows"]), "faster than the memory: bytes counted wrong, or a warm cache"


def test_a_record_is_read_back_and_checked(tmp_path):
    rows = measure(case(), {"a": dense(exact), "b": dense(exact)}, QUICK)
    path = tmp_path / "toy_decode.json"
    write_record(path, {"gpu": "toy"}, rows)
    assert (read(path) == json.loads(path.read_text()) == {"meta": {"gpu": "toy"}, "rows": rows}
            and [p.name for p in tmp_path.iterdir()] == [path.name])
    assert recorded("decode", tmp_path) == {"toy": read(path)} and recorded("gather", tmp_path) == {}
    for change, why in ((dict(checked=1), "was not checked"), (dict(q1_us=1e9), "out of order"),
                        (dict(ratio_to_fastest_dense=None), "ratio_to_fastest_dense"), ({"extra": 1}, None)):
        write_record(path, {}, [rows[0], rows[1] | change])
        if why is None: read(path)
        else:
            with pytest.raises(ValueError, match=f"toy_decode.json, row 1: .*{why}"): read(path)
    write_record(path, {}, [{name: x for name, x in rows[0].items() if name != "error"}])
    with pytest.raises(ValueError, match="row 0: misses error"): read(path)


@pytest.mark.parametrize("wrong, why", [
    (dict(shapes=["gpt"]), "shapes must be of llama3, pocket, got 'gpt'"),
    (dict(methods=["flash9"]), "methods must be of flashinfer"), (dict(lengths=[8, 0]),
        "lengths must be at least 1, got 0"),
    (dict(batches=[-1]), "batches must be at least 1, got -1"), (dict(samples=0), "samples must be at least 1"),
    (dict(lengths=[]), "lengths must name at least one"), (dict(methods=[]), "methods must name"),
    (dict(dtype=torch.float64), "dtype must be bfloat16")])
def test_bad_calls(wrong, why):
    with pytest.raises(ValueError, match=why): bench_decode(**wrong)


def test_without_a_gpu_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"): bench_decode(out=tmp_path)
    assert not list(tmp_path.iterdir())


class FakeGpu:
    "Runs `bench_decode` on the CPU: torch.cuda's few answers are made up, cases live on the CPU and are eager."
    def __init__(self, monkeypatch, free=10**12):
        for name, answer in dict(is_available=True, get_device_name="Fake GPU-1", empty_cache=None,
                                 mem_get_info=(free, free)).items():
            monkeypatch.setattr(torch.cuda, name, lambda *a, answer=answer: answer)
        monkeypatch.setattr(decode, "bandwidth", lambda: dict(copy_gb_s=1.0, read_gb_s=1.0))
        monkeypatch.setattr(decode, "Case", lambda *a, **k: Case(*a, **k, device="cpu"))
        monkeypatch.setattr(decode, "Protocol", lambda **k: QUICK)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
        self.methods = {"sdpa_flash": dense(exact),
                        "santa_systematic": Contender(lambda c: {"": lambda: santa_decode(c.q, c.k, c.v, samples=16,
                            seed=c.seed, backend="torch")},
                                                                                lambda **sizes: santa_bytes(samples=16,
                                                                                    **sizes), 16)}
        monkeypatch.setattr(decode, "contenders", lambda *a: self.methods)


def test_the_whole_bench_writes_after_every_case_and_skips_what_does_not_fit(tmp_path, monkeypatch):
    FakeGpu(monkeypatch)
    said, on_disk = [], []
    def say(line):
        said.append(line)
        on_disk.extend(len(read(p)["rows"]) for p in tmp_path.glob("*.json"))
    path = bench_decode(lengths=[64, 128, 2**22], batches=[1], shapes=["pocket"], dtype=torch.float32, out=tmp_path,
                        budget_gb=1, command="the command", say=say)
    assert path == tmp_path / "fake_gpu_1_decode.json"
    record = read(path)
    assert [(row["method"], row["n"], row["mode"]) for row in record["rows"]] == [(m, n, "eager") for n in (64, 128)
        for m in ("sdpa_flash", "santa_systematic")]
    assert (record["meta"]["gpu"] == "Fake GPU-1" and record["meta"]["command"] == "the command"
            and record["meta"]["protocol"]["runs"] == 3)
    assert (on_disk == [2, 4, 4]
            and "pocket, n=4194304, B=1: not measured, a cache of 4.3 GB is over the budget of 1 GB" in said)
    assert (bench_decode(lengths=[64], batches=[1], shapes=["pocket"], dtype=torch.float32, out=tmp_path / "none.json",
                         limit_s=-1, say=said.append) and "pocket, n=64, B=1: not measured, the time is over" in said)


def test_cases_larger_than_the_memory_are_skipped(tmp_path, monkeypatch):
    FakeGpu(monkeypatch, free=10**9)
    said = []
    bench_decode(lengths=[64], batches=[1], shapes=["pocket"], dtype=torch.float32, out=tmp_path, say=said.append)
    assert (any("not measured, it needs about" in line and "1.0 GB free" in line for line in said)
            and not list(tmp_path.iterdir()))


def test_append_replaces_whole_cases(tmp_path, monkeypatch):
    fake, settings = FakeGpu(monkeypatch), dict(batches=[1], shapes=["pocket"], dtype=torch.float32,
                                                out=tmp_path / "x.json", say=lambda line: None)
    first = read(bench_decode(lengths=[64, 128], **settings))
    del fake.methods["santa_systematic"]
    second = read(bench_decode(lengths=[128], append=True, **settings))
    assert [(row["method"], row["n"]) for row in second["rows"]] == [("sdpa_flash", 64), ("santa_systematic", 64),
        ("sdpa_flash", 128)]
    assert second["rows"][:2] == first["rows"][:2] and second["meta"]["earlier"] == [first["meta"]]
    third = read(bench_decode(lengths=[64], **settings))
    assert [row["n"] for row in third["rows"]] == [64] and "earlier" not in third["meta"]


# What a step finds in the cache.

@pytest.mark.budget(40)
@pytest.mark.slow
def test_steps_are_timed_after_each_kind_of_work(tmp_path):
    command = [sys.executable, "-m", "benchmarks.run", "cache_lines", "--quick", "--out", tmp_path / "x.json"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(CUDA_VISIBLE_DEVICES=""), capture_output=True,
                          text=True)
    assert done.returncode == 0 and "not recorded" not in done.stdout, done.stderr
    meta, rows = read_record(tmp_path / "x.json").values()
    assert (meta["l2"], meta["buffer_mb"], meta["mode"]) == (list(bench.LEFT), 1, "eager")
    named = lambda left: {row["method"] for row in rows if row["left"] == left}
    always = {"exact", "santa_systematic", "santa_int8"}
    assert named("written") == {*named("read"), "vattention", "sketch_walk", "saap"}
    assert always < named("read") == named("weights") and named("read") - always <= DENSE.keys()


# The table of records, and single kernels.

def test_every_measurement_has_its_function():
    for name, record in REGISTRY.items():
        assert list(inspect.signature(record.load()).parameters) == ["recorder"], name


def test_every_result_belongs_to_a_record():
    names = [x.file for x in REGISTRY.values()]
    known = {name.format(gpu=gpu) for name in names for gpu in ("nvidia_h200", "nvidia_h100_80gb_hbm3")}
    by_processor = {x.file.format(gpu="cpu") for x in REGISTRY.values() if not x.gpu}
    days = {f"{gpu}_a_day.json" for gpu in ("nvidia_h200", "nvidia_h100_80gb_hbm3")}  # of `make gpu-day`
    days.add("nvidia_h200_vllm.json")  # of tests/gpu/vllm_day.py
    assert {p.name for p in recorder.results().iterdir()} <= known | by_processor | days
    assert len({*names}) == len(REGISTRY)


def test_a_day_inside_vllm_is_joined_to_its_record(tmp_path):
    day = ROOT / "tests" / "gpu" / "vllm_day.py"
    def joined(*parts):
        for part, date, found in parts:
            facts = [dict(what="start", machine=dict(gpu="a GPU", date=date)), *found, dict(what="late", skipped="3 s"),
                     dict(what="wrong", error="ValueError"), dict(what="end")]
            lines = [json.dumps(dict(part=part, **x, at_s=1.0)) for x in facts]
            (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
        files = [tmp_path / f"{part}.jsonl" for part, *_ in parts]
        made = subprocess.run([sys.executable, day, "record", tmp_path / "found.json", *files], capture_output=True,
                              text=True)
        assert made.returncode == 0 and made.stderr.count("left out: ") == len(parts), made.stderr
        return read_record(tmp_path / "found.json")
    row = lambda method, x: dict(what="tokens", method=method, equal=x)
    of = lambda part, *rows: [dict(part=part, **x) for x in rows]
    first = joined(("speed", "Monday", [row("a", 1), row("b", 1)]), ("pocket", "Monday", [row("a", 2), row("b", 2)]))
    assert first["rows"] == of("speed", row("a", 1), row("b", 1)) + of("pocket", row("a", 2), row("b", 2))
    again = joined(("speed", "Tuesday", [row("a", 3)]), ("pocket", "Tuesday", [row("b", 4)]))
    assert again["rows"] == of("pocket", row("a", 2)) + of("speed", row("a", 3)) + of("pocket", row("b", 4))
    assert joined(("whole", "Friday", []))["meta"]["dates"] == dict(speed="Tuesday", pocket="Tuesday", whole="Friday")


def test_records_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="name must be one of decode, .*, got 'speed'"): run_record("speed")
    for name in (name for name, record in REGISTRY.items() if record.gpu):
        with pytest.raises(ValueError, match=f"{name}: there is no CUDA device here"):
            run_record(name, tmp_path / "new")
    for name in "santa_steps", "vattention_launches", "gather", "host", "decode", "generate":
        with pytest.raises(ValueError, match=f"{name}: there is no CUDA device here"):
            Recorder(name, tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_a_quick_form_does_not_stand_among_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # what the quick form would turn on for the rest of this process
    made = []
    monkeypatch.setattr(generate, "generate", lambda recorder: made.append((recorder.out, recorder.quick)))
    path = run_record("generate", quick=True)
    assert made == [(path, True)] and path.name == "cpu_generate.json" and ROOT not in path.parents
    assert (run_record("generate", tmp_path, quick=True) == tmp_path / "cpu_generate.json" and run_record("generate",
        tmp_path / "y.json", quick=True) == tmp_path / "y.json")


def test_the_first_token_is_timed_in_every_way(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="first_token: there is no CUDA device"):
        run_record("first_token", tmp_path / "x")
    said = []
    meta, rows = read_record(run_record("first_token", tmp_path / "x.json", quick=True, say=said.append)).values()
    ways = [way for way in end_to_end.reading_ways() if way != "cuDNN"]
    assert [(row["n"], row["way"]) for row in rows] == [(n, way) for n in (300, 310) for way in ways]
    assert len(said) == 2 + len(rows) and meta["command"] == "python -m benchmarks.run first_token --quick"
    late = Recorder("first_token", tmp_path / "late.json", quick=True, say=said.append)
    ways = {"streaming": end_to_end.reading_ways()["streaming"], "no attention": end_to_end.Nothing()}
    end_to_end.bench_first_token(late, lengths=((64, 1), (65, 1)), shape=generate.TINY, ways=ways, limit_s=-1)
    assert said[-2:] == [f"n={n}: not measured, the time is over" for n in (64, 65)]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"rows": []}'])
def test_broken_records_are_named(text, tmp_path):
    path = tmp_path / "toy_gather.json"
    path.write_text(text)
    for call in lambda: read_record(path), lambda: recorded("gather", tmp_path):
        with pytest.raises(ValueError, match="toy_gather.json must"): call()


def test_a_recorder_poisons_checks_and_says(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    c, said = case(), []
    r = Recorder("gather", quick=True, say=said.append)
    kept = exact(c)
    r.measure_row(lambda: exact(c), lambda out: check_dense(out, c), what="right")
    r.measure_row(lambda: exact(c) * 2, lambda out: check_dense(out, c), what="wrong")
    r.measure_row(lambda: kept, lambda out: check_dense(out, c), what="its output is its own memory")
    assert [row["what"] for row in r.rows] == ["right"] and r.rows[0]["error"] < 1e-5
    r.measure_row(lambda: exact(c), tflop=0.002)
    assert r.rows[1]["tflops"] == round(0.002 / r.rows[1]["median_us"] * 1e6, 1)
    assert ("wrong" in said[1] and "not recorded, relative error 1, allowed is 0.001" in said[1]
            and "relative error nan" in said[2])


def test_a_recorder_leaves_out_rivals_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    r, said = Recorder("gather", quick=True, say=lambda line: None), []
    r.say = said.append
    recorder.measure_dense(r, case(), memory="device")
    assert ({row["method"] for row in r.rows} == {"sdpa_flash"} and any(line.startswith("sdpa_cudnn: RuntimeError")
        for line in said))
    assert all(row["nbytes"] == dense_bytes(2, 6, 2, 16, 300, 4) and row["memory"] == "device" for row in r.rows)


def test_host_copies_have_the_token_outermost(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    c = case()
    k, v = recorder.to_host(c.k, c.v)
    assert torch.equal(k, c.k) and k.permute(2, 0, 1, 3).is_contiguous() and torch.equal(v, c.v)
    r = Recorder("host", quick=True, say=lambda line: None)
    recorder.measure_copy(r, [c.k, c.v], [k, v], memory="host")
    recorder.measure_copy(r, [c.k, c.v], [v, k], memory="host")
    assert len(r.rows) == 1 and r.rows[0]["nbytes"] == k.nbytes + v.nbytes and r.rows[0]["n"] == 300


def test_dense_rivals_are_right_where_they_run():
    c = case(dtype=torch.float32)
    for call in DENSE["sdpa_flash"].build(c).values(): assert check_dense(call(), c) < 1e-5
    assert all(x.samples is None and x.bytes is dense_bytes for x in DENSE.values()) and set(DENSE) < set(contenders())


# The pictures.

def rows_of(*methods):
    return add_ratios([dict(method=m, variant="", n=n, B=B, H=32, G=8, D=128, dtype="bfloat16",
                            samples=128 if m.startswith("santa") else None, mode="graph", median_us=n / 100 + i,
                            q1_us=n / 101 + i,
                                                q3_us=n / 99 + i, bytes=n * 4096, checked=True, error=0.0,
                                                ratio_to_fastest_dense=None) for i, m in enumerate(methods)
                                                for n in (4096, 8192) for B in (1, 8)])


def test_pictures_hold_a_line_for_each_method():
    plt = pytest.importorskip("matplotlib.pyplot")
    rows, meta = rows_of("flashinfer", "santa_systematic", "someone_new"), dict(copy_gb_s=4300, read_gb_s=4500)
    for fig, panels in (decode.plot_latency(rows), 2), (decode.plot_ratio(rows), 2), (decode.plot_roofline(meta, rows),
        1):
        assert (len(fig.axes) == panels and {"FlashInfer", "SANTA systematic", "someone_new"} <= {text.get_text()
            for text in fig.legends[0].get_texts()})
        plt.close(fig)
    eager, pocket = ([row | changes for row in rows] for changes in (dict(mode="eager"), dict(H=6, G=2, D=64)))
    for call in (lambda: decode.plot_latency([]), lambda: decode.plot_latency(eager), lambda: decode.plot_ratio(pocket),
                 lambda: decode.plot_ratio(rows_of("santa_flash")), lambda: decode.plot_roofline(meta, eager)):
        with pytest.raises(ValueError, match="rows must hold"): call()


# A prompt.

@pytest.fixture
def prefill():
    pytest.importorskip("triton")
    from benchmarks import prefill
    return prefill


@pytest.mark.parametrize("lengths, why", [((), "must name"), ((0,), "at least 1 and at most 1048576, got 0"),
                                          ((8, 2**21), "got 2097152")])
def test_bad_lengths_of_prompts(prefill, lengths, why):
    with pytest.raises(ValueError, match=f"lengths .*{why}"): prefill.bench_prefill(lengths=lengths)


def test_prompts_need_a_gpu(prefill, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="prefill: there is no CUDA device"): prefill.bench_prefill(out=tmp_path)
    with pytest.raises(ValueError, match="prefill: there is no CUDA device"): run_record("prefill", tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_the_work_of_a_prompt(prefill):
    s = prefill.Setting(sinks=2, window=10, gamma=8, anchors=4, tail=5)
    seen = lambda i, low: sum(x < s.sinks or x > low - s.window for x in range(i + 1))
    for n in (1, 5, 6, 40, 77):
        rows, last = range(max(0, n - s.tail)), sum(i + 1 for i in range(max(0, n - s.tail), n))
        near = sum(seen(i, i) for i in rows)
        missing = sum(i + 1 - seen(i, i) for i in rows[::s.gamma])
        assert prefill.needed(n, s, "none") == (near, 0, last, False)
        assert prefill.needed(n, s, "delta") == prefill.needed(n, s, "recompute") == (near, missing, last, False)
        assert prefill.needed(n, s, "tangent") == (sum(seen(i, i // 8 * 8) for i in rows), missing, last, True)
        assert sum(prefill.needed(n, s, "streaming")) == sum(seen(i, i) for i in range(n))
        assert sum(prefill.needed(n, s, "dense")) == n * (n + 1) / 2


def test_tiles_that_are_tried_are_named_once(prefill):
    for n in prefill.SPLIT:
        found = list(prefill.variants(n))
        assert len(set(found)) == len(found) and all(part is None or part % 64 == 0 for *_, part in found)
    assert list(prefill.variants(4096)) == []


def test_the_picture_of_prompts(prefill):
    plt = pytest.importorskip("matplotlib.pyplot")
    rows = [dict(method=m, n=n, median_us=us * n) for m, us in (("sdpa_flash", 2), ("tangent", 1), ("someone_new", 3))
            for n in (4096, 2**20)] + [dict(part="tiles", n=4096, median_us=1.0)]
    fig = prefill.plot_prompts(rows)
    assert {"FlashAttention-2, dense", "tangent"} == {text.get_text() for text in fig.legends[0].get_texts()}
    plt.close(fig)
    assert prefill.over_dense(rows)["tangent"] == {4096: 2.0, 2**20: 2.0}
    assert prefill.pays_from({1: 0.5, 2: 1.5, 4: 0.9, 8: 2}) == 8 and prefill.pays_from({1: 0.5}) is None
    with pytest.raises(ValueError, match="rows must hold one of sdpa_flash"): prefill.plot_prompts(rows[2:])


# A whole model.

def tiny(tmp_path, n=200, **kw):
    return json.loads(generate.bench_generate(**dict(lengths=((n, 1),), tokens=2, shape=generate.TINY, device="cpu",
        out=tmp_path, say=lambda line: None) | kw).read_text())


FEW = dict(methods={"quest": Quest(0.2), "santa": Santa(16)})


@pytest.mark.budget(15)
@pytest.mark.slow
def test_a_record_of_a_whole_model(tmp_path):
    pytest.importorskip("transformers")
    both = dict(offload=True, **FEW)
    first, second, other = tiny(tmp_path, 300, **both), tiny(tmp_path, append=True, **both), tiny(tmp_path, **FEW)
    ways = {*generate.DENSE_WAYS, generate.PAIR[1], *FEW["methods"]}
    hosts, few = {name + generate.HOST for name in FEW["methods"]}, {(generate.NO_KEYS, 16)}
    for record, lengths, names in ((first, {300}, ways | hosts), (second, {300, 200}, ways | hosts),
                                   (other, {200}, ways)):
        assert {(row["way"], row["n"]) for row in record["rows"]} == few | {(x, n) for x in names for n in lengths}
        assert record["meta"]["failed"] == [] and not any(row["static"] for row in record["rows"])
        assert all(row["same_tokens"] == 1 for row in record["rows"] if row["way"] in hosts)
    assert ([row for row in second["rows"] if row["n"] == 300] == [row for row in first["rows"] if row["n"] == 300]
            and second["meta"]["earlier"] == [first["meta"]] and "earlier" not in other["meta"])


def test_a_record_says_what_a_token_is_made_of_and_whose_rival_it_has(tmp_path):
    pytest.importorskip("transformers")
    rows = {row["way"]: row for row in tiny(tmp_path, static=True, **FEW)["rows"]}
    assert set(rows) == {generate.NO_KEYS, *generate.DENSE_WAYS, *FEW["methods"]}
    dense = min(rows[name]["median_us"] for name in generate.DENSE_WAYS)
    for name in (*generate.DENSE_WAYS, *FEW["methods"]):
        row = rows[name]
        assert row["attention_us"] == pytest.approx(3 * row["kernel_us"], abs=0.1) and row["exact_layers"] == 0
        assert row["ratio"] == pytest.approx(dense / row["median_us"], rel=1e-3) and row["static"]
        assert row["median_us"] == pytest.approx(row["weights_us"] + row["attention_us"] + row["rest_us"], abs=0.2)
    assert rows[generate.NO_KEYS]["n"] == 16 and rows[generate.NO_KEYS]["ratio"] is None
    again = tiny(tmp_path, static=True, append=True, baselines=False, methods={"window": Streaming(4, 0.1)})["rows"]
    new = next(row for row in again if row["way"] == "window")
    assert [row for row in again if row is not new] == list(rows.values())
    assert new["ratio"] == pytest.approx(dense / new["median_us"], rel=1e-3)  # of the file's dense rows


@pytest.mark.slow
def test_a_tuned_step_is_asked_of_generate_and_has_rivals_of_its_own(tmp_path, monkeypatch):
    from torch._inductor.runtime.benchmarking import benchmarker
    transformers, asked = pytest.importorskip("transformers"), []
    whole, clock = transformers.LlamaForCausalLM.generate, benchmarker.benchmark_gpu
    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", lambda self, *a, compile_config=None, **kw: (
        asked.append(compile_config), clocks.add(benchmarker.benchmark_gpu), whole(self, *a, **kw))[2])
    clocks = set()
    rows = tiny(tmp_path, static=True, **FEW)["rows"]
    assert set(asked) == {None} and not any(row["tuned"] for row in rows) and clocks == {clock}
    clocks.clear()
    asked.clear()
    tuned = dict(static=True, append=True, tuned=True, methods={"window": Streaming(4, 0.1)})
    alone = next(row for row in tiny(tmp_path, baselines=False, **tuned)["rows"] if row["way"] == "window")
    assert alone["tuned"] and alone["ratio"] is None  # dense rows of steps that were compiled otherwise do not count
    assert clock not in clocks and len(clocks) and benchmarker.benchmark_gpu == clock  # also where a way fails:
    with pytest.raises(RuntimeError, match="no"), generate.cold_tuning(): raise RuntimeError("no")
    assert benchmarker.benchmark_gpu == clock and not torch.compiler.config.cache_key_tag
    assert {(x.mode, *x.options.items()) for x in asked} == {(None, *generate.TUNED.items())}
    assert set(generate.TUNED) <= set(torch._inductor.list_options())
    found = {row["way"]: row for row in tiny(tmp_path, **tuned)["rows"] if row["tuned"] and row["n"] == 200}
    dense = min(found[name]["median_us"] for name in generate.DENSE_WAYS)
    assert found["window"]["ratio"] == pytest.approx(dense / found["window"]["median_us"], rel=1e-3)
    monkeypatch.setattr(generate, "TUNED", generate.TUNED | dict(split_reductions=False))
    other = next(row for row in tiny(tmp_path, baselines=False, **tuned)["rows"] if row["way"] == "window")
    assert other["compiler"] == generate.TUNED | dict(clock=generate.CLOCK)
    assert other["ratio"] is None  # nor do those of other options


def test_what_the_compiler_asks_is_clocked_by_us_and_another_clock_comes_back(monkeypatch):
    from torch._inductor.runtime.benchmarking import benchmarker
    asked = []
    def times(call, protocol, *, device):
        asked.append((call(), protocol, device))
        return [7.0, 9.0, 8.0]
    monkeypatch.setattr(generate, "cold_times", times)
    ask = lambda: benchmarker.benchmark(lambda: "ran", device="cuda", rep=40, is_vetted_benchmarking=True)
    with generate.cold_tuning():
        assert torch.compiler.config.cache_key_tag == generate.CLOCK  # of launches found on disk those of this clock
        with generate.cold_tuning(): assert ask() == 0.008  # milliseconds
        assert ask() == 0.008
    assert asked == [("ran", generate.TRIED, "cuda")] * 2 and "benchmark_gpu" not in vars(benchmarker)
    monkeypatch.setattr(benchmarker, "benchmark_gpu", lambda *a, **kw: 3.0, raising=False)
    with generate.cold_tuning(): assert ask() == 0.008
    assert ask() == 3.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the clock is the GPU's")
def test_what_the_compiler_tries_is_timed_without_the_host():
    from torch._inductor.runtime.benchmarking import benchmarker
    x = torch.zeros(1000, device="cuda")
    def call():  # by a host that needs half a millisecond
        end = time.perf_counter() + 5e-4
        while time.perf_counter() < end: pass
        x.add_(1)
    with generate.cold_tuning(): assert 1 < 1000 * benchmarker.benchmark(call, device="cuda") < 15


def test_what_stays_exact_counts_as_exact(tmp_path):
    rows = [dict(way=way, n=9, batch=1, static=True, median_us=100.0, kernel_us=kernel, exact_layers=exact)
            for way, kernel, exact in ((generate.EXACT, 7.0, 0), ("walk", 2.0, 2), ("slow", None, 0))]
    meta = dict(weights_read_bytes=20_000_000, copy_gb_s=900.0, read_gb_s=1000.0, shape=dict(num_hidden_layers=5))
    found = {row["way"]: row for row in generate.add_parts(rows, meta)}
    assert {x: row["attention_us"] for x, row in found.items()} == {generate.EXACT: 35.0, "walk": 20.0, "slow": None}
    assert found["walk"]["weights_us"] == 20.0 and found["walk"]["rest_us"] == 60.0 and found["slow"]["rest_us"] is None
    alone = generate.add_parts([rows[1] | dict(n=10)], meta)[0]
    assert alone["attention_us"] is None  # nobody has measured exact layers of this length


def test_attention_alone_is_asked_as_the_loop_asks_it(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    model, room = generate.random_model(generate.TINY, "cpu", dtype=torch.float32), 340
    filled = generate.fill(model, torch.randint(1, 64, (2, 301), generator=torch.Generator().manual_seed(0)), room)
    maps, asked = generate.random_networks(generate.TINY, tmp_path / "networks.safetensors"), []
    methods = {name: generate.with_networks(m, maps) for name, m in generate.generate_methods().items()}
    for kind in {*map(type, methods.values()), Exact}:
        def decode(self, q, k, v, *, whole=kind.decode, **given):
            asked.append((k.shape[2], given.get("state"), given.get("kv_end")))
            return whole(self, q, k, v, **given)
        monkeypatch.setattr(kind, "decode", decode)
    drawn = []
    monkeypatch.setattr(torch, "randn_like", lambda x, whole=torch.randn_like: drawn.append(x) or whole(x))
    for name, fixed in generate.generate_ways(methods, static=True).items():
        if name == generate.PAIR[0]: continue
        out = []
        for way in fixed, generate.generate_ways(methods)[name]:
            torch.manual_seed(0)
            call, *_ = generate._attentions(model, filled, way, 2)
            asked.clear()
            out.append(torch.stack(call()))
            held = way.cache == "static" or name.startswith("SnapKV")
            assert {n for n, *_ in asked} == {-(-room // 64) * 64 if held else 300}  # its room, or its keys
            assert all(state is None or state.static == held for _, state, _ in asked)
            assert all((end is not None) == held and (not held or end.eq(300).all()) for *_, end in asked)
        assert (out[0] - out[1]).norm() < 1e-6 * out[1].norm(), name
        assert bool(drawn) == name.startswith("SnapKV")  # queries of a whole prompt are large: for who asks alone
        drawn.clear()


def test_weights_are_of_the_record_of_the_row():
    row = dict(way=generate.EXACT, batch=1, static=True, median_us=100.0, kernel_us=7.0, exact_layers=0)
    meta = dict(weights_read_bytes=20_000_000, copy_gb_s=900.0, read_gb_s=1000.0, shape=dict(num_hidden_layers=5))
    found = generate.add_parts([row | dict(n=9, weights_us=24.0), row | dict(n=10)], meta)
    assert [(x["weights_us"], x["rest_us"]) for x in found] == [(24.0, 41.0), (20.0, 45.0)]  # also behind an older row
    record = json.loads((ROOT / "benchmarks/results/nvidia_h200_generate.json").read_text())
    share = lambda x: round(x["weights_read_bytes"] / max(x["copy_gb_s"], x["read_gb_s"]) / 1e3, 1)
    metas = [x for x in (*record["meta"]["earlier"], record["meta"]) if "weights_read_bytes" in x]
    own = {date: {share(x) for x in metas if x["date"] == date} for date in {x["date"] for x in metas}}
    rows = [x for x in (*record["rows"], *record["meta"]["replaced"]) if x.get("weights_us")]
    assert rows and [x for x in rows if x["weights_us"] not in own[x["date"]]] == []


def test_a_prompt_is_read_once_for_all_ways(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    model, reads = generate.random_model(generate.TINY, "cpu"), []
    ids = torch.randint(1, 64, (2, 101))
    methods = dict(window=Streaming(4, 1.0), snap=SnapKV(1.0))
    want = generate.token_times(model, ids, 4)[1]
    filled = generate.fill(model, ids, 120)
    whole = type(model.base_model).forward
    monkeypatch.setattr(type(model.base_model), "forward", lambda self, *a, **kw: (
        reads.append(kw["input_ids"].shape[1]), whole(self, *a, **kw))[1])
    for static in False, True:
        for name, way in generate.generate_ways(methods, static).items():
            reads.clear()
            _, wrote, _, how = generate.measure_way(model, filled, way, 4)
            assert torch.equal(wrote, want), (name, static)
            assert (max(reads), how) == ((101, "by itself") if name == "snap" else (1, "read")), (name, static)
    assert generate.fill(model, ids, 120, read=False).how == "drawn"


def test_what_cannot_be_measured_is_said_and_left_out(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    record = tiny(tmp_path, methods={"broken": HashAttention(0.1, maps="nowhere"), "quest": Quest(0.2),
                                     "drawn": HashAttention(0.1, maps="random")})
    assert [(x["way"], x["n"]) for x in record["meta"]["failed"]] == [("broken", 200)]
    assert "nowhere" in record["meta"]["failed"][0]["why"]
    found = {row["way"]: row for row in record["rows"]}
    assert {*found} == {generate.NO_KEYS, *generate.DENSE_WAYS, generate.PAIR[1], "quest", "drawn"}
    assert json.loads(found["drawn"]["method"])["maps"] == "random"  # not a file of one run
    late = tiny(tmp_path, limit_s=-1, **FEW)
    assert late["rows"] == [] and {x["why"] for x in late["meta"]["failed"]} == {"the time is over"}
    monkeypatch.setattr(generate, "fill", lambda *a: 1 / 0)
    assert {x["why"].partition(":")[0] for x in tiny(tmp_path, **FEW)["meta"]["failed"]} == {"ZeroDivisionError"}
    for wrong, why in ((dict(batch=0), "batch must be at least 1"), (dict(n=0), "lengths must be at least 1"),
                       (dict(static=True, offload=True), "offload must be"), (dict(tuned=True), "tuned must be")):
        with pytest.raises(ValueError, match=why): tiny(tmp_path, **wrong)


def test_records_are_joined_row_by_row():
    about = dict(gpu="one", shape=dict(hidden_size=8), failed=[])
    row = lambda way, time, **more: dict(way=way, n=9, median_us=time) | more
    old = dict(meta=about | dict(date="1", failed=[dict(way="b", n=9), dict(way="c", n=9)]), rows=[
        row("a", 5.0, batch=1, static=False), row("d", 7.0)])
    new = dict(meta=about | dict(date="2", failed=[dict(way="e", n=9)]), rows=[
        row("a", 4.0), row("b", 3.0), row("d", 2.0, static=True)])
    joined = generate.join_records([old, new])
    assert [(x["way"], x["median_us"], x["date"]) for x in joined["rows"]] == [
        ("d", 7.0, "1"), ("a", 4.0, "2"), ("b", 3.0, "2"), ("d", 2.0, "2")]
    assert joined["meta"]["date"] == "2" and joined["meta"]["earlier"] == [old["meta"]]
    assert joined["meta"]["replaced"] == [dict(date="1") | old["rows"][0]]
    own = row("x", 4.0, rival=generate.EXACT, ratio=0.75)
    own = generate.add_baselines([row(generate.EXACT, 2.0), own, row("y", 4.0)])
    assert [x["ratio"] for x in own] == [1.0, 0.75, 0.5]  # a baseline of another record does not replace one's own
    assert [x["way"] for x in joined["meta"]["failed"]] == ["c", "e"]
    again = generate.join_records([joined, dict(meta=about | dict(date="3"), rows=[row("a", 1.0)])])
    assert [x["date"] for x in again["meta"]["earlier"]] == ["1", "2"] and again["rows"][-1]["date"] == "3"
    assert "earlier" not in generate.join_records([new])["meta"]
    for what, other in ("gpu", "two"), ("shape", dict(hidden_size=9)):
        with pytest.raises(ValueError, match=f"{what} must be the same in all records"):
            generate.join_records([old, dict(meta=new["meta"] | {what: other}, rows=[])])


# On a GPU.

@pytest.mark.gpu
def test_a_graph_that_does_not_write_its_output_is_refused():
    c = Case(Shape(8, 2, 64), 512, 1, device="cuda")
    kept = exact(c)
    said = []
    assert ([row["mode"] for row in measure(c, {"lazy": dense(lambda c: kept)}, QUICK, say=said.append)] == ["eager"]
            and "refused: relative error nan" in said[0])


@pytest.mark.gpu
def test_both_modes_and_plausible_bandwidths():
    found = bench.bandwidth(gigabytes=1)
    assert 50 < found["copy_gb_s"] < 20_000 and 50 < found["read_gb_s"] < 20_000
    rows = measure(Case(Shape(8, 2, 64), 4096, 1, device="cuda"),
                   {name: contenders()[name] for name in ("sdpa_flash", "santa_systematic", "santa_proportional",
                                                          "santa_flash")}, QUICK, say=pytest.fail)
    assert {(row["method"], row["mode"]) for row in rows} == {(m, mode) for m in ("sdpa_flash", "santa_systematic",
        "santa_proportional", "santa_flash") for mode in ("graph", "eager")}


@pytest.mark.gpu
def test_the_command_writes_a_record(tmp_path):
    command = [sys.executable, "-m", "benchmarks.parts", "decode", "--lengths", "4096", "--batches", "1",
               "--shapes", "llama3", "--methods", "sdpa_flash,santa_systematic", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ)
    (path,) = tmp_path.iterdir()
    assert {row["method"] for row in read(path)["rows"]} == {"sdpa_flash", "santa_systematic"}
