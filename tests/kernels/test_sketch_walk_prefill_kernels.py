"""The Triton kernels that choose blocks for a prompt, against Sketch&Walk's reference.

`pytest -m gpu -k test_sketch_walk_prefill_kernels` runs the sweep on a GPU. Without one, a covering design of
small problems runs in Triton's interpreter, in processes of their own.
"""
import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from covering import covering
from inputs import DEVICE, GPU, INTERPRETED, LAYOUTS, kernel, poisoned
from sparse_nb.core.blocks import BlockPattern, block_attention
from sparse_nb.core.exact import assert_close
from sparse_nb.methods.sketch_walk.lists import guessed_shares, list_sizes, prompt_blocks, true_shares
from sparse_nb.sketch_walk import SketchWalk, heaviest_blocks, prompt_lists, sketch_walk_prefill

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2**-8, FP16: 2**-11, FP32: 1e-5} if GPU else {BF16: 2**-7, FP16: 2**-10, FP32: 2e-6}
GAP = 1e-3  # of a share: a step of 4 bits that rounds the other way moves a score by no more
EXACT = 1e-5  # likewise, of shares by exact scores of the same blocks


def problem(B, G, R, Q, N, D, dtype, *, layout="plain", starts=None, seed=0):
    "q, k, v with heavy blocks, and where the sequences start; NaN in the padding."
    generator = torch.Generator(DEVICE).manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)
    q, k, v = new(B, G * R, Q, D), *(LAYOUTS[layout](B, G, N, D, new) for _ in range(2))
    k += 2 * new(B, G, -(-N // 16), D).repeat_interleave(16, 2)[:, :, :N]
    if starts is None: return (q, k, v), None
    starts = torch.tensor(starts, device=DEVICE)
    for x in (k, v):
        for b in range(B): x[b, :, :starts[b]] = math.nan
    return (q, k, v), starts


def chosen(index, count, blocks):
    "Lists as a mask [B, P, M, K]; they must be in order."
    used = torch.arange(index.shape[3], device=DEVICE) < count[..., None]
    assert (index.diff(dim=-1)[used[..., 1:]] > 0).all() and (index[used] >= 0).all() and (index[used] < blocks).all()
    place = torch.where(used, index, blocks).long()
    return used.new_zeros(*count.shape, blocks + 1).scatter(-1, place, True)[..., :-1]


def agree(got, want, a, prompt, gap):
    "Lists are as long, and where they differ, shares `a` [B, P, R, M] do not, by more than a part of them."
    assert torch.equal(got.sum(-1), want.sum(-1))
    lost, came = want & ~got, got & ~want
    assert not (came & ~prompt.visible).any() and not (lost & prompt.forced).any()
    best, worst = a.masked_fill(~lost, -math.inf).amax(-1), a.masked_fill(~came, math.inf).amin(-1)
    there = lost.any(-1)
    assert ((best - worst)[there] <= gap * best[there]).all(), (best[there], worst[there])


def nominated(call):
    "What a call returns, and the lists that its index nominates; None where no exact scores choose."
    from sparse_nb.kernels import sketch_walk_prefill as kernels
    kept, found = kernels.exact_shares, []
    def watched(q, k, near, *rest):
        found.append(near)
        return kept(q, k, near, *rest)
    kernels.exact_shares = watched
    try: lists = call()
    finally: kernels.exact_shares = kept
    return lists, found[-1] if found else None


def compare(q, k, starts=None, scale=None, engine=None, **settings):
    "The kernels' lists beside the reference's, for the same nominated blocks. Returns both masks."
    from sparse_nb.kernels import sketch_walk_prefill as kernels
    s = SketchWalk(**settings)
    begin = torch.zeros(len(q), dtype=torch.int64, device=DEVICE) if starts is None else starts
    prompt = prompt_blocks(s, q, k, begin)
    a, _ = guessed_shares(s, q, k, prompt, scale)
    blocks, lists_of = a.shape[3], lambda a, times: heaviest_blocks(a, prompt.visible, prompt.forced, s.density,
                                                                    s.least, times)
    same = dict(block=s.block, density=s.density, index=s.index, heads=s.heads, pool=s.prompt_pool,
                scale=scale, kv_start=starts, refine=s.prompt_refine, least=s.least)
    with pytest.MonkeyPatch.context() as patch:
        if engine is not None: patch.setattr(kernels, "by_engine", lambda *_: engine)
        lists, near = nominated(lambda: poisoned(lambda: kernels.choose_blocks(q, k, **same)))
    gap = GAP
    if s.prompt_refine > 1:
        near = chosen(*near, blocks)
        agree(near, lists_of(a, s.prompt_refine), a, prompt, GAP)
        a, gap = true_shares(s, q, k, prompt, begin, scale, near), EXACT
    want = lists_of(a, 1)
    assert lists[0].shape[3] >= want.sum(-1).max()
    got = chosen(*lists, blocks)
    agree(got, want, a, prompt, gap)
    return got, want


def drawn(factors, seed=0):
    if not (GPU or INTERPRETED): return []
    draw = random.Random(seed)
    cases = [{name: draw.choice(values) for name, values in factors.items()} for _ in range(300)]
    slow = dict(index="fine4", pool="max", block=64)      # 16 rows of 16 sub-blocks: seconds in the interpreter
    cases = [case for case in cases if GPU or not slow.items() <= case.items()]
    return [cases[i] for i in covering(cases)]


CASES = drawn(dict(index=("mean", "fine16", "fine4"), pool=("mean", "max"), heads=("group", "all", "each"), R=(1, 3, 4),
                   D=(64, 80, 128), dtype=(BF16, FP16, FP32), block=(32, 64, 128) if GPU else (32, 64),
                   layout=("plain", "by position", "sliced"), engine=(None, False), ragged=(False, True),
                   prefix=(False, True), refine=(1, 2), least=(2, 3)))


@kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_cases(case):
    c = dict(case)
    R, D, dtype, layout, ragged, prefix = (c.pop(x) for x in ("R", "D", "dtype", "layout", "ragged", "prefix"))
    Q, N = (1111, 3000) if GPU else (75, 141)
    if not prefix: N = Q
    (q, k, v), starts = problem(1 + ragged, 1, R, Q, N, D, dtype, layout=layout, starts=[0, N // 2] if ragged else None)
    got, want = compare(q, k, starts, density=0.4, **c)
    assert (got != want).sum() <= 0.01 * want.sum()


@kernel
def test_whole_calls():
    "Outputs beside those of the reference's lists in float64, with padding that the call cuts off, and an exact tail."
    exact, ended = dict(density=0.3, pool="max", heads="each", refine=2, least=3), dict(tail=45)
    for R, D, index, starts, more in ((3, 24, "fine4", None, {}), (2, 16, "fine16", [0, 41], {}),
                                      (2, 16, "fine16", [0, 41], exact), (3, 24, "fine4", [0, 95], ended)):
        x, starts = problem(2, 1, R, 100, 130, D, FP32, starts=starts)
        keep = dict(block=32, density=0.5, index=index, kv_start=starts, pool="mean", refine=1, tail=0) | more
        got = sketch_walk_prefill(*x, **keep, backend="triton")
        want = sketch_walk_prefill(*(y.double() for y in x), **keep)
        assert_close(got, want, rtol=TOLERANCE[FP32], name=index)
        assert got.isfinite().all()


@kernel
def test_prompts_take_refined_largest_shares():
    "By default: a group of several heads, with padding, a part of a prompt, a tail."
    told = torch.zeros(2)
    for R, index, starts, tail in ((2, "fine16", [0, 41], 0), (3, "mean", None, 45), (1, "mean", [0, 95], 45)):
        x, starts = problem(2, 2, R, 150, 310, 16, FP32, starts=starts)
        keep = dict(block=32, density=0.4, index=index, kv_start=starts, tail=tail)
        got, want, means, index_alone = (sketch_walk_prefill(*x, **keep, **more, backend="triton") for more in (
            {}, dict(pool="max", refine=2), dict(pool="mean", refine=2), dict(pool="max", refine=1)))
        assert torch.equal(got, want)
        told += torch.tensor([not torch.equal(got, means), not torch.equal(got, index_alone)])
        assert_close(got, sketch_walk_prefill(*(y.double() for y in x), **keep), rtol=TOLERANCE[FP32], name=index)
    assert (told > 1).all(), told


@kernel
def test_the_pattern_of_a_method_is_the_reference_s():
    (q, k, v), _ = problem(1, 2, 2, 100, 100, 16, FP32)
    s = SketchWalk(block=32, density=0.5, pool="mean", refine=1)
    want = s.pattern(q.double(), k.double())
    if not GPU: assert s.pattern(q, k).index.shape == want.index.shape  # without a GPU nothing but "triton" uses them
    from sparse_nb.kernels.sketch_walk_prefill import choose_blocks
    lists = choose_blocks(q, k, block=32, density=0.5, index="fine4", heads="group", pool="mean")
    pattern = BlockPattern(*lists, queries=100, keys=100, query_block=32, key_block=32)
    assert torch.equal(pattern.mask(), want.mask())
    out = block_attention(q, k, v, pattern)
    assert_close(out, sketch_walk_prefill(q, k, v, block=32, density=0.5, pool="mean", refine=1, tail=0,
                                          backend="torch"), rtol=1e-5)


@kernel
def test_equal_blocks_come_in_order():
    from sparse_nb.kernels.sketch_walk_prefill import choose_blocks
    q, k = torch.ones(1, 2, 320, 16, device=DEVICE), torch.ones(1, 1, 320, 16, device=DEVICE)
    index, count = choose_blocks(q, k, block=32, density=0.5, index="mean", heads="group", pool="mean")
    for m in range(10):
        size = max(2 if m else 1, math.ceil((m + 1) / 2))
        assert index[0, 0, m, :count[0, 0, m]].tolist() == [*range(size - 1), m], m


FEW = dict(index="mean", block=32, density=0.2)
CHOSEN = [(6, 1, "group", "mean", None), (4, 2, "each", "max", [0, 77]), (6, 2, "all", "max", [0, 40]),
          (3, 1, "all", "mean", None)]


@kernel
@pytest.mark.parametrize("H, G, heads, pool, starts", CHOSEN, ids=str)
def test_exact_scores_choose_among_the_nominated(H, G, heads, pool, starts):
    "Lists are the reference's, which is told from lists by the index alone and by other exact scores."
    (q, k, _), starts = problem(2, G, H // G, 150, 310, 24, FP32, starts=starts)
    s = SketchWalk(heads=heads, pool=pool, refine=2, least=3, **FEW)
    got, want = compare(q, k, starts, **vars(s))
    assert torch.equal(got, want)
    begin = torch.zeros(2, dtype=torch.int64, device=DEVICE) if starts is None else starts
    assert torch.equal(got, prompt_lists(s, q, k, begin, None, None))
    prompt = prompt_blocks(s, q, k, begin)
    a, _ = guessed_shares(s, q, k, prompt, None)
    later = true_shares(s, q.flip(2), k, prompt, begin, None, heaviest_blocks(a, *prompt[3:], 0.2, 3, 2))
    for wrong in (heaviest_blocks(a, *prompt[3:], 0.2, 3), heaviest_blocks(later, *prompt[3:], 0.2, 3)):
        assert torch.equal(wrong.sum(-1), want.sum(-1)) and not torch.equal(wrong, want)


@kernel
@pytest.mark.parametrize("H, G, heads, pool, starts", CHOSEN, ids=str)
def test_shares_are_of_the_keys_of_nominated_blocks(H, G, heads, pool, starts):
    "What is pooled is a softmax over them, of what each row sees: neither over all blocks, nor with later keys."
    from sparse_nb.kernels.common import LOG2E
    from sparse_nb.kernels.sketch_walk_prefill import exact_shares
    (q, k, _), starts = problem(2, G, H // G, 90, 310, 24, FP32, starts=starts)
    s, begin = SketchWalk(heads=heads, pool=pool, **FEW), q.new_zeros(2).long() if starts is None else starts
    prompt = prompt_blocks(s, q, k, begin)
    a, _ = guessed_shares(s, q, k, prompt, None)
    listed = heaviest_blocks(a, *prompt[3:], 0.2, 2, 2)
    near = BlockPattern.from_mask(listed, queries=90, keys=310, query_block=32, key_block=32)
    near = near.index.int().contiguous(), near.count.int().contiguous()
    found = poisoned(lambda: exact_shares(q, k, near, pool, 32, 24**-0.5 * LOG2E, starts))
    found = found.amax(2) if pool == "max" else found.sum(2)
    used = torch.arange(found.shape[3], device=DEVICE) < near[1][..., None]
    def beside(listed, rows=prompt.real.sum(3)[..., 0] * (H // found.shape[1])):
        want = true_shares(s, q, k, prompt, begin, None, listed).gather(-1, near[0].long())
        assert_close(found[used], (want * rows[..., None] if pool == "mean" else want)[used], rtol=1e-5)
    beside(listed)
    with pytest.raises(AssertionError): beside(listed | prompt.visible)
    if pool == "mean":
        with pytest.raises(AssertionError): beside(listed, torch.full_like(prompt.real.sum(3)[..., 0], 32))


@kernel
@pytest.mark.parametrize("heads, pool", [("group", "mean"), ("each", "max")])
def test_exact_scores_of_all_blocks_choose_what_the_oracle_does(heads, pool):
    (q, k, _), starts = problem(2, 2, 2, 150, 230, 16, FP32, starts=[0, 50])
    settings = FEW | dict(heads=heads, pool=pool, least=4)
    got, _ = compare(q, k, starts, refine=9, **settings)
    assert torch.equal(got, prompt_lists(SketchWalk(**settings | dict(index="oracle")), q, k, starts, None, None))


@kernel
@pytest.mark.parametrize("least", [2, 3, 4, 99])
@pytest.mark.parametrize("refine", [1, 2])
def test_a_least_number_of_blocks_is_listed(least, refine):
    "More than the density says, and than is forced where a block of queries enters two of keys."
    (q, k, _), starts = problem(2, 1, 2, 150, 230, 16, FP32, starts=[0, 77])
    got, want = compare(q, k, starts, least=least, refine=refine, **FEW)
    assert torch.equal(got, want)
    prompt = prompt_blocks(SketchWalk(**FEW), q, k, starts)
    assert torch.equal(got.sum(-1), list_sizes(prompt.visible, prompt.forced, 0.2, least).expand(got.shape[:3]))
    assert (got.sum(-1) >= prompt.visible.sum(-1).clamp(max=least)).all()


@kernel
@pytest.mark.parametrize("Q, N, settings", [
    (1, 1, dict()), (1, 65, dict(density=1.0)), (33, 34, dict(block=32)), (64, 64, dict(density=0.01)),
    (100, 131, dict(block=32, density=1.0)), (40, 97, dict(block=32, pool="max", index="fine16")),
    (1, 1, dict(refine=2, least=3)), (1, 65, dict(refine=2)), (100, 131, dict(block=128, refine=3, density=0.1)),
    (33, 161, dict(block=32, refine=2, density=0.01, index="mean"))], ids=str)
def test_edges(Q, N, settings):
    (q, k, _), _ = problem(1, 1, 2, Q, N, 16, FP32)
    got, want = compare(q, k, **settings)
    assert torch.equal(got, want)


@kernel
def test_padding_and_scale():
    "Sequences that begin in the first block, in the middle of the queries, at the end, and not at all."
    (q, k, _), starts = problem(4, 1, 1, 70, 100, 16, FP32, starts=[0, 13, 66, 99])
    for index in ("mean", "fine16"):
        got, want = compare(q, k, starts, scale=0.7, block=32, density=0.5, index=index)
        assert torch.equal(got, want)
    from sparse_nb.kernels.sketch_walk_prefill import choose_blocks
    same = dict(block=32, density=0.5, index="mean", heads="group", pool="mean")
    assert not choose_blocks(q, k, kv_start=starts * 0 + 200, **same)[1].any()


@kernel
def test_sub_blocks_of_padding_have_no_share():
    "A head gives all its scores below zero, and a sub-block that scores zero would take what it gives to others."
    q, k = torch.zeros(1, 2, 32, 16, device=DEVICE), torch.zeros(1, 1, 192, 16, device=DEVICE)
    q[:, 0, :, 0], q[:, 1, :, 1] = 8, 1
    k[..., 0], k[:, :, 64:96, 0], k[:, :, 96:128, 1] = -8, -4, 4
    k[:, :, :20] = math.nan
    starts = torch.tensor([20], device=DEVICE)
    got, want = compare(q, k, starts, block=32, density=0.5, index="fine16", pool="mean", refine=1)
    assert got[0, 0, 0].nonzero().flatten().tolist() == [0, 2, 5] and torch.equal(got, want)


@kernel
@pytest.mark.parametrize("seed", [1, 5])
def test_the_rotation_has_the_reference_s_signs(seed):
    (q, k, _), _ = problem(1, 1, 2, 100, 200, 24, FP32, seed=seed)
    k[..., 0] *= 30                                       # 4 bits without a rotation, or with another, see nothing else
    got, want = compare(q, k, block=32, density=0.5, index="fine16", pool="mean", refine=1)
    assert torch.equal(got, want)


@kernel
def test_attention_keeps_a_maximum_and_repeats_where_it_is_too_small():
    from sparse_nb.kernels.blocks import launch_blocks
    (q, k, v), starts = problem(2, 1, 3, 100, 230, 16, FP32, starts=[0, 40])
    q[..., 0], k[..., 0] = 4, 0
    k[:, :, 70:90, 0] = 120                               # a factor over 2^128 over all that came before
    mask = torch.rand(2, 1, 4, 8, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.7
    lists = BlockPattern.from_mask(mask, queries=100, keys=230, query_block=32, key_block=32)
    want, sums = block_attention(*(x.double() for x in (q, k, v)), lists, kv_start=starts, return_lse=True)
    got, lse = poisoned(lambda: launch_blocks(
        q, k, v, lists.index, lists.count, None, 32, 32, True, None, starts, None, True))
    assert_close(got, want, rtol=120 * torch.finfo(FP32).eps)
    some = sums > -math.inf
    assert torch.equal(lse > -math.inf, some)
    assert_close(lse[some], sums[some], rtol=1e-5)


@kernel
def test_what_has_no_kernel():
    from sparse_nb.kernels.sketch_walk_prefill import choose_blocks
    (q, k, v), _ = problem(1, 1, 1, 4, 4, 16, torch.float64)
    settings = dict(block=32, density=0.5, index="mean", heads="group", pool="mean")
    with pytest.raises(TypeError, match="q must be float16, bfloat16 or float32"): choose_blocks(q, k, **settings)
    wide = [y.float().repeat(1, 1, 1, 20) for y in (q, k)]
    with pytest.raises(ValueError, match="q must have a head size of at most 256"): choose_blocks(*wide, **settings)


@kernel
def test_compiles_into_one_graph():
    from sparse_nb.kernels.sketch_walk_prefill import choose_blocks
    (q, k, _), starts = problem(2, 1, 2, 70, 70, 16, BF16, starts=[0, 33])
    def step(q, k, starts):
        return choose_blocks(q, k, block=32, density=0.5, index="fine16", heads="group", pool="mean", kv_start=starts,
                             refine=2, least=3)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "eager")
    for a, b in zip(compiled(q, k, starts), step(q, k, starts)): assert torch.equal(a, b)


@kernel
def test_operator():
    import sparse_nb.kernels.sketch_walk_prefill  # noqa: F401, registers it
    (q, k, _), _ = problem(1, 1, 2, 40, 40, 16, FP32)
    for more in ((1, 2), (2, 3)):
        arguments = q, k, 32, 0.5, "mean", "group", "mean", None, None, *more
        torch.library.opcheck(torch.ops.sparse_nb.choose_blocks, arguments,
                              test_utils=("test_schema", "test_faketensor"))


@kernel
@pytest.mark.parametrize("index, heads, degree", [
    ("mean", "group", 24), ("fine4", "each", 2), ("fine16", "all", 3)])
def test_a_walk_stands_on_the_kernels_shares(index, heads, degree):
    "Two layers: lists beside the reference's, which walk over its own shares."
    N = 1111 if GPU else 230
    s = SketchWalk(32, 0.7, index, walk="softmax", degree=degree, heads=heads)
    step, right = {}, {}
    for layer in range(2):
        (q, k, _), _ = problem(2, 2, 2, N, N, 16, FP32, seed=layer)
        q *= 8  # shares whose powers float32 does not hold
        start = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        want = prompt_lists(s, q, k, start, None, None, right)
        found = s.block_pattern(q, k, None, None, "triton", step=step)
        prompt, a = prompt_blocks(s, q, k, start), right[0] ** (1 / degree)
        agree(chosen(found.index, found.count, a.shape[3]), want, a, prompt, 4 * GAP)
        assert_close(step[0], right[0], rtol=4 * GAP * degree * (layer + 1), name=f"layer {layer}")
    alone = prompt_lists(replace(s, walk=None), q, k, start, None, None)
    assert (want != alone).any()  # there is a walk to be seen


def test_a_walk_over_a_part_is_left_to_the_reference():
    (q, k, v), _ = problem(1, 1, 2, 40, 100, 16, FP32)
    s = SketchWalk(32, walk="softmax")
    with pytest.raises(ValueError, match="another walk than softmax's over a whole prompt is"):
        sketch_walk_prefill(q, k, v, block=32, walk="softmax", step={}, backend="triton")
    with pytest.raises(ValueError, match="another walk than softmax's over a whole prompt is"):
        s.prompt_by_kernels(k, k, "triton", torch.zeros(1, dtype=torch.int64))


def test_what_kernels_cannot_do_is_said():
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 1, 8, 16)
    call = lambda **kw: sketch_walk_prefill(q, k, k, backend="triton", **kw)
    for settings, what in ((dict(index="oracle"), "the index 'oracle' is"),
                           (dict(walk="literal"), "another walk than softmax's over a whole prompt is"),
                           (dict(heads="averaged", refine=2), "one list of averaged heads is"),
                           (dict(index="sketch", least=3), "the index 'sketch' is")):
        with pytest.raises(ValueError, match=f"backend must be 'torch' or 'auto' where {what} wanted, got 'triton'"):
            call(**settings)
    q.requires_grad_()
    with pytest.raises(ValueError, match="where a gradient is wanted"): call()
    with pytest.raises(ValueError, match="backend must be one of auto, torch, triton, got 'cuda'"):
        sketch_walk_prefill(q, k, k, backend="cuda")
    if not (GPU or INTERPRETED):
        with pytest.raises(ValueError, match="q must be on a GPU"): sketch_walk_prefill(k, k, k, backend="triton")


def test_a_prompt_without_kernels_is_not_handed_over(monkeypatch):
    "As on a GPU, where `auto` means the kernels for what they can do."
    monkeypatch.setattr("sparse_nb.methods.sketch_walk.call.HAS_TRITON", True)
    there = SimpleNamespace(is_cuda=True, dtype=BF16, shape=(1, 2, 8, 64), requires_grad=False)
    chooses = lambda backend="auto", **kw: SketchWalk(**kw).prompt_by_kernels(there, there, backend)
    for index in ("mean", "fine16", "fine4"):
        for more in ({}, dict(heads="all"), dict(heads="each"), dict(pool="max"), dict(block=32), dict(refine=3),
                     dict(least=5), dict(walk="softmax"), dict(walk="softmax", heads="all")):
            assert chooses(index=index, **more)
    for settings in (dict(heads="averaged"), dict(walk="renormalised"), dict(walk="literal"), dict(index="oracle"),
                     dict(index="random"), dict(index="sketch"), dict(block=16), dict(block=4)):
        assert not chooses(**settings), settings
        with pytest.raises(ValueError, match="'triton'"): chooses("triton", **settings)


if GPU:
    @pytest.mark.gpu
    @pytest.mark.parametrize("index, more", [("mean", {}), ("fine16", {}), ("fine4", {}),
                                             ("fine16", dict(refine=2, least=3, heads="each", pool="max"))])
    def test_graph_without_a_wait(index, more):
        from sparse_nb.bench import captured
        (q, k, v), _ = problem(2, 2, 4, 1000, 2000, 128, BF16)
        call = lambda: sketch_walk_prefill(q, k, v, index=index, tail=100, **more)
        call()
        torch.cuda.set_sync_debug_mode("error")
        try: call()
        finally: torch.cuda.set_sync_debug_mode("default")
        replay, out = captured(call)
        q.copy_(q.flip(2))
        replay()
        assert torch.equal(out, call())

    @pytest.mark.gpu
    @pytest.mark.parametrize("index, pool", [("mean", "mean"), ("fine16", "max"), ("fine4", "mean")])
    @pytest.mark.parametrize("H, G, N, D", [(8, 2, 9000, 128), (6, 2, 20000, 64)])
    def test_long(H, G, N, D, index, pool):
        (q, k, v), _ = problem(1, G, H // G, N, N, D, BF16)
        got, want = compare(q, k, index=index, pool=pool, density=0.1)
        assert (got != want).sum() <= 0.001 * want.sum()

    @pytest.mark.gpu
    @pytest.mark.parametrize("heads, pool, block", [("group", "mean", 64), ("each", "max", 64), ("all", "mean", 128)])
    def test_long_by_exact_scores(heads, pool, block):
        "The chapter's scores take memory: of few heads, and every program has many lists."
        (q, k, v), _ = problem(1, 2, 4, 9000, 9000, 128, BF16)
        got, want = compare(q, k, index="fine16", heads=heads, pool=pool, block=block, density=0.1, refine=2, least=3)
        assert (got != want).sum() <= 0.001 * want.sum()


if not INTERPRETED:
    SPILLS = {}  # bytes a thread, by kernel and index

    def usage(launch, index, capability, kind="bf16", D=128, BS=1024):
        "Registers, spills and shared memory of a kernel with the shipped tiles."
        pytest.importorskip("triton")
        from sparse_nb.kernels import sketch_walk_prefill as kernels
        from sparse_nb.kernels.common import compiled_usage
        rows = torch.empty(1, D, dtype=torch.bfloat16)
        tiles, C = kernels.tile_settings(rows, engine=capability >= 90), {"mean": 1, "fine16": 4, "fine4": 16}[index]
        types = dict.fromkeys(("row_ptr", "code_ptr"), "bf16") | dict(x_ptr=kind, q_ptr=kind, k_ptr=kind)
        types |= dict.fromkeys(("index_ptr", "count_ptr", "near_ptr", "many_ptr"), "i32")
        types |= dict(start_ptr="i64", share="i64")
        known = dict(INDEX=index, SIZE=64, F=64 // C, D=D, W=128, BD=128)
        if index == "mean": known["step_ptr"] = None
        if launch in ("queries", "keys"):
            BS, warps = tiles.means
            known |= dict(KEYS=launch == "keys", BS=BS) | (dict(step_ptr=None) if launch == "queries" else {})
            return compiled_usage(kernels._means_kernel, known, types, capability, warps)
        if launch == "choose": known |= dict(near_ptr=None, many_ptr=None, MAX=False, BS=2048)
        if launch == "refine": known |= dict(MAX=True, BS=BS)
        if launch in ("choose", "refine"):
            warps = tiles.choose * (2 if launch == "refine" and BS > 1024 else 1)
            return compiled_usage(kernels._choose_kernel, known, types, capability, warps)
        if launch.startswith("exact"):
            rows = 64 if launch == "exact, each" else 256
            BM, BN, warps, stages = kernels.exact_tiles(rows, D, 4 if kind == "fp32" else 2, capability >= 90)
            types |= dict(k_desc=f"tensordesc<{kind}[1,1,{BN},{D}]>")
            known |= dict(MAX=rows == 64, BM=BM, BN=BN, BJ=16, BD=D, STAGES=stages)
            if capability < 90 or kind == "fp32": known |= dict(k_desc=None)
            return compiled_usage(kernels._exact_kernel, known, types, capability, warps)
        BM, BN, warps, stages = getattr(tiles, launch)
        types |= {f"{x}_desc": f"tensordesc<bf16[{size}, 128]>" for x, size in (("row", BM), ("code", BN))}
        known |= dict(MAX=False, ALL=False, BM=BM, BN=BN, STAGES=stages)
        if capability < 90: known |= dict(row_desc=None, code_desc=None)
        kernel = kernels._sums_kernel if launch == "sums" else kernels._shares_kernel
        return compiled_usage(kernel, known, types, capability, warps)

    @pytest.mark.kernels
    @pytest.mark.parametrize("launch", ["queries", "keys", "sums", "shares", "choose"])
    @pytest.mark.parametrize("index, capability", [("mean", 90), ("fine16", 90), ("fine4", 90), ("fine4", 80)])
    def test_registers_and_spills(launch, index, capability): fits(launch, index, capability)

    @pytest.mark.kernels
    @pytest.mark.parametrize("launch, more", [
        ("exact", {}), ("exact, each", {}), ("exact", dict(D=256)), ("exact", dict(kind="fp32")), ("refine", {}),
        ("refine", dict(BS=2048))], ids=str)
    @pytest.mark.parametrize("capability", [90, 80])
    def test_registers_and_spills_of_exact_scores(launch, more, capability): fits(launch, "mean", capability, **more)

    def fits(launch, index, capability, **more):
        used = usage(launch, index, capability, **more)
        print(used)
        most = (227 if capability == 90 else 163) * 1024
        assert used["spills"] <= SPILLS.get((launch, index), 0) and used["shared"] <= most, used

    @pytest.mark.kernels
    @pytest.mark.budget(40)
    @pytest.mark.parametrize("shard", range(2))
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_in_the_interpreter(forked_pytest, shard):
        pytest.importorskip("triton")
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--shard", f"{shard}/2", __file__,
                                   TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d passed", said), said[-4000:]
