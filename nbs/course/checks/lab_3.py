"""Checks of lab 3, vAttention's budget and Quest's box."""
import math
from itertools import combinations

import torch
from scipy.stats import norm

from sparse_nb.metrics import clopper_pearson

from . import check, close, need, parts, result, same


def true_draws(sigma, total, n, eps, delta, sides=2, without=True):
    "Draws of Proposition 1 of chapter 5, not rounded."
    S0 = (norm.isf(delta / sides) * n * sigma / (eps * total)) ** 2
    return S0 / (1 + S0 / n) if without else S0


@check
def draws(answer):
    for case in ((1.5, 4000.0, 3990, 0.1, 0.05), (1.5, 9000.0, 3990, 0.05, 0.1), (3.0, 800.0, 500, 0.2, 0.2)):
        sigma, total, n, eps, delta = case
        same(result(answer, *case), math.ceil(true_draws(*case)), "the number of draws for sigma, total, n, eps, delta "
             f"= {case}", {
                 "an error may be too large or too small: half of delta for each side": math.ceil(
                     true_draws(*case, sides=1)),
                 "no term is drawn twice: divide by 1 + S0 / n": math.ceil(true_draws(*case, without=False)),
                 "round up, so that the error is allowed": math.floor(true_draws(*case)),
                 "the estimate is n times a mean: its standard deviation has a factor n": math.ceil(
                     true_draws(sigma, total * n, n, eps, delta))}, 1e-9)
    return f"eps 0.1 and delta 0.05 take {answer(1.5, 4000.0, 3990, 0.1, 0.05)} of 3,990 terms"


def head(layers, layer=3, h=2, keep=100):
    "Terms e^s [N] and values of one head, and its kept keys: sinks, window and the highest scores."
    q, k, v = layers[layer].q[0, h, -1].double(), layers[layer].k[0, h // 3].double(), layers[layer].v[0, h // 3]
    e = (k @ q / 8).exp()
    mask = torch.zeros(len(e), dtype=torch.bool)
    mask[:4] = mask[-16:] = True
    mask[e.topk(keep).indices] = True
    return e, v.double(), mask.nonzero()[:, 0]


@check
def budget(answer, layers):
    rng = torch.Generator().manual_seed(0)
    kept, sample = 5 + torch.rand(20, generator=rng, dtype=torch.float64), torch.rand(40, generator=rng).double()
    n, eps, delta = 2000, 0.1, 0.05
    of = lambda total, sigma=sample.std(): math.ceil(true_draws(float(sigma), float(total), n, eps, delta))
    same(result(answer, kept, sample, n, eps, delta), of(kept.sum() + n * sample.mean()), "the number of draws", {
        "the sum has two parts: the kept terms and an estimate of the others": of(n * sample.mean()),
        "the sample speaks for all n others: n times its mean": of(kept.sum() + sample.sum()),
        "the n others alone are drawn from: the spread is that of the sample, not of all terms read": of(
            kept.sum() + n * sample.mean(), torch.cat([kept, sample]).std())}, 1e-9)
    need(answer(kept, torch.full((40,), 0.5, dtype=torch.float64), n, eps, delta) >= 1,
         "a sample without any spread asks for no draw: draw one key at least")
    wide = torch.cat([torch.zeros(39), torch.ones(1)]).double()
    need(answer(kept * 0, wide, 100, 0.001, 0.05) <= 100, "there are only n keys to draw: never ask for more")
    e, _, kept = head(layers)
    others = torch.ones(len(e), dtype=torch.bool).index_fill(0, kept, False).nonzero()[:, 0]
    off, used = [], []
    for _ in range(400):
        order = others[torch.randperm(len(others), generator=rng)]
        S = int(answer(e[kept], e[order[:50]], len(others), 0.1, 0.1))
        drawn = others[torch.randperm(len(others), generator=rng)[:S]]
        off.append(float((e[kept].sum() + e[drawn].mean() * len(others)) / e.sum() - 1))
        used.append(S)
    rate = clopper_pearson(sum(abs(x) > 0.1 for x in off), len(off))
    return (f"on layer 3, head 2 of the pocket model it draws {sum(used) / len(used):.0f} of {len(others):,} keys in "
            f"the mean; the sum is off by more than 10 % in {rate.value:.0%} of 400 steps "
            f"({rate.low:.0%} to {rate.high:.0%}); 10 % are allowed")


@check
def sums(answer):
    rng = torch.Generator().manual_seed(3)
    e, v = torch.rand(7, generator=rng, dtype=torch.float64), torch.randn(7, 3, generator=rng, dtype=torch.float64)
    kept, others = torch.tensor([0, 6]), [1, 2, 3, 4, 5]
    found = []
    for pair in combinations(others, 2):
        drawn = torch.tensor(pair)
        Z, Y = parts(result(answer, e, v, kept, drawn), 2, "the estimates of Z and of Y")
        of = lambda w, own=1: own * e[kept].sum() + w * e[drawn].sum()
        same(Z, of(5 / 2), f"the estimate of Z from kept keys 0 and 6 and drawn keys {list(pair)}", {
            "a drawn key stands for n / S keys, of which n are not kept": of(7 / 2),
            "a drawn key speaks for others, too: its weight is n / S": of(1),
            "kept keys are certain: their weight is 1": of(5 / 2, 5 / 2)})
        same(Y, e[kept] @ v[kept] + 5 / 2 * e[drawn] @ v[drawn], "the estimate of Y",
             {"the weights of Y are those of Z": e[kept] @ v[kept] + e[drawn] @ v[drawn]})
        found.append(torch.as_tensor(Y))
    same(torch.stack(found).mean(0), e @ v, "the mean of all ten estimates of Y")
    return "the mean of all ten possible samples is exact"


@check
def unseen(answer):
    for n, large, base in ((2000, 20, 40), (10, 3, 4), (10, 3, 8)):
        want = math.comb(n - large, base) / math.comb(n, base)
        known = {"no key is drawn twice: after each draw there is one key less": (1 - large / n) ** base,
                 "this is the probability that it sees at least one": 1 - want}
        same(result(answer, n, large, base), want, f"the probability for n, large, base = {(n, large, base)}", known,
             1e-6)
    few = next(base for base in range(1, 2000) if answer(2000, 20, base) < 0.05)
    return f"40 of 2,000 keys miss all 20 large ones in {answer(2000, 20, 40):.0%} of the steps; 5 % take {few} keys"


@check
def box_bound(answer, layers):
    rng = torch.Generator().manual_seed(4)
    q, pages = torch.randn(6, generator=rng, dtype=torch.float64), torch.randn(5, 4, 6, generator=rng).double()
    low, high = pages.amin(1), pages.amax(1)
    best = (pages @ q).amax(1)
    got = result(answer, q, pages)
    same(got, torch.maximum(q * low, q * high).sum(1), "the bound of each page", {
        "for a negative entry of the query the smallest entry of the keys counts": high @ q,
        "the absolute values of the query turn negative entries round": high @ q.abs(),
        "this is the score of the mean key: some keys score above it": pages.mean(1) @ q,
        "these are the largest scores themselves: they need every key, and the index has two vectors a page": best,
        "this bound holds, but it is larger than necessary: it takes the longest key, not the box":
            q.norm() * pages.norm(dim=2).amax(1)})
    e, _, _ = head(layers)
    q, k = layers[3].q[0, 2, -1].double(), layers[3].k[0, 0].double()
    full = len(k) // 16 * 16
    bound = torch.as_tensor(answer(q, k[:full].reshape(-1, 16, 64)))
    best = (k[:full] @ q).reshape(-1, 16).amax(1)
    need(bool((bound >= best - 1e-9).all()), "a key scores above the bound of its page")
    mass = e[:full].reshape(-1, 16).sum(1) / e.sum()
    tenth = len(mass) // 10
    found, most = (float(mass[x.topk(tenth).indices].sum()) for x in (bound, mass))
    need(not close(bound, bound.mean().expand_as(bound)), "all pages have the same bound")
    return (f"on layer 3, head 2 of the pocket model the {tenth} pages of largest bound hold {found:.0%} of the "
            f"attention, the best {tenth} pages {most:.0%}")
