"""Checks of lab 4, a k-means index and Delta's correction."""
import torch

from sparse_nb.attention import attention
from sparse_nb.core.blocks import streaming_prefill

from . import check, close, need, parts, result, same


def cloud(n=60, size=2, seed=0):
    "Keys in three groups of unequal size [n, size]."
    rng = torch.Generator().manual_seed(seed)
    places = 6 * torch.randn(3, size, generator=rng, dtype=torch.float64)
    return places[torch.arange(n) % 5 % 3] + torch.randn(n, size, generator=rng, dtype=torch.float64)


def nearest(keys, centres): return torch.cdist(keys, centres).argmin(1)


@check
def kmeans_step(answer, layers):
    keys = cloud()
    centres = torch.cat([keys[:3], torch.full((1, 2), 99.0, dtype=torch.float64)])  # nobody is near the last
    want = nearest(keys, centres)
    cluster, new = parts(result(answer, keys, centres), 2, "the cluster of each key and the new centres")
    same(cluster, want, "the clusters", {
        "the nearest centre is not the one of largest product: long centres would win": (keys @ centres.T).argmax(1),
        "this is the farthest centre": torch.cdist(keys, centres).argmax(1)})
    need(not bool(torch.as_tensor(new)[3].isnan().any()),
         "a cluster without keys has no mean (0 / 0): keep its centre where it is")
    means = torch.stack([keys[want == c].mean(0) for c in range(3)] + [centres[3]])
    sums = torch.stack([keys[want == c].sum(0) for c in range(3)] + [centres[3]])
    moved = means.clone()
    moved[3] = 0
    same(new, means, "the new centres", {"divide the sum of the keys by their number": sums,
                                         "a cluster without keys keeps its centre": moved})
    keys = layers[5].k[0, 0].double()
    centres, within = keys[:: len(keys) // 32][:32], []
    for _ in range(6):
        cluster, centres = map(torch.as_tensor, answer(keys, centres))
        within.append(float((keys - centres[cluster]).square().sum(1).mean()))
    need(all(b <= a * (1 + 1e-9) for a, b in zip(within, within[1:])), "the distances to the centres grow")
    return (f"six iterations on {len(keys):,} keys of the pocket model lower the mean squared distance from "
            f"{within[0]:.1f} to {within[-1]:.1f}")


@check
def guess(answer, layers):
    rng = torch.Generator().manual_seed(1)
    q, mean = torch.randn(16, generator=rng, dtype=torch.float64), torch.randn(4, 16, generator=rng).double()
    count = torch.tensor([1.0, 10, 5, 40], dtype=torch.float64)
    s = mean @ q / 4
    same(result(answer, q, count, mean), count * s.exp(), "the guessed masses of four clusters", {
        "a cluster of n keys has n times the mass of one key": s.exp(), "divide the scores by the root of D":
        count * (mean @ q).exp(), "the number of keys stands outside the exponential": (count * s).exp(),
        "masses are compared with those of other keys: do not normalise them": (count * s.exp()) / (
            count * s.exp()).sum()})
    q, k = layers[5].q[0, 0, -1].double(), layers[5].k[0, 0].double()
    cluster = nearest(k, k[:: len(k) // 64][:64])
    used = cluster.unique()
    count = torch.stack([(cluster == c).sum() for c in used]).double()
    mean = torch.stack([k[cluster == c].mean(0) for c in used])
    mass = torch.stack([(k[cluster == c] @ q / 8).exp().sum() for c in used])
    ratio = torch.as_tensor(answer(q, count, mean)) / mass
    return f"on {len(used)} clusters of the pocket model it is {ratio.min():.2f} to {ratio.max():.2f} of the true mass"


@check
def allot(answer):
    mass = torch.tensor([0.5, 0.11, 0.1, 0.09, 0.12, 0.08], dtype=torch.float64)
    count = torch.tensor([100, 10, 10, 10, 10, 10])
    for budget, want in ((50, [0, 10, 10, 10, 10, 10]), (35, [0, 10, 10, 5, 10, 0]), (70, [20, 10, 10, 10, 10, 10])):
        got = torch.as_tensor(result(answer, mass, count, budget))
        need(got.shape == count.shape, f"return a number for each of {len(count)} clusters, got {list(got.shape)}")
        need(int(got.sum()) <= budget, f"with a budget of {budget} keys it reads {int(got.sum())}: cut the last one")
        need(bool(((got >= 0) & (got <= count)).all()), "no cluster has so many keys, or a number is negative")
        by_mass = [min(budget, 100)] + [0] * 5
        need(budget > 60 or not close(got, torch.tensor(by_mass)),
             "it takes the cluster of largest mass first: half of its keys hold a quarter of the mass, five small "
             "clusters half. Rank by mass per key")
        caught, most = (float((x * mass / count).sum()) for x in (got, torch.tensor(want)))
        need(int(got.sum()) == budget, f"with a budget of {budget} keys it reads only {int(got.sum())}: read a part of "
             "the cluster that does not fit")
        need(caught > most - 1e-9, f"with {budget} keys it catches {caught:.3f} of the mass, {most:.3f} are possible")
    return "50 keys catch half of the mass"


@check
def with_means(answer, layers):
    rng = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(*shape, 8, generator=rng, dtype=torch.float64) for shape in ((), (20,), (20,)))
    cluster, read = torch.arange(20) % 3, torch.arange(20) < 7
    read |= cluster == 2  # of the last cluster nothing is unread
    want = stand_in(q, k, v, cluster, read)
    same(result(answer, q, k, v, cluster, read), want, "the output", {
        "the rest is dropped: let a mean key with a mean value stand for it": stand_in(q, k[read], v[read],
            cluster[read], read[read]),
        "a mean stands for n' keys, so it counts n' times": stand_in(q, k, v, cluster, read, weight=False),
        "a key that is read is in the sums already: leave it out of the mean and of the count": stand_in(
            q, k, v, cluster, read, None),
        "the mean is that of the keys that are not read": stand_in(q, k, v, cluster, read, own=False)})
    equal = k[:3][cluster]
    same(answer(q, equal, v, cluster, read), (equal @ q / 8**0.5).softmax(0) @ v,
         "the output where the keys of a cluster are equal, which must be exact,")
    q, k, v = layers[5].q[0, 0, -1].double(), layers[5].k[0, 0].double(), layers[5].v[0, 0].double()
    cluster, exact = nearest(k, k[:: len(k) // 64][:64]), (k @ q / 8).softmax(0) @ v
    read = torch.zeros(len(k), dtype=torch.bool)
    read[:1] = read[-32:] = True
    mass = torch.zeros(64, dtype=torch.float64).index_add(0, cluster, (k @ q / 8).exp())
    read |= torch.isin(cluster, mass.topk(6).indices)
    dropped = (k[read] @ q / 8).softmax(0) @ v[read]
    off = [float((x - exact).norm() / exact.norm()) for x in (dropped, torch.as_tensor(answer(q, k, v, cluster, read)))]
    return (f"on the pocket model, with {int(read.sum())} of {len(k):,} keys read, the error falls from {off[0]:.2f} "
            f"(rest dropped) to {off[1]:.2f}")


def stand_in(q, k, v, cluster, read, weight=True, own=True):
    "Attention to the keys read, and to the mean of the others of each cluster, n' times; wrong: once, or of all keys."
    s, values = [k[read] @ q], [v[read]]
    for c in cluster.unique():
        left = (cluster == c) & ~read if weight is not None else cluster == c
        if not left.any(): continue
        mean = left if own else cluster == c
        n = torch.ones(()).double() if weight is False else left.sum().double()
        s.append((k[mean].mean(0) @ q + n.log() * len(q) ** 0.5)[None])
        values.append(v[mean].mean(0)[None])
    return (torch.cat(s) / len(q) ** 0.5).softmax(0) @ torch.cat(values)


@check
def corrected(answer):
    n, every = 11, 4
    rng = torch.Generator().manual_seed(3)
    sparse, full = (torch.randn(n, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    anchor = torch.arange(n) % every == 0
    exact = full.clone()
    exact[~anchor] = torch.nan  # nobody has computed these
    j = torch.arange(n) // every * every
    want = sparse + (exact - sparse)[j]
    got = torch.as_tensor(result(answer, sparse, exact, every))
    need(not bool(got.isnan().any()), "it uses an exact output that nobody computed: known are those of 0, 4 and 8")
    later = (j + every).clamp(max=8)
    near = ((torch.arange(n) + every // 2) // every * every).clamp(max=8)
    alone = torch.where(anchor[:, None], full, sparse)
    same(got, want, "the corrected outputs", {
        "this uses the next anchor, a later token: attention would not be causal": sparse + (exact - sparse)[later],
        "this uses the nearest anchor, which may be a later token: take the last one up to the query":
            sparse + (exact - sparse)[near],
        "only the anchors are corrected (Eq. 5): add their difference to the queries that follow": alone,
        "add the difference of exact and sparse output, not the exact output": sparse + exact[j],
        "the difference is exact minus sparse": sparse - (exact - sparse)[j]})
    need(close(got[anchor], full[anchor]), "an anchor's own output must be exact")


@check
def helps(answer, layers):
    rng = torch.Generator().manual_seed(4)
    at_query = torch.randn(400, 3, generator=rng, dtype=torch.float64)
    at_anchor = at_query * (3 * torch.rand(400, 1, generator=rng, dtype=torch.float64)) + 0.5 * torch.randn(
        400, 3, generator=rng, dtype=torch.float64)
    inner = (at_anchor * at_query).sum(1)
    cosine = torch.cosine_similarity(at_anchor, at_query)
    want = (at_anchor - at_query).norm(dim=1) < at_query.norm(dim=1)
    same(torch.as_tensor(result(answer, at_anchor, at_query)), want, "for which of 400 pairs it helps", {
        "a high cosine is not enough: a difference of the right direction can be too long": cosine > 0.5,
        "a positive product is not enough: the difference may be too long": inner > 0,
        "the error without a correction is the difference at the query: compare with its length":
            (at_anchor - at_query).norm(dim=1) < at_anchor.norm(dim=1), "this is where it does harm": ~want}, 1e-12)
    q, k, v = (torch.cat([getattr(x, name) for x in layers]).double() for name in ("q", "k", "v"))
    d = attention(q, k, v, causal=True) - streaming_prefill(q, k, v, sinks=4, window=64)
    shares = []
    for after in 1, 16, 63:
        at = torch.arange(192, q.shape[2] - 63, 64)
        helped = torch.as_tensor(answer(d[:, :, at].flatten(0, 2), d[:, :, at + after].flatten(0, 2)))
        shares.append(f"{float(helped.double().mean()):.0%} after {after}")
    return "on the pocket model the anchor's difference helps for these shares of the queries: " + ", ".join(shares)
