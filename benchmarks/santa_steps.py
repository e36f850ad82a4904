"""What each step of the development was worth, where the time goes, and what a feature-major cache costs"""
from functools import partial
from statistics import median

import torch

from sparse_nb.bench import SHAPES, Shape, captured
from benchmarks.timing import Case, Refused, check_sampled, close_to
from sparse_nb.core.streams import fold_in
from sparse_nb.kernels.common import device_limits
from sparse_nb.kernels.santa import launch, launch_settings
from sparse_nb.santa import bernoulli_scores, santa_decode
from sparse_nb.santa_keys import Int8Keys, quantise


CASES, SAMPLES, SEED = ((8192, 1), (32768, 1), (131072, 1), (524288, 1), (32768, 8)), 128, 0  # (keys, sequences)

def steps(
    q: torch.Tensor,        # queries [B, H, 1, D]
    k: torch.Tensor,        # keys [B, G, N, D]
    samples: int = SAMPLES, # draws for each head
) -> dict:                  # step -> settings of `sparse_nb.kernels.santa.launch`; the last one is what is shipped
    "Launch settings of the stages of the development."
    (B, G, n, _), shipped = k.shape, launch_settings(q, k, samples)
    whole = shipped | (dict(sub=1, BS=16, gather_warps=2) if shipped["sub"] > 1 else {})
    serial, sms = whole | dict(overlap=False), device_limits(q.device.index)[0] if q.is_cuda else 2
    many = serial | dict(chunks=max(1, min(-(-n // shipped["BN"]), -(-16 * sms // (B * G)))))
    found = {"one program a head": many | dict(BS=128, gather_warps=8), "draws split over programs": many,
             "fewer chunks": serial, "launches overlapped": whole}
    return found | ({"stash of sums": shipped} if shipped["sub"] > 1 else {})

def _run(q, k, v, samples, **settings):
    return launch(q, k, v, samples, "systematic", 128, SEED, None, None, None, **settings)[0]

def _measure_steps(recorder, case, samples):
    "Time every stage on a case."
    q, k, v = case.q, case.k, case.v
    reference = santa_decode(q, k, v, samples=samples, seed=SEED, backend="torch")
    check = lambda result: check_sampled(result, case, samples, reference)
    for step, settings in steps(q, k, samples).items():
        call = partial(_run, q, k, v, samples, **settings)
        recorder.measure_row(call, check, what="step", step=step, n=case.n, B=case.B, settings=settings)


def _profile(recorder, case, samples):
    "Median duration of each kernel of the shipped step, launched one after the other and overlapped."
    shipped = launch_settings(case.q, case.k, samples)
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
        index.fix(n)
        codes, unit = quantise(cache[:, :, n - 7])
        def step():
            index.put(cache, cache, at)
            return index.unit
        def written(result):
            if not (torch.equal(index.rows[:, :, n - 7], codes) and torch.equal(result[:, :, n - 7], unit)):
                raise Refused("the token is not there")
        recorder.measure_row(step, written, what="index", n=n, B=B)

@torch.no_grad()
def santa_steps(recorder):
    "Time the steps."
    gpu, quick = recorder.gpu, recorder.quick
    shape, samples = (SHAPES["llama3"], SAMPLES) if gpu else (Shape(1, 1, 16), 8)
    for n, B in ((8192 if gpu else 64, 1),) if quick else CASES:
        case = Case(shape, n, B, device=recorder.device, seed=SEED)
        _measure_steps(recorder, case, samples)
        if gpu: _profile(recorder, case, samples)
        if B == 1: _measure_features(recorder, case, samples)
        if gpu: torch.cuda.empty_cache()
    for measure in (_measure_appends, _measure_index):
        measure(recorder, (1,) if quick else (1, 8, 32), shape, 32768 if gpu else 64)
    return dict(samples=samples, seed=SEED)
