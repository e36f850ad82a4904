"""What a step costs after a cache full of written lines, of lines that were read, and of a layer's weights"""
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from sparse_nb.bench import LEFT, Protocol, Shape
from benchmarks.timing import Case, check_sampled
from sparse_nb.kernels.saap import Settings
from benchmarks import saap_launches, sketch_walk_launches, vattention_launches
from benchmarks.decode import contenders
from benchmarks.attention import measure_tiles
from benchmarks.recorder import Recorder, measure_dense


class Sizes(NamedTuple):
    "How much the methods read."
    samples: int = 128      # value rows that SANTA draws for each head
    vattention: float = 0.1 # share of the keys
    ends: int = 128         # sinks of vAttention, and keys of its window
    walk: float = 0.1       # share of the blocks
    saap: float = 0.05      # share of the keys, beside sinks and window
    clusters: int = 128     # of SAAP
    window: int = 255       # keys of its window
    tries: int = 3          # steps of vAttention, to find its settings

SMALL = Sizes(8, 0.6, 8, 0.5, 0.3, 12, 40, 1)

class Made(NamedTuple):
    "A case, and what each method needs for it."
    case: Case
    santa: dict       # method -> (call, what the PyTorch reference returns for the same seed)
    vattention: tuple # signatures; settings, what they find, and the row
    walk: sketch_walk_launches.Indexed
    saap: saap_launches.Parted

def make(case: Case, sizes: Sizes = Sizes()) -> Made:
    "Make indices, settings and references."
    ours = {name: contenders(sizes.samples)[name] for name in ("santa_systematic", "santa_int8")}
    given = vattention_launches.signatures(case, torch.Generator(case.device).manual_seed(0))
    return Made(case, {name: (x.build(case)["triton"], x.reference(case)) for name, x in ours.items()},
                (given, *vattention_launches.settings_for(case, sizes.vattention, sizes.ends, given, sizes.tries)),
                sketch_walk_launches.indexed(case, "fine4"),
                saap_launches.parted(case, sizes.clusters, 1, sizes.window))


def measure_after(recorder: Recorder, made: Made, sizes: Sizes, left: str, choosers: bool = True):
    "Time whole steps of every method after such work; the rows are the recorder's."
    recorder.protocol, before, case = replace(recorder.protocol, left=left), len(recorder.rows), made.case
    measure_dense(recorder, case)
    measure_tiles(recorder, case)
    for name, (call, reference) in made.santa.items():
        check = partial(check_sampled, case=case, samples=sizes.samples, reference=reference)
        recorder.measure_row(call, check, method=name, n=case.n, samples=sizes.samples)
    if choosers:
        vattention_launches.measure_step(recorder, case, ("merge",), *made.vattention)
        sketch_walk_launches.measure_step(recorder, made.walk, sizes.walk, ("merge",))
        saap_launches.measure_step(recorder, made.saap, Settings(sizes.saap), ("merge",))
    recorder.rows[before:] = [dict(left=left) | row for row in recorder.rows[before:]]

@torch.no_grad()
def cache_lines(recorder):
    "Steps after each kind of work; on a CPU keys are chosen in the first state only."
    if not recorder.gpu: recorder.protocol = Protocol(warmup=1, runs=1, buffer_mb=1)  # a buffer in any case
    sizes = Sizes() if recorder.gpu else SMALL
    for case in recorder.cases((8192, 32768, 131072, 524288), 8192, 200, Shape(2, 1, 64)):
        made = make(case, sizes)
        for left in LEFT:
            recorder.say(f"{case.n} keys, after a buffer that is left as {left}:")
            measure_after(recorder, made, sizes, left, recorder.gpu or left == LEFT[0])
        del made
    return dict(l2=LEFT, buffer_mb=recorder.protocol.buffer_mb)
