"""How the tiles of kernels were found: prompts through lists of blocks and through a window, beside the dense kernels
of PyTorch; and of Sketch&Walk each launch of a step, each of a prompt's choice, and attention to the lists"""
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparse_nb.bench import SHAPES, Protocol, Shape
from sparse_nb.core.blocks import BlockPattern, sinks_window_pattern
from sparse_nb.kernels import blocks as by_blocks, sketch_walk as steps, sketch_walk_prefill as choice
from sparse_nb.kernels.blocks import attend_blocks, launch_blocks, launch_streaming, tile_settings
from sparse_nb.kernels.common import LOG2E
from sparse_nb.sketch_walk import SketchWalk
from benchmarks.launches import Indexed, blocks_error, indexed
from benchmarks.prompt import BLOCK, Prompt, Setting, Truth, chosen
from benchmarks.recorder import Recorder
from benchmarks.timing import Case, close_to


DENSITY = 0.1 # of the lists

@contextmanager
def instead(module, **settings):
    "Launches of a module of kernels with these in place of its settings, or of what its functions say; None: its own."
    with ExitStack() as held:
        for name, value in settings.items():
            other = value if name.isupper() else lambda *_, value=value: value
            if value is not None: held.enter_context(mock.patch.object(module, name, other))
        yield


# Lists of blocks, and a window

def _checker(q, k, v, seen):
    "A check of an output: some of its rows against float64, over the keys that `seen(head, rows)` says they see"
    n, heads = q.shape[2], (0, q.shape[1] - 1)
    rows = torch.randint(n, (48,), generator=torch.Generator().manual_seed(1))
    rows = torch.cat([torch.arange(min(16, n)), rows]).to(q.device)
    R, want = q.shape[1] // k.shape[1], []
    for h in heads:
        scores = q[0, h, rows].double() @ k[0, h // R].double().mT * q.shape[3]**-0.5
        want.append(scores.masked_fill(~seen(h, rows), -torch.inf).softmax(-1) @ v[0, h // R].double())
    close = close_to(torch.stack(want))
    return lambda out: close(torch.stack([out[0, h, rows] for h in heads]))


STREAMING = (((128, 64, 4, 2, None), False), ((128, 64, 4, 2, None), True), ((128, 128, 8, 2, None), True),
             ((128, 64, 8, 2, 128), True), ((64, 64, 4, 3, None), False), ((64, 64, 4, 3, None), True))
OF_LISTS = (((64, 64, 4, 3, None), True), ((128, 128, 8, 3, None), True), ((128, 64, 4, 3, None), True),
         ((128, 64, 8, 3, 128), True))
READ, SINKS, WINDOW = (32768, 131072), 4, 2048  # positions; of the window

class _Prompt:
    "Queries, keys and values of one length, and how its rows are made."
    def __init__(self, recorder, n, shape, window):
        self.recorder, self.n, self.shape, self.window = recorder, n, shape, window
        self.generator = torch.Generator(recorder.device).manual_seed(0)
        new = lambda heads: self.rand(torch.randn, 1, heads, n, shape.D).bfloat16()
        self.q, self.k, self.v = new(shape.H), new(shape.G), new(shape.G)
        self.i, self.each = torch.arange(n, device=recorder.device), 4 * shape.H * shape.D / 1e12

    def rand(self, draw, *size): return draw(*size, device=self.recorder.device, generator=self.generator)

    def note(self, call, seen, pairs, **row):
        "Check and time a call, whose queries see `pairs` keys in all."
        check = _checker(self.q, self.k, self.v, seen)
        self.recorder.measure_row(call, check, tflop=round(self.each * pairs, 4), n=self.n, **row)


def _dense(p):
    "PyTorch's dense kernels."
    for name, backend in (("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa_flash", SDPBackend.FLASH_ATTENTION)):
        def dense():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(p.q, p.k, p.v, is_causal=True, enable_gqa=True)
        try: p.note(dense, lambda h, rows: p.i <= rows[:, None], p.n * (p.n + 1) / 2, method=name)
        except RuntimeError as error: p.recorder.say(f"{name}: {str(error)[:100]}")

def _streaming(p, settings):
    "A window and sinks, by loop bounds."
    seen = lambda h, rows: (p.i <= rows[:, None]) & ((p.i > rows[:, None] - p.window) | (p.i < SINKS))
    pairs = int((p.i + 1).clamp(max=SINKS + p.window).sum())
    for tiles, engine in settings:
        call = lambda: launch_streaming(p.q, p.k, p.v, SINKS, p.window, None, None, None, False)[0]
        shipped = tiles == tile_settings(128, 2, engine, False)
        with instead(by_blocks, tile_settings=tiles, by_engine=engine):
            p.note(call, seen, pairs, method="streaming", tiles=tiles, engine=engine, shipped=shipped)
    return seen, pairs

def _lists(p, pattern, seen, pairs, settings, **row):
    "Lists of blocks."
    density = round(float(pattern.density()), 4)
    for tiles, engine in settings:
        call = lambda: launch_blocks(p.q, p.k, p.v, pattern.index, pattern.count, pattern.gap, pattern.query_block,
                                     pattern.key_block, True, None, None, None, False)[0]
        shipped = tiles == tile_settings(128, 2, engine, True)
        with instead(by_blocks, tile_settings=tiles, by_engine=engine):
            p.note(call, seen, pairs, tiles=tiles, engine=engine, density=density, shipped=shipped, **row)

def _random_lists(p, block, settings):
    "Lists that are drawn at random, one for each group."
    (H, G, _), M, n = p.shape, -(-p.n // block), p.n
    mask = p.rand(torch.rand, 1, G, M, M) < DENSITY
    mask = (mask | torch.eye(M, dtype=torch.bool, device=p.q.device)).tril()
    pattern = BlockPattern.from_mask(mask, queries=n, keys=n, query_block=block, key_block=block)
    listed = lambda h, rows: mask[0, h // (H // G), rows // block].repeat_interleave(block, -1)[:, :n]
    pairs = ((int(mask.sum()) - G * M) * block**2 + G * M * block * (block + 1) / 2) / G
    _lists(p, pattern, lambda h, rows: listed(h, rows) & (p.i <= rows[:, None]), pairs, settings, method="lists",
           block=block)


@torch.no_grad()
def blocks(recorder):
    "Time prompts by blocks and window, and PyTorch's dense kernels."
    gpu, quick = recorder.gpu, recorder.quick
    if gpu: recorder.protocol = Protocol(warmup=3, runs=15, buffer_mb=recorder.protocol.buffer_mb)
    shape, window = (SHAPES["llama3"], WINDOW) if gpu else (Shape(2, 1, 16), 48)
    streaming, lists = (STREAMING, OF_LISTS) if gpu else ([(None, False)], [(None, False)])
    if gpu:
        a, b = torch.randn(2, 8192, 8192, device=recorder.device).bfloat16()
        recorder.measure_row(lambda: a @ b, tflop=round(2 * len(a)**3 / 1e12, 4), method="matmul", n=len(a))
    for n in (4096 if gpu else 160,) if quick else READ:
        p = _Prompt(recorder, n, shape, window)
        if gpu: _dense(p)
        seen, pairs = _streaming(p, streaming)
        pattern = sinks_window_pattern(p.q, p.k, sinks=SINKS, window=window)
        _lists(p, pattern, seen, pairs, lists[-1:], method="window_by_lists", block=64)
        for block in (128, 64, 32) if gpu else (32,): _random_lists(p, block, lists if block > 32 else lists[-1:])
    return dict(sinks=SINKS, window=window, density=DENSITY)


# Sketch&Walk

LENGTHS, PROMPT = (131072, 524288), 131072  # keys of a step, positions of a prompt
STEPS = dict(
    score=((256, 8, 3, 2), (256, 8, 4, 2), (256, 8, 2, 2), (256, 8, 3, 3), (256, 4, 3, 3), (128, 4, 3, 4),
           (128, 4, 3, 3), (128, 8, 3, 2), (64, 4, 4, 4)),
    select=((4, 512, 16), (4, 512, 0), (8, 512, 0), (8, 512, 16), (16, 512, 16), (8, 1024, 16), (8, 256, 16),
            (8, 512, 8), (8, 512, 24), (8, 512, 32)),
    read=((32, 4, 3, 5, None), (64, 4, 3, 3, None), (64, 4, 4, 3, None), (64, 4, 3, 4, 128), (64, 4, 2, 4, None),
          (64, 4, 3, 2, None), (64, 8, 3, 3, None), (32, 4, 4, 4, 128), (32, 4, 4, 5, None), (128, 8, 3, 2, None),
          (128, 4, 2, 2, None), (32, 2, 4, 6, None), (64, 4, 4, 2, None), (64, 2, 3, 4, None)),
    merge=((64, 2), (32, 4), (16, 4), (64, 4), (32, 8), (32, 2), (16, 2)))
PAIRS = ((64, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2),
         (64, 128, 8, 2), (64, 64, 8, 3), (128, 64, 4, 2), (64, 32, 4, 3))
CHOICE = dict(means=((32, 8), (16, 4), (32, 4), (16, 2), (64, 8), (16, 8)), sums=PAIRS, shares=PAIRS,
              choose=(1, 2, 4, 8), exact=((128, 64, 8, 2), (128, 64, 8, 4), (128, 64, 4, 3), (128, 32, 8, 4),
                                          (64, 64, 4, 3), (256, 64, 8, 3)))
LISTS = ((128, 64, 8, 3, 128), (128, 32, 8, 5, 128), (256, 32, 16, 5, 128), (256, 64, 8, 4, None),
         (256, 64, 16, 4, 128), (256, 32, 8, 5, None), (64, 32, 4, 4, 168), (64, 64, 4, 3, 168), (128, 64, 8, 4, None),
         (128, 64, 4, 4, None))
RULES = (("fine4", "group", "mean"), ("fine4", "each", "mean"), ("fine4", "group", "max"), ("fine4", "each", "max"),
         ("fine16", "each", "max"))  # index, who shares a list, and how queries of a block are pooled
REFINED = dict(refine=2, least=3), dict(refine=2), dict(least=3)  # settings of the first and the last of them
SHORT = 32768,  # positions of prompts that are read by each rule, beside `PROMPT`
WALKED = "mean", "fine4"  # indexes that a walk is timed on
ALONE = Protocol(warmup=1, runs=5)  # of calls in which PyTorch's launches are few beside their work


def measure_step(recorder: Recorder, x: Indexed, name: str, value):
    "A row: the step with these tiles of one launch."
    tiles, s = steps.Tiles()._replace(**{name: value}), steps.Settings(x.summary.block, DENSITY)
    call = lambda: steps.launch(x.case.q, x.case.k, x.case.v, x.index, s, tiles=tiles)
    found = call()
    recorder.measure_row(lambda: call().out, lambda out: blocks_error(out, x, DENSITY, found), what="step", launch=name,
                         n=x.case.n, tiles=value, shipped=tiles == steps.Tiles())


class Choice:
    "The launches of a choice, each alone."
    def __init__(self, p, index):
        self.p, self.index, self.scale = p, index, p.shape.D**-0.5 * LOG2E
        self.asked, self.table = self.queries(), self.keys()
        self.sums = self.sum()
        self.shares = self.share()
        self.near = choice.heaviest(self.shares, DENSITY, BLOCK, p.n, p.n, None, times=2)
        self.among = self.exact()

    def queries(self): return choice.mean_table(self.p.q, False, self.index, BLOCK, BLOCK, self.p.n, None)

    def keys(self):
        fine = choice.FINE[self.index] or BLOCK
        return choice.mean_table(self.p.k, True, self.index, BLOCK, fine, self.p.n, None)

    def sum(self):
        return choice.log_sums(self.asked, self.table, self.index, BLOCK, self.scale, self.p.n, self.p.n, None)

    def share(self):
        return choice.block_shares(self.asked, self.table, self.sums, self.index, "mean", "group", BLOCK, self.scale,
                                   self.p.n, self.p.n, None)

    def choose(self): return choice.heaviest(self.shares, DENSITY, BLOCK, self.p.n, self.p.n, None)

    def exact(self): return choice.exact_shares(self.p.q, self.p.k, self.near, "mean", BLOCK, self.scale, None)

    def refine(self): return choice.heaviest(self.among, DENSITY, BLOCK, self.p.n, self.p.n, None, near=self.near)

    def launches(self):
        "Calls by name; each returns a tensor that its launch fills."
        return {"queries": lambda: self.queries().more, "keys": lambda: self.keys().more, "sums": self.sum,
                "shares": self.share, "choose": lambda: self.choose()[1].float(), "exact": self.exact,
                "refine": lambda: self.refine()[1].float()}

def measure_choice(recorder: Recorder, p: Prompt, index: str, tried: dict):
    "Rows of the launches of a choice, with the shipped tiles and with those that are tried."
    c, usual = Choice(p, index), choice.SETTINGS
    row = dict(what="choice", n=p.n, index=index)
    for name, call in c.launches().items(): recorder.measure_row(call, None, **row, launch=name, shipped=True)
    for setting, values in tried.items():
        for value in (x for x in values if x != getattr(usual, setting, None)):
            if setting == "exact": other = dict(exact_tiles=value)
            else: other = dict.fromkeys(("SETTINGS", "tile_settings"), usual._replace(**{setting: value}))
            for name, call in c.launches().items():
                if name != setting and (setting != "means" or name not in ("queries", "keys")): continue
                with instead(choice, **other):
                    recorder.measure_row(call, None, **row, launch=name, tiles=value, shipped=False)


def measure_walk(recorder: Recorder, p: Prompt, index: str):
    "Rows of a choice and of one that walks on from a layer below, both from the kernels' shares; and of a step's walk."
    s, step, row = SketchWalk(BLOCK, DENSITY, index, walk="softmax"), {}, dict(what="walk", n=p.n, index=index)
    ask = lambda s, step: s.block_pattern(p.q, p.k, None, None, "triton", step=step).count.float()
    ask(s, step)
    recorder.measure_row(lambda: ask(replace(s, walk=None), None), None, **row, launch="choice")
    recorder.measure_row(lambda: ask(s, dict(step)), None, **row, launch="choice and walk")
    if index != "mean": return  # a step asks again what each block gives to each: 16 times as much
    state, last = s.new_state(), (p.q[:, :, -1:], p.k, p.v)
    state.append(p.k, p.v, q=p.q)
    def token(s, state, step): return s.decode(*last, state=state, step=step)
    step = {}
    token(s, state, step)
    whole = replace(s, walk=None).new_state()
    whole.append(p.k, p.v)
    for name, call in (("step, as a walk has it", lambda: token(s, state, dict(step))),
                       ("step", lambda: token(replace(s, walk=None), whole, None))):
        recorder.measure_row(call, None, plain=ALONE, **row, launch=name)


def measure_lists(recorder: Recorder, p: Prompt, tried: tuple):
    "Rows of the attention to the lists of one choice."
    check, lists = Truth(p).check("sketch_walk_10"), chosen(p, "sketch_walk_10")
    for tiles in tried:
        call = lambda: launch_blocks(p.q, p.k, p.v, *lists, None, BLOCK, BLOCK, True, None, None, None, False)[0]
        shipped = tiles == tile_settings(128, 2, True, True)
        with instead(by_blocks, tile_settings=tiles):
            recorder.measure_row(call, check, what="lists", n=p.n, tiles=tiles, kept=True, ahead=1, shipped=shipped)

def measure_rules(recorder: Recorder, p: Prompt, rules: tuple, what: str = "rule", **more):
    "Rows of whole prompts read by each rule, the choice inside the time, and of the choice alone."
    sizes, truth = dict(query_block=BLOCK, key_block=BLOCK), Truth(p)
    for index, heads, pool in rules:
        same = dict(block=BLOCK, density=DENSITY, index=index, heads=heads, pool=pool)
        ask = lambda: choice.choose_blocks(p.q, p.k, **same, **more)
        lists = [x.repeat_interleave(p.shape.H // x.shape[1], 1) for x in ask()]
        check = truth.check(BlockPattern(*lists, queries=p.n, keys=p.n, **sizes))
        row = dict(what=what, n=p.n, index=index, heads=heads, pool=pool, **more)
        recorder.measure_row(lambda: attend_blocks(p.q, p.k, p.v, *ask(), **sizes)[0], check, **row, launch="all")
        recorder.measure_row(lambda: ask()[1].float(), None, **row, launch="choice")


@torch.no_grad()
def sketch_walk_tiles(recorder):
    "Time the kernels of Sketch&Walk with other tiles."
    gpu, quick, some = recorder.gpu, recorder.quick, (lambda x: x[:1]) if recorder.quick else tuple
    for n in LENGTHS if not quick else (16384,) if gpu else (200,):
        case = Case(SHAPES["llama3"] if gpu else Shape(2, 1, 64), n, device=recorder.device)
        x = indexed(case, "fine4")
        for name, values in STEPS.items():
            for value in some(values): measure_step(recorder, x, name, value)
    if gpu: recorder.protocol = Protocol(warmup=2, runs=9, buffer_mb=recorder.protocol.buffer_mb)
    n = PROMPT if not quick else 8192 if gpu else 200
    p = Prompt(n, recorder.device, SHAPES["llama3"] if gpu else Shape(2, 1, 16), Setting() if gpu else Setting(tail=8))
    measure_choice(recorder, p, "fine4", {name: some(values) for name, values in CHOICE.items()})
    for index in ("fine16", "mean"): measure_choice(recorder, p, index, {})
    for x in (p,) if quick else (*(Prompt(short, recorder.device, p.shape) for short in SHORT), p):
        measure_rules(recorder, x, some(RULES))
        for more in some(REFINED): measure_rules(recorder, x, RULES[-1:] if quick else RULES[::4], "refined", **more)
    measure_lists(recorder, p, some(LISTS) if gpu else ((32, 16, 4, 2, None),))
    return dict(block=BLOCK, density=DENSITY)


@torch.no_grad()
def sketch_walk_tiles_walk(recorder):
    "Time a walk beside the choice and the prompt that it is part of."
    gpu, quick = recorder.gpu, recorder.quick
    if gpu: recorder.protocol = Protocol(warmup=2, runs=9, buffer_mb=recorder.protocol.buffer_mb)
    for n in ((8192,) if gpu else (200,)) if quick else (*SHORT, PROMPT):
        p = Prompt(n, recorder.device, *((SHAPES["llama3"], Setting()) if gpu else (Shape(2, 1, 16), Setting(tail=8))))
        for index in WALKED[:1] if quick else WALKED: measure_walk(recorder, p, index)
        measure_rules(recorder, p, RULES[:1])
    return dict(block=BLOCK, density=DENSITY)
