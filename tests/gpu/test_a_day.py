"""A day with the package: what a person does, with every method of the table, in one process and in stock Python.

    python tests/gpu/test_a_day.py [--short] [--out FILE] [--commit HASH]     (make gpu-day)

needs one CUDA GPU and at most six minutes, `--short` 90 seconds. Each scene is compared with the same without a GPU
(the PyTorch reference in float32) or with the same done another way. Kernels are compiled beforehand, by a process for
each core: Triton keeps them on disk, and one process would compile for as long as the whole day takes. `make test`
plays the scenes on a CPU, with the device tests patched and recorded parts that run again, on a small random model.
"""
import argparse
import contextlib
import copy
import datetime
import functools
import gc
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import CompileConfig, DynamicCache, StaticCache

from sparse_nb import pocket
from sparse_nb.core.registry import METHODS
from sparse_nb.core.streams import fold_in
from sparse_nb.hf import sparsify
from sparse_nb.models import graphs, replay
from sparse_nb.models.compiled import no_graph
from sparse_nb.tasks import make

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # in stock Python, and in processes that it starts
from models import SETTINGS, TINY, build, method_of, taped

NEW, SEED = 8, 5           # tokens of an answer, five of them by a recorded part; of the sessions
EVICTS = "h2o", "snapkv"   # what they evicted is gone where tokens are taken back
GRAPHED = "vattention", "quest", "adamas", "magicpig", "snapkv", "h2o", "saap", "sketch_walk"  # a kind of state each
FEW = "exact", "santa", "vattention", "quest", "snapkv", "saap"  # that `make test` plays on a CPU
SHORT = "exact", "streaming", "santa", "vattention", "quest", "snapkv", "saap", "sketch_walk", "delta"


class Day:
    "A model and its prompts, and what differed from what it should have been."
    def __init__(self, plain, model, prompts, names, small=False, pool=None):
        self.plain, self.model, self.prompts, self.names, self.small = plain, model, prompts, names, small
        self.wrong, self.counted, self.held, self.pool = [], 0, {}, pool
        if pool is not None:  # they work while the GPU does
            jobs = [(what, name) for what in WANTED for name in names if WANTED[what][0](method_of(name, small))]
            self.held = {job: pool.submit(wanted, *job) for job in jobs}

    @property
    def device(self): return self.model.device

    def methods(self, what):
        "Name and method of those that decode, or read prompts."
        for name in self.names:
            method = method_of(name, self.small)
            if callable(getattr(method, what, None)): yield name, method

    def same(self, got, want, *what):
        "Note where tokens differ."
        self.counted += 1
        got, want = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (got, want))
        if got != want: self.wrong.append(f"{' '.join(map(str, what))}: got {got}, not {want}")

    def like(self, got, what, name):
        """Note where tokens differ from the reference's. Of a method that draws the first five count: a weight that a
        GPU rounds otherwise may draw another value, and what follows an answer has no clear next token."""
        cut = 5 if getattr(method_of(name, self.small), "random", False) and self.device.type == "cuda" else None
        want = self.want(what, name)
        first = lambda x: [first(y) for y in x] if x and isinstance(x[0], list) else x[:cut]
        self.same(first(got), first(want), what, name)

    def session(self, method, model=None, **more):
        "Of a method that decodes, or reads prompts alone."
        role = dict(decode=method) if callable(getattr(method, "decode", None)) else dict(prefill=method)
        return sparsify(model or self.model, **role | dict(seed=SEED) | more)

    def write(self, ids=None, model=None, cut=True, **more):
        "Tokens of an answer."
        model, ids = model or self.model, self.prompts[0] if ids is None else ids
        ids = ids.to(model.device)
        given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        given = given | more
        out = model.generate(ids, **given, min_new_tokens=given["max_new_tokens"]).cpu()
        return out[:, ids.shape[1]:].tolist() if cut else out

    def want(self, what, name):
        "What the reference writes."
        if (job := (what, name)) not in self.held:
            with reference(): self.held[job] = WANTED[what][1](self, self.plain, method_of(name, self.small))
        if self.pool is not None and hasattr(self.held[job], "result"): self.held[job] = self.held[job].result()
        return self.held[job]


@contextlib.contextmanager
def reference():
    "As without a GPU, also where the device tests are patched."
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            for where in (graphs, replay):
                stack.enter_context(mock.patch.object(where, "on_a_gpu", lambda x: False))
        yield


SCENES = {}

def scene(title):
    "Note a scene of the day."
    def noted(run):
        SCENES[run.__name__] = title, run
        return run
    return noted


def can(what): return lambda method: callable(getattr(method, what, None))


def can_look(method): return can("decode")(method) and name_of(method) not in EVICTS
def can_be_helped(method): return can_look(method) and name_of(method) in SHORT  # each guess is judged by itself
def can_chat(method): return can("decode")(method) and name_of(method) != "h2o"
def name_of(method): return next(x for x in METHODS if METHODS[x].path.endswith(f":{type(method).__name__}"))


def answers_of(day, model, method, count=3, **more):
    "Tokens after the first prompts, in one session."
    with day.session(method, model, **more): return [day.write(ids, model) for ids in day.prompts[:count]]


def read_with(decode):
    def answers(day, model, method):
        then = method_of("santa", day.small) if decode else None
        with sparsify(model, prefill=method, decode=then, seed=SEED): return day.write(model=model)
    return answers


def searched(**given):
    def answer(day, model, method):
        with day.session(method, model): return day.write(model=model, max_new_tokens=5, **given)
    return answer


def chat(day, model, method):
    "Three turns; the second takes three tokens of the first back."
    cache, ids, told = DynamicCache(config=model.config), day.prompts[0], []
    with day.session(method, model):
        for i in range(3):
            out = day.write(ids, model, cut=False, past_key_values=cache)
            told.append(out[0, ids.shape[1]:].tolist())
            if not i:
                out = out[:, :-3]
                cache.crop(-3)
            ids = torch.cat([out, day.prompts[1][:, -12:]], 1)
    return told


WANTED = {"prompts": (can("decode"), answers_of), "chat": (can_chat, chat),
          "read": (can("prefill"), read_with(False)), "read, then SANTA": (can("prefill"), read_with(True)),
          "beams": (can("decode"), searched(num_beams=2)),
          "prompt lookup": (can_look, searched(prompt_lookup_num_tokens=3)),
          "assistant": (can_be_helped, searched(assistant_early_exit=1))}


@scene("three prompts in one session, in a second one, and once more after empty_cache")
def prompts(day):
    for name, method in day.methods("decode"):
        first = answers_of(day, day.model, method)
        day.like(first, "prompts", name)
        day.same(answers_of(day, day.model, method), first, "a second session", name)
        if day.device.type == "cuda": torch.cuda.empty_cache()
        day.same(answers_of(day, day.model, method, 1), first[:1], "after empty_cache", name)


@scene("methods that read prompts, with exact decoding and with SANTA's")
def prefills(day):
    for name, method in day.methods("prefill"):
        for what in ("read", "read, then SANTA") if name in SHORT else ("read",):
            day.like(WANTED[what][1](day, day.model, method), what, name)


@scene("growing, static, static with replay and offloaded caches")
def caches(day):
    model = copy.deepcopy(day.model)  # of two layers, for to compile takes long
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    if getattr(model.config, "layer_types", None): model.config.layer_types = model.config.layer_types[:2]
    for name, method in day.methods("decode"):
        if name == "hash_attention": continue  # its networks are of the whole model
        want = answers_of(day, model, method, 2)
        if name != "exact": day.same(answers_of(day, model, method, 2, offload=True), want, "offload", name)
        ways = ("static", "replay") if name in SHORT[:3] else ("replay",) if name in GRAPHED else ()
        for how in () if no_graph(method) else ways:
            cache, found = StaticCache(config=model.config, max_cache_len=day.prompts[1].shape[1] + 64), []
            try:
                with day.session(method, model, replay=how == "replay"):
                    for ids in day.prompts[:2]:
                        found.append(day.write(ids, model, past_key_values=cache, compile_config=eagerly()))
                        cache.reset()
                day.same(found, want, how, name)
            except ValueError as error:
                if "its index can only grow" not in str(error): raise
            torch.compiler.reset()
            model.__dict__.pop("_compiled_call", None)


def eagerly():
    "Steps are compiled into one graph, which is not optimised."
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    return config


@scene("batches of one, three and one, with padding")
def batches(day):
    most = max(x.shape[1] for x in day.prompts)
    ids = torch.zeros((3, most), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, x in enumerate(day.prompts): ids[i, most - x.shape[1]:], mask[i, most - x.shape[1]:] = x[0], 1
    mask, streams = mask.to(day.device), [fold_in(SEED, i) for i in range(3)]
    for name, method in day.methods("decode"):
        alone = [with_seed(day, method, x, seed) for x, seed in zip(day.prompts, streams)]
        with day.session(method):
            for rows in (slice(2, 3), slice(0, 3), slice(2, 3)):
                got = day.write(ids[rows], attention_mask=mask[rows])
                if rows.start == 0: day.same([x[:5] for x in got], [x[0][:5] for x in alone], "a batch of three", name)
            day.same(got, day.write(day.prompts[2]), "a batch of one after it", name)


def with_seed(day, method, ids, seed):
    with day.session(method, seed=[seed]): return day.write(ids)


@scene("beams, prompt lookup and an assistant")
def searches(day):
    for name, method in day.methods("decode"):
        for what in ("beams", "prompt lookup", "assistant"):
            if WANTED[what][0](method): day.like(WANTED[what][1](day, day.model, method), what, name)


@scene("a chat of three turns, with a crop")
def chats(day):
    for name, method in day.methods("decode"):
        if name != "h2o":
            day.like(chat(day, day.model, method), "chat", name)
            continue
        try: chat(day, day.model, method)
        except ValueError as error: day.same("evicted" in str(error), True, "chat", name, error)
        else: day.same("an answer", "a ValueError that says what was evicted", "chat", name)


@scene("two models and their sessions in turn, and a thread for each")
def two_models(day):
    other = copy.deepcopy(day.model)
    both = day.model, other
    for name, method in day.methods("decode"):
        want, found = answers_of(day, day.model, method, 1)[0], {}
        with day.session(method), day.session(method, other):
            for model in (*both, day.model): day.same(day.write(model=model), want, "two models", name)
            def work(model): found[model] = day.write(model=model)
            workers = [threading.Thread(target=work, args=(model,)) for model in both]
            for x in workers: x.start()
            for x in workers: x.join()
            for model in both: day.same(found.get(model), want, "in a thread", name)


class Broken(Exception): pass


@scene("an exception in the middle of an answer, and in the middle of a recording")
def exceptions(day):
    for name, method in day.methods("decode"):
        want, calls = answers_of(day, day.model, method, 1)[0], [0]
        def breaks(*args):
            calls[0] += 1
            if calls[0] == 6: raise Broken
        with day.session(method):
            hook = day.model.get_decoder().layers[-1].register_forward_pre_hook(breaks)
            with contextlib.suppress(Broken): day.write()
            hook.remove()
            day.same(day.write(), want, "after an exception", name)
        own = graphs.decoded_in_graph
        def fails(*args):
            out = own(*args)
            if recording(): raise Broken
            return out
        with day.session(method):
            with mock.patch.object(graphs, "decoded_in_graph", fails), contextlib.suppress(Broken): day.write()
            day.same(day.write(), want, "after a recording that broke off", name)


def recording(): return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@scene("200 answers in one session: is memory flat?")
def memory(day):
    if day.device.type != "cuda": return
    held = {}
    for name in [x for x in ("santa", "saap") if x in day.names]:
        with day.session(method_of(name)):
            for i in range(200 if name == "santa" else 60):
                day.write(day.prompts[i % 3], max_new_tokens=5)
                if i == 20: gc.collect()
                if i in (20, 59, 199): held[name, i] = torch.cuda.memory_reserved() / 2**20
        first, last = held[name, 20], max(x for (other, i), x in held.items() if other == name)
        day.same(last <= first + 8, True, "memory in MiB", held)
    print("     ", {f"{name}, answer {i}": f"{x:.0f} MiB reserved" for (name, i), x in held.items()})


@scene("sparse-nb eval, every method in one grid")
def evaluation(day):
    from sparse_nb import cli
    roles = {what: [x for x, _ in day.methods(what) if x not in ("exact", "one_list", "then")]
             for what in ("decode", "prefill")}
    with tempfile.TemporaryDirectory() as folder:
        for what, names in roles.items():
            if not names: continue
            out, said = Path(folder) / f"{what}.jsonl", io.StringIO()
            asked = ["eval", "--model", "pocket", "--lengths", "512", "--seeds", "2", "--out", str(out)]
            asked += [x for n in names for x in (f"--{what}", METHODS[n].path.partition(":")[2].lower())]
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                with contextlib.suppress(SystemExit): cli.main(asked)
            if not out.exists(): raise AssertionError(said.getvalue())
            jobs = [json.loads(x) for x in out.read_text().splitlines()[1:]]
            failed = [x["failed"] for x in jobs if "failed" in x]
            whose = lambda job, row: row["decode"] if what == "decode" else job["prefill"]
            answered = {whose(x["job"], row) for x in jobs for row in x.get("rows", ())}
            day.same(failed, [], "eval", what)
            day.same(len(answered), len(names) + 1, "eval", what, answered)


@scene("README's Python as it stands, twice")
def readme(day):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks
    here, said = functools.partial(pocket.load, "cuda"), []
    for _ in range(2):
        for code in blocks:
            with mock.patch.object(pocket, "load", here), contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, "README.md", "exec"), {})
            said.append(out.getvalue())
    day.same(said[len(blocks):], said[:len(blocks)], "README twice")


def prompts_of(tokenizer):
    asked = [make("needle", n, seed=i, tokenizer=tokenizer) for i, n in enumerate((400, 432, 380))]
    return [tokenizer(f"{x.context}{x.question}", return_tensors="pt").input_ids for x in asked]


def wanted(what, name):
    "In a process of its own: what the reference writes."
    torch.set_num_threads(1)
    return REFERENCE[0].want(what, name)


def compiled(name):
    "In a process of its own: a method's kernels, so that Triton has them on disk."
    torch.set_num_threads(1)
    plain, tokenizer = pocket.load()
    day = Day(plain, copy.deepcopy(plain).cuda(), prompts_of(tokenizer), [name])
    day.like = lambda *given: None  # what is wrong is told by the day itself
    with contextlib.redirect_stdout(io.StringIO()): play(day, COMPILED, say=lambda *said, **given: None)


REFERENCE, COMPILED = [], ("prompts", "prefills", "caches", "batches", "searches", "evaluation")


@contextlib.contextmanager
def day_on_a_gpu(names):
    "The pocket model's; references are made by processes that were forked before CUDA was used."
    plain, tokenizer = pocket.load()
    asked = prompts_of(tokenizer)
    REFERENCE[:] = [Day(plain, plain, asked, names)]
    count = min(16, os.cpu_count())
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, names))
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("fork")) as pool:
        yield Day(plain, copy.deepcopy(plain).cuda(), asked, names, pool=pool)


def play(day, scenes, say=print):
    "Rows of what was seen."
    rows = []
    for name in scenes:
        began, before, wrong = time.perf_counter(), day.counted, len(day.wrong)
        try: SCENES[name][1](day)
        except Exception:
            day.wrong.append(f"{name}: {traceback.format_exc(limit=-6)}")
        if day.device.type == "cuda":
            try: torch.cuda.synchronize()
            except Exception as error: day.wrong.append(f"{name}: the GPU failed: {error}")
        rows.append(dict(scene=name, what=SCENES[name][0], seconds=round(time.perf_counter() - began, 1),
                         compared=day.counted - before, wrong=day.wrong[wrong:]))
        say(f"{'ok  ' if len(day.wrong) == wrong else 'FAIL'} {rows[-1]['seconds']:6.1f} s {rows[-1]['compared']:4} "
            f"{SCENES[name][0]}", flush=True)
        for x in day.wrong[wrong:wrong + 12]: say(f"       {x}", flush=True)
    return rows


# on a CPU, inside `make test`

@pytest.fixture(scope="module", params=["short", pytest.param("whole", marks=pytest.mark.slow)])
def small(request):
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 64, (1, n), generator=draw) for n in (40, 44, 36)]
    names = FEW if request.param == "short" else [x for x in METHODS if x != "hash_attention"]
    model = build("llama").double()  # two ways to add up differ by less than any two weights do
    model.get_input_embeddings().weight.data[0].fill_(0.01)  # of a query of zeros all keys would be alike
    return Day(model, copy.deepcopy(model), prompts, names, small=True)


@pytest.mark.budget(40)
@pytest.mark.parametrize("name", [x for x in SCENES if x not in ("memory", "evaluation", "readme")])
def test_a_day_on_a_cpu(small, monkeypatch, name):
    played = []
    monkeypatch.setattr(replay, "captured", taped(played))
    for where, what in ((graphs, "can_graph"), (graphs, "on_a_gpu"), (replay, "on_a_gpu")):
        monkeypatch.setattr(where, what, lambda x: True)
    small.wrong.clear()
    before = small.counted
    SCENES[name][1](small)
    assert not small.wrong, "\n".join(small.wrong)
    assert small.counted > before + len(small.names) / 2 and (played or name in ("prefills", "searches"))


@pytest.mark.gpu
def test_a_day():
    with day_on_a_gpu([*METHODS]) as day: play(day, SCENES)
    assert not day.wrong


def test_every_method_of_the_table_has_a_place_in_the_day():
    for name in METHODS: assert any(callable(getattr(method_of(name, small), x, None)) for small in (False, True)
                                    for x in ("decode", "prefill"))
    assert {*SETTINGS, *TINY, *SHORT, *GRAPHED} <= {*METHODS}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="the methods of the five papers and four others")
    parser.add_argument("--out", type=Path, help="where to write what was seen, as JSON")
    parser.add_argument("--commit", help="of what is tried, for the file")
    parser.add_argument("--scene", action="append", choices=[*SCENES], help="this scene alone")
    given = parser.parse_args()
    if not torch.cuda.is_available(): sys.exit("a day on a GPU needs a CUDA device, got none")
    began = time.perf_counter()
    with day_on_a_gpu([*SHORT] if given.short else [*METHODS]) as day: rows = play(day, given.scene or SCENES)
    seconds = round(time.perf_counter() - began, 1)
    print(f"{torch.cuda.get_device_name()}: {day.counted} comparisons, {len(day.wrong)} wrong, {seconds} s")
    if given.out:
        meta = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, transformers=transformers.__version__,
                    date=f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M}", commit=given.commit,
                    short=given.short, seconds=seconds, wrong=len(day.wrong))
        rows = [row | dict(wrong=[x.strip().splitlines()[-1] for x in row["wrong"]]) for row in rows]
        given.out.write_text(json.dumps(dict(meta=meta, rows=rows), indent=1) + "\n")
    sys.exit(bool(day.wrong))


if __name__ == "__main__": main()
