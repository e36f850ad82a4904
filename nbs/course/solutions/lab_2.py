"""Solutions of lab 2, SANTA's sampler."""
import torch


def thresholds(scheme, u):
    "Thresholds [S] of a scheme from random numbers u [S] in [0, 1)."
    j = torch.arange(len(u))
    return {"iid": u, "stratified": (j + u) / len(u), "systematic": (j + u[0]) / len(u)}[scheme]


def pick(p, x):
    "The key that each threshold [S] picks, for attention weights p [N]."
    drawn = torch.searchsorted(p.cumsum(0), x, right=True)
    return drawn.clamp(max=len(p) - 1)


def estimate(q, k, v, x):
    "The output of one query [D], estimated with thresholds x [S]."
    p = (k @ q / len(q) ** 0.5).softmax(0)
    drawn = torch.searchsorted(p.cumsum(0), x.to(p), right=True).clamp(max=len(p) - 1)
    return v[drawn].mean(0)


def variance(p, v, samples, scheme):
    "Expected squared error of the estimate, for weights p [N] and values v [N, D]."
    mu = p @ v
    of_one_draw = p @ (v - mu).square().sum(1)
    if scheme == "iid": return of_one_draw / samples
    ends = p.cumsum(0)
    low = torch.arange(samples)[:, None] / samples
    inside = torch.minimum(ends, low + 1 / samples) - torch.maximum(ends - p, low)
    means = inside.clamp(min=0) * samples @ v  # of a value drawn from each stratum [S, D]
    return of_one_draw / samples - (means - mu).square().sum() / samples**2


def agrees(errors, expected):
    "Do squared errors of repeated steps [R] have the expected mean, within four standard errors?"
    standard_error = errors.std() / len(errors) ** 0.5
    return abs(errors.mean() - expected) < 4 * standard_error


def hostile(n, samples):
    "Values [n] for which systematic draws from equal weights are as bad as a single draw."
    period = n // samples
    return (torch.arange(n) % period < period / 2).double()
