"""Every index of blocks, with and without a walk, and what baselines choose, on the pocket model and on SmolLM2:
which questions are still answered"""
import math
from dataclasses import replace

import torch

from sparse_nb.methods.quest import Quest
from sparse_nb import TopK
from sparse_nb.core.streams import fold_in
from sparse_nb.evaluate import bits_of
from sparse_nb.grid import Grid, Worker, load_named, task_of
from sparse_nb.hf import attention_override, prefill
from sparse_nb.models.cache import fork_cache
from sparse_nb.models.capturing import capture
from sparse_nb.methods.block_reads import pairs_read
from sparse_nb.methods.flex_prefill import FlexPrefill
from sparse_nb.methods.vertical_slash import VerticalSlash
from sparse_nb.methods.xattention import XAttention
from experiments.answers import evaluate
from sparse_nb.saap import Saap
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.tasks import TASKS, make as make_task, prompt_tokens


PIECED = ("fine4", 32), ("fine4", 16), ("fine4", 8), ("fine4", 4), ("oracle", 16)  # index and keys of a block

def blocks_by(density: float) -> dict:
    """Ways to choose blocks, for prompts, without an exact tail, and for single queries; those whose indexes are one
    stand together."""
    new = lambda pool="mean", **settings: SketchWalk(density=density, pool=pool, refine=1, tail=0, **settings)
    found = {index: new(index=index) for index in ("fine4", "fine16", "mean", "oracle", "random")}
    found |= {f"{index} max": new(index=index, pool="max") for index in ("fine4", "fine16", "mean", "oracle")}
    return found | {"averaged": new(index="mean", heads="averaged"),
                    "mean walk": new(index="mean", walk="softmax"),
                    "mean renormalised": new(index="mean", walk="renormalised"),
                    "fine4 walk": new(index="fine4", walk="softmax"),
                    "paper": SketchWalk.paper(density)}

def deciders(density: float, length: int) -> dict:
    "Smaller blocks and lists of heads, and baselines, that choose keys for single queries; SAAP's near keys count."
    near, means = 4 + 64, dict(pool="mean", refine=1)
    found = {f"{index} of {size}": SketchWalk(size, density, index, **means) for index, size in PIECED}
    found |= {f"{name} each": replace(found[name], heads="each") for name in ("fine4 of 16", "fine4 of 4")}
    found["fine4 each"] = SketchWalk(density=density, heads="each", **means)
    return found | {"quest-16": Quest(density, 16), "quest-64": Quest(density, 64), "topk": TopK(density),
            "saap": Saap(max(1, round(density * length) - near), sinks=4, window=64)}

def readers(density: float, length: int) -> dict:
    "Lists of heads, and baselines that choose blocks of prompts."
    lines, each = max(64, round(density * length / 4)), blocks_by(density)
    found = {f"{name} each": replace(each[name], heads="each")
             for name in ("fine16 max", "fine4 max", "oracle", "oracle max")}
    found |= {f"{name} refined": replace((each | found)[name], refine=2)
              for name in ("fine16 max", "fine16 max each")}
    return found | {"xattention": XAttention(density=density, block=64),
            "vertical-slash": VerticalSlash(lines, lines, rounding="pool")}

def shared_readers() -> dict: # name -> method
    "Rivals that set their own share."
    return {f"flexprefill {x}": FlexPrefill(x, min_keys=64, block=64) for x in (0.9, 0.7)}

def named(wanted: dict, *makers) -> dict:
    "The methods of these names with the share in each name; those whose indexes are one stand together."
    found = {}
    for density, names in wanted.items():
        own = {}
        for make in makers: own |= make(density)
        for name in names: found[name, density] = own[name]
    order = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in found))}
    index = lambda m: str((m.walk is not None, m.index, m.block)) if isinstance(m, SketchWalk) else "other"
    place = {kind: i for i, kind in enumerate(dict.fromkeys(map(index, found.values())))}
    names = sorted(found, key=lambda x: (place[index(found[x])], order[x[0]]))
    return {f"{name} {100 * density:.0f} %": found[name, density] for name, density in names}


RULES = "fine4", "fine16", "mean", "oracle", "random", "averaged"
SMALL = "fine4 of 16", "fine4 of 4", "fine4 of 4 each"
PIECES = "fine4 of 32", "fine4 of 8", "fine4 each", "fine4 of 16 each", "oracle of 16", *SMALL
RIVALS = "quest-16", "quest-64", "topk", "saap"
WALKING = "mean walk", "mean renormalised", "fine4 walk", "paper"
ALL, FEW = (*RULES, *SMALL, *RIVALS, *WALKING), ("fine4", *SMALL, "mean", "oracle", *RIVALS[:2], "saap", *WALKING)
PLAIN = (*RULES[:5], "paper", "quest-16", "quest-64")
SHORT = "fine4", "mean", *WALKING
LONG = *SHORT, *SMALL, "fine16", "oracle", "quest-16"
EASY = "needle", "multikey:keys=2", "multikey:keys=4"
HARD = "needle", "multikey", "kv", "multivalue"
SOME = (*PLAIN, *SMALL, "saap", "mean walk")
AFAR = "fine4", "fine4 of 16", "fine4 of 4", "fine16", "mean", "oracle", "quest-16", "mean walk"
FARTHEST = "fine4", "fine4 of 4", "mean", "oracle", "quest-16"
DECODES = [ # model, tasks, length, density -> names of arms, prompts, tokens of the prompts decoded at once
    ("smollm2", EASY, 2048, {0.05: ("fine4", *SMALL, "oracle", "quest-64"), 0.1: SOME, 0.2: SOME}, 200, 140_000),
    ("smollm2", EASY[1:2], 8000, dict.fromkeys((0.1, 0.2), ("fine4", *SMALL[1:], "mean", "oracle", "quest-64")), 100,
     200_000),
    ("pocket", HARD, 4096, {0.05: FEW, 0.1: ALL, 0.2: ALL}, 200, 410_000),
    ("pocket", [x for x in TASKS if x not in HARD], 4096, {0.1: PLAIN, 0.2: PLAIN}, 200, 410_000),
    ("pocket", HARD, 16384, {0.05: SHORT, 0.1: LONG, 0.2: LONG}, 200, 820_000),
    ("pocket", [x for x in TASKS if x not in HARD], 16384, dict.fromkeys((0.1, 0.2), AFAR), 200, 820_000),
    ("pocket", TASKS, 32768, dict.fromkeys((0.1, 0.2), FARTHEST), 200, 330_000)]
LOSSES = [ # likewise, but the last
    ("smollm2", EASY, 2048, dict.fromkeys((0.05, 0.1, 0.2), (*RULES, *PIECES, *RIVALS, *WALKING)), 200),
    ("smollm2", EASY[1:2], 8000, dict.fromkeys((0.05, 0.1, 0.2), SHORT), 100)]
READ = ("mean", "mean max", "fine16", "fine16 max", "oracle", "oracle max", "paper", "random", "xattention",
        "vertical-slash")
REFINED = "fine16 max refined", "fine16 max each refined"
EACH = "fine4", "fine4 max", "fine4 max each", "fine16 max each", "oracle each", "oracle max each", *REFINED
CORE = ("mean", "mean max", "fine4", "fine16 max", "fine4 max each", "oracle", "oracle max each", "paper",
        "xattention", *REFINED)
READS = [ # model, tasks, length, prompts, density -> names of arms, baselines that set their own share
    ("pocket", (*HARD, "variable_tracking"), 2048, 200, dict.fromkeys((0.1, 0.2), (*READ, *EACH)), True),
    ("pocket", HARD, 8192, 100, dict.fromkeys((0.1, 0.2), (*READ, *EACH)), True),
    ("smollm2", EASY, 2048, 200, {0.2: CORE}, False)]


def grids() -> dict: # name -> `Grid`
    "All of the record."
    found, about = {}, dict(dense_layers=(0, 1))
    for model, tasks, length, prompts, wanted, shared in READS:
        arms = named(wanted, blocks_by, lambda x: readers(x, length)) | (shared_readers() if shared else {})
        found |= {f"{model}.read.{task.replace(':', '.')}.{length}": Grid(
            model, [task], [length], {}, arms, prompts=prompts, chunk=length,
            batch=410_000 if model == "pocket" else 140_000, **about)
            for task in tasks}
    for model, tasks, length, wanted, prompts, batch in DECODES:
        arms = named(wanted, blocks_by, lambda x: deciders(x, length))
        found |= {f"{model}.decode.{task.replace(':', '.')}.{length}": Grid(
            model, [task], [length], arms, prompts=prompts, setup="context", chunk=length, batch=batch, **about)
            for task in tasks}
    return found

def loss_grids() -> dict: # name -> `Grid`
    "Those whose answers' losses are asked, of SmolLM2."
    return {f"{model}.loss.{task.replace(':', '.')}.{length}": Grid(
        model, [task], [length], named(wanted, blocks_by, lambda x: deciders(x, length)), prompts=prompts,
        setup="context", chunk=length, dense_layers=(0, 1))
        for model, tasks, length, wanted, prompts in LOSSES for task in tasks}

def quick_grids() -> dict: # name -> `Grid`
    "A task of each kind in small, on the pocket model."
    some, about = ("fine4", "oracle max", "paper", "mean walk"), dict(prompts=2, dense_layers=(0, 1))
    reads = named({0.3: (*some, "xattention")}, blocks_by, lambda x: readers(x, 700)) | shared_readers()
    decodes = named({0.3: (*some, *RIVALS)}, blocks_by, lambda x: deciders(x, 700))
    return {"pocket.read.needle.700": Grid("pocket", ["needle"], [700], {}, reads, **about),
            "pocket.decode.kv.700": Grid("pocket", ["kv"], [700], decodes, setup="context", **about)}


def sized_alike(
    grid: Grid, # with one task and one length
    tokenizer,
    chat: bool, # through its chat template?
) -> dict: # (tokens of the context, of the prompt, of all) -> (seeds, tokens [b, N])
    "The prompts of a grid with their answers, those of the same sizes together."
    (length,), (task,), found = grid.lengths, grid.tasks, {}
    name, settings = task_of(task)
    for seed in range(grid.seed, grid.seed + grid.prompts):
        e = make_task(name, length, seed=seed, tokenizer=tokenizer, chat=chat, **settings)
        context, prompt = prompt_tokens(e, tokenizer, chat)
        same = next((i for i, (a, b) in enumerate(zip(context, prompt)) if a != b), len(context))
        ids = prompt_tokens(e, tokenizer, chat, f" {e.answer}.")[1]
        some = found.setdefault((same, len(prompt), len(ids)), ([], []))
        some[0].append(seed)
        some[1].append(ids)
    return {sizes: (seeds, torch.tensor(ids)) for sizes, (seeds, ids) in found.items()}


@torch.no_grad()
def forced_loss(
    model,
    ids: torch.Tensor, # contexts, questions and answers [b, N]
    sizes: tuple,      # tokens of the context, and with the question
    methods: dict,     # layer -> method
    observed: list,    # queries of the context in each layer [b, H, c, D]
    cache,             # of the context
) -> torch.Tensor: # [b], nats a token of the answer
    "The loss of answers that are given, where `methods` attend to contexts that were read exactly."
    context, prompt = sizes
    step = next((x for m in methods.values() if isinstance(m, SketchWalk) and (x := m.new_step()) is not None), None)
    def attend(module, query, key, value, mask, scaling=None, **_):
        i, seen = module.layer_idx, dict(causal=True, scale=scaling)
        method, more = methods[i], {}
        if (state := method.new_state()) is not None:
            given = dict(q=torch.cat([observed[i], query], 2)) if "q" in state.observes else {}
            state.append(key, value, **given)
            more["state"] = state
        if step is not None and state is not None: more["step"] = step
        if method.random: more["seed"] = fold_in(0, i)
        return method.decode(query, key, value, **seen, **more).transpose(1, 2), None

    with attention_override(model, attend):
        logits = model(input_ids=ids[:, context:-1], past_key_values=fork_cache(cache), use_cache=True,
                       logits_to_keep=ids.shape[1] - prompt).logits
    return bits_of(logits, ids[:, prompt:]).mean(1) * math.log(2)

def losses(grid: Grid, worker=None, at_once: int = 8) -> list:
    "The loss of each arm for each prompt of the grid."
    worker = Worker(grid) if worker is None else worker
    model, found = worker.model, {}
    arms = {name: worker.at_layers("decode", name) for name in grid.decode}
    for sizes, (seeds, ids) in sized_alike(grid, worker.tokenizer, worker.chat).items():
        for some, x in zip([seeds[i:i + at_once] for i in range(0, len(seeds), at_once)], ids.split(at_once)):
            x = x.to(model.device)
            cache = prefill(model, x[:, :sizes[0]], chunk=grid.chunk)
            observed = [layer.q for layer in capture(model, x[:, :sizes[0]])]
            for name, methods in arms.items():
                nll = forced_loss(model, x, sizes[:2], methods, observed, cache).tolist()
                row = found.setdefault(name, dict(nll=[], seed=[]))
                row["nll"] += [float(f"{y:.5g}") for y in nll]
                row["seed"] += some
    return [dict(part="loss", model=grid.model, task=grid.tasks[0], length=grid.lengths[0], method=name, **row)
            for name, row in found.items()]


def pairs_of(grid: Grid) -> list:
    "What share of the pairs of query and key each arm reads, of the grid's first prompt."
    (length,), (task,) = grid.lengths, grid.tasks
    model, tokenizer = load_named(grid.model)
    prompt = make_task(task.partition(":")[0], length, seed=grid.seed, tokenizer=tokenizer).prompt
    layers = capture(model, torch.tensor([tokenizer(prompt)["input_ids"]], device=model.device))
    some, rows = [layers[i] for i in (2, len(layers) // 2, len(layers) - 1)], []
    for name, method in grid.prefill.items():
        if not hasattr(method, "pattern"): continue
        shares = [pairs_read(method, x.q, x.k, seed=0).mean() / pairs_read(None, x.q, x.k).mean() for x in some]
        rows.append(dict(part="pairs", model=grid.model, length=length, method=name,
                         density=float(f"{float(sum(shares) / len(shares)):.4g}"), seed=[0]))
    return rows


def sketch_walk(recorder):
    "Evaluate both models; losses of given answers, and shares of pairs. Raises as `evaluate`."
    wanted = quick_grids() if recorder.quick else grids()
    about = evaluate(recorder, wanted)
    for name, grid in (list(wanted.items())[-1:] if recorder.quick else loss_grids().items()):
        recorder.rows += losses(grid)
        recorder.say(f"{name}: losses")
    reading = {(grid.model, grid.lengths[0]): grid for grid in wanted.values() if len(grid.prefill) > 1}
    for (model, length), grid in reading.items():
        recorder.rows += pairs_of(grid)
        recorder.say(f"{model}, {length} tokens: pairs counted")
    return about
