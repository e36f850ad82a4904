"""The Triton kernels of Delta Attention against the equations in float64, row by row.

`pytest -m gpu -k test_delta_kernels` runs the sweep on a GPU. Without one, a covering design of small problems
runs in Triton's interpreter, in processes of their own.
"""
import math
import re
from functools import partial

import pytest
import torch

from covering import drawn
from inputs import DEVICE, GPU, INTERPRETED, LAYOUTS, kernel, poisoned
from sparse_nb import delta
from sparse_nb.core.blocks import block_attention
from sparse_nb.core.exact import assert_close
from sparse_nb.methods.hip import HiP
from sparse_nb.methods.vertical_slash import VerticalSlash

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2**-8, FP16: 2**-11, FP32: 1e-5} if GPU else {BF16: 2**-7, FP16: 2**-10, FP32: 2e-6}
CORRECTIONS = "none", "aligned", "recompute", "delta", "tangent"
CORRECTING = CORRECTIONS[2:]


def problem(B, G, R, Q, N, D, dtype, *, layout="plain", starts=None, seed=0):
    "Gaussian q, k, v, and where the sequences start; NaN in the padding."
    generator = torch.Generator(DEVICE).manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)
    q, k, v = new(B, G * R, Q, D), *(LAYOUTS[layout](B, G, N, D, new) for _ in range(2))
    if starts is None: return (q, k, v), None
    starts = torch.tensor(starts, device=DEVICE)
    for x in (k, v):
        for b in range(B): x[b, :, :starts[b]] = math.nan
    return (q, k, v), starts


# the equations, one row at a time

def softmax_mean(q, k, v, keys, scale):
    "log of the sum of exponentials over `keys`, their mean value and their mean key; -inf and zeros for no keys."
    if not len(keys): return -math.inf, torch.zeros_like(v[0]), torch.zeros_like(k[0])
    scores = scale * (k[keys] @ q)
    weights = scores.softmax(0)
    return float(scores.logsumexp(0)), weights @ v[keys], weights @ k[keys]


class Head:
    "One head in float64: its rows by the equations, each with the anchors that it may use."
    def __init__(self, q, k, v, s, *, sinks, window, gamma, correction, anchors, tail, scale):
        self.q, self.k, self.v = q.double(), k.double(), v.double()
        self.N, self.p0, self.s, self.scale = len(k), len(k) - len(q), s, scale or q.shape[1]**-0.5
        self.sinks, self.window, self.gamma, self.m, self.tail = sinks, window, gamma, anchors, tail
        self.correction, self.aligned = correction, correction in ("tangent", "aligned")
        self.summaries = {}

    def on_grid(self, i): return self.s + self.gamma * ((i - self.s) // self.gamma)

    def anchors(self, i):
        "Anchors of the call up to row i, the last one first."
        first = max(self.p0, self.s)
        found = [j for j in range(self.on_grid(i), first - 1, -self.gamma)]
        return found if first in found else [*found, first]

    def row(self, i): return self.q[i - self.p0]

    def base(self, i, inside=True):
        "Keys up to i that are sinks or in the window, or those that are not."
        low, x = (self.anchors(i)[0] if self.aligned else i) - self.window + 1, torch.arange(self.s, i + 1)
        return x[((x < self.s + self.sinks) | (x >= low)) == inside]

    def over(self, i, keys): return softmax_mean(self.row(i), self.k, self.v, keys, self.scale)

    def exact(self, i): return self.over(i, torch.arange(self.s, i + 1))[1]

    def summary(self, j):
        if j not in self.summaries:
            total, t, mean = self.over(j, self.base(j, inside=False))
            self.summaries[j] = total - self.scale * float(self.row(j) @ mean), t, mean
        return self.summaries[j]

    def out(self, i):
        if i < self.s: return torch.zeros_like(self.v[0])
        if i >= self.N - self.tail: return self.exact(i)
        total, out, _ = self.over(i, self.base(i))
        if self.correction in ("none", "aligned"): return out
        anchors = self.anchors(i)
        if self.correction == "recompute": return self.exact(i) if i == anchors[0] else out
        if self.correction == "delta":
            j = anchors[0]
            return out + self.exact(j) - self.over(j, self.base(j))[1]
        options = [(b + self.scale * float(self.row(i) @ mean), t)
                   for b, t, mean in map(self.summary, anchors[:self.m])]
        best, t = max(options, key=lambda x: x[0])
        if best == -math.inf: return out
        share = 1 / (1 + math.exp(total - best))
        return out + share * (t - out)


def oracle(q, k, v, starts, rows=None, **settings):
    "The rows (all, if not named) of all heads [B, H, rows, D]."
    Q, N, R = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    q, k, v = (x.cpu() for x in (q, k, v))
    rows = range(Q) if rows is None else rows
    heads = [[Head(q[b, h], k[b, h // R].nan_to_num(), v[b, h // R].nan_to_num(),
                   0 if starts is None else int(starts[b]), **settings) for h in range(q.shape[1])]
             for b in range(len(q))]
    return torch.stack([torch.stack([torch.stack([head.out(N - Q + r) for r in rows]) for head in row])
                        for row in heads]).to(DEVICE)


def check(q, k, v, starts, *, tiles=None, rtol=0, **settings):
    from sparse_nb.kernels.delta import attend_delta, launch_delta
    settings = dict(sinks=2, window=8, gamma=8, correction="tangent", anchors=2, tail=4,
                    scale=None) | settings
    def call():
        if tiles is None: return attend_delta(q, k, v, kv_start=starts, **settings)
        return launch_delta(q, k, v, kv_start=starts, **settings, **tiles)
    out = poisoned(call)
    assert out.dtype == q.dtype and out.shape == q.shape
    assert_close(out, oracle(q, k, v, starts, **settings), rtol=max(rtol, TOLERANCE[q.dtype]),
                 name=settings["correction"])
    if starts is not None:
        Q, N = q.shape[2], k.shape[2]
        for b in range(len(q)): assert not out[b, :, :max(0, min(Q, int(starts[b]) - N + Q))].any()
    return out


SMALL = (16, 16, 4, 2, None)  # rows and keys of a tile, warps, stages, registers: small tiles have full neighbours
CUT = dict(part=32) | dict.fromkeys(("whole", "means", "near"), SMALL)
CASES = drawn(dict(correction=CORRECTIONS, dtype=(BF16, FP16, FP32), D=(64, 80, 96, 128, 256),
                   R=(1, 3), layout=tuple(LAYOUTS), ragged=(False, True), sinks=(0, 4), window=(1, 17, 40, 10**6),
                   gamma=(1, 16, 24), anchors=(1, 3, 16), tail=(0, 7, 64), prefix=(False, True), cut=(False, True)))


@kernel
@pytest.mark.parametrize("base", [HiP(((16, 32), (2, 8)), 2, 4, block=32),
                                  VerticalSlash(4, 8, 2, 2, block=32)], ids=repr)
def test_a_base_may_read_its_blocks_with_a_kernel(base, monkeypatch):
    x, starts = problem(2, 1, 2, 90, 130, 64, FP32, starts=[0, 47])
    found = {}
    for backend in ("torch", "triton"):
        monkeypatch.setattr("sparse_nb.methods.delta.keys.block_attention", partial(block_attention, backend=backend))
        found[backend] = [delta.delta_prefill(*x, base=base, gamma=16, tail=9, correction=correction, kv_start=starts)
                          for correction in CORRECTIONS if correction != "aligned"]
    for got, want in zip(found["triton"], found["torch"]): assert_close(got, want, TOLERANCE[FP32])


@kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_cases(case):
    Q, N = (111, 300) if GPU else (63, 111)
    if not case["prefix"]: N = Q
    starts = [0, N - Q + 9] if case["ragged"] else None
    x, starts = problem(1 + case["ragged"], 1, case["R"], Q, N, case["D"], case["dtype"], layout=case["layout"],
                        starts=starts)
    names = "correction", "sinks", "window", "gamma", "anchors", "tail"
    check(*x, starts, tiles=CUT if case["cut"] else None, **{name: case[name] for name in names})


@kernel
@pytest.mark.parametrize("Q, N, settings", [
    (1, 1, dict()), (1, 65, dict(tail=0)), (2, 66, dict(tail=0, gamma=2)), (5, 40, dict(tail=9)),
    (17, 90, dict(gamma=100, tail=0)), (40, 40, dict(gamma=7, sinks=50)), (63, 111, dict(window=1, sinks=0)),
    (64, 128, dict(gamma=16, window=16, tail=16)), (33, 60, dict(gamma=1, anchors=40)), (50, 90, dict(window=90))],
    ids=str)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_edges(Q, N, settings, correction):
    x, _ = problem(1, 1, 2, Q, N, 16, BF16)
    check(*x, None, correction=correction, tiles=CUT, **settings)


@kernel
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_padding(correction):
    "Sequences that begin before the chunk, in it, in its tail, at its end, and not at all."
    x, starts = problem(6, 1, 2, 40, 70, 16, FP32, starts=[0, 13, 41, 66, 69, 70])
    for tiles in (None, CUT): check(*x, starts, correction=correction, gamma=6, anchors=3, tail=8, tiles=tiles)
    assert not check(*x, starts * 0 + 200, correction=correction, tail=0).any()


@kernel
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("rise", [120, -120])
@pytest.mark.parametrize("correction", ["delta", "tangent"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_scores_that_rise_by_more_than_a_number_can(correction, dtype, rise):
    "Keys in the middle of the window and far away outweigh the first and the last by a factor over 2^128."
    (q, k, v), _ = problem(1, 1, 2, 64, 160, 16, dtype)
    q[..., 0], k[..., 0] = 4, 0
    k[:, :, 40:44, 0] = k[:, :, 130:133, 0] = rise
    check(q, k, v, None, correction=correction, window=48, gamma=16, sinks=0, tiles=CUT,
          rtol=abs(rise) * torch.finfo(FP32).eps)  # the scores' own rounding


@kernel
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_chunks_are_one_shot(correction):
    "Chunks of a multiple of gamma, with no tail and one anchor, give what one call gives."
    from sparse_nb.kernels.delta import attend_delta
    (q, k, v), _ = problem(1, 1, 2, 96, 96, 16, FP32)
    keep = dict(sinks=3, window=20, gamma=8, correction=correction, anchors=1, tail=0)
    whole, cut = attend_delta(q, k, v, **keep), []
    for i in range(0, 96, 32): cut.append(attend_delta(q[:, :, i:i + 32], k[:, :, :i + 32], v[:, :, :i + 32], **keep))
    assert_close(torch.cat(cut, 2), whole, rtol=1e-5)


@kernel
def test_scale_and_large_groups():
    for H, R in ((20, 20), (5, 5), (6, 3)):
        x, _ = problem(1, H // R, R, 20, 40, 16, FP32)
        check(*x, None, scale=0.7)
        check(*x, None, scale=0.7, correction="delta", tiles=CUT)


@kernel
def test_anchor_rows_and_the_tail_are_exact():
    from sparse_nb.kernels.delta import attend_delta
    (q, k, v), _ = problem(1, 2, 2, 100, 130, 16, FP32)
    settings = dict(sinks=2, window=10, gamma=16, anchors=4, tail=12)
    head = Head(q[0, 0], k[0, 0], v[0, 0], 0, correction="none", scale=None, **settings)
    rows = [0, *range(2, 88, 16), *range(88, 100)]
    want = torch.stack([head.exact(30 + r) for r in rows]).to(DEVICE)
    for correction in CORRECTING:
        got = attend_delta(q, k, v, **settings | dict(correction=correction))[0, 0]
        assert_close(got[rows], want, rtol=TOLERANCE[FP32], name=correction)
        assert not torch.allclose(got[1].double(), head.exact(31).to(DEVICE), rtol=1e-2)


@kernel
def test_an_anchor_does_not_keep_the_rounding_of_a_window_that_cancels():
    from sparse_nb.kernels.delta import launch_delta
    settings = dict(sinks=2, window=40, gamma=16, anchors=4, tail=0, scale=None)
    (q, k, v), _ = problem(1, 1, 1, 40, 130, 16, FP32, seed=2)
    j = 112
    q[..., 0], k[..., 0], k[:, :, 2:j - 39, 0] = 8, 0, 6   # nearly all of the weight lies before the window
    v[:, :, 2:j - 39] /= 64
    v[:, :, j - 39:] += 8
    q, k, v = (x.to(BF16) for x in (q, k, v))
    head = Head(q[0, 0], k[0, 0], v[0, 0], 0, correction="none", **settings)
    got = launch_delta(q, k, v, correction="delta", kv_start=None, **settings, whole=(32, 16, 4, 1, None),
                       near=(16, 32, 4, 1, None))[0, 0, j - 90]
    assert_close(got[None], head.exact(j)[None].to(DEVICE), rtol=TOLERANCE[BF16], name="anchor")


@kernel
def test_what_has_no_kernel():
    from sparse_nb.kernels.delta import attend_delta
    x, _ = problem(1, 1, 1, 4, 4, 16, torch.float64)
    settings = dict(sinks=2, window=10, gamma=16, correction="delta", anchors=4, tail=12)
    with pytest.raises(TypeError, match="q must be float16, bfloat16 or float32"): attend_delta(*x, **settings)
    wide = [y.float().repeat(1, 1, 1, 20) for y in x]
    with pytest.raises(ValueError, match="q must have a head size of at most 256"): attend_delta(*wide, **settings)


@kernel
def test_compiles_into_one_graph():
    from sparse_nb.kernels.delta import attend_delta
    x, starts = problem(2, 1, 2, 40, 70, 16, BF16, starts=[0, 33])
    def step(q, k, v, starts):
        settings = dict(sinks=2, window=10, gamma=16, anchors=4, tail=12, kv_start=starts)
        return [attend_delta(q, k, v, **settings | dict(correction=name)) for name in ("delta", "tangent")]
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "eager")
    for a, b in zip(compiled(*x, starts), step(*x, starts)): assert torch.equal(a, b)


@kernel
def test_operator():
    import sparse_nb.kernels.delta  # noqa: F401, registers it
    x, _ = problem(1, 1, 2, 32, 40, 16, FP32)
    torch.library.opcheck(torch.ops.sparse_nb.attend_delta, (*x, 2, 8, 8, "tangent", 2, 4, None, None),
                          test_utils=("test_schema", "test_faketensor"))


if GPU:
    @pytest.mark.gpu
    @pytest.mark.parametrize("correction", CORRECTIONS)
    def test_graph_without_a_wait(correction):
        from sparse_nb.bench import captured
        from sparse_nb.kernels.delta import attend_delta
        (q, k, v), starts = problem(2, 2, 4, 1000, 2000, 128, BF16, starts=[0, 7])
        k, v = k.nan_to_num(), v.nan_to_num()
        def call():
            return attend_delta(q, k, v, sinks=4, window=300, gamma=64, correction=correction, anchors=16, tail=128,
                                kv_start=starts)
        call()
        torch.cuda.set_sync_debug_mode("error")
        try: call()
        finally: torch.cuda.set_sync_debug_mode("default")
        replay, out = captured(call)
        starts += 300
        replay()
        assert torch.equal(out, call())

    @pytest.mark.gpu
    @pytest.mark.parametrize("correction", CORRECTIONS)
    @pytest.mark.parametrize("H, G, Q, N, D", [
        (8, 2, 9000, 9000, 128), (6, 2, 3000, 20000, 64), (4, 1, 40000, 40000, 96)])
    def test_long(H, G, Q, N, D, correction):
        from sparse_nb.kernels.delta import attend_delta
        (q, k, v), _ = problem(1, G, H // G, Q, N, D, BF16)
        settings = dict(sinks=4, window=2048, gamma=64, correction=correction, anchors=16, tail=128)
        out = poisoned(lambda: attend_delta(q, k, v, **settings))
        assert out.isfinite().all()
        rows = [0, 1, *torch.randint(Q, (14,), generator=torch.Generator().manual_seed(N)).tolist(), Q - 129, Q - 1]
        assert_close(out[:, :, rows], oracle(q, k, v, None, rows, scale=None, **settings), rtol=2**-8)


if not INTERPRETED:
    # bytes a thread, of what is used before and after the long loop, by whether the copy engine brings tiles
    SPILLS = {(True, "whole", "delta"): 136, (True, "whole", "none"): 120, (True, "window", "delta"): 56,
              (True, "window", "tangent"): 160, (False, "window", "tangent"): 16}

    def usage(launch, correction, capability, kind, D, engine):
        "Registers, spills and shared memory of a kernel with the shipped tiles."
        triton = pytest.importorskip("triton")
        from sparse_nb.kernels import delta
        from sparse_nb.kernels.common import compiled_usage
        BD, means = triton.next_power_of_2(D), correction == "tangent"
        settings = delta.tile_settings(BD, 4 if kind == "fp32" else 2, engine,
                                       "means" if means and launch == "whole" else launch)
        BM, BN, warps, stages, registers = settings
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), kind) | dict(start_ptr="i64", note_ptr="i32")
        types |= dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{kind}[1, 1, {BN}, {BD}]>")
        known = dict(FROZEN=kind != "fp16", ALIGNED=means, D=D, BM=BM, BN=BN, BD=BD, STAGES=stages)
        if not engine: known |= dict.fromkeys(("k_desc", "v_desc"))
        if kind == "fp16": known["note_ptr"] = None
        if launch == "whole":
            known |= dict(ALL=correction == "none", BASE=correction == "delta") | ({} if means else dict(mean_ptr=None))
            return compiled_usage(delta._whole_kernel, known, types, capability, warps, registers)
        known |= dict(SKIP=False, BC=min(64, 2 * BN)) | ({} if means else dict.fromkeys(("mean_ptr", "bias_ptr")))
        if correction == "none": known["delta_ptr"] = None
        return compiled_usage(delta._window_kernel, known, types | dict(mean_ptr=kind), capability, warps, registers)

    @pytest.mark.kernels
    @pytest.mark.parametrize("launch", ["whole", "window"])
    @pytest.mark.parametrize("capability, correction, engine, kind, D", [
        (80, "tangent", False, "bf16", 128), (90, "delta", True, "bf16", 128), (90, "tangent", True, "bf16", 128),
        (90, "none", True, "fp16", 80)])
    def test_registers_and_spills(launch, capability, correction, engine, kind, D):
        used = usage(launch, correction, capability, kind, D, engine)
        print(used)
        allowed = SPILLS.get((engine, launch, correction), 0)
        most = (114 if engine else 99) * 1024
        assert used["spills"] <= allowed and used["registers"] <= 255 and used["shared"] <= most, used

    def test_many_tiles_are_not_cut_and_few_are():
        "The longest of many tiles ends when the shortest have filled its neighbours; of few, it ends last."
        from sparse_nb.kernels.delta import _keys_of_a_part
        places = 264
        for tiles, N, parts in ((1024, 2**20, 1), (516, 2**20, 1), (544, 2**17, 1), (160, 2**15, 7), (4, 2**20, 256)):
            C = _keys_of_a_part(tiles, N, 32, places)
            assert C % 32 == 0 and abs(-(-N // C) - parts) <= parts // 8, (tiles, N, C)
        assert _keys_of_a_part(1, 5000, 64, places) == 1024 and _keys_of_a_part(1, 70, 64, 2) == 128

    @pytest.mark.kernels
    @pytest.mark.budget(40)
    @pytest.mark.parametrize("shard", range(4))
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_in_the_interpreter(forked_pytest, shard):
        pytest.importorskip("triton")
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--shard", f"{shard}/4", __file__,
                                   TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d passed", said), said[-4000:]
