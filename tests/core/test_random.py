"""Randomness: the same bits as Triton, and statistics with a stated false-alarm rate.

Every statistical check accepts between the quantiles ALARM / 2 and 1 - ALARM / 2 of the law that a correct sampler
follows, so each fails a correct sampler once in 1 / ALARM seeds. There are about 280 checks: one run in a million would
fail if seeds were not fixed.
"""
import itertools
import os
import subprocess
import sys

import pytest
import torch
from scipy import stats

from sparse_nb.attention import (
    Exact, Uniform, attention, fold_in, philox, philox_words, select_uniform, stream_seeds, weighted_state)

ALARM = 4e-9

KERNELS = """
import sys
import torch
import triton
import triton.language as tl

@triton.jit
def rand_kernel(seed_ptr, offset_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.load(offset_ptr + i, mask=i < n)
    low = offset.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), low, (offset.to(tl.int64) >> 32).to(tl.uint32), low * 0, low * 0)
    bits = (w0.to(tl.int64) << 21) + (w1 >> 11).to(tl.int64)
    tl.store(out_ptr + i, bits.to(tl.float64) / 9007199254740992, mask=i < n)

@triton.jit
def fold_kernel(seed_ptr, data_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    data = tl.load(data_ptr + i, mask=i < n)
    low = data.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), low, (data >> 32).to(tl.uint32), low * 0 + 1, low * 0)
    tl.store(out_ptr + i, ((w1 & 0x7FFFFFFF).to(tl.int64) << 32) | w0.to(tl.int64), mask=i < n)

cases = torch.load(sys.argv[1])
results = []
for kind, seed, data in cases:
    n = data.numel()
    out = torch.empty(n, dtype=torch.float64 if kind == "rand" else torch.int64)
    kernel = rand_kernel if kind == "rand" else fold_kernel
    kernel[(triton.cdiv(n, 64),)](torch.tensor([seed]), data, out, n, BLOCK=64)
    results.append(out)
torch.save(results, sys.argv[2])
"""


def accept(law, x):
    "Assert that x is not in the tails of the law, two-sided at ALARM."
    low, high = law.ppf([ALARM / 2, 1 - ALARM / 2])
    assert low <= x <= high, (f"{x:.6g} outside [{low:.6g}, {high:.6g}], where a correct sampler ends once in "
                              f"{1 / ALARM:.0e} seeds")


def draws(m, n, samples, seed=0, heads=1, **masks):
    "Indices [heads, m, samples] of m draws for each head."
    one = torch.zeros(1, 1, 1, 1)
    return select_uniform(one.expand(1, heads, m, 1), one.expand(1, 1, n, 1), samples=samples, seed=seed,
                          **masks).index[0]


def included(index, n):
    "1 for the keys of each draw, else 0: [..., n]."
    return torch.zeros(*index.shape[:-1], n).scatter_(-1, index, 1)


# bits

def test_philox_and_fold_in_are_tritons_bit_for_bit(tmp_path):
    pytest.importorskip("triton")
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 0x123456789ABCDEF, 2**63 - 1]
    small = torch.cat([torch.arange(200, dtype=torch.int32), torch.tensor([2**31 - 2, 2**31 - 1], dtype=torch.int32)])
    large = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 7, 2**63 - 1])
    cases = [(kind, seed, data) for seed in seeds
             for kind, data in (("rand", small), ("rand", large), ("fold", large), ("fold", small.long()))]
    script, given, got = tmp_path / "kernels.py", tmp_path / "given.pt", tmp_path / "got.pt"
    script.write_text(KERNELS)
    torch.save(cases, given)
    subprocess.run([sys.executable, script, given, got], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    for (kind, seed, data), want in zip(cases, torch.load(got), strict=True):
        assert torch.equal(philox(seed, data) if kind == "rand" else fold_in(seed, data), want), (kind, seed)


def test_philox_known_answer():
    "The published vector of Random123 for counter and key zero."
    assert [int(w) for w in philox_words(0, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_ints_and_tensors_give_the_same_stream():
    seeds, data = torch.tensor([0, 5, 2**40]), torch.tensor([[3], [2**33]])
    want = [[fold_in(s, d) for s in seeds.tolist()] for [d] in data.tolist()]
    assert fold_in(seeds, data).tolist() == want
    assert fold_in(seeds, 3).tolist() == want[0]
    assert fold_in(7, 1, torch.tensor([2])).tolist() == [fold_in(fold_in(7, 1), 2)]
    assert isinstance(fold_in(0, 1, 2), int) and fold_in(9) == 9
    assert torch.equal(philox(torch.tensor(5), 3), philox(5, torch.tensor(3)))


def test_a_draw_does_not_depend_on_its_neighbours():
    q, k = torch.zeros(3, 4, 5, 1), torch.zeros(3, 2, 50, 1)
    whole = select_uniform(q, k, samples=7, seed=1).index
    assert torch.equal(whole[:2, :2, :3], select_uniform(q[:2, :2, :3], k[:2], samples=7, seed=1).index)
    assert torch.equal(whole, select_uniform(q, k, samples=7, seed=torch.tensor(1)).index)
    assert len({tuple(x) for x in whole.flatten(0, 2).tolist()}) == 60


def test_no_seed_means_a_fresh_one_from_torch():
    q = torch.zeros(1, 1, 1, 1)
    fresh = lambda: select_uniform(q, q.expand(1, 1, 1000, 1), samples=20).index
    torch.manual_seed(0)
    a, b = fresh(), fresh()
    torch.manual_seed(0)
    assert torch.equal(a, fresh()) and not torch.equal(a, b)


# uniformity

def test_random_numbers_are_uniform():
    u = philox(11, torch.arange(10**6))
    assert u.dtype == torch.float64 and 0 <= u.min() and u.max() < 1
    counts = torch.histc(u, 1000, 0, 1)
    accept(stats.chi2(999), float(((counts - 1000)**2 / 1000).sum()))
    whole = u[:10**5] * 2**53
    assert torch.equal(whole, whole.floor())
    for bit in range(53): accept(stats.binom(10**5, 0.5), int((whole.long() >> bit & 1).sum()))  # above one half, too
    for word in philox_words(11, torch.arange(10**5)):
        for bit in range(32): accept(stats.binom(10**5, 0.5), int((word >> bit & 1).sum()))


def test_children_are_distinct_and_their_bits_fair():
    children = fold_in(5, torch.arange(1000)[:, None], torch.arange(1000)).flatten()
    assert children.min() >= 0
    assert len(children.unique()) == 10**6  # a birthday among 2**63 has probability 5e-8
    for bit in range(63): accept(stats.binom(10**6, 0.5), int((children >> bit & 1).sum()))
    neighbours = philox(children[:-1], 0), philox(children[1:], 0)
    accept(stats.norm(), float(torch.corrcoef(torch.stack(neighbours).double())[0, 1] * (len(children) - 1)**0.5))


@pytest.mark.parametrize("n, samples", [(2, 1), (7, 3), (64, 1), (101, 50), (512, 64), (300, 299)])
def test_every_key_is_included_with_probability_s_over_n(n, samples):
    m = 6000
    index = draws(m, n, samples)
    assert all(len(set(x)) == samples for x in index[0, :50].tolist())
    counts = included(index, n).sum((0, 1)).double()
    p = samples / n
    z2 = ((counts - m * p)**2 / (m * p * (1 - p))).sum() * (n - 1) / n
    accept(stats.chi2(n - 1), float(z2))


def test_pairs_of_keys_are_included_as_without_replacement():
    "All 20 sets of 3 of 6 keys are equally likely, which fixes every joint probability."
    m = 20000
    sets = (2 ** draws(m, 6, 3)).sum(-1).flatten()
    counts = torch.bincount(sets, minlength=64)
    codes = [sum(2**i for i in c) for c in itertools.combinations(range(6), 3)]
    assert int(counts[codes].sum()) == m
    accept(stats.chi2(19), float(((counts[codes] - m / 20)**2 / (m / 20)).sum()))


def overlap(a, b, n, samples):
    "z-score of the number of common keys of independent draws, which is hypergeometric in each pair."
    law = stats.hypergeom(n, samples, samples)
    common = (included(a, n) * included(b, n)).sum(-1).flatten()
    return float((common.sum() - len(common) * law.mean()) / (len(common) * law.var())**0.5)


def test_heads_queries_steps_layers_and_seeds_are_independent():
    n, samples, m = 200, 20, 3000
    index = draws(m, n, samples, heads=3)
    accept(stats.norm(), overlap(index[0], index[1], n, samples))          # heads
    accept(stats.norm(), overlap(index[1], index[2], n, samples))
    accept(stats.norm(), overlap(index[0, :-1], index[0, 1:], n, samples)) # queries
    accept(stats.norm(), overlap(index[0], draws(m, n, samples, seed=1)[0], n, samples))
    step = lambda s, layer: draws(m, n, samples, seed=fold_in(0, s, layer))[0]
    accept(stats.norm(), overlap(step(0, 0), step(1, 0), n, samples))
    accept(stats.norm(), overlap(step(0, 0), step(0, 1), n, samples))
    accept(stats.norm(), overlap(step(1, 0), step(0, 1), n, samples))
    assert abs(overlap(index[0], index[0], n, samples)) > 100              # the check sees a stream that repeats


def test_sequences_of_a_batch_draw_among_their_own_keys():
    q, k = torch.zeros(2, 1, 4000, 1), torch.zeros(2, 1, 60, 1)
    selection = select_uniform(q, k, samples=0.25, seed=0, kv_start=torch.tensor([0, 20]),
                               kv_end=torch.tensor([60, 50]))
    assert selection.budget[:, 0, 0].tolist() == [15, 8]
    assert selection.weight[0].unique().tolist() == [4.0] and selection.weight[1].unique().tolist() == [0.0, 3.75]
    kept = (selection.dense(60) > 0).double().sum((1, 2))
    assert kept[1, :20].sum() == 0 and kept[1, 50:].sum() == 0
    for counts, p in ((kept[0], 15 / 60), (kept[1, 20:50], 8 / 30)):
        z2 = ((counts - 4000 * p)**2 / (4000 * p * (1 - p))).sum() * (len(counts) - 1) / len(counts)
        accept(stats.chi2(len(counts) - 1), float(z2))


# a seed for each sequence and head

def of_heads(seed, batch, heads): return fold_in(seed, torch.arange(batch)[:, None], torch.arange(heads))


@pytest.mark.parametrize("seed", [0, 2**40 + 3, torch.tensor(5), torch.tensor(5, dtype=torch.int32)], ids=repr)
def test_streams_of_the_three_forms(seed):
    q = torch.zeros(2, 3, 4, 8)
    want = fold_in(seed, torch.arange(2).view(2, 1, 1), torch.arange(3).view(3, 1), torch.arange(4))
    assert torch.equal(stream_seeds(q, seed), want) and torch.equal(stream_seeds(q, of_heads(seed, 2, 3)), want)
    more = stream_seeds(q, seed, 7, torch.arange(2).view(2, 1, 1))
    for r in range(2):
        assert torch.equal(more[r], stream_seeds(q, fold_in(seed, 7, r)))
        assert torch.equal(stream_seeds(q, of_heads(seed, 2, 3), 7, torch.arange(2).view(2, 1, 1))[r],
                           stream_seeds(q, fold_in(of_heads(seed, 2, 3), 7, r)))


def test_parts_of_a_batch_draw_as_in_the_whole():
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, n, 8, generator=rng) for heads, n in ((6, 2), (3, 50), (3, 50)))
    start, stop, seeds, method = torch.tensor([0, 9, 20]), torch.tensor([50, 41, 50]), of_heads(11, 3, 6), Uniform(0.3)
    whole = method.decode(q, k, v, seed=11, kv_start=start, kv_end=stop)
    assert torch.equal(whole, method.decode(q, k, v, seed=seeds, kv_start=start, kv_end=stop))
    alone = method.select(q[1:2], k[1:2, :, 9:41], seed=seeds[1:2])
    assert torch.equal(alone.index + 9, method.select(q, k, seed=11, kv_start=start,
                                                      kv_end=stop).index[1:2, ..., :alone.index.shape[-1]])
    # the second of three processes
    heads = method.select(q[:, 2:4], k[:, 1:2], seed=seeds[:, 2:4], kv_start=start, kv_end=stop)
    assert torch.equal(heads.index, method.select(q, k, seed=11, kv_start=start, kv_end=stop).index[:, 2:4])


@pytest.mark.parametrize("seed, error, message",
                         [(torch.zeros(2, 6), TypeError, "seed must be int32 or int64, got torch.float32"),
                          (torch.zeros(6).long(), ValueError,
                           "seed must be one number or have shape [B, H], got a tensor of shape [6]"),
                          (torch.zeros(2, 6, 1).long(), ValueError,
                           "seed must be one number or have shape [B, H], got a tensor of shape [2, 6, 1]"),
                          (torch.zeros(1, 6).long(), ValueError,
                           "seed must be one number or have shape [B, H] = [2, 6], got a tensor of shape [1, 6]"),
                          (torch.zeros(2, 2).long(), ValueError,
                           "seed must be one number or have shape [B, H] = [2, 6], got a tensor of shape [2, 2]"),
                          (torch.zeros(2, 6, device="meta").long(), ValueError,
                           "seed must be on the device of q, cpu, got meta"),
                          (torch.tensor([[1] * 6, [1] * 5 + [-3]]), ValueError, "seed must lie in [0, 2**63), got -3")],
                         ids=lambda x: x if isinstance(x, str) else "")
def test_bad_seeds_of_heads(seed, error, message):
    q, k = torch.ones(2, 6, 3, 4), torch.ones(2, 2, 30, 4)
    for call in (lambda: stream_seeds(q, seed), lambda: select_uniform(q, k, samples=2, seed=seed),
                 lambda: Uniform(2).decode(q, k, k, seed=seed), lambda: Uniform(2).prefill(q, k, k, seed=seed),
                 lambda: Exact().decode(q, k, k, seed=seed)):
        with pytest.raises(error) as caught: call()
        assert message in str(caught.value) and type(caught.value) is error


# estimates

def test_sums_are_unbiased_with_the_finite_population_variance():
    n, samples, m = 256, 64, 4000
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8, generator=rng,
                       dtype=torch.float64), torch.randn(1, 1, n, 8, generator=rng, dtype=torch.float64)
    v = torch.randn(1, 1, n, 3, generator=rng, dtype=torch.float64)
    v = torch.nn.functional.pad(v, (0, 5))
    many = q.expand(1, 1, m, 8)
    state = weighted_state(many, k, v, select_uniform(many, k, samples=samples, seed=2))
    e = torch.exp(k @ q.mT / 8**0.5)[0, 0]                                   # [N, 1]
    terms = torch.cat([e, e * v[0, 0, :, :3]], -1)
    got = torch.cat([state.l[0, 0, :, None], state.o[0, 0, :, :3]], -1) * state.m[0, 0, :, None].exp()
    variance = n**2 / samples * (1 - samples / n) * terms.var(0)
    for z in ((got.mean(0) - terms.sum(0)) / (variance / m)**0.5).tolist(): accept(stats.norm(), z)
    kurtosis = ((got - got.mean(0))**4).mean(0) / got.var(0)**2
    for z in ((got.var(0) / variance - 1) / ((kurtosis - 1) / m)**0.5).tolist(): accept(stats.norm(), z)


def test_uniform_tends_to_exact():
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=rng, dtype=torch.float64) for n in (50, 400, 400))
    want = attention(q, k, v)
    errors = [float((Uniform(s).decode(q, k, v, seed=0) - want).norm() / want.norm())
              for s in (0.01, 0.1, 0.5, 0.9, 1.0)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-13
