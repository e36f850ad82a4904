"""`Santa.paper` beside the paper's pseudo-code, in float64 and loops: the same uniform numbers, the same keys"""
import math

import pytest
import torch

from sparse_nb.core.settings import read_method
from sparse_nb.core.streams import fold_in, head_seeds, philox, stream_seeds
from sparse_nb.santa import PAPER, SCHEMES, Santa

TILE = 128  # the paper says B_tile


# the paper

def uniforms(stream, samples):
    "Number j of a stream, as the library draws it, for as many as samples or tiles"
    return philox(stream, torch.arange(max(samples, 8))).tolist().__getitem__


def inverse(p, t):
    "F^-1(t): the first key j with F(j - 1) <= t < F(j), section 2.1 and A.4"
    below = 0.0
    for j, x in enumerate(p):
        if below <= t < below + x: return j
        below += x
    return max(j for j, x in enumerate(p) if x > 0)  # t above the last F, by rounding


def counts_of(x, a):
    "Algorithm 5, lines 5 to 9: how often each key of a tile is drawn"
    p, c = 0.0, []
    for y in x:
        c.append(math.floor(a + p + y) - math.floor(a + p))
        p += y
    return c


def scores(q, k):
    return [sum(a * b for a, b in zip(q.tolist(), row)) / math.sqrt(len(q)) for row in k.tolist()]


def by_cdf(scheme, q, k, v, S, uniform):
    "Definition A.1 (SANTA) and the construction of section 2.1 (S2ANTA-strat and -sys)"
    s = scores(q, k)
    m = max(s)
    e = [math.exp(x - m) for x in s]
    p = [x / sum(e) for x in e]
    threshold = {"iid": lambda m: uniform(m), "stratified": lambda m: (m + uniform(m)) / S,
                 "systematic": lambda m: uniform(0) / S + m / S}[scheme]
    drawn = [inverse(p, threshold(m)) for m in range(S)]
    return sum(v[j] for j in drawn) / S, [drawn.count(j) for j in range(len(k))]


def in_tiles(q, k):
    "Pass 1: maximum and sum of each tile, and its exponentials (Algorithm 3)"
    s = scores(q, k)
    for a in range(0, len(s), TILE):
        tile = s[a:a + TILE]
        m = max(tile)
        u = [math.exp(x - m) for x in tile]
        yield a, m, sum(u), u


def prop(q, k, v, S, uniform):
    "Algorithms 2 to 5 (S2ANTA-prop)"
    tiles = list(in_tiles(q, k))
    m_star = max(m for _, m, _, _ in tiles)
    W = [math.exp(m - m_star) * l for _, m, l, _ in tiles]
    quota = [S * w / sum(W) for w in W]
    budget = [math.floor(x) for x in quota]
    order = sorted(range(len(W)), key=lambda t: (-(quota[t] - budget[t]) if W[t] > 0 else 1, t))
    for t in order[:S - sum(budget)]: budget[t] += 1
    out, count = torch.zeros_like(v[0]), [0] * len(k)
    for t, (a, _, l, u) in enumerate(tiles):
        inv_delta = budget[t] / l if budget[t] > 0 else 0.0
        for n, c in enumerate(counts_of([inv_delta * x for x in u], 1 - uniform(t))):
            count[a + n] = c
            if c: out = out + c * v[a + n]
    return out / S, count


def flash(q, k, v, S, uniform):
    "Algorithms 6 to 8 (S2ANTA-flash)"
    tiles = list(in_tiles(q, k))
    each = max(1, math.floor(S / len(tiles) + 0.5))
    m_star, Z, out, count = max(m for _, m, _, _ in tiles), 0.0, torch.zeros_like(v[0]), [0] * len(k)
    for t, (a, m, l, u) in enumerate(tiles):
        part, W = torch.zeros_like(v[0]), math.exp(m - m_star) * l
        for n, c in enumerate(counts_of([each / l * x for x in u], 1 - uniform(t))):
            count[a + n] = c
            if c: part = part + c * v[a + n]
        Z, out = Z + W, out + W * (part / each)
    return out / Z, count


def as_printed(scheme, *args):
    if scheme in ("proportional", "flash"): return dict(proportional=prop, flash=flash)[scheme](*args)
    return by_cdf(scheme, *args)


# inputs: H = 6 query heads over 2 key heads

def normal(n, heads=6, groups=2, queries=1, size=8, sharp=1.0):
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, h, m, size, generator=g, dtype=torch.float64)
               for h, m in ((heads, queries), (groups, n), (groups, n)))
    return sharp * q, k, v


def tied(n):
    "All scores equal: tiles of one size have equal remainders"
    q, k, v = normal(n)
    return q, torch.zeros_like(k), v


def peaked(n):
    "One key has all the weight that float64 can tell; tiles without any in most places"
    q, k, v = normal(n, sharp=0)
    q[..., 0], k = 1, torch.zeros_like(k)
    k[:, :, n // 2, 0] = 1e4
    return q, k, v


def halved(n):
    "Two tiles' worth of keys of unlike weight"
    q, k, v = normal(n, sharp=0)
    q[..., 0], k = 8, torch.zeros_like(k)
    k[:, :, n // 2:, 0] = 1
    return q, k, v


INPUTS = {"random": normal(300), "sharp": normal(700, sharp=6), "ties": tied(384), "ties, last tile short": tied(400),
          "a peak": peaked(300), "two weights": halved(256), "one key": normal(1), "few keys": normal(5),
          "one tile": normal(128), "a head each": normal(200, groups=6), "one head": normal(200, groups=1)}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", INPUTS)
def test_each_scheme_is_the_papers(scheme, name):
    q, k, v = INPUTS[name]
    for seed, samples in (0, 1), (1, 7), (2, 64), (3, PAPER[scheme]):
        method = Santa.paper(scheme, samples)
        out, drawn = method.decode(q, k, v, seed=seed), method.select(q, k, seed=seed)
        streams = stream_seeds(q, seed)
        for h in range(0, 6, 1 if samples == 7 else 5):
            own = h * k.shape[1] // 6
            want, count = as_printed(scheme, q[0, h, 0], k[0, own], v[0, own], samples,
                                     uniforms(streams[0, h, 0], samples))
            torch.testing.assert_close(out[0, h, 0], want, rtol=0, atol=1e-12)
            index = drawn.index[0, h, 0][drawn.weight[0, h, 0] > 0]
            assert torch.bincount(index, minlength=k.shape[2]).tolist() == count


def test_samples_are_those_at_which_the_paper_loses_nothing():
    assert {x: Santa.paper(x).samples for x in SCHEMES} == dict(
        iid=256, stratified=256, systematic=256, proportional=128, flash=2048)
    assert Santa.paper() == Santa.paper("proportional") == Santa(128, "proportional", 128)
    with pytest.raises(ValueError, match="scheme must be one of"): Santa.paper("prop")


# a prompt, Definition A.1

@pytest.mark.parametrize("start", [0, 3])
def test_a_prompt_is_sampled_query_by_query(start):
    "150 queries, so in two blocks; each has uniform numbers of its own and sees no later key"
    q, k, v = normal(150, queries=150, size=4, sharp=2)
    S, heads = 5, head_seeds(q, 7)
    got = Santa.paper("iid", S).prefill(q, k, v, seed=7, kv_start=torch.tensor([start]))
    assert (got[:, :, :start] == 0).all()
    met = set()
    for r in range(start, 150):
        block, place = divmod(r - start, 128)
        for h in range(6):
            stream = fold_in(fold_in(heads[0, h], 128 * block), place)
            met.add(stream.item())
            if h not in (0, 5): continue
            want, _ = by_cdf("iid", q[0, h, r], k[0, h // 3, start:r + 1], v[0, h // 3, start:r + 1], S,
                             uniforms(stream, S))
            torch.testing.assert_close(got[0, h, r], want, rtol=0, atol=1e-12)
    assert len(met) == 6 * (150 - start)


@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_a_sampled_prompt_is_right_on_average(scheme):
    "Proposition A.2 and A.4 for every query of a prompt, within five standard errors"
    q, k, v = normal(12, queries=12, size=4, sharp=2)
    method = Santa.paper(scheme, 4)
    many = (x.expand(400, -1, -1, -1) for x in (q, k, v))  # sequences with streams of their own
    found = method.prefill(*many, seed=0)[:, None]
    error = found.std(0) / 20
    p = (q @ k.repeat_interleave(3, 1).mT / 2).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf).softmax(-1)
    assert ((found.mean(0) - p @ v.repeat_interleave(3, 1)).abs() <= 5 * error + 1e-12).all()


# Algorithm 1

def test_reinforce_is_the_papers():
    "The full multinomial; a layer that draws no sample is asked with one, and learns from none"
    from experiments.archive.santa_schedule import reinforce, schedule_of
    L, N, E, alpha, asked = 4, 9, 10, 0.5, []

    def reward(s): return math.exp(-sum((i + 1) / x for i, x in enumerate(s)))

    def ask(schedules, step):
        asked.append(schedules)
        return [reward(s) for s in schedules]

    told = reinforce(ask, L, N, steps=30, episodes=E, rate=alpha, seed=3, printed=True)
    theta, rng, empty = [0.0] * L, torch.Generator().manual_seed(3), 0
    for step in range(30):
        p = [math.exp(x) / sum(math.exp(y) for y in theta) for x in theta]
        draws = torch.multinomial(torch.tensor(p, dtype=torch.float64), E * N, replacement=True, generator=rng)
        S = [[draws[e * N:(e + 1) * N].tolist().count(i) for i in range(L)] for e in range(E)]
        assert asked[step] == [[max(x, 1) for x in s] for s in S] and all(sum(s) == N for s in S)
        empty += sum(0 in s for s in S)
        r = [reward([max(x, 1) for x in s]) for s in S]
        b = sum(r) / E
        g = [sum((r[k] - b) * (S[k][i] - N * p[i]) for k in range(E)) / E for i in range(L)]
        theta = [x + alpha * y for x, y in zip(theta, g)]
        assert told[step]["theta"] == pytest.approx(theta, abs=1e-12) and told[step]["reward"] == pytest.approx(b)
    assert empty > 0
    learned = schedule_of(torch.tensor(told[-1]["theta"]), N, printed=True)
    assert min(learned) >= 1 and learned == sorted(learned)


def test_a_text_names_it():
    "As on the command line"
    assert read_method("santa.paper") == Santa.paper()
    assert read_method("Santa.paper(scheme='flash', samples=7)") == Santa.paper("flash", 7)
