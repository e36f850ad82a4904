"A method's state inside transformers' caches, and keys from before rotary embedding, on small random models of many families and of every rope_type"
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import test_hf
from sparse_nb.attention import State, TopK, assert_close
from sparse_nb.cache import Rotation, _candidates, _complex, _random_turn, _stored, keep_state, no_rotation, offload, rotation_of, unrotate
from sparse_nb.hf import answer, capture, prefill, sparsify
from test_hf import IDS, SMALL, Letters, rope, whole_layers

MLA = dict(num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=9)
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA4 = dict(head_dim=16, intermediate_size_mlp=64, num_local_experts=2, num_hidden_layers=4)
TWO, FOUR = dict(layer_types=["sliding_attention", "full_attention"]), dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2)
GEMMA4 = dict(head_dim=16, global_head_dim=32, sliding_window=16, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8)
GEMMA3N = FOUR | dict(head_dim=16, sliding_window=16, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, laurel_rank=4, intermediate_size=[64] * 4, activation_sparsity_pattern=[0.0] * 4)

def longrope(width, **kwargs):
    return dict(original_max_position_embeddings=16) | rope(rope_type="longrope", original_max_position_embeddings=16, short_factor=[1.0] * width, long_factor=[1.0 + i for i in range(width)], **kwargs)

FAMILIES = test_hf.FAMILIES | {
    "linear": ("Llama", rope(rope_type="linear", factor=4.0)),
    "dynamic": ("Llama", rope(rope_type="dynamic", factor=4.0) | dict(max_position_embeddings=16)),
    "longrope": ("Phi3", longrope(8)),
    "longrope, partial": ("Phi3", longrope(4, partial_rotary_factor=0.5)),
    "gemma3, two ropes": ("Gemma3Text", TWO | dict(head_dim=16, sliding_window=16)),
    "gemma4, proportional": ("Gemma4Text", GEMMA4 | TWO),
    "gemma4, shared keys": ("Gemma4Text", GEMMA4 | FOUR),
    "gemma3n, shared keys": ("Gemma3nText", GEMMA3N),
    "ministral3": ("Ministral3", dict(head_dim=16)),
    "stablelm, partial": ("StableLm", rope(partial_rotary_factor=0.25)),
    "ernie": ("Ernie4_5", dict(head_dim=16)),
    "llama4, complex, norm after": ("Llama4Text", LLAMA4),
    "llama4, yarn": ("Llama4Text", LLAMA4 | YARN | dict(use_qk_norm=False)),
    "olmo2": ("Olmo2", {}),
    "nanochat, backwards": ("NanoChat", {}),
    "head of two columns": ("Llama", dict(head_dim=2)),
}
HALVES, NEIGHBOURS, NONE = Rotation("halves", 0, 16), Rotation("neighbours", 0, 16), Rotation("none")
COHERE, PARTS = Rotation("neighbours", 0, 16, step=2), [HALVES, Rotation("halves", 0, 32)]
ROTATIONS = {  # of all layers, or of each; halves unless said
    "longrope, partial": Rotation("halves", 0, 8), "phi, partial": Rotation("halves", 0, 8), "gpt-neox, partial, fused": Rotation("halves", 0, 4), "stablelm, partial": Rotation("halves", 0, 4),
    "gemma4, proportional": PARTS, "gemma4, shared keys": [*PARTS, None, None], "gemma3n, shared keys": [HALVES, HALVES, None, None],
    "cohere, interleaved": COHERE, "cohere2, layers without rope": [COHERE] * 3 + [NONE], "smollm3, layers without rope": [HALVES] * 3 + [NONE],
    "glm, partial, interleaved": Rotation("neighbours", 0, 8), "ernie": NEIGHBOURS, "llama4, complex, norm after": [NEIGHBOURS] * 3 + [NONE], "llama4, yarn": [NEIGHBOURS] * 3 + [NONE],
    "nanochat, backwards": Rotation("halves", 0, 16, sign=-1), "head of two columns": Rotation("halves", 0, 2),
}
REFUSED = {
    "deepseek-v3": ("DeepseekV3", MLA, r"layer 0 of deepseek_v3 \(rope_type default\) rotates what it keeps as values"),
    "deepseek-v2": ("DeepseekV2", MLA, r"layer 0 of deepseek_v2 \(rope_type default\) rotates what it keeps as values"),
    "hunyuan": ("HunYuanDenseV1", dict(head_dim=16), r"layer 0 of hunyuan_v1_dense \(rope_type default\) rotates its keys in another way"),
    "llama4, yarn, norm after": ("Llama4Text", LLAMA4 | YARN, r"layer 0 of llama4_text \(rope_type yarn\) rotates its keys in another way"),
    "gptj": ("GPTJ", dict(rotary_dim=8, n_embd=64, n_head=4, n_layer=2), "layer 0 of gptj .* is not given its rotation"),
    "gpt2": ("GPT2", dict(n_embd=64, n_head=4, n_layer=2), "layer 0 of gpt2 .* is not given its rotation"),
}
GROWING = ["dynamic", "longrope", "longrope, partial"]

def build(family, dtype=torch.float32):
    "A random model whose norms and biases are random, too"
    torch.manual_seed(0)
    name, given = (FAMILIES | REFUSED)[family][:2]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name + "Config")(**({} if name in ("GPTJ", "GPT2") else SMALL) | given)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1: p.add_(0.2 * torch.randn(p.shape))
    return model.to(dtype)

def expected(family, model):
    want = ROTATIONS.get(family, HALVES)
    return want if isinstance(want, list) else [want] * model.config.num_hidden_layers

def hook(model, fn):
    "Call `fn(module, kwargs)` with all arguments by name before each attention layer"
    def call(module, args, kwargs): fn(module, kwargs if "hidden_states" in kwargs else kwargs | dict(hidden_states=args[0]))
    return [m.register_forward_pre_hook(call, with_kwargs=True) for m in model.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__]

def plain_keys(module, kwargs): return _stored(module, kwargs | dict(position_embeddings=no_rotation(kwargs["position_embeddings"])))[0]

class Spy(DynamicCache):
    "A cache that notes the keys of each update"
    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.got[layer_idx] = key_states.clone()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

@torch.no_grad()
def run(model, steps):
    "Rotation of each layer; for each step and layer the angles, the keys stored, and those of a pass without rotation"
    rotations, log, cache = {}, [], Spy(config=model.config)
    def ask(module, kwargs):
        layer, given = module.layer_idx, kwargs["position_embeddings"]
        if layer not in rotations: rotations[layer] = rotation_of(module, (), kwargs)
        if rotations[layer] is not None: log[-1][layer] = [given, plain_keys(module, kwargs)]
    hook(model, ask)
    for ids in steps:
        log.append({})
        cache.got = {}
        model(ids, past_key_values=cache)
        for layer, entry in log[-1].items(): entry.insert(1, cache.got[layer])
    return [rotations[i] for i in sorted(rotations)], log

def close(got, want, rtol=1e-5):
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got.float() - want.float()).abs().max() <= rtol * want.float().abs().max()

@pytest.fixture(params=FAMILIES)
def family(request): return request.param

def test_keys_before_rope_come_back_at_every_step(family):
    model, ids = build(family), torch.cat((IDS, IDS), 1)
    want = expected(family, model)
    rotations, log = run(model, [ids[:, :1], ids[:, 1:40], ids[:, 40:41], ids[:, 41:60]])
    assert rotations == want
    for step in log:
        for layer, (given, after, before) in step.items(): close(unrotate(after, given, want[layer]), before)
    for layer, (given, after, before) in log[1].items(): assert torch.equal(after, before) == (want[layer] == NONE)
    close(torch.cat([unrotate(step[0][1], step[0][0], want[0]) for step in log], 2), capture(build(family), ids[:, :60], before_rope=True)[0].k_before)

def test_only_one_rotation_fits_and_no_other_comes_near(family):
    model, tried = build(family), []
    def try_all(module, kwargs):
        given, right = kwargs["position_embeddings"], expected(family, model)[module.layer_idx]
        if right in (None, NONE): return
        generator, plain = torch.Generator().manual_seed(3), plain_keys(module, kwargs)
        for step in (1, 2):
            turn = _random_turn(given, step, generator)
            k = _stored(module, kwargs | dict(position_embeddings=turn))[0]
            for x in _candidates(_complex(given).shape[-1], k.shape[-1], step):
                error = (unrotate(k, turn, x) - plain).norm() / (k - plain).norm()
                assert error < 1e-6 if x == right else error > 0.3
                tried.append(x == right)
    hook(model, try_all)
    with torch.no_grad(): model(IDS)
    assert True in tried and False in tried

def test_half_precision_finds_the_same(family):
    model = build(family, torch.bfloat16)
    rotations, [log] = run(model, [IDS])
    assert rotations == expected(family, model)
    for layer, (given, after, before) in log.items(): close(unrotate(after, given, rotations[layer]), before, 0.03)

def test_asking_leaves_no_trace(family):
    model, asked = build(family), []
    with torch.no_grad(): want = model(IDS).logits
    state = torch.get_rng_state()
    hook(model, lambda module, kwargs: asked.append(rotation_of(module, (), kwargs)))
    with torch.no_grad(): assert torch.equal(model(IDS).logits, want)
    assert torch.equal(torch.get_rng_state(), state) and len(asked) == model.config.num_hidden_layers

@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_inverted_is_refused(family):
    model = build(family)
    hook(model, lambda module, kwargs: rotation_of(module, (), kwargs))
    with pytest.raises(ValueError, match=REFUSED[family][2]): model(IDS)

def test_every_rope_type_of_transformers_is_covered():
    def types(ropes):
        if "rope_type" in ropes: yield ropes["rope_type"]
        for x in ropes.values():
            if isinstance(x, dict): yield from types(x)
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} <= {t for f in FAMILIES for t in types(build(f).config.rope_parameters)}

def test_the_scaled_and_growing_rotations_are_what_they_say():
    scaled, growing = [], []
    for family in FAMILIES:
        model, given = build(family), []
        hook(model, lambda module, kwargs: module.layer_idx or given.append(_complex(kwargs["position_embeddings"])))
        with torch.no_grad(): model(IDS[:, :5]), model(IDS)
        if abs(given[1].abs().mean() - 1) > 1e-3: scaled.append(family)
        if not torch.allclose(given[0][0, 1], given[1][0, 1]): growing.append(family)
    assert scaled == ["yarn", "gpt-oss, sinks", "longrope", "longrope, partial", "llama4, yarn"] and growing == GROWING

def test_angles_in_an_unknown_form_are_refused():
    model, cos = build("llama"), torch.ones(1, 3, 16)
    for given in (dict(main=(cos, cos)), cos, (cos, cos, cos), (cos[None], cos[None])):
        with pytest.raises(ValueError, match="layer 1 of llama .* in an unknown form"):
            rotation_of(model.model.layers[1].self_attn, (), dict(hidden_states=torch.zeros(1, 3, 64), position_embeddings=given))

@pytest.mark.parametrize("family, rotation", [("deepseek-v3", Rotation("halves", 16, 8)), ("deepseek-v2", Rotation("neighbours", 16, 8))])
def test_the_expanded_keys_of_latent_attention_could_be_inverted_after_the_cache(family, rotation):
    model, given = build(family), {}
    hook(model, lambda module, kwargs: given.update({module.layer_idx: kwargs["position_embeddings"]}))
    for c in capture(model, IDS, before_rope=True): close(unrotate(c.k, given[c.layer], rotation), c.k_before)

class Before(State):
    "The keys themselves, from before their rotation; notes the calls that change their order or number"
    before_rope = True
    def __init__(self):
        super().__init__()
        self.calls = set()
    def features(self, k, v): return k
    def pick_rows(self, rows):
        if rows.tolist() != list(range(len(self.rows))): self.calls.add("select")
        super().pick_rows(rows)
    def crop(self, length):
        if length < len(self): self.calls.add("crop")
        super().crop(length)

class Rows(State):
    "Keys and values"
    def features(self, k, v): return torch.cat([k, v], -1)

class KeepsRows(TopK):
    def new_state(self): return Rows()
    def decode(self, q, k, v, *, state=None, **kwargs): return super().decode(q, k, v, **kwargs)

class KeepsBefore(KeepsRows):
    def new_state(self): return Before()
    def decode(self, q, k, v, *, state=None, **kwargs):
        assert state.rows.shape[:2] == k.shape[:2] and 0 < len(state) <= k.shape[2]
        return super().decode(q, k, v, **kwargs)

ALL, ROWS = KeepsBefore(budget=1.0), KeepsRows(budget=0.5)  # with all keys a later layer gets what it gets from the model itself
E2E = ["llama", "yarn", "qwen3, key norm", "cohere, interleaved", "cohere2, layers without rope", "glm, partial, interleaved", "smollm3, layers without rope", "phi3, fused", "gpt-neox, partial, fused"]
GREEDY = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None, suppress_tokens=[0], return_dict_in_generate=True)
PAD = torch.tensor([0, 9])
PADDED = torch.stack([IDS[0], torch.cat([IDS.new_zeros(9), IDS[0, :31]])])
TWICE = IDS[:, :20].repeat(1, 2)  # a guess for every next token
WAYS = {
    "greedy": (IDS, {}, set()),
    "padded": (PADDED, dict(attention_mask=(torch.arange(40) >= PAD[:, None]).long()), set()),
    "chunks": (IDS, dict(prefill_chunk_size=16), set()),
    "static": (IDS, dict(cache_implementation="static"), set()),
    "padded, static": (PADDED, dict(attention_mask=(torch.arange(40) >= PAD[:, None]).long(), cache_implementation="static"), set()),
    "lookup": (TWICE, dict(prompt_lookup_num_tokens=3), {"crop"}),
    "beams": (IDS, dict(num_beams=5), {"select"}),
}

def session(model, method=ALL): return sparsify(model, decode=dict.fromkeys(whole_layers(model), method))

def generate(model, ids, **kwargs): return model.generate(ids, **GREEDY | dict(attention_mask=torch.ones_like(ids)) | kwargs)

def check(model, cache, ids, pad=None, calls=None):
    "The states hold the keys before rope of `ids`, in every layer without a window"
    for b, row in enumerate(ids):
        first, found = 0 if pad is None else int(pad[b]), []
        for c in capture(model, row[first:], before_rope=True):
            if (state := getattr(cache.layers[c.layer], "state", None)) is None: continue
            assert state.rows.shape[:1] == ids.shape[:1]
            assert_close(state.rows[[b], :, first:], c.k_before, rtol=1e-4)
            assert torch.equal(c.k, c.k_before) or (c.k - c.k_before).norm() > 0.05 * c.k.norm()
            assert calls is None or state.calls == calls
            found.append(c.layer)
        assert found == whole_layers(model) != []

@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", E2E)
def test_generation_keeps_the_keys_before_rope(family, way):
    model, (ids, kwargs, calls) = build(family), WAYS[way]
    with session(model): out = generate(model, ids, **kwargs)
    cache, told = out.past_key_values, out.sequences[:, :int(out.past_key_values.get_seq_length(whole_layers(model)[0]))]
    if way == "beams":  # what was written in each row of the cache: the values of the first layer tell the token
        table = capture(model, torch.arange(64)[None])[0].v.transpose(1, 2).flatten(2)
        values = cache.layers[0].values[:, :, -5:].transpose(1, 2).flatten(2)
        told = torch.cat([ids.expand(5, -1), torch.cdist(values, table).argmin(-1)], 1)
        assert len({tuple(x) for x in told.tolist()}) > 1
    assert told.shape[1] >= 43
    check(model, cache, told, PAD if way.startswith("padded") else None, calls)

@pytest.mark.parametrize("family", E2E)
def test_a_second_turn_goes_on_with_the_keys_before_rope(family):
    model = build(family)
    cache = DynamicCache(config=model.config)
    with session(model):
        first = generate(model, IDS[:, :20], past_key_values=cache).sequences
        assert len(cache.layers[whole_layers(model)[0]].state) == 25
    with session(model): second = generate(model, torch.cat([first, IDS[:, 20:]], 1), past_key_values=cache).sequences
    check(model, cache, second[:, :-1])

def test_a_rotation_given_without_its_name():
    model = build("llama")
    for layer in model.model.layers: layer.self_attn.register_forward_pre_hook(lambda m, args, kwargs: ((kwargs.pop("hidden_states"), kwargs.pop("position_embeddings")), kwargs), with_kwargs=True)
    with session(model): out = generate(model, IDS)
    check(build("llama"), out.past_key_values, out.sequences[:, :-1])

def test_an_answer_goes_on_with_a_context_read_in_a_session():
    model = build("llama")
    with session(model): cache = prefill(model, IDS[:, :30], chunk=7)
    got = answer(model, cache, IDS[:, 30:], ALL, tokenizer=Letters(), max_new_tokens=4)
    assert got.ids == generate(model, IDS, max_new_tokens=4).sequences[0, 40:].tolist()
    check(model, cache, IDS[:, :30])
    with pytest.raises(ValueError, match="cache: layer 0 holds 30 keys that were rotated before"): answer(model, prefill(model, IDS[:, :30]), IDS[:, 30:], ALL, tokenizer=Letters())

def forwards(model):
    "Beyond the original length in the second of four steps"
    cache, ids = DynamicCache(config=model.config), torch.cat((IDS, IDS), 1)
    with torch.no_grad():
        for part in ids[:, :60].split([5, 35, 1, 19], 1): model(part, past_key_values=cache)
    return cache

@pytest.mark.parametrize("way", [forwards, lambda model: generate(model, IDS[:, :10], max_new_tokens=20).past_key_values], ids=["forwards", "generate"])
@pytest.mark.parametrize("family", GROWING)
def test_angles_that_change_as_the_sequence_grows(family, way):
    model, log, given = build(family), {}, {}
    def note(module, kwargs):
        if kwargs["past_key_values"].get_seq_length(module.layer_idx) == 0: log[module.layer_idx], given[module.layer_idx] = [], []  # Phi-3 reads all anew when it changes to the long angles
        log[module.layer_idx].append(plain_keys(module, kwargs))
        given[module.layer_idx].append(kwargs["position_embeddings"])
    with session(model):
        hook(model, note)
        cache = way(model)
    assert len(cache.layers) == len(log) == 2
    for i, layer in enumerate(cache.layers):
        assert len(log[i]) > 3 and len(layer.state) == layer.get_seq_length() > 28
        assert_close(layer.state.rows, torch.cat(log[i], 2), rtol=1e-4)
    if family == "dynamic" or way is forwards:  # the last angles would not do for all keys
        n = layer.get_seq_length()
        last = model.model.rotary_emb(torch.zeros(1), torch.arange(n)[None])
        assert (unrotate(layer.keys, last, ROTATIONS.get(family, HALVES)) - layer.state.rows).norm() > 1e-2 * layer.state.rows.norm()

CONFIG = transformers.LlamaConfig(**SMALL)
CACHES = {"dynamic": (lambda: DynamicCache(config=CONFIG), ["update", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "reset"], 99),
          "host": (lambda: DynamicCache(config=CONFIG), ["update", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "reset"], 99),
          "static": (lambda: StaticCache(config=CONFIG, max_cache_len=12), ["update", "reorder_cache", "reset"], 12)}

def pair(n, rows=2, seed=0): return torch.randn(2, rows, 2, n, 4, generator=torch.Generator().manual_seed(seed)).unbind(0)

class Other(DynamicLayer): "A kind of layer that is not known here"

def filled(n=5, cache=None):
    cache = DynamicCache() if cache is None else cache
    cache.update(*pair(n), 0)
    return cache

def change(cache, op, x, room):
    "One of the things that may happen to a cache; x decides the details"
    layer, length = cache.layers[0], int(cache.get_seq_length())
    rows, n = 2 if layer.keys is None else len(layer.keys), 1 + x % 3
    pick = torch.randint(rows, (rows,), generator=torch.Generator().manual_seed(x))
    if op == "update" and length + n <= room: cache.update(*pair(n, rows, x), 0)
    if op == "reorder_cache": cache.reorder_cache(pick)
    if op == "crop": cache.crop(-(x % (length + 2)))
    if op == "batch_repeat_interleave" and rows * n <= 8: cache.batch_repeat_interleave(n)
    if op == "batch_select_indices": cache.batch_select_indices(pick[:n])
    if op == "reset": cache.reset()

def check_changes(kind, before, after):
    make, _, room = CACHES[kind]
    kept, plain = make(), make()
    for op in [*before, None, *after]:
        if op is None:
            layer = keep_state(kept, 0, ROWS)
            if kind == "host": layer = offload(kept, 0)
        else:
            for cache in (kept, plain): change(cache, *op, room)
        if not hasattr(kept.layers[0], "state"): continue
        length, want = int(plain.get_seq_length()), plain.layers[0]
        assert kept.layers[0] is layer is keep_state(kept, 0, ROWS) and len(layer.state) == int(layer.get_seq_length()) == length
        if not length: continue
        assert torch.equal(layer.keys, want.keys) and torch.equal(layer.values, want.values)
        assert torch.equal(layer.state.rows, torch.cat([want.keys, want.values], -1)[:, :, :length])

def changes(kind): return st.lists(st.tuples(st.sampled_from(CACHES[kind][1]), st.integers(0, 99)), max_size=12)

@settings(max_examples=100, deadline=None, derandomize=True)
@given(changes("dynamic"), changes("dynamic"))
def test_a_state_follows_a_dynamic_layer(before, after): check_changes("dynamic", before, after)

@settings(max_examples=100, deadline=None, derandomize=True)
@given(changes("host"), changes("host"))
def test_a_state_follows_a_layer_in_host_memory(before, after): check_changes("host", before, after)

@settings(max_examples=60, deadline=None, derandomize=True)
@given(changes("static"), changes("static"))
def test_a_state_follows_a_static_layer(before, after): check_changes("static", before, after)

@pytest.mark.parametrize("kind", ["dynamic", "host"])
@pytest.mark.parametrize("op", CACHES["dynamic"][1])
@pytest.mark.parametrize("emptied", [[], [("update", 4), ("reset", 0)], [("update", 4), ("crop", 2)]], ids=["new", "reset", "cropped"])
def test_an_empty_layer_may_be_changed(emptied, op, kind): check_changes(kind, [], [*emptied, (op, 1), ("update", 3), ("reorder_cache", 4)])

@pytest.mark.parametrize("place", [lambda cache: None, lambda cache: offload(cache, 0)], ids=["device", "host"])
@pytest.mark.parametrize("indices", [[1, 0], [-1], torch.tensor([1, 1]), torch.tensor([1], dtype=torch.int32), torch.tensor([False, True])], ids=str)
def test_sequences_may_be_named_in_every_way_that_indexes_a_tensor(indices, place):
    keep_state(cache := filled(), 0, ROWS)
    place(cache)
    layer = cache.layers[0]
    cache.batch_select_indices(indices)
    assert torch.equal(layer.state.rows, torch.cat([layer.keys, layer.values], -1)) and torch.equal(layer.keys, pair(5)[0][indices])

@pytest.mark.parametrize("make, message", [
    (lambda: (filled(), ALL), "layer 0 holds 5 keys that were rotated before `sparsify` saw them"),
    (lambda: (filled(cache=StaticCache(config=CONFIG, max_cache_len=9)), ALL), "layer 0 holds 5 keys that were rotated"),
    (lambda: (DynamicCache(config=transformers.MistralConfig(**SMALL, sliding_window=4)), ROWS), "layer 0 is a DynamicSlidingWindowLayer, in which no index can be kept"),
    (lambda: (StaticCache(config=transformers.MistralConfig(**SMALL, sliding_window=4), max_cache_len=9), ROWS), "layer 0 is a StaticSlidingWindowLayer"),
    (lambda: (transformers.Cache(layers=[Other()]), ROWS), "layer 0 is a Other, in which"),
    (lambda: (filled(cache=transformers.Cache(layers=[Other()])), ROWS), "layer 0 is a Other, in which"),
])
def test_caches_that_cannot_keep_a_state_are_refused_and_left_alone(make, message):
    cache, method = make()
    layer = cache.layers[0]
    with pytest.raises(ValueError, match="cache: " + message): keep_state(cache, 0, method)
    assert cache.layers[0] is layer

def test_a_state_of_another_method_or_out_of_step_is_refused():
    layer = keep_state(cache := filled(), 0, ROWS)
    assert keep_state(cache, 0, KeepsRows(budget=0.25)) is layer  # another budget, the same rows
    with pytest.raises(ValueError, match=r"layer 0 keeps another index, of KeepsRows\(budget=0.5.*\), than KeepsBefore"): keep_state(cache, 0, ALL)
    layer.state.size = 4
    with pytest.raises(ValueError, match="keeps another index"): keep_state(cache, 0, KeepsRows(budget=0.25))
    assert keep_state(cache, 0, KeepsRows(budget=0.5)) is layer and keep_state(cache, 1, ALL) is cache.layers[1]
    layer.state.crop(3)
    with pytest.raises(ValueError, match="layer 0 holds 5 keys, its index 3: they were changed past it"): keep_state(cache, 0, ROWS)
    layer.state.reset()
    with pytest.raises(ValueError, match="layer 0 holds 5 keys, its index 0"): keep_state(cache, 0, ROWS)

def test_keys_of_unknown_rotation_are_refused_and_not_kept():
    layer = keep_state(cache := DynamicCache(config=CONFIG), 0, ALL)
    with pytest.raises(ValueError, match="the index of KeepsBefore.* needs keys from before their rotation"): cache.update(*pair(3), 0)
    assert len(layer.state) == 0
    model = build("llama")
    with session(model): cache = prefill(model, IDS)
    with pytest.raises(ValueError, match="known to a session"), torch.no_grad(): model(IDS[:, :1], past_key_values=cache)
    assert len(cache.layers[0].state) == cache.get_seq_length() == 40
    with session(model), torch.no_grad(): model(IDS[:, :1], past_key_values=cache)
    check(model, cache, torch.cat([IDS, IDS[:, :1]], 1))

class Own:
    "A method that is none of ours and equal to itself alone"
    def new_state(self): return Rows()
    def decode(self, q, k, v, **kwargs): raise AssertionError

@pytest.mark.parametrize("place", [lambda cache: None, lambda cache: offload(cache, 0)], ids=["device", "host"])
@pytest.mark.parametrize("method", [ROWS, Own()], ids=["dataclass", "object"])
def test_a_copy_of_a_cache_has_a_state_of_its_own(method, place):
    keep_state(cache := filled(3), 0, method)
    place(cache)
    cache.update(*pair(2, seed=2), 0)
    layer = cache.layers[0]
    rows, keys, other = layer.state.rows.clone(), layer.keys.clone(), copy.deepcopy(cache)
    other.update(*pair(2, seed=1), 0)
    other.reorder_cache(torch.tensor([1, 1]))
    other.layers[0].state.rows.zero_()
    assert torch.equal(layer.state.rows, rows) and torch.equal(layer.keys, keys) and len(other.layers[0].state) == 7
    cache.crop(-2)
    assert len(layer.state) == 3 and len(other.layers[0].state) == 7
    assert keep_state(other, 0, method) is other.layers[0]

@pytest.mark.parametrize("family", ["qwen2, window", "cohere2, layers without rope", "gemma3, two ropes", "gemma3n, shared keys"])
def test_layers_with_a_window_or_without_keys_of_their_own_keep_nothing(family):
    model = build(family)
    whole = [i for i in whole_layers(model) if expected(family, model)[i]]
    with sparsify(model, decode=KeepsRows(budget=1.0)): cache = generate(model, IDS).past_key_values
    assert [i for i, x in enumerate(cache.layers) if hasattr(x, "state")] == whole != []
    for i in whole: assert torch.equal(cache.layers[i].state.rows, torch.cat([cache.layers[i].keys, cache.layers[i].values], -1))

def test_a_layer_in_host_memory_grows_in_place_and_gives_back_a_first_reading():
    k, v = pair(5)
    layer = offload(cache := DynamicCache(config=CONFIG), 0)
    found = cache.update(k, v, 0)
    assert found[0] is k and found[1] is v and torch.equal(layer.keys, k) and layer.keys.data_ptr() != k.data_ptr()
    assert offload(cache, 0) is layer is cache.layers[0]
    places = []
    for n in range(6, 20):
        found = cache.update(*pair(1, seed=n), 0)
        assert torch.equal(found[0][:, :, :5], k) and torch.equal(found[1][:, :, n - 1:], pair(1, seed=n)[1]) and found[0].shape[2] == n
        places.append(found[0].data_ptr())
    assert [n for n, (a, b) in enumerate(zip(places, places[1:]), 7) if a != b] == [9, 17]

@pytest.mark.parametrize("make, message", [
    (lambda: StaticCache(config=CONFIG, max_cache_len=9), "layer 0 is a StaticLayer, which cannot be kept in host memory"),
    (lambda: DynamicCache(config=transformers.MistralConfig(**SMALL, sliding_window=4)), "layer 0 is a DynamicSlidingWindowLayer, which"),
    (lambda: transformers.Cache(layers=[Other()]), "layer 0 is a Other, which"),
])
def test_layers_that_cannot_move_to_the_host_are_refused_and_left_alone(make, message):
    layer = (cache := make()).layers[0]
    with pytest.raises(ValueError, match="cache: " + message): offload(cache, 0)
    assert cache.layers[0] is layer

def test_a_layer_in_host_memory_keeps_its_room():
    layer = offload(cache := DynamicCache(config=CONFIG), 0)
    cache.update(*pair(5), 0)
    room = layer.room[0]
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.update(*pair(1, seed=1), 0)
    assert layer.room[0] is room and torch.equal(layer.keys, torch.cat([pair(5)[0][[1, 0]], pair(1, seed=1)[0]], 2))
    cache.reset()
    cache.update(*pair(4, seed=2), 0)
    assert layer.room[0] is room and torch.equal(layer.keys, pair(4, seed=2)[0])
    other = copy.deepcopy(cache).layers[0]
    assert torch.equal(other.keys, layer.keys) and other.keys.untyped_storage().nbytes() == other.keys.nbytes

def test_forks_of_a_layer_in_host_memory_go_their_own_ways():
    layer = offload(cache := DynamicCache(config=CONFIG), 0)
    cache.update(*pair(3), 0)
    fork = copy.copy(layer)
    fork.update(*pair(2, seed=1))
    layer.update(*pair(2, seed=2))
    for x, seed in ((fork, 1), (layer, 2)): assert torch.equal(x.keys, torch.cat([pair(3)[0], pair(2, seed=seed)[0]], 2))

def test_host_memory_serves_every_mode_and_default_device():
    cache = DynamicCache(config=CONFIG)
    offload(cache, 0)
    with torch.inference_mode(): cache.update(*pair(5), 0)
    one = pair(1, seed=1)
    with torch.device("meta"): cache.update(*one, 0)
    k, v = (x.requires_grad_() for x in pair(1, seed=2))
    assert not cache.update(k, v, 0)[0].requires_grad and torch.equal(cache.layers[0].keys, torch.cat([pair(5)[0], pair(1, seed=1)[0], pair(1, seed=2)[0]], 2))
    with pytest.raises(ValueError, match="offload: keys of meta cannot be read from host memory"): cache.update(k.to("meta"), v.to("meta"), 0)
