"""A step up to one of its launches."""
import torch

from inputs import INTERPRETED

if INTERPRETED:
    import triton
    import triton.language as tl

    from benchmarks.recorder import up_to

    @triton.jit
    def first_kernel(x_ptr): tl.store(x_ptr, 1)

    @triton.jit
    def second_kernel(x_ptr): tl.store(x_ptr + 1, tl.load(x_ptr) + 1)

    @triton.jit
    def third_kernel(x_ptr): tl.store(x_ptr + 2, tl.load(x_ptr + 1) + 1)

    def test_launches_from_a_kernel_on_are_left_out():
        def step():
            x = torch.zeros(3)
            for kernel in first_kernel, second_kernel, third_kernel: kernel[1,](x)
            return x.tolist()
        for kernel, want in (("first_kernel", [0, 0, 0]), ("second_kernel", [1, 0, 0]), ("third_kernel", [1, 2, 0])):
            for _ in range(2): assert up_to(step, kernel)() == want
            assert step() == [1, 2, 3]


if not INTERPRETED:
    import pytest

    @pytest.mark.slow
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
    def test_in_the_interpreter(forked_pytest):
        pytest.importorskip("triton")
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, TRITON_INTERPRET="1")
        assert not code and "1 passed" in said, said[-4000:]
