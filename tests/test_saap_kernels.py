"""The Triton kernels of SAAP against the rule in float64, cluster by cluster.

`pytest -m gpu tests/test_saap_kernels.py` runs the sweep on a GPU. Without one, a covering design of small problems
runs in Triton's interpreter, in processes of their own.
"""
import math
import random
import re
from typing import NamedTuple

import pytest
import torch

from covering import covering
from problems import DEVICE, GPU, INTERPRETED, LAYOUTS, kernel, poisoned
from sparse_nb.core.exact import assert_close, attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 0.01, FP16: 2**-10, FP32: 4e-6}
TAILS = "first_order", "second_order", "drop"


class Problem(NamedTuple):
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
    def masks(self): return dict(kv_start=self.start, kv_len=self.stop)


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
    return Problem(q.to(dtype), k, v, ids, *masks, since, built, C)


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


def oracle(p, s, centroids=None, ask=None, factor=None, scale=None):
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
            if centroids is None: log_a = scale * q @ rounded(torch.stack(mean)).T + length * variance
            else:
                asked = (p.q if ask is None else ask)[b, heads, 0]
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
    from sparse_nb.kernels.saap import build_index
    return build_index(p.k, p.v, p.ids, p.since, p.built, p.C, **kw)


def check(p, *, tiles=None, rtol=0, centroids=None, ask=None, factor=None, scale=None, **settings):
    from sparse_nb.kernels import saap
    s, given = saap.Settings(**settings), dict(centroids=centroids, ask=ask, factor=factor, scale=scale)
    index = poisoned(lambda: index_of(p))
    more = {} if tiles is None else dict(tiles=tiles)
    out, *lists = poisoned(lambda: saap.launch(p.q, p.k, p.v, index, s, **given, **p.masks, **more))
    want, taken = oracle(p, s, **given)
    assert torch.equal(read_of(index, *lists), taken), "other keys than by the rule"
    assert out.dtype == p.q.dtype
    assert_close(out, want, rtol=max(rtol, TOLERANCE[p.q.dtype]), name=s.tail)
    return out


def drawn(factors, seed=0):
    draw = random.Random(seed)
    cases = [{name: draw.choice(values) for name, values in factors.items()} for _ in range(400)]
    return [cases[i] for i in covering(cases)]


CASES = drawn(dict(tail=TAILS, density=(True, False), route=("moments", "centroid", "before"),
                   how=(0, 1, 7, 40, 10**6, 0.1, 0.5, "0", "1", "3", "99"), dtype=(BF16, FP16, FP32),
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
    ask = torch.randn(p.q.shape, device=DEVICE, generator=generator).to(p.q.dtype)
    given = {"moments": {}, "centroid": dict(centroids=fit), "before": dict(centroids=fit, ask=ask)}[case["route"]]
    how = dict(probes=int(case["how"]), budget=None) if isinstance(case["how"], str) else dict(budget=case["how"])
    check(p, tail=case["tail"], density=case["density"], **how, **given,
          tiles=Tiles((16, 4), (2, 4), (16, 4, 2, 8, None), 16, (16, 4)) if case["small"] else None)
