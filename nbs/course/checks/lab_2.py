"""Checks of lab 2, SANTA's sampler."""
import torch

from sparse_nb.attention import attention
from sparse_nb.santa import santa_decode

from . import check, close, need, result, same


def strata_means(p, v, samples):
    "Means of a value drawn from each of S equal parts of the stick [S, D], and the probabilities of keys there [S, N]."
    ends = p.cumsum(0)
    low = torch.arange(samples, dtype=torch.float64)[:, None] / samples
    inside = (torch.minimum(ends, low + 1 / samples) - torch.maximum(ends - p, low)).clamp(min=0) * samples
    return inside @ v, inside


def heads(n, size=3, seed=0):
    "Attention weights [N], values [N, size]."
    rng = torch.Generator().manual_seed(seed)
    p = torch.rand(n, generator=rng, dtype=torch.float64) ** 3
    return p / p.sum(), torch.randn(n, size, generator=rng, dtype=torch.float64)


@check
def thresholds(answer):
    u = torch.tensor([0.1, 0.9, 0.5, 0.3], dtype=torch.float64)
    j = torch.arange(4, dtype=torch.float64)
    one_for_all, each = (j + u[0]) / 4, (j + u) / 4
    for scheme, want, other in (("iid", u, each), ("stratified", each, one_for_all), ("systematic", one_for_all, each)):
        known = {f"these are thresholds of another scheme than {scheme!r}": other,
                 "thresholds lie in [0, 1): divide by the number of samples": 4 * want,
                 "there are S strata, j = 0 .. S - 1, each 1/S long": want + 1 / 4}
        same(result(answer, scheme, u), want, f"the thresholds of {scheme!r} for u = {u.tolist()}", known)


@check
def pick(answer):
    p, x = torch.tensor([0.25, 0.5, 0.125, 0.125]), torch.tensor([0.0, 0.1, 0.3, 0.6, 0.8, 0.9])
    want, of_weights = torch.tensor([0, 0, 1, 1, 2, 3]), torch.searchsorted(p, x, right=True)
    known = {"take the cumulative weights F, not the weights themselves": of_weights.clamp(max=3),
             "take the cumulative weights F, not the weights": of_weights,
             "leave the keys in their order": torch.searchsorted(p.sort().values.cumsum(0), x, right=True),
             "this is one key too far: count the F_i that are at most X": want + 1,
             "a larger threshold picks a later key": want.flip(0)}
    same(result(answer, p, x), want, f"the keys picked for weights {p.tolist()} and thresholds 0, .1, .3, .6, .8, .9",
         known)
    need(torch.as_tensor(answer(p, torch.tensor([0.25]))).tolist() == [1],
         "a threshold that equals F_0 picks key 1: the first i with F_i > X, not with F_i >= X")
    short = torch.full((10,), 0.1)[:9]  # as if rounding had left the last F below 1
    need(torch.as_tensor(answer(short, torch.tensor([0.95]))).tolist() == [8],
         "rounding can leave the last F below 1, and a threshold above it: then pick the last key")


@check
def estimate(answer):
    p, v = heads(50)
    q, k = torch.ones(1, dtype=torch.float64), p.log()[:, None]
    x = (torch.arange(8, dtype=torch.float64) + 0.3) / 8
    drawn = torch.searchsorted(p.cumsum(0), x, right=True)
    want = v[drawn].mean(0)
    same(result(answer, q, k, v, x), want, "the estimate from eight thresholds", {
        "keys were drawn in proportion to their weights; weighted again, large weights count twice":
            (p[drawn, None] * v[drawn]).mean(0),
        "divided by the sum of the weights drawn, large weights still count twice":
            (p[drawn] / p[drawn].sum()) @ v[drawn],
        "the estimate is the mean of the values drawn, not their sum": v[drawn].sum(0),
        "a key that is drawn twice counts twice": v[drawn.unique()].mean(0),
        "this is the exact output: read only the values of the keys drawn": p @ v})
    q, k, v = (torch.randn(*shape, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
               for shape in ((), (50,), (50,)))
    p = (k @ q / 4).softmax(0)
    same(answer(q, k, v, x), v[torch.searchsorted(p.cumsum(0), x, right=True)].mean(0), "the estimate with D = 16",
         {"divide the scores by the square root of D":
          v[torch.searchsorted((k @ q).softmax(0).cumsum(0), x, right=True)].mean(0)})
    every = (torch.arange(500, dtype=torch.float64) + 0.5) / 500
    many = torch.stack([torch.as_tensor(answer(q, k, v, (torch.arange(8) + u) / 8)) for u in every])
    return f"the mean over 500 values of u is off by {(many.mean(0) - p @ v).norm() / (p @ v).norm():.1%} of the output"


@check
def variance(answer, layers):
    for n, samples in ((30, 4), (7, 5)):
        p, v = heads(n, seed=n)
        mu = p @ v
        trace, strata = p @ (v - mu).square().sum(1), (strata_means(p, v, samples)[0] - mu).square().sum()
        same(result(answer, p, v, samples, "iid"), trace / samples, "the variance of iid draws", {
            "this is the variance of a single draw: divide by S": trace,
            "values are drawn with their attention weights: weight their squared distances":
                (v - v.mean(0)).square().sum(1).mean() / samples,
            "subtract the squared length of the output": p @ v.square().sum(1) / samples,
            "divide by S, not by its square": trace / samples**2})
        same(answer(p, v, samples, "stratified"), trace / samples - strata / samples**2,
             "the variance of stratified draws", {
                 "this is the iid formula: subtract what the strata save": trace / samples,
                 "what the strata save is divided by the square of S": trace / samples - strata / samples,
                 "what the strata save is subtracted, not added": trace / samples + strata / samples**2})
    layer, found = layers[3], []
    q, k, v = (x.double() for x in (layer.q[:, 2:3, -1:], layer.k[:, :1], layer.v[:, :1]))
    p = (k[0, 0] @ q[0, 0, 0] / 8).softmax(0)
    for scheme in "iid", "stratified":
        out = santa_decode(q.expand(-1, -1, 400, -1), k, v, samples=64, scheme=scheme, seed=0)
        measured = (out - attention(q, k, v)).square().sum(-1).mean()
        found.append(float(measured) / float(answer(p, v[0, 0], 64, scheme)))
    return (f"on layer 3, head 2 of the pocket model 400 steps of the library have {found[0]:.2f} (iid) and "
            f"{found[1]:.2f} (stratified) of your variance")


def squared_errors(mean, repeats, seed):
    "Squared errors of repeated steps: positive, skewed, with this mean."
    rng = torch.Generator().manual_seed(seed)
    return mean * torch.rand(repeats, generator=rng, dtype=torch.float64).log().neg()


@check
def agrees(answer):
    said = lambda *given: bool(result(answer, squared_errors(*given), 2.0))
    right = [said(2.0, repeats, seed) for repeats in (50, 100_000) for seed in range(20)]
    need(all(right[20:]), "it rejects 100,000 errors whose mean is right within four standard errors")
    need(not said(2.1, 100_000, 0), "it accepts 100,000 errors whose mean is 5 % too large, sixteen standard errors "
         "away: the standard error is the standard deviation over the root of the number of repetitions")
    need(not said(1.9, 100_000, 0), "it accepts 100,000 errors whose mean is 5 % too small: look at both sides")
    need(all(right[:20]), "it rejects 50 errors that are off by chance alone: allow four standard errors, not a share")
    need(not said(6.0, 50, 0), "it accepts 50 errors whose mean is three times the formula")
    return "it accepts what chance explains, and rejects a variance that is 5 % off, on both sides"


@check
def hostile(answer):
    n, samples = 1024, 128
    v = torch.as_tensor(result(answer, n, samples)).double()
    need(v.shape == (n,), f"return {n} values, got the shape {list(v.shape)}")
    iid = v.var(unbiased=False)
    need(iid > 1e-9, "all values are equal: then every scheme is exact")
    phases = v.reshape(samples, n // samples).mean(0)  # the estimate for each place of the first threshold
    ratio = float(phases.var(unbiased=False) / (iid / samples))
    if close(v, v.sort().values) or close(v, v.sort(descending=True).values):
        need(ratio > 100, "neighbours have similar values: there systematic draws are at their best")
    need(ratio > 100, f"systematic draws have {ratio:.2g} times the variance of iid draws, 128 are possible: all "
         "thresholds must hit the same kind of value. With equal weights they are n / S keys apart")
    return f"systematic draws have {ratio:.0f} times the variance of iid draws"
