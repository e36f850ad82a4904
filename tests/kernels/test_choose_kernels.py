"""The Triton kernels by which predictors choose keys: the same keys as by the stable sort, whatever the scores are.

`pytest -m gpu -k test_choose_kernels` runs the sweep on a GPU. Without one, a covering design of small problems
runs in Triton's interpreter, in processes of their own. Where a score is a sum of floats, the kernels add in another
order than PyTorch: keys may then differ whose scores in float64 are within `CLOSE` of the threshold, and no other.
"""
import math
import re
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from covering import drawn
from inputs import DEVICE, GPU, INTERPRETED, LAYOUTS, kernel, poisoned
from sparse_nb import hash_attention
from sparse_nb.hash_attention import HashAttention
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import HyperplaneBits, MagicPIG
from sparse_nb.methods.one_list import OneList
from sparse_nb.methods.quest import Quest
from sparse_nb.core import selection
from sparse_nb.core.exact import assert_close, attention_scores, visible_range
from sparse_nb import TopK
from sparse_nb.core.selection import Selection, budget_counts, first_slots, weighted_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLOSE = 2**-18  # of the sum of the terms' sizes
SMALL = dict(sample=32, sift=(64, 64), count=(64, 64), select=64, score=(64, 4), page=(8, 4))


# the list

KINDS = {
    "normal": lambda x: x,
    "rounded": lambda x: x.round(),
    "two values": lambda x: (x > 1).float(),
    "all equal": lambda x: torch.zeros_like(x) + 1.5,
    "whole numbers": lambda x: (x * 5).int(),
    "negative whole numbers": lambda x: -(x * 200).int().abs(),
    "zeros of both signs": lambda x: torch.where(x > 0.5, 0., torch.where(x < -0.5, -0., -1.)),
    "infinite": lambda x: torch.where(x < 0, -math.inf, x),
    "far apart": lambda x: x * 10. ** (40 * x).clamp(-37, 37).round(),
    "tiny": lambda x: x * 1e-40,
    "rising": lambda x: torch.arange(x.shape[-1], device=x.device).expand(x.shape) * 1e-3,
    "periodic": lambda x: (torch.arange(x.shape[-1], device=x.device) % 64).float().expand(x.shape).contiguous(),
    "one large": lambda x: torch.where(torch.arange(x.shape[-1], device=x.device) == x.shape[-1] // 2, 1e30, x),
}


def bounds(B, N, ragged):
    "First visible keys and their ends: all keys, or some in the middle, and of one sequence a single one."
    if not ragged: return None, None
    start = torch.tensor([(b + 1) * N // (B + 2) for b in range(B)], device=DEVICE)
    stop = torch.tensor([N - (b + 1) * (N // 7) for b in range(B)], device=DEVICE, dtype=torch.int32)
    stop[-1] = start[-1] + 1
    return start, stop


def listed(index, weight, first, n):
    "The keys of a list, of whose slots the used ones come first; the others point at the first visible key."
    used = weight > 0
    count = int(used.sum())
    assert used[:count].all() and set(weight.tolist()) <= {0., 1.}
    assert (index[count:] == first).all()
    return index[:count].tolist()


def check_list(scores, budget, start, stop, tiles, unit=1, begin=None, N=None, known=None):
    "Lists of all heads against the sort; with `unit`, scores are of pages."
    from sparse_nb.kernels.top_budget import Place, Tiles, launch_list
    B, H, M = scores.shape
    N = M if N is None else N
    index, weight, used = poisoned(lambda: launch_list(scores, budget, Place(N, start, stop, begin, unit),
                                                       tiles=Tiles(**tiles), known=known))
    assert torch.equal(used, (weight > 0).sum(-1))
    assert index.shape == weight.shape == (B, H, 1, budget_counts(budget, torch.tensor([[[N]]]), N)[1])
    for b in range(B):
        first, end = (0, N) if start is None else (int(start[b]), int(stop[b]))
        key = torch.arange(first, end, device=DEVICE)
        page = (key - (0 if begin is None else int(begin[b]))).clamp(min=0) // unit
        want = int(budget_counts(budget, torch.tensor([[[end - first]]]), N)[0])
        for h in range(H):
            x = scores[b, h, page]
            best = key[x.sort(descending=True, stable=True).indices[:want]].sort().values
            assert listed(index[b, h, 0], weight[b, h, 0], first, end - first) == best.tolist(), (b, h)
    return index, weight


CASES = drawn(dict(kind=tuple(KINDS), budget=(1, 17, 0.1, 0.37, 1.0, 10**6),
                   N=(1, 500, 9001) if GPU else (1, 63, 300), ragged=(False, True), tiles=("small", "shipped")))


@kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_lists(case):
    N, tiles = case["N"], SMALL if case["tiles"] == "small" else {}
    x = torch.randn(2, 2, N, generator=torch.Generator(DEVICE).manual_seed(N), device=DEVICE)
    check_list(KINDS[case["kind"]](x), case["budget"], *bounds(2, N, case["ragged"]), tiles)


PAGES = drawn(dict(kind=("normal", "rounded", "all equal", "infinite", "two values"), budget=(1, 17, 0.1, 0.37, 1.0),
                   unit=(2, 5, 16, 128), begin=(0, 3, 40), ragged=(False, True), tiles=("small", "shipped")), seed=1)


@kernel
@pytest.mark.parametrize("case", PAGES, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_lists_of_pages(case):
    "The last page is cut; visible keys may begin within a page, or before the first one."
    N, unit = 500, case["unit"]
    x = torch.randn(2, 2, -(-N // unit), generator=torch.Generator(DEVICE).manual_seed(unit), device=DEVICE)
    begin = torch.tensor([0, case["begin"]], device=DEVICE)
    check_list(KINDS[case["kind"]](x), case["budget"], *bounds(2, N, case["ragged"]),
               SMALL if case["tiles"] == "small" else {}, unit, begin, N)


@kernel
@pytest.mark.parametrize("kind, unit", [("all equal", 100), ("all equal", 127), ("rounded", 127), ("all equal", 200)])
def test_pages_of_many_keys(kind, unit):
    "Two sums share a number of 32 bits where a tile has fewer than 2^16 keys, and no longer."
    x = torch.randn(1, 1, 520, generator=torch.Generator(DEVICE).manual_seed(unit), device=DEVICE)
    check_list(KINDS[kind](x), 0.9, None, None, {}, unit, torch.zeros(1, dtype=torch.int64, device=DEVICE), 520 * unit)


def test_nothing_is_written_before_the_wait():
    "What a launch writes may lie where one before it still reads: in what Python has let go of, as the query's code."
    pytest.importorskip("triton")
    from sparse_nb.kernels import adamas, double_sparsity, hash_attention, magicpig, quest, top_budget, topk
    modules = adamas, double_sparsity, hash_attention, magicpig, quest, top_budget, topk
    bodies = (body for x in modules for body in re.split(r"\n@triton\.jit", Path(x.__file__).read_text()))
    waits = [body for body in bodies if "gdc_wait()" in body]
    assert len(waits) > 5
    for body in waits: assert not re.search(r"tl\.(store|atomic)", body.partition("gdc_wait()")[0]), body[:80]


def counted(scores, start, stop, tiles, bins):
    "What a launch that scores says of how often scores from 0 to `bins` occur, in PyTorch."
    from sparse_nb.kernels.top_budget import Counts, Tiles, list_tile
    B, H, N = scores.shape
    BN, at = list_tile(N, Tiles(**tiles), True)[0], torch.arange(N, device=DEVICE)
    reached = torch.zeros(B, H, bins, -(-N // BN), dtype=torch.int32, device=DEVICE)
    for b in range(B):
        first, end = (0, N) if start is None else (int(start[b]), int(stop[b]))
        for t in range(reached.shape[3]):
            x = scores[b, :, (at >= first + t * BN) & (at < min(first + (t + 1) * BN, end))]
            reached[b, :, :, t] = (x[:, None] > torch.arange(bins, device=DEVICE)[:, None]).sum(2)
    return Counts(reached.sum(3, dtype=torch.int32), reached)


FEW = {"none": lambda x: torch.zeros_like(x), "all": lambda x: torch.full_like(x, 32),
       "both ends": lambda x: 32. * (x > 0.8), "one and none": lambda x: 1. * (x > 0.5),
       "bits": lambda x: (16 + 3 * x).round().clamp(0, 32), "one best": lambda x: 32. * (x == x.max()) + 7}
COUNTED = drawn(dict(kind=tuple(FEW), budget=(1, 17, 0.1, 0.37, 1.0, 10**6), bins=(32, 64, 128),
                     N=(1, 500, 9001) if GPU else (1, 63, 300), ragged=(False, True), tiles=("small", "shipped")),
                seed=2)


@kernel
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_lists_of_counted_scores(case):
    "Also where the threshold is 0, which no bin counts, and where it is the last bin's."
    N, tiles = case["N"], SMALL if case["tiles"] == "small" else {}
    x = torch.randn(2, 2, N, generator=torch.Generator(DEVICE).manual_seed(N), device=DEVICE)
    scores, seen = FEW[case["kind"]](x).clamp(max=32).to(torch.int16), bounds(2, N, case["ragged"])
    check_list(scores, case["budget"], *seen, tiles, known=counted(scores, *seen, tiles, case["bins"]))


class Marks:
    "In place of the launch that guesses: the same two marks for every head."
    def __init__(self, below, above): self.marks = torch.tensor([below, above, 0], dtype=torch.int32, device=DEVICE)
    def __getitem__(self, grid): return self
    def __call__(self, scores, mark, *_, **__): mark[:, :3] = self.marks


@kernel
@pytest.mark.parametrize("below, above", [
    (900, 2**31 - 1), (-2**31, 3), (500, 400), (450, 450), (440, 460), (430, 445), (397, 460), (396, 460),
    (450, 451), (449, 451)])
@pytest.mark.parametrize("unit, budget", [(1, 50), (1, 0.1), (4, 203), (4, 205)])
@pytest.mark.parametrize("ends", [None, 445, 460])
@pytest.mark.parametrize("bins", [64, 2])
def test_marks_decide_nothing(below, above, unit, budget, ends, bins, monkeypatch):
    """Marks that miss the threshold, or cross, or have it and ties on one, or are as far apart as tiles count and
    farther: the list is the same, also where the first page and the last, which are cut, are between them."""
    from sparse_nb.kernels import top_budget
    monkeypatch.setattr(top_budget, "guess_kernel", Marks(below, above))
    monkeypatch.setattr(top_budget, "histogram_bins", lambda BT: bins)
    draw = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randint(500, (1, 2, 500), generator=draw, device=DEVICE, dtype=torch.int32)
    if ends: x[..., [0, 497] if unit > 1 else [9, 498]] = ends
    begin = torch.tensor([7], device=DEVICE) if unit > 1 else None
    check_list(x, budget, torch.tensor([9], device=DEVICE), torch.tensor([499 * unit], device=DEVICE),
               SMALL | dict(select=128), unit, begin, 500 * unit)


def rank(x):
    "Whole numbers in the order of the scores, minus zero as zero."
    if x.dtype == torch.int32: return x
    bits = (x + 0.).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def marks_of(x, budget, size=256):
    "The two marks of rows of scores [1, H, N], from a sample of so many."
    from sparse_nb.kernels.top_budget import NEAR, SIGMAS, guess_kernel
    H, N = x.shape[1:]
    mark = torch.zeros(H, 4, dtype=torch.int32, device=DEVICE)
    guess_kernel[H,](x, mark, None, None, None, N, N, H, budget, SIGMAS=SIGMAS, NEAR=NEAR, SHARE=False, U=1, BS=size,
                     BESIDE=False, PDL=False)
    return mark[:, 0], mark[:, 1]


@kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [2, 35, 151, 298])  # no rank is whole: a GPU's square root is rounded otherwise
def test_marks_stand_where_the_sample_says(kind, budget):
    """The mark below is no higher than a number that `many` of the sample reach, that above no lower than one that
    `few` reach, and of the sample no more than NEAR numbers are between the mark and that number."""
    from sparse_nb.kernels.top_budget import NEAR, SIGMAS
    N, size = 300, 256
    x = KINDS[kind](torch.randn(1, 6, N, generator=torch.Generator(DEVICE).manual_seed(budget), device=DEVICE))
    below, above = marks_of(x, budget)
    place = torch.arange(size, device=DEVICE)
    within = ((place * -1640531527).int() >> 8 & 0xFFFF).long()
    sample = rank(x)[0][:, ((place << 16) + within) * N // size >> 16].sort(-1, descending=True).values
    part = budget / N
    spread = SIGMAS * (size * part * (1 - part))**0.5 + 2
    few, many = math.floor(size * part - spread), math.ceil(size * part + spread)
    if many < size:
        assert (below <= sample[:, many - 1]).all()
        off = (sample >= below[:, None]).sum(-1) - (sample >= sample[:, many - 1:many]).sum(-1)
        assert off.max() <= NEAR
    else: assert (below == -2**31).all()
    if few > 0:
        assert (above >= sample[:, few - 1]).all()
        off = (sample >= sample[:, few - 1:few]).sum(-1) - (sample > above[:, None]).sum(-1)
        assert (off - (sample == sample[:, few - 1:few]).sum(-1)).max() <= NEAR
    else: assert (above == 2**31 - 1).all()


@kernel
def test_the_guess_holds_the_threshold():
    "For 50 rows of scores, the marks have the threshold between them; they miss with a chance of 5e-4 each."
    from sparse_nb.kernels.top_budget import NEAR, SIGMAS
    N, budget = 4000, 400
    x = torch.rand(1, 50, N, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    x = (x * 2**30).int()
    below, above = marks_of(x, budget)
    least = x[0].sort(-1, descending=True).values[:, budget - 1]
    assert ((below <= least) & (least <= above)).sum() >= 49
    between = ((x[0] >= below[:, None]) & (x[0] <= above[:, None])).sum(-1)
    spread = SIGMAS * (256 * 0.1 * 0.9)**0.5 + 2 + NEAR
    assert between.float().mean() < 2 * spread / 256 * N


# the methods

def networks(H, G, D, M=32):
    "Networks of signatures for the queries and keys of one layer."
    draw = torch.Generator(DEVICE).manual_seed(H + D)
    new = lambda *shape: torch.randn(*shape, generator=draw, device=DEVICE)
    return {f"{side}_{part}": x for side, n in (("q", H), ("k", G)) for part, x in (
        ("w1", new(n, D, M)), ("b1", new(n, M)), ("w2", new(n, M, 32)), ("b2", new(n, 32)))}


def chosen(method, q, k, by_kernels, state=None, **masks):
    "`select` with or without the kernels, wherever it runs; of equal scores the first ones."
    if isinstance(method, TopK) and not by_kernels:
        masks.pop("scale", None)
        slots = first_slots(q, k, method.budget, *visible_range(q, k, **masks))
        order = attention_scores(q, k, **masks).sort(dim=-1, descending=True, stable=True).indices
        return slots.filled(order[..., :slots.count])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "has_kernels", lambda q: by_kernels)
        patch.setattr(hash_attention, "hash_maps", lambda *_: networks(q.shape[1], k.shape[1], q.shape[3]))
        return method.select(q, k, **masks, **({} if isinstance(method, TopK) else dict(state=state)))


def exact_scores(method, q, k, state, scale=None):
    "Scores of every key in float64 as chosen by [B, H, N], and by how much a float32 sum may be off."
    G, N, factor = k.shape[1], k.shape[2], q.shape[3]**-0.5 if scale is None else scale
    x = (q.float() * factor).double()[:, :, 0].unflatten(1, (G, -1))                         # [B, G, R, D]
    if isinstance(method, DoubleSparsity):
        x = x.gather(-1, state.numbers()[:, :, None].expand(*x.shape[:3], -1))
        y = state.decoded(torch.float64).transpose(-1, -2)
        return (x @ y).flatten(1, 2), (x.abs() @ y.abs()).flatten(1, 2) * CLOSE
    if isinstance(method, TopK):
        y = k.double().transpose(-1, -2)
        return (x @ y).flatten(1, 2), (x.abs() @ y.abs()).flatten(1, 2) * CLOSE
    low, high = state.rows.double().unbind(3)
    none = (low > high).any(-1)[:, :, None]
    low, high = (y.masked_fill(none[:, :, 0, :, None], 0).transpose(-1, -2) for y in (low, high))
    each = x.clamp(min=0) @ high + x.clamp(max=0) @ low, x.abs() @ torch.maximum(low.abs(), high.abs()) * CLOSE
    block = (torch.arange(N, device=q.device) - state.begin[:, None]).clamp(min=0) // method.page
    spread = lambda y: y.gather(-1, block[:, None, None].expand(*y.shape[:3], N)).flatten(1, 2)
    return spread(each[0].masked_fill(none, -math.inf)), spread(each[1])


def check_method(method, q, k, state=None, scale=None, **masks):
    "The same keys as without kernels; other ones only where float64 scores are as near to the threshold as sums err."
    more = {} if scale is None else dict(scale=scale)
    if state is None and not isinstance(method, TopK): state = chosen_state(method, q, k, **masks)
    want = chosen(method, q, k, False, state, **masks, **more)
    got = poisoned(lambda: chosen(method, q, k, True, state, **masks, **more))
    assert isinstance(got, Selection) and got.index.shape == want.index.shape and torch.equal(got.budget, want.budget)
    a, b = (x.dense(k.shape[2])[:, :, 0] > 0 for x in (got, want))
    if isinstance(method, (Quest, DoubleSparsity, TopK)):
        x, off = exact_scores(method, q, k, state, scale)
        least = x.masked_fill(~b, math.inf).amin(-1, keepdim=True)
        near = (x - least).abs() <= off + off.masked_fill(~b, 0).amax(-1, keepdim=True)
        assert not ((a != b) & ~near).any()
        assert (a != b).sum() <= 0.002 * b.sum()
    else: assert torch.equal(a, b)
    return got


def chosen_state(method, q, k, **masks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_attention, "hash_maps", lambda *_: networks(q.shape[1], k.shape[1], q.shape[3]))
        return method.build(k, **masks)


def problem(B, G, R, N, D, dtype, ragged=False, seed=0):
    "Queries, keys that are alike within a stretch of some 20, and masks; huge numbers in what is hidden."
    draw = torch.Generator(DEVICE).manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=draw, device=DEVICE)
    k = new(B, G, N, D) + new(B, G, N // 20 + 1, D).repeat_interleave(20, 2)[:, :, :N]
    q, k = new(B, G * R, 1, D).to(dtype), k.to(dtype)
    start, stop = bounds(B, N, ragged)
    if not ragged: return q, k, {}
    for b in range(B): k[b, :, :start[b]] = k[b, :, stop[b]:] = 1e4
    return q, k, dict(kv_start=start, kv_end=stop)


METHODS = {"quest": lambda budget, i: Quest(budget, (16, 5, 64)[i]),
           "double sparsity": lambda budget, i: DoubleSparsity(budget, (16, 6, 33)[i]),
           "adamas": lambda budget, i: Adamas(budget), "hash": lambda budget, i: HashAttention(budget, layer=0)}
ALL = METHODS | {"top-k": lambda budget, i: TopK(budget)}
OF_METHODS = drawn(dict(method=tuple(ALL), budget=(1, 40, 0.1, 0.5, 10**6), setting=(0, 1, 2), D=(16, 64, 80, 128),
                        R=(1, 3, 4, 8), dtype=(BF16, FP16, FP32), ragged=(False, True)), seed=2)


@kernel
@pytest.mark.parametrize("case", OF_METHODS, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_methods(case):
    N = 5003 if GPU else 210
    q, k, masks = problem(2, 2, case["R"], N, case["D"], case["dtype"], case["ragged"])
    method = ALL[case["method"]](case["budget"], case["setting"])
    if case["method"] == "double sparsity": method = DoubleSparsity(case["budget"], min(case["D"], method.channels))
    check_method(method, q, k, **masks)


@kernel
@pytest.mark.parametrize("name", ALL)
def test_equal_keys(name):
    "All scores are equal: the first visible keys."
    q, k, masks = problem(2, 2, 2, 100, 64, FP32, True)
    q, k = (x.nan_to_num().mul(256).round().div(256) for x in (q, k))  # sums that are exact in any order
    k = k[:1, :, 50:51].expand(2, 2, 100, 64).contiguous()
    got = check_method(ALL[name](0.3, 0), q, k, **masks)
    assert got.index[0, 0, 0, :10].tolist() == list(range(25, 35))


@kernel
@pytest.mark.parametrize("name", METHODS)
def test_other_strides_and_scale(name):
    q, k, masks = problem(2, 1, 3, 150, 64, FP32, True)
    wide = torch.zeros(2, 1, 3, 129, device=DEVICE)
    wide[:, 0, :, 1::2] = q[:, :, 0]
    q = wide[:, 0, :, None, 1::2]
    assert q.stride(-1) == 2
    method = METHODS[name](0.2, 0)
    state = chosen_state(method, q, torch.cat([k, k]), **{x: torch.cat([y, y]) for x, y in masks.items()})
    state.pick_sequences(torch.tensor([2, 1]))
    check_method(method, q, k, state, scale=0.3, **masks)
    if name != "quest": state.rows = state.rows.repeat_interleave(2, 2)[:, :, ::2]
    check_method(method, q, k, state, scale=0.3, **masks)


@kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D", [20, 64, 256])
def test_keys_as_they_lie(layout, D):
    "By the keys themselves, whatever their strides and the scale."
    draw = torch.Generator(DEVICE).manual_seed(D)
    new = lambda *shape: torch.randn(*shape, generator=draw, device=DEVICE)
    q, k = new(2, D, 6).transpose(1, 2)[:, :, None], LAYOUTS[layout](2, 2, 150, D, new)
    start, stop = bounds(2, 150, True)
    for budget in (9, 0.2):
        for scale in (None, 0.3): check_method(TopK(budget), q, k, kv_start=start, kv_end=stop, scale=scale)


@kernel
def test_keys_that_are_no_numbers_come_first():
    "Of what a GPU may not look at: as `torch.sort` has them."
    q, k, _ = problem(1, 1, 1, 90, 16, FP32)
    k[0, 0, 70] = math.nan
    k[0, 0, 80], q[..., 1:] = math.inf, 0
    q[..., 0] = 1
    k[0, 0, 80, 1:] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "has_kernels", lambda q: True)
        assert TopK(2).select(q, k).index.flatten().tolist() == [70, 80]


@kernel
def test_pages_that_nobody_was_shown():
    "Their boxes are inf and -inf; they come last, and in their order."
    q, k, _ = problem(1, 1, 2, 96, 64, FP32)
    state, shown = Quest(16).new_state(), torch.ones(1, 96, dtype=torch.bool, device=DEVICE)
    shown[:, 32:64] = False
    state.append(k, k, shown=shown)
    assert state.rows.isinf().any()
    for budget in (10, 70, 96): check_method(Quest(budget), q, k, state)


def asked_by(name, state, H, G, D):
    "The kernels of a method, and what their `score` is told."
    from sparse_nb.kernels import adamas, double_sparsity, hash_attention, quest, topk
    channels = state.fit[:, :, 0] if name == "double sparsity" else None
    return {"quest": (quest, [], D**-0.5), "double sparsity": (double_sparsity, [channels], D**-0.5),
            "adamas": (adamas, [], 0.9816),
            "hash": (hash_attention, [networks(H, G, D)[f"q_{x}"] for x in ("w1", "b1", "w2", "b2")], 1.),
            "keys": (topk, [], D**-0.5)}[name]


@kernel
@pytest.mark.parametrize("R, shared, ragged", [(1, False, False), (3, True, True), (4, False, True), (8, True, False)])
def test_signatures_are_counted(R, shared, ragged):
    "Random ones, the first query's own and its opposite: scores from none to all bits, and how often each occurs."
    from sparse_nb.kernels.top_budget import Place, Tiles
    B, G, N, D, lists = 2, 2, 300, 64, 2 if shared else 2 * R
    q, k, masks = problem(B, G, R, N, D, FP32, ragged)
    state = chosen_state(METHODS["hash"](0.2, 0), q, k)
    first, end = (x[:, 0, 0] for x in visible_range(q, k, **masks))
    state.rows = torch.randint(-2**31, 2**31, state.rows.shape, dtype=torch.int32, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_attention, "hash_maps", lambda *_: networks(G * R, G, D))
        own = state.hash(q, "q").view(B, G, R)[:, :, 0]
        for b in range(B): state.rows[b, :, first[b]], state.rows[b, :, end[b] - 1] = own[b, :, None], ~own[b, :, None]
        want = METHODS["hash"](0.2, 0).scores(q, state)[:, :, 0].unflatten(1, (lists, -1)).sum(2).to(torch.int16)
    kernels, own, factor = asked_by("hash", None, G * R, G, D)
    place, most = Place(N, masks.get("kv_start"), masks.get("kv_end")), 32 * R if shared else 32
    def told():
        scores, counts = kernels.score(q, state.rows, own, factor, 0.2, place, Tiles(**SMALL), shared=shared)
        return scores, *counts
    scores, total, reached = poisoned(told)
    for b in range(B): assert torch.equal(scores[b, :, first[b]:end[b]], want[b, :, first[b]:end[b]])
    assert ragged or R > 1 or want.amax() == most and want.amin() == 0
    counts = counted(want, first, end, SMALL, total.shape[2])
    assert total.shape[2] >= most and torch.equal(total, counts.total) and torch.equal(reached, counts.reached)


@kernel
@pytest.mark.parametrize("R, D, ragged", [(1, 64, False), (3, 80, True), (4, 128, True), (40, 32, False)])
@pytest.mark.parametrize("name", [*METHODS, "keys"])
def test_one_list_for_a_group(name, R, D, ragged):
    "Scores are the sums of those of the heads; of the keys, the list is that of the sums."
    from sparse_nb.kernels.top_budget import Place, Tiles, launch_list
    B, G, N = 2, 2, 200
    q, k, masks = problem(B, G, R, N, D, BF16, ragged)
    method = TopK(0.2) if name == "keys" else METHODS[name](0.2, 1)
    state = None if name == "keys" else chosen_state(method, q, k, **masks)
    rows, unit, begin = (k if name == "keys" else state.rows), getattr(method, "page", 1), getattr(state, "begin", None)
    kernels, own, factor = asked_by(name, state, G * R, G, D)
    place = Place(N, masks.get("kv_start"), masks.get("kv_end"), begin if name == "quest" else None, unit)
    each, _ = kernels.score(q, rows, own, factor, 0.2, place, Tiles(**SMALL))
    whole = poisoned(lambda: kernels.score(q, rows, own, factor, 0.2, place, Tiles(**SMALL), shared=True)[:1])[0]
    first, end = (x[:, 0, 0] for x in visible_range(q, k, **masks))
    for b in range(B):
        seen = torch.arange(int(first[b]), int(end[b]), device=DEVICE)
        item = seen if name != "quest" else ((seen - begin[b]).clamp(min=0) // unit).unique()
        want = each[b, :, item].double().unflatten(0, (G, R))
        got, size = whole[b, :, item].double(), want.abs().sum(1)
        want = want.sum(1)
        if not whole.is_floating_point(): assert torch.equal(got, want)
        else:
            assert torch.equal(got.isinf(), want.isinf())
            real = ~want.isinf()
            assert ((got - want)[real].abs() <= 2**-20 * size[real]).all()
    index, weight, used = kernels.topk(q, rows, 0.2, N, own=tuple(own), factor=factor, unit=unit,
                                            begin=place.begin, shared=True, **masks)
    scores, known = kernels.score(q, rows, own, factor, 0.2, place, shared=True)
    again = launch_list(scores, 0.2, place, after=True, known=known)
    for x, y in zip((index, weight, used), again): assert x.shape[1] == G and torch.equal(x, y)
    assert (used == used[:, :1]).all()


@kernel
@pytest.mark.parametrize("R, shared, ragged", [(1, False, False), (3, True, True), (4, False, True), (4, True, False)])
@pytest.mark.parametrize("budget", [0.3, 7])
@pytest.mark.parametrize("name", ["quest", "double sparsity", "adamas"])
def test_marks_beside_the_scores_are_those_of_the_scores(name, R, shared, ragged, budget):
    "As made of the scores when they are there; where there are no more keys than the sample has, they let all pass."
    from sparse_nb.kernels.top_budget import NEAR, SIGMAS, Place, Tiles, _bits_of, guess_kernel
    B, G, N, unit = 2, 2, 800 if name == "quest" else 200, 4 if name == "quest" else 1
    q, k, masks = problem(B, G, R, N, 64, BF16, ragged)
    method = Quest(budget, page=unit) if name == "quest" else METHODS[name](budget, 0)
    state = chosen_state(method, q, k, **masks)
    kernels, own, factor = asked_by(name, state, G * R, G, 64)
    place = Place(N, masks.get("kv_start"), masks.get("kv_end"), state.begin if name == "quest" else None, unit)
    part, share = _bits_of(budget)
    for size in (32, 256):
        told = partial(kernels.score, q, state.rows, own, factor, budget, place, Tiles(sample=size), shared=shared)
        scores, mark = poisoned(told)
        (lists, M), want = scores.shape[1:], torch.zeros_like(mark)
        guess_kernel[B * lists,](scores, want, place.begin, place.start, place.stop, N, M, lists, part, SIGMAS=SIGMAS,
                                 NEAR=NEAR // 4, SHARE=share, U=unit, BS=size, BESIDE=False, PDL=False)
        assert (mark[:, 2] == 0).all()
        if size > M: assert (mark[:, 0] == -2**31).all() and (mark[:, 1] == 2**31 - 1).all()
        elif name == "adamas": assert torch.equal(mark[:, :2], want[:, :2])
        else: assert ((mark[:, :2].long() - want[:, :2]).abs() <= 64).all()  # of the order of floats
        if size < M and not ragged: assert (mark[:, 0] > -2**31).all()


@kernel
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_group_reads_its_list_once(name, ragged, monkeypatch):
    "By kernels the output is that over the keys selected, which are those of the reference; a gradient goes by it."
    from sparse_nb.kernels import gather
    q, k, masks = problem(2, 2, 3, 150, 64, BF16, ragged)
    v = torch.randn(k.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE).to(BF16)
    method, lists, attend = OneList(METHODS[name](0.3, 0)), [], gather.attend
    def told(q, k, v, index, *more, **given):
        lists.append(index.shape[1])
        return attend(q, k, v, index, *more, **given)
    monkeypatch.setattr(gather, "attend", told)
    with served_by(False, q, k):
        want, plain = method.select(q, k, **masks), method.decode(q, k, v, **masks)
    assert not lists
    with served_by(True, q, k):
        got, out = method.select(q, k, **masks), method.decode(q, k, v, **masks)
        assert lists[-1] == 2 and got.index.shape == want.index.shape and torch.equal(got.budget, want.budget)
        slope = method.decode(q.clone().requires_grad_(), k, v, **masks)
        assert slope.requires_grad
    a, b = (x.dense(150)[:, :, 0] > 0 for x in (got, want))
    assert (a.unflatten(1, (2, 3)) == a[:, ::3, None]).all() and (a != b).sum() <= 0.02 * b.sum()
    if name in ("adamas", "hash"): assert torch.equal(a, b)
    assert_close(out, weighted_state(q, k, v, got).output(), 1e-2)
    if torch.equal(a, b): assert_close(out, plain, 1e-2)


@pytest.mark.parametrize("guess, error, message", [
    (TopK(0.1), TypeError, "guess must be a KeyScorer, got TopK"),
    (None, TypeError, "guess must be a KeyScorer, got None"),
    (OneList(), ValueError, "guess must choose for single heads, got a OneList")])
def test_bad_guess(guess, error, message):
    with pytest.raises(error, match=message): OneList(guess)


@kernel
@pytest.mark.parametrize("name", METHODS)
def test_a_buffer_that_is_larger(name):
    "Features written in place at a position on the device, for a length on the device: as an index of just these keys."
    from sparse_nb.kernels.top_budget import Place, Tiles, launch_list
    q, k, _ = problem(1, 2, 2, 130, 64, FP32)
    method, N = METHODS[name](0.2, 0), 130
    state = chosen_state(method, q, k)
    rows = torch.full((1, 2, 200, *state.rows.shape[3:]), 0, dtype=state.rows.dtype, device=DEVICE)
    if rows.is_floating_point(): rows.fill_(math.nan)
    else: rows.fill_(0x5A5A)
    rows.index_copy_(2, torch.arange(state.rows.shape[2] - 1, device=DEVICE), state.rows[:, :, :-1])
    at = torch.tensor([state.rows.shape[2] - 1], device=DEVICE)
    rows.index_copy_(2, at, state.rows[:, :, -1:])
    unit, begin = (16, state.begin) if name == "quest" else (1, None)
    place = Place(200, None, torch.tensor([N], device=DEVICE), begin, unit)
    kernels, own, factor = asked_by(name, state, 4, 2, 64)
    tiles = Tiles(**SMALL)
    def made():
        scores, known = kernels.score(q, rows, own, factor, 0.2, place, tiles)
        return launch_list(scores, 0.2, place, tiles=tiles, after=True, known=known)
    index, weight, used = poisoned(made)
    want = check_method(method, q, k)
    assert index.shape[-1] == 40 and (weight.sum(-1) == 26).all() and (used == 26).all()
    assert torch.equal(index[..., :26], want.index) and (index[..., 26:] == 0).all()


@kernel
@pytest.mark.parametrize("name", METHODS)
def test_a_session_of_keys(name):
    "Key by key, after a crop and in another order: as from scratch."
    q, k, _ = problem(2, 2, 2, 60, 64, FP32)
    method = METHODS[name](0.3, 1)
    state = chosen_state(method, q, k[:, :, :50])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_attention, "hash_maps", lambda *_: networks(4, 2, 64))
        for n in range(50, 60): state.append(k[:, :, n:n + 1], k[:, :, n:n + 1])
        check_method(method, q, k, state)
        state.crop(55)
        check_method(method, q, k[:, :, :55], state)
        order = torch.tensor([1, 0], device=DEVICE)
        state.pick_sequences(order)
        check_method(method, q, k[order, :, :55], state)


# the row of a new key

@contextmanager
def served_by(kernels, q, k):
    "States and methods take kernels, or do not, wherever they run."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "has_kernels", lambda q: kernels)
        patch.setattr(hash_attention, "hash_maps", lambda *_: networks(q.shape[1], k.shape[1], q.shape[3]))
        yield patch


@kernel
@pytest.mark.parametrize("method", [Quest(0.2), OneList(Quest(20, page=8))], ids=repr)
def test_a_page_that_a_query_sees_in_part(method):
    "An index that holds later keys lists what one without them does."
    q, k, _ = problem(2, 2, 2, 130, 64, FP32)
    v = k.flip(2)
    for b, end in enumerate((122, 115)): k[b, :, end:] *= 10
    state, stop = method.build(k), torch.tensor([122, 115], device=DEVICE)
    with served_by(True, q, k):
        got, out = method.select(q, k, state=state, kv_end=stop), method.decode(q, k, v, state=state, kv_end=stop)
        for b, end in enumerate(stop.tolist()):
            alone = [x[b:b + 1] for x in (q, k[:, :, :end], v[:, :, :end])]
            assert torch.equal(got.dense(130)[b, ..., :end], method.select(*alone[:2]).dense(end)[0])
            assert_close(out[b:b + 1], method.decode(*alone), 1e-6)


def fixed_state(method, k, shown, known):
    "The index of the first `known` keys, some of them hidden, with room for all."
    state = method.new_state()
    state.append(k[:, :, :known], k[:, :, :known], **({"shown": shown[:, :known]} if "shown" in state.observes else {}))
    state.to_static(k.shape[2])
    assert state.static
    return state


def same_rows(got, want):
    "Bit by bit; NaN equals NaN, which has many bit patterns."
    if isinstance(got, type(Quest().new_state())): return torch.equal(*(x.rows.nan_to_num(7e4) for x in (got, want)))
    if not isinstance(got, type(DoubleSparsity().new_state())): return torch.equal(got.rows, want.rows)
    steps = (x.rows[..., -1:].view(BF16).float().nan_to_num(7e4) for x in (got, want))
    return torch.equal(*steps) and torch.equal(got.rows[..., :-1], want.rows[..., :-1])


def check_signatures(got, want, k, at):
    "Bits differ only where the output of the network is a rounding error; other rows are as they were."
    w1, b1, w2, b2 = (x.double() for x in got.networks(k.device, "k", k.shape[1]))
    hidden = torch.relu(k[:, :, at].double() @ w1 + b1[:, None])
    out, size = hidden @ w2 + b2[:, None], hidden.abs() @ w2.abs() + b2.abs()[:, None]
    bit = got.rows[:, :, at] >> torch.arange(32, device=k.device) & 1
    assert ((bit == (out > 0)) | (out.abs() <= CLOSE * size)).all()
    other = torch.arange(k.shape[2], device=k.device) != at
    assert torch.equal(got.rows[:, :, other], want.rows[:, :, other])


ROWS = drawn(dict(method=tuple(METHODS), setting=(0, 1, 2), D=(16, 64, 80, 128), dtype=(BF16, FP16, FP32),
                  known=(1, 31, 47), layout=tuple(LAYOUTS), room=(52, 64, 90), hidden=("none", "first keys", "some")),
             seed=3)


@kernel
@pytest.mark.parametrize("case", ROWS, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_rows_of_new_keys(case):
    "Keys one after another over the borders of pages, and the last there is room for; sequences may begin late."
    B, G, D, known, room = 2, 2, case["D"], case["known"], case["room"]
    draw = torch.Generator(DEVICE).manual_seed(D + known)
    new = lambda *shape: torch.randn(*shape, generator=draw, device=DEVICE).to(case["dtype"])
    k, q, shown = LAYOUTS[case["layout"]](B, G, room, D, new), new(B, 4, 1, D), torch.ones(B, room, dtype=torch.bool)
    if case["hidden"] == "first keys": shown[1, :known - 1] = False
    if case["hidden"] == "some": shown[:, 1:known:3] = False
    name, method, shown = case["method"], METHODS[case["method"]](0.3, case["setting"]), shown.to(DEVICE)
    if name == "double sparsity": method = DoubleSparsity(0.3, min(D, method.channels))
    with served_by(False, q, k): got, want = (fixed_state(method, k, shown, known) for _ in range(2))
    for n in (known, known + 1, known + 2, room - 1):
        at = torch.tensor([n], device=DEVICE)
        with served_by(True, q, k): got.write(k, k, at)
        with served_by(False, q, k): want.write(k, k, at)
        if name == "hash":
            check_signatures(got, want, k, at)
            want.rows[:, :, at] = got.rows[:, :, at]
        else: assert same_rows(got, want), n


ODD = {"zeros": 0., "all equal": 1.5, "tiny": 1e-42, "huge": 3e38, "far apart": [1e-30, 1e30], "inf": [math.inf, 1.],
       "minus inf": [-math.inf, 1.], "both": [math.inf, -math.inf, 1.], "nan": [math.nan, 1., -math.inf],
       "half steps": [0.5, 1.5, 2.5, -0.5, -3.5, 7.],
       "a step between two": 7.027343273162842, "one between the next two": 7.082030773162842}  # a seventh in bfloat16


@kernel
@pytest.mark.parametrize("name", [x for x in METHODS if x != "hash"])
@pytest.mark.parametrize("numbers", ODD)
def test_rows_of_odd_keys(name, numbers):
    k = torch.randn(1, 1, 20, 16, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    x = torch.as_tensor(ODD[numbers], device=DEVICE)
    k[:, :, 17] = x.reshape(-1)[torch.arange(16, device=DEVICE) % x.numel()]
    q, shown, at = k[:, :, :1], torch.ones(1, 20, dtype=torch.bool, device=DEVICE), torch.tensor([17], device=DEVICE)
    method = DoubleSparsity(channels=16) if name == "double sparsity" else METHODS[name](0.3, 0)
    got, want = (fixed_state(method, k, shown, 16) for _ in range(2))
    with served_by(True, q, k): got.write(k, k, at)
    with served_by(False, q, k): want.write(k, k, at)
    assert same_rows(got, want)


@kernel
@pytest.mark.parametrize("name", METHODS)
def test_a_key_beyond_the_buffer_has_no_row(name):
    "Nothing is written, and of a buffer of keys that is longer than the index no key behind it is."
    q, k, _ = problem(2, 2, 2, 80, 64, FP32)
    with served_by(True, q, k):
        state = fixed_state(METHODS[name](0.3, 0), k[:, :, :64], torch.ones(2, 64, dtype=torch.bool, device=DEVICE), 60)
        guarded = torch.cat([state.rows, state.rows], 2)
        state.rows, before = guarded[:, :, :state.rows.shape[2]], guarded.clone()
        for n in (-1, 64, 79, 10**6): state.write(k, k, torch.tensor([n], device=DEVICE))
    assert torch.equal(guarded, before)


# collisions

def check_bits(codes, x, planes, bits):
    "Codes [..., tables] of x [..., D] by planes [..., D, tables x bits]: signs of sums, but for rounding errors of 0."
    out, size = (y.squeeze(-2) for y in (x[..., None, :].double() @ planes.double(),
                                         x[..., None, :].double().abs() @ planes.double().abs()))
    bit = (codes[..., None].int() >> torch.arange(bits, device=x.device) & 1).flatten(-2)
    assert ((bit == (out > 0)) | (out.abs() <= CLOSE * size)).all()


def pig(case): return MagicPIG(case["bits"], case["tables"], case["sinks"], case["window"], seed=case["D"])


PIGS = drawn(dict(bits=(1, 3, 8, 11, 16), tables=(2, 7, 33, 75), sinks=(0, 3, 10**20), window=(1, 40), D=(16, 80, 128),
                  R=(1, 3, 4), dtype=(BF16, FP16, FP32), ragged=(False, True), tile=(64, 1024), parts=(1, 8),
                  fixed=(False, True)),
             seed=4)


@kernel
@pytest.mark.parametrize("case", PIGS, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_collisions(case, monkeypatch):
    "The keys and the weights of the rule in PyTorch, given the bits of the query that the kernels find."
    from sparse_nb.kernels import magicpig
    monkeypatch.setattr(magicpig, "_collided", partial(magicpig._collided, tile=case["tile"], parts=case["parts"]))
    q, k, masks = problem(2, 2, case["R"], 1500 if GPU else 150, case["D"], case["dtype"], case["ragged"])
    q[1] = k[1, :, 40:41].repeat_interleave(case["R"], 0)  # like some keys
    method = pig(case)
    state, codes = method.build(k, **masks), q.new_zeros(2, q.shape[1], 1, case["tables"], dtype=torch.int32)
    magicpig._tables_of(q, state.planes, codes)
    planes = state.planes.repeat_interleave(case["R"], 0)
    check_bits(codes[:, :, 0], q[:, :, 0].float(), planes, case["bits"])
    if case["fixed"]:
        state.to_static(len(state) + 10)
        k = torch.cat([k, torch.full_like(k[:, :, :10], math.nan)], 2)
        masks = dict(kv_end=torch.full((2,), k.shape[2] - 10, device=DEVICE)) | masks
        monkeypatch.setattr("sparse_nb.core.index.on_cpu_eagerly", lambda x: False)
    with served_by(True, q, k): got = poisoned(lambda: method.select(q, k, state=state, **masks))
    with served_by(False, q, k) as patch:
        patch.setattr(HyperplaneBits, "hash", lambda self, x: codes.view(2, 2, case["R"], -1))
        want = method.select(q, k, state=state, **masks)
    assert got.index.shape == want.index.shape and got.weight.dtype == want.weight.dtype
    assert torch.equal(got.index, want.index)
    assert_close(got.weight, want.weight, rtol=1e-4)
    assert not case["fixed"] or got.index.shape[3] == k.shape[2]


@kernel
def test_tiles_of_collisions_decide_nothing():
    "Also where there are more tiles than a program adds up at once."
    from sparse_nb.kernels.magicpig import _collided
    q, k, _ = problem(1, 1, 1, 150, 16, FP32)
    state = MagicPIG(2, 8).build(k)
    want, *others = [poisoned(lambda: _collided(q, k, state.rows, state.fit, state.planes, 2, 9, None, None, *sizes))
                     for sizes in ((1024, 8), (1, 8), (64, 1))]
    for got in others: assert all(torch.equal(x, y) for x, y in zip(got, want))


@kernel
@pytest.mark.parametrize("bits, tables, D, dtype", [(8, 32, 64, BF16), (5, 3, 20, FP32), (16, 9, 128, FP16)])
def test_bits_of_new_keys(bits, tables, D, dtype):
    "As of the keys before; other rows stay."
    (q, k, _), method = problem(2, 2, 1, 70, D, dtype), MagicPIG(bits, tables)
    state = fixed_state(method, k, torch.arange(70, device=DEVICE) >= torch.tensor([[0], [9]], device=DEVICE), 60)
    before, at = state.rows.clone(), torch.tensor([65], device=DEVICE)
    with served_by(True, q, k):
        for n in (-1, 70, 65): state.write(k, k, torch.tensor([n], device=DEVICE))
    assert state.rows.dtype == (torch.uint8 if bits <= 8 else torch.int16)
    check_bits(state.rows[:, :, 65], k[:, :, 65].float() - state.fit, state.planes, bits)
    before[:, :, at] = state.rows[:, :, at]
    assert torch.equal(state.rows, before) and state.rows[:, :, 65].any()


def test_collisions_by_other_rules_have_no_kernels():
    "A subclass with scores of its own, and weights of which a gradient is wanted."
    class Rare(MagicPIG):
        def scores(self, q, state, **more): return 2. * (super().scores(q, state, **more) >= 5)
    q, k, _ = problem(1, 2, 2, 100, 16, FP32)
    with served_by(True, q, k) as patch:
        patch.setattr(selection, "has_kernels", lambda q: pytest.fail("asked for kernels"))
        rare = Rare(2, 16, 0, 1).select(q, k)
        assert MagicPIG(2, 16, 0, 1).select(q.clone().requires_grad_(), k).weight.requires_grad
    with served_by(False, q, k): assert (rare.budget < MagicPIG(2, 16, 0, 1).select(q, k).budget).all()


@kernel
def test_one_graph_of_collisions(monkeypatch):
    (q, k, _), method = problem(1, 2, 2, 70, 64, FP32), MagicPIG(3, 8, 2, 9)
    monkeypatch.setattr(selection, "has_kernels", lambda q: True)
    for module in ("index", "key_scorer"):
        monkeypatch.setattr(f"sparse_nb.core.{module}.on_cpu_eagerly", lambda x: False)
    state, stop = method.build(k[:, :, :50]), torch.tensor([60], device=DEVICE)
    state.to_static(70)
    select = lambda q, k: method.select(q, k, state=state, kv_end=stop)
    want, got = select(q, k), torch.compile(select, fullgraph=True, backend="aot_eager")(q, k)
    assert torch.equal(got.index, want.index) and torch.equal(got.weight, want.weight)


class Counted(TorchDispatchMode):
    "Counts what a GPU would do: operations of PyTorch that are no views, and launches of Triton."
    free = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"}

    def __init__(self, patch):
        super().__init__()
        self.done = Counter()
        from triton.runtime import interpreter
        launch = interpreter.GridExecutor.__call__
        def counted(executor, *args, **options):
            self.done[executor.fn.__name__] += 1
            with _disable_current_modes(): return launch(executor, *args, **options)
        patch.setattr(interpreter.GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and name not in self.free: self.done[f"aten.{name}"] += 1
        return function(*args, **(kwargs or {}))


def named(kernel): return f"{kernel}_kernel" if kernel in SHARED else f"_{kernel}_kernel"

SHARED = "code", "guess", "merge"

ATTEND, LIST = ("gather", "merge"), ("sift", "select", "list")
OF_A_STEP = {"quest": ("box_row", "box", "guess", "box", *LIST),
             "double sparsity": ("channel_row", "guess_channels", "channel", *LIST),
             "adamas": ("code_row", "ask", "guess_codes", "distance", *LIST),
             "hash": ("sign_row", "code", "equal", "list"), "top-k": ("key", "guess", *LIST),
             "magicpig": ("table", "table", "collide", "taken", "weigh")}


STEPS = pytest.mark.parametrize("name, shared", [*((x, False) for x in OF_A_STEP), *((x, True) for x in METHODS)])


def one_step(name, shared, k, shown, known, setting):
    "A step that puts a key and decodes its query, with a state of fixed length; `shared`: of one list for a group."
    method = MagicPIG(5, 33) if name == "magicpig" else ALL[name](0.3, setting)
    if shared: method = OneList(method)
    state = None if method.new_state() is None else fixed_state(method, k, shown, known)
    q, own = k.repeat_interleave(2, 1)[:, :, known:known + 1], {} if state is None else dict(state=state)
    start, stop, at = (torch.full((n,), x, device=DEVICE) for n, x in ((len(k), 5), (len(k), known + 1), (1, known)))
    def step():
        if state is not None: state.write(k, k, at)
        method.decode(q, k, k, kv_start=start, kv_end=stop, **own)
    return step, Counter(map(named, (*OF_A_STEP[name], *ATTEND)))


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the profiler counts")
@pytest.mark.parametrize("dtype", [BF16, FP32])
@STEPS
def test_a_step_is_its_kernels_and_nothing_else(name, shared, dtype, monkeypatch):
    "One launch for the row of the new key, and then those that choose and attend; no operation of PyTorch."
    q, k, _ = problem(2, 2, 2, 64, 16, dtype)
    for module in ("checks", "selection", "index", "key_scorer"):
        monkeypatch.setattr(f"sparse_nb.core.{module}.on_cpu_eagerly", lambda x: False)
    with served_by(True, q, k) as patch:
        step, want = one_step(name, shared, k, torch.arange(64) >= torch.tensor([[0], [5]]), 40, 1)
        with Counted(patch) as counted: step()
    assert counted.done == want


FOLLOWS = pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers cannot follow vars() of a state")

@kernel
@FOLLOWS
@pytest.mark.parametrize("name", ALL)
def test_one_graph_of_a_choice(name, monkeypatch):
    "`torch.compile` takes the choice as one graph, with a length on the device."
    q, k, _ = problem(1, 2, 2, 70, 64, FP32)
    monkeypatch.setattr(hash_attention, "hash_maps", lambda *_: networks(4, 2, 64))
    monkeypatch.setattr(selection, "has_kernels", lambda q: True)
    method, stop = ALL[name](0.3, 0), torch.tensor([60], device=DEVICE)
    own = dict(state=method.build(k)) if name in METHODS else {}
    select = lambda q, k: method.select(q, k, **own, kv_end=stop)
    want = select(q, k)
    got = torch.compile(select, fullgraph=True, backend="aot_eager")(q, k)
    assert torch.equal(got.index, want.index) and torch.equal(got.weight, want.weight)


@pytest.mark.parametrize("D", [16, 20, 64, 80])
def test_packing_keeps_every_code(D):
    "Channels and Hadamard codes come back from their bits as they were rounded, of keys that are no numbers as well."
    draw = torch.Generator().manual_seed(D)
    k = torch.randn(2, 2, 50, D, generator=draw, dtype=torch.float64)
    state = DoubleSparsity(channels=7).build(k)
    x = (k - k.mean(2, keepdim=True)).gather(-1, state.numbers()[:, :, None].expand(2, 2, 50, 7))
    step = (x.abs().amax(-1, keepdim=True) / 7).bfloat16().double()
    assert torch.equal(state.decoded(torch.float64), (x / step).round().clamp(-7, 7) * step)
    assert state.rows.shape == (2, 2, 50, 3) and state.rows.dtype == torch.int16
    codes = Adamas().build(k)
    from sparse_nb.methods.adamas import CUT, hadamard
    y = hadamard(k - k.mean(2, keepdim=True))
    cut = CUT * y.square().mean(-1, keepdim=True).sqrt()
    assert torch.equal(codes.codes(y.shape[-1]), (y > -cut).int() + (y > 0) + (y > cut))
    state, odd = DoubleSparsity(channels=D).build(k), k[:, :, :3].clone()
    odd[0, 0, 0] = k[0, 0].mean(0)
    odd[0, 0, 1, 0], odd[0, 0, 2, 0] = math.nan, math.inf
    state.append(odd, odd)
    found = state.decoded(FP32)[0, 0, 50:]
    assert found[0].abs().max() < 1e-12 and found[1:].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_index_has_the_guaranteed_bytes(dtype):
    k = torch.randn(1, 2, 64, 128).to(dtype)
    for method in (DoubleSparsity(), Adamas(), Quest()):
        if isinstance(method, Quest) and dtype == FP32: continue  # boxes are in the dtype of the keys
        rows = method.build(k).rows
        assert rows.numel() * rows.element_size() == 2 * 64 * method.index_bytes(128)


def test_another_rule_has_no_kernels():
    "A subclass with scores of its own is not served by those of its base."
    from sparse_nb.core.key_scorer import ChosenByKernels
    class Backwards(Quest):
        def scores(self, q, state, *, scale=None): return -super().scores(q, state, scale=scale)
    class Renamed(Quest): pass
    assert Backwards.topk is ChosenByKernels.topk and Renamed.topk is Quest.topk


@pytest.mark.parametrize("call, error, message", [
    (dict(q=torch.zeros(1, 2, 1, 64, dtype=torch.float64)), TypeError, "q must be float16"),
    (dict(q=torch.zeros(1, 2, 2, 64)), ValueError, "q must have one query"),
    (dict(q=torch.zeros(1, 2, 1, 64), keys=2**25), ValueError, "keys must be at most 16777216, got 33554432")])
def test_refused(call, error, message):
    pytest.importorskip("triton")
    if not (INTERPRETED or GPU) and error is ValueError: pytest.skip("the device is refused first")
    from sparse_nb.kernels.adamas import topk
    rows = torch.zeros(1, 2, 10, 4, dtype=torch.int32)
    with pytest.raises(error, match=message):
        topk(call["q"].to(DEVICE), rows.to(DEVICE), 0.1, call.get("keys", 10))


def served(name, N=2000, **more):
    "A method, its index of bfloat16 keys if it has one, queries and values."
    q, k, _ = problem(1, 2, 4, N, 128, BF16)
    method = ALL[name](0.1, 0)
    state = chosen_state(method, q, k, **more) if name in METHODS else None
    return method, state, q, k, torch.randn_like(k)


if GPU:
    @pytest.mark.gpu
    @FOLLOWS
    @pytest.mark.parametrize("name", ALL)
    def test_one_graph(name, monkeypatch):
        "torch.compile takes the whole step as one graph; nothing waits for the GPU; a captured step follows a length."
        monkeypatch.setattr(hash_attention, "hash_maps", lambda *_: networks(8, 2, 128))
        method, state, q, k, v = served(name)
        stop = torch.tensor([1500], device=DEVICE)
        own = {} if state is None else dict(state=state)
        step = lambda: method.decode(q, k, v, **own, kv_end=stop)
        want = step()
        torch.cuda.set_sync_debug_mode("error")
        try: step()
        finally: torch.cuda.set_sync_debug_mode("default")
        assert_close(torch.compile(step, fullgraph=True)(), want, rtol=1e-5)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side): step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph): out = step()
        for n in (1500, 40, 1999, 2000, 1):
            stop.fill_(n)
            graph.replay()
            assert torch.equal(out, step())

    @pytest.mark.gpu
    @STEPS
    def test_a_step_on_the_gpu_is_its_kernels_and_nothing_else(name, shared):
        q, k, _ = problem(1, 2, 2, 64, 128, BF16)
        with served_by(True, q, k):
            step, want = one_step(name, shared, k, torch.ones(1, 64, dtype=torch.bool, device=DEVICE), 40, 0)
            step()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                step()
                torch.cuda.synchronize()
        ran = Counter(e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        assert ran == want

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ALL)
    @pytest.mark.parametrize("N", [131072, 524288, 1100003])
    def test_long(name, N):
        q, k, _ = problem(1, 2, 4, N, 128, BF16)
        check_method(ALL[name](0.1, 0), q, k)


if not INTERPRETED:
    def usage(name, capability, kind, **own):
        "Registers, spills and shared memory of a kernel with the shipped tiles."
        pytest.importorskip("triton")
        from sparse_nb.kernels import (
            adamas, common, double_sparsity, hash_attention, magicpig, quest, top_budget, topk)
        own_kernels = {x: y for module in (adamas, common, double_sparsity, hash_attention, magicpig, quest, topk,
                                           top_budget) for x, y in vars(module).items() if x.endswith("_kernel")}
        integers = "mark between higher hist many base code ask total reach zero".split()
        types = {f"{x}_ptr": "i32" for x in integers} | dict(q_ptr=kind, cut="fp32") | dict.fromkeys(
            ("start_ptr", "len_ptr", "begin_ptr", "budget", "index_ptr", "fit_ptr", "count_ptr"), "i64")
        of_row = dict(box=kind, box_row=kind, channel="i16", channel_row="i16", collide="u8").get(name, "i32")
        types |= dict(row_ptr=of_row, at_ptr="i64", k_ptr=kind)
        if name == "distance": types |= dict(score_ptr="i32")
        if name == "equal" or own.get("BINS", 0) and name == "list": types |= dict(score_ptr="i16")
        if name in ("collide", "taken", "weigh"): types |= dict(taken_ptr="u8")
        if name == "weigh": types |= dict(fit_ptr="fp32")
        known = dict(SHARE=True, U=1, PDL=capability >= 90, SIGMAS=top_budget.SIGMAS, NEAR=top_budget.NEAR, LR=4,
                     LP=4) | own
        if known["U"] == 1: known |= dict(begin_ptr=None)
        warps = known.pop("warps")
        assert warps <= 32  # a program has 1,024 threads at most, which a compiler does not ask
        return common.compiled_usage(own_kernels[named(name)], known, types, capability, warps)

    @pytest.mark.kernels
    @pytest.mark.budget(26)
    @pytest.mark.parametrize("capability, kind, U", [(80, "fp16", 1), (90, "bf16", 16), (90, "fp32", 1)])
    def test_registers_and_spills(capability, kind, U):
        pytest.importorskip("triton")
        from sparse_nb.kernels.adamas import ask_warps
        from sparse_nb.kernels.quest import page_tile
        from sparse_nb.kernels.top_budget import Tiles, histogram_bins, list_tile, select_tile
        from sparse_nb.kernels.topk import key_tile
        tiles, found = Tiles(), {}
        of_q = dict(BN=tiles.score[0], warps=tiles.score[1])
        for M, lists in ((8194, 8), (8194, 32), (131104, 8), (131104, 32), (524320, 8), (2**24, 32)):
            BN, warps = list_tile(M, lists=lists)
            BT = 1 << (-(-M // BN) - 1).bit_length()
            BF, BC = select_tile(M, BT)
            many = dict(BINS=histogram_bins(BT))
            found[f"sift {BN}, {BT}"] = usage("sift", capability, kind, U=U, BN=BN, warps=warps, **many)
            many |= dict(BT=BT, BC=BC, BF=BF, warps=8 if BF > 1024 else 4)
            found[f"select {BN}, {BT}"] = usage("select", capability, kind, U=U, BN=BN, **many)
            of_list = dict(BN=BN, BW=256, warps=max(warps, 4 if U > 1 else 1), BT=BT)
            found[f"list {BN}"] = usage("list", capability, kind, U=U, BINS=0, **of_list)
        for BN, BT in ((512, 64), (1024, 256), (2048, 512), (2048, 8192)):
            found[f"list by counts {BN}, {BT}"] = usage("list", capability, kind, BN=BN, BW=256, BT=BT, BINS=128,
                                                        warps=BN // tiles.count[1])
            for SUM in (False, True):
                found[f"equal {BN}, {SUM}"] = usage("equal", capability, kind, BN=BN, SUM=SUM,
                                                    BINS=128 if SUM else 32, warps=BN // tiles.count[1])
        for BS in (tiles.sample, 4 * tiles.sample):
            found[f"guess {BS}"] = usage("guess", capability, kind, U=U, BS=BS, BESIDE=U > 1, warps=4)
        for D in (64, 128, 256):
            BN, few_warps = page_tile(tiles, D), tiles.page[1]
            boxes = dict(U=16, D=D, BD=D, BN=BN, BS=0, warps=few_warps)
            of_few = boxes | dict(BN=2 * BN, warps=2 * few_warps)
            BN, each = key_tile(tiles, D, 4 if kind == "fp32" else 2), tiles.score[1]
            for SUM in (False, True):
                found[f"box {D}, {SUM}"] = usage("box", capability, kind, SUM=SUM, **boxes)
                of_some = boxes | dict(BS=tiles.sample)
                found[f"box of a sample {D}, {SUM}"] = usage("box", capability, kind, SUM=SUM, **of_some)
                found[f"box of few lists {D}, {SUM}"] = usage("box", capability, kind, SUM=SUM, **of_few)
                found[f"key {D}, {SUM}"] = usage("key", capability, kind, D=D, BD=D, BR=16, BN=BN, SUM=SUM, warps=each)
        for SUM in (False, True):
            of_list = dict(EACH=1, R=4, RP=4, PLANES=2) if SUM else dict(EACH=4, R=1, RP=1, PLANES=0)
            of_list |= dict(C=32, WORDS=4, D=128, W=128, STEPS=7)
            found[f"channel, {SUM}"] = usage("channel", capability, kind, SUM=SUM, C=32, **of_q | dict(warps=2))
            of_keys = of_q | dict(BN=of_q["BN"] // (2 if SUM else 4))
            found[f"distance, {SUM}"] = usage("distance", capability, kind, **of_keys | of_list)
            found[f"ask, {SUM}"] = usage("ask", capability, kind, **of_list, warps=ask_warps(of_list["RP"]))
            for BS in (tiles.sample, 2 * tiles.sample):
                of_list["warps"] = 8 if kind == "fp32" else 4
                found[f"guess channels {BS}, {SUM}"] = usage("guess_channels", capability, kind, BS=BS, **of_list)
            found[f"guess codes, {SUM}"] = usage("guess_codes", capability, kind, BS=tiles.sample, **of_list)
        many = dict(R=64, RP=64, PLANES=6, WORDS=4, D=128, W=128, STEPS=7)  # heads of a group: more than warps
        found["ask of many heads"] = usage("ask", capability, kind, **many, warps=ask_warps(64))
        found["code"] = usage("code", capability, kind, D=128, M=128, BD=128, BM=128, BZ=32, warps=8)
        for D in (64, 128, 256):
            of_row, steps = dict(D=D, BD=D, M=128, BM=128, W=D), D.bit_length() - 1
            found[f"box row {D}"] = usage("box_row", capability, kind, U=16, BN=min(16, 4096 // D), warps=1, **of_row)
            found[f"code row {D}"] = usage("code_row", capability, kind, STEPS=steps, warps=1, **of_row)
        found["channel row"] = usage("channel_row", capability, kind, BW=4, warps=1)
        for bits, tables in ((8, 32), (16, 4)):
            of_tables = dict(K=bits, D=128, BD=128, BK=bits, BT=64 // bits, BS=32, BP=256, at_ptr=None, warps=4)
            found[f"table {bits}"] = usage("table", capability, kind, **of_tables)
            found[f"weigh {bits}"] = usage("weigh", capability, kind, **of_tables)
        found["collide"] = usage("collide", capability, kind, BN=1024, BC=64, BT=32, warps=4)
        found["taken"] = usage("taken", capability, kind, BN=1024, BT=128, warps=4)
        found["sign row"] = usage("sign_row", capability, kind, D=128, BD=128, M=128, BM=128, warps=8)
        for name, used in found.items():
            print(name, used)
            assert used["spills"] == 0 and used["registers"] <= 255 and used["shared"] <= 99 * 1024, (name, used)

    @pytest.mark.kernels
    @pytest.mark.budget(40)
    @pytest.mark.parametrize("shard", range(4))
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_in_the_interpreter(forked_pytest, shard):
        pytest.importorskip("triton")
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--shard", f"{shard}/4", __file__,
                                   TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d passed", said), said[-4000:]
