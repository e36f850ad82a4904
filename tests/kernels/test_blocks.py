"""Attention by blocks: the reference against enumeration of all pairs, the Triton kernels against it in float64.

`pytest -m gpu -k test_blocks` runs the sweep of the kernels on a GPU. Without one, a covering design of small
problems runs in Triton's interpreter, in processes of their own.
"""
import importlib.util
import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import drawn
from inputs import DEVICE, GPU, INTERPRETED, LAYOUTS, kernel, poisoned
from sparse_nb.core.blocks import SIZES, BlockPattern, block_attention, sinks_window_pattern, streaming_prefill
from sparse_nb.core.exact import assert_close, attention
from sparse_nb.core.selection import select_sinks_window, weighted_state

TRITON = importlib.util.find_spec("triton") is not None
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def problem(B, G, R, Q, N, D, dtype=FP64, *, layout="plain", ragged=False, seed=0):
    "Gaussian q, k, v and the bounds of the sequences; ragged: padding into the queries, NaN in what is hidden."
    generator = torch.Generator(DEVICE).manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)
    q, k, v = new(B, G * R, Q, D), *(LAYOUTS[layout](B, G, N, D, new) for _ in range(2))
    if not ragged: return (q, k, v), {}
    start = torch.tensor([b * (N - 3 * Q // 4) // max(1, B - 1) for b in range(B)], device=DEVICE)
    stop = torch.tensor([N - b * (Q // 4) for b in range(B)], dtype=torch.int32, device=DEVICE)
    for x in (k, v):
        for b in range(B): x[b, :, :start[b]] = x[b, :, stop[b]:] = math.nan
    return (q, k, v), dict(kv_start=start, kv_end=stop)


def padded(dtype):
    "q, k, v of five sequences, three of which are padding alone; what is hidden is NaN."
    (q, k, v), _ = problem(5, 1, 2, 40, 70, 16, dtype)
    masks = dict(kv_start=torch.tensor([0, 70, 200, 9, 50], device=DEVICE),
                 kv_end=torch.tensor([70, 70, 70, 9, 66], device=DEVICE))
    for b, (start, stop) in enumerate(zip(*(x.tolist() for x in masks.values()))):
        for x in (k, v): x[b, :, :start] = x[b, :, stop:] = math.nan
    return (q, k, v), masks


def lists(B, P, Q, N, QB, KB, *, gaps=False, share=0.5, seed=0):
    "A random pattern."
    generator = torch.Generator().manual_seed(seed)
    shape = B, P, -(-Q // QB), -(-N // KB)
    mask, gap = torch.rand(shape, generator=generator) < share, None
    if gaps: gap = torch.randint(0, N + 1, (B, P, Q, 2), generator=generator, dtype=torch.int32).to(DEVICE)
    return BlockPattern.from_mask(mask.to(DEVICE), queries=Q, keys=N, query_block=QB, key_block=KB, gap=gap)


def gapped(ends, N):
    "A pattern of all blocks, with a sequence for each gap between two of `ends`, and the pairs that are seen."
    gap = torch.tensor(list(itertools.product(ends, ends)), dtype=torch.int32, device=DEVICE)
    gap = gap[:, None, None].expand(-1, -1, 32, -1)
    every = torch.ones(len(gap), 1, 1, -(-N // 32), dtype=torch.bool, device=DEVICE)
    p = BlockPattern.from_mask(every, queries=32, keys=N, query_block=32, key_block=32, gap=gap)
    return p, pairs(p, len(gap), False)


def bounds(B, Q, N, causal, kv_start=None, kv_end=None):
    "Which keys each query may see [B, 1, Q, N]."
    i = torch.arange(N, device=DEVICE)
    start, stop = (torch.as_tensor(d if x is None else x, device=DEVICE).expand(B).view(B, 1, 1, 1).long()
                   for x, d in ((kv_start, 0), (kv_end, N)))
    last = stop - Q + torch.arange(Q, device=DEVICE).view(-1, 1) if causal else stop - 1
    return ((i >= start) & (i < stop) & (i <= last)).expand(B, 1, Q, N)


def pairs(p, B, causal=True, **masks):
    "The same of a pattern [B, P, Q, N], by enumeration."
    listed = p.mask().repeat_interleave(p.query_block, 2)[:, :, :p.queries]
    seen = listed.repeat_interleave(p.key_block, 3)[..., :p.keys] & bounds(B, p.queries, p.keys, causal, **masks)
    if p.gap is None: return seen
    i = torch.arange(p.keys, device=DEVICE)
    return seen & ((i < p.gap[..., :1]) | (i >= p.gap[..., 1:]))


def dense(q, k, v, seen, scale=None):
    "Attention and log-sum-exp over the pairs `seen` [B, P, Q, N], in float64."
    R = q.shape[1] // k.shape[1]
    hidden = ~seen.any(2).any(1)[:, None, :, None]
    k, v = (x.double().masked_fill(hidden, 0).repeat_interleave(R, 1) for x in (k, v))
    seen = seen.expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // seen.shape[1], 1)
    scores = (q.double() @ k.mT * (q.shape[3]**-0.5 if scale is None else scale)).masked_fill(~seen, -math.inf)
    sums = scores.logsumexp(-1)
    return torch.exp(scores - sums.masked_fill(sums == -math.inf, 0)[..., None]) @ v, sums


def check(got, want, rtol=1e-12):
    "Outputs and log-sum-exps agree; rows that saw nothing are exactly 0 and -inf."
    (out, lse), (exact, sums) = got, want
    none = sums == -math.inf
    assert torch.equal(lse == -math.inf, none) and not out[none].any()
    assert_close(out, exact, rtol=rtol, name="output")
    assert_close(lse[~none], sums[~none], rtol=max(rtol, 1e-12) if rtol < 1e-4 else 1e-4, name="log-sum-exp")
    return none


sizes = dict(
    B=st.integers(1, 2), G=st.integers(1, 2), R=st.integers(1, 3), Q=st.integers(1, 80), more=st.integers(0, 90),
    seed=st.integers(0, 99), ragged=st.booleans())
quick = settings(max_examples=40, deadline=None, derandomize=True)


if not INTERPRETED:
    @quick
    @given(**sizes, QB=st.sampled_from(SIZES), KB=st.sampled_from(SIZES), per=st.sampled_from("1GH"),
           causal=st.booleans(), gaps=st.booleans(), share=st.sampled_from([0.2, 0.8]))
    def test_reference_is_attention_over_what_is_listed(
            B, G, R, Q, more, seed, ragged, QB, KB, per, causal, gaps, share):
        N, P = Q + more, {"1": 1, "G": G, "H": G * R}[per]
        (q, k, v), masks = problem(B, G, R, Q, N, 8, ragged=ragged and Q > 4, seed=seed)
        p = lists(1 if seed % 2 else B, P, Q, N, QB, KB, gaps=gaps, share=share, seed=seed)
        got = block_attention(q, k, v, p, causal=causal, scale=0.3, return_lse=True, **masks)
        check(got, dense(q, k, v, pairs(p, B, causal, **masks), 0.3))

    @quick
    @given(**sizes, sinks=st.integers(0, 40), window=st.integers(1, 200))
    def test_streaming_is_attention_to_sinks_and_window(B, G, R, Q, more, seed, ragged, sinks, window):
        N = Q + more
        (q, k, v), masks = problem(B, G, R, Q, N, 8, ragged=ragged and Q > 4, seed=seed)
        see = bounds(B, Q, N, True, **masks)
        order, left = see.cumsum(-1), see.flip(-1).cumsum(-1).flip(-1)  # number among the visible, from either end
        want = dense(q, k, v, see & ((order <= sinks) | (left <= window)))
        check(streaming_prefill(q, k, v, sinks=sinks, window=window, return_lse=True, **masks), want)
        p = sinks_window_pattern(q, k, sinks=sinks, window=window, query_block=32, key_block=64, **masks)
        check(block_attention(q, k, v, p, return_lse=True, **masks), want)

    @quick
    @given(**sizes, QB=st.sampled_from(SIZES), KB=st.sampled_from(SIZES), causal=st.booleans(), gaps=st.booleans())
    def test_full_blocks_are_full_and_the_rest_is_partial(B, G, R, Q, more, seed, ragged, QB, KB, causal, gaps):
        N = Q + more
        _, masks = problem(B, G, R, Q, N, 1, ragged=ragged and Q > 4, seed=seed)
        p = lists(B, G, Q, N, QB, KB, gaps=gaps, seed=seed)
        M, K = p.mask().shape[2:]
        pad = lambda x, value: torch.nn.functional.pad(x, (0, K * KB - N, 0, M * QB - Q), value=value)
        blocks = lambda x: x.unflatten(3, (K, KB)).unflatten(2, (M, QB)).transpose(3, 4)
        seen = pairs(p, B, causal, **masks)
        some = blocks(pad(seen, False)).any(-1).any(-1)
        rows = torch.nn.functional.pad(seen, (0, K * KB - N), value=False)  # keys that do not exist are not seen
        every = blocks(torch.nn.functional.pad(rows, (0, 0, 0, M * QB - Q), value=True)).all(-1).all(-1)
        full, partial = p.split(causal=causal, **masks)
        assert not (full & partial).any() and not (full & ~every).any() and not (some & ~(full | partial)).any()
        if not gaps:
            assert torch.equal(full, every & p.mask()) and torch.equal(full | partial, some)
            exact = blocks(pad(bounds(B, Q, N, causal, **masks), False)).any(-1).any(-1).sum() * G
            assert float(p.density(causal=causal, **masks)) == pytest.approx(int(some.sum()) / int(exact), rel=1e-12)

    def test_full_blocks_beside_a_gap():
        p, seen = gapped([0, 1, 31, 32, 33, 63, 64, 65, 95, 96], 96)
        cells = seen[:, 0].unflatten(2, (3, 32))
        full, partial = (x[:, 0, 0] for x in p.split(causal=False))
        assert torch.equal(full, cells.all(-1).all(1)) and torch.equal(partial, cells.any(-1).any(1) & ~full)

    def test_window_has_few_partial_blocks():
        x = torch.empty(1, 1, 4096, 1)
        full, partial = sinks_window_pattern(x, x, sinks=4, window=1024).split()
        assert int(full[0, 0, -1].sum()) == 15 and int(partial[0, 0, -1].sum()) == 3

    @pytest.mark.parametrize("dtype, rtol", [(BF16, 4e-3), (FP16, 5e-4), (FP32, 1e-6), (FP64, 1e-12)], ids=str)
    def test_all_blocks_are_exact_attention(dtype, rtol):
        (q, k, v), _ = problem(2, 2, 3, 70, 100, 16, dtype)
        out, lse = block_attention(q, k, v, lists(1, 1, 70, 100, 32, 64, share=2.0), return_lse=True)
        assert out.dtype == dtype and lse.dtype == (FP64 if dtype == FP64 else FP32)
        assert_close(out, attention(q.double(), k.double(), v.double(), causal=True), rtol=rtol)
        with torch.autocast("cpu", dtype=BF16):
            again = block_attention(q, k, v, lists(1, 1, 70, 100, 32, 64, share=2.0))
        assert torch.equal(out, again)

    @pytest.mark.parametrize("causal", [True, False])
    def test_the_keys_that_a_row_sees(causal):
        (q, k, _), masks = problem(3, 2, 2, 60, 100, 8, ragged=True)
        for gaps in (False, True):
            p = lists(3, 2, 60, 100, 32, 64, gaps=gaps)
            want = pairs(p, 3, causal, **masks)
            assert torch.equal(p.seen(torch.arange(60), causal=causal, **masks), want)
            some = torch.tensor([59, 0, 31, 32])
            assert torch.equal(p.seen(some, causal=causal, **masks), want[:, :, some])
        near = sinks_window_pattern(q, k, sinks=3, window=9)
        assert torch.equal(near.seen(torch.tensor([7])), pairs(near, 3)[:, :, 7:8])

    @pytest.mark.parametrize("causal", [True, False])
    def test_a_sequence_of_padding_gives_nothing(causal):
        (q, k, v), masks = padded(FP64)
        p = lists(1, 1, 40, 70, 32, 32, share=2.0)
        got = block_attention(q, k, v, p, causal=causal, return_lse=True, **masks)
        none = check(got, dense(q, k, v, pairs(p, 5, causal, **masks)))
        assert none[1:4].all() and not none[0].any() and not none[4, :, -1].any()
        if not causal: return
        want = dense(q, k, v, bounds(5, 40, 70, True, **masks))
        check(streaming_prefill(q, k, v, sinks=3, window=70, return_lse=True, **masks), want)
        near = sinks_window_pattern(q, k, sinks=3, window=70, query_block=32, key_block=32, **masks)
        check(block_attention(q, k, v, near, return_lse=True, **masks), want)

    def test_selected_keys_agree():
        (q, k, v), masks = problem(2, 2, 2, 60, 90, 8)
        masks = dict(kv_start=torch.tensor([0, 20]), kv_end=torch.tensor([90, 85]))
        state = weighted_state(q, k, v, select_sinks_window(q, k, sinks=3, window=9, causal=True, **masks))
        got = streaming_prefill(q, k, v, sinks=3, window=9, return_lse=True, **masks)
        check(got, (state.output(), state.m + state.l.log()))

    @pytest.mark.parametrize("call", [
        lambda *x: block_attention(*x, lists(1, 2, 90, 90, 32, 32)),
        lambda *x: streaming_prefill(*x, sinks=3, window=20)],
        ids=["blocks", "streaming"])
    def test_later_keys_change_nothing(call):
        (q, k, v), _ = problem(1, 2, 2, 90, 90, 8)
        before = call(q, k, v)
        for at in (1, 31, 32, 33, 64, 89):
            x, y = k.clone(), v.clone()
            x[:, :, at:], y[:, :, at:] = 7, -9
            after = call(q, x, y)
            assert torch.equal(before[:, :, :at], after[:, :, :at])
            assert not torch.equal(before[:, :, at:], after[:, :, at:])

    @pytest.mark.parametrize("by", ["blocks", "streaming"])
    def test_a_row_of_a_batch_is_that_row_alone(by):
        (q, k, v), masks = problem(3, 2, 2, 60, 100, 8, ragged=True)
        p = lists(3, 2, 60, 100, 32, 32, gaps=True)
        for b in range(3):
            own = {name: x[b:b + 1] for name, x in masks.items()}
            one = BlockPattern(p.index[b:b + 1], p.count[b:b + 1], 60, 100, 32, 32, p.gap[b:b + 1])
            row = [x[b:b + 1] for x in (q, k, v)]
            if by == "blocks": got, alone = block_attention(q, k, v, p, **masks), block_attention(*row, one, **own)
            else:
                both = ((q, k, v), masks), (row, own)
                got, alone = (streaming_prefill(*x, sinks=2, window=9, **y) for x, y in both)
            assert_close(got[b:b + 1], alone, rtol=1e-12)

    def test_parts_join_by_their_sums():
        (q, k, v), _ = problem(1, 1, 2, 64, 128, 8)
        p = lists(1, 1, 64, 128, 32, 32)
        rest = BlockPattern.from_mask(~p.mask(), queries=64, keys=128, query_block=32, key_block=32)
        (a, x), (b, y) = (block_attention(q, k, v, z, return_lse=True) for z in (p, rest))
        assert_close(torch.logaddexp(x, y), dense(q, k, v, bounds(1, 64, 128, True))[1], rtol=1e-12)
        share = torch.exp(x - torch.logaddexp(x, y))[..., None]
        assert_close(share * a + (1 - share) * b, attention(q, k, v, causal=True), rtol=1e-12)

    def test_gradients():
        (q, k, v), _ = problem(1, 1, 2, 40, 50, 8)
        for x in (q, k, v): x.requires_grad_()
        with pytest.raises(ValueError, match="backend must be 'torch' or 'auto' where a gradient is wanted"):
            streaming_prefill(q, k, v, backend="triton")
        want = torch.autograd.grad(attention(q, k, v, causal=True).square().sum(), (q, k, v))
        whole = lists(1, 1, 40, 50, 32, 32, share=2.0)
        for out in (block_attention(q, k, v, whole), streaming_prefill(q, k, v, sinks=1, window=50)):
            for a, b in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), want): assert_close(a, b, rtol=1e-10)

    good = dict(zip("qkv", problem(1, 2, 2, 40, 50, 8)[0]))
    whole = lists(1, 2, 40, 50, 32, 64, share=2.0)
    INDEX, COUNT = whole.index, whole.count
    make = lambda **x: BlockPattern(**(dict(index=INDEX, count=COUNT, queries=40, keys=50, query_block=32) | x))
    TWICE = torch.zeros(1, 1, 2, 2, dtype=torch.int32)

    @pytest.mark.parametrize("call, error, message", [
        (lambda: make(index=[[0]]), TypeError, "index must be a torch.Tensor, got list"),
        (lambda: make(index=INDEX.long()), TypeError, "index must be int32, got torch.int64"),
        (lambda: make(index=INDEX[0]),
         ValueError, "index must have shape [B, P, Mq, S] with Mq = 2 and nothing empty, got [2, 2, 1]"),
        (lambda: make(queries=70),
         ValueError, "index must have shape [B, P, Mq, S] with Mq = 3 and nothing empty, got [1, 2, 2, 1]"),
        (lambda: make(count=COUNT[:, :1]), ValueError, "count must have shape [1, 2, 2], got [1, 1, 2]"),
        (lambda: make(count=COUNT.to("meta")), ValueError, "count must be on the device of index, cpu, got meta"),
        (lambda: make(count=COUNT + 1), ValueError, "count must lie in [0, S] = [0, 1], got 2 to 2"),
        (lambda: make(count=COUNT - 2), ValueError, "count must lie in [0, S] = [0, 1], got -1 to -1"),
        (lambda: make(index=INDEX + 1), ValueError, "index must lie in [0, 1), got 1"),
        (lambda: make(index=INDEX - 1), ValueError, "index must lie in [0, 1), got -1"),
        (lambda: BlockPattern(TWICE, TWICE[..., 0] + 2, 40, 90, 32),
         ValueError, "index must not name a block twice in one list"),
        (lambda: make(gap=torch.zeros(1, 2, 40, 2)), TypeError, "gap must be int32, got torch.float32"),
        (lambda: make(gap=torch.zeros(1, 2, 40, dtype=torch.int32)),
         ValueError, "gap must have shape [1, 2, 40, 2], got [1, 2, 40]"),
        (lambda: make(query_block=48), ValueError, "query_block must be 32, 64 or 128, got 48"),
        (lambda: make(key_block=16), ValueError, "key_block must be 32, 64 or 128, got 16"),
        (lambda: make(key_block=64.0), TypeError, "key_block must be an int, got float"),
        (lambda: make(keys=0), ValueError, "keys must be at least 1, got 0"),
        (lambda: BlockPattern.from_mask(INDEX, queries=40, keys=50),
         TypeError, "mask must be a bool tensor, got torch.int32"),
        (lambda: BlockPattern.from_mask([True], queries=40, keys=50),
         TypeError, "mask must be a bool tensor, got list"),
        (lambda: BlockPattern.from_mask(INDEX == 0, queries=40, keys=90, query_block=32),
         ValueError, "mask must have 2 blocks of keys in its last axis, got 1"),
        (lambda: block_attention(**good, pattern=INDEX), TypeError, "pattern must be a BlockPattern, got Tensor"),
        (lambda: block_attention(**good, pattern=make(keys=60)),
         ValueError, "pattern must be for Q, N = 40, 50, got 40, 60"),
        (lambda: block_attention(**good, pattern=lists(1, 3, 40, 50, 32, 64)),
         ValueError, "pattern must have lists for [B, P] = [1 or 1, 1 or 2 or 4], got [1, 3]"),
        (lambda: block_attention(**good, pattern=lists(2, 1, 40, 50, 32, 64)),
         ValueError, "pattern must have lists for [B, P] = [1 or 1, 1 or 2 or 4], got [2, 1]"),
        (lambda: block_attention(**good, pattern=make(index=INDEX.to("meta"), count=COUNT.to("meta"))),
         ValueError, "pattern must be on the device of q, cpu, got meta"),
        (lambda: block_attention(**good, pattern=whole, backend="cuda"),
         ValueError, "backend must be one of auto, torch, triton, got 'cuda'"),
        (lambda: block_attention(**good, pattern=whole, return_lse=1), TypeError, "return_lse must be a bool, got int"),
        (lambda: block_attention(**good, pattern=whole, causal=0), TypeError, "causal must be a bool, got int"),
        (lambda: block_attention(**good, pattern=whole, scale=0.0),
         ValueError, "scale must be positive and finite, got 0.0"),
        (lambda: block_attention(**good, pattern=whole, kv_start=torch.tensor([-1])),
         ValueError, "kv_start must not be negative, got -1"),
        (lambda: streaming_prefill(**good, kv_end=torch.tensor([-1])),
         ValueError, "kv_end must not be negative, got -1"),
        (lambda: sinks_window_pattern(good["q"], good["k"], kv_end=torch.tensor([51])),
         ValueError, "kv_end must be at most N = 50, got 51"),
        (lambda: block_attention(**(good | dict(k=good["k"] * math.nan)), pattern=whole),
         ValueError, "the scores of q and k must be finite"),
        (lambda: streaming_prefill(**good, sinks=-1), ValueError, "sinks must be at least 0, got -1"),
        (lambda: streaming_prefill(**good, window=0), ValueError, "window must be at least 1, got 0"),
        (lambda: streaming_prefill(**good, window=0.5), TypeError, "window must be an int, got float"),
        (lambda: streaming_prefill(**good, kv_end=torch.tensor([0.5])),
         TypeError, "kv_end must be int32 or int64, got torch.float32"),
        (lambda: streaming_prefill(**(good | dict(q=good["q"][:, :3]))),
         ValueError, "q must have a multiple of the heads of k, 2, got 3"),
        (lambda: streaming_prefill(**(good | dict(k=good["k"][:, :, :30], v=good["v"][:, :, :30]))),
         ValueError, "q must not have more positions than k, 30, when causal, got 40"),
    ])
    def test_bad_input(call, error, message):
        with pytest.raises(error, match=re.escape(message)): call()

    @pytest.mark.skipif(not TRITON, reason="needs Triton")
    @pytest.mark.parametrize("dtype, repeats, error, message", [
        (FP64, 1, TypeError, "q must be float16, bfloat16 or float32 for backend='triton', got torch.float64"),
        (FP32, 1, ValueError, "q must be on a GPU, or TRITON_INTERPRET=1 be set before Python starts, got cpu"),
        (FP16, 40, ValueError, "q must have a head size of at most 256 for backend='triton', got 320")], ids=str)
    def test_what_has_no_kernel(dtype, repeats, error, message):
        x = [y.to(dtype).repeat(1, 1, 1, repeats) for y in good.values()]
        with pytest.raises(error, match=re.escape(message)): streaming_prefill(*x, backend="triton")
        with pytest.raises(error, match=re.escape(message)): block_attention(*x, whole, backend="triton")


# the kernels

COMMON = dict(dtype=(BF16, FP16, FP32), D=(64, 80, 96, 128, 256), R=(1, 3, 4), layout=tuple(LAYOUTS),
              ragged=(False, True))
LISTS = drawn(COMMON | dict(QB=SIZES, KB=SIZES, per=("1", "G", "H"), causal=(True, False), gaps=(False, True)))
STREAMING = drawn(COMMON | dict(sinks=(0, 4, 40), window=(1, 50, 200, 10**6)))
TOLERANCE = {BF16: 2**-8, FP16: 2**-11, FP32: 1e-5} if GPU else {BF16: 2**-7, FP16: 2**-10, FP32: 2e-6}


def cases(given):
    "All cases on a GPU; in the interpreter ten, among them every value."
    met, first, rest = set(), [], []
    for case in given:
        values = set(case.items())
        (rest if values <= met else first).append(case)
        met |= values
    assert len(first) <= 10
    some = (first + rest)[:10] if INTERPRETED else given
    return pytest.mark.parametrize("case", some, ids=lambda case: "-".join(str(x) for x in case.values()))


@kernel
@cases(LISTS)
def test_kernel_lists(case):
    B, G, Q, N = (2, 2, 300, 700) if GPU else (1 + case["ragged"], 2 if case["per"] == "1" else 1, 36, 70)
    kind = dict(layout=case["layout"], ragged=case["ragged"])
    (q, k, v), masks = problem(B, G, case["R"], Q, N, case["D"], case["dtype"], **kind)
    P = {"1": 1, "G": G, "H": G * case["R"]}[case["per"]]
    p = lists(B, P, Q, N, case["QB"], case["KB"], gaps=case["gaps"], share=0.6)
    keep = dict(causal=case["causal"], return_lse=True, **masks)
    got = poisoned(lambda: block_attention(q, k, v, p, backend="triton", **keep))
    want = block_attention(*(x.double() for x in (q, k, v)), p, backend="torch", **keep)
    check(got, want, TOLERANCE[case["dtype"]])
    assert got[0].dtype == q.dtype and got[1].dtype == FP32


@kernel
@cases(STREAMING)
def test_kernel_streaming(case):
    B, G, Q, N = (2, 2, 300, 700) if GPU else (1 + case["ragged"], 1, 36, 110)
    kind = dict(layout=case["layout"], ragged=case["ragged"])
    (q, k, v), masks = problem(B, G, case["R"], Q, N, case["D"], case["dtype"], **kind)
    keep = dict(sinks=case["sinks"], window=case["window"], return_lse=True, **masks)
    got = poisoned(lambda: streaming_prefill(q, k, v, backend="triton", **keep))
    check(got, streaming_prefill(*(x.double() for x in (q, k, v)), backend="torch", **keep), TOLERANCE[case["dtype"]])


@kernel
@pytest.mark.parametrize("Q, N, sinks, window", [
    (1, 1, 4, 8), (1, 65, 2, 64), (64, 64, 0, 64), (65, 65, 70, 3), (17, 200, 20, 130)])
def test_kernel_edges(Q, N, sinks, window):
    (q, k, v), _ = problem(1, 1, 2, Q, N, 16, BF16)
    wide = [x.double() for x in (q, k, v)]
    got = poisoned(lambda: streaming_prefill(q, k, v, sinks=sinks, window=window, return_lse=True, backend="triton"))
    check(got, streaming_prefill(*wide, sinks=sinks, window=window, return_lse=True, backend="torch"), TOLERANCE[BF16])
    p = sinks_window_pattern(q, k, sinks=sinks, window=window, query_block=32, key_block=32)
    got = poisoned(lambda: block_attention(q, k, v, p, return_lse=True, backend="triton"))
    check(got, block_attention(*wide, p, return_lse=True, backend="torch"), TOLERANCE[BF16])


@kernel
@pytest.mark.parametrize("by", ["lists", "streaming"])
def test_kernel_of_padding_alone(by):
    (q, k, v), masks = padded(FP32)
    p, keep = lists(1, 1, 40, 70, 32, 32, share=2.0), dict(return_lse=True, **masks)
    def run(backend, *x):
        if by == "lists": return block_attention(*x, p, backend=backend, **keep)
        return streaming_prefill(*x, sinks=3, window=30, backend=backend, **keep)
    got = poisoned(lambda: run("triton", q, k, v))
    assert check(got, run("torch", *(x.double() for x in (q, k, v))), TOLERANCE[FP32])[1:4].all()


@kernel
@pytest.mark.parametrize("causal", [True, False])
def test_kernel_of_blocks_that_begin_with_padding(causal):
    "No query stands in them, so that nothing but their padding is to be hidden."
    (q, k, v), _ = problem(3, 1, 1, 32, 128, 16, FP32)
    start = torch.tensor([0, 9, 63], device=DEVICE)
    for b, s in enumerate(start): k[b, :, :s] = v[b, :, :s] = math.nan
    p = lists(1, 1, 32, 128, 32, 32, share=2.0)
    got = poisoned(lambda: block_attention(q, k, v, p, causal=causal, kv_start=start, return_lse=True,
                                           backend="triton"))
    check(got, dense(q, k, v, pairs(p, 3, causal, kv_start=start)), TOLERANCE[FP32])


@kernel
def test_kernel_beside_a_gap():
    p, seen = gapped([31, 32, 33, 64, 65], 96)
    (q, k, v), _ = problem(len(seen), 1, 1, 32, 96, 16, FP32)
    got = block_attention(q, k, v, p, causal=False, return_lse=True, backend="triton")
    check(got, dense(q, k, v, seen), TOLERANCE[FP32])


@kernel
def test_kernel_of_empty_and_bad_lists():
    from sparse_nb.kernels.blocks import attend_blocks
    (q, k, v), _ = problem(1, 2, 1, 64, 96, 16, FP32)
    p = lists(1, 2, 64, 96, 32, 32, share=2.0)
    count = p.count.clone()
    count[0, 1, 0] = 0
    out, lse = attend_blocks(q, k, v, p.index, count, query_block=32, key_block=32, return_lse=True)
    assert not out[0, 1, :32].any() and (lse[0, 1, :32] == -math.inf).all()
    assert out[0, 1, 32:].any() and lse.isfinite().sum() == 96
    for number in (-1, 3, 2**31 - 1):
        index = p.index.clone()
        index[0, 0, 1, 2] = number
        bad = attend_blocks(q, k, v, index, p.count, query_block=32, key_block=32)[0].isnan()
        assert bad[0, 0, 32:].all() and int(bad.sum()) == 32 * 16
    for wrong in (-1, 4):
        assert attend_blocks(q, k, v, p.index, p.count * 0 + wrong, query_block=32, key_block=32)[0].isnan().all()


@kernel
def test_kernel_compiles_into_one_graph():
    (q, k, v), masks = problem(2, 1, 2, 40, 70, 16, BF16, ragged=True)
    p = lists(2, 1, 40, 70, 32, 32)
    def step(q, k, v, start, stop):
        keep = dict(kv_start=start, kv_end=stop, return_lse=True, backend="triton")
        return *block_attention(q, k, v, p, **keep), *streaming_prefill(q, k, v, sinks=2, window=9, **keep)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "eager")
    for a, b in zip(compiled(q, k, v, *masks.values()), step(q, k, v, *masks.values())): assert torch.equal(a, b)


@kernel
def test_kernel_operators():
    (q, k, v), _ = problem(1, 1, 2, 32, 40, 16, FP32)
    p = lists(1, 1, 32, 40, 32, 32)
    ops = torch.ops.sparse_nb
    for op, more in ((ops.attend_blocks, (p.index, p.count, None, 32, 32, True, None, None, None, True)),
                     (ops.attend_streaming, (2, 8, None, None, None, False))):
        torch.library.opcheck(op, (q, k, v, *more), test_utils=("test_schema", "test_faketensor"))


if GPU:
    @pytest.mark.gpu
    @pytest.mark.parametrize("by", ["blocks", "streaming"])
    def test_graph_without_a_wait(by):
        (q, k, v), masks = problem(2, 2, 4, 1000, 2000, 128, BF16)
        masks = dict(kv_start=torch.tensor([0, 7], device=DEVICE), kv_end=torch.tensor([2000, 1990], device=DEVICE))
        mask = torch.rand(2, 2, 8, 16, device=DEVICE)
        def call():
            if by == "streaming": return streaming_prefill(q, k, v, sinks=4, window=300, **masks)
            p = BlockPattern.from_mask(mask < 0.5, queries=1000, keys=2000, query_block=128, key_block=128)
            return block_attention(q, k, v, p, **masks)
        call()
        torch.cuda.set_sync_debug_mode("error")
        try: call()
        finally: torch.cuda.set_sync_debug_mode("default")
        from sparse_nb.bench import captured
        replay, out = captured(call)
        masks["kv_start"] += 300
        mask.copy_(mask.flip(-1))
        replay()
        assert torch.equal(out, call())

    @pytest.mark.gpu
    @pytest.mark.parametrize("n", [16384, 40000])
    def test_long(n):
        (q, k, v), _ = problem(1, 2, 4, n, n, 128, BF16)
        rows = torch.randint(n, (64,), device=DEVICE)
        i = torch.arange(n, device=DEVICE)
        p = lists(1, 2, n, n, 128, 64, share=0.1)
        near = ((i < 4) | (i > rows[:, None] - 2048)).expand(1, 2, -1, -1)
        listed = p.mask()[:, :, rows // 128].repeat_interleave(64, -1)[..., :n]
        for out, seen in ((streaming_prefill(q, k, v, sinks=4, window=2048), near),
                          (block_attention(q, k, v, p), listed)):
            assert_close(out[:, :, rows], dense(q[:, :, rows], k, v, seen & (i <= rows[:, None]))[0], rtol=2**-8)


if not INTERPRETED:
    def usage(kernel_, capability, kind, D, engine, extra, frozen=False):
        "Registers, spills and shared memory of a kernel with the shipped tiles."
        triton = pytest.importorskip("triton")
        from sparse_nb.kernels import blocks
        from sparse_nb.kernels.common import compiled_usage
        BD, listed = triton.next_power_of_2(D), kernel_ == "lists"
        BM, BN, warps, stages, registers = blocks.tile_settings(BD, 4 if kind == "fp32" else 2, engine, listed)
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), kind)
        types |= dict.fromkeys(("slot_ptr", "found_ptr", "gap_ptr", "note_ptr"), "i32")
        types |= dict.fromkeys(("order_ptr", "start_ptr", "len_ptr"), "i64")
        types |= dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{kind}[1, 1, {BN}, {BD}]>")
        known = dict(CAUSAL=True, QB=128, KB=128, FROZEN=frozen, BS=16, D=D, BM=BM, BN=BN, BD=BD, STAGES=stages)
        if not engine: known |= dict.fromkeys(("k_desc", "v_desc"))
        if not extra: known |= dict.fromkeys(("gap_ptr", "start_ptr", "len_ptr", "lse_ptr"))
        fn = blocks._block_kernel if listed else blocks._streaming_kernel
        return compiled_usage(fn, known, types, capability, warps, registers)

    @pytest.mark.kernels
    @pytest.mark.parametrize("kernel_", ["lists", "streaming"])
    @pytest.mark.parametrize("capability, engine, kind, D", [
        (80, False, "bf16", 128), (90, False, "bf16", 128), (90, True, "bf16", 128), (90, True, "fp16", 80)])
    def test_registers_and_spills(kernel_, capability, engine, kind, D):
        launches = (True, False) if kernel_ == "lists" and kind != "fp16" else (False,)
        for frozen in launches:
            used = usage(kernel_, capability, kind, D, engine, extra=D == 128, frozen=frozen)
            # held to 128 registers, so that two programs share a multiprocessor, lists keep some addresses in memory
            allowed = 152 if engine and kernel_ == "lists" else 16 if kernel_ == "lists" else 0
            most = (114 if engine else 99) * 1024
            assert used["spills"] <= allowed and used["registers"] <= 255 and used["shared"] <= most, (frozen, used)

    @pytest.mark.kernels
    @pytest.mark.budget(40)
    @pytest.mark.parametrize("shard", range(4))
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_in_the_interpreter(forked_pytest, shard):
        pytest.importorskip("triton")
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "test_kernel", "--shard",
                                   f"{shard}/4", __file__, TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d passed", said), said[-4000:]
