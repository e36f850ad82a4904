"""The kernels of exact attention for one query: against float64 for every type, size, layout and tile, on the CPU in
Triton's interpreter and on a GPU; how the keys are shared; what hidden rows, huge scores and empty sequences do.
"""
import importlib.util
import math
import random
import re

import pytest
import torch

from covering import covering
from problems import DEVICE, GPU, INTERPRETED, LAYOUTS, kernel, poisoned
from sparse_nb.core import selection
from sparse_nb.core.exact import assert_close, attention
from sparse_nb.core.methods import Exact
from sparse_nb.core.selection import full_attention

TRITON = importlib.util.find_spec("triton") is not None
if TRITON: from sparse_nb.kernels.exact import Tiles, attend_all, launch
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOLERANCE = {BF16: 2**-8, FP16: 2**-11, FP32: 1e-5} if GPU else {BF16: 2**-7, FP16: 2**-10, FP32: 2e-6}


def problem(B, G, R, N, D, dtype=BF16, *, layout="plain", spans=None, seed=0):
    "Gaussian q, k, v and, with `spans`, the bounds of the visible keys of each sequence: all else is NaN."
    generator = torch.Generator(DEVICE).manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)
    q, k, v = new(B, G * R, 1, D), *(LAYOUTS[layout](B, G, N, D, new) for _ in range(2))
    if spans is None: return (q, k, v), {}
    for x in (k, v):
        for b, (start, stop) in enumerate(spans): x[b, :, :start] = x[b, :, stop:] = math.nan
    start, stop = torch.tensor(spans, device=DEVICE).T
    return (q, k, v), dict(kv_start=start.contiguous(), kv_len=stop.to(torch.int32))


def check(got, q, k, v, masks, scale=None):
    "Hold the output against exact attention in float64."
    assert got.dtype == q.dtype and got.shape == q.shape
    assert_close(got, attention(*(x.double() for x in (q, k, v)), scale=scale, **masks), TOLERANCE[q.dtype])


# the kernels

FACTORS = dict(dtype=(BF16, FP16, FP32), D=(64, 80, 128, 256), R=(1, 3, 4, 20), layout=tuple(LAYOUTS), B=(1, 2, 5),
               ragged=(False, True), scale=(None, 0.5))


def drawn_cases():
    "Cases in which each pair of values of two factors appears, of 400 that are drawn."
    draw = random.Random(0)
    cases = [{name: draw.choice(values) for name, values in FACTORS.items()} for _ in range(400)]
    return [cases[i] for i in covering(cases)]


def some_cases():
    "All cases on a GPU; in the interpreter ten, among them every value."
    met, first, rest = set(), [], []
    for case in drawn_cases():
        values = set(case.items())
        (rest if values <= met else first).append(case)
        met |= values
    assert len(first) <= 10
    return (first + rest)[:10] if INTERPRETED else first + rest


@kernel
@pytest.mark.parametrize("case", some_cases(), ids=lambda case: "-".join(str(x) for x in case.values()))
def test_kernel_all(case):
    B, N = case["B"], 3000 if GPU else 90
    spans = [(b * N // 9, N - b * N // 9) for b in range(B)] if case["ragged"] else None
    x, masks = problem(B, 2, case["R"], N, case["D"], case["dtype"], layout=case["layout"], spans=spans)
    got = poisoned(lambda: full_attention(*x, scale=case["scale"], backend="triton", **masks))
    check(got, *x, masks, case["scale"])


SPANS = [(0, 1), (3, 70), (69, 70), (5, 5 + 31), (10, 10 + 32), (0, 33), (37, 70)]


@kernel
@pytest.mark.parametrize("engine", [False, True], ids=["pointers", "engine"])
@pytest.mark.parametrize("columns", [0, 8, 16])
@pytest.mark.parametrize("keys, programs", [(16, 3), (32, 1), (64, 30)])
def test_kernel_tiles(keys, programs, columns, engine):
    if engine and GPU and torch.cuda.get_device_capability()[0] < 9: pytest.skip("needs the copy engine")
    x, masks = problem(len(SPANS), 1, 3, 70, 64, FP16, spans=SPANS)
    tiles = Tiles(keys, 4, 3, programs, columns)
    got = poisoned(lambda: launch(*x, None, *masks.values(), tiles, engine))
    check(got, *x, masks)
    assert torch.equal(got, launch(*x, None, *masks.values(), tiles, engine))


@kernel
@pytest.mark.parametrize("capacity, spans", [
    (20, [(0, 20)]), (4000, [(0, 3)]), (4000, [(5, 300)]), (4000, [(3990, 4000), (0, 1), (7, 1000)]),
    (900, [(0, 900), (0, 0), (300, 301), (2, 800)])])
@pytest.mark.parametrize("programs", [1, 7, 64])
def test_kernel_shares(capacity, spans, programs, monkeypatch):
    "With equal scores, the sum of exponentials of a part is how many keys it read: shares differ by a tile at most."
    (q, k, v), masks = problem(len(spans), 1, 2, capacity, 16, FP32, spans=spans)
    made, empty = [], torch.empty
    def recorded(*shape, **kw):
        made.append(empty(*shape, **kw).fill_(math.nan))
        return made[-1]
    monkeypatch.setattr(torch, "empty", recorded)
    tile = 32
    out = launch(q * 0, k, v, None, *masks.values(), Tiles(tile, 4, 2, programs, 0), False)
    monkeypatch.undo()
    for b, (start, stop) in enumerate(spans):
        if start < stop: assert_close(out[b, :, 0], v[b, :, start:stop].double().mean(1).expand(2, -1), TOLERANCE[FP32])
        else: assert out[b].isnan().all()
    shares, most = made[0][1, 0], made[0].shape[2] - len(spans) + 1                          # sums of head 0
    read = [int(x) for x in shares[~shares.isnan()] if x > 0]
    tiles = [-(-(stop - start) // tile) for start, stop in spans]
    assert sum(read) == sum(stop - start for start, stop in spans)
    used = min(most, sum(tiles))
    assert used <= len(read) <= used + sum(x > 0 for x in tiles) - 1
    assert max(read) <= -(-sum(tiles) // used) * tile


@kernel
def test_kernel_hidden_rows_are_not_seen():
    spans = [(63, 64), (0, 64), (64, 65), (129, 130), (20, 110)]
    x, masks = problem(5, 2, 4, 130, 64, BF16, spans=spans)
    got = poisoned(lambda: full_attention(*x, backend="triton", **masks))
    check(got, *x, masks)
    for b in (0, 2, 3):                                                                      # one key: its value
        assert torch.equal(got[b, :, 0], x[2][b, :, spans[b][0]].repeat_interleave(4, 0))


@kernel
def test_bounds_that_repeat_one_number():
    "Expanded, or every second of a tensor: the numbers count, not where they lie."
    from sparse_nb.kernels.exact import attend_all
    (q, k, v), _ = problem(3, 2, 4, 200, 64)
    start, stop = torch.tensor([5], device=DEVICE).expand(3), torch.tensor([90, 0, 90, 0, 90], device=DEVICE)[::2]
    for x in (k, v): x[:, :, :5], x[:, :, 90:] = math.nan, math.nan
    check(attend_all(q, k, v, kv_start=start, kv_len=stop), q, k, v, dict(kv_start=start, kv_len=stop))

@kernel
def test_kernel_lengths_beyond_the_buffer():
    (q, k, v), _ = problem(2, 1, 2, 50, 16, FP32)
    far = dict(kv_start=torch.tensor([-3, 10], device=DEVICE), kv_len=torch.tensor([50, 10**6], device=DEVICE))
    near = dict(kv_start=torch.tensor([0, 10], device=DEVICE), kv_len=torch.tensor([50, 50], device=DEVICE))
    assert torch.equal(attend_all(q, k, v, **far), attend_all(q, k, v, **near))


@kernel
def test_kernel_scores_that_are_no_numbers():
    (q, k, v), _ = problem(6, 1, 2, 100, 16, FP32)
    q[:, :, :, 0] = 1
    k[0, :, 10:40, 0], k[1, :, :, 0] = -math.inf, -math.inf
    k[2, :, 70, 0], k[3, :, 99, 0] = math.inf, math.nan
    v[4, :, 50] = math.inf
    stop = torch.tensor([100, 100, 100, 100, 100, 0], device=DEVICE)
    got = attend_all(q, k, v, kv_len=stop)
    hidden = torch.ones(100, dtype=torch.bool, device=DEVICE)
    hidden[10:40] = False
    check(got[:1], q[:1], k[:1, :, hidden], v[:1, :, hidden], {})
    assert got[[1, 2, 3, 5]].isnan().all() and (got[4] == math.inf).all()


@kernel
@pytest.mark.parametrize("columns", [0, 16])
def test_kernel_huge_scores(columns):
    (q, k, v), _ = problem(1, 1, 3, 200, 64, FP32)
    k *= 3e4
    tiles = Tiles(32, 4, 2, 9, columns)
    for x in (k, -k): check(launch(q, x, v, None, None, None, tiles, False), q, x, v, {})
    k[:, :, 150] = 1e30 * q[:, 1]                                                            # one key has all the mass
    assert torch.equal(launch(q, k, v, None, None, None, tiles, False)[0, 1, 0], v[0, 0, 150])


@kernel
def test_kernel_compiles_into_one_graph():
    x, masks = problem(3, 1, 2, 70, 16, spans=[(0, 70), (69, 70), (3, 20)])
    def step(q, k, v, start, stop): return full_attention(q, k, v, kv_start=start, kv_len=stop, backend="triton")
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "eager")
    assert torch.equal(compiled(*x, *masks.values()), step(*x, *masks.values()))


@kernel
def test_kernel_operator():
    x, masks = problem(2, 1, 2, 40, 16, FP32, spans=[(0, 40), (3, 20)])
    torch.library.opcheck(torch.ops.sparse_nb.attend_all, (*x, None, *masks.values()),
                          test_utils=("test_schema", "test_faketensor"))


@kernel
def test_kernel_refuses():
    (q, k, v), _ = problem(1, 1, 2, 40, 16, FP32)
    for call, error, message in (
            (lambda: attend_all(q.double(), k, v), TypeError, "q must be float16, bfloat16 or float32"),
            (lambda: attend_all(q.expand(1, 2, 3, 16), k, v), ValueError, "q must have one query"),
            (lambda: attend_all(q, k.to("meta"), v), ValueError, f"k must be on the device of q, {q.device}, got meta"),
            (lambda: attend_all(q, k, v.to("meta")), ValueError, "v must be on the device of q"),
            (lambda: full_attention(q.requires_grad_(), k, v, backend="triton"), ValueError,
             "backend must be 'torch' or 'auto' where a gradient is wanted, got 'triton'")):
        with pytest.raises(error, match=re.escape(message)): call()


if GPU:
    @pytest.mark.gpu
    @pytest.mark.parametrize("N, G, R", [(131072, 8, 4), (40000, 1, 71), (5000, 32, 1)])
    def test_long(N, G, R):
        x, _ = problem(1, G, R, N, 128, BF16)
        check(Exact().decode(*x), *x, {})
        masks = dict(kv_len=torch.tensor([N // 3], device=DEVICE))
        check(Exact().decode(*x, **masks), *x, masks)

    @pytest.mark.gpu
    def test_graph_without_a_wait():
        from sparse_nb.bench import captured
        x, _ = problem(2, 8, 4, 20000, 128, BF16)
        start, stop = torch.tensor([0, 7], device=DEVICE), torch.tensor([1, 30], device=DEVICE)
        call = lambda: Exact().decode(*x, kv_start=start, kv_len=stop)
        call()
        torch.cuda.set_sync_debug_mode("error")
        try: call()
        finally: torch.cuda.set_sync_debug_mode("default")
        replay, out = captured(call)
        for n in (2, 63, 64, 65, 127, 4095, 4096, 20000):
            stop.copy_(torch.tensor([n, max(8, n // 2)]))
            out.fill_(math.nan)
            replay()
            check(out, *x, dict(kv_start=start, kv_len=stop))
            assert torch.equal(out, call())

    @pytest.mark.gpu
    def test_what_exact_decodes_with():
        (q, k, v), _ = problem(2, 2, 3, 500, 64, FP32)
        assert torch.equal(Exact().decode(q, k, v), attend_all(q, k, v))
        wide = [x.double() for x in (q, k, v)]
        assert torch.equal(Exact().decode(*wide), attention(*wide))
        assert torch.equal(Exact().decode(q, k.cpu().pin_memory(), v.cpu().pin_memory()), attention(q, k, v))
        q.requires_grad_()
        assert torch.autograd.grad(Exact().decode(q, k, v).sum(), q)[0].isfinite().all()


if not INTERPRETED:
    def test_the_torch_path_is_the_specification():
        x, masks = problem(2, 2, 3, 40, 16, FP64, spans=[(0, 40), (9, 31)])
        x, masks = [y.cpu() for y in x], {name: y.cpu() for name, y in masks.items()}
        assert torch.equal(full_attention(*x, **masks), attention(*x, **masks))
        out, stats = Exact().decode(*x, seed=0, return_stats=True, **masks)
        assert torch.equal(out, attention(*x, **masks))
        assert stats.values_read[:, 0, 0].tolist() == [40, 22]
        with pytest.raises(ValueError, match="kv_start < kv_len"): Exact().decode(*x, kv_len=torch.tensor([0, 40]))
        with pytest.raises(ValueError, match="seed must lie in"): Exact().decode(*x, seed=-1)

    @pytest.mark.skipif(not TRITON, reason="needs Triton")
    def test_one_query_is_for_the_kernels(monkeypatch):
        "Where a GPU is, the door hands one query to the kernels, with all that it was given."
        (q, k, v), masks = problem(2, 2, 3, 40, 16, FP32, spans=[(0, 40), (9, 31)])
        q, k, v, masks = q.cpu(), k.cpu(), v.cpu(), {name: x.cpu() for name, x in masks.items()}
        asked = []
        monkeypatch.setattr(selection, "has_kernels", lambda q: True)
        monkeypatch.setattr("sparse_nb.kernels.exact.attend_all", lambda *x, **kw: asked.append((x, kw)) or x[0])
        assert Exact().decode(q, k, v, causal=True, scale=0.25, **masks) is q
        assert asked == [((q, k, v), dict(scale=0.25, **masks))]
        full_attention(q.requires_grad_(), k, v, **masks)
        full_attention(q.detach(), k, v, backend="torch", **masks)
        assert len(asked) == 1

    @pytest.mark.skipif(not TRITON, reason="needs Triton")
    @pytest.mark.parametrize("message, change", [
        ("q must be float16, bfloat16 or float32 for backend='triton', got torch.float64", dict(dtype=FP64)),
        ("q must be on a GPU, or TRITON_INTERPRET=1 be set before Python starts, got cpu", dict(dtype=FP32)),
        ("q must have a head size of at most 256 for backend='triton', got 320", dict(dtype=FP16, D=320))])
    def test_what_has_no_kernel(message, change):
        x = torch.ones(1, 2, 1, change.get("D", 16), dtype=change["dtype"])
        with pytest.raises((TypeError, ValueError), match=re.escape(message)): full_attention(x, x, x, backend="triton")

    @pytest.mark.skipif(not TRITON, reason="needs Triton")
    @pytest.mark.parametrize("capability", [80, 90, 100])
    def test_registers_and_spills(capability):
        from sparse_nb.kernels.exact import resource_usage
        rows = resource_usage(capability)
        assert len(rows) == (4 if capability == 80 else 12)
        for row in rows:
            most = 1024 * (113 if row["by"] == "engine" else 99)                             # two programs at once
            assert row["spills"] == 0 and row["registers"] <= 255 and row["shared"] <= most, row

    @pytest.mark.budget(40)
    @pytest.mark.parametrize("shard", range(2))
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_in_the_interpreter(forked_pytest, shard):
        pytest.importorskip("triton")
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "test_kernel", "--shard",
                                   f"{shard}/2", __file__, TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d passed", said), said[-4000:]
