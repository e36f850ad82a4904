"""Delta over the patterns of HiP, MInference and others: its equations, written down here in float64 one row at a time.

What a base reads is enumerated in `test_patterns`; what the correction makes of it is what these tests are about.
"""
import math
from dataclasses import replace

import pytest
import torch

from sparse_nb.core.exact import assert_close, attention
from sparse_nb.delta import CORRECTIONS as ALL, Delta, delta_prefill
from sparse_nb.hf import sparsify
from sparse_nb.methods.flex_prefill import FlexPrefill
from sparse_nb.methods.hip import HiP
from sparse_nb.methods.vertical_slash import VerticalSlash, save_choices
from sparse_nb.methods.xattention import XAttention

CORRECTIONS = [x for x in ALL if x != "aligned"]  # which is of windows, and a base has none
SMALL = dict(block=32)
LINES = dict(vertical=6, slash=9, sinks=2, window=4)
TREE = dict(stages=((16, 48), (4, 16), (2, 6)), sinks=3, window=5, **SMALL)
BASES = [VerticalSlash(rounding="none", **LINES), VerticalSlash(**LINES | dict(vertical=2, slash=2, window=1), **SMALL),
         VerticalSlash(rounding="pool", **LINES, **SMALL), HiP(rounding="none", **TREE), HiP(**TREE),
         HiP(rounding="none", shared="group", **TREE), HiP(rounding="none", shared="head", **TREE),
         FlexPrefill(0.3, 0.1, 8, **SMALL), XAttention(0.3, stride=8, **SMALL)]
bases = pytest.mark.parametrize("base", BASES, ids=repr)


@pytest.fixture(autouse=True)
def few_choose(monkeypatch): monkeypatch.setattr("sparse_nb.methods.vertical_slash.LAST", 16)


EVERYTHING = VerticalSlash(rounding="none"), VerticalSlash(), HiP(rounding="none"), HiP()


def problem(Q, N, B=1, G=2, R=2, D=8, dtype=torch.float64):
    g = torch.Generator().manual_seed(5)
    new = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    return 2 * new(B, G * R, Q, D), new(B, G, N, D), new(B, G, N, D)


def read_by(base, q, k, scale):
    "Which keys the base reads for each query [H, Q, N], the causal ones alone."
    H, Q, N = q.shape[1], q.shape[2], k.shape[2]
    if getattr(base, "rounding", "") == "none": seen = base.rows(q, k, scale=scale)[0]
    else:
        p = base.pattern(q, k, scale=scale)
        seen = p.mask()[0].repeat_interleave(p.query_block, 1)[:, :Q].repeat_interleave(p.key_block, 2)[..., :N]
    rows = range(len(seen)) if len(seen) == H else [h * len(seen) // H for h in range(H)]
    return torch.stack([seen[h] for h in rows]).tril(N - Q)


def literal(q, k, v, reads, *, gamma, tail, correction, anchors, scale):
    """Dense attention on every gamma-th query and in the last block; elsewhere the base's output, corrected.

    Eq. 6 adds what the query's anchor lacked. The tangent adds a key: of the last anchors it takes the one whose
    missing mass, moved along q - q_j, is largest.
    """
    H, Q, N, out = q.shape[1], q.shape[2], k.shape[2], torch.zeros_like(q)
    for h in range(H):
        K, V, found = k[0, h * len(k[0]) // H], v[0, h * len(v[0]) // H], []
        for r in range(Q):
            end, at = N - Q + r + 1, q[0, h, r]
            e, see = torch.exp(scale * K[:end] @ at), reads[h, r, :end]
            dense = e @ V[:end] / e.sum()
            sparse = (e * see) @ V[:end] / (e * see).sum()
            is_anchor = (N - Q + r) % gamma == 0 or r == 0
            if is_anchor and r < Q - tail:
                lost = e * ~see
                found.append((dense - sparse, at, lost.sum(), lost @ K[:end] / lost.sum(), lost @ V[:end] / lost.sum()))
            if r >= Q - tail or is_anchor and correction != "none": out[0, h, r] = dense
            elif correction in ("none", "recompute"): out[0, h, r] = sparse
            elif correction == "delta": out[0, h, r] = sparse + found[-1][0]
            else:
                more = [(float(T * torch.exp(scale * (at - q_j) @ key)), value)
                        for _, q_j, T, key, value in found[-anchors:] if T > 0]
                mass, value = max(more, key=lambda x: x[0]) if more else (0.0, 0.0)
                out[0, h, r] = ((e * see) @ V[:end] + mass * value) / ((e * see).sum() + mass)
    return out


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("Q, N", [(150, 150), (100, 190), (5, 5), (1, 40)])
@bases
def test_is_the_base_corrected_by_dense_queries(base, Q, N, correction):
    "Queries share keys two by two; prompts are shorter than a block and than gamma, and parts of longer ones."
    x, scale = problem(Q, N), 0.4
    given = dict(gamma=16, tail=7, anchors=2, correction=correction, scale=scale)
    reads = read_by(base, x[0], x[1], scale)
    if Q >= 100: assert not reads[:, -1].any(0).all()                  # the last query misses keys in every head
    assert_close(delta_prefill(*x, base=base, **given), literal(*x, reads, **given), rtol=1e-12)


@bases
def test_without_a_correction_it_is_the_base_and_counts_its_keys(base):
    q, k, v = problem(70, 101)
    out, stats = delta_prefill(q, k, v, base=base, correction="none", tail=0, return_stats=True)
    assert_close(out, base.prefill(q, k, v), rtol=1e-12)
    assert torch.equal(stats.keys[0], read_by(base, q, k, None).sum(-1))


@pytest.mark.parametrize("correction", CORRECTIONS)
@bases
def test_each_sequence_of_a_padded_batch_is_what_it_is_alone(base, correction):
    starts, x = [0, 9, 60, 185, 190], problem(100, 190, B=5)
    for b, start in enumerate(starts):
        for y in x[1:]: y[b, :, :start] = math.nan
    given = dict(base=base, gamma=16, tail=5, correction=correction)
    out = delta_prefill(*x, kv_start=torch.tensor(starts), **given)
    for b, start in enumerate(starts):
        first = max(0, start - 90)
        assert not out[b, :, :first].any()
        if start == 190: continue
        alone = x[0][b:b + 1, :, first:], *(y[b:b + 1, :, start:] for y in x[1:])
        assert_close(out[b:b + 1, :, first:], delta_prefill(*alone, **given), rtol=1e-12)


@pytest.mark.parametrize("base", EVERYTHING, ids=repr)
def test_a_base_that_reads_everything_leaves_nothing_to_correct(base):
    x = problem(90, 90)
    for correction in CORRECTIONS:
        assert_close(delta_prefill(*x, base=base, gamma=16, tail=0, correction=correction),
                     attention(*x, causal=True), rtol=1e-12)


def test_lines_of_each_layer_and_head(pocket, tmp_path):
    "A base with sizes of its own for each head, in a model: every layer is read with those of its number."
    model, tokenizer = pocket
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    rows = {i: [(2 + i, 3 + h, 1, 2) for h in range(heads)] for i in range(layers)}
    save_choices(rows, tmp_path / "lines.json", model)
    lines = VerticalSlash(rounding="none", choices=str(tmp_path / "lines.json"))
    method = Delta(base=lines, gamma=16, tail=4)
    ids = tokenizer("Which keys does a query of this sentence read? " * 4, return_tensors="pt").input_ids
    with torch.no_grad():
        with sparsify(model, prefill=method): got = model(ids).logits
        by_hand = {i: replace(method, base=replace(lines, layer=i)) for i in range(layers)}
        with sparsify(model, prefill=by_hand): want = model(ids).logits
        with sparsify(model, prefill={i: by_hand[0] for i in range(layers)}): other = model(ids).logits
    assert torch.equal(got, want) and not torch.equal(got, other)
    model.model.norm.weight.data += 1
    try:
        with pytest.raises(ValueError, match="model must have the weights that"): sparsify(model, prefill=method)
    finally: model.model.norm.weight.data -= 1
