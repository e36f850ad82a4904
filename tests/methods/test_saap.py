"""SAAP against definitions written out in float64: partitions, moments, ranks and tails, states against fresh ones, and
the method inside transformers' generation
"""
import copy
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparse_nb import saap_training
from sparse_nb.attention import (
    Exact, Method, assert_close, attention, attention_scores, attention_weights)
from sparse_nb.core import index
from sparse_nb.core.learnt import weights_id
from sparse_nb.metrics import clopper_pearson, relative_error
from experiments.archive import saap_heads
from benchmarks.recorder import results
from sparse_nb.methods.saap import partition
from sparse_nb.methods.saap.partition import (
    KMEANS, about_partition, cluster_sums, fit_partition, moment_rows, nearest_cluster, partition_parts, router_scores,
    save_partition)
from sparse_nb.methods.saap.state import Partition
from sparse_nb.methods.saap.step import RANKS, ROUTERS, TAILS
from sparse_nb.saap import Saap, keys_to_read, rank_clusters, saap_decode
from sparse_nb.vattention import VAttention, select_with_guarantee
from inputs import fast

UNTRAINED = [tail for tail in TAILS if tail != "fitted"]
SMALL = dict(clusters=7, sinks=2, window=9)

def inputs(seed=0, batch=2, heads=6, groups=2, queries=1, keys=60, size=16, dtype=torch.float64):
    "Queries and keys around a few centres"
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, h, n, size, generator=g, dtype=torch.float64)
               for h, n in ((heads, queries), (groups, keys), (groups, keys)))
    centre = torch.randn(5, size, generator=g, dtype=torch.float64)
    k = k / 2 + 2 * centre[torch.randint(5, (batch, groups, keys), generator=g)]
    return tuple(x.to(dtype) for x in (q, k, v))

def by_hand(s, ids, q, k, v):
    "Selected keys [N] and output [R, D] of one group with one query a head and clusters `ids` [N], in float64"
    n, scale = len(k), q.shape[1]**-0.5
    far = torch.zeros(n, dtype=torch.bool)
    far[min(s.sinks, n):max(n - s.window, min(s.sinks, n))] = True
    weight, groups = (q @ k.T * scale).exp(), {}
    for c in range(s.clusters):
        if (own := (far & (ids == c)).nonzero()[:, 0].tolist()): groups[c] = own
    guess = {c: (q @ k[own].mean(0) * scale + (q.square().sum(-1) * scale**2 / 2
                 * k[own].var(0, correction=0).mean())).exp() for c, own in groups.items()}
    whole = sum((len(own) * guess[c] for c, own in groups.items()), torch.zeros(len(q)).double())
    rank = {c: float((len(own) * guess[c] / whole).sum()) / (len(own) if s.rank == "density" else 1)
            for c, own in groups.items()}
    order = sorted(groups, key=lambda c: (-rank[c], c))
    left = s.budget if isinstance(s.budget, int) else None if s.budget is None else math.ceil(s.budget * n - 1e-9)
    read = ~far
    for i, c in enumerate(order):
        own = groups[c]
        count = len(own) * (i < s.probes) if left is None else min(left, len(own))
        left = left if left is None else left - count
        if count: read[own[-count:]] = True
    top, bottom = weight[:, read] @ v[read], weight[:, read].sum(-1)
    for own in groups.values():
        rest = [i for i in own if not read[i]]
        if not rest or s.tail == "drop": continue
        copies = len(rest) * (q @ k[rest].mean(0) * scale).exp()
        if s.tail == "second_order":
            copies = copies * (q.square().sum(-1) * scale**2 / 2 * k[rest].var(0, correction=0).mean()).exp()
        top, bottom = top + copies[:, None] * v[rest].mean(0), bottom + copies
    return read, top / bottom[:, None]

CASES = [Saap(budget=12, **SMALL), Saap(budget=0, **SMALL), Saap(budget=0.2, rank="mass", **SMALL),
         Saap(probes=2, **SMALL), Saap(probes=3, rank="mass", tail="drop", **SMALL),
         Saap(budget=17, tail="second_order", **SMALL), Saap(budget=9, tail="drop", **SMALL),
         Saap(budget=13, clusters=1, sinks=0, window=1), Saap(probes=1, clusters=90, sinks=3, window=5)]
NAMES = dict(ids=repr)

@pytest.mark.parametrize("s", CASES, **NAMES)
@pytest.mark.parametrize("groups", [2, 6])
def test_a_step_is_its_definition(s, groups):
    q, k, v = inputs(groups=groups)
    state = s.build(k, v=v)
    out, stats = s.decode(q, k, v, state=state, return_stats=True)
    dense, repeats = s.select(q, k, state=state).dense(60), 6 // groups
    for b in range(2):
        for g in range(groups):
            own = slice(g * repeats, (g + 1) * repeats)
            read, want = by_hand(s, state.rows[b, g, :, 0], q[b, own, 0], k[b, g], v[b, g])
            assert (dense[b, own, 0] == read.double()).all() and (stats.values_read[b, own, 0] == read.sum()).all()
            assert_close(out[b, own, 0], want, 1e-10)
    assert_close(s.decode(q, k, v), out, 1e-12)
    assert s.decode(*(x.bfloat16() for x in (q, k, v))).dtype == torch.bfloat16

# k-means

@pytest.mark.parametrize("kmeans", KMEANS)
@pytest.mark.parametrize("clusters", [1, 5, 60, 90])
def test_kmeans_is_lloyds(kmeans, clusters):
    "Each iteration by loops; then no centroid can be bettered where it has converged"
    k = inputs()[1]
    x = torch.nn.functional.normalize(k, dim=-1) if kmeans == "spherical" else k
    for iterations in range(4):
        before, after = (fit_partition(k, clusters, kmeans=kmeans, iterations=i, seed=3)
                         for i in (iterations, iterations + 1))
        for b in range(2):
            for g in range(2):
                # for unit vectors the nearest is the most alike
                far = (x[b, g][:, None] - before[b, g]).square().sum(-1)
                want = before[b, g].clone()
                ids = nearest_cluster(k, before, kmeans)[b, g]
                assert (far.gather(1, ids[:, None])[:, 0] <= far.amin(-1) + 1e-13).all()
                for c in ids.unique().tolist():
                    mean = x[b, g][ids == c].mean(0)
                    want[c] = mean / mean.norm() if kmeans == "spherical" else mean
                assert_close(after[b, g], want, 1e-12)

def test_first_centroids_are_keys_without_repeats_and_follow_the_seed():
    k = inputs()[1]
    drawn = lambda seed, **more: fit_partition(k, 20, kmeans="plain", iterations=0, seed=seed, **more)
    places = lambda found: (found[:, :, :, None] == k[:, :, None]).all(-1).int().argmax(-1)
    for seed in range(5):
        assert torch.equal(drawn(seed), k.gather(2, places(drawn(seed))[..., None].expand(-1, -1, -1, 16)))
        assert all(len(x.unique()) == 20 for x in places(drawn(seed)).flatten(0, 1))
    assert torch.equal(places(drawn(0))[0], places(drawn(0))[1])  # a sequence's draw does not depend on its number
    assert not torch.equal(drawn(0), drawn(1)) and not torch.equal(places(drawn(0))[:, 0], places(drawn(0))[:, 1])

def test_hidden_keys_teach_nothing():
    k = inputs()[1]
    shown = torch.rand(2, 60, generator=torch.Generator().manual_seed(1)) < 0.5
    junk = k.masked_fill(~shown[:, None, :, None], math.nan)
    for kmeans in KMEANS:
        together = fit_partition(junk, 8, kmeans=kmeans, shown=shown)
        for b in range(2):
            assert_close(together[b], fit_partition(k[b:b + 1, :, shown[b]], 8, kmeans=kmeans)[0], 1e-12)
    assert (fit_partition(junk, 8, shown=torch.zeros(2, 60).bool()) == 0).all()

def test_equal_keys_share_a_cluster():
    k = torch.ones(1, 1, 50, 8).double()
    for kmeans in KMEANS:
        ids = nearest_cluster(k, fit_partition(k, 6, kmeans=kmeans), kmeans)
        assert len(ids.unique()) == 1
        for key in (k, 0 * k):
            v = inputs(batch=1, groups=1, keys=50, size=8)[2]
            out = saap_decode(key[:, :, :1], key, v, budget=5, clusters=6, window=3)
            assert_close(out, attention(key[:, :, :1], key, v), 1e-12)

def test_sums_in_blocks(monkeypatch):
    x, _, v = inputs()[1], None, inputs()[2]
    ids, counted = torch.randint(7, (2, 2, 60)), torch.rand(2, 1, 60) < 0.7
    whole = cluster_sums(moment_rows(x, v), ids, counted, 7), nearest_cluster(x, x[:, :, :5], "plain")
    monkeypatch.setattr("sparse_nb.methods.saap.partition.AT_ONCE", 13)
    assert_close(cluster_sums(moment_rows(x, v), ids, counted, 7), whole[0], 1e-12)
    assert torch.equal(nearest_cluster(x, x[:, :, :5], "plain"), whole[1])

# what cannot go wrong

@pytest.mark.parametrize("clusters", [1, 8, 90])
@pytest.mark.parametrize("tail", UNTRAINED)
@pytest.mark.parametrize("router", ROUTERS[:2])
def test_all_clusters_are_exact_attention(clusters, tail, router):
    q, k, v = inputs(queries=3)
    masks = dict(causal=True, kv_start=torch.tensor([0, 9]), kv_end=torch.tensor([60, 41]))
    for how in (dict(probes=clusters), dict(budget=60), dict(budget=1.0)):
        got = saap_decode(q, k, v, clusters=clusters, tail=tail, router=router, sinks=2, window=4, **how, **masks)
        assert_close(got, attention(q, k, v, **masks), 1e-12)

@pytest.mark.parametrize("probes", [8, 1000, 2**63])
def test_more_clusters_than_there_are_is_all_of_them(probes):
    q, k, v = inputs()
    assert_close(saap_decode(q, k, v, probes=probes, clusters=8, window=4), attention(q, k, v), 1e-12)

@pytest.mark.parametrize("keys", [1, 2, 5, 11, 12])
def test_few_keys_are_all_read(keys):
    q, k, v = inputs(keys=keys)
    assert_close(Saap(budget=1, sinks=2, window=9, clusters=4).decode(q, k, v), attention(q, k, v), 1e-12)

@given(st.data())
@settings(max_examples=120, deadline=None)
def test_first_order_never_overstates_the_mass(data):
    "Denominators with values of one: whatever the keys, the partition, the budget and the factor"
    draw = data.draw
    n, size, clusters = draw(st.integers(2, 40)), draw(st.integers(1, 5)), draw(st.integers(1, 12))
    seed, spread = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.1, 1.0, 5.0]))
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(1, 1, n, size, generator=g).double() * spread
    k[:, :, torch.rand(n, generator=g) < 0.2] *= 4
    q = torch.randn(1, 3, 1, size, generator=g).double()
    how = draw(st.sampled_from([dict(probes=2), dict(budget=3), dict(budget=0), dict(budget=0.4)]))
    s = Saap(**how, clusters=clusters, sinks=draw(st.integers(0, 3)), window=draw(st.integers(1, 5)))
    # of the sum of e^s only what is read and what stands in: with v = e_0 on one read key, out = e^s / denominator
    scores = attention_scores(q, k)[0, :, 0]
    v = torch.zeros_like(k)
    v[:, :, -1, 0] = 1                                             # the last key is in every window
    unmarked = torch.zeros_like(v)
    out = s.decode(q, k, v)[0, :, 0, 0]
    denominator = scores[:, -1].exp() / out
    assert (denominator <= scores.exp().sum(-1) * (1 + 1e-9)).all()
    dropped = scores[:, -1].exp() / dataclasses.replace(s, tail="drop").decode(q, k, v)[0, :, 0, 0]
    assert (denominator >= dropped * (1 - 1e-9)).all() and (s.decode(q, k, unmarked) == 0).all()

def test_second_order_is_exact_for_normal_keys():
    "The mean of e^(q.k) over many normal keys, one cluster, against first and second order"
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 200_000, 4, generator=g).double() + 1
    q, v = torch.full((1, 1, 1, 4), 0.6).double(), torch.zeros_like(k)
    v[:, :, -1] = 1
    got = {}
    for tail in TAILS[:2]:
        out = saap_decode(q, k, v, budget=0, clusters=1, sinks=0, window=1, tail=tail, scale=1.0)
        got[tail] = float((q[0, 0, 0] @ k[0, 0, -1]).exp() / out[0, 0, 0, 0])
    want = float((k[0, 0] @ q[0, 0, 0]).exp().sum())
    assert abs(got["second_order"] / want - 1) < 0.02 and got["first_order"] < 0.6 * want

# ranks

def test_density_beats_mass_at_a_budget():
    "One cluster of 100 keys with half of the mass, five of ten keys with a tenth each, and a budget of 50 keys"
    count = torch.tensor([[[100, 10, 10, 10, 10, 10]]])
    mass = torch.tensor([[[.5, .1, .1, .1, .1, .1]]]).double()
    caught = {}
    for rank in RANKS:
        found = rank_clusters((mass / count).log()[:, :, None], count.double(), rank)[:, :, 0]
        caught[rank] = float((keys_to_read(found, count, None, torch.tensor([50])) * mass / count).sum())
    assert caught["mass"] == pytest.approx(.25) and caught["density"] == pytest.approx(.5)

def test_a_needle_in_a_crowd():
    "Ten keys near the query in a clump of their own, and 500 lukewarm ones of more mass in all: ranks differ"
    g = torch.Generator().manual_seed(0)
    axes = torch.eye(16).double()
    k = torch.cat([axes[:1].expand(10, -1) * 8, axes[1:2].expand(500, -1) * 3]) + torch.randn(510, 16, generator=g) / 50
    k = k[torch.randperm(510, generator=g)]
    q = ((axes[0] + 2 * axes[1]) * 1.0)[None, None, None]
    weight = (k @ q[0, 0, 0]).exp()
    heavy = weight > weight.sort(descending=True).values[10]
    assert heavy.sum() == 10 and weight[heavy].sum() < weight[~heavy].sum() / 5
    caught = {}
    for rank in RANKS:
        s = Saap(budget=12, clusters=2, sinks=0, window=1, rank=rank)
        read = s.select(q, k[None, None], scale=1.0).dense(510)[0, 0, 0] > 0
        caught[rank] = float(weight[read].sum() / weight.sum())
        assert read[heavy].sum() == (10 if rank == "density" else 0)
    assert caught["density"] > 4 * caught["mass"]

def test_a_row_shorter_than_its_window_is_its_own_run():
    "Next to a long one, where what is hidden is NaN"
    q, k, v = inputs()
    end = torch.tensor([60, 5])
    k, v = (x.masked_fill((torch.arange(60) >= end[:, None])[:, None, :, None], math.nan) for x in (k, v))
    out, stats = Saap(budget=12, **SMALL).decode(q, k, v, kv_end=end, return_stats=True)
    assert_close(out[1:], attention(q[1:], k[1:, :, :5], v[1:, :, :5]), 1e-12)
    assert (stats.values_read[1] == 5).all() and (stats.values_read[0] > 11).all()

def test_heads_of_a_group_share_what_they_read():
    q, k, _ = inputs()
    dense = Saap(budget=10, **SMALL).select(q, k).dense(60).unflatten(1, (2, 3))
    assert (dense == dense[:, :, :1]).all() and not torch.equal(dense[:, 0], dense[:, 1])

def test_centroids_route_by_their_product_with_the_query():
    q, k, v = inputs(heads=1, groups=1)
    s = Saap(probes=1, router="centroid", **SMALL)
    state = s.build(k)
    dense = s.select(q, k, state=state).dense(60)[:, 0, 0]
    for b in range(2):
        ids, score = state.rows[b, 0, 2:-9, 0].long(), state.fit[b, 0] @ q[b, 0, 0]
        best = max(ids.unique().tolist(), key=lambda c: float(score[c]))
        assert torch.equal(dense[b, 2:-9] > 0, ids == best)

# masks

@pytest.mark.parametrize("s", CASES, **NAMES)
def test_a_padded_row_is_its_own_run(s):
    "On the left and on the right, where hidden keys and values are NaN"
    q, k, v = inputs()
    start, end = [0, 13], [52, 60]
    hidden = (torch.arange(60) < torch.tensor(start)[:, None]) | (torch.arange(60) >= torch.tensor(end)[:, None])
    k, v = (x.masked_fill(hidden[:, None, :, None], math.nan) for x in (k, v))
    out = s.decode(q, k, v, kv_start=torch.tensor(start), kv_end=torch.tensor(end))
    for b in range(2):
        own = slice(start[b], end[b])
        assert_close(out[b], s.decode(q[b:b + 1], k[b:b + 1, :, own], v[b:b + 1, :, own])[0], 1e-10)

@pytest.mark.parametrize("s", CASES, **NAMES)
def test_causal_queries_are_steps(s):
    q, k, v = inputs(queries=4)
    kv_start, state = torch.tensor([0, 6]), s.new_state()
    state.append(k[:, :, :57], v[:, :, :57])
    for i in range(4):
        now = 57 + i
        if i: state.append(k[:, :, now - 1:now], v[:, :, now - 1:now])
        want = s.decode(q[:, :, [i]], k[:, :, :now], v[:, :, :now], state=state, kv_start=kv_start)
        got = s.decode(q, k, v, causal=True, kv_start=kv_start)[:, :, [i]]
        assert_close(got, want, 1e-10)

# states

def fresh(s, state, k, v):
    "An index of the keys with the centroids of `state`"
    new = s.new_state()
    new.append(k, v)
    new.fit, new.waits = state.fit, None
    return new

def same(s, state, q, k, v, **masks):
    "Equal to a fresh index: clusters bit for bit, moments and outputs"
    got, new = s.decode(q, k, v, state=state, **masks), fresh(s, state, k, v)
    assert_close(got, s.decode(q, k, v, state=new, **masks), 1e-10)
    assert torch.equal(state.rows, new.rows) and state.rows.dtype == torch.int16
    assert_close(state.latest, new.latest, 1e-12)

@pytest.mark.parametrize("s", CASES[:8], **NAMES)
def test_append_crop_and_reorder_equal_a_fresh_index(s):
    q, k, v = inputs(keys=400)
    state = s.new_state()
    state.append(k[:, :, :50], v[:, :, :50])
    same(s, state, q, k[:, :, :50], v[:, :, :50])
    for length, back in ((51, 51), (90, 88), (300, 250), (300, 180), (400, 20), (60, 60)):
        known = len(state)
        state.append(k[:, :, known:length], v[:, :, known:length])
        if length > 60: same(s, state, q, k[:, :, :length], v[:, :, :length])
        state.crop(back)                                        # shallow and deep, with and without a step between
        same(s, state, q, k[:, :, :back], v[:, :, :back])
    other = torch.randn(k.shape, generator=torch.Generator().manual_seed(9)).double()
    state.crop(30)
    k, v = torch.cat([k[:, :, :30], other[:, :, :300]], 2), torch.cat([v[:, :, :30], other[:, :, 50:350]], 2)
    state.append(k[:, :, 30:], v[:, :, 30:])                    # other keys at the places of old ones
    same(s, state, q, k, v)
    rows = torch.tensor([1, 0, 1])
    state.pick_sequences(rows)
    same(s, state, q[rows], k[rows], v[rows])
    state.crop(0)
    state.append(k[rows], v[rows])
    same(s, state, q[rows], k[rows], v[rows])
    state.reset()
    assert state.rows is None and state.fit is None and len(state) == 0

@pytest.mark.parametrize("s", CASES[:1] + CASES[2:3], **NAMES)
def test_a_new_prompt_inherits_nothing_from_the_last(s):
    "Its far keys begin and end where those of the last prompt did."
    q, *last = inputs(keys=300)
    _, k, v = inputs(seed=1, keys=300)
    state = s.build(last[0], v=last[1])
    s.decode(q, *last, state=state)
    assert state.marks
    state.reset()
    state.append(k, v)
    s.decode(q, k, v, state=state)
    same(s, state, q, k, v)

def test_a_deep_cut_forgets_its_sums():
    "With no step between, and before the first step"
    q, k, v = inputs(keys=400)
    other, s = inputs(7, keys=400), Saap(budget=20, **SMALL)
    for steps in (0, 1):
        state = s.new_state()
        state.append(k, v)
        if steps: s.decode(q, k, v, state=state)
        state.crop(30)
        state.append(*(x[:, :, 30:] for x in other[1:]))
        same(s, state, q, *(torch.cat([x[:, :, :30], y[:, :, 30:]], 2) for x, y in zip((k, v), other[1:])))

def test_one_index_serves_other_windows():
    "More sinks, fewer, a wider window, an earlier query, another start: sums follow what the far keys are"
    q, k, v = inputs(keys=400)
    s = Saap(budget=20, **SMALL)
    state = s.build(k, v=v)
    for sinks, window, masks in ((2, 9, {}), (20, 9, {}), (0, 9, {}), (2, 200, {}), (2, 9, {}),
                                 (2, 9, dict(kv_end=torch.tensor([400, 120]))),
                                 (2, 9, dict(kv_start=torch.tensor([0, 50])))):
        same(dataclasses.replace(s, sinks=sinks, window=window), state, q, k, v, **masks)

def test_values_may_come_later():
    "Priorities ask for no values; a step that wants them makes their sums anew, and leaves them out again"
    q, k, v = inputs(keys=300)
    s = Saap(budget=20, **SMALL)
    state = s.build(k)
    assert state.latest.shape[-1] == 18
    for tail in ("first_order", "drop", "second_order"):
        same(dataclasses.replace(s, tail=tail), state, q, k, v)

def test_sums_are_not_made_anew_for_each_step(monkeypatch):
    "A key is read once, when it leaves the window, and a few may be taken back without reading the others again"
    q, k, v = inputs(keys=500)
    s, read, kept = Saap(budget=20, **SMALL), [], Partition.KEPT
    between = Partition._between
    monkeypatch.setattr(Partition, "_between", lambda self, k, v, a, b: read.append(int((b - a).max()))
                        or between(self, k, v, a, b))
    state = s.new_state()
    state.append(k[:, :, :300], v[:, :, :300])
    for n in range(301, 501):
        state.append(k[:, :, n - 1:n], v[:, :, n - 1:n])
        s.decode(q, k[:, :, :n], v[:, :, :n], state=state)
    assert read[:2] == [301 - s.sinks - s.window - kept, kept] and read[2:] == [1] * 199
    same(s, state, q, k, v)
    for back in (1, kept, 7, kept // 2):
        n = 500 - back
        read.clear()
        state.crop(n)
        s.decode(q, k[:, :, :n], v[:, :, :n], state=state)
        assert sum(read) <= 2 * kept
        same(s, state, q, k[:, :, :n], v[:, :, :n])
        state.append(k[:, :, n:], v[:, :, n:])
        same(s, state, q, k, v)

class RowsRead(TorchDispatchMode):
    "Notes which rows of tensors [B, G, N, D] operations read: those that an index picks, else all that they are given."
    def __init__(self, *tensors):
        super().__init__()
        self.read = [set() for _ in tensors]
        self.numbers = {x.untyped_storage().data_ptr(): (seen, torch.arange(x[..., 0].numel())[:, None].repeat(
            1, x.shape[3]).flatten()) for seen, x in zip(self.read, tensors)}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
        for x in tree_leaves((args, kwargs)):
            known = isinstance(x, torch.Tensor) and self.numbers.get(x.untyped_storage().data_ptr())
            if view or not known or not x.numel(): continue
            numbers = known[1].as_strided(x.shape, x.stride(), x.storage_offset())
            if function.overloadpacket is torch.ops.aten.index:
                numbers = numbers[tuple(slice(None) if i is None else i for i in args[1])]
            known[0].update(numbers.unique().tolist())
        return function(*args, **(kwargs or {}))

@pytest.mark.parametrize("settings", [dict(budget=8), dict(probes=2), dict(budget=8, tail="drop"),
                                      dict(budget=0.1, tail="second_order")], ids=str)
@pytest.mark.parametrize("how", fast(["grows", "fixed", "compiled"], 2))
def test_a_step_reads_what_it_chose_and_what_left_the_window(settings, how, monkeypatch):
    """Neither keys nor values of others, which are NaN once the moments of their cluster were taken.

    In a compiled step nothing may be looked at that would make the host wait for a GPU.
    """
    (_, k, v), q = inputs(keys=150), inputs(queries=150)[0]
    s, start = Saap(**SMALL | settings), torch.tensor([0, 9])
    fixed, cache, grown = fixed_and_grown(s, k, v, start, 100, 150)
    grows, number, most = how == "grows", torch.arange(2 * 2 * 150).view(2, 2, 150), 0
    state = copy.deepcopy(grown) if grows else fixed
    for n in range(100, 125):
        asked, end = q[:, :, n:n + 1], torch.tensor([n + 1] * 2)
        grown.append(k[:, :, n:n + 1], v[:, :, n:n + 1])
        want = s.decode(asked, k[:, :, :n + 1], v[:, :, :n + 1], state=grown, kv_start=start)
        chosen = s.select(asked, k[:, :, :n + 1], state=grown, kv_start=start).dense(150)[:, :, 0] > 0
        chosen = chosen.unflatten(1, (2, -1)).any(2)
        chosen[:, :, n - s.window] = True  # has left it
        if n == 100: chosen[:, :, :n] = True
        for x, y in zip(cache, (k, v)): x.copy_(y.masked_fill(~chosen[..., None], math.nan))
        seen = [x[:, :, :n + 1] if grows else x for x in cache]
        if grows: state.append(*(x[:, :, n:] for x in seen))
        else: state.write(*cache, end[:1] - 1)
        with monkeypatch.context() as patch, RowsRead(*cache) as rows:
            if how == "compiled":
                for module in partition, index: patch.setattr(module, "on_cpu_eagerly", lambda x: False)
            got = s.decode(asked, *seen, state=state, kv_start=start, kv_end=end)
        assert_close(got, want, 1e-12)
        assert all(x <= set(number[chosen].tolist()) for x in rows.read)
        if n > 100: most = max(most, *map(len, rows.read))
    assert 4 * s.window < most < 0.6 * 4 * end[0]

def test_the_context_is_what_the_first_far_query_sees():
    "However the prompt was read; a row waits for its own first far key"
    q, k, v = inputs(keys=200)
    s, start = Saap(budget=20, clusters=9, sinks=1, window=30), torch.tensor([0, 90])
    outs = []
    for chunks in ([100], [60, 40], [1] * 100):
        state, at = s.new_state(), 0
        for n in chunks:
            state.append(k[:, :, at:at + n], v[:, :, at:at + n])
            at += n
        for n in range(100, 201, 20):
            if n > 100: state.append(k[:, :, n - 20:n], v[:, :, n - 20:n])
            outs.append(s.decode(q, k[:, :, :n], v[:, :, :n], state=state, kv_start=start))
            assert (state.waits is None) == (n > 120)
    for i in range(6): assert torch.equal(outs[i], outs[6 + i]) and torch.equal(outs[i], outs[12 + i])
    alone = s.new_state()
    alone.append(k[1:, :, 90:140], v[1:, :, 90:140])
    assert_close(s.decode(q[1:], k[1:, :, 90:140], v[1:, :, 90:140], state=alone), outs[2][1:], 1e-12)

def fixed_and_grown(s, k, v, start, length, capacity, **observed):
    "A state that was fixed after `length` keys, its cache, and a state that grows"
    shown, states = torch.arange(length) >= start[:, None], (s.new_state(), s.new_state())
    for state in states: state.append(k[:, :, :length], v[:, :, :length], shown=shown, **observed)
    states[0].to_static(capacity)
    states[0].look_at(k[:, :, :length], v[:, :, :length])
    cache = [torch.nn.functional.pad(x[:, :, :length], (0, 0, 0, capacity - length)) for x in (k, v)]
    return states[0], cache, states[1]

@pytest.mark.parametrize("settings", [dict(budget=8), dict(probes=2), dict(budget=0.2, tail="drop"),
                                      dict(budget=5, router="centroid", before_rope=True)], ids=str)
@pytest.mark.parametrize("capacity", [70, 150])
def test_an_index_of_a_fixed_length_is_one_that_grows(settings, capacity):
    "Key by key, to the last place of the cache; with padding, with beams that change places, and in a second turn"
    (_, k, v), q = inputs(keys=150), inputs(queries=150)[0]
    s, start = Saap(**SMALL | settings), torch.tensor([0, 9])
    before = lambda begin, end: dict(k_pre_rope=k[:, :, begin:end].flip(-1)) if s.before_rope else {}
    fixed, cache, grown = fixed_and_grown(s, k, v, start, 40, capacity, **before(0, 40))
    where = [x.data_ptr() for x in fixed.buffers()]
    for n in range(40, 70):
        for x, y in zip(cache, (k, v)): x[:, :, n] = y[:, :, n]
        grown.append(k[:, :, n:n + 1], v[:, :, n:n + 1], **before(n, n + 1))
        fixed.write(*cache, torch.tensor([n]), **before(n, n + 1))
        asks = dict(q_pre_rope=q[:, :, n:n + 1].flip(-1)) if s.before_rope else {}
        want = s.decode(q[:, :, n:n + 1], k[:, :, :n + 1], v[:, :, :n + 1], state=grown, kv_start=start, **asks)
        got = s.decode(q[:, :, n:n + 1], *cache, state=fixed, kv_start=start, kv_end=torch.full((2,), n + 1), **asks)
        assert_close(got, want, 1e-12)
        assert torch.equal(fixed.rows[:, :, :n + 1], grown.rows) and torch.equal(fixed.fit, grown.fit)
        if n == 50:
            assert [x.data_ptr() for x in fixed.buffers()] == where
            back, start = torch.tensor([1, 0]), start.flip(0)
            k, v, cache = k[back], v[back], [x[back] for x in cache]
            for state in (fixed, grown): state.pick_sequences(back)
    fixed.to_dynamic(70, cache[0])
    for state in (fixed, grown): state.append(k[:, :, 70:90], v[:, :, 70:90], **before(70, 90))
    outs = [s.decode(q[:, :, 89:90], k[:, :, :90], v[:, :, :90], state=x, kv_start=start, **asks)
            for x in (fixed, grown)]
    assert_close(*outs, 1e-12)
    assert torch.equal(fixed.rows, grown.rows) and fixed.held is grown.held is fixed.waits is None

def test_what_has_no_far_key_is_read_whole_while_the_length_is_fixed():
    "Exactly; when it may grow again, it is divided as if nothing had been"
    q, k, v = inputs(keys=60)
    s, start, end = Saap(budget=0, clusters=4, sinks=2, window=20), torch.tensor([0, 25]), torch.tensor([60, 60])
    fixed, cache, grown = fixed_and_grown(s, k, v, start, 40, 64)
    for n in range(40, 60):
        for x, y in zip(cache, (k, v)): x[:, :, n] = y[:, :, n]
        fixed.write(*cache, torch.tensor([n]))
    grown.append(k[:, :, 40:], v[:, :, 40:])
    got = s.decode(q, *cache, state=fixed, kv_start=start, kv_end=end)
    assert_close(got[1:], attention(q[1:], k[1:, :, 25:], v[1:, :, 25:]), 1e-12)
    assert (got[0] - attention(q, k, v)[0]).abs().max() > 1e-3
    fixed.to_dynamic(60, cache[0])
    alone = [s.decode(q, k, v, state=x, kv_start=start)[1] for x in (fixed, grown)]
    assert torch.equal(*alone) and torch.equal(fixed.rows[1], grown.rows[1])

def test_what_cannot_be_fixed():
    "A row without a key goes on growing; one key alone is enough; sinks and window are the method's"
    q, k, v = inputs(keys=3)
    s, none = Saap(**SMALL), Saap(**SMALL).new_state()
    none.append(k[:, :, :1], v[:, :, :1], shown=torch.tensor([[True], [False]]))
    none.to_static(9)
    assert not none.static and len(none) == 1
    one, cache, _ = fixed_and_grown(s, k[:, :, :1], v[:, :, :1], torch.tensor([0, 0]), 1, 1)
    out = s.decode(q, *cache, state=one, kv_end=torch.tensor([1, 1]))
    assert_close(out, v[:, :, :1].repeat_interleave(3, 1), 1e-12)
    with pytest.raises(ValueError, match="state must be fixed for sinks and a window of 2 and 8, got .2, 9"):
        dataclasses.replace(s, window=8).decode(q, *cache, state=one)
    with pytest.raises(ValueError, match="capacity must be"): none.to_static(0)

def test_copies_go_their_own_way():
    q, k, v = inputs(keys=300)
    s = Saap(budget=20, **SMALL)
    state = s.build(k[:, :, :250], v=v[:, :, :250])
    other = copy.deepcopy(state)
    other.append(k[:, :, 250:], v[:, :, 250:])
    same(s, other, q, k, v)
    same(s, state, q, k[:, :, :250], v[:, :, :250])

def test_centroids_made_before():
    "One partition for all sequences, given as a tensor or as an index; clusters without a key are never read"
    q, k, v = inputs()
    fit = fit_partition(k.transpose(0, 1).flatten(1, 2)[None], 6)[0]
    centroids = torch.cat([fit, torch.zeros(2, 1, 16)], 1)  # some other has a larger product with each key
    state = Partition(7, "spherical", 0, 0, False, centroids)
    state.append(k, v)
    how = dict(budget=12, sinks=2, window=9)
    want = saap_decode(q, k, v, state, **how)
    assert_close(saap_decode(q, k, v, centroids, **how), want, 1e-12)
    assert (state.rows < 6).all() and want.isfinite().all()
    state.reset()
    state.append(k[:1], v[:1])
    assert_close(saap_decode(q[:1], k[:1], v[:1], state, **how), want[:1], 1e-12)

def test_scores_order_keys_as_the_ranks_of_their_clusters():
    q, k, v = inputs()
    for s in (Saap(budget=10, **SMALL), Saap(budget=10, router="centroid", rank="mass", **SMALL)):
        state = s.build(k)
        found, dense = s.scores(q, state), s.select(q, k, state=state).dense(60)
        assert found.shape == (2, 6, 1, 60) and found.isfinite().all()
        read = (dense > 0)[..., 2:-9]
        best = found[..., 2:-9].masked_fill(read, -math.inf).amax(-1)
        assert (found[..., 2:-9].masked_fill(~read, math.inf).amin(-1) >= best).all()

def test_vattention_asks_it():
    q, k, v = inputs(keys=300, dtype=torch.float32)
    s = Saap(budget=20, clusters=16, sinks=4, window=16)
    method = VAttention(sinks=4, window=16, topk=40, base=30, eps=0.2, predictor=s)
    assert Method.from_json(method.to_json()) == method
    state, masks = method.new_state(), dict(kv_start=torch.tensor([0, 20]))
    state.append(k, v)
    out, stats = method.decode(q, k, v, seed=1, state=state, return_stats=True, **masks)
    assert_close(out, method.decode(q, k, v, seed=1, **masks), 1e-5)
    error = (out - attention(q, k, v, **masks)).norm() / attention(q, k, v, **masks).norm()
    assert error < 0.2 and (stats.density < 1).any()

# settings and bad input

def test_a_budget_stands_where_nothing_else_says_how_much():
    assert Saap().budget == 0.04 and Saap(probes=3).budget is None

Q, K, V = inputs(dtype=torch.float32)
STATE = Saap(**SMALL).build(K, v=V)
@pytest.mark.parametrize("call, error, message", [
    (lambda: Saap(budget=3, probes=2), ValueError, "probes must be None where budget is given, got 2 and 3"),
    (lambda: Saap(budget=-1), ValueError, "budget must be at least 0, got -1"),
    (lambda: Saap(budget=1.5), ValueError, r"budget must lie in \(0, 1\]"),
    (lambda: Saap(budget="3"), TypeError, "budget must be an int"),
    (lambda: Saap(probes=-1), ValueError, "probes must be at least 0, got -1"),
    (lambda: Saap(probes=2.0), TypeError, "probes must be an int, got float"),
    (lambda: Saap(clusters=0), ValueError, "clusters must be at least 1"),
    (lambda: Saap(clusters=2**15), ValueError, "clusters must be at least 1 and at most 32767, got 32768"),
    (lambda: Saap(sinks=-1), ValueError, "sinks must be at least 0 and at most 2147483647, got -1"),
    (lambda: Saap(window=0), ValueError, "window must be at least 1 and at most 2147483647, got 0"),
    (lambda: Saap(router="mlp"), ValueError, "router must not be what a file holds .* context, got 'mlp'"),
    (lambda: Saap(router="tree"), ValueError, "router must be one of moments, centroid, mlp, linear, got 'tree'"),
    (lambda: Saap(rank="size"), ValueError, "rank must be one of density, mass, printed, got 'size'"),
    (lambda: Saap(tail="fitted"), ValueError, "tail must not be what a file holds .* context, got 'fitted'"),
    (lambda: Saap(tail="mean"), ValueError, "tail must be one of first_order, second_order, fitted, drop, got 'mean'"),
    (lambda: Saap(partition=3), TypeError, "partition must be a str, got int"),
    (lambda: Saap(partition="pocket", clusters=128), ValueError, "clusters must be None with a partition of a file"),
    (lambda: Saap(partition="pocket", before_rope=True), ValueError, "before_rope must be None with a partition of a"),
    (lambda: Saap(layer=0), ValueError, "layer must be None for a partition of the context, got 0"),
    (lambda: Saap(partition="pocket", layer=-1), ValueError, "layer must be at least 0, got -1"),
    (lambda: Saap(before_rope=1), TypeError, "before_rope must be a bool, got int"),
    (lambda: Saap().decode(Q, K, V[:, :, :3]), ValueError, "v must have the shape of k"),
    (lambda: Saap(**SMALL).decode(Q, K * math.nan, V), ValueError, "k must be finite .* got NaN or inf"),
    (lambda: Saap(**SMALL).decode(Q, K.masked_fill(torch.arange(60)[:, None] == 30, math.inf), V), ValueError,
     "k must be finite"),
    (lambda: Saap(**SMALL).decode(Q * math.nan, K, V), ValueError, "must be finite, got NaN"),
    (lambda: Saap(clusters=8).decode(Q, K, V, state=STATE), ValueError, "state must have clusters 8, got 7"),
    (lambda: Saap(**SMALL).decode(Q, K[:, :, :9], V[:, :, :9], state=STATE), ValueError,
     "state must hold as many keys as k, 9, got 60"),
    (lambda: Saap(**SMALL).decode(Q, K, V, state=3), TypeError, "state must be Partition or None, got int"),
    (lambda: Saap(**SMALL, before_rope=True).decode(Q, K, V), ValueError, "k_pre_rope must be the keys before RoPE"),
    (lambda: Saap(**SMALL).scores(Q, Saap(**SMALL).new_state()), ValueError, "state must be fresh"),
    (lambda: saap_decode(Q, K, V, 3), TypeError, "partition must be a str, got int"),
    (lambda: saap_decode(Q, K, V, torch.zeros(2, 5)), ValueError, r"partition must have shape \[G, C, D\], got"),
    (lambda: saap_decode(Q, K, V, torch.zeros(3, 5, 16)), ValueError,
     r"partition must have shape \[G, C, D\] = \[2, 5, 16\], got \[3, 5, 16\]"),
    (lambda: saap_decode(Q, K, V, torch.full((2, 5, 16), math.nan)), ValueError, "partition must be finite, got NaN"),
    (lambda: saap_decode(Q, K, V, torch.ones(2, 5, 16).long()), TypeError, "partition must be floating, got torch.int"),
    (lambda: saap_decode(Q, K, V, STATE, k_pre_rope=K), ValueError, "k_pre_rope must be None where partition is an"),
    (lambda: saap_decode(Q, K, V, STATE, layer=0), ValueError, "layer must be None where partition is an index"),
    (lambda: saap_decode(Q, K, V, STATE, clusters=8), ValueError, "clusters must be that of the index, 7, .* got 8"),
    (lambda: saap_decode(Q, K, V, k_pre_rope=K[:, :1], **SMALL), ValueError,
     r"k_pre_rope must have the shape of k, \[2, 2, 60, 16\], got \[2, 1, 60, 16\]"),
    (lambda: saap_decode(Q, K, V, k_pre_rope=K[:, :, :9], **SMALL), ValueError, "k_pre_rope must have the shape of k"),
    (lambda: Saap(**SMALL).new_state().append(K, V, k_pre_rope=3), TypeError,
     "k_pre_rope must be a torch.Tensor, got int"),
    (lambda: saap_decode(Q[:, :, :, :8], K[..., :8], V[..., :8], STATE), ValueError, "head size"),
    (lambda: fit_partition(K[0], 4), ValueError, r"k must have shape \[B, G, n, D\]"),
    (lambda: fit_partition(K.long(), 4), TypeError, "k must be a floating tensor, got torch.int64"),
    (lambda: fit_partition(K, 4, shown=torch.ones(2, 3).bool()), ValueError, r"shown must have shape \[B, n\]"),
    (lambda: STATE.crop(61), ValueError, r"length must lie in \[0, 60\], got 61"),
    *((lambda x=x, n=n: saap_decode(Q, K, V, **SMALL | {n: x}), ValueError,
       f"{n} must be at least {least} and at most 2147483647, got {x}")
      for n, least in (("budget", 0), ("sinks", 0), ("window", 1)) for x in (2**31, 2**63, 2**64, 10**30)),
    (lambda: Saap(budget=2**31), ValueError, "budget must be at least 0 and at most 2147483647, got 2147483648"),
    (lambda: saap_decode(Q, K, V, STATE, budget=2**64), ValueError, "budget must be at least 0 and at most 2147483647"),
    (lambda: Saap(**SMALL).build(K, v=V).to_static(2**62), ValueError,
     "capacity must be at least 60 and at most 2147483647"),
    (lambda: Saap(**SMALL).build(K, v=V).to_static(2**64), ValueError,
     "capacity must be at least 60 and at most 2147483647"),
    (lambda: saap_decode(Q, K, None, **SMALL), TypeError, "v must be a torch.Tensor, got NoneType"),
    (lambda: Saap(**SMALL).decode(Q, K, None), TypeError, "v must be a torch.Tensor, got NoneType"),
    *((lambda x=x: saap_decode(Q, K, V, k_pre_rope=x, **SMALL), TypeError,
       f"k_pre_rope must be a torch.Tensor, got {name}")
      for x, name in ((3, "int"), ([1.0], "list"), (True, "bool"), (K.numpy(), "ndarray"))),
    *((lambda x=x: saap_decode(Q, K, V, k_pre_rope=x, **SMALL), TypeError,
       f"k_pre_rope must be float16, .* got {x.dtype}")
      for x in (K.long(), K.bool(), K.cfloat())),
    (lambda: saap_decode(Q, K, V, k_pre_rope=K.to("meta"), **SMALL), ValueError,
     "k_pre_rope must be on the device of q, cpu, or in host memory, got meta"),
    *((lambda x=x, router=router: saap_decode(Q, K, V, k_pre_rope=K, q_pre_rope=x, router=router, **SMALL), TypeError,
       f"q_pre_rope must be {message}") for router in ("centroid", "moments")
      for x, message in ((3, "a torch.Tensor, got int"), ([1.0], "a torch.Tensor, got list"),
                         (Q.long(), "float16, .* got torch.int64"))),
    *((lambda x=x: Saap(**SMALL).select(Q, K, q_pre_rope=x), error, f"q_pre_rope must be {message}")
      for x, error, message in ((3, TypeError, "a torch.Tensor, got int"),
                                (Q[:, :1], ValueError, r"of the shape of q, \[2, 6, 1, 16\], got \[2, 1, 1, 16\]"))),
    (lambda: saap_decode(Q, K, V, k_pre_rope=K, q_pre_rope=torch.cat([Q, Q], 2), router="centroid", **SMALL),
     ValueError, r"q_pre_rope must be of the shape of q, \[2, 6, 1, 16\], got \[2, 6, 2, 16\]"),
    (lambda: saap_decode(Q, K, V, k_pre_rope=K, q_pre_rope=Q.to("meta"), router="centroid", **SMALL), ValueError,
     "q_pre_rope must be on the device of q, cpu, got meta"),
    (lambda: saap_decode(Q, K, V, torch.ones(2, 5, 16, device="meta")), ValueError,
     "partition must be on the device of q, cpu, or in host memory, got meta"),
    (lambda: Saap(**SMALL, router="centroid").new_state().append(K, V, q_pre_rope=3), TypeError,
     "q_pre_rope must be a torch.Tensor, got int"),
    (lambda: Saap(**SMALL).new_state().append(K, V, k_pre_rope=K.long()), TypeError,
     "k_pre_rope must be float16, .*, got torch.int64"),
    (lambda: Saap(**SMALL).new_state().append(K, V, k_pre_rope=K.to("meta")), ValueError,
     "k_pre_rope must be on the device of k, cpu, got meta"),
    *((lambda x=x: Saap(**SMALL).build(x), TypeError, f"k must be a torch.Tensor, got {name}")
      for x, name in ((3, "int"), (None, "NoneType"), ([1.0], "list"))),
    (lambda: Saap(**SMALL).build(K.long()), TypeError, "k must be float16, .* got torch.int64"),
    (lambda: Saap(**SMALL).build(K, v=V.long()), TypeError, "v must be float16, .* got torch.int64"),
    (lambda: Saap(**SMALL).build(K, v=V.to("meta")), ValueError,
     "v must be on the device of q, cpu, or in host memory, got meta"),
    (lambda: Saap(**SMALL).build(K, v=3), TypeError, "v must be a torch.Tensor, got int"),
    (lambda: Saap(**SMALL).build(K, v=V[..., :8]), ValueError, r"v must have the shape of k, \[2, 2, 60, 16\], got"),
    (lambda: Saap(**SMALL).state_for(3, K, None), TypeError, "q must be a torch.Tensor, got int"),
    *((lambda x=x: Saap(**SMALL).scores(Q, x), TypeError, f"state must be Partition, got {type(x).__name__}")
      for x in (3, K, None)),
    *((lambda x=x: Saap(**SMALL).scores(x, STATE), error, f"q must {message}") for x, error, message in (
        (3, TypeError, "be a torch.Tensor, got int"), (Q.long(), TypeError, "be float16, .* got torch.int64"),
        (Q[0], ValueError, r"have shape \[B, H, Q, D\] .* got \[6, 1, 16\]"),
        (Q[:1], ValueError, r"have shape \[B, H, Q, D\] for 2 sequences, 2 heads of keys and size 16, got \[1, 6"),
        (Q[:, :5], ValueError, "have shape"), (Q[..., :8], ValueError, "have shape"),
        (Q.to("meta"), ValueError, "be on the device of state, cpu, got meta"))),
    *((lambda x=x: about_partition(x), TypeError, f"partition must be a str or a path, got {type(x).__name__}")
      for x in (3, None, [1.0], K)),
    (lambda: partition_parts(3, 0), TypeError, "partition must be a str or a path, got int"),
    *((lambda x=x: partition_parts("pocket", x), TypeError, f"layer must be an int, got {type(x).__name__}")
      for x in (1.0, None, True)),
    (lambda: partition_parts("pocket", -1), ValueError, "layer must be at least 0, got -1"),
    *((lambda x=x: save_partition(x, "x", torch.nn.Linear(2, 2)), TypeError,
       f"parts must be a dict, got {type(x).__name__}") for x in (3, [1.0], K)),
    (lambda: save_partition({3: K}, "x", torch.nn.Linear(2, 2)), ValueError, "parts must be named by layer .* got 3"),
    *((lambda x=x: save_partition({"0.centroids": x}, "x", torch.nn.Linear(2, 2)), TypeError,
       f"parts must hold floating tensors, got {name} in 0.centroids")
      for x, name in ((3, "int"), (None, "NoneType"), (K.long(), "torch.int64"))),
    (lambda: save_partition({"0.centroids": K[0].to("meta")}, "x", torch.nn.Linear(2, 2)), ValueError,
     "parts must be loaded, got 0.centroids on the meta device"),
    (lambda: save_partition({"0.centroids": K[0]}, 3, torch.nn.Linear(2, 2)), TypeError,
     "path must be a str or a path, got int"),
    (lambda: save_partition({"0.centroids": K[0]}, "x", 3), TypeError, "model must be a torch.nn.Module, got int"),
    (lambda: Saap(partition="pocket").check_model(3), TypeError, "model must be a torch.nn.Module, got int"),
])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message): call()

@pytest.mark.parametrize("name", ["budget", "sinks", "window"])
def test_the_largest_counts_read_everything(name):
    start = torch.tensor([3, 0])
    for s in Saap(**SMALL | {name: 2**31 - 1}), Saap(**SMALL | {name: 60}):
        out, stats = s.decode(Q, K, V, kv_start=start, return_stats=True)
        assert_close(out, attention(Q, K, V, kv_start=start), 1e-5)
        assert (stats.density == 1).all()

ALARM = 1e-8  # chance that the test below fails for a guarantee that holds

@pytest.mark.parametrize("guarantee", ["denominator", "output"])
@pytest.mark.parametrize("router, before_rope", [("moments", None), ("centroid", False), ("moments", True)])
def test_a_guarantee_is_kept_on_top_of_clusters(guarantee, router, before_rope):
    "Of many independent steps no more than delta fail, but for chance; and neither everything nor nothing is drawn"
    eps, delta, times = 0.3, 0.2, 300
    q, k, v = inputs(1, batch=1, keys=400)
    v, k_pre_rope = v + 2, inputs(2, batch=1, keys=400)[1]
    method = VAttention(eps, delta, 0, 2, 8, 60, guarantee=guarantee, share=False, predictor=Saap(
        clusters=7, sinks=0, window=2, router=router, before_rope=before_rope))
    state, many = method.new_state(), q.expand(-1, -1, times, -1)
    state.append(k, v, **({"k_pre_rope": k_pre_rope} if before_rope else {}))
    out, stats = method.decode(many, k, v, seed=5, state=state, return_stats=True)
    error = relative_error(out, attention(q, k, v).expand_as(out))
    if guarantee == "denominator":
        chosen = select_with_guarantee(many, k, v, method, state, seed=5)[0]
        weight = attention_weights(q, k).expand(-1, -1, times, -1)
        error = ((weight.gather(-1, chosen.index) * chosen.weight).sum(-1) - 1).abs()
    assert 0.02 < stats.density.mean() < 0.98 and error.std() > 0
    assert clopper_pearson(int((error > eps).sum()), error.numel(), 1 - ALARM).low <= delta

# inside transformers

import safetensors.torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparse_nb import pocket
from sparse_nb.evaluate import accuracy
from sparse_nb.hf import attention_override, capture, prefill, sparsify
from sparse_nb.saap_training import fit_router, train_partition
from sparse_nb.tasks import make
from inputs import IDS
from models import build, gpt2

GREEDY = dict(do_sample=False, max_new_tokens=8, pad_token_id=0, eos_token_id=None, suppress_tokens=[0])
USED = [Saap(budget=5, clusters=6, sinks=1, window=8), Saap(probes=2, clusters=5, window=6, tail="second_order"),
        Saap(budget=5, clusters=6, window=8, before_rope=True, tail="drop"),
        Saap(budget=5, clusters=6, window=8, before_rope=True, router="centroid"),
        VAttention(0.5, 0.2, sinks=1, window=4, topk=4, base=6, plugin="plain", predictor=Saap(clusters=5, window=4)),
        VAttention(0.5, 0.2, sinks=1, window=4, topk=4, base=6, plugin="plain", predictor=Saap(
            clusters=5, window=4, before_rope=True, router="centroid"))]
OF_FILES = [Saap(6, window=8, partition="file", router="mlp", rank="mass", tail="drop"),
            Saap(6, window=8, partition="file", tail="fitted"),
            Saap(probes=2, window=8, partition="file", router="linear"),
            Saap(6, window=8, partition="file", router="centroid"),
            VAttention(0.5, 0.2, sinks=1, window=4, topk=4, base=6, plugin="plain", predictor=Saap(
                window=4, partition="file", router="mlp"))]

@pytest.fixture(scope="module")
def llama(): return build("llama")

def parts_of(model, clusters=5, hidden=6, layers=None):
    "Parts of a partition as a file holds them, drawn at random, with networks for query heads and for groups"
    config, g = model.config, torch.Generator().manual_seed(0)
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    draw = lambda *shape: torch.randn(shape, generator=g)
    shapes = dict(centroids=(groups, clusters, size), mlp_w1=(heads, size, hidden), mlp_b1=(heads, hidden),
                  mlp_w2=(heads, hidden, clusters), mlp_b2=(heads, clusters), linear_w=(groups, size, clusters),
                  linear_b=(groups, clusters))
    return {f"{layer}.{name}": x for layer in layers or range(config.num_hidden_layers)
            for name, x in [*((name, draw(*shape)) for name, shape in shapes.items()), ("factor", torch.rand(heads))]}

@pytest.fixture(scope="module")
def file(llama, tmp_path_factory):
    "A partition of the model"
    path = tmp_path_factory.mktemp("saap") / "llama.safetensors"
    save_partition(parts_of(llama), path, llama)
    return str(path)

def from_file(method, file):
    "The method with a file that is there"
    if not isinstance(method, VAttention): return dataclasses.replace(method, partition=file)
    return dataclasses.replace(method, predictor=from_file(method.predictor, file))

def ids_of(model, ids=IDS, **kwargs):
    return model.generate(ids, **GREEDY | dict(attention_mask=torch.ones_like(ids)) | kwargs)[:, ids.shape[1]:]

@pytest.mark.parametrize("method", fast([*USED, *OF_FILES], 0, 2, len(USED)), **NAMES)
def test_ways_to_generate_agree(llama, file, method):
    if method in OF_FILES: method = from_file(method, file)
    ids = torch.randint(3, 64, (1, 120), generator=torch.Generator().manual_seed(2))
    padded = torch.stack([ids[0], torch.cat([ids.new_zeros(29), ids[0, :91]])])
    mask = (torch.arange(120) >= torch.tensor([[0], [29]])).long()
    with sparsify(llama, decode=method, seed=[0], stats=True) as session:
        want = ids_of(llama, ids)
        assert (session.stats().density < 0.9).all()
        assert torch.equal(ids_of(llama, ids, prompt_lookup_num_tokens=3), want)
        assert torch.equal(ids_of(llama, ids, cache_implementation="static"), want)
        short = ids_of(llama, ids[:, :91])
    with sparsify(llama, decode=method, seed=[0, 0]):
        assert torch.equal(ids_of(llama, padded, attention_mask=mask), torch.cat([want, short]))
    with sparsify(llama, decode=method): assert ids_of(llama, ids, num_beams=3).shape == want.shape

@pytest.mark.parametrize("method", USED[:2], **NAMES)
def test_beams_are_followed(llama, method):
    "The same beams from indexes built anew from the keys of each beam, with the centroids of the prompt"
    learnt, method = {}, dataclasses.replace(method, before_rope=False)
    def attend(module, query, key, value, mask, scaling=None, **kwargs):
        if query.shape[2] > 1:
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)
        state = method.new_state()
        state.append(key, value)
        if module.layer_idx in learnt: state.fit, state.waits = learnt[module.layer_idx].expand_as(key[:, :, :1]
            .expand(-1, -1, method.clusters, -1)), None
        out = method.decode(query, key, value, scale=scaling, state=state).transpose(1, 2)
        learnt.setdefault(module.layer_idx, state.fit[:1])
        return out, None
    with attention_override(llama, attend, mask="sdpa"): want = ids_of(llama, num_beams=4, max_new_tokens=10)
    with sparsify(llama, decode=method): assert torch.equal(ids_of(llama, num_beams=4, max_new_tokens=10), want)

def test_keys_before_rope_make_other_clusters(llama):
    "Those of the model's own projection; and a cache that was filled before has none"
    s, caches = USED[2], []
    for method in (s, dataclasses.replace(s, before_rope=False)):
        caches.append(DynamicCache(config=llama.config))
        with sparsify(llama, decode=method): ids_of(llama, past_key_values=caches[-1])
    assert not torch.equal(caches[0].layers[0].state.fit, caches[1].layers[0].state.fit)
    old = prefill(llama, IDS)
    with sparsify(llama, decode=s), pytest.raises(ValueError, match="k_pre_rope must be .* layer 0"):
        llama(IDS[:, :1], past_key_values=old)

def fits_of(model, method, cache=None, ids=IDS):
    "Centroids of each layer after generating"
    cache = DynamicCache(config=model.config) if cache is None else cache
    with sparsify(model, decode=method): ids_of(model, ids, past_key_values=cache)
    return [layer.state.fit for layer in cache.layers]

def test_clusters_are_of_keys_before_rope_where_these_are_known(llama):
    "In a session; not in a cache that was filled without it, nor in a model that does not say how it rotates"
    same = lambda a, b: all(map(torch.equal, a, b))
    s = Saap(budget=5, clusters=6, window=8)
    free, before, after = (fits_of(llama, dataclasses.replace(s, before_rope=x)) for x in (None, True, False))
    assert same(free, before) and not same(free, after)
    old, plain = (fits_of(llama, dataclasses.replace(s, before_rope=x), prefill(llama, IDS[:, :-1]))
                  for x in (None, False))
    assert same(old, plain)
    other = gpt2()
    assert same(fits_of(other, s), fits_of(other, dataclasses.replace(s, before_rope=False)))
    with pytest.raises(ValueError, match="layer 0 of gpt2 .* is not given its rotation"):
        fits_of(other, dataclasses.replace(s, before_rope=True))

def test_clusters_of_a_direct_call_are_of_the_keys_that_it_gives(llama):
    x = capture(llama, IDS[:1], before_rope=True)[0]
    few = dict(budget=3, window=9, clusters=6, scale=x.scale)
    by = lambda **kw: saap_decode(*x.seen(-1), **few, **kw)
    assert torch.equal(by(), by(before_rope=False))
    assert torch.equal(by(), by(before_rope=False, k_pre_rope=x.k_pre_rope))
    assert torch.equal(by(k_pre_rope=x.k_pre_rope), by(before_rope=True, k_pre_rope=x.k_pre_rope))
    assert not torch.equal(by(), by(k_pre_rope=x.k_pre_rope))
    with pytest.raises(ValueError, match="k_pre_rope must be .* pass them in a call of your own"): by(before_rope=True)
    with pytest.raises(ValueError, match="q_pre_rope must be the queries before RoPE"):
        by(k_pre_rope=x.k_pre_rope, router="centroid")
    state = Saap(clusters=6).new_state()
    state.append(x.k[:, :, :9], x.v[:, :, :9], k_pre_rope=x.k_pre_rope[:, :, :9])
    with pytest.raises(ValueError, match="k_pre_rope must be"): state.append(x.k[:, :, 9:], x.v[:, :, 9:])
    state.reset()
    state.append(x.k, x.v)
    assert len(state) == x.k.shape[2]

def test_vattention_with_clusters_before_rope(llama):
    "Its predictor gets keys and queries before RoPE from a model, and names what a direct call did not give"
    v = VAttention(0.5, 0.2, sinks=1, window=4, topk=4, base=6, plugin="plain", predictor=Saap(
        clusters=5, window=4, before_rope=True, router="centroid"))
    cache, x = DynamicCache(config=llama.config), capture(llama, IDS[:1], before_rope=True)[0]
    with torch.no_grad(), sparsify(llama, decode=v, setup="B") as session:
        with session.dispatch.reading(): llama(IDS[:1, :-1], past_key_values=cache)
        llama(IDS[:1, -1:], past_key_values=cache)
    state = cache.layers[0].state
    assert state.before
    assert_close(state.queries, x.q_pre_rope[:, :, [-1]], 1e-4)
    with pytest.raises(ValueError, match="k_pre_rope must be .* pass them"): v.decode(*x.seen(-1), seed=0)
    own = v.new_state()
    own.append(x.k, x.v, k_pre_rope=x.k_pre_rope)
    with pytest.raises(ValueError, match="q_pre_rope must be the queries before RoPE"):
        v.decode(*x.seen(-1), seed=0, state=own)

@pytest.mark.parametrize("offload", [False, True])
def test_a_second_turn_goes_on_with_the_index(llama, offload):
    s, cache = USED[0], DynamicCache(config=llama.config)
    with sparsify(llama, decode=s, offload=offload):
        first = llama.generate(IDS[:, :30], past_key_values=cache, **GREEDY)
        state = cache.layers[1].state
        fit = state.fit
        more = torch.cat([first, IDS[:, 30:40]], 1)
        second = llama.generate(more, past_key_values=cache, **GREEDY)
    assert cache.layers[1].state is state and state.fit is fit and len(state) == second.shape[1] - 1

def test_the_pocket_model_answers():
    "In a batch with unequal padding, as each row alone, and in a second turn"
    model, tokenizer = pocket.load()
    s = Saap(budget=0.1, clusters=32, window=64)
    examples = [make("multikey", n, seed=i) for i, n in ((0, 900), (1, 700))]
    rows = [torch.tensor(tokenizer.encode(x.prompt)) for x in examples]
    size = max(map(len, rows))
    ids = torch.stack([torch.cat([x.new_zeros(size - len(x)), x]) for x in rows])
    mask = torch.stack([(torch.arange(size) >= size - len(x)).long() for x in rows])
    told = dict(GREEDY, max_new_tokens=6)
    with torch.no_grad(), sparsify(model, decode=s, stats=True) as session:
        together = model.generate(ids, attention_mask=mask, **told)
        again = model.generate(torch.cat([together, ids[:, -40:]], 1), attention_mask=torch.cat(
            [mask, mask.new_ones(2, 46)], 1), **told)
        alone = [model.generate(x[None], attention_mask=torch.ones_like(x[None]), **told)[:, len(x):] for x in rows]
        assert session.stats().density.max() < 0.4 and again.shape[1] == size + 52
    assert torch.equal(together[:, size:], torch.cat(alone))

# partitions of files

@pytest.mark.parametrize("router", ["mlp", "linear", "centroid"])
def test_a_router_reads_the_query_before_rope(llama, file, router):
    "Shares of the clusters by hand, summed over the heads of a group; and never a cluster without a far key"
    parts, x = partition_parts(file, 1), capture(llama, IDS[:1], before_rope=True)[1]
    q, k, v = x.seen(-1)
    before = x.q_pre_rope[:, :, [-1]]
    s = dict(partition=file, layer=1, probes=1, sinks=1, window=9, router=router, rank="mass", tail="drop")
    out = saap_decode(q, k, v, q_pre_rope=before, k_pre_rope=x.k_pre_rope, **s)
    ids = nearest_cluster(x.k_pre_rope, parts["centroids"][None], "spherical")[0]
    repeats = q.shape[1] // k.shape[1]
    for g in range(k.shape[1]):
        far, share = ids[g, 1:-9], 0
        count = torch.bincount(far, minlength=5)
        for h in range(g * repeats, (g + 1) * repeats):
            if router == "mlp":
                hidden = (before[0, h, 0] @ parts["mlp_w1"][h] + parts["mlp_b1"][h]).relu()
                f = (hidden @ parts["mlp_w2"][h] + parts["mlp_b2"][h]).softmax(-1)
            elif router == "linear": f = (before[0, h, 0] @ parts["linear_w"][g] + parts["linear_b"][g]).softmax(-1)
            else: f = (before[0, h, 0] @ parts["centroids"][g].T * q.shape[3]**-0.5).exp() * count
            f = f * (count > 0)
            share = share + f / f.sum()
        best = int(share.argmax())
        read = torch.ones(k.shape[2], dtype=torch.bool)
        read[1:-9] = far == best
        for h in range(g * repeats, (g + 1) * repeats):
            weight = (k[0, g, read] @ q[0, h, 0] * x.scale).softmax(-1)
            assert_close(out[0, h, 0], weight @ v[0, g, read], 1e-4)
    needs = f"q_pre_rope must be the queries before RoPE, .* router='{router}' .* got None"
    with pytest.raises(ValueError, match=needs):
        saap_decode(q, k, v, k_pre_rope=x.k_pre_rope, **s)
    with pytest.raises(ValueError, match="q_pre_rope must be"):
        saap_decode(q, k, v, k_pre_rope=x.k_pre_rope, q_pre_rope=before[:, :1], **s)
    with pytest.raises(ValueError, match="k_pre_rope must be the keys before RoPE, got None"):
        saap_decode(q, k, v, q_pre_rope=before, **s)

def test_a_factor_stands_between_the_orders(llama, tmp_path):
    "0 is the first order, 1 the second, one of each head its own"
    x, outs = capture(llama, IDS[:1], before_rope=True)[0], {}
    heads = x.q.shape[1]
    for name, factor in (("zero", torch.zeros(heads)), ("one", torch.ones(heads)), ("both", torch.arange(heads) % 2.0)):
        path = tmp_path / f"{name}.safetensors"
        save_partition(parts_of(llama) | {"0.factor": factor}, path, llama)
        s = dict(partition=str(path), layer=0, budget=3, window=9, k_pre_rope=x.k_pre_rope)
        for tail in TAILS[:3]: outs[name, tail] = saap_decode(*x.seen(-1), tail=tail, **s)
    assert torch.equal(outs["zero", "fitted"], outs["one", "first_order"])
    assert torch.equal(outs["one", "fitted"], outs["zero", "second_order"])
    odd = (torch.arange(heads) % 2 == 1)[:, None, None]
    assert torch.equal(outs["both", "fitted"][0],
                       torch.where(odd, outs["one", "second_order"][0], outs["one", "first_order"][0]))
    assert not torch.equal(outs["one", "second_order"], outs["one", "first_order"])

def test_vattention_observes_queries_before_rope(llama, file):
    "Those of the step, from the model; another query before RoPE, other keys; and none of another shape"
    s = from_file(OF_FILES[-1], file)
    cache = DynamicCache(config=llama.config)
    with torch.no_grad(), sparsify(llama, decode=s, setup="B") as session:
        with session.dispatch.reading(): llama(IDS[:1, :-1], past_key_values=cache)
        llama(IDS[:1, -1:], past_key_values=cache)
    x = capture(llama, IDS[:1], before_rope=True)[0]
    before = x.q_pre_rope[:, :, [-1]]
    assert_close(cache.layers[0].state.queries, before, 1e-4)
    own, kept = s.at_layer(0), []
    state = own.new_state()
    state.append(x.k, x.v, k_pre_rope=x.k_pre_rope)
    for asked in (before, before, -before):
        kept.append(own.decode(*x.seen(-1), seed=3, state=state, q_pre_rope=asked))
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])
    with pytest.raises(ValueError, match="q_pre_rope must be the queries before RoPE"):
        own.decode(*x.seen(-1), seed=3, state=state, q_pre_rope=before[..., :3])

def test_each_layer_takes_its_own_partition(llama, file):
    cache, s = DynamicCache(config=llama.config), Saap(6, window=8, partition=file)
    with sparsify(llama, decode=s): ids_of(llama, past_key_values=cache)
    for i, layer in enumerate(cache.layers):
        assert layer.state.source[:2] == (file, i)
        assert torch.equal(layer.state.fit[0], partition_parts(file, i)["centroids"])
    other = Saap(6, window=8, before_rope=True, clusters=5)
    with sparsify(llama, decode=other), pytest.raises(ValueError, match="cache must keep the index of .* got layer 0"):
        llama(IDS[:, :1], past_key_values=cache)

def test_a_cache_of_another_router_says_what_it_lacks(llama, file):
    cache, s = DynamicCache(config=llama.config), Saap(6, window=8, partition=file)
    with sparsify(llama, decode=s): ids_of(llama, past_key_values=cache)
    with torch.no_grad(), sparsify(llama, decode=dataclasses.replace(s, router="mlp")):
        with pytest.raises(ValueError, match="q_pre_rope .* got None: .* in a model, read the prompt with this router"):
            llama(IDS[:, :1], past_key_values=cache)

def test_a_prompt_is_read_for_an_index_that_observes_it(llama):
    "`accuracy` answers as generation does, though other methods share its reading"
    model, tokenizer = pocket.load()
    s = Saap(0.05, window=30, partition="pocket", tail="drop")
    found = accuracy(model, tokenizer, "multikey", 700, {"exact": Exact(), "saap": s}, prompts=2, batch=2)
    for seed in range(2):
        x = make("multikey", 700, seed=seed, tokenizer=tokenizer)
        ids = tokenizer(x.prompt, return_tensors="pt").input_ids
        with torch.no_grad(), sparsify(model, decode=s):
            new = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        row = found[(found.method == "saap") & (found.seed == seed)].iloc[0]
        assert row.answer == tokenizer.decode(new[0, ids.shape[1]:])

def spoilt(model, path, **changed):
    "A file of a model with parts changed; None: left out"
    parts = parts_of(model) | changed
    save_partition({name: x for name, x in parts.items() if x is not None}, path, model)
    return str(path)

def test_wrong_files_are_refused_by_name(llama, file, tmp_path):
    name, other = lambda stem: str(tmp_path / f"{stem}.safetensors"), copy.deepcopy(llama)
    torch.nn.init.normal_(other.model.layers[0].mlp.up_proj.weight)
    save_partition(parts_of(llama), name("other"), other)
    for stem, layers in ("few", [0]), ("many", [0, 1, 2]):
        save_partition(parts_of(llama, layers=layers), name(stem), llama)
    spoilt(llama, name("no_router"), **{"1.mlp_w1": None})
    spoilt(llama, name("no_factor"), **{"0.factor": None})
    Path(name("text")).write_text("centroids")
    safetensors.torch.save_file(parts_of(llama), name("unsigned"))
    for method, message in (
        (Saap(partition=name("other")), "model must have the weights that the partition"),
        (VAttention(predictor=Saap(partition=name("other"))), "model must have the weights that the partition"),
        (Saap(partition=name("few")), "partition must hold centroids .* in layer 1"),
        (Saap(partition=name("many")), r"partition must be of the 2 layers .* \[0, 1, 2\]"),
        (Saap(partition=name("no_router"), router="mlp"), "partition must hold mlp_w1 for router='mlp' .* in layer 1"),
        (Saap(partition=name("no_factor"), tail="fitted"), "partition must hold factor .* tail='fitted', .* layer 0"),
        (Saap(partition=name("none")), "partition must be 'context', 'pocket' or a file of"),
        (Saap(partition=name("text")), "partition must be 'context', 'pocket' or a file of"),
        (Saap(partition=name("unsigned")), "partition must be .* a file of .*'model'"),
        (Saap(partition="pocket"), "model must have the weights that the partition 'pocket' was made from"),
    ):
        with pytest.raises(ValueError, match=message), sparsify(llama, decode=method): pass
    with pytest.raises(ValueError, match="outside of a session, got None"):
        saap_decode(Q, K, V, file)
    with pytest.raises(ValueError, match=r"layer must be one of those in the partition .*, \[0, 1\], got 7"):
        saap_decode(Q, K, V, file, layer=7)
    with pytest.raises(ValueError, match=r"partition must have shape \[G, C, D\] = \[2, 5, 16\]"):
        wide = {f"0.{name}": x for name, x in dict(centroids=torch.zeros(3, 5, 16)).items()}
        save_partition(wide, tmp_path / "wide.safetensors", llama)
        saap_decode(Q, K, V, str(tmp_path / "wide.safetensors"), layer=0, k_pre_rope=K)
    nan = spoilt(llama, tmp_path / "nan.safetensors", **{"0.mlp_b2": torch.full((4, 5), math.nan)})
    x = capture(llama, IDS[:1], before_rope=True)[0]
    with pytest.raises(ValueError, match="must be finite, got NaN"):
        saap_decode(*x.seen(-1), nan, layer=0, router="mlp", window=9, k_pre_rope=x.k_pre_rope,
                    q_pre_rope=x.q_pre_rope[:, :, [-1]])
    with pytest.raises(ValueError, match="parts must be named by layer and one of centroids, .*, got '0.mlp'"):
        save_partition({"0.mlp": torch.zeros(1)}, tmp_path / "x.safetensors", llama)

@pytest.mark.parametrize("router, tail, changed, message", [
    ("moments", "drop", dict(centroids=torch.full((2, 5, 16), math.nan)), "finite, got NaN or inf in centroids"),
    ("moments", "drop", dict(centroids=torch.zeros(2, 0, 16)), r"1 to 32767 clusters, got \[2, 0, 16\]"),
    ("moments", "drop", dict(centroids=torch.zeros(1, 2**15, 1)), r"1 to 32767 clusters, got \[1, 32768, 1\]"),
    ("moments", "drop", dict(centroids=torch.zeros(5, 16)), r"centroids \[G, C, D\] .* got \[5, 16\]"),
    ("moments", "fitted", dict(factor=torch.full((4,), math.inf)), "must be finite, got NaN or inf in factor"),
    ("moments", "fitted", dict(factor=torch.ones(5)), r"factor of shape \[5\], for a multiple of 2 heads"),
    ("moments", "fitted", dict(factor=torch.ones(2)), "partition must have factors of 4 heads, got 2"),
    ("mlp", "drop", dict(mlp_b1=None), "partition must hold mlp_b1 for router='mlp' .* in layer 1"),
    ("mlp", "drop", dict(mlp_w2=None), "partition must hold mlp_w2 for router='mlp' .* in layer 1"),
    ("mlp", "drop", dict(mlp_w2=torch.zeros(2, 6, 5), mlp_b2=torch.zeros(2, 5)), r"mlp_w2 of shape \[4, 6, 5\], "),
    ("mlp", "drop", dict(mlp_w2=torch.zeros(4, 6, 3), mlp_b2=torch.zeros(4, 3)), r"mlp_w2 of shape \[4, 6, 5\]"),
    ("linear", "drop", dict(linear_b=torch.zeros(5)), r"layer 1 of .* linear_b of shape \[2, 5\], .* got \[5\]"),
], ids=lambda x: x if isinstance(x, str) else ", ".join(x))
def test_parts_that_do_not_fit_are_refused_by_name(llama, tmp_path, router, tail, changed, message):
    "Before the first token is written; not read as far as they go"
    path = spoilt(llama, tmp_path / "spoilt.safetensors", **{f"1.{name}": x for name, x in changed.items()})
    s = Saap(6, window=8, partition=path, router=router, tail=tail)
    with pytest.raises(ValueError, match=message), sparsify(llama, decode=s): ids_of(llama)

@pytest.mark.parametrize("kind", [torch.int32, torch.bool, torch.complex64])
def test_parts_of_other_numbers_are_refused_by_name(file, tmp_path, kind):
    "Where another program has written them"
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
    with safe_open(file, "pt") as opened: about = opened.metadata()
    parts, path = load_file(file), str(tmp_path / "other.safetensors")
    save_file(parts | {"1.centroids": parts["1.centroids"].to(kind)}, path, metadata=about)
    partition_parts(path, 0)
    message = f"layer 1 of the partition '{path}' must have centroids in a floating dtype, got {kind}"
    with pytest.raises(ValueError, match=message): partition_parts(path, 1)

def test_a_file_that_is_written_anew_is_read_anew(llama, tmp_path):
    "Centroids and model are those of the new file, and an index of the old one is refused"
    path, other = str(tmp_path / "own.safetensors"), copy.deepcopy(llama)
    torch.nn.init.normal_(other.model.layers[0].mlp.up_proj.weight)
    save_partition(parts_of(llama), path, llama)
    x = capture(llama, IDS[:1], before_rope=True)[0]
    s = Saap(3, window=9, partition=path, layer=0)
    old = s.new_state()
    old.append(x.k, x.v, k_pre_rope=x.k_pre_rope)
    s.decode(*x.seen(-1), state=old)
    turned = {name: -y if name.endswith("centroids") else y for name, y in parts_of(llama).items()}
    save_partition(turned, path, llama)
    assert torch.equal(s.new_state().fit, turned["0.centroids"])
    assert torch.equal(partition_parts(path, 1)["centroids"], turned["1.centroids"])
    with pytest.raises(ValueError, match="state must have source"): s.decode(*x.seen(-1), state=old)
    Saap(partition=path).check_model(llama)
    save_partition(turned, path, other)
    assert about_partition(path).model == weights_id(other)
    with pytest.raises(ValueError, match="model must have the weights"): Saap(partition=path).check_model(llama)
    assert [file.name for file in tmp_path.iterdir()] == ["own.safetensors"]

@pytest.mark.slow
def test_the_pocket_has_a_partition():
    "Of its own weights, all layers, with a router and factors from 0 to 1; it answers with it"
    model, tokenizer = pocket.load()
    about = about_partition("pocket")
    assert about.model == weights_id(model) and about.kmeans == "spherical" and about.before_rope
    assert sorted(about.parts) == [*range(6)]
    assert {part for parts in about.parts.values() for part in parts} == {
        "centroids", "factor", "mlp_w1", "mlp_b1", "mlp_w2", "mlp_b2"}
    for i in range(6):
        parts = partition_parts("pocket", i)
        assert_close(parts["centroids"].norm(dim=-1), torch.ones(2, 128), 1e-3)
        assert (parts["factor"] >= 0).all() and (parts["factor"] <= 1).all()
    methods = {tail: Saap(0.04, window=30, partition="pocket", tail=tail) for tail in ("first_order", "fitted", "drop")}
    methods["mlp"] = dataclasses.replace(methods["drop"], router="mlp", rank="mass")
    found = accuracy(model, tokenizer, "multikey", 900, methods, prompts=4, batch=4, watch=True).groupby("method")
    assert (found.density.mean() < 0.12).all() and found.exact.mean().first_order >= 0.5
    error = found.error.mean()
    assert error.first_order < error["drop"] and error.fitted < error["drop"]

# training

def lessons(seed, heads=4, n=40, size=6, clusters=5):
    "Queries, shares of the clusters and which count, of one prompt"
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, n, size, generator=g)
    return x, (3 * x[..., :clusters]).softmax(-1), torch.rand(heads, n, generator=g) < 0.8

@pytest.mark.parametrize("kind", ["mlp", "linear"])
@pytest.mark.parametrize("groups", [None, 2])
def test_a_router_is_seeded_and_learns(kind, groups):
    how, losses = dict(kind=kind, groups=groups, hidden=8, steps=120, queries=16, rate=0.03), []
    examples = [lessons(seed) for seed in range(3)]
    found = fit_router(examples, seed=1, progress=lambda step, loss: losses.append(loss), **how)
    again, other = (fit_router(examples, seed=seed, **how) for seed in (1, 2))
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert not any(torch.equal(found[name], other[name]) for name in found)
    assert len(losses) == 120 and sum(losses[-20:]) < 0.4 * sum(losses[:20])
    assert all(len(x) == (groups or 4) for x in found.values())
    x, share, _ = lessons(9)
    guess = router_scores(x[None], found, kind)[0].softmax(-1)
    flat = torch.full_like(share, 0.2)
    kl = lambda q: float((share * (share / q).log()).sum(-1).mean())
    assert kl(guess) < 0.6 * kl(flat)

def test_queries_that_do_not_count_teach_nothing():
    "What stands in their places may be anything but NaN"
    examples = [lessons(seed) for seed in range(2)]
    junk = [(x.masked_fill(~counts[..., None], 1e3), share.masked_fill(~counts[..., None], 0.5), counts)
            for x, share, counts in examples]
    how = dict(hidden=8, steps=30, queries=40, seed=1)
    found, same_ = fit_router(examples, **how), fit_router(junk, **how)
    for name in found: assert_close(same_[name], found[name], 1e-3)

def test_a_partition_is_trained_and_used(llama, tmp_path):
    "Of the tiny model: seeded, of every layer, with both routers; the file goes through a session"
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 64, (n,), generator=g) for n in (90, 110)]
    how = dict(clusters=5, routers=("mlp", "linear"), queries=24, window=8, reach=8, steps=10, hidden=6)
    said = []
    parts = train_partition(llama, prompts, seed=2, **how, progress=said.append)
    how["progress"] = False
    again = train_partition(llama, prompts, seed=2, **how)
    assert parts.keys() == again.keys() and all(torch.equal(parts[name], again[name]) for name in parts)
    assert not torch.equal(parts["0.centroids"], train_partition(llama, prompts, seed=3, **how)["0.centroids"])
    assert parts.keys() == parts_of(llama).keys() and any("linear: " in line for line in said)
    assert not torch.equal(parts["0.mlp_w1"], parts["1.mlp_w1"])
    of_groups = train_partition(llama, prompts, seed=2, groups=2, **how)
    heads, groups = len(parts["1.mlp_w1"]), len(parts["1.centroids"])
    assert heads > groups == len(of_groups["1.mlp_w1"]) == len(of_groups["0.mlp_w2"]) == 2
    save_partition(parts, tmp_path / "own.safetensors", llama)
    for s in (Saap(6, window=8, partition=str(tmp_path / "own.safetensors"), router=router, tail="fitted")
              for router in ("mlp", "linear")):
        with sparsify(llama, decode=s): assert ids_of(llama).shape == (1, 8)

def letters(text, **options):
    "A tokenizer of the tiny model: a number for each character"
    return SimpleNamespace(input_ids=[3 + ord(c) % 61 for c in text])

TEXTS = ["The river " * 9, "A mill by the river, " * 5]
QUICK = dict(clusters=5, queries=24, window=8, reach=8, steps=10, hidden=6, seed=2, progress=False)

def test_texts_are_strings_or_token_ids(llama):
    of_strings = train_partition(llama, TEXTS, tokenizer=letters, **QUICK)
    ids = [torch.tensor(letters(text).input_ids, dtype=dtype) for text, dtype in zip(TEXTS, (torch.int32, torch.int64))]
    for texts in (ids, (TEXTS[0], ids[1])):
        again = train_partition(llama, texts, tokenizer=letters, **QUICK)
        assert again.keys() == of_strings.keys() and all(torch.equal(again[x], of_strings[x]) for x in again)

def test_training_shows_bars_or_says_lines_or_nothing(llama, capsys):
    how = dict(QUICK, tokenizer=letters, routers=("mlp", "linear"))
    train_partition(llama, TEXTS, **how)
    assert capsys.readouterr() == ("", "")
    train_partition(llama, TEXTS, **how | dict(progress=True))
    out, bars = capsys.readouterr()
    assert out == "" and all(f"{what}: 100%" in bars for what in ("keys", "queries", "mlp", "linear"))
    assert "2/2" in bars and "10/10" in bars and "at last" in bars
    said = []
    train_partition(llama, TEXTS, **how | dict(progress=said.append))
    assert capsys.readouterr() == ("", "")
    assert said[:4] == ["text 1 of 2: keys", "text 2 of 2: keys", "text 1 of 2: queries", "text 2 of 2: queries"]
    assert [line.split(":")[0] for line in said[4:]] == ["mlp", "linear"] and "loss" in said[4]

def test_models_without_a_rotation_train_on_keys_as_they_are(tmp_path):
    model, how = gpt2(), dict(QUICK, tokenizer=letters, before_rope=False)
    parts = train_partition(model, TEXTS, **how)
    save_partition(parts, tmp_path / "own.safetensors", model, before_rope=False)
    s = Saap(6, window=8, partition=str(tmp_path / "own.safetensors"), router="mlp")
    with sparsify(model, decode=s): assert ids_of(model).shape == (1, 8)
    with pytest.raises(ValueError, match="before_rope must be False, got True"):
        train_partition(model, TEXTS, **how | dict(before_rope=True))

@pytest.mark.parametrize("family, got", [("gemma2, capped", "softcap"), ("gpt-oss, sinks", "sinks")])
def test_scores_that_are_not_of_q_and_k_alone_teach_nothing(family, got):
    with pytest.raises(ValueError, match=f"scores must be of q and k alone, got layer 0 with {got}"):
        train_partition(build(family), TEXTS, **QUICK, tokenizer=letters)

@pytest.mark.parametrize("changed, error, message", [
    (dict(texts="The river"), TypeError, "texts must be a list of strings or of tensors of token ids, got str"),
    (dict(texts=torch.ones(2, 90).long()), TypeError, "texts must be a list of strings .* got Tensor"),
    (dict(texts=3), TypeError, "texts must be a list of strings .* got int"),
    (dict(texts=iter(TEXTS)), TypeError, "texts must be a list of strings .* got list_iterator"),
    (dict(texts=[]), ValueError, "texts must hold at least one, got none"),
    (dict(tokenizer=None), ValueError, "tokenizer must be that of the model where texts are strings, got None"),
    (dict(tokenizer="pocket"), TypeError, "tokenizer must be one of transformers, got str"),
    (dict(texts=[TEXTS[0], 3]), TypeError, "texts must be strings or tensors of token ids, got int in place 1"),
    (dict(texts=[torch.ones(90)]), TypeError, "texts must be .* int32 or int64, got torch.float32 in place 0"),
    (dict(texts=[torch.ones(1, 90).long()]), ValueError, r"texts must have shape \[N\], got \[1, 90\] in place 0"),
    (dict(texts=[torch.full((90,), 64)]), ValueError, r"texts must be token ids in \[0, 64\), got 64 to 64 in place 0"),
    (dict(texts=[torch.full((90,), -1)]), ValueError, r"texts must be token ids in \[0, 64\), got -1 to -1 in"),
    (dict(texts=[*TEXTS, "too few"]), ValueError, "texts must be long enough for 24 queries .* got one of 7 tokens"),
    (dict(texts=[""]), ValueError, "texts must be long enough for 24 queries .* got one of 0 tokens"),
    (dict(window=104), ValueError, "texts must hold one of more than 105 tokens, .* got 105 at most"),
    (dict(window=0), ValueError, "window must be at least 1, got 0"),
    (dict(reach=-1), ValueError, "reach must be at least 0, got -1"),
    (dict(queries=3), ValueError, "queries must be at least 4, got 3"),
    (dict(fitted=0), ValueError, "fitted must be at least 1, got 0"),
    (dict(clusters=0), ValueError, "clusters must be at least 1"),
    (dict(clusters=2.0), TypeError, "clusters must be an int, got float"),
    (dict(kmeans="cosine"), ValueError, "kmeans must be one of spherical, plain, got 'cosine'"),
    (dict(before_rope=1), TypeError, "before_rope must be a bool, got int"),
    (dict(seed=2**63), ValueError, "seed must be at least 0 and at most"),
    (dict(routers="mlp"), TypeError, "routers must be a tuple of names, got str"),
    (dict(routers=("tree",)), ValueError, "routers must be one of mlp, linear, got 'tree'"),
    (dict(groups=3), ValueError, "groups must be 2 or 4, .* got 3"),
    (dict(groups=1), ValueError, "groups must be 2 or 4, .* got 1"),
    (dict(hidden=0), ValueError, "hidden must be at least 1, got 0"),
    (dict(steps=0), ValueError, "steps must be at least 1, got 0"),
    (dict(rate=0.0), ValueError, "rate must be positive and finite, got 0.0"),
    (dict(rate="1"), TypeError, "rate must be a number, got str"),
    (dict(progress=3), TypeError, "progress must be True, False or a function, got int"),
    (dict(model=3), TypeError, "model must be a decoder of transformers, got int"),
], ids=lambda x: ", ".join(x) if isinstance(x, dict) else None)
def test_training_names_bad_input_before_it_begins(llama, monkeypatch, changed, error, message):
    monkeypatch.setattr(saap_training, "capture", None)  # runs the model
    given = dict(QUICK, model=llama, texts=TEXTS, tokenizer=letters) | changed
    with pytest.raises(error, match=message): train_partition(given.pop("model"), given.pop("texts"), **given)

@pytest.mark.parametrize("changed, error, message", [
    (dict(examples=3), TypeError, "examples must be a list of three tensors each, got int"),
    (dict(examples=[]), ValueError, "examples must hold a query that counts, got none"),
    (dict(examples=[lessons(0)[:2]]), TypeError, "examples must be a list of three tensors each, got tuple of 2"),
    (dict(examples=[(*lessons(0)[:2], 3)]), TypeError, "examples must be a list of three tensors each, got tuple of 3"),
    (dict(examples=[(*lessons(0)[:2], torch.ones(4, 39).bool())]), ValueError,
     r"examples must have shapes \[H, n, D\], \[H, n, C\], \[H, n\], got \[4, 40, 6\], \[4, 40, 5\], \[4, 39\]"),
    (dict(examples=[lessons(0), lessons(1, heads=3)]), ValueError, "examples must have the same H, D and C"),
    (dict(examples=[(*lessons(0)[:2], torch.ones(4, 40))]), TypeError, "examples must say .* bool, got torch.float32"),
    (dict(groups=3), ValueError, "groups must divide the heads of examples, 4, got 3"),
    (dict(kind="tree"), ValueError, "kind must be one of mlp, linear, got 'tree'"),
    (dict(queries=0), ValueError, "queries must be at least 1, got 0"),
    (dict(rate=math.nan), ValueError, "rate must be positive and finite, got nan"),
    (dict(seed=-1), ValueError, "seed must be at least 0"),
], ids=lambda x: ", ".join(x) if isinstance(x, dict) else None)
def test_a_router_names_bad_input(changed, error, message):
    given = dict(examples=[lessons(0)], steps=2) | changed
    with pytest.raises(error, match=message): fit_router(given.pop("examples"), **given)


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=25)
def test_what_oracles_of_single_heads_read(seed, clusters, budget):
    n, g = saap_heads.SINKS + saap_heads.WINDOW + 40, torch.Generator().manual_seed(seed)
    weight = torch.rand(1, 2, n, generator=g)
    ids = torch.randint(clusters, (1, 2, n), generator=g)
    read, far = saap_heads.oracles(weight, {"clusters": ids}, budget), saap_heads.far_mask(n)
    for group in range(2):
        w, own = weight[0, group], ids[0, group]
        heaviest = sorted(far.nonzero()[:, 0].tolist(), key=lambda i: -w[i])[:budget]
        keys_of = [(far & (own == c)).nonzero()[:, 0].flip(0).tolist() for c in range(clusters)]  # the newest first
        order = sorted((keys for keys in keys_of if keys), key=lambda keys: -w[keys].double().mean())
        for rule, wanted in ("top keys", heaviest), ("clusters", sum(order, [])[:budget]):
            assert (read[rule][0, group] & far).nonzero()[:, 0].tolist() == sorted(wanted), rule
            assert read[rule][0, group, ~far].all()

def test_single_heads_of_two_models_are_asked_the_same():
    rules = saap_heads.figures_of(results() / "cpu_saap_heads_witness.json")["rules"]
    cells = rules.groupby("model")[["rule", "budget", "tail"]].apply(lambda rows: {*map(tuple, rows.to_numpy())})
    names = {*saap_heads.UNTRAINED, *saap_heads.CEILINGS.values(), "top keys"}
    assert {x for x, _, _ in cells["smollm2"]} == names and cells["smollm2"] == cells["pocket"]
    assert {x for _, x, _ in cells["smollm2"]} == set(saap_heads.SHARES)
    assert rules.groupby(["model", "task"]).seed.nunique().to_dict() == {
        (model, task): 4 for model, tasks in saap_heads.MODELS.items() for task in tasks}
    caught = rules[rules["tail"] == "drop"].groupby(["model", "rule", "budget"]).recall.mean()
    for model, own in caught.groupby(level=0):
        assert (own.unstack().diff(axis=1).iloc[:, 1:] > 0).all(axis=None)
        assert (own[model, "top keys"] >= own[model].drop("top keys").unstack().max() - 1e-6).all()


@pytest.mark.parametrize("tail", ["first_order", "second_order"])
def test_a_large_channel_of_the_keys_costs_no_weight(tail):
    "A channel of 1e5 in every key moves all scores alike; the variance is a difference of sums of 1e10."
    g = torch.Generator().manual_seed(6)
    q, k = (torch.randn(1, 1, n, 16, generator=g) for n in (1, 600))
    k, v = 0.1 * k, torch.zeros(1, 1, 600, 16)
    k[:, :, 0] = q[:, :, 0] * math.log(200) * 4 / q.square().sum()
    v[:, :, 0, 0] = 1  # the heavy key's weight is the output
    k[..., 3] += 1e5
    weight = saap_decode(q, k, v, tail=tail, budget=60, clusters=8, window=32)[..., 0].item()
    assert 0.99 < weight / attention(q.double(), k.double(), v.double())[..., 0].item() < 1.01
