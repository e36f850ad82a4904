"""Solutions of lab 5, a kernel in Triton's interpreter, and its time."""
import triton
import triton.language as tl


@triton.jit
def _scores(q_ptr, k_ptr, s_ptr, scale, N, D: tl.constexpr, BN: tl.constexpr):
    "Program t writes the scores of keys t * BN to (t + 1) * BN."
    o_n, o_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D)
    m_n = o_n < N
    b_q = tl.load(q_ptr + o_d)                                                      # [D]
    b_k = tl.load(k_ptr + o_n[:, None] * D + o_d[None, :], mask=m_n[:, None])       # [BN, D]
    tl.store(s_ptr + o_n, tl.sum(b_k * b_q, 1) * scale, mask=m_n)


@triton.jit
def _attend(q_ptr, k_ptr, v_ptr, out_ptr, scale, N, D: tl.constexpr, BN: tl.constexpr):
    "Attention of one query to N keys, tile by tile."
    o_n, o_d = tl.arange(0, BN), tl.arange(0, D)
    b_q = tl.load(q_ptr + o_d)
    M, Z, b_o = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for i_n in range(0, N, BN):
        m_n = i_n + o_n < N
        p_n = (i_n + o_n[:, None]) * D + o_d[None, :]
        b_k = tl.load(k_ptr + p_n, mask=m_n[:, None], other=0.0)
        b_v = tl.load(v_ptr + p_n, mask=m_n[:, None], other=0.0)
        b_s = tl.where(m_n, tl.sum(b_k * b_q, 1) * scale, -float("inf"))
        larger = tl.maximum(M, tl.max(b_s, 0))
        old, b_e = tl.exp(M - larger), tl.exp(b_s - larger)
        Z = old * Z + tl.sum(b_e, 0)
        b_o = old * b_o + tl.sum(b_e[:, None] * b_v, 0)
        M = larger
    tl.store(out_ptr + o_d, b_o / Z)


@triton.jit
def _pages(q_ptr, k_ptr, v_ptr, page_ptr, log_w_ptr, out_ptr, scale, N, L, D: tl.constexpr, BN: tl.constexpr):
    "Attention of one query to the L pages of a list, each with its weight."
    o_n, o_d = tl.arange(0, BN), tl.arange(0, D)
    b_q = tl.load(q_ptr + o_d)
    M, Z, b_o = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for i in range(L):
        first = tl.load(page_ptr + i) * BN
        log_w = tl.load(log_w_ptr + i)
        m_n = first + o_n < N
        p_n = (first + o_n[:, None]) * D + o_d[None, :]
        b_k = tl.load(k_ptr + p_n, mask=m_n[:, None], other=0.0)
        b_v = tl.load(v_ptr + p_n, mask=m_n[:, None], other=0.0)
        b_s = tl.where(m_n, tl.sum(b_k * b_q, 1) * scale + log_w, -float("inf"))
        larger = tl.maximum(M, tl.max(b_s, 0))
        old, b_e = tl.exp(M - larger), tl.exp(b_s - larger)
        Z = old * Z + tl.sum(b_e, 0)
        b_o = old * b_o + tl.sum(b_e[:, None] * b_v, 0)
        M = larger
    tl.store(out_ptr + o_d, b_o / Z)


def cold_time(call, clear, clock, runs):
    "Median time of a call in microseconds, each after the cache was cleared; `clock` gives seconds."
    times = []
    for _ in range(runs):
        clear()
        start = clock()
        call()
        times.append(clock() - start)
    return 1e6 * sorted(times)[runs // 2]


def ratio_of_bytes(n, samples):
    "Bytes of a dense step over those of SANTA, for the heads of Llama-3.1-8B in bfloat16."
    dense = 2 * 8 * n * 128 * 2
    return dense / (dense / 2 + 32 * samples * 128 * 2)
