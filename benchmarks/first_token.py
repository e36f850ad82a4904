"""How long a whole model takes to read a prompt, exactly, by a window, and with the window's corrections"""
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparse_nb.bench import quartiles
from sparse_nb.core.methods import Method, Streaming
from sparse_nb.delta import Delta
from benchmarks.generate import LLAMA, TINY, random_model
from benchmarks.machine import machine
from benchmarks.recorder import need_gpu, write_record
from sparse_nb.sketch_walk import SketchWalk


@dataclass(frozen=True)
class Nothing(Method):
    "Attention that returns its queries."
    decode = None

    def prefill(self, q, k, v, *, seed=None, scale=None, kv_start=None):
        "The queries."
        return q

def reading_ways(window: int = 2048, gamma: int = 64, tail: int = 128, densities: Sequence = (0.1, 0.2)) -> dict:
    "What is compared."
    def delta(correction): return Delta(window=window, gamma=gamma, tail=tail, correction=correction)
    return {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
            "streaming": Streaming(sinks=4, window=window), "Eq. 6": delta("delta"), "tangent": delta("tangent"),
            **{f"Sketch&Walk {x:.0%}": SketchWalk(density=x) for x in densities}, "no attention": Nothing()}

@torch.no_grad()
def time_first_token(
    model,                   # a transformers decoder
    input_ids: torch.Tensor, # prompt [1, N]
    way,                     # one of `reading_ways`
) -> tuple:                  # microseconds, number of the token
    "Read a prompt in one piece, and take the time until the first token is known."
    from sparse_nb.hf import sparsify
    with sdpa_kernel(way) if isinstance(way, SDPBackend) else sparsify(model, prefill=way):
        if input_ids.is_cuda: torch.cuda.synchronize()
        start = time.perf_counter()
        token = int(model(input_ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return 1e6 * (time.perf_counter() - start), token


LENGTHS = (32768, 3), (131072, 1)  # tokens of the prompt, runs of each way, by turns

@torch.no_grad()
def bench_first_token(out, *, lengths=LENGTHS, shape: Mapping = LLAMA, device: str = "cuda", ways: Mapping | None =
                      None, limit_s: float = 150, command: str = "", say: Callable = print) -> Path:
    "Measure every way at every length and write the record. Raises ValueError for device \"cuda\" without one."
    if device == "cuda": need_gpu("first_token")
    start, ways, rows = time.perf_counter(), reading_ways() if ways is None else ways, []
    model = random_model(shape, device)
    meta = machine(device) | dict(shape=dict(shape), dtype="bfloat16", seed=0, command=command,
                                  weights_bytes=sum(p.nbytes for p in model.parameters()),
                                  methods={name: m.to_json() for name, m in ways.items() if isinstance(m, Method)})
    say(f"{meta['weights_bytes'] / 1e9:.1f} GB of weights after {time.perf_counter() - start:.0f} s")
    for n, runs in lengths:
        if time.perf_counter() - start > limit_s:
            say(f"n={n}: not measured, the time is over")
            continue
        ids = torch.randint(1, shape["vocab_size"], (1, n), generator=torch.Generator().manual_seed(0)).to(device)
        warm = ways if not rows else ["no attention"]  # kernels are compiled at the first length; memory is taken anew
        for name in warm: time_first_token(model, ids, ways[name])
        times = {name: [] for name in ways}
        for _ in range(runs):
            for name, method in ways.items(): times[name].append(time_first_token(model, ids, method)[0])
        for name, found in times.items():
            rows.append(dict(way=name, n=n, runs=runs) | quartiles(found)._asdict())
            say(f"n={n}, {name}: {rows[-1]['median_us'] / 1e6:.2f} s, {time.perf_counter() - start:.0f} s")
        write_record(out, meta, rows)
    return Path(out)

def first_token(recorder):
    "A whole model's first token in every way; a tiny model in the quick form."
    small, about = {}, dict(command=recorder.command, say=recorder.say)
    if recorder.quick: small = dict(lengths=((300, 2), (310, 1)), shape=TINY, device=recorder.device,
                                    ways=reading_ways(32, 8, 8))
    if recorder.quick and not recorder.gpu: del small["ways"]["cuDNN"]
    bench_first_token(recorder.out, **small, **about)
