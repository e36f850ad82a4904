"""What the tests of kernels share: where they run, how tensors lie in memory, and memory that nobody has written."""
import math
import os
from typing import NamedTuple

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"

LAYOUTS = {
    "plain": lambda B, G, N, D, new: new(B, G, N, D),
    "by position": lambda B, G, N, D, new: new(B, N, G, D).transpose(1, 2),
    "sliced": lambda B, G, N, D, new: new(B, G, N, D + 16)[..., 5:5 + D],
    "every second": lambda B, G, N, D, new: new(B, G, 2 * N, D)[:, :, ::2],
    "feature-major": lambda B, G, N, D, new: new(B, G, D, N).transpose(-1, -2),
}


class Problem(NamedTuple):
    "Queries, keys and values, and which keys a sequence sees."
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    start: torch.Tensor | None = None
    stop: torch.Tensor | None = None

    @property
    def masks(self): return dict(kv_start=self.start, kv_len=self.stop)


def kernel(test):
    "A test that launches kernels: in the interpreter, or on a GPU."
    return test if INTERPRETED else pytest.mark.gpu(pytest.mark.skipif(not GPU, reason="needs a CUDA device")(test))


def poisoned(run):
    "`run()` with every tensor that it leaves uninitialised full of NaN, or of huge numbers."
    empty = torch.empty
    def full(*shape, **kw):
        x = empty(*shape, **kw)
        if x.device.type == "meta": return x
        return x.fill_(math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", full)
        return run()
