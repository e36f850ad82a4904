"""The Triton kernels: against float64 for every type, size and layout, against the reference's streams, on the CPU and
on a GPU.

`pytest -m gpu -k test_kernels` runs the sweep on a GPU (compiling dominates: -n 12 helps where pytest-xdist is
installed);
without one, the same tests run on small problems in Triton's interpreter, in a process of their own.

What is held against float64: the drawn key's interval of running sums must hold the threshold of its slot, up to what
the arithmetic
rounds away, and the output must be the mean of the drawn rows. Statistical checks use fixed seeds; each accepts a
correct kernel
in all but one of 1 / ALARM seeds.
"""
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import NormalDist

import pytest
import scipy.stats
import torch

from covering import cases_of, covering
from inputs import DEVICE, GPU, INTERPRETED, LAYOUTS, Problem, kernel, poisoned

triton = pytest.importorskip("triton")
tl = triton.language

from sparse_nb.attention import (Selection, SoftmaxState, masked_scores, assert_close, attention, fold_in,
                                 from_first_visible, philox, merge_states, select_sinks_window, select_uniform,
                                 visible_range, weighted_attention, weighted_state)
from sparse_nb import vattention
from sparse_nb.core import bounds
from sparse_nb.core.selection import exponential_terms, take_rows
from sparse_nb.bench import captured
from sparse_nb.kernels import gather, host
from sparse_nb.kernels.common import compiled_usage, merge_kernel
from sparse_nb.kernels import santa as kernels
from sparse_nb.kernels import vattention as steps
from sparse_nb.kernels.santa import SCHEMES, decode, put_codes
from sparse_nb.methods.quest import Quest
from sparse_nb.methods.vattention.facts import chance_of_facts, delta_of_draws
from sparse_nb.methods.vattention.order import cauchy_schwarz, longest_of
from benchmarks.recorder import run_record
from sparse_nb.santa import largest_remainder, santa_decode, select_santa
from sparse_nb.santa_keys import Int8Keys, quantise

ALARM = 1e-8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = {BF16, FP16}


def sizes(gpu, interpreted): return interpreted if INTERPRETED else gpu


LAYOUTS = LAYOUTS | {"one for all": lambda B, G, N, D, new: new(1, 1, N, D).expand(B, G, -1, -1)}


def problem(B, G, R, N, D, dtype, *, spread=1.0, layout="plain", ragged=False):
    "Gaussian q, k, v; ragged: left padding and different lengths, NaN in what is hidden."
    generator = torch.Generator(DEVICE).manual_seed(B + 10 * G + 100 * R + N + 7 * D)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)
    q = (spread * torch.randn(B, G * R, 1, D, device=DEVICE, generator=generator)).to(dtype)
    k, v = (LAYOUTS[layout](B, G, N, D, new) for _ in range(2))
    if not ragged: return Problem(q, k, v)
    start = torch.tensor([b * N // 5 for b in range(B)], device=DEVICE)
    stop = torch.tensor([N - b * N // 7 for b in range(B)], dtype=torch.int32, device=DEVICE)
    for x in (k, v):
        for b in range(B): x[b, :, :start[b]] = x[b, :, stop[b]:] = math.nan
    return Problem(q, k, v, start, stop)


def drawn(p, **kw): return poisoned(lambda: decode(p.q, p.k, p.v, **p.masks, **kw, return_index=True))


def streams(B, H, seed, offset):
    "The reference's random numbers [B, H, len(offset)]."
    row, head = torch.arange(B, device=DEVICE).view(-1, 1, 1), torch.arange(H, device=DEVICE).view(-1, 1)
    return philox(fold_in(seed, row, head, 0), offset).double()


def audit(p, out, index, *, samples, scheme="systematic", tile=128, seed=0, scores_of=None, flips=None):
    "Hold output and drawn keys against float64. `flips`: share of the slots that may hold another key than in float64."
    q, k, v = p.q, p.k, p.v
    (B, H, *_), (G, N) = q.shape, k.shape[1:3]
    first, end = visible_range(q, k, **p.masks)
    # [B, 1, N]
    hidden = (torch.arange(N, device=DEVICE) < first) | (torch.arange(N, device=DEVICE) >= end)
    keys = k.double().masked_fill(hidden[..., None], 0) if p.start is not None else k.double()
    # [B, H, 1, N]
    scores = masked_scores((q if scores_of is None else scores_of).double(), keys, 0, first, end, None)
    largest = float(scores[scores.isfinite()].abs().max())
    tolerance = (4e-4 if q.dtype in HALF else 2e-5) + 4e-6 * largest
    assert index.shape[:3] == (B, H, 1) and index.dtype == torch.int32
    index, first, end = index[:, :, 0].long(), first, end
    used = index >= 0
    i = torch.where(used, index, first)
    assert ((i >= first) & (i < end)).all(), "a key outside the visible range"
    # [B, H, N]
    weights = scores[:, :, 0].softmax(-1)
    if scheme in ("proportional", "flash"):
        # [B, H, T, tile]
        cut = from_first_visible(scores, first, end, tile)[:, :, 0]
        # [B, H, T]
        mass = cut.flatten(-2).softmax(-1).view(cut.shape).sum(-1)
        inner = (cut - cut.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
        share, steps = inner / inner.sum(-1, keepdim=True).clamp(min=1e-300), inner.cumsum(-1) / inner.sum(-1,
            keepdim=True).clamp(min=1e-300)
        t = (i - first) // tile
        count = torch.zeros_like(mass, dtype=torch.int64).scatter_add_(-1, t, used.long())
        if scheme == "proportional":
            assert used.all() and index.shape[-1] == samples, "not S keys"
            assert ((count - samples * mass).abs() <= 1 + samples
                    * tolerance).all(), "a budget that is not a neighbour of its quota"
            quota, want = samples * mass, largest_remainder(mass, samples)
            fraction = quota - quota.floor()
            # the smallest that was rounded up
            cut_off = torch.where(want > quota, fraction, 2).amin(-1, keepdim=True)
            apart = torch.stack([(fraction - cut_off).abs(), fraction, 1 - fraction]).amin(0)
            assert (apart <= (1e-4 if q.dtype in HALF else 1e-6) * quota.amax(-1, keepdim=True)
                    + 1e-5)[count != want].all(), "a budget that rounding does not explain"
        else:
            # [B, 1, 1]
            tiles = torch.div(end - first + tile - 1, tile, rounding_mode="floor")
            each = torch.div(2 * samples + tiles, 2 * tiles, rounding_mode="floor").clamp(min=1)
            assert (count == torch.where(torch.arange(count.shape[-1], device=DEVICE) < tiles, each,
                                         0)).all(), "not round(S / T) keys in each tile"
        assert (t.diff(dim=-1) >= 0)[used[..., 1:]].all(), "tiles out of order"
        rank = torch.arange(index.shape[-1], device=DEVICE) - (count.cumsum(-1) - count).gather(-1, t)
        threshold = (rank + streams(B, H, seed, torch.arange(count.shape[-1],
            device=DEVICE)).gather(-1, t)) / count.gather(-1, t).clamp(min=1)
        place = (i - first - t * tile)
        at = lambda x: x.gather(2, t[..., None].expand(-1, -1, -1, x.shape[-1]))
        w, cum = (at(x).gather(-1, place[..., None]).squeeze(-1) for x in (share, steps))
        used &= mass.gather(-1, t) > 0
        want = first + t * tile + torch.searchsorted(at(steps).contiguous(), threshold[..., None].contiguous(),
                                                     right=True).squeeze(-1)
    else:
        assert used.all() and index.shape[-1] == samples, "not S keys"
        j = torch.arange(samples, device=DEVICE)
        x = streams(B, H, seed, j * (scheme != "systematic"))
        threshold = x if scheme == "iid" else (j + x) / samples
        steps = weights.cumsum(-1)
        w, cum = weights.gather(-1, i), steps.gather(-1, i)
        want = torch.searchsorted(steps, threshold.contiguous() * steps[..., -1:], right=True)
    assert (w > 0)[used].all(), "a key without mass"
    off = torch.maximum(cum - w - threshold, threshold - cum)[used]
    most = float(off.max())
    assert most <= tolerance, f"a threshold lies {most:.2g} beside the interval of its key, allowed is {tolerance:.2g}"
    flipped = float((want != i)[used].double().mean())
    assert flipped <= (0.03 + 0.3 * (N / 2**20) ** 0.5 if flips is None
                       else flips), f"{flipped:.1%} of the keys are not those of float64"
    row, group = torch.arange(B, device=DEVICE).view(-1, 1, 1), (torch.arange(H, device=DEVICE) // (H // G)).view(-1, 1)
    values = v[row, group, i].double()
    assert out.shape == q.shape and out.dtype == q.dtype
    cut = INTERPRETED and q.dtype == BF16  # Triton's interpreter cuts bfloat16 off where a GPU rounds
    rounding = torch.finfo(q.dtype).eps / (1 if cut else 2) + 1e-5
    if scheme == "flash":
        mean, rounding = ((mass / count.clamp(min=1)).gather(-1, t)
                          * used)[..., None].mul(values).sum(-2), rounding + tolerance
    else: mean = values.mean(-2)
    assert_close(out[:, :, 0], mean, rtol=rounding, name="output")


def check(p, *, samples, scores_of=None, flips=None, **kw):
    "Run and audit; the output must not depend on whether the keys are asked for."
    extra = {} if scores_of is None else dict(estimate=scores_of)
    out, index = drawn(p, samples=samples, **kw, **extra)
    audit(p, out, index, samples=samples, scores_of=scores_of, flips=flips, **kw)
    return out, index


# every type and size

@kernel
@pytest.mark.parametrize("dtype, D, R",
                         sizes([(dtype, D, R) for dtype in (BF16, FP16, FP32) for D in (64, 80, 96, 128, 256)
                                for R in (1, 3, 4, 8)],
                                              [(BF16, 64, 3), (FP16, 80, 1), (FP32, 96, 2), (BF16, 128, 4)]), ids=str)
def test_types_and_sizes(dtype, D, R):
    B, N, samples = sizes((3, 1000, 128), (2, 150, 16))
    check(problem(B, sizes(2, 1), R, N, D, dtype, ragged=True), samples=samples, seed=D + R)


@kernel
@pytest.mark.parametrize("N, dtype, D, R, G", sizes(
    [(N, dtype, D, R, 2) for N in (1, 63, 8192) for dtype, D, R in ((BF16, 128, 4), (FP32, 64, 3), (FP16, 96, 1))]
    + [(131072, BF16, 128, 4, 2), (131072, FP16, 80, 3, 1), (131072, FP32, 64, 1, 1), (131072, BF16, 256, 8, 1)]
    + [(1048576, BF16, 128, 4, 1), (1048576, FP32, 64, 3, 1), (1048576, FP16, 64, 8, 1), (1048576, BF16, 256, 1, 1)],
    [(1, BF16, 64, 2, 1), (63, FP32, 16, 1, 1), (64, FP16, 16, 3, 1)]), ids=str)
@pytest.mark.parametrize("spread", sizes([1.0, 4.0], [2.0]))
def test_lengths(N, dtype, D, R, G, spread):
    check(problem(1, G, R, N, D, dtype, spread=spread), samples=sizes(128, 24), seed=N)


@kernel
@pytest.mark.parametrize("N, dtype, D", sizes([(1048576, BF16, 128), (131072, BF16, 64)], []))
@pytest.mark.parametrize("scheme", ["proportional", "flash"])
def test_lengths_of_tiled_schemes(N, dtype, D, scheme):
    check(problem(1, 1, 4, N, D, dtype, ragged=True), samples=2048 if scheme == "flash" else 128, scheme=scheme, seed=N)


@kernel
@pytest.mark.parametrize("dtype, D, R, tile",
                         sizes([(BF16, 128, 4, 64), (FP16, 80, 3, 128), (FP32, 64, 1, 16), (BF16, 256, 8, 32),
                                (FP32, 96, 4, 256)], [(BF16, 16, 3, 16), (FP32, 24, 1, 32)]), ids=str)
@pytest.mark.parametrize("scheme", [x for x in SCHEMES if x != "systematic"])
def test_schemes(dtype, D, R, tile, scheme):
    B, N, samples = sizes((3, 1000, 128), (2, 90, 16))
    check(problem(B, 1, R, N, D, dtype, ragged=True), samples=samples, scheme=scheme, tile=tile, seed=5)


@kernel
@pytest.mark.parametrize("scheme", sizes(SCHEMES, ("systematic",)))
@pytest.mark.parametrize("samples", sizes([1, 2, 7, 1000, 4096], [1, 21]))
def test_numbers_of_samples(samples, scheme):
    check(problem(1, 1, 2, sizes(1000, 80), sizes(64, 16), BF16), samples=samples, scheme=scheme, tile=64, seed=samples)


@kernel
@pytest.mark.parametrize("sub", [8, 16])
@pytest.mark.parametrize("dtype, D, R, layout",
                         sizes([(BF16, 128, 4, "plain"), (FP32, 80, 3, "plain"), (FP16, 64, 1, "by position")],
                               [(BF16, 24, 2, "by position")]), ids=str)
def test_stash_of_sums(dtype, D, R, layout, sub):
    p, samples = problem(sizes(3, 2), 1, R, sizes(1000, 150), D, dtype, layout=layout, ragged=True), sizes(128, 16)
    out, index = poisoned(lambda: kernels.launch(p.q, p.k, p.v, samples, "systematic", 128, 3, None, p.start, p.stop,
                                                 return_index=True, sub=sub))
    audit(p, out, index, samples=samples, seed=3)


@kernel
def test_a_sum_that_was_rounded_up_gives_its_last_key():
    "The last draws lie behind the terms of its two keys; hidden neighbours, of any score, are none of them."
    q, k, v = (torch.zeros(1, 1, n, 16, device=DEVICE, dtype=FP16) for n in (1, 20, 20))
    q[..., 0], k[..., 0] = 1, 20
    k[:, :, 0, 0], k[:, :, 1, 0], v[:, :, 1] = -20, -20 + math.log(1.2 * 2**-11), 1
    stop = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    out, index = poisoned(lambda: kernels.launch(q, k, v, 4096, "systematic", 128, 3, 1.0, None, stop,
                                                 return_index=True, sub=8, BS=128))
    assert index.min() == 0 and index.max() == 1 and int(index.sum()) in (3, 4, 5)
    assert_close(out, torch.full_like(out, float(index.double().mean())), rtol=1e-3)


@kernel
@pytest.mark.parametrize("scheme, dtype", [("systematic", BF16), ("iid", FP32)], ids=str)
def test_many_heads(scheme, dtype):
    "Then one program makes up to 128 draws of a head."
    p = problem(2, 11, 3, sizes(1000, 150), sizes(128, 16), dtype, ragged=True)
    assert kernels.launch_settings(p.q, p.k, 200)["BS"] == 128 > kernels.launch_settings(p.q[:1], p.k[:1], 200)["BS"]
    for samples in (128, 200): check(p, samples=samples, scheme=scheme, seed=4)


@pytest.mark.parametrize("B, N, dtype, keep", (
    (1, 131072, BF16, True), (1, 131072, FP32, False), (8, 32768, BF16, False), (8, 8192, BF16, True),
    (1, 524288, BF16, True)))
def test_the_stash_is_kept_while_it_is_a_small_part_of_the_cache(B, N, dtype, keep):
    "Of 50 MB where no GPU says how large its own is; at 524,288 keys sums are stashed."
    q, k = (torch.empty(B, h, n, 128, dtype=dtype, device="meta") for h, n in ((32, 1), (8, N)))
    assert kernels.launch_settings(q, k, 128)["keep"] == keep


@kernel
@pytest.mark.parametrize("D", [1, 8, 15])
def test_small_heads(D): check(problem(1, 1, 2, 100, D, FP32), samples=16, seed=1)


# layouts

@kernel
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "plain"])
@pytest.mark.parametrize("scheme", sizes(["systematic", "flash"], ["systematic"]))
def test_layouts(layout, scheme):
    shared = layout == "one for all"  # hidden keys of one row would be those of all
    check(problem(2, 2, 2, sizes(1000, 70), sizes(128, 16), BF16, layout=layout, ragged=not shared),
          samples=sizes(128, 8), scheme=scheme, seed=2)


@kernel
@pytest.mark.parametrize("scheme", ["systematic", "flash"])
def test_features_that_lie_far_apart(scheme):
    "Offsets of features beyond 2**31."
    p, far = problem(1, 1, 2, 40, 16, BF16), 2**31 // 15 + 64
    room = torch.empty(15 * far + 200, dtype=BF16, device=DEVICE)  # of which few pages are touched
    k, v = (room[at:].as_strided((1, 1, 40, 16), (40, 40, 1, far)).copy_(x) for at, x in ((0, p.k), (100, p.v)))
    check(p._replace(k=k, v=v), samples=16, scheme=scheme, tile=16, seed=1)


@kernel
def test_strides_of_q():
    p = problem(2, 1, 3, sizes(1000, 60), 16, FP32)
    wide = torch.randn(2, 1, 3, 33, device=DEVICE)
    wide[:, 0, :, 1::2] = p.q[:, :, 0]
    q = wide[:, 0, :, None, 1::2]
    assert torch.equal(q, p.q) and q.stride(-1) == 2
    check(p._replace(q=q), samples=16, seed=1)


# scores

def spoilt(p, row, group, how):
    "The problem with scores of one key/value head spoilt: every score NaN, every score -inf, one score +inf."
    q, k = p.q.clone(), p.k.clone()
    q[..., 0] = 1
    if how == "nan": k[row, group, 3, 1] = math.nan
    elif how == "all -inf": k[row, group, :, 0] = -math.inf
    else: k[row, group, 3, 0] = math.inf
    return p._replace(q=q, k=k)


@kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("how", sizes(["nan", "all -inf", "+inf"], ["nan", "all -inf"]))
def test_spoilt_head_gives_nan_and_only_there(scheme, how):
    p = problem(2, 2, sizes(2, 1), sizes(1000, 40), 16, FP32)
    whole, bad = (drawn(x, samples=8, scheme=scheme, tile=16, seed=1)
                  for x in (spoilt(p, 0, 0, "nothing")._replace(k=p.k), spoilt(p, 1, 0, how)))
    R = p.q.shape[1] // 2
    assert bad[0][1, :R].isnan().all()
    for a, b in zip(bad, whole):
        a, b = a.clone(), b.clone()
        a[1, :R] = b[1, :R] = 0
        assert torch.equal(a, b)


@kernel
@pytest.mark.parametrize("scheme", sizes(SCHEMES, ("systematic", "proportional")))
@pytest.mark.parametrize("kind", ["flat", "peaked", "spiked", "-inf"])
def test_shapes_of_scores(scheme, kind):
    p = problem(2, 1, 3, sizes(1000, 50), sizes(64, 16), sizes(BF16, FP32), spread=0.0 if kind == "flat" else 12.0
                if kind == "peaked" else 1.0, ragged=True)
    q, k = p.q, p.k
    if kind == "spiked":
        q[..., 0] = 1
        k[:, :, 27, 0] = 400.0  # one score of 50 or more
    if kind == "-inf":
        q[..., 0] = 1
        k[:, :, 12:27, 0], k[:, :, 33, 0] = -math.inf, -1e38
    check(p, samples=sizes(128, 16), scheme=scheme, tile=16, seed=9)


# the feature pass

@kernel
@pytest.mark.parametrize("scheme", sizes(["systematic", "proportional"], ["systematic"]))
@pytest.mark.parametrize("layout", ["feature-major", "plain"])
@pytest.mark.parametrize("dtype, D, R", sizes([(BF16, 128, 4), (FP32, 80, 3), (FP16, 64, 1)], [(FP32, 24, 3)]), ids=str)
def test_features(dtype, D, R, layout, scheme):
    B, G = sizes(3, 2), 2
    p = problem(B, G, R, sizes(1000, 70), D, dtype, layout=layout, ragged=True)
    generator = torch.Generator(DEVICE).manual_seed(1)
    keep = torch.rand(B, G, 1, 1, D, device=DEVICE, generator=generator) < 0.3
    estimate = (torch.randn(B, G, R, 1, D, device=DEVICE, generator=generator) * keep).flatten(1, 2)
    # a feature that no head of the group drew must not be read
    k = torch.where(keep[:, :, 0].expand(p.k.shape), p.k, math.nan)
    k = k.transpose(-1, -2).contiguous().transpose(-1, -2) if layout == "feature-major" else k
    out, index = drawn(p._replace(k=k), samples=sizes(128, 16), scheme=scheme, seed=4, estimate=estimate)
    audit(p, out, index, samples=sizes(128, 16), scheme=scheme, seed=4, scores_of=estimate)


@kernel
def test_estimate_of_nothing_is_uniform():
    check(problem(1, 1, 2, 90, 16, FP32), samples=12, scores_of=torch.zeros(1, 2, 1, 16, device=DEVICE), seed=4)


# streams and chance

@kernel
@pytest.mark.parametrize("scheme", sizes(SCHEMES, ("iid", "proportional", "flash")))
def test_deterministic_and_every_head_has_its_stream(scheme):
    p = problem(*sizes((3, 2, 2, 1000), (2, 1, 2, 60)), 16, FP32, layout="one for all")
    p = p._replace(q=p.q[:1, :1].expand(p.q.shape))
    heads = fold_in(1, torch.arange(p.q.shape[0], device=DEVICE)[:, None], torch.arange(p.q.shape[1], device=DEVICE))
    strided = torch.stack([heads, heads + 1], -1)[..., 0]
    runs = [drawn(p, samples=16, scheme=scheme, tile=32, seed=seed) for seed in (2**62 + 5, 2**62 + 5, 1,
        torch.tensor(1, device=DEVICE), heads, strided)]
    for a, b in (runs[:2], runs[2:4], runs[2::2], runs[2::3]): assert all(map(torch.equal, a, b))
    row = drawn(p._replace(q=p.q[1:], k=p.k[1:], v=p.v[1:]), samples=16, scheme=scheme, tile=32, seed=heads[1:])
    assert torch.equal(row[1], runs[2][1][1:])
    want, got = select_santa(p.q, p.k, samples=16, scheme=scheme, tile=32, seed=heads), runs[4][1]
    used = want.weight > 0
    # rounding in float32 moves few draws
    assert (want.index == got[..., :used.shape[-1]])[used].double().mean() > 0.9
    rows = runs[0][1].flatten(0, 2)
    assert len(rows.unique(dim=0)) > len(rows) / 2 and not torch.equal(runs[0][1], runs[2][1])
    assert torch.equal(decode(p.q, p.k, p.v, samples=16, scheme=scheme, tile=32, seed=1), runs[2][0])


def moments(weights, samples, scheme):
    """Mean and variance of how often a draw of `samples` hits each of the neighbouring intervals of [0, 1) of lengths
    `weights` [H, n]."""
    mean, upper = weights * samples, weights.cumsum(-1)[..., None]
    if scheme == "iid": return mean, mean * (1 - weights)
    m = torch.arange(samples, device=DEVICE)
    hit = (torch.minimum(upper * samples, m + 1) - torch.maximum((upper - weights[..., None]) * samples, m)).clamp(0, 1)
    if scheme == "stratified": return mean, (hit * (1 - hit)).sum(-1)
    return mean, mean.frac() * (1 - mean.frac())


def largest_z(x, mean, variance):
    """Largest |z| of the columns of independent rows x [B, ...] with the stated moments, and what a correct sampler
    exceeds with probability ALARM."""
    often = variance * len(x) >= sizes(100, 5)  # the normal approximation wants counts
    assert often.sum() >= often.numel() / 2
    z = (x.double().mean(0) - mean)[often] * (len(x) / variance[often]) ** 0.5
    return float(z.abs().max()), NormalDist().inv_cdf(1 - ALARM / 2 / len(z))


@kernel
@pytest.mark.parametrize("scheme, sub, dtype",
                         sizes([(x, 1, FP32) for x in SCHEMES] + [("systematic", 8, BF16), ("stratified", 8, BF16)],
                                                     [("systematic", 1, FP32), ("proportional", 1, FP32),
                                                      ("flash", 1, FP32), ("stratified", 8, BF16)]), ids=str)
def test_unbiased(scheme, sub, dtype):
    """The batch axis repeats one small problem; every row has its own stream. Keys and tiles are drawn with their
    probabilities, and the mean output is exact attention."""
    B, H, N, D, samples, tile = sizes(4096, 64), sizes(2, 1), 24, 16, 8, 16
    p = problem(1, 1, H, N, D, dtype, spread=0.5)
    many = Problem(*(x.expand(B, -1, -1, -1) for x in p[:3]))
    out, index = poisoned(lambda: kernels.launch(*many[:3], samples, scheme, tile, 20260, None, None, None,
                                                 return_index=True, sub=sub))
    # [H, N]
    weights = masked_scores(p.q.double(), p.k.double(), 0, *visible_range(p.q, p.k), None).softmax(-1)[0, :, 0]
    i = index[:, :, 0].long()
    counts = torch.zeros(B, H, N + 1, device=DEVICE).scatter_add_(-1, torch.where(i < 0, N, i),
        torch.ones(i.shape, device=DEVICE))[..., :N]
    halves = lambda x: torch.stack([x[..., :tile].sum(-1), x[..., tile:].sum(-1)], -1)
    mass = halves(weights)
    if scheme == "flash":  # half of the draws in each tile, whatever its mass
        parts = [moments(x / x.sum(-1, keepdim=True), samples // 2, scheme) for x in (weights[:, :tile],
            weights[:, tile:])]
        found = [largest_z(counts, *(torch.cat(x, -1) for x in zip(*parts)))]
    else:
        found = [largest_z(counts, *moments(weights, samples, scheme)),
                 largest_z(halves(counts), *moments(mass, samples, scheme))]
    exact = weights @ p.v[0, 0].double()
    z = (out[:, :, 0].double().mean(0) - exact) * B**0.5 / out[:, :, 0].double().std(0)
    found.append((float(z.abs().max()), NormalDist().inv_cdf(1 - ALARM / 2 / z.numel())))
    if scheme == "proportional":
        assert any(z > allowed for z, allowed in found), "the test does not see the bias of the proportional rule"
    else: assert all(z <= allowed for z, allowed in found), found


@kernel
@pytest.mark.parametrize("scheme", ["systematic", "stratified"])
@pytest.mark.parametrize("dtype, at, N", [(FP32, 64, 192), (FP32, 32, 49), (BF16, 64, 192)], ids=str)
def test_a_share_of_a_billionth_is_drawn_where_its_threshold_says(scheme, dtype, at, N):
    """Key `at` has a share of 1e-9 behind two thirds of the mass, in a tile without other mass or among heavy keys.

    Equal keys on both sides, whose weights no kernel rounds; the seed is one whose threshold lies in the key's interval
    by the reference's streams. Running sums in float32 lose it.
    """
    S, heavy = 4096, at + at // 2
    scores = torch.full((N,), -90.0)  # of no mass
    scores[:at] = scores[N - at // 2:] = 0
    scores[at] = math.log(1e-9 * heavy)
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, N, 16), torch.zeros(1, 1, N, 16)
    q[..., 0], k[0, 0, :, 0] = 4, scores
    p = Problem(*(x.to(DEVICE, dtype) for x in (q, k, v)))
    share = float(torch.exp(p.k[0, 0, at, 0].double())) / heavy
    start = at / heavy / (1 + share)
    slot = int(start * S)
    for seeds in torch.arange(2**22).split(2**15):
        x = philox(fold_in(fold_in(seeds, 0, 0), 0), slot * (scheme != "systematic"))
        away = ((slot + x) / S - start) / share
        if (hit := (away > 0.02) & (away < 0.98)).any(): break  # not at its very ends
    seed = int(seeds[hit][0])
    index = kernels.launch(*p[:3], S, scheme, 128, seed, None, None, None, return_index=True, BS=128)[1]
    assert int(index[0, 0, 0, slot]) == at
    doubles = [x.double() for x in p[:2]]
    assert int(select_santa(*doubles, samples=S, scheme=scheme, seed=seed).index[0, 0, 0, slot]) == at


# attention over chosen rows

def lists(p, S, kind, seed=0):
    """Key numbers and weights for each head: lists of their own, one for a group, or one for all; a third of the slots
    unused"""
    (B, H), (G, N) = p.q.shape[:2], p.k.shape[1:3]
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows = {"head": H, "group": G, "all": 1}[kind]
    index = torch.randint(N, (B, rows, 1, S), device=DEVICE, generator=generator)
    weight = torch.exp2(20 * torch.rand(B, H, 1, S, device=DEVICE, generator=generator) - 10)
    weight = weight * (torch.rand(B, H, 1, S, device=DEVICE, generator=generator) > 1 / 3)
    whole = index.expand(B, H, 1, S) if kind == "all" else index.repeat_interleave(H // rows, 1)
    return whole if kind == "all" else index, weight, whole


def true_output(p, index, weight):
    return weighted_attention(p.q.double(), p.k.double(), p.v.double(), Selection(index, weight.double()),
                              backend="torch")


@kernel
def test_features_that_lie_billions_apart():
    "Of queries, keys and values: the offset of the last feature is one that 32 bits do not hold."
    from sparse_nb.kernels.topk import topk
    (N, D), places = (40, 16), torch.empty(2**31 + 1200, dtype=torch.float16, device=DEVICE)
    def spread(x, begin):
        "A copy, whose features are 2^31 / 15 numbers apart"
        B, H, n, _ = x.shape
        far = places[begin:].as_strided(x.shape, (0, n, 1, 2**31 // (D - 1) + 1))
        return far.copy_(x)
    g = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (torch.randn(1, h, n, D, generator=g, device=DEVICE).half() for h, n in ((4, 1), (2, N), (2, N)))
    index = torch.randint(N, (1, 4, 1, 9), generator=g, device=DEVICE)
    weight = torch.rand(1, 4, 1, 9, generator=g, device=DEVICE)
    far = spread(q, 0), spread(k, 100), spread(v, 500)
    assert all(torch.equal(x, y) for x, y in zip(far, (q, k, v)))
    assert torch.equal(gather.attend(*far, index, weight), gather.attend(q, k, v, index, weight))
    for x, y in zip(topk(*far[:2], 7, N), topk(q, k, 7, N)): assert torch.equal(x, y)


@kernel
@pytest.mark.parametrize("kind", ["head", "group", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, rtol", [(BF16, 6e-3), (FP16, 1e-3), (FP32, 2e-6)], ids=str)
def test_attention_over_chosen_rows(dtype, rtol, layout, kind):
    B, G, R = 2, 2, 3
    for D in (64, 80, 128, 256) if not INTERPRETED else (80, 256) if layout == "plain" else (80,):
        p = problem(B, G, R, sizes(5000, 300), D, dtype, layout=layout)
        for S in sizes((1, 63, 1000), (1, 100)):
            index, weight, whole = lists(p, S, kind)
            weight[..., 0] = 1  # a head that keeps nothing has a test of its own
            got = poisoned(lambda: gather.attend(p.q, p.k, p.v, index, weight))
            assert got.shape == p.q.shape and got.dtype == dtype
            assert_close(got, true_output(p, whole, weight), rtol=rtol)


@kernel
@pytest.mark.parametrize("R", [1, 4, 8, 20])
def test_groups_of_any_size_scales_and_strides(R):
    p = problem(1, 3, R, 400, 64, FP32)
    index, weight, whole = lists(p, 90, "group")
    weight[..., 0] = 1
    assert_close(gather.attend(p.q, p.k, p.v, index, weight, scale=0.3),
                 true_output(p._replace(q=p.q * 0.3 * 8), whole, weight), rtol=2e-6)
    turned = index.transpose(-1, -2).contiguous().transpose(-1, -2)[..., ::2], weight.flip(1).flip(1)[..., ::2]
    assert_close(gather.attend(p.q, p.k, p.v, *turned), gather.attend(p.q, p.k, p.v,
        *(x.contiguous() for x in turned)), rtol=2e-6)
    assert torch.equal(gather.attend(p.q, p.k, p.v, index.int(), weight), gather.attend(p.q, p.k, p.v, index, weight))


@kernel
def test_what_is_not_used_counts_for_nothing_and_what_is_no_row_shows():
    p = problem(1, 1, 2, 300, 64, FP16)
    index, weight, whole = lists(p, 70, "group")
    weight[..., 0] = 1
    want = gather.attend(p.q, p.k, p.v, index, weight)
    away = torch.where((weight > 0).any(1, keepdim=True), index, 10**9)
    assert torch.equal(gather.attend(p.q, p.k, p.v, away, weight), want)
    for wrong in (-1, 300):
        bad, heavy = index.clone(), weight.clone()
        bad[..., 5], heavy[:, 0, :, 5], heavy[:, 1, :, 5] = wrong, 1, 0
        got = gather.attend(p.q, p.k, p.v, bad, heavy)
        assert got[0, 0].isnan().all() and not got[0, 1].isnan().any()
    nothing = gather.attend(p.q, p.k, p.v, index, weight * torch.tensor([0.0, 1.0], device=DEVICE).view(1, 2, 1, 1))
    assert nothing[0, 0].isnan().all() and torch.equal(nothing[0, 1], want[0, 1])
    lost = weight.clone()
    lost[:, 0, :, 3] = math.nan
    assert (gather.attend(p.q, p.k, p.v, index, lost)[0, 0].isnan().all()
            and not gather.attend(p.q, p.k, p.v, index, lost)[0, 1].isnan().any())
    with pytest.raises(ValueError, match="index must have a list for each of 2 query heads or 1 groups, got 3"):
        gather.attend(p.q, p.k, p.v, index.expand(-1, 3, -1, -1), weight)
    with pytest.raises(ValueError, match="q must have one query for backend='triton', got 2"):
        gather.attend(torch.zeros(1, 2, 2, 64), p.k, p.v, index, weight)
    with pytest.raises(ValueError, match="q must have a head size of at most 256 for backend='triton', got 300"):
        gather.attend(torch.zeros(1, 2, 1, 300), p.k, p.v, index, weight)
    with pytest.raises(TypeError,
                       match="q must be float16, bfloat16 or float32 for backend='triton', got torch.float64"):
        gather.attend(p.q.double(), p.k, p.v, index, weight)


@kernel
def test_selections_reach_the_kernel():
    p = problem(2, 2, 4, 600, 128, FP32, ragged=True)
    for s in (select_sinks_window(p.q, p.k, sinks=3, window=0.3, **p.masks),
              select_uniform(p.q, p.k, samples=0.2, seed=1, **p.masks)):
        got = weighted_attention(p.q, p.k, p.v, s, backend="triton")
        assert_close(got, weighted_attention(p.q, p.k, p.v, s, backend="torch"), rtol=2e-6)
        if GPU:
            assert (torch.equal(weighted_attention(p.q, p.k, p.v, s), got)
                    and torch.equal(weighted_attention(p.q, pinned(p.k), pinned(p.v), s), got))
    q = p.q.clone().requires_grad_()
    assert weighted_attention(q, p.k, p.v, s).requires_grad
    with pytest.raises(ValueError, match="backend must be 'torch' or 'auto' where a gradient is wanted, got 'triton'"):
        weighted_attention(q, p.k, p.v, s, backend="triton")
    with pytest.raises(ValueError, match="backend must be one of auto, torch, triton, got 'cuda'"):
        weighted_attention(p.q, p.k, p.v, s, backend="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_chosen_rows_in_a_graph_and_in_the_compiler():
    p = problem(2, 2, 4, 3000, 128, BF16)
    index, weight, _ = lists(p, 500, "group")
    call = lambda: gather.attend(p.q, p.k, p.v, index, weight)
    replay, out = captured(call)
    for step in range(3):
        more = lists(p, 500, "group", seed=step)
        index.copy_(more[0]), weight.copy_(more[1])
        out.fill_(math.nan)
        replay()
        assert torch.equal(out, call())
    assert torch.equal(torch.compile(lambda q, i, w: gather.attend(q * 1, p.k, p.v, i, w),
                                     fullgraph=True)(p.q, index, weight), call())


# host memory

def pinned(x):
    "A copy in pinned host memory, token by token as a cache layer lays it out; in the interpreter, the same on the CPU"
    return torch.empty(x.shape[2], x.shape[0], x.shape[1], x.shape[3], dtype=x.dtype,
                       pin_memory=GPU).permute(1, 2, 0, 3).copy_(x)


@kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64], ids=str)
@pytest.mark.parametrize("D", sizes([64, 80, 96, 128, 256], [80, 128]))
def test_rows_of_host_memory(D, dtype, layout):
    B, G, R, N = 2, 2, 3, sizes(3000, 300)
    x = problem(B, G, R, N, D, dtype, layout=layout).k
    x = x.cpu().pin_memory() if GPU and layout == "plain" else pinned(x) if GPU else x
    index = torch.randint(N, (B, G * R, 1, sizes(700, 70)), device=DEVICE,
                          generator=torch.Generator(DEVICE).manual_seed(0))
    shared = index[:, :1].expand(-1, G * R, -1, -1)
    for picked in (index, index.transpose(-1, -2), index[..., ::3], shared, index[..., :1]):
        got = poisoned(lambda: host.rows(x, picked))
        where = picked.flatten(2).cpu()[..., None].expand(-1, -1, -1, D)
        assert got.shape == (*picked.shape, D) and got.dtype == dtype
        assert torch.equal(got.flatten(2, -2).cpu(), x.cpu().repeat_interleave(R, 1).gather(2, where))
    outside = index.clone()
    outside[0, 0, 0, :2] = torch.tensor([-1, N])
    got = host.rows(x, outside)
    assert got[0, 0, 0, :2].isnan().all() and not got[0, 0, 0, 2:].isnan().any() and not got[1].isnan().any()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernels_read_pinned_host_memory(scheme):
    p = problem(2, 2, 4, 5000, 128, BF16, ragged=True)
    k, v = pinned(p.k), pinned(p.v)
    bounded = [dict(eps=0.3, delta=0.1)] if scheme in ("iid", "stratified") else []
    for settings in (dict(scheme=scheme), *(dict(scheme=scheme, **x) for x in bounded)):
        want, stats = santa_decode(*p[:3], samples=64, seed=1, **p.masks, **settings, return_stats=True)
        got, again = santa_decode(p.q, k, v, samples=64, seed=1, **p.masks, **settings, return_stats=True)
        assert torch.equal(got, want) and torch.equal(again.values_read, stats.values_read)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_host_memory_that_is_not_pinned_is_refused():
    p = problem(1, 1, 2, 100, 64, BF16)
    with pytest.raises(ValueError, match="k must be on the device of q, cuda:0, or in pinned host memory, got cpu"):
        santa_decode(p.q, p.k.cpu(), p.v)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_launches_go_to_the_device_of_the_tensors():
    p = problem(1, 2, 3, 1000, 64, BF16)
    there = [x.to("cuda:1") for x in p[:3]]
    assert (torch.cuda.current_device() == 0 and torch.equal(decode(*there, samples=64, seed=1).cpu(),
        decode(*p[:3], samples=64, seed=1).cpu()))
    index = torch.randint(1000, (1, 6, 1, 50), device="cuda:1")
    assert torch.equal(host.rows(pinned(p.k), index), host.rows(there[1], index))


# graphs and the compiler

@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_graph_replay_with_a_new_seed_and_length(scheme):
    p, seed = problem(2, 2, 4, 1000, 64, BF16), torch.tensor(0, device=DEVICE)
    start, stop = torch.tensor([0, 10], device=DEVICE), torch.tensor([1000, 900], dtype=torch.int32, device=DEVICE)
    call = lambda: decode(p.q, p.k, p.v, samples=64, scheme=scheme, seed=seed, kv_start=start, kv_end=stop)
    replay, out = captured(call)
    seen = []
    for step in range(4):
        seed.fill_(2**40 * step + step)
        stop.copy_(torch.tensor([1000 - 300 * step, 11 + step], dtype=torch.int32))
        out.fill_(math.nan)
        replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call())
        assert torch.equal(out, decode(p.q, p.k, p.v, samples=64, scheme=scheme, seed=2**40 * step + step,
                                       kv_start=start, kv_end=stop))
        audit(p._replace(start=start, stop=stop), *drawn(p._replace(start=start, stop=stop), samples=64, scheme=scheme,
                                                         seed=seed), samples=64, scheme=scheme, seed=seed, flips=0.05)
        seen.append(out.clone())
    assert all(not torch.equal(a, b) for a, b in zip(seen, seen[1:]))


@kernel
@pytest.mark.parametrize("scheme", sizes(SCHEMES, ("systematic",)))
def test_compiles_into_one_graph(scheme):
    p = problem(2, 1, 4, sizes(1000, 40), 16, BF16, ragged=True)
    def step(q, k, v, seed, start, stop):
        return 2 * santa_decode(q, k, v, samples=16, scheme=scheme, seed=seed, kv_start=start, kv_end=stop,
                                backend="triton")
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=sizes("inductor", "eager"))
    for seed in sizes((torch.tensor(3, device=DEVICE), torch.tensor(4, device=DEVICE), 5, 6), (torch.tensor(3), 5)):
        assert torch.equal(compiled(*p[:3], seed, p.start, p.stop), step(*p[:3], seed, p.start, p.stop))


@kernel
def test_the_operator():
    p = problem(1, 1, 2, 40, 16, FP32)
    arguments = (*p[:3], 8, "systematic", 128, None, 7, None, None, None, None)
    torch.library.opcheck(torch.ops.sparse_nb.santa_decode, arguments, test_utils=("test_schema", "test_faketensor"))


@kernel
def test_public_call():
    p = problem(2, 1, 3, sizes(1000, 60), 16, FP32, ragged=True)
    for scheme in sizes(SCHEMES, ("systematic",)):
        kept = dict(samples=16, scheme=scheme, tile=32, seed=3, **p.masks)
        out, stats = santa_decode(*p[:3], backend="triton", return_stats=True, **kept)
        want, same = santa_decode(*p[:3], backend="torch", return_stats=True, **kept)
        assert torch.equal(stats.budget, same.budget) and torch.equal(stats.keys_scored, same.keys_scored)
        assert (stats.values_read - same.values_read).abs().max() <= 2
        assert_close(out, want, rtol=0.3)


# bad input

good = {n: torch.zeros(1, h, m, 64) for n, h, m in (("q", 2, 1), ("k", 1, 30), ("v", 1, 30))}


@pytest.mark.parametrize("change, error, message", [
    (dict(q=good["q"].double()), TypeError,
     "q must be float16, bfloat16 or float32 for backend='triton', got torch.float64"),
    (dict(q=torch.zeros(1, 2, 2, 64)), ValueError, "q must have one query for backend='triton', got 2"),
    (dict(q=torch.zeros(1, 2, 1, 257)), ValueError,
     "q must have a head size of at most 256 for backend='triton', got 257"),
    (dict(tile=48), ValueError, "tile must be 16, 32, 64, 128 or 256, got 48"),
    (dict(samples=2**17), ValueError, "samples must be at most 65536, got 131072"),
    (dict(scheme="sys"), ValueError,
     "scheme must be one of iid, stratified, systematic, proportional, flash, got 'sys'"),
    (dict(seed=torch.zeros((), dtype=torch.int64, device="meta")), ValueError,
     "seed must be on the device of q, cpu, got meta"),
    (dict(seed=torch.zeros(1, 2, dtype=torch.int64, device="meta")), ValueError,
     "seed must be on the device of q, cpu, got meta"),
    (dict(tile=256, scheme="flash", q=torch.zeros(1, 2, 1, 200), k=torch.zeros(1, 1, 30, 200),
          v=torch.zeros(1, 1, 30, 200)), ValueError,
          "tile must be at most 128 for torch.float32 and heads of 200, got 256"),
    (dict(scheme="flash", estimate=good["q"]), ValueError, "estimate must be None for scheme='flash'"),
    (dict(estimate=good["q"].half()), ValueError,
     "estimate must be torch.float32 [1, 2, 1, 64] on the device of q, cpu, got torch.float16 [1, 2, 1, 64] on cpu"),
    (dict(estimate=good["q"][:, :1]), ValueError,
     "estimate must be torch.float32 [1, 2, 1, 64] on the device of q, cpu, got torch.float32 [1, 1, 1, 64] on cpu"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input(change, error, message):
    with pytest.raises(error, match=re.escape(message)): decode(**(good | change))


@kernel
def test_estimate_is_not_for_flash():
    p = problem(1, 1, 2, 30, 64, FP32)
    with pytest.raises(ValueError, match="estimate must be None for scheme='flash'"):
        decode(*p[:3], scheme="flash", estimate=p.q)


if INTERPRETED:
    def test_the_chosen_cases_hold_every_pair_of_values(request):
        "Of every test of this file, whichever of them are run."
        values = lambda cases: {(a, repr(case[a]), b, repr(case[b])) for case in cases for a in case for b in case}
        marks = lambda test: {mark.name for mark in getattr(test, "pytestmark", ())}
        tests = [x for name, x in vars(request.module).items() if name.startswith("test_") and "gpu" not in marks(x)]
        fewer = []
        for cases in filter(None, map(cases_of, tests)):
            every, chosen = values(cases), [cases[i] for i in covering(cases)]
            assert chosen and values(chosen) == every
            # each is needed
            if every: assert all(values(chosen[:i] + chosen[i + 1:]) < every for i in range(len(chosen)))
            if len(chosen) < len(cases): fewer.append((len(chosen), len(cases)))
        chosen, every = map(sum, zip(*fewer))
        assert len(fewer) > 1 and chosen < every / 2

    # the others, which their notebooks run, are counted and held against the reference there
    @pytest.mark.parametrize("name, rows, most", [
        ("choose", dict(Quest=7, DoubleSparsity=7, Adamas=7, HashAttention=5), 0.01),
        ("batch", dict(exact=1, attend=2, Saap=1, SketchWalk=1, HashAttention=1), 0.01),
        ("saap_launches", {"saap": 5, "index": 4, "prefill": 1, "copy": 1}, 0.01), ("host", {"copy": 1, "rows": 6}, 0)])
    def test_records_run_in_their_quick_form(name, rows, most, tmp_path):
        said = []
        made = json.loads(run_record(name, tmp_path, quick=True, say=said.append).read_text())
        found = [row.get("method") or row["what"] for row in made["rows"]]
        assert rows == {x: found.count(x) for x in found if not x.startswith("sdpa")} and not [line for line in said
            if "not recorded" in line], said
        assert (all(row.get("error", 0) <= most and row["median_us"] > 0 for row in made["rows"])
                and made["meta"]["gpu"] == "CPU")
        assert made["meta"]["command"] == f"python -m benchmarks.run {name} --quick"


if not INTERPRETED:
    def python(*command, **variables):
        "Run Python in a process of its own, with these environment variables."
        known = {name: x for name, x in os.environ.items()
                 if name != "TRITON_INTERPRET"} | dict(OMP_NUM_THREADS="1") | variables
        return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=known,
                              cwd=Path(__file__).parents[2])

    def test_tensors_on_the_cpu():
        done = python("-c",
                      "import torch; from sparse_nb.kernels.santa import decode; x = torch.zeros(1, 1, 1, 64); "
                      "decode(x, x, x)")
        assert (done.returncode
                and "ValueError: q must be on a GPU, or TRITON_INTERPRET=1 be set before Python starts, got cpu"
                in done.stderr)

    @pytest.mark.kernels
    @pytest.mark.parametrize("capability", [80, 90, 100])
    def test_the_rows_kernel_compiles(capability):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        for kind, D, BD in (("bf16", 128, 128), ("fp32", 80, 128), ("fp64", 256, 256)):
            constants = dict(x_d=1, i_s=1, D=D, BS=64, BD=BD)
            signature = {name: "constexpr" if name in constants else f"*{'i64' if name == 'index_ptr' else kind}"
                         if name.endswith("_ptr") else "i32" for name in host._rows_kernel.arg_names}
            made = triton.compile(ASTSource(host._rows_kernel, signature, constexprs=constants),
                                  target=GPUTarget("cuda", capability, 32), options=dict(num_warps=4))
            assert made.asm["cubin"] and "ld.global" in made.asm["ptx"]

    @pytest.mark.kernels
    @pytest.mark.parametrize("kind, D, LR", [("bf16", 128, 4), ("bf16", 128, 1), ("fp16", 80, 8), ("bf16", 256, 8),
                                             ("fp32", 128, 4), ("fp32", 256, 4)])
    @pytest.mark.parametrize("capability", [80, 90, 100])
    def test_the_gather_kernels_do_not_spill(capability, kind, D, LR):
        base = dict(D=D, BD=triton.next_power_of_2(D), PDL=capability >= 90, q_d=1, k_d=1, v_d=1, out_d=1, i_s=1, w_s=1,
                    peak_ptr=None, mass_ptr=None)
        types = dict(index_ptr="i64", weight_ptr="fp32", m_ptr="fp32", l_ptr="fp32", o_ptr="fp32")
        for kernel_, constants in ((gather._gather_kernel, base | dict(LR=LR, BR=16, count_ptr=None,
            **dict(zip(("BN", "STAGES"), gather._tile(triton.next_power_of_2(D), 4 if kind == "fp32" else 2))))),
            (merge_kernel, base | dict(BP=128, BW=32)), (merge_kernel, base | dict(BP=512, BW=32))):
            used = compiled_usage(kernel_, constants, types | {f"{x}_ptr": kind for x in ("q", "k", "v", "out")},
                                  capability, gather._WARPS)
            assert used["spills"] == 0 and used["registers"] <= 255 and used["shared"] <= 99 * 1024, (kernel_, kind,
                used)

    @pytest.mark.kernels
    @pytest.mark.budget(30)
    @pytest.mark.parametrize("kind, D, LR", [("bf16", 128, 4), ("fp16", 256, 8), ("fp32", 128, 1)])
    @pytest.mark.parametrize("capability", [80, 90])
    def test_the_vattention_kernels_do_not_spill(capability, kind, D, LR):
        types = dict.fromkeys(("eps", "log", "square", "plug", "plug_square"), "fp32")
        types |= dict.fromkeys(("sinks_share", "window_share", "top_share", "base_share"), "i64")
        types |= {f"{x}_ptr": "i32" for x in ("row", "mask", "count", "stop", "code", "key", "plane", "hist", "tail",
                                              "bin")} | {f"{x}_ptr": "fp16" for x in ("w1", "b1", "w2", "b2")}
        BD = triton.next_power_of_2(D)
        base = dict(LR=LR, PLANES=LR.bit_length(), D=D, BD=BD, M=64, BM=64, BR=16, BQ=LR, BS=steps.GUESS,
                    BINS=steps._BINS, LEAST=32, CLT_LEAST=32, BOUND="clt", PLUGIN="upper", SEEDS=False,
                    PDL=capability >= 90, key_n=1, TRIES=25,
                    start_ptr=None, len_ptr=None, seed_ptr=None, ceiling_ptr=None)
        rows = lambda setting: dict(BN=min(setting[0], 2**22 // BD**2 // (4 if kind == "fp32" else 2)),
                                    STAGES=setting[1], BC=1024 if setting is steps._LOOK else 128)
        few = rows(steps._LOOK)
        few["BN"] = max(16, few["BN"] // (4 if kind == "fp32" else 2))
        no = dict.fromkeys(("length_ptr", "own_ptr", "own2_ptr", "longest_ptr", "level_ptr", "norm_ptr"))
        types["level_ptr"] = "fp64"
        for kernel_, constants, warps in ((steps.code_kernel, dict(BZ=1, zero_ptr=None), 8),
                                          (steps._guess_kernel, {}, 4),
                                          (steps._count_kernel, dict(BN=4096), 4),
                                          (steps._keep_kernel, dict(BN=4096, BT=256), 4),
                                          (steps._look_kernel, rows(steps._LOOK) | no, 4),
                                          (steps._look_kernel, few, 4),
                                          (steps._budget_kernel, dict(BP=64), 4),
                                          (steps._sample_kernel, rows(steps._SAMPLE) | dict(BP=64), 4),
                                          (steps._sample_kernel, rows(steps._SAMPLE) | dict(BP=256), 4),
                                          (steps._sample_kernel, rows(steps._SAMPLE) | dict(BP=64, most_ptr=None), 4),
                                          (steps._merge_kernel, dict(BP=128, BE=64, BD=32), 4)):
            own = types | {f"{x}_ptr": kind for x in ("q", "k", "v", "out")} | (dict(bin_ptr="u8")
                if kernel_ is steps._count_kernel else {})
            used = compiled_usage(kernel_, base | constants, own, capability, warps)
            # 8 bytes: ptxas trades two registers of the draw for one more program on a multiprocessor
            assert used["spills"] <= 8 and used["registers"] <= 255 and used["shared"] <= 99 * 1024, (kernel_, kind,
                used)

    @pytest.mark.kernels
    @pytest.mark.parametrize("name, known_before", [
        ("code", ("w1_ptr", "b1_ptr", "w2_ptr", "b2_ptr")), ("gather", ()), ("scores", ()), ("put", ()),
        ("box", ()), ("guess_channels", ()), ("ask", ()), ("guess_codes", ()), ("box_row", ()),
        ("channel_row", ()), ("code_row", ()), ("sign_row", ())])
    def test_a_launch_that_starts_early_waits_before_it_reads_what_a_step_makes(name, known_before):
        """The kernel before may be another's that lets the next start before it has written.

        Only what no step makes may be read before the wait: weights.
        """
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from sparse_nb.kernels import adamas, double_sparsity, hash_attention, quest
        named = dict(code=steps.code_kernel, gather=gather._gather_kernel, scores=kernels._score_kernel,
                     put=kernels._put_kernel)
        of_methods = {x: y for x in (adamas, double_sparsity, hash_attention, quest) for x, y in vars(x).items()}
        kernel_ = named.get(name) or of_methods[f"_{name}_kernel"]
        own = dict(code=dict(M=64), scores=dict(G=8, unit_ptr=None), box=dict(BN=8)).get(name, {})
        known = dict(D=128, BD=128, BR=16, PDL=True, start_ptr=None, len_ptr=None, BM=64, BZ=32, LR=4, LP=4, BN=64, R=4,
                     SUB=8, KEEP=False, STAGES=2, count_ptr=None, U=16, C=32, SUM=True, W=128, STEPS=7, BW=8,
                     SIGMAS=3.5, NEAR=4, SHARE=True, EACH=1, RP=4, PLANES=2, WORDS=4, BS=1024, table_ptr=None,
                     t_b=None, PAGE=0) | own
        known = {x: y for x, y in known.items() if x in kernel_.arg_names and x not in known_before}
        integers = {"i32": ("code", "zero", "arrived", "ask", "row", "mark"),
                    "i64": ("index", "at", "begin", "len", "fit")}
        kinds = {f"{x}_ptr": kind for kind, names in integers.items() for x in names} | dict(u_ptr="fp16")
        kinds |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "w1_ptr", "b1_ptr", "w2_ptr", "b2_ptr"), "bf16")
        kinds |= dict(put=dict(code_ptr="i8"), box=dict(row_ptr="bf16"), box_row=dict(row_ptr="bf16"),
                      guess_channels=dict(row_ptr="i16"), channel_row=dict(row_ptr="i16")).get(name, {})
        signature = {x: "constexpr" if x in known else f"*{kinds.get(x, 'fp32')}" if x.endswith("_ptr") else "fp32"
                     if x in ("scale", "cut") else "i64" if x == "budget" else "i32" for x in kernel_.arg_names}
        ptx = triton.compile(ASTSource(kernel_, signature, constexprs=known), target=GPUTarget("cuda", 90, 32),
                             options=dict(num_warps=4)).asm["ptx"]
        free = [x for x in kernel_.arg_names if x not in known]
        static, told = {f"_param_{free.index(x)}]" for x in known_before}, set()  # registers of their addresses
        before, waits, after = ptx.partition("griddepcontrol.wait")
        for line in before.splitlines():
            registers = re.findall(r"%rd?\d+", line)
            of_weights = "ld.param" in line and any(x in line for x in static)
            if of_weights or told & set(registers[1:]): told.add(registers[0])
            if "ld.global" in line: assert told & set(re.findall(r"%rd\d+", line.partition("[")[2])), line
        assert waits and "ld.global" in after and ("ld.global" in before) == bool(known_before)
        assert "st.global" not in before  # where a launch before may still read
        if name != "gather":  # the next launch reads before it waits
            assert "griddepcontrol.launch_dependents" in after and "griddepcontrol.launch_dependents" not in before

    @pytest.mark.kernels
    @pytest.mark.parametrize("name", ["box", "channel", "distance"])
    def test_scores_beside_the_marks_end_after_them(name):
        """The launch before has waited when it lets these start, so they read at once; and the next launch waits only
        for these, so one of their programs waits for the marks, when it has stored its scores."""
        pytest.importorskip("triton")
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from sparse_nb.kernels import adamas, double_sparsity, quest
        kernel_ = dict(box=quest, channel=double_sparsity, distance=adamas)[name].__dict__[f"_{name}_kernel"]
        known = dict(EACH=1, R=4, PLANES=2, WORDS=4, LR=4, LP=4, C=32, SUM=True, BN=8, PDL=True, start_ptr=None,
                     len_ptr=None, U=16, D=128, BD=128, BS=0)
        known = {x: y for x, y in known.items() if x in kernel_.arg_names}
        kinds = dict(q_ptr="bf16", fit_ptr="i64", ask_ptr="i32", begin_ptr="i64",
                     row_ptr=dict(box="bf16", channel="i16", distance="i32")[name])
        signature = {x: "constexpr" if x in known else f"*{kinds.get(x, 'fp32')}" if x.endswith("_ptr") else "fp32"
                     if x == "scale" else "i32" for x in kernel_.arg_names}
        ptx = triton.compile(ASTSource(kernel_, signature, constexprs=known), target=GPUTarget("cuda", 90, 32),
                             options=dict(num_warps=4)).asm["ptx"]
        before, waits, after = ptx.partition("griddepcontrol.wait")
        assert waits and "st.global" in before and "griddepcontrol.launch_dependents" in before
        assert "st.global" not in after and "ld.global" not in after
        last = before.rpartition("st.global")[2]
        assert "%ctaid.x" in before and re.search(r"@%p\d+ bra", last)  # by one program: others do not hold their place

    @pytest.mark.kernels
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    @pytest.mark.budget(100)
    @pytest.mark.parametrize("shard", range(4))
    def test_in_the_interpreter(forked_pytest, shard):
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--shard", f"{shard}/4",
                                   "--cases", "covering", __file__, TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d\d passed", said), said[-4000:]

    @pytest.mark.slow
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_the_other_cases_in_the_interpreter(forked_pytest):
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--cases", "others", __file__,
                                   TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d\d passed", said), said[-4000:]

    @pytest.mark.kernels
    @pytest.mark.budget(60)
    @pytest.mark.parametrize("capability", [80, 90, 100])
    def test_registers_and_spills(capability, capsys):
        rows = kernels.resource_usage(capability)
        with capsys.disabled():  # in the log of every run
            print("", " ".join(rows[0]), *(" ".join(map(str, row.values())) for row in rows), sep="\n")
        assert {row["kernel"] for row in rows} > {"scores", "gather", "flash", "merge, flash", "features",
                                                  "budgets, proportional"}
        # the budgets of the proportional scheme, for comparison only, may spill where a head has thousands of tiles
        allowed = lambda row: 512 if row["kernel"] == "budgets, proportional" and row["n"] > 131072 else 0
        assert not [row for row in rows if row["spills"] > allowed(row) or row["registers"] > 255
                    or row["shared"] > 99 * 1024]


# vAttention

def settings_of(s):
    "What the kernels are told of a `VAttention`."
    level, log_square = s.delta * (0.8 if s.plugin == "upper" else 1), bounds.tail_levels
    return steps.Settings(s.sinks, s.window, s.topk, s.base, 32, s.eps, *log_square(level, False),
                          math.log(10 / s.delta), s.bound, s.plugin)


def networks(H, D, M, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return tuple(torch.randn(*shape, device=DEVICE, generator=generator) for shape in ((H, D, M), (H, M), (H, M, 32),
        (H, 32)))


def random_codes(B, G, N, seed=0):
    return torch.randint(-2**31, 2**31, (B, G, N, 1), device=DEVICE,
                         generator=torch.Generator(DEVICE).manual_seed(seed)).int()


def agreement(p, codes, maps, lists):
    """Equal bits of queries and keys, summed over the heads of a list [B, L, N], and whether a rounding error could
    change them [B, L]."""
    H, G = p.q.shape[1], codes.shape[1]
    hidden = (torch.einsum("bhd,hdm->bhm", p.q[:, :, 0].double(), maps[0].double()) + maps[1]).relu()
    out = torch.einsum("bhm,hmj->bhj", hidden, maps[2].double()) + maps[3]
    bits = (codes[:, :, :, 0, None] >> torch.arange(32, device=DEVICE)) & 1
    equal = (bits.repeat_interleave(H // G, 1) == (out > 0)[:, :, None]).sum(-1)
    return equal.unflatten(1, (lists, -1)).sum(2), (out.abs().amin(-1) < 1e-3).unflatten(1, (lists, -1)).any(2)


def kept_of(found, s, first, n):
    "How many keys a list keeps, by the settings, of n visible ones."
    count = lambda x: min(x, n) if isinstance(x, int) else math.ceil(n * x * (1 - 1e-12))
    left = count(s.sinks)
    right = max(n - count(s.window), left)
    return left, right, min(count(s.topk), right - left)


def base_sample(found, kept, H):
    """Rows that a step has looked at [B, H, 1, S], which of them are kept, first quarter and others of the base sample,
    and the keys that were not kept [B, H, 1]."""
    order = found.rows[:, :, found.slots:found.slots + int(found.places.max())]
    drawn = (order >= 0) & (torch.arange(order.shape[-1], device=DEVICE) < found.places[..., None])
    heads = lambda x: x.repeat_interleave(H // x.shape[1], 1)[:, :, None]
    rank, base = drawn.cumsum(-1), found.base.sum(-1)
    quarter = found.base[..., :found.base.shape[-1] // 4].sum(-1)
    one, two = (drawn & (rank <= quarter[..., None])), drawn & (rank > quarter[..., None]) & (rank <= base[..., None])
    slots = torch.arange(found.slots, device=DEVICE) < kept[..., None]
    parts = [heads(torch.cat([x, y], -1)) for x, y in ((slots, one & False), (slots & False, one),
                                                       (slots & False, two))]
    index = heads(torch.cat([found.rows[:, :, :found.slots], order], -1)).long()
    return torch.where(parts[0] | parts[1] | parts[2], index, 0), parts, heads(found.rest + base)


STEP = vattention.VAttention(0.2, 0.1, sinks=3, window=7, topk=0.05, base=0.1, share=False)

@kernel
@pytest.mark.parametrize("lists", ["group", "head"])
@pytest.mark.parametrize("dtype, D, R, rtol, layout, ragged, share", sizes(
    [(dtype, D, R, rtol, "plain", False, 0.1) for dtype, rtol in ((BF16, 8e-3), (FP16, 2e-3), (FP32, 3e-6))
     for D in (64, 80, 96, 128, 256) for R in (1, 3, 4, 8)]
    + [(FP32, 64, 3, 3e-6, layout, True, 0.1) for layout in LAYOUTS if layout != "one for all"],
    [(BF16, 16, 3, 8e-3, "by position", False, 0.1), (FP32, 24, 4, 3e-6, "plain", True, 0.9)]), ids=str)
def test_vattention_keeps_draws_and_attends(dtype, D, R, rtol, layout, ragged, share, lists):
    B, G, N, s = 2, sizes(2, 1), sizes(9000, 700), dataclasses.replace(STEP, base=share)
    p = problem(B, G, R, N, D, dtype, layout=layout, ragged=ragged)
    H, L = G * R, G if lists == "group" else G * R
    codes, maps = random_codes(B, G, N), networks(H, D, 48)
    found = poisoned(lambda: steps.decode(p.q, p.k, p.v, settings_of(s), lists=L, codes=codes, maps=maps, seed=5,
                                          **p.masks))
    equal, close = agreement(p, codes, maps, L)
    firsts, ends = (x[:, 0, 0] for x in visible_range(p.q, p.k, **p.masks))
    kept = torch.zeros(B, L, dtype=torch.long, device=DEVICE)
    for b in range(B):
        first, n = int(firsts[b if len(firsts) > 1 else 0]), int((ends - firsts)[b if len(ends) > 1 else 0])
        left, right, top = kept_of(found, s, first, n)
        kept[b] = n - (right - left) + top
        for g in range(L):
            row = found.rows[b, g].long()
            own, order = row[:int(kept[b, g])] - first, row[found.slots:found.slots + int(found.places[b, g])]
            new = order[order >= 0] - first
            base, extra = int(found.base[b, g].sum()), int(found.extra[b, g].sum())
            assert (len(new) == base + extra and len(torch.cat([own, new]).unique()) == len(own) + len(new)
                    and 0 <= int(new.min()) and int(new.max()) < n)
            assert (int(found.rest[b, g]) == n - len(own) - base and base >= math.ceil((n - len(own)) * share)
                    and extra >= min(int(found.rest[b, g]), int(found.facts[b, g * H // L:(g + 1) * H // L, 2].max())))
            if close[b, g]: continue
            middle = equal[b, g, first + left:first + right].sort(descending=True, stable=True).indices[:top] + left
            assert torch.equal(own,
                               torch.cat([torch.arange(left, device=DEVICE), middle,
                                          torch.arange(right, n, device=DEVICE)]).sort().values)
    chosen = vattention.read_rows(found, kept, H)
    assert found.out.dtype == dtype
    visible = Problem(p.q, *(torch.where(x.isnan(), 0, x) for x in (p.k, p.v)))
    assert_close(found.out, true_output(visible, chosen.index, chosen.weight), rtol=rtol)
    # the budgets, from the same base sample
    index, parts, n_s = base_sample(found, kept, H)
    used = parts[0] | parts[1] | parts[2]
    e, shift = exponential_terms(visible.q.double(), visible.k.double(), index, used, None)
    facts = vattention.residual_facts(e[..., None], *parts, n_s, (e * (parts[1] | parts[2])).amax(-1), "upper", "clt",
                                      s.delta / 10, False)
    deviation, size, asked, unit = found.facts[:, :, None].double().unbind(-1)
    assert_close(unit * math.log(2), shift, rtol=1e-4)
    want = vattention.draws_needed(s, facts, None, found.rest.repeat_interleave(H // L, 1)[:, :, None])
    assert_close(deviation, facts.spread.sqrt(), rtol=2e-3)
    assert_close(size, facts.size, rtol=2e-3)
    assert ((asked - want).abs() <= 2 + 5e-3 * want).all()


@kernel
@pytest.mark.parametrize("like, topk", [(False, 0.1), (True, 0.5)])
def test_vattention_keeps_as_many_where_the_guess_is_wrong(like, topk):
    N, s = 2100, vattention.VAttention(0.2, 0.1, sinks=3, window=7, topk=topk, base=0.1)
    p, maps = problem(1, 1, 1, N, 64, FP32), networks(1, 64, 48)
    zeros = torch.zeros(1, 1, N, 1, dtype=torch.int32, device=DEVICE)
    own = agreement(p, zeros, maps, 1)[0][0, 0, 0]  # bits of the query that are 0
    hidden = (torch.einsum("bhd,hdm->bhm", p.q[:, :, 0].double(), maps[0].double()) + maps[1]).relu()
    code = ((torch.einsum("bhm,hmj->bhj", hidden, maps[2].double()) + maps[3]
             > 0).long() << torch.arange(32, device=DEVICE)).sum()
    assert 32 - own == int(code).bit_count()
    # what the guess is made from: all like the query, or its opposite
    seen = 3 + torch.arange(steps.GUESS, device=DEVICE) * (N - 10) // steps.GUESS
    codes = random_codes(1, 1, N)
    codes[0, 0, seen, 0] = (code if like else ~code).to(torch.int32)
    found = poisoned(lambda: steps.decode(p.q, p.k, p.v, settings_of(s), lists=1, codes=codes, maps=maps, seed=5))
    top = math.ceil(N * topk)
    score = agreement(p, codes, maps, 1)[0][0, 0]
    guess = 32 if like else 0
    bins = (score[3:-7] - guess + steps._BINS // 2 - 1).clamp(0, steps._BINS - 1)
    want = torch.cat([torch.arange(3, device=DEVICE), bins.sort(descending=True, stable=True).indices[:top] + 3,
                      torch.arange(N - 7, N, device=DEVICE)]).sort().values
    assert (torch.equal(found.rows[0, 0, :top + 10].long(), want) and 0
            < int((bins == (0 if like else steps._BINS - 1)).sum()) != top)


@kernel
@pytest.mark.parametrize("dtype, D, R, bound, plugin, guarantee, share, ragged", sizes(
    [(dtype, D, R, bound, plugin, guarantee, D > 64, dtype == FP32) for dtype in (BF16, FP16, FP32) for D, R in
     ((64, 1), (80, 3), (128, 4), (256, 8)) for bound in vattention.BOUNDS for plugin in ("upper", "plain")
     for guarantee in ("numerator", "output")],
    [(FP32, 24, 4, "clt", "upper", "numerator", True, False), (BF16, 16, 3, "clt", "upper", "output", False, True),
     (FP32, 16, 1, "bernstein", "plain", "output", True, True), (FP32, 24, 2, "hoeffding", "upper", "numerator", False,
                                                                 True)]), ids=str)
def test_vattention_guarantees_about_vectors(dtype, D, R, bound, plugin, guarantee, share, ragged):
    G, N, wide = 2, sizes(9000, 700), bound != "clt"
    eps = 0.9 if wide else 0.3 if plugin == "upper" or guarantee == "output" else sizes(0.06, 0.3)
    s = vattention.VAttention(eps, 0.2, sinks=3, window=7, topk=0.05, base=0.3, share=share,
                              bound=bound, plugin=plugin, guarantee=guarantee)
    p = problem(2, G, R, N, D, dtype, ragged=ragged, spread=0.2 if wide else 1.0)
    p.v.add_(3)  # a numerator that is long beside its error
    visible = Problem(p.q, *(torch.where(x.isnan(), 0, x) for x in (p.k, p.v)))
    H, L, (first, end) = G * R, G if share else G * R, visible_range(p.q, p.k, **p.masks)
    longest = longest_of(visible.v.float().norm(dim=-1), p.q, first, end)
    top = cauchy_schwarz(visible.q, visible.k, first, end, D**-0.5)
    given = dict(lengths=p.v.float().norm(dim=-1), ceiling=(top / math.log(2)).float()[..., 0] if wide else None)
    if guarantee == "output": given["levels"] = bounds.output_levels(delta_of_draws(s), DEVICE)
    codes, maps = random_codes(2, G, N), networks(H, D, 48)
    found = poisoned(lambda: steps.decode(p.q, p.k, p.v, vattention.kernel_settings(s), lists=L, codes=codes, maps=maps,
                                          seed=5, **given, **p.masks))
    n = (end - first)[:, 0, 0].expand(2)
    left, right, best = zip(*(kept_of(found, s, 0, int(x)) for x in n))
    kept = torch.tensor([[int(x) - (b - a) + c] * L for x, a, b, c in zip(n, left, right, best)], device=DEVICE)
    chosen = vattention.read_rows(found, kept, H)
    assert_close(found.out, true_output(visible, chosen.index, chosen.weight), rtol={FP32: 3e-6, BF16: 8e-3}.get(dtype,
        2e-3))
    index, parts, n_s = base_sample(found, kept, H)
    used = parts[0] | parts[1] | parts[2]
    e, shift = exponential_terms(visible.q.double(), visible.k.double(), index, used, None)
    reach = torch.exp(top - shift) if wide else (e * (parts[1] | parts[2])).amax(-1)
    rows = e[..., None] * take_rows(visible.v, index).double().masked_fill(~used[..., None], 0)
    how = plugin, bound, chance_of_facts(s)
    below = vattention.residual_facts(e[..., None], *parts, n_s, reach, *how, False)
    above = vattention.residual_facts(rows, *parts, n_s, reach * longest, *how, True)
    rest = found.rest.repeat_interleave(H // L, 1)[:, :, None]
    want, asked = vattention.draws_needed(s, below, above, rest), found.facts[:, :, None, 2].double()
    assert_close(found.norm[..., None], above.size, rtol=5e-3)
    assert ((asked - want).abs() <= 2 + 1e-2 * want).all() and (above.size > 0).any()
    assert wide or ((vattention.CLT_LEAST < want) & (want < rest)).any()  # neither bound of the draws decides alone


@kernel
@pytest.mark.parametrize("guarantee", ["numerator", "output"])
def test_vattention_reads_all_where_a_value_is_no_number(guarantee):
    p = problem(1, 2, 1, 900, 16, FP32, spread=0.2)
    s = vattention.VAttention(0.5, 0.5, 3, 7, 0.05, 0.2, guarantee=guarantee, predictor=Quest(page=8))
    p.v.add_(3)
    p.v[:, 1, 450] = math.nan
    out, stats = s.decode(*p[:3], seed=3, return_stats=True, backend="triton")
    assert out[0, 1].isnan().all() and not out[0, 0].isnan().any()
    assert stats.certificate.exact.flatten().tolist() == [False, True]


@kernel
@pytest.mark.parametrize("plugin", ["upper", "plain"])
@pytest.mark.parametrize("guarantee", ["numerator", "output"])
def test_vattention_guarantees_in_any_unit_of_the_values(guarantee, plugin):
    p = problem(1, 2, 1, 900, 16, FP32, spread=0.2)
    p.v.add_(3)
    s = vattention.VAttention(0.03, 0.3, 3, 7, 0.05, 0.3, guarantee=guarantee, plugin=plugin,
                              predictor=Quest(page=8))
    run = lambda power: s.decode(p.q, p.k, p.v * 2.0**power, seed=3, return_stats=True, backend="triton")[1].certificate
    plain = run(0)
    assert not plain.exact.any() and (plain.needed > vattention.CLT_LEAST).any()
    for power in (-40, 54): assert torch.equal(run(power).needed, plain.needed)  # 54: squares of sums leave float32
    assert run(70).exact.all()                                                 # those of the values do, too


@kernel
def test_vattention_reads_lengths_that_were_cut():
    "Those of an index that was cropped lie as long as they were."
    p = problem(1, 2, 2, 900, 16, FP32, spread=0.2)
    p.v.mul_(torch.linspace(0.5, 4, 900, device=DEVICE)[:, None]).add_(3)
    s = vattention.VAttention(0.3, 0.3, 3, 7, 0.05, 0.3, guarantee="output", predictor=Quest(page=8))
    state, whole = s.new_state(), s.new_state()
    state.append(p.k, p.v)
    state.crop(700)
    k, v = p.k[:, :, :700], p.v[:, :, :700]
    whole.append(k, v)
    assert not state.lengths.is_contiguous()
    found = [s.decode(p.q, k, v, seed=3, state=x, return_stats=True, backend="triton") for x in (state, whole)]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(*(x.certificate.needed for _, x in found)) and not found[0][1].certificate.exact.all()


kl_bounds = steps._kl_bounds

@triton.jit
def _lower_bounds(mean_ptr, log_ptr, out_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    mean, log = tl.load(mean_ptr + o), tl.load(log_ptr + o)
    tl.store(out_ptr + o, kl_bounds(mean, log, mean, log)[1])

@kernel
@pytest.mark.parametrize("draws", [24, 1000, 100000])
def test_vattention_bounds_of_tiny_means_stay_below_them(draws):
    log = torch.full((64,), math.log(100) / draws, device=DEVICE)
    # exp(-log / mean) leaves float32
    mean, lower = log / torch.linspace(80, 105, 64, device=DEVICE), torch.empty_like(log)
    _lower_bounds[1,](mean, log, lower, BN=64)
    assert (lower >= 0).all() and (lower < 1e-3 * mean).all()


@triton.jit
def _places_kernel(asked_ptr, n, rest_ptr, out_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(out_ptr + o, steps._places(tl.load(asked_ptr + o), n, tl.load(rest_ptr + o)))


@kernel
@pytest.mark.parametrize("n", [70, 4096, 131072])
def test_vattention_asks_for_places_that_hold_the_draws(n):
    "The exact chance that the places hold fewer new keys than were asked for: at most e^-15, whatever the counts."
    counts, shares = (1, 2, 5, 12, 32, 100, 1000, 10000), range(2, n + 1, max(1, n // 60))
    pairs = [(a, r) for a in counts for r in shares if a < r][:1024]
    asked, rest = (torch.tensor([x[i] for x in pairs] + [1] * (1024 - len(pairs)), device=DEVICE) for i in (0, 1))
    out = torch.empty(1024, dtype=torch.int32, device=DEVICE)
    _places_kernel[1,](asked.float(), n, rest.int(), out, BLOCK=1024)
    asked, rest, out = (x.cpu().numpy()[:len(pairs)] for x in (asked, rest, out))
    assert (out <= n).all() and (out >= asked).all() and (out < n).mean() > 0.3
    assert scipy.stats.hypergeom.cdf(asked - 1, n, rest, out).max() <= math.exp(-15)


@kernel
def test_vattention_draws_uniformly_and_keeps_its_guarantee():
    B, N = sizes((4096, 600), (30, 400))
    one, s = problem(1, 1, 2, N, 16, FP32, spread=0.5), vattention.VAttention(0.2, 0.2, sinks=2, window=4, topk=0.03,
        base=0.1)
    p = Problem(*(x.expand(B, -1, -1, -1) for x in one[:3]))
    codes, maps = random_codes(1, 1, N).expand(B, -1, -1, -1), networks(2, 16, 32)
    found = poisoned(lambda: steps.decode(p.q, p.k, p.v, settings_of(s), lists=1, codes=codes, maps=maps, seed=9))
    kept = int(kept_of(found, s, 0, N)[2]) + 6
    chosen = vattention.read_rows(found, torch.full((B, 1), kept, device=DEVICE), 2)
    dense = torch.zeros(B, N, dtype=torch.double, device=DEVICE).scatter_add_(-1, chosen.index[:, 0, 0],
        chosen.weight[:, 0, 0].double())
    assert_close(dense.sum(-1), torch.full((B,), float(N), device=DEVICE), rtol=1e-5)
    # each key outside the kept ones is in the base sample as often as any other
    base = (found.rows[:, 0, found.slots:] >= 0) & ((found.rows[:, 0, found.slots:] >= 0).cumsum(-1)
                                                    <= found.base.sum(-1))
    base &= torch.arange(N, device=DEVICE) < found.places
    hits = torch.zeros(B, N + 1, device=DEVICE).scatter_add_(-1, torch.where(base, found.rows[:, 0, found.slots:],
        N).long(), torch.ones(B, N, device=DEVICE))[:, :N].sum(0)
    others = (found.rows[0, 0, :kept, None] != torch.arange(N, device=DEVICE)).all(0)
    share = base.sum(-1).double() / (N - kept)
    z = (hits[others] - share.sum()) / (share * (1 - share)).sum().sqrt()
    assert float(z.abs().max()) < NormalDist().inv_cdf(1 - ALARM / 2 / int(others.sum())) and not hits[~others].any()
    # the estimate of the denominator is unbiased, and rarely off by more than guaranteed
    terms = torch.exp(masked_scores(p.q[:1].double(), p.k[:1].double(), 0, *visible_range(p.q[:1], p.k[:1]),
                                    None)[0, :, 0])
    assert not (found.extra.sum(-1) == found.rest).any()
    D = dense @ terms.T
    z = (D.mean(0) - terms.sum(-1)) * B**0.5 / D.std(0)
    assert float(z.abs().max()) < NormalDist().inv_cdf(1 - ALARM / 4)
    failed = ((D / terms.sum(-1) - 1).abs() > s.eps).sum(0)
    assert all(scipy.stats.binom.sf(int(x) - 1, B, s.delta) > ALARM for x in failed)


@kernel
def test_vattention_streams_and_device_seeds():
    p = problem(2, 2, 2, 250, 16, FP32)
    codes, maps = random_codes(2, 2, 250), networks(4, 16, 32)
    run = lambda seed, lists=2: steps.decode(p.q, p.k, p.v, settings_of(STEP), lists=lists, codes=codes, maps=maps,
                                             seed=seed)
    order = lambda x: x.rows[:, :, x.slots:x.slots + 20]
    one = run(2**40 + 7)
    assert (torch.equal(one.out, run(2**40 + 7).out) and torch.equal(one.out,
        run(torch.tensor(2**40 + 7, device=DEVICE)).out))
    assert (not torch.equal(order(one), order(run(8))) and not torch.equal(order(one)[0], order(one)[1])
            and not torch.equal(order(one)[:, 0], order(one)[:, 1]))
    rows, heads = torch.arange(2, device=DEVICE).view(-1, 1), torch.arange(4, device=DEVICE)
    assert torch.equal(run(fold_in(2**40 + 7, rows, heads)).out, one.out)
    assert torch.equal(order(run(fold_in(2**40 + 7, rows, heads), 4))[:, ::2], order(run(2**40 + 7, 4))[:, ::2])


@kernel
def test_vattention_lists_of_groups_draw_as_their_first_heads():
    p, s = problem(2, 2, 2, 250, 16, FP32), vattention.VAttention(0.2, 0.1, sinks=0, window=0, topk=0, base=0.1)
    codes, maps = random_codes(2, 2, 250), networks(4, 16, 32)
    group, head = (steps.decode(p.q, p.k, p.v, settings_of(s), lists=lists, codes=codes, maps=maps, seed=7)
                   for lists in (2, 4))
    assert group.slots == 0 and torch.equal(group.rows[..., :20], head.rows[:, ::2, :20])
    assert not torch.equal(group.rows[..., :20], head.rows[:, 1::2, :20])


@kernel
def test_vattention_finds_the_longest_value_wherever_it_stands():
    "Among the first keys and the last ones, all of which are kept: the guarantee knows its length alone."
    p, s = problem(2, 1, 2, 300, 16, FP32, ragged=True, spread=0.2), dataclasses.replace(STEP, guarantee="numerator")
    p.v.add_(3)
    codes, maps = random_codes(2, 1, 300), networks(2, 16, 32)
    def run(at):
        lengths = torch.full((2, 1, 300), 16.0, device=DEVICE)
        for b in range(2): lengths[b, :, at[b]] = 40
        return steps.decode(p.q, p.k, p.v, vattention.kernel_settings(s), lists=1, codes=codes, maps=maps, seed=5,
                            lengths=lengths, **p.masks)
    first, last = p.start.tolist(), p.stop.tolist()
    wide, hidden = run(first), run([0, first[1] - 1])
    assert (wide.norm < hidden.norm)[1].all() and (wide.norm > 0).any()
    for at in ([x + 2 for x in first], [x - 7 for x in last], [x - 1 for x in last]):
        found = run(at)
        assert torch.equal(found.norm, wide.norm) and torch.equal(found.facts, wide.facts), at
    assert torch.equal(run([0, last[1]]).norm[1], hidden.norm[1])


@kernel
@pytest.mark.parametrize("predictor, share, bound, plugin", sizes(
    [(x, share, *how) for x in ("oracle", Quest(page=8)) for share in (True, False)
     for how in (("clt", "upper"), ("clt", "plain"), ("bernstein", "upper"), ("hoeffding", "upper"))],
    [("oracle", True, "clt", "upper"), ("oracle", False, "bernstein", "upper"),
     (Quest(page=8), True, "hoeffding", "upper"), (Quest(page=8), False, "clt", "plain")]), ids=str)
def test_vattention_by_any_predictor(predictor, share, bound, plugin):
    p = problem(2, 2, 3, sizes(3000, 150), 16, FP32, ragged=True)
    k, v = (torch.where(x.isnan(), 0, x) for x in (p.k, p.v))
    method = vattention.VAttention(0.2, 0.1, 4, 5, 0.06, 0.1, predictor, bound=bound, plugin=plugin, share=share)
    (out, stats), (_, reference) = (method.decode(p.q, k, v, seed=3, **p.masks, return_stats=True, backend=x)
                                    for x in ("triton", "torch"))
    mine, theirs = stats.certificate, reference.certificate
    visible = (visible_range(p.q, k, **p.masks)[1] - visible_range(p.q, k, **p.masks)[0]).expand(mine.kept.shape)
    assert (torch.equal(mine.kept, theirs.kept) and mine.proven == theirs.proven
            and torch.equal(mine.kept + mine.base + mine.rest, visible))
    assert (((mine.budget >= mine.needed) | (mine.budget == mine.rest)).all() and torch.equal(mine.exact,
        mine.budget == mine.rest))
    assert torch.equal(stats.values_read, visible - mine.rest + mine.budget)
    group = mine.density.unflatten(1, (2, -1))
    assert ((mine.group_density >= group.amax(2) - 1e-6).all() and (not share or torch.equal(mine.group_density,
        group[:, :, 0])))
    if mine.exact.all(): assert_close(out, attention(p.q, k, v, **p.masks), rtol=1e-5)
    assert torch.equal(out, method.decode(p.q, k, v, seed=3, **p.masks, backend="triton"))


@kernel
def test_vattention_of_few_keys_reads_all_and_spoilt_heads_show():
    for N in (1, 2, 5, 33):
        p = problem(1, 1, 2, N, 16, FP32)
        out = steps.decode(p.q, p.k, p.v, settings_of(STEP), lists=1, codes=random_codes(1, 1, N),
                           maps=networks(2, 16, 32), seed=1).out
        assert_close(out, true_output(p, torch.arange(N, device=DEVICE).expand(1, 2, 1, N),
                                      torch.ones(1, 2, 1, N, device=DEVICE)), rtol=1e-5)
    p = problem(1, 2, 1, 300, 16, FP32)
    p.k[:, 1, 0] = math.nan
    out = steps.decode(p.q, p.k, p.v, settings_of(STEP), lists=2, codes=random_codes(1, 2, 300),
                       maps=networks(2, 16, 32), seed=1).out
    assert out[0, 1].isnan().all() and not out[0, 0].isnan().any()


@kernel
def test_vattention_refuses_what_has_no_kernel():
    p = problem(1, 2, 2, 100, 16, FP32)
    decode_ = lambda q=p.q, lists=2, **kw: steps.decode(q, p.k, p.v, settings_of(STEP), lists=lists,
                                                        **({"codes": random_codes(1, 2, 100),
                                                            "maps": networks(4, 16, 32)} | kw))
    with pytest.raises(ValueError, match="lists must be 4 or 2, for each head or for each group, got 1"):
        decode_(lists=1)
    with pytest.raises(ValueError, match="codes or kept must be given, and not both"): decode_(codes=None)
    with pytest.raises(ValueError, match="q must have one query for backend='triton', got 2"):
        decode_(q=torch.zeros(1, 4, 2, 16, device=DEVICE))
    with pytest.raises(TypeError,
                       match="q must be float16, bfloat16 or float32 for backend='triton', got torch.float64"):
        decode_(q=p.q.double())
    with pytest.raises(ValueError, match="q must have a head size of at most 256 for backend='triton', got 300"):
        decode_(q=torch.zeros(1, 4, 1, 300, device=DEVICE))
    with pytest.raises(TypeError,
                       match="q must be float16, bfloat16 or float32 for backend='triton', got torch.float64"):
        STEP.decode(*(x.double() for x in p[:3]), backend="triton")
    with pytest.raises(ValueError, match="backend must be one of"): STEP.decode(*p[:3], backend="cuda")


@kernel
def test_vattention_compiles_into_one_graph():
    p, seed = problem(1, 2, 2, 200, 16, FP32), torch.tensor(5, device=DEVICE)
    codes, maps, settings, how = random_codes(1, 2, 200), networks(4, 16, 32), settings_of(STEP), dict(fullgraph=True,
        backend="inductor" if GPU else "eager")
    call = lambda q, seed: steps.decode(q * 1, p.k, p.v, settings, lists=2, codes=codes, maps=maps, seed=seed).out
    assert torch.equal(torch.compile(call, **how)(p.q, seed), call(p.q, seed))
    quest = vattention.VAttention(0.2, 0.1, 3, 7, 0.05, 0.1, Quest(page=8))
    for method in (STEP, quest, dataclasses.replace(quest, guarantee="numerator"), dataclasses.replace(STEP,
                                                                                        guarantee="output")):
        call = lambda q, seed: method.decode(q * 1, p.k, p.v, seed=seed, backend="triton")
        assert_close(torch.compile(call, **how)(p.q, seed), call(p.q, seed), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("bound", vattention.BOUNDS)
def test_budgets_in_a_graph(bound):
    sigma, D, trace, norm, reach = torch.rand(5, 8, 12, dtype=torch.float64,
                                              device=DEVICE) * torch.tensor([1, 900, 1, 900, 9],
                                                  device=DEVICE)[:, None, None]
    call = lambda: torch.stack([vattention.budget_output(sigma, D, trace, norm, 5000, 0.3, 0.1, bound, width=reach,
                                                         reach=reach),
                                                         vattention.budget_denominator(sigma, D, 5000, 0.3, 0.1, bound,
                                                             width=reach),
                                vattention.budget_numerator(trace, norm, 5000, 0.3, 0.1, bound, reach=reach)])
    replay, out = captured(call)
    sigma *= 0.5
    out.fill_(-1)
    replay()
    torch.cuda.synchronize()
    assert torch.equal(out, call())


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_vattention_in_a_graph():
    p, seed = problem(2, 2, 4, 3000, 128, BF16), torch.tensor(0, device=DEVICE)
    codes, maps, stop, settings = random_codes(2, 2, 3000), networks(8, 128, 64), torch.tensor([3000, 2500],
        device=DEVICE), settings_of(STEP)
    call = lambda: steps.decode(p.q, p.k, p.v, settings, lists=2, codes=codes, maps=maps, seed=seed, kv_end=stop).out
    replay, out = captured(call)
    for step in range(3):
        seed.fill_(2**40 * step + 3)
        stop.copy_(torch.tensor([3000 - 700 * step, 40 + step]))
        out.fill_(math.nan)
        replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call())
    host = [pinned(x) for x in (p.k, p.v)]
    assert torch.equal(steps.decode(p.q, *host, settings, lists=2, codes=codes, maps=maps, seed=seed, kv_end=stop).out,
                       call())
    for method in (STEP, vattention.VAttention(0.2, 0.1, 3, 7, 0.05, 0.1),
                   vattention.VAttention(0.2, 0.1, 3, 7, 0.05, 0.1, Quest(), share=False)):
        replay, out = captured(lambda: method.decode(p.q, p.k, p.v, seed=seed))
        replay()
        assert torch.equal(out, method.decode(p.q, p.k, p.v, seed=seed))


# SANTA with keys of eight bits

def with_bytes(p, room=0):
    "Keys whose first channel makes their index coarse, the index, with `room` behind it, and what it stands for."
    k = p.k.clone()
    k[..., 0] += 20
    state = Int8Keys()
    state.append(k, p.v)
    if room:
        state.to_static(k.shape[2] + room)
        state.to_dynamic(k.shape[2], k)
    return p._replace(k=k), state, p._replace(k=state.keys())


def by_bytes(p, state, samples, rescore, scheme="systematic", **settings):
    "Output and drawn keys of the launches, at seed 3."
    return poisoned(lambda: kernels.launch(p.q, p.k, p.v, samples, scheme, 32, 3, None, p.start, p.stop, True,
                                           codes=state.rows, units=state.unit, rescore=rescore, **settings))


def reweighted_mean(p, scored, index):
    "Mean of the drawn values [B, H, 1, D], weighted by the quotients of the true weights and those of the index."
    (first, end), i = visible_range(p.q, p.k, **p.masks), index.long()
    k, guess = (x.double().masked_fill(~shown(p)[..., None], 0) for x in (p.k, scored.k))
    exact, by = (masked_scores(p.q.double(), x, 0, first, end, None).gather(-1, i) for x in (k, guess))
    row, group = torch.arange(len(p.q), device=DEVICE).view(-1, 1, 1), torch.arange(p.q.shape[1], device=DEVICE)
    values = p.v[row, (group // (p.q.shape[1] // p.k.shape[1])).view(-1, 1), i[:, :, 0]].double()
    weight = (exact - by).softmax(-1)
    assert not p.masks["kv_end"] is None or weight.max() > 1.05 / i.shape[-1]  # the index is coarse enough to be seen
    return weight @ values


def shown(p):
    "Which keys are visible [B, 1, N]."
    first, end = visible_range(p.q, p.k, **p.masks)
    i = torch.arange(p.k.shape[2], device=DEVICE)
    return (i >= first) & (i < end)


@kernel
@pytest.mark.parametrize("rescore", [False, True])
@pytest.mark.parametrize("scheme, settings", [("systematic", {}), ("systematic", dict(sub=8)),
                                              ("stratified", dict(BS=8)), ("iid", {}), ("proportional", {})], ids=str)
@pytest.mark.parametrize("dtype, D, R, layout, room", sizes(
    [(BF16, 128, 4, "plain", 0), (FP32, 80, 3, "plain", 9), (FP16, 64, 1, "every second", 0)],
    [(BF16, 24, 2, "by position", 9), (FP32, 16, 3, "plain", 0)]), ids=str)
def test_scores_of_bytes(dtype, D, R, layout, room, scheme, settings, rescore):
    p = problem(2, 1, R, sizes(1000, 150), D, dtype, layout=layout, ragged=True)
    (p, state, scored), samples = with_bytes(p, room), sizes(128, 20)
    out, index = by_bytes(p, state, samples, rescore, scheme, **settings)
    plain = out if not rescore else by_bytes(p, state, samples, False, scheme, **settings)[0]
    audit(scored, plain, index, samples=samples, scheme=scheme, tile=32, seed=3)
    if not rescore: return
    assert torch.equal(index, by_bytes(p, state, samples, False, scheme, **settings)[1])
    # the mass that a draw used was stashed in half precision
    assert_close(out, reweighted_mean(p, scored, index), rtol=2e-5 if dtype == FP32 else
                 torch.finfo(dtype).eps + 2e-3)


@kernel
def test_weights_far_apart_do_not_overflow():
    p, state, scored = with_bytes(problem(1, 1, 2, 60, 16, FP32))
    p = p._replace(k=p.k * 40)  # not the keys of the index: quotients of the weights are beyond float32
    for settings in (dict(BS=32), dict(BS=4)):
        out, index = by_bytes(p, state, 32, True, **settings)
        assert_close(out, reweighted_mean(p, scored, index), rtol=1e-3)


@kernel
@pytest.mark.parametrize("keys", ["int8", "rescored"])
@pytest.mark.parametrize("how", ["nan", "+inf"])
def test_spoilt_keys_show_through_their_bytes(how, keys):
    p = problem(2, 2, 1, sizes(1000, 40), 16, FP32)
    whole, bad = (decode(x.q, x.k, x.v, samples=8, seed=1, codes=state.rows, units=state.unit,
                         rescore=keys == "rescored")
                  for x in (spoilt(p, 0, 0, "nothing")._replace(k=p.k), spoilt(p, 1, 0, how))
                  for state in (with_bytes_of(x),))
    assert bad[1, 0].isnan().all() and torch.equal(bad[0], whole[0]) and torch.equal(bad[1, 1], whole[1, 1])


def with_bytes_of(p):
    state = Int8Keys()
    state.append(p.k, p.v)
    return state


@kernel
@pytest.mark.parametrize("keys", ["int8", "rescored"])
def test_public_call_with_keys_of_eight_bits(keys):
    p, state, _ = with_bytes(problem(2, 1, 3, sizes(1000, 60), 16, FP32, ragged=True))
    kept = dict(samples=24, seed=3, keys=keys, return_stats=True, **p.masks)
    found = [santa_decode(*p[:3], state=x, backend=y, **kept) for x, y in ((state, "triton"), (None, "triton"),
                                                                         (state, "torch"))]
    for out, stats in found[:2]:
        for name in ("keys_scored", "values_read", "index_bytes", "budget"):
            a, b = (getattr(x, name) for x in (stats, found[2][1]))
            assert (a - b).abs().max() <= 2 * (name in ("values_read", "keys_scored"))
        assert torch.equal(out, found[0][0])
    assert_close(found[0][0], found[2][0], rtol=0.3)
    assert (found[0][1].keys_scored == (found[0][1].values_read if keys == "rescored" else 0)).all()
    assert torch.equal(found[0][1].index_bytes, shown(p).sum(-1)[..., None].expand(2, 3, 1) * 20)


@kernel
@pytest.mark.parametrize("keys", ["int8", "rescored"])
def test_keys_of_eight_bits_compile_into_one_graph(keys):
    p, state, _ = with_bytes(problem(2, 1, 4, sizes(1000, 40), 16, BF16, ragged=True))
    def step(q, k, v, seed, start, stop):
        return 2 * santa_decode(q, k, v, samples=16, seed=seed, kv_start=start, kv_end=stop, backend="triton",
                                keys=keys, state=state)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=sizes("inductor", "eager"))
    seed = torch.tensor(3, device=DEVICE)
    assert torch.equal(compiled(*p[:3], seed, p.start, p.stop), step(*p[:3], seed, p.start, p.stop))
    arguments = (*p[:3], 8, "systematic", 128, None, 7, None, None, None, None, state.rows, state.unit,
                 keys == "rescored")
    torch.library.opcheck(torch.ops.sparse_nb.santa_decode, arguments, test_utils=("test_schema", "test_faketensor"))


@kernel
@pytest.mark.parametrize("D", [16, 24, 128])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_bytes_of_a_new_key_by_one_launch(dtype, D):
    n, wide = sizes(400, 30), (-44, 38) if dtype == FP32 else (-7, 4)
    k = torch.randn(2, 3, n, D, generator=torch.Generator().manual_seed(D)) * torch.logspace(*wide, n)[:, None]
    k[0, 0, 3], k[1, 1, 7] = 0, torch.arange(D) + 0.5  # halfway between two numbers once the largest is 127
    k[1, 1, 7, 0] = 127
    k[0, 0, 4, 1], k[0, 1, 5, 2], k[1, 2, 6, 0] = math.nan, math.inf, -math.inf
    k = k.to(DEVICE, dtype)
    places = [0, *range(3, 8), n - 2, -1, n - 1, n]  # the last two lie beyond what there is room for
    for x in k, k.transpose(1, 2).contiguous().transpose(1, 2):
        codes = torch.full((2, 3, n - 1, D), 55, dtype=torch.int8, device=DEVICE)
        units = torch.full((2, 3, n - 1), -5., device=DEVICE)
        want = codes.clone(), units.clone()
        for at in places: put_codes(x, torch.tensor([at], device=DEVICE), codes, units)
        for y, z in zip(want, quantise(x)): y[:, :, places[:-3]] = z[:, :, places[:-3]]
        assert torch.equal(codes, want[0]) and torch.equal(units.nan_to_num(-9), want[1].nan_to_num(-9))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("keys", ["int8", "rescored"])
def test_keys_of_eight_bits_in_a_graph_and_in_host_memory(keys):
    p, state, scored = with_bytes(problem(2, 2, 4, 1000, 64, BF16))
    seed, stop = torch.tensor(0, device=DEVICE), torch.tensor([1000, 900], dtype=torch.int32, device=DEVICE)
    how = dict(samples=64, seed=seed, kv_end=stop, codes=state.rows, units=state.unit, rescore=keys == "rescored")
    call = lambda: decode(p.q, p.k, p.v, **how)
    replay, out = captured(call)
    for step in range(3):
        seed.fill_(2**40 * step + step)
        stop.copy_(torch.tensor([1000 - 300 * step, 11 + step], dtype=torch.int32))
        out.fill_(math.nan)
        replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call()) and torch.equal(out, decode(p.q, pinned(p.k), pinned(p.v), **how))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("N, sub", [(131072, 1), (1048576, 8)])
def test_many_keys_of_eight_bits(N, sub):
    p, state, scored = with_bytes(problem(1, 2, 4, N, 128, BF16))
    assert kernels.launch_settings(p.q, p.k, 128)["sub"] == sub
    plain, index = by_bytes(p, state, 128, False)
    audit(scored, plain, index, samples=128, seed=3)
    assert_close(by_bytes(p, state, 128, True)[0], reweighted_mean(p, scored, index), rtol=1e-2)


BYTES = dict(codes=torch.zeros(1, 1, 30, 64, dtype=torch.int8), units=torch.zeros(1, 1, 30))

@pytest.mark.parametrize("change, error, message", [
    (dict(units=None), ValueError, "codes and units must be given together, got one of them"),
    (dict(codes=None), ValueError, "codes and units must be given together, got one of them"),
    (dict(codes=None, units=None, rescore=True), ValueError, "rescore must be False without codes, got True"),
    (dict(scheme="flash"), ValueError, "codes must be None for scheme='flash', got a tensor"),
    (dict(estimate=good["q"]), ValueError, "codes must be None with an estimate, got a tensor"),
    (dict(codes=BYTES["codes"].float()), ValueError,
     "codes must be torch.int8 [1, 1, 30, 64] on the device of q, cpu, got torch.float32 [1, 1, 30, 64] on cpu"),
    (dict(codes=BYTES["codes"][:, :, :29]), ValueError,
     "codes must be torch.int8 [1, 1, 30, 64] on the device of q, cpu, got torch.int8 [1, 1, 29, 64] on cpu"),
    (dict(units=BYTES["units"].half()), ValueError,
     "units must be torch.float32 [1, 1, 30] on the device of q, cpu, got torch.float16 [1, 1, 30] on cpu"),
    (dict(units=BYTES["units"].to("meta")), ValueError,
     "units must be torch.float32 [1, 1, 30] on the device of q, cpu, got torch.float32 [1, 1, 30] on meta"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_bad_bytes(change, error, message):
    with pytest.raises(error, match=re.escape(message)): decode(**(good | BYTES | change))


# slots that are not looked at
def counted_lists(p, S, kind, counts):
    "Lists whose heads use the first `counts` slots: with garbage in the others, the counts, and without the garbage."
    index, weight, whole = lists(p, S, kind)
    weight[..., 0] = 1
    count = torch.tensor(counts, device=DEVICE).expand(p.q.shape[:2])[..., None]
    unused = torch.arange(S, device=DEVICE) >= count[..., None]
    own = dict(head=p.q.shape[1], group=p.k.shape[1], all=1)[kind]
    garbage = index[:, :own].masked_fill(unused.unflatten(1, (own, -1)).all(2), 10**9).expand(index.shape)
    return (garbage, weight.masked_fill(unused, math.nan)), count, (whole, weight.masked_fill(unused, 0))


def attend_first(p, garbage, count): return gather.attend(p.q, p.k, p.v, *garbage, count)


@kernel
@pytest.mark.parametrize("kind", ["head", "group", "all"])
@pytest.mark.parametrize("dtype, rtol", [(BF16, 6e-3), (FP32, 2e-6)], ids=str)
def test_slots_behind_the_count_count_for_nothing(dtype, rtol, kind):
    for B, S in sizes(((2, 3000), (1, 40000)), ((2, 100), (1, 230))):
        p = problem(B, 2, 2, 300, 64, dtype)
        for counts in ([S, S // 3, 33, 1], [2, 1, 1, 32], [S] * 4):
            garbage, count, clean = counted_lists(p, S, kind, counts)
            assert_close(poisoned(lambda: attend_first(p, garbage, count)), true_output(p, *clean), rtol=rtol)
        assert_close(attend_first(p, garbage, 10 * count), gather.attend(p.q, p.k, p.v, *garbage), rtol=1e-7)
        garbage, count, (whole, weight) = counted_lists(p, S, kind, [5, 0, 40, 0])
        got = poisoned(lambda: attend_first(p, garbage, count.int()))
        assert got[:, 1::2].isnan().all()
        want = true_output(p, whole, torch.where(count[..., None] > 0, weight, 1.0))
        assert_close(got[:, ::2], want[:, ::2], rtol=rtol)
        assert poisoned(lambda: attend_first(p, garbage, 0 * count)).isnan().all()


@kernel
@pytest.mark.parametrize("dtype, rtol", [(BF16, 6e-3), (FP32, 2e-6)], ids=str)
def test_no_weights_are_weights_of_one(dtype, rtol):
    for (B, S), kind in product(sizes(((2, 3000), (1, 40000)), ((2, 100), (1, 230))), ("head", "group", "all")):
        p = problem(B, 2, 2, 300, 64, dtype)
        for counts in ([S, S // 3, 33, 1], [2, 1, 1, 32], [S] * 4):
            (index, _), count, (whole, weight) = counted_lists(p, S, kind, counts)
            ones = (torch.arange(S, device=DEVICE) < count[..., None]).to(weight.dtype)
            got = poisoned(lambda: gather.attend(p.q, p.k, p.v, index, None, count))
            assert_close(got, true_output(p, whole, ones), rtol=rtol)
        assert_close(gather.attend(p.q, p.k, p.v, whole, None), true_output(p, whole, torch.ones_like(ones)), rtol=rtol)
        state = gather.attend_state(p.q, p.k, p.v, index, None, count)
        assert_close(state[2] / state[1][..., None], gather.attend(p.q, p.k, p.v, index, None, count), rtol=rtol)


class Loads:
    "Which numbers of some tensors the kernels load in the interpreter, by program of the grid."
    def __init__(self, patch, **tensors):
        from triton.runtime import interpreter
        self.tensors, self.seen, load = tensors, {}, interpreter.InterpreterBuilder.create_masked_load
        def note(builder, ptrs, mask, *rest):
            at = ptrs.data[mask.data.astype(bool)].astype("int64")
            for name, x in self.tensors.items():
                place = (at - x.data_ptr()) // x.element_size()
                place = place[(place >= 0) & (place < x.numel())]
                self.seen.setdefault((name, tuple(builder.grid_idx)), set()).update(place.tolist())
            return load(builder, ptrs, mask, *rest)
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", note)

    def of(self, name):
        "Places of the numbers of one tensor that any program loads."
        return set().union(*(places for (of, _), places in self.seen.items() if of == name))

    def most(self, name):
        "As many as one program loads at most."
        return max(len(places) for (of, _), places in self.seen.items() if of == name)


@kernel
@pytest.mark.skipif(not INTERPRETED, reason="looks on in the interpreter")
@pytest.mark.parametrize("kind", ["head", "group"])
def test_slots_behind_the_count_are_not_read(monkeypatch, kind):
    S, N, D = 480, 300, 16
    p = problem(1, 2, 2, N, D, FP32)
    for counts, given in (([70, 0, 33, 5], True), ([S] * 4, False)):
        (index, weight), count, _ = counted_lists(p, S, kind, counts)
        with monkeypatch.context() as patch:
            loads = Loads(patch, k=p.k, v=p.v, index=index, weight=weight)
            gather.attend(p.q, p.k, p.v, index, weight, count if given else None)
        ends = counts if kind == "head" else [max(counts[:2]), max(counts[2:])]
        slots = {(i, s) for i, end in enumerate(ends) for s in range(end)}
        assert loads.of("index") == {i * S + s for i, s in slots}
        assert loads.of("weight") == {h * S + s for h, end in enumerate(counts) for s in range(end)}
        rows = {i * 2 // len(ends) * N + int(index[0, i, 0, s]) for i, s in slots}
        for name in ("k", "v"): assert loads.of(name) == {row * D + d for row in rows for d in range(D)}
        parts = 8 // len(ends)  # of a list
        assert loads.most("index") == 32 * math.ceil(max(ends) / parts / 32)


@kernel
@pytest.mark.parametrize("dtype, rtol", [(BF16, 6e-3), (FP32, 2e-6)], ids=str)
def test_states_of_chosen_rows_are_joined(dtype, rtol):
    p, S = problem(2, 2, 2, 300, 80, dtype), 230
    (index, weight), count, (whole, clean) = counted_lists(p, S, "head", [S, 0, 40, 3])
    state = SoftmaxState(*poisoned(lambda: gather.attend_state(p.q, p.k, p.v, index, weight, count, scale=0.3)))
    assert all(x.dtype == torch.float32 for x in state)
    assert state.m[:, 1].eq(-math.inf).all() and not state.l[:, 1].any() and not state.o[:, 1].any()
    other = Selection(*lists(p, 50, "head", seed=7)[:2])
    both = Selection(torch.cat([whole, other.index], -1), torch.cat([clean, other.weight], -1))
    wide = p._replace(q=p.q * 0.3 * 80**0.5)
    near = weighted_state(p.q, p.k, p.v, other, scale=0.3, backend="triton")
    assert_close(merge_states(state, near).output(), true_output(wide, both.index, both.weight), rtol=rtol)
    assert_close(near.output(), weighted_state(p.q, p.k, p.v, other, scale=0.3).output(), rtol=rtol)


@kernel
def test_counts_in_one_graph():
    p = problem(1, 2, 2, 300, 64, FP32)
    (index, weight), count, _ = counted_lists(p, 90, "group", [90, 9, 0, 33])
    for n in (count, None):
        call = lambda q, i, w: (gather.attend(q, p.k, p.v, i, w, n), *gather.attend_state(q, p.k, p.v, i, w, n))
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(p.q, index, weight)
        for x, y in zip(got, call(p.q, index, weight)): assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_counts_in_a_graph_and_in_the_compiler():
    p, S = problem(2, 2, 2, 3000, 128, BF16), 2000
    (index, weight), count, _ = counted_lists(p, S, "group", [S, 9, 0, 700])
    count = count.contiguous()
    call = lambda: gather.attend(p.q, p.k, p.v, index, weight, count)
    replay, out = captured(call)
    for counts in ([1, 2, 3, 4], [S, S, 500, 33]):
        more, now, clean = counted_lists(p, S, "group", counts)
        for x, y in zip((index, weight, count), (*more, now)): x.copy_(y)
        out.fill_(math.nan)
        replay()
        assert torch.equal(out, call())
        assert_close(out, true_output(p, *clean), rtol=6e-3)
    assert torch.equal(torch.compile(lambda q, i, w, n: gather.attend(q * 1, p.k, p.v, i, w, n),
                                     fullgraph=True)(p.q, index, weight, count), out)


if not INTERPRETED:
    @pytest.mark.kernels
    @pytest.mark.parametrize("kind, D, LR", [("bf16", 128, 4), ("fp16", 80, 1), ("bf16", 256, 4), ("fp32", 256, 4)])
    @pytest.mark.parametrize("capability", [80, 90, 100])
    def test_the_gather_of_counted_slots_does_not_spill(capability, kind, D, LR):
        BD, itemsize = triton.next_power_of_2(D), 4 if kind == "fp32" else 2
        types = dict(index_ptr="i64", count_ptr="i64") | {f"{x}_ptr": kind for x in ("q", "k", "v")}
        for weighed in (True, False):
            BN, stages, programs = gather._tile(BD, itemsize, weighed)
            constants = dict(D=D, BD=BD, PDL=capability >= 90, i_s=1, LR=LR, BR=16, BN=BN, STAGES=stages)
            constants |= dict(w_s=1) if weighed else dict(weight_ptr=None)
            used = compiled_usage(gather._gather_kernel, constants, types, capability, gather._WARPS)
            assert used["spills"] == 0, used
            assert used["registers"] <= 255 and used["shared"] <= 99 * 1024, used
            fitting = 2**16 // (32 * gather._WARPS * used["registers"])
            assert fitting >= programs or BD * itemsize > 256, used
        merge = compiled_usage(merge_kernel, constants | dict(BP=512, BW=32), {}, capability, 4)
        assert merge["spills"] == 0, merge
