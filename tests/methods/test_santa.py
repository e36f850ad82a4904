"""SANTA: bad input, streams, masks, edge cases, and statistics with a stated false-alarm rate.

Statistical checks use fixed seeds. Each accepts what a correct sampler gives in all but one of 1 / ALARM seeds; there
are about 60 of them, so a run with fresh seeds would fail a correct sampler less than once in a million.
"""
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sparse_nb.attention import (Exact, Method, Selection, TopK, Uniform, assert_close, attention, attention_scores,
                                 attention_weights, fold_in, philox, stream_seeds, weighted_attention)
from sparse_nb.methods.santa import CLT_SAMPLES, PILOT_SHARE, average_values, draw_keys
from sparse_nb.santa import (SCHEMES, Certificate, Santa, ValueNorms, bernoulli_decode, bernoulli_scores, draw_selected,
                             sample_values, santa_decode, select_santa, unique_keys, variance_trace,
                             variance_trace_replicates)
from sparse_nb.compose import Then
from sparse_nb.santa_keys import Int8Keys, int8_error, quantise
from inputs import fast

ALARM = 1e-8
q, k, v = (torch.randn(2, heads, n, 8, generator=torch.Generator().manual_seed(i))
           for i, (heads, n) in enumerate(((6, 3), (2, 40), (2, 40))))
q = 3 * q
start, stop = torch.tensor([0, 5]), torch.tensor([40, 31])
nan = math.nan


def same(a, b): return torch.equal(a, b)


# bad input

def everyone(f, **needed):
    "Calls that every function which takes q, k and maybe v refuses."
    values = (v,) if f not in (select_santa, bernoulli_scores) else ()
    run = lambda q=q, k=k, *rest, **kw: f(q, k, *(rest or (torch.ones_like(k) if isinstance(k, torch.Tensor) else k,
                                                  ) * len(values)), **(needed | kw))
    return [
        (lambda: run([1.0]), TypeError, "q must be a torch.Tensor, got list"),
        (lambda: run(q, None), TypeError, "k must be a torch.Tensor, got NoneType"),
        (lambda: run(q.long()), TypeError, "q must be float16, bfloat16, float32 or float64, got torch.int64"),
        (lambda: run(q, k.half()), TypeError, "k must have the dtype of q"),
        (lambda: run(q, k[:1]), ValueError, "k must have the batch size of q, 2, got 1"),
        (lambda: run(q, k[:, :, :0]), ValueError, "k must not be empty"),
        (lambda: run(q[:, :5]), ValueError, "q must have a multiple of the heads of k, 2, got 5"),
        (lambda: run(q * nan), ValueError, "must be finite, got NaN"),
        (lambda: run(q, k * math.inf), ValueError, "must be finite, got NaN or +inf"),
        (lambda: run(scale=0.0), ValueError, "scale must be positive and finite, got 0.0"),
        (lambda: run(scale="1"), TypeError, "scale must be a number, got str"),
        (lambda: run(kv_start=[0, 0]), TypeError, "kv_start must be an integer tensor"),
        (lambda: run(kv_end=torch.tensor([41, 40])), ValueError, "kv_end = 41 in sequence 0"),
        (lambda: run(kv_end=torch.tensor([0, 40])), ValueError, "kv_end = 0 in sequence 0"),
        (lambda: run(samples=0), ValueError, "samples must be at least 1"),
        (lambda: run(samples=2.0), TypeError, "samples must be an int, got float"),
        (lambda: run(samples=True), TypeError, "samples must be an int, got bool"),
    ]


def sampler(f, **needed):
    run = lambda **kw: f(q, k, *((v,) if f is not select_santa else ()), **(needed | kw))
    return [(lambda: run(scheme="sys"), ValueError, "scheme must be one of iid, stratified"),
            (lambda: run(scheme=3), TypeError, "scheme must be a string, got int")]


def tiler(f, **needed):
    run = lambda **kw: f(q, k, *((v,) if f is not select_santa else ()), **(needed | kw))
    return [(lambda: run(tile=0), ValueError, "tile must be at least 1, got 0"),
            (lambda: run(tile=64.0), TypeError, "tile must be an int, got float")]


def seeded(f, **needed):
    run = lambda **kw: f(q, k, *((v,) if f not in (select_santa, bernoulli_scores) else ()), **(needed | kw))
    return [(lambda: run(seed=-1), ValueError, "seed must lie in [0, 2**63), got -1"),
            (lambda: run(seed=0.5), TypeError, "seed must be an int or an integer tensor, got float"),
            (lambda: run(seed=torch.arange(2)), ValueError,
             "seed must be one number or have shape [B, H], got a tensor of shape [2]"),
            (lambda: run(seed=torch.ones(2, 2).long()), ValueError,
             "seed must be one number or have shape [B, H] = [2, 6], got a tensor of shape [2, 2]"),
            (lambda: run(seed=torch.zeros(2, 6)), TypeError, "seed must be int32 or int64, got torch.float32"),
            (lambda: run(seed=-torch.eye(6).long()[:2]), ValueError, "seed must lie in [0, 2**63), got -1")]


def decode(**kw): return santa_decode(q, k, v, **kw)


FEW = Uniform(0.5).select(q, k, seed=9)
def chosen(q, k, v, **kw): return sample_values(q, k, v, FEW, **kw)


BAD = [
    *everyone(select_santa), *sampler(select_santa), *tiler(select_santa), *seeded(select_santa),
    (lambda: select_santa(q, k, causal=1), TypeError, "causal must be a bool, got int"),
    *everyone(santa_decode), *sampler(santa_decode), *tiler(santa_decode), *seeded(santa_decode),
    (lambda: decode(causal="yes"), TypeError, "causal must be a bool, got str"),
    (lambda: santa_decode(q, k, v[:, :, :39]), ValueError, "v must have the shape of k"),
    (lambda: santa_decode(q, k, v.double()), TypeError, "v must have the dtype of q"),
    (lambda: decode(backend="cuda"), ValueError, "backend must be one of auto, torch, triton, got 'cuda'"),
    (lambda: decode(backend=None), TypeError, "backend must be a string, got NoneType"),
    (lambda: decode(backend="triton"), ValueError, "q must have one query for backend='triton', got 3"),
    (lambda: santa_decode(q[:, :, :1].double(), k.double(), v.double(), backend="triton"), TypeError,
     "q must be float16, bfloat16 or float32 for backend='triton', got torch.float64"),
    (lambda: decode(backend="triton", eps=0.1, delta=0.1), ValueError,
     "backend must be 'torch' or 'auto' when eps is given"),
    (lambda: decode(return_stats=1), TypeError, "return_stats must be a bool, got int"),
    (lambda: decode(eps=0.1), ValueError, "delta must be given too"),
    (lambda: decode(delta=0.1), ValueError, "eps must be given too"),
    *((lambda x=x: decode(eps=x, delta=0.1), ValueError, f"eps must lie in (0, 1), got {x}")
      for x in (0, 0.0, 1, 1.5, -0.1, nan)),
    *((lambda x=x: decode(eps=0.1, delta=x), ValueError, f"delta must lie in (0, 1), got {x}")
      for x in (0.0, 1.0, nan)),
    (lambda: decode(eps="a", delta=0.1), TypeError, "eps must be a number, got str"),
    (lambda: decode(eps=0.1, delta=True), TypeError, "delta must be a number, got bool"),
    (lambda: decode(eps=0.1, delta=0.3), ValueError, "delta must be at most 0.25 with bound='clt', got 0.3"),
    (lambda: decode(eps=0.1, delta=0.1, bound="hoeffding"), ValueError,
     "bound must be one of clt, bernstein, got 'hoeffding'"),
    (lambda: decode(bound=3), TypeError, "bound must be a string, got int"),
    (lambda: decode(eps=0.1, delta=0.1, scheme="systematic"), ValueError,
     "scheme must be 'iid' or 'stratified' when eps is given, got 'systematic'"),
    *((lambda s=s: decode(eps=0.1, delta=0.1, scheme=s), ValueError, f"got '{s}'") for s in ("proportional", "flash")),
    (lambda: decode(eps=0.1, delta=0.1, samples=7), ValueError,
     "samples must be even and at least 32 when eps is given with bound='clt', for two pilots of one size, got 7"),
    *((lambda n=n: decode(eps=0.1, delta=0.1, bound="bernstein", samples=n), ValueError,
       "samples must be even and at least 2 when eps is given with bound='bernstein', for two pilots of one size, got "
       f"{n}") for n in (1, 7)),
    (lambda: decode(eps=0.1, delta=0.1, value_norms=[1.0]), TypeError, "value_norms must be a torch.Tensor, got list"),
    (lambda: decode(eps=0.1, delta=0.1, value_norms=v), ValueError,
     "value_norms must have shape [B, G, N] = [2, 2, 40], got [2, 2, 40, 8]"),
    (lambda: decode(eps=0.1, delta=0.1, value_norms=torch.ones(2, 2, 40).long()), TypeError,
     "value_norms must be floating point, got torch.int64"),
    (lambda: decode(eps=0.1, delta=0.1, value_norms=torch.ones(2, 2, 40, device="meta")), ValueError,
     "value_norms must be on the device of q"),
    (lambda: decode(eps=0.1, delta=0.1, value_norms=-torch.ones(2, 2, 40)), ValueError,
     "value_norms must be finite and not negative"),
    (lambda: decode(eps=0.1, delta=0.1, value_norms=nan * torch.ones(2, 2, 40)), ValueError,
     "value_norms must be finite and not negative"),
    *everyone(variance_trace, samples=4, scheme="iid"),
    (lambda: variance_trace(q, k, v, samples=4, scheme="flash"), ValueError,
     "scheme must be one of iid, stratified, got 'flash'"),
    (lambda: variance_trace(q, k, v, samples=4, scheme=1), TypeError, "scheme must be a string, got int"),
    *everyone(variance_trace_replicates, samples=4), *sampler(variance_trace_replicates, samples=4),
    *seeded(variance_trace_replicates, samples=4),
    (lambda: variance_trace_replicates(q, k, v, samples=4, replicates=1), ValueError,
     "replicates must be at least 2, got 1"),
    (lambda: variance_trace_replicates(q, k, v, samples=4, replicates=9.0), TypeError,
     "replicates must be an int, got float"),
    *everyone(bernoulli_scores, samples=4), *seeded(bernoulli_scores, samples=4),
    (lambda: bernoulli_scores(q, k, samples=4, stratified=1), TypeError, "stratified must be a bool, got int"),
    (lambda: bernoulli_scores(q, k, samples=4, mean_group="no"), TypeError, "mean_group must be a bool, got str"),
    *everyone(bernoulli_decode), *sampler(bernoulli_decode), *tiler(bernoulli_decode), *seeded(bernoulli_decode),
    (lambda: bernoulli_decode(q, k, v, features=0), ValueError, "features must be at least 1, got 0"),
    (lambda: bernoulli_decode(q, k, v, mean_group=2), TypeError, "mean_group must be a bool, got int"),
    (lambda: bernoulli_decode(q, k, v, return_stats=None), TypeError, "return_stats must be a bool, got NoneType"),
    (lambda: unique_keys([0], 4), TypeError, "selection must be a Selection, got list"),
    (lambda: unique_keys(select_santa(q, k, samples=2, seed=0), 0), ValueError, "n must be at least 1, got 0"),
    (lambda: unique_keys(select_santa(q, k, samples=2, seed=0), "40"), TypeError, "n must be an int, got str"),
    (lambda: unique_keys(Selection(torch.full((1, 1, 1, 1), 9), torch.ones(1, 1, 1, 1)), 9), ValueError,
     "n must be above every index of the selection, 9, got 9"),
    *seeded(chosen),
    (lambda: chosen(q, k, v, samples=0), ValueError, "samples must be at least 1 and at most 1048576, got 0"),
    (lambda: chosen(q, k, v, scheme="flash"), ValueError,
     "scheme must be one of iid, stratified, systematic, got 'flash'"),
    (lambda: chosen(q, k, v.double()), TypeError, "v must have the dtype of q"),
    (lambda: chosen(q, k, v, scale=-1.0), ValueError, "scale must be positive and finite, got -1.0"),
    (lambda: chosen(q * nan, k, v), ValueError, "must be finite, got NaN"),
    (lambda: chosen(q, k, v, return_drawn=1), TypeError, "return_drawn must be a bool, got int"),
    (lambda: sample_values(q, k, v, [1]), TypeError, "selection must be a Selection, got list"),
    (lambda: sample_values(q[:, :, :1], k, v, FEW), ValueError,
     "selection must be for [B, H, Q] = [2, 6, 1], got [2, 6, 3]"),
    (lambda: sample_values(q, k[:, :, :9], v[:, :, :9], FEW), ValueError,
     "selection must be of the 9 keys of k, got number"),
    (lambda: sample_values(q, k, v, Selection(FEW.index, 0 * FEW.weight)), ValueError, "each query must see a key"),
    (lambda: Santa(samples=0), ValueError, "samples must be at least 1 and at most 1048576, got 0"),
    (lambda: Santa(scheme="x"), ValueError, "scheme must be one of"),
    (lambda: Santa(tile=-1), ValueError, "tile must be at least 1, got -1"),
    (lambda: Santa(eps=0.5), ValueError, "delta must be given too"),
    (lambda: Santa(eps=2, delta=0.1), ValueError, "eps must lie in (0, 1), got 2"),
    (lambda: Santa(bound="x"), ValueError, "bound must be one of"),
    (lambda: Santa(eps=0.5, delta=0.1).select(q, k), ValueError, "eps must be None to select without values, got 0.5"),
    (lambda: Santa(eps=0.5, delta=0.1).decode(q, k, v, state=v), TypeError,
     "state must be ValueNorms or None, got Tensor"),
    (lambda: Santa(eps=0.5, delta=0.1).decode(q, k, v, state=ValueNorms()), ValueError,
     "state must hold as many keys as k, 40, got 0"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[f"{i}" for i in range(len(BAD))])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error) as found: call()
    assert message in str(found.value) and type(found.value) is error


# streams

@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_seed_same_keys_and_other_seed_other_keys(scheme):
    a, b, c = (select_santa(q, k, samples=16, scheme=scheme, tile=8, seed=s) for s in (5, torch.tensor(5), 6))
    assert same(a.index, b.index) and same(a.weight, b.weight) and not same(a.index, c.index)
    assert same(santa_decode(q, k, v, samples=16, scheme=scheme, tile=8, seed=5),
                santa_decode(q, k, v, samples=16, scheme=scheme, tile=8, seed=5))


def test_without_a_seed_torchs_generator_decides():
    torch.manual_seed(3); a = santa_decode(q, k, v, samples=4)
    b = santa_decode(q, k, v, samples=4)
    torch.manual_seed(3)
    assert same(a, santa_decode(q, k, v, samples=4)) and not same(a, b)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_of_a_batch_draws_as_it_would_alone(scheme):
    kept = dict(samples=16, scheme=scheme, tile=8, seed=5)
    whole = select_santa(q, k, kv_start=start, kv_end=stop, **kept)
    first = select_santa(q[:1], k[:1], kv_start=start[:1], kv_end=stop[:1], **kept)
    assert same(first.index[0], whole.index[0][..., :first.index.shape[-1]])
    one = torch.cat([q[:1], q[:1]]), torch.cat([k[:1], k[:1]])
    assert not same(*select_santa(*one, **kept).index)  # equal rows, different streams


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equal_heads_and_queries_have_streams_of_their_own(scheme):
    index = select_santa(torch.zeros(1, 4, 4, 1), torch.zeros(1, 1, 200000, 1), samples=8, scheme=scheme, tile=50000,
                         seed=1).index[0].flatten(0, 1)
    assert len(index.unique(dim=0)) == 16


HEADS = fold_in(5, torch.arange(2)[:, None], torch.arange(6))
CALLS = {**{f"decode, {scheme}": lambda q, k, v, scheme=scheme,
            **kw: santa_decode(q, k, v, samples=12, scheme=scheme, tile=8, **kw) for scheme in SCHEMES},
         "select": lambda q, k, v, **kw: select_santa(q, k, samples=12, **kw).index, "eps": lambda q, k, v,
         **kw: santa_decode(q, k, v, eps=0.4, delta=0.2, samples=32, **kw), "replicates": lambda q, k, v,
         **kw: variance_trace_replicates(q, k, v, samples=12, replicates=5, **kw),
         **{f"bernoulli {name}, mean_group={mean_group}": lambda q, k, v, f=f, mean_group=mean_group,
            **kw: f(q, k, v, mean_group=mean_group, **kw) for mean_group in (False, True)
            for name, f in (("scores", lambda q, k, v, **kw: bernoulli_scores(q, k, samples=2, **kw)[0]),
                            ("decode", lambda q, k, v, **kw: bernoulli_decode(q, k, v, samples=12, **kw)))},
         "method": lambda q, k, v, **kw: Santa(samples=12).decode(q, k, v, **kw), }
# these fold a number into the seed, which from one number happens before row and head
FOLDING = [CALLS[name] for name in CALLS if name == "replicates" or name.startswith("bernoulli decode")]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_seed_for_each_sequence_and_head(call):
    kept = dict(kv_start=start, kv_end=stop)
    whole = call(q, k, v, seed=HEADS, **kept)
    if call not in FOLDING: assert all(same(whole, call(q, k, v, seed=seed, **kept)) for seed in (5, torch.tensor(5)))
    row = call(q[1:], k[1:], v[1:], seed=HEADS[1:], kv_start=start[1:], kv_end=stop[1:])[..., :whole.shape[-1]]
    assert same(row, whole[1:, ..., :row.shape[-1]])
    # the second of two processes
    assert same(whole[:, 3:], call(q[:, 3:], k[:, 1:], v[:, 1:], seed=HEADS[:, 3:], **kept))
    assert not same(whole, call(q, k, v, seed=HEADS.flip(1), **kept))


def test_thresholds_are_the_documented_ones():
    n, samples = 1000, 7
    zero, keys = torch.zeros(1, 2, 1, 4, dtype=torch.float64), torch.zeros(1, 1, n, 4, dtype=torch.float64)
    for head in range(2):
        seed, j = fold_in(9, 0, head, 0), torch.arange(samples)
        want = {"iid": philox(seed, j).double(), "stratified": (j + philox(seed, j).double()) / samples,
                "systematic": (j + philox(seed, 0).double()) / samples}
        for scheme, x in want.items():
            assert same(select_santa(zero, keys, samples=samples, scheme=scheme, seed=9).index[0, head, 0],
                        (x * n).floor().long())
        tiles = select_santa(zero, keys, samples=8, scheme="flash", tile=500, seed=9).index[0, head, 0]
        t, j = torch.tensor([0] * 4 + [1] * 4), torch.arange(4).repeat(2)
        assert same(tiles, t * 500 + ((j + philox(seed, t).double()) / 4 * 500).floor().long())
        assert same(tiles, select_santa(zero, keys, samples=8, scheme="proportional", tile=500,
                                        seed=9).index[0, head, 0])


# masks and edges

@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_hidden_has_no_effect(scheme, causal):
    bad_k, bad_v = k.clone(), v.clone()
    for row in range(2):
        bad_k[row, :, :start[row]] = bad_v[row, :,
                                           :start[row]] = bad_k[row, :, stop[row]:] = bad_v[row, :, stop[row]:] = nan
    kept = dict(samples=24, scheme=scheme, tile=8, seed=2, causal=causal, kv_start=start, kv_end=stop)
    clean, stats_ = santa_decode(q, k, v, return_stats=True, **kept)
    assert same(clean, santa_decode(q, bad_k, bad_v, **kept)) and clean.isfinite().all()
    index = select_santa(q, k, **kept).index
    end = stop.view(2, 1, 1) - (torch.arange(2, -1, -1) if causal else 0)
    assert (index >= start.view(2, 1, 1, 1)).all() and (index < end[..., None]).all()
    assert same(stats_.keys_scored,
                (end - start.view(2, 1, 1)).expand(2, 6, 3)) and (stats_.values_read <= stats_.budget).all()
    assert_close(clean, weighted_attention(q, k, v, select_santa(q, k, **kept)), 1e-5)


def test_causal_queries_equal_cut_caches():
    whole = santa_decode(q, k, v, samples=500, scheme="systematic", seed=1, causal=True)
    for i in range(3):
        part = select_santa(q, k[:, :, :38 + i], samples=500, seed=1).index[:, :, i]
        assert same(part, select_santa(q, k, samples=500, seed=1, causal=True).index[:, :, i])
    assert_close(whole, attention(q, k, v, causal=True), 0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dtypes_sizes_and_peaks(dtype, scheme):
    for n in (1, 7, 63):
        a, b, c = q.to(dtype), 20 * k.repeat(1, 1, 2, 1)[:, :, :n].to(dtype), v.repeat(1, 1, 2, 1)[:, :, :n].to(dtype)
        for samples in (1, 3, 200):
            out, stats_ = santa_decode(a, b, c, samples=samples, scheme=scheme, tile=16, seed=1, return_stats=True)
            assert out.dtype == dtype and out.isfinite().all() and out.shape == a.shape
            assert (stats_.values_read >= 1).all() and (stats_.values_read <= min(n, max(samples, 4))).all()
            if n == 1:
                assert_close(out, c.repeat_interleave(3, 1).expand(2, 6, 3, 8),
                             1e-7 if dtype != torch.float16 else 1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scores_of_minus_infinity_are_never_drawn(scheme):
    some = k.abs()
    some[:, :, :30] = -math.inf
    picked = select_santa(q.abs(), some, samples=64, scheme=scheme, tile=8, seed=0)
    assert (picked.index[picked.weight > 0] >= 30).all()
    with pytest.raises(ValueError, match="each query must see a key"):
        select_santa(q.abs(), torch.full_like(k, -math.inf), samples=4, scheme=scheme, seed=0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_the_ends_of_the_uniform_numbers_meet_no_weightless_key(scheme, u):
    scores = torch.tensor([-math.inf, 0, -math.inf, 1, 0, -math.inf, -math.inf, 0, -math.inf],
                          dtype=torch.float64).view(1, 1, 1, 9)
    first = torch.zeros(1, 1, 1, dtype=torch.int64)
    draws = draw_keys(scores, first, first + 9, first[..., None], 6, scheme, 3, uniform=lambda seeds,
                  offset: torch.full(torch.broadcast_shapes(seeds.shape, offset.shape), u))
    used = (draws.share > 0).expand(draws.index.shape)
    assert used.any() and scores.flatten()[draws.index[used]].isfinite().all()


def test_a_peak_takes_all_samples():
    keys = torch.zeros(1, 1, 300, 8); keys[0, 0, 123] = 100.0
    for scheme in ("iid", "stratified", "systematic", "proportional"):
        picked = select_santa(torch.ones(1, 2, 1, 8), keys, samples=50, scheme=scheme, seed=0)
        assert (picked.index == 123).all() and (unique_keys(picked, 300) == 1).all()
    assert_close(santa_decode(torch.ones(1, 2, 1, 8), keys,
                              torch.randn(1, 1, 300, 8).index_fill(2, torch.tensor([123]), 2.0), scheme="flash",
                              seed=0), torch.full((1, 2, 1, 8), 2.0), 1e-6)


def test_flash_budgets():
    zero, keys = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1000, 4)
    for samples, tile, want in ((128, 100, 130), (4, 100, 10), (25, 100, 30), (24, 100, 20), (5, 2000, 5),
                                (7, 1, 1000)):
        assert int(select_santa(zero, keys, samples=samples, scheme="flash", tile=tile, seed=0).budget) == want
    assert select_santa(zero, keys, samples=50, scheme="flash", tile=100, seed=0,
                        kv_end=torch.tensor([150])).budget.item() == 50


def test_nothing_of_the_input_is_changed():
    before = [x.clone() for x in (q, k, v)]
    santa_decode(q, k, v, seed=0, samples=8); bernoulli_decode(q, k, v, seed=0); decode(eps=0.2, delta=0.1, seed=0)
    assert all(same(a, b) for a, b in zip(before, (q, k, v)))


def test_interpreted_triton_is_not_chosen_by_itself():
    code = """import sys, torch; from sparse_nb.santa import santa_decode
x = torch.ones(1, 1, 1, 16); santa_decode(x, x, x); print("sparse_nb.kernels.santa" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True,
                          text=True, check=True)
    assert done.stdout.strip() == "False"


# properties

@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2**40), st.floats(0, 4))
def test_counts_of_a_systematic_draw_are_floor_or_ceil(n, samples, seed, sharpness):
    g = torch.Generator().manual_seed(seed % 2**31)
    query, keys = torch.ones(1, 1, 1, 1, dtype=torch.float64), sharpness * torch.randn(
        1, 1, n, 1, generator=g, dtype=torch.float64)
    count = torch.bincount(select_santa(query, keys, samples=samples, seed=seed, scale=1.0).index.flatten(),
                           minlength=n)
    quota = samples * attention_weights(query, keys, scale=1.0).flatten()
    assert (count >= (quota - 1e-9).floor()).all() and (count <= (quota + 1e-9).ceil()).all() and count.sum() == samples


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.integers(1, 40), st.integers(1, 20), st.integers(0, 2**31 - 1), st.sampled_from(SCHEMES))
def test_decode_is_weighted_attention_on_the_selection(n, samples, tile, seed, scheme):
    g = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(1, heads, m, 4, generator=g, dtype=torch.float64) for heads, m in ((2, 2), (1, n), (1, n)))
    kept = dict(samples=samples, scheme=scheme, tile=tile, seed=seed)
    picked, (out, stats_) = select_santa(a, b, **kept), santa_decode(a, b, c, return_stats=True, **kept)
    assert_close(out, weighted_attention(a, b, c, picked), 1e-9)
    assert same(stats_.values_read, unique_keys(picked, n)) and same(stats_.budget, picked.budget)
    if scheme != "flash": assert (picked.budget == samples).all()


# statistics

@pytest.mark.parametrize("scheme", ["iid", "stratified", "systematic", "flash"])
def test_keys_are_drawn_as_often_as_their_weight_says(scheme):
    m, samples = 4000, 6
    keys = torch.randn(1, 1, 12, 1, generator=torch.Generator().manual_seed(4))
    query = torch.ones(1, 1, m, 1)
    p = attention_weights(query[:, :, :1], keys, scale=1.0).double().flatten()
    picked = select_santa(query, keys, samples=samples, scheme=scheme, tile=4, seed=8, scale=1.0)
    share = picked.weight.double() * p[picked.index]                 # what each slot counts for
    got = torch.zeros(m, 12, dtype=torch.float64).scatter_add(1, picked.index[0, 0], share[0, 0])
    z = (got.mean(0) - p) / (got.std(0) / m**0.5)
    assert z.abs().max() < stats.norm.isf(ALARM / 24)


def test_iid_counts_are_multinomial():
    m, p = 500, torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    index = select_santa(torch.ones(1, 1, m, 1, dtype=torch.float64), p.log().view(1, 1, 4, 1), samples=20,
                         scheme="iid", seed=3, scale=1.0).index
    count = torch.bincount(index.flatten(), minlength=4)
    assert stats.chisquare(count.numpy(), (20 * m * p).numpy()).pvalue > ALARM
    per = torch.zeros(m, 4).scatter_add(1, index[0, 0], torch.ones(m, 20))
    assert ALARM / 2 < stats.chi2.cdf(float(((per[:, 0] - 10) ** 2 / 5).sum()), m) < 1 - ALARM / 2


def test_variance_traces_agree_with_brute_force():
    a, b, c = q[:1].double(), k[:1].double(), v[:1].double()
    p = attention_weights(a, b)
    mean = attention(a, b, c)
    values = c.repeat_interleave(3, 1)[:, :, None]
    one = (p[..., None] * (values - mean[..., None, :]).square()).sum((-1, -2))
    assert_close(variance_trace(a, b, c, samples=5, scheme="iid"), one / 5, 1e-12)
    grid = (torch.arange(200000, dtype=torch.float64) + 0.5) / 200000    # within each of 5 strata 40,000 points
    for h, i in ((0, 0), (5, 2)):
        rows = values[0, h, 0][torch.searchsorted(p[0, h, i].cumsum(0), grid,
                                                  right=True).clamp(max=39)].view(5, 40000, 8)
        assert_close(variance_trace(a, b, c, samples=5, scheme="stratified")[0, h, i],
                     rows.var(1, correction=0).sum() / 25, 1e-3)
    assert_close(variance_trace(a, b, c, samples=1, scheme="stratified"), one, 1e-12)
    hidden = v.clone(); hidden[1, :, :5] = hidden[1, :, 31:] = nan
    assert same(variance_trace(q, k, hidden, samples=5, scheme="stratified", kv_start=start, kv_end=stop),
                variance_trace(q, k, hidden.nan_to_num(), samples=5, scheme="stratified", kv_start=start, kv_end=stop))


def test_replicates_are_single_runs():
    outs = torch.stack([santa_decode(q, k, v, samples=6, scheme="stratified", seed=fold_in(4, r)) for r in range(8)])
    assert_close(variance_trace_replicates(q, k, v, samples=6, scheme="stratified", replicates=8, seed=4),
                 outs.double().var(0).sum(-1), 1e-5)
    outs = torch.stack([santa_decode(q, k, v, samples=6, scheme="stratified", seed=fold_in(HEADS, r))
                        for r in range(8)])
    assert_close(variance_trace_replicates(q, k, v, samples=6, scheme="stratified", replicates=8, seed=HEADS),
                 outs.double().var(0).sum(-1), 1e-5)


@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_replicates_estimate_the_variance_that_there_is(scheme):
    "Three replicates at a time, since a wrong divisor then shows; against every U of a fine grid, or the closed form."
    a, b, c = q[:1].double(), k[:1].double(), v[:1].double()
    if scheme == "systematic":
        weights, values = attention_weights(a, b), c.repeat_interleave(3, 1)[:, :, None].expand(-1, -1, 3, -1, -1)
        at = (torch.arange(6) + (torch.arange(4000, dtype=torch.float64)[:, None] + 0.5) / 4000) / 6
        rows = torch.searchsorted(weights.cumsum(-1), at.flatten().expand(*weights.shape[:-1], -1).contiguous(),
                                  right=True).clamp(max=39)
        outs = values.gather(-2, rows[..., None].expand(*rows.shape, 8)).unflatten(-2, (4000, 6)).mean(-2)
        want = outs.var(-2, correction=0).sum(-1)
    else: want = variance_trace(a, b, c, samples=6, scheme=scheme)
    got = torch.stack([variance_trace_replicates(a, b, c, samples=6, scheme=scheme, replicates=3, seed=i)
                       for i in range(300)]).mean((1, 2, 3)) / want.mean()
    assert abs(float(got.mean()) - 1) < stats.norm.isf(ALARM / 2) * float(got.std()) / 300**0.5 < 0.25


@pytest.mark.parametrize("settings_", [dict(stratified=False), dict(), dict(mean_group=True),
                                       dict(stratified=False, mean_group=True)])
def test_bernoulli_scores_are_unbiased(settings_):
    m = 3000
    query, keys = torch.randn(1, 6, 1, 16, generator=torch.Generator().manual_seed(1)), torch.randn(
        1, 2, 10, 16, generator=torch.Generator().manual_seed(2))
    scores = bernoulli_scores(query.expand(1, 6, m, 16), keys.expand(1, 2, 10, 16), samples=3, seed=6,
                              **settings_)[0][0].double()
    z = (scores.mean(1) - attention_scores(query, keys)[0, :, 0]) / (scores.std(1) / m**0.5)
    assert z.abs().max() < stats.norm.isf(ALARM / 120)


def test_bernoulli_features():
    scores, read = bernoulli_scores(q, k, samples=2, mean_group=True, seed=0, kv_start=start, kv_end=stop)
    assert same(read[:, 0], read[:, 1]) and same(read[:, 0], read[:, 2]) and read.dtype == torch.bool
    assert (scores[1, ..., :5] == -math.inf).all() and (
        scores[1, ..., 31:] == -math.inf).all() and scores[1, ..., 5:31].isfinite().all()
    assert read.any(-1).all()                                       # the largest entry is certain
    changed = k.clone(); changed[..., ~read[0, 0, 0]] = 7.0          # what is not read has no effect
    assert same(bernoulli_scores(q[:1, :1, :1], k[:1, :1], samples=2, seed=0)[0],
                bernoulli_scores(q[:1, :1, :1], k[:1, :1], samples=2, seed=torch.tensor(0))[0])
    assert_close(bernoulli_scores(q, changed, samples=2, mean_group=True, seed=0)[0][0, 0, 0],
                 bernoulli_scores(q, k, samples=2, mean_group=True, seed=0)[0][0, 0, 0], 1e-6)
    zero = bernoulli_scores(torch.zeros_like(q), k, samples=2, seed=0)
    assert (zero[0] == 0).all() and not zero[1].any()
    many = bernoulli_scores(q.double(), k.double(), samples=4000, seed=0)[0]
    assert_close(many, attention_scores(q.double(), k.double()), 1e-3)
    out, stats_ = bernoulli_decode(q, k, v, features=4000, samples=4000, seed=0, return_stats=True)
    assert_close(out, attention(q, k, v), 0.02)
    assert (stats_.keys_scored <= 40).all() and out.dtype == q.dtype


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bernoulli_decode_is_santa_on_bernoulli_scores(scheme):
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[1, :, :5] = bad_v[1, :, :5] = bad_k[1, :, 31:] = bad_v[1, :, 31:] = nan
    out, stats_ = bernoulli_decode(q, bad_k, bad_v, features=3, samples=20, scheme=scheme, tile=8, seed=4,
                                   kv_start=start, kv_end=stop, return_stats=True)
    scores, read = bernoulli_scores(q, k, samples=3, seed=fold_in(4, 0), kv_start=start, kv_end=stop)
    first, end = (x.view(2, 1, 1).expand(2, 1, 3) for x in (start, stop))
    draws = draw_keys(scores, first, end, stream_seeds(q, fold_in(4, 1))[..., None], 20, scheme, 8)
    assert same(out, average_values(v, draws, scheme, 20)[..., 0, :])
    assert_close(stats_.keys_scored, (end - first) * read.double().mean(-1), 1e-9)
    assert (stats_.values_read <= stats_.budget).all()


# guarantees

BOUNDS = [(bound, scheme) for bound in ("clt", "bernstein") for scheme in ("iid", "stratified")]


def check_coverage(out, truth, certificate, eps, delta=0.05):
    "Not more failures than `delta` allows, in output and in norm, of heads of which more than a half drew"
    drawn, length = certificate.samples, truth.norm(dim=-1)
    drew, heads = float((drawn > 0).double().mean()), drawn.numel()
    assert drew > 0.5, f"{drew:.0%} of the heads drew, and one that reads every key cannot fail"
    failed, above = int(((out - truth).norm(dim=-1) > eps * length).sum()), int((certificate.norm > length).sum())
    assert stats.binom.sf(failed - 1, heads, delta) > ALARM, f"{failed} of {heads} failed, {drew:.0%} drew"
    assert stats.binom.sf(above - 1, heads, PILOT_SHARE * delta) > ALARM / 10, f"{above} norms are not below the truth"


@pytest.mark.parametrize("bound, scheme", BOUNDS)
def test_a_guarantee_is_kept(bound, scheme):
    g = torch.Generator().manual_seed(7)
    query, keys, values = torch.zeros(1, 1, 300, 8), torch.randn(1, 1, 1500, 8,
                                                                 generator=g), torch.randn(1, 1, 1500, 8,
                                                                                           generator=g) + 1
    out, stats_ = santa_decode(query, keys, values, eps=0.25, delta=0.05, bound=bound, scheme=scheme, seed=3,
                               return_stats=True)
    truth, certificate = attention(query.double(), keys.double(), values.double()), stats_.certificate
    assert isinstance(certificate, Certificate) and certificate.bound == bound
    check_coverage(out, truth, certificate, 0.25)
    assert (stats_.values_read <= stats_.budget + certificate.pilot).all() and stats_.index_bytes == 4 * 1500


def along_an_axis(n, few, length, period=None):
    "Values 1 along an axis, but for `few` keys, or each `period`-th, which are `length` along it."
    values = torch.zeros(1, 1, n, 2)
    values[..., 0] = 1
    values[0, 0, ::period or n // few, 0] = length
    return values


# few keys, but of which most heads draw: how often a draw meets what was made to be missed is a share of them
CANCELLED = {f"{share} by {few}": (along_an_axis(4096, few, 1 - share * 4096 / few), eps)
             for few, eps in ((23, 0.5), (62, 0.3)) for share in (0.9, 0.3)}
RARE = {f"{share} of them turned, eps {eps}": (along_an_axis(n, int(n * share), -1.0), eps)
        for n, share, eps in ((16384, 0.002, 0.02), (16384, 0.004, 0.03), (16384, 0.008, 0.02), (8192, 0.02, 0.04),
                              (16384, 0.05, 0.06), (16384, 0.02, 0.5))}
ATTACKS = CANCELLED | RARE | {
    "Poisson": (torch.cat([along_an_axis(1023, 1, 1.0), torch.tensor([[[[0, 47.0]]]])], 2), 0.3),
    "period": (along_an_axis(4096, 512, -2.0, 8), 0.3), "half the mass": (along_an_axis(4096, 1, 4096.0), 0.3)}
READ_ALL = {"0.9 by 23", "0.9 by 62"} # what is left of the values is a tenth of their lengths: too many draws


@pytest.mark.parametrize("bound, scheme", BOUNDS)
@pytest.mark.parametrize("name", fast(ATTACKS, *(i for i, x in enumerate(ATTACKS) if x not in RARE or "eps 0.04" in x)))
def test_a_guarantee_is_kept_on_inputs_made_to_break_it(name, bound, scheme):
    "A pilot that misses the keys that cancel, a rare long value, rare turned values, a period"
    values, eps = ATTACKS[name]
    values = values[:, :, torch.randperm(values.shape[2], generator=torch.Generator().manual_seed(1))] if (
        eps < 0.1) else values
    query, truth = torch.zeros(1, 1, 400, 2), values.double().mean(2, keepdim=True)
    out, stats_ = santa_decode(query, torch.zeros_like(values), values, eps=eps, delta=0.05, bound=bound,
                               scheme=scheme, seed=3, return_stats=True)
    if name not in READ_ALL: return check_coverage(out, truth, stats_.certificate, eps)
    assert (stats_.certificate.samples == 0).all()  # no head drew: nothing is shown but that the output is exact
    assert_close(out, truth.expand_as(out), 1e-6)


@pytest.mark.parametrize("bound", ["clt", "bernstein"])
def test_the_number_of_samples_follows_the_formula(bound):
    g = torch.Generator().manual_seed(7)
    query, keys, values = (torch.randn(1, m, n, 8, generator=g, dtype=torch.float64)
                           for m, n in ((3, 1), (1, 20000), (1, 20000)))
    certificate = santa_decode(query, keys, values + 1, eps=0.3, delta=0.1, bound=bound, scheme="iid", seed=3,
                           return_stats=True)[1].certificate
    length = (attention_weights(query, keys) * (values + 1).norm(dim=-1)[0, 0]).sum(-1)
    assert_close(certificate.trace, length**2 - certificate.norm**2, 1e-12)
    left, radius = 0.1 * (1 - PILOT_SHARE), 0.3 * certificate.norm
    jumps = 4 / 3 * math.log(2 / left) * length / radius
    if bound == "clt":
        need = (stats.norm.isf(left / 2) ** 2 * certificate.trace / radius**2).clamp(min=CLT_SAMPLES).maximum(jumps)
    else: need = 2 * math.log(2 / left) * certificate.trace / radius**2 + jumps
    assert (certificate.samples > 0).all() and torch.equal(certificate.samples, need.ceil().long())
    assert (certificate.norm <= attention(query, keys, values + 1).norm(dim=-1)).all()


PILOTS = [("clt", CLT_SAMPLES), ("clt", CLT_SAMPLES + 2), ("clt", 48), ("bernstein", 32)]


@pytest.mark.parametrize("scheme", ["iid", "stratified"])
@pytest.mark.parametrize("bound, pilot", PILOTS)
def test_guarantees_of_the_smallest_pilots(bound, pilot, scheme):
    "A standard deviation as large as the mean, in both of its halves seen by 16 draws"
    values = 1 + torch.randn(1, 1, 8192, 1, generator=torch.Generator().manual_seed(7))
    query, truth = torch.zeros(1, 1, 300, 1), values.double().mean(2, keepdim=True).expand(1, 1, 300, 1)
    out, stats_ = santa_decode(query, torch.zeros_like(values), values, eps=0.3, delta=0.05, bound=bound, scheme=scheme,
                               samples=pilot, seed=3, return_stats=True)
    check_coverage(out, truth, stats_.certificate, 0.3)
    assert stats_.certificate.pilot == pilot and (stats_.values_read < 8192).double().mean() > 0.5


def test_guarantees_at_the_edges():
    two = dict(eps=0.3, delta=0.05, bound="bernstein", samples=2, seed=0, return_stats=True)
    values = 1 + torch.randn(1, 1, 4096, 1, generator=torch.Generator().manual_seed(7))
    out, stats_ = santa_decode(torch.zeros(1, 1, 9, 1), torch.zeros_like(values), values, **two)
    assert (stats_.certificate.samples == 0).all() and (stats_.certificate.norm == 0).all() # two rows bound nothing
    assert_close(out, values.mean(2, keepdim=True).expand_as(out), 1e-6)
    with pytest.raises(ValueError, match=f"samples must be even and at least {CLT_SAMPLES} when eps is given"):
        santa_decode(torch.zeros(1, 1, 9, 1), torch.zeros_like(values), values, **two | dict(bound="clt"))
    out, stats_ = decode(eps=0.001, delta=0.01, seed=0, return_stats=True)
    assert_close(out, attention(q, k, v), 1e-6)
    whole = stats_.certificate.samples == 0
    assert whole.all() and (stats_.values_read == 40).all() and (stats_.density == 1).all() and (
        stats_.budget == 40).all()
    one = decode(eps=0.5, delta=0.2, seed=0, kv_start=start, kv_end=start + 1)
    assert_close(one, torch.stack([v[0, :, 0], v[1, :, 5]]).repeat_interleave(3, 1)[:, :, None].expand(2, 6, 3, 8),
                 1e-6)
    norms = v.double().norm(dim=-1).float()
    norms[1, :, :5] = nan                                             # padding
    kept = dict(eps=0.4, delta=0.2, seed=0, kv_start=start, kv_end=stop, return_stats=True)
    (a, first), (b, second) = decode(**kept), decode(value_norms=norms, **kept)
    assert same(a, b) and same(first.certificate.samples, second.certificate.samples)
    zero, _ = santa_decode(q, k, torch.zeros_like(v), eps=0.4, delta=0.2, seed=0, return_stats=True)
    assert (zero == 0).all()


# schedules of samples, asked together

@pytest.fixture(scope="module")
def prompts_read(pocket):
    "Two batches of prompts of the pocket model, read but for the last token."
    from sparse_nb.grid import Grid
    from experiments.archive import santa_schedule as room
    class Hands: model, tokenizer, chat = *pocket, False
    return room.batches(Hands, Grid("pocket", ["needle"], [200], {}, prompts=5, chat=False), each=3)


def answers_one_by_one(model, batch, schedule, seed):
    "Bits and right [b] of a single schedule, by the method itself on a cache of its own."
    from sparse_nb.evaluate import bits_of
    from sparse_nb.hf import attention_override
    from sparse_nb.models.cache import fork_cache
    def attend(module, q, k, v, mask, scaling=None, **_):
        i = module.layer_idx
        out = Santa(samples=schedule[i]).decode(q, k, v, seed=fold_in(seed, i), causal=True, scale=scaling)
        return out.transpose(1, 2), None
    with torch.no_grad(), attention_override(model, attend):
        z = model(input_ids=batch.ids[:, batch.prompt - 1:-1], past_key_values=fork_cache(batch.cache)).logits
    target = batch.ids[:, batch.prompt:]
    return torch.stack([bits_of(z, target).sum(1), (z.argmax(-1) == target).all(1).double()])


@pytest.mark.parametrize("rows", [None, 6, 100])
def test_schedules_asked_together_answer_as_one_by_one(pocket, prompts_read, rows):
    from experiments.archive.santa_schedule import forced_answers
    schedules, seeds = [[3] * 6, [1, 2, 3, 4, 5, 30], [30, 5, 4, 3, 2, 1], [3] * 6], [5, 6, 7, 8]
    assert len(prompts_read) > 1
    for batch in prompts_read:
        together = forced_answers(pocket[0], batch, schedules, seeds, rows)
        alone = torch.stack([answers_one_by_one(pocket[0], batch, *x) for x in zip(schedules, seeds)], 1)
        assert_close(together[0], alone[0])
        assert same(together[1], alone[1])
        assert not torch.isclose(together[0, 0], together[0, 3]).all()  # the same schedule, other draws
        assert not torch.isclose(together[0, 1], together[0, 2]).all()


def test_means_of_schedules_use_the_same_draws_for_all(pocket, prompts_read):
    from experiments.archive.santa_schedule import mean_answers
    found = mean_answers(pocket[0], prompts_read, [[2] * 6, [4] * 6, [2] * 6], draws=2, seed=9)
    assert_close(found[:, 0], found[:, 2])
    batch = prompts_read[-1]
    seeds = [fold_in(9, batch.seeds[0], j) for j in range(2)]
    want = torch.stack([answers_one_by_one(pocket[0], batch, [4] * 6, seed) for seed in seeds]).mean(0)
    assert_close(found[:, 1, -len(batch.seeds):], want)


# values of a selection

@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_sampling_a_selection_of_all_keys_is_santa(scheme):
    kept, masks = dict(samples=24, scheme=scheme, seed=HEADS), dict(causal=True, kv_start=start, kv_end=stop)
    a, b, c = (x.double() for x in (q, k, v))
    every = Exact().select(a, b, **masks)
    got, want = draw_selected(a, b, every, **kept), select_santa(a, b, **kept, **masks)
    assert same(got.index, want.index)
    assert_close(got.weight, want.weight, 1e-9)
    assert_close(sample_values(a, b, c, every, **kept), santa_decode(a, b, c, **kept, **masks), 1e-12)


@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_values_of_a_selection_are_drawn_by_their_share_of_it(scheme):
    "Weights, a key in two slots and an unused slot: each slot's share of the draws, and the mean over many."
    m, index, weight = 3000, torch.tensor([3, 7, 7, 0, 5]), torch.tensor([1.0, 5.0, 2.0, 0.0, 0.5], dtype=torch.float64)
    a, b, c = q[:1, :1, :1].double().expand(-1, -1, m, -1) / 3, k[:1, :1].double(), v[:1, :1].double()
    few = Selection(index.expand(1, 1, m, 5), weight.expand(1, 1, m, 5))
    share = (weight * torch.exp(b[0, 0, index] @ a[0, 0, 0] / 8**0.5)).double()
    share = torch.zeros(40, dtype=torch.float64).index_add(0, index, share / share.sum())
    out, drawn = sample_values(a, b, c, few, samples=6, scheme=scheme, seed=2, return_drawn=True)
    count = torch.zeros(m, 40, dtype=torch.float64).scatter_add(1, drawn.index[0, 0],
                                                                torch.full((m, 6), 1 / 6).double())
    assert not count[:, share == 0].any()
    z = (count.mean(0) - share)[share > 0] / (count.std(0)[share > 0] / m**0.5)
    assert z.abs().max() < stats.norm.isf(ALARM / 8)
    assert_close(out, weighted_attention(a, b, c, drawn), 1e-12)  # its denominator is the selection's
    error = out[0, 0] - weighted_attention(a, b, c, few)[0, 0]
    assert (error.mean(0).abs() / (error.std(0) / m**0.5)).max() < stats.norm.isf(ALARM / 16)
    assert same(drawn.index, draw_selected(a, b, Selection(few.index, 4 * few.weight), samples=6, scheme=scheme,
                                           seed=2).index)


def test_draws_of_a_selection_in_blocks_dtypes_and_rows(monkeypatch):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        few = Uniform(0.5).select(q.to(dtype), k.to(dtype), seed=9)
        assert sample_values(q.to(dtype), k.to(dtype), v.to(dtype), few, samples=4, seed=1).dtype == dtype
    whole = chosen(q, k, v, samples=9, seed=HEADS)
    part = Selection(FEW.index[1:], FEW.weight[1:])
    assert same(whole[1:], sample_values(q[1:], k[1:], v[1:], part, samples=9, seed=HEADS[1:]))
    monkeypatch.setattr("sparse_nb.methods.santa.COPIED_AT_ONCE", 1)  # a query at a time
    assert same(whole, chosen(q, k, v, samples=9, seed=HEADS))


def test_a_gradient_reaches_the_values_that_were_drawn_and_nothing_else():
    a, b, c = (x[:, :, :n].clone().requires_grad_() for x, n in ((q, 1), (k, 40), (v, 40)))
    for call in (lambda: santa_decode(a, b, c, samples=8, seed=3, return_stats=True),
                 lambda: (sample_values(a, b, c, TopK(20).select(a, b), samples=8, seed=3), None)):
        a.grad = b.grad = c.grad = None
        call()[0].sum().backward()
        assert a.grad is None and b.grad is None and 0 < int((c.grad != 0).any(-1).sum()) < 60
        # each of 12 heads shares out 1 for each of 8 numbers
        assert_close(c.grad.sum(), torch.tensor(2.0 * 6 * 8), 1e-6)


def test_a_gradient_of_guaranteed_draws_is_that_of_attention_on_average():
    "Lengths and weights decide what is drawn, and no gradient passes through either"
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(1, 1, n, 8, generator=g, dtype=torch.float64).requires_grad_() for n in (1, 300, 300))
    weight, found = attention_weights(a, b)[0, 0, 0].detach(), []
    for seed in range(300):
        c.grad = None
        out, stats_ = santa_decode(a, b, c + 2, eps=0.3, delta=0.1, seed=seed, return_stats=True)
        assert (stats_.certificate.samples > 0).all()
        out[..., 0].sum().backward()
        assert a.grad is None and b.grad is None and not c.grad[..., 1:].any()
        found.append(c.grad[0, 0, :, 0].clone())
    found, often = torch.stack(found), weight > 1 / 300
    z = (found.mean(0) - weight)[often] / (found.std(0)[often] / 300**0.5)
    assert often.sum() > 50 and z.abs().max() < stats.norm.isf(ALARM)


def test_a_guarantee_for_values_whose_squares_overflow():
    values = (3 + torch.randn(1, 1, 50, 8, generator=torch.Generator().manual_seed(1))).bfloat16() * 1e20
    flat = torch.zeros(1, 1, 50, 8, dtype=torch.bfloat16)
    state = ValueNorms()
    state.append(flat, values)
    norms = values.double().norm(dim=-1)
    assert_close(state.rows.double(), norms, 1e-6)
    out, stats_ = santa_decode(flat[:, :, :1], flat, values, eps=0.5, delta=0.2, seed=0, return_stats=True)
    assert stats_.certificate.norm.isfinite().all() and out.isfinite().all()


# the method

@pytest.mark.parametrize("method", [Santa(), Santa(samples=3, scheme="iid", tile=7), Santa(eps=0.25, delta=0.125),
                                    Santa(scheme="stratified", eps=0.25, delta=0.5, bound="bernstein")])
def test_the_method_survives_json_and_decodes(method):
    assert Method.from_json(method.to_json()) == method and Santa.from_json(method.to_json()) == method
    out, stats_ = method.decode(q, k, v, seed=4, causal=True, return_stats=True)
    assert same(out,
                method.decode(q, k, v, seed=4, causal=True)) and (stats_.certificate is not None) == (
                    method.eps is not None)
    if method.eps is None:
        assert same(method.select(q, k, seed=4).index,
                    select_santa(q, k, samples=method.samples, scheme=method.scheme, tile=method.tile, seed=4).index)


def test_the_state_of_the_method():
    assert Santa().new_state() is None and Santa.random
    method = Santa(samples=32, eps=0.4, delta=0.2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        a, b, c = (x.to(dtype) for x in (q, k, v))
        state = method.new_state()
        for begin, end in ((0, 17), (17, 18), (18, 40)): state.append(b[:, :, begin:end], c[:, :, begin:end])
        assert state.rows.dtype == (torch.float64 if dtype == torch.float64
                                    else torch.float32) and state.rows.shape == (2, 2, 40)
        for rows, length in ((torch.arange(2), 40), (torch.tensor([1, 1, 0]), 33)):
            state.pick_sequences(rows); state.crop(length)
            a, b, c = a[rows], b[rows, :, :length], c[rows, :, :length]
            (x, first), (y, second) = (method.decode(a, b, c, seed=3, state=s, return_stats=True)
                                       for s in (None, state))
            assert same(x, y) and same(first.certificate.samples,
                                       second.certificate.samples) and same(
                                           first.certificate.trace, second.certificate.trace)
    with pytest.raises(ValueError, match=r"value_norms must have shape \[B, G, N\]"):
        method.decode(q, k[:, :, :33], v[:, :, :33], seed=3, state=state)


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="Santa has no setting 'sample'"):
        Method.from_json('{"method": "Santa", "sample": 3}')
    with pytest.raises(ValueError, match="scheme must be one of"):
        Method.from_json('{"method": "Santa", "scheme": "exact"}')


# keys of eight bits

def index_of(k, v=None):
    state = Int8Keys()
    state.append(k, k if v is None else v)
    return state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gaussian", "huge", "tiny", "zero", "one channel"])
def test_an_index_is_off_by_half_a_unit(kind, dtype):
    x = torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    limits = torch.finfo(dtype)
    x = dict(gaussian=x, huge=(x / x.abs().max()) * limits.max * 0.99, tiny=x * limits.tiny, zero=0 * x)[
        kind] if kind != "one channel" else x + 1000 * (torch.arange(8) == 5)
    x = x.to(dtype)
    codes, unit = quantise(x)
    assert codes.dtype == torch.int8 and unit.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (codes >= -127).all() and codes.shape == x.shape and unit.shape == x.shape[:3]
    off = (codes * unit[..., None].double() - x.double()).abs()
    assert (off <= unit[..., None].double() * 0.5001 + (1e-43 if kind == "tiny" else 0)).all()
    assert (codes.abs().amax(-1) == 127).all() or kind == "zero"


@pytest.mark.parametrize("keys", ["int8", "rescored"])
@pytest.mark.parametrize("scheme", SCHEMES[:4])
def test_an_index_of_the_cache_gives_what_a_new_one_gives(scheme, keys):
    method = Santa(samples=16, scheme=scheme, tile=8, keys=keys)
    assert Method.from_json(method.to_json()) == method and not method.scores_all and method.index_bytes(8) == 12
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        a, b, c = (x.to(dtype) for x in (q, k, v))
        state = method.new_state()
        for begin, end in ((0, 17), (17, 18), (18, 40)): state.append(b[:, :, begin:end], c[:, :, begin:end])
        for rows, length in ((torch.arange(2), 40), (torch.tensor([1, 1, 0]), 33)):
            state.pick_sequences(rows); state.crop(length)
            a, b, c = a[rows], b[rows, :, :length], c[rows, :, :length]
            (x, first), (y, second) = (method.decode(a, b, c, seed=3, causal=True, state=s, return_stats=True)
                                       for s in (None, state))
            assert x.dtype == dtype and same(x, y) and same(first.values_read, second.values_read)
            assert same(first.keys_scored, first.values_read if keys == "rescored" else 0 * first.values_read)
            assert same(first.index_bytes, (torch.arange(3) + length - 2).expand(len(a), 6, 3) * 12)
            assert same(first.budget, torch.full_like(first.budget, 16))


def test_an_index_of_fixed_length_grows_in_place_and_on():
    state, whole = index_of(k[:, :, :20]), index_of(k)
    state.to_static(30)
    held = [x.data_ptr() for x in state.buffers()]
    for n in range(20, 30): state.write(k, v, torch.tensor([n]))
    assert len(state) == 30 and held == [x.data_ptr() for x in state.buffers()] and len(held) == 2
    with pytest.raises(ValueError, match="state must be made dynamic"): state.append(k[:, :, 30:], v[:, :, 30:])
    state.to_dynamic(29, k)
    state.append(k[:, :, 29:], v[:, :, 29:])
    assert same(state.rows, whole.rows) and same(state.unit, whole.unit) and state.settings() == whole.settings() == {}
    state.reset()
    assert len(state) == 0 and not state.buffers()


@pytest.mark.parametrize("keys", ["int8", "rescored"])
def test_hidden_keys_may_hold_anything(keys):
    spoilt = [x.clone() for x in (k, v)]
    for x in spoilt:
        for b in range(2): x[b, :, :start[b]] = x[b, :, stop[b]:] = nan
    kept = dict(samples=16, seed=2, keys=keys, kv_start=start, kv_end=stop)
    assert same(santa_decode(q, *spoilt, **kept), santa_decode(q, k, v, **kept))


@pytest.mark.parametrize("scheme", ["iid", "stratified", "systematic"])
def test_drawn_keys_scored_again_are_right_on_average_and_those_of_the_index_are_not(scheme):
    "Means of 4,000 outputs of 64 draws, from a coarse index: a channel with a constant."
    loud, many = k[:1].clone(), q[:1, :1, :1].expand(-1, -1, 4000, -1)
    loud[..., 0] += 60
    keys, values = loud[:, :1].double(), v[:1, :1].double()
    truth = attention(many[:, :, :1].double(), keys, values)[0, 0, 0]
    far = {}
    for name in ("int8", "rescored"):
        out = santa_decode(many.double(), keys, values, samples=64, scheme=scheme, seed=1, keys=name)[0, 0]
        far[name] = (out.mean(0) - truth) / (out.std(0) / 4000**0.5), (out.mean(0) - truth).norm() / truth.norm()
    # the quotient of two means has a bias of order 1 / S, below a hundredth here; that of the index has none to lose
    assert far["int8"][0].abs().max() > stats.norm.isf(ALARM) and far["rescored"][1] < min(0.01, far["int8"][1] / 5)


def test_the_theorem_of_eight_bits():
    for scale in (None, 1.0):
        for factor in (0.1, 1, 30):
            found = int8_error(factor * q, k, causal=True, scale=scale, kv_start=start)
            assert found.distance.shape == (2, 6, 3) and (found.range <= found.allowed).all()
            assert (found.distance <= torch.tanh(found.range / 2) + 1e-12).all() and (found.distance > 0).all()
    weights, moved = (attention_weights(q.double(), x.double()) for x in (k, index_of(k).keys()))
    assert_close(int8_error(q, k).distance, (weights - moved).abs().sum(-1) / 2, 1e-9)


def test_errors_of_eight_bits_are_of_the_keys_that_a_query_sees():
    "Keys in the padding and behind a causal query are a thousand times as large."
    loud = k.clone()
    for b in range(2): loud[b, :, :start[b]] = loud[b, :, stop[b]:] = 1000
    for got, want in zip(*(int8_error(q, x, kv_start=start, kv_end=stop) for x in (loud, k))):
        assert torch.equal(got, want)
    loud = k.clone()
    loud[:, :, -1] = 1000
    found, plain = (int8_error(q, x, causal=True) for x in (loud, k))
    for got, want in zip(found, plain): assert torch.equal(got[:, :, :-1], want[:, :, :-1])
    assert (found.allowed > plain.allowed)[:, :, -1].all()


@pytest.mark.parametrize("keys", ["int8", "rescored"])
def test_a_gradient_reaches_the_drawn_values_alone(keys):
    a, b, c = (x.clone().requires_grad_() for x in (q, k, v))
    santa_decode(a, b, c, samples=8, seed=0, keys=keys).sum().backward()
    assert a.grad is None and b.grad is None and c.grad.any()


INDEX = index_of(k, v)
BAD_KEYS = [
    (lambda: decode(keys="fp8"), ValueError, "keys must be one of exact, int8, rescored, got 'fp8'"),
    (lambda: decode(keys=8), TypeError, "keys must be a string, got int"),
    (lambda: decode(keys="int8", eps=0.1, delta=0.1), ValueError,
     "keys must be 'exact' when eps is given, got 'int8'"),
    (lambda: decode(keys="rescored", scheme="flash"), ValueError,
     "scheme must be one of iid, stratified, systematic, proportional for keys='rescored', got 'flash'"),
    (lambda: decode(state=INDEX), ValueError, "state must be None with keys='exact', got Int8Keys"),
    (lambda: decode(keys="int8", state=ValueNorms()), TypeError, "state must be Int8Keys or None, got ValueNorms"),
    (lambda: decode(keys="int8", state=INDEX.rows), TypeError, "state must be Int8Keys or None, got Tensor"),
    (lambda: decode(keys="int8", state=Int8Keys()), ValueError, "state must hold as many keys as k, 40, got 0"),
    (lambda: decode(keys="int8", state=index_of(k[:, :, :39])), ValueError,
     "state must hold as many keys as k, 40, got 39"),
    (lambda: decode(keys="int8", state=index_of(k[:1])), ValueError, "state must be for [B, G] = [2, 2], got [1, 2]"),
    (lambda: santa_decode(q, k * nan, v, keys="int8"), ValueError, "must be finite, got NaN"),
    (lambda: santa_decode(q, k * math.inf, v, keys="rescored"), ValueError, "must be finite, got NaN"),
    (lambda: Santa(keys="half"), ValueError, "keys must be one of exact, int8, rescored, got 'half'"),
    (lambda: Santa(keys="int8", scheme="flash"), ValueError, "for keys='int8', got 'flash'"),
    (lambda: Santa(keys="int8", eps=0.1, delta=0.1), ValueError, "keys must be 'exact' when eps is given"),
    (lambda: Santa(keys="int8").select(q, k), ValueError, "keys must be 'exact' to select, got 'int8'"),
    (lambda: Then(values=Santa(keys="int8")), ValueError, "values.keys must be one of exact, got 'int8'"),
    (lambda: int8_error(q, k * nan), ValueError, "must be finite, got NaN"),
    (lambda: int8_error(q, k[:1]), ValueError, "k must have the batch size of q, 2, got 1"),
    (lambda: int8_error(q, k, scale=-1.0), ValueError, "scale must be positive and finite, got -1.0"),
]


@pytest.mark.parametrize("call, error, message", BAD_KEYS, ids=[f"{i}" for i in range(len(BAD_KEYS))])
def test_bad_keys_of_eight_bits(call, error, message):
    with pytest.raises(error) as found: call()
    assert message in str(found.value) and type(found.value) is error
