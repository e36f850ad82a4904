"""One query: exact attention, chosen rows, rows from host memory, methods that choose a tenth of the keys, audits, and
the stages of SANTA's kernels, beside the dense kernels of the same run"""
from collections.abc import Callable
from functools import partial
from statistics import median
from types import ModuleType
from typing import NamedTuple

import torch

from sparse_nb.audit import audit as audited, key_boxes
from sparse_nb.hash_attention import HashAttention
from sparse_nb.methods.adamas import CUT, Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.quest import Quest
from sparse_nb.bench import SHAPES, Protocol, Shape, captured, cold_times, quartiles
from sparse_nb import TopK
from sparse_nb.core.index import State
from sparse_nb.core.key_scorer import KeyScorer
from sparse_nb.core.selection import Selection, weighted_attention
from sparse_nb.core.streams import fold_in
from sparse_nb.hash_attention import BITS, PARTS
from sparse_nb.kernels import adamas, double_sparsity, hash_attention, quest
from sparse_nb.kernels import santa as santa_kernels
from sparse_nb.kernels.common import by_engine, device_limits
from sparse_nb.kernels.exact import Tiles, launch, tile_settings
from sparse_nb.kernels.gather import attend
from sparse_nb.kernels.host import rows
from sparse_nb.kernels.top_budget import Place, launch_list
from sparse_nb.metrics import relative_error
from sparse_nb.santa import bernoulli_scores, santa_decode
from sparse_nb.santa_keys import Int8Keys, quantise
from benchmarks.recorder import Recorder, measure_copy, measure_dense, to_host, up_to
from benchmarks.timing import Case, Refused, check_dense, check_sampled, close_to

SMALL, TWO = Shape(2, 1, 16), ("sdpa_cudnn", "sdpa_flash")  # heads on a CPU, dense baselines


TRIED = Tiles(64, 4, 4, 2, 8), Tiles(64, 4, 3, 3, 8, 168), Tiles(64, 4, 3, 2, 0)  # beside those that ship

def measure_tiles(recorder: Recorder, case: Case, tiles: Tiles | None = None):
    "A row: the exact kernels with these tiles, or with those that ship."
    q, k, v, shipped = case.q, case.k, case.v, tiles is None
    used = tile_settings(case.shape.D, q.element_size(), by_engine(q, k, v)) if shipped else tiles
    recorder.measure_row(lambda: launch(q, k, v, None, None, None, used), lambda out: check_dense(out, case),
                         method="exact", n=case.n, tiles=used, shipped=shipped, nbytes=2 * k.nbytes)

@torch.no_grad()
def exact(recorder):
    "Exact attention with the tiles that ship and with others."
    for case in recorder.cases((2048, 8192, 32768, 131072, 524288, 1048576), 8192, 200, SMALL):
        measure_dense(recorder, case, kernels=TWO)
        for tiles in (None, *(TRIED[:1] if recorder.quick else TRIED)): measure_tiles(recorder, case, tiles)
    return {}


DENSITY, HOST = 0.1, 131072  # share of the keys, keys in host memory

def check_lists(
    case: Case,
    index: torch.Tensor,  # key numbers [1, H or G, 1, S]
    weight: torch.Tensor, # [1, H, 1, S]
) -> Callable:            # gets an output [1, H, 1, D], returns its relative error or raises `Refused`
    "A check of attention to these lists, against PyTorch."
    whole = Selection(index.repeat_interleave(case.shape.H // index.shape[1], 1), weight)
    return close_to(weighted_attention(case.q, case.k, case.v, whole, backend="torch").double())

def _measure_lists(recorder, case, lists, generator, far):
    "Time one choice of rows at random, and the same from host memory (`far`), if that is asked for."
    draw = partial(torch.rand, device=case.device, generator=generator)
    index = draw(1, lists, 1, case.n).topk(round(DENSITY * case.n), -1).indices
    weight = draw(1, case.shape.H, 1, index.shape[-1]) + 0.5
    q, close = case.q, check_lists(case, index, weight)
    row = dict(method="attend", n=case.n, lists="a group" if lists == case.shape.G else "a head",
               nbytes=2 * lists * index.shape[3] * case.shape.D * q.element_size())
    recorder.measure_row(lambda: attend(q, case.k, case.v, index, weight), close, **row, memory="device")
    if far: recorder.measure_row(lambda: attend(q, *far, index, weight), close, **row, memory="host")

@torch.no_grad()
def gather(recorder):
    "Ten percent of the keys at random, with shared lists and without."
    host = 4096 if recorder.quick and recorder.gpu else HOST if recorder.gpu else 96
    for case in recorder.cases((32768, 131072, 524288, 1048576), host, host, SMALL):
        generator = torch.Generator(recorder.device).manual_seed(0)
        measure_dense(recorder, case, lists="all", memory="device")
        far = to_host(case.k, case.v) if case.n == host else None
        for lists in (case.shape.G, case.shape.H): _measure_lists(recorder, case, lists, generator, far)
        if far: measure_copy(recorder, [case.k, case.v], far, lists="all", memory="host")
    return dict(density=DENSITY)


DENSITIES = 0.001, 0.003, 0.01, 0.03, 0.1, 0.3

def _orders(keys, count, heads, device, generator):
    "Row numbers [1, heads, count] in three orders."
    random = torch.rand(1, heads, keys, device=device, generator=generator).argsort(-1)[..., :count]
    last = torch.arange(keys - count, keys, device=device).expand(1, heads, -1).contiguous()
    return {"random": random, "sorted": random.sort(-1).values, "neighbours": last}

def _measure_bring(recorder, protocol, call, want, **row):
    "Time a call that brings `want` over."
    times = quartiles(cold_times(call, protocol, device=recorder.device))
    if not torch.equal(call().cpu(), want): raise Refused(f"{row}: the rows differ")
    recorder.rows.append(row | dict(bytes=want.nbytes, **times._asdict(), checked=True))
    recorder.say(f"{row}: {times.median_us:.0f} us, {want.nbytes / times.median_us / 1000:.1f} GB/s")

def host(recorder):
    "A copy of all keys by the copy engine, against rows read by a kernel, from one in a thousand to one in three."
    device, quick, keys = recorder.device, recorder.quick, 1000 if recorder.quick else HOST
    shape, protocol = SHAPES["llama3"] if recorder.gpu else SMALL, Protocol(3, 2 if quick else 20, 0)
    (x,) = to_host(torch.randn(1, shape.G, keys, shape.D, dtype=torch.bfloat16, device=device))
    _measure_bring(recorder, protocol, lambda: x.to(device, non_blocking=True, copy=True), x, what="copy")
    generator = torch.Generator(device).manual_seed(0)
    for density in DENSITIES[-2:] if quick else DENSITIES:
        for order, index in _orders(keys, round(density * keys), shape.G, device, generator).items():
            want = x.gather(2, index.cpu()[..., None].expand(-1, -1, -1, shape.D))
            _measure_bring(recorder, protocol, lambda: rows(x, index), want, what="rows", density=density, order=order)
    return dict(keys=keys, mode="eager", l2="warm", runs=protocol.runs)


HIDDEN = 128  # numbers of a network
LAUNCHES = "score", "sift", "select", "list", "attend"         # the marks are within `score`
BEFORE = dict(sift="_select_kernel", select="_list_kernel")    # launch -> kernel of the next
COUNTED = "score", "list", "attend"                           # where scores are counted as they are made
METHODS = Quest(DENSITY), DoubleSparsity(DENSITY), Adamas(DENSITY), HashAttention(DENSITY, layer=0)

class Asked(NamedTuple):
    "A method, its index of the keys of a case, and what the kernels are told of it."
    case: Case
    method: KeyScorer
    state: State
    kernels: ModuleType # of the method
    factor: float
    own: tuple
    place: Place

def drawn_networks(case: Case, hidden: int = HIDDEN) -> dict:
    "Gaussian networks for the keys and for the queries."
    (H, G, D), generator = case.shape, torch.Generator(case.device).manual_seed(1)
    draw = lambda *size: torch.randn(*size, device=case.device, generator=generator) * size[-2]**-0.5
    sizes = lambda heads: ((heads, D, hidden), (heads, hidden), (heads, hidden, BITS), (heads, BITS))
    return {part: draw(*size) for part, size in zip(PARTS, sizes(G) + sizes(H))}

def asked(case: Case, method: KeyScorer) -> Asked:
    "The index of its keys."
    state, place, factor = method.new_state(), Place(case.n), case.shape.D**-0.5
    if isinstance(method, HashAttention): state.held = drawn_networks(case)
    state.append(case.k, case.v, **dict(q=case.q) if "q" in state.observes else {})
    known = lambda kernels, factor, *own, place=place: Asked(case, method, state, kernels, factor, own, place)
    if isinstance(method, Quest):
        return known(quest, factor, place=Place(case.n, begin=state.begin, unit=method.page))
    if isinstance(method, DoubleSparsity): return known(double_sparsity, factor, state.fit[:, :, 0])
    if isinstance(method, Adamas): return known(adamas, CUT)
    return known(hash_attention, factor, *(state.held[part] for part in PARTS if part[0] == "q"))

def launches_of(x: Asked) -> tuple: return COUNTED if x.kernels is hash_attention else LAUNCHES


def step(
    x: Asked,
    last: str = LAUNCHES[-1], # launch that is the last one
) -> tuple: # output [1, H, 1, D], list, weights: None where no launch makes them, not filled where not all of one did
    "The first launches of a step."
    scores, known = x.kernels.score(x.case.q, x.state.rows, x.own, x.factor, DENSITY, x.place)
    if last == "score": return None, None, None
    listed = partial(launch_list, scores, DENSITY, x.place, after=True, known=known)
    if last in BEFORE: listed = up_to(listed, BEFORE[last])
    index, weight, count = listed()
    out = attend(x.case.q, x.case.k, x.case.v, index, weight, count) if last == "attend" else None
    return out, index, weight

def list_error(
    x: Asked,
    index: torch.Tensor,  # the list [1, H, 1, S]
    weight: torch.Tensor, # likewise
) -> float:
    "How much worse than the best the listed keys are, in standard deviations of a head. Raises `Refused`."
    guess = x.method.scores(x.case.q, x.state)[:, :, 0].double()
    if not (weight == 1).all() or (index.diff(dim=-1) <= 0).any(): raise Refused("a list has a hole or no order")
    got, best = guess.gather(-1, index[:, :, 0]).sort(-1).values, guess.topk(index.shape[-1]).values.flip(-1)
    error = float(((got - best).abs().amax(-1) / guess.std(-1)).max())
    if not error < 1e-4: raise Refused(f"a listed key is {error:.3g} deviations below the best")
    return error


def measure_method(recorder: Recorder, x: Asked):
    "Rows of the step up to each launch, and of the attention to its list and to that of each group's first head."
    case, (H, G, D), held = x.case, x.case.shape, {}
    _, index, weight = step(x)
    none = torch.zeros_like(weight)
    measure = partial(recorder.measure_row, method=type(x.method).__name__, n=case.n, index_bytes=x.state.rows.nbytes)
    checks = {"list": lambda out: list_error(x, held["index"], out), "attend": check_lists(case, index, weight)}
    def call(last):
        out, held["index"], weights = step(x, last)
        return {"score": none, "attend": out}.get(last, weights)
    for name in launches_of(x): measure(partial(call, name), checks.get(name), launch=name)
    for lists in (H, G):
        rows = index[:, ::H // lists].contiguous()
        measure(lambda: attend(case.q, case.k, case.v, rows, weight), check_lists(case, rows, weight),
                launch="attend alone", lists="a head" if lists == H else "a group",
                nbytes=2 * lists * rows.shape[-1] * D * case.k.element_size())

@torch.no_grad()
def choose(recorder):
    "Steps that choose keys."
    for case in recorder.cases((32768, 131072, 524288), 16384, 200, Shape(2, 1, 32)):
        measure_dense(recorder, case, kernels=("sdpa_cudnn", "sdpa_flash"))
        for method in METHODS: measure_method(recorder, asked(case, method))
    return dict(density=DENSITY, hidden=HIDDEN)

SAMPLES, DELTA = 256, 0.05
INDEXES = {"codes of 4 bits": dict(bits=4, page=64), "boxes of 16 keys": dict(bits=0, page=16)}

def _measure_audits(recorder, case):
    "Rows of audits with each index, of a uniform sample, and of making an index."
    q, k, v = case.q, case.k, case.v
    read = TopK(DENSITY).select(q, k)
    out = weighted_attention(q, k, v, read)
    wrong, seen = relative_error(out, case.truth[0]), torch.ones(1, case.n, dtype=torch.bool, device=q.device)
    plain = Protocol(warmup=2, runs=9) if q.is_cuda else recorder.protocol
    measure = partial(recorder.measure_row, plain=plain)
    asked = partial(audited, out, q, k, v, read, samples=SAMPLES, delta=DELTA, seed=1)
    def check(bound):
        below = float((~(bound >= wrong)).double().mean())  # what is no number is none
        if below > DELTA: raise Refused(f"{below:.1%} of the bounds are below the error")
        return below
    for name, index in INDEXES.items():
        measure(lambda: asked(**index).bound, check, what="audit", index=name, n=case.n)
        measure(lambda: key_boxes(k, seen, **index)[1], what="index", index=name, n=case.n)
    measure(lambda: asked(bound="clt").bound, what="audit", index="none: not proven", n=case.n)

@torch.no_grad()
def audit(recorder):
    "What an audit costs beside the step that it audits, by the reference."
    for case in recorder.cases((8192, 32768, 131072), 8192, 400, SMALL):
        measure_dense(recorder, case, kernels=TWO)
        _measure_audits(recorder, case)
    return dict(samples=SAMPLES, delta=DELTA, density=DENSITY)


CASES, DRAWS, SEED = ((8192, 1), (32768, 1), (131072, 1), (524288, 1), (32768, 8)), 128, 0  # (keys, sequences)

def stages(
    q: torch.Tensor,        # queries [B, H, 1, D]
    k: torch.Tensor,        # keys [B, G, N, D]
    samples: int = DRAWS,   # draws for each head
) -> dict:                  # step -> settings of `kernels.santa.launch`; the last one is what is shipped
    "Launch settings of the stages of the development."
    (B, G, n, _), shipped = k.shape, santa_kernels.launch_settings(q, k, samples)
    whole = shipped | (dict(sub=1, BS=16, gather_warps=2) if shipped["sub"] > 1 else {})
    serial, sms = whole | dict(overlap=False), device_limits(q.device.index)[0] if q.is_cuda else 2
    many = serial | dict(chunks=max(1, min(-(-n // shipped["BN"]), -(-16 * sms // (B * G)))))
    found = {"one program a head": many | dict(BS=128, gather_warps=8), "draws split over programs": many,
             "fewer chunks": serial, "launches overlapped": whole}
    return found | ({"stash of sums": shipped} if shipped["sub"] > 1 else {})

def _run(q, k, v, samples, **settings):
    return santa_kernels.launch(q, k, v, samples, "systematic", 128, SEED, None, None, None, **settings)[0]

def _measure_steps(recorder, case, samples):
    "Time every stage on a case."
    q, k, v = case.q, case.k, case.v
    reference = santa_decode(q, k, v, samples=samples, seed=SEED, backend="torch")
    check = lambda result: check_sampled(result, case, samples, reference)
    for step, settings in stages(q, k, samples).items():
        call = partial(_run, q, k, v, samples, **settings)
        recorder.measure_row(call, check, what="step", step=step, n=case.n, B=case.B, settings=settings)


def _profile(recorder, case, samples):
    "Median duration of each kernel of the shipped step, launched one after the other and overlapped."
    shipped = santa_kernels.launch_settings(case.q, case.k, samples)
    for overlap in (False, True):
        replay, _ = captured(lambda: _run(case.q, case.k, case.v, samples, **shipped | dict(overlap=overlap)))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(10):
                recorder.buffer.add_(1)
                replay()
            torch.cuda.synchronize()
        found = {}
        for event in profile.events():
            if event.name.startswith("_"): found.setdefault(event.name, []).append(event.device_time)
        recorder.rows += [dict(what="profile", overlap=overlap, kernel=name, median_us=round(median(times), 3),
                               n=case.n, B=case.B) for name, times in found.items()]


def _estimates(q, G):
    "(draws or None, share of the features that a group reads) -> estimate of q."
    B, D, R = q.shape[0], q.shape[3], q.shape[1] // G
    draw = torch.Generator(q.device).manual_seed(SEED)
    order = torch.rand(B, G, 1, D, device=q.device, generator=draw).argsort(-1)  # a share of each group's features
    found = {(None, share): q * (order < share * D).repeat_interleave(R, 1) for share in (0.125, 0.25, 0.5, 1)}
    unit = torch.eye(D, device=q.device, dtype=q.dtype).expand(B, G, -1, -1)
    for count in (1, 4, 16):  # scores with the unit vectors are the estimate itself
        drawn = dict(samples=count, mean_group=True, seed=fold_in(SEED, 0), scale=1.0)
        estimate, read = bernoulli_scores(q, unit, **drawn)
        found[count, float(read.unflatten(1, (G, -1)).any(2).double().mean())] = estimate
    return found

def _measure_features(recorder, case, samples):
    "Time steps with scores of estimates, from keys whose tokens lie side by side."
    q, k, v = case.q, case.k, case.v
    features = k.transpose(-1, -2).contiguous().transpose(-1, -2)  # [B, G, N, D], the tokens side by side
    for (count, share), estimate in _estimates(q, case.shape.G).items():
        estimate = estimate.float()
        want = santa_decode(estimate, k.float(), v.float(), samples=samples, seed=SEED, backend="torch").double()
        recorder.measure_row(partial(_run, q, features, v, samples, estimate=estimate), close_to(want, 0.5),
                             what="bernoulli", features=count, share=round(share, 4), n=case.n, B=case.B)


def _measure_appends(recorder, batches, shape, n):
    for B in batches:
        cache = torch.zeros(B, shape.G, n, shape.D, dtype=torch.bfloat16, device=recorder.device)
        new = torch.randn(B, shape.G, shape.D, device=recorder.device).bfloat16()
        at = torch.tensor([n - 7], device=recorder.device)
        beside = cache.view(B, shape.G, shape.D, n).transpose(-1, -2)
        def written(result):
            if not torch.equal(result[:, :, n - 7], new): raise Refused("the token is not there")
        for layout, keys in (("rows", cache), ("features", beside)):
            recorder.measure_row(lambda: keys.index_copy_(2, at, new[:, :, None]), written, what="append",
                                 layout=layout, n=n, B=B)

def _measure_index(recorder, batches, shape, n):
    "What it takes to put one token's keys into an index of eight bits, in a cache of fixed size."
    for B in batches:
        cache = torch.randn(B, shape.G, n, shape.D, device=recorder.device).bfloat16()
        at, index = torch.tensor([n - 7], device=recorder.device), Int8Keys()
        index.append(torch.zeros_like(cache), cache)
        index.to_static(n)
        codes, unit = quantise(cache[:, :, n - 7])
        def step():
            index.write(cache, cache, at)
            return index.unit
        def written(result):
            if not (torch.equal(index.rows[:, :, n - 7], codes) and torch.equal(result[:, :, n - 7], unit)):
                raise Refused("the token is not there")
        recorder.measure_row(step, written, what="index", n=n, B=B)

@torch.no_grad()
def santa_steps(recorder):
    "Time the steps."
    gpu, quick = recorder.gpu, recorder.quick
    shape, samples = (SHAPES["llama3"], DRAWS) if gpu else (Shape(1, 1, 16), 8)
    for n, B in ((8192 if gpu else 64, 1),) if quick else CASES:
        case = Case(shape, n, B, device=recorder.device, seed=SEED)
        _measure_steps(recorder, case, samples)
        if gpu: _profile(recorder, case, samples)
        if B == 1: _measure_features(recorder, case, samples)
        if gpu: torch.cuda.empty_cache()
    for measure in (_measure_appends, _measure_index):
        measure(recorder, (1,) if quick else (1, 8, 32), shape, 32768 if gpu else 64)
    return dict(samples=samples, seed=SEED)
