"""Ten percent of the keys at random, with shared lists and without, beside the dense kernels of the same run"""
from collections.abc import Callable
from functools import partial

import torch

from sparse_nb.bench import SHAPES, Case, Refused, Shape
from sparse_nb.core.selection import Selection, weighted_attention
from sparse_nb.kernels.gather import attend
from benchmarks.recorder import measure_copy, measure_dense, to_host


LENGTHS, DENSITY, HOST = (32768, 131072, 524288, 1048576), 0.1, 131072  # keys, share of them, keys in host memory

def _lists(case, lists, generator):
    "Key numbers [1, lists, 1, S] and weights [1, H, 1, S] at random."
    draw, count = partial(torch.rand, device=case.device, generator=generator), round(DENSITY * case.n)
    return draw(1, lists, 1, case.n).topk(count, -1).indices, draw(1, case.shape.H, 1, count) + 0.5

def check_lists(
    case: Case,
    index: torch.Tensor,  # key numbers [1, H or G, 1, S]
    weight: torch.Tensor, # [1, H, 1, S]
) -> Callable:            # gets an output [1, H, 1, D], returns its relative error or raises `Refused`
    "A check of attention to these lists, against PyTorch."
    whole = Selection(index.repeat_interleave(case.shape.H // index.shape[1], 1), weight)
    want = weighted_attention(case.q, case.k, case.v, whole, backend="torch").double()
    def check(result):
        error = float((result.double() - want).norm() / want.norm())
        if not error < 0.01: raise Refused(f"differs from the reference by {error:.3g} of it")
        return error
    return check

def _measure_lists(recorder, case, index, weight, far):
    "Time one choice of rows, and the same from host memory (`far`), if that is asked for."
    q, lists, close = case.q, index.shape[1], check_lists(case, index, weight)
    row = dict(method="attend", n=case.n, lists="a group" if lists == case.shape.G else "a head",
               nbytes=2 * lists * index.shape[3] * case.shape.D * q.element_size())
    recorder.measure_row(lambda: attend(q, case.k, case.v, index, weight), close, **row, memory="device")
    if far: recorder.measure_row(lambda: attend(q, *far, index, weight), close, **row, memory="host")

@torch.no_grad()
def gather(recorder):
    "Time attention over chosen rows."
    gpu, quick = recorder.gpu, recorder.quick
    shape, host = SHAPES["llama3"] if gpu else Shape(2, 1, 16), 4096 if quick and gpu else HOST if gpu else 96
    for n in (host,) if quick else LENGTHS:
        case, generator = Case(shape, n, device=recorder.device), torch.Generator(recorder.device).manual_seed(0)
        measure_dense(recorder, case, lists="all", memory="device")
        far = to_host(case.k, case.v) if n == host else None
        for lists in (shape.G, shape.H): _measure_lists(recorder, case, *_lists(case, lists, generator), far)
        if far: measure_copy(recorder, [case.k, case.v], far, lists="all", memory="host")
        if gpu: torch.cuda.empty_cache()
    return dict(density=DENSITY)
