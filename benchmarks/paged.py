"""Decode steps over a cache in pages, beside the same kernels over keys that lie side by side"""
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from sparse_nb.bench import SHAPES, Shape
from sparse_nb.core.bounds import tail_levels
from sparse_nb.hash_attention import HashAttention
from sparse_nb.kernels import saap, saap_index, santa, sketch_walk, vattention
from sparse_nb.kernels.common import PageTable
from sparse_nb.kernels.exact import attend_all
from sparse_nb.kernels.gather import attend
from sparse_nb.kernels.topk import topk
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.quest import Quest
from benchmarks.attention import asked
from benchmarks.launches import EPS, indexed
from benchmarks.recorder import Recorder
from benchmarks.timing import Case, close_to, refuse_above

KEYS, BATCHES, PAGES = 131072, (1, 8), (16, 64)
DENSITY, SAMPLES = 0.1, 128  # share of the keys of a list; values that SANTA draws for each head
LIMIT_S = 240                # no method is begun later

class Pages(NamedTuple):
    "Where pages in random order are, for each of them its place in the order of sequences and keys."
    order: torch.Tensor # [B * pages of a sequence]
    table: PageTable

def in_pages(case: Case, page: int) -> Pages:
    "A page table for sequences of all keys of a case."
    order = torch.randperm(case.B * case.n // page, device=case.device,
                           generator=torch.Generator(case.device).manual_seed(5))
    lengths = torch.full((case.B,), case.n, dtype=torch.int32, device=case.device)
    return Pages(order, PageTable(order.view(case.B, -1).int(), lengths, case.n))

def cut(x: torch.Tensor, pages: Pages) -> torch.Tensor:
    "Items of each key/value head [B, G, items, ...] in pages [P, G, items, ...], heads side by side for each item."
    rows = x.unflatten(2, (pages.table.numbers.shape[1], -1)).permute(0, 2, 3, 1, *range(4, x.ndim + 1)).flatten(0, 1)
    return torch.empty(rows.shape, dtype=x.dtype, device=x.device).index_copy_(0, pages.order, rows).transpose(1, 2)

def cut_both(case: Case, pages: Pages) -> tuple:
    "Keys and values in pages, a key and its value side by side, as an engine lays them out."
    both = cut(torch.cat([case.k, case.v], -1), pages)
    return both[..., :case.shape.D], both[..., case.shape.D:]


class Paged(NamedTuple):
    "A step that reads keys and values, or an index, side by side or in pages."
    run: Callable      # gets keys and values, what `held` is, and a page table or None; returns a tensor
    held: tuple        # of each key/value head [B, G, items, ...], cut like the keys
    allowed: float     # relative error beside the same step without pages
    listed: list | None = None # its last element: the list of keys, of which all but this share are the same

def _attends(case):
    "Steps that read all keys and values, or those of a list."
    q, G, n = case.q, case.shape.G, case.n
    draw = torch.Generator(case.device).manual_seed(0)
    index = torch.rand(case.B, G, 1, n, device=case.device, generator=draw).topk(math.ceil(n * DENSITY), -1).indices
    samples = SAMPLES if n > SAMPLES else 8
    yield "exact", lambda: Paged(lambda k, v, table: attend_all(q, k, v, table=table), (), 0.01)
    yield "santa", lambda: Paged(lambda k, v, table: santa.decode(q, k, v, samples=samples, table=table), (), 0.1)
    yield "gather", lambda: Paged(lambda k, v, table: attend(q, k, v, index, None, table=table), (), 0.01)

def _vattention(case):
    "With signatures and networks at random."
    (H, G, D), M, draw = case.shape, 64, torch.Generator(case.device).manual_seed(0)
    new = lambda *size: (torch.randn(*size, device=case.device, generator=draw) / 10).half()
    codes = torch.randint(-2**31, 2**31, (case.B, G, case.n, 1), device=case.device, generator=draw).int()
    maps, ends = (new(H, D, M), new(H, M), new(H, M, 32), new(H, 32)), min(128, case.n // 16)
    settings = vattention.Settings(ends, ends, DENSITY / 2, DENSITY / 4, 32, EPS, *tail_levels(0.08, False), 4.6)
    def run(k, v, codes, table):
        return vattention.decode(case.q, k, v, settings, lists=G, codes=codes, maps=maps, table=table).out
    return Paged(run, (codes,), 0.05)

def _sketch_walk(case):
    "The index is of sequences."
    index = indexed(case, "fine4").index._replace(begin=torch.zeros(case.B, dtype=torch.int64, device=case.device))
    settings = sketch_walk.Settings(64, DENSITY)
    return Paged(lambda k, v, table: sketch_walk.decode(case.q, k, v, index, settings, table=table).out, (), 0.01)

def _saap(case):
    "Clusters and index are of sequences, whose first keys and last ones are in no list."
    (_, G, D), C, draw = case.shape, 1024 if case.n > 1024 else 8, torch.Generator(case.device).manual_seed(1)
    centroids = torch.randn(case.B, G, C, D, device=case.device, generator=draw).to(case.dtype)
    bounds = (torch.full((case.B,), x, device=case.device) for x in (1, case.n - case.n // 64))
    index = saap_index.build_index(case.k, case.v, saap_index.assign(case.k, centroids), *bounds, C)
    settings = saap.Settings(DENSITY)
    return Paged(lambda k, v, table: saap.decode(case.q, k, v, index, settings, table=table).out, (), 0.01)

def _lists(case, method):
    "The list that a method makes by its index in pages, or, for None, the keys of the largest scores."
    listed, x = [], None if method is None else asked(case, method)
    choose = topk if x is None else partial(
        x.kernels.topk, factor=x.factor, own=x.own, unit=x.place.unit, begin=x.place.begin)
    def run(k, v, *held):
        (rows, table) = (k, *held) if x is None else held
        index, weight, _ = choose(case.q, rows, DENSITY, case.n, table=table)
        listed.append(index)
        return weight
    return Paged(run, () if x is None else (x.state.rows,), 0.001, listed)

def steps(case: Case):
    "Name, and what makes the step of a case, one by one."
    yield from _attends(case)
    yield "vattention", partial(_vattention, case)
    yield "sketch_walk", partial(_sketch_walk, case)
    yield "saap", partial(_saap, case)
    for name, method in (("topk", None), ("quest", Quest(DENSITY, page=16)), ("adamas", Adamas(DENSITY)),
                         ("hash_attention", HashAttention(DENSITY, layer=0)),
                         ("double_sparsity", DoubleSparsity(DENSITY))):
        yield name, partial(_lists, case, method)


def same_keys(got: torch.Tensor, want: torch.Tensor, n: int) -> float:
    "Share of the listed keys [B, H, 1, S] that are not on the other list."
    marks = [torch.zeros(*x.shape[:2], n, dtype=torch.bool, device=x.device).scatter_(2, x[:, :, 0], True)
             for x in (got, want)]
    return 1 - float((marks[0] & marks[1]).sum() / marks[1].sum())

def measure_step(recorder: Recorder, case: Case, name: str, step: Paged, layouts: dict):
    "A row without pages and one for each size of pages, whose output has to agree before it is timed."
    row = dict(method=name, n=case.n, B=case.B)
    want = step.run(case.k, case.v, *step.held, None).double()
    index = step.listed and step.listed[-1]
    recorder.measure_row(lambda: step.run(case.k, case.v, *step.held, None), **row, page=None)
    beside = recorder.rows[-1]["median_us"]
    def check(out):
        if index is None: return close_to(want, step.allowed)(out)
        return refuse_above(same_keys(step.listed[-1], index, case.n), step.allowed, "{:.3g} of the keys are others")
    for page, (pages, (k, v)) in layouts.items():
        held = [cut(x, pages).contiguous() for x in step.held]  # heads outermost, as behind an engine's blocks
        before = len(recorder.rows)
        recorder.measure_row(lambda: step.run(k, v, *held, pages.table), check, **row, page=page)
        for new in recorder.rows[before:]: new["ratio"] = round(new["median_us"] / beside, 3)

@torch.no_grad()
def paged(recorder):
    "Every kernel that takes a page table, at one length; on a CPU small heads and one size of pages."
    gpu = recorder.gpu
    n, sizes = (KEYS, PAGES) if gpu and not recorder.quick else (16384, PAGES) if gpu else (128, PAGES[:1])
    late = []
    for B in BATCHES if gpu else (1,):
        case = Case(SHAPES["llama3"] if gpu else Shape(2, 1, 64), n, B, device=recorder.device)
        layouts = {page: (pages, cut_both(case, pages)) for page in sizes for pages in [in_pages(case, page)]}
        for name, make in steps(case):
            if gpu and recorder.seconds() > LIMIT_S: late.append(f"{name}, {B}")
            else: measure_step(recorder, case, name, make(), layouts)
    if late: recorder.say(f"not measured, the time is over: {'; '.join(late)}")
    return dict(density=DENSITY, samples=SAMPLES, layout="NHD, keys and values side by side", late=late)
