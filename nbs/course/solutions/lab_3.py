"""Solutions of lab 3, vAttention's budget and Quest's box."""
import math

import torch
from scipy.stats import norm


def draws(sigma, total, n, eps, delta):
    "Draws, none twice, so that an estimated sum is off by more than eps * total with probability delta."
    z = norm.isf(delta / 2)
    S0 = (z * n * sigma / (eps * total)) ** 2
    return math.ceil(S0 / (1 + S0 / n))


def budget(kept, sample, n, eps, delta):
    "Draws from n keys, by the terms of the kept keys [m] and of a base sample of the n [base]."
    total = float(kept.sum() + n * sample.mean())
    S0 = (norm.isf(delta / 2) * n * float(sample.std()) / (eps * total)) ** 2
    return min(n, max(1, math.ceil(S0 / (1 + S0 / n))))


def sums(e, v, kept, drawn):
    "Estimates of Z and of Y [D] from the terms e [N] of the keys `kept` and `drawn`, and the values of both."
    w = (len(e) - len(kept)) / len(drawn)
    return e[kept].sum() + w * e[drawn].sum(), e[kept] @ v[kept] + w * e[drawn] @ v[drawn]


def unseen(n, large, base):
    "Probability that `base` of n keys, none twice, are all different from the `large` ones."
    return math.comb(n - large, base) / math.comb(n, base)


def box_bound(q, pages):
    "An upper bound of the products of q [D] with the keys of each page [P, page, D]: [P]."
    low, high = pages.amin(1), pages.amax(1)
    return torch.where(q > 0, high, low) @ q
