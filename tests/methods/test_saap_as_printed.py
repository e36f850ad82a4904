"""`Saap.paper` beside sections 4 and 5, Algorithms 1 and 2 and the merge of the paper, in float64 and loops"""
import inspect
import math

import pytest
import torch

from models import build
from sparse_nb import Exact
from sparse_nb.core.settings import read_method
from sparse_nb.hf import attention_layers, by_layer, sparsify
from sparse_nb.methods.saap.partition import router_scores
from sparse_nb.methods.saap.step import served
from sparse_nb.saap import Saap, saap_decode, save_partition
from sparse_nb.saap_training import PAPER, cluster_shares, fit_router, train_partition

D, BLOCK = 8, 4  # of a head; B_c, keys that a program reads at once


# the paper

def assigned(key, centroids, kmeans):
    "Section 2: the nearest centroid; of unit vectors (spherical k-means, section 3) the most alike"
    if kmeans == "spherical": order = [-sum(a * b for a, b in zip(key, c)) for c in centroids]
    else: order = [sum((a - b)**2 for a, b in zip(key, c)) for c in centroids]
    return order.index(min(order))


def inverted_lists(ids, clusters):
    "Appendix F: Off and Idx; the list of bucket c is Idx[Off[c] : Off[c + 1]]"
    off, idx = [0], []
    for c in range(clusters):
        idx += [i for i, own in enumerate(ids) if own == c]
        off.append(len(idx))
    return off, idx


def f(q, net):
    "Section 6.1: two layers with batch normalization and a ReLU, then a distribution over the buckets"
    w1, b1, gain, shift, mean, var, w2, b2 = net
    h = ((q @ w1 + b1 - mean) / (var + 1e-5).sqrt() * gain + shift).clamp(min=0)
    return (h @ w2 + b2).softmax(-1).tolist()


def p_attn(q, k, v, m_star, s_star, o_star):
    "Algorithm 1, whose maximum is over the scores s"
    for h in range(len(q)):
        s = [float(q[h] @ x) / math.sqrt(D) for x in k]
        m = max(m_star[h], *s)
        old = math.exp(m_star[h] - m)
        o_star[h] = o_star[h] * old + sum(math.exp(x - m) * y for x, y in zip(s, v))
        s_star[h] = s_star[h] * old + sum(math.exp(x - m) for x in s)
        m_star[h] = m


def bucket(q, k, v, keys):
    "Algorithm 2 for the keys of one program: partial output, sum and maximum of each head"
    heads = range(len(q))
    o, s, m = [torch.zeros(D, dtype=torch.float64) for _ in heads], [0.0 for _ in heads], [-math.inf for _ in heads]
    for a in range(0, len(keys), BLOCK): p_attn(q, k[keys[a:a + BLOCK]], v[keys[a:a + BLOCK]], m, s, o)
    return o, s, m


def merged(parts, h):
    "Merge-attention of Appendix F, for head h"
    (o, s, m), *rest = [(o[h], s[h], m[h]) for o, s, m in parts]
    for o_i, s_i, m_i in rest:
        if m_i == -math.inf: continue  # a bucket without a key
        top = max(m, m_i)
        if m_i < m: o_i, s_i = math.exp(m_i - top) * o_i, math.exp(m_i - top) * s_i
        else: o, s = math.exp(m - top) * o, math.exp(m - top) * s
        m, o, s = top, o + o_i, s + s_i
    return o / s


def saap(q, k, v, q_plain, k_plain, centroids, kmeans, nets, probes, window):
    "The outputs of the heads of one group, and which keys were read"
    n = len(k)
    local = sorted({0, *range(max(0, n - window), n)})
    rest = [i for i in range(n) if i not in local]
    ids = [assigned(k_plain[i].tolist(), centroids.tolist(), kmeans) for i in rest]
    off, idx = inverted_lists(ids, len(centroids))
    r = [sum(column) for column in zip(*(f(x, net) for x, net in zip(q_plain, nets)))]
    B = sorted(range(len(centroids)), key=lambda c: (-r[c], c))[:probes]
    lists = [local] + [[rest[j] for j in idx[off[c]:off[c + 1]]] for c in B]
    parts = [bucket(q, k, v, keys) for keys in lists]
    return torch.stack([merged(parts, h) for h in range(len(q))]), sorted(sum(lists, []))


# inputs

def net_of(g, clusters, hidden=5, sharp=1.0):
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    norm = r(hidden), r(hidden), r(hidden), r(hidden).abs() + 0.1
    return [r(D, hidden), r(hidden), *norm, sharp * r(hidden, clusters), sharp * r(clusters)]


def problem(seed, keys, clusters, groups=2, heads=6, sharp=1.0, kmeans="spherical"):
    g = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    centroids = r(groups, clusters, D).float().double()
    if kmeans == "spherical": centroids = torch.nn.functional.normalize(centroids, dim=-1).float().double()
    return dict(q=r(1, heads, 1, D), k=r(1, groups, keys, D), v=r(1, groups, keys, D), q_plain=r(1, heads, 1, D),
                k_plain=r(1, groups, keys, D), centroids=centroids, kmeans=kmeans,
                nets=[net_of(g, clusters, sharp=sharp) for _ in range(heads)])


def silent(x):
    "Networks that say the same of all clusters: which are the best is decided by their number"
    for net in x["nets"]: net[-2], net[-1] = 0 * net[-2], 0 * net[-1]
    return x


def doubled(x):
    "Each centroid twice: keys go to the first of two, and the second is empty"
    x["centroids"][:, 1::2] = x["centroids"][:, ::2]
    return x


def longing(x):
    "Networks that ask for clusters that have no key: these use up probes"
    for net in x["nets"]: net[-1][1::2] += 99
    return doubled(x)


INPUTS = {"random": (problem(0, 60, 7), 9), "plain k-means": (problem(1, 60, 7, kmeans="plain"), 9),
          "more clusters than keys": (problem(2, 40, 90), 5), "ties": (silent(problem(3, 60, 8)), 9),
          "equal centroids": (doubled(problem(4, 60, 8)), 9), "empty clusters wanted": (longing(problem(5, 60, 8)), 9),
          "sure networks": (problem(6, 60, 12, sharp=300), 9), "one cluster": (problem(7, 30, 1), 3),
          "inside the window": (problem(8, 9, 5), 2047), "one key": (problem(9, 1, 5), 2047),
          "one key behind the window": (problem(10, 11, 5), 9), "a head each": (problem(11, 50, 6, groups=6), 9),
          "one key head": (problem(12, 50, 6, groups=1), 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("saap")


def written(x, path):
    "The file of the centroids and networks, batch norm folded, as layer 1"
    w1, b1, gain, shift, mean, var, w2, b2 = (torch.stack(y) for y in zip(*x["nets"]))
    factor = gain / (var + 1e-5).sqrt()
    parts = dict(centroids=x["centroids"], mlp_w1=w1 * factor[:, None], mlp_b1=(b1 - mean) * factor + shift, mlp_w2=w2,
                 mlp_b2=b2)
    save_partition({f"1.{name}": y.float().contiguous() for name, y in parts.items()}, path, torch.nn.Linear(1, 1),
                   kmeans=x["kmeans"])
    return str(path)


@pytest.mark.parametrize("probes", [0, 1, 3, 32])
@pytest.mark.parametrize("name", INPUTS)
def test_it_is_the_papers(name, probes, folder):
    x, window = INPUTS[name]
    method = Saap.paper(written(x, folder / f"{name}.safetensors"), probes, window=window).at_layer(1)
    state, (q, k, v) = method.new_state(), (x[y] for y in "qkv")
    state.append(k, v, k_pre_rope=x["k_plain"])
    out, stats = method.decode(q, k, v, state=state, q_pre_rope=x["q_plain"], return_stats=True)
    read = method.select(q, k, state=state, q_pre_rope=x["q_plain"]).dense(k.shape[2])
    group = q.shape[1] // k.shape[1]
    for g in range(k.shape[1]):
        own = slice(g * group, (g + 1) * group)
        want, keys = saap(q[0, own, 0], k[0, g], v[0, g], x["q_plain"][0, own, 0], x["k_plain"][0, g],
                          x["centroids"][g], x["kmeans"], x["nets"][own], probes, window)
        torch.testing.assert_close(out[0, own, 0], want, rtol=0, atol=1e-12)
        for h in range(own.start, own.stop): assert read[0, h, 0].nonzero()[:, 0].tolist() == keys
        assert (stats.values_read[0, own] == len(keys)).all()


def test_it_is_the_papers_key_by_key(folder):
    "Keys that come one by one keep their clusters, and are dropped or read by these once they leave the window"
    x, window = INPUTS["random"]
    method = Saap.paper(written(x, folder / "grown.safetensors"), 2, window=window).at_layer(1)
    state, (q, k, v) = method.new_state(), (x[y] for y in "qkv")
    for n in range(1, 61):
        new = slice(n - 1, n)
        state.append(k[:, :, new], v[:, :, new], k_pre_rope=x["k_plain"][:, :, new])
        out = method.decode(q, k[:, :, :n], v[:, :, :n], state=state, q_pre_rope=x["q_plain"])
        want, _ = saap(q[0, :3, 0], k[0, 0, :n], v[0, 0, :n], x["q_plain"][0, :3, 0], x["k_plain"][0, 0, :n],
                       x["centroids"][0], x["kmeans"], x["nets"][:3], 2, window)
        torch.testing.assert_close(out[0, :3, 0], want, rtol=0, atol=1e-12)


def test_ranking_by_mass_is_not_what_is_printed(folder):
    "It knows which clusters are empty, and never asks for them"
    x, window = INPUTS["empty clusters wanted"]
    file = written(x, folder / "mass.safetensors")
    read = [saap_decode(x["q"], x["k"], x["v"], file, k_pre_rope=x["k_plain"], q_pre_rope=x["q_plain"], layer=1,
                        probes=3, window=window, router="mlp", tail="drop", rank=rank,
                        return_stats=True)[1].values_read.max()
            for rank in ("printed", "mass")]
    assert read[0] == 1 + window < read[1]


# settings

def test_the_papers_settings():
    method = Saap.paper("pocket")
    assert (method.probes, method.sinks, method.window, method.dense_layers) == (32, 1, 2047, 1)
    assert (method.router, method.tail) == ("mlp", "drop")
    with pytest.raises(ValueError, match="router must be a network for rank='printed', got 'moments'"):
        Saap(probes=2, rank="printed")
    with pytest.raises(ValueError, match="probes must be given for rank='printed'"):
        Saap(0.1, rank="printed", router="mlp", partition="pocket")
    with pytest.raises(ValueError, match="dense_layers must be"): Saap(dense_layers=-1)
    with pytest.raises(ValueError, match="layer must be at least 1, got 0"):
        Saap(partition="pocket", layer=0, dense_layers=1)
    with pytest.raises(ValueError, match="rank must be 'density' or 'mass' for backend='triton', got 'printed'"):
        served(method, *torch.randn(3, 1, 2, 1, 8), "triton")


@pytest.fixture(scope="module")
def llama(): return build("llama")


@pytest.fixture(scope="module")
def file(llama, folder):
    heads, groups = llama.config.num_attention_heads, llama.config.num_key_value_heads
    size, g = llama.config.hidden_size // heads, torch.Generator().manual_seed(0)
    r = lambda *shape: torch.randn(*shape, generator=g)
    parts = dict(centroids=torch.nn.functional.normalize(r(groups, 6, size), dim=-1), mlp_w1=r(heads, size, 5),
                 mlp_b1=r(heads, 5), mlp_w2=r(heads, 5, 6), mlp_b2=r(heads, 6))
    layers = range(llama.config.num_hidden_layers)
    save_partition({f"{i}.{name}": x.clone() for i in layers for name, x in parts.items()}, folder / "llama", llama)
    return str(folder / "llama")


def test_layer_0_of_a_model_is_exact(llama, file):
    method, layers = Saap.paper(file, 1, window=3), attention_layers(llama)
    chosen = by_layer("decode", method, layers, "decode")
    assert chosen[0] == Exact() and all(chosen[i].layer == i for i in list(chosen)[1:])
    ids = torch.arange(30)[None] % llama.config.vocab_size
    write = lambda **how: llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
                                         output_logits=True, return_dict_in_generate=True, pad_token_id=0, **how)
    with torch.no_grad(), sparsify(llama, decode=method, stats=True) as session:
        mine = torch.cat(write().logits)
        density = session.stats().groupby("layer").density.mean()
    assert density[0] == 1 and (density[1:] < 1).all()
    by_hand = dict(enumerate([Exact(), *(chosen[i] for i in list(chosen)[1:])]))
    with torch.no_grad(), sparsify(llama, decode=by_hand): again = torch.cat(write().logits)
    assert torch.equal(mine, again)


# training, section 4 and Appendix A

def test_targets_are_the_rows_of_A_H_k():
    "Every key of the prompt but the sink, later ones too, more than 8 steps away; queries whose heaviest is beyond 5"
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(h, 40, D, generator=g, dtype=torch.float64) for h in (4, 2))
    ids, n = torch.randint(6, (2, 40), generator=g), 40
    share, counts = cluster_shares(q, k, ids, torch.arange(n), 6, window=9, reach=6, causal=False)
    for h in range(4):
        for i in range(n):
            s = {j: float(q[h, i] @ k[h // 2, j]) / math.sqrt(D) for j in range(1, n)}
            heaviest = max(s, key=s.get)
            assert counts[h, i] == (abs(i - heaviest) > 5)
            far = {j: math.exp(x) for j, x in s.items() if abs(i - j) > 8}
            row = [sum(x for j, x in far.items() if ids[h // 2, j] == c) / sum(far.values()) for c in range(6)]
            torch.testing.assert_close(share[h, i], torch.tensor(row, dtype=share.dtype), rtol=0, atol=1e-12)


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_network_learns_as_printed(in_float64):
    "Linear, BatchNorm, ReLU, Linear of torch; Eq. 1 as KLDiv(f(Q), A H_k); Adam at 1e-5; a prompt a step"
    g, nn = torch.Generator().manual_seed(1), torch.nn
    examples = [(torch.randn(1, 50, D, generator=g), torch.rand(1, 50, 6, generator=g).softmax(-1),
                 torch.rand(1, 50, generator=g) < 0.7) for _ in range(3)]
    g = torch.Generator().manual_seed(4)
    net = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 6))
    with torch.no_grad():
        for layer, (a, b) in (net[0], (D, 5)), (net[3], (5, 6)):
            layer.weight.copy_((2 * torch.rand(1, a, b, generator=g)[0].T - 1) * a**-0.5)
            layer.bias.zero_()
    adam = torch.optim.Adam(net.parameters(), PAPER["rate"])
    for _ in range(20):
        x, target, counts = examples[int(torch.randint(3, (), generator=g))]
        drawn = torch.rand(counts.shape, generator=g)[0].masked_fill(~counts[0], -1).topk(12).indices
        loss = nn.KLDivLoss(reduction="batchmean")(net(x[0, drawn]).log_softmax(-1), target[0, drawn])
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad(): want, x = net.eval()(examples[0][0][0]), examples[0][0]
    said = {falls: router_scores(x[None], fit_router(examples, hidden=5, steps=20, queries=12, seed=4,
                                                     rate=PAPER["rate"], falls=falls), "mlp")[0, 0]
            for falls in (PAPER["falls"], True)}
    torch.testing.assert_close(said[False], want, rtol=0, atol=1e-9)
    assert (said[True] - want).abs().max() > 1e-6


def test_the_papers_training_is_a_call_away():
    assert (PAPER["clusters"], PAPER["hidden"], PAPER["steps"], PAPER["batch"]) == (1024, 1024, 40_000, 1000)
    assert not PAPER["causal"] and {*PAPER} <= {*inspect.signature(train_partition).parameters}


def test_a_text_names_it():
    "As on the command line"
    assert read_method("saap.paper(partition='pocket', probes=4)") == Saap.paper("pocket", 4)
    with pytest.raises(ValueError, match="partition"): read_method("saap.paper")
