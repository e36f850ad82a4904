"Steps that are recorded and played back: with a stand-in for graphs, that plays by running again, on a CPU."
import gc
import threading
import weakref

import pytest
import torch
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")
from sparse_nb.attention import TopK
from sparse_nb.methods.quest import Quest
from sparse_nb.hf import sparsify
from sparse_nb.models import replay
from sparse_nb.models.replay import places_of, replayed, weights_of
from sparse_nb.methods.saap.state import Partition
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from inputs import IDS, MASK, PADDED, fast
from models import build, compiling, forget, ids_of, taped

TOKENS = 6


@pytest.fixture(scope="module")
def llama(): return build("llama")


@pytest.fixture
def played(monkeypatch):
    "Recorded steps run again; a number for each."
    found = []
    monkeypatch.setattr(replay, "captured", taped(found))
    monkeypatch.setattr(replay, "on_a_gpu", lambda model: True)
    return found


def records_of(model): return model.get_compiled_call.__self__.thread.records


def written(model, cache, ids=IDS, **more):
    return ids_of(model, ids, past_key_values=cache, compile_config=compiling(), max_new_tokens=TOKENS, **more)


def static(model, room=64): return transformers.StaticCache(config=model.config, max_cache_len=room)


@pytest.mark.parametrize("method", fast([None, TopK(budget=0.3), Santa(samples=32), Quest(budget=12, page=4),
                                         Saap(budget=8, sinks=2, window=8, clusters=4)], 2, 4),
                         ids=lambda m: type(m).__name__)
def test_what_is_played_is_what_is_written(llama, played, method):
    forget(llama)
    with sparsify(llama, decode=method, seed=3, replay=True):
        given = dict(ids=PADDED, attention_mask=MASK) if isinstance(method, Quest) else dict(ids=IDS)
        want, cache = ids_of(llama, max_new_tokens=TOKENS, **given), static(llama)
        for answers in (1, 2):
            assert torch.equal(written(llama, cache, **given), want)
            assert len(played) == answers * (TOKENS - 1) - replay.Replay.warm and len(records_of(llama)) == 1
            cache.reset()
    assert "get_compiled_call" not in vars(llama)


def test_an_index_is_asked_to_refresh_what_ages(llama, played, monkeypatch):
    """Between two steps, after every so many since the prompt, with the number of keys that its cache holds then; an
    answer that goes on from its cache counts on."""
    forget(llama)
    told = []
    monkeypatch.setattr(replay, "EVERY", 3)
    monkeypatch.setattr(
        Partition, "refresh", lambda self, k, v, known: told.append((int(known), k.shape[2], v.shape[2])))
    n, layers = IDS.shape[1], llama.config.num_hidden_layers - 1
    with sparsify(llama, decode=Saap(budget=8, sinks=2, window=8, clusters=4), dense_layers=[0], replay=True):
        cache = static(llama)
        for _ in range(2):
            more = written(llama, cache)                            # steps read keys n to n + 4
            written(llama, cache, torch.cat([IDS, more], 1))        # one key is observed, and five steps are counted on
            cache.reset()
    assert told == [(x, 64, 64) for x in (n + 3, n + 7, n + 10) * 2 for _ in range(layers)]
    with sparsify(llama, decode=Quest(budget=12, page=4), replay=True): written(llama, static(llama))  # nothing ages


class Arrived:
    "Stands for an event of a GPU: on a CPU what was copied is there."
    def __init__(self, **given): pass
    def record(self): pass
    def synchronize(self): pass


@pytest.mark.parametrize("method", fast([None, Quest(budget=12, page=4)], 1), ids=lambda m: type(m).__name__)
def test_an_answer_that_ends_is_over_a_token_late(llama, played, monkeypatch, method):
    """In a cache of generate's own: one step more, which leaves no trace in what comes back nor in the next answer. One
    that ends by its length, or whose cache is given or handed back, has none."""
    forget(llama)
    monkeypatch.setattr(torch, "Event", Arrived)
    own = dict(attention_mask=MASK, compile_config=compiling(), cache_implementation="static", max_new_tokens=8)
    steps = []
    def written(**given):
        before = len(played)
        got = ids_of(llama, PADDED, **own | given)
        steps.append(len(played) - before)
        return got
    with sparsify(llama, decode=method, replay=True):
        want = ids_of(llama, PADDED, attention_mask=MASK, max_new_tokens=8)
        over = lambda ids, scores, **more: torch.full((len(ids),), ids.shape[1] >= PADDED.shape[1] + 6)
        ends, short = dict(stopping_criteria=[over]), want[:, :6]
        assert torch.equal(written(**ends), short)
        assert torch.equal(written(), want)
        assert torch.equal(written(cache_implementation=None, past_key_values=static(llama), **ends), short)
        monkeypatch.setattr(replay.stops, "announce", lambda: None)
        assert torch.equal(written(**ends), short)
    at_once, whole = 6 - 1 - replay.Replay.warm, 8 - 1 - replay.Replay.warm
    assert steps == [at_once + 1, whole, at_once, at_once]


def test_caches_take_turns_and_the_oldest_is_forgotten(llama, played):
    forget(llama)
    with replayed(llama):
        want, caches = ids_of(llama, IDS, max_new_tokens=TOKENS), [static(llama) for _ in range(replay.Replay.most + 1)]
        def goes_on(cache):
            before = len(played)
            assert torch.equal(written(llama, cache), want)
            cache.reset()
            return len(played) - before
        first = [goes_on(x) for x in caches]
        assert len(records_of(llama)) == replay.Replay.most
        again = [goes_on(x) for x in (*caches[:0:-1], caches[0])]
    new, known = TOKENS - 1 - replay.Replay.warm, TOKENS - 1
    assert first == [new] * 5 and again == [known] * 4 + [new]


def test_a_record_holds_no_cache(llama, played):
    "What the tape of these tests keeps in its closure, a graph does not."
    forget(llama)
    held = []
    with pytest.MonkeyPatch.context() as patch, replayed(llama):
        tape = replay.captured
        def once(run, device):
            out = tape(run, device)()
            return lambda: out
        patch.setattr(replay, "captured", once)
        cache = static(llama)
        written(llama, cache)
        held += [weakref.ref(x.keys) for x in cache.layers]
        assert len(records_of(llama)) == 1
        del cache
        forget(llama)
        llama.__dict__.pop("_cache", None)
        gc.collect()
        assert [x() for x in held] == [None] * len(held)


def test_results_are_the_callers(llama, played):
    "Logits and hidden states of a token are not overwritten by the next one."
    forget(llama)
    more = dict(output_hidden_states=True, output_logits=True, return_dict_in_generate=True, do_sample=False,
                max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0, attention_mask=torch.ones_like(IDS))
    want = llama.generate(IDS, **more)
    with replayed(llama):
        got = llama.generate(IDS, past_key_values=static(llama), compile_config=compiling(), **more)
    assert len(played) == TOKENS - 1 - replay.Replay.warm
    for name in ("logits", "hidden_states"):
        pairs = list(zip(tree_leaves(getattr(got, name)), tree_leaves(getattr(want, name)), strict=True))
        assert len(pairs) >= TOKENS
        for x, y in pairs: torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_other_weights_are_recorded_anew(llama, played):
    forget(llama)
    model, cache = build("llama"), None
    with replayed(model):
        cache = static(model)
        one = written(model, cache)
        cache.reset()
        with torch.no_grad(): model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
        other, before = written(model, cache), len(played)
        assert before == 2 * (TOKENS - 1 - replay.Replay.warm)
        assert torch.equal(other, ids_of(model, IDS, max_new_tokens=TOKENS)) and not torch.equal(one, other)


def test_threads_have_records_of_their_own(llama, played):
    forget(llama)
    with replayed(llama):
        cache = static(llama)
        written(llama, cache)
        cache.reset()
        before = len(played)
        thread = threading.Thread(target=written, args=(llama, cache))
        thread.start()
        thread.join()
        assert len(played) - before == TOKENS - 1 - replay.Replay.warm and len(records_of(llama)) == 1


@pytest.mark.slow
def test_what_cannot_be_recorded_is_run(llama, played):
    forget(llama)
    want = ids_of(llama, IDS, max_new_tokens=TOKENS)
    with replayed(llama):
        assert torch.equal(ids_of(llama, IDS, max_new_tokens=TOKENS), want)  # a cache that grows
        cache = static(llama)
        cache.layers[1].__class__ = type("Other", (type(cache.layers[1]),), {})
        assert torch.equal(written(llama, cache), want)
    assert not played and places_of(None) is None and places_of(static(llama)) is None
    windows = build("mistral, window")
    with replayed(windows):
        cache = static(windows)
        assert any(x.is_sliding for x in cache.layers)
        written(windows, cache)
    assert not played
    two = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta")])
    assert weights_of(two) is None


def test_refusals(llama):
    with replayed(llama), pytest.raises(ValueError, match="model must not be replayed already"):
        with replayed(llama): pass
    with pytest.raises(TypeError, match="replay must be a bool, got int"): sparsify(llama, replay=1)
    assert "get_compiled_call" not in vars(llama)
    with pytest.raises(ValueError, match="model must not be replayed already"), replayed(llama):
        sparsify(llama, replay=True)
    assert llama.config._attn_implementation == "sdpa"
