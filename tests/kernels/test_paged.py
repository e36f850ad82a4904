"""A cache in pages: every kernel that decodes gives, bit by bit, what it gives for the same keys side by side, in both
orders of heads and keys, for pages of 16 to 256 keys, ragged lengths, pages in any order and pages that sequences
share. What is in no sequence is NaN, and the numbers behind a sequence's last page lead there.

On the CPU in Triton's interpreter, in a process of its own, and on a GPU.
"""
import math
import re
from functools import partial
from typing import NamedTuple

import pytest
import torch

from inputs import DEVICE, INTERPRETED, kernel, poisoned

pytest.importorskip("triton")
from sparse_nb.core.bounds import output_levels, tail_levels
from sparse_nb.core.exact import assert_close
from sparse_nb.hash_attention import PARTS, HashAttention
from sparse_nb.kernels import (
    adamas, double_sparsity, engine, exact, gather, hash_attention, quest, saap, saap_index, santa, sketch_walk, topk,
    vattention)
from sparse_nb.kernels.common import PageTable
from sparse_nb.kernels.top_budget import Place, Tiles
from sparse_nb.methods.adamas import CUT, Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.quest import Quest
from sparse_nb.methods.sketch_walk.index import FINE, signed_hadamard
from sparse_nb.santa_keys import quantise
from sparse_nb.sketch_walk import SketchWalk

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = 150, 1, 97, 64

# how pages [P, G, page, C] lie in memory: heads side by side for each key, or keys for each head
LAYOUTS = {"NHD": lambda P, G, page, C, new: new(P, page, G, C).transpose(1, 2), "HND": lambda P, G, page, C, new:
           new(P, G, page, C)}


class Cache(NamedTuple):
    "The same keys and values side by side and in pages."
    q: torch.Tensor
    k: torch.Tensor          # [B, G, N, D]; NaN behind the last key of a sequence
    v: torch.Tensor
    lengths: torch.Tensor    # [B], int32
    pages_k: torch.Tensor    # [P, G, page, D]
    pages_v: torch.Tensor
    table: PageTable
    places: list             # (page, sequence, first key) of the pages with keys
    layout: str

    def cut(self, x, unit=1):
        "Items of an index [B, G, items, ...] of `unit` keys each, in pages."
        P, G, page, _ = self.pages_k.shape
        empty, page = math.nan if x.is_floating_point() else 77, page // unit
        out = LAYOUTS[self.layout](P, G, page, x[0, 0, 0].numel(), lambda *size: x.new_full(size, empty))
        for at, b, first in self.places:
            part = x[b, :, first // unit:first // unit + page]
            out[at, :, :part.shape[1]] = part.flatten(2) if x.ndim > 3 else part[..., None]
        return out.unflatten(3, x.shape[3:]) if x.ndim > 3 else out[..., 0]


def cache(page=16, layout="NHD", dtype=FP32, *, lengths=LENGTHS, G=2, R=2, D=32, share=1, seed=0):
    "Gaussian numbers; the first `share` pages are those of the longest sequence wherever a sequence has them whole."
    generator = torch.Generator(DEVICE).manual_seed(seed)
    new = lambda *size: torch.randn(*size, device=DEVICE, generator=generator).to(dtype)
    B, N = len(lengths), max(lengths)
    q, k, v = new(B, G * R, 1, D), new(B, G, N, D), new(B, G, N, D)
    columns = -(-N // page) + 1
    total = B * columns + 3
    order = torch.randperm(total, device=DEVICE, generator=generator).tolist()
    nothing = order.pop()                                  # a page of NaN, where all that is not used leads
    numbers = torch.full((B, columns + 2), nothing, dtype=torch.int32, device=DEVICE)[:, :columns]
    both = LAYOUTS[layout](total, G, page, 2 * D, lambda *size: torch.full(size, math.nan, dtype=dtype, device=DEVICE))
    pages_k, pages_v = both[..., :D], both[..., D:]        # side by side, as in an engine
    longest, places = max(range(B), key=lambda b: lengths[b]), []
    for b in [longest, *(b for b in range(B) if b != longest)]:
        for i in range(-(-lengths[b] // page)):
            of = slice(i * page, min((i + 1) * page, lengths[b]))
            if i < share and of.stop == (i + 1) * page and b != longest:
                k[b, :, of], v[b, :, of] = k[longest, :, of], v[longest, :, of]
                numbers[b, i] = numbers[longest, i]
                continue
            numbers[b, i] = at = order.pop()
            places.append((at, b, i * page))
            pages_k[at, :, :of.stop - of.start], pages_v[at, :, :of.stop - of.start] = k[b, :, of], v[b, :, of]
        k[b, :, lengths[b]:] = v[b, :, lengths[b]:] = math.nan
    ends = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return Cache(q, k, v, ends, pages_k, pages_v, PageTable(numbers, ends, N), places, layout)


def same(got, want):
    "Equal bit by bit, and numbers."
    got, want = ((x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (got, want))
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert not y.isnan().any() and torch.equal(x, y)


CASES = [(16, "NHD", FP32), (16, "HND", BF16), (64, "NHD", BF16), (32, "HND", FP32), (256, "NHD", FP16)]
cases = pytest.mark.parametrize("page, layout, dtype", CASES, ids=lambda x: str(x))


# exact attention

@kernel
@cases
def test_exact(page, layout, dtype):
    x = cache(page, layout, dtype)
    want = exact.launch(x.q, x.k, x.v, None, None, x.lengths, engine=False)
    same(poisoned(lambda: exact.attend_all(x.q, x.pages_k, x.pages_v, table=x.table)), want)


@kernel
def test_exact_sinks_and_window():
    x = cache(32, share=2)
    for sinks, window in ((3, 40), (20, 0.3)):
        want = exact.attend_all(x.q, x.k, x.v, kv_end=x.lengths, sinks=sinks, window=window)
        same(exact.attend_all(x.q, x.pages_k, x.pages_v, table=x.table, sinks=sinks, window=window), want)


@kernel
def test_exact_from_a_first_key():
    x, start = cache(), torch.tensor([20, 0, 96, 17], device=DEVICE)
    want = exact.attend_all(x.q, x.k, x.v, kv_start=start, kv_end=x.lengths)
    same(exact.attend_all(x.q, x.pages_k, x.pages_v, kv_start=start, table=x.table), want)


# SANTA

def both_draw(x, launch=santa.decode, codes=(), **settings):
    "The same draws from pages as from the keys side by side."
    stored = dict(zip(("codes", "units"), codes))
    want = launch(x.q, x.k, x.v, **settings, **stored, kv_end=x.lengths, return_index=True)
    stored = {name: x.cut(y) for name, y in stored.items()}
    got = poisoned(lambda: launch(x.q, x.pages_k, x.pages_v, **settings, **stored, table=x.table, return_index=True))
    same(got, want)


@kernel
@cases
def test_santa(page, layout, dtype): both_draw(cache(page, layout, dtype), samples=24, seed=3)


@kernel
@pytest.mark.parametrize("page, layout, scheme", [(16, "HND", "proportional"), (16, "NHD", "flash"),
                                                  (64, "HND", "flash")])
def test_santa_schemes(page, layout, scheme): both_draw(cache(page, layout), samples=24, scheme=scheme, tile=32)


@kernel
@pytest.mark.parametrize("page, layout, dtype, sub, rescore", [
    (16, "NHD", FP32, 8, None), (16, "HND", BF16, 1, False), (16, "NHD", BF16, 8, False), (32, "HND", FP32, 8, True),
    (64, "NHD", BF16, 1, True)], ids=str)
def test_santa_sums_and_codes(page, layout, dtype, sub, rescore):
    x = cache(page, layout, dtype)
    codes = () if rescore is None else quantise(x.k.nan_to_num(0))
    def launch(*tensors, kv_end=None, **given):
        return santa.launch(*tensors, 24, "stratified", 128, 5, None, None, kv_end, sub=sub, **given)
    both_draw(x, launch, codes, **{} if rescore is None else dict(rescore=rescore))


@kernel
def test_santa_of_an_estimate():
    x = cache(32, "HND")
    estimate = x.q * (torch.arange(32, device=DEVICE) % 3 == 0)
    both_draw(x, samples=24, seed=3, estimate=estimate.float())


# lists of keys

def lists(x, S=40, heads=4):
    "Keys of each sequence at random, with weights, a few of them 0, and how many slots are read."
    generator = torch.Generator(DEVICE).manual_seed(4)
    draw = lambda *size: torch.rand(*size, device=DEVICE, generator=generator)
    index = (draw(4, heads, 1, S) * x.lengths.view(4, 1, 1, 1)).long()
    weight = draw(4, 4, 1, S) * (draw(4, 4, 1, S) > 0.2)
    weight[..., 0] = 1
    return index, weight, 1 + (draw(4, 4, 1) * S).long()


@kernel
@cases
def test_lists(page, layout, dtype):
    x = cache(page, layout, dtype)
    for heads in (4, 2):
        index, weight, count = lists(x, heads=heads)
        for given in ((index, weight), (index.int(), None, count)):
            want = gather.attend(x.q, x.k, x.v, *given)
            same(poisoned(lambda: gather.attend(x.q, x.pages_k, x.pages_v, *given, table=x.table)), want)
    want = gather.attend_state(x.q, x.k, x.v, *given)
    same(gather.attend_state(x.q, x.pages_k, x.pages_v, *given, table=x.table), want)


@kernel
def test_a_number_behind_a_sequence_is_no_key():
    x = cache()
    index, weight, _ = lists(x)
    index[2, 1, 0, 0] = 97                                 # the page has room for it, and other numbers than NaN
    for pages in x.pages_k, x.pages_v: pages.nan_to_num_(0)
    got = gather.attend(x.q, x.pages_k, x.pages_v, index, weight, table=x.table)
    assert got[2, 1].isnan().all() and int(got.isnan().any(-1).sum()) == 1


def index_of(name, k, unit, R=2, seed=2):
    "Kernels, rows of the index, and what a step is told, as the methods' states keep them."
    state_of = dict(topk=None, quest=Quest(0.2, page=unit), adamas=Adamas(0.2), double_sparsity=DoubleSparsity(0.2),
                    hash_attention=HashAttention(0.2, layer=0))[name]
    if name == "topk": return topk, k, {}
    B, G, N, D = k.shape
    state, draw = state_of.new_state(), torch.Generator(DEVICE).manual_seed(seed)
    if name == "hash_attention":
        new = lambda *size: torch.randn(*size, device=DEVICE, generator=draw)
        state.held = {part: new(*size) for part, size in zip(PARTS, [
            x for heads in (G, G * R) for x in ((heads, D, 8), (heads, 8), (heads, 8, 32), (heads, 32))])}
    q = dict(q=torch.randn(B, G * R, 1, D, device=DEVICE, generator=draw).to(k.dtype)) if "q" in state.observes else {}
    state.append(k, k, **q)
    own = dict(double_sparsity=lambda: (state.fit[:, :, 0],),
               hash_attention=lambda: tuple(state.held[part] for part in PARTS if part[0] == "q")).get(name, tuple)()
    given = dict(unit=unit, begin=torch.zeros(B, dtype=torch.int64, device=DEVICE)) if name == "quest" else {}
    kernels = dict(quest=quest, adamas=adamas, double_sparsity=double_sparsity, hash_attention=hash_attention)[name]
    return kernels, state.rows, given | dict(own=own) | (dict(factor=CUT) if name == "adamas" else {})


@kernel
@pytest.mark.parametrize("page, layout, dtype, shared", [(16, "HND", FP32, False), (64, "NHD", BF16, True)], ids=str)
@pytest.mark.parametrize("name", ["topk", "quest", "adamas", "double_sparsity", "hash_attention"])
def test_the_best_keys_by_an_index_in_pages(name, page, layout, dtype, shared):
    x = cache(page, layout, dtype, share=0 if name in ("adamas", "double_sparsity") else 2)  # fitted to a sequence
    kernels, rows, given = index_of(name, x.k.nan_to_num(0), unit=page // 2)
    pages, rows = (x.pages_k, x.k) if name == "topk" else (x.cut(rows, given.get("unit", 1)), rows)
    want = kernels.topk(x.q, rows, 0.2, 150, **given, kv_end=x.lengths, shared=shared)
    got = poisoned(lambda: kernels.topk(x.q, pages, 0.2, 150, **given, shared=shared, table=x.table))
    same(got, want)


@kernel
@pytest.mark.parametrize("name, sample", [("quest", 16), ("adamas", 64), ("double_sparsity", 32)])
def test_marks_from_a_sample_of_an_index_in_pages(name, sample):
    x = cache(16, "NHD", share=0)
    kernels, rows, given = index_of(name, x.k.nan_to_num(0), unit=4)
    place = Place(150, None, x.lengths, given.get("begin"), given.get("unit", 1))
    told = list(given["own"]), given.get("factor", 1.0), 0.2
    marks = [kernels.score(x.q, of, *told, at, tiles=Tiles(sample=sample))[1][:, :3]
             for of, at in ((rows, place), (x.cut(rows, place.unit), place._replace(table=x.table)))]
    assert int((marks[0][:, 0] > -2**31).sum()) >= 4       # a sample was read
    same(*marks)


# vAttention

@kernel
@pytest.mark.parametrize("page, layout, dtype, G, guarantee", [
    (16, "NHD", FP32, 2, "denominator"), (32, "HND", BF16, 1, "numerator"), (64, "NHD", FP32, 1, "output")], ids=str)
def test_vattention(page, layout, dtype, G, guarantee):
    x = cache(page, layout, dtype, lengths=(300, 1, 97), G=G, R=3)
    draw = torch.Generator(DEVICE).manual_seed(6)
    codes = torch.randint(-2**31, 2**31, (3, G, 300, 1), device=DEVICE, generator=draw).int()
    for b in range(3): codes[b, :, :page] = codes[0, :, :page]                  # of a page that may be shared
    sizes = (3 * G, 32, 8), (3 * G, 8), (3 * G, 8, 32), (3 * G, 32)
    maps, levels = tuple(torch.randn(*size, device=DEVICE, generator=draw) for size in sizes), None
    log, square = tail_levels(0.1, guarantee == "numerator")
    settings = vattention.Settings(3, 7, 0.05, 0.1, 16, 0.2, log, square, 5.0, plug_square=9.0)
    lengths = None if guarantee == "denominator" else x.v.float().norm(dim=-1)
    if guarantee == "output": levels = output_levels(0.1, DEVICE)
    call = partial(vattention.decode, settings=settings, lists=G, maps=maps, levels=levels, seed=5)
    want = call(x.q, x.k, x.v, codes=codes, lengths=lengths, kv_end=x.lengths)
    got = poisoned(lambda: call(x.q, x.pages_k, x.pages_v, codes=x.cut(codes), table=x.table,
                                lengths=None if lengths is None else x.cut(lengths)))
    same([got.out, got.places, got.rest, got.base, got.extra], [want.out, *want[2:6]])
    assert torch.equal(got.facts.nan_to_num(), want.facts.nan_to_num()) and (got.extra.sum(-1) > 0).any()
    if lengths is not None: assert torch.equal(got.norm, want.norm)


# Sketch&Walk

@kernel
@pytest.mark.parametrize("page, layout, dtype, kind, heads", [
    (16, "NHD", FP32, "fine4", "group"), (32, "HND", BF16, "mean", "each"), (64, "NHD", FP32, "fine16", "group")],
    ids=str)
def test_sketch_walk(page, layout, dtype, kind, heads):
    x = cache(page, layout, dtype, lengths=(150, 33, 96), R=3, D=64)
    settings = sketch_walk.Settings(32, 0.4, kind, heads)
    places = dict(causal=False, kv_start=None, kv_end=None)
    state = SketchWalk(32, index=kind).state_of(x.q, x.k.nan_to_num(0), None, places)
    sign = signed_hadamard(64, None)[:, 0].sign().to(DEVICE)
    def step(*tensors, **given):
        index = sketch_walk.pack(kind, state.rows, state.begin, sign)           # the step writes full blocks
        found = sketch_walk.decode(*tensors, index, settings, **given)
        return found.out, found.count, index.rows, index.facts, found.blocks.where(
            torch.arange(found.blocks.shape[2], device=DEVICE) < found.count[..., None], 0)
    want = step(x.q, x.k, x.v, kv_end=x.lengths)
    same(poisoned(lambda: step(x.q, x.pages_k, x.pages_v, table=x.table)), want)
    assert (want[1] < 5).any()


def means_in_pages(x, kind):
    "Space for the means of a cache's sub-blocks, pages apart, and the signs of the rotation."
    (P, G, page, D), fine = x.pages_k.shape, FINE.get(kind, 32)
    def new(dtype, *size):
        memory = torch.full((P, 16 + G * page // fine * math.prod(size)), 77, dtype=dtype, device=DEVICE)
        return memory[:, 16:].unflatten(1, (G, page // fine, *size))
    rows = new(BF16, D) if kind == "mean" else new(torch.uint8, 2**math.ceil(math.log2(D)) // 2)
    index = rows, new(torch.int32), new(FP32) if kind == "fine16" else None
    return index, signed_hadamard(D, None)[:, 0].sign().float().to(DEVICE)


@kernel
@pytest.mark.parametrize("page, layout, dtype, kind, heads, D", [
    (16, "NHD", BF16, "fine4", "group", 64), (16, "HND", FP32, "fine16", "each", 40),
    (64, "NHD", FP16, "fine16", "group", 64), (64, "HND", BF16, "mean", "group", 40)], ids=str)
def test_sketch_walk_with_an_index_in_pages(page, layout, dtype, kind, heads, D):
    "Its numbers are those of an index of sequences, a radius to rounding, and the same numbers make the same step."
    x = cache(page, layout, dtype, lengths=(230, 1, 97, 64, 20), R=3, D=D, seed=2)
    s, fine = SketchWalk(32, index=kind, heads=heads), FINE.get(kind, 32)
    state = s.state_of(x.q, x.k.nan_to_num(0), None, dict(causal=False, kv_start=None, kv_end=None))
    index, sign = means_in_pages(x, kind)
    packed = sketch_walk.pack(kind, state.rows, state.begin, sign)
    slots = [at * page + i for at, b, first in x.places for i in range(min(page, x.lengths[b] - first))]
    engine.write_means(x.pages_k, index, sign, torch.tensor([*slots, -1], device=DEVICE))
    for got, want in zip(index[:2 + (kind == "fine16")], packed):
        want, known = want.view(5, 2, -1, *want.shape[4:]), torch.zeros(len(got), page // fine, dtype=torch.bool)
        for b, n in enumerate(x.lengths.tolist()):
            for i in range(n // fine):
                at, place = int(x.table.numbers[b, i * fine // page]), i % (page // fine)
                known[at, place] = True
                if got.dtype != FP32: assert torch.equal(got[at, :, place], want[b, :, i])
                else: assert_close(got[at, :, place], want[b, :, i], rtol=1e-6)
                want[b, :, i] = got[at, :, place]
        assert (got.transpose(1, 2)[~known.to(DEVICE)] == 77).all()             # all others are left alone
    def step(*tensors, index, **given):
        found = sketch_walk.decode(*tensors, index, sketch_walk.Settings(32, 0.4, kind, heads), **given)
        there = torch.arange(found.blocks.shape[2], device=DEVICE)
        return found.out, found.count, found.blocks.where(there < found.count[..., None], 0), found.score.where(
            there < (x.lengths[:, None, None] + 31) // 32, 0)
    *want, score = step(x.q, x.k, x.v, index=packed, kv_end=x.lengths)
    whole, before = sketch_walk.Index(*index, state.begin, sign), [y.clone() for y in index if y is not None]
    *got, ours = poisoned(lambda: step(x.q, x.pages_k, x.pages_v, index=whole, table=x.table))
    same(got, want)
    assert_close(ours, score, rtol=1e-6)                                        # two kernels: a GPU may fuse other sums
    assert (want[1] < 8).any() and all(map(torch.equal, before, (y for y in index if y is not None)))


@kernel
@pytest.mark.parametrize("change, said", [
    (dict(rows=lambda x: x[:, :1]), r"\[pages, G, sub-blocks of a page\] = \[11, 2, 4\], got \[11, 1, 4\]"),
    (dict(rows=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)), "must lie side by side within a page, got"),
    (dict(radius=lambda x: x.contiguous()), "facts and radii as far apart"),
    (dict(rows=lambda x: x.bfloat16()), "packed as 'fine16', got another kind")], ids=str)
def test_an_index_in_pages_that_does_not_fit(change, said):
    x = cache(64, lengths=(150, 33), D=64)
    index, sign = means_in_pages(x, "fine16")
    whole = sketch_walk.Index(*index, torch.zeros(2, dtype=torch.int64, device=DEVICE), sign)
    wrong = whole._replace(**{name: make(getattr(whole, name)) for name, make in change.items()})
    settings = sketch_walk.Settings(32, 0.4, "fine16")
    with pytest.raises(ValueError, match=said):
        sketch_walk.decode(x.q, x.pages_k, x.pages_v, wrong, settings, table=x.table)
    with pytest.raises(ValueError, match="index must be of"):
        sketch_walk.decode(x.q, x.k, x.v, whole, settings, kv_end=x.lengths)


# SAAP

@kernel
@pytest.mark.parametrize("page, layout, dtype, tail, probes", [
    (16, "NHD", FP32, "first_order", None), (32, "HND", BF16, "second_order", None), (64, "NHD", FP32, "drop", 3)],
    ids=str)
def test_saap(page, layout, dtype, tail, probes):
    x = cache(page, layout, dtype, lengths=(150, 33, 97))
    ids = torch.randint(6, (3, 2, 150), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(7))
    index = saap_index.build_index(x.k.nan_to_num(0), x.v.nan_to_num(0), ids, torch.full((3,), 4, device=DEVICE),
                                   x.lengths - 9, 6)
    settings = saap.Settings(None if probes else 0.2, probes, tail=tail)
    step = lambda *tensors, **given: saap.decode(*tensors, index, settings, **given)
    want = step(x.q, x.k, x.v, kv_end=x.lengths)
    got = poisoned(lambda: step(x.q, x.pages_k, x.pages_v, table=x.table))
    same([got.out, got.end, got.facts[..., :5]], [want.out, want.end, want.facts[..., :5]])
    slots, order = torch.tensor([4, 0, 2], device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)  # in any order
    spread = lambda part: part.new_full((6, *part.shape[1:]), 3).index_copy(0, slots, part)
    index = saap_index.Index(*map(spread, index))
    mixed = PageTable(*(part[order] for part in (x.table.numbers, x.table.lengths)), x.table.keys)
    got = poisoned(lambda: step(x.q[order], x.pages_k, x.pages_v, table=mixed, slots=slots[order].int()))
    same([got.out, got.end, got.facts[..., :5]], [y[order] for y in (want.out, want.end, want.facts[..., :5])])


# what is refused

@kernel
@pytest.mark.parametrize("change, said", [
    (dict(numbers=lambda x: x.table.numbers.long()), "numbers must be int32, got torch.int64"),
    (dict(numbers=lambda x: x.table.numbers[0]), r"numbers must be \[B, pages\], got \[11\]"),
    (dict(numbers=lambda x: x.table.numbers.T.contiguous().T), "numbers must lie side by side, got a last stride of 4"),
    (dict(lengths=lambda x: x.lengths[:3]), "lengths must be of 4 sequences, got 3"),
    (dict(lengths=lambda x: x.lengths.tolist()), "lengths must be a tensor, got list"),
    (dict(keys=lambda x: 0), "keys must be at least 1, got 0"),
    (dict(keys=lambda x: 150.0), "keys must be an int, got float"),
    (dict(keys=lambda x: 177), "table must have pages of 16 for 177 keys, got 11"),
    (dict(kv_end=lambda x: x.lengths), "kv_end must be None with a page table"),
    (dict(q=lambda x: x.q[:3]), "table must be of the 3 sequences of q, got 4"),
    (dict(q=lambda x: x.q[:, :3]), "k must have as many heads as divide 3, got 2"),
    (dict(v=lambda x: x.pages_v[1:]), r"v must have the shape of k, \[47, 2, 16, 32\], got \[46, 2, 16, 32\]"),
    (dict(k=lambda x: x.pages_k[:, :, :8]), "a power of two of at least 16 keys, got 8"),
    (dict(k=lambda x: x.pages_k.flatten(0, 1), v=lambda x: x.pages_v), "k must be pages"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused(change, said):
    x = cache()
    call = dict(q=x.q, k=x.pages_k, v=x.pages_v, kv_end=None, numbers=x.table.numbers, lengths=x.lengths, keys=150)
    call |= {name: make(x) for name, make in change.items()}
    with pytest.raises((TypeError, ValueError), match=said):
        table = PageTable(*(call.pop(name) for name in ("numbers", "lengths", "keys")))
        exact.attend_all(**call, table=table)


if not INTERPRETED:
    @pytest.mark.kernels
    @pytest.mark.budget(40)
    @pytest.mark.parametrize("shard", range(2))
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_in_the_interpreter(forked_pytest, shard):
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--shard", f"{shard}/2", __file__,
                                   TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d\d passed", said), said[-4000:]
