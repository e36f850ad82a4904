"Recorded parts of a step over a growing cache: with a stand-in for graphs, that plays by running again, on a CPU."
import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache

from sparse_nb.attention import Exact, Streaming, TopK, TopP, Uniform
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.one_list import OneList
from sparse_nb.methods.quest import Quest
from sparse_nb.compose import Then
from sparse_nb.eviction import H2O, SnapKV
from sparse_nb.hf import prefill, sparsify
from sparse_nb.lsh import KDEformer, Reformer
from sparse_nb.models import cache as cache_room, graphs, replay
from sparse_nb.models.cache import PreallocatedLayer, StatefulPreallocatedLayer, fork_cache
from sparse_nb.models.forward import ForwardPass
from sparse_nb.models.plan import keeps_state
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vattention import VAttention
from inputs import IDS, MASK, PADDED, fast
from models import OLD, build, ids_of, play_on_a_cpu

TOKENS = 28
METHODS = [TopK(budget=0.3), Streaming(sinks=2, window=0.3), Streaming(sinks=4, window=12), Santa(samples=32),
           Santa(samples=32, keys="int8"), Quest(budget=12, page=4), DoubleSparsity(budget=12, channels=4),
           Adamas(budget=12), OneList(Adamas(budget=12)), MagicPIG(4, 8), Saap(budget=8, sinks=2, window=8, clusters=4),
           SketchWalk(density=0.5, dense_layers=0), SnapKV(0.5), H2O(0.5),
           VAttention(sinks=2, window=2, topk=4, base=4, predictor=Adamas(budget=4)),
           VAttention(sinks=2, window=2, topk=4, base=4), Uniform(samples=8), Reformer(bins=4, window=4),
           KDEformer(bins=4, window=4), Then(Quest(budget=16, page=4), Santa(samples=8))]
FEW = [Santa(samples=32), Quest(budget=12, page=4), Saap(budget=8, sinks=2, window=8, clusters=4)]
some = pytest.mark.parametrize("method", FEW, ids=lambda m: type(m).__name__)


@pytest.fixture(scope="module")
def llama(): return build("llama")


@pytest.fixture
def played(monkeypatch): return play_on_a_cpu(monkeypatch)


@contextmanager
def unplayed():
    "As if there were no GPU"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "on_a_gpu", lambda x: False)
        yield


@pytest.mark.parametrize("padded", fast((False, True), 1))
@pytest.mark.parametrize("method", fast(METHODS, 1, 4, 9, 14), ids=lambda m: type(m).__name__)  # tests/contract: each
def test_what_is_played_is_what_is_written(llama, played, method, padded):
    """Also where the room is full in the middle of it. Two tokens run before a part is recorded; where the room is new,
    an index takes one more to move."""
    given = dict(ids=PADDED, attention_mask=MASK) if padded else dict(ids=IDS)
    with sparsify(llama, decode=method, dense_layers=[0], seed=3):
        with unplayed(): want = ids_of(llama, max_new_tokens=TOKENS, **given)
        assert not played
        assert torch.equal(ids_of(llama, max_new_tokens=TOKENS, **given), want)
    room = 64 - given["ids"].shape[1]
    assert len(played) == room - 2 + (TOKENS - 1 - room - 2) - keeps_state(method)


@pytest.mark.parametrize("method", fast(METHODS, 5, 10, 12, 13, 15), ids=lambda m: type(m).__name__)
def test_a_context_is_read_in_parts(llama, played, method):
    "What an index decides at the end of a prompt waits for the last part, and for the question."
    def write():
        with sparsify(llama, decode=method, setup="context", seed=3):
            cache = prefill(llama, IDS[:, :-6], chunk=9)
            return ids_of(llama, IDS, past_key_values=cache, max_new_tokens=10)
    with unplayed(): want = write()
    assert torch.equal(write(), want) and played


@pytest.mark.gpu
@pytest.mark.parametrize("padded", fast((False, True), 1))
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_graphs_write_the_same(monkeypatch, method, padded):
    "On a GPU, with real graphs. (Lists of SAAP are made anew where a room is, so its room lasts.)"
    model, calls, call = build("llama").cuda(), [], replay.CapturedLayer.__call__
    monkeypatch.setattr(replay.CapturedLayer, "__call__", lambda self, given: calls.append(self) or call(self, given))
    if not isinstance(method, Saap): monkeypatch.setattr(cache_room, "SPARE", 0)
    given = dict(ids=PADDED.cuda(), attention_mask=MASK.cuda()) if padded else dict(ids=IDS.cuda())
    with sparsify(model, decode=method, seed=3):
        with unplayed(): want = ids_of(model, max_new_tokens=TOKENS, **given)
        assert not calls
        for _ in range(2): assert torch.equal(ids_of(model, max_new_tokens=TOKENS, **given), want)
    assert len(calls) > 2 * 2 * 15 and len(set(calls)) >= 2 * 2


@pytest.mark.gpu
def test_graphs_share_their_memory():
    "What the graphs of 16 layers need beside their results is what one of them needs."
    x, pools, size = torch.ones(1 << 22, device="cuda"), {}, 4 << 22
    run = lambda: ((x + 1) * 2).sum()
    run()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    plays = [replay.captured(run, x.device, pools) for _ in range(16)]
    assert torch.cuda.memory_reserved() - before <= 4 * size
    assert {float(play()) for play in plays} == {float(size)}


WAYS = {"beams": dict(num_beams=3), "assisted": dict(prompt_lookup_num_tokens=3), "sampled": dict(do_sample=True),
        "chunks": dict(prefill_chunk_size=16), "static": dict(cache_implementation="static")}

@pytest.mark.parametrize("method", fast(FEW, 0, 2), ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_generate(llama, played, method, way):
    "What moves the keys is not recorded, or anew; nobody notices."
    def write():
        torch.manual_seed(0)
        return ids_of(llama, IDS, max_new_tokens=10, **WAYS[way])
    with sparsify(llama, decode=method, seed=3):
        with unplayed(): want = write()
        assert torch.equal(write(), want)
    if way != "assisted": assert bool(played) == (way in ("sampled", "chunks"))


@some
@pytest.mark.parametrize("setup", fast(("prompt", "context"), 1))
def test_a_cache_goes_on(llama, played, method, setup):
    """Turns of several tokens, forks, copies, a crop, the exchange of sequences, a turn of the model alone, one in host
    memory, and another session: each writes what it writes in a cache without room."""
    if isinstance(method, Saap): method = replace(method, before_rope=False)  # else no turn may go unobserved
    def story():
        told, cache, ids = [], DynamicCache(config=llama.config), PADDED.flip(1)
        def turn(cache, ids, **more):
            more = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, past_key_values=cache) | more
            told.append(ids_of(llama, ids, **more))
            return torch.cat([ids, told[-1]], 1)
        with sparsify(llama, decode=method, seed=3, setup=setup):
            ids = turn(cache, ids)
            longer = torch.cat([ids, IDS[:, :3].expand(2, -1)], 1)
            fork, twin = fork_cache(cache), copy.deepcopy(cache)
            for x in (fork, twin, cache, fork_cache(cache)): again = turn(x, longer)
            assert all(torch.equal(x, told[1]) for x in told[2:5])
            cache.crop(-4)
            again = turn(cache, again[:, :-4])
            cache.reorder_cache(torch.tensor([1, 0]))
            ids = turn(cache, again.flip(0))
        ids = turn(cache, ids)
        with sparsify(llama, decode=method, seed=3): ids = turn(cache, ids)
        with sparsify(llama, decode=method, seed=4, offload=True): turn(cache, ids)
        return told
    with unplayed(): want = story()
    got = story()
    assert played and len(got) == len(want) == 10
    for x, y in zip(got, want): assert torch.equal(x, y)


@some
def test_a_step_that_is_observed_goes_on(llama, played, method):
    "After recorded steps: the index gets its key by the call that observes."
    def write():
        cache, seen = DynamicCache(config=llama.config), []
        with sparsify(llama, decode=method, seed=3) as session:
            one = ids_of(llama, IDS, max_new_tokens=8, past_key_values=cache)
            session.dispatch.observe = seen.append
            two = ids_of(llama, torch.cat([IDS, one], 1), max_new_tokens=6, past_key_values=cache)
            session.dispatch.observe = None
            return torch.cat([one, two, ids_of(llama, torch.cat([IDS, one, two], 1), max_new_tokens=6,
                                               past_key_values=cache)], 1), [x.out for x in seen]
    with unplayed(): want, outs = write()
    got, same = write()
    assert torch.equal(got, want) and len(played) > 2 * 5 and len(same) == len(outs) == 2 * 6
    for x, y in zip(same, outs): torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_what_a_part_gives_is_the_callers(llama, played):
    "A hook may keep what a layer's attention gave: the next token does not overwrite it."
    def kept():
        found, layer = [], llama.model.layers[1].self_attn.o_proj
        hook = layer.register_forward_pre_hook(lambda module, args: found.append((args[0], args[0].clone())))
        with sparsify(llama, decode=TopK(budget=0.3)): ids_of(llama, IDS, max_new_tokens=8)
        hook.remove()
        return found
    found = kept()
    assert played and len(found) == 8
    for x, y in found: assert torch.equal(x, y)


@pytest.mark.parametrize("first", (0, 41, 46))
@some
def test_keys_that_a_layer_makes_of_its_cache_are_read(llama, played, method, first):
    """A part reads the room itself, so none is played where the model attends to something else, from some key on.

    (SAAP makes its lists anew when its state can grow again.)
    """
    if isinstance(method, Saap) and first > 41: pytest.skip("its lists are others")
    class Louder(DynamicCache):
        def update(self, keys, values, i, *args, **given):
            new = keys[:, :, -1:]
            keys, values = super().update(keys, values, i, *args, **given)
            assert torch.equal(keys[:, :, -1:], new)
            return keys, -4 * values if keys.shape[2] >= first else values
    def write(): return ids_of(llama, IDS, max_new_tokens=14, past_key_values=Louder(config=llama.config))
    with sparsify(llama, decode=method, seed=3):
        with unplayed(): want = write()
        assert torch.equal(write(), want) and bool(played) == (first > 43)
        if not first: assert not torch.equal(ids_of(llama, IDS, max_new_tokens=14), want) and played


class Broken(Exception): pass


class Stopped(BaseException): pass


def gets_a_key(layer):
    "From whoever attends to it at once"
    x = torch.randn(1, *layer.keys.shape[1::2])[:, :, None]
    keys, values = layer.update(x, -x)
    assert torch.equal(keys[:, :, -1:], x) and torch.equal(values[:, :, -1:], -x)


@contextmanager
def broken(llama, where, error):
    "The part of a layer fails, or what comes before the second layer's."
    def breaks(*args): raise error
    with pytest.MonkeyPatch.context() as patch:
        if where == "part": patch.setattr(replay.CapturedLayer, "__call__", breaks)
        else: patch.setattr(llama.model.layers[1].self_attn.q_proj, "forward", breaks)
        yield


@pytest.mark.parametrize("where", ("part", "layer"))
@pytest.mark.parametrize("after", ("step", "session", "another", "thread"))
def test_a_step_that_breaks_off_leaves_no_key_unwritten(llama, played, where, after):
    """The key of the layer whose part fails is in the cache, and so is one that it gets between steps, after the
    session, or when that has gone on with another cache, whoever holds the traceback; and a thread's."""
    cache, held, given = DynamicCache(config=llama.config), [], dict(max_new_tokens=1)
    def fails(ids):
        with broken(llama, where, Broken if after == "step" else Stopped):
            try: ids_of(llama, ids, past_key_values=cache, **given)
            except (Broken, Stopped) as error: held.append(error)
    def story():
        ids = torch.cat([IDS, ids_of(llama, IDS, max_new_tokens=8, past_key_values=cache)], 1)
        copied = copy.deepcopy(cache)
        ids_of(llama, ids, past_key_values=copied, **given)
        for layer in copied.layers: gets_a_key(layer)
        fails(ids)
        found, want = cache.layers[0], copied.layers[0]
        assert torch.equal(found.keys, want.keys[:, :, :-1]) and torch.equal(found.values, want.values[:, :, :-1])
        assert pickle.loads(pickle.dumps(cache.layers[1])).get_seq_length() == ids.shape[1] - 1
    with sparsify(llama, decode=TopK(budget=0.3)):
        if after == "thread":
            with ThreadPoolExecutor(1) as pool: pool.submit(story).result()
        else: story()
        assert type(held[0]) in (Broken, Stopped)
        if after == "another": ids_of(llama, IDS, max_new_tokens=8, past_key_values=DynamicCache(config=llama.config))
        if after == "step": gets_a_key(cache.layers[1])
    gets_a_key(cache.layers[1])
    x = torch.ones(1, 2, 1, 16)
    cache.reset()
    n = cache.layers[1].get_seq_length()
    assert n == 0 or OLD  # where a layer that is reset keeps its length
    assert torch.equal(cache.layers[1].update(x, x)[0][:, :, n:], x)


def test_a_key_of_another_batch_is_refused_and_changes_nothing():
    layer, key = cache_room.preallocate(DynamicCache(), 0), torch.ones(1, 2, 5, 4)
    layer.update(key, key)
    one = cache_room.preallocate(DynamicCache(), 0)
    one.update(key[:, :, :1], key[:, :, :1])
    for rows in (torch.ones(3, 2, 1, 4), torch.ones(1, 2, 1, 3), torch.ones(3, 2, 70, 4)):
        for x in (layer, one):
            held = x.keys.clone()
            with pytest.raises(RuntimeError): x.update(rows, rows)
            assert torch.equal(x.keys, held)
    wide = cache_room.preallocate(DynamicCache(), 0)
    wide.update(torch.ones(3, 2, 5, 4), torch.ones(3, 2, 5, 4))
    with pytest.raises(RuntimeError): wide.update(key[:, :, :1], key[:, :, :1])  # copies, but cannot be joined


def test_a_layer_that_is_compiled_later_goes_on(llama, played):
    "With keys that it writes itself."
    def story(compiles):
        model, cache, tokens = build("llama"), DynamicCache(config=llama.config), []
        with sparsify(model, decode=TopK(budget=0.3)), torch.no_grad():
            token = model(IDS, past_key_values=cache).logits[:, -1:].argmax(-1)
            for i in range(9):
                if compiles and i == 5:
                    own = model.model.layers[1].self_attn
                    own.forward = torch.compile(own.forward, backend="eager")
                token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
                tokens.append(int(token))
        return tokens
    assert story(True) == story(False) and played


@pytest.mark.parametrize("then", [TopK(budget=0.3), Santa(samples=32), None], ids=lambda m: type(m).__name__)
@some
def test_another_session_goes_on_with_a_cache_that_has_an_index(llama, played, method, then):
    "Of another method, or of the same."
    if type(method) is Santa: method = replace(method, keys="int8")
    then = then or method
    def story():
        cache = DynamicCache(config=llama.config)
        with sparsify(llama, decode=method, seed=3):
            one = ids_of(llama, IDS, max_new_tokens=6, past_key_values=cache)
        with sparsify(llama, decode=then, seed=3):
            two = ids_of(llama, torch.cat([IDS, one], 1), max_new_tokens=6, past_key_values=cache)
        return torch.cat([one, two], 1)
    with unplayed(): want = story()
    assert torch.equal(story(), want) and played


def test_an_offloaded_layer_lets_its_room_go(llama, played):
    cache = DynamicCache(config=llama.config)
    with sparsify(llama, decode=TopK(budget=0.3)): one = ids_of(llama, IDS, max_new_tokens=6, past_key_values=cache)
    room = weakref.ref(cache.layers[0].buffer[0])
    with sparsify(llama, decode=TopK(budget=0.3), offload=True):
        ids_of(llama, torch.cat([IDS, one], 1), max_new_tokens=2, past_key_values=cache)
    gc.collect()
    assert room() is None


@some
def test_an_assistant_of_fewer_layers(llama, played, method):
    def write(): return ids_of(llama, IDS, max_new_tokens=8, assistant_early_exit=1)
    with sparsify(llama, decode=method, seed=3):
        with unplayed(): want = write()
        assert torch.equal(write(), want)


def test_what_is_not_recorded(llama, played):
    "A method that is not ours, one that waits or walks, steps that are observed, masks with holes, other devices."
    class Own(TopK): pass
    class Bare(Adamas): pass
    walk = SketchWalk(density=0.5, dense_layers=0, walk="softmax")
    for method in (Own(budget=0.3), TopP(0.9), walk, VAttention(predictor=Bare(budget=4)), Exact(), None):
        with sparsify(llama, decode=method, seed=3):
            ids_of(llama, IDS, max_new_tokens=6)
            assert not played
    with sparsify(llama, decode=TopK(budget=0.3), stats=True) as session: ids_of(llama, IDS, max_new_tokens=6)
    assert not played and session.stats().queries.eq(5).all()
    holes = torch.ones_like(IDS)
    holes[:, 7:9] = 0
    with sparsify(llama, decode=TopK(budget=0.3)):
        got = ids_of(llama, IDS, max_new_tokens=6, attention_mask=holes)
        with unplayed(): assert torch.equal(ids_of(llama, IDS, max_new_tokens=6, attention_mask=holes), got)
        assert not played
        for name in ("can_graph", "on_a_gpu"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(graphs, name, lambda x: False)
                ids_of(llama, IDS, max_new_tokens=6)
        assert not played
        ids_of(llama, IDS, max_new_tokens=6)
        assert len(played) == 2 * 3
    assert not graphs.of_ours(Own(budget=4)) and graphs.of_ours(VAttention(predictor=Adamas(budget=4)))


@some
def test_a_record_is_of_one_kind_of_step(llama, played, method):
    "Other batches, other modes, other threads and below a crossover: parts of their own, or none."
    def write(ids=IDS, **given): return ids_of(llama, ids, max_new_tokens=8, **given)
    def twice(session, **given):
        with sparsify(llama, decode=method, seed=3, **session):
            with unplayed(): want = write(**given)
            before = len(played)
            assert torch.equal(write(**given), want)
            return len(played) - before
    assert twice({}) == 2 * 5
    assert twice(dict(crossover=44)) == 2 * (1 + 2)  # three tokens exactly, of which the third is played, then four
    assert twice({}, ids=PADDED.flip(1)) == 2 * 5
    with torch.inference_mode(): assert twice({}) == 2 * 5
    cache = DynamicCache(config=llama.config)
    with sparsify(llama, decode=method, seed=3):
        one = write(past_key_values=cache)
        with torch.inference_mode(): more = write(torch.cat([IDS, one], 1), past_key_values=cache)
        found = []
        thread = threading.Thread(target=lambda: found.append(write()))
        thread.start()
        thread.join()
        assert torch.equal(found[0], one)
        with unplayed():
            plain = DynamicCache(config=llama.config)
            assert torch.equal(write(past_key_values=plain), one)
            assert torch.equal(write(torch.cat([IDS, one], 1), past_key_values=plain), more)


def test_records_go_with_their_cache(llama, played):
    "Nobody holds the keys of a cache that is gone; a layer's record is replaced when its room is."
    with sparsify(llama, decode=Quest(budget=12, page=4)) as session:
        cache = DynamicCache(config=llama.config)
        ids_of(llama, IDS, max_new_tokens=TOKENS, past_key_values=cache)
        parts = session.dispatch.thread.graphs.parts
        assert {type(x) for x in parts} == {StatefulPreallocatedLayer} and len(parts) == 2
        assert all(record.places[0] is layer.buffer for layer, record in parts.items())
        rooms = [weakref.ref(x.buffer[0]) for x in cache.layers]
        del cache
        session.dispatch.thread.forward = ForwardPass()
        llama.__dict__.pop("_cache", None)
        gc.collect()
        assert not parts and [x() for x in rooms] == [None] * 2


@some
def test_a_room_that_is_left_is_nobodys(llama, played, method):
    "A second turn that needs a new room: no record holds the old one while the turn is read, so memory is not doubled."
    with sparsify(llama, decode=method, seed=3) as session:
        cache = DynamicCache(config=llama.config)
        one = ids_of(llama, IDS, max_new_tokens=8, past_key_values=cache)
        rooms = [weakref.ref(x.buffer[0]) for x in cache.layers]
        assert len(session.dispatch.thread.graphs.parts) == 2 and played
        longer = torch.cat([IDS, one, IDS], 1)
        with torch.no_grad(): llama(longer[:, cache.get_seq_length():], past_key_values=cache)
        assert not session.dispatch.thread.graphs.parts and [x() for x in rooms] == [None] * 2


def test_a_layer_without_parameters_says_where_it_is():
    "Of quantised weights some are buffers."
    module = torch.nn.Module()
    assert not graphs.on_a_gpu(module)
    module.register_buffer("weight", torch.zeros(2))
    assert not graphs.on_a_gpu(module)


def test_a_layer_with_room_is_a_growing_layer():
    "Keys and values of each call, as transformers has them; a new key moves nothing while there is room."
    draw = torch.Generator().manual_seed(0)
    rows = lambda n, B=2: torch.randn(B, 2, n, 4, generator=draw)
    caches, where = (DynamicCache(), DynamicCache()), []
    cache_room.preallocate(caches[0], 0)
    def both(call):
        for cache in caches: call(cache)
        ours, plain = (cache.layers[0] for cache in caches)
        assert torch.equal(ours.keys, plain.keys) and torch.equal(ours.values, plain.values)
        assert ours.get_seq_length() == plain.get_seq_length()
        where.append(ours.keys.data_ptr())
        return ours
    def add(n, B=2):
        k, v = rows(n, B), rows(n, B)
        return lambda cache: cache.update(k, v, 0)
    for n in (5, 1, 3, 1): layer = both(add(n))
    assert len(set(where)) == 1 and type(layer) is PreallocatedLayer and layer.has_buffer() and layer.most() % 64 == 0
    held, want = layer.keys, layer.keys.clone()
    for call in (lambda c: c.crop(-3), add(2), lambda c: c.reorder_cache(torch.tensor([1, 1])), add(1),
                 lambda c: c.batch_repeat_interleave(2), add(1, 4),
                 lambda c: c.batch_select_indices(torch.tensor([0, 3])), add(1), add(cache_room.SPARE), add(700)):
        both(call)
    assert torch.equal(held, want)  # who holds what a layer gave keeps it
    forks, k = [fork_cache(caches[0]) for _ in range(2)], [rows(1) for _ in range(3)]
    n = caches[0].get_seq_length()
    for cache, x in zip((*forks, caches[0]), k): cache.update(x, x, 0)
    for cache, x in zip((*forks, caches[0]), k): assert torch.equal(cache.layers[0].keys[:, :, n:], x)
    twin = copy.deepcopy(caches[0])
    twin.update(k[0], k[0], 0)
    assert caches[0].get_seq_length() == n + 1 and twin.layers[0].has_buffer()
    grown = rows(1).requires_grad_()
    caches[0].update(grown, grown, 0)
    caches[0].layers[0].keys.sum().backward()
    assert torch.equal(grown.grad, torch.ones_like(grown)) and not caches[0].layers[0].has_buffer()
    if not OLD:
        for cache in caches: cache.reset()
        both(add(4))
    static = transformers.StaticCache(config=build("llama").config, max_cache_len=8)
    for kind in (DynamicCache(offloading=True), static):
        cache_room.preallocate(kind, 0)
        assert not isinstance(kind.layers[0] if kind.layers else None, PreallocatedLayer)
