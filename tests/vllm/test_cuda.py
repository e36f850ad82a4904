"""The backend for CUDA beside a stand-in for vLLM's classes, by the kernels: steps in which some requests decode, some
read a prompt and some its last token, blocks in any order and shared, room for boxes behind each block, requests that
only fill a graph up. On the CPU in Triton's interpreter, in a process of its own, and on a GPU."""
import importlib
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inputs import DEVICE, INTERPRETED, fast, kernel

pytest.importorskip("triton")
import fake_vllm
from sparse_nb.core.exact import assert_close, attention
from sparse_nb.core.settings import read_method
from sparse_nb.core.streams import fold_in
from sparse_nb.kernels import engine, saap_index, sketch_walk
from sparse_nb.methods.quest import Quest, page_box
from sparse_nb.methods.sketch_walk.index import signed_hadamard
from sparse_nb.models import plan
from sparse_nb.saap import Saap
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vllm import lists
from sparse_nb.vllm.paged import box_view, mean_keys, mean_view, streams_at, with_capacity
from sparse_nb.vllm.serving import RELEASES, SIZES, read_serving
from sparse_nb.vllm.step import Bounds, reads

BF16, H, G, D, LAYERS = torch.bfloat16, 4, 2, 16, 2


def config(decode, block, prefill=None, crossover=None, **other):
    "A configuration of vLLM's for a model whose first layer keeps vLLM's own attention."
    model = dict(runner_type="generate", use_mla=False, is_encoder_decoder=False, is_hybrid=False, rswa_window=None,
                 is_mm_prefix_lm=False, dtype=BF16, max_model_len=96, enable_sleep_mode=False,
                 get_total_num_hidden_layers=lambda: LAYERS)
    parallel = dict.fromkeys(SIZES, 1) | dict(worker_cls="auto")
    parts = dict(model=model, parallel=parallel, cache=dict(cache_dtype="auto", block_size=block),
                 device=dict(device_type="cuda"), attention=dict(backend=None),
                 scheduler=dict(max_num_seqs=6, enable_chunked_prefill=False, long_prefill_token_threshold=0),
                 compilation=dict(static_forward_context={}))
    given = dict(decode=decode, prefill=prefill, crossover=crossover)
    methods = {x: y for x, y in given.items() if y is not None}
    given = dict(sparse_nb=dict(methods, dense_layers=[0], seed=5)) if methods else {}
    return SimpleNamespace(**{f"{x}_config": SimpleNamespace(**y) for x, y in parts.items()}, additional_config=given,
                           speculative_config=None, kv_transfer_config=None, use_v2_model_runner=True, heads=H, **other)


@pytest.fixture
def served(monkeypatch):
    "`served(decode, block, prefill, crossover)`: the module, and a configuration with layers in its context."
    def make(decode, block=16, prefill=None, crossover=None, **layer):
        own = config(decode, block, prefill, crossover)
        fake_vllm.put_in_place(monkeypatch, own, RELEASES["cuda"])
        cuda = importlib.import_module("sparse_nb.vllm.cuda")
        kind = cuda.SparseBackend.get_impl_cls()
        for i in range(LAYERS):
            name = f"model.layers.{i}.self_attn.attn"
            own.compilation_config.static_forward_context[name] = SimpleNamespace(
                layer_name=name, impl=kind(H, D, D**-0.5, G, **layer))
        return cuda, own
    yield make
    for name in ("layer", "cuda"): sys.modules.pop(f"sparse_nb.vllm.{name}", None)


class Hashed(SimpleNamespace):
    "An attention layer, as a module that is its own key."
    __hash__, __eq__ = object.__hash__, object.__eq__


class Requests:
    "Queries, keys and values of each request and layer, and where its blocks are; the last two begin alike."
    def __init__(self, prompts, new, block):
        generator = torch.Generator().manual_seed(0)
        self.prompts, self.block, total = prompts, block, [n + new for n in prompts]
        of = lambda heads: [[torch.randn(n, heads, D, generator=generator).to(BF16) for n in total]
                            for _ in range(LAYERS)]
        self.q, self.k, self.v, self.done = of(H), of(G), of(G), [0] * len(prompts)
        self.whole, self.crossover = (), {}  # requests whose prompt comes in one step; of layers
        self.shared = 32 // block
        for x in (self.k, self.v):
            for layer in x: layer[-1][:32] = layer[-2][:32]
        order = (torch.randperm(40, generator=generator) + 1).tolist()
        self.table = torch.zeros(len(prompts), 96 // block + 1, dtype=torch.int32)
        for i, n in enumerate(total):
            for j in range(-(-n // block)):
                again = i == len(prompts) - 1 and j < self.shared
                self.table[i, j] = self.table[i - 1, j] if again else order.pop()

    def step(self, lengths, fill):
        "What the runner says of a step, and its requests in order; `fill` more that have no token."
        of = sorted(lengths, key=lambda i: (lengths[i] != 1, lengths[i]))
        new = torch.tensor([lengths[i] for i in of] + [0] * fill)
        ends = torch.tensor([self.done[i] + lengths[i] for i in of] + [0] * fill, dtype=torch.int32)
        starts = torch.cat([new[:1] * 0, new.cumsum(0)]).int()
        places = [(i, self.done[i] + j) for i in of for j in range(lengths[i])]
        slots = [int(self.table[i, p // self.block]) * self.block + p % self.block for i, p in places] + [-1] * fill
        blocks = torch.cat([self.table[of], self.table.new_zeros(fill, self.table.shape[1])]).to(DEVICE)
        return places, fake_vllm.CommonAttentionMetadata(
            starts.to(DEVICE), starts, ends.to(DEVICE), len(new), len(slots), int(new.max()), int(ends.max()), blocks,
            torch.tensor(slots, device=DEVICE), seq_lens_cpu_upper_bound=ends,
            is_prefilling=torch.tensor([self.done[i] < self.prompts[i] for i in of]))

    def rows(self, x, layer, places, fill):
        "Rows of a step."
        found = torch.stack([x[layer][i][p] for i, p in places])
        return torch.cat([found, found[:1].expand(fill, -1, -1) * 0 + 7]).to(DEVICE)

    def wanted(self, layer, i, place, method, reads=None):
        "The output of the reference, with a method for what is decoded and one for whole prompts."
        x = [y[layer][i] for y in (self.q, self.k, self.v)]
        if layer and reads is not None and place < self.prompts[i] and i in self.whole:
            prompt = (y[:self.prompts[i]].transpose(0, 1)[None].float() for y in x)
            return reads.prefill(*prompt)[0, :, place]
        q, (k, v) = x[0][place][None, :, None].float(), [y[:place + 1].transpose(0, 1)[None].float() for y in x[1:]]
        method, least = plan.at_layer(method, layer), self.crossover.get(layer, 0)
        if layer == 0 or method is None or place < self.prompts[i] or place + 1 < least:
            return attention(q, k, v)[0, :, 0]
        given, first = {}, max(self.prompts[i] + 1, least)
        if method.random: given["seed"] = streams_at(5, layer, torch.arange(H), place)
        if type(method).__name__ == "VAttention": given["backend"] = "triton"  # its order, and a larger base sample
        if isinstance(method, Saap):  # clusters of what was there first, and lists made some tokens ago
            given["state"] = state = method.new_state()
            state.append(k[:, :, :first], v[:, :, :first], k_pre_rope=None, shown=None)
            method.decode(q, k[:, :, :first], v[:, :, :first], **given)
            if place >= first: state.append(k[:, :, first:], v[:, :, first:], k_pre_rope=None)
            method = replace(method, window=method.window + (place + 1 - first) % lists.EVERY)
        return method.decode(q, k, v, **given)[0, :, 0]


# tokens of a step for each request: pieces of prompts, a last token of one beside others that decode, a hit of the
# shared blocks by the last request, whose prompt then has one token left, and steps in a graph with room for two more
PLAN = (({0: 20, 1: 16}, 0), ({0: 17, 1: 1, 2: 30}, 0), ({0: 1, 1: 1, 2: 20}, 0), ({0: 1, 1: 1, 2: 1, 3: 1}, 2),
        ({0: 1, 2: 1, 3: 1}, 2), ({1: 1, 3: 1}, 0))
CASES = [("Exact", "NHD", 16), ("Streaming(sinks=4, window=16)", "HND", 16), ("Santa(samples=16)", "NHD", 32),
         ("Quest(budget=0.3)", "NHD", 16), ("Quest(budget=0.3)", "HND", 32), ("TopK(budget=0.3)", "NHD", 16),
         ("Saap(budget=0.2, clusters=4, sinks=2, window=8)", "NHD", 16),
         ("Saap(probes=2, clusters=4, window=20, tail='drop')", "HND", 32),
         ("OneList(guess=Quest(budget=0.3))", "NHD", 16),
         ("HashAttention(budget=0.3, maps='MAPS')", "HND", 16),
         ("OneList(guess=HashAttention(budget=0.3, maps='MAPS'))", "NHD", 32),
         ("VAttention(sinks=2, window=4, topk=0.1, base=4, eps=0.3, predictor=HashAttention(maps='MAPS'))", "NHD", 16),
         ("SketchWalk(block=8, density=0.3, dense_layers=0)", "NHD", 16),
         ("SketchWalk(block=16, density=0.3, index='fine16', heads='each', dense_layers=0)", "HND", 32),
         ("SketchWalk(block=32, density=0.3, index='fine4', dense_layers=0)", "HND", 16),
         ("SketchWalk(block=16, density=0.3, index='mean', dense_layers=0)", "NHD", 32)]
ROOM = {"block=8": 8 * (32 + 4), "fine16": 4 * (32 + 8), "block=32": 8 * (32 + 4), "mean": 4 * (80 + 4)} # of its means


def caches_of(cuda, own, layout, block):
    "What vLLM knows of a block, and caches of the layers."
    layers = own.compilation_config.static_forward_context
    specs = cuda.SparseWorker(own, {x: fake_vllm.Spec(block, G, D, BF16) for x in layers}).get_kv_cache_spec()
    spec = specs["model.layers.1.self_attn.attn"]
    caches = [spec.cache(41, layout, DEVICE, 3.0) for _ in layers]
    for layer, x in zip(layers.values(), caches): layer.kv_cache = x
    return spec, caches


def run_step(own, builder, caches, requests, lengths, fill, *methods):
    "A step whose outputs are compared with the reference's; gives where its queries are."
    places, common = requests.step(lengths, fill)
    slots = np.array([(4, 0, 5, 2, 1)[i] for i in dict.fromkeys(i for i, _ in places)], np.int32)
    builder.batch = slots, torch.from_numpy(slots).to(DEVICE)
    step = (builder.build_for_cudagraph_capture if fill else lambda x: builder.build(0, x))(common)
    rest = getattr(getattr(step, "step", None), "rest", None)
    assert step.scheduled and (rest is None or not rest.scheduled)
    for i, layer in enumerate(own.compilation_config.static_forward_context.values()):
        q, k, v = (requests.rows(x, i, places, fill) for x in (requests.q, requests.k, requests.v))
        layer.impl.do_kv_cache_update(layer, k, v, caches[i], common.slot_mapping)
        output = torch.full_like(q, torch.nan)
        layer.impl.forward(layer, q, k, v, caches[i], step, output)
        for got, (request, place) in zip(output, places):
            want = requests.wanted(i, request, place, *methods)
            assert (got.cpu().float() - want).norm() < 0.02 * want.norm(), (i, request, place)
    for request, n in lengths.items(): requests.done[request] += n
    return places


@kernel
@pytest.mark.parametrize("decode, layout, block", fast(CASES, 0, 1, 2, 5, 6, 8, 9, 11, 12, 13), ids=str)
def test_steps(served, monkeypatch, tmp_path, decode, layout, block):
    generator, maps = torch.Generator().manual_seed(1), tmp_path / "maps.safetensors"
    new = lambda *size: torch.randn(*size, generator=generator)
    save_file({f"1.{side}_{name}": new(heads, *size) for side, heads in (("k", G), ("q", H))
               for name, size in (("w1", (D, 8)), ("b1", (8,)), ("w2", (8, 32)), ("b2", (32,)))}, maps)
    decode = decode.replace("MAPS", str(maps))
    if "Walk" in decode: monkeypatch.setitem(globals(), "D", 40)  # its kernels take heads of more than 32 numbers
    cuda, own = served(decode, block)
    if "drop" in decode: monkeypatch.setattr(lists, "EVERY", 2)  # lists are made anew after two tokens
    spec, caches = caches_of(cuda, own, layout, block)
    more = 4 * G * block if "Hash" in decode else spec.unpadded_page_size_bytes // 16 if "Quest" in decode else 0
    more = next((room + -room % 16 for name, room in ROOM.items() if name in decode), more)
    assert spec.page_size_bytes == spec.unpadded_page_size_bytes + more
    builder = cuda.SparseBuilder(spec, [*own.compilation_config.static_forward_context], own, torch.device(DEVICE))
    requests, decoded, method = Requests([37, 16, 50, 33], 4, block), 0, read_method(decode)
    if "Hash" in decode: method = method.at_layer(1)
    for lengths, fill in PLAN:
        if 3 in lengths and not requests.done[3]: requests.done[3] = 32
        places = run_step(own, builder, caches, requests, lengths, fill, method)
        decoded += sum(place >= requests.prompts[request] for request, place in places)
    rows = cuda.SparseWorker(own, {}).sparse_nb_stats()
    assert [(x["layer"], x["head"], x["queries"]) for x in rows] == [(1, h, decoded) for h in range(H)]
    assert {(x["prompt_tokens"], x["dense_tokens"]) for x in rows} == {(0, 0)}
    assert cuda.SparseWorker(own, {}).compile_or_warm_up_model() == "times"
    assert cuda.SparseWorker(own, {}).sparse_nb_stats() == []  # what warming up has counted is forgotten


# methods of layers, and below how many keys each decodes exactly; a request of PLAN reaches 39
CROSSED = [({1: CASES[6][0], 2: CASES[6][0].replace("0.2", "0.3"), 3: "Santa(samples=16)", 4: CASES[1][0]},
            {1: 39, 2: 52, 3: 18, 4: 39}),
           ({1: "Quest(budget=0.3)", 2: "Quest(budget=0.3)"}, {1: 39, 2: 39}),
           ({1: "SketchWalk(block=8, density=0.3)", 2: "TopK(budget=0.3)"}, {1: 39, 2: 52})]


@kernel
@pytest.mark.parametrize("lines, crossovers", fast(CROSSED, 0), ids=str)
def test_queries_below_the_crossover_read_all_keys(served, monkeypatch, lines, crossovers):
    "Each by itself, beside others in its step; layers that differ in it, clusters made on the way, statistics."
    monkeypatch.setitem(globals(), "LAYERS", len(lines) + 1)
    if "Walk" in lines[1]: monkeypatch.setitem(globals(), "D", 40)
    methods, same = {i: read_method(x) for i, x in lines.items()}, len({*crossovers.values()}) == 1
    monkeypatch.setattr(plan, "crossover_keys", lambda m: next(crossovers[i] for i, x in methods.items() if x == m))
    cuda, own = served({str(i): x for i, x in lines.items()}, crossover=39 if same else "auto")
    spec, caches = caches_of(cuda, own, "NHD", 16)
    builder = cuda.SparseBuilder(spec, [*own.compilation_config.static_forward_context], own, torch.device(DEVICE))
    assert {*builder.bounds} == {*crossovers.values()}
    requests, decoded, short = Requests([37, 16, 50, 33], 4, 16), [], []
    requests.crossover = crossovers
    for lengths, fill in PLAN:
        if 3 in lengths and not requests.done[3]: requests.done[3] = 32
        places = run_step(own, builder, caches, requests, lengths, fill, methods)
        new = [(i, place + 1) for i, place in places if place >= requests.prompts[i]]
        decoded, short = decoded + new, short + [(builder.short, all(n < builder.least for _, n in new))]
    assert {n - 39 for _, n in decoded} >= {-1, 0, 1}
    assert {*short} == {(True, True), (False, False)}  # steps of vLLM's own attention alone, and others
    rows = {(x["layer"], x["head"]): x for x in cuda.SparseWorker(own, {}).sparse_nb_stats()}
    assert {*rows} == {(i, h) for i in lines for h in range(H)}
    for (i, _), row in rows.items():
        def scored(request, n):
            if n < crossovers[i]: return n
            made = max(requests.prompts[request] + 1, crossovers[i])
            return reads(methods[i], n, max(made - 8, 2) - 2 if "Saap" in lines[i] else 0)["keys_scored"]
        assert row["queries"] == len(decoded)
        assert row["keys_scored"] == pytest.approx(sum(scored(*x) for x in decoded) / len(decoded))
    slots = [[-1, 0, -1, 0, 39, 51], [-1, 0, -1, 0, -1, 52]] # keys when lists were made
    assert [x.keys for _, x in builder.lists] == (slots if "Saap" in lines[1] else [])


def test_another_crossover_in_a_running_engine(served):
    "A layer that gets other settings is asked anew when its builder is reset."
    cuda, own = served("Quest(budget=0.3)", crossover=20)
    layers = own.compilation_config.static_forward_context
    builder = cuda.SparseBuilder(fake_vllm.Spec(16, G, D, BF16), [*layers], own, "cpu")
    assert [*builder.bounds] == [20]
    for crossover, want in ((30, 30), (None, 0), (10**12, 10**12)):
        given = dict(decode="Quest(budget=0.3)", dense_layers=[0], crossover=crossover)
        for x in layers.values(): x.impl.serving, x.impl.number = read_serving(given, LAYERS, "cuda"), None
        builder.reset_layers()
        assert [*builder.bounds] == [want]
        builder.build(0, Requests([9, 9], 1, 16).step({0: 1, 1: 1}, 0)[1])


def test_a_query_with_as_many_keys_as_the_crossover_is_the_methods():
    for crossover, few in ((0, [1, 7, 8]), (1, [1, 7, 8]), (8, [1, 1, 8]), (9, [1, 1, 1]), (10**12, [1, 1, 1])):
        bounds = Bounds(5, "cpu", crossover=crossover)
        bounds.fill(torch.tensor([1, 7, 8, 9], dtype=torch.int32), torch.tensor([False] * 3 + [True]))
        assert bounds.few.tolist() == [*few, 1, 0] and bounds.ends.tolist() == [1, 7, 8, 9, 0]
        whole = [n if n < crossover else 0 for n in (1, 7, 8)]
        assert bounds.whole.tolist() == [*whole, 9, 0]  # the last reads a prompt


# the second step has a decoded query, a whole prompt, the rest of one whose beginning is shared, and a whole prompt
PROMPTS = ({1: 16}, 0), ({1: 1, 0: 12, 4: 13, 3: 50}, 0), ({0: 1, 1: 1, 3: 1, 4: 1}, 2), ({0: 1, 3: 1, 2: 40}, 0)
READ = [("Quest(budget=0.3)", "Delta(window=8, gamma=8, tail=8)"),
        (None, "SketchWalk(block=32, tail=8, dense_layers=0)")]


@kernel
@pytest.mark.parametrize("decode, prefill", READ, ids=str)
def test_whole_prompts(served, decode, prefill):
    cuda, own = served(decode, prefill=prefill)
    spec, caches = caches_of(cuda, own, "NHD", 16)
    builder = cuda.SparseBuilder(spec, [*own.compilation_config.static_forward_context], own, torch.device(DEVICE))
    requests, method = Requests([12, 16, 40, 50, 45], 4, 16), decode and read_method(decode)
    requests.whole = 0, 1, 2, 3
    for lengths, fill in PROMPTS:
        if 4 in lengths and not requests.done[4]: requests.done[4] = 32
        run_step(own, builder, caches, requests, lengths, fill, method, read_method(prefill))
    rows, decoded = cuda.SparseWorker(own, {}).sparse_nb_stats(), 7 if decode else 0
    assert [(x["layer"], x["head"], x["queries"]) for x in rows] == [(1, h, decoded) for h in range(H)]
    assert {(x["prompt_tokens"], x["dense_tokens"]) for x in rows} == {(12 + 16 + 50 + 40, 13)}
    cuda.SparseWorker(own, {}).compile_or_warm_up_model()
    assert cuda.SparseWorker(own, {}).sparse_nb_stats() == []


def test_the_longest_step_is_read_as_one_prompt_where_vllm_looks_how_much_memory_it_needs(served):
    _, own = served(None, prefill="Delta(window=8, gamma=8, tail=8)")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(60, heads, D, generator=generator).to(BF16).to(DEVICE) for heads in (H, G, G))
    whole = read_method("Delta(window=8, gamma=8, tail=8)").prefill(*(x.transpose(0, 1)[None] for x in (q, k, v)))
    for layer, want in zip(own.compilation_config.static_forward_context.values(), (q * 0, whole[0].transpose(0, 1))):
        assert torch.equal(layer.impl.forward(layer, q, k, v, None, None, torch.empty_like(q)), want)


def test_without_settings_the_classes_are_vllms_own(served):
    cuda, own = served(None)
    assert type(own.compilation_config.static_forward_context["model.layers.1.self_attn.attn"].impl) \
        is fake_vllm.FlashAttentionImpl
    builder = cuda.SparseBuilder(None, [], own, "cpu")
    assert not hasattr(builder.build(0, Requests([9, 9], 1, 16).step({0: 5}, 0)[1]), "step")
    support = fake_vllm.AttentionCGSupport
    assert cuda.SparseBuilder.get_cudagraph_support(own, None) == support.ALWAYS
    asked = served("topk")[1]
    assert cuda.SparseBuilder.get_cudagraph_support(asked, None) == support.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.mark.parametrize("layer, said", [
    (dict(alibi_slopes=[1.0]), "ALiBi"), (dict(logits_soft_cap=30.0), "soft-capped scores"),
    (dict(sinks=torch.zeros(H)), "sinks"), (dict(kv_sharing_target_layer_name="x"), "keys of another layer")])
def test_layers_with_more_than_plain_attention_are_refused(served, layer, said):
    with pytest.raises(ValueError, match=f"sparse_nb: model must have plain attention .*, got a layer with {said}$"):
        served("quest", **layer)
    assert not served("quest", sliding_window=8, **layer)[1].compilation_config.static_forward_context[
        "model.layers.1.self_attn.attn"].impl.served


@kernel
@pytest.mark.parametrize("decode, keys, said", [
    ("SketchWalk(dense_layers=0)", 96, "q must have a head size above 32 for .* index='fine4', got 16"),
    ("SketchWalk(block=16, index='mean', dense_layers=0)", 2**20, "k must have at most 32768 blocks .*, got 65536")])
def test_sizes_without_kernels_are_refused_before_a_request_comes(served, decode, keys, said):
    cuda, own = served(decode)
    own.model_config.max_model_len = keys
    with pytest.raises(ValueError, match=said):
        cuda.SparseBuilder(None, [*own.compilation_config.static_forward_context], own, torch.device(DEVICE))


def test_a_decoding_request_behind_a_prompt_is_no_order_of_vllms(served):
    cuda, own = served("topk")
    builder = cuda.SparseBuilder(fake_vllm.Spec(16, G, D, BF16), [], own, "cpu")
    _, common = Requests([9, 9], 1, 16).step({0: 5, 1: 1}, 0)
    common.is_prefilling[:] = False
    common.query_start_loc_cpu = torch.tensor([0, 5, 6], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="must get requests that decode first"): builder.build(0, common)


# lists of requests

@kernel
@pytest.mark.parametrize("halves, prompt", [(True, 20), (False, 45)])
def test_lists_of_a_request(halves, prompt):
    "Of keys before their rotary embedding, for three layers at once or one after the other, in a slot of its own."
    method, generator = Saap(budget=0.2, clusters=5, sinks=2, window=8), torch.Generator().manual_seed(prompt)
    found = lists.Lists(method, 3, lists.Sizes(4, 64, G, D, torch.float32), DEVICE, part=1)
    angles = torch.arange(64)[:, None] / torch.tensor([1.0, 3.0, 10.0, 40.0])
    cos, sin = angles.cos()[:prompt], angles.sin()[:prompt]
    rotary = SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], 1), rotary_dim=8,
                             is_neox_style=halves)
    k, v = torch.randn(2, 3, G, prompt, D, generator=generator)
    split, at = ((2, 4), 3) if halves else ((4, 2), 4)
    x, y = k[..., :8].unflatten(3, split).unbind(at)
    turned = torch.cat([torch.stack([x * cos - y * sin, y * cos + x * sin], at).flatten(3), k[..., 8:]], 3)
    blocks, caches = torch.tensor([[6, 1, 4, 0]], dtype=torch.int32, device=DEVICE), []
    for layer in range(3):
        cache = torch.full((7, G, 16, 2 * D), torch.nan, device=DEVICE)
        for i in range(prompt):
            cache[blocks[0, i // 16], :, i % 16] = torch.cat([turned, v], 3)[layer, :, i].to(DEVICE)
        caches.append(cache)
    slot = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    step = lambda n, reads: found.follow([2], slot, [n], [reads], blocks, caches, [rotary] * 3)
    step(prompt, True)
    assert not found.index.start.any()
    step(prompt + 1, False)
    state = method.new_state()
    state.part = 1, 2
    state.append(turned, v, k_pre_rope=k, shown=None)
    state.append(turned[:, :, :1], v[:, :, :1], k_pre_rope=k[:, :, :1])  # the query's own key, whatever it is
    bounds = [torch.tensor([x]).expand(3) for x in (2, prompt - 7, prompt + 1)]
    state.place(*bounds)
    want = saap_index.build_index(turned.to(DEVICE), v.to(DEVICE), state.rows[:, :, :prompt, 0].to(DEVICE),
                                  bounds[0].to(DEVICE), bounds[1].to(DEVICE), 5)
    for layer in range(3):
        index, slots = found.of(layer)
        assert slots[0] == 2 and (index.since[2], index.built[2]) == (2, prompt - 7)
        assert torch.equal(index.start[2], want.start[layer]) and not index.start[[0, 1, 3]].any()
        far = prompt - 9
        assert torch.equal(index.order[2, :, :far], want.order[layer, :, :far])
        for name in ("sums", "mean", "value", "log", "variance"):
            assert torch.allclose(getattr(index, name)[2], getattr(want, name)[layer], atol=1e-5), name
    assert found.far[2] == prompt - 9
    step(prompt, True)  # another request in this slot
    assert not found.index.start.any() and not found.index.built.any() and found.far[2] == 0


def test_lists_leave_the_cache_less_memory(served):
    cuda, own = served("Saap(budget=0.2, clusters=4)")
    layers = own.compilation_config.static_forward_context
    worker = cuda.SparseWorker(own, {x: fake_vllm.Spec(16, G, D, BF16) for x in layers})
    worker.free = 10**9
    need = lists.bytes_of(Saap(clusters=4), 1, lists.Sizes(6, 96, G, D, BF16))  # the first layer has no method
    assert worker.determine_available_memory() == 10**9 - need
    worker.free = need
    with pytest.raises(ValueError, match="sparse_nb: max_num_seqs or max_model_len must be lower, .*lists of 0.0 GiB"):
        worker.determine_available_memory()
    cuda, own = served("topk")
    worker = cuda.SparseWorker(own, {})
    assert worker.determine_available_memory() == 0


class Manager:
    "What a worker looks at of vLLM's graphs: they are named by what was captured last."
    def __init__(self): self.graphs = {}
    def capture(self, builder, sizes):
        for n in sizes: self.graphs[n] = f"{n} {'own' if builder.fixed else 'method'}"
    def run_fullgraph(self, n): return self.graphs[n]


class Runner:
    "What a worker looks at of vLLM's runner: a model with a rotary embedding, groups of layers, a state."
    def __init__(self, builder, layers, rotary):
        around = SimpleNamespace(children=lambda: layers, rotary_emb=rotary)
        self.model = SimpleNamespace(modules=lambda: [around])
        self.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda ubatch: builder)]]
        self.model_state = SimpleNamespace(prepare_attn=lambda batch, more: (batch, more))
        self.cudagraph_manager = Manager()


def test_builders_learn_slots_and_rotary_embeddings(served):
    cuda, own = served("Saap(clusters=4)")
    context = own.compilation_config.static_forward_context
    for name, x in context.items(): context[name] = Hashed(**vars(x), kv_cache=torch.zeros(3, G, 16, 2 * D))
    builder = cuda.SparseBuilder(fake_vllm.Spec(16, G, D, BF16), [*context], own, "cpu")
    step = lambda *lengths: builder.build(0, Requests([9, 9], 1, 16).step(dict(enumerate(lengths)), 0)[1])
    with pytest.raises(RuntimeError, match="must know the slots"): step(5)
    rotary = SimpleNamespace(cos_sin_cache=torch.ones(96, 8), rotary_dim=8, is_neox_style=True)
    runner, worker = Runner(builder, [*context.values()], rotary), cuda.SparseWorker(own, {})
    worker.initialize_from_config(runner)
    assert [*builder.rotaries.values()] == [rotary] * LAYERS
    batch = SimpleNamespace(idx_mapping_np=np.array([3]), idx_mapping=torch.tensor([3], dtype=torch.int32))
    assert runner.model_state.prepare_attn(batch, 5) == (batch, 5) and builder.batch[0] == [3]
    step(5)
    assert builder.lists[0][1].keys == [0, 0, 0, -1, 0, 0]
    with pytest.raises(RuntimeError, match="must know the slots of 2 requests, got 1"): step(5, 5)


def test_steps_below_the_crossover_are_graphs_of_vllms_own(served):
    "All their decoded queries are below it; without a crossover, or without a method, graphs are captured once."
    def graphs_of(**given):
        cuda, own = served(**given)
        context = own.compilation_config.static_forward_context
        builder, manager = cuda.SparseBuilder(fake_vllm.Spec(16, G, D, BF16), [*context], own, "cpu"), Manager()
        graphs = cuda.Graphs(manager, [builder])
        with pytest.raises(TypeError): manager.capture(builder, None)  # as without memory for graphs
        for _ in range(2): manager.capture(builder, [1, 2])  # as after other settings
        assert builder.fixed is None
        def replayed(*ends):
            requests = Requests([8, 8], 60, 16)
            requests.done = [n - 1 for n in ends]
            builder.build(0, requests.step({i: 1 for i in range(len(ends))}, 2 - len(ends))[1])
            return manager.run_fullgraph(len(ends))
        return graphs, replayed
    graphs, replayed = graphs_of(decode="topk", crossover=20)
    assert [*map(len, graphs.sets)] == [2, 2]
    assert [replayed(19), replayed(20), replayed(10, 19), replayed(10, 20), replayed(8)] == [
        "1 own", "1 method", "2 own", "2 method", "1 own"]  # the last reads the end of a prompt
    graphs, replayed = graphs_of(decode="topk")
    assert [*map(len, graphs.sets)] == [2, 0] and replayed(12) == replayed(60) == "1 method"
    graphs, replayed = graphs_of(decode=None, prefill="Delta(window=8, gamma=8)")
    assert [*map(len, graphs.sets)] == [2, 0] and replayed(12) == "1 method"


def test_prompts_may_stand_before_requests_that_only_fill_a_graph_up(served):
    "As with VLLM_USE_BREAKABLE_CUDAGRAPH=1, where steps that read prompts are filled up, too."
    cuda, own = served("topk")
    context = own.compilation_config.static_forward_context
    builder = cuda.SparseBuilder(fake_vllm.Spec(16, G, D, BF16), [*context], own, "cpu")
    requests = Requests([8, 9, 9, 12], 60, 16)
    requests.done[0] = 9
    step = builder.build(0, requests.step({0: 1, 1: 4, 2: 5, 3: 6}, 3)[1]).step
    assert step.count == 1 and step.rest.query_start_loc.tolist() == [0, 4, 9, 15, 15, 15, 15]


@pytest.mark.parametrize("sizes", [[], [1]], ids=["eager or in pieces", "graphs"])
def test_trial_steps_below_the_crossover_warm_the_methods_up(served, monkeypatch, sizes):
    "Their kernels are compiled then, not when the first request reaches the crossover."
    cuda, own = served("topk", crossover=50)
    context, found = own.compilation_config.static_forward_context, []
    for name, x in context.items(): context[name] = Hashed(**vars(x))
    builder = cuda.SparseBuilder(fake_vllm.Spec(16, G, D, BF16), [*context], own, "cpu")
    runner, worker = Runner(builder, [*context.values()], None), cuda.SparseWorker(own, {})
    def trial():
        requests = Requests([8, 8], 60, 16)
        requests.done = [9, 0]
        found.append(hasattr(builder.build(0, requests.step({0: 1}, 0)[1]), "step"))
        if sizes: found.append(runner.cudagraph_manager.run_fullgraph(1))
    def warm(worker):
        runner.cudagraph_manager.capture(builder, sizes)
        trial()
        return "times"
    monkeypatch.setattr(fake_vllm.Worker, "compile_or_warm_up_model", warm)
    worker.initialize_from_config(runner)
    assert worker.compile_or_warm_up_model() == "times"
    trial()
    assert found == ([True, "1 method", False, "1 own"] if sizes else [True, False])


@pytest.mark.parametrize("least", [0, 20])
def test_builders_agree_on_the_graphs_of_a_step(served, monkeypatch, least):
    "Layers of two groups have two crossovers: a graph with the methods finds all of its `Bounds` written."
    monkeypatch.setitem(globals(), "LAYERS", 3)
    monkeypatch.setattr(plan, "crossover_keys", lambda m: 50 if isinstance(m, Quest) else least)
    cuda, own = served({"1": "topk", "2": "Quest(budget=0.3)"}, crossover="auto")
    context, manager = own.compilation_config.static_forward_context, Manager()
    builders = [cuda.SparseBuilder(fake_vllm.Spec(16, G, D, BF16), names, own, "cpu")
                for names in zip(context)]
    cuda.Graphs(manager, builders)
    manager.capture(builders[0], [1])
    def replayed(n):
        requests = Requests([8, 8], 60, 16)
        requests.done = [n - 1, 0]
        common = requests.step({0: 1}, 0)[1]
        for x in builders: x.build(0, common)
        return manager.run_fullgraph(1), [int(b.ends[0]) for x in builders for b in x.bounds.values()]
    assert replayed(30) == ("1 method", [30, 30]) and replayed(55) == ("1 method", [55, 55])
    if least: assert replayed(19)[0] == "1 own"


def test_keys_before_a_rotary_embedding_that_is_not_known(served):
    cuda, own = served("Saap(clusters=4, before_rope=True)")
    context = own.compilation_config.static_forward_context
    for name, x in context.items(): context[name] = Hashed(**vars(x), kv_cache=torch.zeros(3, G, 16, 2 * D))
    builder = cuda.SparseBuilder(fake_vllm.Spec(16, G, D, BF16), [*context], own, "cpu")
    with pytest.raises(ValueError, match="sparse_nb: before_rope must be None or False for a model without a table"):
        cuda.SparseWorker(own, {}).initialize_from_config(Runner(builder, [*context.values()], None))


# the kernels of a step

@kernel
@pytest.mark.parametrize("dtype, layout, page", [(BF16, "NHD", 16), (torch.float32, "HND", 4)], ids=str)
def test_boxes_of_pages_that_get_keys(dtype, layout, page):
    "In steps of any length, for several requests at once; a NaN stays one, other pages are left alone."
    size, n, generator = 32, 90, torch.Generator().manual_seed(page)
    spec = fake_vllm.Spec(size, G, D, dtype)
    spec.page_size_padded = spec.unpadded_page_size_bytes * (page + 1) // page
    cache = spec.cache(9, layout, DEVICE, 5.0)
    boxes, k = box_view(cache, page), torch.randn(2, n, G, D, generator=generator).to(DEVICE, dtype)
    blocks = torch.tensor([[5, 0, 3], [7, 2, 8]])
    slots = (blocks[..., None] * size + torch.arange(size)).flatten(1)[:, :n].to(DEVICE)
    k[1, 37, 0, 3], done = torch.nan, 0
    for step in (33, 1, 1, 20, 35):
        at = slots[:, done:done + step].flatten()
        cache[at // size, :, at % size, :D] = k[:, done:done + step].flatten(0, 1)
        engine.write_boxes(cache[..., :D], boxes, torch.cat([at, at[:2] * 0 - 1]))
        done += step
        for i in range(2):
            rows = k[i, :done].transpose(0, 1)
            for page_, part in enumerate(rows.split(page, 1)):
                at = int(slots[i, page_ * page])
                got = boxes[at // size, :, at % size // page]
                want = page_box(part[None, :, None], part.new_ones(1, 1, 1, part.shape[1], 1).bool())[0, :, 0]
                assert torch.equal(got.nan_to_num(99), want.nan_to_num(99))
    assert (boxes[[1, 4, 6]] == 5).all()


@kernel
@pytest.mark.parametrize("dtype, layout, size, index", [
    (BF16, "NHD", 16, "fine4"), (torch.float16, "HND", 32, "fine16"), (BF16, "HND", 64, "mean")], ids=str)
def test_means_of_sub_blocks_that_new_keys_fill(dtype, layout, size, index):
    "In steps of any length, for several requests at once: those of the method, packed; others are left alone."
    method, n, wide, generator = SketchWalk(block=32, index=index), 90, 48, torch.Generator().manual_seed(size)
    spec = with_capacity(fake_vllm.Spec(size, G, wide, dtype), [Quest(page=16), method])
    cache, fine = spec.cache(14, layout, DEVICE, 5.0), mean_keys(method)
    k, sign = torch.randn(2, n, G, wide, generator=generator).to(DEVICE, dtype), signed_hadamard(wide, None)[:, 0]
    blocks, sign = torch.randperm(14, generator=generator)[:12].view(2, 6), sign.sign().float().to(DEVICE)
    slots = (blocks[..., None] * size + torch.arange(size)).flatten(1)[:, :n].to(DEVICE)
    views, done = mean_view(cache, method), 0
    before = [None if x is None else x.clone() for x in views]
    for step in (fine + 1, 1, 1, 20, 2 * fine - 1):
        at = slots[:, done:done + step].flatten()
        cache[at // size, :, at % size, :wide] = k[:, done:done + step].flatten(0, 1)
        engine.write_means(cache[..., :wide], views, sign, torch.cat([at, at[:2] * 0 - 1]))
        done = min(n, done + step)
        state = method.new_state()
        state.append(*[k[:, :done].transpose(1, 2)] * 2)
        want = sketch_walk.pack(index, state.rows, state.begin, sign)
        for got, old, whole in zip(views, before, want):
            if got is None: continue
            for i, j in ((i, j) for i in range(2) for j in range(done // fine)):
                at = int(slots[i, j * fine])
                old[at // size, :, at % size // fine] = whole.flatten(2, 3)[i, :, j]
            if got.dtype == torch.float32: assert_close(got, old, rtol=1e-6)
            else: assert torch.equal(got, old)


@pytest.mark.parametrize("line", ["SketchWalk(block=8, density=0.3)", "SketchWalk(block=64, density=1.0)",
                                  "SketchWalk(block=4, density=0.01)", "Quest(budget=0.1)", "TopK(budget=9)"])
def test_what_a_query_reads_follows_from_its_keys(line):
    method = read_method(line)
    for n in (1, 4, 8, 9, 16, 65, 200):
        q, k, v = torch.randn(1, 2, 1, 64), *torch.randn(2, 1, 1, n, 64)
        stats, found = method.decode(q, k, v, return_stats=True)[1], reads(method, n)
        for name in ("density", "keys_scored", "values_read"):
            assert getattr(stats, name)[0, 0, 0].item() == pytest.approx(found[name], rel=1e-6), (n, name)
        assert found["visible"] == n


@kernel
def test_streams_and_outputs():
    base, ends = torch.randint(2**62, (3, 5), device=DEVICE), torch.tensor([7, 2**17], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, 4, 5, dtype=torch.int64, device=DEVICE)
    engine.write_streams(base, ends, out)
    assert torch.equal(out[:, :2], fold_in(base[:, None], ends.long()[:, None] - 1)) and not out[:, 2:].any()
    x, y, to = torch.rand(3, 2, 1, 8), torch.rand(3, 2, 1, 8), torch.zeros(3, 4, 8, device=DEVICE)[:, ::2]
    y[0], x[2] = torch.nan, torch.nan
    engine.put(x.to(DEVICE), to, y.to(DEVICE), torch.tensor([0, 4, 1], device=DEVICE))
    assert torch.equal(to.cpu(), torch.stack([x[0], y[1], y[2]])[:, :, 0])


if not INTERPRETED:
    @pytest.mark.kernels
    @pytest.mark.budget(60)
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU: pytest -m gpu")
    def test_in_the_interpreter(forked_pytest):
        code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, TRITON_INTERPRET="1")
        print(said)
        assert not code and re.search(r"\d\d passed", said), said[-4000:]
