"""Reformer and KDEformer against their definitions, key by key; their states against fresh ones; and in generation."""
import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_nb.attention import assert_close, attention, attention_weights
from sparse_nb.hf import sparsify
from sparse_nb.lsh import KDEformer, Reformer, gray_place, random_directions, same_bin
from sparse_nb.vattention import VAttention

METHODS = [KDEformer(bins=4, sinks=1, window=2), KDEformer(bins=7, sinks=0, window=1),
           Reformer(bins=4, sinks=1, window=2), Reformer(bins=9, sinks=0, window=3)]
NAMES = dict(ids=repr)


def inputs(seed=0, batch=2, heads=6, groups=2, queries=3, keys=40, size=16, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, h, n, size, generator=g, dtype=torch.float64).to(dtype)
                 for h, n in ((heads, queries), (groups, keys), (groups, keys)))


def gray_row(bits):
    "All codes, each one bit from the next: first those without the highest bit, then the same backwards with it."
    row = [0]
    for b in range(bits): row += [x | 1 << b for x in reversed(row)]
    return row


PLACES = {code: place for place, code in enumerate(gray_row(16))}


def code(method, x, group, groups):
    "The hash of one vector x [D]."
    y = x @ random_directions(0, groups, len(x), 16)[group]
    if isinstance(method, KDEformer): return PLACES[sum((float(z) > 0) << b for b, z in enumerate(y))]
    return int(torch.cat([y, -y]).argmax())


def bin_of(method, codes, asked, first, end):
    "Visible keys in the bin of a query."
    row = sorted(range(first, end), key=lambda j: (codes[j], j))
    place = max(0, sum(codes[j] <= asked for j in row) - 1)
    own = place * method.bins // len(row)
    return {j for p, j in enumerate(row) if p * method.bins // len(row) == own}


def brute(method, q, k, b, h, i, first, end):
    "The keys that query i of head h reads."
    groups, g = k.shape[1], h // (q.shape[1] // k.shape[1])
    read = {j for j in range(first, end) if j < first + method.sinks or j >= end - method.window}
    codes = {j: code(method, k[b, g, j], g, groups) for j in range(first, end)}
    return read | bin_of(method, codes, code(method, q[b, h, i], g, groups), first, end)


@pytest.mark.parametrize("bits", [1, 5, 12])
def test_the_place_of_a_code(bits):
    assert gray_place(torch.tensor(gray_row(bits), dtype=torch.int32)).tolist() == list(range(2**bits))


@pytest.mark.parametrize("method", METHODS, **NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_selection_is_its_definition(method, causal):
    q, k, _ = inputs()
    masks = dict(causal=causal, kv_start=torch.tensor([0, 7]), kv_end=torch.tensor([40, 31]))
    dense = method.select(q, k, **masks).dense(40)
    assert ((dense == 0) | (dense == 1)).all()
    for b, h, i in ((0, 0, 0), (0, 5, 2), (1, 2, 1), (1, 3, 0)):
        end = [40, 31][b] - (2 - i if causal else 0)
        assert set(dense[b, h, i].nonzero()[:, 0].tolist()) == brute(method, q, k, b, h, i, [0, 7][b], end)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bins_are_equal_and_every_key_is_in_one(data):
    n, bins = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 40))
    first = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(first + 1, n))
    codes = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))).view(1, 1, n)
    bound = lambda x: torch.full((1, 1, 1), x)
    asked = torch.arange(-1, 7).view(1, -1, 1)
    kept = same_bin(codes, asked, bound(first), bound(end), bins)[0, :, 0]
    for x, row in zip(asked[0, :, 0].tolist(), kept):
        want = bin_of(KDEformer(bins), codes[0, 0].tolist(), x, first, end)
        assert set(row.nonzero()[:, 0].tolist()) == want
        assert len(want) in ({math.floor((end - first) / bins), math.ceil((end - first) / bins)} - {0})


@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_one_bin_and_a_long_window_are_exact(method):
    q, k, v = inputs()
    for whole in (dataclasses.replace(method, bins=1), dataclasses.replace(method, window=99)):
        for masks in (dict(), dict(causal=True), dict(causal=True, kv_start=torch.tensor([0, 7]))):
            assert_close(whole.decode(q, k, v, **masks), attention(q, k, v, **masks), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_decode_keeps_the_dtype_and_counts(method, dtype):
    q, k, v = inputs(dtype=dtype)
    out, stats = method.decode(q, k, v, return_stats=True, kv_start=torch.tensor([0, 8]))
    assert out.dtype == dtype and out.shape == q.shape and out.isfinite().all()
    visible = torch.tensor([40, 32]).view(2, 1, 1).expand(2, 6, 3)
    assert_close(stats.density, stats.budget / visible)
    assert_close(stats.index_bytes, visible * 4)


@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_a_state_that_grew_is_a_new_one(method):
    q, k, v = inputs()
    state = method.new_state()
    for a, b in ((0, 3), (3, 30), (30, 40)): state.append(k[:, :, a:b], v[:, :, a:b])
    whole = method.build(k)
    assert torch.equal(state.rows, whole.rows) and state.rows.dtype == torch.int32
    assert torch.equal(method.scores(q, state), method.scores(q, whole))
    state.crop(25)
    state.pick_sequences(torch.tensor([1, 1]))
    state.append(k[[1, 1]][:, :, 25:], v[[1, 1]][:, :, 25:])
    assert torch.equal(method.select(q, k[[1, 1]], state=state).index, method.select(q, k[[1, 1]]).index)
    other = (Reformer if isinstance(method, KDEformer) else KDEformer)(bins=4)
    with pytest.raises(ValueError, match="state must have signs"): other.select(q, k[[1, 1]], state=state)


@pytest.mark.parametrize("kind", [KDEformer, Reformer])
@pytest.mark.parametrize("wrong", [
    dict(bins=0), dict(sinks=-1), dict(window=0), dict(bins=2.0)], ids=str)
def test_bad_settings(kind, wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))): kind(**wrong)


def test_a_guarantee_on_top():
    "The denominator is off by more than eps in no more cases than delta allows."
    q, k, _ = inputs(keys=1500, queries=1)
    method = VAttention(predictor=KDEformer(8), sinks=2, window=8, base=0.1, topk=0.1, eps=0.2, delta=0.2)
    weights, off, state = attention_weights(q, k), [], method.predictor.build(k)
    for seed in range(20):
        selection = method.select(q, k, seed=seed, state=state)
        off.append(((selection.dense(1500) * weights).sum(-1) - 1).abs())
    assert (selection.density(1500) < 1).all()
    assert (torch.stack(off) > 0.2).double().mean() < 0.2 and torch.stack(off).max() > 0.02


@pytest.mark.parametrize("method", [METHODS[0], METHODS[3]], **NAMES)
def test_in_generation(pocket, method):
    "A padded batch writes what its rows write alone; one bin writes what dense attention writes."
    model, tokenizer = pocket
    texts = ["The key of Berlin is 4711. The key of Rome is 22. The key of Berlin is", "One, two, three, four,"]
    def written(texts, method):
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        with sparsify(model, decode=method):
            out = model.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=0)
        return out[:, -5:].tolist()
    assert written(texts, method) == [written([x], method)[0] for x in texts]
    whole = dataclasses.replace(method, bins=1)
    batch = tokenizer(texts[:1], return_tensors="pt").to(model.device)
    dense = model.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=0)[:, -5:].tolist()
    assert written(texts[:1], whole) == dense
