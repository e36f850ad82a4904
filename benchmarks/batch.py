"""One layer that decodes for 64 sequences at once: dense kernels, reads of lists that are given, and steps that choose
their lists, all with a tenth of the keys"""
import copy
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from sparse_nb.bench import SHAPES, Shape
from sparse_nb.hash_attention import HashAttention
from sparse_nb.kernels import saap, saap_index, sketch_walk, topk
from sparse_nb.kernels.exact import attend_all
from sparse_nb.kernels.gather import attend
from sparse_nb.methods.quest import Quest
from benchmarks.attention import asked
from benchmarks.launches import indexed
from benchmarks.recorder import Recorder, measure_dense
from benchmarks.timing import Case, check_dense, close_to

KEYS, BATCH, DENSITY = 131072, 64, 0.1
PARTS = 8                # sequences whose index is made at once
DENSE = "exact", "sdpa_cudnn", "sdpa_flash", "flash3", "flashinfer_tc"  # kernels that read everything, ours first
BUILT_S, LIMIT_S = 45, 80  # FlashInfer, which may have to be compiled, and a step are not begun later
SLOW = 1, 4, 5, 7, 9     # of `layers`, which a CPU leaves out: most of their kernels are in others

class Layer(NamedTuple):
    "A step of all sequences, or of some: `run` gets them as a slice and returns [B, H, 1, D]."
    row: dict
    run: Callable

def some(case: Case, part: slice) -> Case:
    "The case of some of its sequences."
    few = copy.copy(case)
    few.__dict__.update(q=case.q[part], k=case.k[part], v=case.v[part])
    few.B = len(few.q)
    return few

def in_parts(case: Case) -> list:
    "The case, some sequences at a time."
    return [some(case, slice(i, i + PARTS)) for i in range(0, case.B, PARTS)]


def given_lists(case: Case, heads: int, page: int):
    "Keys of whole pages at random, in their order, for each of so many lists."
    draw, slots = torch.Generator(case.device).manual_seed(0), math.ceil(case.n * DENSITY)
    pages = torch.rand(case.B, heads, 1, case.n // page, device=case.device, generator=draw)
    pages = pages.topk(math.ceil(slots / page), -1).indices.sort(-1).values
    index = (pages[..., None] * page + torch.arange(page, device=case.device)).flatten(-2)[..., :slots].contiguous()
    row = dict(method="attend", lists="a group" if heads == case.shape.G else "a head", page=page, chooses=False)
    return Layer(row, lambda b: attend(case.q[b], case.k[b], case.v[b], index[b], None))

def chosen_lists(case: Case, method, shared: bool):
    "A method that lists its keys by an index, or the keys of the largest scores for None."
    row = dict(method=type(method).__name__ if method else "TopK", lists="a group" if shared else "a head",
               page=getattr(method, "page", 1), chooses=True)
    if method is None: listed, rows = topk.topk, case.k
    else:
        found = [asked(few, method) for few in in_parts(case)]
        rows, x = torch.cat([x.state.rows for x in found]), found[0]
        listed = partial(x.kernels.topk, factor=x.factor, own=x.own, unit=x.place.unit)
    def run(b):
        q = case.q[b]
        begin = torch.zeros(len(q), dtype=torch.int64, device=case.device)
        index, weight, count = listed(q, rows[b], DENSITY, case.n, begin=begin, shared=shared)
        if shared: weight, count = None, count[:, :1].expand(-1, case.shape.H, -1)  # as `OneList` does
        return attend(q, case.k[b], case.v[b], index, weight, count)
    return Layer(row, run)

def clusters(case: Case):
    "SAAP with centroids at random; the first keys and the last ones are in no list."
    (_, G, D), C, draw = case.shape, 1024 if case.n > 1024 else 8, torch.Generator(case.device).manual_seed(1)
    centroids = torch.randn(case.B, G, C, D, device=case.device, generator=draw).to(case.dtype)
    bounds = (torch.full((case.B,), x, device=case.device) for x in (1, case.n - case.n // 64))
    index = saap_index.build_index(case.k, case.v, saap_index.assign(case.k, centroids), *bounds, C)
    def run(b):
        few = saap_index.Index(*(x[b] for x in index))
        return saap.decode(case.q[b], case.k[b], case.v[b], few, saap.Settings(DENSITY)).out
    return Layer(dict(method="Saap", lists="a group", page=None, chooses=True), run)

def blocks(case: Case):
    "Sketch&Walk, whose lists are of blocks of 64 keys."
    indexes = [indexed(few, "fine4").index for few in in_parts(case)]
    whole = [None if x[0] is None or x[0].ndim < 2 else torch.cat(x) for x in zip(*indexes)]
    begin = torch.zeros(case.B, dtype=torch.int64, device=case.device)
    def run(b):
        few = [y if x is None else x[b] for x, y in zip(whole, indexes[0])]
        few = sketch_walk.Index(*few)._replace(begin=begin[b])
        return sketch_walk.decode(case.q[b], case.k[b], case.v[b], few, sketch_walk.Settings(64, DENSITY)).out
    return Layer(dict(method="SketchWalk", lists="a group", page=64, chooses=True), run)

def layers(case: Case):
    "What makes each step, one by one."
    G, H = case.shape.G, case.shape.H
    for heads, page in ((G, 16), (G, 1), (H, 1)): yield partial(given_lists, case, heads, page)
    yield partial(clusters, case)
    for shared in (True, False): yield partial(chosen_lists, case, Quest(DENSITY, page=16), shared)
    yield partial(blocks, case)
    yield partial(chosen_lists, case, Quest(DENSITY, page=64), True)
    yield partial(chosen_lists, case, HashAttention(DENSITY, layer=0), True)
    yield partial(chosen_lists, case, None, True)


def measure_layer(recorder: Recorder, case: Case, make: Callable):
    "A row of a step, whose last sequence has the output that it has alone; what cannot be done is said."
    try:
        layer = make()
        alone = layer.run(slice(case.B - 1, case.B)).double()
        recorder.measure_row(lambda: layer.run(slice(None)), lambda out: close_to(alone)(out[-1:]), **layer.row,
                             n=case.n, B=case.B)
    except (RuntimeError, ValueError, TypeError) as error:
        recorder.say(f"{make}: {type(error).__name__}: {str(error)[:200]}")

@torch.no_grad()
def batch(recorder):
    "Dense kernels first, then what reads a tenth; `ratio` is the time of the fastest of the former over a row's own."
    gpu, quick = recorder.gpu, recorder.quick
    n, B = (4096 if quick else KEYS, 8 if quick else BATCH) if gpu else (128, 2)
    case = Case(SHAPES["llama3"] if gpu else Shape(4, 2, 64), n, B, device=recorder.device)
    recorder.measure_row(lambda: attend_all(case.q, case.k, case.v), lambda out: check_dense(out, case),
                         method="exact", n=n, B=B, nbytes=2 * case.k.nbytes)
    for name in DENSE[1:]:
        if name.startswith("flashinfer") and recorder.seconds() > BUILT_S: recorder.say(f"{name}: the time is over")
        else: measure_dense(recorder, case, (name,), B=B)
    case.__dict__.pop("by_position", None)
    for i, make in enumerate(layers(case)):
        if gpu: torch.cuda.empty_cache()
        if gpu and recorder.seconds() > LIMIT_S: recorder.say(f"step {i} is not measured, the time is over")
        elif gpu or i not in SLOW: measure_layer(recorder, case, make)
    dense = [row["median_us"] for row in recorder.rows if row["method"] in DENSE]
    for row in recorder.rows if dense else (): row["ratio"] = round(min(dense) / row["median_us"], 3)
    return dict(density=DENSITY)
