"""The kernels of exact attention for one query: against float64 for every type, size, layout and tile, on the CPU in
Triton's interpreter and on a GPU; how the keys are shared; what hidden rows, huge scores and empty sequences do; sinks
and a window alone.
"""
import importlib.util
import math
import re

import pytest
import torch

from covering import drawn
from inputs import DEVICE, GPU, INTERPRETED, LAYOUTS, kernel, poisoned
from sparse_nb.core import selection
from sparse_nb.core.exact import assert_close, attention
from sparse_nb import Exact, Method, Streaming
from sparse_nb.core.selection import full_attention, select_sinks_window, weighted_attention, window_attention

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
    return (q, k, v), dict(kv_start=start.contiguous(), kv_end=stop.to(torch.int32))


def check(got, q, k, v, masks, scale=None):
    "Hold the output against exact attention in float64."
    assert got.dtype == q.dtype and got.shape == q.shape
    assert_close(got, attention(*(x.double() for x in (q, k, v)), scale=scale, **masks), TOLERANCE[q.dtype])


# the kernels

FACTORS = dict(dtype=(BF16, FP16, FP32), D=(64, 80, 128, 256), R=(1, 3, 4, 20), layout=tuple(LAYOUTS), B=(1, 2, 5),
               ragged=(False, True), scale=(None, 0.5))


def some_cases():
    "All cases on a GPU; in the interpreter ten, among them every value."
    met, first, rest = set(), [], []
    for case in drawn(FACTORS):
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
    check(attend_all(q, k, v, kv_start=start, kv_end=stop), q, k, v, dict(kv_start=start, kv_end=stop))

@kernel
def test_kernel_lengths_beyond_the_buffer():
    (q, k, v), _ = problem(2, 1, 2, 50, 16, FP32)
    far = dict(kv_start=torch.tensor([-3, 10], device=DEVICE), kv_end=torch.tensor([50, 10**6], device=DEVICE))
    near = dict(kv_start=torch.tensor([0, 10], device=DEVICE), kv_end=torch.tensor([50, 50], device=DEVICE))
    assert torch.equal(attend_all(q, k, v, **far), attend_all(q, k, v, **near))


# sinks and window: two runs of keys

def check_window(run, q, k, v, masks, sinks, window, scale=None):
    """Hold `run(k, v)` against the list of the chosen keys, in float64; all other keys are NaN, values infinite.

    A sequence without a visible key gives NaN.
    """
    shape, wide = q.shape, [x.double().nan_to_num(0) for x in (q, k, v)]
    start, stop = (torch.full(shape[:1], x) if (m := masks.get(name)) is None else m.long().cpu()
                   for name, x in (("kv_start", 0), ("kv_end", k.shape[2])))
    seen = (stop > start).to(q.device)
    some = {name: x if x is None else x[seen] for name, x in masks.items()}
    chosen = select_sinks_window(wide[0][seen], wide[1][seen], sinks=sinks, window=window, **some)
    hidden = torch.ones(k.shape[0], k.shape[2], 1, dtype=torch.bool, device=q.device)
    hidden[seen] = (chosen.dense(k.shape[2])[:, 0, 0] == 0)[..., None]
    for x, bad in ((k, math.nan), (v, math.inf)): x.masked_fill_(hidden[:, None], bad)
    got = poisoned(lambda: run(k, v))
    assert got.dtype == q.dtype and got.shape == shape and got[~seen].isnan().all()
    want = weighted_attention(*(x[seen] for x in wide), chosen, scale=scale, backend="torch")
    assert_close(got[seen], want, TOLERANCE[q.dtype])


WINDOW_FACTORS = dict(dtype=(BF16, FP32, FP16), D=(64, 80, 128), R=(1, 4, 3), layout=tuple(LAYOUTS), B=(1, 3),
                      ragged=(False, True), sinks=(0, 4, 1, 40, 500), window=(0.1, 1, 33, 500, 1.0, 0.5),
                      scale=(None, 0.5))


def window_cases():
    "As `some_cases`, of sinks and windows."
    met, first, rest = set(), [], []
    for case in drawn(WINDOW_FACTORS, 1):
        values = {(name, type(x), x) for name, x in case.items()}
        (rest if values <= met else first).append(case)
        met |= values
    return first if INTERPRETED else first + rest


@kernel
@pytest.mark.parametrize("case", window_cases(), ids=lambda case: "-".join(str(x) for x in case.values()))
def test_kernel_window(case):
    B, N = case["B"], 3000 if GPU else 90
    spans = [(b * N // 9, N - b * N // 9) for b in range(B)] if case["ragged"] else None
    (q, k, v), masks = problem(B, 2, case["R"], N, case["D"], case["dtype"], layout=case["layout"], spans=spans)
    given = dict(sinks=case["sinks"], window=case["window"])
    def run(k, v): return window_attention(q, k, v, scale=case["scale"], backend="triton", **given, **masks)
    check_window(run, q, k, v, masks, **given, scale=case["scale"])


@kernel
@pytest.mark.parametrize("sinks, window", [(0, 1), (1, 1), (0, 15), (4, 0.1), (15, 16), (16, 17), (17, 32), (16, 64),
                                           (33, 0.5), (100, 3), (3, 100), (100, 1.0)])
def test_kernel_window_at_the_edges_of_tiles(sinks, window):
    "Each number of programs cuts elsewhere, between the runs of a sequence, too; sequences of no key and of one key."
    spans = [(0, 0), (3, 4), (5, 20), (5, 21), (5, 22), (7, 7), (0, 31), (0, 32), (0, 33), (9, 70), (70, 70), (69, 70)]
    (q, k, v), masks = problem(len(spans), 1, 2, 70, 16, FP32, spans=spans)
    for programs in (1, 7, 40) if INTERPRETED else range(1, 60):
        for columns, engine in ((0, False),) if INTERPRETED or programs % 9 else ((0, False), (8, False)):
            tiles = Tiles(16, 4, 2, programs, columns)
            def run(k, v): return launch(q, k, v, None, *masks.values(), tiles, engine, sinks=sinks, window=window)
            check_window(run, q, k, v, masks, sinks, window)


@kernel
def test_kernel_window_between_any_two_shares():
    "One sequence, any number of shares: with and without a place between the runs, of whole tiles and of others."
    for sinks, window in ((16, 48), (5, 40), (32, 32), (0, 64), (64, 1)):
        for programs in range(1, 6):
            (q, k, v), _ = problem(1, 1, 1, 200, 16, FP32, seed=programs)
            tiles = Tiles(16, 4, 2, programs, 0)
            def run(k, v): return launch(q, k, v, None, None, None, tiles, False, sinks=sinks, window=window)
            check_window(run, q, k, v, {}, sinks, window)


@kernel
@pytest.mark.parametrize("share", [0.07, 0.15, 1 / 3, 0.5, 0.1 + 2e-12, 0.99, 1e-320])
def test_kernel_window_has_as_many_keys_as_the_list(share):
    "Where the share of the keys is a whole number, or a rounding more: one key would change the output."
    lengths = torch.tensor([1, 2, 3, 10, 20, 30, 99, 100, 101, 180, 200], device=DEVICE)
    (q, k, v), _ = problem(len(lengths), 1, 1, 200, 16, FP32)
    def run(k, v): return launch(q, k, v, None, None, lengths, Tiles(64, 4, 2, 4, 0), False, sinks=1, window=share)
    check_window(run, q, k, v, dict(kv_end=lengths), 1, share)


@kernel
def test_kernel_window_of_many_keys():
    "A share of a million and one equal keys; values are how far from the end."
    n = 10**6 + 1
    k = torch.ones(1, 1, 1, 16, device=DEVICE).expand(1, 1, n, 16)
    v = torch.arange(-n, 0, device=DEVICE, dtype=torch.float32).view(1, 1, n, 1).expand(1, 1, n, 16)
    for share, keys in ((3e-5, 31), (1e-6, 2), (3e-5 / (1 + 1e-6), 30)):
        got = attend_all(k[:, :, :1].contiguous(), k, v, sinks=0, window=share)
        assert_close(got.double(), torch.full_like(got, -(keys + 1) / 2).double(), 1e-6)


@kernel
def test_kernel_window_without_a_middle_is_exact_attention():
    (q, k, v), masks = problem(3, 2, 4, 90, 64, FP32, spans=[(0, 90), (3, 40), (89, 90)])
    want = attend_all(q, k, v, **masks)
    for given in (dict(window=1.0), dict(window=90), dict(window=10**12), dict(sinks=10**12, window=1),
                  dict(sinks=45, window=0.5)):
        assert_close(attend_all(q, k, v, **given, **masks), want.double(), TOLERANCE[FP32])


@kernel
def test_kernel_window_of_the_only_key():
    (q, k, v), _ = problem(1, 1, 2, 1, 16, FP32)
    for window in (1, 1.0, 0.1): assert torch.equal(window_attention(q, k, v, window=window, backend="triton"),
                                                    v.expand(1, 2, 1, 16))


@kernel
def test_kernel_window_compiles_into_one_graph():
    x, masks = problem(3, 1, 2, 70, 16, spans=[(0, 70), (69, 70), (3, 20)])
    for window in (8, 0.3):
        def step(q, k, v, start, stop):
            return window_attention(q, k, v, window=window, kv_start=start, kv_end=stop, backend="triton")
        torch.compiler.reset()
        compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "eager")
        assert torch.equal(compiled(*x, *masks.values()), step(*x, *masks.values()))


@kernel
def test_kernel_scores_that_are_no_numbers():
    (q, k, v), _ = problem(6, 1, 2, 100, 16, FP32)
    q[:, :, :, 0] = 1
    k[0, :, 10:40, 0], k[1, :, :, 0] = -math.inf, -math.inf
    k[2, :, 70, 0], k[3, :, 99, 0] = math.inf, math.nan
    v[4, :, 50] = math.inf
    stop = torch.tensor([100, 100, 100, 100, 100, 0], device=DEVICE)
    got = attend_all(q, k, v, kv_end=stop)
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
    def step(q, k, v, start, stop): return full_attention(q, k, v, kv_start=start, kv_end=stop, backend="triton")
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "eager")
    assert torch.equal(compiled(*x, *masks.values()), step(*x, *masks.values()))


@kernel
def test_kernel_operator():
    x, masks = problem(2, 1, 2, 40, 16, FP32, spans=[(0, 40), (3, 20)])
    for more in ((), (4, 8), (4, 0.3)):
        torch.library.opcheck(torch.ops.sparse_nb.attend_all, (*x, None, *masks.values(), *more),
                              test_utils=("test_schema", "test_faketensor"))


@kernel
def test_kernel_refuses():
    (q, k, v), _ = problem(1, 1, 2, 40, 16, FP32)
    for call, error, message in (
            (lambda: attend_all(q.double(), k, v), TypeError, "q must be float16, bfloat16 or float32"),
            (lambda: attend_all(q.expand(1, 2, 3, 16), k, v), ValueError, "q must have one query"),
            (lambda: attend_all(q, k.to("meta"), v), ValueError, f"k must be on the device of q, {q.device}, got meta"),
            (lambda: attend_all(q, k, v.to("meta")), ValueError, "v must be on the device of q"),
            (lambda: window_attention(q, k, v, sinks=-1, backend="triton"), ValueError, "sinks must be at least 0"),
            (lambda: window_attention(q, k, v, window=1.5, backend="triton"), ValueError, "window must lie in (0, 1]"),
            (lambda: full_attention(q.requires_grad_(), k, v, backend="triton"), ValueError,
             "backend must be 'torch' or 'auto' where a gradient is wanted, got 'triton'")):
        with pytest.raises(error, match=re.escape(message)): call()


if GPU:
    @pytest.mark.gpu
    @pytest.mark.parametrize("N, G, R", [(131072, 8, 4), (40000, 1, 71), (5000, 32, 1)])
    def test_long(N, G, R):
        x, _ = problem(1, G, R, N, 128, BF16)
        check(Exact().decode(*x), *x, {})
        masks = dict(kv_end=torch.tensor([N // 3], device=DEVICE))
        check(Exact().decode(*x, **masks), *x, masks)

    @pytest.mark.gpu
    @pytest.mark.parametrize("method", [Exact(), Streaming(4, 0.1), Streaming(100, 300)], ids=repr)
    def test_graph_without_a_wait(method):
        from sparse_nb.bench import captured
        x, _ = problem(2, 8, 4, 20000, 128, BF16)
        start, stop = torch.tensor([0, 7], device=DEVICE), torch.tensor([1, 30], device=DEVICE)
        call = lambda: method.decode(*x, kv_start=start, kv_end=stop)
        call()
        torch.cuda.set_sync_debug_mode("error")
        try: call()
        finally: torch.cuda.set_sync_debug_mode("default")
        replay, out = captured(call)
        for n in (2, 63, 64, 65, 127, 4095, 4096, 20000):
            stop.copy_(torch.tensor([n, max(8, n // 2)]))
            out.fill_(math.nan)
            replay()
            masks = dict(kv_start=start, kv_end=stop)
            want = Method.decode(method, *(y.double() for y in x), **masks)
            assert_close(out, want, TOLERANCE[BF16])
            assert torch.equal(out, call())

    @pytest.mark.gpu
    @pytest.mark.parametrize("N, sinks, window", [(131072, 4, 0.1), (131072, 1000, 20000), (5000, 4, 64)])
    def test_long_window(N, sinks, window):
        (q, k, v), _ = problem(1, 8, 4, N, 128, BF16)
        masks, method = dict(kv_end=torch.tensor([N - 77], device=DEVICE)), Streaming(sinks, window)
        check_window(lambda k, v: method.decode(q, k, v, **masks), q, k, v, masks, sinks, window)

    @pytest.mark.gpu
    def test_what_streaming_decodes_with():
        (q, k, v), masks = problem(2, 2, 3, 500, 64, FP32, spans=[(0, 500), (20, 300)])
        method = Streaming(4, 0.2)
        out, stats = method.decode(q, k, v, causal=True, return_stats=True, **masks)
        assert torch.equal(out, attend_all(q, k, v, sinks=4, window=0.2, **masks))
        listed, told = Method.decode(method, q, k, v, return_stats=True, **masks)
        assert_close(out, listed.double(), TOLERANCE[FP32])
        for name in ("keys_scored", "values_read", "density", "budget"):
            assert torch.equal(getattr(stats, name), getattr(told, name))
        (q, k, v), _ = problem(2, 2, 3, 500, 64, FP32)
        host = [x.cpu().pin_memory() for x in (k, v)]
        assert torch.equal(method.decode(q, *host), Method.decode(method, q, *host))
        wide, many = [x.double() for x in (q, k, v)], [q.expand(-1, -1, 3, -1), k, v]
        for x in (wide, many):
            assert torch.equal(method.decode(*x, causal=True), Method.decode(method, *x, causal=True))
        q.requires_grad_()
        assert torch.autograd.grad(method.decode(q, k, v).sum(), q)[0].isfinite().all()

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
        with pytest.raises(ValueError, match="kv_start < kv_end"): Exact().decode(*x, kv_end=torch.tensor([0, 40]))
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
        given = dict(sinks=3, window=0.25)
        assert Streaming(**given).decode(q, k, v, causal=True, scale=0.25, **masks) is q
        assert asked[1:] == [((q, k, v), dict(scale=0.25, **given, **masks))]
        out, stats = Streaming(**given).decode(q, k, v, return_stats=True, **masks)
        assert out is q and stats.values_read[:, 0, 0].tolist() == [3 + 10, 3 + 6] and len(asked) == 3
        for attend in (full_attention, window_attention):
            attend(q.detach().requires_grad_(), k, v, **masks)
            attend(q, k, v, backend="torch", **masks)
        assert len(asked) == 3

    @pytest.mark.skipif(not TRITON, reason="needs Triton")
    @pytest.mark.parametrize("message, change", [
        ("q must be float16, bfloat16 or float32 for backend='triton', got torch.float64", dict(dtype=FP64)),
        ("q must be on a GPU, or TRITON_INTERPRET=1 be set before Python starts, got cpu", dict(dtype=FP32)),
        ("q must have a head size of at most 256 for backend='triton', got 320", dict(dtype=FP16, D=320))])
    def test_what_has_no_kernel(message, change):
        x = torch.ones(1, 2, 1, change.get("D", 16), dtype=change["dtype"])
        with pytest.raises((TypeError, ValueError), match=re.escape(message)): full_attention(x, x, x, backend="triton")

    @pytest.mark.kernels
    @pytest.mark.budget(12)
    @pytest.mark.skipif(not TRITON, reason="needs Triton")
    @pytest.mark.parametrize("capability", [80, 90, 100])
    def test_registers_and_spills(capability):
        from sparse_nb.kernels.exact import resource_usage
        rows = resource_usage(capability)
        assert len(rows) == (6 if capability == 80 else 16) and {row["runs"] for row in rows} == {1, 2}
        for row in rows:
            most = 1024 * (113 if row["by"] == "engine" else 99)                             # two programs at once
            assert row["spills"] == 0 and row["registers"] <= 255 and row["shared"] <= most, row

    @pytest.mark.kernels
    @pytest.mark.budget(40)
    @pytest.mark.parametrize("shard", range(2))
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_in_the_interpreter(forked_pytest, shard):
        pytest.importorskip("triton")
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "test_kernel", "--shard",
                                   f"{shard}/2", __file__, TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d passed", said), said[-4000:]
