"What holds for every method of the table: later keys have no say, and bad input is refused by name."
import math
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparse_nb.attention import Exact, Streaming, TopK, TopP, Uniform, assert_close
from sparse_nb.baselines import Adamas, DoubleSparsity, HashAttention, MagicPIG, OneList, Quest
from sparse_nb.compose import Then
from sparse_nb.core.methods import METHODS, method_class
from sparse_nb.delta import Delta
from sparse_nb.eviction import H2O, SnapKV
from sparse_nb.hash_attention import PARTS
from sparse_nb.lsh import KDEformer, Reformer
from sparse_nb.patterns import FlexPrefill, HiP, OracleBlocks, RandomBlocks, VerticalSlash, XAttention
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vattention import VAttention

FOLDER = tempfile.TemporaryDirectory()
NAMES = dict(ids=lambda m: repr(m).replace(FOLDER.name, "")[:70])


@lru_cache
def networks():
    "A file of random networks for two layers of 4 heads in 2 groups of size 16"
    path, g = Path(FOLDER.name) / "networks.safetensors", torch.Generator().manual_seed(0)
    shapes = dict(w1=(16, 8), b1=(8,), w2=(8, 32), b2=(32,))
    parts = {part: (2 if part[0] == "k" else 4, *shapes[part[2:]]) for part in PARTS}
    save_file({f"{layer}.{part}": torch.randn(shape, generator=g) for layer in range(2)
               for part, shape in parts.items()}, path)
    return str(path)


SMALL = dict(sinks=1, window=4, topk=8, base=8, eps=0.9, delta=0.2)
LONGEST = SMALL | dict(base=64, delta=0.5, guarantee="output", bound="bernstein", plugin="plain")
HASH = HashAttention(8, networks(), 0)
PAGES, CLUSTERS = Quest(8, page=8), Saap(clusters=4, window=8, budget=4)
DECODES = [
    Exact(), Streaming(2, 5), TopK(7), TopP(0.5), Uniform(7), Santa(samples=6), Santa(samples=6, keys="int8"),
    Santa(samples=6, keys="rescored"), Santa(samples=64, eps=0.9, delta=0.2), VAttention(**SMALL),
    VAttention(**LONGEST), VAttention(**SMALL, predictor=Quest(page=32)),
    VAttention(**SMALL, predictor=CLUSTERS), PAGES, DoubleSparsity(8, channels=4), HASH, Adamas(8), OneList(PAGES),
    OneList(DoubleSparsity(8, channels=4)), OneList(CLUSTERS), MagicPIG(bits=3, tables=6, sinks=1, window=3),
    Reformer(bins=4, sinks=1, window=2), KDEformer(bins=4, bits=4, sinks=1, window=2), CLUSTERS,
    Saap(clusters=4, window=8, budget=6, router="centroid", tail="drop"), Saap(clusters=4, window=8, unread=0.2),
    SketchWalk(block=8, density=0.3, dense_layers=0), SketchWalk(block=16, density=0.3, index="fine16", dense_layers=0),
    Then(PAGES, Santa(samples=5)), Then(TopK(8), Santa(samples=5))]
EVICT = [H2O(budget=12), SnapKV(budget=12, window=4)]  # decode in a session, which tells them the queries
READS = [
    Exact(), Streaming(2, 5), TopK(7), TopP(0.5), Uniform(7), *EVICT, Delta(window=8, sinks=2, gamma=8, tail=0),
    SketchWalk(block=32, density=0.5),
    VerticalSlash(vertical=16, slash=16, last=32, sinks=2, window=8, query_block=32, key_block=32),
    FlexPrefill(gamma=0.5, min_keys=32, query_block=32, key_block=32),
    XAttention(density=0.3, stride=4, query_block=32, key_block=32),
    HiP(stages=((16, 64), (4, 32)), sinks=8, window=32, query_block=32, key_block=32),
    OracleBlocks(density=0.3, query_block=32, key_block=32), RandomBlocks(density=0.3)]
# Methods whose lists of a prompt are chosen by queries that come after the ones they are for
LATER = {"SketchWalk": "all queries of a block choose its list", "VerticalSlash": "the prompt's last queries choose",
         "FlexPrefill": "the prompt's last queries choose", "XAttention": "all queries of a block choose its list",
         "HiP": "all queries of a block choose its list", "OracleBlocks": "all queries of a block choose its list"}


def problem(queries=5, keys=44, heads=4):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, n, 16, generator=g, dtype=torch.float64)
            for h, n in ((heads, queries), (2, keys), (2, keys))]


def drawn(method, heads=4):
    "Seeds for methods that draw"
    return dict(seed=torch.arange(2 * heads).view(2, heads)) if method.random else {}


def test_every_method_is_here():
    assert {type(m) for m in DECODES + EVICT + READS} == {method_class(x.path.partition(":")[2])
                                                          for x in METHODS.values()}
    assert LATER.keys() <= {type(m).__name__ for m in READS}


# later keys

@pytest.mark.parametrize("method", DECODES, **NAMES)
def test_later_keys_have_no_say_in_one_call(method):
    "Of several causal queries each gets the same, whatever stands behind its own key"
    keys = 300 if isinstance(method, VAttention) else 44  # of which it samples some
    q, k, v = problem(keys=keys)
    k, v = 0.3 * k, v + 3
    got = method.decode(q, k, v, causal=True, **drawn(method))
    for j in range(1, 5):
        others = k.clone(), v.clone()
        for x in others: x[:, :, keys - 5 + j:] *= torch.tensor([10.0, -7.0]).view(2, 1, 1, 1)
        assert_close(method.decode(q, *others, causal=True, **drawn(method))[:, :, :j], got[:, :, :j], 1e-12)


@pytest.mark.parametrize("method", READS, **NAMES)
def test_later_tokens_have_no_say_in_a_prompt(method):
    "But where the method says that they choose: then they do"
    q, k, v = problem(queries=256, keys=256)
    got, same = method.prefill(q, k, v, **drawn(method)), []
    for border in 110, 205:
        others = [x.clone() for x in (q, k, v)]
        for x in others: x[:, :, border:] = 5 * x[:, :, border:].flip(2)
        same.append(torch.allclose(method.prefill(*others, **drawn(method))[:, :, :border], got[:, :, :border], 1e-9))
    assert all(same) == (type(method).__name__ not in LATER)


# bad input

Q, K, V = problem()


def spoilt(x, value):
    "A copy with one bad number"
    x = x.clone()
    x[1, 0, 20, 3] = value
    return x


CALLS = [
    (dict(q=None), "q must be a torch.Tensor, got NoneType"), (dict(k=None), "k must be a torch.Tensor, got NoneType"),
    (dict(v=None), "v must be a torch.Tensor, got NoneType"), (dict(q=[1.0]), "q must be a torch.Tensor, got list"),
    (dict(v=V.long()), "v must be float16"), (dict(k=K.float()), "k must have the dtype of q"),
    (dict(k=K[0]), "k must have 4 axes"), (dict(v=V[:, :, :9]), "v must have the shape of k"),
    (dict(q=Q[:, :3]), "q must have a multiple of the heads of k"), (dict(scale=-1.0), "scale must be positive"),
    (dict(scale="1"), "scale must be a number, got str"), (dict(kv_start=[0, 0]), "kv_start must be an integer tensor"),
    (dict(kv_start=torch.tensor([0, -1])), "kv_start"), (dict(seed=1.5), "seed must be an int or an integer tensor"),
    (dict(seed=-1), "seed must lie in"),
    (dict(q=Q * math.nan), "must be finite, got NaN")]
DECODE_CALLS = [(dict(causal=1), "causal must be a bool, got int"),
                (dict(kv_len=torch.tensor([45, 44])), "kv_len = 45"),
                (dict(return_stats="yes"), "return_stats must be a bool, got str"), (dict(state=[1]), "state")]
UNSEEN = Streaming, Uniform  # read some keys, and look at no other


def refused(call, settings, wrong, message):
    "Is the call refused by name?"
    given = dict(q=Q, k=K, v=V) | settings | wrong
    with pytest.raises((TypeError, ValueError), match=message) as error: call(**given)
    assert not isinstance(error.value, AttributeError)


@pytest.mark.parametrize("method", DECODES, **NAMES)
def test_bad_calls_of_decode_are_refused_by_name(method):
    for wrong, message in CALLS + DECODE_CALLS: refused(method.decode, drawn(method), wrong, message)
    for x in math.nan, math.inf:
        if not isinstance(method, UNSEEN): refused(method.decode, drawn(method), dict(k=spoilt(K, x)), "finite")
        # but where nobody sees it
        hidden = dict(kv_start=torch.tensor([0, 21]))
        assert method.decode(Q, spoilt(K, x), V, **hidden, **drawn(method)).isfinite().all()


@pytest.mark.parametrize("method", READS, **NAMES)
def test_bad_calls_of_prefill_are_refused_by_name(method):
    for wrong, message in CALLS: refused(method.prefill, drawn(method), wrong, message)
    for x in math.nan, math.inf:
        if not isinstance(method, (Streaming, RandomBlocks)):
            refused(method.prefill, drawn(method), dict(k=spoilt(K, x)), "finite")


@pytest.mark.parametrize("method", EVICT, **NAMES)
def test_bad_calls_of_methods_that_evict_are_refused_by_name(method):
    for wrong, message in CALLS[:-1] + DECODE_CALLS: refused(method.decode, {}, wrong, message)
    refused(method.decode, {}, {}, "state must have heard the prompt's queries .in a session of `sparsify`., got None")


@pytest.mark.parametrize("method", [*DECODES, *EVICT, *READS], **NAMES)
def test_what_a_method_cannot_do_it_says(method):
    "In a TypeError; to `hasattr`, and so to sessions, it is not there"
    for what in "decode", "prefill":
        if hasattr(method, what): assert callable(getattr(method, what))
        else:
            assert getattr(method, what, None) is None
            with pytest.raises(TypeError, match=f"has no {what}"): getattr(method, what)(Q, K, V)
    assert hasattr(method, "decode") or hasattr(method, "prefill")


def test_files_are_named_before_layers():
    for method, where in ((HashAttention(maps="/no/file"), "maps .* '/no/file'"), (Saap(partition="/no/file"),
                                                                                 "partition .* '/no/file'")):
        with pytest.raises(ValueError, match=where): method.decode(Q, K, V)
    with pytest.raises(ValueError, match=r"layer must be one of .*, \[0, 1\], outside of a session, got None"):
        HashAttention(maps=networks()).decode(Q, K, V)
    with pytest.raises(ValueError, match="samples must be at least 1 and at most 1048576, got 1000000000"):
        Santa(samples=10**9)
    for guess in Saap(probes=2), MagicPIG():
        with pytest.raises(TypeError, match="guess.budget must be an int"): OneList(guess)


transformers = pytest.importorskip("transformers")
from transformers import DynamicCache

from sparse_nb.hf import sparsify
from inputs import GREEDY, IDS
from models import SMALL as TINY, build


@pytest.fixture(scope="module")
def llama(): return build("llama")


@pytest.mark.parametrize("method", DECODES + EVICT, **NAMES)
@torch.no_grad()
def test_later_keys_have_no_say_in_a_session(llama, method):
    "Queries of one step are answered as in steps of one query each"
    def read(*parts):
        with sparsify(llama, decode=method, setup="context"):
            cache = DynamicCache(config=llama.config)
            llama(IDS[:, :30], past_key_values=cache)
            return torch.cat([llama(x, past_key_values=cache).logits for x in parts], 1)
    assert_close(read(IDS[:, 30:]), read(*IDS[:, 30:].split(1, 1)), 1e-5)


@pytest.mark.parametrize("method", DECODES + EVICT, **NAMES)
def test_assisted_decoding_is_plain_decoding(llama, method):
    "Also where drafts come with the prompt, from which an index may learn"
    torch.manual_seed(1)
    draft = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).eval()
    ids = torch.cat([IDS, IDS[:, :12]], 1)  # whose next token a lookup finds
    given = GREEDY | dict(attention_mask=torch.ones_like(ids))
    with sparsify(llama, decode=method):
        want = llama.generate(ids, **given)
        assert torch.equal(llama.generate(ids, **given, prompt_lookup_num_tokens=3), want)
        assert torch.equal(llama.generate(ids, **given, assistant_model=draft), want)
