"""Checks of lab 1, softmax in pieces."""
from itertools import combinations, product

import torch

from sparse_nb.attention import attention, attention_weights

from . import check, close, need, parts, result, same

WEIGHTS, PER_KEY = 15.0e9, 2 * 32 * 8 * 128 * 2  # bytes of Llama-3.1-8B that a step reads: all weights, one key


def inputs(n=40, size=16, seed=0, shift=0.0):
    "A query [D], keys and values [N, D]; `shift` is added to all keys along the query, so that scores become large."
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, size, generator=rng, dtype=torch.float64) for shape in ((), (n,), (n,)))
    return q, k + shift * q, v


def true_piece(q, k, v, scale=True):
    "Largest score M, Z e^-M and O e^-M."
    scores = k @ q / (len(q) ** 0.5 if scale else 1)
    e = (scores - scores.max()).exp()
    return scores.max(), e.sum(), e @ v


@check
def largest_speedup(answer):
    for keys, share, sequences in ((131_072, 1.0, 1), (131_072, 0.1, 1), (32_768, 0.0, 1), (32_768, 0.1, 8)):
        cache = PER_KEY * keys
        want = (WEIGHTS + sequences * cache) / (WEIGHTS + share * sequences * cache)
        known = {"this is the time of the sparse step over that of the dense one: turn it round": 1 / want}
        if share == 1: known["a method that reads the whole cache gains nothing: at a share of 1 expected is 1"] = 0.0
        if share:
            known["only the cache shrinks; the weights are read as before"] = 1 / share
            known["the sparse step reads the weights, too"] = (WEIGHTS / sequences + cache) / (share * cache)
        if sequences > 1: known["every sequence has a cache of its own, and the weights are read once for all"] = (
            (WEIGHTS + cache) / (WEIGHTS + share * cache))
        same(result(answer, keys, share, sequences), want, f"the speedup at {keys:,} keys, share {share}, "
             f"{sequences} sequence{'s' * (sequences > 1)}", known)
    return "32,768 keys and one sequence allow a speedup of at most 1.29, with 32 sequences of at most 10.16"


@check
def piece(answer):
    q, k, v = inputs()
    M, Z, O = true_piece(q, k, v)
    got = parts(result(answer, q, k, v), 3, "the largest score, Z and O")
    same(got[0], M, "the largest score", {"divide the scores by the square root of D": true_piece(q, k, v, False)[0]})
    same(got[1], Z, "Z", {"divide all sums by e^M: every term is then at most 1": Z * M.exp()})
    same(got[2], O, "O", {"O is the sum before the division by Z": O / Z,
                          "O is relative to e^M, as Z is": O * M.exp()})
    got = answer(*inputs(shift=300.0))
    need(all(torch.as_tensor(x).isfinite().all() for x in got),
         "with scores of some thousand the sums are not finite: subtract the largest score before you exponentiate")


@check
def merge(answer):
    q, k, v = inputs()
    whole, a, b = (true_piece(q, k[x], v[x]) for x in (slice(None), slice(15), slice(15, None)))
    for one, two, order in ((a, b, "in order"), (b, a, "in the other order")):
        M, Z, O = parts(result(answer, one, two), 3, "the largest score, Z and O")
        same(M, whole[0], f"the largest score of two pieces {order}")
        same(Z, whole[1], f"Z of two pieces {order}", {
            "bring both sums to the common largest score before you add them": one[1] + two[1],
            "a sum that is relative to M_A gets the factor e^(M_A - M), not e^M_A":
                one[1] * one[0].exp() + two[1] * two[0].exp()})
        same(O, whole[2], f"O of two pieces {order}", {
            "O of both pieces must be brought to the common largest score": one[2] + two[2],
            "O is a sum, not an output: do not divide it by Z": whole[2] / whole[1]})
    none = torch.tensor(-torch.inf, dtype=torch.float64), torch.zeros_like(Z), torch.zeros_like(O)
    same(answer(a, none)[2], a[2], "O of a piece and one without keys (largest score minus infinity, sums 0)")
    q, k, v = inputs(4096, 64, shift=4.0)
    joined, *others = (true_piece(q, k[i:i + 512], v[i:i + 512]) for i in range(0, 4096, 512))
    for other in others: joined = answer(joined, other)
    same(joined[2] / joined[1], attention(*(x.reshape(1, 1, -1, 64) for x in (q, k, v)))[0, 0, 0], "the output")
    return f"eight pieces give the exact output of 4,096 keys, with scores up to {float(joined[0]):.0f}"


@check
def left_out(answer, layers):
    rng = torch.Generator().manual_seed(1)
    w, v = torch.rand(12, generator=rng, dtype=torch.float64), torch.randn(12, 5, generator=rng, dtype=torch.float64)
    w, kept = w / w.sum(), torch.arange(12) % 3 == 0
    mean = lambda x: w[x] @ v[x] / w[x].sum()
    tau, error = w[~kept].sum(), w @ v - mean(kept)
    got = parts(result(answer, w, v, kept), 2, "the missing mass and the error")
    same(got[0], tau, "the missing mass", {"this is the coverage; missing is what is not kept": 1 - tau})
    same(got[1], error, "the error", {
        "the sign is turned round: exact output minus output of the kept keys": -error,
        "the output of the kept keys is a mean: divide by their mass": tau * (mean(~kept) - w[kept] @ v[kept]),
        "the outputs of both sets are means: divide each by its mass": w[~kept] @ v[~kept] - w[kept] @ v[kept],
        "multiply the distance of the two means by the missing mass": mean(~kept) - mean(kept)})
    found = []
    for layer in layers:
        weights = attention_weights(layer.q.double(), layer.k.double())[0, :, 0]
        for h, row in enumerate(weights):
            keep = torch.zeros(len(row), dtype=torch.bool).index_fill(0, row.topk(64).indices, True)
            values = layer.v[0, h // 3].double()
            tau, error = answer(row, values, keep)
            found.append((float(tau), float(torch.as_tensor(error).norm() / (row @ values).norm())))
    worst, better = max(found), sorted(found)[len(found) // 2]
    return (f"with 64 of {layers[0].k.shape[2]:,} keys the middle head of 36 misses {better[0]:.1%} of its mass, the "
            f"worst {worst[0]:.0%}, with an error of {worst[1]:.2f} of its output")


@check
def weighted_sums(answer):
    rng = torch.Generator().manual_seed(2)
    s, v = torch.randn(6, generator=rng, dtype=torch.float64), torch.randn(6, 3, generator=rng, dtype=torch.float64)
    p = torch.tensor([0.9, 0.2, 0.5, 0.7, 0.4, 0.25], dtype=torch.float64)
    e, drawn = s.exp(), torch.tensor([0, 1, 4])
    Z, O = parts(result(answer, s, v, drawn, p), 2, "the estimates of Z and of O")
    x, y = e[drawn], p[drawn]
    same(Z, (x / y).sum(), "the estimate of Z", {
        "the less probable a key is, the more keys it speaks for: divide by p": (x * y).sum(),
        "each key drawn stands for 1/p keys": x.sum(), "only the keys drawn have been read": (e / p).sum()})
    same(O, (x / y) @ v[drawn], "the estimate of O", {
        "the weight 1/p belongs to both sums": x @ v[drawn],
        "return O before the division by Z": (x / y) @ v[drawn] / (x / y).sum()})
    sets = [torch.tensor([i for i in range(6) if bits[i]], dtype=torch.long) for bits in product((0, 1), repeat=6)]
    chance = [float(torch.where(torch.isin(torch.arange(6), t), p, 1 - p).prod()) for t in sets]
    mean = sum(c * answer(s, v, t, p)[0] for c, t in zip(chance, sets))
    same(mean, e.sum(), "the mean of all 64 possible estimates of Z")
    halves = [torch.tensor(t) for t in combinations(range(6), 3)]
    outs = torch.stack([O / Z for Z, O in (answer(s, v, t, torch.full_like(p, 0.5)) for t in halves)])
    exact = e @ v / e.sum()
    need(not close(outs.mean(0), exact), "the mean of the 20 quotients is exact, which cannot be")
    return f"both sums are right on average; the quotient is not: bias {(outs.mean(0) - exact).norm():.2f} in length"
