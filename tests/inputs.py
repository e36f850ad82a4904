"""What tests are given: token ids; for kernels where they run, how tensors lie in memory, and memory that nobody has
written."""
import math
import os
from typing import NamedTuple

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"

IDS = torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(1))
PAD = torch.tensor([0, 9])
PADDED = torch.stack([IDS[0], torch.cat([IDS.new_zeros(9), IDS[0, :31]])])
MASK = (torch.arange(40) >= PAD[:, None]).long()
# token 0 is embedded as 0, a tie of all keys
GREEDY = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None, suppress_tokens=[0])

LAYOUTS = {
    "plain": lambda B, G, N, D, new: new(B, G, N, D),
    "by position": lambda B, G, N, D, new: new(B, N, G, D).transpose(1, 2),
    "sliced": lambda B, G, N, D, new: new(B, G, N, D + 16)[..., 5:5 + D],
    "every second": lambda B, G, N, D, new: new(B, G, 2 * N, D)[:, :, ::2],
    "feature-major": lambda B, G, N, D, new: new(B, G, D, N).transpose(-1, -2),
}


def fast(cases, *places):
    "Cases of a test: those at these places are fast tests, all others slow ones."
    lists = [x if isinstance(x, tuple) else (x,) for x in cases]
    return [pytest.param(*x, marks=() if i in places else pytest.mark.slow) for i, x in enumerate(lists)]


class Problem(NamedTuple):
    "Queries, keys and values, and which keys a sequence sees."
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    start: torch.Tensor | None = None
    stop: torch.Tensor | None = None

    @property
    def masks(self): return dict(kv_start=self.start, kv_end=self.stop)


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


def assert_codes_close(got, want, share=1e-3, rtol=1e-6):
    """Rows of an index of four bits [..., W + 2] as the chapter holds them: codes times a step, a radius, a count.

    What is rounded, codes and the bfloat16 steps of sub-blocks, may fall on the next value either way, at most `share`
    of either; a radius may be off by `rtol` of the largest, and a count by nothing.
    """
    assert got.shape == want.shape and got.dtype == want.dtype, "another shape or dtype"
    held, width = [], got.shape[-1] - 2
    for x in got, want:
        assert x.isfinite().all(), "not finite"
        mean, radius, count = x.double().split([width, 1, 1], -1)
        step = mean.abs().amax(-1, keepdim=True) / 7
        code = mean / torch.where(step > 0, step, 1)
        assert torch.equal(step.bfloat16().double(), step) and (code - code.round()).abs().max() <= rtol, "not codes"
        held.append((code.round(), step.bfloat16().view(torch.int16).long(), radius, count))
    for what, x, y in zip(("codes", "steps"), *held):
        off = (x - y).abs()
        assert off.max() <= 1, f"{what} differ by {int(off.max())}, allowed is 1"
        assert (off > 0).double().mean() <= share, f"{int((off > 0).sum())} of {off.numel()} {what} differ"
    (radius, count), (radius_, count_) = (x[2:] for x in held)
    assert (radius - radius_).abs().max() <= rtol * radius_.max(), "other radii"
    assert torch.equal(count, count_), "other counts"
