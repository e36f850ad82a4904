"""A window and its corrections beside dense kernels, from 2,048 to 1,048,576 positions, and what each launch takes"""
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import sparse_nb
from sparse_nb.bench import Protocol, Shape
from sparse_nb.core.blocks import BlockPattern, sinks_window_pattern
from sparse_nb.kernels.blocks import attend_blocks, attend_streaming
from sparse_nb.kernels.delta import (
    DeltaCall, attend_delta, launch_delta, launch_window, merge_whole, read_whole, tile_settings)
from sparse_nb.methods.block_controls import RandomBlocks
from sparse_nb.methods.vertical_slash import VerticalSlash
from sparse_nb.plots import METHOD_COLOURS, palette
from benchmarks.prompt import BLOCK, CORRECTIONS, SKETCHES, Prompt, Setting, Truth, Work, chosen, needed
from benchmarks.recorder import Recorder, record_path


LENGTHS = 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576
FLEX = 32768, 131072  # lengths that FlexAttention is compiled for

def ours(p: Prompt) -> dict:
    "Our calls."
    s, given = p.setting, p.setting._asdict()
    def corrected(name): return lambda: attend_delta(p.q, p.k, p.v, correction=name, **given)
    def sketched(name):
        sizes = dict(query_block=BLOCK, key_block=BLOCK)
        return lambda: attend_blocks(p.q, p.k, p.v, *chosen(p, name), **sizes)[0]
    near = dict(sinks=s.sinks, window=s.window)
    return {"streaming": (lambda: attend_streaming(p.q, p.k, p.v, **near)[0], "streaming"),
            "blocks": (by_lists(p, sinks_window_pattern(p.q, p.k, **near)), "streaming"),
            **{name: (corrected(name), name) for name in CORRECTIONS},
            **{name: (sketched(name), name) for name in SKETCHES}}

def by_lists(p: Prompt, pattern: BlockPattern) -> Callable:
    "Our attention by blocks over lists that are made beforehand."
    index = pattern.index[..., :int(pattern.count.max())].contiguous()
    given = dict(gap=pattern.gap, query_block=pattern.query_block, key_block=pattern.key_block)
    return lambda: attend_blocks(p.q, p.k, p.v, index, pattern.count, **given)[0]

def window_mask(p: Prompt, size: int = 128):
    "Sinks and window for FlexAttention: which blocks to read, which of them whole, and the mask of the others."
    from torch.nn.attention.flex_attention import BlockMask
    s, M = p.setting, -(-p.n // size)
    first, b = size * torch.arange(M, device=p.device)[:, None], torch.arange(M, device=p.device)
    last = first + size - 1
    read = (b * size <= last) & ((b * size < s.sinks) | (b * size + size > first - s.window + 1))
    full = (b * size + size - 1 <= first) & (b * size > last - s.window)
    def lists(mask):
        index = (~mask).to(torch.uint8).argsort(dim=-1, stable=True).int()
        return mask.sum(-1, dtype=torch.int32)[None, None], index[None, None]
    def seen(b, h, i, j): return (j <= i) & ((j > i - s.window) | (j < s.sinks))
    return BlockMask.from_kv_blocks(*lists(read & ~full), *lists(full), BLOCK_SIZE=size, mask_mod=seen,
                                    seq_lengths=(p.n, p.n))


def flex(p: Prompt) -> Callable:
    "FlexAttention over sinks and window; compiled for a GPU."
    from torch.nn.attention.flex_attention import flex_attention
    mask, attend = window_mask(p), flex_attention
    if p.device == "cuda": attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(p.q, p.k, p.v, block_mask=mask, enable_gqa=True)

def sdpa(p: Prompt, backend: SDPBackend) -> Callable:
    "PyTorch's dense causal attention by one of its kernels."
    def call():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(p.q, p.k, p.v, is_causal=True, enable_gqa=True)
    return call

def flashinfer(p: Prompt) -> Callable:
    "FlashInfer's dense causal attention, in the layout that it likes."
    from flashinfer import single_prefill_with_kv_cache
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (p.q, p.k, p.v))
    return lambda: single_prefill_with_kv_cache(q, k, v, causal=True)[None].transpose(1, 2)


def fa4(p: Prompt, pattern: BlockPattern | None = None) -> Callable:
    "FlashAttention-4's forward, in the layout that it likes; of a pattern by lists of whole and of partial blocks."
    from flash_attn.cute import flash_attn_func
    q, k, v = (x.transpose(1, 2).contiguous() for x in (p.q, p.k, p.v))
    given = dict(causal=True) if pattern is None else fa4_lists(p, pattern)
    def call():
        out = flash_attn_func(q, k, v, **given)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
    return call

def fa4_lists(p: Prompt, pattern: BlockPattern) -> dict:
    "A pattern as FlashAttention-4 takes it."
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    window, sinks = (p.n, 0) if pattern.gap is None else (p.setting.window, p.setting.sinks)
    @cute.jit
    def seen(b, h, i, j, lengths, more):
        reach, first = utils.scalar_to_ssa(window, cutlass.Int32), utils.scalar_to_ssa(sinks, cutlass.Int32)
        return (j <= i) & ((j > i - reach) | (j < first))
    def lists(mask):
        count = mask.sum(-1, dtype=torch.int32)
        index = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., :max(1, int(count.max()))]
        return count, index.int().contiguous()
    whole, part = pattern.split()
    sizes = pattern.query_block, pattern.key_block
    blocks = BlockSparseTensorsTorch(*lists(part), *lists(whole), block_size=sizes)
    return dict(mask_mod=seen, block_sparse_tensors=blocks, pack_gqa=False)

def fa4_window(p: Prompt) -> Callable:
    "FlashAttention-4 over sinks and window, in the blocks that it likes best."
    near = dict(sinks=p.setting.sinks, window=p.setting.window)
    return fa4(p, sinks_window_pattern(p.q, p.k, **near, query_block=128, key_block=128))

RIVALS = {"sdpa_flash": (lambda p: sdpa(p, SDPBackend.FLASH_ATTENTION), "dense"),
          "sdpa_cudnn": (lambda p: sdpa(p, SDPBackend.CUDNN_ATTENTION), "dense"),
          "flashinfer": (flashinfer, "dense"), "fa4": (fa4, "dense"), "flex": (flex, "streaming"),
          "fa4_window": (fa4_window, "streaming")}


SLOW = 30  # operations, in 10**12, from which on a call is timed without a graph
BRIEF = Protocol(warmup=1, runs=3)

def note(recorder: Recorder, p: Prompt, call: Callable, check: Callable | None, work: Work, **row):
    "Check and time a call; a row with its rate."
    tflop, plain = work.tflop(p.shape), None
    if recorder.device == "cuda" and tflop > SLOW and row.get("method") in RIVALS:
        plain = Protocol(warmup=1, runs=2 if tflop > 10 * SLOW else BRIEF.runs, buffer_mb=recorder.protocol.buffer_mb)
    how = dict(mode="eager", runs=plain.runs) if plain else {}
    sizes = dict(n=p.n, H=p.shape.H, G=p.shape.G, D=p.shape.D)
    recorder.measure_row(call, check, plain=plain, **row, **sizes, **how, keys=round(sum(work[:3]) / p.n, 1),
                         tflop=round(tflop, 6))


def attempt(recorder: Recorder, what: str, step: Callable):
    "Run a step; what cannot run here is said and left out."
    try: step()
    except Exception as error:
        recorder.say(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
        if recorder.device == "cuda": torch.cuda.synchronize()  # what broke the device is raised again, and ends it

def measure_calls(recorder: Recorder, p: Prompt, truth: Truth, *, until: float, without=()):
    "Rows of all contenders at one length."
    checks = {name: truth.check(name) for name in ("dense", "streaming", *CORRECTIONS, *SKETCHES)}
    def one(name, call, kind):
        note(recorder, p, call, checks[kind], needed(p.n, p.setting, kind), method=name)
    for name, (call, kind) in ours(p).items(): attempt(recorder, name, lambda: one(name, call, kind))
    for name, (build, kind) in RIVALS.items():
        if name in without or name == "flex" and recorder.device == "cuda" and p.n not in FLEX: continue
        if time.perf_counter() > until: recorder.say(f"{name}, n={p.n}: not measured, the time is over")
        else: attempt(recorder, f"{name}, n={p.n}", lambda: one(name, build(p), kind))


LISTS = {"vertical_slash": VerticalSlash(rounding="pool"), "random": RandomBlocks(0.1)}
LISTED = 8192, 32768, 131072  # lengths at which they are timed

def pairs_of_blocks(pattern: BlockPattern) -> Work:
    "What a head has to do, in the mean of all."
    mask = pattern.mask()[0]
    rows = pattern.query_block * torch.arange(1, mask.shape[1] + 1, device=mask.device)[:, None]
    first = pattern.key_block * torch.arange(mask.shape[2], device=mask.device)
    seen = sum((rows - i - first).clamp(0, pattern.key_block) for i in range(pattern.query_block))
    return Work(round(int((seen * mask).sum()) / len(mask)), 0, 0, False)

def measure_lists(recorder: Recorder, p: Prompt, truth: Truth, *, without=()):
    "Rows of a choice, of attention to what it chose, and of the baseline."
    for name, method in LISTS.items():
        pattern = method.pattern(p.q, p.k, seed=0)
        check, work = truth.check(pattern), pairs_of_blocks(pattern)
        row = dict(part="lists", lists=name, density=float(f"{float(pattern.density()):.4g}"))
        if name != "random":
            choice = Protocol(warmup=1, runs=3, buffer_mb=recorder.protocol.buffer_mb)
            recorder.measure_row(lambda: method.pattern(p.q, p.k, seed=0).count.float(), None, plain=choice, **row,
                                 by="choice", mode="eager", runs=choice.runs, n=p.n, H=p.shape.H, G=p.shape.G,
                                 D=p.shape.D)
        note(recorder, p, by_lists(p, pattern), check, work, **row, by="ours")
        if "fa4" not in without:
            attempt(recorder, f"fa4, {name}, n={p.n}",
                    lambda: note(recorder, p, fa4(p, pattern), check, work, **row, by="fa4"))


TILED, SPLIT = (131072,), (32768, 131072, 1048576)  # lengths at which tiles, and parts of the keys, are tried
NEAR = (64, 32, 4, 3, 168), (64, 64, 4, 3, None), (128, 64, 8, 2, 128), (128, 32, 4, 3, None)
WHOLE = (128, 32, 4, 3, None), (64, 32, 4, 3, 168), (64, 64, 4, 3, None), (128, 64, 4, 2, None)
MEANS = (64, 64, 4, 3, None), (64, 64, 4, 2, None), (64, 32, 4, 4, None), (128, 64, 8, 3, None)

class Steps:
    "The launches of a correction, each alone, and their work."
    def __init__(self, p, correction):
        self.p, s, self.means = p, p.setting, correction == "tangent"
        self.call = DeltaCall(p.q, p.k, p.v, s.sinks, s.window, s.gamma, correction, s.tail, False, None, None, None)
        self.found = self.read()
        self.taught, self.correction = merge_whole(self.call, self.found), correction

    def read(self, tiles=None, part=None):
        return read_whole(self.call, self.call.A, 0 if self.means else self.call.X, self.means, tiles, part)

    def whole(self, tiles=None, part=None): return lambda: self.read(tiles, part).rows

    def merge(self): return merge_whole(self.call, self.found)[0]

    def window(self, tiles=None):
        def call():
            launch_window(self.call, self.taught, min(self.p.setting.anchors, self.call.A), tiles)
            return self.call.out
        return call

    def work(self, launch):
        "What the launch has to do."
        work = needed(self.p.n, self.p.setting, self.correction)
        if launch == "window": return work._replace(missing=0, tail=0)
        return work._replace(near=0, tail=0 if self.means else work.tail)


def measure_launches(recorder: Recorder, p: Prompt):
    "Rows of each launch of both corrections, and of the choice of blocks."
    for name in SKETCHES:
        note(recorder, p, lambda: chosen(p, name)[1].float(), None, Work(0, 0, 0, False), part="launches",
             launch="choice", correction=name)
    for name in ("delta", "tangent"):
        steps = Steps(p, name)
        for launch, call in {"whole rows": steps.whole(), "merge": steps.merge, "window": steps.window()}.items():
            work = steps.work(launch) if launch != "merge" else Work(0, 0, 0, False)
            note(recorder, p, call, None, work, part="launches", launch=launch, correction=name)

def variants(n: int, tiled=TILED, split=SPLIT):
    "What is tried beside the shipped settings."
    whole = {"delta": ("whole", WHOLE), "tangent": ("means", MEANS)}
    for name, (argument, settings) in whole.items():
        if n in tiled:
            for tiles in NEAR: yield name, "window", "near", tiles, None
            for tiles in settings: yield name, "whole rows", argument, tiles, None
        for parts in (1, 2, 3, 4, 8) if n in split else ():
            yield name, "whole rows", argument, settings[0], -(-n // parts // 64) * 64

def measure_tiles(recorder: Recorder, p: Prompt, truth: Truth, chosen: list):
    "Rows of single launches with other tiles and parts; each is checked as a part of the whole call first."
    s, checks, steps = p.setting, {}, {}
    def one(name, launch, argument, tiles, part):
        given = {argument: tiles} | ({} if part is None else dict(part=part))
        out = launch_delta(p.q, p.k, p.v, s.sinks, s.window, s.gamma, name, s.anchors, s.tail, False, None, None,
                           **given)
        error = checks[name](out)
        call = steps[name].window(tiles) if launch == "window" else steps[name].whole(tiles, part)
        shipped = tiles == tile_settings(p.shape.D, 2, True, {"near": "window"}.get(argument, argument))
        note(recorder, p, call, None, steps[name].work(launch), part="tiles", launch=launch, correction=name,
             tiles=tiles, keys_of_part=part, shipped=shipped and part is None, error=float(f"{error:.3g}"))
    for name, *rest in chosen:
        if name not in steps: steps[name], checks[name] = Steps(p, name), truth.check(name)
        attempt(recorder, f"{name}, {rest}", lambda: one(name, *rest))


def compile_jobs(lengths, tiles: bool) -> list:
    "What has to be compiled, piece by piece."
    jobs = [lambda p, name=name: ours(p)[name][0]() for name in ("streaming", "blocks", *CORRECTIONS, *SKETCHES)]
    def launch(name, argument, setting):
        def job(p):
            s = p.setting
            launch_delta(p.q, p.k, p.v, s.sinks, s.window, s.gamma, name, s.anchors, s.tail, False, None, None,
                         **{argument: setting})
        return job
    if tiles:
        found = dict.fromkeys((name, argument, x) for n in lengths for name, _, argument, x, _ in variants(n))
        jobs += [launch(*x) for x in found]
    return jobs + [lambda p, n=n: flex(Prompt(n, p.device))() for n in FLEX if n in lengths]

@torch.no_grad()
def compile_some(i: int, n: int, lengths, tiles: bool, p: Prompt | None = None):
    "Call every n-th of `compile_jobs` once, on a prompt of 4,096 positions if none is given."
    p = p or Prompt(4096, "cuda")
    for job in compile_jobs(lengths, tiles)[i::n]:
        try: job(p)
        except Exception as error: print(f"{type(error).__name__}: {str(error)[:200]}", flush=True)

def compile_all(recorder: Recorder, lengths, tiles: bool, seconds: float = 75) -> list:
    "Compile in processes of their own. What is ours and not done is compiled when it is called."
    start, n = time.perf_counter(), max(1, min(16, len(os.sched_getaffinity(0)) - 1))
    root = str(Path(sparse_nb.__file__).parents[1])
    where = os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))
    codes = [f"compile_some({i}, {n}, {tuple(lengths)}, {tiles})" for i in range(n)]
    if find_spec("flashinfer"): codes.append("flashinfer(Prompt(4096, 'cuda'))()")
    children = [subprocess.Popen([sys.executable, "-c", f"from benchmarks.prefill import *; {x}"], env=where)
                for x in codes]
    for child in children:
        try: child.wait(timeout=max(1, start + seconds - time.perf_counter()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    recorder.say(f"compiled after {time.perf_counter() - start:.0f} s")
    return ["flashinfer"] if len(children) == n or children[-1].returncode else []


LONGEST = 2**20

def check_lengths(lengths):
    "Raise ValueError for nothing to do, and for lengths below 1 or above `LONGEST`."
    if not list(lengths): raise ValueError("lengths must name at least one")
    if bad := [n for n in lengths if not 1 <= n <= LONGEST]:
        raise ValueError(f"lengths must be at least 1 and at most {LONGEST}, got {bad[0]}")

def measure_prompts(recorder: Recorder, prompts, write: Callable, *, tiles: Callable, listed=LISTED, split=SPLIT, until:
                    float, without=()):
    "All rows of these prompts."
    def one(p):
        truth = Truth(p)
        measure_calls(recorder, p, truth, until=until, without=without)
        if p.n in listed: measure_lists(recorder, p, truth, without=without)
        if p.n in split: attempt(recorder, f"launches, n={p.n}", lambda: measure_launches(recorder, p))
        measure_tiles(recorder, p, truth, tiles(p.n))
    for make in prompts:
        one(make())
        gc.collect()  # a graph holds the memory of its tensors
        if recorder.device == "cuda": torch.cuda.empty_cache()
        write()

@torch.no_grad()
def bench_prefill(
    *,
    lengths=LENGTHS,        # positions
    tiles: bool = False,    # other tiles, too?
    quick: bool = False,    # few runs?
    out=None,               # file ending in .json, or a folder; None: benchmarks/results of the clone
    limit_s: float = 200,   # no baseline is begun later
    command: str = "",      # for the record
    say: Callable = print,  # told what happens, line by line
) -> Path:                  # the file
    "Measure prompts on this machine's GPU and write the record. Raises ValueError without one, and for bad lengths."
    lengths = sorted(set(lengths))
    check_lengths(lengths)
    start, recorder = time.perf_counter(), Recorder("prefill", record_path("prefill", out), quick=quick, say=say)
    recorder.command = command or recorder.command
    recorder.protocol = Protocol(warmup=2, runs=9, buffer_mb=recorder.protocol.buffer_mb)
    without = compile_all(recorder, lengths, tiles)
    if not find_spec("flash_attn"): without += ["fa4", "fa4_window"]
    if without: say(f"not measured, since not installed or not compiled: {', '.join(without)}")
    prompts = [lambda n=n: Prompt(n, "cuda") for n in lengths]
    write = lambda: recorder.write(**Setting()._asdict())
    measure_prompts(recorder, prompts, write, tiles=lambda n: list(variants(n)) if tiles else [],
                    until=start + limit_s, without=without)
    return recorder.out


@torch.no_grad()
def prefill(recorder):
    "Prompts with all that is tried; in the quick form one short prompt."
    if recorder.gpu:
        given = dict(lengths=(4096,)) if recorder.quick else dict(tiles=True)
        bench_prefill(**given, quick=recorder.quick, out=recorder.out, say=recorder.say)
        return
    small, tiles = Setting(4, 24, 16, 4, 16), (32, 32, 4, 2, None)
    tried = [("tangent", "window", "near", tiles, None), ("delta", "whole rows", "whole", tiles, 64)]
    make, write = lambda: Prompt(96, "cpu", Shape(2, 1, 16), small), lambda: recorder.write(**small._asdict())
    measure_prompts(recorder, [make], write, tiles=lambda n: tried, listed=(96,), split=(96,),
                    until=time.perf_counter() + 60, without=["fa4", "fa4_window"])


_COLOURS = palette("contenders") | palette("corrections")
_LINES = { # label, colour, dashes, marker
    "streaming": ("window", METHOD_COLOURS["streaming"], "-", "v"),
    "recompute": ("Eq. 5", _COLOURS["recompute"], "-.", "s"), "delta": ("Eq. 6", _COLOURS["delta"], "--", "D"),
    "tangent": ("tangent", _COLOURS["tangent"], "-", "o"),
    "sketch_walk_10": ("Sketch&Walk, 10 %", METHOD_COLOURS["sketch_walk"], "-", "h"),
    "sketch_walk_20": ("Sketch&Walk, 20 %", METHOD_COLOURS["sketch_walk"], "--", "H"),
    "flex": ("FlexAttention, window", _COLOURS["flex"], ":", "*"),
    "sdpa_flash": ("FlashAttention-2, dense", _COLOURS["sdpa_flash"], "-", "P"),
    "sdpa_cudnn": ("cuDNN, dense", _COLOURS["sdpa_cudnn"], "--", "X"),
    "flashinfer": ("FlashInfer, dense", _COLOURS["flashinfer"], "-", "^"),
    "fa4": ("FlashAttention-4, dense", _COLOURS["fa4"], "-", "<"),
    "fa4_window": ("FlashAttention-4, window", _COLOURS["fa4"], ":", ">"),
}
DENSE_CALLS = [name for name, (_, kind) in RIVALS.items() if kind == "dense"]


def over_dense(rows: list) -> dict:
    "Speed over the fastest dense call. Raises ValueError where no length has one."
    times = {(row["method"], row["n"]): row["median_us"] for row in rows if "method" in row}
    best = {n: min(times[m, n] for m in DENSE_CALLS if (m, n) in times) for n in sorted({
        n for m, n in times if m in DENSE_CALLS})}
    if not best: raise ValueError(f"rows must hold one of {', '.join(DENSE_CALLS)}, got none")
    methods = dict.fromkeys(method for method, _ in times)
    return {m: {n: best[n] / times[m, n] for n in best if (m, n) in times} for m in methods}

def pays_from(speeds: dict) -> int | None:
    "The length from which a method is faster at that and at all longer lengths."
    slow = [n for n, x in speeds.items() if x <= 1]
    return min((n for n in speeds if n > max(slow, default=0)), default=None)

def plot_prompts(rows: list, *, title: str = "Attention of a prompt, beside dense kernels") -> Figure:
    "Time of a head, and speed over the fastest dense call, by length. Raises ValueError as `over_dense`."
    fig, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.6), layout="constrained")
    for method, speeds in over_dense(rows).items():
        if method not in _LINES: continue
        name, colour, dashes, marker = _LINES[method]
        own = (row for row in rows if row.get("method") == method)
        times = sorted((row["n"], row["median_us"] / 1e3 / row.get("H", 1)) for row in own)
        look = dict(color=colour, ls=dashes, marker=marker, ms=6, mec="white", mew=0.7)
        left.plot(*zip(*times), **look, label=name)
        right.plot(list(speeds), list(speeds.values()), **look)
    right.axhline(1, color="0.5", lw=1, zorder=1)
    left.set(ylabel="time of a head (ms, median)")
    right.set(ylabel="speed over the fastest dense kernel")
    ticks = sorted({row["n"] for row in rows if "method" in row})
    for ax in (left, right):
        ax.set(xscale="log", yscale="log", xlabel="positions")
        ax.set_xticks(ticks, [f"{n // 2**20}M" if n >= 2**20 else f"{n // 1024}k" for n in ticks], minor=False)
        ax.minorticks_off()
    fig.legend(loc="outside lower center", ncols=4)
    fig.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return fig
