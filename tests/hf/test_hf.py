"Attention override, capture and answer on small random models of many families"
import pytest
import torch

transformers = pytest.importorskip("transformers")

from sparse_nb.attention import Exact, TopK, Uniform, assert_close, attention
from sparse_nb.hf import answer, attention_override, capture, prefill
from inputs import IDS
from models import FAMILIES, REFUSED, Letters, build, gpt2, whole_layers

@pytest.fixture(params=FAMILIES)
def family(request): return request.param

@pytest.fixture
def llama(): return build("llama")

def per_query(module, query, key, value, attention_mask, scaling=None, **kwargs):
    "Attention of one sequence, query by query over the keys that the mask shows"
    rows, queries, keys = [], query.shape[2], key.shape[2]
    for j in range(queries):
        seen = slice(0, keys - queries + j + 1) if attention_mask is None else attention_mask[0, 0, j]
        rows.append(attention(query[:, :, [j]], key[:, :, seen], value[:, :, seen], scale=scaling))
    return torch.cat(rows, 2).transpose(1, 2), None

def projected_keys(model, layer, like):
    "Keys as the last projection or norm before the rotation leaves them, by forward hooks on one plain run"
    attn = [m for m in model.modules() if getattr(m, "layer_idx", None) == layer and "Attention" in type(m).__name__][0]
    name = next(n for n in ("k_norm", "k_proj", "qkv_proj", "query_key_value") if hasattr(attn, n))
    out = []
    hook = getattr(attn, name).register_forward_hook(lambda module, args, result: out.append(result))
    with torch.no_grad(): model(IDS, use_cache=False)
    hook.remove()
    batch, groups, keys, size = like.shape
    if name == "qkv_proj":
        return out[0][..., -2 * groups * size:-groups * size].unflatten(-1, (groups, size)).transpose(1, 2)
    if name == "query_key_value": return out[0].unflatten(-1, (groups, 3, size))[..., 1, :].transpose(1, 2)
    if out[0].shape == like.shape: return out[0]
    return out[0].reshape(batch, keys, groups, size).transpose(1, 2)

def test_captured_tensors_reproduce_the_attention_of_the_model(family):
    model = build(family)
    for c in capture(model, IDS, positions=[-1, 0, 20, 33]):
        assert c.q.shape[2] == 4 and c.k.shape[2] == 40 and c.positions.tolist() == [39, 0, 20, 33]
        if family in REFUSED:
            with pytest.raises(ValueError, match="scores must be of q and k alone, got layer 0 with"): c.seen(0)
            break
        for i in range(4): assert_close(attention(*c.seen(i), scale=c.scale), c.out[:, :, [i]], rtol=1e-5)

def test_a_pass_through_override_reproduces_the_logits_and_leaves_no_trace(family):
    if family in REFUSED: pytest.skip("the pass-through knows plain attention only")
    model = build(family)
    before = model.config._attn_implementation
    with torch.no_grad():
        want = model(IDS).logits
        with attention_override(model, per_query, mask="sdpa"): got = model(IDS).logits
        assert_close(got, want, rtol=1e-5)
        assert torch.equal(model(IDS).logits, want)
    assert model.config._attn_implementation == before
    assert not [n for n in transformers.AttentionInterface._global_mapping if "sparse_nb" in n]
    assert not [n for n in transformers.AttentionMaskInterface._global_mapping if "sparse_nb" in n]

def test_keys_before_rope_are_the_projected_keys(family):
    model = build(family)
    for c in capture(model, IDS, before_rope=True):
        assert torch.equal(c.k_pre_rope, projected_keys(model, c.layer, c.k_pre_rope))
        assert c.q_pre_rope.shape == c.q.shape

@pytest.mark.parametrize("family", ["llama", "yarn", "llama3 scaling"])
def test_rotating_the_keys_before_rope_gives_the_keys_after(family):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    model = build(family)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(40)[None])
    assert (family == "yarn") == bool((cos**2 + sin**2 - 1).abs().max() > 1e-3)
    for c in capture(model, IDS, before_rope=True):
        q, k = apply_rotary_pos_emb(c.q_pre_rope, c.k_pre_rope, cos, sin)
        assert_close(q, c.q, rtol=1e-6)
        assert_close(k, c.k, rtol=1e-6)

@pytest.mark.parametrize("family", ["cohere2, layers without rope", "smollm3, layers without rope"])
def test_a_layer_that_does_not_rotate_has_the_same_keys_before_and_after(family):
    rotated = [not torch.equal(c.k, c.k_pre_rope) for c in capture(build(family), IDS, before_rope=True)]
    assert rotated == [True, True, True, False]

def test_a_window_shows_in_the_first_key_seen():
    c = capture(build("mistral, window"), IDS, positions=[5, 15, 16, 39])[0]
    assert c.first.tolist() == [0, 0, 1, 24]

def test_capture_keeps_only_what_was_asked_for(llama):
    c = capture(llama, IDS, positions=[3])[0]
    for x in (c.q, c.k, c.v, c.out): assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
    batch = capture(llama, IDS.repeat(2, 1))[1]
    assert batch.q.shape == (2, 4, 40, 16) and batch.k.shape == (2, 2, 40, 16) and batch.q_pre_rope is None
    assert_close(attention(batch.q, batch.k, batch.v, causal=True, scale=batch.scale), batch.out, rtol=1e-5)

def test_capture_does_not_compute_logits(llama):
    llama.lm_head.register_forward_hook(lambda *args: pytest.fail("the logits were computed"))
    capture(llama, IDS)
    prefill(llama, IDS)

def test_left_padding_reaches_the_function(llama):
    pad = torch.tensor([0, 7])
    ids = torch.stack([IDS[0], torch.cat([IDS.new_zeros(7), IDS[0, :33]])])
    mask = (torch.arange(40) >= pad[:, None]).long()
    def padded(module, query, key, value, attention_mask, scaling=None, **kwargs):
        assert attention_mask.shape == (2, 40)
        start = attention_mask.int().argmax(-1)
        visible = (torch.arange(40) >= start[:, None]).float()
        from sparse_nb.attention import attention_scores
        scores = attention_scores(query, key, scale=scaling) + torch.where(visible.bool(), 0, -torch.inf)[:, None, None]
        hidden = torch.ones(40, 40).tril().log()
        weights = (scores + hidden).softmax(-1).nan_to_num(0)
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), None
    with torch.no_grad():
        want = llama(ids, attention_mask=mask).logits
        with attention_override(llama, padded): got = llama(ids, attention_mask=mask).logits
    assert_close(got[0], want[0], rtol=1e-5)
    assert_close(got[1, 7:], want[1, 7:], rtol=1e-5)

def test_layers_tell_themselves_apart(llama):
    calls = []
    def fn(module, *args, **kwargs):
        calls.append(module.layer_idx)
        return per_query(module, *args, **kwargs)
    with torch.no_grad(), attention_override(llama, fn, mask="sdpa"): llama(IDS)
    assert calls == [0, 1]

def test_overrides_nest_and_restore_after_an_exception(llama):
    def crash(*args, **kwargs): raise KeyError("inside")
    with torch.no_grad():
        want = llama(IDS).logits
        with attention_override(llama, per_query, mask="sdpa"):
            with pytest.raises(KeyError, match="inside"), attention_override(llama, crash): llama(IDS)
            assert_close(llama(IDS).logits, want, rtol=1e-5)
        assert torch.equal(llama(IDS).logits, want)

def test_prefill_in_chunks_fills_the_same_cache(family):
    model = build(family)
    whole, steps = prefill(model, IDS), []
    parts = prefill(model, IDS[0], chunk=9, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(i, 40) for i in (0, 9, 18, 27, 36, 40)]
    for a, b in zip(whole.layers, parts.layers): assert_close(b.keys, a.keys, rtol=1e-4)

def test_exact_answer_is_the_generated_one(family):
    model = build(family)
    cache = prefill(model, IDS[:, :32])
    before = [x.keys for x in cache.layers]
    if family in REFUSED:
        with pytest.raises(ValueError, match=f"which uses {REFUSED[family]}"):
            answer(model, cache, IDS[:, 32:], TopK(budget=0.5), tokenizer=Letters())
    got = answer(model, cache, IDS[:, 32:], Exact(), tokenizer=Letters(), max_new_tokens=6)
    want = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False)[0, 40:].tolist()
    assert got.ids == want and len(got.seconds) == len(want) and got.ms_per_token > 0 and got.error is None
    assert cache.get_seq_length() == 32 and all(a is b.keys for a, b in zip(before, cache.layers))
    if not (whole := whole_layers(model)):
        with pytest.raises(ValueError, match="model must have a layer without a sliding window"):
            answer(model, cache, IDS[:, 32:], Exact(), tokenizer=Letters(), audit=True)
        return
    got = answer(model, cache, IDS[:, 32:], Exact(), tokenizer=Letters(), max_new_tokens=6, audit=True)
    assert got.ids == want and got.error.shape == (8 + len(want) - 1, len(whole), 4) and got.density.min() == 1
    assert got.error.max() < 1e-5 or family in REFUSED

def test_layers_with_a_window_stay_exact():
    model, seen = build("qwen2, window"), set()
    answer(model, prefill(model, IDS[:, :32]), IDS[:, 32:], TopK(budget=0.5), tokenizer=Letters(), max_new_tokens=2,
           watch=lambda layer, **kwargs: seen.add(layer))
    assert seen == set(whole_layers(model)) == {0}

def test_a_budget_beyond_the_keys_means_all_of_them(llama):
    cache = prefill(llama, IDS[:, :32])
    exact, got = (answer(llama, cache, IDS[:, 32:], m, tokenizer=Letters(), max_new_tokens=4, audit=True)
                  for m in (Exact(), TopK(budget=1000)))
    assert got.ids == exact.ids and got.error.max() < 1e-5 and got.density.min() == 1

def test_the_seed_fixes_the_answer_and_the_audit_replays_it(llama):
    cache = prefill(llama, IDS[:, :32])
    def run(seed, **kwargs):
        return answer(llama, cache, IDS[:, 32:], Uniform(samples=0.2), tokenizer=Letters(), max_new_tokens=4,
                      seed=seed, **kwargs)
    a, b, c = run(1, audit=True), run(1, audit=True), run(2, audit=True)
    assert a.ids == b.ids == run(1).ids and torch.equal(a.error, b.error) and not torch.equal(a.error, c.error)
    assert (a.density - 0.2).abs().max() < 0.03 and run(1).error is None
    seeds = set()
    run(1, watch=lambda seed, **kwargs: seeds.update(seed.flatten().tolist()))
    assert len(seeds) == 2 * 4 * (8 + 3)

def test_an_answer_stops_at_a_stop_character_once_begun(llama):
    class Lines:
        texts = iter(["\n", "\n4", "\n47", "\n47.", "never"])
        def decode(self, ids, **kwargs): return next(self.texts)
    got = answer(llama, prefill(llama, IDS), IDS[:, :1], Exact(), tokenizer=Lines(), stop="\n.")
    assert got.text == "\n47" and len(got.ids) <= 4

@pytest.mark.parametrize("call, error, message", [
    (lambda m: attention_override(m, None).__enter__(), TypeError, "fn must be a function, got NoneType"),
    (lambda m: attention_override(m, per_query, mask="dense").__enter__(), ValueError,
     "mask must be one of .*, got 'dense'"),
    (lambda m: attention_override(torch.nn.Linear(2, 2), per_query).__enter__(), ValueError,
     "model must look its attention up by name.* got Linear"),
    (lambda m: capture(m, [1, 2]), TypeError, "input_ids must be a tensor of token numbers, got list"),
    (lambda m: capture(m, IDS.float()), TypeError, "input_ids must be int32 or int64, got torch.float32"),
    (lambda m: capture(m, IDS[:, :0]), ValueError, r"input_ids must have shape \[N\] or \[B, N\]"),
    (lambda m: capture(m, IDS[None]), ValueError, r"input_ids must have shape \[N\] or \[B, N\]"),
    (lambda m: capture(m, IDS + 60), ValueError, r"input_ids must lie in \[0, 64\), got numbers from"),
    (lambda m: capture(m.train(), IDS), ValueError, "model must not be in training mode"),
    (lambda m: capture(m, IDS, positions=[40]), ValueError, r"positions must lie in \[-40, 40\), got 40 to 40"),
    (lambda m: capture(m, IDS, positions=[-41]), ValueError, r"positions must lie in \[-40, 40\), got -41"),
    (lambda m: capture(m, IDS, positions=[]), (TypeError, ValueError), "positions must be"),
    (lambda m: capture(m, IDS, positions=5), ValueError, "positions must be a vector of at least one, got shape"),
    (lambda m: capture(m, IDS, positions=[0.5]), TypeError, "positions must be integers, got torch.float32"),
    (lambda m: capture(gpt2(), IDS, before_rope=True), ValueError, "layer 0 of gpt2 is not given its rotation"),
    (lambda m: capture(transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=8, n_layer=1,
        n_head=2)).eval(), IDS), ValueError, "got bloom"),
    (lambda m: capture(transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, hidden_size=8,
        num_hidden_layers=1)).eval(), IDS), ValueError, "got mamba"),
    (lambda m: prefill(m, IDS, chunk=0), ValueError, "chunk must be at least 1, got 0"),
    (lambda m: prefill(m, IDS, chunk=2.0), TypeError, "chunk must be an int, got float"),
    (lambda m: answer(m, prefill(m, IDS), IDS.repeat(2, 1), Exact(), tokenizer=Letters()), ValueError,
     "input_ids must be one question, got 2 sequences"),
    (lambda m: answer(m, prefill(m, IDS), IDS, None, tokenizer=Letters()), TypeError,
     "method must have `decode`, got NoneType"),
    (lambda m: answer(m, prefill(m, IDS), IDS, Exact(), tokenizer=Letters(), max_new_tokens=0), ValueError,
     "max_new_tokens must be at least 1, got 0"),
    (lambda m: answer(m, prefill(m, IDS), IDS, Exact(), tokenizer=Letters(), max_new_tokens=1.5), TypeError,
     "max_new_tokens must be an int, got float"),
    (lambda m: answer(m, prefill(m, IDS), IDS, Exact(), tokenizer=Letters(), seed=-1), ValueError, "seed must lie"),
    (lambda m: answer(m, None, IDS, Exact(), tokenizer=Letters()), TypeError,
     "cache must be one of transformers, as `prefill` gives it, got NoneType"),
    (lambda m: answer(m, prefill(m, IDS), IDS, Exact(), tokenizer=None), TypeError,
     "tokenizer must have `decode`, got NoneType"),
    (lambda m: answer(m, prefill(m, IDS), IDS, Exact(), tokenizer=Letters(), stop=None), TypeError,
     "stop must be a string, got NoneType"),
    (lambda m: answer(m, prefill(m, IDS), IDS, Exact(), tokenizer=Letters(), watch=3), TypeError,
     "watch must be a function, got int"),
    (lambda m: prefill(None, IDS), ValueError, "model must be one of transformers, got NoneType"),
    (lambda m: prefill(m, IDS, progress=3), TypeError, "progress must be a function, got int"),
    (lambda m: capture(torch.nn.Linear(2, 2), IDS), ValueError, "model must be one of transformers, got Linear"),
])
def test_bad_input_is_named(llama, call, error, message):
    with pytest.raises(error, match=message): call(llama)

