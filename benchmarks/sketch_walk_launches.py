"""Where the time of a step goes, for three densities, beside the dense kernels of the same run"""
import math
from functools import partial
from typing import NamedTuple

import torch

from sparse_nb.bench import Shape
from benchmarks.timing import Case, Refused
from sparse_nb.kernels.sketch_walk import Index, Settings, launch, pack
from benchmarks.recorder import Recorder, measure_dense, measure_launches
from sparse_nb.sketch_walk import Summary, block_scores, signed_hadamard


DENSITIES, OTHERS = (0.05, 0.1, 0.2), ("fine16", "mean")
LAUNCHES = dict(score="_ask_kernel", select="_share_kernel", read="_read_kernel", merge="_merge_kernel")
AT_ONCE = 2048  # blocks whose rows are made at once
SMALL, OF_HEADS = (16, 8, 4), (131072, 524288)  # keys of other blocks; lengths for lists of single heads

class Indexed(NamedTuple):
    "A case and an index of its keys."
    case: Case
    summary: Summary
    rows: torch.Tensor # as the chapter keeps them [1, G, M, C, W + 2]
    index: Index       # as the kernels read them

def indexed(case: Case, kind: str, block: int = 64) -> Indexed:
    "The index of the keys of a case, whose first block begins at key 0."
    summary, device, rows = Summary(kind, block), case.device, []
    for keys in case.k.split(AT_ONCE * block, 2):
        M = math.ceil(keys.shape[2] / block)
        there = (torch.arange(M * block, device=device) < keys.shape[2]).view(1, 1, M, block, 1)
        blocks = torch.nn.functional.pad(keys, (0, 0, 0, M * block - keys.shape[2])).unflatten(2, (M, block))
        rows.append(summary(blocks, there))
    rows, sign = torch.cat(rows, 2), signed_hadamard(case.shape.D, None)[:, 0].sign().to(device)
    return Indexed(case, summary, rows, pack(kind, rows, torch.zeros(1, device=device), sign))


def worst_error(
    result: torch.Tensor, # what a step returned [1, H, 1, D]
    x: Indexed,
    density: float,       # of the step
    found: tuple,         # what `launch` returned for the same step
) -> float:               # of the groups that are looked at, every third
    "Largest relative error of a group. Raises `Refused` above a percent, and where other blocks were read."
    (H, G, D), block, M, worst = x.case.shape, x.summary.block, x.rows.shape[2], 0.0
    want = min(M, max(math.ceil(M * density * (1 - 1e-12)), 2))
    wide = H // G if found.readers is None else 1  # heads of a list
    for first in (h for h in range(0, H, wide) if h * G // H % 3 == 0):
        heads, g = slice(first, first + wide), first * G // H
        blocks = found.blocks[0, g, :(read := int(found.count[0, g]))].long()
        if found.readers is not None: blocks = blocks[(found.readers[0, g, :read] >> first % (H // G) & 1).bool()]
        q, of_g = x.case.q[:, heads].double(), x.rows[:, g:g + 1].double()
        share = block_scores(x.summary, q, of_g, None)[0, :, 0].softmax(-1).mean(0)
        share[0] = share[-1] = math.inf
        if len(blocks) != want or len(blocks.unique()) != want: raise Refused(f"{len(blocks)} blocks were read")
        left = torch.ones_like(share, dtype=torch.bool).index_fill_(0, blocks, False)
        if left.any() and not share[blocks].min() > share[left].max() * (1 - 1e-4):
            raise Refused(f"a block was read that weighs {share[blocks].min() / share[left].max():.4g} of another")
        key = (blocks[:, None] * block + torch.arange(block, device=blocks.device)).flatten()
        key = key[key < x.case.n]
        k, v = x.case.k[0, g, key].double(), x.case.v[0, g, key].double()
        right = (q[0, :, 0] @ k.T * D**-0.5).softmax(-1) @ v
        worst = max(worst, float((result[0, heads, 0].double() - right).norm() / right.norm()))
    if not worst < 0.01: raise Refused(f"differs from the reference by {worst:.3g} of it")
    return worst


def read_bytes(x: Indexed, read: float) -> dict:
    "What each launch has to read: packed rows with their words, the guesses of all heads, keys and values."
    (H, G, D), parts = x.case.shape, (x.index.rows, x.index.facts, x.index.radius)
    return dict(score=sum(y.nbytes for y in parts if y is not None), select=4 * H * x.rows.shape[2],
                read=round(G * 4 * D * read), merge=0)

def measure_step(recorder: Recorder, x: Indexed, density: float, names: tuple = LAUNCHES, heads: str = "group"):
    "Time the steps up to each of these launches; heads: who shares a list, or nobody (\"each\")."
    case, s = x.case, Settings(x.summary.block, density, x.summary.index, heads)
    step = partial(launch, case.q, case.k, case.v, x.index, s)
    found = step()
    read = float(found.count.double().mean()) * s.block  # the lengths are whole blocks
    measure_launches(recorder, LAUNCHES, names, lambda: step().out,
                     lambda out: worst_error(out, x, density, found), read_bytes(x, read), method="sketch_walk",
                     n=case.n, H=case.shape.H, index=s.index, block=s.block, heads=heads, asked=density,
                     density=round(read / case.n, 4))

@torch.no_grad()
def sketch_walk_launches(recorder):
    "A step launch by launch; on a CPU two parts of the launches, with small heads."
    gpu, quick = recorder.gpu, recorder.quick
    names, tenth = ((*LAUNCHES,), 0.1) if gpu else (("select", "merge"), 0.5)
    for i, case in enumerate(recorder.cases((32768, 131072, 524288, 1048576), 16384, 320, Shape(2, 1, 64))):
        measure_dense(recorder, case, H=case.shape.H, memory="device")
        x = indexed(case, "fine4")
        for density in DENSITIES if gpu else (0.5,): measure_step(recorder, x, density, names)
        if quick or case.n in OF_HEADS: measure_step(recorder, x, tenth, names, "each")
        if quick or i == 1:
            for kind in OTHERS: measure_step(recorder, indexed(case, kind), tenth, names[-1:])
            for block in SMALL: measure_step(recorder, indexed(case, "fine4", block), tenth, names)
        del x
    return dict(block=64)
