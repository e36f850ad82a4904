"""The Triton kernels of SAAP against the rule in float64, cluster by cluster.

`pytest -m gpu -k test_saap_kernels` runs the sweep on a GPU. Without one, a covering design of small problems
runs in Triton's interpreter, in processes of their own.
"""
import math
import re
from typing import NamedTuple

import pytest
import torch

from covering import drawn
from inputs import DEVICE, GPU, INTERPRETED, LAYOUTS, kernel, poisoned
from sparse_nb.core.exact import assert_close, attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 0.01, FP16: 2**-10, FP32: 4e-6}
TAILS = "first_order", "second_order", "drop"


class Clustered(NamedTuple):
    "Queries, keys, values, clusters of the keys, and what is far: keys from `since` on and before `built`."
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    ids: torch.Tensor
    start: torch.Tensor | None
    stop: torch.Tensor | None
    since: torch.Tensor
    built: torch.Tensor
    C: int

    @property
    def masks(self): return dict(kv_start=self.start, kv_end=self.stop)


def problem(B, G, R, N, D, dtype, *, C=8, layout="plain", ragged=False, sinks=2, near=20, spread=1.0, seed=0):
    "Keys around centres of their clusters, of very different sizes, and some of none; NaN in what is hidden."
    generator = torch.Generator(DEVICE).manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)
    q = spread * torch.randn(B, G * R, 1, D, device=DEVICE, generator=generator)
    k, v = (LAYOUTS[layout](B, G, N, D, new) for _ in range(2))
    ids = (torch.rand(B, G, N, device=DEVICE, generator=generator) ** 2 * C * 0.9).to(torch.int16)
    centre = torch.randn(B, G, C, D, device=DEVICE, generator=generator)
    k.copy_((k + centre.gather(2, ids.long()[..., None].expand(-1, -1, -1, D))).to(dtype))
    end = torch.full((B,), N, device=DEVICE)
    start = torch.zeros_like(end)
    if ragged:
        start = torch.tensor([b * N // 5 for b in range(B)], device=DEVICE)
        end = torch.tensor([N - b * N // 7 for b in range(B)], device=DEVICE)
        for x in (k, v):
            for b in range(B): x[b, :, :start[b]] = x[b, :, end[b]:] = math.nan
    since = torch.minimum(start + sinks, end)
    built = torch.maximum(end - near, since)
    masks = (start, end.int()) if ragged else (None, None)
    return Clustered(q.to(dtype), k, v, ids, *masks, since, built, C)


# the rule, one group at a time

def chosen(log_a, n, budget, probes, density):
    "Keys to read of each cluster: log_a [R, C] float64, sizes n [C]."
    x = log_a + n.log()
    share = (x - x.logsumexp(-1, keepdim=True)).logsumexp(0)
    rank = (share - n.log() if density else share).tolist()
    rank = [r if size else -math.inf for r, size in zip(rank, n.tolist())]
    taken = [0] * len(rank)
    for place, c in enumerate(sorted(range(len(rank)), key=lambda c: (-rank[c], c))):
        size = int(n[c])
        if probes is not None: taken[c] = size if place < probes else 0
        else:
            taken[c] = min(size, budget)
            budget -= taken[c]
    return taken


def oracle(p, s, centroids=None, router_q=None, guess=None, factor=None, scale=None):
    "Output [B, H, 1, D] and keys read of each cluster [B, G, C], in float64."
    (B, H, _, D), (G, N) = p.q.shape, p.k.shape[1:3]
    R, scale, out, taken = H // G, D**-0.5 if scale is None else scale, torch.zeros(B, H, 1, D).double(), []
    for b in range(B):
        first, end = (0, N) if p.start is None else (int(p.start[b]), int(p.stop[b]))
        since, built = int(p.since[b]), int(p.built[b])
        share = s.budget if s.budget is not None else 0
        budget = min(share, end - first) if isinstance(share, int) else math.ceil((end - first) * share * (1 - 1e-12))
        for g in range(G):
            heads = slice(g * R, g * R + R)
            q, k, v = p.q[b, heads, 0].double().cpu(), p.k[b, g].double().cpu(), p.v[b, g].double().cpu()
            far = torch.arange(since, built)
            lists = [far[p.ids[b, g, since:built].cpu() == c] for c in range(p.C)]
            n = torch.tensor([len(x) for x in lists]).double()
            rounded = lambda x: x.to(p.k.dtype).double()  # as the index keeps means
            mean = [k[x].mean(0) if len(x) else torch.zeros(D).double() for x in lists]
            spread = lambda x: (k[x].square().sum(-1).mean() - k[x].mean(0).square().sum()).clamp(min=0) / D
            variance = torch.stack([spread(x) if len(x) else torch.zeros(()).double() for x in lists])
            length = (scale * q).square().sum(-1, keepdim=True) / 2
            if guess is not None: log_a = guess[b, heads].double().cpu()
            elif centroids is None: log_a = scale * q @ rounded(torch.stack(mean)).T + length * variance
            else:
                asked = (p.q if router_q is None else router_q)[b, heads, 0]
                log_a = scale * asked.double().cpu() @ centroids[b, g].to(asked.dtype).double().cpu().T
            taken.append(chosen(log_a, n, budget, s.probes, s.density))
            read = [x[len(x) - t:] for x, t in zip(lists, taken[-1])]
            rows = torch.cat([torch.arange(first, since), *read, torch.arange(built, end)])
            scores, values = scale * q @ k[rows].T, v[rows]
            if s.tail != "drop":
                lam = torch.ones(H) if factor is None else factor.cpu()
                for x, t in zip(lists, taken[-1]):
                    if t == len(x): continue
                    rest = x[:len(x) - t]
                    more = lam[heads, None].double() * length * spread(rest) if s.tail == "second_order" else 0
                    score = scale * q @ k[rest].mean(0)[:, None] + more + math.log(len(rest))
                    scores, values = torch.cat([scores, score], 1), torch.cat([values, v[rest].mean(0)[None]])
            out[b, heads, 0] = scores.softmax(-1) @ values
    return out.to(DEVICE), torch.tensor(taken).view(B, G, -1)


def read_of(index, end, base, facts):
    "Keys read of each cluster [B, G, C], from the lists that the kernels chose: each must be the end of a list."
    B, G, C = end.shape
    found = torch.zeros(B, G, C, dtype=torch.int64)
    for b in range(B):
        for g in range(G):
            begin, start = 0, index.start[b, g].tolist()
            for i in range(int(facts[b, g, 0])):
                last, shift = int(end[b, g, i]), int(base[b, g, i])
                c = next(c for c in range(C) if start[c + 1] == last + shift and start[c] < start[c + 1])
                assert start[c] <= begin + shift < start[c + 1] and not found[b, g, c]
                found[b, g, c], begin = last - begin, last
            assert begin == int(facts[b, g, 1])
    return found


def index_of(p, **kw):
    from sparse_nb.kernels.saap_index import build_index
    return build_index(p.k, p.v, p.ids, p.since, p.built, p.C, **kw)


def check(p, *, tiles=None, rtol=0, centroids=None, router_q=None, guess=None, factor=None, scale=None, **settings):
    from sparse_nb.kernels import saap
    s = saap.Settings(**settings)
    given = dict(centroids=centroids, router_q=router_q, guess=guess, factor=factor, scale=scale)
    index = poisoned(lambda: index_of(p))
    more = {} if tiles is None else dict(tiles=tiles)
    out, *lists = poisoned(lambda: saap.launch(p.q, p.k, p.v, index, s, **given, **p.masks, **more))
    want, taken = oracle(p, s, **given)
    assert torch.equal(read_of(index, *lists), taken), "other keys than by the rule"
    assert out.dtype == p.q.dtype
    assert_close(out, want, rtol=max(rtol, TOLERANCE[p.q.dtype]), name=s.tail)
    return out


CASES = drawn(dict(tail=TAILS, density=(True, False), route=("moments", "centroid", "before", "given"),
                   how=(0, 7, 40, 10**6, 0.1, "0", "3", "99"), dtype=(BF16, FP16, FP32),
                   D=(64, 80, 96, 128, 256), R=(1, 3, 4, 8), C=(1, 5, 16, 40), layout=tuple(LAYOUTS),
                   ragged=(False, True), near=(1, 30, 10**6), sinks=(0, 3), small=(False, True)))


@kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_cases(case):
    from sparse_nb.kernels.saap import Tiles
    B, N = (3, 2000) if GPU else (1 + case["ragged"], 130)
    p = problem(B, 1 + (case["R"] == 3), case["R"], N, case["D"], case["dtype"],
                **{x: case[x] for x in ("C", "layout", "ragged", "near", "sinks")})
    generator = torch.Generator(DEVICE).manual_seed(1)
    fit = torch.randn(B, p.k.shape[1], p.C, case["D"], device=DEVICE, generator=generator)
    router_q = torch.randn(p.q.shape, device=DEVICE, generator=generator).to(p.q.dtype)
    guess = torch.randn(*p.q.shape[:2], p.C, device=DEVICE, generator=generator)
    given = {"moments": {}, "centroid": dict(centroids=fit), "before": dict(centroids=fit, router_q=router_q),
             "given": dict(guess=guess)}[case["route"]]
    how = dict(probes=int(case["how"]), budget=None) if isinstance(case["how"], str) else dict(budget=case["how"])
    check(p, tail=case["tail"], density=case["density"], **how, **given,
          tiles=Tiles((16, 4), (4, 8, 4, None), (16, 4, 2, 8, None), 16, 16, (16, 4)) if case["small"] else None)


@kernel
@pytest.mark.parametrize("N, near, sinks, budget", [
    (1, 1, 0, 5), (1, 9, 3, 0), (40, 40, 0, 7), (40, 0, 0, 7), (41, 3, 40, 9), (70, 5, 1, 0.0001), (70, 5, 1, 1.0)],
    ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_edges(N, near, sinks, budget, tail):
    check(problem(1, 1, 2, N, 16, FP32, C=3, near=near, sinks=sinks), tail=tail, budget=budget)


@kernel
@pytest.mark.parametrize("R", [15, 16, 20])
def test_large_groups(R): check(problem(1, 1, R, 90, 16, BF16), budget=33, scale=0.3)


@kernel
def test_factors_and_strides_of_q():
    p = problem(2, 1, 3, 90, 16, FP32)
    wide = torch.randn(2, 1, 3, 33, device=DEVICE)
    wide[:, 0, :, 1::2] = torch.cat([p.q[:, :, 0], p.q[:, :, 0, :1]], -1)[..., :16]
    q = wide[:, 0, :, None, 1::2]
    assert q.stride(-1) == 2
    factor = torch.tensor([0., 0.5, 2.], device=DEVICE)
    check(p._replace(q=q), tail="second_order", budget=20, factor=factor)


@kernel
@pytest.mark.parametrize("density", [True, False])
@pytest.mark.parametrize("budget, probes", [(17, None), (30, None), (None, 3)])
def test_of_equal_ranks_the_lower_number_wins(budget, probes, density):
    "Clusters of ten equal keys each; the window holds the rest."
    p = problem(1, 1, 2, 90, 16, FP32, C=8, near=10, sinks=0)
    k = p.k[:, :, :1].expand(p.k.shape).clone()
    ids = (torch.arange(90, device=DEVICE) % 8).to(torch.int16).view(1, 1, -1)
    check(p._replace(k=k, ids=ids), budget=budget, probes=probes, density=density)


@kernel
def test_all_clusters_are_exact_attention():
    for budget, probes in ((10**6, None), (1.0, None), (None, 8)):
        p = problem(2, 2, 3, 150, 64, FP32, ragged=True)
        out = check(p, budget=budget, probes=probes)
        hide = lambda x: x.nan_to_num()
        assert_close(out, attention(p.q, hide(p.k), hide(p.v), **p.masks), rtol=TOLERANCE[FP32])


@kernel
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("where", [0, 60, 89])
def test_a_nan_stays_in_its_group(where):
    "In a sink, in a list and in the window."
    from sparse_nb.kernels import saap
    p = problem(2, 2, 2, 90, 16, FP32, near=10)
    whole = saap.launch(p.q, p.k, p.v, index_of(p), saap.Settings(20))[0]
    p.k[1, 0, where, 3] = math.nan
    bad = saap.launch(p.q, p.k, p.v, index_of(p), saap.Settings(20))[0]
    assert bad[1, :2].isnan().all()
    whole[1, :2] = bad[1, :2] = 0
    assert torch.equal(bad, whole)


@kernel
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("tail", ["first_order", "second_order"])
@pytest.mark.parametrize("budget", [1, 43, 61, 97])
def test_a_cluster_cut_in_any_part(budget, tail, small):
    "Two large clusters: the cut one lies in one part or in several, and reading starts with the other or with it."
    from sparse_nb.kernels.saap import Tiles
    p = problem(1, 2, 3, 130, 16, FP32, C=3, near=9, sinks=1, seed=budget)
    p.ids.copy_((torch.arange(130, device=DEVICE) % 2).to(torch.int16).view(1, 1, -1))
    check(p, budget=budget, tail=tail, tiles=Tiles(read=(16, 4, 2, 8, None), part=16) if small else None)


@kernel
def test_parts():
    "All multiprocessors, and no part with few rows of the budget and 4,096 more."
    from sparse_nb.kernels.saap import Settings, Tiles, _parts
    tiles = Tiles(read=(64, 4, 3, 3, None), part=96)
    of = lambda BG, N, s: _parts(BG, N, s, 8, tiles, 132)
    assert of(8, 171008, Settings(0.044)) == 3 * 132 // 8 - 8
    assert of(1, 171008, Settings(0.044)) == math.ceil((math.ceil(171008 * 0.044) + 4096) / 96)
    assert of(1, 171008, Settings(1000)) == of(1, 171008, Settings(1000, density=False)) == math.ceil(5096 / 96)
    assert of(1, 171008, Settings(None, 4)) == 3 * 132 - 8
    assert of(1, 50, Settings(10**6)) == of(999, 10**6, Settings()) == 1


@kernel
@pytest.mark.parametrize("B, H, D, M, C, dtype", [(1, 4, 16, 24, 40, BF16), (2, 3, 80, 130, 17, FP32),
                                                  (1, 2, 128, 64, 64, FP16)], ids=str)
def test_networks_of_the_router(B, H, D, M, C, dtype):
    from sparse_nb.kernels.saap import network
    generator = torch.Generator(DEVICE).manual_seed(0)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)
    x, layers = new(B, H, 2, 2 * D)[:, :, 1:, ::2], (new(H, D, M), new(H, M), new(H, M, C), new(H, C))
    w1, b1, w2, b2 = (y.double() for y in layers)
    want = torch.relu(x.double() @ w1 + b1[:, None]) @ w2 + b2[:, None]
    got = poisoned(lambda: network(x, *layers))
    assert got.dtype == FP32
    assert_close(got, want[:, :, 0], rtol=1e-6)


# the index

@kernel
@pytest.mark.parametrize("dtype, D, C, plain", [(BF16, 64, 40, False), (FP32, 80, 17, True), (FP16, 128, 5, True),
                                                (FP32, 24, 1, False)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nearest_centroid(dtype, D, C, plain, layout):
    from sparse_nb.kernels.saap_index import assign
    p = problem(2, 2, 1, 130, D, dtype, layout=layout)
    fit = torch.randn(2, 2, C, D, device=DEVICE)
    shift = fit.square().sum(-1) / 2 if plain else None
    found = poisoned(lambda: assign(p.k, fit, shift))
    like = p.k.double() @ fit.to(dtype).double().transpose(-1, -2) - (shift.double()[:, :, None] if plain else 0)
    assert (like.amax(-1) - like.gather(-1, found.long()[..., None])[..., 0]).max() < 1e-4 * D**0.5
    assert found.dtype == torch.int16 and (found == like.argmax(-1)).double().mean() > 0.99
    for a, b in ((0, 1), (1, 77), (77, 130)): assert torch.equal(assign(p.k[:, :, a:b], fit, shift), found[:, :, a:b])


@kernel
@pytest.mark.parametrize("C", [300, 256])  # tiles of 64: equal ones in the same place of theirs, or not
def test_of_equal_centroids_the_first_wins(C):
    from sparse_nb.kernels.saap_index import assign
    p = problem(1, 1, 1, 50, 16, FP32)
    fit = torch.randn(1, 1, C, 16, device=DEVICE)
    for x in p.k, fit: x.mul_(256).round_().div_(256)  # sums that are exact in any order
    twice = assign(p.k, torch.cat([fit, fit], 2))
    assert torch.equal(twice, assign(p.k, fit)) and twice.max() < C


@kernel
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("dtype, layout", [(BF16, "plain"), (FP32, "feature-major"), (FP16, "by position")], ids=str)
def test_sums_of_clusters(dtype, layout, unit):
    from sparse_nb.kernels.saap_index import cluster_sums
    p = problem(2, 2, 1, 130, 24, dtype, layout=layout, ragged=True)
    i = torch.arange(130, device=DEVICE)
    shown = ((i >= p.start[:, None]) & (i < p.stop[:, None]))[:, None]
    got = poisoned(lambda: cluster_sums(p.k, p.v, p.ids, shown, p.C, unit=unit))
    k, v = (x.double().masked_fill(~shown[..., None], 0) for x in (p.k, p.v))
    length = k.square().sum(-1, keepdim=True)
    rows = torch.cat([shown[..., None].double().expand(length.shape), length,
                      torch.nn.functional.normalize(k, dim=-1) if unit else k, v], -1)
    want = torch.zeros(got.shape).double().to(DEVICE).scatter_add(
        2, p.ids.long()[..., None].expand(rows.shape), rows)
    assert_close(got, want, rtol=1e-6)
    assert torch.equal(got[..., 0], want[..., 0].float())
    alone = cluster_sums(p.k, None, p.ids, shown, p.C, unit=unit)
    assert_close(alone, got[..., :26], rtol=1e-6 if GPU else 0)  # on a GPU another compilation, which may sum otherwise


@kernel
def test_sums_in_place_go_on_by_kernels(monkeypatch):
    "A step by PyTorch: sums of the keys that left the window, and of those that were read, have kernels of their own."
    from sparse_nb.methods.saap import partition, state as states, step
    from sparse_nb.saap import Saap
    p = problem(2, 2, 2, 80, 16, FP32)
    s, outs = Saap(budget=12, clusters=5, sinks=2, window=9, before_rope=False), []
    assert s.tail == "first_order" and s.router == "moments"
    for kernels in (True, False):
        for module in (partition, states, step): monkeypatch.setattr(module, "has_kernels", lambda q: False)
        state, end = s.new_state(), torch.full((2,), 71, device=DEVICE)
        state.append(p.k[:, :, :70], p.v[:, :, :70])
        state.to_static(80)
        state.look_at(p.k[:, :, :70], p.v[:, :, :70])
        for n in range(70, 74):
            state.write(p.k, p.v, end[:1] - 1)
            with monkeypatch.context() as patch:
                for module in (partition, states): patch.setattr(module, "has_kernels", lambda q: kernels)
                outs.append(s.decode(p.q, p.k, p.v, state=state, kv_end=end))
            end = end + 1
    for got, want in zip(outs[:4], outs[4:]): assert_close(got, want, rtol=TOLERANCE[FP32])


@kernel
def test_an_index_that_grew_is_that_of_a_rebuild():
    from sparse_nb.kernels.saap_index import build_index
    p = problem(2, 2, 2, 130, 16, BF16, ragged=True, near=60)
    index = index_of(p)
    addresses = [x.data_ptr() for x in index]
    for near in (40, 1, 55):
        p = p._replace(built=torch.maximum(p.stop.long() - near, p.since))
        again = poisoned(lambda: index_of(p))
        build_index(p.k, p.v, p.ids, p.since, p.built, p.C, index)
        for name, a, b in zip(index._fields, index, again): assert torch.equal(a, b), name
        assert [x.data_ptr() for x in index] == addresses
    with pytest.raises(ValueError, match="index must have space for 260 keys, got 130"):
        build_index(*(torch.cat([x, x], 2) for x in (p.k, p.v, p.ids)), p.since, p.built, p.C, index)


# the method

@kernel
@pytest.mark.parametrize("ragged, settings", [
    (True, dict(budget=30)), (False, dict(probes=3, rank="mass")), (True, dict(budget=0.2, tail="second_order")),
    (False, dict(budget=9, tail="drop")), (False, dict(budget=25, router="centroid"))], ids=str)
def test_the_method_by_kernels_is_the_reference(ragged, settings):
    "After appending: as with a longer window, until the lists are made anew. After crop and reorder: as from scratch."
    from sparse_nb.core.index import EVERY
    from sparse_nb.methods.saap.state import Partition
    from sparse_nb.saap import saap_decode
    p = problem(2, 2, 2, 190, 16, FP32, ragged=ragged)
    k, v, fit = p.k.nan_to_num(), p.v.nan_to_num(), torch.randn(2, 8, 16, device=DEVICE)
    masks = lambda n: dict(p.masks, kv_end=None if p.stop is None else (p.stop - 190 + n).clamp(max=n))
    def both(window, n, row=slice(None), **kw):
        fresh = Partition(8, "spherical", 0, 0, False, fit)
        fresh.append(k[row, :, :n], v[row, :, :n])
        given = dict({x: None if y is None else y[row] for x, y in masks(n).items()}, return_stats=True)
        by = lambda backend, window, state: saap_decode(
            p.q, k[row, :, :n], v[row, :, :n], state, sinks=2, window=window, backend=backend, **given, **settings)
        got, want = by("triton", 20, state), by("torch", window, fresh)
        assert_close(got[0], want[0], rtol=1e-5)
        for name in "keys_scored", "values_read", "index_bytes", "density", "budget":
            assert torch.equal(*(torch.as_tensor(getattr(x[1], name)) for x in (got, want))), name
    state = Partition(8, "spherical", 0, 0, False, fit)
    state.append(k[:, :, :150], v[:, :, :150])
    both(20, 150)
    kept = state.kept
    for n in (151, 170):
        state.append(k[:, :, len(state):n], v[:, :, len(state):n])
        both(20 + n - 150, n)
        assert state.kept is kept
    state.crop(160)
    both(30, 160)
    assert state.kept is kept
    state.crop(149)
    both(20, 149)
    back = torch.tensor([1, 0], device=DEVICE)
    state.pick_sequences(back)
    both(20, 149, back)
    state.append(k[back][:, :, 149:], v[back][:, :, 149:])
    state.kept = state.kept._replace(keys=190 - EVERY)
    both(20, 190, back)


@kernel
@pytest.mark.parametrize("dtype, D, layout, plain, rotation, width", [
    (FP32, 16, "plain", False, None, 0), (BF16, 64, "by position", True, ("halves", 0, 64), 64),
    (FP16, 80, "every second", False, ("neighbours", 16, 64, 1, -1), 32),
    (FP32, 40, "feature-major", True, ("halves", 8, 24), 24), (BF16, 48, "sliced", False, ("neighbours", 0, 24, 2), 24),
    (BF16, 256, "plain", False, ("halves", 128, 128, 1, -1), 128)])
def test_a_key_is_put_in_one_launch(dtype, D, layout, plain, rotation, width):
    "Turned back, compared and written where it belongs, and nowhere else; of equal centroids the first."
    from sparse_nb.kernels.saap_index import Turn, put_key
    from sparse_nb.models.rotation import Rotation, unrotate
    from sparse_nb.methods.saap.partition import nearest_cluster
    B, G, N, C, at = 3, 2, 50, 37, 31
    p = problem(B, G, 1, N, D, dtype, layout=layout, seed=D)
    generator = torch.Generator(DEVICE).manual_seed(1)
    fit = torch.randn(B, G, C, D, device=DEVICE, generator=generator)
    exact = dtype == FP32 and rotation is None  # sums: elsewhere a processor's products round equal centroids apart
    if exact:
        for x in p.k, fit: x.mul_(256).round_().div_(256)
    fit[:, :, 30:] = fit[:, :, :7]
    turn, wanted = None, p.k[:, :, at:at + 1]
    if rotation is not None:
        rotation = Rotation(*rotation)
        angle = 6 * torch.rand(B, 1, width // rotation.step, device=DEVICE, generator=generator)
        if rotation.step == 2: angle = angle.repeat_interleave(2, -1)
        cos, sin = 1.3 * angle.cos().to(dtype), 1.3 * angle.sin().to(dtype)
        cos[0, 0, 0] = sin[1, 0, 0] = 0
        wanted = unrotate(wanted, (cos, sin), rotation)
        turn = Turn(cos, sin, rotation.start, rotation.width, rotation.step, rotation.sign, rotation.kind == "halves")
    number = torch.tensor([at], device=DEVICE)
    for k, alone in ((p.k, False), (wanted, True)):
        ids = torch.full((B, G, N, 1), -1, dtype=torch.int16, device=DEVICE)
        held = torch.zeros(B, G, N, D, dtype=dtype, device=DEVICE)
        put_key(k, number, fit, ids[..., 0], plain=plain, turn=None if alone else turn, held=held, alone=alone)
        assert_close(held[:, :, at:at + 1], wanted, rtol=2e-6 if dtype == FP32 else 2 * torch.finfo(dtype).eps)
        want = nearest_cluster(wanted.float(), fit.to(dtype).float(), "plain" if plain else "spherical")
        found = ids[:, :, at:at + 1, 0].long()
        assert torch.equal(found % 30, want % 30) and (found.max() < 30 and want.max() < 30 or not (exact or GPU))
        assert (ids >= 0).sum() == B * G and (held != 0).any(-1).sum() == B * G


@kernel
def test_lists_of_a_fixed_length_stay_where_they_are():
    "Keys that are put are read as near ones, until so many are there that the lists are made anew in their places"
    from sparse_nb.core.index import EVERY
    from sparse_nb.saap import Saap
    p = problem(2, 2, 2, 90, 16, FP32)
    q, k, v = p.q, p.k.nan_to_num(), p.v.nan_to_num()
    s, start = Saap(budget=12, sinks=2, window=20, clusters=8), torch.tensor([0, 9], device=DEVICE)
    state = s.new_state()
    state.append(k[:, :, :70], v[:, :, :70], shown=torch.arange(70, device=DEVICE) >= start[:, None])
    state.to_static(90)
    state.look_at(k[:, :, :70], v[:, :, :70])
    cache = [torch.nn.functional.pad(x[:, :, :70], (0, 0, 0, 20)) for x in (k, v)]
    def step(n, built):
        "Key n, and a step whose lists were made at key number `built`"
        for x, y in zip(cache, (k, v)): x[:, :, n] = y[:, :, n]
        state.write(*cache, torch.tensor([n], device=DEVICE))
        masks = dict(kv_start=start, kv_end=torch.full((2,), n + 1, device=DEVICE))
        got = s.decode(q, *cache, state=state, backend="triton", **masks)
        wide = Saap(budget=12, sinks=2, window=20 + n - built, clusters=8)
        grown = wide.new_state()
        grown.append(k[:, :, :n + 1], v[:, :, :n + 1])
        grown.fit, grown.waits = state.fit, None
        assert_close(got, wide.decode(q, k[:, :, :n + 1], v[:, :, :n + 1], state=grown, kv_start=start,
                                      backend="torch"), rtol=1e-5)
    step(70, 70)
    where = [x.data_ptr() for x in state.buffers()]
    for n in (71, 72): step(n, 70)
    state.late = EVERY - 1
    step(73, 70)  # after so many keys it is the turn of whoever renews between two steps, here nobody
    step(74, 74)
    assert [x.data_ptr() for x in state.buffers()] == where and len(where) == 15 and state.late == 0
    back = torch.tensor([1, 0], device=DEVICE)
    state.pick_sequences(back)
    q, k, v, start = q[back], k[back], v[back], start[back]
    cache = [x[back] for x in cache]
    step(75, 74)

@kernel
@pytest.mark.parametrize("few", (False, True))
def test_lists_are_renewed_in_their_places(few):
    """What has left the window since goes into the lists, and into the moments, as in lists made of all of it.

    A sequence that had no far key when its length was fixed has no centroids, and stays out of them."""
    from sparse_nb.kernels.saap_index import build_index
    from sparse_nb.methods.saap.state import listed
    from sparse_nb.saap import Saap
    p = problem(2, 2, 2, 90, 16, FP32)
    q, k, v = p.q, p.k.nan_to_num(), p.v.nan_to_num()
    s, start = Saap(budget=12, sinks=2, window=20, clusters=8), torch.tensor([0, 45 if few else 9], device=DEVICE)
    state = s.new_state()
    state.append(k[:, :, :60], v[:, :, :60], shown=torch.arange(60, device=DEVICE) >= start[:, None])
    state.to_static(96)
    state.look_at(k[:, :, :60], v[:, :, :60])
    assert (state.waits is not None) is few
    if not GPU: state.kept = listed(state, k[:, :, :60], v[:, :, :60], *state.far(60))
    cache = [torch.nn.functional.pad(x, (0, 0, 0, 6), value=float("nan")) for x in (k, v)]
    for n in range(60, 85): state.write(*cache, torch.tensor([n], device=DEVICE))
    where, late = [x.data_ptr() for x in state.buffers()], state.kept.index.built.tolist()
    state.refresh(*cache, torch.tensor([85], device=DEVICE))
    assert [x.data_ptr() for x in state.buffers()] == where and state.late == 0
    assert late == [41, 47 if few else 41] and state.kept.index.built.tolist() == [66, 47 if few else 66]
    first, last = torch.tensor([2, start[1] + 2], device=DEVICE), state.kept.index.built
    want = build_index(*cache, state.rows[..., 0], first, last, 8)
    for name, x in want._asdict().items():
        got = getattr(state.kept.index, name)
        if name == "order":  # behind the lists lies what is in none
            ends = want.start[..., -1:].expand(*x.shape[:2], x.shape[2])
            inside = torch.arange(x.shape[2], device=DEVICE) < ends
            got, x = got.masked_fill(~inside, -1), x.masked_fill(~inside, -1)
        assert torch.equal(got.nan_to_num(), x.nan_to_num()), name
    state.write(*cache, torch.tensor([85], device=DEVICE))
    grown = s.new_state()
    grown.append(k[:, :, :86], v[:, :, :86])
    grown.fit, grown.waits = state.fit, None
    got = s.decode(q, *cache, state=state, backend="triton", kv_start=start,
                   kv_end=torch.full((2,), 86, device=DEVICE))
    want = s.decode(q, k[:, :, :86], v[:, :, :86], state=grown, kv_start=start, backend="torch")
    if few: want[1:] = attention(q[1:], k[1:, :, 45:86], v[1:, :, 45:86])
    assert_close(got, want, rtol=1e-5)


@kernel
def test_which_backend():
    from sparse_nb.saap import saap_decode
    p = problem(1, 1, 2, 60, 16, FP32)
    settings = dict(clusters=4, window=10, budget=12)
    by = lambda q, **kw: saap_decode(q, p.k, p.v, **settings, **kw)
    assert_close(by(p.q, backend="triton"), by(p.q, backend="torch"), rtol=1e-5)
    with pytest.raises(ValueError, match="backend must be one of"): by(p.q, backend="cuda")
    with pytest.raises(ValueError, match="q must have one query"): by(p.q.repeat(1, 1, 2, 1), backend="triton")
    learns = p.q.clone().requires_grad_()
    with pytest.raises(ValueError, match="where a gradient is wanted"): by(learns, backend="triton")
    assert by(learns).requires_grad


# what the launcher refuses, and PyTorch's compiler

@kernel
def test_what_has_no_kernel():
    from sparse_nb.kernels.saap import Settings, decode
    p = problem(1, 1, 1, 40, 16, FP32)
    index, s = index_of(p), Settings()
    with pytest.raises(TypeError, match="q must be float16, bfloat16 or float32"):
        decode(p.q.double(), p.k, p.v, index, s)
    with pytest.raises(ValueError, match="q must have a head size of at most 256"):
        decode(*(x.repeat(1, 1, 1, 20) for x in p[:3]), index, s)
    with pytest.raises(ValueError, match="q must have one query"): decode(p.q.repeat(1, 1, 2, 1), p.k, p.v, index, s)
    with pytest.raises(ValueError, match=r"index must be of \[B, G\] = \[1, 2\], got \[1, 1\]"):
        decode(p.q.repeat(1, 2, 1, 1), *(x.repeat(1, 2, 1, 1) for x in p[1:3]), index, s)


@kernel
def test_compiles_into_one_graph():
    from sparse_nb.kernels.saap import Settings, decode
    p = problem(2, 1, 2, 70, 16, BF16, ragged=True)
    index, fit = index_of(p), torch.randn(2, 1, p.C, 16, device=DEVICE)
    def step(q, k, v, fit):
        return [decode(q, k, v, index, Settings(0.3), **p.masks).out,
                decode(q, k, v, index, Settings(probes=2, tail="drop"), centroids=fit, **p.masks).out]
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "eager")
    for a, b in zip(compiled(*p[:3], fit), step(*p[:3], fit)): assert torch.equal(a, b)


@kernel
def test_operator():
    p = problem(1, 1, 2, 40, 16, FP32)
    given = (*p[:3], list(index_of(p)), 9.0, True, None, True, "first_order", *[None] * 7)
    torch.library.opcheck(torch.ops.sparse_nb.saap_decode, given, test_utils=("test_schema", "test_faketensor"))


if GPU:
    @pytest.mark.gpu
    @pytest.mark.parametrize("tail, probes", [("first_order", None), ("second_order", None), ("drop", 7)])
    def test_graph_without_a_wait(tail, probes):
        from sparse_nb.bench import captured
        from sparse_nb.kernels.saap import Settings, decode
        from sparse_nb.kernels.saap_index import build_index
        p = problem(2, 2, 4, 5000, 128, BF16, C=64, near=300)
        index, s = index_of(p), Settings(0.1, probes, tail=tail)
        stop = torch.full((2,), 4000, dtype=torch.int32, device=DEVICE)
        def call():
            build_index(p.k, p.v, p.ids, p.since, stop - 300, p.C, index)
            return decode(p.q, p.k, p.v, index, s, kv_end=stop).out
        call()
        torch.cuda.set_sync_debug_mode("error")
        try: call()
        finally: torch.cuda.set_sync_debug_mode("default")
        replay, out = captured(call)
        stop += 777
        replay()
        assert torch.equal(out, call())

    @pytest.mark.gpu
    @pytest.mark.parametrize("N, C, R", [(171008, 1024, 4), (70001, 2048, 8), (400000, 300, 3)])
    def test_long(N, C, R):
        p = problem(1, 2, R, N, 128, BF16, C=C, near=2047, sinks=1)
        for given in (dict(budget=0.044), dict(budget=None, probes=9, density=False), dict(budget=0)): check(p, **given)


if not INTERPRETED:
    def usage(name, capability, kind, D, *, tail="first_order", warps=4, registers=None, fit=None, **own):
        "Registers, spills and shared memory of a kernel with the shipped tiles."
        triton = pytest.importorskip("triton")
        from sparse_nb.kernels import saap, saap_index
        from sparse_nb.kernels.common import compiled_usage
        BD = max(16, triton.next_power_of_2(D))
        types = dict.fromkeys(("order_ptr", "list_ptr", "end_ptr", "base_ptr", "fact_ptr", "since_ptr", "built_ptr",
                               "len_ptr"), "i32") | dict(start_ptr="i64", id_ptr="i16", at_ptr="i64", share="i64")
        halves = "q_ptr", "ask_ptr", "k_ptr", "v_ptr", "mean_ptr", "fit_ptr", "value_ptr", "out_ptr", "w_ptr", "b_ptr"
        types |= dict.fromkeys((*halves, "cos_ptr", "sin_ptr", "held_ptr"), kind) | dict(fit_ptr=fit or kind)
        known = dict(LR=4, D=D, BR=16, BD=BD, PDL=capability >= 90, CUT=tail != "drop", SECOND=tail == "second_order")
        if tail != "second_order": known |= dict.fromkeys(("factor_ptr", "sum_x_ptr"))
        if tail == "drop": known |= dict.fromkeys(("sum_s_ptr", "rest_ptr", "rest_s_ptr", "rest_x_ptr", "score_ptr"))
        kernel_ = getattr(saap_index if name in ("assign", "sums", "put") else saap, f"_{name}_kernel")
        return compiled_usage(kernel_, known | own, types, capability, warps, registers)

    @pytest.mark.kernels
    @pytest.mark.parametrize("capability, kind, D, tail", [
        (80, "bf16", 128, "drop"), (90, "bf16", 128, "first_order"), (90, "fp16", 80, "second_order"),
        (90, "fp32", 128, "first_order")])
    def test_registers_and_spills_of_a_step(capability, kind, D, tail):
        triton = pytest.importorskip("triton")
        from sparse_nb.kernels.saap import _NETWORK, Tiles, read_tile
        tiles, size, BD = Tiles(), 4 if kind == "fp32" else 2, triton.next_power_of_2(D)
        _, warps, stages, _, registers = tiles.read
        BN = read_tile(tiles, BD, size)
        read = dict(BN=BN, BC=1024, BT=BN, STAGES=stages)
        read["TILES"] = 0 if tail == "drop" else triton.cdiv(tiles.means, BN)
        if tail != "second_order": read |= dict(variance_ptr=None)
        found = {"read": usage("read", capability, kind, D, tail=tail, warps=warps, registers=registers, **read)}
        routed = dict(BN=tiles.route[0], fit_ptr=None, ask_ptr=None, given_ptr=None)
        found["route"] = usage("route", capability, kind, D, warps=tiles.route[1], **routed)
        BM, BK, warps, most = tiles.select
        chosen = dict(BC=1024, BM=BM, BK=BK, LP=4, BS=32, DENSITY=True, PROBES=False)
        found["select"] = usage("select", capability, kind, D, tail=tail, warps=warps, registers=most, **chosen)
        BK, BN, warps, stages = _NETWORK
        found["layer"] = usage("layer", capability, kind, D, warps=warps, BK=BK, BN=BN, STAGES=stages, RELU=True)
        found["merge"] = usage("merge", capability, kind, D, tail=tail, warps=tiles.merge[1], BP=64, BW=tiles.merge[0])
        for name, used in found.items():
            print(name, used)
            few = 8 * (name == "select")  # two numbers outside the loop: the fastest of its tiles all the same
            assert used["spills"] <= few and used["registers"] <= 255 and used["shared"] <= 99 * 1024, (name, used)

    @pytest.mark.kernels
    @pytest.mark.parametrize("capability, kind, D", [(80, "fp16", 128), (90, "bf16", 128), (90, "fp32", 96)])
    def test_registers_and_spills_of_the_index(capability, kind, D):
        pytest.importorskip("triton")
        from sparse_nb.kernels.saap_index import assign_tile
        BM, BN, warps, stages = assign_tile(128, 4 if kind == "fp32" else 2)
        tile = dict(BM=BM, BN=BN, STAGES=stages, shift_ptr=None)
        found = {"assign": usage("assign", capability, kind, D, warps=warps, **tile),
                 "sums": usage("sums", capability, kind, D, UNIT=False, BN=32, STAGES=3)}
        one = dict(BM=BM, BN=BN, STAGES=stages, WHOLE=True, HALVES=True, PLAIN=False, held_ptr=None)
        found["put"] = usage("put", capability, kind, D, warps=warps, fit="fp32", **one)
        for name, used in found.items():
            print(name, used)
            assert used["spills"] == 0 and used["shared"] <= (227 if capability == 90 else 163) * 1024, (name, used)

    @pytest.mark.kernels
    @pytest.mark.budget(40)
    @pytest.mark.parametrize("shard", range(3))
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_in_the_interpreter(forked_pytest, shard):
        pytest.importorskip("triton")
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--shard", f"{shard}/3", __file__,
                                   TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d passed", said), said[-4000:]
