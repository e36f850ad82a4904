"""Metrics and plots: properties, statistics with stated false-alarm rates, and what bad input gets."""
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from sparse_nb.attention import Exact, Selection, Stats, Streaming, TopK, TopP, Uniform, attention_weights
from sparse_nb.metrics import (Interval, bootstrap_interval, bytes_read, clopper_pearson, cosine, coverage,
                               coverage_curve, density,
                               keys_for_coverage, paired_interval, relative_error, distinct_keys, spearman)
from sparse_nb.plots import (METHOD_COLOURS, METHOD_LABELS, METHOD_MARKERS, plot_coverage, plot_error_budget,
                             plot_kept, style)

B, H, G, Q, N, D = 2, 6, 2, 3, 50, 8


@pytest.fixture(scope="module")
def tensors():
    rng = torch.Generator().manual_seed(0)
    return (torch.randn(B, H, Q, D, generator=rng), torch.randn(B, G, N, D, generator=rng),
            torch.randn(B, G, N, D, generator=rng))


@pytest.fixture(scope="module")
def weights(tensors): return attention_weights(*tensors[:2])


# errors

@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_relative_error_is_scale_free_and_cosine_blind_to_scale(seed, factor):
    out, ref = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(relative_error(factor * out, factor * ref), relative_error(out, ref))
    torch.testing.assert_close(cosine(factor * out, ref), cosine(out, ref))
    torch.testing.assert_close(relative_error(factor * ref, ref),
                               torch.full((4,), abs(factor - 1), dtype=torch.float64), rtol=1e-9, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31))
def test_error_and_cosine_obey_the_law_of_cosines(seed):
    out, ref = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ratio = out.norm(dim=-1) / ref.norm(dim=-1)
    torch.testing.assert_close(relative_error(out, ref) ** 2, 1 + ratio**2 - 2 * ratio * cosine(out, ref))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_low_precision_is_measured_in_at_least_float32(dtype):
    ref = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    error = relative_error(torch.tensor([[3.0, 4.5]]).to(dtype), ref)
    assert error.dtype == torch.float64 and error.item() == pytest.approx(0.1)
    assert relative_error(ref.to(dtype), ref.to(dtype)).dtype == (torch.float64 if dtype == torch.float64
                                                                  else torch.float32)


def test_float16_does_not_overflow():
    big = torch.full((1, 4), 6e4, dtype=torch.float16)
    assert relative_error(-big, big).item() == pytest.approx(2)


def test_spearman_is_scipys_row_by_row_with_ties():
    a, b = torch.randint(0, 9, (2, 3, 4, 30), generator=torch.Generator().manual_seed(1)).double()
    want = [[scipy.stats.spearmanr(x, y).statistic for x, y in zip(*rows)] for rows in zip(a, b)]
    torch.testing.assert_close(spearman(a, b), torch.tensor(want, dtype=torch.float64))


# coverage

@pytest.mark.parametrize("budget", [1, 7, N])
def test_no_selection_covers_more_than_topk(tensors, weights, budget):
    q, k, _ = tensors
    best = coverage(weights, TopK(budget).select(q, k))
    torch.testing.assert_close(best.double(), coverage_curve(weights)[..., budget - 1], rtol=1e-5, atol=1e-6)
    assert (coverage(weights, Uniform(budget).select(q, k, seed=3)) <= best + 1e-6).all()


@pytest.mark.parametrize("mass", [0.01, 0.5, 0.9, 0.999])
def test_keys_for_coverage_is_what_topp_reads(tensors, weights, mass):
    q, k, _ = tensors
    count = keys_for_coverage(weights.double(), mass)
    torch.testing.assert_close(count, TopP(mass).select(q, k).budget)
    assert (coverage_curve(weights).gather(-1, count[..., None] - 1) >= mass - 1e-6).all()


def test_coverage_counts_a_key_once(weights):
    twice = Selection(torch.zeros(B, H, Q, 2, dtype=torch.int64), torch.ones(B, H, Q, 2))
    torch.testing.assert_close(coverage(weights, twice), weights[..., 0])
    assert (distinct_keys(twice, N) == 1).all()


def test_coverage_ignores_unused_slots(weights):
    half_used = Selection(torch.tensor([3, 0]).expand(B, H, Q, 2), torch.tensor([2.0, 0.0]).expand(B, H, Q, 2))
    torch.testing.assert_close(coverage(weights, half_used), weights[..., 3])


def test_causal_coverage_of_everything_is_one(tensors):
    q, k, _ = tensors
    torch.testing.assert_close(coverage(attention_weights(q, k, causal=True), Exact().select(q, k, causal=True)),
                               torch.ones(B, H, Q))


# rows and bytes

def test_rows_of_a_group_are_the_union_of_its_heads():
    index = torch.tensor([[0, 1], [1, 2], [0, 1], [5, 6]]).view(1, 4, 1, 2)
    selection = Selection(index, torch.ones(1, 4, 1, 2))
    assert distinct_keys(selection, 9, groups=2).flatten().tolist() == [3, 4]
    assert distinct_keys(selection, 9, groups=1).item() == 5
    for found in distinct_keys(selection, 9, groups=4), distinct_keys(selection, 9):
        assert found.flatten().tolist() == [2] * 4
    assert density(selection, 9, groups=1).item() == pytest.approx(5 / 9)


@pytest.mark.parametrize("method", [Exact(), Streaming(2, 5), TopK(7), TopP(0.8), Uniform(7)])
def test_sharing_lies_between_one_head_and_all(tensors, method):
    q, k, v = tensors
    stats = method.decode(q, k, v, seed=0, return_stats=True)[1]
    shared = distinct_keys(method.select(q, k, seed=0), N, groups=G)
    each, group = bytes_read(stats, D, 2), bytes_read(stats, D, 2, shared=shared)
    for one, together in ((each.keys, group.keys), (each.values, group.values)):
        assert ((together >= one.unflatten(1, (G, -1)).amax(2)).all()
                and (together <= one.unflatten(1, (G, -1)).sum(2)).all())
    assert group.sum().total <= each.sum().total


def test_ledger_of_exact_attention(tensors):
    stats = Exact().decode(*tensors, return_stats=True)[1]
    ledger = bytes_read(stats, D, 2)
    assert ledger.sum().total == 2 * B * H * Q * N * D * 2 and ledger.index.sum() == 0
    assert bytes_read(stats, D, 2, shared=distinct_keys(Exact().select(*tensors[:2]), N,
                                                    groups=G)).sum().total == 2 * B * G * Q * N * D * 2
    assert (ledger.ratio(ledger) == 1).all()


def test_oracles_pay_for_every_key_and_an_index_is_read_once_in_a_group():
    stats = Stats(torch.full((1, 4, 1), 100), torch.full((1, 4, 1), 10), 64, torch.full((1, 4, 1), 0.1),
                  torch.full((1, 4, 1), 10))
    each, group = bytes_read(stats, 16, 2), bytes_read(stats, 16, 2, shared=torch.tensor([[[15], [20]]]))
    assert (each.keys.flatten().tolist() == [3200] * 4 and each.values.flatten().tolist() == [320] * 4
            and each.index.flatten().tolist() == [64] * 4)
    assert (group.keys.flatten().tolist() == [3200] * 2 and group.values.flatten().tolist() == [480, 640]
            and group.index.flatten().tolist() == [64] * 2)


# intervals

@pytest.mark.parametrize("trials", [1, 7, 40])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_clopper_pearson_covers_at_every_rate(trials, confidence):
    ends = np.array([clopper_pearson(s, trials, confidence) for s in range(trials + 1)])[:, [0, 2]]
    rate = np.linspace(0, 1, 501)
    hit = (ends[:, :1] <= rate) & (rate <= ends[:, 1:])
    chance = (scipy.stats.binom.pmf(np.arange(trials + 1)[:, None], trials, rate) * hit).sum(0)
    assert chance.min() >= confidence - 1e-9


def test_interval():
    interval = clopper_pearson(5, 10)
    assert isinstance(interval, Interval) and interval == clopper_pearson(np.int64(5), np.int64(10))
    assert (interval.covers(interval.low) and interval.covers(interval.value)
            and not interval.covers(interval.high + 1e-9))
    assert str(Interval(0.25, 0.5, 0.75)) == "0.5 [0.25, 0.75]"


@pytest.mark.parametrize("n", [6, 8, 30])
@pytest.mark.parametrize("draw", ["normal", "exponential"])
def test_a_mean_of_few_is_covered_as_often_as_said(n, draw):
    draws = getattr(np.random.default_rng(n), draw)(size=(400, n)) - (draw == "exponential")
    ends = np.array([bootstrap_interval(x) for x in draws])[:, [0, 2]]
    hits = (ends[:, 0] <= 0) & (0 <= ends[:, 1])
    # 0.94 to 0.97 were seen in 2,000 trials; false-alarm rate 1e-6. Of 400 intervals of BCa 330 to 360 cover with n = 6
    assert scipy.stats.binom.ppf(5e-7, 400, 0.94) <= hits.sum()
    half = scipy.stats.t.isf(0.025, n - 1) * draws.std(1, ddof=1) / n**0.5  # Student's interval lies in ours
    assert (ends[:, 0] <= draws.mean(1) - half + 1e-12).all() and (ends[:, 1] >= draws.mean(1) + half - 1e-12).all()
    wider = (ends[:, 1] - ends[:, 0]) / (2 * half)
    assert wider.max() > 1.05 and np.median(wider) < (1.5 if n < 30 else 1.25)


def test_a_skew_is_followed_and_fewer_than_six_have_no_bootstrap():
    x = np.random.default_rng(3).exponential(size=12)
    low, mean, high = bootstrap_interval(x)
    assert high - mean > 1.2 * (mean - low)
    assert bootstrap_interval(x[:5]) == bootstrap_interval(x[:5], seed=1)
    mean, error = x[:5].mean(), x[:5].std(ddof=1) / 5**0.5
    want = scipy.stats.t.interval(0.9, 4, mean, error)
    assert bootstrap_interval(x[:5], confidence=0.9) == pytest.approx((want[0], mean, want[1]))


@pytest.mark.parametrize("rest", [1.0, 1.0 + 1e-12, 1.0 + 1e-4])
def test_where_nearly_all_are_equal_the_ends_stay_near(rest):
    x = np.array([1.0] * 6 + [rest] * 6 + [2.0])
    low, mean, high = bootstrap_interval(x)
    half = scipy.stats.t.isf(0.025, 12) * x.std(ddof=1) / 13**0.5
    assert half <= mean - low + 1e-12 and half <= high - mean + 1e-12 and max(mean - low, high - mean) <= 4.01 * half


def test_numbers_of_a_unit_are_one():
    x, prompts = np.random.default_rng(5).normal(size=30), np.repeat(["a", "b", "c", "d", "e", "f"], [1, 9, 5, 5, 5, 5])
    means = [x[prompts == name].mean() for name in "abcdef"]
    assert bootstrap_interval(x, prompts) == pytest.approx(bootstrap_interval(means))
    copies = bootstrap_interval(np.repeat(x, 10), np.repeat(np.arange(30), 10))  # heads that all say the same
    assert copies == pytest.approx(bootstrap_interval(x), rel=1e-9)
    assert copies.high - copies.low > 2.5 * (bootstrap_interval(np.repeat(x, 10)).high
                                             - bootstrap_interval(np.repeat(x, 10)).low)


def test_bootstrap_takes_tensors_arrays_and_lists_and_replays():
    x = np.random.default_rng(1).exponential(size=30)
    assert bootstrap_interval(x) == bootstrap_interval(torch.tensor(x)) == bootstrap_interval(
        list(x)) != bootstrap_interval(x, seed=1)
    large = np.random.default_rng(1).exponential(size=1001)  # Student's alone
    assert bootstrap_interval(large) == bootstrap_interval(large, seed=1)


@pytest.mark.parametrize("n", [1, 4, 8, 20, 60])
def test_differences_of_right_answers_are_covered_at_every_pair_of_rates(n):
    a, b = (x.flatten() for x in np.meshgrid(np.arange(n + 1), np.arange(n + 1)))
    a, b = a[a + b <= n], b[a + b <= n]
    ends = np.array([paired_interval(np.repeat([1.0, -1.0, 0.0], [x, y, n - x - y])) for x, y in zip(a, b)])
    assert (ends[:, 0] < ends[:, 2]).all() and ends[:, 1] == pytest.approx((a - b) / n)
    assert (ends[:, 0] <= ends[:, 1]).all() and (ends[:, 1] <= ends[:, 2]).all() and np.abs(ends).max() <= 1
    for p in (0, 0.002, 0.01, 0.05, 0.15, 0.35, 0.65, 0.95):
        for r in (0, 0.002, 0.01, 0.05, 0.15, 0.35, 0.65, 0.95):
            if p + r > 1: continue
            chance = scipy.stats.multinomial.pmf(np.stack([a, b, n - a - b], -1), n, [p, r, 1 - p - r])
            assert chance[(ends[:, 0] - 1e-12 <= p - r) & (p - r <= ends[:, 2] + 1e-12)].sum() > 0.93, (p, r)


def test_the_paired_interval_is_the_formula_of_bonett_and_price():
    n, a, b = 40, 9, 2
    p, r = (a + 1) / (n + 2), (b + 1) / (n + 2)
    half = scipy.stats.t.isf(0.05, n + 1) * ((p + r - (p - r)**2) / (n + 2)) ** 0.5
    got = paired_interval([1] * a + [-1] * b + [0] * (n - a - b), 0.9)
    assert got == pytest.approx((p - r - half, (a - b) / n, p - r + half))


def test_a_difference_is_small_only_where_the_whole_interval_is():
    assert Interval(-0.04, 0.0, 0.04).within(0.05)
    assert not Interval(-0.06, 0.0, 0.04).within(0.05) and not Interval(-0.04, 0.0, 0.06).within(0.05)
    assert not Interval(-0.5, 0.0, 0.5).within(0.05)  # holds 0, and shows nothing
    # two one-sided tests: their p values at the margin are below alpha just where the interval of 1 - 2 alpha is within
    x = np.random.default_rng(0).normal(size=5)
    for margin in (0.2, 0.5, 0.7, 1.0, 1.5):
        p = max(scipy.stats.ttest_1samp(x, -margin, alternative="greater").pvalue,
                scipy.stats.ttest_1samp(x, margin, alternative="less").pvalue)
        assert bootstrap_interval(x, confidence=0.9).within(margin) == (p < 0.05)


# bad input

X, TWO = torch.ones(2, 3), torch.ones(1, 1, 1, 2)
NAN, HALVES = torch.tensor([[1.0, float("nan")]]), torch.full((1, 1, 1, 2), 0.5)
KEPT = Selection(torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.ones(1, 1, 1, 1))
STATS = Stats(torch.ones(1, 4, 1, dtype=torch.int64), torch.ones(1, 4, 1, dtype=torch.int64), 0, torch.ones(1, 4, 1),
              torch.ones(1, 4, 1))


@pytest.mark.parametrize("call, error, names", [
    (lambda: relative_error([1.0], X), TypeError, "out .*list"),
    (lambda: relative_error(X.long(), X), TypeError, "out .*int64"),
    (lambda: relative_error(X, X.long()), TypeError, "ref .*int64"),
    (lambda: relative_error(X, X[:1]), ValueError, r"out and ref .*\[2, 3\] and \[1, 3\]"),
    (lambda: relative_error(X, X.to("meta")), ValueError, "out and ref .*cpu and meta"),
    (lambda: relative_error(NAN, NAN), ValueError, "out .*NaN"),
    (lambda: relative_error(X, X / 0), ValueError, "ref .*inf"),
    (lambda: relative_error(X, 0 * X), ValueError, "ref .*zero"),
    (lambda: relative_error(X[:0], X[:0]), ValueError, r"out .*\[0, 3\]"),
    (lambda: cosine(0 * X, X), ValueError, "out .*zero"),
    (lambda: cosine(X, 0 * X), ValueError, "ref .*zero"),
    (lambda: cosine(X, X.bool()), TypeError, "ref .*bool"),
    (lambda: spearman(X, X), ValueError, "a .*equal"),
    (lambda: spearman(X[:, :1], X[:, :1]), ValueError, "a .*2 keys"),
    (lambda: spearman(X.cumsum(-1), X.cumsum(-1)[..., :2]), ValueError, "a and b .*shape"),
    (lambda: coverage_curve(X), ValueError, "weights .*sum to 1"),
    (lambda: coverage_curve(torch.tensor([1.5, -0.5])), ValueError, "weights .*negative"),
    (lambda: coverage_curve(NAN), ValueError, "weights .*NaN"),
    (lambda: keys_for_coverage(HALVES, 0.0), ValueError, "mass .*0.0"),
    (lambda: keys_for_coverage(HALVES, 1.5), ValueError, "mass .*1.5"),
    (lambda: keys_for_coverage(HALVES, "0.9"), TypeError, "mass .*str"),
    (lambda: coverage(HALVES, KEPT.index), TypeError, "selection .*Tensor"),
    (lambda: coverage(HALVES.expand(1, 2, 1, 2), KEPT), ValueError, r"selection .*\[1, 2, 1, 2\].*\[1, 1, 1, 2\]"),
    (lambda: distinct_keys(KEPT, 0), ValueError, "n .*0"),
    (lambda: distinct_keys(KEPT, 2.0), TypeError, "n .*float"),
    (lambda: distinct_keys(Selection(KEPT.index + 5, KEPT.weight), 3), ValueError, "index .*3.*5"),
    (lambda: distinct_keys(KEPT, 2, groups=2), ValueError, "groups .*1 query heads.*2"),
    (lambda: distinct_keys(KEPT, 2, groups=0), ValueError, "groups .*0"),
    (lambda: density(KEPT, 2, groups=True), TypeError, "groups .*bool"),
    (lambda: bytes_read(KEPT, 8, 2), TypeError, "stats .*Selection"),
    (lambda: bytes_read(STATS, 0, 2), ValueError, "head_dim .*0"),
    (lambda: bytes_read(STATS, 8, 2.0), TypeError, "itemsize .*float"),
    (lambda: bytes_read(STATS, 8, 2, shared=torch.ones(1, 3, 1)), ValueError, r"shared .*\[1, 4, 1\].*\[1, 3, 1\]"),
    (lambda: bytes_read(STATS, 8, 2, shared=[2]), TypeError, "shared .*list"),
    (lambda: bytes_read(STATS, 8, 2).sum().ratio(bytes_read(STATS, 8, 2)), ValueError, r"dense .*\[\].*\[1, 4, 1\]"),
    (lambda: clopper_pearson(1.0, 2), TypeError, "successes .*float"),
    (lambda: clopper_pearson(3, 2), ValueError, "successes .*2.*3"),
    (lambda: clopper_pearson(-1, 2), ValueError, "successes .*-1"),
    (lambda: clopper_pearson(0, 0), ValueError, "trials .*0"),
    (lambda: clopper_pearson(1, 2, 1.0), ValueError, "confidence .*1"),
    (lambda: clopper_pearson(1, 2, 95), ValueError, "confidence .*95"),
    (lambda: bootstrap_interval([1.0]), ValueError, "x .*2 numbers"),
    (lambda: bootstrap_interval(np.ones((2, 2))), ValueError, r"x .*\[2, 2\]"),
    (lambda: bootstrap_interval([1.0, np.nan]), ValueError, "x .*NaN"),
    (lambda: bootstrap_interval([1.0, 1.0]), ValueError, "x must vary.*2 times 1"),
    (lambda: bootstrap_interval([1.0, 2.0], confidence=0), ValueError, "confidence .*0"),
    (lambda: bootstrap_interval([1.0, 2.0], [0]), ValueError, "units must name .* 2 numbers, got 1 names"),
    (lambda: bootstrap_interval([1.0, 2.0], ["one", "one"]), ValueError, "units must be at least 2.*unit one"),
    (lambda: bootstrap_interval([1.0, 2.0, 3.0, 0.0], ["a", "a", "b", "b"]), ValueError, "x must vary.*2 times 1.5"),
    (lambda: paired_interval([]), ValueError, r"gains .*shape \[0\]"),
    (lambda: paired_interval([1.0, -1.5]), ValueError, "gains must lie in .*got -1.5"),
    (lambda: paired_interval([0.0, 1.0], 1), ValueError, "confidence .*1"),
    (lambda: Interval(-1, 0, 1).within(0), ValueError, "margin must be above 0, got 0"),
    (lambda: plot_coverage(torch.ones(4)), ValueError, "weights .*sum to 1"),
    (lambda: plot_coverage(torch.ones(1, 1, 1, 1)), ValueError, r"weights .*3 axes.*\[1, 1, 1, 1\]"),
    (lambda: plot_coverage(HALVES[0, 0], labels=["a", "b"]), ValueError, "labels .*1.*2"),
    (lambda: plot_coverage(HALVES[0], panels=["a", "b"]), ValueError, "panels .*1.*2"),
    (lambda: plot_coverage(HALVES[0], mass=0), ValueError, "mass .*0"),
    (lambda: plot_error_budget([1]), TypeError, "table .*list"),
    (lambda: plot_error_budget(pd.DataFrame({"method": ["topk"], "error": [1.0]})), ValueError, "table .*budget"),
    (lambda: plot_error_budget(pd.DataFrame({"method": ["topk"], "budget": [0.1], "error": [0.0]})), ValueError,
     "table.*positive"),
    (lambda: plot_error_budget(pd.DataFrame({"method": ["topk"], "budget": [10], "error": [0.1]})), ValueError,
     r"table.*\(0, 1\]"),
    (lambda: plot_error_budget(pd.DataFrame({"method": ["mine"], "budget": [0.1], "error": [0.1]})), ValueError,
     "method .*topk.*'mine'"),
    (lambda: plot_kept(HALVES, {"topk": [1, 0]}), ValueError, r"weights .*one axis.*\[1, 1, 1, 2\]"),
    (lambda: plot_kept(HALVES.flatten(), {}), ValueError, "selections .*at least one"),
    (lambda: plot_kept(HALVES.flatten(), {"mine": [1, 0]}), ValueError, "method .*topk.*'mine'"),
    (lambda: plot_kept(HALVES.flatten(), {"topk": [1, 0, 0]}), ValueError, r"selections\['topk'\].*\[2\].*\[3\]"),
    (lambda: plot_kept(HALVES.flatten(), {"topk": [2.0, 0]}), ValueError, r"selections\['topk'\].*\[0, 1\]"),
    (lambda: plot_kept(HALVES.flatten(), {"topk": [1, 0]}, bins=0), ValueError, "bins .*0"),
    (lambda: plot_kept(HALVES.flatten(), {"topk": [1, 0]}, answer=(1, 5)), ValueError, r"answer .*2.*\(1, 5\)"),
])
def test_bad_input_names_the_argument(call, error, names):
    with pytest.raises(error, match=names): call()
    plt.close("all")


# plots

def test_every_method_has_a_look():
    assert METHOD_COLOURS.keys() == METHOD_LABELS.keys() == METHOD_MARKERS.keys()
    assert {"exact", "streaming", "topk", "topp", "uniform"} <= METHOD_COLOURS.keys()


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_plots_take_tensors_arrays_and_lists(kind):
    style()
    weights = [0.5, 0.25, 0.125, 0.125]
    table = pd.DataFrame({"method": ["topk", "uniform"] * 2, "budget": [0.1, 0.1, 0.2, 0.2],
                          "error": [0.3, 0.2, 0.1, 0.1]})
    for fig in (plot_coverage(kind(weights)), plot_error_budget(table),
                plot_kept(kind(weights), {"topk": kind([1, 1, 0, 0])}, answer=(1, 2))):
        assert isinstance(fig, Figure)
        fig.canvas.draw()
        plt.close(fig)


def test_plots_read_gpu_style_and_low_precision_tensors():
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.bfloat16, requires_grad=True)
    for fig in (plot_coverage(weights), plot_kept(weights, {"exact": torch.ones(3, dtype=torch.bool)})): plt.close(fig)


@pytest.mark.parametrize("n", [1, 100, 8192, 33000])
def test_bins_of_plot_kept_hold_all_of_the_mass(n):
    weights = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    weights /= weights.sum()
    fig = plot_kept(weights, {"uniform": torch.rand(n) < 0.1, "exact": torch.ones(n)})
    values, edges, _ = fig.axes[0].patches[0].get_data()
    assert values.sum() == pytest.approx(1) and edges[0] == 0 and edges[-1] == n and len(values) <= 256
    assert fig.axes[2].texts[0].get_text() == "100.0 % of keys, 100.0 % of mass"
    plt.close(fig)


@pytest.mark.gpu
def test_metrics_on_a_gpu_match_the_cpu():
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, h, n, D, generator=rng) for h, n in ((H, Q), (G, N), (G, N)))
    def measure(q, k, v):
        out, stats = TopK(7).decode(q, k, v, return_stats=True)
        selection, ref = TopK(7).select(q, k), Exact().decode(q, k, v)
        w = attention_weights(q, k)
        shared = distinct_keys(selection, N, groups=G)
        return [relative_error(out, ref), cosine(out, ref), coverage(w, selection), coverage_curve(w),
                keys_for_coverage(w, 0.5), shared,
                bytes_read(stats, D, 4).total, bytes_read(stats, D, 4, shared=shared).total]
    for cpu, gpu in zip(measure(q, k, v), measure(q.cuda(), k.cuda(), v.cuda())):
        assert gpu.is_cuda
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-4, atol=1e-5)

def test_panels_with_the_same_rows_show_the_same_means():
    rows = pd.DataFrame([dict(method="topk", budget=b, error=e) for b in (0.1, 0.2) for e in (0.001, 1.0)])
    fig = plot_error_budget(pd.concat([rows.assign(panel=x) for x in "ab"]))
    for ax in fig.axes: np.testing.assert_allclose(ax.lines[0].get_ydata(), [0.5005, 0.5005])
