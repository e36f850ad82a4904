"""Reformer and KDEformer against their definitions, key by key; their states against fresh ones; and in generation."""
import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_nb.attention import assert_close, attention, attention_weights
from sparse_nb.hf import sparsify
from sparse_nb.lsh import KDEformer, LshCodes, Reformer, gray_place, random_directions, same_bin
from sparse_nb.vattention import VAttention

METHODS = [KDEformer(bins=4, sinks=1, window=2), KDEformer(bins=7, bits=5, sinks=0, window=1, seed=3),
           Reformer(bins=4, sinks=1, window=2), Reformer(bins=5, directions=3, rounds=3, sinks=0, window=1),
           Reformer(bins=9, neighbour=True, sinks=0, window=3)]
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


def code(method, x, group, groups, i):
    "The hash of one vector x [D] in round i."
    if isinstance(method, KDEformer):
        y = x @ random_directions(method.seed, groups, len(x), method.bits)[group]
        return gray_row(method.bits).index(sum((float(z) > 0) << b for b, z in enumerate(y)))
    m = method.directions
    y = x @ random_directions(method.seed, groups, len(x), m * method.rounds)[group][:, i * m:i * m + m]
    return int(torch.cat([y, -y]).argmax())


def bin_of(method, codes, asked, first, end):
    "Visible keys in the bin of a query, and in those before that it reads."
    row = sorted(range(first, end), key=lambda j: (codes[j], j))
    place = max(0, sum(codes[j] <= asked for j in row) - 1)
    own = place * method.bins // len(row)
    return {j for p, j in enumerate(row) if own - method.back <= p * method.bins // len(row) <= own}


def brute(method, q, k, b, h, i, first, end):
    "The keys that query i of head h reads."
    groups, rounds, g = k.shape[1], getattr(method, "rounds", 1), h // (q.shape[1] // k.shape[1])
    read = {j for j in range(first, end) if j < first + method.sinks or j >= end - method.window}
    for n in range(rounds):
        codes = {j: code(method, k[b, g, j], g, groups, n) for j in range(first, end)}
        read |= bin_of(method, codes, code(method, q[b, h, i], g, groups, n), first, end)
    return read


@pytest.mark.parametrize("bits", [1, 5, 12])
def test_the_place_of_a_code(bits):
    assert gray_place(torch.tensor(gray_row(bits), dtype=torch.int32)).tolist() == list(range(2**bits))


@pytest.mark.parametrize("method", METHODS, **NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_selection_is_its_definition(method, causal):
    if isinstance(method, KDEformer) and method.bits > 6: method = dataclasses.replace(method, bits=6)
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
    assert_close(stats.index_bytes, visible * 4 * getattr(method, "rounds", 1))


@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_a_state_that_grew_is_a_new_one(method):
    q, k, v = inputs()
    state = method.new_state()
    for a, b in ((0, 3), (3, 30), (30, 40)): state.append(k[:, :, a:b], v[:, :, a:b])
    whole = method.build(k)
    assert torch.equal(state.rows, whole.rows) and state.rows.dtype == torch.int32
    assert torch.equal(method.scores(q, state), method.scores(q, whole))
    state.crop(25)
    state.pick_rows(torch.tensor([1, 1]))
    state.append(k[[1, 1]][:, :, 25:], v[[1, 1]][:, :, 25:])
    assert torch.equal(method.select(q, k[[1, 1]], state=state).index, method.select(q, k[[1, 1]]).index)
    other = dataclasses.replace(method, seed=99)
    with pytest.raises(ValueError, match="state must have seed 99"): other.select(q, k[[1, 1]], state=state)
    assert not torch.equal(other.build(k).rows, whole.rows)


def test_keys_hashed_by_their_own_queries():
    "Each head has codes of its own: those of its queries. With keys for queries they are those of the keys."
    method = Reformer(bins=4, rounds=2, own_query=True, sinks=0, window=1)
    q, k, v = inputs(queries=40)
    state, plain = method.new_state(), Reformer(bins=4, rounds=2, sinks=0, window=1)
    for a, b in ((0, 7), (7, 40)): state.append(k[:, :, a:b], v[:, :, a:b], q=q[:, :, a:b])
    assert state.rows.shape == (2, 2, 40, 6) and method.index_bytes(16) == 8
    for h in range(6):
        alone = LshCodes(16, 2, False, False, 0)
        alone.hash(k)  # directions of both groups
        codes = alone.hash(torch.stack([q[:, h], q[:, h]], 1))[:, h // 3]
        assert torch.equal(state.codes(6)[:, h], codes)
    same = method.new_state()
    same.append(k, v, q=k.repeat_interleave(3, 1))
    asked = q[:, :, -2:]
    assert torch.equal(method.select(asked, k, state=same).dense(40), plain.select(asked, k).dense(40))
    assert not torch.equal(method.select(asked, k, state=state).dense(40), plain.select(asked, k).dense(40))
    with pytest.raises(ValueError, match="q must be the queries of the keys"): method.select(asked, k)


@pytest.mark.parametrize("kind", [KDEformer, Reformer])
@pytest.mark.parametrize("wrong", [
    dict(bins=0), dict(sinks=-1), dict(window=0), dict(seed=-1), dict(bins=2.0)], ids=str)
def test_bad_settings(kind, wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))): kind(**wrong)


@pytest.mark.parametrize("method, wrong", [
    (KDEformer, dict(bits=0)), (KDEformer, dict(bits=25)), (Reformer, dict(directions=0)), (Reformer, dict(rounds=0)),
    (Reformer, dict(rounds=65)), (Reformer, dict(neighbour=1)), (Reformer, dict(own_query=None))], ids=str)
def test_bad_settings_of_one(method, wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))): method(**wrong)


def test_a_promise_on_top():
    "The denominator is off by more than eps in no more cases than delta allows."
    q, k, _ = inputs(keys=1500, queries=1)
    method = VAttention(predictor=KDEformer(8), sinks=2, window=8, base=0.1, topk=0.1, eps=0.2, delta=0.2)
    weights, off, state = attention_weights(q, k), [], method.predictor.build(k)
    for seed in range(20):
        selection = method.select(q, k, seed=seed, state=state)
        off.append(((selection.dense(1500) * weights).sum(-1) - 1).abs())
    assert (selection.density(1500) < 1).all()
    assert (torch.stack(off) > 0.2).double().mean() < 0.2 and torch.stack(off).max() > 0.02


@pytest.mark.parametrize("method", [METHODS[0], METHODS[4], Reformer(8, own_query=True, sinks=1, window=2)], **NAMES)
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
