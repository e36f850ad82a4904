"""What every method costs a model in right answers, at one setting each, beside what it reads and how far off it is:

    python -m benchmarks.run answers [--model FOLDER]
"""
import gc
import math
import os
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.one_list import OneList
from sparse_nb.methods.quest import Quest
from sparse_nb import Streaming, TopK, TopP, Uniform
from sparse_nb.core.settings import read_method
from sparse_nb.delta import Delta, delta_prefill
from sparse_nb.evaluate import accuracy
from sparse_nb.eviction import H2O, SnapKV
from sparse_nb.grid import load_named, task_of
from sparse_nb.hash_attention import HashAttention
from sparse_nb.metrics import paired_interval
from sparse_nb.models.capturing import Captured, capture
from sparse_nb.compose import Then
from sparse_nb.lsh import KDEformer, Reformer
from sparse_nb.methods.block_controls import OracleBlocks, RandomBlocks
from sparse_nb.methods.block_reads import pairs_read
from sparse_nb.methods.hip import HiP
from sparse_nb.methods.xattention import XAttention
from sparse_nb.methods.flex_prefill import FlexPrefill
from sparse_nb.methods.vertical_slash import VerticalSlash
from sparse_nb.ruler import RULER
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.tasks import make, prompt_tokens, reply_tokens
from sparse_nb.vattention import VAttention
from benchmarks.generate import random_networks, with_networks
from benchmarks.recorder import read_record
from benchmarks.workers import GivenUp, filled_in, lacking

SHARE, LENGTH, PROMPTS, WATCHED = 0.1, 16384, 30, 1
# what a method does -> prompts at once; "listen": it decodes, and observes queries of a prompt, which is read for it;
# "blocks": it reads prompts without kernels of its own, ten of each task; "context": it decodes the question, too, ten
ROLES = {"decode": 10, "listen": 5, "prompt": 1, "blocks": 1, "context": 10}
CONTEXT = "_context"       # ends the names of methods of the role "context"
TOGETHER = 6               # methods of a cell that are evaluated, and written, at once: what is stopped loses no more
READ = "prompt", "blocks"  # roles of methods that read prompts
TASKS = tuple(task for task in RULER if task != "ruler_qa_2")  # HotpotQA is not to be had from a package index
GUESSED = {"qasper": 0.5, "mmlu": 0.25}  # share of the points that guessing has
SMALL = {"pocket": (("kv", 2048), ("frequent_words", 2048), ("multikey", 4096), ("multivalue", 4096)),
         "smollm2": (("needle", 2048), ("multikey:keys=4", 1024), ("needle", 4096))} # what they can do


def methods_of(role: str) -> dict:
    """name -> method of a role, at the settings of the one table (`benchmarks.configurations`), and a few beside them.

    A name stands for one setting: records know methods by it. Networks that are "random" are drawn for the model.
    """
    if role == "listen": return {"double_sparsity": DoubleSparsity(SHARE), "snapkv": SnapKV(SHARE), "h2o": H2O(SHARE)}
    if role == "prompt":
        return {"delta": Delta(), "sketch_walk_prompt": SketchWalk(), "flex_prefill": FlexPrefill(),
                "vertical_slash": VerticalSlash(500, 1500), "streaming_prompt": Streaming(4, 2048)}
    if role == "blocks":
        return {"xattention": XAttention(density=0.2), "hip": HiP(), "oracle_blocks": OracleBlocks(SHARE),
                "random_blocks": RandomBlocks(SHARE)}
    signs = lambda share: HashAttention(share, maps="random")
    sampled = lambda **given: VAttention(**given, delta=0.1, topk=0.05, base=0.025, predictor=signs(0.05))
    found = {"santa": Santa(128), "vattention": sampled(eps=0.3, plugin="plain"), "saap": Saap(SHARE),
             "sketch_walk": SketchWalk(density=SHARE), "quest": Quest(SHARE), "adamas": Adamas(SHARE)}
    if role == "context": return {name + CONTEXT: method for name, method in found.items()}
    own = VAttention(0.1, 0.05, sinks=4, window=64, topk=0.05, base=0.01, predictor=Adamas(SHARE))
    return found | {
        "santa_int8": Santa(128, keys="int8"), "vattention_eps": sampled(eps=0.1), "vattention_adamas": own,
        "saap_5": Saap(0.05), "one_list": OneList(Quest(SHARE)), "hash_attention": signs(SHARE),
        "magicpig": MagicPIG(8, 32), "magicpig_6": MagicPIG(), "topk": TopK(SHARE), "topp": TopP(0.9),
        "streaming": Streaming(128, SHARE), "streaming_4": Streaming(4, SHARE), "uniform": Uniform(SHARE),
        "then": Then(Quest(0.2), Santa(64)), "reformer": Reformer(32),
        "kdeformer": KDEformer(32)}


class Cell(NamedTuple):
    "Prompts of one task that the methods of one role are asked"
    role: str    # one of `ROLES`
    model: str
    task: str    # as of `task_of`
    length: int  # tokens
    seeds: range
    names: tuple = ()  # of the methods that are evaluated; none: `names_of` the role

def names_of(role: str) -> list:
    "What is evaluated in a role: its methods, and of \"decode\" exact attention, which all are compared with."
    return ["exact"] * (role == "decode") + [*methods_of(role)]

@cache
def networks(name: str) -> str:
    "The file of random networks of HashAttention for a model of this name."
    config = loaded(name)[0].config.get_text_config().to_dict()
    return random_networks(config, Path(tempfile.mkdtemp()) / "networks.safetensors")

def methods_in(cell: Cell) -> dict:
    "name -> method of a cell, with its networks; None is exact attention."
    every = {"exact": None} | methods_of(cell.role)
    return {name: every[name] and with_networks(every[name], networks(cell.model))
            for name in cell.names or names_of(cell.role)}

@cache
def loaded(name: str) -> tuple:
    "A model and its tokenizer, from the folder that the environment names, or as `load_named` finds it."
    return load_named(os.environ.get(f"{name.upper()}_FOLDER", name))

def tasks_of(model: str) -> tuple: # of (task, tokens)
    "What a model is asked: the small ones what they can do, others RULER's tasks, at as many tokens as they hold."
    if model in SMALL: return SMALL[model]
    held = LENGTH if model == "qwen" else getattr(
        loaded(model)[0].config.get_text_config(), "max_position_embeddings", LENGTH)
    return tuple((task, min(LENGTH, held)) for task in TASKS)

def cells(models: list, quick: bool = False) -> list:
    """Decoding first, "context" last; between them the small models first, and ten prompts of each task before the next
    ten."""
    if quick: return [Cell(role, model, "kv", 640, range(2)) for model in models for role in ROLES]
    asked = [(model, *task) for model in models for task in tasks_of(model)]
    parts = lambda size: [range(a, a + size) for a in range(0, PROMPTS, size)]
    found = [Cell("decode", *task, seeds) for seeds in parts(ROLES["decode"]) for task in asked]
    for own in [x for x in asked if x[0] in SMALL], [x for x in asked if x[0] not in SMALL]:
        found += [Cell(role, *task, seeds) for seeds in parts(10) for role in ("prompt", "listen") for task in own]
        found += [Cell("blocks", *task, range(10)) for task in own]
    return found + [Cell("context", *task, range(10)) for task in asked]

def of_cell(row: dict) -> tuple:
    "What tells a row's cell from others."
    return row["role"], row["model"], row["task"], row["length"], *row["seeds"]


def first_prompt(model: str, task: str, length: int, seed: int = 0) -> list:
    "Tokens of a prompt of a cell's task. Raises ValueError if the model holds too few for it, and as `make`."
    decoder, tokenizer = loaded(model)
    name, settings = task_of(task)
    chat = bool(tokenizer.chat_template)
    prompt = make(name, length, seed=seed, tokenizer=tokenizer, chat=chat, **settings)
    tokens = prompt_tokens(prompt, tokenizer, chat)[1]
    held = getattr(decoder.config.get_text_config(), "max_position_embeddings", math.inf)
    if (takes := len(tokens) + reply_tokens(prompt, tokenizer, chat)) > held:
        raise ValueError(f"prompt and reply must have at most the {held} tokens that the model holds, got {takes}")
    return tokens

def check_prompts(every: list):
    "Make a prompt of each task of the cells. Raises ValueError that names all tasks of which there is none, and why."
    failed = []
    for asked in dict.fromkeys(cell[1:4] for cell in every):
        try: first_prompt(*asked)
        except (ValueError, OSError) as error: failed.append("{}, {} at {} tokens: ".format(*asked) + str(error))
    if failed: raise ValueError(f"no prompt of {'; '.join(failed)}")

def evaluate(cell: Cell) -> list:
    """A row for each method: what it got right, prompt by prompt, or of RULER's tasks the share of answers that it
    found, its score; and of the first prompts what it read, and its error."""
    model, tokenizer = loaded(cell.model)
    task, settings = task_of(cell.task)
    methods, given = methods_in(cell), dict(task_settings=settings, chat=bool(tokenizer.chat_template),
                                            batch=ROLES[cell.role])
    if cell.role in READ:
        ask = lambda name, how: accuracy(model, tokenizer, task, cell.length, {name: None}, prefill=how,
                                         chunk=cell.length, prompts=len(cell.seeds), seed=cell.seeds[0], **given)
        found = pd.concat([ask(*way) for way in methods.items()])
        shares = shares_of_pairs(cell, methods) if 0 in cell.seeds else {}
        return [_row(cell, name, own) | shares.get(name, {}) for name, own in found.groupby("method", sort=False)]
    if cell.role == "context": given |= dict(setup="context")
    watched = len(range(min(WATCHED, len(cell.seeds)))) if 0 in cell.seeds else 0
    ask = lambda first, count: accuracy(model, tokenizer, task, cell.length, methods, seed=first, prompts=count,
                                        watch=first < watched, **given)
    parts = (cell.seeds[0], watched), (cell.seeds[0] + watched, len(cell.seeds) - watched)
    found = pd.concat([ask(first, count) for first, count in parts if count])
    return [_row(cell, name, own) for name, own in found.groupby("method", sort=False)]

def _row(cell, name, own):
    "The row of a method, of a table that `accuracy` makes"
    row = dict(zip(cell._fields[:4], cell), seeds=[cell.seeds[0], cell.seeds[-1] + 1], method=name)
    if "density" in own and name != "exact":
        own_bytes = (own.bytes / own.dense_bytes).mean()
        row |= {x: round(own[x].mean(), 5) for x in ("density", "error")} | dict(bytes=round(own_bytes, 5))
    score = own.characters.round(4) if cell.task in RULER else own.exact.astype(int)
    return row | dict(right=score.tolist(), answers=own.answer.tolist())

def share_of_pairs(method, x: Captured) -> float:
    "The share of a prompt's pairs of query and key that a method reads in a layer, mean over its heads."
    if isinstance(method, Streaming): method = Delta(method.window, method.sinks, correction="none", tail=0)
    n, tail = x.k.shape[2], getattr(method, "tail", 0)
    if x.layer < getattr(method, "dense_layers", 0): return 1.0
    if isinstance(method, Delta):  # which keys it reads depends on their number alone
        given = torch.zeros(3, 1, 1, n, 8, device=x.q.device)
        return float(delta_prefill(*given, **vars(method), return_stats=True, backend="torch")[1].density)
    q, k = x.q[:, :, :n - tail], x.k[:, :, :n - tail]
    every = n * (n + 1) / 2
    return float((pairs_read(method, q, k, seed=0) + every - (n - tail) * (n - tail + 1) / 2).mean() / every)

def shares_of_pairs(cell: Cell, methods: dict) -> dict:
    "name -> density: the share of pairs read of the cell's first prompt, mean over layers, and of each layer."
    model = loaded(cell.model)[0]
    layers = capture(model, torch.tensor([first_prompt(*cell[1:4], cell.seeds[0])], device=model.device))
    found = {name: [share_of_pairs(method, x) for x in layers] for name, method in methods.items()}
    return {name: dict(density=round(sum(x) / len(x), 5), layers=[round(y, 4) for y in x])
            for name, x in found.items()}


def needed(
    task: str,    # whose points
    least: float, # share of those beyond what guessing has; 0: any
) -> float:       # mean score of exact attention with which a task counts: others test nothing
    "Half-way between guessing and all for a `least` of 0.5."
    guessed = GUESSED.get(task.partition(":")[0], 0)
    return least and guessed + least * (1 - guessed)

def gains(
    rows: list,          # of a record of `answers`
    model: str,          # its name there
    least: float = 0.5,  # as of `needed`
) -> pd.DataFrame:       # method, task, length, exact, own (1 for right, or a score): a row for each prompt
    "Answers of each method beside those of exact attention to the same prompts."
    flat = pd.DataFrame([(row["method"], row["task"], row["length"], row["seeds"][0] + i, x) for row in rows
                         if row["model"] == model for i, x in enumerate(row["right"])],
                        columns=["method", "task", "length", "seed", "own"])
    prompt = ["task", "length", "seed"]
    exact = flat[flat.method == "exact"].drop(columns="method").rename(columns=dict(own="exact"))
    can = exact.groupby(prompt[:2]).exact.transform("mean") >= exact.task.map(lambda task: needed(task, least))
    return flat[flat.method != "exact"].merge(exact[can], on=prompt)

def columns(
    rows: list,          # of a record of `answers`
    model: str,          # its name there
    watched=None,        # rows that say what was read; None: the same
) -> pd.DataFrame:       # a row for each method
    """Share of keys (of pairs, for prompts) and of bytes read, error of outputs, and right answers lost against exact
    attention, points, with a paired interval of 95 %; over the tasks that count (`needed`)."""
    found, watched = {}, rows if watched is None else watched
    for method, own in gains(rows, model).groupby("method", sort=False):
        low, lost, high = (100 * x for x in paired_interval((own.exact - own.own).astype(float)))
        read = pd.DataFrame([row for row in watched if (row["model"], row["method"]) == (model, method)
                             and "density" in row]).reindex(columns=["density", "bytes", "error"])
        found[method] = dict(read.mean(), prompts=len(own), exact=own.exact.sum(), right=own.own.sum(), lost=lost,
                             low=low, high=high)
    if not found: return pd.DataFrame(columns=["density", "bytes", "error", "prompts", "exact", "right", "lost"])
    return pd.DataFrame(found).T.astype(dict(prompts=int))

def scores(
    rows: list,         # of a record of `answers`
    model: str,         # its name there
    least: float = 0.5, # as of `needed`
) -> pd.DataFrame:      # task, tokens, prompts, score (mean, from 0 to 1), and "not counted" where it is under `least`
    "What exact attention scores on each task."
    own = [(row["task"], row["length"], x) for row in rows if (row["model"], row["method"]) == (model, "exact")
           for x in row["right"]]
    found = pd.DataFrame(own, columns=["task", "tokens", "score"]).groupby(["task", "tokens"], sort=False).score
    found = found.agg(["size", "mean"]).rename(columns=dict(size="prompts", mean="score")).reset_index()
    counts = found.score >= found.task.map(lambda task: needed(task, least))
    return found.assign(note=["" if x else "not counted" for x in counts])

def indexes(model: str) -> pd.DataFrame: # method -> index_bytes (of a key and head), index_share (of key and value)
    "What a decoding step reads of an index, at the size of the model's heads in bfloat16."
    config = loaded(model)[0].config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    read = {name: getattr(method, "predictor", method).index_bytes(size) for role in ROLES if role not in READ
            for name, method in methods_of(role).items()}
    return pd.DataFrame({name: dict(index_bytes=x, index_share=x / (4 * size)) for name, x in read.items()}).T

def printed(rows: list, model: str) -> str:
    "What the command prints of a model: what exact attention scores, and the columns of the one table but for times."
    names = {role: [*dict.fromkeys(row["method"] for row in rows if (row["model"], row["role"]) == (model, role))]
             for role in ROLES}
    found, index = columns(rows, model), indexes(model)
    parts = [f"{model}: mean score of exact attention; tasks with less than half of the points are not counted",
             scores(rows, model).round(3).to_string(index=False)]
    for said, roles in (("decoding the answer", ("decode", "listen")), ("decoding the question, too", ("context",)),
                        ("reading the prompt", READ)):
        own = found[found.index.isin([name for role in roles for name in names[role]])]
        if own.empty: continue
        if roles == READ: own = own.rename(columns=dict(density="pairs")).drop(columns=["bytes", "error"])
        else: own = own.rename(columns=dict(density="keys")).join(index)
        parts += [f"{model}: {said}; lost: points, with an interval of 95 % from low to high",
                  own.round(3).to_string(na_rep="-")]
    if found.empty: parts.append("no task counts, so nothing can be said of what methods lose")
    return "\n\n".join(parts)

def by_setup(
    rows: list,         # of a record of `answers`
    model: str,         # its name there
) -> pd.DataFrame:      # method, setup, lost, low, high (points, paired 95 %), prompts
    """What methods lose that decode the question, too ("context"), and of the same prompts where they decode the answer
    alone ("prompt")."""
    found = gains(rows, model)
    found["setup"] = found.method.str.endswith(CONTEXT).map({True: "context", False: "prompt"})
    found["method"] = found.method.str.removesuffix(CONTEXT)
    key = ["method", "task", "length", "seed"]
    found = found[found.set_index(key).index.isin(found[found.setup == "context"].set_index(key).index)]
    lines = []
    for (method, setup), own in found.groupby(["method", "setup"], sort=False):
        low, lost, high = (100 * x for x in paired_interval((own.exact - own.own).astype(float)))
        lines.append(dict(method=method, setup=setup, lost=lost, low=low, high=high, prompts=len(own)))
    return pd.DataFrame(lines, columns=["method", "setup", "lost", "low", "high", "prompts"])

def hours(every: list, processes: int) -> float:
    "How long cells will take, if each method takes as long for a prompt as those of its role for the first one alone."
    took = {}
    for role in dict.fromkeys(cell.role for cell in every):
        first = next(cell for cell in every if cell.role == role)
        began = time.monotonic()
        evaluate(first._replace(seeds=range(1)))
        took[role] = (time.monotonic() - began) / _count(first)
    return sum(took[cell.role] * len(cell.seeds) * _count(cell) for cell in every) / processes / 3600

def _count(cell): return len(cell.names or names_of(cell.role)) # methods that are evaluated

def methods_with(path: Path) -> dict:
    """role -> name -> method as text: those of today, and others that a record has rows of.

    Raises ValueError where a name of today stands for another setting in the record, whose rows would be taken for it.
    """
    found = read_record(path)["meta"].get("methods", {}) if path.exists() else {}
    for role in ROLES:
        for name, method in methods_of(role).items():
            was = found.setdefault(role, {}).get(name)
            if was and read_method(was, stored=True) != method:
                raise ValueError(f"{path.name} must have {name} of role {role} as {method!r}, got {was}")
            found[role][name] = repr(method)
    return found

def answers(recorder):
    """Evaluate what the file lacks, cell by cell and method by method, write it after each cell, and print what is
    known of each model. ValueError before all else for tasks of which there is no prompt, after all else for cells that
    failed; else raises as `load_named`."""
    models = [recorder.model] if recorder.model else ["pocket"] if recorder.quick else [
        "qwen"] * recorder.gpu + [*SMALL]
    every, about = cells(models, recorder.quick), dict(methods=methods_with(recorder.out))
    names, failed = (lambda cell: names_of(cell.role)), None
    left = lacking(recorder, every, of_cell, names, TOGETHER)
    check_prompts(left)
    recorder.say(f"{len(left)} parts are left; each is written to {recorder.out} when it is done, and "
                 "the same command goes on where it was stopped")
    if left and recorder.model and not recorder.quick:
        recorder.say("one prompt of each kind is timed, to say how long all take")
        recorder.say(f"about {hours(left, max(1, torch.cuda.device_count())):.1f} hours")
    if recorder.gpu:  # other processes do the work, and need the memory
        loaded.cache_clear()
        gc.collect()
        torch.cuda.empty_cache()
    try: filled_in(recorder, evaluate, every, of_cell, about, names, TOGETHER)
    except GivenUp as error: failed = error
    for model in dict.fromkeys(cell.model for cell in every): recorder.say(printed(recorder.rows, model))
    recorder.say("Times are not of this command: `sparse-nb bench --decode METHOD --model FOLDER` takes them")
    if failed: raise ValueError(f"not evaluated: {failed}")
    return about
