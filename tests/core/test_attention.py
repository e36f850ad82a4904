"""Exact attention, partial states, weighted keys and the four simple rules, against independent formulas and generated
examples.
"""
import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.nn.functional import scaled_dot_product_attention

from sparse_nb.attention import (
    Exact, Method, Selection, SoftmaxState, State, Streaming, TopK, TopP, Uniform, assert_close, attention,
    attention_scores, attention_weights,
    budget_counts, fold_in, merge_states, partial_attention, visible_range, select_sinks_window, select_topk,
    select_topp, select_uniform, stream_seeds, weighted_attention, weighted_state)

METHODS = [Exact(), Streaming(sinks=2, window=0.2), TopK(budget=0.3), TopP(mass=0.8), Uniform(samples=0.4)]
WHOLE = [Exact(), Streaming(sinks=1, window=1.0), TopK(budget=1.0), TopP(mass=1.0), Uniform(samples=1.0)]


def make(batch=2, heads=6, groups=2, queries=3, keys=45, size=16, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, size), (batch, groups, keys, size), (batch, groups, keys, size)
    return [torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for s in shapes]


def naive(q, k, v, *, causal=False, kv_start=None, kv_end=None, scale=None, weight=None):
    "Attention with explicit sums over visible keys, a query of a head at a time; `weight` [B, H, Q, N] is Eq. 3's w."
    out = torch.empty(q.shape, dtype=torch.float64)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        start = 0 if kv_start is None else int(kv_start[b])
        stop = k.shape[2] if kv_end is None else int(kv_end[b])
        if causal: stop += i + 1 - q.shape[2]
        g = h * k.shape[1] // q.shape[1]
        e = torch.exp(k[b, g, start:stop].double() @ q[b, h, i].double()
                      * (q.shape[3]**-0.5 if scale is None else scale))
        if weight is not None: e = e * weight[b, h, i, start:stop]
        out[b, h, i] = (e[:, None] * v[b, g, start:stop].double()).sum(0) / e.sum()
    return out


# exact attention

@pytest.mark.parametrize("heads, groups", [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("queries, keys, size", [(1, 1, 64), (1, 63, 80), (7, 111, 96), (64, 64, 16)])
@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_attention_is_sdpa(heads, groups, queries, keys, size, dtype, rtol):
    q, k, v = make(2, heads, groups, queries, keys, size, dtype)
    assert_close(attention(q, k, v), scaled_dot_product_attention(q, k, v, enable_gqa=True), rtol)
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    assert_close(attention(q, k, v, causal=True, scale=0.3),
                 scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True), rtol)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("start, length", [(None, None), ([0, 7], None), (None, [45, 20]), ([3, 17], [40, 20])])
@pytest.mark.parametrize("int_type", [torch.int32, torch.int64])
def test_masks(causal, start, length, int_type):
    q, k, v = make()
    masks = dict(causal=causal, kv_start=None if start is None else torch.tensor(start, dtype=int_type),
                 kv_end=None if length is None else torch.tensor(length, dtype=int_type))
    want = naive(q, k, v, **masks)
    assert_close(attention(q, k, v, **masks), want, 1e-13)
    assert_close(attention_weights(q, k, **masks).unflatten(1, (2, 3)) @ v[:, :, None],
                 want.unflatten(1, (2, 3)), 1e-13)
    for method in WHOLE: assert_close(method.decode(q, k, v, seed=0, **masks), want, 1e-13, repr(method))


@pytest.mark.parametrize("places", [[30, 8, 44], [[0, 43, 9], [19, 40, 7]]])
def test_places_among_the_keys_beside_masks(places):
    "A query sees no key behind its place, and none behind the valid keys."
    q, k, v = make()
    places, start, stop = torch.tensor(places), torch.tensor([0, 7]), torch.tensor([42, 20])
    out = attention(q, k, v, positions=places, kv_start=start, kv_end=stop)
    scores = attention_scores(q, k, positions=places, kv_start=start, kv_end=stop)
    for i, place in enumerate(places.expand(2, 3).T):
        seen = torch.minimum(place + 1, stop)
        assert_close(out[:, :, [i]], naive(q[:, :, [i]], k, v, kv_start=start, kv_end=seen), 1e-13)
        assert torch.equal(scores[:, 0, i].isfinite().sum(-1), seen - start)


def test_rows_outside_start_and_len_are_never_used():
    q, k, v = make()
    masks = dict(kv_start=torch.tensor([0, 7]), kv_end=torch.tensor([45, 20]))
    want = {m: m.decode(q, k, v, seed=0, causal=True, **masks) for m in METHODS}
    k[1, :, :7], k[1, :, 20:], v[1, :, :7], v[1, :, 20:] = math.nan, math.inf, math.nan, math.inf
    for method in METHODS:
        assert torch.equal(method.decode(q, k, v, seed=0, causal=True, **masks), want[method]), method


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_autocast_changes_nothing(method):
    q, k, v = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16): out = method.decode(q, k, v, seed=0)
    assert torch.equal(out, method.decode(q, k, v, seed=0))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_strides_change_nothing(method):
    q, k, v = make()
    q_, k_, v_ = q.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([k, k], -1)[..., :16], v.mT.contiguous().mT
    assert not (q_.is_contiguous() or k_.is_contiguous() or v_.is_contiguous())
    assert_close(method.decode(q_, k_, v_, seed=0, causal=True), method.decode(q, k, v, seed=0, causal=True), 1e-13)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_gradients(method):
    q, k, v = (x.requires_grad_() for x in make(1, 2, 1, 2, 9, 4))
    assert torch.autograd.gradcheck(lambda v: method.decode(q, k, v, seed=0, causal=True), (v,))
    if method in (Exact(), METHODS[1]):
        assert torch.autograd.gradcheck(lambda q, k: method.decode(q, k, v, seed=0, causal=True), (q, k))
    out = method.decode(q, k, v, seed=0)
    with torch.no_grad(): assert torch.equal(method.decode(q, k, v, seed=0), out)
    with torch.inference_mode(): assert torch.equal(method.decode(q, k, v, seed=0), out)


def test_huge_scores_do_not_overflow():
    q, k, v = make(dtype=torch.float32)
    assert_close(attention(q * 1e4, k, v), v.repeat_interleave(3, 1)
                 .gather(2, attention_scores(q, k).argmax(-1)[..., None].expand(q.shape)), 1e-6)


# partial states

values = st.one_of(st.just(-math.inf), st.floats(-1e4, 1e4), st.floats(-2, 2))


@st.composite
def state(draw):
    "A state of two queries; -inf is the empty one."
    m = torch.tensor([draw(values), draw(values)], dtype=torch.float64).view(1, 1, 2)
    l = torch.tensor([draw(st.floats(1e-3, 1e6)), draw(st.floats(1e-3, 1e6))], dtype=torch.float64).view(1, 1, 2)
    o = torch.tensor([[draw(st.floats(-9, 9)) for _ in range(3)] for _ in range(2)],
                     dtype=torch.float64).view(1, 1, 2, 3) * l[..., None]
    return SoftmaxState(m, l.masked_fill(m == -math.inf, 0), o.masked_fill((m == -math.inf)[..., None], 0))


def same(a, b, tolerance):
    "Equal states: the same maximum, sums within `tolerance` of the size of their terms (|v| <= 9)."
    assert torch.equal(a.m, b.m)
    assert ((a.l - b.l).abs() <= tolerance * b.l).all()
    assert ((a.o - b.o).abs() <= 9 * tolerance * b.l[..., None]).all()


@settings(max_examples=300, deadline=None)
@given(state(), state(), state())
def test_merge_is_associative_and_commutative(a, b, c):
    same(merge_states(merge_states(a, b), c), merge_states(a, merge_states(b, c)), 1e-14)
    assert all(map(torch.equal, merge_states(a, b), merge_states(b, a)))


@settings(max_examples=100, deadline=None)
@given(state())
def test_empty_state_is_neutral_to_the_last_bit(a):
    empty = SoftmaxState.empty(torch.zeros(1, 1, 2, 3, dtype=torch.float64))
    for merged in (merge_states(a, empty), merge_states(empty, a)): assert all(map(torch.equal, merged, a))


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(1, 44), max_size=8), st.randoms(use_true_random=False), st.booleans(), st.integers(0, 30),
       st.integers(34, 45))
def test_any_parts_in_any_order_are_the_whole(cuts, random, causal, start, length):
    q, k, v = make()
    masks = dict(causal=causal, kv_start=torch.tensor([0, start]), kv_end=torch.tensor([length, 45]))
    edges = [0, *sorted(cuts), 45]
    states = [partial_attention(q, k, v, begin=a, stop=b, **masks) for a, b in itertools.pairwise(edges)]
    while len(states) > 1:
        random.shuffle(states)
        states.append(merge_states(states.pop(), states.pop()))
    assert_close(states[0].output(), naive(q, k, v, **masks), 1e-13)


# weighted keys

def test_weighted_attention_is_equation_3():
    q, k, v = make()
    rng = torch.Generator().manual_seed(1)
    index = torch.rand(2, 6, 3, 45, generator=rng).argsort(-1)[..., :12]
    selection = Selection(index, torch.randint(0, 5, index.shape, generator=rng).double())
    assert_close(weighted_attention(q, k, v, selection, scale=0.4),
                 naive(q, k, v, scale=0.4, weight=selection.dense(45)), 1e-13)
    assert torch.equal(selection.budget, (selection.dense(45) > 0).sum(-1))
    assert torch.equal(selection.density(45), selection.budget / 45)


def test_blocks_of_queries_change_nothing(monkeypatch):
    q, k, v = make(queries=20)
    selection = select_topk(q, k, budget=9)
    want, drawn = weighted_attention(q, k, v, selection), select_uniform(q, k, samples=9, seed=0).index
    monkeypatch.setattr("sparse_nb.core.selection.COPIED_AT_ONCE", 1)
    monkeypatch.setattr("sparse_nb.core.selection.TICKETS", 1)
    assert_close(weighted_attention(q, k, v, selection), want, 1e-14)
    assert torch.equal(select_uniform(q, k, samples=9, seed=0).index, drawn)


def test_disjoint_selections_merge_to_their_union():
    q, k, v = make()
    top = select_topk(q, k, budget=10)
    first, rest = (Selection(top.index[..., s], top.weight[..., s] * w)
                   for s, w in ((slice(0, 4), 1), (slice(4, 10), 3)))
    union = Selection(top.index, torch.cat([first.weight, rest.weight], -1))
    assert_close(merge_states(weighted_state(q, k, v, first), weighted_state(q, k, v, rest)).output(),
                 weighted_attention(q, k, v, union), 1e-13)


def test_numerator_and_denominator_are_unbiased_for_unequal_probabilities():
    "Independent draws with a probability for each key: the expectation is a sum over all 64 subsets."
    q, k, v = make(1, 1, 1, 1, 6, 4)
    p = torch.tensor([0.1, 0.9, 0.5, 0.3, 1.0, 0.2], dtype=torch.float64)
    taken = torch.tensor(list(itertools.product((0, 1), repeat=6)), dtype=torch.float64)
    chance = (taken * p + (1 - taken) * (1 - p)).prod(-1)
    selection = Selection(torch.arange(6).expand(1, 1, 64, 6), (taken / p)[None, None])
    m, l, o = weighted_state(q.expand(1, 1, 64, 4), k, v, selection)
    size = torch.exp(m) * chance
    e = attention_scores(q, k).exp()
    assert_close((l * size).nansum(), e.sum(), 1e-13)
    assert_close((o * size[..., None]).sum(2), (e @ v)[:, :, 0], 1e-13)


# rules

def test_streaming_keeps_ends():
    q, k, _ = make()
    kept = select_sinks_window(q, k, sinks=2, window=3, causal=True, kv_start=torch.tensor([0, 7]),
                               kv_end=torch.tensor([45, 20])).dense(45)
    assert kept[0, 5, 2].nonzero().flatten().tolist() == [0, 1, 42, 43, 44]
    assert kept[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 40, 41, 42]
    assert kept[1, 3, 1].nonzero().flatten().tolist() == [7, 8, 16, 17, 18]
    assert kept.max() == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 42))
def test_topk_has_the_least_missing_mass(seed, budget):
    q, k, _ = make(seed=seed)
    weights = attention_weights(q, k, causal=True)
    kept = (weights * select_topk(q, k, budget=budget, causal=True).dense(45)).sum(-1)
    assert_close(kept, weights.sort(-1, descending=True).values[..., :budget].sum(-1), 1e-13)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-6, 1))
def test_topp_is_the_smallest_set_with_the_mass(seed, mass):
    q, k, _ = make(seed=seed)
    weights = attention_weights(q, k, causal=True)
    selection = select_topp(q, k, mass=mass, causal=True)
    kept = weights.gather(-1, selection.index) * selection.weight
    assert (kept.sum(-1) >= mass - 1e-12).all()
    largest = weights.sort(-1, descending=True).values.cumsum(-1)
    one_less = torch.where(selection.budget > 1,
                           largest.gather(-1, (selection.budget - 2).clamp(min=0)[..., None])[..., 0], 0)
    assert (one_less < mass + 1e-12).all()
    assert (selection.dense(45)[weights == 0] == 0).all()


@pytest.mark.parametrize("mass, count", [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.8, 4), (1.0, 4)])
def test_a_mass_that_is_just_reached_asks_for_no_other_key(mass, count):
    "Four keys of a quarter each"
    q, k, _ = make(keys=4)
    assert (select_topp(q, k * 0, mass=mass).budget == count).all()


@pytest.mark.parametrize("method", METHODS[:4], ids=repr)
def test_a_block_of_queries_is_its_rows_one_by_one(method):
    q, k, v = make(queries=5)
    out = method.decode(q, k, v, causal=True, kv_start=torch.tensor([0, 9]))
    for i in range(5):
        row = method.decode(q[:, :, i:i + 1], k, v, kv_start=torch.tensor([0, 9]), kv_end=torch.full((2,), 41 + i))
        assert_close(out[:, :, i:i + 1], row, 1e-13)


@given(st.integers(1, 10**6), st.integers(1, 10**4))
@example(100, 7)  # 0.07 * 100 is more than 7 in floating point
@settings(deadline=None)
def test_shares_round_up_without_noise(n, parts):
    "A share that means a whole number of keys gives this number, and a little more gives one key more."
    whole = min(parts, n)
    count, slots = budget_counts(whole / n, torch.tensor([[[n]]]), n)
    assert count.item() == slots == whole
    if whole < n: assert budget_counts((whole + 0.01) / n, torch.tensor([[[n]]]), n)[1] == whole + 1


# methods

@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_methods_stats_and_json(method):
    q, k, v = make()
    masks = dict(causal=True, kv_start=torch.tensor([0, 7]))
    out, stats = method.decode(q, k, v, seed=3, return_stats=True, **masks)
    assert torch.equal(out, method.decode(q, k, v, seed=3, **masks))
    selection = method.select(q, k, seed=3, **masks)
    visible = torch.isfinite(attention_scores(q, k, **masks)).sum(-1)
    assert torch.equal(stats.budget, selection.budget) and torch.equal(stats.values_read, selection.budget)
    assert_close(stats.density, selection.budget / visible, 1e-6)
    assert torch.equal(stats.keys_scored, visible if isinstance(method, (Exact, TopK, TopP)) else selection.budget)
    assert stats.certificate is None and stats.index_bytes == 0
    assert Method.from_json(method.to_json()) == method == type(method).from_json(method.to_json())
    assert eval(repr(method)) == method


def test_methods_in_methods_go_to_json_and_back():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Pair(Method):
        first: Method
        second: Method

    pair = Pair(TopK(3), Pair(Uniform(0.5), Streaming()))
    assert Method.from_json(pair.to_json()) == pair


@pytest.mark.parametrize("method", [TopK(50), Uniform(50), Streaming(sinks=3, window=50),
                                    Streaming(sinks=60, window=1)], ids=repr)
def test_a_count_beyond_the_visible_keys_means_all_of_them(method):
    q, k, v = make(queries=3, keys=41)
    masks = dict(causal=True, kv_start=torch.tensor([0, 30]))
    out, stats = method.decode(q, k, v, seed=1, return_stats=True, **masks)
    first, end = visible_range(q, k, **masks)
    assert_close(out, attention(q, k, v, **masks), 1e-6)
    assert torch.equal(stats.budget, (end - first).expand(2, 6, 3)) and (stats.density == 1).all()


# prompts

PROMPTS = [Exact(), Streaming(sinks=3, window=20), Streaming(sinks=200, window=0.2), TopK(budget=30), TopK(budget=0.3),
           TopP(mass=0.7), Uniform(samples=25), Uniform(samples=0.3)]


def of_heads(seed, batch, heads): return fold_in(seed, torch.arange(batch)[:, None], torch.arange(heads))


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_prompt_of_any_length_is_causal_attention(dtype, rtol):
    for n, last in ((1, 1), (127, 127), (128, 128), (300, 300), (300, 40)):
        q, k, v = make(queries=last, keys=n, dtype=dtype)
        want = attention(q, k, v, causal=True, scale=0.3)
        for method in (Exact(), Streaming(sinks=4, window=300), Streaming(window=1.0, sinks=0), TopK(budget=10**6),
                       TopP(mass=1.0), Uniform(samples=300)):
            out = method.prefill(q, k, v, seed=0, scale=0.3)
            assert out.dtype == dtype
            assert_close(out, want, rtol, repr(method))


@pytest.mark.parametrize("method", PROMPTS, ids=repr)
def test_a_padded_prompt_is_its_rows_alone(method):
    "To the bit, but for `streaming_prefill`, which cuts a prompt into blocks where the longest row begins."
    def agree(a, b): assert torch.equal(a, b) if method != PROMPTS[1] else assert_close(a, b, 1e-6) is None
    q, k, v = make(3, queries=290, keys=290, dtype=torch.float32)
    start, seeds = torch.tensor([0, 33, 289]), of_heads(4, 3, 6)
    out = method.prefill(q, k, v, seed=4, kv_start=start)
    k[1, :, :33] = v[2, :, :289] = q[1, :, :33] = math.nan
    assert torch.equal(out, method.prefill(q, k, v, seed=seeds, kv_start=start))
    for row, s in enumerate(start):
        assert not out[row, :, :s].any()
        alone = [x[row:row + 1, :, s:].clone() for x in (q, k, v)]
        agree(out[row:row + 1, :, s:], method.prefill(*alone, seed=seeds[row:row + 1]))
    same = method.prefill(q[:2, :, 33:], k[:2, :, 33:], v[:2, :, 33:], seed=seeds[:2])
    agree(same, method.prefill(q[:2], k[:2], v[:2], seed=seeds[:2], kv_start=torch.tensor([33, 33]))[:, :, 33:])


@pytest.mark.parametrize("method", PROMPTS, ids=repr)
@pytest.mark.parametrize("start", [None, torch.tensor([0, 61])], ids=["", "padded"])
def test_a_prompt_in_chunks(method, start):
    "The second row's padding is longer than the first chunk."
    q, k, v = make(queries=280, keys=280)
    whole = method.prefill(q, k, v, seed=4, kv_start=start)
    cuts = [0, 1, 60, 200, 280]
    chunks = torch.cat([method.prefill(q[:, :, a:b], k[:, :, :b], v[:, :, :b], seed=4, kv_start=start)
                        for a, b in itertools.pairwise(cuts)], 2)
    if method.random: assert not torch.equal(chunks, whole) and torch.equal(chunks == 0, whole == 0)
    else: assert_close(chunks, whole, 1e-13)


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_prompt_by_streaming_prefill_is_that_of_decoding(dtype, rtol):
    "The second row's padding reaches into the queries, the third row is padding alone."
    q, k, v = make(3, queries=200, keys=280, dtype=dtype)
    start = torch.tensor([0, 130, 280])
    for sinks, window in ((0, 1), (3, 20), (40, 200), (300, 300)):
        method = Streaming(sinks, window)
        got, want = (f(q, k, v, scale=0.3, kv_start=start) for f in (method.prefill, super(Streaming, method).prefill))
        assert torch.equal(got == 0, want == 0) and not got[2].any()
        assert_close(got, want, rtol)


def test_the_streams_of_a_prompt_are_all_different(monkeypatch):
    q, k, v = make(queries=300, keys=300)
    drawn = []
    monkeypatch.setattr("sparse_nb.core.selection.stream_seeds",
                        lambda q, seed: drawn.append(stream_seeds(q, seed)) or drawn[-1])
    Uniform(0.1).prefill(q, k, v, seed=0, kv_start=torch.tensor([0, 17]))
    found = torch.cat([x.flatten() for x in drawn])
    assert len(found) == 6 * (300 + 283) and len(found.unique()) == len(found)


@pytest.mark.parametrize("call, error, message", [
    (lambda q, k, v: Exact().prefill(q, k[:, :, :2], v[:, :, :2]), ValueError,
     "q must not have more positions than k, 2, when causal, got 3"),
    (lambda q, k, v: Exact().prefill(q, k, v, kv_start=torch.tensor([0, -1])), ValueError,
     "kv_start must not be negative, got -1"),
    (lambda q, k, v: Exact().prefill(q, k, v, kv_start=torch.tensor([0])), ValueError,
     "kv_start must have shape [B] = [2], got [1]"),
    (lambda q, k, v: Exact().prefill(q, k, v, kv_start=[0, 1]), TypeError,
     "kv_start must be an integer tensor of shape [B], got list"),
    (lambda q, k, v: Uniform().prefill(q, k, v, scale=0), ValueError, "scale must be positive and finite, got 0"),
    (lambda q, k, v: Uniform().prefill(q, k, v, seed=-1), ValueError, "seed must lie in [0, 2**63), got -1")])
def test_bad_prompts(call, error, message):
    with pytest.raises(error) as caught: call(*make())
    assert message in str(caught.value)


def test_without_a_seed_a_prompt_is_random():
    q, k, v = make(queries=45)
    assert not torch.equal(Uniform(0.3).prefill(q, k, v), Uniform(0.3).prefill(q, k, v))
    assert [m.random for m in METHODS] == [False] * 4 + [True] and Method.random is False
    assert not hasattr(Method, "prefill")


# what is kept about the keys

class Sums(State):
    def features(self, k, v): return torch.stack([k.sum(-1), v.sum(-1)], -1)


def sums(k, v): return Sums().features(k, v)


def test_a_state_follows_its_cache():
    _, k, v = make(3)
    state = Sums()
    state.crop(0); state.pick_sequences(torch.tensor([0, 0])); state.reset()   # nothing to do yet
    assert len(state) == 0 and state.rows is None
    for a, b in ((0, 20), (20, 21), (21, 21), (21, 45)): state.append(k[:, :, a:b], v[:, :, a:b])
    assert torch.equal(state.rows, sums(k, v)) and len(state) == 45
    rows = torch.tensor([2, 0, 2, 1])
    state.pick_sequences(rows)
    state.crop(40)
    k, v = k[rows], v[rows]
    assert torch.equal(state.rows, sums(k, v)[:, :, :40])
    state.append(k[:, :, 40:], v[:, :, 40:])
    assert torch.equal(state.rows, sums(k, v))
    state.crop(0)
    assert len(state) == 0
    state.append(k, v)
    assert torch.equal(state.rows, sums(k, v))
    state.reset()
    state.append(k[:1], v[:1])
    assert torch.equal(state.rows, sums(k[:1], v[:1])) and all(m.new_state() is None for m in METHODS)


@pytest.mark.parametrize("call, error, message", [
    (lambda s, k, v: s.append(k[:1], v[:1]), ValueError, "k must have the batch size of the state, 2, got 1"),
    (lambda s, k, v: s.append(k[:, :1], v[:, :1]), ValueError, "k must have the heads of the state, 2, got 1"),
    (lambda s, k, v: s.append(k, v[:, :, 1:]), ValueError, "v must have the shape of k up to the last axis, [2, 2, "
     "45], got [2, 2, 44]"),
    (lambda s, k, v: s.append(k[0], v[0]), ValueError, "k must have shape [B, G, n, D], got [2, 45, 16]"),
    (lambda s, k, v: s.append(k, None), TypeError, "v must be a torch.Tensor, got NoneType"),
    (lambda s, k, v: s.append(k.to("meta"), v.to("meta")), ValueError,
     "k must be on the device of the state, cpu, got meta"),
    (lambda s, k, v: s.crop(46), ValueError, "length must lie in [0, 45], got 46"),
    (lambda s, k, v: s.crop(-1), ValueError, "length must lie in [0, 45], got -1"),
    (lambda s, k, v: s.crop(3.0), TypeError, "length must be an int, got float"),
    (lambda s, k, v: s.pick_sequences([0]), TypeError, "rows must be an int64 tensor, got list"),
    (lambda s, k, v: s.pick_sequences(torch.tensor([0.0])), TypeError,
     "rows must be an int64 tensor, got torch.float32"),
    (lambda s, k, v: s.pick_sequences(torch.tensor([True, False])), TypeError,
     "rows must be an int64 tensor, got torch.bool"),
    (lambda s, k, v: s.pick_sequences(torch.tensor(0)), ValueError,
     "rows must have shape [B'] with nothing empty, got []"),
    (lambda s, k, v: s.pick_sequences(torch.tensor([0, 2])), ValueError, "rows must lie in [0, 2), got [0, 2]"),
    (lambda s, k, v: s.pick_sequences(torch.tensor([-1])), ValueError, "rows must lie in [0, 2), got [-1]"),
    (lambda s, k, v: State().append(k, v), NotImplementedError, "State does not say what it keeps about a key")])
def test_what_a_state_refuses(call, error, message):
    _, k, v = make()
    state = Sums()
    state.append(k, v)
    with pytest.raises(error) as caught: call(state, k, v)
    assert message in str(caught.value) and type(caught.value) is error
    assert torch.equal(state.rows, sums(k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("method", PROMPTS, ids=repr)
def test_a_prompt_on_a_gpu(method):
    inputs, start, seeds = make(queries=200, keys=200), torch.tensor([0, 50]), of_heads(7, 2, 6)
    want = method.prefill(*inputs, seed=7, kv_start=start)
    for seed in (7, torch.tensor(7), seeds.cuda()):
        assert_close(method.prefill(*(x.cuda() for x in inputs), seed=seed, kv_start=start.cuda()), want, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_gpu_gives_the_same_and_is_never_waited_for(method):
    "TopP is the exception to the second half, as its documentation says: its number of slots depends on the scores."
    masks = dict(kv_start=torch.tensor([0, 7]), kv_end=torch.tensor([45, 20]))
    inputs = make()
    want = method.decode(*inputs, seed=7, causal=True, **masks)
    inputs, masks, seed = ([x.cuda() for x in inputs], {name: x.cuda() for name, x in masks.items()},
                           torch.tensor(7).cuda())
    method.decode(*inputs, seed=seed, causal=True, **masks)
    if not isinstance(method, TopP): torch.cuda.set_sync_debug_mode("error")
    try: out = method.decode(*inputs, seed=seed, causal=True, **masks)
    finally: torch.cuda.set_sync_debug_mode("default")
    assert_close(out, want, 1e-12)
