"""Predictors against definitions written out in float64, their states against fresh ones, and both inside transformers'
generation
"""
import copy
import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy import stats

from sparse_nb.attention import CLASSES, Method, Streaming, TopK, assert_close, attention, attention_scores
from sparse_nb.core.index import Fitted
from sparse_nb.hash_attention import PARTS, HashAttention, hash_maps, signatures
from sparse_nb.methods.adamas import CUT, Adamas, hadamard
from sparse_nb.methods.double_sparsity import DoubleSparsity, heavy_channels
from sparse_nb.methods.magicpig import MagicPIG, inclusion_probability
from sparse_nb.methods.quest import Quest
from sparse_nb.core.block_index import BlockState
from sparse_nb.core.learnt import weights_id
from sparse_nb.hash_attention import POCKET_WEIGHTS, save_networks, trained_on
from experiments.train.hash_networks import fit_maps, hash_examples, train_hash
from sparse_nb.sketch_walk import SketchWalk
from inputs import fast
from models import FOLDER, random_maps

ALARM = 1e-8  # chance that a check of random numbers fails for a correct sampler; about 100 checks

PREDICTORS = [Quest(0.25), Quest(7, page=5), DoubleSparsity(0.25, channels=5),
              DoubleSparsity(9, channels=2, chosen=((3, 1), (0, 15))), Adamas(0.25), Adamas(11),
              HashAttention(0.25, random_maps(), 0), HashAttention(9, random_maps(), layer=2)]
METHODS = [*PREDICTORS, MagicPIG(bits=3, tables=8, sinks=2, window=4)]
NAMES = dict(ids=lambda m: repr(m).replace(FOLDER.name, ""))

def inputs(seed=0, batch=2, heads=6, groups=2, queries=3, keys=40, size=16, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, h, n, size, generator=g, dtype=torch.float64).to(dtype)
                 for h, n in ((heads, queries), (groups, keys), (groups, keys)))

def guess(method, q, k):
    "The scores of one head, by the definition: q [Q, D], all keys k [N, D] of its group"
    if isinstance(method, Quest):
        pages = [k[a:a + method.page] for a in range(0, len(k), method.page)]
        return torch.stack([torch.cat([torch.maximum(row * p.amin(0), row * p.amax(0)).sum().expand(len(p))
                                       for p in pages]) for row in q]) * q.shape[-1]**-0.5
    if isinstance(method, Adamas):
        def code(x):
            x = hadamard(x)
            return torch.bucketize(x / x.square().mean(-1, keepdim=True).sqrt(), torch.tensor([-CUT, 0, CUT]).double())
        return -(code(q)[:, None] - code(k - k.mean(0))).abs().sum(-1).double()
    raise AssertionError

def equal_bits(method, q, k, h, g):
    "The same for two networks of one layer, from the file itself"
    file = load_file(method.maps)
    def bits(side, x, head):
        w1, b1, w2, b2 = (file[f"{method.layer}.{side}_{part}"][head].double() for part in ("w1", "b1", "w2", "b2"))
        return (x @ w1 + b1).clamp(min=0) @ w2 + b2 > 0
    return (bits("q", q, h)[:, None] == bits("k", k, g)).sum(-1).double()

def labels(method, k, group):
    "Channels and rounded labels of one group's keys [N, D], which no query chose"
    chosen = (list(method.chosen[group]) if method.chosen else k.std(0).topk(method.channels).indices.sort()
              .values.tolist())
    k = k - k.mean(0)
    step = (k[:, chosen].abs().amax(-1, keepdim=True) / 7).bfloat16().double()
    return chosen, (k[:, chosen] / step).round().clamp(-7, 7) * step

def brute(method, q, k, b, h, groups):
    "The scores of head h of sequence b"
    g = h // (q.shape[1] // groups)
    if isinstance(method, HashAttention): return equal_bits(method, q[b, h], k[b, g], h, g)
    if not isinstance(method, DoubleSparsity): return guess(method, q[b, h], k[b, g])
    chosen, rows = labels(method, k[b, g], g)
    return q[b, h][:, chosen] @ rows.T * q.shape[-1]**-0.5

@pytest.mark.parametrize("method", PREDICTORS, **NAMES)
@pytest.mark.parametrize("size", [16, 24])
def test_scores_are_their_definition(method, size):
    q, k, v = inputs(size=size)
    if isinstance(method, HashAttention): method = dataclasses.replace(method, maps=random_maps(size))
    got = method.scores(q, method.build(k))
    assert got.shape == (2, 6, 3, 40) and got.dtype in (torch.float32, torch.float64)
    for b in range(2):
        for h in range(6): assert_close(got[b, h], brute(method, q, k, b, h, 2), 1e-12)

@pytest.mark.parametrize("method", PREDICTORS, **NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_selection_is_the_best_of_the_visible_keys(method, causal):
    q, k, v = inputs()
    masks = dict(causal=causal, kv_start=torch.tensor([0, 7]), kv_end=torch.tensor([40, 31]))
    state = method.build(k)
    dense = method.select(q, k, state=state, **masks).dense(40)
    for b in range(2):
        for i in range(3):
            first, end = [0, 7][b], [40, 31][b] - (2 - i if causal else 0)
            seen = method.new_state()  # by this query: what was learnt, and the keys up to its own
            if isinstance(seen, Fitted): seen.fit = state.fit
            seen.append(k[:, :, :end], v[:, :, :end])
            found = method.scores(q, seen)
            count = method.budget if isinstance(method.budget, int) else math.ceil(method.budget * (end - first) - 1e-9)
            for h in range(6):
                order = sorted(range(first, end), key=lambda j: (-float(found[b, h, i, j]), j))[:count]
                want = torch.zeros(40, dtype=torch.float64).index_fill(0, torch.tensor(order), 1)
                assert torch.equal(dense[b, h, i].double(), want)

@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_all_keys_give_exact_attention(method):
    q, k, v = inputs()
    if isinstance(method, MagicPIG): method = MagicPIG(bits=3, tables=8, window=99)
    else: method = type(method)(**{**{f: getattr(method, f) for f in method.__dataclass_fields__}, "budget": 1.0})
    for masks in (dict(), dict(causal=True), dict(causal=True, kv_start=torch.tensor([0, 7]))):
        assert_close(method.decode(q, k, v, **masks), attention(q, k, v, **masks), 1e-12)

def append(state, k, shown):
    "Append keys with what a cache says of them, to a state that observes it"
    state.append(k, k, **({"shown": shown} if "shown" in state.observes else {}))

@pytest.mark.parametrize("method", METHODS, **NAMES)
@pytest.mark.parametrize("cuts", [(40,), (12, 40), (3, 9, 30, 31, 40)])
def test_a_padded_row_in_pieces_chooses_as_the_row_alone(method, cuts):
    "The same places of a row arrive in the same pieces, with padding before them and without, NaN in the padding"
    q, k, v = inputs()
    start, state, alone = 7, method.new_state(), method.new_state()
    shown = torch.arange(40) >= torch.tensor([[0], [start]])
    spoilt = k.masked_fill(~shown[:, None, :, None], math.nan)
    for a, b in zip((0, *cuts), cuts):
        append(state, spoilt[:, :, a:b], shown[:, a:b])
        if b > start: alone.append(*(k[1:, :, max(a, start):b],) * 2)
    together = method.select(q, spoilt, causal=True, kv_start=torch.tensor([0, start]), state=state).dense(40)
    assert_close(together[1:, ..., start:], method.select(q[1:], k[1:, :, start:], causal=True, state=alone).dense(33))
    assert not together[1, ..., :start].any()

@pytest.mark.parametrize("method", [x for x in METHODS if "shown" in x.new_state().observes], **NAMES)
def test_hidden_keys_that_count_would_be_seen(method):
    "The check above can fail: an index that is not told what is padding chooses otherwise"
    q, k, v = inputs()
    if getattr(method, "chosen", None): pytest.skip("channels that are given learn nothing")
    k[1, :, :7] *= 9
    masks = dict(causal=True, kv_start=torch.tensor([0, 7]))
    deaf = method.new_state()
    deaf.append(k, k)
    assert not torch.equal(method.select(q, k, state=deaf, **masks).dense(40), method.select(q, k, **masks).dense(40))

@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_a_count_means_all_where_there_are_fewer(method):
    "One short row in a padded batch reads all its keys, the other its budget, and `Stats` say so"
    q, k, v = inputs()
    if isinstance(method, MagicPIG): method = MagicPIG(bits=3, tables=8, sinks=10, window=20)
    else: method = dataclasses.replace(method, budget=25)
    masks = dict(kv_start=torch.tensor([0, 26]))
    out, stats_ = method.decode(q, k, v, return_stats=True, **masks)
    assert_close(out[1], attention(q, k, v, **masks)[1], 1e-12)
    assert (stats_.budget[1] == 14).all() and (stats_.density[1] == 1).all() and (stats_.values_read[1] == 14).all()
    if isinstance(method, MagicPIG): assert ((stats_.budget[0] >= 30) & (stats_.budget[0] <= 40)).all()
    else: assert (stats_.budget[0] == 25).all() and (stats_.density[0] == 25 / 40).all()
    assert_close(stats_.index_bytes, torch.tensor([40.0, 14.0]).view(2, 1, 1).expand(2, 6, 3) * method.index_bytes(16))
    alone, counted = method.decode(q[1:], k[1:, :, 26:], v[1:, :, 26:], return_stats=True)
    assert_close(alone, out[1:], 1e-12)
    assert torch.equal(counted.budget, stats_.budget[1:])

@pytest.mark.parametrize("page", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("kind", ["normal", "positive", "negative", "zero"])
def test_the_bound_of_a_page_holds(page, kind):
    q, k, v = inputs(keys=50)
    k = {"normal": k, "positive": k.abs(), "negative": -k.abs(), "zero": k * 0}[kind]
    bound = Quest(page=page).scores(q, Quest(page=page).build(k))
    assert (bound - attention_scores(q, k)).min() >= -1e-12
    if page == 1: assert_close(bound, attention_scores(q, k), 1e-12) if kind != "zero" else None

def test_quest_reads_whole_pages_and_cuts_the_last():
    q, k, v = inputs(keys=64, queries=1)
    method, bound = Quest(27, page=8), Quest(page=8).scores(q, Quest(page=8).build(k))[:, :, 0, ::8]
    kept = method.select(q, k).dense(64).unflatten(-1, (8, 8))[:, :, 0]
    for b in range(2):
        for h in range(6):
            order = bound[b, h].argsort(descending=True)
            assert (kept[b, h].sum(-1)[order].tolist() == [8, 8, 8, 3, 0, 0, 0, 0]
                    and kept[b, h, order[3], :3].sum() == 3)

def test_index_bytes():
    assert [Quest(page=p).index_bytes(128) for p in (1, 16)] == [512, 32]
    assert [DoubleSparsity(channels=c).index_bytes(128) for c in (16, 3)] == [10, 3.5]
    assert [Adamas().index_bytes(d) for d in (64, 80, 128)] == [16, 32, 32]
    assert MagicPIG(10, 150).index_bytes(64) == 187.5
    assert [HashAttention().index_bytes(d) for d in (64, 80, 128)] == [4, 4, 4]

@pytest.mark.parametrize("size", [1, 2, 16, 24, 80])
def test_hadamard_is_a_rotation(size):
    import scipy.linalg
    x = torch.randn(7, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = 1 << (size - 1).bit_length()
    assert_close(hadamard(x), F.pad(x, (0, whole - size)) @ torch.tensor(scipy.linalg.hadamard(whole)).double()
                 / whole**0.5, 1e-12)
    assert_close(hadamard(x) @ hadamard(x).T, x @ x.T, 1e-12)

def test_heavy_channels():
    q, k, v = inputs(batch=1)
    q[..., 4], k[:, 0, :, 9], k[:, 1, :, 4], k[:, 1, :, 5] = 0, 30 * k[:, 0, :, 9], 1000 * k[:, 1, :, 4], 1000.0
    found = heavy_channels(q, k, 3)  # no query looks at channel 4, and a constant says nothing of the order of keys
    assert 9 in found[0] and 4 not in found[0] + found[1] and 5 not in found[1]
    assert all(x == tuple(sorted(x)) for x in found)
    weight = torch.stack([q[0, 3 * g:3 * g + 3].abs().mean((0, 1)) * k[0, g].std(0, correction=0) for g in range(2)])
    assert found == tuple(tuple(sorted(x)) for x in weight.topk(3).indices.tolist())
    method = DoubleSparsity(channels=3, chosen=found)
    assert method.build(k).numbers().tolist() == [[list(x) for x in found]]
    first = torch.stack([(q[0, 3 * g:3 * g + 3, 0].abs().mean(0) * k[0, g].std(0, correction=0)).topk(3).indices
                         for g in range(2)])
    state = DoubleSparsity(channels=3).state_for(q, k, None)  # the first query chooses where no prompt was observed
    assert state.numbers()[0].tolist() == first.sort(-1).values.tolist()

def test_a_prompts_queries_choose_channels():
    q, k, v = inputs(queries=40)
    q, k, v = q.cpu(), k.cpu(), v.cpu()
    for b in range(2): k[b, :, :, 3] *= 50
    q[0, :, :, 3], q[1, :, 5:, 3], q[1, :, :5, 3] = 0, 0, 1000  # sequence 1 looks at channel 3, but in padding alone
    shown = torch.arange(40) >= torch.tensor([[0], [5]])
    state = DoubleSparsity(channels=4).new_state()
    state.append(k, v, shown=shown, q=q)
    assert not (state.numbers() == 3).any()
    for b, first in enumerate((0, 5)):
        weight = (q[b, :, first:].unflatten(0, (2, 3)).abs().mean((1, 2)) * k[b, :, first:].std(1, correction=0))
        assert state.numbers()[b].tolist() == weight.topk(4).indices.sort(-1).values.tolist()
    blind = DoubleSparsity(channels=4).new_state()
    with pytest.warns(UserWarning, match="no query was observed"): blind.append(k, v, shown=shown)
    assert (blind.numbers() == 3).any(-1).all()

@pytest.mark.parametrize("method", [Adamas(0.25), DoubleSparsity(0.25, channels=4, chosen=((0, 1, 2, 3), (4, 5, 6, 7))),
                                    DoubleSparsity(0.25, channels=4), MagicPIG(2, 6)], **NAMES)
def test_a_vector_added_to_all_keys_changes_no_choice(method):
    q, k, v = inputs()
    c = torch.randn(2, 2, 1, k.shape[3], generator=torch.Generator().manual_seed(5)).to(k) * 64
    near, far = (method.select(q, x) for x in (k, k + c))
    assert torch.equal(near.dense(40) > 0, far.dense(40) > 0)

# states

def pair(n, rows=2, seed=0, size=8):
    return torch.randn(2, rows, 2, n, size, generator=torch.Generator().manual_seed(seed)).unbind(0)

def fresh(method, state, k):
    "An index built at once, with what `state` learnt from its first keys"
    new = method.new_state()
    if isinstance(new, Fitted): new.fit = state.fit
    new.append(k, k)
    return new

OPS = st.lists(st.tuples(st.sampled_from(["append", "append", "select", "crop", "reset", "copy"]),
                         st.integers(0, 10**6)), min_size=1, max_size=14)
KEEPERS = [Quest(page=1), Quest(page=5), Quest(page=16), DoubleSparsity(channels=3), Adamas(),
           HashAttention(maps=random_maps(8, 4), layer=0), MagicPIG(bits=3, tables=5)]

@pytest.mark.parametrize("method", KEEPERS, **NAMES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(OPS)
def test_a_state_is_a_fresh_one_after_any_changes(method, ops):
    state, keys = method.new_state(), None
    for op, x in ops:
        g = torch.Generator().manual_seed(x)
        if op == "append":
            new = pair(1 + x % 40, 2 if keys is None else len(keys), x)[0]
            first = keys is None
            state.append(new, new)
            keys = new if first else torch.cat([keys, new], 2)
            if first and isinstance(state, Fitted):
                assert_close(state.fit.double(), method.build(new).fit.double(), 1e-6)
        if keys is None: continue
        if op == "select":
            rows = torch.randint(len(keys), (1 + x % 4,), generator=g)
            state.pick_sequences(rows)
            keys = keys[rows]
        if op == "crop":
            # less than `BlockState.KEPT`, in sum as well unless many follow one another
            length = max(0, keys.shape[2] - x % 40)
            state.crop(length)
            keys = keys[:, :, :length]
        if op == "reset":
            state.reset()
            keys = None
            assert len(state) == 0 and state.rows is None
            continue
        if op == "copy": state = copy.deepcopy(state)
        assert len(state) == keys.shape[2]
        if not keys.shape[2]: continue
        want = fresh(method, state, keys)
        q = torch.randn(len(keys), 4, 2, 8, generator=g)
        if not isinstance(state, BlockState):
            assert torch.equal(state.rows, want.rows)
            continue
        low, high = (want.rows[:, :, :, i] for i in (0, 1))
        assert (state.rows.shape == want.rows.shape and (state.rows[:, :, :, 0] <= low).all()
                and (state.rows[:, :, :, 1] >= high).all())
        assert (method.scores(q, state) >= attention_scores(q, keys) - 1e-5).all()

@pytest.mark.parametrize("page", [3, 16, 40])
def test_pages_are_exact_after_cuts_of_up_to_64_keys(page):
    g, state, keys = torch.Generator().manual_seed(page), Quest(page=page).new_state(), pair(300)[0]
    state.append(keys, keys)
    for step in range(60):
        cut = int(torch.randint(0, 65, (), generator=g))
        # as drafts do: no more is taken back than was put on
        keys = torch.cat([keys[:, :, :keys.shape[2] - cut], pair(cut + 1, seed=step)[0]], 2)
        state.crop(keys.shape[2] - cut - 1)
        assert torch.equal(state.rows, Quest(page=page).build(keys[:, :, :len(state)]).rows)
        state.append(*(keys[:, :, len(state):],) * 2)
        assert torch.equal(state.rows, Quest(page=page).build(keys).rows)
        assert state.tail.shape[2] <= BlockState.KEPT + page

@pytest.mark.parametrize("method", [Quest(page=4), SketchWalk(block=4)], ids=lambda m: type(m).__name__)
def test_a_new_key_has_one_block_worked_out(method):
    "What a block without a key is, is known: also of other sequences, and once more for gradients after inference."
    keys, state, made = pair(30)[0], method.new_state(), []
    with torch.inference_mode(): state.append(keys[:, :, :9], keys[:, :, :9])
    reduce = state.reduce
    state.reduce = lambda *given: made.append(state.count) or reduce(*given)
    for n in range(9, 20): state.append(*(keys[:, :, n:n + 1],) * 2)
    state.pick_sequences(rows := torch.tensor([1, 1, 0]))
    keys = keys[rows]
    for n in range(20, 30): state.append(*(keys[:, :, n:n + 1],) * 2)
    assert made == [10, *range(10, 31)]
    (at_once := method.new_state()).append(keys, keys)
    assert torch.equal(state.rows, at_once.rows)

@pytest.mark.parametrize("page", [1, 3, 16, 40])
def test_pages_of_padded_sequences_are_those_of_each_alone(page):
    "Appended, cut, reordered at random: the boxes of every sequence are those of its own shown keys, from the first on"
    g, state, method = torch.Generator().manual_seed(page), Quest(page=page).new_state(), Quest(page=page)
    keys, starts = torch.zeros(3, 2, 0, 8), torch.tensor([0, 5, 50])
    drawn = 0
    for step in range(40):
        n = int(torch.randint(1, 60, (), generator=g))
        new = torch.randn(len(keys), 2, n, 8, generator=g)
        place = keys.shape[2] + torch.arange(n)
        state.append(new, new, shown=place >= starts[:, None])
        keys = torch.cat([keys, new], 2)
        state.crop(keys.shape[2] - min(n, int(torch.randint(0, 60, (), generator=g))))
        keys = keys[:, :, :len(state)]
        rows = torch.randint(3, (3,), generator=g)
        state.pick_sequences(rows)
        keys, starts = keys[rows], starts[rows]
        if step % 10 == 9:  # other sequences, so that the paddings stay apart
            state, keys, starts = method.new_state(), keys[:, :, :0], torch.tensor([3, 17, 70])
            continue
        for b, start in enumerate(starts.tolist()):
            own = keys[b:b + 1, :, start:]
            blocks = -(-own.shape[2] // page)
            low, high = state.rows[b, :, blocks:].unbind(2)
            assert (low == math.inf).all() and (high == -math.inf).all()
            if not blocks: continue
            assert torch.equal(state.rows[b:b + 1, :, :blocks], method.build(own).rows)
            drawn += start > 0
    assert drawn > 40

def test_a_page_without_a_shown_key_has_no_bound():
    q, k, v = inputs()
    shown = torch.ones(2, 40, dtype=torch.bool)
    shown[1, 8:16] = False
    state = Quest(page=8).new_state()
    state.append(k, k, shown=shown)
    bound = Quest(page=8).scores(q, state)
    assert (bound[1, ..., 8:16] == -math.inf).all()
    assert bound[0].isfinite().all() and bound[1, ..., 16:].isfinite().all()

@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_a_given_state_is_the_built_one(method):
    q, k, v = inputs()
    state = method.new_state()
    for part in zip(k.split(11, 2), v.split(11, 2)): state.append(*part)
    if isinstance(state, Fitted):
        state.reset()
        for part in slice(38), slice(38, None):  # learns of query 0, and what that sees
            state.append(k[:, :, part], v[:, :, part], **dict(q=q[:, :, :1]) if "q" in state.observes else {})
    assert torch.equal(method.decode(q, k, v, causal=True, state=state), method.decode(q, k, v, causal=True))
    state.crop(30)
    with pytest.raises(ValueError, match="state must hold as many keys as k, 40, got 30"):
        method.decode(q, k, v, state=state)
    with pytest.raises(ValueError, match=r"state must be for \[B, G\] = \[1, 2\], got \[2, 2\]"):
        method.decode(q[:1], k[:1, :, :30], v[:1, :, :30], state=state)
    with pytest.raises(TypeError, match="state must be .* or None, got list"): method.decode(q, k, v, state=[])

def test_what_is_learnt_follows_the_sequences_and_is_forgotten():
    a, b = pair(30)[0], pair(30, seed=1)[0]
    a[0, 0, :, 5], b[0, 0, :, 6] = a[0, 0, :, 5] * 100, b[0, 0, :, 6] * 100
    state = DoubleSparsity(channels=1).new_state()
    state.append(a, a)
    state.append(b, b)
    assert state.numbers()[0, 0].tolist() == [5]
    state.pick_sequences(torch.tensor([1, 0]))
    assert state.numbers()[1, 0].tolist() == [5]
    state.reset()
    state.append(b, b)
    assert state.numbers()[0, 0].tolist() == [6]
    with pytest.raises(ValueError, match="k must have the batch size of the state, 2, got 1"):
        state.append(a[:1], a[:1])
    assert state.numbers()[0, 0].tolist() == [6] and len(state) == 30

# sampling

@pytest.mark.parametrize("bits, tables", fast([(1, 2), (2, 2), (2, 5), (4, 12)], 1))
def test_chances_are_how_often_keys_are_sampled(bits, tables):
    g, seeds = torch.Generator().manual_seed(1), 1500
    q, k = torch.randn(1, 2, 1, 6, generator=g), torch.randn(1, 1, 20, 6, generator=g)
    hits = sum((MagicPIG(bits, tables, sinks=0, window=1, seed=s).select(q, k).dense(20) > 0).long()
               for s in range(seeds))[0, :, 0]
    chance = inclusion_probability(F.cosine_similarity(q[:, :, 0, None], k - k.mean(2, keepdim=True), dim=-1),
                                   bits, tables)[0]
    assert (hits[:, -1] == seeds).all()
    for h in range(2):
        for n, p in zip(hits[h, :-1].tolist(), chance[h, :-1].tolist()):
            assert stats.binomtest(n, seeds, p).pvalue > ALARM

@pytest.mark.parametrize("bits, tables", [(1, 2), (3, 7), (8, 32), (10, 150), (16, 1000)])
def test_chances_are_the_binomial_law(bits, tables):
    angle = torch.linspace(1e-3, math.pi - 1e-3, 200, dtype=torch.float64)
    got, want = (inclusion_probability(angle.cos(), bits, tables),
                 stats.binom.sf(1, tables, ((1 - angle / math.pi)**bits).numpy()))
    assert (got >= 0).all() and (got <= 1).all()
    kept = want > 1e-280
    assert (got.numpy()[kept] / want[kept] - 1).__abs__().max() < 1e-6

def test_weights_are_one_over_the_chance_and_no_key_counts_twice():
    q, k, v = inputs(keys=60)
    method = MagicPIG(bits=2, tables=6, sinks=3, window=5)
    masks = dict(causal=True, kv_start=torch.tensor([0, 10]))
    selection, state = method.select(q, k, **masks), method.build(k, kv_start=masks["kv_start"], queries=3)
    centre = torch.stack([k[0, :, :58].mean(1), k[1, :, 10:58].mean(1)])  # of what the first query sees
    assert_close(state.fit, centre, 1e-12)
    chance = inclusion_probability(F.cosine_similarity(q[..., None, :], (k - centre[:, :, None])
                                                       .repeat_interleave(3, 1)[:, :, None], dim=-1), 2, 6)
    hits = method.scores(q, state)
    for b in range(2):
        for i in range(3):
            first, end = [0, 10][b], 60 - 2 + i
            for j in range(60):
                sure = first <= j < first + 3 or end - 5 <= j < end
                want = (torch.where(hits[b, :, i, j] >= 2, 1 / chance[b, :, i, j], 0.0) if first <= j < end
                        else torch.zeros(6).double())
                assert_close(selection.dense(60)[b, :, i, j], torch.ones(6) if sure else want, 1e-9)

def test_hyperplanes_are_drawn_once_and_by_seed():
    q, k, v = inputs()
    one = MagicPIG(4, 8, window=1).build(k)
    assert (torch.equal(one.rows, MagicPIG(4, 8).build(k).rows)
            and not torch.equal(one.rows, MagicPIG(4, 8, seed=1).build(k).rows))
    assert one.planes.shape == (2, 16, 32) and not torch.equal(one.planes[0], one.planes[1])
    z = torch.cat([MagicPIG(4, 8, seed=s).build(k).planes.flatten() for s in range(100)])
    assert stats.kstest(z.numpy(), "norm").pvalue > ALARM
    out = MagicPIG(4, 8).decode(q, k, v, seed=3)
    assert torch.equal(out, MagicPIG(4, 8).decode(q, k, v, seed=4))

@pytest.mark.slow
def test_the_estimate_is_unbiased_over_seeds():
    "Numerator and denominator, for fixed keys: the mean of each weight is 1"
    q, k, v = inputs(batch=1, heads=2, queries=1, keys=30)
    weights = torch.stack([MagicPIG(2, 6, sinks=0, window=1, seed=s).select(q, k).dense(30)[0, :, 0]
                           for s in range(1500)]).double()
    z = (weights.mean(0) - 1) / (weights.std(0) / 1500**0.5)
    often = (weights > 0).double().mean(0) > 0.05  # nearly normal
    often[:, -1] = False
    assert often.sum() > 20 and z[often].abs().max() < stats.norm.isf(ALARM / 2)

# learned signatures

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_signature_is_the_number_of_its_signs(dtype):
    number = torch.tensor([0, 1, -1, -2, 2**31 - 1, -2**31, 0x55555555, -0x55555556]
                          + torch.randint(-2**31, 2**31, (500,), generator=torch.Generator().manual_seed(0)).tolist())
    sign = torch.tensor([[1.0 if int(n) >> j & 1 else -1.0 for j in range(32)] for n in number], dtype=dtype)
    eye = torch.eye(32)
    pairs = [x[None] for x in (torch.cat([eye, -eye], 1), torch.zeros(64), torch.cat([eye, -eye]), torch.zeros(32))]
    got = signatures(sign[None, None] / 8, *pairs)
    assert got.dtype == torch.int32 and torch.equal(got[0, 0].long(), number)

def test_random_hyperplanes_are_networks_of_this_kind():
    "Equal bits of the same hyperplanes for query and key count angles: a binomial law"
    k = torch.nn.functional.normalize(torch.randn(1, 1, 3000, 16, generator=torch.Generator().manual_seed(1),
                                                  dtype=torch.float64), dim=-1)
    q, method = k[:, :, :1], HashAttention(maps=random_maps(16, 1, 1, planes=True), layer=0)
    state = method.build(k)
    drawn = torch.randn(16, 32, generator=torch.Generator().manual_seed(5)).half().double()
    assert torch.equal(method.scores(q, state)[0, 0, 0].double(),
                       ((q @ drawn > 0) == (k @ drawn > 0)).sum(-1)[0, 0].double())
    assert method.scores(q, state)[0, 0, 0, 0] == 32

def test_networks_are_loaded_once_and_copies_are_cheap():
    assert (hash_maps("pocket", 2)["k_w1"] is hash_maps("pocket", 2)["k_w1"] and hash_maps("pocket", 2)["k_w1"].shape
            == (2, 64, 64))
    state = HashAttention(layer=2).build(POCKET[1])
    other = copy.deepcopy(state)
    assert (vars(other).keys() == {"rows", "static", "maps", "layer"} and torch.equal(other.rows, state.rows)
            and other.rows is not state.rows)
    assert state.rows.shape == (2, 2, 40, 1) and state.rows.dtype == torch.int32
    with pytest.raises(ValueError, match="maps must be 'pocket' or a safetensors file of networks, got 'no/such"):
        HashAttention(maps="no/such.safetensors", layer=0).build(POCKET[1])
    with pytest.raises(ValueError, match="maps must be 'pocket' or a safetensors file of networks"):
        HashAttention(maps=__file__, layer=0).build(POCKET[1])

def test_networks_are_refused_by_other_weights(tmp_path):
    "The shipped networks, a file that says what it was trained on, and one that does not; alone and inside vAttention"
    from sparse_nb import pocket
    from sparse_nb.vattention import VAttention
    model, _ = pocket.load()
    other = type(model)(model.config)
    assert weights_id(model) == trained_on("pocket") == POCKET_WEIGHTS != weights_id(other)
    assert weights_id(model.bfloat16()) == POCKET_WEIGHTS == weights_id(model.half())
    path = str(tmp_path / "networks.safetensors")
    save_networks(load_file(random_maps(64, layers=6)), path, other)
    for wrap in (lambda x: x, lambda x: VAttention(predictor=x)):
        wrap(HashAttention()).check_model(model)
        wrap(HashAttention(maps=path)).check_model(other)
        wrap(HashAttention(maps=random_maps(64, layers=6))).check_model(other)
        with pytest.raises(ValueError, match="model must have the weights that the networks 'pocket' were trained on"):
            wrap(HashAttention()).check_model(other)
        with pytest.raises(ValueError, match="model must have the weights that the networks .* were trained on"):
            wrap(HashAttention(maps=path, layer=2)).check_model(model)
    with torch.no_grad(): other.model.layers[3].mlp.up_proj.weight += 0.01
    with pytest.raises(ValueError, match="model must have the weights"): HashAttention(maps=path).check_model(other)
    for method in (Quest(), MagicPIG(), TopK(), VAttention()): method.check_model(other)

WRONG = [
    ("k_w1", lambda x: x.index_fill(1, torch.tensor(3), math.nan), "must be finite, got NaN or inf in k_w1"),
    ("q_b2", lambda x: x / 0, "must be finite, got NaN or inf in q_b2"),
    *(("q_w2", lambda x, kind=kind: x.to(kind), f"must have q_w2 in float16, .* got {kind}")
      for kind in (torch.int32, torch.bool, torch.complex64)),
    ("k_b1", lambda x: x[:, :5], r"must have k_b1 of shape \[2, 64\], got \[2, 5\]"),
    ("q_w2", lambda x: x[..., :31], r"must have q_w2 of shape \[6, 64, 32\], got \[6, 64, 31\]"),
    ("q_w1", lambda x: x[:, :8], r"must have q_w1 for a multiple of 2 heads of size 16, got \[6, 8, 64\]"),
    ("q_w1", lambda x: x[:5], r"must have q_w1 for a multiple of 2 heads of size 16, got \[5, 16, 64\]"),
    ("k_w1", lambda x: x[0], r"must have k_w1 of shape \[heads, D, M\] .* got \[16, 64\]"),
    ("k_b2", None, "must have k_b2, got k_"), ("q_w1", None, "must have q_w1 .* got nothing")]

@pytest.mark.parametrize("part, change, message", WRONG, ids=[f"{x[0]} {x[2][10:40]}" for x in WRONG])
def test_wrong_networks_are_refused_by_file_layer_and_part(tmp_path, part, change, message):
    path, networks, k = str(tmp_path / "networks.safetensors"), load_file(random_maps()), inputs()[1]
    if change is None: del networks[f"1.{part}"]
    else: networks[f"1.{part}"] = change(networks[f"1.{part}"].float()).contiguous()
    save_file(networks, path)
    HashAttention(maps=path, layer=0).build(k)
    with pytest.raises(ValueError, match=f"layer 1 of the networks '{path}' {message}"):
        HashAttention(maps=path, layer=1).build(k)
    with pytest.raises(ValueError, match=f"networks of layer 1 {message}"):
        save_networks(networks, tmp_path / "other", torch.nn.Linear(1, 1))
    assert os.listdir(tmp_path) == ["networks.safetensors"]

def test_a_file_of_networks_is_written_whole_and_read_anew(tmp_path, monkeypatch):
    path, networks, model = tmp_path / "networks.safetensors", load_file(random_maps()), torch.nn.Linear(1, 1)
    save_networks(networks, path, model)
    known = hash_maps(str(path), 0)["k_w1"]
    assert hash_maps(str(path), 0)["k_w1"] is known
    def stop(parts, name, **more):
        Path(name).write_bytes(b"half of it")
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("safetensors.torch.save_file", stop)
        save_networks(networks, path, model)
    assert os.listdir(tmp_path) == [path.name] and hash_maps(str(path), 0)["k_w1"] is known
    networks["0.k_w1"] = -networks["0.k_w1"]
    save_networks(networks, path, model)
    assert torch.equal(hash_maps(str(path), 0)["k_w1"], -known)
    with pytest.raises(ValueError, match="networks must be named by layer and one of k_w1, .* got 'k_w1'"):
        save_networks({"k_w1": known}, path, model)

def problem(seed, keys=400, queries=40):
    "Keys with a pattern of six signs among loud channels, and queries that look for a pattern"
    g = torch.Generator().manual_seed(seed)
    pattern = torch.randint(0, 2, (keys, 6), generator=g) * 2.0 - 1
    k = torch.cat([pattern * (1 + 0.1 * torch.randn(keys, 6, generator=g)), 3 * torch.randn(keys, 26, generator=g)], 1)
    asked = pattern[torch.randint(keys, (queries,), generator=g)]
    return ((torch.cat([4 * asked, torch.zeros(queries, 26)], 1)[None], k[None], torch.full((queries,), keys - 1)),
            asked @ pattern.T == 6)

def test_training_finds_planted_signs(tmp_path):
    losses, path = [], tmp_path / "planted.safetensors"
    learnt = fit_maps([problem(s)[0] for s in range(8)], steps=250, share=(0.01, 0.02),
                      progress=lambda step, loss: losses.append(loss))
    save_file({f"0.{part}": x for part, x in learnt.items()}, path)
    hits, total = {}, 0
    for seed in range(100, 105):  # others than it was trained on
        (q, k, _), right = problem(seed)
        total += int(right.sum())
        for name, maps in (("trained", str(path)), ("drawn", random_maps(32, 1, 1, planes=True))):
            method = HashAttention(maps=maps, layer=0)
            rank = method.scores(q[None], method.build(k[None]))[0, 0].sort(dim=-1, descending=True,
                                                                                stable=True).indices.argsort(-1)
            hits[name] = hits.get(name, 0) + int((right & (rank < right.sum(1, keepdim=True))).sum())
    assert len(losses) == 250 and sum(losses[-20:]) < 0.7 * sum(losses[:20])
    assert stats.binomtest(hits["trained"],
                           total).proportion_ci(1 - 2 * ALARM, "exact").low > 0.8 > 0.3 > stats.binomtest(
                               hits["drawn"], total).proportion_ci(1 - 2 * ALARM, "exact").high

def test_training_is_fixed_by_its_seed():
    g = torch.Generator().manual_seed(3)
    examples = [(torch.randn(4, 6, 8, generator=g), torch.randn(2, 50, 8, generator=g),
                 torch.tensor([9, 20, 30, 40, 45, 49])) for _ in range(3)]
    one, same, other = (fit_maps(examples, steps=5, hidden=16, seed=s) for s in (1, 1, 2))
    assert {part: tuple(x.shape) for part, x in one.items()} == dict(k_w1=(2, 8, 16), k_b1=(2, 16), k_w2=(2, 16, 32),
                                                                     k_b2=(2, 32), q_w1=(4, 8, 16), q_b1=(4, 16),
                                                                     q_w2=(4, 16, 32), q_b2=(4, 32))
    assert all(torch.equal(one[x], same[x]) for x in PARTS) and not torch.equal(one["k_w1"], other["k_w1"])
    assert not any(x.requires_grad for x in one.values()) and all(x.isfinite().all() for x in one.values())

def test_training_sees_no_later_key():
    "What stands behind a query's place has no part in what is learnt from it"
    q, k, at = torch.randn(2, 6, 8), torch.randn(1, 60, 8), torch.tensor([9, 20, 30, 35, 38, 39])
    later, losses = k.clone(), ([], [])
    later[:, 40:] = 100 * torch.randn(1, 20, 8)
    for x, found in zip((k, later), losses):
        fit_maps([(q, k[:, :40], at)] * 16 + [(q, x, at)], steps=20, hidden=16,
                 progress=lambda step, loss: found.append(loss))
    assert losses[0] == losses[1]

@pytest.fixture(scope="module")
def pocket_heads():
    "What the pocket model asks at the end of prompts that it was not trained on: the examples of each layer"
    from sparse_nb import pocket
    from sparse_nb.tasks import TASKS, make
    model, tokenizer = pocket.load()
    return hash_examples(model,
                         [tokenizer(make(task, length, seed=50_000, tokenizer=tokenizer).prompt, return_tensors="pt")
                          .input_ids[0] for task in TASKS for length in (700, 1500)], last=8, others=8)

def test_examples_are_what_the_model_asks(pocket_heads):
    assert list(pocket_heads) == list(range(6)) and {len(x) for x in pocket_heads.values()} == {14}
    for q, k, at in pocket_heads[3]:
        n = k.shape[1]
        assert q.shape == (6, 16, 64) and k.shape == (2, n, 64) and at[-8:].tolist() == list(range(n - 8, n))
        assert n // 8 <= at[0] and (at.diff() > 0).all()

def test_the_shipped_networks_find_more_than_hyperplanes(pocket_heads, tmp_path):
    """Recall of the heaviest 5 % of the keys, mean over all heads, prompt by prompt: Student's interval for each side
    of a level
    """
    def recall(layer, example, maps):
        q, k, at = (x[:, -8:][None] if x.ndim == 3 and len(x) == 6 else x for x in example)
        found, top = (m.select(q, k[None], causal=True).dense(k.shape[1]) > 0
                      for m in (HashAttention(0.05, maps, layer), TopK(0.05)))
        return float(((found & top).sum(-1) / top.sum(-1)).mean())
    drawn = dict(load_file(random_maps(64, layers=6, planes=True)))
    for layer, examples in pocket_heads.items():
        drawn[f"{layer}.k_b1"] = -(torch.cat([k for _, k, _ in examples], 1).mean(1, keepdim=True)
                                   @ drawn[f"{layer}.k_w1"].float())[:, 0].half()  # of centred keys
    save_file(drawn, tmp_path / "drawn.safetensors")
    got = {maps: torch.tensor([[recall(layer, x, maps) for x in examples] for layer, examples in pocket_heads.items()])
           .double().mean(0) for maps in ("pocket", str(tmp_path / "drawn.safetensors"))}
    shipped, planes = got.values()
    def end(x, side): return float(x.mean() + side * stats.t.isf(ALARM, len(x) - 1) * x.std() / len(x)**0.5)
    assert end(planes, 1) < 0.35 < end(shipped, -1), (planes.mean(), shipped.mean())

def test_the_shipped_file_is_small_and_whole():
    from sparse_nb import pocket
    path = pocket.path().parent / "pocket_methods" / "hash_attention.safetensors"
    held = load_file(path)
    assert path.stat().st_size < 2**20 and set(held) == {f"{layer}.{part}" for layer in range(6) for part in PARTS}
    assert all(x.dtype == torch.float16 and x.isfinite().all() for x in held.values())

def test_train_hash_makes_a_file_for_every_layer(tmp_path):
    from sparse_nb.vattention import VAttention
    from inputs import IDS
    from models import build
    model, told = build("llama"), []
    learnt = train_hash(model, [IDS[0], IDS[0].flip(0)], steps=3, hidden=16, last=4, others=4,
                        progress=lambda layer, step, loss: told.append((layer, step)))
    save_file(learnt, tmp_path / "llama.safetensors")
    assert told == [(layer, step) for layer in range(2) for step in range(3)]
    with pytest.raises(ValueError, match="prompts must be long enough for 96 queries in the last 7/8 of each, got one "
                       "of 40 tokens"):
        train_hash(model, [IDS[0]])
    method, found = HashAttention(0.25, str(tmp_path / "llama.safetensors")), []
    for decode in (lambda layer: HashAttention(0.25, method.maps, layer), method,
                   VAttention(sinks=1, window=2, topk=0.25, base=8, predictor=method),
                   lambda layer: VAttention(sinks=1, window=2, topk=0.25, base=8,
                                            predictor=HashAttention(maps=method.maps, layer=layer))):
        with sparsify(model, decode=decode, stats=True, seed=1) as session:
            found.append((ids_of(model), session.stats()))
    assert set(found[0][1].index.get_level_values("layer")) == {0, 1}
    for i in (0, 2): assert torch.equal(found[i][0], found[i + 1][0]) and found[i][1].equals(found[i + 1][1])

# settings and bad input

def test_the_base_is_no_method():
    assert {"Quest", "DoubleSparsity", "Adamas", "HashAttention", "MagicPIG"} <= CLASSES.keys()
    with pytest.raises(ValueError, match="method must be one of"): Method.from_json('{"method": "KeyScorer"}')

Q, K, V = inputs(dtype=torch.float32)
POCKET = inputs(dtype=torch.float32, size=64)
@pytest.mark.parametrize("call, error, message", [
    (lambda: Quest(0), ValueError, "budget must be at least 1 key, got 0"),
    (lambda: Quest(1.5), ValueError, r"budget must lie in \(0, 1\]"),
    (lambda: Quest("0.1"), TypeError, "budget must be an int"),
    (lambda: Quest(page=0), ValueError, "page must be at least 1, got 0"),
    (lambda: Quest(page=2.0), TypeError, "page must be an int, got float"),
    (lambda: Quest(page=True), TypeError, "page must be an int, got bool"),
    (lambda: DoubleSparsity(True), TypeError, "budget must be an int"),
    (lambda: DoubleSparsity(channels=0), ValueError, "channels must be at least 1, got 0"),
    (lambda: DoubleSparsity(channels=2, chosen=3), TypeError, "chosen must be a list of channel numbers for each group "
     "or None, got 3"),
    (lambda: DoubleSparsity(channels=2, chosen=(1, 2)), TypeError, "chosen must be a list"),
    (lambda: DoubleSparsity(channels=2, chosen=((1, 2), (3,))), ValueError,
     r"chosen must name 2 different channels for each group, got \(3,\)"),
    (lambda: DoubleSparsity(channels=2, chosen=((1, 1),)), ValueError, "different channels"),
    (lambda: DoubleSparsity(channels=2, chosen=((1, -1),)), ValueError, "chosen must be at least 0, got -1"),
    (lambda: DoubleSparsity(channels=2, chosen=((1, 0.5),)), TypeError, "chosen must be an int, got float"),
    (lambda: DoubleSparsity(channels=17).decode(Q, K, V), ValueError,
     "channels must be at most the head size, 16, got 17"),
    (lambda: DoubleSparsity(channels=1, chosen=((1,),)).decode(Q, K, V), ValueError,
     "chosen must have a list for each of 2 groups with numbers below 16"),
    (lambda: DoubleSparsity(channels=1, chosen=((1,), (16,))).decode(Q, K, V), ValueError, "numbers below 16"),
    (lambda: heavy_channels(Q, K, 17), ValueError, "channels must be at least 1 and at most 16, got 17"),
    (lambda: heavy_channels(Q, None, 3), TypeError, "k must be a torch.Tensor"),
    (lambda: Adamas(-3), ValueError, "budget must be at least 1 key, got -3"),
    (lambda: HashAttention(0), ValueError, "budget must be at least 1 key, got 0"),
    (lambda: HashAttention(maps=None), TypeError, "maps must be a str, got NoneType"),
    (lambda: HashAttention().build(K), ValueError, "outside of a session, got None"),
    (lambda: HashAttention(layer=-1), ValueError, "layer must be at least 0, got -1"),
    (lambda: HashAttention(layer=1.0), TypeError, "layer must be an int, got float"),
    (lambda: HashAttention(layer=6).new_state().append(*POCKET[1:]), ValueError,
     r"layer must be one of those in the file 'pocket', \[0, 1, 2, 3, 4, 5\], got 6"),
    (lambda: HashAttention(layer=0).build(K), ValueError, r"maps must hold networks that fit k, got 'pocket': x must "
     r"have the heads and the head size of its networks, \[2, 64\], got \[2, 16\]"),
    (lambda: HashAttention(layer=0).build(POCKET[1][:, :1]), ValueError,
     r"fit k, got 'pocket': .* \[2, 64\], got \[1, 64\]"),
    (lambda: HashAttention(layer=0).decode(POCKET[0][:, :4], *POCKET[1:]), ValueError,
     r"maps must hold networks that fit q, got 'pocket': .* \[6, 64\], got \[4, 64\]"),
    (lambda: HashAttention(maps=random_maps(), layer=0).decode(Q, K, V, state=Adamas().build(K)), TypeError,
     "state must be LearnedBits or None, got HadamardCodes"),
    (lambda: fit_maps([]), ValueError, "examples must hold a prompt, got none"),
    (lambda: fit_maps([(Q[0], K[0], torch.full((3,), 39))], steps=0), ValueError, "steps must be at least 1, got 0"),
    (lambda: fit_maps([(Q[0], K[0], torch.full((3,), 39))], hidden=0.5), TypeError, "hidden must be an int, got float"),
    (lambda: MagicPIG(bits=0), ValueError, "bits must be at least 1 and at most 16, got 0"),
    (lambda: MagicPIG(bits=17), ValueError, "bits must be at least 1 and at most 16, got 17"),
    (lambda: MagicPIG(tables=1), ValueError, "tables must be at least 2 and at most 4096, got 1"),
    (lambda: MagicPIG(sinks=-1), ValueError, "sinks must be at least 0, got -1"),
    (lambda: MagicPIG(window=0), ValueError, "window must be at least 1, got 0"),
    (lambda: MagicPIG(seed=-1), ValueError, "seed must be at least 0"),
    (lambda: MagicPIG(seed=0.5), TypeError, "seed must be an int, got float"),
    (lambda: Quest().decode(Q, K, V[:, :, :3]), ValueError, "v must have the shape of k"),
    (lambda: Quest().select(Q, K * math.nan), ValueError, "must be finite"),
    (lambda: DoubleSparsity().select(Q * math.inf, K), ValueError, "must be finite"),
    (lambda: Quest().decode(Q, K, V, state=Adamas().build(K)), TypeError,
     "state must be Boxes or None, got HadamardCodes"),
    (lambda: Quest().select(Q, K, seed=-1), ValueError, "seed must lie in"),
    (lambda: Quest().new_state().crop(1), ValueError, r"length must lie in \[0, 0\], got 1"),
    (lambda: Quest().build(K).crop(41), ValueError, r"length must lie in \[0, 40\], got 41"),
    (lambda: Quest().build(K).pick_sequences(torch.tensor([2])), ValueError, r"rows must lie in \[0, 2\)"),
    (lambda: Quest().build(K).append(K[:, :1], K[:, :1]), ValueError, "k must have the heads of the state, 2, got 1"),
    (lambda: Adamas().build([1]), TypeError, "k must be a torch.Tensor, got list"),
    (lambda: MagicPIG().new_state().append(K[:, :, :0], K[:, :, :0]), ValueError, "k must hold a key"),
    (lambda: MagicPIG().new_state().append(K, K[:, :, :3]), ValueError, "v must have the shape of k"),
    (lambda: DoubleSparsity().new_state().append([1], [1]), TypeError, "k must be a torch.Tensor, got list"),
    (lambda: Quest().new_state().append(K, K, shown=torch.ones(2, 3).bool()), ValueError,
     r"shown must have shape \[B, n\] = \[2, 40\], got \[2, 3\]"),
    (lambda: Quest().new_state().append(K, K, shown=[True]), TypeError,
     "shown must be a bool tensor or None, got list"),
    (lambda: MagicPIG().new_state().append(K, K, shown=torch.ones(2, 40)), TypeError,
     "shown must be .* got torch.float32"),
    (lambda: Adamas().new_state().append(K, K, q=None), TypeError,
     "append takes shown beside k and v, got q"),
    (lambda: Quest(page=4).decode(Q, K, V, state=Quest(page=8).build(K)), ValueError, "state must have size 4, got 8"),
    (lambda: MagicPIG(tables=5000), ValueError, "tables must be at least 2 and at most 4096, got 5000"),
])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message): call()

# inside transformers

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparse_nb.hf import attention_override, sparsify
from inputs import GREEDY, IDS
from models import build

USED = [Quest(0.25, page=4), Adamas(0.25), HashAttention(0.25, random_maps(16, 4), 0),
        DoubleSparsity(0.25, channels=2, chosen=((0, 3), (5, 9))),
        DoubleSparsity(0.25, channels=6), MagicPIG(bits=2, tables=6, sinks=2, window=4)]

@pytest.fixture(scope="module")
def llama(): return build("llama")

def asked(method, q):
    "What an index of `method` observes of queries"
    return dict(q=q) if "q" in method.new_state().observes else {}

def ids_of(model, ids=IDS, **kwargs):
    return model.generate(ids, **GREEDY | dict(attention_mask=torch.ones_like(ids)) | kwargs)[:, ids.shape[1]:]

@pytest.mark.parametrize("method", USED, **NAMES)
def test_generation_is_the_method_step_by_step(llama, method):
    states = {}
    def attend(module, query, key, value, mask, scaling=None, **kwargs):
        if query.shape[2] > 1:
            states[module.layer_idx] = method.new_state()
            states[module.layer_idx].append(key, value, **asked(method, query))
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)
        states[module.layer_idx].append(key[:, :, -1:], value[:, :, -1:])
        return method.decode(query, key, value, scale=scaling, state=states[module.layer_idx]).transpose(1, 2), None
    with attention_override(llama, attend, mask="sdpa"): want = ids_of(llama)
    with sparsify(llama, decode=method, audit=True) as session: got = ids_of(llama)
    assert torch.equal(got, want)
    seen = session.stats()
    assert seen.error.min() > 1e-4 and (seen.bytes < seen.dense_bytes).all() and (seen.density < 0.8).all()
    n = torch.arange(41, 46).double()  # keys of each decoded query
    if not isinstance(method, MagicPIG):
        assert_close(torch.tensor(seen.bytes.to_numpy()), (2 * (n / 4).ceil() * 64 + n * method.index_bytes(16)).mean()
                     .expand(len(seen)), 1e-9)

@pytest.mark.parametrize("method", USED, **NAMES)
def test_beams_are_followed(llama, method):
    """The same beams from indexes that are built anew from the keys of each beam, where nothing is learnt or all is
    learnt from the prompt
    """
    learnt = {}
    def attend(module, query, key, value, mask, scaling=None, **kwargs):
        if query.shape[2] > 1:
            state = method.new_state()
            state.append(key[:1], value[:1], **asked(method, query[:1]))
            learnt[module.layer_idx] = getattr(state, "fit", None)
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)
        state = method.new_state()
        if learnt[module.layer_idx] is not None:
            state.fit = learnt[module.layer_idx].expand(len(key), *learnt[module.layer_idx].shape[1:])
        state.append(key, value)
        return method.decode(query, key, value, scale=scaling, state=state).transpose(1, 2), None
    with attention_override(llama, attend, mask="sdpa"): want = ids_of(llama, num_beams=4, max_new_tokens=10)
    with sparsify(llama, decode=method): assert torch.equal(ids_of(llama, num_beams=4, max_new_tokens=10), want)

@pytest.mark.parametrize("method", USED[:4], **NAMES)
def test_a_padded_row_is_its_own_single_run(llama, method):
    "For indexes that learn nothing, and whole pages of padding"
    padded = torch.stack([IDS[0], torch.cat([IDS.new_zeros(8), IDS[0, :32]])])
    mask = (torch.arange(40) >= torch.tensor([[0], [8]])).long()
    with sparsify(llama, decode=method):
        together = ids_of(llama, padded, attention_mask=mask)
        assert (torch.equal(ids_of(llama, IDS)[0], together[0])
                and torch.equal(ids_of(llama, IDS[:, :32])[0], together[1]))

def test_another_budget_goes_on_with_the_same_index(llama):
    cache = DynamicCache(config=llama.config)
    with sparsify(llama, decode=DoubleSparsity(0.5, channels=6)):
        first = llama.generate(IDS[:, :20], past_key_values=cache, **GREEDY)
    state = cache.layers[0].state
    with sparsify(llama, decode=DoubleSparsity(0.25, channels=6)):
        llama.generate(first, past_key_values=cache, **GREEDY)
    assert cache.layers[0].state is state and len(state) > 25
    with sparsify(llama,
                  decode=DoubleSparsity(0.25, channels=5)), pytest.raises(ValueError, match="keeps another index"):
        llama.generate(first, past_key_values=cache, **GREEDY)

def test_a_predictor_finds_what_position_cannot():
    "A few keys of one direction far back, which the query points to"
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 1, 32, generator=g), torch.randn(1, 1, 400, 32, generator=g),
               torch.randn(1, 1, 400, 32, generator=g))
    k[:, :, 100:108] = 3 * q[:, :1]
    q = q[:, :1].expand(1, 2, 1, 32)
    exact = attention(q, k, v)
    off = lambda method: float((method.decode(q, k, v) - exact).norm() / exact.norm())
    for method in (TopK(0.1), Quest(0.1), DoubleSparsity(0.1), Adamas(0.1),
                   HashAttention(0.1, random_maps(32, 2, 1, planes=True), 0), MagicPIG()):
        assert off(method) < 0.05, method
    assert off(Streaming(4, 0.1)) > 0.5
