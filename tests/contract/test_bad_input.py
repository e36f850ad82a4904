"""Everything wrong that was tried on `sparse_nb.attention` and on every method of the table: each must be refused with
the right exception and a message that says what is wrong.
"""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparse_nb.attention import (
    Method, Selection, SoftmaxState, Streaming, TopK, TopP, Uniform, assert_close, attention, attention_scores,
    attention_weights, fold_in,
    partial_attention, philox, select_sinks_window, select_topk, select_topp, select_uniform, weighted_attention)
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.one_list import OneList
from sparse_nb.core.registry import METHODS
from sparse_nb.hash_attention import HashAttention
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from models import method_of, random_maps

q, k, v = torch.ones(2, 6, 3, 16), torch.ones(2, 2, 40, 16), torch.ones(2, 2, 40, 16)
nan, inf = math.nan, math.inf
index, weight = torch.zeros(2, 6, 3, 5, dtype=torch.int64), torch.ones(2, 6, 3, 5)
some = Selection(index, weight)


def spoilt(x, value):
    "A copy of x with one bad number."
    x = x.clone()
    x[1, 0, 2, 3] = value
    return x


def at(*numbers, dtype=torch.int64, device="cpu"):
    "One end of the keys."
    return torch.tensor(numbers, dtype=dtype, device=device)


SHAPES = [
    ("q is a list", lambda f: f([1.0], k), TypeError, "q must be a torch.Tensor, got list"),
    ("k is an array", lambda f: f(q, k.numpy()), TypeError, "k must be a torch.Tensor, got ndarray"),
    ("k is None", lambda f: f(q, None), TypeError, "k must be a torch.Tensor, got NoneType"),
    ("integer q", lambda f: f(q.long(), k), TypeError, "q must be float16, bfloat16, float32 or float64, got "
     "torch.int64"),
    ("complex k", lambda f: f(q, k.cfloat()), TypeError, "k must be float16, bfloat16, float32 or float64, got "
     "torch.complex64"),
    ("float8 q and k", lambda f: f(q.to(torch.float8_e4m3fn), k), TypeError,
     "q must be float16, bfloat16, float32 or float64, got torch.float8_e4m3fn"),
    ("mixed dtypes", lambda f: f(q, k.half()), TypeError,
     "k must have the dtype of q, torch.float32, got torch.float16"),
    ("other device", lambda f: f(q, k.to("meta")), ValueError, "k must be on the device of q, cpu, got meta"),
    ("q without heads", lambda f: f(q[:, 0], k), ValueError, "q must have 4 axes (batch, heads, positions, head size), "
     "got shape [2, 3, 16]"),
    ("k with 5 axes", lambda f: f(q, k[None]), ValueError, "k must have 4 axes"),
    ("N = 0", lambda f: f(q, k[:, :, :0]), ValueError, "k must not be empty, got shape [2, 2, 0, 16]"),
    ("Q = 0", lambda f: f(q[:, :, :0], k), ValueError, "q must not be empty, got shape [2, 6, 0, 16]"),
    ("B = 0", lambda f: f(q[:0], k[:0]), ValueError, "q must not be empty"),
    ("batch sizes differ", lambda f: f(q, k[:1]), ValueError, "k must have the batch size of q, 2, got 1"),
    ("head sizes differ", lambda f: f(q, k[..., :8]), ValueError, "k must have the head size of q, 16, got 8"),
    ("H not a multiple of G", lambda f: f(q[:, :5], k), ValueError,
     "q must have a multiple of the heads of k, 2, got 5"),
    ("fewer heads than groups", lambda f: f(q[:, :1], k), ValueError,
     "q must have a multiple of the heads of k, 2, got 1"),
    ("causal with Q > N", lambda f: f(q, k[:, :, :2], causal=True), ValueError,
     "q must not have more positions than k, 2, when causal, got 3"),
    ("causal is a number", lambda f: f(q, k, causal=1), TypeError, "causal must be a bool, got int"),
    ("kv_start is a list", lambda f: f(q, k, kv_start=[0, 0]), TypeError,
     "kv_start must be an integer tensor of shape [B], got list"),
    ("kv_end is an int", lambda f: f(q, k, kv_end=40), TypeError,
     "kv_end must be an integer tensor of shape [B], got int"),
    ("kv_end is float", lambda f: f(q, k, kv_end=torch.ones(2)), TypeError,
     "kv_end must be int32 or int64, got torch.float32"),
    ("kv_start is bool", lambda f: f(q, k, kv_start=torch.ones(2).bool()), TypeError,
     "kv_start must be int32 or int64, got torch.bool"),
    ("kv_start too long", lambda f: f(q, k, kv_start=at(0, 0, 0)), ValueError,
     "kv_start must have shape [B] = [2], got [3]"),
    ("kv_end without axes", lambda f: f(q, k, kv_end=torch.tensor(9)), ValueError,
     "kv_end must have shape [B] = [2], got []"),
    ("kv_end on another device", lambda f: f(q, k, kv_end=at(9, 9, device="meta")), ValueError,
     "kv_end must be on the device of q, cpu, got meta"),
    ("kv_start negative", lambda f: f(q, k, kv_start=at(0, -1)), ValueError,
     "got kv_start = -1 and kv_end = 40 in sequence 1"),
    ("kv_end beyond N", lambda f: f(q, k, kv_end=at(41, 40)), ValueError,
     "0 <= kv_start < kv_end <= 40 must hold, got kv_start = 0 and kv_end = 41 in sequence 0"),
    ("kv_end = 0 hides everything", lambda f: f(q, k, kv_end=at(0, 40)), ValueError,
     "got kv_start = 0 and kv_end = 0 in sequence 0"),
    ("kv_start = N hides everything", lambda f: f(q, k, kv_start=at(0, 40)), ValueError,
     "got kv_start = 40 and kv_end = 40 in sequence 1"),
    ("kv_start after kv_end", lambda f: f(q, k, kv_start=at(0, 9), kv_end=at(9, 8)), ValueError,
     "got kv_start = 9 and kv_end = 8 in sequence 1"),
    ("a causal query sees nothing", lambda f: f(q, k, causal=True, kv_start=at(0, 38)), ValueError,
     "must leave a key to each of the 3 causal queries, got 2 keys in sequence 1"),
]
SCALES = [
    ("scale is a string", lambda f: f(q, k, scale="1"), TypeError, "scale must be a number, got str"),
    ("scale is bool", lambda f: f(q, k, scale=True), TypeError, "scale must be a number, got bool"),
    ("scale = 0", lambda f: f(q, k, scale=0), ValueError, "scale must be positive and finite, got 0"),
    ("scale negative", lambda f: f(q, k, scale=-0.5), ValueError, "scale must be positive and finite, got -0.5"),
    ("scale = 2**63", lambda f: f(q, k, scale=2**63), ValueError, f"scale must be a float from 2**63 on, got {2**63}"),
    ("scale nan", lambda f: f(q, k, scale=nan), ValueError, "scale must be positive and finite, got nan"),
    ("scale inf", lambda f: f(q, k, scale=inf), ValueError, "scale must be positive and finite, got inf"),
]
SCORES = [
    ("q holds NaN", lambda f: f(spoilt(q, nan), k), ValueError,
     "the scores of q and k must be finite, got NaN or +inf"),
    ("k holds NaN", lambda f: f(q, spoilt(k, nan)), ValueError, "the scores of q and k must be finite"),
    ("k holds inf", lambda f: f(q, spoilt(k, inf)), ValueError, "the scores of q and k must be finite"),
    ("inf times zero", lambda f: f(q * 0, spoilt(k, -inf)), ValueError, "the scores of q and k must be finite"),
    ("scores overflow", lambda f: f(q * 1e30, k * 1e30), ValueError, "the scores of q and k must be finite"),
]
SEEDS = [
    ("seed is float", lambda f: f(q, k, seed=1.0), TypeError, "seed must be an int or an integer tensor, got float"),
    ("seed is bool", lambda f: f(q, k, seed=True), TypeError, "seed must be an int or an integer tensor, got bool"),
    ("seed is a generator", lambda f: f(q, k, seed=torch.Generator()), TypeError,
     "seed must be an int or an integer tensor, got Generator"),
    ("seed negative", lambda f: f(q, k, seed=-1), ValueError, "seed must lie in [0, 2**63), got -1"),
    ("seed too large", lambda f: f(q, k, seed=2**63), ValueError,
     "seed must lie in [0, 2**63), got 9223372036854775808"),
    ("seed tensor is float", lambda f: f(q, k, seed=torch.tensor(1.0)), TypeError,
     "seed must be int32 or int64, got torch.float32"),
    ("seed tensor with axes", lambda f: f(q, k, seed=at(1, 2)), ValueError,
     "seed must be one number or have shape [B, H], got a tensor of shape [2]"),
    ("seed tensor negative", lambda f: f(q, k, seed=torch.tensor(-5)), ValueError,
     "seed must lie in [0, 2**63), got -5"),
]
FUNCTIONS = [
    ("attention_scores", attention_scores, SHAPES + SCALES + SCORES),
    ("attention_weights", attention_weights, SHAPES + SCALES + SCORES),
    ("attention", lambda q, k, **more: attention(q, k, k, **more), SHAPES + SCALES + SCORES),
    ("partial_attention", lambda q, k, **more: partial_attention(q, k, k, **more), SHAPES + SCALES + SCORES),
    ("select_sinks_window", lambda q, k, **more: select_sinks_window(q, k, sinks=1, window=0.5, **more), SHAPES),
    ("select_topk", lambda q, k, **more: select_topk(q, k, budget=0.5, **more), SHAPES + SCORES),
    ("select_topp", lambda q, k, **more: select_topp(q, k, mass=0.5, **more), SHAPES + SCALES + SCORES),
    ("select_uniform", lambda q, k, **more: select_uniform(q, k, samples=0.5, **more), SHAPES + SEEDS),
]
SHARED = [(f"{function}: {name}", lambda f=f, call=call: call(f), error, text) for function, f, cases in FUNCTIONS
          for name, call, error, text in cases]

BUDGETS = [
    ("bool", True, TypeError, "must be an int (keys) or a float (share of the keys), got bool"),
    ("string", "0.1", TypeError, "must be an int (keys) or a float (share of the keys), got str"),
    ("None", None, TypeError, "must be an int (keys) or a float (share of the keys), got NoneType"),
    ("numpy integer", np.int64(3), TypeError, "must be an int (keys) or a float (share of the keys), got int64"),
    ("tensor", torch.tensor(3), TypeError, "must be an int (keys) or a float (share of the keys), got Tensor"),
    ("zero", 0, ValueError, "must be at least 1 key, got 0"),
    ("negative", -1, ValueError, "must be at least 1 key, got -1"),
    ("zero share", 0.0, ValueError, "must lie in (0, 1] as a share of the keys, got 0.0"),
    ("negative share", -0.1, ValueError, "must lie in (0, 1] as a share of the keys, got -0.1"),
    ("share above one", 1.5, ValueError, "must lie in (0, 1] as a share of the keys, got 1.5"),
    ("nan", nan, ValueError, "must lie in (0, 1] as a share of the keys, got nan"),
    ("inf", inf, ValueError, "must lie in (0, 1] as a share of the keys, got inf"),
]
TAKES_BUDGET = [
    ("Streaming", lambda b: Streaming(window=b), "window"),
    ("TopK", lambda b: TopK(b), "budget"),
    ("Uniform", lambda b: Uniform(b), "samples"),
    ("select_sinks_window", lambda b: select_sinks_window(q, k, window=b), "window"),
    ("select_topk", lambda b: select_topk(q, k, budget=b), "budget"),
    ("select_uniform", lambda b: select_uniform(q, k, samples=b), "samples"),
]
BUDGETED = [(f"{who}: {name}", lambda f=f, b=b: f(b), error, f"{argument} {text}")
            for who, f, argument in TAKES_BUDGET for name, b, error, text in BUDGETS]

short = dict(kv_end=at(40, 20))
OTHERS = [
    ("v is a number", lambda: attention(q, k, 1.0), TypeError, "v must be a torch.Tensor, got float"),
    ("v in another dtype", lambda: attention(q, k, v.double()), TypeError,
     "v must have the dtype of q, torch.float32, got torch.float64"),
    ("v shorter than k", lambda: attention(q, k, v[:, :, :39]), ValueError,
     "v must have the shape of k, [2, 2, 40, 16], got [2, 2, 39, 16]"),
    ("v with other heads", lambda: TopK().decode(q, k, v[:, :1]), ValueError,
     "v must have the shape of k, [2, 2, 40, 16], got [2, 1, 40, 16]"),
    ("v with another head size", lambda: attention(q, k, v[..., :8]), ValueError,
     "v must have the head size of q, 16, got 8"),
    ("begin is float", lambda: partial_attention(q, k, v, begin=0.0), TypeError, "begin must be an int, got float"),
    ("stop is bool", lambda: partial_attention(q, k, v, stop=True), TypeError, "stop must be an int, got bool"),
    ("begin negative", lambda: partial_attention(q, k, v, begin=-1), ValueError,
     "0 <= begin < stop <= 40 must hold, got begin = -1 and stop = 40"),
    ("stop beyond N", lambda: partial_attention(q, k, v, stop=41), ValueError, "got begin = 0 and stop = 41"),
    ("empty part", lambda: partial_attention(q, k, v, begin=5, stop=5), ValueError, "got begin = 5 and stop = 5"),
    ("output of no keys", lambda: SoftmaxState.empty(q).output(), ValueError, "each query must see a key"),
    ("output of a hidden part", lambda: partial_attention(q, k, v, begin=30, **short).output(), ValueError,
     "each query must see a key"),
    ("sinks a share", lambda: Streaming(sinks=0.1), TypeError, "sinks must be an int, got float"),
    ("sinks bool", lambda: select_sinks_window(q, k, sinks=True), TypeError, "sinks must be an int, got bool"),
    ("sinks negative", lambda: Streaming(sinks=-1), ValueError, "sinks must be at least 0, got -1"),
    *((f"mass {m!r}", lambda m=m: TopP(m), ValueError, f"mass must lie in (0, 1], got {m!r}")
      for m in (0.0, -0.5, 1.0001, 2, nan, inf)),
    ("mass a string", lambda: TopP("0.9"), TypeError, "mass must be a number, got str"),
    ("mass bool", lambda: select_topp(q, k, mass=True), TypeError, "mass must be a number, got bool"),
    ("mass nan", lambda: select_topp(q, k, mass=nan), ValueError, "mass must lie in (0, 1], got nan"),
    ("index a list", lambda: Selection([[0]], weight), TypeError, "index must be a torch.Tensor, got list"),
    ("index int32", lambda: Selection(index.int(), weight), TypeError, "index must be int64, got torch.int32"),
    ("index with 3 axes", lambda: Selection(index[0], weight[0]), ValueError,
     "index must have shape [B, H, Q, S] with nothing empty, got [6, 3, 5]"),
    ("no slots", lambda: Selection(index[..., :0], weight[..., :0]), ValueError,
     "with nothing empty, got [2, 6, 3, 0]"),
    ("index negative", lambda: Selection(index - 1, weight), ValueError, "index must not be negative, got -1"),
    ("weight integer", lambda: Selection(index, index), TypeError, "weight must be floating point, got torch.int64"),
    ("weight of another shape", lambda: Selection(index, weight[..., :1]), ValueError,
     "weight must have the shape of index, [2, 6, 3, 5], got [2, 6, 3, 1]"),
    ("weight on another device", lambda: Selection(index, weight.to("meta")), ValueError,
     "weight must be on the device of index, cpu, got meta"),
    *((f"weight {x}", lambda x=x: Selection(index, spoilt(weight, x)), ValueError,
       "weight must be finite and not negative") for x in (-1.0, nan, inf)),
    ("count a list", lambda: Selection(index, weight, [5]), TypeError, "count must be a torch.Tensor, got list"),
    ("count int32", lambda: Selection(index, weight, some.budget.int()), TypeError,
     "count must be int64, got torch.int32"),
    ("count for other queries", lambda: Selection(index, weight, some.budget[:, :, :1]), ValueError,
     "count must have shape [B, H, Q] = [2, 6, 3], got [2, 6, 1]"),
    ("count on another device", lambda: Selection(index, weight, some.budget.to("meta")), ValueError,
     "count must be on the device of index, cpu, got meta"),
    *((f"a used slot at {n} or behind", lambda n=n: Selection(index, weight, torch.full((2, 6, 3), n)), ValueError,
       "weight must be 0 from slot number count on") for n in (4, 0, -1)),
    ("not a selection", lambda: weighted_attention(q, k, v, index), TypeError,
     "selection must be a Selection, got Tensor"),
    ("selection for other queries", lambda: weighted_attention(q[:, :, :1], k, v, some), ValueError,
     "selection must be for [B, H, Q] = [2, 6, 1], got [2, 6, 3]"),
    ("selection on another device", lambda: weighted_attention(q, k, v, Selection(index.to("meta"), weight.to("meta"))),
     ValueError, "selection must be on the device of q, cpu, got meta"),
    ("key number beyond N", lambda: weighted_attention(q, k, v, Selection(index + 40, weight)), ValueError,
     "index must be below the number of keys, 40, got 40"),
    ("dense with too few keys", lambda: Selection(index + 4, weight).dense(4), ValueError,
     "index must be below the number of keys, 4, got 4"),
    ("a query without keys", lambda: weighted_attention(q, k, v, Selection(index, weight * 0)), ValueError,
     "each query must see a key"),
    ("NaN in a selected key", lambda: weighted_attention(q, spoilt(k, nan), v, Selection(index + 2, weight)),
     ValueError, "the scores of q and k must be finite"),
    ("philox seed float", lambda: philox(0.5, 0), TypeError, "seed must be an int or an integer tensor, got float"),
    ("philox offset negative", lambda: philox(0, torch.tensor([3, -3])), ValueError,
     "offset must lie in [0, 2**63), got -3"),
    ("fold_in of a string", lambda: fold_in(0, "layer"), TypeError,
     "data must be an int or an integer tensor, got str"),
    ("fold_in of a bool tensor", lambda: fold_in(0, torch.tensor(True)), TypeError,
     "data must be int32 or int64, got torch.bool"),
    ("fold_in of a negative number", lambda: fold_in(0, 1, -1), ValueError, "data must lie in [0, 2**63), got -1"),
    ("fold_in without a seed", lambda: fold_in(None, 1), TypeError,
     "seed must be an int or an integer tensor, got NoneType"),
    ("method not JSON", lambda: Method.from_json("TopK"), ValueError, "text must be JSON, got 'TopK'"),
    ("unknown method", lambda: Method.from_json('{"method": "Topk"}'), ValueError, "got 'Topk'"),
    ("method without a name", lambda: Method.from_json('{"budget": 3}'), ValueError, "got None"),
    ("method's name a list", lambda: Method.from_json('{"method": [1]}'), ValueError, "got [1]"),
    ("unknown setting", lambda: Method.from_json('{"method": "Streaming", "sink": 4}'), ValueError,
     "Streaming has no setting 'sink', it has sinks, window"),
    ("bad setting", lambda: Method.from_json('{"method": "TopK", "budget": 0}'), ValueError,
     "budget must be at least 1 key, got 0"),
    ("another method", lambda: TopP.from_json(TopK().to_json()), ValueError,
     "text must describe a TopP, got TopK(budget=0.1)"),
    ("a list of methods", lambda: Method.from_json("[]"), ValueError, "text must describe a Method, got []"),
    ("a base method", lambda: Method().decode(q, k, v), NotImplementedError, "Method does not say how it selects keys"),
    ("comparing different shapes", lambda: assert_close(q, q[:1]), AssertionError,
     "got has shape [2, 6, 3, 16], want [1, 6, 3, 16]"),
    ("comparing NaN", lambda: assert_close(spoilt(q, nan), spoilt(q, nan)), AssertionError, "relative error of nan"),
    ("comparing with zero", lambda: assert_close(1e-9, 0.0), AssertionError, "relative error of inf"),
]
TABLE = SHARED + BUDGETED + OTHERS


@pytest.mark.parametrize("call, error, text", [case[1:] for case in TABLE], ids=[case[0] for case in TABLE])
def test_bad_input(call, error, text):
    with pytest.raises(error) as caught: call()
    assert type(caught.value) is error
    assert text in str(caught.value)


# every method of the table

EVERY = {name: method_of(name, tiny=True) for name in METHODS}
EVERY["hash_attention"] = replace(EVERY["hash_attention"], layer=0)  # outside of a session
EVICT = "h2o", "snapkv"  # which must have observed the prompt's queries
DECODES = [x for x, m in EVERY.items() if hasattr(m, "decode")]
READS = [x for x, m in EVERY.items() if hasattr(m, "prefill")]
UNSEEN = "streaming", "uniform", "random_blocks"  # read some keys, and look at no other

g = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, h, n, 16, generator=g, dtype=torch.float64) for h, n in ((4, 5), (2, 44), (2, 44)))
CALLS = [
    (dict(q=None), "q must be a torch.Tensor, got NoneType"), (dict(k=None), "k must be a torch.Tensor, got NoneType"),
    (dict(v=None), "v must be a torch.Tensor, got NoneType"), (dict(q=[1.0]), "q must be a torch.Tensor, got list"),
    (dict(v=V.long()), "v must be float16"), (dict(k=K.float()), "k must have the dtype of q"),
    (dict(k=K[0]), "k must have 4 axes"), (dict(v=V[:, :, :9]), "v must have the shape of k"),
    (dict(q=Q[:, :3]), "q must have a multiple of the heads of k"), (dict(scale=-1.0), "scale must be positive"),
    (dict(scale="1"), "scale must be a number, got str"), (dict(kv_start=[0, 0]), "kv_start must be an integer tensor"),
    (dict(kv_start=torch.tensor([0, -1])), "kv_start"), (dict(seed=1.5), "seed must be an int or an integer tensor"),
    (dict(seed=-1), "seed must lie in"),
    (dict(q=Q * math.nan), "must be finite, got NaN")]
DECODE_CALLS = [(dict(causal=1), "causal must be a bool, got int"),
                (dict(kv_end=torch.tensor([45, 44])), "kv_end = 45"),
                (dict(return_stats="yes"), "return_stats must be a bool, got str"), (dict(state=[1]), "state")]


def refused(name, call, wrong, message):
    "Is the call refused by name?"
    seed = dict(seed=torch.arange(8).view(2, 4)) if EVERY[name].random else {}
    with pytest.raises((TypeError, ValueError), match=message) as error: call(**dict(q=Q, k=K, v=V) | seed | wrong)
    assert not isinstance(error.value, AttributeError)


@pytest.mark.parametrize("name", DECODES)
def test_bad_calls_of_decode(name):
    method = EVERY[name]
    for wrong, message in (CALLS[:-1] if name in EVICT else CALLS) + DECODE_CALLS:
        refused(name, method.decode, wrong, message)
    if name in EVICT:
        message = "state must have observed the prompt's queries .in a session of `sparsify`., got None"
        return refused(name, method.decode, {}, message)
    for x in nan, inf:
        spoilt_keys = K.clone()
        spoilt_keys[1, 0, 20, 3] = x
        if name not in UNSEEN: refused(name, method.decode, dict(k=spoilt_keys), "finite")
    for what, call, error, text in SHAPES + SCALES + SEEDS + (SCORES if method.scores_all else []):
        with pytest.raises(error) as caught: call(lambda q, k, **more: method.decode(q, k, k, **more))
        assert type(caught.value) is error and text in str(caught.value), what


@pytest.mark.parametrize("name", READS)
def test_bad_calls_of_prefill(name):
    for wrong, message in CALLS: refused(name, EVERY[name].prefill, wrong, message)
    for x in nan, inf:
        spoilt_keys = K.clone()
        spoilt_keys[1, 0, 20, 3] = x
        if name not in UNSEEN: refused(name, EVERY[name].prefill, dict(k=spoilt_keys), "finite")


def test_files_are_named_before_layers():
    for method, where in ((HashAttention(maps="/no/file"), "maps .* '/no/file'"), (Saap(partition="/no/file"),
                                                                                 "partition .* '/no/file'")):
        with pytest.raises(ValueError, match=where): method.decode(Q, K, V)
    with pytest.raises(ValueError, match=r"layer must be one of .*, \[0, 1, 2\], outside of a session, got None"):
        HashAttention(maps=random_maps(16, 4)).decode(Q, K, V)
    with pytest.raises(ValueError, match="samples must be at least 1 and at most 1048576, got 1000000000"):
        Santa(samples=10**9)
    for guess in Saap(probes=2), MagicPIG():
        with pytest.raises(TypeError, match="guess.budget must be an int"): OneList(guess)
