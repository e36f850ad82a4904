"""The Triton kernels of Sketch&Walk's decode step against the chapter's rule: the same lists, and attention over them.

`pytest -m gpu -k test_sketch_walk_kernels` runs the sweep on a GPU. Without one, a covering design of small
problems runs in Triton's interpreter, in processes of their own.
"""
import math
import re

import pytest
import torch

from covering import drawn
from inputs import DEVICE, GPU, INTERPRETED, LAYOUTS, Problem, assert_codes_close, kernel, poisoned
from sparse_nb.core.exact import assert_close, attention
from sparse_nb.methods.sketch_walk.index import FINE, block_scores, signed_hadamard
from sparse_nb.sketch_walk import SketchWalk, query_lists, sketch_walk_decode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 0.01, FP16: 2**-10, FP32: 4e-6}
KINDS = "fine4", "fine16", "mean"


def problem(B, G, R, N, D, dtype, *, layout="plain", ragged=False, spread=1.5, seed=0):
    "Keys that are alike within a stretch of some 20; NaN in what is hidden."
    generator = torch.Generator(DEVICE).manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)
    q = spread * torch.randn(B, G * R, 1, D, device=DEVICE, generator=generator)
    k, v = (LAYOUTS[layout](B, G, N, D, new) for _ in range(2))
    k.add_(torch.randn(B, G, N // 20 + 1, D, device=DEVICE, generator=generator).repeat_interleave(20, 2)[:, :, :N])
    if not ragged: return Problem(q.to(dtype), k, v)
    start = torch.tensor([b * N // 5 for b in range(B)], device=DEVICE)
    stop = torch.tensor([N - b * N // 7 for b in range(B)], device=DEVICE, dtype=torch.int32)
    for x in (k, v):
        for b in range(B): x[b, :, :start[b]] = x[b, :, stop[b]:] = math.nan
    return Problem(q.to(dtype), k, v, start, stop)


def packed(p, s, n=None, room=None):
    "The chapter's index of the first n keys, and the same packed."
    from sparse_nb.kernels.sketch_walk import pack
    n = p.k.shape[2] if n is None else n
    stop = None if p.stop is None else p.stop.clamp(max=n)
    state = s.state_of(p.q, p.k[:, :, :n], None, dict(causal=False, kv_start=p.start, kv_end=stop))
    sign = signed_hadamard(p.k.shape[3], None)[:, 0].sign().to(DEVICE)
    return state, pack(s.index, state.rows, state.begin, sign, room)


def lists_of_heads(found, H):
    "The blocks that each head has read, of each sequence; those of a group come in order, each has a reader."
    B, G, _ = found.blocks.shape
    R, lists = H // G, [[] for _ in range(B)]
    for b, g in ((b, g) for b in range(B) for g in range(G)):
        blocks = found.blocks[b, g, :found.count[b, g]].tolist()
        bits = [2**R - 1] * len(blocks) if found.readers is None else found.readers[b, g, :len(blocks)].tolist()
        assert blocks == sorted(set(blocks)) and all(x % 2**R for x in bits)
        lists[b] += [[m for m, x in zip(blocks, bits) if x >> r & 1] for r in range(R)]
    return lists


def check(p, *, density=0.3, index="fine4", block=64, scale=None, tiles=None, heads="group"):
    "A step against the rule in float64."
    from sparse_nb.kernels import sketch_walk
    s = SketchWalk(block, density, index, heads=heads)
    state, given = packed(p, s)
    more = {} if tiles is None else dict(tiles=tiles)
    found = poisoned(lambda: sketch_walk.launch(
        p.q, p.k, p.v, given, sketch_walk.Settings(block, density, index, heads), scale, **p.masks, **more))
    k, v = (x.nan_to_num() for x in (p.k, p.v))
    lists, place, *_ = query_lists(s, p.q.double(), k, state, None, dict(causal=False, **p.masks), scale, None)
    z = block_scores(s.summary, p.q.double(), state.rows.double(), scale)[:, :, 0] / math.log(2)
    out, (B, H), G = torch.empty(p.q.shape).double(), p.q.shape[:2], p.k.shape[1]
    read = lists_of_heads(found, H)
    for b in range(B):
        first, end = (0, k.shape[2]) if p.start is None else (int(p.start[b]), int(p.stop[b]))
        key = torch.arange(first, end, device=DEVICE)
        seen, own = place.visible[b, 0, 0], int(place.own[b, 0])
        rows = [x for x in seen.nonzero()[:, 0].tolist() if x != own]
        assert_close(found.score[b][:, rows], z[b][:, rows], rtol=1e-5) if rows else None
        for h, got in enumerate(read[b]):
            g, want = h * G // H, lists[b, h * lists.shape[1] // H, 0].nonzero()[:, 0].tolist()
            assert got == want, "other blocks than by the rule"
            rows = key[torch.isin((key - state.begin[b]) // block, torch.tensor(want, device=DEVICE))]
            factor = p.q.shape[3]**-0.5 if scale is None else scale
            log = factor * p.q[b, h, 0].double() @ k[b, g, rows].double().T
            out[b, h, 0] = (log.softmax(-1) @ v[b, g, rows].double()).cpu()
    assert found.out.dtype == p.q.dtype
    assert_close(found.out, out.to(DEVICE), rtol=TOLERANCE[p.q.dtype])
    return found


CASES = drawn(dict(index=KINDS, block=(32, 64, 128), density=(0.01, 0.3, 0.77, 1.0), dtype=(BF16, FP16, FP32),
                   D=(64, 80, 96, 128), R=(1, 3, 4), layout=tuple(LAYOUTS), ragged=(False, True),
                   small=(False, True), heads=("group", "each")))


@kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_cases(case):
    from sparse_nb.kernels.sketch_walk import Tiles
    B, N = (3, 5003) if GPU else (1 + case["ragged"], 7 * case["block"] + 9)
    p = problem(B, 1 + (case["R"] == 3), case["R"], N, case["D"], case["dtype"], layout=case["layout"],
                ragged=case["ragged"])
    check(p, **{x: case[x] for x in ("index", "block", "density", "heads")},
          tiles=Tiles((32, 4, 2, 8), (4, 4, 0), (16, 4, 2, 8, None), (16, 4), (1, 2)) if case["small"] else None)


@kernel
@pytest.mark.parametrize("heads", ["group", "each"])
@pytest.mark.parametrize("index, N", [
    ("fine4", 1), ("fine4", 64), ("mean", 65), ("fine16", 127), ("fine4", 128), ("fine16", 129), ("mean", 200)])
def test_edges(index, N, heads): check(problem(1, 1, 2, N, 64, FP32), index=index, density=1e-6, scale=0.3, heads=heads)


@kernel
@pytest.mark.parametrize("block, index", [(4, "fine4"), (4, "mean"), (8, "fine4"), (8, "mean"), (16, "fine4"),
                                          (16, "fine16"), (16, "mean")])
@pytest.mark.parametrize("ragged", [False, True])
def test_small_blocks(block, index, ragged):
    check(problem(2, 1, 3, 203, 64, FP32, ragged=ragged), index=index, block=block,
          heads="each" if block == 8 else "group")


@kernel
@pytest.mark.parametrize("R, D, index, heads", [
    (16, 64, "fine4", "group"), (20, 64, "fine16", "group"), (2, 256, "fine4", "each"), (2, 16, "mean", "group"),
    (32, 64, "fine4", "each"), (20, 64, "fine16", "each")])
def test_large_groups_and_other_heads(R, D, index, heads):
    check(problem(1, 1, R, 333, D, BF16), index=index, heads=heads)


# a list for each head

def needles(where, R=4, blocks=24):
    "A group of R heads, of which head r finds the keys of the blocks where[r] twenty times as heavy as others."
    p = problem(1, 1, R, 64 * blocks, 64, FP32, spread=0)
    p.k.mul_(0.01)
    for r, places in enumerate(where):
        p.q[0, r, 0, r] = 8
        for m in places: p.k[0, 0, 64 * m:64 * m + 64, r] += 3
    return p


@kernel
@pytest.mark.parametrize("density", [6 / 24, 2 / 24])
def test_lists_that_share_nothing(density):
    "Each head finds four blocks of its own; between them the group reads them all, or with a budget of two, none."
    where = [[1, 2, 3, 4], [5, 9, 13, 17], [6, 7, 8, 10], [19, 20, 21, 22]]
    found = check(needles(where), density=density, heads="each")
    mine = [[0, *x, 23] if density > 0.2 else [0, 23] for x in where]
    assert lists_of_heads(found, 4) == [mine]
    assert found.blocks[0, 0, :found.count[0, 0]].tolist() == sorted({x for y in mine for x in y})


@kernel
def test_lists_that_are_equal():
    "Then the lists of heads are the group's, the union is one list, and so is the output but for how it is cut up."
    p = needles([[3, 4, 11]] * 3, R=3)
    p.q[:] = p.q[:, :1] + p.q[:, 1:2] + p.q[:, 2:]
    each, group = (check(p, density=5 / 24, heads=x) for x in ("each", "group"))
    assert each.count.tolist() == group.count.tolist() == [[5]]
    assert torch.equal(each.blocks[..., :5], group.blocks[..., :5])
    assert_close(each.out, group.out, rtol=TOLERANCE[FP32])


@kernel
def test_a_head_of_its_own_reads_what_it_would_read_alone():
    "Whatever the others of its group read, in other groups and sequences, with padding."
    from sparse_nb.kernels.sketch_walk import Settings, decode
    p, s = problem(2, 2, 3, 700, 64, FP32, ragged=True), SketchWalk()
    whole = decode(p.q, p.k, p.v, packed(p, s)[1], Settings(density=0.3, heads="each"), **p.masks)
    lists = lists_of_heads(whole, 6)
    for h in (0, 4):
        q = p.q.view(2, 2, 3, 1, 64)[:, :, h % 3]
        alone = decode(q, p.k, p.v, packed(p, s)[1], Settings(density=0.3), **p.masks)
        assert_close(whole.out[:, h], alone.out[:, h // 3], rtol=TOLERANCE[FP32])
        for b in range(2): assert lists[b][h] == lists_of_heads(alone, 2)[b][h // 3]


@kernel
def test_of_equal_shares_each_head_takes_the_earlier():
    "Nine blocks of equal keys for one head; the other has a heaviest one, and of the rest the earlier."
    p = needles([[], [6]], R=2, blocks=9)
    p.k[..., 0], p.q[0, 0, 0, 1:] = 1, 0
    p.k[..., 2:] = 0
    p.k[0, 0, :, 1] = 0
    p.k[0, 0, 64 * 6:64 * 7, 1] = 3
    assert lists_of_heads(check(p, density=4 / 9, heads="each"), 2) == [[[0, 1, 2, 8], [0, 1, 6, 8]]]


@kernel
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_of_a_query_stays_with_its_head():
    from sparse_nb.kernels.sketch_walk import Settings, decode
    p, s = problem(1, 2, 2, 576, 64, FP32), SketchWalk()
    settings = Settings(64, 0.3, heads="each")
    whole = decode(p.q, p.k, p.v, packed(p, s)[1], settings)
    index = packed(p, s)[1]
    p.q[0, 1, 0, 5] = math.nan
    bad = decode(p.q, p.k, p.v, index, settings)
    assert bad.out[0, 1].isnan().all() and bad.out[:, [0, 2, 3]].isfinite().all()
    assert_close(bad.out[:, [0, 2, 3]], whole.out[:, [0, 2, 3]], rtol=TOLERANCE[FP32])


@kernel
def test_strides_of_q():
    p = problem(2, 1, 3, 200, 64, FP32)
    wide = torch.zeros(2, 1, 3, 129, device=DEVICE)
    wide[:, 0, :, 1::2] = p.q[:, :, 0]
    q = wide[:, 0, :, None, 1::2]
    assert q.stride(-1) == 2
    check(p._replace(q=q))


@kernel
@pytest.mark.parametrize("index, heads", [*((x, "group") for x in KINDS), ("fine4", "each")])
def test_all_blocks_are_exact_attention(index, heads):
    p = problem(2, 2, 3, 300, 64, FP32, ragged=True)
    out = check(p, density=1.0, index=index, heads=heads).out
    assert_close(out, attention(p.q, p.k.nan_to_num(), p.v.nan_to_num(), **p.masks), rtol=TOLERANCE[FP32])


@kernel
@pytest.mark.parametrize("index", KINDS)
def test_of_equal_shares_the_earlier_wins(index):
    "Nine blocks of equal keys: the first three and the last."
    p = problem(1, 1, 2, 9 * 64, 64, FP32)
    found = check(p._replace(k=p.k[:, :, :1].expand(p.k.shape).clone()), density=4 / 9, index=index)
    assert found.blocks[0, 0, :4].tolist() == [0, 1, 2, 8]


@kernel
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("where", [3, 200, 500, 575])
@pytest.mark.parametrize("index", KINDS)
def test_a_nan_stays_in_its_group(where, index):
    "In the first block, in those between, and in the newest; a block that nothing else would have read is read."
    from sparse_nb.kernels import sketch_walk
    p, s = problem(1, 2, 2, 576, 64, FP32), SketchWalk(index=index)
    settings = sketch_walk.Settings(64, 0.3, index)
    whole = sketch_walk.launch(p.q, p.k, p.v, packed(p, s)[1], settings)
    p.k[0, 0, where, 3] = math.nan
    bad = sketch_walk.launch(p.q, p.k, p.v, packed(p, s)[1], settings)
    assert bad.out[0, :2].isnan().all() and torch.equal(bad.out[:, 2:], whole.out[:, 2:])
    assert where // 64 in bad.blocks[0, 0, :bad.count[0, 0]].tolist() and bad.count.tolist() == whole.count.tolist()


@kernel
@pytest.mark.parametrize("part", [16, 64, 256])
@pytest.mark.parametrize("M, want, apart", [(5, 2, 1), (100, 33, 1), (129, 128, 1), (200, 3, 1), (200, 100, 9),
                                            (200, 160, 9)])
def test_selection(M, want, apart, part):
    """Scores of three heads, of which many have the same share, or none; sums of parts, one of them without a block.

    Where they are far `apart`, shares differ by many powers of two.
    """
    from sparse_nb.kernels.sketch_walk import _join_kernel, _select_kernel, _share_kernel
    new = torch.Generator(DEVICE).manual_seed(M)
    z = torch.randint(-3, 3, (3, M), generator=new, device=DEVICE).float() * apart
    z[:, M // 2:M // 2 + M // 8] = -200
    many, cuts = math.inf, [0, M // 3, M // 3, M]
    m, l = torch.full((3, 3), -1e38, device=DEVICE), torch.zeros(3, 3, device=DEVICE)
    for i, (a, b) in enumerate(zip(cuts, cuts[1:])):
        if a < b: m[:, i], l[:, i] = z[:, a:b].amax(1), (z[:, a:b] - z[:, a:b].amax(1, keepdim=True)).exp2().sum(1)
    lists, count = torch.full((M,), -1, device=DEVICE).int(), torch.zeros(1, device=DEVICE).int()
    begin = torch.zeros(1, device=DEVICE).long()
    same = dict(BLOCK=64, BT=part, PDL=False, num_warps=4)
    key, parts, none = torch.zeros(M, device=DEVICE).int(), -(-M // part), torch.zeros(1, device=DEVICE)
    _share_kernel[parts, 1](z, m, l, begin, None, None, key, M * 64, 1, M, 3, LR=3, LP=4, BS=4, **same)
    share, tiles = math.floor(want / M * 2**38), dict(D=64, BM=256, BF=128, MOST=0)
    _select_kernel[1, parts](none, none, key, begin, None, None, lists, count, None, 0, 0, 0, 0, M * 64, 1, M, share,
                             parts, EACH=0, **tiles, **same)
    own, cut, bits = torch.full_like(lists, -1), torch.zeros(1, 2, device=DEVICE).int(), torch.zeros_like(lists)
    _select_kernel[1, 1](none, none, key, begin, None, None, None, None, cut, 0, 0, 0, 0, M * 64, 1, M, share, 1,
                         EACH=1, **tiles, **same)
    _join_kernel[1, parts](key, cut, own, bits, count, M, LR=1, BM=64, BT=part, PDL=False, num_warps=4)
    assert torch.equal(own, lists) and (bits[:want] == 1).all()
    share = (z - m.amax(1, keepdim=True) - (l * (m - m.amax(1, keepdim=True)).exp2()).sum(1, keepdim=True).log2())
    share = share.exp2().sum(0)
    share[[0, M - 1]] = many
    best = share.argsort(descending=True, stable=True)[:want].sort().values
    assert int(count) == want and torch.equal(lists[:want].long(), best) and (lists[want:] == -1).all()


# the index

@kernel
@pytest.mark.parametrize("index, block, D, dtype", [
    ("fine4", 64, 128, BF16), ("fine16", 128, 80, FP32), ("mean", 32, 64, FP16), ("fine4", 128, 64, FP32),
    ("fine4", 32, 96, FP16), ("fine16", 64, 64, BF16), ("mean", 64, 24, FP32), ("fine4", 8, 64, BF16),
    ("mean", 8, 64, BF16), ("fine16", 16, 64, FP16)], ids=str)
def test_a_full_block_enters_the_index(index, block, D, dtype):
    "At its last key, for each sequence at another time; nothing else is written."
    from sparse_nb.kernels import sketch_walk
    N = 3 * block
    p = problem(2, 2, 2, N + 5, D, dtype)
    p, s = p._replace(start=torch.tensor([0, 5], device=DEVICE)), SketchWalk(block, index=index)
    settings, whole = sketch_walk.Settings(block, 0.5, index), packed(p, s)[1]
    grown = packed(p, s, N - 1, room=4)[1]
    before = [x if x is None else x.clone() for x in grown]
    for n in range(N - 1, N + 6):
        sketch_walk.decode(p.q, p.k[:, :, :n], p.v[:, :, :n], grown, settings, kv_start=p.start)
        for b in range(2):
            done = 3 if n >= N + 5 * b else 2
            for x, old, want in zip(grown[:2 if grown.radius is None else 3], before, whole):
                if x.dtype == FP32: assert_close(x[b, :, :done], want[b, :, :done], rtol=1e-6)
                else: assert torch.equal(x[b, :, :done], want[b, :, :done])
                assert torch.equal(x[b, :, done:], old[b, :, done:])


@kernel
def test_packing_keeps_every_bit():
    p = problem(2, 2, 1, 300, 80, BF16, ragged=True)
    state, index = packed(p, SketchWalk(index="fine16"), room=9)
    code = torch.stack([index.rows & 15, index.rows >> 4], -1).flatten(-2).float() - 8
    step, count = (index.facts & -65536).view(FP32), (index.facts << 16).view(FP32)
    M = state.rows.shape[2]
    assert torch.equal((code * step[..., None])[:, :, :M], state.rows[..., :-2]) and index.rows.shape[2] == 9
    assert torch.equal(count[:, :, :M], state.rows[..., -1]) and not index.facts[:, :, M:].any()
    assert torch.equal(index.radius[:, :, :M], state.rows[..., -2])


# the method

@kernel
@pytest.mark.parametrize("ragged, settings", [
    (True, dict(density=0.4)), (False, dict(density=0.3, index="fine16", block=32)),
    (True, dict(density=0.5, index="mean")), (True, dict(density=0.4, heads="each", pool="max"))], ids=str)
def test_the_method_by_kernels_is_the_reference(ragged, settings):
    "Key by key, several at once, after a crop and in another order: as from scratch in PyTorch."
    from sparse_nb.kernels.sketch_walk import pack
    p = problem(2, 2, 2, 420, 64, FP32)
    start = torch.tensor([0, 70], device=DEVICE) if ragged else None
    method = SketchWalk(**settings)
    def both(n, row=slice(None), **kw):
        k, v = p.k[row, :, :n], p.v[row, :, :n]
        given = dict(kv_start=start if start is None else start[row], return_stats=True, **kw)
        got, want = (method.decode(p.q, k, v, backend=by, state=x, **given)
                     for by, x in (("triton", state), ("torch", None)))
        assert_close(got[0], want[0], rtol=1e-5)
        for name in "keys_scored", "values_read", "index_bytes", "density", "budget":
            assert torch.equal(*(torch.as_tensor(getattr(x[1], name)) for x in (got, want))), name
    state = method.new_state()
    def same_packed():
        "As packed anew, where blocks are full."
        fresh = pack(method.index, state.rows, state.begin, state.packed.sign)
        for b in range(2):
            full = (len(state) - int(state.begin[b])) // method.block
            for x, want in zip(state.packed[:3], fresh):
                if x is None or x.dtype == FP32: continue
                assert torch.equal(x[b, :, :full], want[b, :, :full])
        assert torch.equal(state.packed.begin, fresh.begin)
    def grow(n, row=slice(None)):
        i = torch.arange(len(state), n, device=DEVICE)
        shown = None if start is None else i >= start[row, None]
        state.append(p.k[row, :, len(state):n], p.v[row, :, len(state):n], shown=shown)
    grow(318)
    both(318)
    kept = state.packed
    for n in (319, 320, 321):
        grow(n)
        both(n)
        assert state.packed is kept  # a block was completed by the kernels
    grow(340)
    both(340)
    same_packed()
    assert state.packed is not kept
    assert state.packed.rows is kept.rows  # and those that were not followed packed alone
    both(340, kv_end=torch.tensor([340, 331], device=DEVICE))
    state.crop(330)
    both(330)
    same_packed()
    back = torch.tensor([1, 0], device=DEVICE)
    state.pick_sequences(back)
    both(330, back)
    grow(420, back)
    both(420, back)
    same_packed()
    state.reset()
    grow(200)
    both(200)
    same_packed()


@kernel
@pytest.mark.parametrize("index, heads, answered", [
    ("fine16", "group", "all"), ("fine4", "each", "some"), ("mean", "group", "some")])
def test_a_state_of_a_fixed_length(index, heads, answered):
    """Put key by key where they have their place, padding included: nothing moves, and a step is that of a growing one.

    Where kernels answer all keys, they alone write; where they answer some, in turns with PyTorch, nothing is missed.
    """
    from sparse_nb.kernels.sketch_walk import pack
    p, s = problem(2, 1, 2, 196, 64, FP32), SketchWalk(32, 0.4, index, heads=heads)
    start = torch.tensor([0, 45], device=DEVICE)
    k, v = (torch.full((2, 1, 250, 64), math.nan, device=DEVICE) for _ in range(2))
    grown, fixed = s.new_state(), s.new_state()
    def grow(state, a, b):
        i = torch.arange(a, b, device=DEVICE)
        state.append(p.k[:, :, a:b], p.v[:, :, a:b], shown=i >= start[:, None])
    for x in (grown, fixed): grow(x, 0, 157)
    k[:, :, :157], v[:, :, :157] = p.k[:, :, :157], p.v[:, :, :157]
    step = lambda state, k, v, by, **kw: s.decode(p.q, k, v, backend=by, state=state, kv_start=start, **kw)
    step(fixed, k[:, :, :157], v[:, :, :157], "triton")
    fixed.to_static(250)
    places = [x.data_ptr() for x in fixed.buffers()]
    assert len(fixed) == 250 and len(places) == (7 if index == "fine16" else 6)
    for n in range(157, 196):
        k[:, :, n], v[:, :, n] = p.k[:, :, n], p.v[:, :, n]
        old, length = [x.clone() for x in fixed.buffers()], torch.full((2,), n + 1, device=DEVICE)
        fixed.write(k, v, torch.tensor([n], device=DEVICE))
        grow(grown, n, n + 1)
        if answered == "all":
            assert all(torch.equal(*x) for x in zip(old, fixed.buffers()))
            got = step(fixed, k, v, "triton", kv_end=length)
        if n % 8: continue
        want = step(grown, p.k[:, :, :n + 1], p.v[:, :, :n + 1], "torch")
        if answered == "all": assert_close(got, want, rtol=TOLERANCE[FP32])
        else:
            for by in ("torch", "triton") if n % 16 else ("triton",):
                assert_close(step(fixed, k, v, by, kv_end=length), want, rtol=TOLERANCE[FP32])
        fresh = pack(index, grown.rows, grown.begin, fixed.packed.sign)
        for b in range(2):
            full = (n + 1 - int(start[b])) // 32
            for x, y in zip(fixed.packed[:3], fresh):
                if x is not None and x.dtype == FP32: assert_close(x[b, :, :full], y[b, :, :full], rtol=1e-6)
                elif x is not None: assert torch.equal(x[b, :, :full], y[b, :, :full])
    assert [x.data_ptr() for x in fixed.buffers()] == places
    fixed.to_dynamic(196, k)
    for name in ("rows", "begin", "tail", "tail_shown", "count"):
        x, y = getattr(fixed, name), getattr(grown, name)
        assert x == y if name == "count" else torch.equal(x, y), name
    for by in ("torch", "triton"):
        assert_close(step(fixed, p.k, p.v, by), step(grown, p.k, p.v, by), rtol=0)


@kernel
def test_what_a_replayed_graph_wrote_is_not_missed():
    "Python sees neither keys nor steps while a graph that was captured for another cache is replayed."
    from sparse_nb.kernels import sketch_walk as kernels
    p, s = problem(2, 1, 2, 196, 64, FP32), SketchWalk(32, 0.4)
    grown, fixed = s.new_state(), s.new_state()
    for state, end in ((grown, 196), (fixed, 120)):
        state.append(p.k[:, :, :end], p.v[:, :, :end])
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 54)) for x in (p.k, p.v))
    s.decode(p.q, k[:, :, :120], v[:, :, :120], backend="triton", state=fixed)
    fixed.to_static(250)
    for n in range(120, 196):
        kernels.decode(p.q, k, v, fixed.packed, kernels.Settings(32, 0.4, "fine4", "group"),
                       kv_end=torch.full((2,), n + 1, device=DEVICE))
    fixed.to_dynamic(196, k)
    assert torch.equal(fixed.rows, grown.rows)


@kernel
def test_which_backend():
    p = problem(1, 1, 2, 200, 64, FP32)
    by = lambda q=p.q, **kw: sketch_walk_decode(q, p.k, p.v, **kw)
    assert_close(by(backend="triton"), by(backend="torch"), rtol=1e-5)
    with pytest.raises(ValueError, match="backend must be one of"): by(backend="cuda")
    with pytest.raises(ValueError, match="q must have one query"): by(p.q.repeat(1, 1, 2, 1), backend="triton")
    assert_close(by(backend="triton", heads="each"), by(backend="torch", heads="each"), rtol=1e-5)
    for name, other in (("heads", "all"), ("heads", "averaged"), ("pool", "max"), ("walk", "softmax")):
        with pytest.raises(ValueError, match=f"^{name} must be .* for backend='triton', got '?{other}'?$"):
            by(backend="triton", **{name: other})
        if name != "walk":  # "auto" on a GPU: chosen in PyTorch, the chosen rows read by a kernel
            assert_close(by(**{name: other}), by(backend="torch", **{name: other}), rtol=1e-5 if GPU else 0)
    with pytest.raises(ValueError, match="index must be one of fine4, fine16, mean for backend='triton', got 'oracle'"):
        by(backend="triton", index="oracle")
    learns = p.q.clone().requires_grad_()
    with pytest.raises(ValueError, match="where a gradient is wanted"): by(learns, backend="triton")
    assert by(learns).requires_grad


OTHERS = (dict(heads="all"), dict(heads="averaged"), dict(pool="max"), dict(walk="softmax"),
          *(dict(index=x) for x in ("oracle", "random", "sketch")))


@kernel
def test_a_step_without_a_kernel_is_not_handed_over(monkeypatch):
    "As on a GPU, where `auto` means the kernels for what they can do."
    monkeypatch.setattr("sparse_nb.methods.sketch_walk.call.has_kernels", lambda q: True)
    p = problem(1, 1, 2, 200, 64, FP32)
    serves = lambda backend="auto", **kw: SketchWalk(**kw).step_by_kernels(p.q, p.k, p.v, backend)
    for index in KINDS:
        for block in (4, 8, 16, 32, 64, 128):
            if block >= FINE.get(index, 1):
                assert serves(index=index, block=block) and not serves("torch", index=index, block=block)
    long = p.k[:, :, :1].expand(1, 1, 2**17 + 1, 64)
    assert not SketchWalk(block=4).step_by_kernels(p.q, long, long, "auto")
    with pytest.raises(ValueError, match="k must have at most 32768 blocks for backend='triton', got 32769"):
        SketchWalk(block=4).step_by_kernels(p.q, long, long, "triton")
    assert serves(heads="each") and serves(heads="each", pool="max")
    many = p.q.repeat(1, 33, 1, 1)
    assert not SketchWalk(heads="each").step_by_kernels(many, p.k, p.v, "auto")
    with pytest.raises(ValueError, match="at most 32 heads a group for backend='triton' and heads='each', got 66"):
        SketchWalk(heads="each").step_by_kernels(many, p.k, p.v, "triton")
    for settings in OTHERS:
        assert not serves(**settings), settings
        with pytest.raises(ValueError, match=next(iter(settings))): serves("triton", **settings)


# what the launcher refuses, and PyTorch's compiler

@kernel
def test_what_has_no_kernel():
    from sparse_nb.kernels.sketch_walk import Settings, decode
    p, s = problem(1, 1, 1, 200, 64, FP32), Settings()
    index = packed(p, SketchWalk())[1]
    with pytest.raises(TypeError, match="q must be float16, bfloat16 or float32"):
        decode(p.q.double(), p.k, p.v, index, s)
    with pytest.raises(ValueError, match="q must have a head size of at most 256"):
        decode(*(x.repeat(1, 1, 1, 5) for x in p[:3]), index, s)
    with pytest.raises(ValueError, match="q must have a head size above 32 .* got 32"):
        decode(*(x[..., :32] for x in p[:3]), index, s)
    with pytest.raises(ValueError, match="q must have one query"): decode(p.q.repeat(1, 1, 2, 1), p.k, p.v, index, s)
    with pytest.raises(ValueError, match=r"index must be of .* = \[1, 2, 16\], got \[1, 1, 16\]"):
        decode(p.q.repeat(1, 2, 1, 1), *(x.repeat(1, 2, 1, 1) for x in p[1:3]), index, s)
    with pytest.raises(ValueError, match=r"index must be of .* = \[1, 1, 32\]"):
        decode(*p[:3], index, s._replace(block=128))
    with pytest.raises(ValueError, match="index needs space for 7 blocks, got 4"):
        decode(p.q, *(x.repeat(1, 1, 2, 1) for x in p[1:3]), index, s)
    with pytest.raises(ValueError, match="index must be packed as 'mean', got another kind"):
        decode(*p[:3], index._replace(rows=index.rows[..., :1, :]), s._replace(index="mean"))
    with pytest.raises(ValueError, match="index must be one of fine4, fine16, mean"):
        decode(*p[:3], index, s._replace(index="sketch"))
    with pytest.raises(ValueError, match="heads must be one of group, each for backend='triton', got 'all'"):
        decode(*p[:3], index, s._replace(heads="all"))
    with pytest.raises(ValueError, match="k must have at most 32768 blocks"):
        decode(p.q, *(x[:, :, :1].expand(1, 1, 2**21 + 1, 64) for x in p[1:3]), index, s)


@kernel
def test_compiles_into_one_graph():
    from sparse_nb.kernels.sketch_walk import Settings, decode
    p = problem(2, 1, 2, 200, 64, BF16, ragged=True)
    index = packed(p, SketchWalk())[1]
    step = lambda q, k, v: torch.cat([decode(q, k, v, index, Settings(density=0.5, heads=x), **p.masks).out
                                      for x in ("group", "each")])
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "eager")
    assert torch.equal(compiled(*p[:3]), step(*p[:3]))


@kernel
def test_operator():
    p = problem(1, 1, 2, 192, 64, FP32)
    given = (*p[:3], *packed(p, SketchWalk())[1], 64, 0.5, "fine4", "each", None, None, None)
    torch.library.opcheck(torch.ops.sparse_nb.sketch_walk_decode, given, test_utils=("test_schema", "test_faketensor"))


if GPU:
    @pytest.mark.gpu
    @pytest.mark.parametrize("heads", ["group", "each"])
    def test_graph_without_a_wait(heads):
        "A cache that is filled key by key: a replay completes blocks, and nobody waits."
        from sparse_nb.bench import captured
        from sparse_nb.kernels.sketch_walk import Settings, decode
        p, s = problem(2, 2, 4, 5000, 128, BF16), SketchWalk()
        index, whole = packed(p, s, 4030, room=79)[1], packed(p, s)[1]
        stop = torch.full((2,), 4030, dtype=torch.int32, device=DEVICE)
        settings = Settings(density=0.1, heads=heads)
        call = lambda: decode(p.q, p.k, p.v, index, settings, kv_end=stop).out
        call()
        torch.cuda.set_sync_debug_mode("error")
        try: call()
        finally: torch.cuda.set_sync_debug_mode("default")
        replay, out = captured(call)
        for _ in range(4030, 4200):
            stop += 1
            replay()
        assert torch.equal(out, decode(p.q, p.k, p.v, whole, settings, kv_end=stop).out)
        assert torch.equal(index.rows[:, :, :4200 // 64], whole.rows[:, :, :4200 // 64])

    @pytest.mark.gpu
    @pytest.mark.parametrize("heads", ["group", "each"])
    @pytest.mark.parametrize("backend", ["torch", "triton"])
    def test_a_fixed_state_in_a_graph(heads, backend):
        "A key is put and a query decoded: captured once, replays fill blocks, and nobody waits."
        from sparse_nb.bench import captured
        p, s = problem(2, 2, 4, 4200, 128, BF16), SketchWalk(density=0.1, heads=heads)
        state, at = s.new_state(), torch.tensor([4030], device=DEVICE)
        state.append(p.k[:, :, :4030], p.v[:, :, :4030])
        state.to_static(4200)
        def call():
            state.write(p.k, p.v, at)
            return s.decode(p.q, p.k, p.v, state=state, kv_end=(at + 1).expand(2), backend=backend)
        call()
        torch.cuda.set_sync_debug_mode("error")
        try: call()
        finally: torch.cuda.set_sync_debug_mode("default")
        replay, out = captured(call)
        for _ in range(4031, 4200):
            at += 1
            replay()
        grown = s.new_state()
        for a, b in ((0, 4030), *((n, n + 1) for n in range(4030, 4200))): grown.append(p.k[:, :, a:b], p.v[:, :, a:b])
        assert_close(out, s.decode(p.q, p.k, p.v, state=grown, backend=backend), rtol=TOLERANCE[BF16])
        state.to_dynamic(4200, p.k)
        assert_codes_close(state.rows, grown.rows)
        assert torch.equal(state.begin, grown.begin) and torch.equal(state.tail, grown.tail)

    @pytest.mark.gpu
    @pytest.mark.parametrize("N, R, index", [(131072, 4, "fine4"), (70001, 8, "fine16"), (1100003, 3, "fine4")])
    @pytest.mark.parametrize("heads", ["group", "each"])
    def test_long(N, R, index, heads): check(problem(1, 2, R, N, 128, BF16), density=0.1, index=index, heads=heads)


if not INTERPRETED:
    def usage(name, capability, kind, D, *, index="fine4", block=64, warps=4, registers=None, **own):
        "Registers, spills and shared memory of a kernel with the shipped tiles."
        triton = pytest.importorskip("triton")
        from sparse_nb.kernels import engine, sketch_walk as kernels
        from sparse_nb.kernels.common import compiled_usage, merge_kernel
        BD, s = triton.next_power_of_2(D), kernels.Settings(block, 0.1, index)
        types = dict.fromkeys(("fact_ptr", "len_ptr", "list_ptr", "count_ptr", "off_ptr", "key_ptr", "cut_ptr",
                               "reader_ptr", "table_ptr"), "i32")
        types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), kind) | dict(
            start_ptr="i64", begin_ptr="i64", slot_ptr="i64", share="i64", row_ptr="bf16" if index == "mean" else "u8",
            digit_ptr="bf16" if index == "mean" else "i8")
        known = dict(LR=4, LP=4, D=D, W=BD, BD=BD, BR=16, STEPS=BD.bit_length() - 1, PDL=capability >= 90,
                     MEAN=index == "mean", RADIUS=index == "fine16", REACH=0.5, FINE=s.fine, BLOCK=block, WARPS=warps,
                     BF=128, EACH=0, peak_ptr=None, mass_ptr=None, BB=kernels.score_tile(kernels.Tiles(), s, BD))
        if "ITEMS" not in own: known |= dict(ITEMS=0, x_p=None, f_p=None)
        if index != "fine16": known |= dict(radius_ptr=None)
        kernel_ = dict(merge=merge_kernel, mean=engine._mean_kernel).get(name) or getattr(kernels, f"_{name}_kernel")
        return compiled_usage(kernel_, known | own, types, capability, warps, registers)

    @pytest.mark.kernels
    @pytest.mark.budget(20)
    @pytest.mark.parametrize("capability, kind, D, index", [
        (80, "fp16", 128, "mean"), (90, "bf16", 128, "fine4"), (90, "fp32", 80, "fine16")])
    def test_registers_and_spills(capability, kind, D, index):
        triton = pytest.importorskip("triton")
        from sparse_nb.kernels.sketch_walk import Settings, Tiles, read_tile, score_tile
        tiles = Tiles()
        _, warps, stages, _ = tiles.score
        few, BT, _ = tiles.select
        found = {"score": usage("score", capability, kind, D, index=index, warps=warps, STAGES=stages),
                 "ask": usage("ask", capability, kind, D, index=index, warps=1),
                 "means in pages": usage("mean", capability, kind, D, index=index, warps=1, SIZE=64, x_p=4096, f_p=99),
                 "share": usage("share", capability, kind, D, BT=BT, BS=64),
                 "join": usage("join", capability, kind, D, warps=few, BM=4096, BT=BT)}
        s, paged = Settings(index=index), tiles if index == "mean" else tiles._replace(score=tiles.pages)
        _, warps, stages, _ = paged.score
        found["score in pages"] = usage(
            "score", capability, kind, D, index=index, warps=warps, WARPS=warps, STAGES=stages, PAGE=64,
            ITEMS=64 // s.fine, BB=score_tile(paged, s, triton.next_power_of_2(D)))
        for BM in (2048, 8192, 16384, 32768):
            scaled = lambda least: min(32, least * max(1, BM // 4096))
            chosen = dict(BM=BM, BT=BT, MOST=60 if capability >= 90 else 0)
            if BM <= tiles.twice[0]:
                found[f"select {BM}"] = usage("select", capability, kind, D, warps=scaled(few), **chosen)
            found[f"cut {BM}"] = usage("select", capability, kind, D, warps=scaled(tiles.twice[1]), EACH=4, **chosen)
        _, warps, stages, _, registers = tiles.read
        for each, more in (("", dict(reader_ptr=None)), (" each", {})):
            BN = read_tile(tiles, triton.next_power_of_2(D), 4 if kind == "fp32" else 2, each)
            found["read" + each] = usage("read", capability, kind, D, warps=warps, registers=registers, BN=BN,
                                         STAGES=stages, **more)
        found["read in pages"] = usage(
            "read", capability, kind, D, warps=warps, registers=registers, STAGES=stages + 1, PAGE=16, reader_ptr=None,
            BN=read_tile(tiles, triton.next_power_of_2(D), 4 if kind == "fp32" else 2, ""))
        if kind != "fp32":  # as many programs as are started at once have their registers, in pages one fewer
            assert found["read"]["registers"] * 32 * warps * tiles.read[3] <= 2**16, found["read"]
            assert found["read in pages"]["registers"] * 32 * warps * tiles.apart <= 2**16, found["read in pages"]
        found["merge"] = usage("merge", capability, kind, D, warps=tiles.merge[1], BP=64, BW=tiles.merge[0])
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
