"""Composition: bad input, what reaches the selecting method, counts, streams, statistics with a stated alarm rate.

Statistical checks use fixed seeds. Each accepts what a correct method gives in all but one of 1 / ALARM seeds.
"""
import dataclasses

import pytest
import torch
from scipy import stats

from sparse_nb.attention import (
    Exact, Method, Streaming, TopK, TopP, Uniform, assert_close, attention, fold_in, weighted_attention)
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.one_list import OneList
from sparse_nb.methods.quest import Quest
from sparse_nb.compose import Then
from sparse_nb.core.index import Fitted
from sparse_nb.core.method import Unable
from sparse_nb.core.registry import method_class
from sparse_nb.delta import Delta
from sparse_nb.lsh import KDEformer, Reformer
from sparse_nb.metrics import relative_error, distinct_keys
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa, unique_keys
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vattention import VAttention

ALARM = 1e-8
q, k, v = (torch.randn(2, heads, n, 16, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
           for i, (heads, n) in enumerate(((6, 3), (2, 120), (2, 120))))
start, stop = torch.tensor([0, 25]), torch.tensor([120, 101])
MASKS = dict(kv_start=start, kv_end=stop)
HEADS = fold_in(5, torch.arange(2)[:, None], torch.arange(6))
SELECTING = [Exact(), TopK(0.2), TopK(11), Streaming(sinks=2, window=9), Uniform(0.3), Quest(budget=0.2, page=8),
             DoubleSparsity(budget=0.2), Adamas(budget=0.2), MagicPIG(bits=3, tables=20),
             VAttention(eps=0.4, delta=0.3, sinks=2, window=4, topk=5, base=8), Santa(samples=30),
             Then(TopK(0.5), Santa(samples=40))]


# bad input

class Blind(Method):
    "A method that does not select."


@pytest.mark.parametrize("call, error, message", [(lambda: Then("topk"), TypeError, "keys must be a Method, got str"),
                                                  (lambda: Then(TopK), TypeError, "keys must be a Method, got type"),
                                                  (lambda: Then(Blind()), ValueError,
                                                   "keys must be a method that selects keys, got"),
                                                  (lambda: Then(TopK(), TopK()), TypeError,
                                                   "values must be a Santa, got TopK"),
                                                  (lambda: Then(TopK(), Santa(eps=0.1, delta=0.1)), ValueError,
                                                   "values must be a Santa without eps"),
                                                  (lambda: Then(TopK(), Santa(scheme="flash")), ValueError,
                                                   "values.scheme must be one of iid, stratified, systematic, got "
                                                   "'flash'"),
                                                  (lambda: Then(TopK()).decode(q, k[:1], v), ValueError,
                                                   "k must have the batch size of q, 2, got 1"),
                                                  (lambda: Then(TopK()).decode(q, k, v, seed=-1), ValueError,
                                                   "seed must lie in [0, 2**63), got -1"),
                                                  (lambda: Then(TopK()).decode(q, k, v, return_stats=1), TypeError,
                                                   "return_stats must be a bool, got int"),
                                                  (lambda: Then(TopK()).decode(q, k, v, kv_end=torch.tensor([0, 9])),
                                                   ValueError, "kv_end = 0 in sequence 0"),
                                                  (lambda: Then(Quest()).decode(q, k, v, state=Quest().new_state()),
                                                   ValueError, "state must hold as many keys as k, 120, got 0"),
                                                  (lambda: Then(VAttention(guarantee="output")).decode(q, k, v),
                                                   ValueError,
                                                   "guarantee must be 'denominator' to select without values"),
                                                  (lambda: Then(Saap()).prefill, Unable,
                                                   "Saap decodes and has no prefill"), ])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error) as found: call()
    assert message in str(found.value) and type(found.value) is error


# what it passes on

@pytest.mark.parametrize("keys", SELECTING, ids=repr)
def test_values_are_those_of_the_selected_keys(keys):
    method = Then(keys, Santa(samples=12))
    assert Method.from_json(method.to_json()) == method and hash(method) == hash(Method.from_json(method.to_json()))
    out, counted = method.decode(q, k, v, seed=HEADS, return_stats=True, **MASKS)
    drawn = method.select(q, k, seed=HEADS, **MASKS)
    assert_close(out, weighted_attention(q, k, v, drawn), 1e-11)
    selected = keys.select(q, k, seed=fold_in(HEADS, 0), **MASKS)
    assert ((selected.dense(120) > 0) | (drawn.dense(120) == 0)).all()  # nothing that was not selected
    visible = (stop - start).view(2, 1, 1).expand(2, 6, 3)
    assert torch.equal(counted.keys_scored, visible if keys.scores_all else distinct_keys(selected, 120))
    assert torch.equal(counted.values_read, unique_keys(drawn, 120)) and (counted.budget == 12).all()
    assert_close(counted.density, counted.values_read / visible, 1e-6)
    size = keys.index_bytes(16)
    assert torch.equal(torch.as_tensor(counted.index_bytes).expand(visible.shape),
                       visible * size if size else 0 * visible)
    assert method.scores_all == keys.scores_all and method.random and counted.certificate is None
    assert torch.equal(out, method.decode(q, k, v, seed=HEADS, **MASKS))


@pytest.mark.parametrize("keys", [Quest(budget=0.3, page=8), Adamas(budget=0.3),
                                  VAttention(predictor=Quest(page=8), sinks=2, window=4, base=8)], ids=repr)
def test_the_index_is_that_of_the_selecting_method(keys):
    method = Then(keys, Santa(samples=12))
    index = method.new_state()
    assert type(index) is type(keys.new_state())
    parts = ((0, 120),) if isinstance(index, Fitted) else ((0, 90), (90, 91), (91, 120))  # what it learns: of all keys
    for begin, end in parts: index.append(k[:, :, begin:end], v[:, :, begin:end])
    want = method.decode(q, k, v, seed=3)
    assert torch.equal(want, method.decode(q, k, v, seed=3, state=index))
    index.pick_sequences(torch.tensor([1]))
    assert torch.equal(method.decode(q[1:], k[1:], v[1:], seed=HEADS[1:], state=index),
                       method.decode(q[1:], k[1:], v[1:], seed=HEADS[1:]))
    assert Then(TopK()).new_state() is None


class ByLayer(TopK):
    "Top-k that keeps more keys the deeper the layer."
    def at_layer(self, layer): return dataclasses.replace(self, budget=self.budget + layer)


def test_layers_and_prompts_are_the_selecting_methods():
    assert Then(ByLayer(3), Santa(samples=5)).at_layer(4) == Then(ByLayer(7), Santa(samples=5))
    assert Then(TopK(3)).at_layer(4) == Then(TopK(3))
    method = Then(Streaming(sinks=2, window=9), Santa(samples=5))
    assert torch.equal(method.prefill(q, k, v), method.keys.prefill(q, k, v)) and not hasattr(Then(Saap()), "prefill")


class Walk(TopK):
    "Notes in every layer that it comes through what it does there."
    def new_step(self): return []
    def select(self, q, k, *, step, **given):
        step.append("select")
        return super().select(q, k, **given)
    def prefill(self, q, k, v, *, step, seed=None, **given):
        step.append("prefill")
        return attention(q, k, v, causal=True, **given)


@pytest.mark.parametrize("method", [Then(Walk(9), Santa(samples=5)),
                                    Then(Then(Walk(9), Santa(samples=7)), Santa(samples=5))], ids=["once", "twice"])
def test_the_step_is_that_of_the_selecting_method(method):
    assert Then(TopK()).new_step() is None
    step, plain = method.new_step(), Then(TopK(9), method.keys.values) if isinstance(method.keys, Then) else TopK(9)
    want = Then(plain, method.values).decode(q, k, v, seed=3)
    for layers in 1, 2:
        assert torch.equal(method.decode(q, k, v, seed=3, step=step), want) and step == ["select"] * layers
    method.select(q, k, seed=3, step=step)
    assert_close(method.prefill(q, k, v, step=step), attention(q, k, v, causal=True), 1e-12)
    assert step == ["select"] * 3 + ["prefill"]


def test_a_step_goes_through_the_layers_of_a_model():
    pytest.importorskip("transformers")
    from sparse_nb.hf import sparsify
    from models import build, ids_of
    class Kept(Walk):
        made = []
        def new_step(self):
            self.made.append(super().new_step())
            return self.made[-1]
    model, method = build("llama"), Then(Kept(12), Santa(samples=6))
    layers = model.config.num_hidden_layers
    with sparsify(model, prefill=method, decode=method): ids_of(model)
    passes = [step for step in Kept.made if step]
    assert passes and all(step in (["prefill"] * layers, ["select"] * layers) for step in passes)


# streams and masks

def test_a_row_of_a_batch_draws_as_it_would_alone():
    method = Then(Uniform(0.3), Santa(samples=12))
    whole = method.decode(q, k, v, seed=5, **MASKS)
    assert torch.equal(whole, method.decode(q, k, v, seed=HEADS, **MASKS))  # the streams, written out
    assert torch.equal(whole[1:], method.decode(q[1:], k[1:], v[1:], seed=HEADS[1:], kv_start=start[1:],
                                                kv_end=stop[1:]))
    assert not torch.equal(whole, method.decode(q, k, v, seed=6, **MASKS))
    torch.manual_seed(0)
    a, b = method.decode(q, k, v), method.decode(q, k, v)
    torch.manual_seed(0)
    assert torch.equal(a, method.decode(q, k, v)) and not torch.equal(a, b)


def test_keys_and_values_are_drawn_by_streams_of_their_own():
    "The first key is selected where its random number is small: were that the draw's too, it would pick end slots."
    flat, many, method = torch.zeros(1, 1, 200, 8), torch.zeros(1, 1, 8000, 8), Then(Uniform(20), Santa(samples=1))
    keys = method.keys.select(many, flat, seed=fold_in(HEADS[:1, :1], 0)).index[0, 0]
    drawn = method.select(many, flat, seed=HEADS[:1, :1]).index[0, 0]
    assert (keys == drawn).any(-1).all()
    slot = (keys == drawn).float().argmax(-1)[(keys == 0).any(-1)]
    assert len(slot) > 600 and stats.chisquare(torch.bincount(slot, minlength=20).numpy()).pvalue > ALARM


def test_what_is_hidden_has_no_effect():
    wild_k, wild_v = k.clone(), v.clone()
    wild_k[1, :, :25] = wild_v[1, :, :25] = wild_k[1, :, 101:] = wild_v[1, :, 101:] = torch.nan
    for keys in (TopK(0.2), Uniform(0.3), Quest(budget=0.2, page=8)):
        method = Then(keys, Santa(samples=9))
        assert torch.equal(method.decode(q, k, v, seed=2, **MASKS), method.decode(q, wild_k, wild_v, seed=2, **MASKS))
    method = Then(TopK(0.2), Santa(samples=9))
    last = method.decode(q[:, :, -1:], k, v, seed=fold_in(HEADS, 0))
    assert last.shape == (2, 6, 1, 16)
    assert torch.equal(method.decode(q, k, v, seed=HEADS, causal=True)[:, :, :1],
                       method.decode(q[:, :, :1], k[:, :, :118], v[:, :, :118], seed=HEADS))


def test_dtypes_and_many_draws():
    for dtype, tol in ((torch.float64, 1e-3), (torch.float32, 1e-3), (torch.bfloat16, 0.02)):
        a, b, c = (x.to(dtype) for x in (q, k, v))
        out = Then(Exact(), Santa(samples=100_000)).decode(a, b, c, seed=1)
        assert out.dtype == dtype
        assert_close(out, attention(a, b, c), tol)


# statistics

def mean_is(errors, tests):
    "Assert that errors [m, tests] have mean zero, at ALARM."
    z = errors.mean(0) / (errors.std(0) / len(errors) ** 0.5)
    assert z.abs().max() < stats.norm.isf(ALARM / tests / 2)


@pytest.mark.parametrize("scheme", ["iid", "stratified", "systematic"])
def test_the_draws_are_unbiased_for_the_selection(scheme):
    m = 4000
    many, method = q[:1, :, :1].expand(-1, -1, m, -1), Then(TopK(0.2), Santa(samples=5, scheme=scheme))
    out = method.decode(many, k[:1], v[:1], seed=4)
    want = weighted_attention(q[:1, :, :1], k[:1], v[:1], TopK(0.2).select(q[:1, :, :1], k[:1]))
    mean_is((out - want)[0].movedim(1, 0).flatten(1), 96)
    exact = attention(q[:1, :, :1], k[:1], v[:1])
    assert (relative_error(out.mean(2, keepdim=True), exact) > 0.05).any()  # and not for exact attention


def test_squared_errors_of_the_two_stages_add_up():
    m = 6000
    a, b, c = q[:1, :1, :1].expand(-1, -1, m, -1), k[:1, :1], v[:1, :1]
    method, exact = Then(Uniform(0.3), Santa(samples=8, scheme="iid")), attention(q[:1, :1, :1], k[:1, :1], v[:1, :1])
    seed = HEADS[:1, :1]
    own = weighted_attention(a, b, c, method.keys.select(a, b, seed=fold_in(seed, 0)))
    out = method.decode(a, b, c, seed=seed)
    cross = 2 * ((out - own) * (own - exact)).sum(-1)[0, 0]
    mean_is(cross[:, None], 1)
    selection, noise, both = ((x[0, 0]).square().sum(-1).mean() for x in (own - exact, out - own, out - exact))
    assert noise > 0.05 * both and selection > 0.05 * both
    assert_close(both, selection + noise + cross.mean(), 1e-9)


# generation

def test_generation_under_sparsify():
    pytest.importorskip("transformers")
    from sparse_nb.hf import sparsify
    from inputs import IDS
    from models import build, ids_of, step_by_step
    model = build("llama")
    for keys in (TopK(12), Quest(budget=12, page=4)):
        method = Then(keys, Santa(samples=6))
        with sparsify(model, decode=method, audit=True) as session: got = ids_of(model)
        found = session.stats()
        assert (found.values_read <= 6).all() and (found.error > 1e-4).all() and (found.budget == 6).all()
        assert torch.equal(got, step_by_step(model, method, IDS, 6))
        if keys == TopK(12): assert (found.keys_scored > 12).all()
        else: assert (found.keys_scored == 12).all()


# the default device of PyTorch

PROMPT = torch.randn(1, 2, 130, 16, generator=torch.Generator().manual_seed(3))
BY_QUERY = [*SELECTING, TopP(0.8), *(Santa(samples=32, scheme=x) for x in ("iid", "proportional", "flash")),
            *(Santa(samples=32, keys=x) for x in ("int8", "rescored")), Santa(samples=32, eps=0.5, delta=0.2),
            VAttention(sinks=2, window=4, topk=4, base=4, guarantee="output"),
            VAttention(sinks=2, window=4, topk=4, base=4, predictor=Quest(page=4)), OneList(Quest(budget=12, page=4)),
            SketchWalk(4, 0.4, dense_layers=0), SketchWalk(8, 0.4, "mean", heads="each", dense_layers=0),
            Saap(sinks=2, window=8, clusters=4), KDEformer(), Reformer()]
BY_PROMPT = [Exact(), Streaming(2, 8), Delta(window=16, sinks=2, gamma=8), SketchWalk(32, 0.4, dense_layers=0),
             *map(method_class, ("VerticalSlash", "FlexPrefill", "XAttention", "HiP", "OracleBlocks", "RandomBlocks"))]


def outputs_elsewhere(device):
    "What methods give on CPU tensors, or how they fail, where new tensors go to another device by default."
    torch.set_default_device(device)
    ready = lambda x: x() if isinstance(x, type) else x
    calls = {f"decode {m}": lambda m=m: m.decode(q[:, :, :1], k, v, seed=1, **MASKS) for m in BY_QUERY}
    calls |= {f"causal {m}": lambda m=m: m.decode(q, k, v, causal=True, return_stats=True)[0] for m in BY_QUERY}
    calls |= {f"prefill {m}": lambda m=m: ready(m).prefill(PROMPT, PROMPT, PROMPT) for m in BY_PROMPT}
    found = {}
    for name, call in calls.items():
        try: found[name] = call().device.type
        except Exception as error: found[name] = f"{type(error).__name__}: {error}"
    return found


def test_tensors_stay_on_the_cpu_whatever_the_default_device(forked):
    found = forked(outputs_elsewhere, "meta")
    assert len(found) > 50 and not {name: x for name, x in found.items() if x != "cpu"}
