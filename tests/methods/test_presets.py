"""Each method as published, `VAttention.paper`, `SketchWalk.paper` and `Delta.paper`, against its algorithm, written
down here from the paper's pseudo-code in float64, one query, key and block at a time.

The library lends nothing but the stream of random numbers that says which keys a uniform sample takes.
"""
import math
from fractions import Fraction
from statistics import NormalDist

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache

from sparse_nb import pocket
from sparse_nb.attention import Method, assert_close, attention
from sparse_nb.core.settings import read_method
from sparse_nb.core.streams import fold_in, stream_seeds, tickets
from sparse_nb.delta import Delta
from sparse_nb.hf import attention_override, capture, sparsify
from sparse_nb.metrics import relative_error
from sparse_nb.methods.vertical_slash import VerticalSlash
from sparse_nb.methods.sketch_walk.index import signed_hadamard
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.tasks import make
from sparse_nb.vattention import VAttention, select_with_guarantee
from models import build

FP64 = torch.float64


def problem(Q, N, H=4, G=2, D=16, seed=0, kind="random"):
    """Queries, keys and values of one sequence. The kinds but "random" have whole numbers, whose products are exact, so
    that keys which are equal on paper are equal here: "ties" has few different keys, "same" one, "peaked" one that
    outweighs all others.
    """
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, h, n, D, generator=g, dtype=FP64) for h, n in ((H, Q), (G, N), (G, N)))
    if kind == "random": return 1.5 * q, k, v + 1
    q, k = q.round(), k.sign() * (torch.arange(D) < 2)
    if kind == "same": k = k[:, :, :1].expand_as(k).clone()
    if kind == "peaked":
        k = k * 0
        k[:, :, N // 3] = 8
        q = q.abs() + 1
    return q, k, v + 1


# vAttention, Algorithms 1 and 2

def how_many(share, n):
    "A count, or a share of n keys rounded down."
    return min(share, n) if isinstance(share, int) else math.floor(Fraction(str(share)) * n)


def variance(rows):
    "The trace of the covariance matrix of vectors, estimated from a sample of them."
    mean = sum(rows) / len(rows)
    return float(sum((x - mean).square().sum() for x in rows)) / max(1, len(rows) - 1)


def budget(I_f, n_s, e, V, eps, delta, base, guarantee, uniform_sample):
    "Algorithm 2: e[i] is the exponential of key i's score."
    if not n_s: return 0, 0
    size = base if isinstance(base, int) else max(2, how_many(base, n_s))
    I_bs = uniform_sample(min(size, n_s), 0)
    D = sum(e[i] for i in I_f) + n_s * sum(e[i] for i in I_bs) / len(I_bs)
    N = sum((e[i] * V[i] for i in I_f), torch.zeros_like(V[0])) + n_s * sum(e[i] * V[i] for i in I_bs) / len(I_bs)
    sigma = variance([e[i][None] for i in I_bs])**0.5
    trace = variance([e[i] * V[i] for i in I_bs])
    z = lambda delta: NormalDist().inv_cdf(1 - delta / 2)
    b_D = lambda eps, delta: (z(delta) * n_s * sigma / (eps * float(D)))**2
    b_N = lambda eps, delta: (z(delta) * n_s * trace**0.5 / (eps * float(N.norm())))**2
    if guarantee == "denominator": b = b_D(eps, delta)
    else: # Theorem 4.3, the minimum over a grid
        parts = [i / 80 for i in range(1, 80)]
        b = min(max(b_D(x * eps / 2, y * delta), b_N((1 - x) * eps / 2, (1 - y) * delta)) for x in parts for y in parts)
    return len(I_bs), min(n_s, max(1, math.ceil(b)))


def vattention(q, K, V, *, sinks, window, topk, base, eps, delta, guarantee, order, drawn=None):
    """Algorithm 1 for one query [D]: the output, how many keys are in each set, and the budget.

    `order(j)` is the j-th random order of all keys; `drawn` takes the place of the budget.
    """
    n = len(K)
    scores = (K @ q / len(q)**0.5).tolist()
    e = [torch.tensor(math.exp(s - max(scores)), dtype=FP64) for s in scores]
    I_s = set(range(how_many(sinks, n)))
    I_l = set(range(n - how_many(window, n), n))
    others = sorted(set(range(n)) - I_s - I_l, key=lambda i: (-scores[i], i))
    I_t = set(others[:how_many(topk, n)])
    I_f = sorted(I_s | I_l | I_t)
    n_s = n - len(I_f)
    uniform_sample = lambda m, j: [i for i in order(j) if i not in set(I_f)][:m]
    base, b = budget(I_f, n_s, e, V, eps, delta, base, guarantee, uniform_sample)
    b = b if drawn is None else drawn
    I_dyn = uniform_sample(b, 1)
    p = [(i, 1.0) for i in I_f] + [(i, b / n_s) for i in I_dyn]
    return sum(e[i] / x * V[i] for i, x in p) / sum(e[i] / x for i, x in p), len(I_f), base, b


def order_of(seed, n, end):
    "The random orders of the first `end` of n keys in the stream of one head and query."
    return lambda j: [i for i in tickets(seed if j == 0 else fold_in(seed, j), n).argsort().tolist() if i < end]


CHOICES = dict(sinks=3, window=5, topk=4, base=9), dict(sinks=0.07, window=0.04, topk=0.05, base=0.1)
WAYS = [(kind, N, i, 0.2, 0.2) for kind in ("random", "ties", "same", "peaked") for N in (200, 41) for i in (0, 1)]
WAYS += [(kind, N, i, 0.02, 0.4) for kind in ("random", "same") for N in (5, 9, 12, 13, 100) for i in (0, 1)]


@pytest.mark.parametrize("kind, N, choice, eps, delta", WAYS)
def test_vattention_is_algorithms_1_and_2(kind, N, choice, eps, delta):
    "Four heads of two groups, three queries, with all sets as printed; some heads draw, in short contexts none do."
    q, k, v = problem(3, N, seed=N + choice, kind=kind)
    method = VAttention.paper(eps, delta, **CHOICES[choice])
    out, stats = method.decode(q, k, v, seed=7, causal=True, return_stats=True)
    seeds, certificate = stream_seeds(q, 7), stats.certificate
    for h in range(4):
        for j in range(3):
            end = N - 2 + j
            want, kept, base, b = vattention(q[0, h, j], k[0, h // 2, :end], v[0, h // 2, :end], eps=eps, delta=delta,
                                             guarantee="denominator", order=order_of(seeds[0, h, j], N, end),
                                             **CHOICES[choice])
            got = [int(x[0, h, j]) for x in (certificate.kept, certificate.base, certificate.budget)]
            assert got == [kept, base, b], (h, j)
            assert_close(out[0, h, j], want, 1e-12)
            assert int(stats.values_read[0, h, j]) == kept + b
    if kind == "random" and N == 200: assert (~certificate.exact).any() and (certificate.budget > 1).any()
    if kind == "same": assert (certificate.budget <= 1).all()  # no least number of draws


def test_vattention_for_the_output_is_theorem_4_3():
    "A grid of 80 by 80 shares finds hardly more than the best share of eps for 99 of delta."
    q, k, v = problem(1, 800, D=8)
    v = v + 4
    method = VAttention.paper(0.9, 0.5, sinks=2, window=2, topk=0.1, base=0.2, guarantee="output")
    out, stats = method.decode(0.5 * q, k, v, seed=3, return_stats=True)
    seeds, certificate, ratios = stream_seeds(q, 3), stats.certificate, []
    for h in range(4):
        given = dict(sinks=2, window=2, topk=0.1, base=0.2, eps=0.9, delta=0.5, guarantee="output",
                     order=order_of(seeds[0, h, 0], 800, 800))
        found = 0.5 * q[0, h, 0], k[0, h // 2], v[0, h // 2]
        b = int(certificate.budget[0, h, 0])
        ratios.append(b / vattention(*found, **given)[3])
        assert_close(out[0, h, 0], vattention(*found, drawn=b, **given)[0], 1e-12)
    assert not certificate.exact.all() and 0.97 < min(ratios) <= max(ratios) <= 1.01, ratios


def test_vattention_draws_uniformly_and_afresh():
    "Every key of the residual equally often, those of the base sample included, in which each query has others."
    q, k, v = problem(1, 60, H=1, G=1)
    many = q.expand(-1, -1, 4000, -1)
    method = VAttention.paper(0.3, 0.3, sinks=0, window=0, topk=0, base=20)
    chosen, certificate = select_with_guarantee(many, k, None, method, seed=1)
    drawn, b = chosen.dense(60) > 0, certificate.budget[0, 0].double()
    assert b.min() < 20 and (drawn.sum(-1)[0, 0] == b).all() and b.std() > 1
    often, want = drawn[0, 0].double().mean(0), float(b.mean()) / 60
    assert ((often - want).abs() < 5 * (want * (1 - want) / 4000)**0.5).all()
    assert_close(chosen.weight.amax(-1)[0, 0], 60 / b, 1e-12)


def test_vattention_has_no_kernel_and_needs_its_own_settings():
    q, k, v = problem(1, 50)
    with pytest.raises(ValueError, match="plugin must be 'upper' or 'plain' for backend='triton', got 'printed'"):
        VAttention.paper().decode(q, k, v, backend="triton")
    for name, wrong in dict(bound="bernstein", share=True).items():
        with pytest.raises(ValueError, match=f"{name} must be .* with plugin='printed', got"):
            VAttention(**dict(plugin="printed", share=False) | {name: wrong})


# Sketch&Walk, Algorithms 1 and 2

def attend(q, K, V, keys):
    "Softmax attention of one query to some keys."
    keys = torch.tensor(keys)
    return torch.softmax(K[keys] @ q / len(q)**0.5, 0) @ V[keys]


def averaged(X, B):
    "Steps 1 to 3: head-averaged block representatives of X [h, n, d]."
    avg = sum(X[u] for u in range(len(X))) / len(X)
    return [sum(avg[i:i + B]) / len(avg[i:i + B]) for i in range(0, len(avg), B)]


def walk_on(R, A, s):
    "Step 6. Rows are divided by their largest number."
    W = A**s
    R = W if R is None else R @ W
    top = R.abs().amax(-1, keepdim=True)
    return R / torch.where(top > 0, top, 1.0)


def chosen_of(row, i, share):
    "Step 7 for query block i: the first and the own block, and the highest others that it sees, tau in all."
    tau = max(math.ceil(Fraction(str(share)) * (i + 1)), len({0, i}))
    others = sorted(set(range(i + 1)) - {0, i}, key=lambda j: (-float(row[j]), j))
    return {0, i} | set(others[:tau - len({0, i})])


def sketch_walk_prompt(Q, K, V, H, r, R, *, B=64, s=8, share):
    "Algorithm 1 for one layer: Q, K, V [h, n, d]; the output, and the state R of the walk."
    h, n, _ = Q.shape
    q_bar, k_bar = averaged(Q, B), averaged(K, B)
    q_sketch, k_sketch = [x @ H for x in q_bar], [x @ H for x in k_bar]
    A = torch.tensor([[float(x @ y) / r**0.5 for y in k_sketch] for x in q_sketch], dtype=FP64)
    R, O = walk_on(R, A, s), torch.zeros_like(Q)
    for t in range(n):
        S = chosen_of(R[t // B], t // B, share)
        keys = [j for j in range(t + 1) if j // B in S]
        for u in range(h): O[u, t] = attend(Q[u, t], K[u], V[u], keys)
    return O, R


def sketch_walk_token(Q, K, V, H, r, row, *, B=64, s=8, share):
    """Algorithm 2 for one layer and the last query of Q, K, V [h, t, d]: the output [h, d], and its row of R.

    Of R no other row is needed: row b_q of R W is that row of R times W.
    """
    h, t, _ = Q.shape
    q_bar, k_bar = averaged(Q, B), averaged(K, B)
    b = len(k_bar)
    A = torch.tensor([[float((x @ H) @ (y @ H)) / r**0.5 for y in k_bar] for x in q_bar], dtype=FP64)
    q_new = sum(Q[u, -1] for u in range(h)) / h
    A[b - 1] = torch.tensor([float((q_new @ H) @ (y @ H)) / r**0.5 for y in k_bar], dtype=FP64)
    if row is None: row = torch.eye(b, dtype=FP64)[b - 1]
    row = walk_on(row[None], A, s)[0]
    S = chosen_of(row, b - 1, share)
    keys = [j for j in range(t) if j // B in S]
    return torch.stack([attend(Q[u, -1], K[u], V[u], keys) for u in range(h)]), row


def spread(k, R): return k[0].repeat_interleave(R, 0)


@pytest.mark.parametrize("kind, n, sketch", [("random", 500, 16), ("random", 449, 8), ("random", 64, 16),
                                             ("random", 3, 16), ("ties", 400, 16), ("same", 330, 16),
                                             ("peaked", 350, 16)])
def test_sketch_walk_is_algorithms_1_and_2(kind, n, sketch):
    "Three layers, four heads in two groups; the whole prompt, and its last token alone."
    method, H = SketchWalk.paper(0.3, sketch=sketch), signed_hadamard(16, sketch)
    step, token, R, row = {}, {}, None, None
    for layer in range(3):
        q, k, v = problem(n, n, seed=layer, kind=kind)
        K, V = spread(k, 2), spread(v, 2)
        want, R = sketch_walk_prompt(q[0], K, V, H, sketch, R, share=0.3)
        assert_close(method.prefill(q, k, v, step=step)[0], want, 1e-12)
        state = method.new_state()
        state.append(k, v, q=q)
        want, row = sketch_walk_token(q[0], K, V, H, sketch, row, share=0.3)
        assert_close(method.decode(q[:, :, -1:], k, v, state=state, step=token)[0, :, 0], want, 1e-12)


def test_sketch_walk_answers_several_queries_as_each_alone():
    "Without a mask each row of the walk observes the last block, which grows from query to query: a border is crossed."
    method, together, alone = SketchWalk.paper(0.3, sketch=16), {}, [{} for _ in range(5)]
    for layer in range(3):
        q, k, v = (torch.cat([x, -2 * x.flip(1)]) for x in problem(386, 386, seed=layer))
        state = method.new_state()
        state.append(k, v, q=q)
        got = method.decode(q[:, :, -5:], k, v, state=state, step=together, causal=True)
        for j, end in enumerate(range(382, 387)):
            state = method.new_state()
            state.append(k[:, :, :end], v[:, :, :end], q=q[:, :, :end])
            want = method.decode(q[:, :, end - 1:end], k[:, :, :end], v[:, :, :end], state=state, step=alone[j])
            assert_close(got[:, :, j:j + 1], want, 1e-12)


def test_sketch_walk_wants_no_longer_sketch_than_heads():
    q, k, v = problem(70, 70)
    with pytest.raises(ValueError, match="sketch must be at most the head size up to a power of two, 16, got 64"):
        SketchWalk.paper().prefill(q, k, v, step={})
    assert isinstance(SketchWalk.paper().at_layer(2), SketchWalk)
    assert not isinstance(SketchWalk.paper().at_layer(1), SketchWalk)  # the paper leaves the first two layers dense


@pytest.fixture(scope="module")
def prompts():
    "The pocket model and three prompts of 1,024 tokens."
    model, tokenizer = pocket.load()
    texts = [make("kv", 1024, seed=seed, tokenizer=tokenizer).prompt for seed in range(3)]
    return model, [torch.tensor([tokenizer(x)["input_ids"]]) for x in texts]


@torch.no_grad()
def test_sketch_walk_is_algorithm_2_on_captured_heads(prompts):
    """Where it answers nonsense, and the walk does it.

    The last layer's error is that of blocks drawn at random; with the same sketches and powers, and a walk that begins
    at that layer, it is far smaller.
    """
    model, ids = prompts
    own, H, errors = SketchWalk.paper(0.2), signed_hadamard(64, 64), {name: [] for name in ("walk", "alone", "random")}
    for x in ids:
        step, row = {}, None
        for layer in capture(model, x)[2:]:
            q, k, v = layer.q.double(), layer.k.double(), layer.v.double()
            want, row = sketch_walk_token(q[0], spread(k, 3), spread(v, 3), H, 64, row, share=0.2)
            exact, told = attention(q[:, :, -1:], k, v), {}
            for name, walk in (("walk", step), ("alone", {}), ("random", None)):
                method = own if name != "random" else SketchWalk(density=0.2, index="random")
                state, more = method.new_state(), {} if walk is None else dict(step=walk)
                state.append(k, v, **(dict(q=q) if "q" in state.observes else {}))
                told[name] = method.decode(q[:, :, -1:], k, v, state=state, seed=layer.layer, **more)
            assert_close(told["walk"][0, :, 0], want, 1e-12)
        for name, out in told.items(): errors[name].append(float(relative_error(out, exact).mean()))
    walk, alone, random = (sum(errors[name]) / 3 for name in errors)
    assert walk > 0.9 * random > 1.5 * alone, errors


@torch.no_grad()
def test_sketch_walk_is_algorithm_2_in_a_trained_model(prompts):
    "The logits of a token that follows a prompt which exact attention has read."
    model, (ids, *_) = prompts
    H, own = signed_hadamard(64, 64), SketchWalk.paper(0.2)
    rows = {}
    def attend(module, q, k, v, mask, scaling=None, **_):
        if module.layer_idx < 2: return attention(q, k, v, causal=True).transpose(1, 2), None
        if q.shape[2] > 1:
            rows[module.layer_idx] = q.double()
            return attention(q, k, v, causal=True).transpose(1, 2), None
        q = torch.cat([rows[module.layer_idx], q.double()], 2)
        out, rows["walk"] = sketch_walk_token(q[0], spread(k.double(), 3), spread(v.double(), 3), H, 64,
                                              rows.get("walk"), share=0.2)
        return out.to(k.dtype)[None, None], None
    def last(): # the prompt but its last token by exact attention, and that by the method
        cache = DynamicCache(config=model.config)
        model(ids[:, :-1], past_key_values=cache)
        return model(ids[:, -1:], past_key_values=cache).logits[0, -1]
    with attention_override(model, attend): want = last()
    with sparsify(model, decode=own): got = last()
    assert_close(got, want, 1e-4)
    assert relative_error(got[None, None, None], model(ids).logits[:, -1:, None]).item() > 0.1


# Delta Attention, Eq. 6

def delta(q, K, V, *, window, gamma, sinks, tail):
    "Eq. 6 over sinks and a window, for one head [n, d], and the dense block of Appendix C."
    n = len(q)
    seen = lambda i: [t for t in range(i + 1) if t < sinks or t > i - window]
    sparse = [attend(q[i], K, V, seen(i)) for i in range(n)]
    dense = lambda i: attend(q[i], K, V, [*range(i + 1)])
    out = []
    for i in range(n):
        j = i - i % gamma
        out.append(dense(i) if i == j or i >= n - tail else sparse[i] + dense(j) - sparse[j])
    return torch.stack(out)


@pytest.mark.parametrize("kind, n, settings", [
    ("random", 150, dict(window=20, gamma=16, sinks=2, tail=10)), ("random", 97, dict(window=7, gamma=64, sinks=0)),
    ("random", 300, dict(window=40)), ("random", 30, {}), ("random", 1, {}), ("ties", 200, dict(window=3, tail=1)),
    ("same", 100, dict(window=9, gamma=8, tail=0)), ("peaked", 140, dict(window=10, gamma=32, tail=0))])
def test_delta_is_equation_6(kind, n, settings):
    q, k, v = problem(n, n, seed=n, kind=kind)
    got, given = Delta.paper(**settings).prefill(q, k, v), dict(window=2048, gamma=64, sinks=4, tail=128) | settings
    for h in range(4): assert_close(got[0, h], delta(q[0, h], k[0, h // 2], v[0, h // 2], **given), 1e-12)


# in use

ARMS = {"vattention.paper(sinks=2, window=2, topk=2, base=4, eps=0.3)": "decode",
        "sketch_walk.paper(sketch=16)": "both", "delta.paper(window=8, gamma=4, tail=2)": "prefill"}


@pytest.mark.parametrize("text, role", ARMS.items())
@torch.no_grad()
def test_the_presets_work_in_a_model(text, role):
    "Named as in `sparse-nb eval`, in four layers; not what exact attention says, and the same after a context."
    model, method = build("smollm3, layers without rope"), read_method(text)
    ids = torch.randint(3, 64, (1, 240), generator=torch.Generator().manual_seed(1))
    assert Method.from_json(method.to_json()) == method == eval(repr(method))
    exact = model(ids).logits[:, -8:]
    def read(setup, *parts, **roles):
        with sparsify(model, **roles, setup=setup, seed=1):
            cache = DynamicCache(config=model.config)
            return torch.cat([model(x, past_key_values=cache).logits for x in parts], 1)[:, -8:]
    if role != "decode": assert relative_error(read("prompt", ids, prefill=method), exact).mean() > 1e-3
    if role == "prefill": return
    want = read("prompt", ids[:, :-8], *ids[:, -8:].split(1, 1), decode=method)
    assert relative_error(want, exact).mean() > 1e-3
    assert_close(read("context", ids[:, :-8], ids[:, -8:], decode=method), want, 1e-5)


def test_delta_takes_the_papers_other_bases():
    q, k, v = problem(200, 200)
    base = VerticalSlash(40, 40)
    got = Delta.paper(gamma=16, base=base, tail=0).prefill(q, k, v)
    sparse = base.prefill(q, k, v)
    exact = Delta(correction="none", window=200, tail=0).prefill(q, k, v)
    anchor = torch.arange(200) // 16 * 16
    assert_close(got, sparse + (exact - sparse)[:, :, anchor], 1e-12)
