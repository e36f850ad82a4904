"""Dense attention as others have made it fast, on the problems of the benches"""
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparse_nb import bench
from benchmarks.timing import dense_bytes


@dataclass(frozen=True)
class Contender:
    "A method that the bench can measure."
    build: Callable                   # case -> {variant: call without arguments that returns [B, H, 1, D]}
    bytes: Callable = dense_bytes     # B, H, G, D, n, itemsize -> fewest bytes it must move
    samples: int | None = None        # value rows for each head; None: dense
    reference: Callable | None = None # case -> what a sampling kernel should return, or None
    compile_s: float = math.inf       # seconds that all its builds together may take


def build_flashinfer(
    sizes=(128, 64),                     # head sizes
    dtype: torch.dtype = torch.bfloat16, # of queries and cache
    *,
    batch: bool = True,                  # the kernels for several sequences, too?
) -> list:                               # names of the libraries that are there now
    """Compile all of FlashInfer's kernels that the bench calls, in one parallel build.

    Libraries that are there are not built again. Raises ModuleNotFoundError where FlashInfer is not installed.
    """
    from flashinfer import jit
    specs = []
    for size in sizes:
        kinds = [(jit.gen_single_decode_module, jit.gen_single_prefill_module, ())]
        if batch: kinds.append((jit.gen_batch_decode_module, jit.gen_batch_prefill_module, (torch.int32,)))
        for decode, prefill, index in kinds:
            same = (dtype,) * 3 + index + (size, size, 0, False, False)  # no position encoding, window or soft cap
            specs += [decode(*same), prefill("fa2", *same, False)]       # the latter for decoding by tensor cores
    jit.build_jit_specs(specs)
    return [spec.name for spec in specs]


def _flashinfer(name):
    "By the case's copy of the cache in FlashInfer's order, of which all builds take the same."
    return lambda case: bench.DENSE[name](case.q, *(x.transpose(1, 2) for x in case.by_position))

def _sdpa(name): return lambda case: bench.DENSE[name](case.q, case.k, case.v)

def _flex(case):
    from torch.nn.attention.flex_attention import flex_attention
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return {"enable_gqa": lambda: compiled(case.q, case.k, case.v, enable_gqa=True)}


def _flash3(case):
    "FlashAttention-3, as vLLM brings it, over keys that lie side by side and over pages."
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    (k, v), (B, n, page) = case.by_position, (case.B, case.n, 256)
    q, starts = case.q[:, :, 0], torch.arange(B + 1, dtype=torch.int32, device=case.device)
    same = dict(max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=n, causal=True, fa_version=3)
    paged = dict(seqused_k=torch.full_like(starts[1:], n), block_table=torch.arange(
        B * n // page, dtype=torch.int32, device=case.device).view(B, -1))
    def call(*size, **more):
        out = flash_attn_varlen_func(q, *(x.view(*size, *x.shape[2:]) for x in (k, v)), **same, **more)
        return out[:, :, None]
    return {"pages of 256": lambda: call(-1, page, **paged),
            "side by side": lambda: call(-1, cu_seqlens_k=starts * n)}


DENSE = {name: Contender(_flashinfer(name)) for name in ("flashinfer", "flashinfer_tc")}
DENSE |= {name: Contender(_sdpa(name)) for name in ("sdpa_flash", "sdpa_cudnn")}
DENSE |= {"flex": Contender(_flex, compile_s=60)}
DENSE |= {"flash3": Contender(_flash3)}
