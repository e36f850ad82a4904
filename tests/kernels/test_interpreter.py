"""The quicker interpreter of the tests computes what Triton's does."""
import importlib.util

import pytest
import torch

import interpreter
from sparse_nb.device import kernel_device


def mixed(x_ptr, out_ptr, n):
    "Operands of all kinds: tensors of other types and shapes, and numbers that are equal but not of one type"
    row, column = tl.program_id(0) + tl.arange(0, 4)[:, None], tl.arange(0, 16)[None]
    at = row * 16 + column
    x = tl.load(x_ptr + at, at < n, 0)
    word = (at.to(tl.uint32) * 2654435769 ^ n) >> 7
    share = (at * 100000000 // 3 + at * 100000000.0 / 3) * ((at > 3) & True) - (at & 1)
    half = x * 2 + (x * 2.0 - 1) / (row + 1) - 1.0 / (1 + x * x)
    out = tl.where(column + row < n // 2, half + share, word) + tl.minimum(at, 5) * -0.0
    tl.store(out_ptr + at, out - 1, at < n)


def before_and_after():
    "Outputs of a kernel and outputs and drawn keys of a method by Triton's own interpreter, and by the quicker one."
    kernel_device()
    global tl
    import triton
    import triton.language as tl
    from sparse_nb.kernels.santa import decode

    def mixture(kind):
        x, out = torch.randn(9 * 16, generator=torch.Generator().manual_seed(2)).to(kind), torch.zeros(2, 9 * 16)
        for row in out: triton.jit(mixed)[(6,)](x, row, 9 * 16 - 3)
        return out
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, n, 24, generator=generator).bfloat16() for heads, n in ((6, 1), (2, 70), (2, 70)))
    stop = torch.tensor([70, 41], dtype=torch.int32)
    run = lambda: [mixture(kind) for kind in (torch.float16, torch.float32)] + [
        x for scheme in ("systematic", "proportional")
        for x in decode(q, k, v, samples=8, scheme=scheme, tile=16, seed=3, kv_end=stop, return_index=True)]
    plain = run()
    interpreter.patch()
    return [torch.equal(a, b) for a, b in zip(plain, run())]


@pytest.mark.skipif(torch.cuda.is_available() or not importlib.util.find_spec("triton"), reason="the interpreter's")
def test_the_quicker_interpreter_is_the_interpreter(forked):
    assert forked(before_and_after) == [True] * 6
