"""Where the time of a step goes, beside the dense kernels of the same run; and what the index costs"""
import math
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparse_nb.bench import SHAPES, Protocol, Shape
from benchmarks.timing import Case, Refused
from sparse_nb.core.exact import attention
from sparse_nb.kernels.saap import Index, Settings, assign, build_index, cluster_sums, launch, lists_of, network
from benchmarks.recorder import Recorder, measure_copy, measure_dense, measure_launches, to_host


LENGTHS, DENSITY, CLUSTERS, SINKS, WINDOW = (171008, 524288, 1048576), 0.044, 1024, 1, 2047
LAUNCHES = {name: f"_{name}_kernel" for name in ("route", "select", "read", "merge")}
ONE_HEAD = Shape(4, 1, 128)  # a key/value head of Llama 3
HIDDEN = 1024  # numbers of a router's network

class Parted(NamedTuple):
    "A case with its clusters."
    case: Case
    centroids: torch.Tensor # [1, G, C, D]
    ids: torch.Tensor       # cluster of each key [1, G, N]
    index: Index

def parted(case: Case, clusters: int, sinks: int, window: int) -> Parted:
    "Clusters of the keys of a case, and the index of those that are far."
    device, (_, G, D) = case.device, case.shape
    generator = torch.Generator(device).manual_seed(1)
    centroids = torch.randn(1, G, clusters, D, device=device, generator=generator, dtype=torch.float32).to(case.dtype)
    ids, bound = assign(case.k, centroids), partial(torch.full, (1,), device=device)
    bounds = bound(sinks), bound(case.n - window)
    return Parted(case, centroids, ids, build_index(case.k, case.v, ids, *bounds, clusters))


def layers_of(
    case: Case,
    clusters: int, # C
    hidden: int,   # M
) -> tuple:        # [H, D, M], [H, M], [H, M, C], [H, C], in the dtype of the keys
    "The layers of a Gaussian network for each query head, whose outputs are about as far apart as scores."
    (H, _, D), generator = case.shape, torch.Generator(case.device).manual_seed(3)
    sizes = ((H, D, hidden), D**-0.5), ((H, hidden), 1), ((H, hidden, clusters), (2 / hidden)**0.5), ((H, clusters), 1)
    return tuple((torch.randn(*size, device=case.device, generator=generator) * factor).to(case.dtype)
                 for size, factor in sizes)

def guess_in_float64(
    q: torch.Tensor, # [1, H, 1, D]
    layers: tuple,   # of `layers_of`
) -> torch.Tensor:   # [1, H, C]
    "What the networks say."
    w1, b1, w2, b2 = (x.double() for x in layers)
    return (torch.relu(q[0].double() @ w1 + b1[:, None]) @ w2 + b2[:, None]).transpose(0, 1)


def _rows_read(x, found, g):
    "Far rows that a group read."
    _, end, base, facts = found
    lists, count = facts[0, g, :2].tolist()
    slot = torch.arange(count, device=end.device)
    at = torch.searchsorted(end[0, g, :lists].contiguous(), slot.int(), right=True)
    return x.index.order[0, g, base[0, g, at].long() + slot].long()

def _check_choice(x, s, g, mean, n, read, guess):
    "Raise `Refused` unless the clusters read are those of the highest ranks, and as many keys as the budget says."
    (H, G, D), n_read = x.case.shape, torch.bincount(x.ids[0, g, read].long(), minlength=len(n))
    if len(read) != min(math.ceil(x.case.n * s.budget * (1 - 1e-12)), int(n.sum())):
        raise Refused(f"{len(read)} keys were read")
    heads = slice(g * H // G, (g + 1) * H // G)
    q = x.case.q[0, heads, 0].double() * D**-0.5
    log = q @ mean.T + q.square().sum(-1, keepdim=True) * x.index.variance[0, g].double() / 2
    log = (log if guess is None else guess[0, heads].double()) + n.log()
    rank = (log - log.logsumexp(-1, keepdim=True)).logsumexp(0) - (n.log() if s.density else 0)
    if (n_read > n).any(): raise Refused("a row was read twice")
    low, high = rank[n_read > 0].min(), rank[(n_read < n) & (n > 0)].max()
    if not low > high - 1e-3: raise Refused(f"a cluster was read {high - low:.3g} below one that was not")

def worst_error(
    result: torch.Tensor, # what a step returned [1, H, 1, D]
    x: Parted,
    s: Settings,          # with a budget, and a first-order tail
    found: tuple,         # what `launch` returned for the same step
    guess: torch.Tensor | None = None, # logarithms of mean weights [1, H, C], if they routed
) -> float:               # of the groups that are looked at, every third
    "Largest relative error of a group. Raises `Refused` above a percent, and where other clusters were read."
    (H, G, D), C, worst = x.case.shape, x.index.clusters, 0.0
    far = torch.arange(int(x.index.since), int(x.index.built), device=result.device)
    for g in range(0, G, 3):
        k, v, ids, read = x.case.k[0, g].double(), x.case.v[0, g].double(), x.ids[0, g].long(), _rows_read(x, found, g)
        sums = lambda rows, y: torch.zeros(C, D).double().to(y.device).index_add_(0, ids[rows], y[rows])
        count = lambda rows: torch.bincount(ids[rows], minlength=C).double()
        _check_choice(x, s, g, sums(far, k) / count(far)[:, None].clamp(min=1), count(far), read, guess)
        left = far[torch.isin(far, read, invert=True)]
        n = count(left)
        there = n > 0
        mean_k, mean_v = (sums(left, y)[there] / n[there, None] for y in (k, v))
        rows = torch.cat([torch.arange(int(far[0]), device=far.device), read,
                          torch.arange(int(far[-1]) + 1, x.case.n, device=far.device)])
        heads = slice(g * H // G, (g + 1) * H // G)
        q = x.case.q[0, heads, 0].double() * D**-0.5
        weight = torch.cat([q @ k[rows].T, q @ mean_k.T + n[there].log()], 1).softmax(-1)
        want = weight @ torch.cat([v[rows], mean_v])
        worst = max(worst, float((result[0, heads, 0].double() - want).norm() / want.norm()))
    if not worst < 0.01: raise Refused(f"differs from the reference by {worst:.3g} of it")
    return worst


def read_bytes(x: Parted, read: int) -> dict:
    "What each launch has to read: means, rows of keys and values with their numbers, and means of values."
    (_, G, D), C = x.case.shape, x.index.clusters
    return dict(route=2 * G * C * D, select=12 * G * C, read=G * (4 * D * read + 4 * read + 2 * C * D), merge=0)

def rows_read(x: Parted, found: tuple) -> int:
    "Rows that a group reads in what `launch` returned, sinks and window included."
    return int(found[-1][0, 0, 1]) + x.case.n - int(x.index.built) + int(x.index.since)

def measure_step(recorder: Recorder, x: Parted, s: Settings, names: tuple = LAUNCHES):
    "Time the steps up to each of these launches."
    case, step = x.case, partial(launch, x.case.q, x.case.k, x.case.v, x.index, s)
    found = step()
    read = rows_read(x, found)
    measure_launches(recorder, LAUNCHES, names, lambda: step()[0],
                     lambda out: worst_error(out, x, s, found), read_bytes(x, read), method="saap", n=case.n,
                     H=case.shape.H, density=round(read / case.n, 4))


def measure_network(recorder: Recorder, x: Parted, s: Settings, layers: tuple):
    "Time the networks alone, and a whole step that they route; returns nothing, the rows are the recorder's."
    case, index, want = x.case, x.index, guess_in_float64(x.case.q, layers)
    def step(): return launch(case.q, case.k, case.v, index, s, guess=network(case.q, *layers))
    def check(out):
        error = float((out.double() - want).norm() / want.norm())
        if not error < 1e-4: raise Refused(f"networks differ from float64 by {error:.3g} of it")
        return error
    found = step()
    read = rows_read(x, found)
    nbytes, row = sum(y.nbytes for y in layers), dict(method="saap", n=case.n, H=case.shape.H, memory="device")
    recorder.measure_row(lambda: network(case.q, *layers), check, **row, launch="network", nbytes=nbytes)
    recorder.measure_row(lambda: step()[0], lambda out: worst_error(out, x, s, found, want), **row,
                         density=round(read / case.n, 4), launch="with network",
                         nbytes=nbytes + sum(read_bytes(x, read).values()))


def _measure_index(recorder, x):
    "Time the parts of an index, and one iteration of k-means."
    case, index, C = x.case, x.index, x.index.clusters
    shown, bounds = torch.ones_like(x.ids, dtype=torch.bool), (index.since, index.built)
    def same(out):
        some = torch.arange(0, case.n, max(1, case.n // 1000), device=out.device)
        like = case.k[:, :, some].double() @ x.centroids.double().transpose(-1, -2)
        best, got = like.amax(-1), like.gather(-1, out[:, :, some].long()[..., None])[..., 0]
        error = float(((best - got) / like.std()).max())
        if not error < 0.01: raise Refused(f"a key is {error:.3g} deviations from its nearest centroid")
        return error
    parts = {"assign": (lambda: assign(case.k, x.centroids).float(), same),
             "lists": (lambda: lists_of(x.ids, shown, C)[0].float(), None),
             "sums": (lambda: cluster_sums(case.k, None, x.ids, shown, C), None),
             "build": (lambda: build_index(case.k, case.v, x.ids, *bounds, C, index).sums, None)}
    slow = Protocol(warmup=2, runs=10, buffer_mb=512) if recorder.device == "cuda" else None
    for part, (call, check) in parts.items():
        recorder.measure_row(call, check, plain=slow, method="index", n=case.n, H=case.shape.H, part=part,
                             memory="device", nbytes=case.k.nbytes * (2 if part == "build" else 1))


def _measure_prefill(recorder, case):
    "Time the dense attention of a prompt as long as the index, which is what the index follows in a layer."
    q = torch.randn(1, case.shape.H, case.n, case.shape.D, dtype=case.dtype, device=recorder.device,
                    generator=torch.Generator(recorder.device).manual_seed(2))
    def check(out):
        errors = []
        for at in (0, case.n // 2, case.n - 1):
            want = attention(q[:, :, [at]].double(), *(x[:, :, :at + 1].double() for x in (case.k, case.v)))
            errors.append(float((out[:, :, [at]].double() - want).norm() / want.norm()))
        if not max(errors) < 0.01: raise Refused(f"differs from exact attention by {max(errors):.3g} of it")
        return max(errors)
    gpu = recorder.device == "cuda"
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION") if gpu else ("MATH",):
        def call():
            with sdpa_kernel(getattr(SDPBackend, name)):
                return scaled_dot_product_attention(q, case.k, case.v, is_causal=True, enable_gqa=True)
        recorder.measure_row(call, check, plain=Protocol(warmup=1, runs=3), method="prefill", variant=name.lower(),
                             n=case.n, H=case.shape.H, memory="device", nbytes=2 * (q.nbytes + case.k.nbytes))

def _measure_host(recorder, x, s):
    "Time a whole step with keys and values in host memory, and a copy of these."
    case, far = x.case, to_host(x.case.k, x.case.v)
    found = launch(case.q, *far, x.index, s)
    read = rows_read(x, found)
    recorder.measure_row(lambda: launch(case.q, *far, x.index, s)[0], lambda out: worst_error(out, x, s, found),
                         method="saap", n=case.n, H=case.shape.H, density=round(read / case.n, 4), launch="merge",
                         memory="host", nbytes=read_bytes(x, read)["read"])
    measure_copy(recorder, [case.k, case.v], far, H=case.shape.H, memory="host")


@torch.no_grad()
def saap_launches(recorder):
    "Time a step launch by launch, and its index."
    gpu, quick = recorder.gpu, recorder.quick
    lengths = LENGTHS if not quick else (16384,) if gpu else (200,)
    shapes = (SHAPES["llama3"], ONE_HEAD) if gpu else (Shape(2, 1, 16),)
    clusters, ends, names = (CLUSTERS, (SINKS, WINDOW), LAUNCHES) if gpu else (12, (3, 40), ("select", "merge"))
    hidden = HIDDEN if gpu else 24
    s = Settings(DENSITY if gpu else 0.3)
    for n in lengths:
        for shape in shapes[:2 if n == lengths[0] else 1]:
            case = Case(shape, n, device=recorder.device)
            measure_dense(recorder, case, H=shape.H, memory="device")
            x = parted(case, clusters, *ends)
            measure_step(recorder, x, s, names)
            if n == lengths[0]: measure_network(recorder, x, s, layers_of(case, clusters, hidden))
            if shape == shapes[0]:
                _measure_index(recorder, x)
                if n == lengths[0]:
                    _measure_prefill(recorder, case)
                    _measure_host(recorder, x, s)
        if gpu: torch.cuda.empty_cache()
    return dict(density=s.budget, clusters=clusters, sinks=ends[0], window=ends[1],
                          inputs="Gaussian keys and centroids")
