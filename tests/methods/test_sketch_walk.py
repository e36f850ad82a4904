"""Sketch&Walk: attacks first, then Algorithms 1 and 2 transcribed by themselves, then what the method owes a caller,
alone and inside a model."""
import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inputs import assert_codes_close, fast
from sparse_nb.attention import Method, assert_close, attention, fold_in
from sparse_nb.hf import attention_layers, has_window, prefill, register, sparsify
from sparse_nb.methods.sketch_walk.index import FINE, INDEXES, signed_hadamard
from sparse_nb.methods.sketch_walk.state import QueryBlocks
from sparse_nb.sketch_walk import SketchWalk, sketch_walk_decode, sketch_walk_prefill

SMALL = dict(block=32, density=0.4, sketch=16, tail=0)
PAPER = dict(index="sketch", walk="literal", heads="averaged")
MEANS, LARGEST = dict(pool="mean", refine=1), dict(pool="max", refine=1)
GUESSING = [SketchWalk(index=x, **MEANS, **SMALL) for x in ("fine4", "fine16", "mean", "sketch")]
PIECES = [SketchWalk(block=16, density=0.3), SketchWalk(block=4, density=0.3, heads="each")]
GUESSING += [SketchWalk(heads="all", **MEANS, **SMALL), SketchWalk(heads="averaged", index="mean", **MEANS, **SMALL),
             SketchWalk(**LARGEST, **SMALL), SketchWalk(index="mean", heads="all", **LARGEST, **SMALL),
             SketchWalk(heads="each", **MEANS, **SMALL), SketchWalk(heads="each", **LARGEST, **SMALL),
             SketchWalk(**SMALL), SketchWalk(index="sketch", heads="averaged", **SMALL)]
REFINED = SketchWalk(index="fine16", pool="max", heads="each", refine=2, least=4, **SMALL)
GUESSING += [REFINED, SketchWalk(index="mean", pool="mean", refine=2, **SMALL)]
PLAIN = [*GUESSING, SketchWalk(index="oracle", **SMALL), SketchWalk(index="random", **MEANS, **SMALL),
         SketchWalk(index="oracle", heads="each", **MEANS, **SMALL),
         SketchWalk(index="random", heads="each", **MEANS, **SMALL),
         SketchWalk(index="random", refine=2, **SMALL)]
WALKING = [SketchWalk(walk=x, **SMALL) for x in ("softmax", "renormalised", "literal")]
WALKING += [SketchWalk(walk="softmax", degree=3, index="mean", **SMALL), SketchWalk(**SMALL | PAPER),
            SketchWalk(**SMALL | PAPER, degree=2)]
TAILED = [SketchWalk(**MEANS, **SMALL | dict(tail=40)), replace(REFINED, tail=64),
          replace(WALKING[0], tail=33), replace(WALKING[-1], tail=32),
          SketchWalk(index="random", **MEANS, **SMALL | dict(tail=1)), SketchWalk(**SMALL | dict(tail=40))]

def problem(B=2, G=2, R=2, Q=150, N=230, D=16, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    return 2 * new(B, G * R, Q, D), new(B, G, N, D), new(B, G, N, D)

def seeds(q, seed=3): return fold_in(seed, torch.arange(q.shape[0])[:, None], torch.arange(q.shape[1]))

def state_of(method, q, k):
    "An index that has observed all keys and queries"
    state = method.new_state()
    state.append(k, k, **({"q": q} if method.walk else {}))
    return state

def lists(method, q, k, **more): return method.pattern(q, k, **more).mask()

# attacks

@pytest.mark.parametrize("method", PLAIN + WALKING + TAILED, ids=repr)
def test_hidden_keys_have_no_say(method):
    "Padding holds NaN and huge keys; each sequence is what it is alone, in prompts and in steps."
    q, k, v = problem(B=3, Q=230)
    start = torch.tensor([0, 70, 229])
    for b, s in enumerate(start): k[b, :, :s] = v[b, :, :s] = q[b, :, :s] = math.nan
    k[1, :, :70] = 1e30
    more = dict(step={}) if method.walk else {}
    out = method.prefill(torch.where(q.isnan(), 0, q), k, v, seed=3, kv_start=start, **more)
    shown = torch.arange(230) >= start[:, None]
    state = method.new_state()
    for a in range(0, 230, 50):
        given = {"q": q[:, :, a:a + 50]} if method.walk else {}
        state.append(k[:, :, a:a + 50], v[:, :, a:a + 50], shown=shown[:, a:a + 50], **given)
    steps = method.decode(q[:, :, -1:], k, v, kv_start=start, state=state, seed=seeds(q))
    for b, s in enumerate(start.tolist()):
        q_, k_, v_ = (x[b:b + 1, :, s:] for x in (q, k, v))
        alone = method.prefill(q_, k_, v_, seed=seeds(q)[b:b + 1], **{"step": {}} if method.walk else {})
        assert_close(out[b:b + 1, :, s:], alone, 1e-12)
        assert not out[b, :, :s].any()
        assert_close(steps[b:b + 1], method.decode(q_[:, :, -1:], k_, v_, state=state_of(method, q_, k_),
                                                   seed=seeds(q)[b:b + 1]), 1e-12)

@pytest.mark.parametrize("method", [SketchWalk(block=32, density=1.0),
                                    SketchWalk(block=32, density=1.0, index="oracle")], ids=repr)
def test_sequences_that_begin_inside_a_block(method):
    "All that is visible is read: blocks that some query of the block of queries sees a key of."
    q, k, _ = problem(B=5, G=1, R=1)
    start = torch.tensor([0, 1, 70, 95, 229])
    found = lists(method, q, k, kv_start=start)
    for b, s in enumerate(start.tolist()):
        want = torch.zeros_like(found[b, 0])
        for i in range(max(80, s), 230): want[(i - 80) // 32, torch.arange(s, i + 1) // 32] = True
        assert torch.equal(found[b, 0], want), s

@pytest.mark.parametrize("heads, lists_of", [("group", slice(0, None, 2)), ("all", slice(0, 1))])
def test_random_lists_are_drawn_from_the_streams_of_first_heads(heads, lists_of):
    "Lists that heads share are those of the first of them, where each has its own."
    q, k, v = problem(Q=230)
    shared, own = (SketchWalk(**SMALL, index="random", refine=1, heads=x) for x in (heads, "each"))
    assert torch.equal(lists(shared, q, k, seed=4), lists(own, q, k, seed=4)[:, lists_of])
    read = [s.select(q[:, :, -2:], k, causal=True, seed=4, state=state_of(s, q, k)).dense(230) for s in (shared, own)]
    assert torch.equal(read[0][:, lists_of], read[1][:, lists_of]) and not torch.equal(*read)

def coded(index, seed=0):
    "Rows of an index of four bits"
    return state_of(SketchWalk(index=index), *(x.float() for x in problem(B=1, N=640, Q=1, D=64, seed=seed)[:2])).rows

@pytest.mark.parametrize("index", ["fine4", "fine16"])
def test_codes_that_may_fall_either_way(index):
    "What the tests of kernels allow of an index of four bits, and what they do not."
    rows = coded(index)
    step = rows[..., :-2].abs().amax(-1, keepdim=True) / 7
    code, far = (rows[..., :-2] / step).round(), float(rows[..., -2].max())
    small = [tuple(x) for x in (code.abs() <= 4).nonzero().tolist()]
    at, total = small[len(small) // 2], code.numel()
    sub, own = at[:-1], float(step[at[:-1]])
    def changed(by, *where):
        "Rows with something added at some places"
        new = rows.clone()
        for x in where: new[x] += float(step[x[:-1]]) if by is None else by
        return new
    def stepped(n):
        "Rows one of whose steps is the n-th bfloat16 above it"
        new, above = rows.clone(), (step[sub].bfloat16().view(torch.int16) + n).view(torch.bfloat16).float()
        new[sub][:-2] = code[sub] * above  # exact: a product with a rounded quotient may be no code
        return new
    radius, count = (*sub, -2), (*sub, -1)
    for same in rows, changed(own, at), changed(-own, at), changed(None, *small[:total // 2000]), changed(5e-7 * far,
                                                                                                          radius):
        assert_codes_close(same, rows)
    assert_codes_close(stepped(1), rows, share=1 / step.numel())
    other = rows.clone()
    other[:, :, 3] = coded(index, seed=1)[:, :, 3]
    for wrong, message in (
            (changed(2 * own, at), "codes differ by 2"), (changed(-2 * own, at), "codes differ by 2"),
            (changed(own / 2, at), "not codes"), (changed(own / 1000, at), "not codes"),
            (changed(None, *small[:total // 500]), f"{total // 500} of {total} codes differ"),
            (stepped(2), "steps differ by 2"), (other, "codes differ by"), (rows.roll(1, 2), "codes differ by"),
            (changed(1e-5 * far, radius), "other radii"), (changed(-1, count), "other counts"),
            (changed(math.nan, at), "not finite"), (rows[:, :, 1:], "another shape")):
        with pytest.raises(AssertionError, match=message): assert_codes_close(wrong, rows)
    with pytest.raises(AssertionError, match=f"1 of {step.numel()} steps differ"):
        assert_codes_close(stepped(1), rows, share=0.5 / step.numel())

@pytest.mark.parametrize("method", PLAIN + WALKING, ids=repr)
def test_a_block_does_not_know_later_blocks_but_its_own_queries(method):
    q, k, v = problem(B=1, Q=256, N=256)
    leaks = []
    for border in (64, 200, 207, 210, 220):
        others = [x.clone() for x in (q, k, v)]
        for x in others: x[:, :, border:] = 5 * x[:, :, border:].flip(2)
        got, want = (method.prefill(*x, seed=3, **{"step": {}} if method.walk else {}) for x in (others, (q, k, v)))
        whole = border // 32 * 32
        assert torch.equal(got[:, :, :whole], want[:, :, :whole])
        leaks.append(bool((got - want)[:, :, whole:border].any()))
    blind = method.index == "random" and method.prompt_refine == 1
    assert any(leaks) == (not blind)
    assert method.sees_ahead == (not blind)
    assert not leaks[0]

def test_without_a_mask_the_future_moves_the_past():
    "Algorithm 1 as it is printed: an even power carries mass through blocks to come, and back."
    q, k, v = problem(B=1, Q=512, N=512)
    def moved(walk):
        method, others = SketchWalk(walk=walk, index="sketch", block=32, density=0.5, sketch=16), [k.clone(), q.clone()]
        for x in others: x[:, :, 300:] = 5 * x[:, :, 300:].flip(2)
        found = []
        for keys, queries in ((k, q), others):
            step = {}
            found.append([lists(method, queries, keys, step=step) for _ in range(2)][1])
        return bool((found[0] != found[1])[:, :, :300 // 32].any())
    assert moved("unmasked") and not moved("literal")

@pytest.mark.parametrize("method", PLAIN + PIECES, ids=repr)
def test_a_query_does_not_know_later_keys(method):
    "One call for several queries, whose index holds keys that most of them must not see."
    q, k, v = problem(Q=5, N=230)
    together = method.decode(q, k, v, causal=True, seed=seeds(q))
    for j in range(5):
        n = 226 + j
        if method.random: continue
        assert_close(together[:, :, [j]], method.decode(q[:, :, [j]], k[:, :, :n], v[:, :, :n], seed=seeds(q)), 1e-12)

@pytest.mark.parametrize("method", PLAIN + WALKING + TAILED, ids=repr)
@pytest.mark.parametrize("Q, N", [(1, 1), (31, 31), (33, 33), (230, 230)])
def test_odd_sizes(method, Q, N):
    q, k, v = problem(Q=Q, N=N)
    more = {"step": {}} if method.walk else {}
    out = method.prefill(q, k, v, seed=0, **more)
    assert out.isfinite().all() and out.any(-1).all()
    one = method.decode(q[:, :, -1:], k, v, state=state_of(method, q, k), seed=0)
    assert one.isfinite().all()
    if N <= 32:
        assert_close(out, attention(q, k, v, causal=True), 1e-12)
        assert_close(one, attention(q[:, :, -1:], k, v), 1e-12)

@pytest.mark.parametrize("method", [replace(m, density=1.0) for m in PLAIN + WALKING], ids=repr)
def test_a_density_of_one_is_exact(method):
    q, k, v = problem(Q=230)
    start = torch.tensor([0, 90])
    more = {"step": {}} if method.walk else {}
    exact = attention(q[:, :, 90:], k, v, causal=True, kv_start=start)
    assert_close(method.prefill(q, k, v, seed=0, kv_start=start, **more)[:, :, 90:], exact, 1e-12)
    assert_close(method.decode(q[:, :, -1:], k, v, state=state_of(method, q, k), seed=0),
                 attention(q[:, :, -1:], k, v), 1e-12)

def test_shares_that_underflow_keep_their_order():
    "Thirty layers of eighth powers of hundredths: float64 alone would hold 1e-480"
    method, step = SketchWalk(walk="softmax", index="mean", **SMALL), {}
    q, k, _ = problem(B=1, Q=640, N=640)
    for _ in range(30): found = lists(method, q, k, step=step)
    at = step[0]
    assert at.isfinite().all() and (at.amax(-1) == 1).all() and (found.sum(-1)[..., -1] == 8).all()

def test_scores_of_nothing_are_no_trouble():
    q, k, v = (torch.zeros_like(x) for x in problem(Q=230))
    for method in PLAIN + WALKING:
        more = {"step": {}} if method.walk else {}
        assert method.prefill(q, k, v + 1, seed=1, **more).isfinite().all()
        assert (method.decode(q[:, :, :1], k, v + 1, state=state_of(method, q, k), seed=1) == 1).all()

@pytest.mark.parametrize("method", GUESSING + WALKING, ids=repr)
def test_scores_that_are_no_numbers(method):
    for which in (0, 1):
        given = list(problem(Q=230))
        given[which][0, 0, 100] = math.nan
        with pytest.raises(ValueError, match="scores of q and k must be finite"):
            method.prefill(*given, **{"step": {}} if method.walk else {})

# Algorithms 1 and 2, transcribed

def algorithm_1(Q, K, H, r, B, s, tau, R, mask):
    "One layer, by loops as printed, but for the mask and the forced blocks: Q, K [h, n, d]; lists, and R"
    q_avg, k_avg = Q.mean(0), K.mean(0)
    b = math.ceil(len(q_avg) / B)
    q_bar = torch.stack([q_avg[i * B:(i + 1) * B].mean(0) for i in range(b)])
    k_bar = torch.stack([k_avg[i * B:(i + 1) * B].mean(0) for i in range(b)])
    A = (q_bar @ H) @ (k_bar @ H).T / r**0.5
    W = A**s
    if mask: W = W * torch.ones(b, b).tril()
    R = W if R is None else R @ W
    chosen = []
    for i in range(b):
        forced = {0, i}
        order = sorted(set(range(i + 1)) - forced, key=lambda j: -float(R[i, j]))
        count = max(math.ceil(tau * (i + 1) - 1e-9), len(forced))
        chosen.append(forced | set(order[:count - len(forced)]))
    return chosen, R

def algorithm_2(q, K, q_bar, k_avg, H, r, B, s, tau, u, mask):
    "A token's row of one layer: q [h, d]; k_avg [t, d]; q_bar of the finished blocks; u: its row of the layer below"
    b = math.ceil(len(k_avg) / B)
    k_bar = torch.stack([k_avg[i * B:(i + 1) * B].mean(0) for i in range(b)])
    A = torch.zeros(b, b, dtype=torch.float64)
    for i in range(b - 1):
        for j in range(b): A[i, j] = (q_bar[i] @ H) @ (k_bar[j] @ H) / r**0.5
    A[b - 1] = (q.mean(0) @ H) @ (k_bar @ H).T / r**0.5
    W = A**s
    if mask: W = W * torch.ones(b, b).tril()
    u = W[b - 1] if u is None else u @ W
    forced = {0, b - 1}
    order = sorted(set(range(b)) - forced, key=lambda j: -float(u[j]))
    count = max(math.ceil(tau * b - 1e-9), len(forced))
    return forced | set(order[:count - len(forced)]), u

@pytest.mark.parametrize("walk", ["literal", "unmasked"])
@pytest.mark.parametrize("size, sketch", [(16, 16), (16, 8), (12, 16)])
def test_the_papers_algorithms(walk, size, sketch):
    method = SketchWalk(**SMALL | dict(index="sketch", sketch=sketch, heads="averaged", walk=walk))
    H, step, R, u = signed_hadamard(size, sketch), {}, None, None
    token = {}
    for layer in range(4):
        q, k, _ = problem(B=1, G=2, R=2, Q=230, N=230, D=size, seed=layer)
        chosen, R = algorithm_1(q[0], k[0].repeat_interleave(2, 0), H, sketch, 32, 8, 0.4, R, walk == "literal")
        found = lists(method, q, k, step=step)[0, 0]
        assert [{j for j in range(8) if row[j]} for row in found] == chosen
        assert_close(step[0][0, 0] / step[0][0, 0].amax(-1, keepdim=True), R / R.amax(-1, keepdim=True), 1e-10)
        q_bar = q[0].mean(0)[:224].unflatten(0, (7, 32)).mean(1)
        one, u = algorithm_2(q[0, :, -1], k[0], q_bar, k[0].mean(0), H, sketch, 32, 8, 0.4, u, walk == "literal")
        read = method.select(q[:, :, -1:], k, state=state_of(method, q, k), step=token).dense(230)[0, 0, 0]
        read = read.nonzero()[:, 0]
        assert {int(i) // 32 for i in read} == one
        assert_close(token["query"][0, 0, 0] / token["query"].max(), u / u.max(), 1e-10)
    assert step[0].dtype == torch.float64

def scores_by_hand(method, q, k, size=32):
    "The guess for one query [D] and the keys [N, D] of one head: of each block, in float64"
    fine, D = FINE.get(method.index, size), len(q)
    found = []
    for block in k.split(size):
        parts = []
        for x in block.split(fine):
            mean, H = x.mean(0), torch.eye(D, dtype=torch.float64)
            if method.index == "sketch": H = signed_hadamard(D, method.sketch)
            kept = mean @ H
            if method.index in FINE:
                H = signed_hadamard(D, None)
                turned = mean @ H
                step = float((turned.abs().max() / 7).bfloat16())
                kept = (turned / step).round().clamp(-7, 7) * step
            score = float((q @ H) @ kept) / D**0.5
            if method.index == "fine16": score += 0.5 * float(q.norm()) / D**0.5 * float((x - mean).norm(dim=1).max())
            parts.append((score, len(x)))
        if method.index == "fine4": found.append(math.log(sum(n * math.exp(x) for x, n in parts)))
        else: found.append(max(x for x, _ in parts))
    return torch.tensor(found, dtype=torch.float64)

@pytest.mark.parametrize("index", ["fine4", "fine16", "mean", "sketch"])
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_lists_of_a_group_by_hand(index, pool):
    method = SketchWalk(index=index, pool=pool, refine=1, **SMALL)
    q, k, _ = problem(B=1, Q=230)
    mask, fine = lists(method, q, k)[0], FINE.get(index, 32) if pool == "max" else 32
    read = method.select(q[:, :, -1:], k).dense(230)[0, :, 0]
    for g in range(2):
        def best(p, i):
            order = sorted(range(1, i), key=lambda j: -float(p[j]))
            return {0, i} | set(order[:max(math.ceil(0.4 * (i + 1) - 1e-9), 2) - 2])
        for i in range(2, 8):
            p = []
            for h in (2 * g, 2 * g + 1):
                for rows in q[0, h, i * 32:(i + 1) * 32].split(fine):
                    p.append(scores_by_hand(method, rows.mean(0), k[0, g, :(i + 1) * 32]).softmax(0))
            p = torch.stack(p).amax(0) if pool == "max" else torch.stack(p).mean(0)
            assert {j for j in range(8) if mask[g, i, j]} == best(p, i)
        p = torch.stack([scores_by_hand(method, q[0, h, -1], k[0, g]).softmax(0) for h in (2 * g, 2 * g + 1)])
        want = best(p.amax(0) if pool == "max" else p.mean(0), 7)
        for h in (2 * g, 2 * g + 1): assert {int(i) // 32 for i in read[h].nonzero()[:, 0]} == want

@pytest.mark.parametrize("heads", ["group", "each", "all", "averaged"])
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_exact_scores_of_all_blocks_choose_what_the_oracle_does(heads, pool):
    q, k, _ = problem(Q=230)
    method = SketchWalk(index="mean", heads=heads, pool=pool, refine=1, **SMALL)
    oracle = lists(replace(method, index="oracle"), q, k)
    assert torch.equal(lists(replace(method, refine=9), q, k), oracle)
    assert not torch.equal(lists(method, q, k), oracle)

@pytest.mark.parametrize("pool", ["mean", "max"])
def test_exact_scores_choose_among_nominated_blocks_by_hand(pool):
    method = SketchWalk(index="mean", heads="each", pool=pool, refine=2, **SMALL | dict(density=0.3))
    q, k, _ = problem(B=1, Q=256, N=256)
    got = lists(method, q, k)[0]
    plain = replace(method, refine=1)
    for i in range(2, 8):
        count = max(math.ceil(0.3 * (i + 1) - 1e-9), 2)
        near = lists(replace(plain, density=min(1, 2 * count / (i + 1))), q, k)[0, :, i]
        assert (near.sum(-1) == min(2 * count, i + 1)).all()
        for h in range(4):
            keys = torch.cat([torch.arange(32 * j, 32 * j + 32) for j in range(8) if near[h, j]])
            rows = []
            for row in range(32 * i, 32 * i + 32):
                seen = keys[keys <= row]
                p = (k[0, h // 2, seen] @ q[0, h, row] / 4).softmax(0)
                rows.append(torch.zeros(8, dtype=p.dtype).index_add(0, seen // 32, p))
            share = torch.stack(rows).amax(0) if pool == "max" else torch.stack(rows).mean(0)
            order = sorted((j for j in range(1, i) if near[h, j]), key=lambda j: -float(share[j]))
            assert {j for j in range(8) if got[h, i, j]} == {0, i} | set(order[:count - 2])

def test_one_retrieving_row_of_64_is_not_drowned():
    "One query of the last block matches one key: no mean of queries shows it, exact scores of nominated blocks do."
    g = torch.Generator().manual_seed(0)
    found = {1: 0, 2: 0}
    for _ in range(20):
        k, q = torch.randn(1, 1, 1024, 64, generator=g), 2 * torch.randn(1, 1, 1024, 64, generator=g)
        block, key, row = (int(torch.randint(a, b, (), generator=g)) for a, b in ((1, 15), (0, 64), (0, 64)))
        q[0, 0, 960 + row] = 2 * k[0, 0, 64 * block + key]
        for times in found:
            method = SketchWalk(density=0.25, index="fine16", pool="max", heads="each", refine=times)
            found[times] += bool(lists(method, q, k)[0, 0, 15, block])
    assert found[2] >= found[1] + 4

@pytest.mark.parametrize("least", [2, 3, 5])
def test_a_least_number_of_blocks_is_read(least):
    q, k, v = problem(Q=230)
    seen = torch.arange(1, 9)
    want = torch.maximum((0.1 * seen).ceil().long(), seen.clamp(max=least))
    for method in (SketchWalk(block=32, density=0.1, least=least), replace(REFINED, density=0.1, least=least)):
        assert (lists(method, q, k)[:, :, -8:].sum(-1) == want).all()
    read = SketchWalk(block=32, density=0.1, least=least).decode(q[:, :, -1:], k, v, return_stats=True)[1]
    assert (read.values_read == (least - 1) * 32 + 230 % 32).all()

@pytest.mark.parametrize("settings, what", [
    (dict(refine=2, index="sketch"), "the index 'sketch' is"),
    (dict(least=3, walk="literal"), "another walk than softmax's over a whole prompt is")])
def test_what_no_kernel_chooses_is_refused_by_name(settings, what):
    with pytest.raises(ValueError, match=f"backend must be 'torch' or 'auto' where {what} wanted, got 'triton'"):
        sketch_walk_prefill(*problem(Q=230), backend="triton", **settings)

@pytest.mark.parametrize("index", ["fine4", "mean", "oracle", "random"])
@pytest.mark.parametrize("walk", [None, "softmax"])
def test_a_list_for_each_head_is_that_of_a_model_with_one_group_a_head(index, walk):
    if walk and index == "random": pytest.skip("refused")
    method = SketchWalk(index=index, heads="each", walk=walk, **SMALL)
    q, k, v = problem(Q=230)
    keys, values, steps = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), [{}, {}, {}]
    more = lambda i: {"step": steps[i]} if walk else {}
    for _ in range(2):
        found = lists(method, q, k, seed=3, **more(0))
        assert torch.equal(found, lists(replace(method, heads="group"), q, keys, seed=3, **more(1)))
        assert found.shape[1] == 4 and (walk or not torch.equal(found[:, 0], found[:, 1]))
    one = q[:, :, -1:]
    if walk and index == "oracle": return
    of_group = replace(method, heads="group")
    assert_close(method.decode(one, k, v, state=state_of(method, q, k), seed=3),
                 of_group.decode(one, keys, values, state=state_of(method, q, keys), seed=3), 1e-12)

@pytest.mark.parametrize("index", ["fine4", "fine16", "mean"])
def test_lists_of_pieces_by_hand(index):
    "Blocks too small for the tiles of a prompt, of the same index."
    method = SketchWalk(block=16, index=index, density=0.25)
    q, k, v = problem(B=1, Q=1)
    read = method.select(q, k).dense(230)[0, :, 0]
    for g in range(2):
        p = sum(scores_by_hand(method, q[0, h, 0], k[0, g], 16).softmax(0) for h in (2 * g, 2 * g + 1))
        order = sorted(range(1, 14), key=lambda j: -float(p[j]))
        for h in (2 * g, 2 * g + 1): assert {int(i) // 16 for i in read[h].nonzero()[:, 0]} == {0, 14, *order[:2]}
    assert method.index_bytes(64) == SketchWalk(index=index).index_bytes(64) * (4 if index == "mean" else 1)
    stats = method.decode(q, k, v, return_stats=True)[1]
    assert (stats.values_read == 3 * 16 + 6).all()

# the exact tail of a prompt

def answers(method, q, k, v):
    "Outputs of a prompt, and of the walk's layer where there is one."
    step = {} if method.walk else None
    return method.prefill(q, k, v, seed=3, **{"step": step} if method.walk else {}), step

@pytest.mark.parametrize("tail", [1, 31, 32, 100, 229])
@pytest.mark.parametrize("method", [GUESSING[0], REFINED, PLAIN[-2], WALKING[0], WALKING[-1]], ids=repr)
def test_the_tail_is_exact_and_leaves_the_queries_before_it_alone(method, tail):
    q, k, v = problem(Q=230)
    (got, walk), (plain, before) = answers(replace(method, tail=tail), q, k, v), answers(method, q, k, v)
    exact = attention(q, k, v, causal=True)
    assert torch.equal(got[:, :, :-tail], plain[:, :, :-tail])
    assert_close(got[:, :, -tail:], exact[:, :, -tail:], 1e-12)
    assert ((plain - exact)[:, :, -tail:].abs().amax((0, 1, 3)) > 1e-3).any()
    if method.walk: assert torch.equal(walk[0], before[0])
    assert torch.equal(lists(replace(method, tail=tail), q, k, seed=3, **{"step": {}} if method.walk else {}),
                       lists(method, q, k, seed=3, **{"step": {}} if method.walk else {}))

@pytest.mark.parametrize("tail", [230, 231, 10**30])
@pytest.mark.parametrize("method", [GUESSING[0], WALKING[0]], ids=repr)
def test_a_tail_of_the_whole_prompt_is_exact_attention(method, tail):
    q, k, v = problem(Q=230)
    start, method = torch.tensor([0, 90]), replace(method, tail=tail)
    assert_close(answers(method, q, k, v)[0], attention(q, k, v, causal=True), 1e-12)
    got = method.prefill(q, k, v, kv_start=start, **{"step": {}} if method.walk else {})
    assert_close(got[:, :, 90:], attention(q[:, :, 90:], k, v, causal=True, kv_start=start), 1e-12)
    assert not got[1, :, :90].any()

def test_each_part_of_a_prompt_has_its_tail():
    "Counted in the sequence's own queries: of a part that begins inside it, and of one that is shorter than the tail."
    q, k, v = problem(B=3, Q=230)
    start, method = torch.tensor([0, 100, 180]), SketchWalk(**SMALL)
    whole = method.prefill(q, k, v, kv_start=start)
    exact = torch.cat([attention(q, k, v, causal=True)[:1], torch.zeros_like(q[1:])])
    for b in (1, 2):
        own = (x[b:b + 1, :, start[b]:] for x in (q, k, v))
        exact[b, :, start[b]:] = attention(*own, causal=True)[0]
    for a, end in ((0, 128), (128, 224), (224, 230)):
        part = slice(a, end)
        got, plain = (replace(method, tail=x).prefill(q[:, :, part], k[:, :, :end], v[:, :, :end], kv_start=start)
                      for x in (40, 0))
        if a == 0: assert_close(plain[:1], whole[:1, :, part], 1e-12)
        n = min(40, end - a)
        assert_close(got[:, :, -n:], exact[:, :, part][:, :, -n:], 1e-12)
        assert torch.equal(got[:, :, :-n], plain[:, :, :-n])
    assert (whole - exact)[:, :, 88:128].abs().max() > 1e-3

@pytest.mark.parametrize("tail", [40, 230])
def test_a_gradient_flows_through_the_tail_and_what_stands_before_it(tail):
    given, method = [x.requires_grad_() for x in problem(Q=230)], SketchWalk(**SMALL | dict(tail=tail))
    w = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, exact = replace(method, tail=0).prefill(*given), attention(*given, causal=True)
    want = torch.cat([plain[:, :, :-tail], exact[:, :, -tail:]], 2)
    found, wanted, sparse = (torch.autograd.grad((x * w).sum(), given, retain_graph=True)
                             for x in (method.prefill(*given), want, plain))
    for a, b, c in zip(found, wanted, sparse):
        assert_close(a, b, 1e-11)
        assert not torch.allclose(b, c, 1e-3)

# the index

@pytest.mark.parametrize("size", [16, 12, 5, 80, 96])
def test_a_rotation_keeps_products_and_a_sketch_keeps_them_on_average(size):
    whole = 1 << (size - 1).bit_length()
    H = signed_hadamard(size, None)
    assert H.shape == (size, whole)
    assert_close(H @ H.T, torch.eye(size).double(), 1e-12)
    mean = sum(signed_hadamard(size, whole // 4, seed) @ signed_hadamard(size, whole // 4, seed).T
               for seed in range(400)) / 400
    assert (mean - torch.eye(size).double()).abs().max() < 0.4 and abs(mean.diagonal().mean() - 1) < 1e-9
    with pytest.raises(ValueError, match=f"sketch must be at most the head size up to a power of two, {whole}"):
        signed_hadamard(size, whole + 1)

@pytest.mark.parametrize("index", ["fine4", "fine16", "mean", "sketch"])
@pytest.mark.parametrize("walk", [None, "softmax"])
def test_an_index_in_steps_is_the_whole_one(index, walk):
    method = SketchWalk(index=index, walk=walk, **SMALL)
    q, k, _ = problem(Q=230)
    grown, i = method.new_state(), 0
    for n in (1, 40, 0, 3, 120, 66):
        grown.append(k[:, :, i:i + n], k[:, :, i:i + n], **({"q": q[:, :, i:i + n]} if walk else {}))
        i += n
    def same(n):
        whole = state_of(method, q[:, :, :n], k[:, :, :n])
        assert_close(grown.rows, whole.rows, 1e-12)
        if walk: assert_close(grown.queries.rows, whole.queries.rows, 1e-12)
    same(230)
    again = copy.deepcopy(grown)
    again.pick_sequences(torch.tensor([1, 0, 1]))
    assert_close(again.rows, grown.rows[[1, 0, 1]], 1e-12)
    grown.crop(180)
    same(180)
    for n in (7, 43): grown.append(k[:, :, len(grown):len(grown) + n], k[:, :, len(grown):len(grown) + n],
                                   **({"q": q[:, :, len(grown):len(grown) + n]} if walk else {}))
    same(230)
    grown.reset()
    assert not len(grown)

class NewBytes(TorchDispatchMode):
    "Counts the bytes of all tensors that calls make anew."
    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        old = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        new = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
               for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        self.bytes += sum(n for at, n in new.items() if at not in old)
        return out

@pytest.mark.parametrize("walk", [None, "softmax"])
def test_a_step_of_an_index_costs_the_same_whatever_it_holds(walk):
    def bytes_of_steps(N, steps):
        state, x = SketchWalk(block=32, walk=walk).new_state(), torch.randn(1, 2, N, 32)
        state.append(x, x, **({"q": x} if walk else {}))
        with NewBytes() as new:
            for _ in range(steps): state.append(*(x[:, :, :1],) * 2, **({"q": x[:, :, :1]} if walk else {}))
        return new.bytes
    assert bytes_of_steps(8192, 96) == bytes_of_steps(512, 96) > 0

def test_an_index_that_grows_is_seldom_moved():
    state, x, held = SketchWalk(block=4).new_state(), torch.randn(1, 1, 8, 64), []
    for _ in range(400):
        state.append(x, x)
        if not held or held[-1] is not state.held: held.append(state.held)
    rooms = [y.shape[2] for y in held]
    assert sum(rooms) < 8 * state.rows.shape[2] and len(rooms) < 20 and rooms == sorted(rooms)
    assert state.rows.data_ptr() == held[-1].data_ptr() and state.rows.shape[2] == 800

@pytest.mark.parametrize("index", ["fine4", "fine16", "mean"])
def test_rows_in_place_are_those_made_anew(index):
    "Appended, cut, reordered, reset at random, beside an index that is copied at each step since its keys learn."
    g, method = torch.Generator().manual_seed(7), SketchWalk(index=index, block=32)
    draw = lambda n: int(torch.randint(n, (), generator=g))
    state, other = method.new_state(), method.new_state()
    keys, shown = torch.zeros(3, 2, 0, 16), torch.zeros(3, 0, dtype=torch.bool)
    for step in range(150):
        new = torch.randint(-9, 10, (3, 2, 1 + draw(3) * draw(60), 16), generator=g).float()
        start = torch.tensor([0, 5, 50])[:, None]
        seen = torch.arange(new.shape[2]) + keys.shape[2] >= start
        state.append(new, new, shown=seen)
        other.append(new.requires_grad_(), new, shown=seen)
        keys, shown = torch.cat([keys, new.detach()], 2), torch.cat([shown, seen], 1)
        assert other.held is None and other.rows.requires_grad and not state.rows.requires_grad
        if step % 4 == 0:
            length = len(state) - draw(min(64, new.shape[2]) + 1)
            state.crop(length)
            other.crop(length)
            keys, shown = keys[:, :, :length], shown[:, :length]
        if step % 9 == 0:
            rows = torch.randperm(3, generator=g)
            for x in (state, other): x.pick_sequences(rows)
            keys, shown = keys[rows], shown[rows]
        assert torch.equal(state.rows, other.rows) and torch.equal(state.begin, other.begin)
        if index == "mean":  # sums of whole numbers are exact in any order
            whole = method.new_state()
            whole.append(keys, keys, shown=shown)
            assert torch.equal(state.rows[..., [0, 5, -1]], whole.rows[..., [0, 5, -1]])
        if step == 100:
            for x in (state, other): x.reset()
            keys, shown = keys[:, :, :0], shown[:, :0]

def test_an_index_of_inference_mode_goes_on_outside_of_it():
    state, x = SketchWalk(block=32).new_state(), torch.randn(1, 1, 70, 16)
    with torch.inference_mode(): state.append(x, x)
    state.append(x, x)
    whole = SketchWalk(block=32).new_state()
    whole.append(x.repeat(1, 1, 2, 1), x.repeat(1, 1, 2, 1))
    assert_close(state.rows, whole.rows, 1e-5)

def test_a_deep_cut_keeps_what_it_can():
    "Blocks before the cut stay, the one that is cut is made of old and new keys, later ones are exact again."
    method = SketchWalk(index="fine4", block=32)
    _, k, _ = problem(N=230)
    state = state_of(method, None, k)
    state.crop(50)
    other = problem(N=100, seed=5)[1]
    state.append(other, other)
    whole = state_of(method, None, torch.cat([k[:, :, :50], other], 2))
    assert_close(state.rows[:, :, 0], whole.rows[:, :, 0], 1e-12)
    assert_close(state.rows[:, :, 2:], whole.rows[:, :, 2:], 1e-12)
    assert_close(state.rows[:, :, 1, :4], whole.rows[:, :, 1, :4], 1e-12)   # sub-blocks that were not touched
    assert_close(state.rows[:, :, 1, 5:], whole.rows[:, :, 1, 5:], 1e-12)   # and those that are new

def test_bytes():
    want = dict(fine4=8.5, fine16=2.25, mean=2, sketch=1, oracle=0, random=0)
    for index in INDEXES: assert SketchWalk(index=index, sketch=32).index_bytes(64) == want[index]
    assert SketchWalk(index="mean", walk="softmax").index_bytes(64) == 4
    assert SketchWalk().index_bytes(80) == (64 + 2) / 4
    q, k, v = problem(B=1, Q=1)
    stats = sketch_walk_decode(q, k, v, block=32, density=0.4, return_stats=True)[1]
    assert (stats.index_bytes == 230 * 2.5).all() and (stats.keys_scored == stats.values_read).all()
    assert (stats.values_read == 3 * 32 + 6).all()
    assert (SketchWalk(index="oracle").decode(q, k, v, return_stats=True)[1].keys_scored == 230).all()

# what it owes a caller

@pytest.mark.parametrize("method", PLAIN + [m for m in WALKING if m.index != "oracle"], ids=repr)
@pytest.mark.parametrize("size", [32, 96])
def test_chunks_of_whole_blocks_change_nothing(method, size):
    q, k, v = problem(Q=230)
    layers, step, got, states = 2, {}, [], [method.new_state() for _ in range(2)]
    want = [method.prefill(q, k * (1 + layer), v, seed=3, **{"step": step} if method.walk else {})
            for layer in range(layers)]
    for a in range(0, 230, size):
        step, outs = {}, []
        for layer in range(layers):
            part, keys = slice(a, min(a + size, 230)), k * (1 + layer)
            if method.walk: states[layer].append(keys[:, :, part], v[:, :, part], q=q[:, :, part])
            more = {"step": step, "state": states[layer]} if method.walk else {}
            outs.append(method.prefill(q[:, :, part], keys[:, :, :part.stop], v[:, :, :part.stop], seed=3, **more))
        got.append(outs)
    for layer in range(layers): assert_close(torch.cat([x[layer] for x in got], 2), want[layer], 1e-12)

def test_a_row_of_the_walk_is_the_row_of_the_whole_walk():
    "Decoding follows one row; a prompt, which follows all, has the same where its block is full."
    method = SketchWalk(walk="softmax", index="mean", **SMALL)
    whole, row = {}, {}
    for layer in range(4):
        q, k, _ = problem(B=1, Q=256, N=256, seed=layer)
        lists(method, q, k, step=whole)
        mean = q[:, :, 224:].mean(2, keepdim=True)
        method.select(mean, k, state=state_of(method, q, k), step=row)
        assert_close(row["query"][0, :, 0], whole[0][0, :, -1], 1e-12)

def flipped(q, k):
    "The same products in another basis: signs of one group's queries and keys"
    sign = torch.where(torch.arange(q.shape[3]) % 3 == 0, -1.0, 1.0).double()
    q, k = q.clone(), k.clone()
    q[:, 2:], k[:, 1:] = q[:, 2:] * sign, k[:, 1:] * sign
    return q, k

@pytest.mark.parametrize("heads", ["group", "each", "all", "averaged"])
def test_another_basis_of_one_group_changes_no_list(heads):
    "But for heads that are averaged before they are asked."
    method = SketchWalk(index="mean", heads=heads, block=32, density=0.25)
    q, k, v = problem(B=1, Q=512, N=512)
    there = flipped(q, k)
    assert torch.equal(attention(q, k, v, causal=True), attention(*there, v, causal=True))
    same = torch.equal(lists(method, q, k), lists(method, *there))
    assert same == (heads != "averaged")

@pytest.mark.parametrize("more", [{}, dict(heads="each"), dict(heads="all", tail=40), dict(index="sketch"),
                                  dict(index="mean", heads="averaged")], ids=str)
def test_prompts_take_refined_largest_shares_and_steps_means(more):
    "Of a group of three heads a key, with padding, in one part or several; None is neither of the other readings."
    more, (q, k, v) = SMALL | dict(density=0.3) | more, problem(R=3, Q=230)
    method, start = SketchWalk(**more), torch.tensor([0, 41])
    own = lambda **kw: SketchWalk(**more | kw)
    def prompts(m):
        parts = [m.prefill(q[:, :, a:a + 96], k[:, :, :a + 96], v[:, :, :a + 96], seed=3) for a in range(0, 230, 96)]
        return [m.pattern(q, k, seed=3).mask(), m.prefill(q, k, v, seed=3, kv_start=start), torch.cat(parts, 2)]
    got, want = prompts(method), prompts(own(pool="max", refine=2))
    for x, y in zip(got, want): assert torch.equal(x, y)
    for wrong in (dict(pool="mean"), dict(refine=1), MEANS):
        assert not all(map(torch.equal, got, prompts(own(**dict(pool="max", refine=2) | wrong)))), wrong
    one = dict(state=state_of(method, q, k), kv_start=start, seed=seeds(q), return_stats=True)
    (out, stats), (means, read), (largest, _) = (own(**x).decode(q[:, :, -1:], k, v, **one)
                                                 for x in ({}, dict(pool="mean"), dict(pool="max")))
    assert torch.equal(out, means) and torch.equal(stats.values_read, read.values_read)
    assert torch.equal(out, largest) == (more.get("heads") in ("each", "averaged"))

def test_blocks_drawn_at_random_are_not_refined_by_default():
    q, k, v = problem(R=3, Q=230)
    ways = {}, dict(refine=1), dict(refine=2)
    dice, plain, refined = (SketchWalk(index="random", **more, **SMALL) for more in ways)
    out, want, other = (method.prefill(q, k, v, seed=3) for method in (dice, plain, refined))
    assert torch.equal(out, want) and not torch.equal(out, other) and not dice.sees_ahead

@pytest.mark.parametrize("method", [*WALKING, SketchWalk(index="oracle", **SMALL),
                                    SketchWalk(index="oracle", walk="softmax", **SMALL)], ids=repr)
def test_what_refuses_refined_lists_has_none_by_default(method):
    q, k, v = problem(Q=230)
    pool = "max" if method.walk is None else "mean"
    assert method == replace(method, pool=None, refine=None)
    out, want = (m.prefill(q, k, v, **{"step": {}} if m.walk else {})
                 for m in (method, replace(method, pool=pool, refine=1)))
    assert torch.equal(out, want)

def test_functions_are_the_method():
    q, k, v = problem(Q=230)
    settings = dict(block=32, density=0.3, index="mean", heads="all", pool="max")
    method = SketchWalk(**settings)
    assert torch.equal(sketch_walk_prefill(q, k, v, **settings), method.prefill(q, k, v))
    assert torch.equal(sketch_walk_decode(q[:, :, -1:], k, v, **settings), method.decode(q[:, :, -1:], k, v))
    for more in (dict(settings, refine=2, least=4, tail=50), dict(settings, refine=1, tail=0), dict(block=32)):
        assert torch.equal(sketch_walk_prefill(q, k, v, **more), SketchWalk(**more).prefill(q, k, v))
    assert torch.equal(sketch_walk_decode(q[:, :, -1:], k, v, block=32),
                       SketchWalk(32).decode(q[:, :, -1:], k, v))
    for method in PLAIN + WALKING + TAILED: assert Method.from_json(method.to_json()) == method

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision(dtype):
    q, k, v = problem(Q=230, dtype=dtype)
    for method in (SketchWalk(**SMALL), WALKING[0], *TAILED[:2]):
        out = method.prefill(q, k, v, **{"step": {}} if method.walk else {})
        one = method.decode(q[:, :, -1:], k, v, state=state_of(method, q, k))
        assert out.dtype == one.dtype == dtype and out.isfinite().all() and one.isfinite().all()
        assert state_of(method, q, k).rows.dtype == torch.float32

@pytest.mark.parametrize("size", [5, 12, 80])
def test_head_sizes_that_are_no_powers_of_two(size):
    q, k, v = problem(Q=100, N=100, D=size)
    for index in INDEXES:
        method = SketchWalk(index=index, block=32, density=0.5, sketch=4)
        assert method.prefill(q, k, v, seed=0).isfinite().all()
        assert method.decode(q[:, :, -1:], k, v, seed=0).isfinite().all()

@pytest.mark.parametrize("settings, message", [
    (dict(block=24), "block must be 4, 8, 16, 32, 64 or 128, got 24"),
    (dict(block=8, index="fine16"), "block must be at least 16 for sub-blocks of as many keys, got 8"),
    (dict(density=0.0), r"density must lie in \(0, 1\], got 0"),
    (dict(density=1.5), "density must lie in"), (dict(index="box"), "index must be one of fine4"),
    (dict(sketch=0), "sketch must be at least 1"), (dict(degree=0), "degree must be at least 1"),
    (dict(walk="far"), "walk must be one of softmax"),
    (dict(heads="none"), "heads must be one of"), (dict(pool="sum"), "pool must be one of mean, max"),
    (dict(dense_layers=-1), "dense_layers must be at least 0"),
    (dict(degree=33), "degree must be at least 1 and at most 32, got 33"),
    (dict(degree=10**400, walk="softmax"), "degree must be at least 1 and at most 32, got 1000"),
    (dict(tail=-1), "tail must be at least 0, got -1"),
    (dict(refine=0), "refine must be at least 1 and at most 1024, got 0"), (dict(least=1), "least must be at least 2"),
    (dict(refine=10**30), "refine must be at least 1 and at most 1024, got 10000"),
    (dict(least=2**63), f"least must be at least 2 and at most 1048576, got {2**63}"),
    (dict(refine=2, walk="softmax"), "refine must be 1 with a walk or an oracle, got 2"),
    (dict(refine=2, index="oracle"), "refine must be 1 with a walk or an oracle, got 2"),
    (dict(walk="softmax", pool="max"), "pool must be 'mean' with a walk"),
    (dict(walk="softmax", index="random"), "walk must be None with an index that draws"),
    (dict(walk="literal", index="oracle"), "walk must be 'softmax' or None with the true weights")])
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message): SketchWalk(**settings)

def test_kinds_that_cannot_work():
    for settings in (dict(density="all"), dict(block=64.0), dict(walk=3), dict(degree=2.0), dict(dense_layers=True),
                     dict(refine=2.0), dict(refine=True), dict(pool=3)):
        with pytest.raises(TypeError, match=f"{next(iter(settings))} must be"): SketchWalk(**settings)
    for tail in (True, 128.0, "all", None, torch.tensor(3)):
        for call in (SketchWalk, lambda tail: sketch_walk_prefill(*problem(Q=100), tail=tail)):
            with pytest.raises(TypeError, match="tail must be an int"): call(tail=tail)

@pytest.mark.parametrize("step", [[], 3])
@pytest.mark.parametrize("walk", [None, "softmax"])
def test_steps_that_cannot_work(step, walk):
    q, k, v = problem(Q=230)
    method = SketchWalk(walk=walk, **SMALL)
    for call in (lambda: method.prefill(q, k, v, step=step), lambda: method.pattern(q, k, step=step),
                 lambda: sketch_walk_prefill(q, k, v, walk=walk, step=step),
                 lambda: method.select(q, k, state=state_of(method, q, k), step=step),
                 lambda: method.decode(q, k, v, state=state_of(method, q, k), step=step)):
        with pytest.raises(TypeError, match=f"step must be a dict or None, got {type(step).__name__}"): call()
    with pytest.raises(TypeError, match="step must hold what the layers below have put there, got int for 0"):
        SketchWalk(walk="softmax", **SMALL).prefill(q, k, v, step={0: 3})

def test_the_highest_degree_tells_the_blocks_of_a_list_apart():
    "At a degree of 64 most of these lists, of eight layers of 128 blocks, would hold blocks whose share is 0."
    method, step = SketchWalk(walk="softmax", index="mean", block=32, degree=32), {}
    for layer in range(8):
        q, k, _ = problem(B=1, Q=4096, N=4096, seed=layer)
        found = lists(method, q, k, step=step)
    assert (step[0].amax(-1) == 1).all() and ((step[0] > 0).sum(-1) >= found.sum(-1) - 2).all()  # but the forced ones

@pytest.mark.parametrize("walk", (None, "softmax"))
def test_the_function_reads_a_padded_prompt_as_alone(walk):
    "Queries before the first key of their sequence get 0, as do all where it has not begun."
    q, k, v = problem(B=3, Q=230)
    given = dict(block=32, density=0.4, sketch=16, walk=walk, tail=40)
    out = sketch_walk_prefill(q, k, v, kv_start=torch.tensor([0, 9, 500]), step={}, **given)
    for b, start in enumerate((0, 9)):
        alone = sketch_walk_prefill(*(x[b:b + 1, :, start:] for x in (q, k, v)), step={}, **given)
        assert not out[b, :, :start].any() and torch.equal(out[b:b + 1, :, start:], alone)
    assert not out[2].any()

def test_calls_that_cannot_work():
    q, k, v = problem(Q=100)
    walk, plain = SketchWalk(walk="softmax", **SMALL), SketchWalk(**SMALL)
    other = state_of(replace(walk, index="mean"), problem(Q=230)[0], k)
    calls = [
        (lambda: SketchWalk(block=16).prefill(q, k, v), "block must be 32, 64 or 128, got 16"),
        (lambda: SketchWalk(block=16).pattern(q, k), "block must be 32, 64 or 128, got 16"),
        (lambda: walk.prefill(q, k, v), "state must be the index of this walk, .* got NoneType"),
        (lambda: walk.prefill(q, k, v, state=other), "state must be the index of this walk"),
        (lambda: walk.decode(q[:, :, -1:], k, v), "state must know the queries of all keys for a walk, got None"),
        (lambda: walk.new_state().append(k, v), "q must be the queries of these keys for a walk, got None"),
        (lambda: plain.decode(q[:, :, -1:], k, v, state=SketchWalk().new_state()), "state must have size"),
        (lambda: SketchWalk(index="sketch", sketch=64).prefill(q, k, v), "sketch must be at most .* 16, got 64"),
        (lambda: SketchWalk(walk="softmax", index="oracle").prefill(q, k, v), "q must be a whole prompt"),
        (lambda: SketchWalk(walk="softmax", index="oracle").decode(q[:, :, -1:], k, v, state=state_of(walk, k, k)),
         "walk must be None for single queries of an oracle")]
    for call, message in calls:
        with pytest.raises(ValueError, match=message): call()
    step = {}
    walk.prefill(q, k[:, :, :100], v[:, :, :100], step=step)
    with pytest.raises(ValueError, match="step must come from a layer with lists of the shape"):
        replace(walk, heads="all").prefill(q, k[:, :, :100], v[:, :, :100], step=step)

# inside a model

transformers = pytest.importorskip("transformers")
from models import FAMILIES, REFUSED, build

def has_holes(model):
    "Do layers with a window stand between others?"
    whole = [not has_window(layer) for layer in attention_layers(model).values()]
    return False in whole[whole.index(True):len(whole) - whole[::-1].index(True)] if any(whole) else True

def model_of(**kwargs):
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | kwargs)).eval()

@pytest.fixture(scope="module")
def llama(): return model_of()

TOKENS = torch.randint(1, 64, (1, 200), generator=torch.Generator().manual_seed(1))
GREEDY = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None, suppress_tokens=[0])
DENSE = dict(block=32, density=0.4, dense_layers=1, tail=0)
WITHIN = [SketchWalk(**DENSE), SketchWalk(index="mean", heads="all", **DENSE), SketchWalk(index="random", **DENSE),
          SketchWalk(index="oracle", pool="max", **DENSE), SketchWalk(walk="softmax", **DENSE),
          SketchWalk(sketch=8, **DENSE | PAPER)]

def ids_of(model, ids=TOKENS, **kwargs):
    return model.generate(ids, **GREEDY | dict(attention_mask=torch.ones_like(ids)) | kwargs)[:, ids.shape[1]:]

def forward(model, ids, **kwargs):
    with torch.no_grad(): return model(ids, **kwargs).logits

def step_by_step(model, method, new=6, seed=0):
    "Greedy tokens of a prompt that is read exactly, with indexes made anew from everything that was observed"
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from sparse_nb.hf import attention_override
    cache, asked, steps = transformers.DynamicCache(config=model.config), {}, []
    def attend(module, query, key, value, mask, scaling=None, **kwargs):
        i = module.layer_idx
        asked[i] = torch.cat([asked[i], query], 2) if i in asked else query
        if query.shape[2] > 1 or i < 1:
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)
        if i == 1: steps.append({})
        own = fold_in(fold_in(seed, 0), i, torch.arange(query.shape[1]), key.shape[2] - 1)[None]
        out = method.decode(query, key, value, scale=scaling, seed=own if method.random else None,
                            state=state_of(method, asked[i], key), **{"step": steps[-1]} if method.walk else {})
        return out.transpose(1, 2), None
    with torch.no_grad(), attention_override(model, attend, mask="sdpa"):
        likeliest = lambda ids: model(ids, past_key_values=cache).logits[:, -1, 1:].argmax(-1) + 1
        found = [likeliest(TOKENS)]
        for _ in range(new - 1): found.append(likeliest(found[-1][:, None]))
    return torch.stack(found, 1)

@pytest.mark.parametrize("method", fast([*WITHIN, SketchWalk(**DENSE | dict(block=16))], 1, 4), ids=repr)
def test_every_way_to_generate(llama, method):
    with sparsify(llama, decode=method, audit=True) as session:
        want = ids_of(llama)
        error = session.stats().error.groupby("layer").mean()
    assert (error[1:] > 1e-3).all() and error[0] < 1e-5
    assert torch.equal(want, step_by_step(llama, method))
    draft = model_of(num_hidden_layers=1)
    with sparsify(llama, decode=method):
        for way in (dict(cache_implementation="static"), dict(prefill_chunk_size=48), dict(prompt_lookup_num_tokens=3),
                    dict(assistant_model=draft)):
            assert torch.equal(ids_of(llama, **way), want), way
        beams = ids_of(llama, num_beams=3)
        cache = transformers.DynamicCache(config=llama.config)
        first = llama.generate(TOKENS[:, :70], past_key_values=cache, **GREEDY)
        second = llama.generate(torch.cat([first, TOKENS[:, 70:]], 1), past_key_values=cache, **GREEDY)
    with sparsify(llama, decode=method, offload=True):
        assert torch.equal(ids_of(llama), want) and torch.equal(ids_of(llama, num_beams=3), beams)
    with sparsify(llama, decode=method):
        cache = transformers.DynamicCache(config=llama.config)
        forward(llama, first[:, :70], past_key_values=cache)
        for i in range(70, 75): forward(llama, first[:, [i]], past_key_values=cache)
        token = forward(llama, torch.cat([first, TOKENS[:, 70:]], 1)[:, 75:], past_key_values=cache)[:, -1].argmax(-1)
    assert token == second[0, -6]

@pytest.mark.parametrize("method", fast(WITHIN, 0, 3), ids=repr)
def test_prompts_in_chunks_and_batches(llama, method):
    with sparsify(llama, prefill=method, decode=method): want = ids_of(llama)
    with sparsify(llama, prefill=method): alone, exact = ids_of(llama), forward(llama, TOKENS)
    assert (exact - forward(llama, TOKENS)).abs().max() > 1e-3
    for size in (32, 96):
        with sparsify(llama, prefill=method, decode=method):
            assert torch.equal(ids_of(llama, prefill_chunk_size=size), want)
        with sparsify(llama, prefill=method): assert torch.equal(ids_of(llama, prefill_chunk_size=size), alone)
    pads = torch.tensor([0, 41])
    both = torch.stack([TOKENS[0], torch.cat([TOKENS.new_zeros(41), TOKENS[0, :159]])])
    mask = (torch.arange(200) >= pads[:, None]).long()
    for reads in (dict(prefill=method), {}):
        with sparsify(llama, decode=method, **reads):
            together = ids_of(llama, both, attention_mask=mask)
            chunks = ids_of(llama, both, attention_mask=mask, prefill_chunk_size=96)
        if not reads: assert torch.equal(chunks, together)
        for b, pad in enumerate(pads):
            with sparsify(llama, decode=method, seed=[fold_in(0, b)], **reads):
                assert torch.equal(ids_of(llama, TOKENS[:, :200 - pad])[0], together[b])

def test_a_tail_in_a_model(llama):
    "One that a prompt, or each part of it, consists of is exact attention; a shorter one is neither that nor none."
    exact = forward(llama, TOKENS)
    with sparsify(llama): want = ids_of(llama)
    for tail, size, same in ((200, None, True), (40, None, False), (32, 32, True), (31, 32, False)):
        with sparsify(llama, prefill=SketchWalk(**DENSE | dict(tail=tail))):
            if size is None: found = forward(llama, TOKENS)
            else:
                cache = transformers.DynamicCache(config=llama.config)
                found = torch.cat([forward(llama, x, past_key_values=cache) for x in TOKENS.split(size, 1)], 1)
                if same: assert torch.equal(ids_of(llama, prefill_chunk_size=size), want)
        assert ((found - exact).abs().max() < 1e-4) == same, (tail, size)
    with sparsify(llama, prefill=SketchWalk(**DENSE)): alone = forward(llama, TOKENS)
    with sparsify(llama, prefill=SketchWalk(**DENSE | dict(tail=40))): found = forward(llama, TOKENS)
    assert torch.equal(found[:, :160], alone[:, :160]) and (found - alone)[:, 160:].abs().max() > 1e-3

def test_a_perplexity_that_would_leak_is_refused(llama):
    "A token that is read may be helped by a list that knows the next ones; one that is decoded is not."
    from sparse_nb.delta import Delta
    from sparse_nb.text import token_bits
    method = SketchWalk(**DENSE)
    for given in (method, Delta(base=method), {2: method}, replace(method, walk="softmax", index="oracle"),
                  replace(method, index="random", refine=2)):
        with pytest.raises(ValueError, match="prefill must choose without a look at later tokens .* got SketchWalk in"):
            token_bits(llama, TOKENS, read=100, prefill=given)
    assert len(token_bits(llama, TOKENS, read=100, prefill=replace(method, index="random"))[0][0]) == 99
    assert len(token_bits(llama, TOKENS, read=100, prefill=method, decode=method)[0][0]) == 99

@pytest.mark.parametrize("name, settings", [
    ("VerticalSlash", dict(vertical=16, slash=16)), ("FlexPrefill", dict(gamma=0.5)), ("XAttention", dict(density=0.3)),
    ("HiP", {}), ("OracleBlocks", {})])
def test_losses_that_have_looked_ahead_are_let_through(llama, name, settings):
    "As the docstring of `token_bits` says: their rows know what is to come."
    import sparse_nb
    from sparse_nb.text import token_bits
    method = getattr(sparse_nb, name)(**settings)
    assert name in token_bits.__doc__ and not getattr(method, "sees_ahead", False)
    assert len(token_bits(llama, TOKENS, read=100, prefill=method)[0][0]) == 99

EACH = [name for name in FAMILIES if name not in REFUSED]  # the walk goes through all layers, others stay in one

@pytest.mark.parametrize("family, method", fast([(family, method) for method in (
    SketchWalk(walk="softmax", **DENSE | dict(dense_layers=0)), SketchWalk(**DENSE | dict(dense_layers=0)),
    SketchWalk(sketch=8, **DENSE | PAPER | dict(dense_layers=0))) for family in EACH],
    *range(len(EACH)), len(EACH) + EACH.index("llama"), 2 * len(EACH) + EACH.index("gemma3, window")), ids=str)
@pytest.mark.filterwarnings("ignore:every layer of .* has a sliding window:UserWarning")
def test_every_family(family, method):
    model = build(family)
    if has_holes(model):
        if method.walk and not all(has_window(layer) for layer in attention_layers(model).values()):
            with pytest.raises(ValueError, match="must be SketchWalk in every layer"): sparsify(model, decode=method)
        method = replace(method, walk=None)
    pads = torch.tensor([0, 41])
    both = torch.stack([TOKENS[0, :140], torch.cat([TOKENS.new_zeros(41), TOKENS[0, :99]])])
    with sparsify(model, prefill=method, decode=method):
        together = ids_of(model, both, attention_mask=(torch.arange(140) >= pads[:, None]).long())
    for b, pad in enumerate(pads):
        with sparsify(model, prefill=method, decode=method):
            assert torch.equal(ids_of(model, TOKENS[:, :140 - pad])[0], together[b])

def test_a_walk_goes_through_layers(llama):
    "Its lists differ from those of each layer alone, and a pass begins anew."
    walk = SketchWalk(walk="softmax", index="mean", **DENSE)
    found = {}
    for name, method in (("walk", walk), ("alone", replace(walk, walk=None))):
        with sparsify(llama, prefill=method):
            found[name] = forward(llama, TOKENS)
            assert torch.equal(forward(llama, TOKENS), found[name])
    assert (found["walk"] - found["alone"]).abs().max() > 1e-3

def test_what_a_session_refuses(llama):
    walk = SketchWalk(walk="softmax", **DENSE)
    assert [type(walk.at_layer(i)).__name__ for i in range(2)] == ["Exact", "SketchWalk"]
    for way in ("prefill", "decode"):
        with pytest.raises(ValueError, match="must be SketchWalk in every layer from 1 to 3, .* got layer 2"):
            sparsify(llama, **{way: walk}, dense_layers=[2])
        sparsify(llama, **{way: SketchWalk(**DENSE)}, dense_layers=[2]).restore()
    for method in (walk, SketchWalk(), SketchWalk(dense_layers=0), replace(walk, dense_layers=0)):
        with pytest.raises(ValueError, match="decode must keep no index and take no steps"):
            register("test_sketch_walk", method)
    cache = prefill(llama, TOKENS[:, :150])
    with sparsify(llama, decode=walk, setup="B"), pytest.raises(
            ValueError, match="q must be the queries of these keys .* read outside the session, .*index of layer 1"):
        forward(llama, TOKENS[:, 150:], past_key_values=cache)
    with sparsify(llama, decode=walk, setup="B"):
        cache = prefill(llama, TOKENS[:, :150])
        assert forward(llama, TOKENS[:, 150:], past_key_values=cache).isfinite().all()
        assert isinstance(cache.layers[1].state, QueryBlocks) and type(cache.layers[0]).__name__ == "DynamicLayer"
    cut = model_of()
    cut.model.layers[2].to("meta")
    with pytest.raises(ValueError, match="model must have the layers of SketchWalk on one device, got cpu, meta"):
        sparsify(cut, prefill=walk)

def test_signs_of_one_group_leave_a_model_and_our_lists_alone(llama):
    "The model's weights in another basis: its logits stay bit for bit, ours too, those of averaged heads do not."
    other = copy.deepcopy(llama)
    D = 16
    for layer in other.model.layers:
        layer.self_attn.q_proj.weight.data[2 * D:] *= -1
        layer.self_attn.k_proj.weight.data[D:] *= -1
    assert torch.equal(forward(llama, TOKENS), forward(other, TOKENS))
    for heads in ("group", "each", "all", "averaged"):
        method = SketchWalk(index="mean", heads=heads, refine=1, **DENSE)
        with sparsify(llama, prefill=method): want = forward(llama, TOKENS)
        with sparsify(other, prefill=method): got = forward(other, TOKENS)
        assert torch.equal(want, got) == (heads != "averaged")

def test_a_walk_is_compared_with_other_methods():
    "Its contexts are read again, within its session."
    from sparse_nb import pocket
    from sparse_nb.evaluate import accuracy
    model, tokenizer = pocket.load()
    walk = SketchWalk(walk="softmax", index="mean", density=0.5)
    methods = {"exact": None, "mean": replace(walk, walk=None), "walk": walk}
    found = accuracy(model, tokenizer, "needle", 400, methods, prompts=2, setup="B", watch=True).set_index("method")
    assert (found.loc["exact"].error < 1e-5).all() and (found.error[["mean", "walk"]] > 1e-3).all()
    walk, mean = (found.loc[name].reset_index() for name in ("walk", "mean"))
    assert (walk.density == mean.density).all() and not (walk.error == mean.error).any()


# a state of a fixed length

@pytest.mark.parametrize("settings", [dict(index=x, heads=y) for x, y in (
    ("fine4", "group"), ("fine16", "each"), ("mean", "all"), ("sketch", "averaged"), ("oracle", "group"))], ids=str)
def test_a_fixed_state_put_key_by_key_is_one_that_grew(settings):
    "Bit for bit, padding included, whatever lies behind the keys; and so is what is decoded, told how many there are."
    g = torch.Generator().manual_seed(4)
    k_, v_ = (torch.randn(3, 2, 230, 16, generator=g) for _ in range(2))
    q, start = torch.randn(3, 4, 1, 16, generator=g), torch.tensor([0, 31, 90])
    s = SketchWalk(block=32, density=0.4, sketch=8, **settings)
    grown, fixed = s.new_state(), s.new_state()
    def grow(state, a, b):
        state.append(k_[:, :, a:b], v_[:, :, a:b], shown=torch.arange(a, b) >= start[:, None])
    for x in (grown, fixed):
        for a, b in ((0, 100), (100, 130)): grow(x, a, b)
    k, v = (torch.full((3, 2, 300, 16), math.nan) for _ in range(2))
    k[:, :, :130], v[:, :, :130] = k_[:, :, :130], v_[:, :, :130]
    fixed.to_static(300)
    places = [x.data_ptr() for x in fixed.buffers()]
    with pytest.raises(ValueError, match="state must be made dynamic"): grow(fixed, 130, 131)
    for n in range(130, 230):
        k[:, :, n], v[:, :, n] = k_[:, :, n], v_[:, :, n]
        fixed.write(k, v, torch.tensor([n]))
        grow(grown, n, n + 1)
        blocks = grown.rows.shape[2]
        assert torch.equal(fixed.rows[:, :, :blocks], grown.rows)
        if n % 7: continue
        same = dict(kv_start=start, return_stats=True)
        want, stats = s.decode(q, k_[:, :, :n + 1], v_[:, :, :n + 1], state=grown, **same)
        got, ours = s.decode(q, k, v, state=fixed, kv_end=torch.full((3,), n + 1), **same)
        assert torch.equal(ours.budget, stats.budget)
        assert_close(got, want, rtol=1e-6)
    assert [x.data_ptr() for x in fixed.buffers()] == places and len(fixed) == 300
    fixed.to_dynamic(230, k)
    def same_bits():
        for name in ("rows", "begin", "tail", "tail_shown"):
            assert torch.equal(getattr(fixed, name), getattr(grown, name)), name
        assert len(fixed) == len(grown)
    same_bits()
    for x in (grown, fixed): x.append(k_[:, :, :40], v_[:, :, :40])
    same_bits()
    for x in (grown, fixed): x.crop(222)
    same_bits()


@pytest.mark.parametrize("settings", [dict(walk="softmax"), dict(walk="renormalised", heads="each"),
                                      dict(walk="unmasked", index="mean", degree=2)], ids=str)
def test_a_fixed_state_of_a_walk_keeps_the_queries_that_no_cache_has(settings):
    "Bit for bit that of a walk that grew, through blocks of unequal beginnings; behind a cut it is not fixed yet."
    g = torch.Generator().manual_seed(5)
    k_, v_ = (torch.randn(3, 2, 170, 16, generator=g) for _ in range(2))
    q_, start = torch.randn(3, 4, 170, 16, generator=g), torch.tensor([0, 11, 40])
    s = SketchWalk(block=16, density=0.4, **dict(index="fine4") | settings)
    grown, fixed = s.new_state(), s.new_state()
    def grow(state, a, b):
        state.append(k_[:, :, a:b], v_[:, :, a:b], q=q_[:, :, a:b], shown=torch.arange(a, b) >= start[:, None])
    def same_bits():
        blocks = grown.rows.shape[2]
        for one, other in ((fixed, grown), (fixed.queries, grown.queries)):
            assert torch.equal(one.rows[:, :, :blocks], other.rows)
            if fixed.static: continue
            for name in ("rows", "begin", "tail", "tail_shown"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
            assert len(one) == len(other)
    for x in (grown, fixed): grow(x, 0, 60)
    k, v = (torch.full((3, 2, 200, 16), math.nan) for _ in range(2))
    k[:, :, :60], v[:, :, :60] = k_[:, :, :60], v_[:, :, :60]
    fixed.to_static(200)
    places = [x.data_ptr() for x in fixed.buffers()]
    assert len(places) == 5
    for n in range(60, 170):
        k[:, :, n], v[:, :, n] = k_[:, :, n], v_[:, :, n]
        fixed.write(k, v, torch.tensor([n]), q=q_[:, :, n:n + 1])
        grow(grown, n, n + 1)
        same_bits()
        if n % 9: continue
        at = dict(kv_start=start, return_stats=True)
        walks = [{}, {}]
        for _ in range(2):  # two layers
            want, stats = s.decode(q_[:, :, n:n + 1], k_[:, :, :n + 1], v_[:, :, :n + 1], state=grown, step=walks[0],
                                   **at)
            got, ours = s.decode(q_[:, :, n:n + 1], k, v, state=fixed, kv_end=torch.full((3,), n + 1), step=walks[1],
                                 **at)
            assert torch.equal(ours.budget, stats.budget)
            assert_close(got, want, rtol=1e-6)
    assert [x.data_ptr() for x in fixed.buffers()] == places
    fixed.to_dynamic(170, k)
    same_bits()
    for x in (grown, fixed): grow(x, 0, 30)
    same_bits()
    for x in (grown, fixed): x.crop(185)
    same_bits()
    fixed.to_static(300)
    assert not fixed.static and not fixed.queries.static and len(fixed) == 185
