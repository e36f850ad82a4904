"""Delta Attention: the reference against an independent transcription of its equations, and what must not happen.

No row depends on a later key or query, no mass is overstated, padding and chunks change nothing, bad input is refused.
"""
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_nb.core.blocks import BlockPattern, sinks_window_pattern, streaming_prefill
from sparse_nb.core.exact import assert_close, attention, attention_scores
from sparse_nb import Exact, Method, Streaming, TopK, TopP, Uniform
from sparse_nb.core.prefill import PrefillByDecode
from sparse_nb.core.registry import method_class
from sparse_nb.delta import CORRECTIONS, Delta, delta_prefill
from sparse_nb.hf import sparsify
from sparse_nb.methods.hip import HiP
from sparse_nb.methods.vertical_slash import VerticalSlash

FP64 = torch.float64
CORRECTING = "tangent", "delta", "recompute"
BASED = *CORRECTING, "none"  # what a base, which has no window, can have
EVERY = pytest.mark.parametrize("correction", CORRECTIONS)


def problem(B=1, G=2, R=2, Q=60, N=75, D=8, dtype=FP64, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=generator, dtype=FP64)
    return [x.to(dtype) for x in (size * new(B, G * R, Q, D), new(B, G, N, D), new(B, G, N, D))]


def shown_by(i, anchor, window, sinks, aligned):
    "Keys of sinks and window that row i shows."
    low = (anchor if aligned else i) - window + 1
    return [t < sinks or t >= low for t in range(i + 1)]


def by_hand(q, k, v, *, window, sinks, gamma, correction, anchors, tail, scale=None, shown=None):
    "The equations of one sequence without padding, row by row."
    aligned = correction in ("tangent", "aligned")
    (_, H, Q, D), (_, G, N, _) = q.shape, k.shape
    out, scale = torch.zeros_like(q), D**-0.5 if scale is None else scale
    for h in range(H):
        keys, values = k[0, h * G // H], v[0, h * G // H]
        left = []                   # of each anchor: difference, query, and of what it missed T, mean key and value
        for r in range(Q):
            i = N - Q + r
            anchor = max(i // gamma * gamma, N - Q)
            e = torch.exp(scale * keys[:i + 1] @ q[0, h, r])
            see = torch.tensor(shown(h, r) if shown else shown_by(i, anchor, window, sinks, aligned))
            exact = e @ values[:i + 1] / e.sum()
            sparse = e[see] @ values[:i + 1][see] / e[see].sum() if see.any() else torch.zeros_like(exact)
            if i == anchor and correction in CORRECTING:
                lost = e * ~see
                T = lost.sum()
                left.append((exact - sparse, q[0, h, r], T, lost @ keys[:i + 1] / T, lost @ values[:i + 1] / T))
            if r >= Q - tail or i == anchor and correction in CORRECTING: out[0, h, r] = exact
            elif correction in ("none", "aligned", "recompute"): out[0, h, r] = sparse
            elif correction == "delta": out[0, h, r] = sparse + left[-1][0]
            else:
                mass, sums = e[see].sum(), e[see] @ values[:i + 1][see]
                bounds = [(float(T * torch.exp(scale * (q[0, h, r] - at) @ key)), value)
                          for _, at, T, key, value in left[-anchors:] if T > 0]
                more, value = max(bounds, key=lambda x: x[0]) if bounds else (0.0, 0.0)
                out[0, h, r] = (sums + more * value) / (mass + more)
    return out


# the equations

@EVERY
@pytest.mark.parametrize("window, sinks, gamma, anchors, tail", [
    (20, 3, 16, 16, 9), (5, 0, 13, 2, 0), (1, 1, 4, 1, 3), (70, 9, 64, 3, 0), (3, 2, 100, 16, 0), (9, 80, 8, 4, 1)])
def test_is_what_the_equations_say(correction, window, sinks, gamma, anchors, tail):
    x, scale = problem(G=1, R=2, size=2), 0.3
    given = dict(window=window, sinks=sinks, gamma=gamma, anchors=anchors, tail=tail, scale=scale)
    got = delta_prefill(*x, correction=correction, **given)
    assert_close(got, by_hand(*x, correction=correction, **given), rtol=1e-12)


@pytest.mark.parametrize("correction", BASED)
@pytest.mark.parametrize("kind", ["topk", "blocks"])
def test_a_base_is_what_the_equations_say(correction, kind):
    x, given = problem(G=2, R=2), dict(gamma=16, anchors=3, tail=5, correction=correction)
    if kind == "topk":
        base, chosen = TopK(budget=9), TopK(budget=9).select(*x[:2], causal=True).dense(75) > 0
    else:
        base = Blocks()
        pattern = base.pattern(*x[:2], scale=None, kv_start=None)
        chosen = pattern.seen(torch.arange(60)).repeat_interleave(2, 1)
    shown = lambda h, r: chosen[0, h, r, :16 + r].tolist()
    want = by_hand(*x, window=1, sinks=0, shown=shown, **given)
    assert_close(delta_prefill(*x, base=base, **given), want, rtol=1e-12)


class Blocks(PrefillByDecode, Method):
    "A base with a pattern: random blocks for each group, in which a row may see nothing."
    def pattern(self, q, k, *, scale, kv_start):
        shape = 1, k.shape[1], -(-q.shape[2] // 32), -(-k.shape[2] // 32)
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
        mask[..., 0, 0] = False
        return BlockPattern.from_mask(mask, queries=q.shape[2], keys=k.shape[2], query_block=32, key_block=32)


def test_a_row_that_sees_nothing_is_nan_nowhere():
    x = problem(Q=75)
    assert not Blocks().pattern(*x[:2], scale=None, kv_start=None).seen(torch.arange(32)).any()
    for correction in BASED:
        out, stats = delta_prefill(*x, base=Blocks(), gamma=16, tail=0, correction=correction, return_stats=True)
        assert out.isfinite().all() and stats.missing.isfinite().all() and (stats.missing[..., 0] == 1).all()


def test_sinks_and_window_as_a_pattern_or_a_selection_are_the_same():
    class Lists(Streaming):
        def pattern(self, q, k, *, scale, kv_start):
            return sinks_window_pattern(q, k, sinks=self.sinks, window=self.window, query_block=32, key_block=32)
    x = problem(B=2, Q=150, N=200)
    for correction in ("delta", "recompute", "none"):
        given = dict(gamma=16, tail=10, correction=correction, return_stats=True)
        want, told = delta_prefill(*x, window=20, sinks=3, **given)
        for base in (Streaming(sinks=3, window=20), Lists(sinks=3, window=20)):
            got, stats = delta_prefill(*x, base=base, **given)
            assert_close(got, want, rtol=1e-12)
            assert torch.equal(stats.keys, told.keys) and torch.equal(stats.anchors, told.anchors)
            torch.testing.assert_close(stats.missing, told.missing)
            torch.testing.assert_close(stats.error, told.error, equal_nan=True)


def test_none_is_streaming():
    x = problem(B=2, Q=300, N=330, dtype=torch.float32)
    got = delta_prefill(*x, window=40, sinks=3, correction="none", tail=0)
    assert_close(got, streaming_prefill(*x, window=40, sinks=3), rtol=1e-6)


# what must not happen

@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([0.5, 2.0, 8.0]), window=st.integers(1, 40),
       sinks=st.integers(0, 5), gamma=st.integers(1, 40), anchors=st.integers(1, 20))
def test_tangent_never_overstates_and_stays_in_the_hull(seed, size, window, sinks, gamma, anchors):
    q, k, v = problem(G=1, R=2, Q=75, N=75, seed=seed, size=size)
    ones = torch.cat([torch.ones_like(v[..., :1]), v[..., 1:]], -1)
    given = dict(window=window, sinks=sinks, gamma=gamma, anchors=anchors, tail=0)
    out = delta_prefill(q, k, ones, **given)
    assert (out[..., 0] - 1).abs().max() < 1e-12                                  # weights sum to one
    assert (out <= ones.cummax(2).values + 1e-9).all() and (out >= ones.cummin(2).values - 1e-9).all()
    # values that are 1 where a row sees the key: the output is the share of what it sees, too large if mass is lost
    # to the bound, and never too small
    i = torch.arange(75)
    low = i // gamma * gamma - window + 1
    weights = attention_scores(q, k, causal=True).softmax(-1)
    for r in range(0, 75, 7):
        see = (i < sinks) | (i >= low[r])
        shown = see.to(FP64).view(1, 1, 75, 1).expand_as(v)
        assert (delta_prefill(q, k, shown, **given)[0, :, r, 0] >= weights[0, :, r, see].sum(-1) - 1e-9).all()


@EVERY
def test_no_row_knows_a_later_key_or_query(correction):
    q, k, v = problem(Q=90, N=100)
    run = lambda *x: delta_prefill(*x, window=12, sinks=2, gamma=16, correction=correction, tail=0)
    before = run(q, k, v)
    for at in (1, 5, 6, 7, 21, 22, 23, 54, 89):
        x, y, z = q.clone(), k.clone(), v.clone()
        x[:, :, at:], y[:, :, 10 + at:], z[:, :, 10 + at:] = 3, 7, -9
        after = run(x, y, z)
        assert torch.equal(before[:, :, :at], after[:, :, :at])
        assert not torch.equal(before[:, :, at:], after[:, :, at:])


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_gradients_reach_no_later_row(correction):
    x = [y.requires_grad_() for y in problem(Q=50, N=50)]
    out = delta_prefill(*x, window=12, sinks=2, gamma=16, correction=correction, tail=0)
    for r in (3, 16, 37):
        for y in torch.autograd.grad(out[:, :, r].square().sum(), x, retain_graph=True):
            assert y[:, :, :r + 1].any() and not y[:, :, r + 1:].any()


@pytest.mark.parametrize("correction", ["tangent", "delta", "recompute"])
def test_anchors_and_tail_are_exact(correction):
    x = problem(B=2, Q=100, N=107)
    exact = attention(*x, causal=True)
    got = delta_prefill(*x, window=9, sinks=1, gamma=16, correction=correction, tail=10)
    at = [0, *range(9, 90, 16), *range(90, 100)]          # first row, multiples of 16 from position 7 on, tail
    assert_close(got[:, :, at], exact[:, :, at], rtol=1e-12)
    others = [r for r in range(40, 90) if r not in at]
    assert ((got - exact)[:, :, others].norm(dim=-1) > 1e-6).all()


@pytest.mark.parametrize("dtype, rtol", [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 1e-6)], ids=str)
def test_is_computed_in_float32(dtype, rtol):
    x = problem(B=2, Q=100, N=107, dtype=dtype)
    for correction in CORRECTIONS:
        given = dict(window=20, sinks=1, gamma=16, correction=correction, tail=3)
        got = delta_prefill(*x, **given)
        assert got.dtype == dtype
        assert_close(got, delta_prefill(*(y.double() for y in x), **given), rtol=rtol)
        with torch.autocast("cpu", dtype=torch.bfloat16): assert torch.equal(got, delta_prefill(*x, **given))


# padding, chunks, edges

@EVERY
def test_padding_changes_nothing(correction):
    starts, x = [0, 7, 40, 71, 75, 200], problem(B=6)
    for b, start in enumerate(starts):
        for y in x[1:]: y[b, :, :start] = math.nan
        x[0][b, :, :max(0, start - 15)] = math.nan
    given = dict(window=12, sinks=2, gamma=16, correction=correction, tail=4)
    out, stats = delta_prefill(*x, kv_start=torch.tensor(starts), return_stats=True, **given)
    for b, start in enumerate(starts):
        first = max(0, start - 15)
        assert not out[b, :, :first].any() and not stats.visible[b, :, :first].any()
        if start >= 75: continue
        alone = [x[0][b:b + 1, :, first:], *(y[b:b + 1, :, start:] for y in x[1:])]
        assert_close(out[b:b + 1, :, first:], delta_prefill(*alone, **given), rtol=1e-12)
    none, stats = delta_prefill(*(y[4:] for y in x), kv_start=torch.tensor(starts[4:]), return_stats=True, **given)
    assert not none.any() and not stats.visible.any() and stats.missing.shape == (2, 4, 0)
    together = delta_prefill(*(y[[1, 1]] for y in x), kv_start=torch.tensor([7, 7]), **given)
    assert_close(together[0], out[1], rtol=1e-12)
    assert_close(together[1], out[1], rtol=1e-12)


@EVERY
@pytest.mark.parametrize("start", [0, 7])
def test_chunks_that_end_on_the_grid_change_nothing(correction, start):
    q, k, v = problem(B=1, Q=112, N=112)
    given = dict(window=12, sinks=2, gamma=16, correction=correction, tail=0, anchors=1,
                 kv_start=torch.tensor([start]))
    whole = delta_prefill(q, k, v, **given)
    ends = 0, start + 32, start + 48, 112
    chunks = [delta_prefill(q[:, :, a:b], k[:, :, :b], v[:, :, :b], **given) for a, b in zip(ends, ends[1:])]
    assert_close(torch.cat(chunks, 2), whole, rtol=1e-12)


def test_the_first_row_of_a_chunk_is_an_anchor():
    x = problem(Q=40, N=75)                                                       # its grid: 48 and 64
    for aligned in (False, True):
        given = dict(window=5, sinks=0, gamma=16, tail=0, correction="tangent" if aligned else "delta")
        _, stats = delta_prefill(*x, return_stats=True, **given)
        assert stats.anchors.tolist() == [[0, 13, 29]]
        assert (stats.keys[0, 0, [0, 13, 29]] == torch.tensor([36, 49, 65])).all()
        assert stats.keys[0, 0, 12] == (17 if aligned else 5)


@pytest.mark.parametrize("Q, N, tail, gamma", [
    (1, 1, 0, 64), (1, 9, 0, 64), (1, 9, 128, 4), (5, 9, 128, 2), (5, 5, 5, 7), (6, 6, 5, 7), (40, 75, 0, 1),
    (40, 75, 0, 1000)])
def test_edges(Q, N, tail, gamma):
    x = problem(B=2, Q=Q, N=N)
    exact = attention(*x, causal=True)
    for correction in CORRECTIONS:
        given = dict(window=3, sinks=1, gamma=gamma, correction=correction, tail=tail)
        got, stats = delta_prefill(*x, return_stats=True, **given)
        assert got.isfinite().all() and stats.anchors.shape[1] == len(
            [i for i in range(N - Q, N - tail) if i == N - Q or i % gamma == 0])
        if tail >= Q or gamma == 1 and correction in CORRECTING: assert_close(got, exact, rtol=1e-12)
        if tail: assert_close(got[:, :, -1], exact[:, :, -1], rtol=1e-12)
        elif correction in CORRECTING: assert_close(got[:, :, 0], exact[:, :, 0], rtol=1e-12)


def test_a_window_that_holds_everything_is_exact():
    x = problem(B=2, Q=75)
    for correction in CORRECTIONS:
        got, stats = delta_prefill(*x, window=75, gamma=16, tail=0, correction=correction, return_stats=True)
        assert_close(got, attention(*x, causal=True), rtol=1e-12)
        assert not stats.missing.any() and (stats.density == 1).all()
    for base in (Exact(), TopP(mass=1.0)):
        assert_close(delta_prefill(*x, base=base, gamma=16, tail=0), attention(*x, causal=True), rtol=1e-12)


# statistics

def test_statistics_count_every_pair_that_is_scored():
    x, gamma, window, sinks, tail = problem(Q=75), 16, 9, 2, 6
    for correction in CORRECTIONS:
        _, stats = delta_prefill(*x, window=window, sinks=sinks, gamma=gamma, tail=tail, correction=correction,
                                 return_stats=True)
        own = correction in ("tangent", "aligned")
        want = [sum(shown_by(i, i // gamma * gamma, window, sinks, own)) for i in range(75)]
        for i in range(75):
            if i >= 75 - tail or correction in CORRECTING and i % gamma == 0: want[i] = i + 1
        assert stats.keys[0, 0].tolist() == want and stats.visible[0, 0].tolist() == [*range(1, 76)]
        assert float(stats.density[0, 0]) == pytest.approx(sum(want) / (75 * 76 / 2))
        assert float(stats.keys_per_query[0, 0]) == pytest.approx(sum(want) / 75)


@EVERY
def test_missing_share_and_estimate(correction):
    q, k, v = problem(Q=75, G=1)
    _, stats = delta_prefill(q, k, v, window=9, sinks=2, gamma=16, tail=6, correction=correction,
                             return_stats=True)
    assert stats.anchors.tolist() == [[0, 16, 32, 48, 64]]
    weights = attention_scores(q, k, causal=True).softmax(-1)
    own = correction in ("tangent", "aligned")
    for j, i in enumerate((0, 16, 32, 48, 64)):
        see = torch.tensor(shown_by(i, i, 9, 2, own))
        assert_close(stats.missing[0, :, j], weights[0, :, i, :i + 1][:, ~see].sum(-1), rtol=1e-12)
    # the estimate at an anchor is the error of a prefill in which it is none
    assert stats.error[..., 0].isnan().all()
    if correction not in CORRECTING: return
    exact = attention(q, k, v, causal=True)
    for j, i in ((2, 32), (4, 64)):
        x = [y[:, :, :i + 1] for y in (q, k, v)]
        guess = by_hand_without(*x, anchor=i, window=9, sinks=2, gamma=16, correction=correction, aligned=own)
        error = (guess - exact[:, :, i]).norm(dim=-1) / exact[:, :, i].norm(dim=-1)
        assert_close(stats.error[..., j], error, rtol=1e-9)


def by_hand_without(q, k, v, *, anchor, window, sinks, gamma, correction, aligned):
    "Output of the last row, number `anchor`, as a row of the anchor before it."
    out, before = [], range(0, anchor, gamma)
    for h in range(q.shape[1]):
        keys, values, e_at = k[0, 0], v[0, 0], lambda i: torch.exp(k[0, 0, :i + 1] @ q[0, h, i] * 8**-0.5)
        see = torch.tensor(shown_by(anchor, anchor - gamma, window, sinks, aligned))
        e = e_at(anchor)
        sparse = e[see] @ values[see] / e[see].sum()
        if correction == "recompute": out.append(sparse); continue
        left = []
        for i in before:
            own, seen = e_at(i), torch.tensor(shown_by(i, i, window, sinks, aligned))
            delta = own @ values[:i + 1] / own.sum() - own[seen] @ values[:i + 1][seen] / own[seen].sum()
            lost = own[~seen]
            left.append((delta, lost.sum(), lost @ keys[:i + 1][~seen], lost @ values[:i + 1][~seen], q[0, h, i]))
        if correction == "delta": out.append(sparse + left[-1][0]); continue
        bounds = [(float(T * torch.exp(8**-0.5 * (q[0, h, anchor] - at) @ key / T)), value / T)
                  for _, T, key, value, at in left if T > 0]
        mass, value = max(bounds, key=lambda x: x[0]) if bounds else (0.0, 0.0)
        out.append((e[see] @ values[see] + mass * value) / (e[see].sum() + mass))
    return torch.stack(out)[None]


# the method

def test_a_base_may_learn_something_of_each_layer():
    class Learned(TopK):
        def at_layer(self, layer): return TopK(budget=10 + layer)
        def check_model(self, model): raise ValueError(f"asked about {model}")
    method = Delta(gamma=16, base=Learned(budget=1))
    assert method.at_layer(3) == Delta(gamma=16, base=TopK(budget=13)) and Delta().at_layer(3) == Delta()
    with pytest.raises(ValueError, match="asked about a model"): method.check_model("a model")


def test_prefill_is_the_function_and_nothing_decodes():
    x = problem(B=2)
    start = torch.tensor([0, 20])
    got = Delta(12, 2, 16, tail=4).prefill(*x, seed=3, scale=0.2, kv_start=start)
    assert torch.equal(got, delta_prefill(*x, window=12, sinks=2, gamma=16, tail=4, scale=0.2, kv_start=start))
    assert not hasattr(Delta, "decode") and not Delta.random


SMALL = Delta(window=16, sinks=2, gamma=8, tail=8)


def test_a_model_reads_with_it_and_refuses_to_decode_with_it(pocket):
    model, tokenizer = pocket
    with pytest.raises(ValueError, match="decode must be a method that can decode, got Delta, which cannot"):
        sparsify(model, decode=Delta())
    ids = tokenizer("The quick brown fox jumps over the lazy dog, and then over the fence. " * 3,
                    return_tensors="pt").input_ids.to(model.device)
    with torch.no_grad():
        exact = model(ids).logits
        with sparsify(model, prefill=SMALL): sparse = model(ids).logits
        with sparsify(model, prefill=Delta(window=1000)): whole = model(ids).logits
    assert_close(whole, exact, rtol=1e-4)
    assert 1e-3 < float((sparse - exact).norm() / exact.norm()) < 0.9


@torch.no_grad()
@pytest.mark.parametrize("method", [
    SMALL, Delta(16, 2, 8, "delta"), Delta(base=TopK(budget=16), gamma=8),
    Delta(base=HiP(((16, 32), (2, 8)), 2, 4, "head", "none"), gamma=8, tail=9),
    Delta(base=VerticalSlash(6, 9, 2, 4, "none"), gamma=8, tail=9)], ids=repr)
def test_a_batch_with_unequal_padding_is_each_prompt_alone(pocket, method):
    model, tokenizer = pocket
    texts = ["One short prompt of some words, and not more. ", "Another one, which is longer. " * 7, "Third: " * 13]
    rows = [tokenizer(text).input_ids for text in texts]
    longest = max(map(len, rows))
    new = lambda x: torch.tensor(x, device=model.device)
    ids = new([[row[0]] * (longest - len(row)) + row for row in rows])
    mask = new([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with sparsify(model, prefill=method):
        together = model(ids, attention_mask=mask, position_ids=places).logits
        for b, row in enumerate(rows):
            alone = model(new([row])).logits
            assert_close(together[b:b + 1, longest - len(row):], alone, rtol=1e-4)


@torch.no_grad()
def test_a_second_turn_goes_on_from_the_cache(pocket):
    model, tokenizer = pocket
    ids = tokenizer("A prompt that is read in two turns, the second of which goes on where the first ended. " * 2,
                    return_tensors="pt").input_ids[:, :168].to(model.device)
    method = Delta(window=16, sinks=2, gamma=8, tail=0, anchors=1)
    with sparsify(model, prefill=method):
        whole = model(ids).logits
        for at in (64, 128):
            first = model(ids[:, :at], use_cache=True)
            second = model(ids[:, at:], past_key_values=first.past_key_values, use_cache=True)
            assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-4)
    with sparsify(model, prefill=SMALL):
        out = model.generate(ids[:, :100], max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        more = torch.cat([out.sequences, ids[:, 100:]], 1)
        again = model.generate(more, past_key_values=out.past_key_values, max_new_tokens=4, do_sample=False)
    assert again.shape[1] == more.shape[1] + 4


# bad input

X = dict(zip("qkv", problem()))

@pytest.mark.parametrize("changes, error, message", [
    (dict(window=0), ValueError, "window must be at least 1, got 0"),
    (dict(window=0.5), TypeError, "window must be an int, got float"),
    (dict(sinks=-1), ValueError, "sinks must be at least 0, got -1"),
    (dict(sinks=True), TypeError, "sinks must be an int, got bool"),
    (dict(gamma=0), ValueError, "gamma must be at least 1, got 0"),
    (dict(gamma="64"), TypeError, "gamma must be an int, got str"),
    (dict(anchors=0), ValueError, "anchors must be at least 1, got 0"),
    (dict(tail=-1), ValueError, "tail must be at least 0, got -1"),
    (dict(tail=None), TypeError, "tail must be an int, got NoneType"),
    (dict(correction="eq6"), ValueError, "correction must be one of tangent, delta, recompute, aligned, none"),
    (dict(correction=6), TypeError, "correction must be a string, got int"),
    (dict(base="topk"), TypeError, "base must be None or a method, got 'topk'"),
    (dict(base=TopK), TypeError, "base must be None or a method, got <class"),
    (dict(base=Delta()), ValueError, "base must be a method that reads prompts and tells which keys"),
    (dict(base=Uniform()), ValueError, "base must be a method that does not draw"),
    (dict(base=method_class("Quest")()), ValueError, "base must be a method that reads prompts and tells which keys"),
    (dict(base=TopK(), correction="aligned"), ValueError, "correction must not be 'aligned' with a base"),
    (dict(scale=0.0), ValueError, "scale must be positive and finite, got 0.0"),
    (dict(seed=-1), ValueError, "seed must lie in [0, 2**63), got -1"),
    (dict(return_stats=1), TypeError, "return_stats must be a bool, got int"),
    (dict(backend="cuda"), ValueError, "backend must be one of auto, torch, triton, got 'cuda'"),
    (dict(backend="triton", base=TopK()),
     ValueError, "backend must be 'torch' or 'auto' where a base is wanted, got 'triton'"),
    (dict(backend="triton", return_stats=True),
     ValueError, "backend must be 'torch' or 'auto' where statistics are wanted, got 'triton'"),
    (dict(kv_start=torch.tensor([-1])), ValueError, "kv_start must not be negative, got -1"),
    (dict(kv_start=torch.tensor([0.5])), TypeError, "kv_start must be int32 or int64, got torch.float32"),
    (dict(kv_start=torch.tensor([1, 2])), ValueError, "kv_start must have shape [B] = [1], got [2]"),
    (dict(q=X["q"] * math.nan), ValueError, "the scores of q and k must be finite"),
    (dict(k=X["k"] * math.nan), ValueError, "the scores of q and k must be finite"),
    (dict(k=torch.where(torch.arange(75)[:, None] == 3, math.inf, X["k"])),
     ValueError, "the scores of q and k must be finite"),
    (dict(v=X["v"] * math.nan), ValueError, "v must be finite, got NaN or inf"),
    (dict(q=X["q"][:, :3]), ValueError, "q must have a multiple of the heads of k, 2, got 3"),
    (dict(k=X["k"][:, :, :50], v=X["v"][:, :, :50]),
     ValueError, "q must not have more positions than k, 50, when causal"),
    (dict(v=X["v"].float()), TypeError, "v must have the dtype of q"),
    (dict(q=X["q"][..., 0]), ValueError, "q must have 4 axes"),
], ids=lambda x: re.sub(r"[^\w=]+", " ", str(x))[:40])
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=re.escape(message)): delta_prefill(**(X | changes))


def test_a_kernel_gives_no_gradient():
    q = X["q"].clone().requires_grad_()
    with pytest.raises(ValueError, match="'torch' or 'auto' where a gradient is wanted"):
        delta_prefill(q, X["k"], X["v"], backend="triton")


# a spacing for each layer

def prompts_of(*lengths):
    return [torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]


def tiny(family="llama"):
    pytest.importorskip("transformers")
    from models import build
    return build(family)


def test_calibration_takes_the_cheapest_spacing_whose_true_error_is_small_enough():
    from sparse_nb.hf import capture
    from sparse_nb.tuning import calibrate
    model, prompts, gammas, start = tiny(), prompts_of(150, 90), (1, 4, 16, 32), Delta(16, 2, 8, tail=20)
    heard = []
    _, table = calibrate(model, prompts, 0.999, method=start, gammas=gammas, return_table=True,
                         progress=lambda *x: heard.append(x))
    layers = sorted(set(table.layer))
    total = 2 * len(layers) * 4
    assert heard == [(i, total) for i in range(total + 1)] and len(table) == 4 * len(layers)
    captured = [capture(model, ids) for ids in prompts]
    for row in table.itertuples():
        errors, densities = [], []                                     # rows from 18 on miss some
        for found in captured:
            c = next(c for c in found if c.layer == row.layer)
            q, k, v = (x.double() for x in (c.q, c.k, c.v))
            n, exact = q.shape[2], attention(q, k, v, causal=True, scale=c.scale)
            out = delta_prefill(q, k, v, window=16, sinks=2, gamma=row.gamma, tail=0, scale=c.scale)
            errors.append(((out - exact).norm(dim=-1) / exact.norm(dim=-1))[:, :, 18:].mean())
            keys = [i + 1 if i % row.gamma == 0 else sum(shown_by(i, i // row.gamma * row.gamma, 16, 2, True))
                    for i in range(n)]
            densities.append(sum(keys) / (n * (n + 1) / 2))
        assert row.error == pytest.approx(float(sum(errors)) / 2, rel=1e-4, abs=1e-6)
        assert row.density == pytest.approx(sum(densities) / 2)
    assert (table[table.gamma == 1].error < 1e-5).all()
    target = float(table[table.gamma == 4].error.median())
    chosen = calibrate(model, prompts, target, method=start, gammas=gammas)
    for layer, method in chosen.items():
        mine = table[table.layer == layer]
        row = mine[mine.gamma == method.gamma].iloc[0]
        assert row.error <= target and row.density == mine[mine.error <= target].density.min()
        assert method == replace(start, gamma=method.gamma)                                     # the tail is kept
    assert set(chosen) == set(layers) and len({m.gamma for m in chosen.values()}) > 1
    assert {int(i): Method.from_json(x) for i, x in json.loads(json.dumps(
        {i: m.to_json() for i, m in chosen.items()})).items()} == chosen
    with torch.no_grad(), sparsify(model, prefill=chosen): model(prompts[0][None])


def test_calibration_is_not_misled_by_anchors_that_foretell_each_other():
    from sparse_nb import hf, tuning
    q, k, v = problem(G=1, R=1, Q=300, N=300)                       # every row but the anchors looks back at key 3
    k[:, :, 3], v[:, :, 3], q[..., 0] = 0, 5, 0
    k[..., 0] = 0
    k[:, :, 3, 0], q[:, :, torch.arange(300) % 16 > 0, 0] = 8, 5
    c = hf.Captured(0, q, k, v, attention(q, k, v, causal=True), torch.arange(300), torch.zeros(300), 8**-0.5)
    told = {gamma: tuning._spacing(Delta(16, 0, gamma, tail=0), c) for gamma in (12, 16)}
    assert told[16]["estimate"] < 0.7 * told[16]["error"] and told[12]["error"] < 0.5 * told[16]["error"]


def test_calibration_leaves_layers_with_a_sliding_window_out():
    from sparse_nb.tuning import calibrate
    model = tiny("cohere2, layers without rope")
    from models import whole_layers
    chosen = calibrate(model, prompts_of(100), 0.5, method=SMALL, gammas=[1])
    assert [*chosen] == whole_layers(model) and set(chosen.values()) == {replace(SMALL, gamma=1)}
    with pytest.raises(ValueError, match="model must have a layer that sees all keys"):
        calibrate(tiny("mistral, window"), prompts_of(100), 0.5, method=SMALL)


def test_calibration_of_a_base_asks_it_for_each_layer():
    from sparse_nb.tuning import calibrate
    class Learned(TopK):
        def at_layer(self, layer): return TopK(budget=10 + layer)
    chosen = calibrate(tiny(), prompts_of(100), 0.9, method=Delta(base=Learned(budget=1)), gammas=(1, 16))
    assert {i: m.base for i, m in chosen.items()} == {i: TopK(budget=10 + i) for i in chosen}


@pytest.mark.parametrize("changes, error, message", [
    (dict(target=0), ValueError, "target must lie in (0, 1), got 0"),
    (dict(target=math.nan), ValueError, "target must lie in (0, 1), got nan"),
    (dict(target="0.1"), TypeError, "target must be a number, got str"),
    (dict(target=1e-4, gammas=(16,)), ValueError, "a longer window is a setting of `method`"),
    (dict(method=TopK()), TypeError, "method must be a Delta, got TopK"),
    (dict(method=Delta), TypeError, "method must be a Delta, got type"),
    (dict(method=replace(SMALL, correction="none")), ValueError,
     "method must correct its queries, got correction 'none'"),
    (dict(gammas=()), ValueError, "gammas must hold at least one, got none"),
    (dict(gammas=64), TypeError, "gammas must be a sequence of counts, got 64"),
    (dict(gammas=(8, 0)), ValueError, "gammas must be at least 1, got 0"),
    (dict(gammas=(8, 1.5)), TypeError, "gammas must be an int, got float"),
    (dict(prompts=[]), ValueError, "prompts must hold at least one, got none"),
    (dict(prompts=["text"]), TypeError, "input_ids must be a tensor of token numbers, got str"),
    (dict(method=Delta()), ValueError, "prompts must be longer than what a query sees, got one of 100 tokens"),
], ids=lambda x: re.sub(r"[^\w=]+", " ", str(x))[:40])
def test_bad_input_of_calibration(changes, error, message):
    from sparse_nb.tuning import calibrate
    given = dict(model=tiny(), prompts=prompts_of(100), target=0.5, method=SMALL, gammas=(1,)) | changes
    with pytest.raises(error, match=re.escape(message)): calibrate(**given)


@pytest.mark.parametrize("family, lost", [("gemma2, capped", "softcap"), ("gpt-oss, sinks", "sinks")])
def test_calibration_refuses_scores_that_are_not_of_q_and_k_alone(family, lost):
    from sparse_nb.tuning import calibrate
    with pytest.raises(ValueError, match=f"scores must be of q and k alone, got layer . with {lost}"):
        calibrate(tiny(family), prompts_of(100), 0.5, method=SMALL, gammas=(1,))
