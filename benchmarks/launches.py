"""Where the time of a step goes that chooses its keys, launch by launch: vAttention, Sketch&Walk and SAAP, beside the
dense kernels of the same run; and what whole steps cost after a cache full of other lines"""
import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparse_nb.bench import LEFT, SHAPES, Protocol, Shape
from sparse_nb.core.exact import attention
from sparse_nb.kernels import saap, saap_index, sketch_walk, vattention
from sparse_nb.methods.sketch_walk.index import Summary, block_scores, signed_hadamard
from sparse_nb.vattention import read_rows
from benchmarks.attention import measure_tiles
from benchmarks.decode import contenders
from benchmarks.recorder import Recorder, Step, measure_dense, measure_host, measure_launches
from benchmarks.timing import Case, Refused, check_sampled, largest, refuse_above, relative, worst_of_lists


# vAttention

VATTENTION = dict(code="code_kernel") | {  # launch -> its first kernel
    name: f"_{name}_kernel" for name in ("guess", "count", "keep", "look", "sample", "merge")}
DENSITY, HOST = 0.1, (0.05, 0.1, 0.2, 0.4)  # shares with keys in host memory
EPS, SEED = 0.1, 7

def signatures(case: Case) -> dict:
    "Random signatures of the keys, and random networks of the queries."
    (H, G, D), M, device = case.shape, 64, case.device
    generator = torch.Generator(device).manual_seed(0)
    normal = lambda *shape: (torch.randn(*shape, device=device, generator=generator) / 10).half()
    codes = torch.randint(-2**31, 2**31, (1, G, case.n, 1), device=device, generator=generator).int()
    return dict(codes=codes, maps=(normal(H, D, M), normal(H, M), normal(H, M, 32), normal(H, 32)), seed=SEED)

def _output_of_rows(case, found, kept, g, heads):
    "Attention of a group's heads over the rows that it read, as these are weighted."
    own = vattention.Found(*(x[:, g:g + 1] if isinstance(x, torch.Tensor) else x for x in found))
    read = read_rows(own, torch.full((1, 1), kept, device=case.device), 1)
    i = read.weight[0, 0, 0].nonzero().squeeze(-1)
    row, weight = read.index[0, 0, 0, i], read.weight[0, 0, 0, i].double()
    if len(row.unique()) < len(row): raise Refused("a row was read twice")
    score = case.q[0, heads, 0].double() @ case.k[0, g, row].double().T * case.shape.D**-0.5 + weight.log()
    return score.softmax(-1) @ case.v[0, g, row].double()

def vattention_step(case: Case, given: dict, density: float, ends: int, tries: int = 3) -> Step:
    "With settings that read this share of the keys, as far as what must be drawn leaves room; given: `signatures`."
    (H, G, D), n, topk, base = case.shape, case.n, density / 2, density / 4
    for _ in range(tries):
        s = vattention.Settings(ends, ends, topk, base, 32, eps=EPS, log=math.log(2 / 0.08),
                                square=1.7506860712521692**2, plug=math.log(1 / 0.01))
        found = vattention.launch(case.q, case.k, case.v, s, G, **given)
        kept = 2 * ends + math.ceil(n * topk * (1 - 1e-12))
        drawn, extra = (x.sum(-1).float().mean().item() for x in (found.base, found.extra))
        share, topk = (kept + drawn + extra) / n, max(0.001, density - (2 * ends + drawn + extra) / n)
    drawn, extra, of_rows = round(drawn), round(extra), 4 * G * D  # bytes of a key and a value of each group
    nbytes = dict(code=sum(x.nbytes for x in given["maps"]), guess=4 * vattention.GUESS * G, count=4 * n * G,
                  keep=n * G, look=of_rows * (kept + drawn), sample=of_rows * extra, merge=0)
    return Step(lambda k, v: vattention.launch(case.q, k, v, s, G, **given).out,
                lambda out: worst_of_lists(out, case.shape, partial(_output_of_rows, case, found, kept), H // G),
                VATTENTION, nbytes, dict(method="vattention", n=n, density=round(share, 4), kept=kept, base=drawn,
                                         extra=extra))

@torch.no_grad()
def vattention_launches(recorder):
    "A step launch by launch; on a CPU one part of the launches, with small heads."
    small = 8, ("keep",), 0.6, (0.6,), 1
    ends, names, density, host, tries = (128, None, DENSITY, HOST, 3) if recorder.gpu else small
    for i, case in enumerate(recorder.cases((131072, 524288, 1048576), 16384, 128, Shape(1, 1, 16))):
        measure_dense(recorder, case, memory="device")
        given = signatures(case)
        steps = {x: vattention_step(case, given, x, ends, tries) for x in sorted({density} if i else {density, *host})}
        measure_launches(recorder, case, steps[density], names)
        if not i: measure_host(recorder, case, [steps[x] for x in host])
    return dict(density=DENSITY, inputs="Gaussian, random signatures", eps=EPS, delta=0.1)


# Sketch&Walk

SKETCH_WALK = dict(score="_ask_kernel", select="_share_kernel", read="_read_kernel", merge="merge_kernel")
DENSITIES, OTHERS = (0.05, 0.1, 0.2), ("fine16", "mean")
AT_ONCE = 2048  # blocks whose rows are made at once
SMALL, OF_HEADS = (16, 8, 4), (131072, 524288)  # keys of other blocks; lengths for lists of single heads

class Indexed(NamedTuple):
    "A case and an index of its keys."
    case: Case
    summary: Summary
    rows: torch.Tensor       # as the chapter keeps them [1, G, M, C, W + 2]
    index: sketch_walk.Index # as the kernels read them

def indexed(case: Case, kind: str, block: int = 64) -> Indexed:
    "The index of the keys of a case, whose first block begins at key 0."
    summary, device, rows = Summary(kind, block), case.device, []
    for keys in case.k.split(AT_ONCE * block, 2):
        M = math.ceil(keys.shape[2] / block)
        there = (torch.arange(M * block, device=device) < keys.shape[2]).view(1, 1, M, block, 1)
        blocks = torch.nn.functional.pad(keys, (0, 0, 0, M * block - keys.shape[2])).unflatten(2, (M, block))
        rows.append(summary(blocks, there))
    rows, sign = torch.cat(rows, 2), signed_hadamard(case.shape.D, None)[:, 0].sign().to(device)
    return Indexed(case, summary, rows, sketch_walk.pack(kind, rows, torch.zeros(1, device=device), sign))

def blocks_error(
    out: torch.Tensor, # what a step returned [1, H, 1, D]
    x: Indexed,
    density: float,    # of the step
    found: tuple,      # what `launch` returned for the same step
) -> float:
    "As `worst_of_lists`. Raises `Refused` where other blocks were read than those that weigh most."
    (H, G, D), block, M = x.case.shape, x.summary.block, x.rows.shape[2]
    count, wide = min(M, max(math.ceil(M * density * (1 - 1e-12)), 2)), H // G if found.readers is None else 1
    def want(i, heads):
        g = i * wide * G // H
        blocks = found.blocks[0, g, :(read := int(found.count[0, g]))].long()
        if found.readers is not None: blocks = blocks[(found.readers[0, g, :read] >> i % (H // G) & 1).bool()]
        q, of_g = x.case.q[:, heads].double(), x.rows[:, g:g + 1].double()
        share = block_scores(x.summary, q, of_g, None)[0, :, 0].softmax(-1).mean(0)
        share[0] = share[-1] = math.inf
        if len(blocks) != count or len(blocks.unique()) != count: raise Refused(f"{len(blocks)} blocks were read")
        left = torch.ones_like(share, dtype=torch.bool).index_fill_(0, blocks, False)
        if left.any() and not share[blocks].min() > share[left].max() * (1 - 1e-4):
            raise Refused(f"a block was read that weighs {share[blocks].min() / share[left].max():.4g} of another")
        key = (blocks[:, None] * block + torch.arange(block, device=blocks.device)).flatten()
        key = key[key < x.case.n]
        return (q[0, :, 0] @ x.case.k[0, g, key].double().T * D**-0.5).softmax(-1) @ x.case.v[0, g, key].double()
    return worst_of_lists(out, x.case.shape, want, wide)

def sketch_walk_step(x: Indexed, density: float, heads: str = "group") -> Step:
    "heads: who shares a list, or nobody (\"each\")."
    case, s, (H, G, D) = x.case, sketch_walk.Settings(x.summary.block, density, x.summary.index, heads), x.case.shape
    run = lambda k, v: sketch_walk.launch(case.q, k, v, x.index, s)
    found = run(case.k, case.v)
    read = float(found.count.double().mean()) * s.block  # the lengths are whole blocks
    parts = x.index.rows, x.index.facts, x.index.radius
    nbytes = dict(score=sum(y.nbytes for y in parts if y is not None), select=4 * H * x.rows.shape[2],
                  read=round(G * 4 * D * read), merge=0)
    return Step(lambda k, v: run(k, v).out, lambda out: blocks_error(out, x, density, found), SKETCH_WALK, nbytes,
                dict(method="sketch_walk", n=case.n, H=H, index=s.index, block=s.block, heads=heads, asked=density,
                     density=round(read / case.n, 4)))

@torch.no_grad()
def sketch_walk_launches(recorder):
    "A step launch by launch, for three densities; on a CPU two parts of the launches, with small heads."
    gpu, quick = recorder.gpu, recorder.quick
    names, tenth = ((*SKETCH_WALK,), 0.1) if gpu else (("select", "merge"), 0.5)
    for i, case in enumerate(recorder.cases((32768, 131072, 524288, 1048576), 16384, 320, Shape(2, 1, 64))):
        measure_dense(recorder, case, H=case.shape.H, memory="device")
        measure = lambda x, density, names, *heads: measure_launches(
            recorder, x.case, sketch_walk_step(x, density, *heads), names)
        x = indexed(case, "fine4")
        for density in DENSITIES if gpu else (0.5,): measure(x, density, names)
        if quick or case.n in OF_HEADS: measure(x, tenth, names, "each")
        if quick or i == 1:
            for kind in OTHERS: measure(indexed(case, kind), tenth, names[-1:])
            for block in SMALL: measure(indexed(case, "fine4", block), tenth, names)
        del x
    return dict(block=64)


# SAAP

SAAP = {name: f"_{name}_kernel" for name in ("route", "select", "read", "merge")}
LENGTHS, BUDGET, CLUSTERS, ENDS = (171008, 524288, 1048576), 0.044, 1024, (1, 2047)  # ENDS: sinks and window
ONE_HEAD = Shape(4, 1, 128)  # a key/value head of Llama 3
HIDDEN = 1024  # numbers of a router's network

class Parted(NamedTuple):
    "A case with its clusters."
    case: Case
    centroids: torch.Tensor # [1, G, C, D]
    ids: torch.Tensor       # cluster of each key [1, G, N]
    index: saap_index.Index

def parted(case: Case, clusters: int, sinks: int, window: int) -> Parted:
    "Clusters of the keys of a case, and the index of those that are far."
    device, (_, G, D) = case.device, case.shape
    generator = torch.Generator(device).manual_seed(1)
    centroids = torch.randn(1, G, clusters, D, device=device, generator=generator, dtype=torch.float32).to(case.dtype)
    ids, bound = saap_index.assign(case.k, centroids), partial(torch.full, (1,), device=device)
    bounds = bound(sinks), bound(case.n - window)
    return Parted(case, centroids, ids, saap_index.build_index(case.k, case.v, ids, *bounds, clusters))

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


def _rows_read(x, found, g):
    "Far rows that a group read."
    _, end, base, facts = found
    lists, count = facts[0, g, :2].tolist()
    slot = torch.arange(count, device=end.device)
    at = torch.searchsorted(end[0, g, :lists].contiguous(), slot.int(), right=True)
    return x.index.order[0, g, base[0, g, at].long() + slot].long()

def _check_choice(x, s, g, heads, mean, n, read, guess):
    "Raise `Refused` unless the clusters read are those of the highest ranks, and as many keys as the budget says."
    n_read = torch.bincount(x.ids[0, g, read].long(), minlength=len(n))
    if len(read) != min(math.ceil(x.case.n * s.budget * (1 - 1e-12)), int(n.sum())):
        raise Refused(f"{len(read)} keys were read")
    q = x.case.q[0, heads, 0].double() * x.case.shape.D**-0.5
    log = q @ mean.T + q.square().sum(-1, keepdim=True) * x.index.variance[0, g].double() / 2
    log = (log if guess is None else guess[0, heads].double()) + n.log()
    rank = (log - log.logsumexp(-1, keepdim=True)).logsumexp(0) - (n.log() if s.density else 0)
    if (n_read > n).any(): raise Refused("a row was read twice")
    low, high = rank[n_read > 0].min(), rank[(n_read < n) & (n > 0)].max()
    if not low > high - 1e-3: raise Refused(f"a cluster was read {high - low:.3g} below one that was not")

def clusters_error(
    out: torch.Tensor, # what a step returned [1, H, 1, D]
    x: Parted,
    s: saap.Settings,  # with a budget, and a first-order tail
    found: tuple,      # what `launch` returned for the same step
    guess: torch.Tensor | None = None, # logarithms of mean weights [1, H, C], if they routed
) -> float:
    "As `worst_of_lists`. Raises `Refused` where other clusters were read than those of the highest ranks."
    (H, G, D), C, n = x.case.shape, x.index.clusters, x.case.n
    keys = torch.arange(n, device=out.device)
    far = keys[int(x.index.since):int(x.index.built)]
    def want(g, heads):
        k, v, ids, read = x.case.k[0, g].double(), x.case.v[0, g].double(), x.ids[0, g].long(), _rows_read(x, found, g)
        sums = lambda rows, y: torch.zeros(C, D).double().to(y.device).index_add_(0, ids[rows], y[rows])
        count = lambda rows: torch.bincount(ids[rows], minlength=C).double()
        _check_choice(x, s, g, heads, sums(far, k) / count(far)[:, None].clamp(min=1), count(far), read, guess)
        left = far[torch.isin(far, read, invert=True)]
        size = count(left)
        there = size > 0
        mean_k, mean_v = (sums(left, y)[there] / size[there, None] for y in (k, v))
        rows = torch.cat([keys[:int(far[0])], read, keys[int(far[-1]) + 1:]])
        q = x.case.q[0, heads, 0].double() * D**-0.5
        weight = torch.cat([q @ k[rows].T, q @ mean_k.T + size[there].log()], 1).softmax(-1)
        return weight @ torch.cat([v[rows], mean_v])
    return worst_of_lists(out, x.case.shape, want, H // G)

def saap_step(x: Parted, s: saap.Settings, layers: tuple | None = None) -> Step:
    "layers: of networks that route, as `layers_of` gives them."
    case, (H, G, D), C = x.case, x.case.shape, x.index.clusters
    more = lambda: {} if layers is None else dict(guess=saap.network(case.q, *layers))
    run = lambda k, v: saap.launch(case.q, k, v, x.index, s, **more())
    found, guess = run(case.k, case.v), None if layers is None else guess_in_float64(case.q, layers)
    read = int(found[-1][0, 0, 1]) + case.n - int(x.index.built) + int(x.index.since)  # rows of a group
    nbytes = dict(route=2 * G * C * D, select=12 * G * C, read=G * (4 * D * read + 4 * read + 2 * C * D), merge=0)
    return Step(lambda k, v: run(k, v)[0], lambda out: clusters_error(out, x, s, found, guess), SAAP, nbytes,
                dict(method="saap", n=case.n, H=H, density=round(read / case.n, 4)))

def guess_in_float64(
    q: torch.Tensor, # [1, H, 1, D]
    layers: tuple,   # of `layers_of`
) -> torch.Tensor:   # [1, H, C]
    "What the networks say."
    w1, b1, w2, b2 = (x.double() for x in layers)
    return (torch.relu(q[0].double() @ w1 + b1[:, None]) @ w2 + b2[:, None]).transpose(0, 1)

def measure_network(recorder: Recorder, x: Parted, s: saap.Settings, layers: tuple):
    "Time the networks alone, and a whole step that they route."
    case, want, nbytes = x.case, guess_in_float64(x.case.q, layers), sum(y.nbytes for y in layers)
    check = lambda out: refuse_above(relative(out, want), 1e-4, "networks differ from float64 by {:.3g} of it")
    recorder.measure_row(lambda: saap.network(case.q, *layers), check, method="saap", n=case.n, H=case.shape.H,
                         memory="device", launch="network", nbytes=nbytes)
    step = saap_step(x, s, layers)
    recorder.measure_row(lambda: step.run(case.k, case.v), step.check, **step.row, memory="device",
                         launch="with network", nbytes=nbytes + sum(step.nbytes.values()))

def _measure_index(recorder, x):
    "Time the parts of an index, and one iteration of k-means."
    case, index, C = x.case, x.index, x.index.clusters
    shown, bounds = torch.ones_like(x.ids, dtype=torch.bool), (index.since, index.built)
    def same(out):
        some = torch.arange(0, case.n, max(1, case.n // 1000), device=out.device)
        like = case.k[:, :, some].double() @ x.centroids.double().transpose(-1, -2)
        best, got = like.amax(-1), like.gather(-1, out[:, :, some].long()[..., None])[..., 0]
        return refuse_above(float(((best - got) / like.std()).max()), 0.01,
                            "a key is {:.3g} deviations from its nearest centroid")
    parts = {"assign": (lambda: saap_index.assign(case.k, x.centroids).float(), same),
             "lists": (lambda: saap_index.lists_of(x.ids, shown, C)[0].float(), None),
             "sums": (lambda: saap_index.cluster_sums(case.k, None, x.ids, shown, C), None),
             "build": (lambda: saap_index.build_index(case.k, case.v, x.ids, *bounds, C, index).sums, None)}
    slow = Protocol(warmup=2, runs=10, buffer_mb=512) if recorder.gpu else None
    for part, (call, check) in parts.items():
        recorder.measure_row(call, check, plain=slow, method="index", n=case.n, H=case.shape.H, part=part,
                             memory="device", nbytes=case.k.nbytes * (2 if part == "build" else 1))

def _measure_prefill(recorder, case):
    "Time the dense attention of a prompt as long as the index, which is what the index follows in a layer."
    q = torch.randn(1, case.shape.H, case.n, case.shape.D, dtype=case.dtype, device=recorder.device,
                    generator=torch.Generator(recorder.device).manual_seed(2))
    def check(out):
        some = [0, case.n // 2, case.n - 1]
        want = [attention(q[:, :, [i]].double(), *(x[:, :, :i + 1].double() for x in (case.k, case.v))) for i in some]
        return refuse_above(largest(relative(out[:, :, [i]], x) for i, x in zip(some, want)), 0.01,
                            "differs from exact attention by {:.3g} of it")
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION") if recorder.gpu else ("MATH",):
        def call():
            with sdpa_kernel(getattr(SDPBackend, name)):
                return scaled_dot_product_attention(q, case.k, case.v, is_causal=True, enable_gqa=True)
        recorder.measure_row(call, check, plain=Protocol(warmup=1, runs=3), method="prefill", variant=name.lower(),
                             n=case.n, H=case.shape.H, memory="device", nbytes=2 * (q.nbytes + case.k.nbytes))

@torch.no_grad()
def saap_launches(recorder):
    "Time a step launch by launch, and its index."
    gpu, quick = recorder.gpu, recorder.quick
    lengths = LENGTHS if not quick else (16384,) if gpu else (200,)
    shapes = (SHAPES["llama3"], ONE_HEAD) if gpu else (Shape(2, 1, 16),)
    clusters, ends, names, hidden = (CLUSTERS, ENDS, None, HIDDEN) if gpu else (12, (3, 40), ("select", "merge"), 24)
    s = saap.Settings(BUDGET if gpu else 0.3)
    for n in lengths:
        for shape in shapes[:2 if n == lengths[0] else 1]:
            case = Case(shape, n, device=recorder.device)
            measure_dense(recorder, case, H=shape.H, memory="device")
            x = parted(case, clusters, *ends)
            step = saap_step(x, s)
            measure_launches(recorder, case, step, names)
            if n == lengths[0]: measure_network(recorder, x, s, layers_of(case, clusters, hidden))
            if shape == shapes[0]:
                _measure_index(recorder, x)
                if n == lengths[0]:
                    _measure_prefill(recorder, case)
                    measure_host(recorder, case, [step], H=shape.H)
        if gpu: torch.cuda.empty_cache()
    return dict(density=s.budget, clusters=clusters, sinks=ends[0], window=ends[1],
                inputs="Gaussian keys and centroids")


# A cache full of other lines

class Sizes(NamedTuple):
    "How much the methods read."
    samples: int = 128      # value rows that SANTA draws for each head
    vattention: float = 0.1 # share of the keys
    ends: int = 128         # sinks of vAttention, and keys of its window
    walk: float = 0.1       # share of the blocks
    saap: float = 0.05      # share of the keys, beside sinks and window
    clusters: int = 128     # of SAAP
    window: int = 255       # keys of its window
    tries: int = 3          # steps of vAttention, to find its settings

FEW = Sizes(8, 0.6, 8, 0.5, 0.3, 12, 40, 1)

def santa_calls(case: Case, samples: int) -> dict: # method -> (call, check)
    "SANTA's steps with exact scores and with an index of eight bits."
    def one(x): return x.build(case)["triton"], partial(check_sampled, case=case, samples=samples,
                                                        reference=x.reference(case))
    return {name: one(contenders(samples)[name]) for name in ("santa_systematic", "santa_int8")}

@torch.no_grad()
def cache_lines(recorder):
    "Whole steps after each kind of work; on a CPU keys are chosen in the first state only."
    if not recorder.gpu: recorder.protocol = Protocol(warmup=1, runs=1, buffer_mb=1)  # a buffer in any case
    sizes = Sizes() if recorder.gpu else FEW
    for case in recorder.cases((8192, 32768, 131072, 524288), 8192, 200, Shape(2, 1, 64)):
        calls = santa_calls(case, sizes.samples)
        steps = (vattention_step(case, signatures(case), sizes.vattention, sizes.ends, sizes.tries),
                 sketch_walk_step(indexed(case, "fine4"), sizes.walk),
                 saap_step(parted(case, sizes.clusters, 1, sizes.window), saap.Settings(sizes.saap)))
        for left in LEFT:
            recorder.say(f"{case.n} keys, after a buffer that is left as {left}:")
            recorder.protocol, before = replace(recorder.protocol, left=left), len(recorder.rows)
            measure_dense(recorder, case)
            measure_tiles(recorder, case)
            for name, (call, check) in calls.items():
                recorder.measure_row(call, check, method=name, n=case.n, samples=sizes.samples)
            for step in steps if recorder.gpu or left == LEFT[0] else ():
                measure_launches(recorder, case, step, ("merge",))
            recorder.rows[before:] = [dict(left=left) | row for row in recorder.rows[before:]]
        del steps, calls
    return dict(l2=LEFT, buffer_mb=recorder.protocol.buffer_mb)
