"""vAttention: bad input, exact probabilities, masks and edges, streams, statistics with a stated alarm rate, use.

Probabilities are exact where the terms are 0 and 1 (hypergeometric). Statistical checks use fixed seeds; each accepts
what a correct sampler gives in all but one of 1 / ALARM seeds, and there are fewer than 40 of them.
"""
import copy
import dataclasses
import inspect
import itertools
import json
import math
import re
import sys

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_nb.attention import (
    Method, State, TopK, assert_close, attention, attention_scores, attention_weights, fold_in, weighted_attention)
from sparse_nb.hash_attention import HashAttention
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.quest import Quest
from sparse_nb.metrics import clopper_pearson, relative_error, distinct_keys
from sparse_nb import vattention
from sparse_nb.core.bounds import bernstein_radius, kl_bound, output_levels, spread_bound
from sparse_nb.core.key_scorer import KeyScorer
from sparse_nb.methods.vattention import facts, order
from sparse_nb.saap import Saap
from sparse_nb.tuning import search
from sparse_nb.vattention import (
    BASE_LEAST, BOUNDS, CLT_LEAST, GUARANTEES, Guarantee, VAttention, budget_denominator, budget_numerator,
    budget_output, gaussian_quantile, kernel_settings, residual_facts, select_with_guarantee, vattention_decode)
from inputs import fast

ALARM = 1e-8
SMALL = dict(sinks=4, window=6, topk=10, base=24)
q, k, v = (torch.randn(2, heads, n, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
           for i, (heads, n) in enumerate(((6, 3), (2, 300), (2, 300))))
v = v + 1
start, stop = torch.tensor([0, 35]), torch.tensor([300, 281])
nan = math.nan


class Norms(State):
    "The sum of the numbers of each key: an index of one number."
    def features(self, k, v): return k.sum(-1)


class Guess(KeyScorer):
    "A predictor that looks at one number of each key."
    def new_state(self): return Norms()
    def scores(self, q, state, *, scale=None):
        return (q.sum(-1)[..., None] * state.rows.repeat_interleave(q.shape[1] // state.rows.shape[1],
                                                                    1)[:, :, None]).float()
    def index_bytes(self, head_dim): return 2.0


def decode(*args, **kw): return vattention_decode(*(args or (q, k, v)), **(dict(seed=3) | SMALL | kw))


# bad input

BAD = [(lambda: decode([1.0], k, v), TypeError, "q must be a torch.Tensor, got list"),
       (lambda: decode(q, k[:1], v), ValueError, "k must have the batch size of q, 2, got 1"),
       (lambda: decode(q, k, v[:, :, :9]), ValueError, "v must have the shape of k"),
       (lambda: decode(q, k.float(), v), TypeError, "k must have the dtype of q"),
       (lambda: decode(q * nan, k, v), ValueError, "must be finite, got NaN"),
       (lambda: decode(scale=-1.0), ValueError, "scale must be positive and finite, got -1.0"),
       (lambda: decode(kv_end=torch.tensor([0, 300])), ValueError, "kv_end = 0 in sequence 0"),
       (lambda: decode(seed=-1), ValueError, "seed must lie in [0, 2**63), got -1"),
       (lambda: decode(return_stats=1), TypeError, "return_stats must be a bool, got int"),
       (lambda: decode(eps=0), ValueError, "eps must lie in (0, 1), got 0"),
       (lambda: decode(eps="small"), TypeError, "eps must be a number, got str"),
       (lambda: decode(delta=1.0), ValueError, "delta must lie in (0, 1), got 1.0"),
       (lambda: decode(delta=True), TypeError, "delta must be a number, got bool"),
       (lambda: decode(sinks=-1), ValueError, "sinks must be at least 0, got -1"),
       (lambda: decode(window=1.5), ValueError, "window must lie in (0, 1] as a share of the keys, got 1.5"),
       (lambda: decode(topk=0.0), ValueError, "topk must lie in (0, 1] as a share of the keys, got 0.0"),
       (lambda: decode(topk="5%"), TypeError, "topk must be an int (keys) or a float (share of the keys), got str"),
       (lambda: decode(base=1), ValueError, "base must be at least 2, got 1"),
       (lambda: decode(predictor="quest"), ValueError,
        "predictor must be 'oracle' or a method that scores keys, got 'quest'"),
       (lambda: decode(predictor=TopK()), ValueError, "predictor must be 'oracle' or a method that scores keys"),
       (lambda: decode(guarantee="all"), ValueError,
        "guarantee must be one of denominator, numerator, output, got 'all'"),
       (lambda: decode(bound="chernoff"), ValueError, "bound must be one of clt, hoeffding, bernstein, got 'chernoff'"),
       (lambda: decode(plugin=None), TypeError, "plugin must be a string, got NoneType"),
       (lambda: decode(plugin="exact"), ValueError, "plugin must be one of upper, plain, printed, got 'exact'"),
       (lambda: decode(share="group"), TypeError, "share must be a bool, got str"),
       (lambda: decode(state=Norms()), ValueError, "state must be None with predictor='oracle', got Norms"),
       (lambda: decode(predictor=Guess(), state=Norms()), ValueError, "state must hold as many keys as k, 300, got 0"),
       (lambda: decode(predictor=Guess(), state=State()), TypeError, "state must be Norms or None, got State"),
       (lambda: VAttention(guarantee="output").select(q, k), ValueError,
        "guarantee must be 'denominator' to select without values (decode has them), got 'output'"),
       (lambda: gaussian_quantile(0.0), ValueError, "delta must lie in (0, 1), got 0.0"),
       (lambda: budget_denominator([1.0], 1.0, 9, 0.1, 0.1), TypeError, "sigma must be a tensor or a number, got list"),
       (lambda: budget_denominator(1.0, -1.0, 9, 0.1, 0.1), ValueError, "D must not be negative, got -1.0"),
       (lambda: budget_denominator(1.0, 1.0, 9, 0.1, 0.1, "hoeffding"), ValueError,
        "width must be given for bound='hoeffding', got None"),
       (lambda: budget_denominator(1.0, 1.0, 9, 0.1, 0.1, "normal"), ValueError, "bound must be one of"),
       (lambda: budget_denominator(1.0, 1.0, 9, 2, 0.1), ValueError, "eps must lie in (0, 1), got 2"),
       (lambda: budget_denominator(1.0, 1.0, 9, 0.1, 0.1, replacement=1), TypeError,
        "replacement must be a bool, got int"), (lambda: budget_numerator(torch.tensor([-2.0]), 1.0, 9, 0.1, 0.1),
                                                 ValueError, "trace must not be negative, got -2.0"),
       (lambda: budget_numerator(1.0, 1.0, 9, 0.1, 0.1, "bernstein"), ValueError,
        "reach must be given for bound='bernstein', got None"),
       (lambda: budget_output(1.0, 1.0, 1.0, 1.0, 9, 0.1, 0.1, "bernstein", width=1.0), ValueError,
        "reach must be given"), (lambda: budget_output(1.0, 1.0, 1.0, "x", 9, 0.1, 0.1), TypeError,
                                 "norm must be a tensor or a number, got str"), ]


@pytest.mark.parametrize("call, error, message", BAD, ids=range(len(BAD)))
def test_bad_input(call, error, message):
    with pytest.raises(error) as e: call()
    assert message in str(e.value)


# budgets

def failure(n, ones, b, allowed):
    "Exact chance that b of n zeros and ones, drawn without replacement, give a sum that is off by more than `allowed`."
    hits = torch.arange(min(b, ones) + 1).numpy()
    return float(scipy.stats.hypergeom(n, ones, b).pmf(hits)[abs(hits * n / b - ones) > allowed * (1 + 1e-12)].sum())


@settings(max_examples=150, deadline=None)
@given(n=st.integers(2, 400), ones=st.floats(0.001, 0.999), kept=st.floats(0, 100), eps=st.floats(0.02, 0.9),
       delta=st.floats(0.001, 0.9), bound=st.sampled_from(["hoeffding", "bernstein"]))
def test_bounds_hold_exactly_on_zeros_and_ones(n, ones, kept, eps, delta, bound):
    K = min(max(1, round(ones * n)), n)
    b = int(budget_denominator((K * (n - K) / (n * max(n - 1, 1))) ** 0.5, K + kept, n, eps, delta, bound, width=1.0))
    assert 1 <= b <= n and failure(n, K, b, eps * (K + kept)) <= delta


@settings(max_examples=60, deadline=None)
@given(sigma=st.floats(0, 10), D=st.floats(0.1, 1000), n=st.integers(1, 10**6), eps=st.floats(0.01, 0.9),
       delta=st.floats(0.001, 0.4), bound=st.sampled_from(BOUNDS))
def test_budgets_are_monotone(sigma, D, n, eps, delta, bound):
    get = lambda s=sigma, D=D, eps=eps, delta=delta, **kw: int(
        budget_denominator(s, D, n, eps, delta, bound, width=20.0, **kw))
    assert get(2 * sigma) >= get() >= get(D=2 * D) and get(eps=eps / 2) >= get() >= get(delta=2 * delta) and get(
        replacement=True) >= get()


def test_finite_population_form_and_limits():
    b0 = int(budget_denominator(0.5, 300.0, 10**9, 0.1, 0.05))
    for n in (10, 1000, 10**6):
        sigma = 0.5 * 10**9 / n  # the same b_0
        want = (scipy.stats.norm.isf(0.025) * 10**9 * 0.5 / 30) ** 2
        assert int(budget_denominator(sigma, 300.0, n, 0.1, 0.05)) == min(n, math.ceil(want / (1 + want / n)))
        assert int(budget_denominator(sigma, 300.0, n, 0.1, 0.05, replacement=True)) == min(n, math.ceil(want))
    assert b0 <= 10**9
    edge = torch.tensor([0.0, nan, 1.0, math.inf], dtype=torch.float64)
    for bound in BOUNDS:
        assert budget_denominator(edge, 1.0, 50, 0.1, 0.1, bound, width=edge).tolist() == [1, 50, 50, 50]
    assert budget_numerator(0.0, 0.0, 50, 0.1, 0.1).item() == 50 and budget_denominator(
        1.0, 1.0, 0, 0.1, 0.1).item() == 0


def test_numerator_in_one_direction_is_the_denominator():
    for eps, delta in itertools.product((0.05, 0.3), (0.01, 0.2)):
        assert budget_numerator(4.0, 700.0, 5000, eps, delta) == budget_denominator(2.0, 700.0, 5000, eps, delta)
    assert budget_numerator(4.0, 700.0, 5000, 0.3, 0.4) > budget_denominator(2.0, 700.0, 5000, 0.3, 0.4)
    assert gaussian_quantile(0.3) == pytest.approx(max(scipy.stats.chi2.isf(0.3, m) / m for m in range(1, 200)),
                                                   rel=1e-9)


def test_budget_of_the_output_is_enough_for_both_and_batched():
    sigma, D, trace, norm = (torch.rand(3, 4, dtype=torch.float64) + x for x in (0.1, 3000, 0.1, 2000))
    got = budget_output(sigma, D, trace, norm, 9000, 0.2, 0.1)
    assert got.shape == (3, 4) and got.dtype == torch.int64
    for i, j in itertools.product(range(3), range(4)):
        assert got[i, j] == budget_output(*(float(x[i, j]) for x in (sigma, D, trace, norm)), 9000, 0.2, 0.1)
    assert (got >= budget_denominator(sigma, D, 9000, 0.2, 0.1)).all() and (
        got >= budget_numerator(trace, norm, 9000, 0.2, 0.1)).all()
    for bound in BOUNDS[1:]:
        assert (budget_output(sigma, D, trace, norm, 9000, 0.2, 0.1, bound, width=3.0,
                              reach=3.0) >= budget_denominator(sigma, D, 9000, 0.2, 0.1, bound, width=3.0)).all()
    assert budget_output(1.0, 1.0, 1.0, 0.0, 77, 0.2, 0.1).item() == 77


@pytest.mark.parametrize("bound", BOUNDS)
def test_budget_of_the_output_compiles_and_copies_nothing_from_the_host(bound):
    numbers = [torch.rand(3, 4, dtype=torch.float64) * x for x in (1, 900, 1, 900, 9)]
    call = lambda sigma, D, trace, norm, reach: budget_output(sigma, D, trace, norm, 5000, 0.3, 0.1, bound, width=reach,
                                                              reach=reach)
    want = call(*numbers)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(*numbers),
                       want) and 1 < want.double().mean() < 5000
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Watch(): torch.tensor([1.0, 2.0])
    # so a list of numbers becomes a tensor; a CUDA graph does not capture the copy to the device
    assert "aten::lift_fresh" in made
    made.clear()
    with Watch(): assert torch.equal(call(*numbers), want)
    assert made and "aten::lift_fresh" not in made
    with torch.inference_mode(): budget_output(1.0, 1.0, 1.0, 1.0, 9, 0.3, 0.07)
    grad = torch.ones(2, dtype=torch.float64, requires_grad=True)
    budget_output(grad, 1.0, grad, 1.0, 9, 0.3, 0.07)  # what was kept in inference mode is an ordinary tensor


@settings(max_examples=60, deadline=None)
@given(n=st.integers(10, 300), share=st.floats(0.0, 1.0), count=st.integers(4, 60), delta=st.floats(0.001, 0.5))
def test_bounds_on_a_mean_fail_at_most_as_guaranteed(n, share, count, delta):
    K, count = round(share * n), min(count, n)
    hits = torch.arange(count + 1).double()
    chance = scipy.stats.hypergeom(n, K, count).pmf(hits.numpy())
    low, high = (kl_bound(hits / count, torch.tensor(math.log(1 / delta) / count), upper) for upper in (False, True))
    assert chance[(low > K / n * (1 + 1e-12)).numpy()].sum() <= delta and chance[
        (high < K / n * (1 - 1e-12)).numpy()].sum() <= delta
    assert (low <= hits / count + 1e-12).all() and (high >= hits / count - 1e-12).all()


@pytest.mark.parametrize("upper", [False, True])
def test_a_bound_on_a_mean_lies_outside(upper):
    "Bisection ends with two numbers around the bound; the one that is given is not among those that are likely enough."
    mean, log = (x.flatten() for x in torch.meshgrid(torch.linspace(0, 1, 41, dtype=torch.float64),
                                                     torch.logspace(-6, 1, 40, dtype=torch.float64), indexing="ij"))
    u = kl_bound(mean, log, upper)
    far = torch.xlogy(mean, mean / u) + torch.xlogy(1 - mean, (1 - mean) / (1 - u))
    assert ((far > log) | (u == float(upper))).all() and 0.5 < (u != float(upper)).double().mean() < 1


@settings(max_examples=60, deadline=None)
@given(n=st.integers(20, 200), share=st.floats(0.0, 1.0), count=st.integers(8, 40), delta=st.floats(0.001, 0.5))
def test_a_bound_on_a_spread_fails_at_most_as_guaranteed(n, share, count, delta):
    "Zeros and ones: the chance of each outcome of the two parts of the sample is hypergeometric."
    K, count = round(share * n), min(count, n)
    quarter = count // 4
    h1, h2 = (x.flatten() for x in torch.meshgrid(torch.arange(quarter + 1), torch.arange(count - quarter + 1),
                                                  indexing="ij"))
    fits = (h1 + h2 <= K) & (quarter - h1 + count - quarter - h2 <= n - K)
    h1, h2 = h1[fits], h2[fits]
    chance = scipy.stats.hypergeom(n, K, quarter).pmf(h1.numpy())
    chance = chance * scipy.stats.hypergeom(n - quarter, K - h1.numpy(), count - quarter).pmf(h2.numpy())
    place = torch.arange(count)
    x = ((place < h1[:, None]) | (place >= quarter) & (place < quarter + h2[:, None])).double()
    parts = ((place < quarter).expand(x.shape), (place >= quarter).expand(x.shape))
    whole, others = spread_bound(x[..., None], *parts, n, lambda c: torch.maximum(c[..., 0], 1 - c[..., 0]) ** 2,
                                 math.log(1 / delta))
    left, rest = (K - h1 - h2).double(), n - count
    from_mean = left * (rest - left) / max(rest, 1)
    assert chance[(others < from_mean * (1 - 1e-9)).numpy()].sum() <= delta
    assert chance[(whole < K * (n - K) / n * (1 - 1e-9)).numpy()].sum() <= delta


def test_bernsteins_radius_is_solved():
    for variance, largest, draws, delta in itertools.product((0.1, 4.0), (0.5, 9.0), (1, 200), (0.01, 0.4)):
        t = bernstein_radius(variance, largest, draws, delta)
        assert 2 * math.exp(-draws * t**2 / (2 * (variance + largest * t / 3))) == pytest.approx(delta, rel=1e-9)


@pytest.mark.parametrize("vector", [False, True])
def test_a_spread_is_the_variance_of_what_was_not_drawn(vector):
    "Squares are shared among one fewer than there are: of three keys that are left, or of a plain sample."
    rows = torch.rand(2, 3, 1, 12, 3 if vector else 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    place = torch.arange(12).expand(rows.shape[:-1])
    parts, n_s, reach = (place < 2, (place >= 2) & (place < 5), place >= 5), torch.full((2, 3, 1), 13), rows.amax() * 2
    given = rows, *parts, n_s, reach.expand(2, 3, 1)
    upper, plain = (residual_facts(*given, plugin, "bernstein", 0.3, vector).spread for plugin in ("upper", "plain"))
    centre = rows[..., 2:5, :].mean(-2)
    far = reach + centre.norm(dim=-1) if vector else torch.maximum(centre[..., 0], reach - centre[..., 0])
    squares = spread_bound(rows, *parts[1:], n_s.double(), lambda _: far**2, math.log(1 / 0.3))[1]
    assert_close(upper, squares / 2, 1e-12)
    assert_close(plain, rows[..., 2:, :].var(-2).sum(-1), 1e-12)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_all_bounds_of_a_guarantee_together_fail_as_rarely_as_it_says(guarantee, bound, monkeypatch):
    "A ledger of the chance that each bound is given: from the base sample, and for the draws."
    ledger, sample, s = [], 100, VAttention(0.9, 0.2, 2, 2, 2, 100, Guess(), guarantee, bound)
    def book(module, name, chance):
        inner = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kw: ledger.append(chance(args)) or inner(*args, **kw))
    book(facts, "kl_bound", lambda args: math.exp(-float(args[1].max()) * sample))
    book(facts, "spread_bound", lambda args: math.exp(-args[-1]))
    last_number = lambda args: [x for x in args if isinstance(x, float)][-1]
    for name in "bernstein_radius", "gaussian_quantile": book(facts, name, last_number)
    for name in "draws_for_denominator", "draws_for_numerator", "budget_output": book(vattention, name, last_number)
    inner, asked = facts.residual_facts, {"denominator": (False,), "numerator": (True,), "output": (False, True)}
    def of_use(*args):  # what is known of the denominator does not matter where the numerator's error is bounded
        before = len(ledger)
        found = inner(*args)
        if args[-1] not in asked[guarantee]: del ledger[before:]
        return found
    monkeypatch.setattr(order, "residual_facts", of_use)
    found = s.decode(q / 4, k, v, seed=1, return_stats=True)[1].certificate
    assert (found.base == sample).all() and len(ledger) == 2 * len(asked[guarantee]) + 1
    assert 0.9 * s.delta < sum(ledger) <= s.delta * (1 + 1e-9), ledger


def test_the_bounds_of_an_output_share_the_chance_of_its_draws():
    "Of each split that is tried: both logarithms are those of 2 / chance, and the quantiles are of the same chances."
    _, log, square, log_vector, square_vector = output_levels(0.3, torch.device("cpu"))
    below, above = (2 * torch.exp(-x) for x in (log, log_vector))
    assert (below + above <= 0.3 * (1 + 1e-12)).all()
    assert_close(square, scipy.stats.norm.isf(below.numpy() / 2) ** 2, 1e-6)
    assert_close(square_vector, [gaussian_quantile(float(x)) for x in above], 1e-6)


def test_the_kernels_are_given_the_same_chances():
    pytest.importorskip("triton")
    for guarantee, bounds_made in (("denominator", 2), ("numerator", 2), ("output", 4)):
        given = kernel_settings(VAttention(0.1, 0.2, guarantee=guarantee))
        assert 0.19 < bounds_made * math.exp(-given.plug) + 2 * math.exp(-given.log) <= 0.2 * (1 + 1e-9)


# the selection

@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kw", [{}, dict(bound="bernstein"), dict(guarantee="output"), dict(plugin="plain"),
                                dict(predictor=Guess()), dict(sinks=0, window=0, topk=0),
                                dict(sinks=0.1, window=0.05, topk=0.1, base=0.2)])
def test_parts_do_not_overlap_and_weights_add_up(kw, share):
    method = VAttention(**(dict(eps=0.3, delta=0.2, share=share) | SMALL | kw))
    if method.guarantee != "denominator": chosen = None
    else: chosen = method.select(q, k, seed=5, kv_start=start, kv_end=stop)
    out, stats = method.decode(q, k, v, seed=5, kv_start=start, kv_end=stop, return_stats=True)
    p = stats.certificate
    visible = (stop - start)[:, None, None]
    assert (p.kept + p.base + p.rest == visible).all() and (p.needed <= p.budget).all() and (
        p.budget <= p.rest).all() and (p.exact == (p.budget == p.rest)).all()
    assert (stats.budget == p.kept + p.base + p.budget).all() and torch.equal(stats.values_read, stats.budget)
    assert_close(stats.density, stats.budget / visible, 1e-6)
    assert (p.group_density >= p.density.unflatten(1, (2, 3)).amax(2) - 1e-6).all()
    if chosen is None: return
    assert_close(out, weighted_attention(q, k, v, chosen), 1e-15)
    assert torch.equal(distinct_keys(chosen, 300), chosen.budget)  # no key twice
    dense = chosen.dense(300)
    assert_close(dense.sum(-1), visible.expand(2, 6, 3).double(), 1e-12)
    assert not dense[1, ..., :35].any() and not dense[1, ..., 281:].any()
    if kw == {}:
        assert (dense[0, ..., :4] == 1).all() and (dense[1, ..., 275:281] == 1).all() and (p.kept == 20).all() and (
            p.base == 24).all()
    if share: assert torch.equal(dense[:, ::3], dense[:, 1::3]) and torch.allclose(p.group_density, p.density[:, ::3])


def test_kept_keys_are_the_heaviest_between_sinks_and_window():
    weights = attention_weights(q, k)
    group = weights.unflatten(1, (2, 3)).sum(2).repeat_interleave(3, 1)
    for share, heavy in ((False, weights), (True, group)):
        chosen = VAttention(eps=0.3, delta=0.2, share=share, **SMALL).select(q, k, seed=1)
        want = heavy[..., 4:294].topk(10).indices + 4
        assert torch.equal(chosen.index[..., :20].sort(-1).values,
                           torch.cat([torch.arange(4).expand(2, 6, 3, 4), want,
                                      torch.arange(294, 300).expand(2, 6, 3, 6)], -1).sort(-1).values)


def test_heads_of_a_group_choose_together_unless_told_otherwise():
    signature = inspect.signature(vattention_decode).parameters
    assert all(signature[x.name].default == x.default for x in dataclasses.fields(VAttention))
    found = {share: decode(share=share, eps=0.4, delta=0.4, return_stats=True) for share in (True, False)}
    assert VAttention().share and torch.equal(found[True][0], decode(eps=0.4, delta=0.4))
    shared, own = (found[share][1].certificate for share in (True, False))
    heads = lambda x: x.unflatten(1, (2, 3))
    assert torch.equal(heads(shared.budget),
                       heads(shared.needed).amax(2, keepdim=True).expand(-1, -1, 3, -1)) and torch.equal(
                           own.budget, own.needed) and (own.budget < own.rest).any()
    assert torch.allclose(shared.group_density,
                          shared.density[:, ::3]) and (own.group_density > heads(own.density).amax(2)).any()


def test_everything_read_is_exact():
    for kw in (dict(eps=1e-9), dict(eps=1e-9, guarantee="output", bound="bernstein"),
               dict(base=300), dict(sinks=300), dict(topk=1.0), dict(sinks=10**6, window=10**6)):
        out, stats = decode(return_stats=True, kv_start=start, kv_end=stop, **kw)
        assert_close(out, attention(q, k, v, kv_start=start, kv_end=stop), 1e-13)
        assert stats.certificate.exact.all() and (stats.density == 1).all()
    for n in range(1, 12):
        assert_close(vattention_decode(q[:, :, :1], k[:, :, :n], v[:, :, :n]),
                     attention(q[:, :, :1], k[:, :, :n], v[:, :, :n]), 1e-13)


def test_first_causal_query_is_a_decode_step():
    seed = torch.full((2, 6), 9)
    assert_close(decode(causal=True, seed=seed)[:, :, :1], decode(q[:, :, :1], k[:, :, :298], v[:, :, :298], seed=seed),
                 1e-12)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_causal_query_is_guaranteed_what_its_own_keys_say(guarantee):
    "Each of the last three keys and values is longer than all before, and widens the bounds of those who see it alone."
    keys, values, far = k / 4, v / 10 + 1, torch.tensor([2.0, 4, 6])[:, None]
    keys[:, :, 297:] *= far
    values[:, :, 297:] *= far
    kw = dict(guarantee=guarantee, bound="bernstein", predictor=Guess(), eps=0.9, delta=0.9, window=0, topk=0, base=150,
              return_stats=True)
    found = decode(q / 9, keys, values, causal=True, **kw)[1].certificate
    for i, n in enumerate((298, 299, 300)):  # the same query of a call in which all see so many keys
        alone = decode(q / 9, keys, values, kv_end=torch.tensor([n, n]), **kw)[1].certificate
        for name in ("sigma", "D", "norm", "needed"):
            if getattr(found, name) is None: continue
            got, want = (getattr(x, name)[:, :, i].double() for x in (found, alone))
            assert torch.allclose(got, want, rtol=1e-9), (n, name)
    assert (found.needed < found.rest).any() and (guarantee == "denominator" or (found.norm > 0).any(1).all())


def test_streams_and_padding():
    assert torch.equal(decode(), decode()) and not torch.equal(decode(), decode(seed=4))
    # the streams, written out
    assert torch.equal(decode(seed=fold_in(3, torch.arange(2)[:, None], torch.arange(6))), decode())
    padded_k, padded_v = (torch.cat([torch.full((2, 2, 7, 8), 9.0, dtype=torch.float64), x], 2) for x in (k, v))
    for kw in (dict(), dict(bound="bernstein"), dict(guarantee="output", eps=0.5, delta=0.5)):
        assert_close(decode(q, padded_k, padded_v, kv_start=torch.tensor([7, 7]), **kw), decode(**kw), 1e-12)
    assert_close(decode(q, torch.cat([k, 50 * k], 2), torch.cat([v, 50 * v], 2), kv_end=torch.tensor([300, 300]),
                        bound="bernstein", predictor=Guess()), decode(bound="bernstein", predictor=Guess()), 1e-12)
    steps = decode(q[:1].expand(1, 6, 3, 8), k[:1], v[:1], seed=3)
    assert_close(steps, decode()[:1], 1e-12)


def test_dtypes():
    for dtype, tol in ((torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        args = [x.to(dtype) for x in (q, k, v)]
        out = decode(*args, eps=1e-6)
        assert out.dtype == dtype
        assert_close(out, attention(*(x.double() for x in args)), tol)
    huge = [x.double() for x in (q * 300, k * 300, v)]
    assert decode(*huge, bound="bernstein").isfinite().all() and decode(*huge, guarantee="output").isfinite().all()
    assert decode(*huge, bound="hoeffding", predictor=Guess()).isfinite().all()


def check_mean(errors):
    "Mean zero along the last axis, within what a z-test at ALARM allows."
    z = errors.mean(-1) / (errors.std(-1) / errors.shape[-1] ** 0.5)
    assert float(z.abs().max()) < scipy.stats.norm.isf(ALARM / z.numel() / 2)


@pytest.mark.parametrize("kw", [dict(share=False, plugin="plain"), dict(share=False), dict(plugin="plain"),
                                dict(predictor=Guess(), plugin="plain"), dict(share=False, bound="hoeffding"),
                                dict(share=False, plugin="printed")])
def test_denominator_and_numerator_are_unbiased(kw):
    many = q[:1, :, :1].expand(-1, -1, 1500, -1)
    chosen = VAttention(**(dict(eps=0.5, delta=0.5) | SMALL | kw)).select(many, k[:1], seed=8)
    share = attention_weights(many[:, :, :1], k[:1])
    weight = chosen.dense(300)
    check_mean((weight * share).sum(-1) - 1)
    values = v[:1].repeat_interleave(3, 1)[:, :, None]
    check_mean(((weight[..., None, :] @ (share[..., None] * values)).squeeze(-2)
                - (share[..., None, :] @ values).squeeze(-2)).movedim(2, -1))


@pytest.mark.parametrize("bound", fast(["bernstein", "hoeffding", "clt"], 0))
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_guarantee_is_kept(bound, guarantee):
    "Three heads, each judged by itself; most must draw, since one that is read whole cannot fail."
    eps, delta, times, n, g = 0.3, 0.2, 150, 8000, torch.Generator().manual_seed(5)
    keys, values = (torch.randn(1, 3, n, 8, generator=g, dtype=torch.float64) for _ in range(2))
    query = torch.randn(1, 3, 1, 8, generator=g, dtype=torch.float64) * torch.tensor([0.1, 0.25, 0.4]).view(1, 3, 1, 1)
    many, values = query.expand(-1, -1, times, -1), values + 2
    settings = dict(bound=bound, guarantee=guarantee, share=False, sinks=0, window=2, topk=4, base=100)
    chosen, p = select_with_guarantee(many, keys, values, VAttention(eps, delta, **settings), seed=6)
    out, scores = weighted_attention(many, keys, values, chosen), attention_scores(query, keys)
    assert_close(vattention_decode(many[:, :, :9], keys, values, eps=eps, delta=delta, seed=6, **settings),
                 out[:, :, :9], 1e-15)
    assert isinstance(p, Guarantee)
    assert p.proven == (bound != "clt") and (p.norm is None) == (guarantee == "denominator")
    D, failed = torch.exp(scores - p.shift[..., None]).sum(-1), lambda x: [int(y) for y in x.flatten(0, -2).sum(-1)]
    assert all(clopper_pearson(x, times, 1 - ALARM).low <= 0.2 * delta / 2 for x in failed(p.D > D * (1 + 1e-9)))
    drew = (~p.exact).double().mean((0, 2))
    assert (drew > 0.5).all(), drew
    weights, exact = (f.expand(-1, -1, times, -1) for f in (attention_weights(query, keys),
                                                            attention(query, keys, values)))
    ratio = (weights.gather(-1, chosen.index) * chosen.weight).sum(-1)
    wrong = {"denominator": (ratio - 1).abs(), "numerator": relative_error(out * ratio[..., None], exact),
             "output": relative_error(out, exact)}[guarantee] > eps
    assert all(clopper_pearson(x, times, 1 - ALARM).low <= delta for x in failed(wrong))


def test_plain_plugin_breaks_its_guarantee_where_the_tail_is_heavy_and_bounds_do_not():
    """One key in 200 has a term of e^4; a base sample of 100 misses all of them more often than not.

    The sinks hold so much that the bounds, too, leave keys unread: who reads all cannot fail.
    """
    keys = torch.zeros(1, 1, 5000, 4, dtype=torch.float64)
    keys[:, :, 150::200, 0], keys[:, :, :50, 0] = 4.0, 5.0
    query = torch.zeros(1, 1, 300, 4, dtype=torch.float64); query[..., 0] = 2.0  # scale 1/2
    rate, drew = {}, {}
    for plugin, bound in (("plain", "clt"), ("upper", "clt"), ("upper", "bernstein"), ("upper", "hoeffding")):
        chosen, certificate = select_with_guarantee(query, keys, None, VAttention(
            0.08, 0.1, 50, 0, 0, 100, plugin=plugin, bound=bound), seed=1)
        failed = ((attention_weights(query, keys).gather(-1, chosen.index) * chosen.weight).sum(-1) - 1).abs() > 0.08
        rate[plugin, bound] = clopper_pearson(int(failed.sum()), failed.numel(), 1 - ALARM)
        drew[plugin, bound] = float((~certificate.exact).double().mean())
    assert rate["plain", "clt"].low > 0.4 and all(x.low <= 0.1 for name, x in rate.items() if name[0] == "upper")
    assert all(x > 0.5 for x in drew.values()), drew


def test_least_draws_and_base():
    flat = torch.zeros_like(k)
    p = vattention_decode(q, flat, v, sinks=0, window=0, topk=0, base=0.01, plugin="plain", eps=0.9, seed=1,
                          return_stats=True)[1].certificate
    assert (p.base == BASE_LEAST).all() and (p.budget == CLT_LEAST).all() and (p.sigma == 0).all()


def test_the_kernels_refuse_in_words():
    pytest.importorskip("triton")
    one = [q[:, :, :1].float(), k.float(), v.float()]
    for args, kw, error, message in (([x.double() for x in one], {}, TypeError,
                                      "q must be float16, bfloat16 or float32 for backend='triton'"),
                                     ([q.float(), *one[1:]], {}, ValueError,
                                      "q must have one query for backend='triton', got 3"),
                                     ([x.clone().requires_grad_() for x in one], {}, ValueError,
                                      "backend must be 'torch' or 'auto' where a gradient")):
        with pytest.raises(error) as found: decode(*args, backend="triton", **kw)
        assert message in str(found.value) and type(found.value) is error


# predictors

def test_a_predictor_from_json():
    settings = dict(eps=0.4, delta=0.3) | SMALL
    written = {"method": "VAttention", "predictor": {"method": "Quest", "page": 8}} | settings
    nested = VAttention(predictor=Method.from_json('{"method": "Quest", "page": 8}'), **settings)
    assert nested == VAttention(predictor=Quest(page=8), **settings) == Method.from_json(json.dumps(written))
    assert torch.equal(nested.decode(q, k, v, seed=1),
                       VAttention(predictor=Quest(page=8), **settings).decode(q, k, v, seed=1))


@pytest.mark.parametrize("share", [True, False])
def test_padding_has_no_part_in_an_index_that_is_built(share):
    method = VAttention(predictor=Quest(page=8), eps=0.5, delta=0.4, plugin="plain", share=share, **SMALL)
    seed, alone = torch.arange(12).view(2, 6), slice(35, 281)
    wild_k, wild_v = (torch.where(torch.arange(300)[:, None] < start[:, None, None, None], 9.0, x) for x in (k, v))
    both, stats = method.decode(q, wild_k, wild_v, seed=seed, kv_start=start, kv_end=stop, return_stats=True)
    own, own_stats = method.decode(q[1:], k[1:, :, alone], v[1:, :, alone], seed=seed[1:], return_stats=True)
    assert_close(both[1:], own, 1e-12)
    assert torch.equal(stats.budget[1:], own_stats.budget) and (own_stats.density < 1).any()
    chosen = method.select(q, wild_k, seed=seed, kv_start=start, kv_end=stop).dense(300)
    assert torch.equal(chosen[1:, ..., alone], method.select(q[1:], k[1:, :, alone], seed=seed[1:]).dense(246))


def test_predictor_state_and_bytes():
    method = VAttention(predictor=Guess(), eps=0.3, delta=0.3, plugin="plain", **SMALL)
    state = method.new_state()
    state.append(k, v)
    out, stats = method.decode(q, k, v, seed=2, state=state, return_stats=True)
    assert torch.equal(out, method.decode(q, k, v, seed=2)) and stats.index_bytes == 600 and torch.equal(
        stats.keys_scored, stats.budget)
    assert not method.scores_all and VAttention().scores_all and VAttention().new_state() is None and (
        stats.density < 1).any()
    proven = VAttention(predictor=Guess(), bound="bernstein",
                        **SMALL).decode(q, k, v, seed=2, return_stats=True)[1].certificate
    assert proven.proven and proven.density.mean() > stats.density.mean()


CLUSTERS = Saap(partition="context", clusters=8, window=1)

@pytest.mark.parametrize("predictor", [Guess(), Quest(page=8), DoubleSparsity(channels=2), Adamas(), MagicPIG(bits=4),
                                       CLUSTERS], ids=lambda x: type(x).__name__)
def test_an_index_keeps_the_lengths_of_the_values_where_the_guarantee_needs_them(predictor):
    method = VAttention(0.1, 0.5, 4, 6, 10, 100, predictor=predictor, guarantee="numerator", share=False)
    plain, want = predictor.new_state(), v.norm(dim=-1)
    state, one = method.new_state(), dict(seed=torch.arange(12).view(2, 6))
    assert type(dataclasses.replace(method, guarantee="denominator").new_state()) is type(plain)
    assert isinstance(state, type(plain)) and type(state) is type(method.new_state())
    assert state.settings().keys() == plain.settings().keys()
    for part in slice(0, 200), slice(200, 300):
        for x in state, plain: x.append(k[:, :, part], v[:, :, part])
    assert torch.equal(state.lengths, want) and "lengths" not in vars(plain)
    less = copy.deepcopy(state)
    less.lengths *= 0.7
    own, found, fewer = (method.decode(q / 8, k, v, state=x, return_stats=True, **one)[1].certificate.needed
                         for x in (state, plain, less))
    assert torch.equal(own, found) and (fewer <= own).all() and (fewer < own).any()  # what is kept is what is used
    assert torch.equal(state.lengths, want)
    state.crop(250)
    state.append(k[:, :, 250:], v[:, :, 250:])
    state.pick_sequences(torch.tensor([1, 1, 0]))
    assert torch.equal(state.lengths, want[[1, 1, 0]])
    state.crop(290)
    state.to_static(310)
    for i in range(290, 300): state.write(k[[1, 1, 0]], v[[1, 1, 0]], torch.tensor([i]))
    assert torch.equal(state.lengths[:, :, :300], want[[1, 1, 0]]) and state.lengths.shape[2] == 310
    assert any(x is state.lengths for x in state.buffers())
    state.to_dynamic(299, k[[1, 1, 0]])
    assert torch.equal(state.lengths, want[[1, 1, 0], :, :299])
    state.reset()
    assert state.lengths is None and not state.static


def test_the_lengths_are_counted():
    method = VAttention(predictor=Guess(), eps=0.3, delta=0.3, guarantee="output", **SMALL)
    assert method.decode(q, k, v, seed=2, return_stats=True)[1].index_bytes == 600 + 4 * 300


# generation

def test_generation():
    pytest.importorskip("transformers")
    from sparse_nb.hf import sparsify
    from inputs import IDS
    from models import build, ids_of, step_by_step
    model = build("llama")
    with sparsify(model, decode=VAttention()): assert torch.equal(ids_of(model), ids_of(model))  # 40 keys: exact
    plain = ids_of(model)
    with sparsify(model, decode=VAttention()) as session: assert torch.equal(ids_of(model), plain)
    method = VAttention(eps=0.9, delta=0.5, sinks=2, window=4, topk=2, base=4, plugin="plain", bound="bernstein")
    with sparsify(model, decode=method, audit=True) as session: got = ids_of(model)
    assert torch.equal(got,
                       step_by_step(model, method, IDS,
                                    6)) and session.stats().error.min() > 1e-5 and session.stats().density.max() <= 1
    indexed = VAttention(eps=0.9, delta=0.5, sinks=2, window=4, topk=4, base=4, plugin="plain", bound="bernstein",
                         predictor=Guess())
    with sparsify(model, decode=indexed): got = ids_of(model)
    assert torch.equal(got, step_by_step(model, indexed, IDS, 6))


def test_search_finds_the_least_error_among_those_that_read_little_enough():
    pytest.importorskip("transformers")
    from models import build
    from sparse_nb.hf import capture
    model, prompts = build("llama"), [torch.randint(3, 64, (240,), generator=torch.Generator().manual_seed(i))
                                      for i in range(2)]
    start, grid = VAttention(sinks=4, window=4, plugin="plain"), dict(topk=(0.05, 0.2), base=(0.05,), eps=(0.05, 0.3))
    best, table = search(model, prompts, 0.6, method=start, grid=grid, queries=2, progress=False)
    assert len(table) == 4 and table.error.is_monotonic_increasing and best == dataclasses.replace(
        start, **{x: getattr(best, x) for x in grid})
    row = table[(table.topk == best.topk) & (table.eps == best.eps)].iloc[0]
    assert row.density <= 0.6 and row.error == table[table.density <= 0.6].error.min()
    errors, densities = [], []
    for i, (c, j) in enumerate((c, j) for ids in prompts for c in capture(model, ids, positions=[-2, -1])
                               for j in range(2)):
        q, k, v = c.seen(j)
        out, stats = best.decode(q, k, v, scale=c.scale, seed=fold_in(0, i), return_stats=True)
        errors.append(relative_error(out,
                                     attention(q, k, v, scale=c.scale)).double().mean()), densities.append(
                                         stats.density.double().mean())
    assert_close(row.error, torch.stack(errors).mean(),
                 1e-9), assert_close(row.density, torch.stack(densities).mean(), 1e-9)

@pytest.mark.parametrize("call, error, message",
                         [(lambda m, x: search(m, x, 0.01, grid=dict(eps=(0.1,))), ValueError,
                           "which a setting of the grid reads, got 0.01; fewer sinks"),
                          (lambda m, x: search(m, x, 0.3), ValueError,
                           "density must be one of 0.1, 0.15, 0.2 unless a grid is given, got 0.3"),
                          (lambda m, x: search(m, x, 0.1, grid=dict(epsilon=(0.1,))), ValueError,
                           "grid must name settings of VAttention, got 'epsilon'"),
                          (lambda m, x: search(m, x, 0.1, method=VAttention(predictor=HashAttention())), ValueError,
                           "model must have the weights that the networks 'pocket' were trained on"),
                          (lambda m, x: search(m, [], 0.1), ValueError, "prompts must hold at least one, got none"),
                          (lambda m, x: search(m, x, 0.1, queries=0), ValueError, "queries"),
                          (lambda m, x: search(m, x, 1.5, grid=dict(eps=(0.1,))), ValueError,
                           "density must lie in (0, 1), got 1.5"),
                          (lambda m, x: search(m, x, method=TopK()), TypeError,
                           "method must be a VAttention, got TopK"), ])
def test_search_names_what_is_wrong(call, error, message):
    pytest.importorskip("transformers")
    from models import build
    with pytest.raises(error) as found:
        call(build("llama"), [torch.randint(3, 64, (240,), generator=torch.Generator().manual_seed(0))])
    assert message in str(found.value)


def test_a_step_makes_few_calls_and_checks_at_its_door_alone():
    "Of functions of this package, in a step: in all, from module to module (those of a method are one), and of checks."
    frames = []
    def note(frame, event, _):
        if event == "call" and "sparse_nb" in frame.f_code.co_filename: frames.append(frame)
    method, q_, k_ = VAttention(eps=0.1), torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4096, 64)
    method.decode(q_, k_, k_, seed=0)
    sys.setprofile(note)
    method.decode(q_, k_, k_, seed=0)
    sys.setprofile(None)
    called = [frame.f_code for frame in frames]
    of = lambda frame: re.sub(r"/methods/vattention/\w+", "/vattention", frame.f_code.co_filename)
    walls = sum("sparse_nb" in of(x.f_back) and of(x.f_back) != of(x) for x in frames)
    assert len(called) <= 130 and walls <= 50, (len(called), walls)
    assert sum("check_" in code.co_name for code in called) <= 15
