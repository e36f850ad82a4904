"""A method's state inside transformers' caches, and keys from before rotary embedding, on small random models of many
families and of every rope_type"""
import copy
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import models
from sparse_nb.attention import State, TopK, assert_close
from sparse_nb.methods.quest import Quest
from sparse_nb.hf import answer, capture, prefill, sparsify
from sparse_nb.models.cache import StatefulStaticLayer, keep_places, keep_state, layer_of, offload
from sparse_nb.models.override import cache_of
from sparse_nb.models.rotation import (Rotation, as_complex, candidate_rotations, no_rotation, random_rotation,
                                       rotation_of, stored_keys, unrotate)
from sparse_nb.santa import Santa
from inputs import IDS, fast
from models import FOUR, GEMMA3N, OLD, SMALL, TWO, Letters, rope, whole_layers

MLA = dict(num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
           v_head_dim=16, first_k_dense_replace=9)
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA4 = dict(head_dim=16, intermediate_size_mlp=64, num_local_experts=2, num_hidden_layers=4)
GEMMA4 = dict(head_dim=16, global_head_dim=32, sliding_window=16, vocab_size_per_layer_input=64,
              hidden_size_per_layer_input=8)
def longrope(width, **kwargs):
    return dict(original_max_position_embeddings=16) | rope(rope_type="longrope", original_max_position_embeddings=16,
                                                            short_factor=[1.0] * width,
                                                            long_factor=[1.0 + i for i in range(width)], **kwargs)

FAMILIES = models.FAMILIES | {
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
    "longrope, partial": Rotation("halves", 0, 8), "phi, partial": Rotation("halves", 0, 8),
    "gpt-neox, partial, fused": Rotation("halves", 0, 4), "stablelm, partial": Rotation("halves", 0, 4),
    "gemma4, proportional": PARTS, "gemma4, shared keys": [*PARTS, None, None],
    "gemma3n, shared keys": [HALVES, HALVES, None, None],
    "cohere, interleaved": COHERE, "cohere2, layers without rope": [COHERE] * 3 + [NONE],
    "smollm3, layers without rope": [HALVES] * 3 + [NONE],
    "glm, partial, interleaved": Rotation("neighbours", 0, 8), "ernie": NEIGHBOURS,
    "llama4, complex, norm after": [NEIGHBOURS] * 3 + [NONE], "llama4, yarn": [NEIGHBOURS] * 3 + [NONE],
    "nanochat, backwards": Rotation("halves", 0, 16, sign=-1), "head of two columns": Rotation("halves", 0, 2),
}
REFUSED = {
    "deepseek-v3": ("DeepseekV3", MLA,
                    r"layer 0 of deepseek_v3 \(rope_type default\), which rotates what it keeps as values"),
    "deepseek-v2": ("DeepseekV2", MLA,
                    r"layer 0 of deepseek_v2 \(rope_type default\), which rotates what it keeps as values"),
    "hunyuan": ("HunYuanDenseV1", dict(head_dim=16),
                r"layer 0 of hunyuan_v1_dense \(rope_type default\), which rotates its keys in another way"),
    "llama4, yarn, norm after": ("Llama4Text", LLAMA4 | YARN,
                                 r"layer 0 of llama4_text \(rope_type yarn\), which rotates its keys in another way"),
    "gpt2": ("GPT2", dict(n_embd=64, n_head=4, n_layer=2), "layer 0 of gpt2 .* is not given its rotation"),
}
if Version(transformers.__version__) < Version("5.24"):
    REFUSED["gptj"] = ("GPTJ", dict(rotary_dim=8, n_embd=64, n_head=4, n_layer=2),
                       "layer 0 of gptj .* is not given its rotation")
GROWING = ["dynamic", "longrope", "longrope, partial"]

def build(family, dtype=torch.float32):
    "A random model whose norms and biases are random, too"
    torch.manual_seed(0)
    name, given = (FAMILIES | REFUSED)[family][:2]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers,
        name + "Config")(**({} if name in ("GPTJ", "GPT2") else SMALL) | given)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1: p.add_(0.2 * torch.randn(p.shape))
    return model.to(dtype)

def expected(family, model):
    want = ROTATIONS.get(family, HALVES)
    return want if isinstance(want, list) else [want] * model.config.num_hidden_layers

def hook(model, fn):
    "Call `fn(module, kwargs)` with all arguments by name before each attention layer"
    def call(module, args, kwargs):
        fn(module, kwargs if "hidden_states" in kwargs else kwargs | dict(hidden_states=args[0]))
    return [m.register_forward_pre_hook(call, with_kwargs=True) for m in model.modules() if hasattr(m, "layer_idx")
            and "Attention" in type(m).__name__]

def plain_keys(module, kwargs):
    return stored_keys(module, kwargs | dict(position_embeddings=no_rotation(kwargs["position_embeddings"])))[0]

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
        for layer, (turn, after, before) in step.items(): close(unrotate(after, turn, want[layer]), before)
    for layer, (_, after, before) in log[1].items(): assert torch.equal(after, before) == (want[layer] == NONE)
    close(torch.cat([unrotate(step[0][1], step[0][0], want[0]) for step in log], 2),
          capture(build(family), ids[:, :60], before_rope=True)[0].k_pre_rope)

def test_only_one_rotation_fits_and_no_other_comes_near(family):
    model, tried = build(family), []
    def try_all(module, kwargs):
        given, right = kwargs["position_embeddings"], expected(family, model)[module.layer_idx]
        if right in (None, NONE): return
        generator, plain = torch.Generator().manual_seed(3), plain_keys(module, kwargs)
        for step in (1, 2):
            turn = random_rotation(given, step, generator)
            k = stored_keys(module, kwargs | dict(position_embeddings=turn))[0]
            for x in candidate_rotations(as_complex(given).shape[-1], k.shape[-1], step):
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
    for layer, (turn, after, before) in log.items(): close(unrotate(after, turn, rotations[layer]), before, 0.03)

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
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} <= {t for f in FAMILIES
                                                      for t in types(build(f).config.rope_parameters)}

def test_the_scaled_and_growing_rotations_are_what_they_say():
    scaled, growing = [], []
    for family in FAMILIES:
        model, given = build(family), []
        hook(model, lambda module, kwargs: module.layer_idx or given.append(as_complex(kwargs["position_embeddings"])))
        with torch.no_grad(): model(IDS[:, :5]), model(IDS)
        if abs(given[1].abs().mean() - 1) > 1e-3: scaled.append(family)
        if not torch.allclose(given[0][0, 1], given[1][0, 1]): growing.append(family)
    assert scaled == ["yarn", "gpt-oss, sinks", "longrope", "longrope, partial", "llama4, yarn"] and growing == GROWING

def test_angles_in_an_unknown_form_are_refused():
    model, cos = build("llama"), torch.ones(1, 3, 16)
    for turns in (dict(main=(cos, cos)), cos, (cos, cos, cos), (cos[None], cos[None])):
        with pytest.raises(ValueError, match="layer 1 of llama .* in an unknown form"):
            rotation_of(model.model.layers[1].self_attn, (), dict(hidden_states=torch.zeros(1, 3, 64),
                position_embeddings=turns))

@pytest.mark.parametrize("family, rotation", [("deepseek-v3", Rotation("halves", 16, 8)),
                                              ("deepseek-v2", Rotation("neighbours", 16, 8))])
def test_the_expanded_keys_of_latent_attention_could_be_inverted_after_the_cache(family, rotation):
    model, given = build(family), {}
    hook(model, lambda module, kwargs: given.update({module.layer_idx: kwargs["position_embeddings"]}))
    for c in capture(model, IDS, before_rope=True): close(unrotate(c.k, given[c.layer], rotation), c.k_pre_rope)

def by_group(q, groups):
    "Queries [B, H, n, D] of each group side by side [B, G, n, R D]"
    return q.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)

class Before(State):
    """All that a state can observe, side by side, NaN where it is unknown; notes the calls that change the order or
    number of its keys"""
    observes = "shown", "q", "k_pre_rope", "q_pre_rope"
    def __init__(self):
        super().__init__()
        self.calls = set()
    def features(self, k, v, shown, q, k_pre_rope, q_pre_rope):
        assert len({x is None for x in (shown, q, k_pre_rope, q_pre_rope)}) == 1
        if shown is None:
            return torch.cat([k, k.new_full((*k.shape[:3], 1 + k.shape[3] * (1 + 2 * self.shares)), torch.nan)], -1)
        assert (shown.shape == (k.shape[0], k.shape[2]) and shown.dtype == torch.bool and k_pre_rope.shape == k.shape
                and q_pre_rope.shape == q.shape)
        self.shares = q.shape[1] // k.shape[1]
        return torch.cat([k, k_pre_rope, by_group(q, k.shape[1]), by_group(q_pre_rope, k.shape[1]),
                          shown[:, None, :, None].expand(*k.shape[:3], 1)], -1)
    shares = 2
    def pick_sequences(self, rows):
        if rows.tolist() != list(range(len(self.rows))): self.calls.add("select")
        super().pick_sequences(rows)
    def crop(self, length):
        if length < len(self): self.calls.add("crop")
        super().crop(length)
    def split(self, rows, size):
        "Keys, keys and queries from before and after, shown"
        return rows.split([size, size, self.shares * size, self.shares * size, 1], -1)

class Rows(State):
    "Keys and values"
    def features(self, k, v): return torch.cat([k, v], -1)

class KeepsRows(TopK):
    def new_state(self): return Rows()
    def decode(self, q, k, v, *, state=None, **kwargs): return super().decode(q, k, v, **kwargs)

class KeepsBefore(KeepsRows):
    def new_state(self): return Before()
    def decode(self, q, k, v, *, state=None, q_pre_rope=None, **kwargs):
        assert state.rows.shape[:2] == k.shape[:2] and 0 < len(state) <= k.shape[2]
        stop = torch.full((len(q),), len(state)) if kwargs["kv_end"] is None else kwargs["kv_end"]
        own = state.rows[torch.arange(len(q)), :, stop - 1][:, :, None]  # of the query's own place
        assert (torch.equal(state.split(own, k.shape[3])[3], by_group(q_pre_rope, k.shape[1]))
                and torch.equal(state.split(own, k.shape[3])[2], by_group(q, k.shape[1])))
        return super().decode(q, k, v, **kwargs)

class NeedsBefore(Before):
    def features(self, k, v, shown, q, k_pre_rope, q_pre_rope):
        if k_pre_rope is None: raise ValueError("k_pre_rope must be known: read the context in the session")
        return super().features(k, v, shown, q, k_pre_rope, q_pre_rope)

class Needs(KeepsBefore):
    def new_state(self): return NeedsBefore()

# with all keys a later layer gets what it gets from the model itself
ALL, ROWS = KeepsBefore(budget=1.0), KeepsRows(budget=0.5)
E2E = ["llama", "yarn", "qwen3, key norm", "cohere, interleaved", "cohere2, layers without rope",
       "glm, partial, interleaved", "smollm3, layers without rope", "phi3, fused", "gpt-neox, partial, fused"]
GREEDY = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None, suppress_tokens=[0],
              return_dict_in_generate=True)
PAD = torch.tensor([0, 9])
PADDED = torch.stack([IDS[0], torch.cat([IDS.new_zeros(9), IDS[0, :31]])])
TWICE = IDS[:, :20].repeat(1, 2)  # a guess for every next token
WAYS = {
    "greedy": (IDS, {}, set()),
    "padded": (PADDED, dict(attention_mask=(torch.arange(40) >= PAD[:, None]).long()), set()),
    "chunks": (IDS, dict(prefill_chunk_size=16), set()),
    "static": (IDS, dict(cache_implementation="static"), set()),
    "padded, static": (PADDED, dict(attention_mask=(torch.arange(40) >= PAD[:, None]).long(),
                                    cache_implementation="static"), set()),
    "lookup": (TWICE, dict(prompt_lookup_num_tokens=3), {"crop"}),
    "beams": (IDS, dict(num_beams=5), {"select"}),
}

def session(model, method=ALL): return sparsify(model, decode=dict.fromkeys(whole_layers(model), method))

def generate(model, ids, **kwargs):
    return model.generate(ids, **GREEDY | dict(attention_mask=torch.ones_like(ids)) | kwargs)

def check(model, cache, ids, pad=None, calls=None):
    "The states hold the keys before rope of `ids`, in every layer without a window"
    for b, row in enumerate(ids):
        first, found = 0 if pad is None else int(pad[b]), []
        for c in capture(model, row[first:], before_rope=True):
            if (state := getattr(cache.layers[c.layer], "state", None)) is None: continue
            assert state.rows.shape[:1] == ids.shape[:1]
            groups, size = c.k.shape[1], c.k.shape[3]
            *got, shown = state.split(state.rows[[b]], size)
            for x, want in zip(got, (c.k, c.k_pre_rope, by_group(c.q, groups), by_group(c.q_pre_rope, groups)),
                               strict=True):
                assert_close(x[:, :, first:], want, rtol=1e-4)
            assert (shown[:, :, :first] == 0).all() and (shown[:, :, first:] == 1).all()
            for x, y in ((c.k, c.k_pre_rope), (c.q, c.q_pre_rope)):
                assert torch.equal(x, y) or (x - y).norm() > 0.05 * x.norm()
            assert calls is None or state.calls == calls
            found.append(c.layer)
        assert found == whole_layers(model) != []

@pytest.mark.parametrize("family, way", fast([(family, way) for family in E2E for way in WAYS], *range(0, 63, 2)))
def test_generation_keeps_the_keys_before_rope(family, way):
    model, (ids, kwargs, calls) = build(family), WAYS[way]
    with session(model): out = generate(model, ids, **kwargs)
    cache, told = out.past_key_values, out.sequences[:,
                                                     :int(out.past_key_values.get_seq_length(whole_layers(model)[0]))]
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
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda m, args, kwargs: ((kwargs.pop("hidden_states"),
            kwargs.pop("position_embeddings")), kwargs), with_kwargs=True)
    with session(model): out = generate(model, IDS)
    check(build("llama"), out.past_key_values, out.sequences[:, :-1])

def test_an_answer_goes_on_with_a_context_read_in_a_session():
    model = build("llama")
    with session(model): cache = prefill(model, IDS[:, :30], chunk=7)
    got = answer(model, cache, IDS[:, 30:], ALL, tokenizer=Letters(), max_new_tokens=4)
    assert got.ids == generate(model, IDS, max_new_tokens=4).sequences[0, 40:].tolist()
    check(model, cache, IDS[:, :30])

@pytest.mark.parametrize("way", [{}, dict(offload=True)], ids=["device", "host"])
def test_keys_that_came_outside_of_a_session_are_unknown(way):
    model = build("llama")
    cache = prefill(model, IDS[:, :30])
    plain = [x.keys for x in cache.layers]
    with sparsify(model, decode=ALL, **way), torch.no_grad(): model(IDS[:, 30:35], past_key_values=cache)
    if not way:
        with torch.no_grad(): model(IDS[:, 35:36], past_key_values=cache)  # nobody listens
        with sparsify(model, decode=ALL, setup="context"), torch.no_grad(): model(IDS[:, 36:], past_key_values=cache)
    for c, keys in zip(capture(model, IDS, before_rope=True), plain):
        state = cache.layers[c.layer].state
        k, k_pre_rope, *_ = state.split(state.rows, 16)
        unobserved = [*range(30), 35] if not way else list(range(30))
        assert (len(state) == (35 if way else 40) and k_pre_rope.isnan().all(-1)[0, 0].nonzero().flatten().tolist()
                == unobserved)
        observed = [i for i in range(len(state)) if i not in unobserved]
        assert torch.equal(k[:, :, :30], keys)
        assert_close(k, c.k[:, :, :len(state)], rtol=1e-4)
        assert_close(k_pre_rope[:, :, observed], c.k_pre_rope[:, :, observed], rtol=1e-4)

def test_a_state_may_insist_on_what_it_observes():
    model = build("llama")
    with pytest.raises(ValueError, match=r"read the context in the session \(the index of layer 0 of llama\)"):
        answer(model, prefill(model, IDS[:, :30]), IDS[:, 30:], Needs(budget=1.0), tokenizer=Letters())
    with session(model, Needs(budget=1.0)): cache = prefill(model, IDS[:, :30])
    assert answer(model, cache, IDS[:, 30:], Needs(budget=1.0), tokenizer=Letters(), max_new_tokens=2).ids

@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v2", "hunyuan", "gpt2"])
def test_an_index_of_keys_before_rope_names_the_model_that_cannot_give_them(family):
    model = build(family)
    with sparsify(model, decode=ALL), pytest.raises(ValueError, match=REFUSED[family][2]): generate(model, IDS)

@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v2"])
def test_an_index_of_a_model_that_keeps_latents_is_of_the_keys_that_attention_gets(family, monkeypatch):
    with sparsify(model := build(family), decode=KeepsRows(budget=1.0)), pytest.raises(ValueError,
        match="got layer 0 of deepseek_v., which uses values of another head size"):
        generate(model, IDS)
    monkeypatch.setitem(REFUSED, family, (REFUSED[family][0], MLA | dict(v_head_dim=24)))
    model = build(family)
    with sparsify(model, decode=KeepsRows(budget=1.0)): out = generate(model, IDS)
    for c in capture(model, out.sequences[:, :-1]):
        layer = out.past_key_values.layers[c.layer]
        assert_close(layer.state.rows, torch.cat([c.k, c.v], -1), rtol=1e-4)
        assert layer.keys.shape[3] != c.k.shape[3]

def forwards(model):
    "Beyond the original length in the second of four steps"
    cache, ids = DynamicCache(config=model.config), torch.cat((IDS, IDS), 1)
    with torch.no_grad():
        for part in ids[:, :60].split([5, 35, 1, 19], 1): model(part, past_key_values=cache)
    return cache

@pytest.mark.parametrize("way",
                         [forwards, lambda model: generate(model, IDS[:, :10], max_new_tokens=20).past_key_values],
                         ids=["forwards", "generate"])
@pytest.mark.parametrize("family", GROWING)
def test_angles_that_change_as_the_sequence_grows(family, way):
    if OLD and "longrope" in family and way is not forwards: pytest.skip("Phi-3 goes on with one token alone there")
    model, log, given = build(family), {}, {}
    def note(module, kwargs):
        # Phi-3 reads all anew when it changes to the long angles
        if cache_of(kwargs).get_seq_length(module.layer_idx) == 0:
            log[module.layer_idx], given[module.layer_idx] = [], []
        log[module.layer_idx].append(plain_keys(module, kwargs))
        given[module.layer_idx].append(kwargs["position_embeddings"])
    with session(model):
        hook(model, note)
        cache = way(model)
    assert len(cache.layers) == len(log) == 2
    for i, layer in enumerate(cache.layers):
        assert len(log[i]) > 3 and len(layer.state) == layer.get_seq_length() > 28
        before = layer.state.split(layer.state.rows, layer.keys.shape[3])[1]
        assert_close(before, torch.cat(log[i], 2), rtol=1e-4)
    if family == "dynamic" or way is forwards:  # the last angles would not do for all keys
        n = layer.get_seq_length()
        last = model.model.rotary_emb(torch.zeros(1), torch.arange(n)[None])
        assert (unrotate(layer.keys, last, ROTATIONS.get(family, HALVES)) - before).norm() > 1e-2 * before.norm()

CONFIG = transformers.LlamaConfig(**SMALL)
CACHES = {"dynamic": (lambda: DynamicCache(config=CONFIG), ["update", "reorder_cache", "crop",
                                                            "batch_repeat_interleave", "batch_select_indices",
                                                            "reset"], 99),
          "host": (lambda: DynamicCache(config=CONFIG), ["update", "reorder_cache", "crop", "batch_repeat_interleave",
                                                         "batch_select_indices", "reset"], 99),
          "static": (lambda: StaticCache(config=CONFIG, max_cache_len=12),
                     ["update", "reorder_cache", "reset", *["crop"] * StaticLayer.is_croppable], 12)}

def pair(n, rows=2, seed=0):
    return torch.randn(2, rows, 2, n, 4, generator=torch.Generator().manual_seed(seed)).unbind(0)

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
    if op == "crop" and (length or not OLD):  # there an empty layer cannot be cropped
        (layer if OLD else cache).crop(-min(x % (length + 2), length if isinstance(layer, StaticLayer) else 99))
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
        assert (kept.layers[0] is layer is keep_state(kept, 0, ROWS) and layer.known()
                <= int(layer.get_seq_length()) == length)
        if not length: continue
        if op is not None and op[1] % 3 == 0: continue  # nobody listens
        new = min(length - layer.known(), 1)
        if kind != "host": layer.observe(layer.keys[:, :, :length], layer.values[:, :, :length], new)
        else: layer.observe(layer.keys, layer.values)
        assert layer.known() == length and len(layer.state) == (room if kind == "static" else length)
        assert torch.equal(layer.keys, want.keys) and torch.equal(layer.values, want.values)
        assert torch.equal(layer.state.rows[:, :, :length], torch.cat([want.keys, want.values], -1)[:, :, :length])

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
@pytest.mark.parametrize("emptied", [[], [("update", 4), ("reset", 0)], [("update", 4), ("crop", 2)]],
                         ids=["new", "reset", "cropped"])
def test_an_empty_layer_may_be_changed(emptied, op, kind):
    check_changes(kind, [], [*emptied, (op, 1), ("update", 3), ("reorder_cache", 4)])

@pytest.mark.parametrize("place", [lambda cache: None, lambda cache: offload(cache, 0)], ids=["device", "host"])
@pytest.mark.parametrize("indices", [[1, 0], [-1], torch.tensor([1, 1]), torch.tensor([1], dtype=torch.int32),
                                     torch.tensor([False, True])], ids=str)
def test_sequences_may_be_named_in_every_way_that_indexes_a_tensor(indices, place):
    keep_state(cache := filled(), 0, ROWS)
    place(cache)
    layer = cache.layers[0]
    layer.observe(layer.keys, layer.values)
    cache.batch_select_indices(indices)
    assert (torch.equal(layer.state.rows, torch.cat([layer.keys, layer.values], -1)) and torch.equal(layer.keys,
        pair(5)[0][indices]))

@pytest.mark.parametrize("make, message", [
    (lambda: DynamicCache(config=transformers.MistralConfig(**SMALL, sliding_window=4)),
     "got a DynamicSlidingWindowLayer for layer 0"),
    (lambda: StaticCache(config=transformers.MistralConfig(**SMALL, sliding_window=4), max_cache_len=9),
     "got a StaticSlidingWindowLayer for layer 0"),
    (lambda: transformers.Cache(layers=[Other()]), "got a Other for layer 0"),
    (lambda: filled(cache=transformers.Cache(layers=[Other()])), "got a Other for layer 0"),
])
def test_caches_that_cannot_keep_a_state_are_refused_and_left_alone(make, message):
    layer = (cache := make()).layers[0]
    with pytest.raises(ValueError, match="cache must have layers that can keep an index, " + message):
        keep_state(cache, 0, ROWS)
    assert cache.layers[0] is layer

def test_a_state_of_another_method_or_of_keys_that_are_gone_is_refused():
    layer = keep_state(cache := filled(), 0, ROWS)
    layer.observe(layer.keys, layer.values)
    assert keep_state(cache, 0, KeepsRows(budget=0.25)) is layer  # another budget, the same rows
    with pytest.raises(ValueError,
                       match=r"cache must keep the index of KeepsBefore.*, got layer 0, which keeps another index, of "
                             r"KeepsRows\(budget=0.5"):
        keep_state(cache, 0, ALL)
    layer.state.size = 4
    with pytest.raises(ValueError, match="cache must keep the index"): keep_state(cache, 0, KeepsRows(budget=0.25))
    assert keep_state(cache, 0, KeepsRows(budget=0.5)) is layer and keep_state(cache, 1, ALL) is cache.layers[1]
    layer.keys, layer.values = layer.keys[:, :, :3], layer.values[:, :, :3]
    with pytest.raises(ValueError, match="cache must hold the keys of its index, got one of 5 for 3 in layer 0"):
        keep_state(cache, 0, ROWS)
    with pytest.raises(ValueError, match="new must be at most -2"): layer.observe(layer.keys, layer.values)
    layer.state.crop(2)
    with pytest.raises(ValueError, match="new must be at most 1, .* got 2"): layer.observe(layer.keys, layer.values, 2)

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
    layer.observe(layer.keys, layer.values)
    rows, keys, other = layer.state.rows.clone(), layer.keys.clone(), copy.deepcopy(cache)
    other.update(*pair(2, seed=1), 0)
    other.layers[0].observe(other.layers[0].keys, other.layers[0].values, 2)
    other.reorder_cache(torch.tensor([1, 1]))
    other.layers[0].state.rows.zero_()
    assert torch.equal(layer.state.rows, rows) and torch.equal(layer.keys, keys) and len(other.layers[0].state) == 7
    cache.crop(-2)
    assert len(layer.state) == 3 and len(other.layers[0].state) == 7
    assert keep_state(other, 0, method) is other.layers[0]

@pytest.mark.parametrize("family", ["qwen2, window", "cohere2, layers without rope", "gemma3, two ropes",
                                    "gemma3n, shared keys"])
def test_layers_with_a_window_or_without_keys_of_their_own_keep_nothing(family):
    model = build(family)
    whole = [i for i in whole_layers(model) if expected(family, model)[i]]
    with sparsify(model, decode=KeepsRows(budget=1.0)): cache = generate(model, IDS).past_key_values
    assert [i for i, x in enumerate(cache.layers) if hasattr(x, "state")] == whole != []
    for i in whole:
        assert torch.equal(cache.layers[i].state.rows, torch.cat([cache.layers[i].keys, cache.layers[i].values], -1))

def test_a_layer_in_host_memory_grows_in_place_and_gives_back_a_first_reading():
    k, v = pair(5)
    layer = offload(cache := DynamicCache(config=CONFIG), 0)
    found = cache.update(k, v, 0)
    assert found[0] is k and found[1] is v and torch.equal(layer.keys, k) and layer.keys.data_ptr() != k.data_ptr()
    assert offload(cache, 0) is layer is cache.layers[0]
    places = []
    for n in range(6, 20):
        found = cache.update(*pair(1, seed=n), 0)
        assert (torch.equal(found[0][:, :, :5], k) and torch.equal(found[1][:, :, n - 1:], pair(1, seed=n)[1])
                and found[0].shape[2] == n)
        places.append(found[0].data_ptr())
    assert [n for n, (a, b) in enumerate(zip(places, places[1:]), 7) if a != b] == [9, 17]

@pytest.mark.parametrize("make, message", [
    (lambda: StaticCache(config=CONFIG, max_cache_len=9), "got a StaticLayer for layer 0"),
    (lambda: DynamicCache(config=transformers.MistralConfig(**SMALL, sliding_window=4)),
     "got a DynamicSlidingWindowLayer for layer 0"),
    (lambda: transformers.Cache(layers=[Other()]), "got a Other for layer 0"),
])
def test_layers_that_cannot_move_to_the_host_are_refused_and_left_alone(make, message):
    layer = (cache := make()).layers[0]
    with pytest.raises(ValueError, match="cache must be a DynamicCache to be offloaded, " + message): offload(cache, 0)
    assert cache.layers[0] is layer

def test_a_layer_in_host_memory_keeps_its_room():
    layer = offload(cache := DynamicCache(config=CONFIG), 0)
    cache.update(*pair(5), 0)
    room = layer.buffer[0]
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.update(*pair(1, seed=1), 0)
    assert layer.buffer[0] is room and torch.equal(layer.keys, torch.cat([pair(5)[0][[1, 0]], pair(1, seed=1)[0]], 2))
    cache.reset()
    cache.update(*pair(4, seed=2), 0)
    assert OLD or layer.buffer[0] is room and torch.equal(layer.keys, pair(4, seed=2)[0])
    other = copy.deepcopy(cache).layers[0]
    assert torch.equal(other.keys, layer.keys) and other.keys.untyped_storage().nbytes() == other.keys.nbytes

def test_forks_of_a_layer_in_host_memory_go_their_own_ways():
    layer = offload(cache := DynamicCache(config=CONFIG), 0)
    cache.update(*pair(3), 0)
    fork = copy.copy(layer)
    fork.update(*pair(2, seed=1))
    layer.update(*pair(2, seed=2))
    for x, seed in ((fork, 1), (layer, 2)):
        assert torch.equal(x.keys, torch.cat([pair(3)[0], pair(2, seed=seed)[0]], 2))

def test_host_memory_serves_every_mode_and_default_device():
    cache = DynamicCache(config=CONFIG)
    offload(cache, 0)
    with torch.inference_mode(): cache.update(*pair(5), 0)
    one = pair(1, seed=1)
    with torch.device("meta"): cache.update(*one, 0)
    k, v = (x.requires_grad_() for x in pair(1, seed=2))
    assert (not cache.update(k, v, 0)[0].requires_grad and torch.equal(cache.layers[0].keys,
        torch.cat([pair(5)[0], pair(1, seed=1)[0], pair(1, seed=2)[0]], 2)))
    with pytest.raises(ValueError,
                       match="offload must be False but for keys of a CPU or a CUDA device, got keys of meta"):
        cache.update(k.to("meta"), v.to("meta"), 0)


@pytest.mark.parametrize("method", [Santa(eps=0.3, delta=0.05), Quest(budget=4, page=4)],
                         ids=lambda m: type(m).__name__)
def test_what_a_graph_is_given_stands_for_where_all_of_an_index_lies(method, monkeypatch):
    """However caches of a session come and go: what lies where it lay once, lies there with all else; no two that live
    share it. After the session, and when its caches are gone, nothing is held."""
    g, seen, living, memory, counts = torch.Generator().manual_seed(0), {}, [], [], {}
    config = transformers.LlamaConfig(num_hidden_layers=1)
    draw = lambda n: int(torch.randint(n, (), generator=g))

    def keep(tensors, places):
        "Then what lies elsewhere takes memory that is free, most of it used before."
        keep_places(tensors, places)
        taken = {y.data_ptr() for x in StatefulStaticLayer.living.values() for y in x.state.buffers()}
        taken |= {x.data_ptr() for x in places}
        for x in tensors:
            if x.data_ptr() in taken: continue
            free = [m for m in memory if m.data_ptr() not in taken and (m.dtype, m.numel()) == (x.dtype, x.numel())]
            if not free: memory.append(torch.empty(x.numel(), dtype=x.dtype))
            x.set_((free[draw(len(free))] if free else memory[-1]).view(x.shape).copy_(x))
            taken.add(x.data_ptr())
    monkeypatch.setattr("sparse_nb.models.cache.keep_places", keep)
    for _ in range(400):
        cache = StaticCache(config=config, max_cache_len=24)
        layer, n = keep_state(cache, 0, method, counts), 1 + draw(20)
        cache.update(torch.randn(1, 2, n, 8, generator=g), torch.randn(1, 2, n, 8, generator=g), 0)
        layer.observe(layer.keys[:, :, :n], layer.values[:, :, :n], n)
        if draw(3) == 0: cache.reorder_cache(torch.tensor([0, 0]))
        if draw(5) == 0: cache = copy.deepcopy(cache)
        living.append(cache.layers[0])
        if len(living) > 6: living.pop(draw(6))
        assert len({x.observed.data_ptr() for x in living}) == len(living)
        for x in living:
            where = [(y.data_ptr(), y.shape, y.stride()) for y in x.state.buffers()]
            assert layer_of(x.observed) is x and seen.setdefault(x.observed.data_ptr(), where) == where
        assert cache.layers[0].known() == n
    assert len(seen) < 300  # memory was given back and taken again
    held = [weakref.ref(x) for x in counts.values()]
    del counts, living, cache, layer, x
    gc.collect()
    assert len(held) >= len(seen) and not any(x() for x in held)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("inside_before", [False, True])
def test_tensors_lie_where_others_lay(inside, inside_before):
    "Made in inference mode or not; all of them or none, and none that are a part of those others."
    def some(add, inside=False, shapes=((2, 3), (4,))):
        with torch.inference_mode(inside): return [torch.arange(math.prod(s)).reshape(s) + add for s in shapes]
    places, tensors, same = some(10, inside_before), some(20, inside), torch.ones(5)
    where = [x.data_ptr() for x in places]
    keep_places([*tensors, same], [*places, same])
    assert [x.data_ptr() for x in tensors] == where and all(map(torch.equal, tensors, some(20)))
    assert torch.equal(same, torch.ones(5)) and all(map(torch.equal, places, some(20)))
    if not inside: tensors[0] += 1
    for others in (some(30)[:1], some(30, shapes=((2, 3), (5,))), [x.float() for x in some(30)],
                   [some(30)[0], places[0].view(-1)[1:5]], [some(30)[0].mT.contiguous().mT, some(30)[1]]):
        kept, left = [x.data_ptr() for x in others], [x.clone() for x in (*others, *places)]
        keep_places(others, places)
        assert [x.data_ptr() for x in others] == kept and all(map(torch.equal, (*others, *places), left))
    wide = [torch.zeros(1, 3).expand(2, 3)], [torch.ones(1, 3).expand(2, 3)]
    keep_places(*wide)
    assert wide[0][0].data_ptr() != wide[1][0].data_ptr() and wide[1][0].all()
