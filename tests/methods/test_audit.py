"""The audit: bad input, ceilings that hold, draws of the right shares, the two attacks, and coverage of every head.

Statistical checks use fixed seeds; each accepts what a correct audit gives in all but one of 1 / ALARM seeds.
"""
import math
from statistics import NormalDist

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_nb.attention import (
    Selection, Streaming, TopK, assert_close, attention, attention_scores, weighted_attention)
from sparse_nb import audit as room
from sparse_nb.audit import Audit, audit, draw_by_weight, index_bytes, key_boxes, score_ceilings
from sparse_nb.metrics import clopper_pearson, relative_error

ALARM = 1e-8
q, k, v = (torch.randn(2, heads, n, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
           for i, (heads, n) in enumerate(((6, 3), (2, 300), (2, 300))))
v = v + 1
start, stop = torch.tensor([0, 35]), torch.tensor([300, 281])
many = lambda x, times: x.expand(-1, -1, times, *x.shape[3:])


def audited(**kw): return audit(*(kw.pop("args", (attention(q, k, v), q, k, v, TopK(budget=0.2).select(q, k)))), **kw)


@pytest.mark.parametrize("call, error, message", [
    (lambda: audited(samples=7), ValueError, "samples must be at least 8, got 7"),
    (lambda: audited(samples=0.5), TypeError, "samples must be an int, got float"),
    (lambda: audited(delta=0), ValueError, "delta must lie in (0, 1), got 0"),
    (lambda: audited(bound="hoeffding"), ValueError, "bound must be one of boxes, clt, got 'hoeffding'"),
    (lambda: audited(bits=9), ValueError, "bits must"), (lambda: audited(bits=-1), ValueError, "bits must"),
    (lambda: audited(bits=4.0), TypeError, "bits must be an int, got float"),
    (lambda: audited(page=0), ValueError, "page must be at least 1, got 0"),
    (lambda: audited(seed=-1), ValueError, "seed must lie in [0, 2**63), got -1"),
    (lambda: audited(args=(None, q, k, v, None)), TypeError, "out must be a torch.Tensor, got NoneType"),
    (lambda: audited(args=(q[:1], q, k, v, None)), ValueError, "out must have the shape of q"),
    (lambda: audited(args=(q, q, k, v, None)), TypeError, "selected must be a Selection, got NoneType"),
    (lambda: audited(args=(q, q, k, v, TopK(budget=3).select(q[:, :, :1], k))), ValueError,
     "selected must be for [B, H, Q] = [2, 6, 3], got [2, 6, 1]"),
    (lambda: audited(args=(q, q, k[:, :, :200], v[:, :, :200], TopK(budget=299).select(q, k))), ValueError,
     "selected must be of the 200 keys of k, got number 299"),
])
def test_bad_input(call, error, message):
    with pytest.raises(error) as e: call()
    assert message in str(e.value)


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(0, 8), page=st.integers(1, 70), n=st.integers(1, 60), size=st.sampled_from([1e-30, 1.0, 1e5]),
       seed=st.integers(0, 99))
def test_no_score_is_above_its_ceiling(bits, page, n, size, seed):
    g = torch.Generator().manual_seed(seed)
    query, keys = (torch.randn(2, x, y, 4, generator=g, dtype=torch.float64) for x, y in ((4, 2), (2, n)))
    keys = (keys * size).round(decimals=1) if size == 1 else keys * size  # ranges of width zero, too
    seen = torch.rand(2, n, generator=g) < 0.8
    centre, half = key_boxes(keys, seen, bits, page)
    over = score_ceilings(query, centre, half, page, 0.3) - attention_scores(query, keys, scale=0.3)
    assert (over >= -1e-9 * size)[seen[:, None, None].expand(over.shape)].all() and centre.isfinite().all()
    assert (half * 2**bits <= keys.abs().amax() * (1 + 1e-9)).all()
    assert index_bytes(n, 4, bits, page) == math.ceil(bits * n / 2) + 16 * math.ceil(n / page) + 2 * n


def test_boxes_of_no_bits_are_quests_and_each_bit_halves_them():
    seen = torch.ones(2, 300, dtype=torch.bool)
    pages = k.unflatten(2, (-1, 20))
    want = torch.maximum(q[:, :, :, None] * pages.amax(3).repeat_interleave(3, 1)[:, :, None],
                         q[:, :, :, None] * pages.amin(3).repeat_interleave(3, 1)[:, :, None]).sum(-1)
    got = score_ceilings(q, *key_boxes(k, seen, 0, 20), 20, 1.0)
    assert_close(got, want.repeat_interleave(20, -1), 1e-12)
    wide = [(score_ceilings(q, *key_boxes(k, seen, bits, 20), 20, 1.0) - attention_scores(q, k, scale=1.0)).mean()
            for bits in range(6)]
    assert all(0.4 < b / a < 0.6 for a, b in zip(wide, wide[1:]))


def test_draws_have_the_shares_of_their_weights_and_the_heavy_are_read_for_sure():
    weight = torch.tensor([0.0, 5, 1, 30, 2, 2, 0, 1, 1]).double().log().expand(1, 1, 30_000, 9)
    got = draw_by_weight(weight, torch.arange(30_000).view(1, 1, -1), 4)  # 30 > 42 / 4; 5 > 12 / 3; 2 <= 7 / 2
    assert (got.sure == 2).all() and (got.drawn == 2).all() and (got.index[..., 0] == 3).all() and (
        got.index[..., 1] == 1).all()
    counts = torch.bincount(got.index[..., 2:].flatten(), minlength=9)
    light = [2, 4, 5, 7, 8]
    assert counts.sum() == counts[light].sum()
    want = 60_000 * weight[0, 0, 0].exp()[light] / 7
    assert scipy.stats.chisquare(counts[light].numpy(), want.numpy()).pvalue > ALARM
    assert_close(got.inverse[..., 2:].exp(), 7 / weight.exp().gather(-1, got.index)[..., 2:], 1e-12)
    few = draw_by_weight(weight[:, :, :1], torch.zeros(1, 1, 1, dtype=torch.int64), 20)
    assert few.sure.item() == 7 and few.drawn.item() == 0 and few.index[0, 0, 0, :7].unique().tolist() == [
        1, 2, 3, 4, 5, 7, 8]
    none = draw_by_weight(torch.full((1, 1, 1, 3), -math.inf).double(), torch.zeros(1, 1, 1, dtype=torch.int64), 8)
    assert none.sure.item() == none.drawn.item() == 0


@pytest.mark.parametrize("bound", ["boxes", "clt"])
def test_an_audit_that_reads_everything_is_the_error(bound):
    keys = TopK(budget=0.5).select(q, k)
    out = weighted_attention(q, k, v, keys)
    wrong = relative_error(out, attention(q, k, v))
    got = audit(out, q, k, v, keys, samples=300, bound=bound)
    assert isinstance(got, Audit) and (got.drawn == 150).all() and got.proven == (bound == "boxes")
    assert (got.index_bytes > 0) == got.proven
    assert_close(got.error, wrong, 1e-9)
    assert_close(got.bound, wrong, 1e-9)
    whole = Selection(torch.arange(300).expand(2, 6, 3, 300), torch.ones(2, 6, 3, 300))
    assert float(audit(attention(q, k, v), q, k, v, whole, bound=bound).bound.max()) < 1e-12
    assert audit(torch.zeros_like(q), q, k, v, keys, samples=300, bound=bound).bound.min() > 0.99
    for scale in (0.1, 0.7):
        out = weighted_attention(q, k, v, keys, scale=scale)
        got = audit(out, q, k, v, keys, samples=300, bound=bound, scale=scale)
        assert_close(got.error, relative_error(out, attention(q, k, v, scale=scale)), 1e-9)


def heavy(n=4096, read=400):
    "One key that was not read has half of the mass, and its value is another."
    g = torch.Generator().manual_seed(4)
    query, keys = (torch.randn(1, 1, x, 16, generator=g, dtype=torch.float64) for x in (1, n))
    values = torch.tensor([1.0, 0]).double() + 0.05 * torch.randn(1, 1, n, 2, generator=g, dtype=torch.float64)
    values = torch.nn.functional.pad(values, (0, 14))
    mass = torch.exp(attention_scores(query, keys))[0, 0, 0]
    keys[..., n // 2, :] = query[..., 0, :] * math.log(float(mass.sum())) * 4 / query.square().sum()
    values[..., n // 2, 1] = 3.0
    return query, keys, values, Streaming(read // 2, read // 2).select(query, keys), dict()


def flat(n=2048, read=200):
    "All ceilings are alike, from one box; one key reaches it, and its value is the others' opposite."
    query, keys, values = torch.zeros(1, 1, 1, 16).double(), torch.zeros(1, 1, n, 16).double(), torch.ones(1, 1, n, 16)
    query[..., 0], keys[..., 0], keys[..., :read, 0], keys[..., n // 2, 0], values[..., n // 2, :] = 4, -40, 0, 5, -1
    keys[..., -1, 0] = 0
    return query, keys, values.double(), Streaming(read, 1).select(query, keys), dict(bits=0, page=n)


def ceiling(n=2560, heavy=5):
    "The same in the half that is not read, and the other half weighs as much as the box could: bounds are finite."
    query, keys, values, _, _ = flat(n, n // 2)
    keys[..., :n // 2, 0], keys[..., n // 2:, 0], keys[..., n // 2:n // 2 + heavy, 0] = 5, -40, 5
    values[..., n // 2:n // 2 + heavy, :] = -1
    read = torch.arange(n // 2).expand(1, 1, 1, -1)
    return query, keys, values, Selection(read, torch.ones(read.shape)), dict(bits=0, page=n // 2)


@pytest.mark.parametrize("attack, finite, uniform_fails", [(heavy, 1, 0.5), (flat, 0, 0.5), (ceiling, 1, 0.2)])
def test_attacks_break_the_uniform_sample_and_not_the_draws_by_boxes(attack, finite, uniform_fails):
    """The input that broke the audit's predecessor, and those that are worst for draws by a ceiling.

    `finite` is the share of the proven bounds that are: with `flat` none is, and none can be too small.
    """
    query, keys, values, read, index = attack()
    out, times, delta = weighted_attention(query, keys, values, read), 400, 0.05
    wrong = relative_error(out, attention(query, keys, values))
    rate = {}
    for bound in ("clt", "boxes"):
        got = audit(many(out, times), many(query, times), keys, values,
                    Selection(many(read.index, times), many(read.weight, times)), samples=256, delta=delta, bound=bound,
                    seed=8, **index)
        assert (got.drawn == 256).all()
        rate[bound] = clopper_pearson(int((got.bound < many(wrong, times)).sum()), times, 1 - ALARM)
        assert got.proven == (bound == "boxes")
    assert got.bound.isfinite().double().mean() == finite
    assert rate["clt"].low > uniform_fails and rate["boxes"].low <= delta and rate["boxes"].value == 0
    if attack is not ceiling: assert wrong > 0.5
    if attack is heavy: assert got.bound.max() < 10 * wrong


def test_a_bound_that_is_too_short_is_seen():
    "Where a tenth of the keys is heavy, half the bound breaks the guarantee: the check above is not an idle one."
    query, keys, values, read, index = ceiling(heavy=128)
    out, times, delta = weighted_attention(query, keys, values, read), 400, 0.05
    wrong = relative_error(out, attention(query, keys, values))
    got = audit(many(out, times), many(query, times), keys, values,
                Selection(many(read.index, times), many(read.weight, times)), samples=1024, delta=delta, seed=8,
                **index)
    assert got.bound.isfinite().all() and (got.drawn == 1024).all() and (got.bound > many(wrong, times)).all()
    assert clopper_pearson(int((got.bound / 2 < many(wrong, times)).sum()), times, 1 - ALARM).low > delta


@pytest.mark.parametrize("bound", ["boxes", "clt"])
def test_all_bounds_together_fail_as_rarely_as_the_audit_says(bound, monkeypatch):
    "A ledger of the chance that each of them is given; logarithms are shared among the draws of each head."
    ledger, draws, delta = [], [], 0.3
    kl, bernstein, quantile = room.kl_bound, room.bernstein_radius, room.gaussian_quantile
    monkeypatch.setattr(room, "kl_bound", lambda mean, log, upper: ledger.append(log) or kl(mean, log, upper))
    monkeypatch.setattr(room, "bernstein_radius", lambda variance, largest, m, chance:
                        draws.append(m) or ledger.append(chance) or bernstein(variance, largest, m, chance))
    monkeypatch.setattr(room, "gaussian_quantile", lambda chance: ledger.append(chance) or quantile(chance))
    class Normal:
        def inv_cdf(self, share): return ledger.append(1 - share) or NormalDist().inv_cdf(share)
    monkeypatch.setattr(room, "NormalDist", Normal)
    audited(samples=16, seed=1, bound=bound, delta=delta)
    chances = [torch.exp(-x * draws[0]) if isinstance(x, torch.Tensor) else x for x in ledger]
    assert len(chances) == {"boxes": 3, "clt": 2}[bound]
    assert torch.allclose(torch.as_tensor(sum(chances)).double(), torch.tensor(delta).double(), rtol=1e-6)


@pytest.mark.parametrize("bound", ["boxes", "clt"])
def test_every_head_is_covered(bound):
    """Each head by itself, and only what could fail: 160 draws of the 240 keys that are left, and finite bounds.

    In every head all audits draw, and more than half of the bounds are finite.
    """
    times, delta = 300, 0.1
    query, keys, values = q[:1, :, :1], k[:1], v[:1]
    read = TopK(budget=0.2).select(query, keys)
    out = weighted_attention(query, keys, values, read)
    got = audit(many(out, times), many(query, times), keys, values,
                Selection(many(read.index, times), many(read.weight, times)), samples=160, delta=delta, bound=bound,
                seed=4, page=16)
    wrong = many(relative_error(out, attention(query, keys, values)), times)
    finite, missed = got.bound.isfinite().sum(-1)[0], (got.bound < wrong).sum(-1)[0]
    assert (got.drawn < 300 - read.budget).all() and (finite > times / 2).all()
    assert all(clopper_pearson(int(x), int(n), 1 - ALARM).low <= delta for x, n in zip(missed, finite))
    assert ((got.bound / wrong).median(-1).values < 30).all()


def test_masks_streams_and_causal():
    keys = TopK(budget=30).select(q, k, kv_start=start, kv_end=stop)
    out = weighted_attention(q, k, v, keys)
    wild_k, wild_v = k.clone(), v.clone()
    wild_k[1, :, :35], wild_v[1, :, 281:] = 99.0, 99.0
    for bound in ("boxes", "clt"):
        got, again = (audit(out, q, *x, keys, samples=16, seed=2, kv_start=start, kv_end=stop, bound=bound)
                      for x in ((k, v), (wild_k, wild_v)))
        assert_close(again.error, got.error, 1e-12)
        assert torch.equal(again.drawn, got.drawn)
        other = audit(out, q, k, v, keys, samples=16, seed=3, kv_start=start, kv_end=stop, bound=bound)
        assert not torch.equal(got.error, other.error)
    some = audit(out, q, wild_k, wild_v, keys, samples=300, kv_start=start, kv_end=stop)
    assert_close(some.error, relative_error(out, attention(q, k, v, kv_start=start, kv_end=stop)), 1e-9)
    causal = TopK(budget=30).select(q, k, causal=True)
    out = weighted_attention(q, k, v, causal)
    assert_close(audit(out, q, k, v, causal, samples=300, causal=True).error,
                 relative_error(out, attention(q, k, v, causal=True)), 1e-9)


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_dtypes_and_sizes_that_overflow(dtype, tol):
    args = [x.to(dtype) for x in (q, k, v)]
    keys = TopK(budget=0.2).select(*args[:2])
    out = weighted_attention(*args, keys)
    got = audit(out, *args, keys, samples=300)
    exact = attention(*(x.double() for x in args))
    assert_close(got.error, relative_error(out.double(), exact), tol)
    huge = audit(out, args[0] * 300, args[1] * 300, args[2], keys, samples=16, bits=0, seed=1)
    assert not huge.bound.isnan().any() and not huge.error.isnan().any()
