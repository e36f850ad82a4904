"""The quicker interpreter of the tests computes what Triton's does."""
import importlib.util

import pytest
import torch

import interpreter
from sparse_nb.records.device import kernel_device


def before_and_after():
    "Outputs and drawn keys by Triton's own interpreter, and by the quicker one."
    kernel_device()
    from sparse_nb.kernels.santa import decode
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, n, 24, generator=generator).bfloat16() for heads, n in ((6, 1), (2, 70), (2, 70)))
    stop = torch.tensor([70, 41], dtype=torch.int32)
    run = lambda: [x for scheme in ("systematic", "proportional")
                   for x in decode(q, k, v, samples=8, scheme=scheme, tile=16, seed=3, kv_len=stop, return_index=True)]
    plain = run()
    interpreter.patch()
    return [torch.equal(a, b) for a, b in zip(plain, run())]


@pytest.mark.skipif(torch.cuda.is_available() or not importlib.util.find_spec("triton"), reason="the interpreter's")
def test_the_quicker_interpreter_is_the_interpreter(forked):
    assert forked(before_and_after) == [True] * 4
