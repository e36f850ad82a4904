"""Every correction of a sparse prefill on the pocket model and on SmolLM2: what prose costs, and which questions
are still answered"""
from dataclasses import replace

import torch

from sparse_nb import Streaming
from sparse_nb.delta import Delta, delta_prefill
from sparse_nb.grid import Grid, load_named
from sparse_nb.models.capturing import capture
from sparse_nb.methods.flex_prefill import FlexPrefill
from sparse_nb.methods.hip import HiP
from sparse_nb.methods.vertical_slash import VerticalSlash
from experiments.answers import evaluate
from sparse_nb.text import documents, speeches, windows


CORRECTIONS = "recompute", "delta", "tangent"  # Eq. 5, Eq. 6 as published, ours

def arms(sizes, gammas, tails=(0,)) -> dict:
    "Sinks and window, with and without what anchors teach."
    found = {}
    for size in sizes:
        for tail in tails:
            own, end = Delta(size, tail=tail, correction="none"), " tail" if tail else ""
            found[f"w{size} streaming{end}"] = own
            for gamma in gammas:
                found[f"w{size} g{gamma} aligned{end}"] = replace(own, gamma=gamma, correction="aligned")
                found |= {f"w{size} g{gamma} {x}{end}": Delta.paper(size, gamma, tail=tail) if x == "delta" else
                          replace(own, gamma=gamma, correction=x) for x in CORRECTIONS}
    return found

def based(length: int) -> dict:
    "Patterns as bases: alone, with Eq. 6, and with the tangent, which for them is a heuristic."
    bases = {"vertical-slash": VerticalSlash(length // 16, length // 8, rounding="pool"),
             "flexprefill": FlexPrefill(0.9, min_keys=length // 16, block=64),
             "hip": HiP(((64, length // 2), (8, length // 4), (2, length // 8)), sinks=128, window=256)}
    return bases | {f"{name} {x}": Delta.paper(base=base, tail=0) if x == "delta" else Delta(base=base, tail=0)
                    for name, base in bases.items() for x in ("delta", "tangent")}


def lent(tail: int = 0) -> dict:
    "Streaming, HiP and MInference's lines with a few keys a row: uncorrected, with Eq. 6, and with the tangent."
    hip = HiP(((64, 256), (8, 16), (1, 2)), sinks=4, window=1, rounding="none", block=32)
    lines = VerticalSlash(6, 6, sinks=4, window=4, rounding="none")
    bases = {"streaming": Delta.paper(8, 16, tail=tail), "HiP": Delta.paper(gamma=16, base=hip, tail=tail),
             "MInference": Delta.paper(gamma=16, base=lines, tail=tail)}
    return {f"{name} {x}": own if x == "delta" else replace(own, correction=x)
            for name, own in bases.items() for x in ("none", "delta", "tangent")}


TEXTS = [("pocket", 4096, (32, 128, 512), (16, 64)), ("smollm2", 2048, (128, 512), (16, 64)),
         ("smollm2", 8000, (512, 2048), (4, 16, 64))]
EASY = "needle", "multikey:keys=2", "multikey:keys=4"
TASKS = [("pocket", ("multikey", "kv", "variable_tracking", "multiquery"), 1024, (8,), (8, 16)),
         ("pocket", ("multikey", "multivalue"), 4096, (8,), (16, 64)), ("pocket", ("multikey",), 16384, (8,), (64,)),
         ("smollm2", EASY, 1024, (64,), (16, 64)), ("smollm2", EASY, 2048, (128,), (16, 64))]

def grids() -> dict: # name -> `Grid`
    "All of the record, the quickest first."
    found = {}
    for model, length, sizes, gammas in TEXTS:
        found[f"{model}.text.{length}"] = Grid(
            model, ["text"], [length], {}, arms(sizes, gammas) | (based(length) if length == 8000 else {}), prompts=8,
            texts=speeches(2000)[::-1], every=length, short=512, batch=length)
    for model, tasks, length, sizes, gammas in TASKS:
        found |= {f"{model}.{task.replace(':', '.')}.{length}": Grid(
            model, [task], [length], {}, arms(sizes, gammas, (0, 128)), prompts=200, chunk=length,
            batch=min(200 * length, 400_000)) for task in tasks}
    return found

def quick_grids() -> dict: # name -> `Grid`
    "A text and a task in small, on the pocket model."
    methods = {"streaming": Streaming(4, 16)} | arms((16,), (16,))
    return {"pocket.text.512": Grid("pocket", ["text"], [512], {}, methods, prompts=2, texts=speeches(2016)[::-1],
                                    every=512, short=64),
            "pocket.multikey.700": Grid("pocket", ["multikey"], [700], {}, methods, prompts=3)}


def lent_grids(quick: bool = False) -> dict: # name -> `Grid`
    "Two tasks, and a window of each of thirty texts of five genres, on the pocket model."
    texts = [text for some in documents(each=6).values() for text in some]
    found = {task: Grid("pocket", [task], [1024], {}, lent(128), prompts=prompts, batch=4096)
             for task, prompts in ({} if quick else {"multikey": 40, "variable_tracking": 20}).items()}
    return found | {"text": Grid("pocket", ["text"], [1024], {}, lent(), prompts=1 if quick else len(texts),
                                 texts=texts, every=1024, batch=2048)}


def keys_read(model: str, length: int, methods: dict) -> list:
    "How many keys a row reads, anchors and tail included."
    it, tokenizer = load_named(model)
    ids = windows(tokenizer, speeches(2000)[::-1], length, 1)[0].ids
    layers = capture(it, ids.to(it.device))
    some, rows = [layers[i] for i in (0, len(layers) // 2, len(layers) - 1)], []
    for name, method in methods.items():
        s = method if isinstance(method, Delta) else Delta(base=method, correction="none", tail=0)
        given = {x: getattr(s, x) for x in s.__dataclass_fields__}
        asked = some if s.base is not None else some[:1]
        stats = [delta_prefill(x.q, x.k, x.v, scale=x.scale, return_stats=True, **given)[1] for x in asked]
        means = [(x.keys_per_query.mean(), x.density.mean()) for x in stats]
        keys, density = torch.tensor(means).mean(0).tolist()
        rows.append(dict(part="work", model=model, length=length, method=name, keys=round(keys, 1),
                         density=float(f"{density:.4g}"), seed=[0]))
    return rows


def delta(recorder):
    "Evaluate both models, and count the keys. Raises as `evaluate`."
    wanted = quick_grids() if recorder.quick else grids()
    about = evaluate(recorder, wanted)
    for grid in (x for x in wanted.values() if x.texts):
        methods = {name: x for name, x in grid.prefill.items() if name not in ("exact", "streaming")}
        recorder.rows += keys_read(grid.model, grid.lengths[0], methods)
        recorder.say(f"{grid.model}, {grid.lengths[0]} tokens: keys counted")
    return about


def delta_bases(recorder):
    "Evaluate the pocket model with each base, without and with a correction, and count the keys. Raises as `evaluate`."
    about = evaluate(recorder, lent_grids(recorder.quick))
    recorder.rows += keys_read("pocket", 1024, lent())
    return about
