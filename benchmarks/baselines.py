"""Dense attention as others have made it fast, asked in every way that it allows"""
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.timing import Refused, dense_bytes


@dataclass(frozen=True)
class Contender:
    "A method that the bench can measure."
    build: Callable                   # case -> {variant: call without arguments that returns [B, H, 1, D]}
    bytes: Callable = dense_bytes     # B, H, G, D, n, itemsize -> fewest bytes it must move
    samples: int | None = None        # value rows for each head; None: dense
    reference: Callable | None = None # case -> what a sampling kernel should return, or None
    compile_s: float = math.inf       # seconds that all its builds together may take


_PAGE = 16  # tokens

def _single(case, tensor_cores):
    from flashinfer import single_decode_with_kv_cache as decode
    q, k, v = case.q[0, :, 0], *(x[0] for x in case.by_position)
    return lambda: decode(q, k, v, kv_layout="NHD", use_tensor_cores=tensor_cores)[None, :, None]

def _paged(case, tensor_cores):
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    if case.n % _PAGE: raise Refused(f"pages of {_PAGE} tokens do not divide {case.n} keys")
    pages = torch.arange(case.B + 1, dtype=torch.int32) * (case.n // _PAGE)
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=case.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    numbers, last = torch.arange(int(pages[-1]), dtype=torch.int32, device=case.device), torch.full((case.B,), _PAGE)
    wrapper.plan(pages, numbers, last.int(), case.shape.H, case.shape.G, case.shape.D, _PAGE,
                 q_data_type=case.dtype, kv_data_type=case.dtype)
    q, cache = case.q[:, :, 0], tuple(x.view(-1, _PAGE, case.shape.G, case.shape.D) for x in case.by_position)
    return lambda: wrapper.run(q, cache)[:, :, None]

def _flashinfer(tensor_cores):
    def build(case):
        return {"single": _single(case, tensor_cores)} if case.B == 1 else {"paged": _paged(case, tensor_cores)}
    return build


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


def _sdpa(backend):
    def build(case):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        q, k, v, kind = case.q, case.k, case.v, getattr(SDPBackend, backend)
        rows = q.view(case.B, case.shape.G, -1, case.shape.D)
        def gqa():
            with sdpa_kernel(kind): return sdpa(q, k, v, enable_gqa=True)
        def heads_as_rows():
            with sdpa_kernel(kind): return sdpa(rows, k, v).reshape(q.shape)
        return {"enable_gqa": gqa, "heads as rows": heads_as_rows}
    return build

def _flex(case):
    from torch.nn.attention.flex_attention import flex_attention
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return {"enable_gqa": lambda: compiled(case.q, case.k, case.v, enable_gqa=True)}


DENSE = {
    "flashinfer": Contender(_flashinfer(False)), "flashinfer_tc": Contender(_flashinfer(True)),
    "sdpa_flash": Contender(_sdpa("FLASH_ATTENTION")), "sdpa_cudnn": Contender(_sdpa("CUDNN_ATTENTION")),
    "flex": Contender(_flex, compile_s=60),
}
