"""All threads of a program take the same branches in every kernel that a test marked `kernels` compiles: the fixture
`compiled` of all tests looks, and these try what it looks with."""
import pytest
import torch
import triton
import triton.language as tl

from sparse_nb.kernels.common import INTERPRETED as _INTERPRETED, compiled_usage
from sparse_nb.kernels.vattention import _rounded, _sample_kernel
from uniform import branches

INTERPRETED = _INTERPRETED.value


@triton.jit
def _until_kernel(x_ptr, y_ptr, seen_ptr, out_ptr, APART: tl.constexpr, BN: tl.constexpr, LOOP: tl.constexpr):
    "The largest of BN sums of products, as each thread has it, and steps of a loop that ends by it"
    o_n = tl.arange(0, BN)
    o_x = tl.program_id(0) * BN * 4 + o_n[:, None] * 4 + tl.arange(0, 4)[None, :]
    x, y = tl.load(x_ptr + o_x), tl.load(y_ptr + o_x)
    if APART: xy = _rounded(x, y)
    else: xy = x * y
    most = tl.max(tl.sum(xy, 1), 0)
    o_t = tl.arange(0, 128)
    tl.store(seen_ptr + tl.program_id(0) * 128 + o_t, most + tl.zeros([128], tl.float32))
    if LOOP:
        for _ in range(0, tl.ceil(most).to(tl.int32)): tl.store(out_ptr + o_t, tl.load(out_ptr + o_t) * 3 + most)


if not INTERPRETED:
    @pytest.mark.kernels
    @pytest.mark.parametrize("capability, LR, CP, bound, plugin", [
        (80, 6, 4, "bernstein", "upper"), (90, 6, 4, "clt", "upper"), (90, 4, 4, "hoeffding", "plain"),
        (90, 1, 8, "clt", "plain")])
    def test_a_budget_is_one_for_all_threads(capability, LR, CP, bound, plugin, compiled):
        types = dict.fromkeys(("eps", "log", "square", "plug", "plug_square"), "fp32")
        types |= dict.fromkeys(("sinks_share", "window_share", "top_share", "base_share"), "i64")
        types |= {f"{x}_ptr": "i32" for x in ("row", "mask", "count", "stop")} | {f"{x}_ptr": "bf16" for x in "qkv"}
        known = dict(LR=LR, D=128, BD=128, BR=16, BQ=triton.next_power_of_2(LR), BP=CP, BN=128, STAGES=2, BC=128,
                     LEAST=32, CLT_LEAST=32, BOUND=bound, PLUGIN=plugin, SEEDS=False, PDL=capability >= 90,
                     start_ptr=None, len_ptr=None, seed_ptr=None, ceiling_ptr=None)
        compiled_usage(_sample_kernel, known, types, capability, 4)
        assert "bra" in compiled[0] and not branches(compiled[0])

    @pytest.mark.kernels
    @pytest.mark.parametrize("apart", [False, True])
    def test_a_loop_that_ends_by_a_sum_of_products_is_found(apart, compiled):
        compiled_usage(_until_kernel, dict(APART=apart, BN=8, LOOP=True), {}, 90, 4)
        assert bool(branches(compiled.pop())) != apart

    @pytest.mark.gpu
    @pytest.mark.parametrize("apart", [False, True])
    def test_threads_disagree_about_sums_of_products(apart):
        x, y = torch.randn(2, 4096, 8, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        seen = torch.empty(4096, 128, device="cuda")
        _until_kernel[4096,](x, y, seen, None, APART=apart, BN=8, LOOP=False)
        assert bool((seen == seen[:, :1]).all()) == apart


PTX = """
    mul.f32 %r3, %r1, %r2;
    shfl.sync.bfly.b32 %r4, %r3, 2, 31, -1;
    {sum}
    shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;
    add.f32 %r7, %r5, %r6;
    {more}
    setp.gt.f32 %p1, {last}, 0f00000000;
    @%p1 bra $L__BB0_2;
"""


@pytest.mark.parametrize("sum, more, last, found", [
    ("fma.rn.f32 %r5, %r1, %r2, %r4;", "", "%r7", ["%p1"]),
    ("add.f32 %r5, %r3, %r4;", "", "%r7", ["%p1"]),  # the assembler may make the same of it
    ("add.rn.f32 %r5, %r1, %r2;", "", "%r7", []),
    ("max.f32 %r5, %r1, %r2;", "", "%r7", []),
    ("mad.lo.s32 %r5, %r1, %r2, %r4;", "", "%r7", []),  # of whole numbers
    ("fma.rn.f32 %r5, %r1, %r2, %r4;", "shfl.sync.bfly.b32 %r8, %r7, 2, 31, -1;\n max.f32 %r9, %r7, %r8;", "%r9", []),
    ("fma.rn.f32 %r5, %r1, %r2, %r4;", "shfl.sync.bfly.b32 %r8, %r7, 4, 31, -1;\n max.f32 %r9, %r7, %r8;", "%r9",
     ["%p1"]),
    ("fma.rn.f32 %r5, %r1, %r2, %r4;", "shfl.sync.idx.b32 %r8, %r7, %r10, 31, -1;\n mov.b32 %r9, %r8;", "%r9", ["%p1"]),
    ("fma.rn.f32 %r5, %r1, %r2, %r4;", "setp.gt.f32 %p2, %r7, %r1;\n selp.b32 %r9, 1, 2, %p2;", "%r9", ["%p1"])])
def test_what_lanes_may_disagree_about(sum, more, last, found):
    assert branches(PTX.format(sum=sum, more=more, last=last)) == found


SUM = """
    mul.f32 %r3, %r1, %r2;
    shfl.sync.bfly.b32 %r4, %r3, 2, 31, -1;
    fma.rn.f32 %r5, %r1, %r2, %r4;
    shfl.sync.bfly.b32 %r6, %r5, 2, 31, -1;
"""


@pytest.mark.parametrize("code", [
    SUM + "mad.wide.s32 %rd2, %r5, 4, %rd1;\n ld.global.b32 %r7, [%rd2];\n setp.gt.s32 %p1, %r7, 0;\n @%p1 bra $L;",
    SUM + "setp.gt.f32 %p2, %r5, 0f00000000;\n @%p2 ld.global.b32 { %r7 }, [ %rd1 + 0 ];\n"
          "setp.gt.s32 %p1, %r7, 0;\n @%p1 bra $L;",
    SUM + "sub.f32 %r7, %r5, %r6;\n setp.gt.f32 %p1, %r7, 0f00000000;\n @%p1 bra $L;",
    SUM + "setp.lt.f32 %p1, %r5, %r6;\n @%p1 bra $L;",
    SUM + "selp.f32 %r7, %r5, %r6, %p7;\n setp.gt.f32 %p1, %r7, 0f00000000;\n @!%p1 ret;",
    SUM + "shfl.sync.down.b32 %r7, %r5, 1, 31, -1;\n shfl.sync.bfly.b32 %r8, %r7, 0x2, 31, -1;\n"
          "max.f32 %r9, %r7, %r8;\n setp.gt.f32 %p2|%p1, %r9, 0f00000000;\n @%p1 bra $L;",
    "mul.f64 %fd3, %fd1, %fd2;\n mov.b64 {%r1, %r2}, %fd3;\n shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1;\n"
    "shfl.sync.bfly.b32 %r5, %r2, 1, 31, -1;\n mov.b64 %fd4, {%r4, %r5};\n add.f64 %fd5, %fd3, %fd4;\n"
    "setp.gt.f64 %p1, %fd5, 0d0000000000000000;\n @%p1 bra $L;",
    "mul.f16 %h3, %h1, %h2;\n cvt.u32.u16 %r3, %h3;\n shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;\n"
    "cvt.u16.u32 %h4, %r4;\n fma.rn.f16 %h5, %h1, %h2, %h4;\n setp.gt.f16 %p1, %h5, %h9;\n @%p1 bra $L;"])
def test_no_way_to_a_branch_is_missed(code):
    assert branches(code) == ["%p1"]


def test_what_a_warp_agrees_on_is_one_number():
    agreed = "setp.gt.f32 %p2, %r5, 0f00000000;\n vote.sync.any.pred %p1, %p2, -1;\n @%p1 bra $L;"
    assert branches(SUM + agreed) == [] and branches(SUM + agreed.replace("@%p1", "@%p2")) == ["%p2"]
