"""H2O and SnapKV against transcriptions of their definitions; what is evicted stays away; and in generation."""
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from inputs import INTERPRETED
from sparse_nb.attention import Selection, TopK, assert_close, attention, weighted_attention
from sparse_nb.commands.options import method_from, rehearse
from sparse_nb.eviction import H2O, SnapKV, all_but_least, most_voted
from sparse_nb.methods.retained import StaticRetainedKeys
from sparse_nb.grid import needs_queries
from sparse_nb.hf import prefill, sparsify
from experiments.configs.eviction import equal_bytes, equal_rows

METHODS = [H2O(12), H2O(38), H2O(0.3, recent=0.2), H2O(9, recent=3), SnapKV(14, 6), SnapKV(0.4, 5, 5),
           SnapKV(12, 4, 3)]
NAMES = dict(ids=repr)


def inputs(seed=0, batch=2, heads=6, groups=2, keys=50, size=16, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, h, keys, size, generator=g, dtype=torch.float64).to(dtype)
                 for h in (heads, groups, groups))


def state_of(method, q, k, v, cuts=()):
    state = method.new_state()
    for a, b in zip((0, *cuts), (*cuts, k.shape[2])): state.append(k[:, :, a:b], v[:, :, a:b], q=q[:, :, a:b])
    return state


def whole(x, n): return min(x, n) if isinstance(x, int) else math.ceil(n * x * (1 - 1e-12))


def softmax_over(q, k, keys):
    "Shares of one query [D] over some keys, a dict."
    keys = sorted(keys)
    return dict(zip(keys, (k[keys] @ q / len(q)**0.5).softmax(0).tolist()))


def h2o(method, qs, k, prompt):
    "Keys that each query after the prompt reads; queries [heads, N, D] of one list of heads, keys [N, D]."
    sums, held = [0.0] * len(k), {*range(prompt)}
    budget = method.budget if isinstance(method.budget, int) else max(1, whole(method.budget, prompt))
    recent, read = whole(method.recent, budget), []
    for t in range(len(k)):
        if t == prompt or t > prompt:
            while len(held) > budget:
                old = [i for i in held if i < t - recent]
                held.remove(min(old or held, key=lambda i: (sums[i], -i)))
            held.add(t)
            read.append({*held})
        for q in qs:
            for i, p in softmax_over(q[t], k, held if t >= prompt else range(t + 1)).items(): sums[i] += p / len(qs)
    return read


def snapkv(method, qs, k, prompt):
    "Likewise."
    begin, sums = max(0, prompt - method.window), [0.0] * len(k)
    for t in range(begin, prompt):
        for q in qs:
            for i, p in softmax_over(q[t], k, range(t + 1)).items(): sums[i] += p / len(qs)
    half, pooled = method.kernel // 2, []
    for i in range(begin):
        near = [sums[j] if 0 <= j < begin else 0.0 for j in range(i - half, i + half + 1)]
        pooled.append(max(near))
    best = sorted(range(begin), key=lambda i: (-pooled[i], i))
    count = whole(method.budget, prompt)
    kept = {*range(begin, prompt)} if count >= prompt - begin else {*range(prompt - count, prompt)}
    kept |= {*best[:max(0, count - len(kept))]}
    return [kept | {*range(prompt, t + 1)} for t in range(prompt, len(k))]


@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_definition(method):
    "Keys read, and outputs, of each step after the prompt, for a sequence with padding and one without."
    q, k, v = inputs(keys=80)
    q, prompt, starts = 3 * q, 40, [0, 7]
    state = state_of(method, q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt])
    reads, want = snapkv if isinstance(method, SnapKV) else h2o, {}
    for b, start in enumerate(starts):
        for g in range(2):
            heads = [3 * g, 3 * g + 1, 3 * g + 2]
            found = reads(method, q[b, heads, start:], k[b, g, start:], prompt - start)
            for h in heads: want[b, h] = [{start + i for i in row} for row in found]
    masks = dict(kv_start=torch.tensor(starts))
    for t in range(prompt, 80):
        state.append(k[:, :, [t]], v[:, :, [t]], q=q[:, :, [t]])
        seen = k[:, :, :t + 1], v[:, :, :t + 1]
        kept = method.select(q[:, :, [t]], seen[0], state=state, **masks).dense(t + 1)[:, :, 0]
        out = method.decode(q[:, :, [t]], *seen, state=state, **masks)[:, :, 0]
        for (b, h), rows in want.items():
            keys = sorted(rows[t - prompt])
            assert kept[b, h].nonzero()[:, 0].tolist() == keys
            share = softmax_over(q[b, h, t], k[b, h // 3], keys)
            assert_close(out[b, h], sum(share[i] * v[b, h // 3, i] for i in keys), 1e-10)


@pytest.mark.parametrize("method", [x for x in METHODS if x.budget != 38], **NAMES)
def test_what_is_evicted_stays_away(method):
    "Keys read at a step are those of the step before, less some, and the new one; a wanted key that is gone is lost."
    q, k, v = inputs()
    prompt, before = 30, None
    k[:, :, 5], v[:, :, 5], q[:, :, 40:] = 0, 100, 0
    q[:, :, :prompt, 0], k[:, :, 2:9, 0] = -3, 40    # all queries of the prompt shun key 5 and its neighbours ...
    k[:, :, 5, 0], q[:, :, 40:, 0] = 60, 50          # ... and late ones want nothing else
    state = state_of(method, q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt])
    for t in range(prompt, 50):
        state.append(k[:, :, [t]], v[:, :, [t]], q=q[:, :, [t]])
        asked, seen = q[:, :, [t]], (k[:, :, :t + 1], v[:, :, :t + 1])
        kept = method.select(asked, seen[0], state=state).dense(t + 1)[:, :, 0] > 0
        if before is not None: assert not (kept[..., :t] & ~before).any() and kept[..., t].all()
        before = kept
    assert not kept[..., 5].any()
    assert (method.decode(asked, *seen, state=state) < 50).all() and (TopK(1).decode(asked, *seen) == 100).all()
    size = kept.sum(-1)
    if isinstance(method, H2O): assert (size == whole(method.budget, prompt) + 1).all()
    else: assert (size == whole(method.budget, prompt) + 20).all()


@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_parts_of_a_prompt_and_steps_at_once(method):
    q, k, v = inputs()
    one, many = state_of(method, q, k, v), state_of(method, q, k, v, (1, 13, 14, 37, 45))
    asked = q[:, :, 40:]
    together = method.select(asked, k, causal=True, state=one).dense(50)
    for j in range(10):
        n = torch.full((2,), 41 + j)
        assert torch.equal(method.select(asked[:, :, [j]], k, kv_end=n, state=many).dense(50)[:, :, 0],
                           together[:, :, j])
    again = method.select(asked, k, causal=True, state=many).dense(50)
    assert torch.equal(again, together) and torch.equal(one.rows, many.rows)


@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_a_state_is_cut_and_picked(method):
    q, k, v = inputs()
    q = 3 * q
    state = state_of(method, q, k, v)
    n = torch.full((2,), 41)
    method.select(q[:, :, 40:41], k, kv_end=n, state=state)
    method.select(q[:, :, 48:49], k, kv_end=n + 8, state=state)
    with pytest.raises(ValueError, match="length must be at least 40, got 39"): state.crop(39)
    state.crop(44)                                   # queries 44 to 48 were never asked
    rows = torch.tensor([1, 1, 0])
    state.pick_sequences(rows)
    other = tuple(x[rows] * 3 for x in inputs(seed=9))
    state.append(*(x[:, :, 44:] for x in other[1:]), q=other[0][:, :, 44:])
    mixed = tuple(torch.cat([x[rows][:, :, :44], y[:, :, 44:]], 2) for x, y in zip((q, k, v), other))
    fresh = state_of(method, *mixed)
    want = method.select(mixed[0][:, :, 40:], mixed[1], causal=True, state=fresh).dense(50)
    for asked in 9, 0:                               # the last query first, so that nothing is asked again before it
        found = method.select(mixed[0][:, :, 40 + asked:], mixed[1], causal=True, state=state).dense(50)
        assert torch.equal(found, want[:, :, asked:])
    state.reset()
    assert len(state) == 0 and state.begun is None
    undecided = state_of(method, q, k, v)
    undecided.crop(20)                               # nothing was decided yet
    undecided.append(k[:, :, 20:], v[:, :, 20:], q=q[:, :, 20:])
    fresh = state_of(method, q, k, v)
    last = method.select(q[:, :, -1:], k, state=fresh).dense(50)
    assert torch.equal(method.select(q[:, :, -1:], k, state=undecided).dense(50), last)


@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_all_keys_are_exact(method):
    q, k, v = inputs()
    every = dataclasses.replace(method, budget=99)
    masks = dict(causal=True, kv_start=torch.tensor([0, 9]))
    out, stats = every.decode(q[:, :, 40:], k, v, state=state_of(every, q, k, v), return_stats=True, **masks)
    assert_close(out, attention(q[:, :, 40:], k, v, **masks), 1e-12)
    assert (stats.density == 1).all()
    if isinstance(method, H2O): assert torch.equal(stats.index_bytes, 4 * stats.budget)
    else: assert stats.index_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_dtypes_and_padding(method, dtype):
    "Hidden keys leave no trace, whatever stands there."
    q, k, v = inputs(dtype=dtype)
    masks = dict(kv_start=torch.tensor([0, 9]))
    out = method.decode(q[:, :, -1:], k, v, state=state_of(method, q, k, v), **masks)
    assert out.dtype == dtype and out.isfinite().all()
    alone = tuple(x[1:, :, 9:] for x in (q, k, v))
    assert_close(method.decode(alone[0][:, :, -1:], *alone[1:], state=state_of(method, *alone)), out[1:],
                 2e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("method", [METHODS[0], METHODS[4]], **NAMES)
def test_later_parts_are_read_without_what_is_gone(method):
    q, k, v = inputs()
    state = state_of(method, q[:, :, :30], k[:, :, :30], v[:, :, :30])
    masks = dict(kv_start=torch.tensor([0, 4]))
    first = method.prefill(q[:, :, :30], k[:, :, :30], v[:, :, :30], state=state, **masks)
    for b, start in ((0, 0), (1, 4)):
        want = attention(q[b:b + 1, :, start:30], k[b:b + 1, :, start:30], v[b:b + 1, :, start:30], causal=True)
        assert_close(first[b:b + 1, :, start:], want, 1e-12)
    assert (first[1, :, :4] == 0).all() and state.begun is None
    state.append(k[:, :, 30:], v[:, :, 30:], q=q[:, :, 30:])
    method.select(q[:, :, 30:31], k[:, :, :31], state=state, **masks)
    later = method.prefill(q[:, :, 31:], k, v, state=state, **masks)
    assert_close(later, method.decode(q[:, :, 31:], k, v, causal=True, state=state, **masks), 1e-12)
    assert not torch.allclose(later, attention(q[:, :, 31:], k, v, causal=True, **masks))


def fixed_and_grown(method, q, k, v, start, length, capacity, scale=None):
    "A state that was fixed after `length` keys, its cache, and a state that grows"
    shown, states = torch.arange(length) >= start[:, None], (method.new_state(), method.new_state())
    given = dict(q=q[:, :, :length], shown=shown, scale=scale)
    for state in states: state.append(k[:, :, :length], v[:, :, :length], **given)
    states[0].to_static(capacity)
    states[0].look_at(k[:, :, :length], v[:, :, :length])
    cache = [torch.nn.functional.pad(x[:, :, :length], (0, 0, 0, capacity - length)) for x in (k, v)]
    return states[0], cache, states[1]

@pytest.mark.parametrize("capacity", [45, 90])
@pytest.mark.parametrize("method", METHODS, **NAMES)
def test_a_state_of_a_fixed_length_is_one_that_grows(method, capacity):
    "Key by key, to the last place of the cache; with padding, with beams that change places, and in a second turn"
    (q, k, v), start = inputs(keys=90), torch.tensor([0, 4])
    fixed, cache, grown = fixed_and_grown(method, q, k, v, start, 30, capacity)
    where = [x.data_ptr() for x in fixed.buffers()]
    for n in range(30, 45):
        new = slice(n, n + 1)
        for x, y in zip(cache, (k, v)): x[:, :, new] = y[:, :, new]
        grown.append(k[:, :, new], v[:, :, new], q=q[:, :, new])
        fixed.write(*(x[:, :, :n + 1 if n % 2 else None] for x in cache), torch.tensor([n]), q=q[:, :, new])
        want = method.decode(q[:, :, new], k[:, :, :n + 1], v[:, :, :n + 1], state=grown, kv_start=start)
        got = method.decode(q[:, :, new], *cache, state=fixed, kv_start=start, kv_end=torch.full((2,), n + 1))
        assert_close(got, want, 1e-12)
        assert torch.equal(fixed.rows[:, :, :n + 1], grown.rows)
        if n == 36:
            assert [x.data_ptr() for x in fixed.buffers()] == where
            back, start = torch.tensor([1, 0]), start.flip(0)
            q, k, v, cache = q[back], k[back], v[back], [x[back] for x in cache]
            for state in (fixed, grown): state.pick_sequences(back)
    fixed.to_dynamic(45, cache[0])
    more = [x[:, :, 45:60] for x in (q, k, v)]
    for state in (fixed, grown): state.append(more[1], more[2], q=more[0])
    for last in (47, 46, 60):  # a query that stands before another one that was asked already
        both = [method.decode(q[:, :, last - 1:last], k[:, :, :last], v[:, :, :last], state=x, kv_start=start)
                for x in (fixed, grown)]
        assert_close(*both, 1e-12)
    assert torch.equal(fixed.rows, grown.rows)

@pytest.mark.parametrize("method", METHODS[1:5], **NAMES)
def test_queries_that_stand_before_the_first_key_that_is_put(method, monkeypatch):
    "A part of a text is read by a state that has its length already, and after it keys are put as ever"
    (q, k, v), start = inputs(keys=40), torch.tensor([0, 4])
    fixed, cache, grown = fixed_and_grown(method, q, k, v, start, 30, 40)
    fixed.to_dynamic(30, cache[0])
    for x, y in zip(cache, (k, v)): x[:, :, 30:37] = y[:, :, 30:37]
    for state in (fixed, grown): state.append(k[:, :, 30:36], v[:, :, 30:36], q=q[:, :, 30:36])
    fixed.to_static(40)
    fixed.look_at(k[:, :, :36], v[:, :, :36])
    args = q[:, :, 30:36], k[:, :, :36], v[:, :, :36]
    want = method.decode(*args, causal=True, state=grown, kv_start=start)
    assert_close(method.prefill(*args, state=fixed, kv_start=start), want, 1e-12)
    with monkeypatch.context() as patch:  # no list is of these queries, and no kernel reads one
        patch.setattr("sparse_nb.methods.retained.has_kernels", lambda q: True)
        assert_close(method.decode(q[:, :, [35]], *args[1:], state=fixed, kv_start=start), want[:, :, -1:], 1e-12)
    grown.append(k[:, :, 36:37], v[:, :, 36:37], q=q[:, :, 36:37])
    fixed.write(*cache, torch.tensor([36]), q=q[:, :, 36:37])
    seen = dict(kv_start=start, kv_end=torch.tensor([37, 37]))
    want = method.decode(q[:, :, 36:37], k[:, :, :37], v[:, :, :37], state=grown, kv_start=start)
    assert_close(method.decode(q[:, :, 36:37], *cache, state=fixed, **seen), want, 1e-12)
    with pytest.raises(ValueError, match="q must be the query of the key that was put, got 2 queries"):
        method.decode(q[:, :, 35:37], *cache, state=fixed, **seen)
    for wrong, message in ((dict(kv_end=torch.tensor([36, 36])), r"kv_end must be where .* ends, got \[36, 36\]"),
                           (dict(kv_end=torch.tensor([37, 36])), "kv_end must be the same"),
                           (dict(kv_end=None), r"kv_end must be where .* ends, got \[40, 40\]"),
                           (dict(kv_start=torch.tensor([1, 4])), r"kv_start must be the first .*, got \[1, 4\]")):
        with pytest.raises(ValueError, match=message): method.decode(q[:, :, [36]], *cache, state=fixed, **seen | wrong)

EDGES = [H2O(1), H2O(2, recent=0), H2O(1.0), H2O(99), H2O(5, recent=5), H2O(0.3, recent=0), SnapKV(7, 6),
         SnapKV(1.0, 6), SnapKV(99, 6, 1), SnapKV(0.05, 1, 9), SnapKV(0.2, 64)]

@pytest.mark.parametrize("method", METHODS + EDGES, **NAMES)
def test_several_turns_in_a_cache_of_a_fixed_length(method):
    """As a state that grows: keys that are put to the last place, some of a turn that are taken back and come anew,
    another length. The lists are the mask's, and as long as each other."""
    (q, k, v), start = inputs(batch=3, keys=90), torch.tensor([0, 4, 29])
    fixed, cache, grown = fixed_and_grown(method, q, k, v, start, 30, 38)
    def put(places):
        for n in places:
            new, end = slice(n, n + 1), torch.full((3,), n + 1)
            for x, y in zip(cache, (k, v)): x[:, :, new] = y[:, :, new]
            grown.append(k[:, :, new], v[:, :, new], q=q[:, :, new])
            for _ in range(1 + n % 2): fixed.write(*cache, torch.tensor([n]), q=q[:, :, new])  # once or twice: the same
            want = method.select(q[:, :, new], k[:, :, :n + 1], state=grown, kv_start=start)
            got = method.select(q[:, :, new], cache[0], state=fixed, kv_start=start, kv_end=end)
            assert torch.equal(got.dense(n + 1), want.dense(n + 1)) and torch.equal(got.count, want.count)
            for index, count, rows in zip(fixed.lists.index, fixed.lists.count, fixed.rows[:, :, :n + 1]):
                held = [x.nonzero()[:, 0].tolist() for x in rows]
                assert [x[:count].tolist() for x in index] == held
            if n == places[0]: first = got, got.count.clone(), got.index.clone()
        assert torch.equal(first[0].count, first[1]) and torch.equal(first[0].index, first[2])  # it does not move
    put(range(30, 38))
    fixed.to_dynamic(38, cache[0])
    assert fixed.lists is None
    for a, b, keep in ((38, 46, 41), (41, 44, 44)):
        for state in (fixed, grown): state.append(k[:, :, a:b], v[:, :, a:b], q=q[:, :, a:b])
        if b == 46: method.select(q[:, :, [45]], k[:, :, :46], state=fixed, kv_start=start)
        for state in (fixed, grown): state.crop(keep)
    cache[:] = (torch.nn.functional.pad(x[:, :, :44], (0, 0, 0, 46)) for x in (k, v))
    fixed.to_static(90)
    fixed.look_at(k[:, :, :44], v[:, :, :44])
    put(range(44, 50))
    back = torch.tensor([2, 0, 0])
    start, q, k, v, cache[:] = start[back], q[back], k[back], v[back], [x[back] for x in cache]
    for state in (fixed, grown): state.pick_sequences(back)
    put(range(50, 90))
    fixed.reset()
    assert fixed.lists is None and len(fixed) == 0

def held_by_definition(method, q, k, start, prompt):
    "As `h2o`, for each group of each sequence, keys counted from the first of the cache"
    return [[[{a + i for i in x} for x in h2o(method, q[b, 3 * g:3 * g + 3, a:], k[b, g, a:], prompt - a)]
             for g in range(2)] for b, a in enumerate(start.tolist())]

@pytest.mark.parametrize("method", [H2O(12), H2O(9, recent=3), H2O(4, recent=0), H2O(1, recent=0)], **NAMES)
def test_of_equal_votes_the_earlier_key_stays(method):
    "A prompt that gives all its attention to one key, and queries that give the same to each"
    (q, k, v), start = inputs(keys=60), torch.tensor([0, 4])
    q[:], k[..., 0] = 0, 0
    q[:, :, :30, 0] = 1
    for b in range(2): k[b, :, start[b] + 5, 0] = 1e5
    q[:, :, :9, 0] = 0
    fixed, cache, _ = fixed_and_grown(method, q, k, v, start, 30, 60)
    cache[:] = k, v
    want = held_by_definition(method, q, k, start, 30)
    for n in range(30, 60):
        fixed.write(*cache, torch.tensor([n]), q=q[:, :, [n]])
        for b, count in enumerate(fixed.lists.count.flatten().tolist()):
            for g in range(2): assert {*fixed.lists.index[b, g, :count].tolist()} == want[b][g][n - 30]

@pytest.mark.parametrize("seed", range(20))
def test_the_least_goes_as_if_all_were_sorted(seed):
    "Few votes that are different, none or one key too many, padding, newest keys and room behind them"
    g = torch.Generator().manual_seed(seed)
    draw = lambda high, *shape: torch.randint(high, shape, generator=g)
    n, end, first = 24, 13 + int(draw(12, 1)), draw(5, 3)
    votes, i = draw(1 + seed % 4, 3, 4, n).double(), torch.arange(n)
    count = draw(9, 3)
    there = (i >= first.view(3, 1, 1)) & (i < end)
    order = torch.rand(3, 4, n, generator=g).masked_fill(~there, -1).argsort(2, descending=True).argsort(2)
    held = there & (order < (count + draw(2, 3)).view(3, 1, 1))
    for recent in (draw(1, 3), draw(4, 3), draw(14, 3)):
        args = votes, held, first, count, recent, torch.tensor([end])
        assert torch.equal(all_but_least(*args), most_voted(*args))

def read_lists(q, k, v, index, weight, count, *, scale=None):
    "What `sparse_nb.kernels.gather.attend` computes."
    used = (torch.arange(index.shape[3]) < count[..., None]) * weight
    each = torch.where(used > 0, index.long().repeat_interleave(q.shape[1] // index.shape[1], 1), 0)
    return weighted_attention(q, k, v, Selection(each, used, count), scale=scale)

@pytest.mark.parametrize("method", [METHODS[i] for i in (0, 2, 3, 4, 6)], **NAMES)
def test_what_kernels_are_given(method, monkeypatch):
    "The lists themselves, one for each group; each head's for a gradient and for statistics."
    pytest.importorskip("triton")
    from sparse_nb.kernels import gather
    (q, k, v), start, called = inputs(keys=36, dtype=torch.float32), torch.tensor([0, 4]), []
    fixed, cache, grown = fixed_and_grown(method, q, k, v, start, 30, 36, 0.3)
    read = gather.attend if INTERPRETED else read_lists
    def attend(q, k, v, index, weight, count, *, scale=None):
        called.append(index)
        assert index.untyped_storage().data_ptr() == fixed.lists.index.untyped_storage().data_ptr()
        assert index.shape[1] == 2 and not any(weight.stride())
        return read(q, k, v, index, weight, count, scale=scale)
    monkeypatch.setattr(gather, "attend", attend)
    for n in range(30, 36):
        new, asked = slice(n, n + 1), q[:, :, n:n + 1]
        for x, y in zip(cache, (k, v)): x[:, :, new] = y[:, :, new]
        grown.append(k[:, :, new], v[:, :, new], q=asked)
        fixed.write(*cache, torch.tensor([n]), q=asked)
        want = method.decode(asked, k[:, :, :n + 1], v[:, :, :n + 1], state=grown, kv_start=start, scale=0.3)
        given = dict(state=fixed, scale=0.3, kv_start=start, kv_end=torch.full((2,), n + 1))
        with monkeypatch.context() as patch:
            patch.setattr("sparse_nb.methods.retained.has_kernels", lambda q: True)
            found = [method.decode(asked, *cache, **given)]
            assert len(called) == n - 29
            patch.setattr("sparse_nb.core.selection.has_kernels", lambda q: False)
            out, stats = method.decode(asked, *cache, return_stats=True, **given)
            found += [out, method.decode(asked.clone().requires_grad_(), *cache, **given)]
            assert len(called) == n - 29
        assert torch.equal(stats.budget, fixed.lists.count.expand(2, 6, 1)) and found[2].requires_grad
        for x in found: assert_close(x, want, 1e-5)

@pytest.mark.kernels
@pytest.mark.budget(20)
@pytest.mark.skipif(INTERPRETED, reason="is it")
def test_the_kernels_in_the_interpreter(forked_pytest):
    pytest.importorskip("triton")
    code, said = forked_pytest("-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, "-k", "kernels_are_given",
                               TRITON_INTERPRET="1")
    assert not code and "5 passed" in said, said[-4000:]

def test_what_cannot_be_fixed():
    "A row without a key goes on growing; one key alone is enough"
    q, k, v = (x[:, :, :2] for x in inputs())
    for method in (H2O(0.5), SnapKV(0.5)):
        one = fixed_and_grown(method, q, k, v, torch.tensor([0, 0]), 1, 2)[0]
        one.write(k, v, torch.tensor([1]), q=q[:, :, 1:])
        assert_close(method.decode(q[:, :, 1:], k, v, state=one), attention(q[:, :, 1:], k, v), 1e-12)
        unread = state_of(method, q[:, :, :1], k[:, :, :1], v[:, :, :1])
        unread.to_static(2)
        with pytest.raises(ValueError, match="look at its keys"): unread.write(k, v, torch.tensor([1]), q=q[:, :, 1:])
        with pytest.raises(ValueError, match="look at its keys"): method.decode(q[:, :, 1:], k, v, state=unread)
        none = method.new_state()
        none.append(k[:, :, :1], v[:, :, :1], q=q[:, :, :1], shown=torch.tensor([[True], [False]]))
        none.to_static(9)
        assert not none.static and len(none) == 1
        with pytest.raises(ValueError, match="capacity must be"): none.to_static(0)


@pytest.mark.parametrize("kind, wrong", [
    (H2O, dict(budget=0)), (H2O, dict(budget=1.5)), (H2O, dict(recent=-1)), (H2O, dict(recent=2.0)),
    (H2O, dict(budget=8, recent=9)),
    (SnapKV, dict(budget=32)), (SnapKV, dict(window=0)), (SnapKV, dict(kernel=4)), (SnapKV, dict(kernel=2.0))],
    ids=str)
def test_bad_settings(kind, wrong):
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))} must"): kind(**wrong)


def test_bad_input():
    method, (q, k, v) = H2O(12), inputs()
    state, asked = state_of(method, q, k, v), q[:, :, -1:]
    for wrong, message in ((None, "state must have observed the prompt.s queries .* got None"),
                           (state_of(H2O(11), q, k, v), "state must be that"),
                           (state_of(method, q[:1], k[:1], v[:1]), "state must hold the keys"),
                           (state_of(method, q[:, :, :9], k[:, :, :9], v[:, :, :9]), "state must hold the keys")):
        with pytest.raises(ValueError, match=message): method.decode(asked, k, v, state=wrong)
    with pytest.raises(ValueError, match="kv_end must be the same"):
        method.decode(asked, k, v, state=state, kv_end=torch.tensor([50, 49]))
    with pytest.raises(ValueError, match="q must be the queries of these keys"): state.append(k, v)
    with pytest.raises(TypeError, match="append takes q"): state.append(k, v, angle=None)
    method.decode(asked, k, v, state=state)
    with pytest.raises(ValueError, match="q must stand behind the 49 keys"):
        method.decode(asked, k, v, state=state, kv_end=torch.tensor([40, 40]))
    k[0, 0, 3] = math.nan
    with pytest.raises(ValueError, match="NaN"): method.decode(asked, k, v, state=state_of(method, q, k, v))


TEXTS = ["The key of Berlin is 4711. The key of Rome is 22. The key of Berlin is", "One, two, three, four,"]


def batch_of(tokenizer, texts): return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")


@pytest.mark.parametrize("method", [H2O(20), SnapKV(24, 8)], **NAMES)
@pytest.mark.parametrize("how", [dict(), dict(num_beams=2), dict(prompt_lookup_num_tokens=3)], ids=str)
def test_in_generation(pocket, method, how):
    "A padded batch writes what its rows write alone; beams and guesses that are taken back do not disturb it."
    model, tokenizer = pocket

    def written(texts, method, **how):
        with sparsify(model, decode=method):
            out = model.generate(**batch_of(tokenizer, texts), max_new_tokens=6, do_sample=False, pad_token_id=0, **how)
        return out[:, -6:].tolist()

    if "num_beams" in how or not how:
        assert written(TEXTS, method, **how) == [written([x], method, **how)[0] for x in TEXTS]
    else: assert written(TEXTS[:1], method, **how) == written(TEXTS[:1], method)
    dense = model.generate(**batch_of(tokenizer, TEXTS[:1]), max_new_tokens=6, do_sample=False, pad_token_id=0, **how)
    assert written(TEXTS[:1], dataclasses.replace(method, budget=500), **how) == dense[:, -6:].tolist()


@pytest.mark.parametrize("method", [H2O(20), SnapKV(24, 8)], **NAMES)
def test_a_cache_that_is_read_in_parts_and_goes_on(pocket, method):
    model, tokenizer = pocket
    ids = batch_of(tokenizer, TEXTS[:1]).input_ids
    found = []
    for chunk in (7, 500):
        with torch.no_grad(), sparsify(model, decode=method, prefill=method, stats=True) as session:
            cache = prefill(model, ids, chunk=chunk)
            logits = [model(input_ids=ids[:, i:i + 1], past_key_values=cache).logits for i in range(4)]
            logits.append(model(input_ids=ids[:, :9], past_key_values=cache).logits)   # a second turn
            logits.append(model(input_ids=ids[:, :1], past_key_values=cache).logits)
        states = [layer.state for layer in cache.layers]
        assert all(isinstance(state, StaticRetainedKeys) and state.begun == ids.shape[1] for state in states)
        assert len(states[0]) == ids.shape[1] + 14 and session.stats().density.max() < 1
        found.append((torch.cat(logits, 1), [state.rows for state in states]))
    assert_close(found[0][0], found[1][0], 1e-4)
    assert all(torch.equal(*rows) for rows in zip(found[0][1], found[1][1]))


def test_a_cache_that_was_read_outside(pocket):
    model, tokenizer = pocket
    ids = batch_of(tokenizer, TEXTS[:1]).input_ids
    cache = prefill(model, ids)
    with torch.no_grad(), sparsify(model, decode=H2O(20)):
        with pytest.raises(ValueError, match="q must be the queries of these keys.*read outside the session"):
            model(input_ids=ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("method", [H2O(20), SnapKV(24, 8)], **NAMES)
def test_other_caches(pocket, method):
    "Keys in host memory, and a cache of a fixed size, give the same words."
    model, tokenizer = pocket
    found = []
    for offload, how in ((False, {}), (True, {}), (False, dict(cache_implementation="static"))):
        with sparsify(model, decode=method, offload=offload):
            out = model.generate(**batch_of(tokenizer, TEXTS), max_new_tokens=5, do_sample=False, pad_token_id=0, **how)
        found.append(out[:, -5:].tolist())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("method", [H2O(), SnapKV()], **NAMES)
def test_the_command_rehearses_them(method):
    sizes = SimpleNamespace(num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_hidden_layers=1)
    rehearse("--decode", method, sizes)
    with pytest.raises(ValueError, match="--decode: .*budget must be more than the window"):
        method_from("--decode", "SnapKV(budget=20)")


# Settings that read as many rows, or as many bytes.

def test_settings_of_equal_rows_and_equal_bytes_read_as_many():
    n, size = 1024, 64
    q, k, v = (x.bfloat16() for x in inputs(1, 1, 2, 1, n + 1, size))
    new = q[:, :, n:]
    def read(method):
        "Rows and bytes of one query after n keys, index included"
        state = state_of(method, q, k, v) if isinstance(method, (H2O, SnapKV)) else method.new_state()
        if state is not None and not len(state): state.append(k, v)
        if isinstance(state, StaticRetainedKeys): state.held_at(n, k, torch.zeros(1, dtype=torch.long), None)
        stats = method.decode(new, k, v, return_stats=True, **({} if state is None else dict(state=state)))[1]
        rows = stats.budget.double().mean()
        return float(rows), float(rows * 4 * size + (torch.as_tensor(stats.index_bytes).double().mean()))
    share, row = 0.25, 4 * size
    for name, method in equal_rows(share).items():
        extra = 5 if name == "streaming" else 1  # its sinks, and the query's own key
        assert share * n - 1 <= read(method)[0] <= share * (n + 1) + extra, name
    for name, method in equal_bytes(size, share).items():
        assert abs(read(method)[1] - share * n * row) <= 6 * row, name
    assert read(equal_rows(share)["quest"])[1] > share * n * row * 1.2
    with pytest.raises(ValueError, match="share must be more than an index reads, 0.0625, got 0.06"):
        equal_bytes(size, 0.06)


def test_only_methods_that_need_queries_are_said_to():
    needs = {x: needs_queries(method_from("--decode", x)) for x in ("exact", "quest", "topk", "h2o", "snapkv")}
    assert needs == dict(exact=False, quest=False, topk=False, h2o=True, snapkv=True) and not needs_queries(None)
