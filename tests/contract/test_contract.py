"What every method of the table guarantees, rule by rule; each test is one rule, asked of each method."
import copy
import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache

from sparse_nb.attention import Method, TopK, assert_close
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.one_list import OneList
from sparse_nb.methods.quest import Quest
from sparse_nb.compose import Then
from sparse_nb.core.key_scorer import KeyScorer
from sparse_nb.core.registry import CLASSES, METHODS, method_class
from sparse_nb.core.streams import head_seeds
from sparse_nb.delta import Delta
from sparse_nb.hf import sparsify
from sparse_nb.models.compiled import no_graph
from sparse_nb.saap import Saap
from sparse_nb.methods.hip import HiP
from sparse_nb.methods.vertical_slash import VerticalSlash
from sparse_nb.santa import Santa
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vattention import VAttention
from inputs import IDS, MASK, PADDED
from models import SMALL, build, compiling, forget, ids_of, method_of, play_on_a_cpu, random_clusters, random_maps

VATTENTION = dict(sinks=1, window=4, topk=8, base=8, eps=0.9, delta=0.2)
CLUSTERS = Saap(clusters=4, window=8, budget=4)
EVERY = {name: method_of(name, tiny=True) for name in METHODS} | {
    "santa, int8": Santa(samples=6, keys="int8"), "santa, rescored": Santa(samples=6, keys="rescored"),
    "santa, paper": Santa.paper(samples=6),
    "santa, guarantee": Santa(samples=64, eps=0.9, delta=0.2),
    "vattention, output": VAttention(**VATTENTION | dict(base=64, delta=0.5), guarantee="output", bound="bernstein",
                                     plugin="plain"),
    "vattention, paper": VAttention.paper(0.9, 0.2, sinks=1, window=4, topk=8, base=8),
    "vattention, pages": VAttention(**VATTENTION, predictor=Quest(page=32)),
    "vattention, clusters": VAttention(**VATTENTION, predictor=CLUSTERS),
    "double_sparsity, chosen": DoubleSparsity(8, channels=2, chosen=((0, 3), (5, 9))),
    "one_list, channels": OneList(DoubleSparsity(8, channels=4)), "one_list, clusters": OneList(CLUSTERS),
    "saap, centroid": Saap(clusters=4, window=8, budget=6, router="centroid", tail="drop"),
    "saap, paper": Saap.paper(random_clusters(), probes=1, window=8),  # random networks, few clusters
    "sketch_walk, small": SketchWalk(block=8, density=0.3, dense_layers=0),
    "sketch_walk, fine": SketchWalk(block=16, density=0.3, index="fine16", dense_layers=0),
    "then, top-k": Then(TopK(8), Santa(samples=5)), "delta, base": Delta(gamma=4, tail=0, base=TopK(budget=4)),
    "delta, hip": Delta(gamma=4, tail=0, base=HiP(((8, 16), (2, 4)), 2, 4, "head", "none")),
    "delta, lines": Delta(gamma=4, tail=0, base=VerticalSlash(4, 6, sinks=1, window=2, rounding="none")),
    "delta, paper": Delta.paper(window=8, gamma=4, tail=2),
    "sketch_walk, paper": replace(SketchWalk.paper(0.3, sketch=16), block=32, dense_layers=0)}
def direct(name):
    "The method, with the layer whose networks it is to use outside of a model."
    method = EVERY[name]
    return replace(method, layer=1) if hasattr(method, "maps") or of_a_file(method) else method


def of_a_file(method):
    "Does it need a partition that was trained beforehand?"
    return getattr(method, "partition", "context") != "context"


DECODES = [x for x, m in EVERY.items() if hasattr(m, "decode")]
READS = [x for x, m in EVERY.items() if hasattr(m, "prefill") and getattr(m, "block", 32) >= 32]  # in prompts
KEEPS = [x for x in DECODES if direct(x).new_state() is not None]
OBSERVES = "h2o", "snapkv", "sketch_walk, paper"  # the prompt's queries, so they decode with a state alone
ALONE = [x for x in DECODES if x not in OBSERVES]
DRAWS = [x for x in METHODS if EVERY[x].random]
# methods whose lists of a prompt are chosen by queries that come after the ones they are for
LATER = "sketch_walk", "sketch_walk, paper", "vertical_slash", "flex_prefill", "xattention", "hip", "oracle_blocks", \
    "delta, hip", "delta, lines"
UNREAD = "saap",  # values that are not read have a part by the mean of their cluster
PILOTS = "santa, guarantee",  # which read values to find out how many to draw
WHOLE = "exact", "vattention, output", "sketch_walk", "sketch_walk, paper"  # read all of so short a prompt
STEPS = [x for x in DECODES if x in METHODS and x != "sketch_walk"] + ["sketch_walk, small"]
NO_GRAPH = [x for x in ALONE if no_graph(EVERY[x])]
COMPILES = "exact", "topk", "santa", "vattention", "quest", "h2o", "saap", "sketch_walk, small"  # a kind of state each
START, N = torch.tensor([0, 9]), 44

every, decodes = pytest.mark.parametrize("name", EVERY), pytest.mark.parametrize("name", DECODES)
alone, reads = pytest.mark.parametrize("name", ALONE), pytest.mark.parametrize("name", READS)
keeps = pytest.mark.parametrize("name", KEEPS)
routes = pytest.mark.parametrize("name, kept", [(x, False) for x in ALONE] + [(x, True) for x in KEEPS])


@pytest.fixture(scope="module")
def llama(): return build("llama")


def problem(keys=N, seed=0, size=16, dtype=torch.float64):
    "Queries, keys and values of two sequences, 4 heads in 2 groups"
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, keys, size, generator=g, dtype=torch.float64).to(dtype) for h in (4, 2, 2)]


def drawn(method, rows=slice(None)):
    "Seeds for methods that draw"
    return dict(seed=torch.arange(8).view(2, 4)[rows]) if method.random else {}


def state_of(method, q, k, v, start=None, parts=(30,)):
    "A state that has observed all of it, in parts"
    state, borders = method.new_state(), [0, *parts, k.shape[2]]
    beside = dict(q=q, shown=None if start is None else torch.arange(k.shape[2]) >= start[:, None])
    for a, b in zip(borders, borders[1:]):
        part = lambda x: None if x is None else x[:, a:b] if x.ndim == 2 else x[:, :, a:b]
        state.append(part(k), part(v), **{x: part(beside[x]) for x in state.observes if x in beside})
    return state


def answer(method, q, k, v, kept, start=None, last=5, rows=slice(None), **more):
    "To the last queries: from the keys alone, or from a state that has observed the earlier ones"
    if kept: more |= dict(state=state_of(method, q, k, v, start, (k.shape[2] - 14,)))
    return method.decode(q[:, :, -last:], k, v, causal=True, kv_start=start, **drawn(method, rows), **more)


def spoilt(x, *places):
    "A copy with what no method may look at at these places"
    x = x.clone()
    for where, value in zip(places, (math.nan, math.inf, -math.inf)): x[where] = value
    return x


# settings

def test_the_table_is_asked_whole():
    assert {type(m) for m in EVERY.values()} == {method_class(x) for x in CLASSES}
    assert {*DECODES, *READS} == {*EVERY}


@every
def test_a_method_goes_to_json_and_repr_and_back(name):
    names = {x: method_class(x) for x in CLASSES}
    for method in EVERY[name], direct(name):
        again = Method.from_json(method.to_json())
        assert again == method and hash(again) == hash(method) and type(again) is type(method)
        assert type(method).from_json(method.to_json()) == eval(repr(method), names) == method
        other = method_class("TopP" if name != "topp" else "TopK")
        with pytest.raises(ValueError, match="text must describe a"): other.from_json(method.to_json())
        for x in fields(method):
            with pytest.raises(FrozenInstanceError): setattr(method, x.name, getattr(method, x.name))


@every
def test_what_a_method_cannot_do_it_says(name):
    "In a TypeError; to `hasattr`, and so to sessions, it is not there"
    for what in "decode", "prefill":
        if hasattr(EVERY[name], what): assert callable(getattr(EVERY[name], what))
        else:
            assert getattr(EVERY[name], what, None) is None
            with pytest.raises(TypeError, match=f"has no {what}"): getattr(EVERY[name], what)(*problem())


# what is seen

@routes
def test_left_padding_changes_nothing(name, kept):
    method, (q, k, v) = direct(name), problem()
    together = answer(method, q, k, v, kept, START)
    for b, s in enumerate(START.tolist()):
        row = [x[b:b + 1, :, s:] for x in (q, k, v)]
        assert_close(together[b:b + 1], answer(method, *row, kept, rows=slice(b, b + 1)), 1e-12)


@reads
def test_left_padding_changes_nothing_in_a_prompt(name):
    method, (q, k, v), start = direct(name), problem(160), torch.tensor([0, 41])
    k_, v_ = (spoilt(x, (1, slice(None), slice(7, 41)), (1, 0, 3)) for x in (k, v))
    together = method.prefill(q, k_, v_, kv_start=start, **drawn(method))
    assert not together[1, :, :41].any()
    for b, s in enumerate(start.tolist()):
        own = method.prefill(*(x[b:b + 1, :, s:] for x in (q, k, v)), **drawn(method, slice(b, b + 1)))
        assert_close(together[b:b + 1, :, s:], own, 1e-12)


@routes
def test_hidden_keys_leave_no_trace(name, kept):
    method, (q, k, v) = direct(name), problem()
    k_, v_ = (spoilt(x, (1, slice(None), slice(5, 9)), (1, 0, 2), (1, 1, 3)) for x in (k, v))
    assert torch.equal(answer(method, q, k_, v_, kept, START), answer(method, q, k, v, kept, START))


@alone
def test_keys_behind_the_end_leave_no_trace(name):
    method, (q, k, v), stop = direct(name), problem(), torch.tensor([44, 33])
    k_, v_ = (spoilt(x, (1, slice(None), slice(35, None)), (1, 0, 34), (1, 1, 33)) for x in (k, v))
    together = method.decode(q[:, :, -5:], k_, v_, causal=True, kv_start=START, kv_end=stop, **drawn(method))
    assert torch.equal(together, method.decode(q[:, :, -5:], k, v, causal=True, kv_start=START, kv_end=stop,
                                               **drawn(method)))
    own = method.decode(q[1:, :, -5:], k[1:, :, 9:33], v[1:, :, 9:33], causal=True, **drawn(method, slice(1, 2)))
    assert_close(together[1:], own, 1e-12)


@alone
def test_later_keys_have_no_say_in_one_call(name):
    "Of several causal queries each gets the same, whatever stands behind its own key"
    method, keys = direct(name), 300 if isinstance(EVERY[name], VAttention) else N  # of which it samples some
    q, k, v = problem(keys)
    q, k, v = q[:, :, -5:], 0.3 * k, v + 3
    got = method.decode(q, k, v, causal=True, **drawn(method))
    for j in range(1, 5):
        others = k.clone(), v.clone()
        for x in others: x[:, :, keys - 5 + j:] *= torch.tensor([10.0, -7.0]).view(2, 1, 1, 1)
        assert_close(method.decode(q, *others, causal=True, **drawn(method))[:, :, :j], got[:, :, :j], 1e-12)


@decodes
@torch.no_grad()
def test_later_keys_have_no_say_in_a_session(llama, name):
    "Queries of one step are answered as in steps of one query each"
    def read(*parts):
        with sparsify(llama, decode=EVERY[name], setup="context"):
            cache = DynamicCache(config=llama.config)
            llama(IDS[:, :30], past_key_values=cache)
            return torch.cat([llama(x, past_key_values=cache).logits for x in parts], 1)
    assert_close(read(IDS[:, 30:]), read(*IDS[:, 30:].split(1, 1)), 1e-5)


@reads
def test_later_tokens_have_no_say_in_a_prompt(name):
    "But where the method says that they choose: then they do"
    method, (q, k, v) = direct(name), problem(256)
    got, same = method.prefill(q, k, v, **drawn(method)), []
    for border in 110, 205:
        others = [x.clone() for x in (q, k, v)]
        for x in others: x[:, :, border:] = 5 * x[:, :, border:].flip(2)
        same.append(torch.allclose(method.prefill(*others, **drawn(method))[:, :, :border], got[:, :, :border], 1e-9))
    assert all(same) == (name not in LATER)


# numbers

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@decodes
def test_a_half_is_computed_in_float32_and_given_back_as_it_came(name, dtype):
    method, given = direct(name), problem(dtype=dtype)
    out = answer(method, *given, name in OBSERVES)
    assert out.dtype == dtype and out.shape == (2, 4, 5, 16)
    assert torch.equal(out, answer(method, *(x.float() for x in given), name in OBSERVES).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@reads
def test_a_prompt_keeps_its_dtype(name, dtype):
    method, given = direct(name), problem(160, dtype=dtype)
    out = method.prefill(*given, **drawn(method))
    assert out.dtype == dtype and out.shape == given[0].shape and out.isfinite().all()


def weights_of(method, kept, **more):
    "Of each value in the answer [2, 4, 5, 120], and what the statistics say: values are unit vectors."
    q, k, v = problem(120, size=128)
    v = torch.eye(120, 128, dtype=v.dtype).expand_as(v).clone()
    if hasattr(method, "maps"): method = replace(method, maps=random_maps(128, 4))
    if of_a_file(method): method = replace(method, partition=random_clusters(128))
    out, stats = answer(method, q, k, v, kept, START, return_stats=True)
    assert torch.equal(out, answer(method, q, k, v, kept, START))
    return out[..., :120], stats


@routes
def test_what_is_read_is_what_the_statistics_say(name, kept):
    weights, stats = weights_of(direct(name), kept)
    visible = (120 - START).view(2, 1, 1) - torch.arange(4, -1, -1)
    read = (weights != 0).sum(-1)
    if name in UNREAD: assert (stats.values_read <= read).all()
    elif name in PILOTS: assert (stats.values_read >= read).all()
    else: assert torch.equal(stats.values_read, read)
    assert not weights[1, ..., :9].any() and (weights >= 0).all()
    if not EVERY[name].random: assert_close(weights.sum(-1), torch.ones(2, 4, 5).double(), 1e-6)
    assert torch.equal(stats.density, stats.values_read / visible)
    assert (stats.keys_scored <= visible).all()
    assert (stats.budget >= stats.values_read).all()
    if EVERY[name].scores_all: assert torch.equal(stats.keys_scored, visible.expand(2, 4, 5))
    assert (stats.density.mean() < 1) == (name != "exact")
    if isinstance(EVERY[name], KeyScorer) and not isinstance(EVERY[name], Saap):  # which reads some of its lists
        index = torch.as_tensor(stats.index_bytes).double()
        assert_close(index, visible.expand(2, 4, 5) * EVERY[name].index_bytes(128))


# states

@keeps
def test_a_state_after_crop_and_reorder_is_a_fresh_one(name):
    "What was learnt from the first keys stays; the keys that come after those that were taken back are others"
    method, (q, k, v), rows = direct(name), problem(), torch.tensor([1, 0, 1])
    def observed(q, k, v):
        "A state that was asked at the end of the prompt, as it will be"
        state = state_of(method, *(x[:, :, :30] for x in (q, k, v)), parts=())
        for n in 30, N:
            beside = dict(q=q[:, :, 30:]) if "q" in state.observes else {}
            if n == N: state.append(k[:, :, 30:], v[:, :, 30:], **beside)
            seeds = dict(seed=torch.arange(4 * len(q)).view(-1, 4)) if method.random else {}
            out = method.decode(q[:, :, n - 1:n], k[:, :, :n], v[:, :, :n], state=state, **seeds)
        return state, out
    state, _ = observed(q, k, v)
    state.crop(36)
    state.pick_sequences(rows)
    other = problem(seed=9)
    q, k, v = (torch.cat([x[rows][:, :, :36], y[rows][:, :, 36:]], 2) for x, y in zip((q, k, v), other))
    state.append(k[:, :, 36:], v[:, :, 36:], **(dict(q=q[:, :, 36:]) if "q" in state.observes else {}))
    fresh, want = observed(q, k, v)
    assert len(state) == len(fresh) == N
    seeds = dict(seed=torch.arange(12).view(3, 4)) if method.random else {}
    assert_close(method.decode(q[:, :, -1:], k, v, state=state, **seeds), want, 1e-10)
    state.reset()
    assert len(state) == 0
    for x, y in zip((q, k, v), problem(seed=5)): x[:] = y[rows]
    state.append(k, v, **(dict(q=q) if "q" in state.observes else {}))
    fresh = state_of(method, q, k, v, parts=())
    got, want = (method.decode(q[:, :, -5:], k, v, causal=True, state=x, **seeds) for x in (state, fresh))
    assert_close(got, want, 1e-12)


@keeps
def test_copies_of_a_state_go_their_own_ways(name):
    method, (q, k, v) = direct(name), problem()
    state = state_of(method, *(x[:, :, :40] for x in (q, k, v)), parts=(30,))
    other, beside = copy.deepcopy(state), lambda x: dict(q=x) if "q" in state.observes else {}
    other.append(-k[:, :, 40:], 9 * v[:, :, 40:], **beside(-q[:, :, 40:]))
    state.append(k[:, :, 40:], v[:, :, 40:], **beside(q[:, :, 40:]))
    got, want = (method.decode(q[:, :, -3:], k, v, causal=True, state=x, **drawn(method))
                 for x in (state, state_of(method, q, k, v, parts=(30, 40))))
    assert_close(got, want, 1e-12)


# seeds

@decodes
def test_a_seed_fixes_what_is_drawn(name):
    "A number stands for a stream for each sequence and head; what draws nothing is the same with any seed or none"
    method, (q, k, v) = direct(name), problem()
    kept = dict(state=state_of(method, q, k, v)) if name in OBSERVES else {}
    run = lambda **seed: method.decode(q[:, :, -5:], k, v, causal=True, **kept, **seed)
    assert torch.equal(run(seed=5), run(seed=5))
    assert torch.equal(run(seed=5), run(seed=head_seeds(q, 5)))
    assert torch.equal(run(seed=5), run(seed=6)) != method.random
    torch.manual_seed(0)
    first, second = run(), run()
    torch.manual_seed(0)
    assert torch.equal(run(), first) and torch.equal(first, second) != method.random


@pytest.mark.parametrize("name", DRAWS)
def test_sequences_and_groups_draw_from_streams_of_their_own(name):
    "Equal sequences, heads and queries are answered differently where numbers are drawn"
    method, (q, k, v) = direct(name), problem(160)
    q, k, v = (x[:1, :1].expand(2, y, -1, -1) for x, y in ((q, 4), (k, 2), (v, 2)))
    if hasattr(method, "decode"): out = method.decode(q[:, :, -1:], k, v, seed=3)[:, :, 0]
    else: out = method.prefill(q, k, v, seed=3)
    assert not torch.equal(out[0], out[1]) and not torch.equal(out[:, 0], out[:, 3])
    seeds = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    if hasattr(method, "decode"): out = method.decode(q[:, :, -1:], k, v, seed=seeds)
    else: out = method.prefill(q, k, v, seed=seeds)
    assert torch.equal(out[0], out[1])


# in a model

@pytest.fixture(scope="module")
def short():
    "A model of one layer, for compiling takes long"
    model = build("llama")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    return model


@decodes
def test_ways_to_generate_agree(llama, name):
    "Also where drafts come with the prompt, from which an index may learn"
    torch.manual_seed(1)
    draft = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | dict(num_hidden_layers=1))).eval()
    ids = torch.cat([IDS, IDS[:, :12]], 1)  # whose next token a lookup finds
    with sparsify(llama, decode=EVERY[name], seed=3, audit=True) as session: want = ids_of(llama, ids, max_new_tokens=3)
    assert session.stats().error.max() > 1e-4 or name in WHOLE
    with sparsify(llama, decode=EVERY[name], seed=3):
        assert torch.equal(ids_of(llama, ids, max_new_tokens=3), want)
        want = ids_of(llama, ids)
        assert torch.equal(ids_of(llama, ids, prompt_lookup_num_tokens=3), want)
        assert torch.equal(ids_of(llama, ids, assistant_model=draft), want)
        assert torch.equal(ids_of(llama, ids, cache_implementation="static"), want)


@decodes
def test_a_row_of_a_padded_batch_is_its_own_run(llama, name):
    with sparsify(llama, decode=EVERY[name], seed=[1, 2]): together = ids_of(llama, PADDED, attention_mask=MASK)
    for b, p in enumerate((0, 9)):
        with sparsify(llama, decode=EVERY[name], seed=[1 + b]):
            assert torch.equal(ids_of(llama, IDS[:, :40 - p])[0], together[b])


@reads
def test_a_prompt_that_is_read_in_a_padded_batch_is_its_own(llama, name):
    with sparsify(llama, prefill=EVERY[name], seed=[1, 2]): together = ids_of(llama, PADDED, attention_mask=MASK)
    for b, p in enumerate((0, 9)):
        with sparsify(llama, prefill=EVERY[name], seed=[1 + b]):
            assert torch.equal(ids_of(llama, IDS[:, :40 - p])[0], together[b])


@pytest.mark.parametrize("name", STEPS)
def test_what_is_played_is_what_is_written(short, monkeypatch, name):
    "By recorded parts of a step, with a stand-in for graphs, also where the room is full in the middle of it"
    def write():
        with sparsify(short, decode=EVERY[name], seed=3):
            return ids_of(short, PADDED, attention_mask=MASK, max_new_tokens=28)
    want, played = write(), play_on_a_cpu(monkeypatch)
    assert torch.equal(write(), want)
    assert (len(played) > 15) == (name not in ("exact", *NO_GRAPH))


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in COMPILES else pytest.mark.slow)
                                  for x in STEPS if x not in NO_GRAPH])
def test_a_compiled_step_is_one_graph_and_writes_the_same(short, name):
    forget(short)
    given = dict(attention_mask=MASK, max_new_tokens=5)
    with sparsify(short, decode=EVERY[name], seed=3):
        want, graphs = ids_of(short, PADDED, **given), torch._dynamo.utils.counters["stats"]["unique_graphs"]
        got = ids_of(short, PADDED, cache_implementation="static", compile_config=compiling(), **given)
    assert torch.equal(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
