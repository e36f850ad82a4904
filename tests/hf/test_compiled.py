"A step that transformers compiles: every method in one graph, with the tokens it writes otherwise."
import copy
import gc
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")
from transformers.masking_utils import create_masks_for_generate

from sparse_nb.attention import Selection, Streaming, TopK, TopP, Uniform
from sparse_nb.hash_attention import HashAttention
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.one_list import OneList
from sparse_nb.methods.quest import Quest
from sparse_nb.compose import Then
from sparse_nb.eviction import H2O, SnapKV
from sparse_nb import Exact
from sparse_nb.core.method import own_arguments
from sparse_nb.core.registry import CLASSES, method_class
from sparse_nb.hf import register, sparsify
from sparse_nb.lsh import KDEformer, Reformer
from sparse_nb.models import compiled as in_graph, override, replay
from sparse_nb.models.compiled import no_graph
from sparse_nb.models.plan import keeps_state
from sparse_nb.models.view import view_of
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vattention import VAttention
from inputs import IDS, MASK, PADDED, fast
from models import SMALL as SMALL_MODEL, build, compiling, forget, ids_of

SMALL = dict(sinks=2, window=8, clusters=4)
METHODS = [Streaming(sinks=4, window=8), TopK(budget=0.3), Uniform(samples=8), Santa(samples=32),
           Santa(samples=32, keys="int8"), Santa(samples=32, keys="rescored"),
           Quest(budget=12, page=4), Adamas(budget=12),
           DoubleSparsity(budget=12, channels=4), MagicPIG(bits=2, tables=8, sinks=2, window=4),
           VAttention(sinks=2, window=4, topk=4, base=4),
           VAttention(sinks=2, window=4, topk=4, base=4, predictor=Quest(page=4)),
           Then(Quest(budget=12, page=4), Santa(samples=8)), OneList(Quest(budget=12, page=4)),
           SketchWalk(4, 0.4, dense_layers=0), SketchWalk(8, 0.4, "mean", heads="each", dense_layers=0),
           *(SketchWalk(4, 0.4, dense_layers=0, **x) for x in (
               dict(walk="softmax"), dict(index="mean", walk="renormalised", heads="each"),
               dict(index="mean", walk="softmax", degree=2))),
           Saap(budget=8, **SMALL), Saap(probes=1, tail="drop", **SMALL),
           H2O(budget=12, recent=4), SnapKV(budget=16, window=4)]

@pytest.fixture(scope="module")
def llama(): return build("llama")

def compiled(model, ids=IDS, backend="eager", **settings):
    "What `generate` writes with a static cache and steps that are compiled."
    return ids_of(model, ids, cache_implementation="static", compile_config=compiling(backend), **settings)

def test_a_step_without_side_effects(llama):
    "As inductor gets it: what is written in place is written at the end, but for the index of our own."
    forget(llama)
    with sparsify(llama, decode=Quest(budget=12, page=4)):
        assert torch.equal(compiled(llama, backend="aot_eager"), ids_of(llama))

@pytest.mark.slow  # with its usual settings each method is tried by tests/contract
@pytest.mark.parametrize("method", METHODS, ids=lambda m: repr(m)[:40])
def test_a_compiled_step_writes_the_same(llama, method):
    forget(llama)
    padded = dict(attention_mask=MASK)
    with sparsify(llama, decode=method, seed=3):
        want, want_padded = ids_of(llama), ids_of(llama, PADDED, **padded)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert torch.equal(compiled(llama), want)
        assert torch.equal(compiled(llama), want)  # in another cache
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
        assert torch.equal(compiled(llama, PADDED, **padded), want_padded)

@pytest.mark.slow
def test_a_compiled_step_makes_no_streams_of_its_own(llama):
    "Whatever it would make of nothing is a kernel that reads nothing, and may run before the one that it follows ends."
    shifts = []
    def count(graph, inputs):
        shifts.append(sum("shift" in getattr(node.target, "__name__", "") for node in graph.graph.nodes))
        return graph
    for seed in 3, [3]:
        forget(llama)
        with sparsify(llama, decode=Santa(samples=8), seed=seed): compiled(llama, backend=count)
        assert 0 < sum(shifts) <= 25  # of the place alone: ten rounds of two each, and what becomes of it
        shifts.clear()
    forget(llama)
    with sparsify(llama, decode=Santa(samples=8), seed=3), torch.no_grad():  # nor does a compiled prompt
        torch.compile(llama, backend=count)(input_ids=IDS)
    assert sum(shifts) == 0

def test_a_seed_for_each_sequence_is_asked_of_those_that_draw_alone(llama):
    "A context that is read for several sequences at once has another batch than they have."
    read = lambda ids, **more: llama(input_ids=ids, use_cache=True, **more)
    for seed in [1, 2], 1:
        with sparsify(llama, decode=Santa(samples=8), seed=seed), torch.no_grad():
            cache = read(IDS).past_key_values
            cache.batch_repeat_interleave(2)
            read(IDS[:, -1:].expand(2, 1), past_key_values=cache)
            if seed == 1: continue
            with pytest.raises(ValueError, match="seed must be one for each of 1 sequences, got 2"):
                read(IDS[:, -1:], past_key_values=read(IDS).past_key_values)

def test_networks_of_the_pocket_in_a_compiled_step():
    from sparse_nb import pocket
    model, _ = pocket.load()
    forget(model)
    with sparsify(model, decode=HashAttention(budget=12)):
        assert torch.equal(compiled(model, max_new_tokens=4), ids_of(model, max_new_tokens=4))

class NoWait(TorchDispatchMode):
    "Refuses operations that would make the host wait for a GPU, or copy numbers of the host to it."
    waits = [getattr(torch.ops.aten, name) for name in (
        "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim",
        "unique_consecutive", "bincount", "lift_fresh")]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        picks = args[1] if function.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put,
                                                       torch.ops.aten.index_put_) else ()
        if (function.overloadpacket in self.waits or function is torch.ops.aten.repeat_interleave.Tensor
                or any(x is not None and x.dtype == torch.bool for x in picks)): raise AssertionError(str(function))
        return function(*args, **(kwargs or {}))

class NoLook(TorchFunctionMode):
    "Refuses looks at numbers that PyTorch does on a CPU without an operation."
    def __torch_function__(self, function, types, args=(), kwargs=None):
        looks = torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.item
        if function in looks: raise AssertionError(function.__name__)
        return function(*args, **(kwargs or {}))

def one_step(method, monkeypatch):
    "A key is put, and its query decoded, twice: what is made once is made the first time, and the second may not wait."
    for name, module in list(sys.modules.items()):
        if name.startswith("sparse_nb") and hasattr(module, "on_cpu_eagerly"):
            monkeypatch.setattr(module, "on_cpu_eagerly", lambda x: False)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 64, 16, generator=g) for heads in (4, 2, 2))
    state, shown, own = method.new_state(), torch.arange(40) >= torch.tensor([[0], [5]]), {}
    if state is not None:
        known = dict(shown=shown, q=q[:, :, :40])
        state.append(k[:, :, :40], v[:, :, :40], **{name: x for name, x in known.items() if name in state.observes})
        state.to_static(64)
        state.look_at(k[:, :, :40], v[:, :, :40])
        assert state.static
    start, seed = torch.tensor([0, 5]), torch.arange(8).view(2, 4)
    for n, modes in ((40, (nullcontext(),)), (41, (NoWait(), NoLook()))):
        at, end, asked = torch.tensor([n]), torch.tensor([n + 1] * 2), q[:, :, n:n + 1]
        observed = dict(q=asked) if state is not None and "q" in state.observes else {}
        own = own_arguments(state, method.new_step())
        with ExitStack() as stack:
            for mode in modes: stack.enter_context(mode)
            if state is not None: state.write(k, v, at, **observed)
            method.decode(asked, k, v, kv_start=start, kv_end=end, seed=seed, **own)

PACKED = [TopK(budget=0.3), Quest(budget=0.3, page=4), MagicPIG(bits=4, tables=8, sinks=2, window=4),
          VAttention(sinks=2, window=4, topk=4, base=4, eps=0.5, delta=0.5), SketchWalk(4, 0.4, dense_layers=0),
          Saap(probes=1, tail="drop", **SMALL), H2O(budget=0.3, recent=4),
          SnapKV(budget=16, window=4), Reformer(bins=4, window=4), KDEformer(bins=4, window=4)]

@pytest.mark.parametrize("method", PACKED, ids=lambda m: repr(m)[:40])
def test_a_list_with_room_says_where_its_used_slots_end(method, monkeypatch):
    "There the kernels stop."
    made, check = [], Selection.__post_init__
    monkeypatch.setattr(Selection, "__post_init__", lambda x: (check(x), made.append(x)))
    one_step(method, monkeypatch)
    assert len(made) == 2
    for x in made:
        assert torch.equal(x.count, x.budget) and x.count.max() < x.index.shape[3]
        assert not x.weight[torch.arange(x.index.shape[3]) >= x.count[..., None]].any()

WAITING = [TopP(), Santa(samples=32, eps=0.5, delta=0.1), Then(TopP(), Santa(samples=8))]
MORE = [*(Santa(samples=32, scheme=x, tile=8) for x in ("iid", "stratified", "proportional", "flash")),
        *(VAttention(sinks=2, window=4, topk=4, base=4, **x) for x in (
            dict(guarantee="numerator"), dict(guarantee="output"), dict(bound="hoeffding"),
            dict(guarantee="output", predictor=Quest(page=4)),
            dict(predictor=Saap(**SMALL)))),
        Saap(router="centroid", rank="mass", tail="second_order", **SMALL),
        Then(Saap(budget=8, **SMALL), Santa(samples=8)), H2O(0.3), SnapKV(0.5, 4),
        Reformer(bins=4), KDEformer(bins=4)]

@pytest.mark.parametrize("method", METHODS + MORE, ids=lambda m: repr(m)[:60])
def test_a_step_does_not_wait_for_a_gpu(method, monkeypatch):
    assert no_graph(method) is None
    one_step(method, monkeypatch)

@pytest.mark.parametrize("method", WAITING, ids=lambda m: repr(m)[:60])
def test_a_step_that_waits_is_known_to(method, monkeypatch):
    assert "waits for the GPU in every step" in no_graph(method)
    with pytest.raises(AssertionError, match="_local_scalar_dense"): one_step(method, monkeypatch)

def test_every_method_that_decodes_was_asked_whether_it_waits():
    asked = {type(m).__name__ for m in METHODS + MORE + WAITING}
    decoding = {name for name in CLASSES if hasattr(method_class(name), "decode")}
    assert decoding - asked == {"Exact", "HashAttention"}  # other tests

def test_what_no_graph_can_hold_is_refused_by_name(llama):
    forget(llama)
    with sparsify(llama, decode=Then(TopP(), Santa(samples=8))), pytest.raises(
            ValueError, match="graph can hold, got .*TopP waits for the GPU in every step"): compiled(llama)
    forget(llama)
    with sparsify(llama, decode=TopK(), stats=True), pytest.raises(ValueError, match="stats and audit must be False"):
        compiled(llama)

@pytest.mark.slow
def test_below_the_crossover_every_layer_reads_all(llama):
    method, plain = Streaming(sinks=1, window=2), ids_of(llama)
    with sparsify(llama, decode=method): want = ids_of(llama)
    assert not torch.equal(want, plain)
    for crossover, expected in ((10**6, plain), (1, want), ("auto", want), (None, want)):
        forget(llama)
        with sparsify(llama, decode=method, crossover=crossover):  # "auto": no record says one of a CPU
            assert torch.equal(ids_of(llama), expected) and torch.equal(compiled(llama), expected)
    with sparsify(llama, decode=method, crossover=43, stats=True) as session:  # the fourth of the steps has 43 keys
        ids_of(llama)
        shares = session.stats().density
    steps = ids_of(llama).shape[1] - 1
    assert np.allclose(shares, (2 + sum(3 / n for n in range(43, 41 + steps))) / steps)
    for bad, message in ((-1, "crossover must be at least 0, got -1"), ("soon", "or 'auto', got 'soon'"),
                         (0.5, "crossover must be an int, got float")):
        with pytest.raises((TypeError, ValueError), match=message): sparsify(llama, decode=method, crossover=bad)

@dataclass(frozen=True)
class Walk(TopK):
    "Top-k that notes how many layers a pass has been through."
    seen: ClassVar[list] = []
    def new_step(self): return [0]
    def decode(self, *args, step, **settings):
        step[0] += 1
        self.seen.append(step[0])
        return super().decode(*args, **settings)

@pytest.mark.parametrize("dense", fast([((),), ((0,),), ((0, 3),)], 2), ids=str)
def test_a_walk_begins_anew_in_each_compiled_step(dense):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL_MODEL | dict(num_hidden_layers=4))).eval()
    Walk.seen.clear()
    with sparsify(model, decode=Walk(budget=0.3), dense_layers=dense): compiled(model, max_new_tokens=4)
    assert Walk.seen == [*range(1, 5 - len(dense))] * 3

def test_a_row_may_hide_the_newest_key(llama):
    "The index gets it at its place all the same, whichever row of the batch hides it."
    forget(llama)
    ids, new = PADDED[[1, 0]], IDS[:, :1].expand(2, 1)
    mask = torch.cat([MASK[[1, 0]], torch.tensor([[0], [1]])], 1)
    with sparsify(llama, decode=Quest(budget=12, page=4)), torch.no_grad():
        found = []
        for call in (llama, torch.compile(llama, backend="eager", fullgraph=True)):
            cache = transformers.StaticCache(config=llama.config, max_cache_len=48)
            llama(ids, attention_mask=mask[:, :-1], past_key_values=cache)
            call(new, attention_mask=mask, past_key_values=cache, position_ids=torch.tensor([[31], [40]]))
            found.append([cache.layers[0].known(), cache.layers[0].state.rows])
    assert found[0][0] == found[1][0] == 41 and torch.equal(found[0][1], found[1][1])

@pytest.mark.parametrize("method", fast([Quest(budget=12, page=4), MagicPIG(bits=2, tables=8, sinks=2, window=4),
                                         Saap(budget=8, **SMALL), H2O(budget=12, recent=4)], 2, 3),
                         ids=lambda m: type(m).__name__)
def test_a_second_turn_goes_on_with_the_cache(llama, method):
    forget(llama)
    settings = dict(return_dict_in_generate=True, do_sample=False, max_new_tokens=5, min_new_tokens=5, pad_token_id=0)
    def two_turns(cache, **kwargs):
        ids = IDS
        for more in (IDS[:, 5:12], None):
            out = llama.generate(ids, past_key_values=cache, attention_mask=torch.ones_like(ids), **settings, **kwargs)
            ids = out.sequences if more is None else torch.cat([out.sequences, more], 1)
        return ids
    with sparsify(llama, decode=method, seed=3):
        want = two_turns(transformers.DynamicCache(config=llama.config))
        got = two_turns(transformers.StaticCache(config=llama.config, max_cache_len=80), compile_config=compiling())
    assert torch.equal(got, want)

class Conversation:
    "The same tokens in a static cache, whose steps are compiled, and in one that grows."
    def __init__(self, model, room=64):
        self.model, self.ids = model, None
        self.static = transformers.StaticCache(config=model.config, max_cache_len=room)
        self.grows = transformers.DynamicCache(config=model.config)

    def goes_on(self, ids):
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
        step = torch.compile(self.model, backend="eager", fullgraph=True) if ids.shape[1] == 1 else self.model
        given = dict(attention_mask=torch.ones_like(self.ids), logits_to_keep=1)
        with torch.no_grad():
            got = step(ids, past_key_values=self.static, **given).logits
            want = self.model(ids, past_key_values=self.grows, **given).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def copied(self):
        other = copy.copy(self)
        other.static, other.grows = copy.deepcopy((self.static, self.grows))
        return other

    def reordered(self, rows):
        for cache in (self.static, self.grows): cache.reorder_cache(rows)
        self.ids = self.ids[rows]

INDEXED = [Quest(budget=12, page=4), MagicPIG(bits=2, tables=8, sinks=2, window=4), Saap(budget=8, **SMALL),
           H2O(budget=12, recent=4), SnapKV(budget=10, window=4), SketchWalk(4, 0.4, dense_layers=0),
           SketchWalk(4, 0.4, walk="softmax", dense_layers=0), DoubleSparsity(budget=12, channels=4),
           OneList(Adamas(budget=12))]

@pytest.fixture
def places(monkeypatch):
    """What CUDA graphs rest on: they are given one tensor of an index, and where it lies as it lay once, all others do.

    For each address of that one where the others lay, whichever cache they were of.
    """
    seen, find = {}, in_graph.layer_of
    def found(observed):
        layer = find(observed)
        where = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in layer.state.buffers()]
        assert seen.setdefault(observed.data_ptr(), where) == where
        assert all(x.data_ptr() != observed.data_ptr() for x in layer.state.buffers())
        return layer
    monkeypatch.setattr(in_graph, "layer_of", found)
    return seen

@pytest.mark.budget(20)
@pytest.mark.parametrize("method", fast(INDEXED, 2), ids=lambda m: repr(m)[:40])
def test_graphs_tell_caches_apart(llama, method, places):
    "Two in turn, a third in the memory of one that is gone, one that is used anew, copies, and beams."
    forget(llama)
    g = torch.Generator().manual_seed(0)
    some = lambda n: torch.randint(3, 64, (2, n), generator=g)
    def steps(*talks, n=2):
        for _ in range(n):
            for talk in talks: talk.goes_on(some(1))
    with sparsify(llama, decode=method, seed=3):
        one, two = Conversation(llama), Conversation(llama)
        for talk, length in ((one, 20), (two, 33)): talk.goes_on(some(length))
        steps(one, two)
        known = len(places)
        for length in (20, 33, 17, 20):
            del one
            gc.collect()
            one = Conversation(llama)
            one.goes_on(some(length))
            steps(two, one)
        wide = Conversation(llama, 80)
        wide.goes_on(some(30))
        steps(one, wide, two)
        one.static.reset()
        one.ids, one.grows = None, transformers.DynamicCache(config=llama.config)
        one.goes_on(some(25))
        steps(one, two)
        other = one.copied()
        steps(other, one, two)
        del one
        other.reordered(torch.tensor([1, 0]))
        steps(other, two)
        other.goes_on(some(5))  # a second turn
        steps(other)
    assert known == 4 and len(places) >= 8  # two layers each; malloc may give back the places that were

@pytest.mark.parametrize("method", fast([*INDEXED, Santa(samples=32, keys="int8")], 4, 9),
                         ids=lambda m: repr(m)[:40])
def test_a_cache_that_is_used_anew_keeps_its_places(llama, method, places):
    "A second prompt, a second turn and other beams lie where the first prompt's index lay, so its graph goes on."
    forget(llama)
    g, held = torch.Generator().manual_seed(0), []
    some = lambda n: torch.randint(3, 64, (2, n), generator=g)
    with sparsify(llama, decode=method, seed=3):
        talk = Conversation(llama)
        for length in (20, 33, 12):
            for n in (length, 1, 1, 4, 1): talk.goes_on(some(n))  # in two turns
            talk.reordered(torch.tensor([1, 0]))
            talk.goes_on(some(1))
            old = [x.shape for layer in talk.static.layers for x in layer.state.buffers()]
            talk.static.reset()
            held += [torch.empty(n, dtype=torch.uint8) for x in old for n in {x.numel() * i for i in (1, 2, 4, 8)}]
            assert all(len(layer.state) == 0 and layer.observed is None for layer in talk.static.layers)
            talk.ids, talk.grows = None, transformers.DynamicCache(config=llama.config)
    assert len(places) == llama.config.num_hidden_layers

@pytest.mark.parametrize("method", fast([TopK(budget=0.3), Santa(samples=32)], 1), ids=lambda m: type(m).__name__)
def test_a_method_by_its_name_in_a_compiled_step(llama, method):
    forget(llama)
    with sparsify(llama, decode=method, seed=3): want = ids_of(llama)
    llama.set_attn_implementation(register("by its name", method, seed=3))
    try: assert torch.equal(ids_of(llama), want) and torch.equal(compiled(llama), want)
    finally: llama.set_attn_implementation("sdpa")

FREE = dict.fromkeys(("clusters", "before_rope"))  # the partition says it
ON_A_GPU = [TopK(budget=64), Streaming(sinks=4, window=60), Streaming(sinks=4, window=0.1), Uniform(samples=64),
            Santa(samples=64), Quest(budget=64), Adamas(budget=64), DoubleSparsity(budget=64), HashAttention(budget=64),
            MagicPIG(bits=4, tables=16), VAttention(sinks=16, window=16, topk=64, base=32),
            VAttention(sinks=16, window=16, topk=64, base=32, predictor=HashAttention()),
            Saap(budget=0.1), Saap(budget=0.1, partition="pocket", **FREE), SketchWalk(density=0.2),
            SketchWalk(density=0.2, heads="each"),
            H2O(budget=256), SnapKV(budget=256), Then(Quest(budget=256), Santa(samples=64))]

@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("method", ON_A_GPU, ids=lambda m: repr(m)[:40])
def test_a_gpu_replays_one_graph(method, recorded):
    from sparse_nb import pocket, tasks
    model, tokenizer = pocket.load("cuda")
    prompts = [tasks.make("needle", length, seed=i, tokenizer=tokenizer).prompt
               for i, length in enumerate((2048, 1500))]
    inputs, settings = tokenizer(prompts, return_tensors="pt", padding=True).to("cuda"), dict(max_new_tokens=8,
        do_sample=False)
    forget(model)
    with sparsify(model, decode=method, replay=recorded):
        want = model.generate(**inputs, **settings)
        for _ in range(2):
            got = model.generate(**inputs, **settings, cache_implementation="static",
                                 compile_config=transformers.CompileConfig(fullgraph=True))
            assert torch.equal(got, want)
        if not recorded: return
        cache, played = transformers.StaticCache(config=model.config, max_cache_len=2304), []
        with pytest.MonkeyPatch.context() as patch:
            play = replay.GraphedStep.__call__
            patch.setattr(replay.GraphedStep, "__call__", lambda *args: played.append(1) or play(*args))
            for _ in range(2):
                got = model.generate(**inputs, **settings, past_key_values=cache)
                assert torch.equal(got, want)
                cache.reset()
        assert len(played) == 5 + 7  # a second prompt goes on with the record

@pytest.mark.gpu
@pytest.mark.parametrize("method", ON_A_GPU, ids=lambda m: repr(m)[:40])
def test_a_gpu_reads_host_memory(method):
    from sparse_nb import pocket, tasks
    model, tokenizer = pocket.load("cuda")
    make = lambda length, seed: tasks.make("needle", length, seed=seed, tokenizer=tokenizer).prompt
    prompts = [make(2048, 0), make(1500, 1)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to("cuda")
    wrote = []
    for offload in (False, True):
        with sparsify(model, decode=method, offload=offload):
            wrote.append(model.generate(**inputs, max_new_tokens=70, min_new_tokens=70, do_sample=False))
    assert torch.equal(*wrote)


# what a compiled step does on a GPU: counted here, where kernels are as good as there, but launch nothing

class Launches(TorchDispatchMode):
    "Counts operations that a GPU would have a kernel for: not views, not memory."
    memory = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "promote_types",
              "_unsafe_view"}

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        where = lambda xs: {x.untyped_storage().data_ptr() for x in tree_leaves(xs) if isinstance(x, torch.Tensor)}
        aliases = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
        if name not in self.memory and not (aliases and where(out) <= where(args)): self.found[name] += 1
        return out.zero_() if "empty" in name else out  # what a kernel would write

def launched(model, method, monkeypatch, steps=2, prompt=40):
    """For each step what each layer does, name by name, and how many tensors the graph of a step is given.

    Two sequences, the second padded, in a static cache.
    """
    from triton.runtime.jit import JITFunction
    from sparse_nb.kernels import common
    counting, found, given = [], [], []
    def run(self, *args, **options):
        if counting: counting[-1].found[self.__name__] += 1
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(common.INTERPRETED, "value", True)
    for name, module in list(sys.modules.items()):
        if not name.startswith("sparse_nb"): continue
        if hasattr(module, "on_cpu_eagerly"): monkeypatch.setattr(module, "on_cpu_eagerly", lambda x: False)
        if hasattr(module, "has_kernels"): monkeypatch.setattr(module, "has_kernels", lambda q: not common.refusal(q))
    shared = in_graph.GraphPass.sharing
    @contextmanager
    def counted(*args):  # around all that the operation of a layer does
        with Launches() as mode:
            counting.append(mode)
            try:
                with shared(*args): yield
            finally: counting.pop()
        found.append(mode.found)
    monkeypatch.setattr(in_graph.GraphPass, "sharing", counted)
    def backend(graph, inputs):
        given.append(len(inputs))
        return graph
    forget(model)
    ids, mask = torch.randint(3, 64, (2, prompt)), (torch.arange(prompt) >= torch.tensor([[0], [5]])).long()
    with torch.no_grad(), sparsify(model, decode=method):
        cache = transformers.StaticCache(config=model.config, max_cache_len=128)
        with Launches(): model(ids, attention_mask=mask, past_key_values=cache)
        call = torch.compile(model, backend=backend, fullgraph=True)
        for i in range(steps):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            call(ids[:, :1], attention_mask=mask, past_key_values=cache, position_ids=mask.sum(1, keepdim=True) - 1)
    layers = model.config.num_hidden_layers
    return [found[i:i + layers] for i in range(0, len(found), layers)], given[0]

@pytest.fixture(scope="module")
def bfloat():
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, num_hidden_layers=3)  # heads of 64 numbers
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL_MODEL | sizes)).eval().bfloat16()

SAAP = dict(sinks=2, window=8, clusters=4)
GIVEN = 43 # tensors: weights, keys and values, what the step is asked
EACH_LAYER = [  # what the first layer of a step does, and what the others do; the last tells all indexes, by 2 more
    (Exact(), 2, 2), (Streaming(sinks=4, window=16), 2, 2), (Streaming(sinks=4, window=0.3), 2, 2),
    (TopK(budget=16), 7, 7), (Santa(samples=16), 2, 2),
    (VAttention(sinks=4, window=4, topk=4, base=16), 62, 57), (Saap(budget=8, **SAAP), 5, 5),
    (Saap(probes=1, tail="drop", before_rope=False, **SAAP), 5, 5), (Saap(budget=8, router="centroid", **SAAP), 14, 11),
    (Santa(samples=16, keys="int8"), 3, 3), (Santa(samples=16, keys="rescored"), 3, 3),
    (SketchWalk(32, 0.4, dense_layers=0), 6, 6), (SketchWalk(32, 0.4, heads="each", dense_layers=0), 7, 7),
    (SketchWalk(32, 0.4, "mean", dense_layers=0), 6, 6), (SnapKV(budget=16, window=4), 3, 3),
    (SnapKV(budget=16, window=4), 3, 3), (H2O(budget=12, recent=4), 66, 66)]

@pytest.mark.parametrize("method, first, others", fast(EACH_LAYER, 5, 6, 10), ids=lambda x: repr(x)[:50])
def test_what_a_layer_of_a_compiled_step_does(bfloat, method, first, others, monkeypatch):
    "No more than this many launches, from the first step on, which a graph may be captured at."
    pytest.importorskip("triton")
    steps, given = launched(bfloat, method, monkeypatch)
    keeps = keeps_state(method)
    for step in steps:
        assert [x.total() for x in step] == [first, others, others + 2 * keeps], step
    # of all that an index is made of one tensor a layer, and all streams in one
    assert given == GIVEN + 3 * keeps + getattr(method, "random", True)


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("method", [Quest(budget=64), Saap(budget=0.1), SketchWalk(density=0.2)],
                         ids=lambda m: type(m).__name__)
def test_a_gpu_tells_caches_apart(method, recorded):
    "A new cache each time, the last one kept or not, and other memory taken in between."
    from sparse_nb import pocket, tasks
    model, tokenizer = pocket.load("cuda")
    prompt = tasks.make("needle", 1500, seed=0, tokenizer=tokenizer).prompt
    inputs, settings = tokenizer(prompt, return_tensors="pt").to("cuda"), dict(max_new_tokens=8, do_sample=False)
    forget(model)
    with sparsify(model, decode=method, replay=recorded):
        want, held = model.generate(**inputs, **settings), []
        for i in range(6):
            cache = transformers.StaticCache(config=model.config, max_cache_len=2048)
            got = model.generate(**inputs, **settings, past_key_values=cache,
                                 compile_config=transformers.CompileConfig(fullgraph=True))
            assert torch.equal(got, want)
            held[:] = [cache] if i % 3 else [torch.empty(1 << 12 + i, device="cuda") for _ in range(i)]


# the mask of a step: as transformers makes it, in fewer operations

STEP = torch.ones(2, 1, dtype=torch.long)
SHOWN = {  # of two sequences whose static cache holds 40 keys and gets one, with room for 48
    "nothing said": None, "all": torch.ones(2, 41), "padded": torch.cat([MASK, STEP], 1),
    "a hole": torch.cat([MASK, STEP], 1) * (torch.arange(41) != 20),
    "the newest hidden": torch.cat([MASK, 0 * STEP], 1),
    "a row hidden": torch.cat([MASK, STEP], 1) * torch.tensor([[0], [1]]), "too short": MASK[:, :30],
    "too long": torch.ones(2, 44), "as long as the room": torch.ones(2, 48), "longer": torch.ones(2, 60)}
CHUNKED = dict(vocab_size=64, hidden_size=64, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=4,
               num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_chunk_size=16, num_local_experts=2)

def chunked():
    torch.manual_seed(0)
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**CHUNKED)).eval()

def filled(model):
    "A static cache that has read `PADDED`."
    cache = transformers.StaticCache(config=model.config, max_cache_len=48)
    with torch.no_grad(): model(PADDED, attention_mask=MASK, past_key_values=cache)
    return cache

def masks_of(model, cache, shown, queries=1):
    "What `generate` makes of a mask [B, n] for a step, by kind of layer."
    shown = None if shown is None else shown.long()
    made = create_masks_for_generate(model.config, torch.empty(2, queries, 0), shown, cache)
    return made if isinstance(made, dict) else dict(all=made)

@pytest.mark.parametrize("name", ["llama", "mistral, window", "gemma3, window", "gemma2, capped", "chunked"])
def test_a_session_makes_the_masks_of_the_model(name):
    model = chunked() if name == "chunked" else build(name)
    for queries in (1, 3):
        for said, shown in SHOWN.items():
            cache = filled(model)
            want = masks_of(model, cache, shown, queries)
            with sparsify(model, decode={0: None}): got = masks_of(model, cache, shown, queries)
            assert got.keys() == want.keys()
            for kind, x in want.items():
                assert type(got[kind]) is type(x), (said, kind)
                if x is None: continue
                assert torch.equal(got[kind], x) and got[kind].dtype == x.dtype, (said, kind)

@pytest.mark.parametrize("shown, most", [("nothing said", 2), ("padded", 5)])
def test_the_mask_of_a_step_is_made_by_few_operations(llama, shown, most):
    "transformers' own takes 7 and 14."
    with sparsify(llama, decode=TopK(budget=0.3)):
        cache = filled(llama)
        with Launches() as mode: masks_of(llama, cache, SHOWN[shown])
    assert 0 < mode.found.total() <= most, mode.found

def moved(mask, by):
    "What the keys `by` places before are, and nothing at the end."
    kept = mask[..., :-1] if by > 0 else mask[..., 1:]
    return torch.nn.functional.pad(kept, (1, 0) if by > 0 else (0, 1))

WRONG = {"nothing": lambda x: x, "padding is shown": lambda x: x.any(0, keepdim=True).expand_as(x),
         "the newest key is hidden": lambda x: x & moved(x, -1), "a key too many is shown": lambda x: x | moved(x, 1),
         "the first key is hidden": lambda x: x & moved(x, 1)}

@pytest.mark.parametrize("wrong", fast(WRONG, 0, 3))
def test_a_wrong_mask_of_a_step_writes_other_tokens(wrong, monkeypatch):
    "So tests of the tokens of compiled steps see one."
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL_MODEL, initializer_range=0.1)).eval()
    own = override.step_mask
    def mask(**given):
        step = given["q_length"] == 1 and isinstance(given["q_offset"], torch.Tensor)
        return WRONG[wrong](own(**given)) if step else own(**given)
    monkeypatch.setattr(override, "step_mask", mask)
    padded = dict(ids=PADDED + (PADDED == 0) * 7, attention_mask=MASK, max_new_tokens=12)
    with sparsify(model, decode=TopK(budget=1.0)):
        assert torch.equal(compiled(model, **padded), ids_of(model, **padded)) == (wrong == "nothing")

def test_beams_of_padded_sequences_in_compiled_steps(llama):
    forget(llama)
    given = dict(ids=PADDED, attention_mask=MASK, num_beams=3)
    with sparsify(llama, decode=TopK(budget=0.3)): assert torch.equal(compiled(llama, **given), ids_of(llama, **given))

def test_what_a_step_sees_is_found_by_sums_and_extremes(llama):
    "A compiler shares a row of keys among programs for these; for the place of an extreme one program walks it all."
    seen = set()
    def backend(graph, inputs):
        seen.update(str(x.target) for x in graph.graph.nodes)
        return graph
    forget(llama)
    with torch.no_grad(), sparsify(llama, decode=TopK(budget=0.3)):
        step, cache = torch.compile(llama, backend=backend, fullgraph=True), filled(llama)
        step(IDS[:, :1].expand(2, 1), attention_mask=torch.cat([MASK, STEP], 1), past_key_values=cache)
    assert {"amin", "amax", "sum"} <= seen and not {"argmin", "argmax"} & seen, seen

@pytest.mark.parametrize("queries", [1, 3])
def test_what_a_query_sees_row_by_row(queries):
    "One run, runs with holes, and, of a query among others, nothing: then the last key."
    g = torch.Generator().manual_seed(0)
    q, k, places = torch.zeros(16, 1, queries, 4), torch.zeros(16, 1, 12, 4), torch.arange(12)
    first, last = torch.rand(16, 2, generator=g).mul(12).long().sort(-1).values.unbind(1)
    run = (places >= first[:, None]) & (places <= last[:, None])
    some = run & (torch.arange(16)[:, None] > 2) if queries > 1 else run
    for shown in (run, run | (torch.rand(16, 12, generator=g) > 0.5), some):
        view = view_of(shown[:, None, None].expand(16, 1, queries, 12), queries - 1, q, k, False)
        of = lambda x, b, otherwise: otherwise if x is None else int(x[b])
        for b, row in enumerate(shown):
            want = places[row].tolist() or [view.end - 1]
            if view.index is None: got = [*range(of(view.start, b, 0), of(view.stop, b, view.end))]
            else: got = view.index[b, :of(view.stop, b, 0)].tolist()
            assert got == want and int(view.count[b]) == len(want)
