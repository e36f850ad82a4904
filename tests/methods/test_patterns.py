"""Methods that choose blocks of a prompt: attacks first, then each choice against an enumeration of all pairs, then
what every one of them owes a caller, alone and inside a model."""
import json
import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM

import sparse_nb
from sparse_nb.core.blocks import block_attention, sinks_window_pattern
from sparse_nb.core.exact import assert_close, attention, attention_weights
from sparse_nb.core.streams import fold_in
from sparse_nb.hf import capture, sparsify
from sparse_nb.methods.block_chooser import block_sums
from sparse_nb.methods.block_controls import OracleBlocks, RandomBlocks, with_counts_of
from sparse_nb.methods.block_reads import mass_read, pairs_read
from sparse_nb.methods.flex_prefill import FlexPrefill, js_distance
from sparse_nb.methods.hip import HiP
from sparse_nb.methods.vertical_slash import LAST, VerticalSlash, save_choices, search_choices
from sparse_nb.methods.xattention import XAttention
from sparse_nb.tasks import make

SMALL = dict(block=32)
LINES = dict(vertical=20, slash=30, sinks=4, window=8, **SMALL)
TREE = dict(stages=((32, 96), (8, 48), (2, 12)), sinks=6, window=20, **SMALL)
LEAKY = [VerticalSlash(**LINES), VerticalSlash(rounding="pool", **LINES), VerticalSlash(rounding="none", **LINES),
         FlexPrefill(0.6, 0.1, 32, **SMALL), FlexPrefill(0.6, 1.0, 32, **SMALL)]
CAUSAL = [HiP(**TREE), HiP(shared="group", **TREE), HiP(shared="head", rounding="none", **TREE),
          HiP(shared="group", rounding="none", **TREE),
          HiP(stages=((32, 64),), sinks=0, window=1, shared="head", block=64),
          OracleBlocks(0.3, **SMALL), RandomBlocks(0.3, **SMALL), XAttention(0.5, stride=8, **SMALL),
          XAttention(density=0.4, stride=4, block=64)]
METHODS = LEAKY + CAUSAL
ROWS = [m for m in METHODS if getattr(m, "rounding", "") == "none"]
BLOCKS = [m for m in METHODS if m not in ROWS]
EVERYTHING = [VerticalSlash(), VerticalSlash(vertical=0, slash=300), VerticalSlash(vertical=300, slash=0),
              VerticalSlash(rounding="pool"), VerticalSlash(rounding="none"), FlexPrefill(), FlexPrefill(tau=1.0),
              HiP(), HiP(rounding="none", sinks=0, window=1), HiP(stages=((256, 512),), sinks=0, window=1),
              OracleBlocks(1.0), RandomBlocks(1.0), XAttention(density=1.0)]


def problem(B=2, G=2, R=2, Q=150, N=230, D=16, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return 2 * new(B, G * R, Q, D), new(B, G, N, D), new(B, G, N, D)


def seeds(q, seed=3): return fold_in(seed, torch.arange(q.shape[0])[:, None], torch.arange(q.shape[1]))


def weights_of(q, k): return attention_weights(q, k, causal=True)[0]  # [H, Q, N]


def chosen_keys(mask, p):
    "The keys that a pattern's mask [H, Mq, Mk] lists, for each query [H, Q, N], the causal ones alone."
    seen = mask.repeat_interleave(p.query_block, 1)[:, :p.queries].repeat_interleave(p.key_block, 2)[..., :p.keys]
    place = torch.arange(p.keys - p.queries, p.keys)
    return seen & (torch.arange(p.keys) <= place[:, None])


def top(mass, count, forced=()):
    "The `count` numbers of largest mass in a list, the forced ones first, the earlier of equal ones."
    order = sorted(range(len(mass)), key=lambda i: (i not in forced, -float(mass[i]), i))
    return set(order[:int(count)])


# attacks

@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_hidden_keys_have_no_say(method):
    "Padding holds NaN and huge keys; each sequence is what it is alone."
    q, k, v = problem(B=4, Q=230)
    start = torch.tensor([0, 70, 200, 229])
    for b, s in enumerate(start): k[b, :, :s] = v[b, :, :s] = math.nan
    k[1, :, :70] = 1e30
    out = method.prefill(q, k, v, seed=3, kv_start=start)
    for b, s in enumerate(start.tolist()):
        alone = method.prefill(q[b:b + 1, :, s:], k[b:b + 1, :, s:], v[b:b + 1, :, s:], seed=seeds(q)[b:b + 1])
        assert_close(out[b:b + 1, :, s:], alone, 1e-12)
        assert not out[b, :, :s].any()


@pytest.mark.parametrize("method", BLOCKS, ids=repr)
def test_a_pattern_knows_where_sequences_begin(method):
    q, k, _ = problem(Q=192, N=256)
    k[1, :, :128] = math.nan
    found = method.pattern(q, k, seed=seeds(q), kv_start=torch.tensor([0, 128])).mask()
    alone = method.pattern(q[1:, :, 64:], k[1:, :, 128:], seed=seeds(q)[1:]).mask()
    first = method.pattern(q[:1], k[:1], seed=seeds(q)[:1]).mask()
    assert torch.equal(found[0], first[0]) and not found[1, :, :64 // method.block].any()
    rows, keys = 64 // method.block, 128 // method.block
    assert not found[1, :, :, :keys].any()
    if not method.random: assert torch.equal(found[1, :, rows:, keys:], alone[0])


@pytest.mark.parametrize("block", [32, 64, 128])
def test_sequences_that_begin_inside_a_block(block):
    "A block is read where some query of the block of queries sees some key of it."
    q, k, _ = problem(B=5, G=1, R=1, Q=150, N=230, D=4)
    start = torch.tensor([0, 1, 70, 95, 229])
    found = OracleBlocks(1.0, block).pattern(q, k, kv_start=start).mask()
    for b, s in enumerate(start.tolist()):
        want = torch.zeros_like(found[b, 0])
        for i in range(max(80, s), 230): want[(i - 80) // block, torch.arange(s, i + 1) // block] = True
        assert torch.equal(found[b, 0], want), s


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_sequence_that_is_padding_alone(method):
    q, k, v = problem(B=3, Q=20, N=70)
    start = torch.tensor([0, 70, 200])
    for b in (1, 2): k[b] = v[b] = math.nan
    out = method.prefill(q, k, v, seed=0, kv_start=start)
    assert not out[1:].any() and out[0].isfinite().all() and out[0].any()


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("Q, N", [(1, 1), (1, 230), (31, 31), (33, 200), (230, 230)])
def test_odd_sizes(method, Q, N):
    q, k, v = problem(Q=Q, N=N)
    out = method.prefill(q, k, v, seed=0)
    own = weights_of(q[:1], k[:1])[:, 0, N - Q]
    assert out.isfinite().all() and out.shape == q.shape and out.any(-1).all() and own.all()
    if N == 1: assert_close(out, attention(q, k, v), 1e-12)


@pytest.mark.parametrize("method", EVERYTHING, ids=repr)
def test_a_budget_of_everything_is_exact(method):
    for Q, start in ((300, torch.tensor([0, 90])), (120, None), (1, None)):
        q, k, v = problem(Q=Q, N=300)
        first = 0 if start is None else 90
        out = method.prefill(q, k, v, seed=0, kv_start=start)[:, :, first:]
        assert_close(out, attention(q[:, :, first:], k, v, causal=True, kv_start=start), 1e-12)


@pytest.mark.parametrize("method", CAUSAL, ids=repr)
def test_a_block_does_not_know_later_blocks(method):
    q, k, v = problem(B=1, Q=256, N=256)
    for border in (64, 192):
        others = [x.clone() for x in (q, k, v)]
        for x in others: x[:, :, border:] = 5 * x[:, :, border:].flip(2)
        got, want = (method.prefill(*x, seed=3)[:, :, :border] for x in (others, (q, k, v)))
        assert torch.equal(got, want)


SPARSE = dict(vertical=4, slash=6, sinks=1, window=2, **SMALL)
KNOWING = [VerticalSlash(**SPARSE), VerticalSlash(**SPARSE | dict(vertical=96, slash=96, rounding="pool")), *LEAKY[2:]]


@pytest.mark.parametrize("method", KNOWING + [OracleBlocks(0.2, **SMALL), HiP(**TREE)], ids=repr)
def test_what_a_choice_knows_of_later_queries(method):
    "Vertical-slash and FlexPrefill choose by the last queries of all; the others by those of the block."
    q, k, v = problem(B=1, R=1, Q=256, N=256)
    leaks = lambda border: bool((changed(border) - whole)[:, :, :border].any())
    whole = method.prefill(q, k, v)

    def changed(border):
        others = q.clone()
        others[:, :, border:] = 5 * k[:, :, :256 - border]                  # they look at the first keys
        return method.prefill(others, k, v)
    if method in KNOWING: assert leaks(192)
    else: assert not leaks(192) and any(leaks(border) for border in (200, 210, 220, 230))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_equal_scores_are_no_trouble(method):
    q, k, v = (torch.zeros_like(x) for x in problem(Q=100, N=100))
    v = v + torch.arange(100.0)[:, None]
    out, again = (method.prefill(q, k, v, seed=1) for _ in range(2))
    assert torch.equal(out, again) and out.isfinite().all()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_scores_that_are_no_numbers(method):
    q, k, v = problem(Q=100, N=100)
    for x in (q, k):
        spoilt = x.clone()
        spoilt[0, 0, 90] = math.nan
        with pytest.raises(ValueError, match="scores of q and k must be finite"):
            method.prefill(spoilt if x is q else q, spoilt if x is k else k, v)


# each choice against an enumeration

@pytest.mark.parametrize("Q, N", [(150, 230), (9, 90), (96, 96)])
def test_lines_by_enumeration(Q, N):
    q, k, v = problem(B=1, Q=Q, N=N)
    method, weights = VerticalSlash(rounding="none", **LINES), weights_of(q, k)
    want = torch.zeros_like(weights, dtype=torch.bool)
    for h, w in enumerate(weights):
        last = range(max(0, Q - LAST), Q)
        columns = [sum(w[r, i] for r in last) for i in range(N)]
        diagonals = [sum(w[r, N - Q + r - d] for r in last if N - Q + r >= d) for d in range(N)]
        v_lines = top(columns, method.vertical, range(method.sinks))
        s_lines = top(diagonals, method.slash, range(method.window))
        for r in range(Q):
            for i in range(N - Q + r + 1): want[h, r, i] = i in v_lines or N - Q + r - i in s_lines
    assert torch.equal(method.rows(q, k)[0], want)
    exact = (weights * want / (weights * want).sum(-1, keepdim=True)) @ v[0].repeat_interleave(2, 0)
    assert_close(method.prefill(q, k, v)[0], exact, 1e-12)
    p = VerticalSlash(**LINES).pattern(q, k)
    place = N - Q + torch.arange(Q)
    blocks = torch.zeros_like(p.mask()[0])
    for h, r, i in want.nonzero().tolist(): blocks[h, r // 32, i // 32] = True
    assert torch.equal(p.mask()[0], blocks) and place[-1] == N - 1


def test_pooled_lines_by_enumeration():
    q, k, _ = problem(B=1, Q=160, N=224)
    method, weights = VerticalSlash(rounding="pool", **LINES | dict(vertical=60, slash=70)), weights_of(q, k)
    want = torch.zeros(4, 5, 7, dtype=torch.bool)
    for h, w in enumerate(weights):
        last = range(160 - LAST, 160)
        columns, diagonals = [0.0] * 7, [0.0] * 7
        for r in last:
            for i in range(64 + r + 1):
                columns[i // 32] += float(w[r, i])
                diagonals[(64 + r - i) // 32] += float(w[r, i])
        v_blocks, s_blocks = top(columns, 2, [0]), top(diagonals, 3, [0])
        for m in range(5):
            for j in range(2 + m + 1): want[h, m, j] = j in v_blocks or 2 + m - j in s_blocks
    assert torch.equal(method.pattern(q, k).mask()[0], want)


@pytest.mark.parametrize("gamma, tau", [(0.6, 0.0), (0.9, 0.0), (0.6, 1.0), (0.9, 1.0), (0.8, 0.08)])
def test_flex_prefill_by_enumeration(gamma, tau):
    q, k, _ = problem(B=1, Q=160, N=224)
    q[:, 0] /= 20                                                           # a head whose pooled scores are good
    method, weights, size = FlexPrefill(gamma, tau, 40, **SMALL), weights_of(q, k), 32
    found, kinds = method.pattern(q, k).mask()[0], []

    def count_for(mass):
        total = 0.0
        for n, x in enumerate(sorted(mass, reverse=True), 1):
            total += x
            if total >= gamma: return n
        return len(mass)

    for h, w in enumerate(weights):
        columns, diagonals = [0.0] * 224, [0.0] * 224
        for r in range(160 - size, 160):
            for i in range(64 + r + 1):
                columns[i] += float(w[r, i]) / size
                diagonals[64 + r - i] += float(w[r, i]) / size
        pool = lambda x: [sum(x[j * size:(j + 1) * size]) for j in range(7)]
        means = k[0, h // 2].unflatten(0, (7, size)).mean(1)
        q_means = q[0, h].unflatten(0, (5, size)).mean(1)
        estimate, true = (q_means[-1] @ means.T / 4).softmax(-1), torch.tensor(pool(columns), dtype=torch.float64)
        middle = (estimate + true) / 2
        distance = (((estimate * (estimate / middle).log()).sum() + (true * (true / middle).log()).sum()) / 2).sqrt()
        aware = bool(distance < tau)
        kinds.append(aware)
        counts = [2 if aware else max(2, count_for(x) // size + 1) for x in (columns, diagonals)]
        v_blocks, s_blocks = top(pool(columns), counts[0], [0]), top(pool(diagonals), counts[1], [0])
        want = torch.tensor([[j <= m + 2 and (j in v_blocks or m + 2 - j in s_blocks) for j in range(7)]
                             for m in range(5)])
        if aware:
            scores = {(m, j): q_means[m] @ means[j] / 4 for m in range(5) for j in range(m + 3)}
            share = {(m, j): float(torch.stack([scores[m, i] for i in range(m + 3)]).softmax(0)[j])
                     for m, j in scores}
            total = 0.0
            for m, j in sorted(share, key=lambda x: -share[x]):
                if total >= 5 * gamma: break
                want[m, j] = True
                total += share[m, j]
        assert torch.equal(found[h], want), h
    assert kinds == [tau > 0] * 4 if tau != 0.08 else set(kinds) == {True, False}


@pytest.mark.parametrize("shared", ["all", "group", "head"])
def test_hip_by_enumeration(shared):
    Q, N, size = 128, 221, 32
    q, k, _ = problem(B=1, Q=Q, N=N)
    method = HiP(**TREE | dict(shared=shared, rounding="none"))
    found = method.rows(q, k)[0]
    heads = dict(all=[range(4)], group=[range(2), range(2, 4)], head=[[h] for h in range(4)])[shared]
    for at, together in enumerate(heads):
        for m in range(Q // size):
            first, base = N - Q + m * size, method.sinks
            end = max(base, first - method.window + 1)

            def best(h, i, m=m): return float((q[0, h, m * size:(m + 1) * size] @ k[0, h // 2, i]).max())

            def speaks(h, low, high):
                while high - low > 1:
                    half = (low + high + 1) // 2
                    left, right = (low + half - 1) // 2, (half + high - 1) // 2
                    low, high = (half, high) if best(h, right) > best(h, left) else (low, half)
                return best(h, low)
            parts = [(base, end)] if base < end else []
            for chunk, keep in method.stages:
                parts = [(i, min(i + chunk, high)) for low, high in parts for i in range(low, high, chunk)]
                score = {part: max(speaks(h, *part) for h in together) for part in parts}
                parts = sorted(parts, key=lambda x: -score[x])[:keep // chunk]
            keys = {i for low, high in parts for i in range(low, high)} | set(range(base)) | set(range(end, N))
            for r in range(size):
                want = [i in keys and i <= first + r for i in range(N)]
                assert found[at, m * size + r].tolist() == want
    p = HiP(**TREE | dict(shared=shared)).pattern(q, k)
    cover = torch.zeros_like(p.mask()[0])
    for h, r, i in found.nonzero().tolist(): cover[h, r // 32, i // 32] = True
    assert torch.equal(p.mask()[0], cover)


def test_oracle_by_enumeration():
    q, k, _ = problem(B=1, Q=150, N=230)
    weights = weights_of(q, k)
    found = OracleBlocks(0.4, **SMALL).pattern(q, k).mask()[0]
    for h in range(4):
        for m in range(5):
            rows = range(m * 32, min(150, m * 32 + 32))
            last = 80 + rows[-1]
            own = {(80 + r) // 32 for r in rows}
            mass = [float(weights[h, rows, j * 32:(j + 1) * 32].sum()) for j in range(last // 32 + 1)]
            want = top(mass, max(len(own), math.ceil(0.4 * len(mass))), own)
            assert {j for j in range(8) if found[h, m, j]} == want


@pytest.mark.parametrize("Q, N", [(160, 224), (150, 230)])
@pytest.mark.parametrize("density", [None, 0.4])
def test_xattention_by_enumeration(Q, N, density):
    q, k, _ = problem(B=1, Q=Q, N=N)
    method, S, first = XAttention(0.6, density, 8, **SMALL), 8, N - Q
    found = method.pattern(q, k).mask()[0]
    take = lambda x, i: x[i] if i < len(x) else torch.zeros(16).double()
    for h in range(4):
        share = {}
        for a in range(-(-Q // S)):
            ends = min(first + a * S + S, N)
            sums = [sum(take(q[0, h], a * S + S - 1 - i) @ take(k[0, h // 2], b * S + i) for i in range(S)) / S / 4
                    for b in range(N) if b * S < ends]
            for b, p in enumerate(torch.stack(sums).softmax(0)):
                share[a // 4, b // 4] = share.get((a // 4, b // 4), 0) + float(p)
        for m in range(5):
            rows = range(first + m * 32, min(N, first + m * 32 + 32))
            own = {r // 32 for r in rows} | {0}
            mass = [share[m, j] for j in range(rows[-1] // 32 + 1)]
            if density: want = top(mass, max(len(own), math.ceil(density * len(mass))), own)
            else:
                want, total = set(own), sum(mass[j] for j in own)
                for j in sorted(set(range(len(mass))) - own, key=lambda j: -mass[j]):
                    if total >= 0.6 * sum(mass): break
                    want.add(j)
                    total += mass[j]
            assert {j for j in range(found.shape[-1]) if found[h, m, j]} == want


def test_oracle_reads_the_most():
    q, k, _ = problem(B=1, Q=256, N=256)
    of_blocks = lambda method, seed=0: mass_read(method, q, k, seed=seed).unflatten(2, (-1, 32)).sum(-1)
    best = of_blocks(OracleBlocks(0.4, **SMALL))
    for seed in range(3):
        drawn = of_blocks(RandomBlocks(0.4, **SMALL), seed)
        assert (drawn <= best + 1e-9).all() and drawn.sum() < 0.97 * best.sum()


def test_every_block_is_drawn_equally_often():
    "Chi-squared test, false alarms once in a million."
    x = torch.zeros(40, 25, 640, 1)
    found = RandomBlocks(0.3).pattern(x, x[:, :1], seed=5).mask()[:, :, -1]  # 10 blocks, 3 with its own
    assert (found.sum(-1) == 3).all() and found[..., -1].all()
    counts, share = found[..., :-1].sum((0, 1)).double(), 2 / 9
    statistic = ((counts - 1000 * share)**2).sum() / (1000 * share * (1 - share)) * 8 / 9
    assert statistic < chi2.isf(1e-6, 8) and counts.min() > 0


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_mass_read_is_the_sum_of_weights(method):
    q, k, _ = problem(B=1)
    weights = weights_of(q, k)
    if method in ROWS: seen = method.rows(q, k)[0]
    else: seen = chosen_keys((p := method.pattern(q, k, seed=1)).mask()[0], p)
    seen = seen.repeat_interleave(4 // len(seen), 0)
    assert_close(mass_read(method, q, k, seed=1)[0], (weights * seen).sum(-1), 1e-10)
    assert_close(pairs_read(method, q, k, seed=1)[0], seen.sum((1, 2)).double(), 1e-10)


@pytest.mark.parametrize("Q, sinks, window", [(70, 0, 9), (70, 5, 33), (70, 40, 40), (23, 3, 16), (1, 8, 8)])
def test_pairs_of_a_pattern_with_a_gap(Q, sinks, window):
    q, k, _ = problem(B=2)
    q, own = q[:, :, -Q:], dict(sinks=sinks, window=window)
    pattern = sinks_window_pattern(q, k, query_block=64, key_block=32, **own)
    row = torch.arange(k.shape[2])[-Q:, None]
    seen = (torch.arange(k.shape[2]) <= row) & ((torch.arange(k.shape[2]) < sinks)
                                                | (torch.arange(k.shape[2]) > row - window))
    assert torch.equal(pairs_read(pattern, q, k), seen.sum().double().expand(q.shape[:2]))
    with pytest.raises(ValueError, match="pattern must be for Q, N = "): pairs_read(pattern, q, k[:, :, 1:])
    with pytest.raises(ValueError, match="pattern must have lists"):
        twice = {x: torch.cat([getattr(pattern, x)] * 2) for x in ("index", "count", "gap")}
        pairs_read(replace(pattern, **twice), q, k)


def test_js_distance():
    a, b = torch.tensor([1.0, 0, 0]), torch.tensor([0, 0.5, 0.5])
    assert js_distance(a, a) == 0 and abs(js_distance(a, b) - math.sqrt(math.log(2))) < 1e-6
    p, r = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    middle = (p + r) / 2
    want = ((p * (p / middle).log()).sum() / 2 + (r * (r / middle).log()).sum() / 2).sqrt()
    assert abs(js_distance(p, r) - want) < 1e-6


# what a caller is owed

@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_prefill_is_attention_over_the_pattern(method):
    q, k, v = problem()
    if method in ROWS: pytest.skip("reads rows")
    want = block_attention(q, k, v, method.pattern(q, k, seed=seeds(q), scale=0.3), scale=0.3)
    assert_close(method.prefill(q, k, v, seed=3, scale=0.3), want, 1e-12)
    assert not torch.equal(method.prefill(q, k, v, seed=3), want)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_chunks(method):
    "Chunks of whole blocks; what chooses by the last queries of a prompt agrees in the last chunk."
    q, k, v = problem(Q=256, N=256)
    whole = method.prefill(q, k, v, seed=3)
    parts = [method.prefill(q[:, :, a:b], k[:, :, :b], v[:, :, :b], seed=3)
             for a, b in ((0, 64), (64, 192), (192, 256))]
    if method in CAUSAL: assert_close(torch.cat(parts, 2), whole, 1e-12)
    elif isinstance(method, VerticalSlash): assert_close(parts[2], whole[:, :, 192:], 1e-12)
    else: assert_close(parts[2], method.prefill(q[:, :, 192:], k, v), 1e-12)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_numbers_of_less_precision(method):
    q, k, v = problem(B=1)
    for dtype in (torch.bfloat16, torch.float32):
        x = [y.to(dtype) for y in (q, k, v)]
        out = method.prefill(*x, seed=1)
        with torch.autocast("cpu", dtype=torch.bfloat16): again = method.prefill(*x, seed=1)
        assert out.dtype == dtype and torch.equal(out, again)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_seeds(method):
    q, k, v = problem(B=1)
    out = [method.prefill(q, k, v, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2]) != method.random
    torch.manual_seed(0)
    assert torch.equal(*(method.prefill(q, k, v) for _ in range(2))) != method.random
    with pytest.raises(ValueError, match="seed must lie in"): method.prefill(q, k, v, seed=-1)


@pytest.mark.parametrize("make_method, said", [
    (lambda: VerticalSlash(vertical=-1), "vertical must be at least 0, got -1"),
    (lambda: VerticalSlash(slash=0.5), "slash must be an int, got float"),
    (lambda: VerticalSlash(sinks=True), "sinks must be an int, got bool"),
    (lambda: VerticalSlash(window=0), "window must be at least 1, got 0"),
    (lambda: VerticalSlash(rounding="up"), "rounding must be one of cover, pool, none, got 'up'"),
    (lambda: VerticalSlash(choices=3), "choices must be a str or None, got int"),
    (lambda: VerticalSlash(layer=-1), "layer must be at least 0, got -1"),
    (lambda: VerticalSlash(block=48), "block must be 32, 64 or 128, got 48"),
    (lambda: FlexPrefill(gamma=1.0), r"gamma must lie in \(0, 1\), got 1.0"),
    (lambda: FlexPrefill(tau=-0.1), r"tau must lie in \[0, 1\], got -0.1"),
    (lambda: FlexPrefill(tau="0"), "tau must be a number, got str"),
    (lambda: FlexPrefill(min_keys=-1), "min_keys must be at least 0, got -1"),
    (lambda: FlexPrefill(block=256), "block must be 32, 64 or 128, got 256"),
    (lambda: HiP(stages=()), r"stages must be pairs \(keys of a chunk, keys that are kept\), got \(\)"),
    (lambda: HiP(stages=(64, 128)), "stages must be pairs"),
    (lambda: HiP(stages=((64, 0),)), "stages, keys that are kept, must be at least 1, got 0"),
    (lambda: HiP(stages=((64, 128), (48, 96))), "stages must have chunks that divide those before them, got 48"),
    (lambda: HiP(sinks=-1), "sinks must be at least 0, got -1"),
    (lambda: HiP(window=0), "window must be at least 1, got 0"),
    (lambda: HiP(shared="some"), "shared must be one of all, group, head, got 'some'"),
    (lambda: HiP(rounding="pool"), "rounding must be one of cover, none, got 'pool'"),
    (lambda: HiP(block="64"), "block must be an int, got str"),
    (lambda: OracleBlocks(0), r"density must lie in \(0, 1\], got 0"),
    (lambda: RandomBlocks(1.5), r"density must lie in \(0, 1\], got 1.5"),
    (lambda: RandomBlocks("all"), "density must be a number, got str")])
def test_settings_that_cannot_work(make_method, said):
    with pytest.raises((TypeError, ValueError), match=said): make_method()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_bad_tensors(method):
    q, k, v = problem(B=1)
    for said, call in {
        "q must be a torch.Tensor": lambda: method.prefill(1, k, v),
        "v must have the shape of k": lambda: method.prefill(q, k, v[:, :, 1:]),
        "q must not have more positions than k": lambda: method.prefill(q, k[:, :, :9], v[:, :, :9]),
        "scale must be positive": lambda: method.prefill(q, k, v, scale=0),
        "kv_start must have shape": lambda: method.prefill(q, k, v, kv_start=torch.tensor([0, 0])),
        "kv_start must not be negative": lambda: method.prefill(q, k, v, kv_start=torch.tensor([-1]))}.items():
        with pytest.raises((TypeError, ValueError), match=said): call()


@pytest.mark.parametrize("method", ROWS, ids=repr)
def test_rows_are_no_blocks(method):
    q, k, _ = problem()
    with pytest.raises(ValueError, match="rounding must give blocks where a pattern is wanted, got 'none'"):
        method.pattern(q, k)


# a search, and the file of its choices

def test_the_search_finds_what_a_head_does():
    "One head looks at a few keys, the other at a few distances."
    g = torch.Generator().manual_seed(0)
    N, D = 192, 64
    k = torch.randn(1, 2, N, D, generator=g, dtype=torch.float64)
    q = torch.empty(1, 2, N, D, dtype=torch.float64)
    q[0, 0] = 3 * k[0, 0, [5, 41, 77, 101]].sum(0)
    q[0, 1] = 3 * k[0, 1].roll(33, 0)
    candidates = [(24, 4), (4, 24), (14, 14)]
    method = VerticalSlash(sinks=1, window=1, rounding="none")
    found = search_choices([(0, q, k), (4, q.flip(1), k.flip(1))], candidates, method)
    assert found == {0: [(24, 4, 1, 1), (4, 24, 1, 1)], 4: [(4, 24, 1, 1), (24, 4, 1, 1)]}
    a_shape = search_choices([(0, q, k)], [(24, 4), (20, 8, 20, 8)], method)
    assert a_shape[0][0] == (24, 4, 1, 1)
    for rounding in ("none", "pool"):                                       # all is the most, unless it has its price
        found = [search_choices([(0, q, k)], [(24, 4), (192, 192)], replace(method, rounding=rounding), price=price)[0]
                 for price in (0, 1.0)]
        assert found[0] == [(192, 192, 1, 1)] * 2 and (found[1][0] == (24, 4, 1, 1) or rounding == "pool")


def llama(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2)).eval()


@torch.no_grad()
def test_choices_are_of_a_model(tmp_path):
    model, path = llama(), tmp_path / "choices.json"
    rows = {0: [(3, 20, 2, 4)] * 4, 1: [(40, 4, 2, 4), (3, 20, 2, 4), (0, 30, 0, 30), (5, 5, 5, 5)]}
    save_choices(rows, path, model)
    method, ids = VerticalSlash(choices=str(path), rounding="none"), torch.arange(60)[None]
    q, k, v = problem(B=1, Q=60, N=60)
    with sparsify(model, prefill=method): got = model(ids).logits
    with sparsify(model, prefill={i: VerticalSlash(choices=str(path), layer=i, rounding="none") for i in rows}):
        assert torch.equal(model(ids).logits, got)
    assert not torch.equal(model(ids).logits, got)
    for h, row in enumerate(rows[1]):                                       # each head by its own row
        alone = VerticalSlash(*row[:2], sinks=row[2], window=row[3], rounding="none").rows(q, k)[0, h]
        assert torch.equal(method.at_layer(1).rows(q, k)[0, h], alone)
    with pytest.raises(ValueError, match="model must have the weights that .* was searched on"):
        sparsify(llama(1), prefill=method)
    with pytest.raises(ValueError, match="outside of a session, got None"): method.prefill(q, k, v)
    with pytest.raises(ValueError, match=r"layer must be one of those in .*, \[0, 1\], got 7"):
        method.at_layer(7).prefill(q, k, v)
    with pytest.raises(ValueError, match="choices must be of 2 heads, got 4"):
        method.at_layer(0).prefill(q[:, :2], k[:, :1], v[:, :1])
    assert method.at_layer(1).at_layer(0).layer == 1 and VerticalSlash().at_layer(3).layer is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "x", "layers": {"a": []}}', '{"model": "x", "layers": []}',
                                  '{"model": "x", "layers": {"0": [[1, 2, 3]]}}',
                                  '{"model": "x", "layers": {"0": [[1, 2, 3, 0]]}}',
                                  '{"model": "x", "layers": {"0": [[1, 2, -3, 4]]}}',
                                  '{"model": "x", "layers": {"0": [[1, 2, 3, 4.0]]}}',
                                  '{"layers": {"0": [[1, 2, 3, 4]]}}'])
def test_files_that_hold_no_choices(tmp_path, text):
    path = tmp_path / "choices.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="choices must be a file of `save_choices`, got"):
        VerticalSlash(choices=str(path)).check_model(llama())
    with pytest.raises(ValueError, match="choices must be a file of `save_choices`, got"):
        VerticalSlash(choices=str(tmp_path / "none.json")).check_model(llama())


def test_choices_are_written_as_json(tmp_path):
    save_choices({0: [(3, 20, 2, 4)]}, tmp_path / "x.json", llama())
    held = json.loads((tmp_path / "x.json").read_text())
    assert held["layers"] == {"0": [[3, 20, 2, 4]]} and len(held["model"]) == 64


# inside a model

def test_a_pattern_cannot_decode(pocket):
    model, _ = pocket
    for method in METHODS:
        with pytest.raises(ValueError, match=f"decode must be a method that can decode, got {type(method).__name__}"):
            sparsify(model, decode=method)


def test_everything_read_is_the_model_itself(pocket):
    model, tokenizer = pocket
    ids = tokenizer(make("needle", 400, seed=1, tokenizer=tokenizer).prompt, return_tensors="pt").input_ids
    with torch.no_grad(): want = model(ids.to(model.device)).logits
    for method in (VerticalSlash(), FlexPrefill(), HiP(), OracleBlocks(1.0), RandomBlocks(1.0)):
        with sparsify(model, prefill=method), torch.no_grad():
            assert_close(model(ids.to(model.device)).logits, want, 1e-4)


@pytest.mark.parametrize("method", [VerticalSlash(40, 60, window=32), FlexPrefill(0.5, 0.3, 64, 64),
                                    HiP(((64, 128), (16, 32)), 16, 32), RandomBlocks(0.3)], ids=repr)
def test_padded_batches_write_what_each_row_writes(pocket, method):
    model, tokenizer = pocket
    prompts = [make("needle", length, seed=i, tokenizer=tokenizer).prompt for i, length in enumerate((300, 200))]
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    settings = dict(max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    with sparsify(model, prefill=method, seed=7): together = model.generate(**batch, **settings)
    for row, prompt in enumerate(prompts):
        one = tokenizer(prompt, return_tensors="pt").to(model.device)
        with sparsify(model, prefill=method, seed=[fold_in(7, row)]): alone = model.generate(**one, **settings)
        assert_close(together.logits[0][row], alone.logits[0][0], 1e-4)
        if row == 0: assert not torch.allclose(alone.logits[0], model.generate(**one, **settings).logits[0], atol=1e-3)


def test_layers_with_methods_of_their_own(pocket):
    model, tokenizer = pocket
    prompt = tokenizer(make("needle", 300, seed=1, tokenizer=tokenizer).prompt, return_tensors="pt").to(model.device)
    methods = {0: HiP(((64, 64),), 4, 16), 3: RandomBlocks(0.3), 5: VerticalSlash(20, 20)}
    with sparsify(model, prefill=methods, decode=None, dense_layers=[0]) as session:
        model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert "layer 5: prefill=VerticalSlash(vertical=20" in repr(session)
    assert "layer 0: the model's own attention (dense_layers)" in repr(session)


def test_the_last_chunk_chooses_by_itself(pocket):
    "hf.prefill in chunks of whole blocks: what a causal choice reads does not depend on the chunks."
    from sparse_nb.hf import prefill
    model, tokenizer = pocket
    ids = tokenizer(make("needle", 380, seed=1, tokenizer=tokenizer).prompt, return_tensors="pt").input_ids[:, :384]
    found = {}
    for method in (HiP(((64, 64),), 4, 16), OracleBlocks(0.3), VerticalSlash(40, 60, window=32)):
        for chunk in (384, 128):
            with sparsify(model, prefill=method, setup="context"):
                cache = prefill(model, ids.to(model.device), chunk=chunk)
            found[type(method), chunk] = cache.layers[-1].keys
    for kind in (HiP, OracleBlocks): assert_close(found[kind, 128], found[kind, 384], 1e-4)
    assert not torch.allclose(found[VerticalSlash, 128], found[VerticalSlash, 384], atol=1e-3)


def test_real_heads_are_read_better_than_by_chance(pocket):
    model, tokenizer = pocket
    ids = tokenizer(make("multikey", 1000, seed=2, tokenizer=tokenizer).prompt, return_tensors="pt").input_ids
    shares = {}
    for x in capture(model, ids.to(model.device)):
        for method in (VerticalSlash(64, 128, rounding="pool", window=64), FlexPrefill(0.8, 0.3, 128, 64),
                       HiP(((64, 192),), 64, 64)):
            p = method.pattern(x.q, x.k)
            shares.setdefault(type(method), []).append([mass_read(x_, x.q, x.k).mean() for x_ in (
                with_counts_of(p, x.q, x.k, seed=0), p, with_counts_of(p, x.q, x.k))])
    for kind, found in shares.items():
        drawn, mine, best = torch.tensor(found).mean(0).tolist()
        assert drawn + 0.3 * (best - drawn) < mine < best, kind


@pytest.mark.parametrize("method", [m for m in BLOCKS if not isinstance(m, OracleBlocks)], ids=repr)
def test_no_choice_of_as_many_blocks_reads_more(method):
    q, k, _ = problem(B=2, Q=160, N=230)
    p = method.pattern(q, k, seed=1)
    of_blocks = lambda p: block_sums(mass_read(p, q, k), p.query_block)
    best, drawn = with_counts_of(p, q, k), with_counts_of(p, q, k, seed=2)
    counts = p.mask().sum(-1).expand(2, -1, -1).repeat_interleave(4 // p.mask().shape[1], 1)
    assert torch.equal(best.mask().sum(-1), counts) and torch.equal(drawn.mask().sum(-1), counts)
    assert (of_blocks(p) <= of_blocks(best) + 1e-9).all() and (of_blocks(drawn) <= of_blocks(best) + 1e-9).all()


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS + EVERYTHING, ids=repr)
def test_on_a_gpu(method):
    q, k, v = problem(Q=300, N=400, dtype=torch.float32)
    start = torch.tensor([0, 90])
    want = method.prefill(q, k, v, seed=3, kv_start=start)
    got = method.prefill(q.cuda(), k.cuda(), v.cuda(), seed=3, kv_start=start.cuda())
    assert_close(got, want, 1e-3)


def test_all_names_are_documented():
    assert {"VerticalSlash", "FlexPrefill", "HiP", "OracleBlocks", "RandomBlocks"} <= set(sparse_nb.__all__)
