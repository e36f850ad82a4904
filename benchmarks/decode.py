"""Ours and its baselines in one run: time, speed over the fastest dense kernel, and how near the memory's bandwidth"""
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from sparse_nb.bench import SHAPES, Protocol, bandwidth, captured, cold_times, quartiles
from sparse_nb.plots import SERIES, palette
from benchmarks.machine import machine
from benchmarks.recorder import Recorder, read_record, record_path, recorded
from benchmarks.baselines import DENSE, Contender, build_flashinfer
from benchmarks.timing import (
    COMPARED, DENSE_ERROR, Case, Refused, bytes_needed, cache_bytes, check_dense, check_sampled, flash_bytes,
    santa_bytes)
from sparse_nb.santa import Santa, santa_decode


def contenders(samples: int = 128) -> dict:
    "What `decode` measures, baselines first."
    def santa(samples, moved=santa_bytes, **settings):
        def decode(case, backend, state=None):
            return santa_decode(case.q, case.k, case.v, samples=samples, backend=backend, seed=case.seed, state=state,
                                **settings)
        def build(case):
            state = Santa(samples, **settings).new_state()
            if state is not None: state.append(case.k, case.v)  # the cache has it from the steps before
            return {"triton": lambda: decode(case, "triton", state)}
        return Contender(build=build, bytes=lambda **sizes: moved(samples=samples, **sizes), samples=samples,
                         reference=lambda case: decode(case, "torch"))
    found = {scheme: santa(samples, scheme=scheme) for scheme in ("systematic", "proportional")}
    found["flash"] = santa(16 * samples, flash_bytes, scheme="flash")
    found |= {keys: santa(samples, partial(santa_bytes, keys=keys), keys=keys) for keys in ("int8", "rescored")}
    return DENSE | {f"santa_{name}": contender for name, contender in found.items()}


FIELDS = ("method", "variant", "n", "B", "H", "G", "D", "dtype", "samples", "mode", "median_us", "q1_us", "q3_us",
          "bytes", "checked", "error", "ratio_to_fastest_dense")

def _key(row): return tuple(row[x] for x in ("n", "B", "H", "G", "D", "dtype", "mode"))

def add_ratios(rows: list) -> list:
    """Set `ratio_to_fastest_dense`: the median of the fastest dense method of the same case and mode over a row's own.

    Above one is faster than dense; None where nothing dense was measured.
    """
    fastest = {}
    for row in rows:
        if row["samples"] is None: fastest[_key(row)] = min(row["median_us"], fastest.get(_key(row), math.inf))
    for row in rows:
        best = fastest.get(_key(row))
        row["ratio_to_fastest_dense"] = None if best is None else round(best / row["median_us"], 4)
    return rows


class _Bench:
    "A case with what measuring takes: protocol, buffer, whom to tell, and seconds of building for each method so far."
    def __init__(self, case, protocol, buffer, say, spent):
        self.case, self.protocol, self.say, self.spent = case, protocol, say, spent
        self.buffer = protocol.buffer(case.device) if buffer is None else buffer
        self.cuda = torch.device(case.device).type == "cuda"

    def refuse(self, name, variant, error):
        "Say why there is no row."
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        kind = "refused" if isinstance(error, Refused) else type(error).__name__
        who = f"{name}{f' ({variant})' if variant else ''}, n={self.case.n}, B={self.case.B}"
        self.say(f"{who}: {kind}: {reason[:200]}")
        if self.cuda: torch.cuda.synchronize()  # an error that broke the device is raised again here and ends the bench

    def row(self, call, mode, check):
        "What a call in one mode adds to its row: error and times."
        run, out = captured(call) if mode == "graph" else (call, call())
        if mode == "graph":
            out.fill_(math.nan)
            run()
        error = check(out, self.case)
        times = quartiles(cold_times(run, self.protocol, device=self.case.device, buffer=self.buffer))
        return dict(times._asdict(), mode=mode, checked=True, error=float(f"{error:.4g}"))


def measure_one(bench: _Bench, name: str, method: Contender) -> list:
    "Check and time a method on a case. One that is not installed, raises, or fails its check is said."
    case, start, best, reference = bench.case, time.perf_counter(), {}, None
    if bench.spent.get(name, 0) > method.compile_s:
        took, allowed = bench.spent[name], method.compile_s
        bench.refuse(name, "", Refused(f"its builds took {took:.0f} s in all, allowed are {allowed:g}"))
        return []
    try:
        calls = method.build(case)
        if method.reference and cache_bytes(case) <= COMPARED: reference = method.reference(case)
    except Exception as error:
        bench.refuse(name, "", error)
        return []
    check = (check_dense if method.samples is None
             else lambda out, case: check_sampled(out, case, method.samples, reference))
    same = dict(method=name, **case.sizes, dtype=str(case.dtype).removeprefix("torch."), samples=method.samples,
                bytes=method.bytes(**case.sizes, itemsize=case.dtype.itemsize), ratio_to_fastest_dense=None)
    for variant, call in calls.items():
        try:
            check(call(), case)
            bench.spent[name] = bench.spent.get(name, 0) + time.perf_counter() - start
            for mode in ("eager", "graph") if bench.cuda else ("eager",):
                row = same | dict(variant=variant) | bench.row(call, mode, check)
                if mode not in best or row["median_us"] < best[mode]["median_us"]: best[mode] = row
        except Exception as error: bench.refuse(name, variant, error)
        start = time.perf_counter()
    return [{x: row[x] for x in FIELDS} for row in best.values()]

def measure(case: Case, methods: Mapping, protocol: Protocol = Protocol(), *, buffer: torch.Tensor | None = None, say:
            Callable = print, spent: dict | None = None) -> list:
    "Check and time every method on a case; one that is not installed, raises, or fails its check gets no row."
    bench = _Bench(case, protocol, buffer, say, {} if spent is None else spent)
    return add_ratios([row for name, method in methods.items() for row in measure_one(bench, name, method)])


def read(path=None) -> dict:
    """A record of decode steps.

    Raises ValueError, with the file's name, for rows that miss a field, were not checked, have no order in their
    quartiles or a ratio that does not follow from the medians; FileNotFoundError where none is recorded.
    """
    record = read_record(path) if path else next(iter(recorded("decode").values()), None)
    if record is None:
        raise FileNotFoundError("benchmarks/results/*_decode.json is missing: python -m benchmarks.run decode")
    name = Path(path).name if path else "decode"
    again = add_ratios([dict(row) for row in record["rows"]]) if all("samples" in row for row in record["rows"]) else []
    for i, row in enumerate(record["rows"]):
        what = f"{name}, row {i}"
        if missing := [x for x in FIELDS if x not in row]: raise ValueError(f"{what}: misses {missing[0]}")
        if row["checked"] is not True: raise ValueError(f"{what}: was not checked")
        if not 0 < row["q1_us"] <= row["median_us"] <= row["q3_us"]:
            raise ValueError(f"{what}: quartiles are out of order")
        ratio, said = row["ratio_to_fastest_dense"], again[i]["ratio_to_fastest_dense"]
        if ratio != said: raise ValueError(f"{what}: ratio_to_fastest_dense is {ratio}, the medians say {said}")
    return record


LENGTHS = 4096, 8192, 32768, 131072, 524288, 1048576
BATCHES = 1, 8, 32

def check_request(*, lengths, batches, shapes, methods, samples, dtype):
    "Raise ValueError for unknown names, for counts below one, for nothing to do and for another dtype."
    for name, given, allowed in (("shapes", shapes, SHAPES), ("methods", methods, contenders())):
        if unknown := [x for x in given if x not in allowed]:
            raise ValueError(f"{name} must be of {', '.join(allowed)}, got {unknown[0]!r}")
    for name, given in (("lengths", lengths), ("batches", batches), ("samples", [samples])):
        if bad := [x for x in given if x < 1]: raise ValueError(f"{name} must be at least 1, got {bad[0]}")
    for name, given in (("lengths", lengths), ("batches", batches), ("shapes", shapes), ("methods", methods)):
        if not list(given): raise ValueError(f"{name} must name at least one")
    if dtype not in DENSE_ERROR: raise ValueError(f"dtype must be bfloat16, float16 or float32, got {dtype}")

def plan_cases(shapes, batches, lengths, *, dtype: torch.dtype, budget_gb: float, until: float, say: Callable):
    "Cases one by one, those that fit now."
    for name, B, n in ((name, B, n) for name in shapes for B in batches for n in lengths):
        case, what = Case(SHAPES[name], n, B, dtype=dtype), f"{name}, n={n}, B={B}"
        cache, needed = cache_bytes(case) / 1e9, bytes_needed(case) / 1e9
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 1e9
        if time.perf_counter() > until: why = "the time is over"
        elif cache > budget_gb: why = f"a cache of {cache:.1f} GB is over the budget of {budget_gb:g} GB"
        elif needed > free: why = f"it needs about {needed:.1f} GB of {free:.1f} GB free"
        else:
            yield what, case
            continue
        say(f"{what}: not measured, {why}")


def _build(methods, shapes, dtype, batches, say):
    "Compile FlashInfer's kernels, if they are wanted; what cannot be built is said."
    start = time.perf_counter()
    if not {"flashinfer", "flashinfer_tc"} & set(methods): return
    try:
        build_flashinfer(sorted({SHAPES[x].D for x in shapes}), dtype, batch=max(batches) > 1)
        say(f"FlashInfer's kernels are there after {time.perf_counter() - start:.0f} s")
    except Exception as error:
        say(f"FlashInfer's kernels could not be built at once: {type(error).__name__}: {str(error)[-300:]}")

def _line(row):
    "One measurement, to be said."
    ratio = row["ratio_to_fastest_dense"] if row["samples"] else None
    return f"{row['method']} {row['median_us']:.1f} us" + (f" = {ratio:.2f}x" if ratio else "")

def _run(recorder, cases, methods, meta):
    "Measure cases and write the file after each; rows of earlier runs of the same cases go."
    spent, buffer, kept = {}, recorder.protocol.buffer("cuda"), recorder.rows
    rows = []
    for what, case in cases:
        new = measure(case, methods, recorder.protocol, buffer=buffer, say=recorder.say, spent=spent)
        rows += new
        done = {_key(row)[:-1] for row in rows}
        recorder.rows = [row for row in kept if _key(row)[:-1] not in done] + rows
        recorder.write(**meta)
        said = ", ".join(_line(row) for row in new if row["mode"] == "graph")
        recorder.say(f"{what}, {recorder.seconds():.0f} s: {said}")


def bench_decode(
    *,
    lengths=LENGTHS,                     # numbers of keys
    batches=BATCHES,                     # numbers of sequences
    shapes=tuple(SHAPES),                # names in SHAPES
    methods=None,                        # names in `contenders()`; None: all
    samples: int = 128,                  # value rows for each head; flash draws 16 times as many
    dtype: torch.dtype = torch.bfloat16, # of the cache: bfloat16, float16 or float32
    out=None,                            # file ending in .json, or a folder; None: benchmarks/results of the clone
    append: bool = False,                # keep the file's other cases?
    quick: bool = False,                 # 8,192 and 32,768 keys, one sequence, Llama 3, ten runs, no flex
    budget_gb: float = 20,               # largest cache, in 10**9 bytes
    limit_s: float = 330,                # no case is started later
    command: str = "",                   # for the record
    say: Callable = print,               # told what happens, line by line
) -> Path:                               # the file
    """Measure decode kernels on this machine's GPU and write the record.

    Raises ValueError without a CUDA device, for unknown names and counts below one.
    """
    known = contenders(samples)
    if quick:
        lengths, batches, shapes = (8192, 32768), (1,), ("llama3",)
        methods = methods or [x for x in known if x != "flex"]
    methods = list(known) if methods is None else list(methods)
    check_request(lengths=lengths, batches=batches, shapes=shapes, methods=methods, samples=samples, dtype=dtype)
    recorder = Recorder("decode", record_path("decode", out), say=say)
    recorder.protocol = Protocol(warmup=3, runs=10) if quick else Protocol()
    how = asdict(recorder.protocol) | dict(seed=0, inputs="Gaussian", l2="cold", times="CUDA events")
    meta = machine() | bandwidth() | dict(protocol=how, command=command)
    if append and recorder.out.exists():
        old, recorder.rows = read(recorder.out).values()
        meta["earlier"] = [*old.pop("earlier", []), old]
    say(f"{meta['gpu']}: copy {meta['copy_gb_s']:,.0f} GB/s, read {meta['read_gb_s']:,.0f} GB/s")
    _build(methods, shapes, dtype, batches, say)
    with torch.no_grad():
        cases = plan_cases(shapes, batches, lengths, dtype=dtype, budget_gb=budget_gb, until=recorder.began + limit_s,
                           say=say)
        _run(recorder, cases, {x: known[x] for x in methods}, meta)
    return recorder.out


def decode(recorder):
    "One decode step of every contender; in the quick form two lengths and one batch size, on a CPU one small case."
    if recorder.gpu:
        bench_decode(out=recorder.out, quick=recorder.quick, command=recorder.command, say=recorder.say)
        return None
    known, protocol = contenders(samples=8), Protocol(warmup=1, runs=2, buffer_mb=1)
    case = Case(SHAPES["pocket"], 128, dtype=torch.float32, device="cpu")
    few = "sdpa_flash", "santa_systematic", "santa_int8", "santa_rescored"
    recorder.rows += measure(case, {x: known[x] for x in few}, protocol, say=recorder.say)
    return machine("cpu") | dict(protocol=asdict(protocol))


_LOOK = { # label, colour, dashes, marker
    "santa_systematic": ("SANTA systematic", palette("schemes")["systematic"], "-", "o"),
    "santa_proportional": ("SANTA proportional", palette("schemes")["proportional"], "--", "s"),
    "santa_flash": ("SANTA flash", palette("schemes")["flash"], "-.", "D"),
    "santa_int8": ("SANTA, int8 keys", SERIES[1], "-", "p"),
    "santa_rescored": ("SANTA, int8 keys rescored", SERIES[2], "--", "h"),
    "flashinfer": ("FlashInfer", palette("contenders")["flashinfer"], "-", "v"),
    "flashinfer_tc": ("FlashInfer, tensor cores", palette("contenders")["flashinfer_tc"], "--", "^"),
    "sdpa_flash": ("SDPA flash", palette("contenders")["sdpa_flash"], "-", "P"),
    "sdpa_cudnn": ("SDPA cuDNN", palette("contenders")["sdpa_cudnn"], "--", "X"),
    "flex": ("flex_attention", palette("contenders")["flex"], "-.", "*"),
}

def _looks(rows):
    "How to draw the line of each method, those without a look of their own too."
    methods = list(dict.fromkeys(row["method"] for row in rows))
    spare = sorted(set(methods) - _LOOK.keys())
    own = {x: (x, SERIES[i % len(SERIES)], "-", "osDv^P*pdh<>8"[i % 13]) for i, x in enumerate(spare)}
    names = "label", "color", "ls", "marker"
    return {x: dict(zip(names, (_LOOK | own)[x]), ms=6, mec="white", mew=0.7) for x in methods}

def _finish(fig, handles, columns, title):
    fig.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2, handletextpad=0.5)
    fig.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return fig

def _panels(rows, draw, ylabel, title, extra=()):
    "A panel for each batch size with keys across, in which `draw(ax, keys, rows, look)` draws the line of a method."
    shape = SHAPES["llama3"]
    rows = [row for row in rows if (row["H"], row["G"], row["D"]) == shape and row["mode"] == "graph"]
    if not rows: raise ValueError(f"rows must hold some with H, G, D = {tuple(shape)} and mode 'graph', got none")
    batches, looks, ticks = sorted({row["B"] for row in rows}), _looks(rows), sorted({row["n"] for row in rows})
    fig, axes = plt.subplots(1, len(batches), figsize=(3.4 * max(len(batches), 2.2), 4.6), sharey=True, squeeze=False)
    for ax, B in zip(axes.flat, batches):
        for method, look in looks.items():
            line = sorted((x for x in rows if x["B"] == B and x["method"] == method), key=lambda row: row["n"])
            if line: draw(ax, [row["n"] for row in line], line, look)
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{n / 2**20:g}M" if n >= 2**20 else f"{n / 1024:g}k" for n in ticks], minor=False)
        ax.set_xlabel("keys")
        ax.set_title(f"{B} sequence{'s' * (B > 1)}", fontsize=11, fontweight="normal")
    axes[0, 0].set_ylabel(ylabel)
    return _finish(fig, [*(plt.Line2D([], [], **look) for look in looks.values()), *extra], 4, title)


def plot_latency(
    rows: list,                          # of the record
    *,
    title: str = "Time of a decode step", # what to see
) -> Figure:
    "Median time of a step against keys, with its quartiles, for each method. Raises ValueError where no row fits."
    def draw(ax, keys, line, look):
        ax.plot(keys, [row["median_us"] for row in line], **look)
        band = [row["q1_us"] for row in line], [row["q3_us"] for row in line]
        ax.fill_between(keys, *band, color=look["color"], alpha=0.15, lw=0)
        ax.set_yscale("log")
    return _panels(rows, draw, "time of one step (µs, median and quartiles)", title)

def plot_ratio(
    rows: list,                                                           # of the record
    *,
    title: str = "Speed over the fastest dense method of the same run", # what to see
) -> Figure:
    """Speed over that of the fastest dense method against keys; dotted: what the bytes alone would give.

    Raises ValueError where no row fits.
    """
    rows = [row for row in rows if row["ratio_to_fastest_dense"] is not None]
    of = lambda row: (row["B"], row["n"], row["H"])
    dense, sampled = {of(x): x["bytes"] for x in rows if x["samples"] is None}, any(x["samples"] for x in rows)
    def draw(ax, keys, line, look):
        ax.plot(keys, [row["ratio_to_fastest_dense"] for row in line], **look)
        if line[0]["samples"] is None: return
        ax.plot(keys, [dense[of(row)] / row["bytes"] for row in line], ":", color=look["color"], alpha=0.6, lw=1.2)
    dotted = [plt.Line2D([], [], ls=":", color="0.4", lw=1.2, label="ratio of the bytes")] if sampled else []
    fig = _panels(rows, draw, "speed over the fastest dense method", title, dotted)
    for ax in fig.axes:
        ax.axhline(1, color="0.5", lw=1, zorder=1)
        ax.set_ylim(0, None)
    return fig


def plot_roofline(
    meta: Mapping,                                                      # of the record: copy_gb_s and read_gb_s
    rows: list,                                                         # of the same record
    *,
    title: str = "How close each step comes to the memory's bandwidth", # what to see
) -> Figure:
    """Bandwidth reached, fewest bytes over median time, against those bytes, for all shapes and batches.

    Lines: the measured ceilings. Raises ValueError where no row fits.
    """
    rows = [row for row in rows if row["mode"] == "graph"]
    if not rows: raise ValueError("rows must hold some of mode 'graph', got none")
    fig, ax = plt.subplots(figsize=(8, 5.2))
    for name, what, dashes in (("read_gb_s", "read", "-"), ("copy_gb_s", "copy", "--")):
        ax.axhline(meta[name], color="0.45", lw=1.2, ls=dashes, label=f"{what}, measured: {meta[name]:,.0f} GB/s")
    for method, look in _looks(rows).items():
        line = [row for row in rows if row["method"] == method]
        reached = [row["bytes"] / row["median_us"] / 1e3 for row in line]
        ax.plot([row["bytes"] / 1e6 for row in line], reached, **look | dict(ls="", alpha=0.85))
    ax.set(xscale="log", ylim=(0, None), xlabel="fewest bytes of the step (MB)", ylabel="fewest bytes over time (GB/s)")
    return _finish(fig, ax.get_legend_handles_labels()[0], 3, title)
