"""A copy of all keys by the copy engine, against rows read by a kernel, from one in a thousand to one in three"""

import torch

from sparse_nb.bench import SHAPES, Protocol, Refused, Shape, cold_times, quartiles
from sparse_nb.kernels.host import rows
from benchmarks.recorder import to_host


KEYS, DENSITIES, RUNS = 131072, (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), 20

def _orders(keys, count, heads, device, generator):
    "Row numbers [1, heads, count] in three orders."
    random = torch.rand(1, heads, keys, device=device, generator=generator).argsort(-1)[..., :count]
    last = torch.arange(keys - count, keys, device=device).expand(1, heads, -1).contiguous()
    return {"random": random, "sorted": random.sort(-1).values, "neighbours": last}

def _measure(recorder, protocol, call, want, **row):
    "Time a call that brings `want` over."
    times = quartiles(cold_times(call, protocol, device=recorder.device))
    if not torch.equal(call().cpu(), want): raise Refused(f"{row}: the rows differ")
    recorder.rows.append(row | dict(bytes=want.nbytes, **times._asdict(), checked=True))
    recorder.say(f"{row}: {times.median_us:.0f} us, {want.nbytes / times.median_us / 1000:.1f} GB/s")

def host(recorder):
    "Time copies and rows from host memory."
    device, quick, keys = recorder.device, recorder.quick, 1000 if recorder.quick else KEYS
    shape, protocol = SHAPES["llama3"] if device == "cuda" else Shape(2, 1, 16), Protocol(3, 2 if quick else RUNS, 0)
    (x,) = to_host(torch.randn(1, shape.G, keys, shape.D, dtype=torch.bfloat16, device=device))
    _measure(recorder, protocol, lambda: x.to(device, non_blocking=True, copy=True), x, what="copy")
    generator = torch.Generator(device).manual_seed(0)
    for density in DENSITIES[-2:] if quick else DENSITIES:
        for order, index in _orders(keys, round(density * keys), shape.G, device, generator).items():
            want = x.gather(2, index.cpu()[..., None].expand(-1, -1, -1, shape.D))
            _measure(recorder, protocol, lambda: rows(x, index), want, what="rows", density=density, order=order)
    return dict(keys=keys, mode="eager", l2="warm", runs=protocol.runs)
