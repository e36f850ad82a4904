"Methods inside transformers' own generation: every way to generate, on small random models of several families"
import copy
import warnings

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparse_nb.attention import Exact, State, Streaming, TopK, TopP, Uniform, assert_close, attention, fold_in
from sparse_nb.methods.quest import Quest
from sparse_nb.compose import Then
from sparse_nb.delta import Delta
from sparse_nb.eviction import H2O, SnapKV
from sparse_nb.hf import UNFIT, answer, attention_override, prefill, register, sparsify
from sparse_nb.models import override, rng
from sparse_nb.methods.block_controls import OracleBlocks
from sparse_nb.methods.vertical_slash import VerticalSlash
from sparse_nb.santa import Santa
from sparse_nb.santa_keys import quantise
from sparse_nb.sketch_walk import SketchWalk
from inputs import GREEDY, IDS, MASK, PAD, PADDED, fast
from models import (FAMILIES, GEMMA3N, OLD, REFUSED, SMALL, Letters, build, ids_of, step_by_step,
                    whole_layers)

METHODS = [TopK(budget=0.25), Streaming(sinks=2, window=6), TopP(mass=0.5), Uniform(samples=0.3), Santa(samples=5)]
pytestmark = pytest.mark.filterwarnings("ignore:every layer of .* has a sliding window:UserWarning")

@pytest.fixture(scope="module")
def llama(): return build("llama")

def ids_of_cache(model): return model.generate(IDS, **GREEDY, return_dict_in_generate=True).past_key_values

@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_generate_is_the_method_step_by_step(llama, method):
    with sparsify(llama, decode=method): got = ids_of(llama)
    assert torch.equal(got, step_by_step(llama, method, IDS, 6))
    with sparsify(llama, decode=method, audit=True) as session: assert torch.equal(ids_of(llama), got)
    assert session.stats().error.min() > 1e-4  # it is not exact attention that wrote this

@pytest.mark.parametrize("rows", [1, 3, 5000])
def test_streams_made_for_some_steps_at_once_are_those_of_each(llama, monkeypatch, rows):
    "Steps one after another, back, far ahead, of sequences that part, of others in between; few at once of many."
    layer, made, own = llama.model.layers[0].self_attn, [], rng.Streams(3)
    monkeypatch.setattr(rng, "fold_in", lambda *given: made.append(given) or fold_in(*given))
    def check(*places):
        place = torch.tensor(places).expand(rows)
        got, streams = own.at(layer, rows, 4, place), own.heads(layer, rows, 4, place.device)
        assert torch.equal(got, fold_in(streams, place[:, None]))
    for n in range(40, 40 + 2 * rng.AHEAD): check(n)
    assert len(made) == (2 * rng.AHEAD if rows == 5000 else 2) + 2  # and a stream for each sequence, and for each head
    for n in (41, 40, 39, 55, 56, 900, 0): check(n)
    if rows == 3:
        for places in ((7, 9, 8), (8, 10, 9), (9, 10, 9), (10, 11, 10), (0, 0, 5)): check(*places)
    for n in (901, 902):
        assert torch.equal(own.at(layer, 2, 4, torch.tensor([n, 3])),
                           fold_in(own.heads(layer, 2, 4, torch.device("cpu")), torch.tensor([[n], [3]])))
        check(n)

@pytest.mark.parametrize("family", FAMILIES)
def test_exact_and_whole_methods_leave_every_family_as_it_is(family):
    model = build(family)
    want, padded = ids_of(model), ids_of(model, PADDED, attention_mask=MASK)
    for method in (None, Exact(), TopK(budget=1.0)):
        if method == TopK(budget=1.0) and family in REFUSED:
            with sparsify(model, decode=method), pytest.raises(ValueError, match=f"which uses {REFUSED[family]}"):
                ids_of(model)
            continue
        with sparsify(model, decode=method, prefill=None if method is None else method):
            assert torch.equal(ids_of(model), want)
        with sparsify(model, decode=method): assert torch.equal(ids_of(model, PADDED, attention_mask=MASK), padded)
    assert torch.equal(ids_of(model), want)
    with torch.no_grad():
        logits = model(IDS).logits
        with sparsify(model, decode=Exact()): assert torch.equal(model(IDS).logits, logits)

@pytest.mark.parametrize("family", ["llama", "mistral, window", "qwen2, window", "qwen3, key norm",
                                    "gpt-neox, partial, fused", "cohere2, layers without rope"])
def test_a_row_of_a_padded_batch_is_its_own_single_run(family):
    "Also of a prompt that is read by another method; tests/contract asks each method, in one family."
    model, method = build(family), Santa(samples=5)
    with sparsify(model, decode=method): together = ids_of(model, PADDED, attention_mask=MASK)
    for b, p in enumerate(PAD):
        with sparsify(model, decode=method, seed=[fold_in(0, b)]):
            assert torch.equal(ids_of(model, IDS[:, :40 - p])[0], together[b])
    with sparsify(model, decode=method, prefill=Streaming(sinks=2, window=8)):
        together = ids_of(model, PADDED, attention_mask=MASK)
    for b, p in enumerate(PAD):
        with sparsify(model, decode=method, prefill=Streaming(sinks=2, window=8), seed=[fold_in(0, b)]):
            assert torch.equal(ids_of(model, IDS[:, :40 - p])[0], together[b])

READERS = [Delta(window=5, sinks=1, gamma=4, tail=0, correction=x) for x in ("tangent", "delta", "recompute", "none")]
READERS += [Delta(window=5, sinks=1, gamma=4, tail=3), Delta(gamma=4, tail=0, base=TopK(budget=4)),
            VerticalSlash(2, 4, sinks=1, window=2, rounding="none")]

@pytest.mark.parametrize("family", FAMILIES)
def test_methods_that_read_prompts_work_in_every_family(family):
    model = build(family)
    want, exact = ids_of(model), forward(model)
    for method in (Delta(window=100, gamma=4, tail=0), Delta(window=100, gamma=4, correction="delta"),
                   OracleBlocks(1.0)):
        with sparsify(model, prefill=method):
            if family not in REFUSED:
                assert torch.equal(ids_of(model), want)
                continue
            with pytest.raises(ValueError, match=f"which uses {REFUSED[family]}"): ids_of(model)
    for method in READERS if family == "llama" else READERS[4:] if family not in REFUSED else ():
        with sparsify(model, prefill=method):
            together = ids_of(model, PADDED, attention_mask=MASK)
            off = (forward(model) - exact).abs().max()
            assert off > 1e-5 if whole_layers(model) else off == 0  # layers with a window of their own keep it
        for b, p in enumerate(PAD):
            with sparsify(model, prefill=method): assert torch.equal(ids_of(model, IDS[:, :40 - p])[0], together[b])

@pytest.mark.parametrize("method", READERS, ids=repr)
def test_what_a_method_has_read_serves_every_way_to_generate(llama, method):
    with sparsify(llama, prefill=method):
        want = ids_of(llama)
        for way in (dict(cache_implementation="static"), dict(prompt_lookup_num_tokens=3)):
            assert torch.equal(ids_of(llama, **way), want)
        together = ids_of(llama, PADDED, attention_mask=MASK, num_beams=2)
        for b, p in enumerate(PAD): assert torch.equal(ids_of(llama, IDS[:, :40 - p], num_beams=2)[0], together[b])

@pytest.mark.parametrize("method", READERS, ids=repr)
def test_a_second_turn_is_read_against_the_cache_of_the_first(llama, method):
    with sparsify(llama, prefill=method):
        cache = DynamicCache(config=llama.config)
        first = llama.generate(IDS[:, :20], past_key_values=cache, **GREEDY)
        turn, before = torch.cat([first, IDS[:, 20:]], 1), copy.deepcopy(cache)
        second = llama.generate(turn, past_key_values=cache, **GREEDY)[:, turn.shape[1]:]
    new, logits = turn[:, before.get_seq_length():], {}
    for reader in (method, Exact()):
        with sparsify(llama, prefill=reader):
            logits[reader] = forward(llama, new, past_key_values=copy.deepcopy(before))
    assert torch.equal(logits[method][:, -1, 1:].argmax(-1) + 1, second[:, 0])
    assert (logits[method] - logits[Exact()]).abs().max() > 1e-5

@pytest.mark.parametrize("correction", ["delta", "recompute", "tangent"])
def test_chunks_of_whole_gammas_change_nothing(llama, correction):
    method = Delta(window=5, sinks=1, gamma=4, anchors=1, tail=0, correction=correction)
    with sparsify(llama, prefill=method): want = ids_of(llama)
    for size in (8, 20):
        with sparsify(llama, prefill=method): assert torch.equal(ids_of(llama, prefill_chunk_size=size), want)

@pytest.mark.parametrize("method", [METHODS[0], METHODS[4]], ids=lambda m: type(m).__name__)
def test_ways_to_generate_agree(llama, method):
    "Beside those of tests/contract"
    with sparsify(llama, decode=method):
        want = ids_of(llama)
        assert torch.equal(ids_of(llama, past_key_values=StaticCache(config=llama.config, max_cache_len=64)), want)
        assert torch.equal(ids_of(llama, prefill_chunk_size=16), want)
        torch.manual_seed(0)
        sampled = ids_of(llama, do_sample=True)
        torch.manual_seed(0)
        assert torch.equal(ids_of(llama, do_sample=True), sampled)
        assert torch.equal(ids_of(llama, PADDED, attention_mask=MASK, cache_implementation="static"),
                           ids_of(llama, PADDED, attention_mask=MASK))

@pytest.mark.parametrize("method", [TopK(budget=0.25), Streaming(sinks=2, window=6)], ids=lambda m: type(m).__name__)
def test_beam_search(llama, method):
    def attend(module, query, key, value, mask, scaling=None, **kwargs):
        if query.shape[2] > 1:
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)
        return torch.cat([method.decode(query[[b]], key[[b]], value[[b]], scale=scaling)
                          for b in range(len(query))]).transpose(1, 2), None
    with attention_override(llama, attend, mask="sdpa"): want = ids_of(llama, num_beams=3)
    with sparsify(llama, decode=method): assert torch.equal(ids_of(llama, num_beams=3), want)
    with sparsify(llama, decode=Uniform(samples=0.3)):
        assert torch.equal(ids_of(llama, num_beams=3), ids_of(llama, num_beams=3))

@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_a_second_turn_goes_on_with_the_old_cache(llama, method):
    cache = DynamicCache(config=llama.config)
    with sparsify(llama, decode=method):
        first = llama.generate(IDS[:, :20], past_key_values=cache, **GREEDY)
        ids = torch.cat([first, IDS[:, 20:]], 1)
        second = llama.generate(ids, past_key_values=cache, **GREEDY)
    cache = DynamicCache(config=llama.config)
    with torch.no_grad(): llama(IDS[:, :20], past_key_values=cache)
    with sparsify(llama, decode=method), torch.no_grad():
        for i in range(20, 25): llama(first[:, [i]], past_key_values=cache)
        logits = llama(ids[:, 25:], past_key_values=cache).logits
        found = [logits[:, -1].argmax(-1)]
        for _ in range(5): found.append(llama(found[-1][:, None], past_key_values=cache).logits[:, -1].argmax(-1))
    assert torch.equal(second[:, ids.shape[1]:], torch.stack(found, 1))

def test_hidden_keys_in_the_middle_of_a_row_are_skipped(llama):
    mask = torch.ones_like(PADDED)
    mask[1, 12:17] = 0
    without = torch.cat([PADDED[1:, :12], PADDED[1:, 17:]], 1)
    def run(ids, mask, seed):
        cache = DynamicCache(config=llama.config)
        positions = mask.cumsum(-1) - 1
        with sparsify(llama, decode=TopK(budget=0.4), seed=seed), torch.no_grad():
            llama(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], past_key_values=cache)
            return llama(ids[:, -1:], attention_mask=mask, position_ids=positions[:, -1:], past_key_values=cache).logits
    both = run(PADDED, mask, 0)
    assert_close(both[1:], run(without, torch.ones_like(without), 0), rtol=1e-5)
    assert_close(both[:1], run(PADDED[:1], mask[:1], 0), rtol=1e-5)

def slow(method): return pytest.param(method, True, marks=pytest.mark.slow)

@pytest.mark.parametrize("method, grows", [(Streaming(sinks=2, window=6), False), (Uniform(samples=0.3), False),
                                           slow(TopK(budget=0.25)), slow(Santa(samples=5))],
                                           ids=lambda x: type(x).__name__)
def test_a_compiled_step_is_the_plain_one(llama, method, grows):
    "With a mask that grows, for which a step is compiled twice, or one of full length"
    def run(step):
        cache, mask = StaticCache(config=llama.config, max_cache_len=48), torch.ones(2, 48, dtype=torch.long)
        mask[1, :9] = 0
        with torch.no_grad():
            found = [llama(PADDED, attention_mask=mask[:, :40], past_key_values=cache).logits[:, -1]]
            for i in range(40, 44):
                found.append(step(found[-1].argmax(-1)[:, None], attention_mask=mask[:, :i + 1] if grows else mask,
                                  past_key_values=cache).logits[:, -1])
        return torch.stack(found)
    with sparsify(llama, decode=method):
        want = run(llama)
        torch.compiler.reset()
        assert_close(run(torch.compile(llama, backend="eager", fullgraph=True)), want, rtol=1e-5)

def test_a_device_map(llama, tmp_path):
    pytest.importorskip("accelerate")
    llama.save_pretrained(tmp_path)
    mapped = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto").eval()
    with sparsify(llama, decode=Santa(samples=5)): want = ids_of(llama)
    with sparsify(mapped, decode=Santa(samples=5)):
        assert torch.equal(ids_of(mapped, IDS.to(mapped.device),
                                  attention_mask=torch.ones_like(IDS).to(mapped.device)).cpu(), want)

def test_setups(llama):
    "A reads a whole prompt exactly; B only what was read first"
    def logits(setup, context):
        cache = DynamicCache(config=llama.config)
        with torch.no_grad(), sparsify(llama, decode=TopK(budget=0.1), setup=setup):
            if context: llama(IDS[:, :context], past_key_values=cache)
            return llama(IDS[:, context:], past_key_values=cache).logits[:, -1]
    with torch.no_grad(): exact = llama(IDS).logits[:, -1]
    for setup, context in (("A", 0), ("A", 30), ("B", 0)): assert_close(logits(setup, context), exact, rtol=1e-5)
    cache = DynamicCache(config=llama.config)
    with torch.no_grad(), sparsify(llama, decode=TopK(budget=0.1)):
        llama(IDS[:, :30], past_key_values=cache)
        for i in range(30, 40): one_by_one = llama(IDS[:, [i]], past_key_values=cache).logits[:, -1]
    assert_close(logits("B", 30), one_by_one, rtol=1e-5)
    with sparsify(llama, decode=TopK(budget=0.1), setup="B"), torch.no_grad():
        cache = prefill(llama, IDS[:, :30], chunk=7)
        assert_close(llama(IDS[:, 30:], past_key_values=cache).logits[:, -1], one_by_one, rtol=1e-5)
    assert (one_by_one - exact).norm() > 1e-2 * exact.norm()

def test_methods_by_layer(llama):
    ten, whole = TopK(budget=0.1), TopK(budget=1.0)
    ways = [dict(decode={0: ten}), dict(decode=lambda i: ten if i == 0 else None), dict(decode=ten, dense_layers=[1]),
            dict(decode={0: ten, 1: whole})]
    found = []
    for way in ways:
        with sparsify(llama, **way): found.append(ids_of(llama))
    assert all(torch.equal(x, found[0]) for x in found)
    with sparsify(llama, decode=ten): assert not torch.equal(ids_of(llama), found[0])

def test_stats(llama):
    with sparsify(llama, decode={0: TopK(budget=0.25), 1: Santa(samples=8)}, audit=True) as session:
        ids_of(llama, max_new_tokens=5)
        table = session.stats()
    assert list(table.index) == [(layer, head) for layer in (0, 1) for head in range(4)] and (table.queries == 4).all()
    visible = torch.arange(41., 45.)
    kept = torch.cat([TopK(budget=0.25).select(torch.ones(1, 1, 1, 1), torch.ones(1, 1, int(n), 1)).budget.flatten()
                      for n in visible])
    assert_close(table.density[0].iloc[0], (kept / visible).mean(), rtol=1e-6)
    assert (table.budget[1] == 8).all() and (table.keys_scored == visible.mean().item()).all()
    assert_close(table.bytes.tolist(), (64 * (table.keys_scored + table.values_read)).tolist(), rtol=1e-12)
    assert (table.dense_bytes == 128 * visible.mean().item()).all()
    assert (table.error > 0).all()
    with sparsify(llama, decode=TopK(budget=1.0), stats=True) as session: ids_of(llama)
    assert (session.stats().density == 1).all() and "error" not in session.stats()
    with sparsify(llama, decode=TopK(budget=0.1), dense_layers=[0], audit=True) as session: ids_of(llama)
    assert (session.stats().error[0] < 1e-6).all() and (session.stats().error[1] > 1e-3).all()

def test_register_and_transformers_own_switch(llama):
    with sparsify(llama, decode=Santa(samples=5), seed=3): want = ids_of(llama)
    llama.set_attn_implementation(register("test_santa", Santa(samples=5), seed=3))
    try:
        assert torch.equal(ids_of(llama), want)
        with pytest.raises(ValueError, match="name must be without .* got 'sdpa'"): register("sdpa", Santa())
        assert register("test_santa", TopK()) == "test_santa"
    finally: llama.set_attn_implementation("sdpa")
    capped = build("gemma2, capped")
    capped.set_attn_implementation("test_santa")
    with pytest.raises(ValueError, match="softcap"): ids_of(capped)

class Sums(State):
    "The sum of each key, to see what arrives in what order"
    def __init__(self, name):
        super().__init__()
        self.name = name
    def features(self, k, v): return k.float().sum(-1)

class Indexed(TopK):
    "Top-k that refuses an index out of step with the keys"
    seen = []
    def new_state(self): return Sums(self.budget)
    def decode(self, q, k, v, *, state=None, **kwargs):
        if state is not None:
            assert_close(state.rows, k.float().sum(-1), rtol=1e-6)
            self.seen.append(len(state))
        return super().decode(q, k, v, **kwargs)

@pytest.mark.parametrize("way", [{}, dict(num_beams=3), dict(prompt_lookup_num_tokens=3), dict(prefill_chunk_size=16),
                                 dict(do_sample=True, num_return_sequences=2)], ids=str)
def test_an_index_stays_in_step_with_the_cache(llama, way):
    Indexed.seen.clear()
    torch.manual_seed(0)
    with sparsify(llama, decode=TopK(budget=0.25)): want = ids_of(llama, **way)
    torch.manual_seed(0)
    with sparsify(llama, decode=Indexed(budget=0.25)): assert torch.equal(ids_of(llama, **way), want)
    assert Indexed.seen[0] >= 41 and len(Indexed.seen) >= 10

def test_an_index_goes_on_in_a_second_turn_and_refuses_a_foreign_cache(llama):
    cache = DynamicCache(config=llama.config)
    with sparsify(llama, decode=Indexed(budget=0.25)):
        first = llama.generate(IDS[:, :20], past_key_values=cache, **GREEDY)
    ids = torch.cat([first, IDS[:, 20:]], 1)
    with sparsify(llama, decode=Indexed(budget=0.25)):
        llama.generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY)
    cache.layers[0].state.reset()  # an index that lost its keys gets them from the cache
    with sparsify(llama, decode=Indexed(budget=0.25)):
        llama.generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY)
    cache.layers[0].keys, cache.layers[0].values = cache.layers[0].keys[:, :, :20], cache.layers[0].values[:, :, :20]
    cache.layers[0].state.rows = cache.layers[1].state.rows
    with sparsify(llama, decode=Indexed(budget=0.25)), pytest.raises(ValueError,
        match="cache must hold the keys of its index, got one of 25 for 20 in layer 0"):
        llama.generate(ids, past_key_values=cache, **GREEDY)
    cache.reset()
    with sparsify(llama, decode=Indexed(budget=0.5)), pytest.raises(ValueError, match="cache must keep the index"):
        llama.generate(ids, past_key_values=cache, **GREEDY)
    ready = prefill(llama, IDS[:, :30])
    with sparsify(llama, decode=Indexed(budget=0.25)): ids_of(llama, past_key_values=ready)
    assert len(ready.layers[0].state) == 45

@pytest.mark.parametrize("way", ["greedy", "assisted", "static", "B"])
def test_an_audit_compares_with_what_the_query_sees(llama, way):
    "A method that keeps all keys has no error, with an index and without"
    for method in (TopK(budget=1.0), Indexed(budget=1.0)):
        with sparsify(llama, decode=method, audit=True, setup="B" if way == "B" else "A") as session:
            kept = dict(past_key_values=prefill(llama, IDS[:, :30])) if way == "B" else dict(greedy={},
                assisted=dict(prompt_lookup_num_tokens=3), static=dict(cache_implementation="static"))[way]
            ids_of(llama, **kept)
        assert session.stats().error.max() < 1e-5 and (session.stats().density == 1).all()

def test_santa_with_a_guarantee(llama):
    method = Santa(samples=32, eps=0.4, delta=0.2)
    want = step_by_step(llama, method, IDS, 6)  # computes all norms at each step
    with sparsify(llama, decode=method):
        for way in ({}, dict(cache_implementation="static"), dict(prompt_lookup_num_tokens=3),
                    dict(prefill_chunk_size=16)):
            assert torch.equal(ids_of(llama, **way), want)
        assert torch.equal(ids_of(llama, num_beams=2), ids_of(llama, num_beams=2))

@pytest.mark.parametrize("keys", ["int8", "rescored"])
def test_santa_with_keys_of_eight_bits(llama, keys):
    method = Santa(samples=8, keys=keys)
    want = step_by_step(llama, method, IDS, 6)  # makes the index anew at each step
    with sparsify(llama, decode=method):
        for way in ({}, dict(cache_implementation="static"), dict(prompt_lookup_num_tokens=3),
                    dict(prefill_chunk_size=16)):
            assert torch.equal(ids_of(llama, **way), want)
        assert torch.equal(ids_of(llama, num_beams=2), ids_of(llama, num_beams=2))
        for layer in ids_of_cache(llama).layers:
            codes, unit = quantise(layer.keys)
            assert torch.equal(layer.state.rows, codes) and torch.equal(layer.state.unit, unit)

def forward(model, ids=IDS, **kwargs):
    with torch.no_grad(): return model(ids, **kwargs).logits

def test_masks_that_say_more_than_a_method_can_honour_are_refused(llama):
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    documents, prefix = causal.clone(), causal.clone()
    documents[15:, :15], prefix[:15, :15] = False, True
    bias = torch.zeros(1, 1, 1, 41)
    bias[..., :20] = -0.5
    cache = prefill(llama, IDS)
    with sparsify(llama, decode=TopK(budget=1.0), prefill=Streaming(sinks=4, window=100)):
        want = forward(llama)
        assert_close(forward(llama, attention_mask=causal[None, None]), want, rtol=1e-6)
        for mask in (documents, prefix):
            with pytest.raises(ValueError, match="must be causal with padding on the left alone"):
                forward(llama, attention_mask=mask[None, None])
        with pytest.raises(ValueError, match="got other numbers to add to the scores"):
            forward(llama, IDS[:, :1], attention_mask=bias, past_key_values=copy.deepcopy(cache))
        bias[..., :20] = torch.finfo(torch.float32).min
        forward(llama, IDS[:, :1], attention_mask=bias, past_key_values=cache)
        late = torch.ones(1, 40, dtype=torch.long)
        late[:, 35:] = 0
        with pytest.raises(ValueError, match="must be causal with padding on the left alone"):
            forward(llama, attention_mask=late)

def test_a_mask_that_is_changed_in_place_is_seen(llama):
    cache, mask = StaticCache(config=llama.config, max_cache_len=48), torch.zeros(1, 1, 1, 48, dtype=torch.bool)
    forward(llama, IDS[:, :30], past_key_values=cache)
    mask[..., :30] = True
    with sparsify(llama, decode=TopK(budget=1.0)):
        for i in range(30, 34):
            mask[..., i] = True
            got = forward(llama, IDS[:, [i]], attention_mask=mask, position_ids=torch.tensor([[i]]),
                          past_key_values=cache)
    assert_close(got[:, -1], forward(llama, IDS[:, :34])[:, -1], rtol=1e-5)

def test_a_compiled_step_stops_at_a_mask_with_holes(llama):
    cache, mask = StaticCache(config=llama.config, max_cache_len=48), torch.ones(1, 41, dtype=torch.long)
    with sparsify(llama, decode=TopK(budget=1.0)):
        forward(llama, past_key_values=cache, attention_mask=mask[:, :40])
        mask[:, 10:20] = 0
        torch.compiler.reset()
        with torch.no_grad(), pytest.raises(RuntimeError, match="hides keys in the middle"):
            torch.compile(llama, backend="eager", fullgraph=True)(IDS[:, :1], attention_mask=mask,
                past_key_values=cache)

def test_a_chunk_may_lie_in_the_padding_of_a_row(llama):
    for prefilled in (None, Streaming(sinks=2, window=8)):
        with sparsify(llama, decode=TopK(budget=0.25), prefill=prefilled):
            assert torch.equal(ids_of(llama, PADDED, attention_mask=MASK, prefill_chunk_size=7),
                               ids_of(llama, PADDED, attention_mask=MASK))

def test_one_name_serves_models_of_any_depth(llama):
    torch.manual_seed(0)
    deeper = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | dict(num_hidden_layers=4))).eval()
    name, found = register("test_depth", Uniform(samples=0.3)), []
    for model in (llama, deeper):
        try:
            model.set_attn_implementation(name)
            found.append(ids_of(model))
        finally: model.set_attn_implementation("sdpa")
        with sparsify(model, decode=Uniform(samples=0.3)): assert torch.equal(ids_of(model), found[-1])

def test_a_forward_pass_without_a_cache_is_a_reading(llama):
    with torch.no_grad():
        want = llama(IDS, logits_to_keep=8).logits
        with sparsify(llama, decode=TopK(budget=2)): assert torch.equal(llama(IDS, logits_to_keep=8).logits, want)

def test_a_mask_of_one_row_serves_the_batch_and_inference_tensors_are_looked_at_anew(llama):
    two, mask = IDS[:, :20].repeat(2, 1), torch.ones(1, 1, 1, 21, dtype=torch.bool)
    for way in ("session", "name"):
        with torch.inference_mode():
            cache = [prefill(llama, two) for _ in range(4)]
            mask = torch.ones(1, 1, 1, 21, dtype=torch.bool)
            step = lambda i, hidden: [mask[..., :hidden].fill_(False),
                                      llama(two[:, :1], attention_mask=mask, position_ids=torch.tensor([[20]]),
                                            past_key_values=cache[i]).logits][1]
            want = [step(0, 0), step(1, 9)]
            mask.fill_(True)
            if way == "session":
                with sparsify(llama, decode=TopK(budget=1.0)): got = [step(2, 0), step(3, 9)]
            else:
                llama.set_attn_implementation(register("test_rows", TopK(budget=1.0)))
                try: got = [step(2, 0), step(3, 9)]
                finally: llama.set_attn_implementation("sdpa")
        for a, b in zip(got, want): assert_close(a, b, rtol=1e-5)

def test_a_chunk_of_padding_alone(llama):
    mask = MASK.clone()
    mask[:, :8] = 0
    want = ids_of(llama, PADDED, attention_mask=mask)
    with sparsify(llama, decode=TopK(budget=1.0), prefill=Streaming(sinks=0, window=1.0)):
        assert torch.equal(ids_of(llama, PADDED, attention_mask=mask, prefill_chunk_size=4), want)

def test_an_attention_class_of_the_user(llama):
    for name in ("sdpa", "eager"):
        model = build("llama")
        model.set_attn_implementation(name)
        for layer in model.model.layers:
            layer.self_attn.__class__ = type("OwnAttention", (type(layer.self_attn),), dict(__module__="__main__"))
        with sparsify(model, decode=TopK(budget=1.0)): assert torch.equal(ids_of(model), ids_of(llama))

def test_models_that_share_a_config_are_apart(llama):
    torch.manual_seed(3)
    twin = transformers.LlamaForCausalLM(llama.config).eval()
    want = ids_of(twin)
    with sparsify(llama, decode=TopK(budget=0.1)): assert torch.equal(ids_of(twin), want)

OTHERS = {"opt, calls its decoder": ("OPT", dict(ffn_dim=64, word_embed_proj_dim=64)),
          "gpt2": ("GPT2", dict(n_embd=64, n_head=4, n_layer=2)), "mixtral": ("Mixtral", dict(num_local_experts=2)),
          "starcoder2": ("Starcoder2", {}), "olmo2": ("Olmo2", {}), "biogpt": ("BioGpt", {}),
          "llama4, chunks alone": ("Llama4Text", dict(head_dim=16, intermediate_size_mlp=64, num_local_experts=2)),
          "falcon h1, mixed": ("FalconH1", dict(head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
                                                mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=8))}

def build_other(family):
    torch.manual_seed(0)
    name, settings = OTHERS[family]
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers,
        name + "Config")(**SMALL | settings)).eval()

@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_every_family_decodes_as_many_queries_as_it_is_asked(family):
    "Twenty tokens of context, twenty more, in every layer without a window; `plan` knew which"
    model = build_other(family) if family in OTHERS else build(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), sparsify(model, decode=TopK(budget=1.0), setup="context", stats=True) as session:
        model(IDS[:, :20], past_key_values=cache)
        if family in REFUSED:
            with pytest.raises(ValueError, match=f"which uses {REFUSED[family]}"):
                model(IDS[:, 20:], past_key_values=cache)
            return
        model(IDS[:, 20:], past_key_values=cache)
    table = session.stats()
    expected = [i for i in session.plan.layers if session.plan.line(i).startswith("decode=")]
    assert sorted(table.index.unique("layer")) == expected and (table.queries == 20).all()
    assert bool(expected) != bool(session.plan.doubts)

class Adapter(torch.nn.Module):
    "A wrapper that passes everything on to the model inside, as adapters do: what is not its own is the inner model's"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def __getattr__(self, name):
        try: return super().__getattr__(name)
        except AttributeError: return getattr(super().__getattr__("model"), name)
    def forward(self, *args, **kwargs): return self.model(*args, **kwargs)

class Tuned(Adapter):
    "Two of them around each other; `generate` is called on the one inside"
    @property
    def base_model(self): return self.model
    def generate(self, *args, **kwargs): return self.base_model.generate(*args, **kwargs)

def lora(model, **task):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], **task))

WRAPPERS = {"none": lambda model: model, "adapter": lambda model: Tuned(Adapter(model)),
            "compiled": lambda model: torch.compile(model, backend="eager"),
            "peft": lambda model: lora(model, task_type="CAUSAL_LM"), "peft, no task": lora}

@pytest.mark.parametrize("way", [{}, dict(prompt_lookup_num_tokens=3)], ids=["greedy", "lookup"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_decodes_as_many_queries_as_the_model_inside(name, way):
    "The same number, and the same tokens, whichever module is called; candidates are known by the logits asked for"
    def run(wrap, **bad):
        model = wrap(build("llama")).eval()
        with sparsify(model, decode=TopK(budget=0.25), setup="prompt" if way else "context",
                      stats=True) as session, torch.no_grad(), torch.compiler.set_stance("force_eager"):
            cache = DynamicCache()
            model(input_ids=IDS[:, :20], past_key_values=cache)
            ids = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache,
                                 **GREEDY | way | bad)
        return ids, session.stats().queries.unique().tolist()
    want, count = run(WRAPPERS["none"])
    got, counted = run(WRAPPERS[name])
    assert torch.equal(got, want) and counted == count
    assert count[0] > 5 if way else count == [25]
    with pytest.raises(ValueError, match="output_attentions must be False"):
        run(WRAPPERS[name], output_attentions=True, return_dict_in_generate=True)

def test_a_wrapper_that_hides_its_model_is_refused(llama):
    with pytest.raises(ValueError, match="model must look its attention up by name.* got DataParallel"):
        sparsify(torch.nn.DataParallel(llama), decode=TopK())

def test_a_model_that_goes_round_the_function_is_told():
    model = build("llama")
    model.model.layers[0].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with sparsify(model, decode=TopK()), pytest.raises(ValueError,
                                                       match="model must look its attention up by name.* got llama"):
        model(IDS)

@pytest.mark.parametrize("method", fast([TopK(budget=0.25), Santa(samples=5), Santa(samples=32, eps=0.5, delta=0.1)],
                                        0, 2), ids=repr)
def test_threads_share_a_session_without_meeting(llama, method):
    import sys
    from concurrent.futures import ThreadPoolExecutor
    prompts = [IDS[:, i:i + 25 + i] for i in range(4)]
    def ask(ids): return ids_of(llama, ids), ids_of(llama, ids, prompt_lookup_num_tokens=3)
    with sparsify(llama, decode=method, stats=True) as session: want = [ask(x) for x in prompts]
    before, count = sys.getswitchinterval(), session.stats().queries
    sys.setswitchinterval(1e-5)
    try:
        with sparsify(llama, decode=method, stats=True) as session, ThreadPoolExecutor(4) as pool:
            got = list(pool.map(ask, prompts))
    finally: sys.setswitchinterval(before)
    for a, b in zip(got, want): assert all(map(torch.equal, a, b))
    assert session.stats().queries.equals(count)

def test_a_model_whose_every_layer_has_a_window_says_so(llama):
    model = build("mistral, window")
    with pytest.warns(UserWarning, match="every layer of mistral that was given a method has a sliding window") as told:
        session = sparsify(model, decode=TopK())
    assert (told[0].filename == __file__
            and "layers 0 to 1: the model's own attention (a sliding window)" in repr(session))
    session.restore()
    assert "over" in repr(session)
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in (dict(decode=Exact()), dict(decode=TopK(), dense_layers=[0, 1])):
            with sparsify(model, **way): pass
        with sparsify(build("qwen2, window"), prefill=Streaming(), decode=TopK(budget=3)) as session: pass
    assert repr(session).splitlines()[1:] == [
        "  layer 0: prefill=Streaming(sinks=4, window=0.1), decode=TopK(budget=3)",
        "  layer 1: the model's own attention (a sliding window)"]

def test_a_model_in_a_session_is_not_copied_or_trained(llama):
    import pickle
    with sparsify(llama, decode=TopK()):
        for way in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="must not be in a session of sparsify to be copied or pickled"):
                way(llama)
        try:
            llama.train()
            with pytest.raises(ValueError, match="must not be in training mode"): forward(llama)
        finally: llama.eval()
    copy.deepcopy(llama)
    with pytest.raises(ValueError, match="model must not be in training mode"):
        sparsify(build("llama").train(), decode=TopK())

class Walk(TopK):
    "Counts the layers that each query, or prompt, has come through"
    seen = []
    def new_step(self): return []
    def note(self, what, layers, step):
        step.append(what)
        self.seen.append((what, layers, len(step), id(step)))
    def decode(self, q, k, v, *, step, **kwargs):
        self.note("decode", k.shape[2], step)
        return super().decode(q, k, v, **kwargs)
    def prefill(self, q, k, v, *, step, **kwargs):
        self.note("prefill", k.shape[2], step)
        return attention(q, k, v, causal=True, scale=kwargs["scale"], kv_start=kwargs["kv_start"])

def four_layers():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | dict(num_hidden_layers=4))).eval()

@pytest.mark.parametrize("way", [{}, dict(prompt_lookup_num_tokens=3), dict(num_beams=2), dict(prefill_chunk_size=16),
                                 dict(cache_implementation="static")], ids=str)
def test_a_step_goes_through_the_layers_of_one_pass_in_order(way):
    model, walk = four_layers(), Walk(budget=1.0)
    want = ids_of(model, **way)
    Walk.seen.clear()
    with sparsify(model, prefill=walk, decode=walk, dense_layers=[0]): assert torch.equal(ids_of(model, **way), want)
    passes = {}
    for what, keys, layers, step in Walk.seen: passes.setdefault((what, keys, step), []).append(layers)
    assert {what for what, *_ in passes} == {"prefill", "decode"}
    assert all([x[i:i + 3] for i in range(0, len(x), 3)] == [[1, 2, 3]] * (len(x) // 3) for x in passes.values())

class Chosen(Walk):
    "Selects and hands on: what `Then` may stand on"
    def select(self, q, k, *, step, **kwargs):
        self.note("select", k.shape[2], step)
        return TopK(self.budget).select(q, k, **kwargs)

def test_a_method_within_a_method_hands_on_to_its_like_alone(llama):
    model = four_layers()
    within = [Then(kind(budget=1.0), Santa(samples=4)) for kind in (Chosen, type("Other", (Chosen,), {}))]
    Walk.seen.clear()
    with sparsify(model, decode={0: within[0], 1: within[0], 2: within[1], 3: within[1]}): ids_of(model)
    assert {layers for _, _, layers, _ in Walk.seen} == {1, 2}
    with pytest.raises(ValueError, match=r"must be Then\(Chosen, Santa\) in every layer from 0 to 2, .* layer 1: "):
        sparsify(model, decode={0: within[0], 1: within[1], 2: within[0]})

def test_a_step_needs_all_layers_on_one_device(llama):
    model, walk = four_layers(), Walk(budget=1.0)
    for way in (dict(decode=walk, dense_layers=[2]), dict(decode={0: walk, 1: walk, 2: TopK(), 3: walk}),
                dict(prefill=walk, dense_layers=[1])):
        with pytest.raises(ValueError,
                           match="must be Walk in every layer from 0 to 3, for it hands on what it knows, got layer "
                                 "[12]: "):
            sparsify(model, **way)
    for way in (dict(dense_layers=[0, 3]), dict(decode={2: walk})): sparsify(model, **dict(decode=walk) | way).restore()
    mixed = build("cohere2, layers without rope")
    sparsify(mixed, decode=walk).restore()  # one layer without a window
    model.model.layers[2].to("meta")
    with pytest.raises(ValueError, match="model must have the layers of Walk on one device, got cpu, meta"):
        sparsify(model, decode=walk)
    with pytest.raises(ValueError, match="decode must keep no index and take no steps"): register("test_walk", walk)

class Learned(TopK):
    def check_model(self, model):
        if model.config.num_hidden_layers != 4: raise ValueError("maps must be of this model")

def test_a_method_may_refuse_a_model(llama):
    sparsify(four_layers(), decode=Learned()).restore()
    for way in (dict(decode=Learned()), dict(prefill={1: Learned()})):
        with pytest.raises(ValueError, match="maps must be of this model"): sparsify(llama, **way)

def bert():
    return transformers.BertModel(transformers.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1,
                                                          num_attention_heads=2, intermediate_size=32)).eval()
def gemma4():
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SMALL | dict(head_dim=16, global_head_dim=16,
        vocab_size_per_layer_input=64, hidden_size_per_layer_input=8))).eval()
def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=64, d_model=32,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32)).eval()

@pytest.mark.parametrize("call, error, message", [
    (lambda m: sparsify(torch.nn.Linear(2, 2), decode=TopK()), ValueError, "got Linear"),
    (lambda m: sparsify(transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=8, n_layer=1,
        n_head=2)).eval(), decode=TopK()), ValueError, "got bloom"),
    (lambda m: sparsify(transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, hidden_size=8,
        num_hidden_layers=1)).eval(), decode=TopK()), ValueError, "got mamba"),
    (lambda m: sparsify(bert(), decode=TopK()), ValueError,
     "model must have causal self-attention to replace, got bert"),
    (lambda m: sparsify(bart(), decode=TopK()), ValueError, "model must be a decoder alone, got bart"),
    pytest.param(lambda m: sparsify(gemma4(), decode=TopK()), ValueError,
        "model must make one mask for all attention functions, got gemma4_text",
        marks=pytest.mark.skipif(OLD, reason="it makes one there")),
    (lambda m: sparsify(m, decode="topk"), TypeError, "decode must be None, a method, .* got str"),
    (lambda m: sparsify(m, decode=TopK), (TypeError, ValueError), "decode"),
    (lambda m: sparsify(m, prefill=Quest()), ValueError, "prefill must be a method that can prefill, got Quest"),
    (lambda m: sparsify(m, decode={2: TopK()}), ValueError, "decode must be for layers 0 to 1, got 2"),
    (lambda m: sparsify(m, decode=TopK(), dense_layers=[5]), ValueError,
     "dense_layers must be among layers 0 to 1, got 5"),
    (lambda m: sparsify(m, decode=TopK(), dense_layers=0), TypeError, "dense_layers must be layer numbers, got 0"),
    (lambda m: sparsify(m, decode=TopK(), setup="C"), ValueError,
     "setup must be one of prompt, context, A, B, got 'C'"),
    (lambda m: sparsify(m, decode=TopK(), stats="yes"), TypeError, "stats must be a bool, got str"),
    (lambda m: sparsify(m, decode=TopK(), offload=1), TypeError, "offload must be a bool, got int"),
    (lambda m: sparsify(m, prefill=TopK(), decode=Exact(), offload=True), ValueError,
     "offload must be False where no layer decodes with a method"),
    (lambda m: sparsify(m, decode=TopK(), dense_layers=[0, 1], offload=True), ValueError,
     "offload must be False where no layer decodes with a method"),
    (lambda m: sparsify(m, decode=Uniform(), seed=-1), ValueError, "seed"),
    (lambda m: sparsify(m, decode=Uniform(), seed=1.5), TypeError, "seed"),
])
def test_bad_input_is_named(call, error, message):
    model = build("llama")
    with pytest.raises(error, match=message): call(model)

def test_a_model_whose_attention_does_not_run_here_is_refused():
    for name, message in ("flash_attention_2", "got flash_attention_2 on the CPU"), ("flex_attention",
        "model must have eager, sdpa or flash attention of its own, got flex_attention"):
        model = build("llama")
        model.config._attn_implementation_internal = name
        with pytest.raises(ValueError, match=message): sparsify(model, decode=TopK())

def run_bad(model, message, **kwargs):
    with pytest.raises(ValueError, match=message): ids_of(model, **kwargs)

def test_bad_calls_inside_a_session_are_named_and_leave_a_model_that_works(llama):
    want = ids_of(llama)
    with sparsify(llama, decode=Uniform(samples=0.3), seed=[1, 2]):
        run_bad(llama, "seed must be one for each of 1 sequences, got 2")
        run_bad(llama, "output_attentions", output_attentions=True, return_dict_in_generate=True)
        run_bad(llama, "use_cache must be True: without a cache", use_cache=False)
        with pytest.raises(ValueError, match="output_attentions"): llama.model(IDS, output_attentions=True)
        with pytest.raises(ValueError, match="in another session"): sparsify(llama, decode=TopK())
        with pytest.raises(ValueError, match=r"model must run under torch.no_grad\(\)"): llama(IDS[:, :1])
        cache = StaticCache(config=llama.config, max_cache_len=48)
        with torch.no_grad():
            llama(IDS, past_key_values=cache)
            with pytest.raises(ValueError, match="must say how far a static cache is filled"):
                llama(IDS[:, :1], past_key_values=cache)
    with pytest.raises(KeyError), sparsify(llama, decode=TopK(budget=0.1)): raise KeyError
    assert torch.equal(ids_of(llama), want)
    session = sparsify(llama, decode=TopK(budget=0.1))
    with pytest.raises(ValueError, match="stats must be True for statistics"): session.stats()
    assert not torch.equal(ids_of(llama), want)
    session.restore()
    session.restore()
    with pytest.raises(ValueError, match="session must not be over"), session: pass
    llama.set_attn_implementation(register("test_taken", TopK()))
    with pytest.raises(ValueError, match="attention of its own, got test_taken"): sparsify(llama, decode=Exact())
    llama.set_attn_implementation("sdpa")
    assert torch.equal(ids_of(llama), want) and llama.config._attn_implementation == "sdpa"
    assert not [n for n in transformers.AttentionInterface._global_mapping if n.startswith("sparse_nb")]
    assert not any(m._forward_pre_hooks for m in llama.modules())

@pytest.mark.parametrize("family", fast(["llama", "qwen2, window", "gpt-neox, partial, fused"], 1))
@pytest.mark.parametrize("method", fast([*METHODS, Santa(samples=32, eps=0.5, delta=0.1),
                                         Santa(samples=8, keys="rescored")], 0, 3, 5, 6), ids=repr)
def test_keys_in_host_memory_change_nothing(family, method):
    model = build(family)
    def ways(**kwargs):
        with sparsify(model, decode=method, **kwargs):
            yield from (ids_of(model), ids_of(model, num_beams=3), ids_of(model, prefill_chunk_size=16),
                        ids_of(model, prompt_lookup_num_tokens=3), ids_of(model, PADDED, attention_mask=MASK))
            cache = DynamicCache(config=model.config)
            first = model.generate(IDS[:, :20], past_key_values=cache, **GREEDY)
            yield model.generate(torch.cat([first, IDS[:, 20:]], 1), past_key_values=cache, **GREEDY)
            cache = prefill(model, IDS[:, :30], chunk=7)
        with sparsify(model, decode=method, setup="B", audit=True, **kwargs) as session, torch.no_grad():
            yield model(IDS[:, 30:], past_key_values=cache).logits
            yield torch.as_tensor(session.stats().to_numpy())
    for got, want in zip(list(ways(offload=True)), ways(), strict=True): assert_close(got, want, rtol=1e-5)

def test_a_cache_of_latents_is_not_for_host_memory():
    torch.manual_seed(0)
    config = transformers.Glm4MoeLiteConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
                                            moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
                                            num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=16,
                                            qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4,
                                            num_experts_per_tok=2, n_shared_experts=1, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    want = ids_of(model)
    with sparsify(model, decode=TopK(budget=1.0)): assert torch.equal(ids_of(model), want)
    with sparsify(model, decode=TopK(budget=1.0), offload=True):
        run_bad(model,
                "offload must be False for layers that make their keys from what a cache holds, got layer 0 of "
                "glm4_moe_lite")

def test_which_layers_go_to_host_memory_and_which_caches_cannot(llama):
    with sparsify(llama, decode=TopK(), dense_layers=[0], offload=True):
        cache = ids_of_cache(llama)
        assert [type(x).__name__ for x in cache.layers] == ["DynamicLayer", "OffloadedLayer"]
        run_bad(llama, "cache must be a DynamicCache to be offloaded, got a StaticLayer for layer 1",
                cache_implementation="static")
    before = [x.keys.clone() for x in cache.layers]
    replies = [answer(llama, x, IDS[:, :1], TopK(budget=1.0), tokenizer=Letters(), max_new_tokens=2).ids
               for x in (cache, ids_of_cache(llama))]
    assert replies[0] == replies[1] and all(torch.equal(x.keys, kept) for x, kept in zip(cache.layers, before))

def test_a_session_that_is_over_keeps_no_cache(llama):
    import gc
    import weakref
    with sparsify(llama, decode=Santa(samples=32, eps=0.5, delta=0.1), offload=True, stats=True) as session:
        cache = ids_of_cache(llama)
    layers = [weakref.ref(x) for x in cache.layers]
    del cache
    gc.collect()
    assert len(session.stats()) and not any(x() for x in layers)

def warned(run):
    "The warnings of ours that `run` gives."
    import warnings
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [str(x.message) for x in told if x.category is UserWarning]

@pytest.mark.parametrize("setup", ["prompt", "context"])
def test_a_cache_that_is_not_found_is_refused(llama, monkeypatch, setup):
    "Under a name that nobody knows no index observes its keys, and no set-up of its context."
    monkeypatch.setattr(override, "CACHE_NAMES", ("store",))
    with sparsify(llama, decode=TopK(budget=0.25), setup=setup):
        message = "cache must be an argument .* none in layer 0 of llama, whose 1 queries see 41 keys"
        with pytest.raises(ValueError, match=message): ids_of(llama)
        with torch.no_grad(): assert llama(IDS, use_cache=False).logits.isfinite().all()

HYBRID = dict(num_hidden_layers=6, layers_block_type=["mamba", "mamba", "hybrid"] * 2, mamba_d_state=8, mamba_dt_rank=4)

@pytest.mark.parametrize("family, settings, message", [
    ("HrmText", dict(num_layers_per_stack=1, H_cycles=1, L_cycles=1),
     "one attention layer of each number, got layer 0 of hrm_text in model.L_module.layers.0.self_attn and in model.H"),
    ("Zamba", HYBRID | dict(n_mamba_heads=2, attention_head_dim=16),
     "that know their number, got layer_idx=None in model.layers.2.*self_attn"),
    ("Zamba2", HYBRID | dict(n_mamba_heads=4, mamba_headdim=32, mamba_ngroups=1, num_mem_blocks=2, chunk_size=8),
     "that know their number, got layer_idx=-1 in model.layers.2.*self_attn")],
    ids=["hrm", "zamba", "zamba2"])
def test_layers_without_a_number_of_their_own_are_refused(family, settings, message):
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family + "Config")(**SMALL | settings))
    with pytest.raises(ValueError, match=f"model must have .*{message}"): sparsify(model.eval(), decode=TopK())

def test_two_towers_are_refused_and_each_is_served(llama):
    "As of an assistant that thinks with one decoder and talks with another."
    both, other = copy.deepcopy(llama), copy.deepcopy(llama)
    both.talker = other
    with pytest.raises(ValueError, match="layer 0 of llama in model.layers.0.self_attn and in talker.model.layers.0"):
        sparsify(both, decode=TopK())
    with sparsify(both.talker, decode=TopK(budget=0.1), stats=True) as session: few = ids_of(other)
    assert session.stats().queries.eq(5).all() and not torch.equal(few, ids_of(other))

def llava():
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, image_size=8,
                                           num_attention_heads=2, patch_size=4, projection_dim=32)
    text = transformers.LlamaConfig(**SMALL)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=text, vision_config=vision,
        image_token_index=63, vision_feature_layer=-1)).eval()

def test_a_vision_tower_is_left_out_and_counted():
    model, ids = llava(), torch.cat([IDS[:, :5] % 60 + 3, torch.full((1, 4), 63), IDS[:, 5:20] % 60 + 3], 1)
    image = dict(pixel_values=torch.randn(1, 3, 8, 8))
    want = ids_of(model, ids, **image)
    with sparsify(model, decode=TopK(budget=1.0), dense_layers=[1], stats=True) as session:
        assert torch.equal(ids_of(model, ids, **image), want)
    assert repr(session).splitlines() == [
        "Session(llava, setup='prompt', seed=0, over): methods in 1 of 4 attention modules",
        "  layer 0: decode=TopK(budget=1.0)", "  layer 1: the model's own attention (dense_layers)",
        "  2 CLIPAttention: the model's own attention (no causal self-attention)"]
    assert session.stats().attrs["served"] == "methods in 1 of 4 attention modules"
    name = register("test_towers", TopK(budget=1.0))
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=r'got CLIPAttention .*set_attn_implementation\({"text_config": name}\)'):
        ids_of(model, ids, **image)
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation({"text_config": name})
    assert torch.equal(ids_of(model, ids, **image), want)

def test_a_window_that_the_config_alone_speaks_of_is_kept():
    "PhiMoE hands no window to its attention function, only a mask that hides the older keys."
    torch.manual_seed(0)
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**SMALL, sliding_window=16, num_local_experts=2,
                                                                     num_experts_per_tok=2)).eval()
    want, found = ids_of(model), []
    def run():
        with sparsify(model, decode=TopK(budget=2)): found.append(ids_of(model))
    assert ["this session changes nothing" in x for x in warned(run)] == [True]
    assert torch.equal(found[0], want)

def test_a_method_that_leaves_all_layers_exact_says_so(llama):
    for what in ("prefill", "decode"):
        told = warned(lambda: sparsify(llama, **{what: SketchWalk()}).restore())
        assert len(told) == 1 and told[0].startswith(f"{what}=SketchWalk(") and "all 2 layers of llama exact" in told[0]
    assert not warned(lambda: sparsify(four_layers(), decode=SketchWalk()).restore())
    assert not warned(lambda: sparsify(llama, decode=SketchWalk(dense_layers=1)).restore())

def test_a_session_that_decoded_nothing_says_so(llama):
    "Log-likelihoods come from one forward pass, which reads."
    def session(*runs, **way):
        def run():
            with torch.no_grad(), sparsify(llama, **dict(decode=TopK(budget=0.1)) | way):
                for x in runs: x()
        return [x.startswith("decode was never used: all queries") for x in warned(run)]
    score, write = lambda: llama(IDS), lambda: ids_of(llama)
    cache = DynamicCache(config=llama.config)
    read, ask = lambda: prefill(llama, IDS), lambda: llama(IDS, past_key_values=cache)
    assert session(score) == session(score, prefill=Streaming()) == session(score, setup="context") == [True]
    for runs in ((), (write,), (score, write), (read,)): assert session(*runs) == []
    assert session(score, prefill=Streaming(), decode=None) == session(score, decode=Exact()) == []
    assert session(ask, ask, setup="context") == []
    assert session(lambda: ids_of(llama, cache_implementation="static")) == []
    assert session(lambda: ids_of(llama, prompt_lookup_num_tokens=3)) == []
    def fails():
        with pytest.raises(KeyError), sparsify(llama, decode=TopK()), torch.no_grad(): raise KeyError(score())
    assert warned(fails) == []
    def restored():
        open_one = sparsify(llama, decode=TopK())
        with torch.no_grad(): score()
        open_one.restore()
        open_one.restore()
    assert len(warned(restored)) == 1

def test_attention_that_is_called_twice_a_layer_takes_no_index():
    torch.manual_seed(0)
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SMALL)).eval()
    want = ids_of(model)
    with sparsify(model, decode=TopK(budget=1.0)): assert torch.equal(ids_of(model), want)
    for what, method in (("decode", Quest(budget=64, page=4)), ("decode", H2O(budget=64)), ("prefill", H2O(budget=64))):
        with sparsify(model, **{what: method}):
            run_bad(model, f"{what} must be a method without an index where a layer calls its attention twice in a "
                           f"step, got {type(method).__name__} in layer 0 of diffllama")

def test_layers_that_share_keys_take_no_method_that_needs_an_index():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma3nTextConfig(
        **SMALL | GEMMA3N | dict(layer_types=["full_attention"] * 4))).eval()
    want = ids_of(model)
    for method in (H2O(budget=64), SnapKV(budget=64)):
        for what in ("prefill", "decode"):
            with pytest.raises(ValueError, match=f"{what} must be a method that can do without an index in layers that "
                                                 rf"use the keys of another, got {type(method).__name__} in layer 2 of "
                                                 r"gemma3n_text; dense_layers=\[2, 3\]"):
                sparsify(model, **{what: method})
        with sparsify(model, decode=method, dense_layers=[2, 3]): assert torch.equal(ids_of(model), want)
    with sparsify(model, decode=Quest(budget=64, page=4)): assert torch.equal(ids_of(model), want)

@pytest.mark.gpu
@pytest.mark.parametrize("method", [TopK(budget=64), Streaming(sinks=4, window=60), Uniform(samples=64),
                                    Santa(samples=64), Santa(samples=32, eps=0.3, delta=0.1),
                                    Santa(samples=64, keys="rescored")], ids=repr)
def test_a_gpu_reads_from_pinned_host_memory(method):
    from sparse_nb import pocket, tasks
    model, tokenizer = pocket.load("cuda", dtype=torch.float32)
    prompts = [tasks.make("needle", length, seed=i, tokenizer=tokenizer).prompt
               for i, length in enumerate((2048, 1500))]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to("cuda")
    def run(beams, **kwargs):
        with sparsify(model, decode=method, dense_layers=[0], audit=True, **kwargs) as session:
            out = model.generate(**inputs, max_new_tokens=12, do_sample=False, num_beams=beams,
                                 return_dict_in_generate=True)
            return out.sequences, session.stats(), out.past_key_values
    for beams in (1, 2):
        want, table, cache = run(beams)
        got, offloaded, host = run(beams, offload=True)
        assert torch.equal(got, want) and np.allclose(offloaded, table, rtol=1e-4)
        for a, b in zip(host.layers[1:], cache.layers[1:]):
            # what beams were exchanged is pinned at the next step
            assert beams > 1 or a.keys.is_pinned() and a.values.is_pinned()
            assert not a.keys.is_cuda and b.keys.is_cuda
            for x, y in ((a.keys, b.keys.cpu()), (a.values, b.values.cpu())):
                # sinks and window on the GPU have kernels of their own
                if isinstance(method, Streaming): torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
                else: assert torch.equal(x, y)
        assert host.layers[0].keys.is_cuda


@pytest.mark.parametrize("method, fits", [(Streaming(1, 1), False), (TopK(budget=0.99), True)])
def test_an_audit_warns_of_a_method_that_misses_attention_widely(llama, method, fits):
    "The error is the mean of all layers, as the statistics say; without an audit nothing is known."
    for audit in (True, False):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with sparsify(llama, decode=method, audit=audit, stats=True) as session: ids_of(llama)
        said = [str(x.message) for x in found if "missed exact attention" in str(x.message)]
        assert len(said) == (audit and not fits)
        if not audit: continue
        error = session.stats().error.mean()
        assert (error > UNFIT) == (not fits)
        if said: assert f"by {error:.2f} of its size" in said[0]
