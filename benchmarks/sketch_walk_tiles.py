"""How the settings of the kernels were found: each launch of a step, each of a prompt's choice, and attention to the
lists, with other tiles"""
from dataclasses import replace

import torch

from sparse_nb.bench import SHAPES, Protocol, Shape
from sparse_nb.core.blocks import BlockPattern
from sparse_nb.kernels import sketch_walk as steps, sketch_walk_prefill as choice
from sparse_nb.kernels.blocks import attend_blocks, launch_blocks, tile_settings
from sparse_nb.kernels.common import LOG2E
from benchmarks.launches import Indexed, blocks_error, indexed
from benchmarks.prefill import BLOCK, Prompt, Setting, Truth, chosen
from benchmarks.recorder import Recorder
from benchmarks.timing import Case
from sparse_nb.sketch_walk import SketchWalk, pattern_of


LENGTHS, PROMPT, DENSITY = (131072, 524288), 131072, 0.1  # keys of a step, positions of a prompt
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

    def queries(self, tiles=None):
        return choice.mean_table(self.p.q, False, self.index, BLOCK, BLOCK, 0, self.p.n, None, tiles)

    def keys(self, tiles=None):
        fine = choice.FINE[self.index] or BLOCK
        return choice.mean_table(self.p.k, True, self.index, BLOCK, fine, 0, self.p.n, None, tiles)

    def sum(self, tiles=None):
        return choice.log_sums(self.asked, self.table, self.index, BLOCK, self.scale, self.p.n, self.p.n, None, tiles)

    def share(self, tiles=None):
        return choice.block_shares(self.asked, self.table, self.sums, self.index, "mean", "group", BLOCK, self.scale,
                                   self.p.n, self.p.n, None, tiles)

    def choose(self, tiles=None):
        return choice.heaviest(self.shares, DENSITY, BLOCK, self.p.n, self.p.n, None, tiles)

    def exact(self, tiles=None):
        return choice.exact_shares(self.p.q, self.p.k, self.near, "mean", BLOCK, self.scale, None, tiles)

    def refine(self, tiles=None):
        return choice.heaviest(self.among, DENSITY, BLOCK, self.p.n, self.p.n, None, tiles, near=self.near)

    def launches(self, tiles=None):
        "Calls by name; each returns a tensor that its launch fills."
        return {"queries": lambda: self.queries(tiles).more, "keys": lambda: self.keys(tiles).more,
                "sums": lambda: self.sum(tiles), "shares": lambda: self.share(tiles),
                "choose": lambda: self.choose(tiles)[1].float(), "exact": lambda: self.exact(tiles),
                "refine": lambda: self.refine(tiles)[1].float()}

def measure_choice(recorder: Recorder, p: Prompt, index: str, tried: dict):
    "Rows of the launches of a choice, with the shipped tiles and with those that are tried."
    c, usual = Choice(p, index), choice.Tiles()
    row = dict(what="choice", n=p.n, index=index)
    for name, call in c.launches().items(): recorder.measure_row(call, None, **row, launch=name, shipped=True)
    for setting, values in tried.items():
        for value in (x for x in values if x != getattr(usual, setting)):
            for name, call in c.launches(usual._replace(**{setting: value})).items():
                if name == setting or setting == "means" and name in ("queries", "keys"):
                    recorder.measure_row(call, None, **row, launch=name, tiles=value, shipped=False)


def measure_walk(recorder: Recorder, p: Prompt, index: str):
    "Rows of a choice and of one that walks on from a layer below, both from the kernels' shares; and of a step's walk."
    s, step, row = SketchWalk(BLOCK, DENSITY, index, walk="softmax"), {}, dict(what="walk", n=p.n, index=index)
    ask = lambda s, step: pattern_of(s, p.q, p.k, None, None, "triton", step=step).count.float()
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
        call = lambda: launch_blocks(p.q, p.k, p.v, *lists, None, BLOCK, BLOCK, True, None, None, None, False, tiles)[0]
        recorder.measure_row(call, check, what="lists", n=p.n, tiles=tiles, kept=True, ahead=1,
                             shipped=tiles == tile_settings(128, 2, True, True))

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
