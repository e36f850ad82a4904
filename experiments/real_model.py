"""Every method on a model of 1.5 billion weights whose keys are biased, at 16,384 tokens, beside the two small ones:
right answers, what was read, and ideas for indexes and for prompts"""
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch

from sparse_nb.methods.adamas import Adamas, HadamardCodes, hadamard
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.one_list import OneList
from sparse_nb.methods.quest import Quest
from sparse_nb.core.exact import grouped, promote
from sparse_nb import Exact, Streaming, TopK
from sparse_nb.core.selection import Selection
from sparse_nb.delta import Delta
from sparse_nb.evaluate import accuracy
from sparse_nb.eviction import H2O, SnapKV
from sparse_nb.grid import task_of
from sparse_nb.metrics import paired_interval
from sparse_nb.methods.flex_prefill import FlexPrefill
from sparse_nb.methods.vertical_slash import VerticalSlash
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vattention import VAttention
from benchmarks.answers import LENGTH, SHARE, SMALL, loaded, shares_of_pairs
from benchmarks.workers import filled_in

PROMPTS, AT_ONCE, FEW = 60, 15, 5 # of each task; of a batch, and of one that is read for a method
TASKS = "needle", "multikey", "kv", "multivalue:keys=1", "multiquery", "frequent_words:others=9", "qa"


@dataclass(frozen=True)
class Product(Adamas):
    "An idea: the codes of Adamas, and in place of the distance their product with the transformed query in 4 bits."
    def topk(self, *given, **more) -> Selection | None:
        "No kernel does this."
        return None

    def values(self, state: HadamardCodes, size: int) -> torch.Tensor:
        "What the codes stand for [B, G, N, size]: -3, -1, 1, 3."
        return 2 * state.codes(size).float() - 3

    def scores(self, q, state, *, scale=None):
        "The product for each key."
        x = hadamard(promote(grouped(q, state.rows.shape[1])))
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
        x = (x / step).round() * step
        return (x @ self.values(state, x.shape[-1]).to(x.dtype).transpose(-1, -2)).reshape(*q.shape[:3], -1)

class CodesAndLengths(HadamardCodes):
    "The codes of each key, and in one more word its root mean square."
    def features(self, k, v, shown=None):
        "The same of each key."
        rms = (promote(k) - self.fit[:, :, None]).square().mean(-1, keepdim=True).sqrt().float()
        return torch.cat([super().features(k, v), rms.view(torch.int32)], -1)

    def write(self, k, v, at, shown=None):
        "No kernel writes these."
        raise NotImplementedError

    def codes(self, size):
        "As `HadamardCodes.codes`."
        own = HadamardCodes()
        own.rows = self.rows[..., :-1]
        return own.codes(size)

@dataclass(frozen=True)
class ProductTimesLength(Product):
    "The same with the length of each key, of two more bytes if it were rounded to bfloat16."
    def new_state(self):
        "`CodesAndLengths`."
        return CodesAndLengths()

    def values(self, state, size):
        "As `Product.values`, times the length."
        return super().values(state, size) * state.rows[..., -1:].contiguous().view(torch.float32)

    def index_bytes(self, head_dim):
        "As of Adamas, and the length."
        return super().index_bytes(head_dim) + 2


def vattention(predictor, delta: float = 0.05) -> VAttention:
    "A relative error of the denominator of at most 0.1."
    return VAttention(0.1, delta, sinks=4, window=64, topk=0.05, base=0.01, predictor=predictor)

def decoders() -> dict:
    "name -> method, of about a tenth of the keys."
    return {"exact": Exact(), "adamas": Adamas(SHARE), "product": Product(SHARE), "quest": Quest(SHARE),
            "magicpig-6x42": MagicPIG(6, 42),
            "sketch_walk": SketchWalk(density=SHARE, pool="mean", refine=1), "saap": Saap(budget=SHARE),
            "vattention+adamas": vattention(Adamas(SHARE)), "vattention+product": vattention(Product(SHARE))}

def only_read() -> dict:
    "name -> method, of which only what they read and their error are measured."
    return {"topk": TopK(SHARE), "streaming": Streaming(4, SHARE), "santa": Santa(128),
            "product-length": ProductTimesLength(SHARE), "magicpig-8x32": MagicPIG(8, 32),
            "magicpig-7x36": MagicPIG(7, 36), "vattention+topk": vattention("oracle"),
            "vattention+product-length": vattention(ProductTimesLength(SHARE)),
            "vattention+adamas-.1": vattention(Adamas(SHARE), 0.1),
            "vattention+adamas-top.1": replace(vattention(Adamas(SHARE)), topk=0.1)}

def need_queries() -> dict:
    "name -> method whose index needs the queries of a prompt, which is read anew for each."
    return {"double_sparsity": DoubleSparsity(SHARE), "snapkv": SnapKV(SHARE), "h2o": H2O(SHARE)}

def quests() -> dict:
    """name -> Quest with pages of other sizes, with one list a group, and with exact attention in the first two layers,
    as its paper has it."""
    late = lambda method: lambda layer: method if layer > 1 else None
    return {"quest": Quest(SHARE), "quest-8": Quest(SHARE, 8), "quest-4": Quest(SHARE, 4),
            "quest-late": late(Quest(SHARE)), "quest-8-late": late(Quest(SHARE, 8)),
            "quest-one_list": OneList(Quest(SHARE))}

def prefills() -> dict:
    "name -> method that reads prompts."
    means = dict(pool="mean", refine=1)
    return {"sketch_walk": SketchWalk(**means), "sketch_walk-max": SketchWalk(pool="max", refine=1),
            "sketch_walk-max-refine": SketchWalk(pool="max", refine=2),
            "sketch_walk-no_tail": SketchWalk(tail=0, **means),
            "delta": Delta(), "flexprefill": FlexPrefill(), "vertical_slash": VerticalSlash(500, 1500)}


# these are evaluated on every prompt, the others on the first ones alone
ON_ALL = {"prompts": ("sketch_walk-max-refine", "delta", "flexprefill", "vertical_slash"),
          "need_queries": ("double_sparsity", "snapkv")}
FIRST = {"prompts": 20, "need_queries": 10}

def on(cell, methods: dict) -> dict:
    "Those of the methods that are evaluated on a cell's prompts."
    return {name: x for name, x in methods.items() if cell.seeds[0] < FIRST[cell.part] or name in ON_ALL[cell.part]}

PARTS = "answers", "need_queries", "prompts", "quest", "read", "pairs"

class Cell(NamedTuple):
    "A batch of prompts of one task, and what is measured on them"
    part: str    # one of `PARTS`
    model: str
    task: str    # as of `task_of`
    length: int  # tokens
    seeds: range

def cells(quick: bool = False, gpu: bool = True) -> list:
    "Those of the record, what decides first; without a GPU those of the small models."
    if quick:
        return [Cell(part, "pocket", "kv", 640, range(2)) for part in PARTS]  # of "pairs" the first prompt
    if not gpu: return [Cell("answers", model, *task, seeds) for seeds in (range(20), range(20, PROMPTS))
                        for model, tasks in SMALL.items() for task in tasks]
    parts = lambda size: [range(a, a + size) for a in range(0, PROMPTS, size)]
    of = lambda part, seeds, tasks=TASKS: [Cell(part, "qwen", task, LENGTH, seeds) for task in tasks]
    batches, tens = parts(AT_ONCE), parts(10)
    found = of("answers", batches[0]) + of("need_queries", tens[0]) + of("prompts", tens[0])
    found += of("quest", tens[0], ("multiquery", "kv")) + of("pairs", range(1), TASKS[1:3])
    found += [x for seeds in batches[1:] for x in of("answers", seeds)]
    found += [x for a in (100, 104) for x in of("read", range(a, a + 4), TASKS[1:4])]
    return found + [x for seeds in tens[1:] for part in ("prompts", "need_queries") for x in of(part, seeds)]

def evaluate(cell: Cell) -> list:
    "A row for each method: what it got right of the cell's prompts, one by one, and of the part \"read\" what it read."
    if cell.part == "pairs":
        shares = shares_of_pairs(cell, prefills() | {"vertical_slash-default": VerticalSlash()})
        return [row_of(cell, name, **found) for name, found in shares.items()]
    model, tokenizer = loaded(cell.model)
    task, settings = task_of(cell.task)
    given = dict(prompts=len(cell.seeds), seed=cell.seeds[0], task_settings=settings,
                 chat=bool(tokenizer.chat_template))
    few = FEW if cell.part in FIRST else len(cell.seeds)
    if cell.part == "prompts":
        read = lambda name, how: accuracy(model, tokenizer, task, cell.length, {name: None}, prefill=how, batch=few,
                                          chunk=cell.length, **given)
        frames = [partial(read, *way) for way in on(cell, prefills()).items()]
    else:
        methods = on(cell, need_queries()) if cell.part == "need_queries" else quests() if cell.part == "quest" else (
            decoders())
        if cell.part == "read": methods |= only_read() | need_queries()
        if cell.part in ("answers", "quest"): methods["exact"] = None
        frames = [lambda: accuracy(model, tokenizer, task, cell.length, methods, batch=few, watch=cell.part == "read",
                                   **given)]
    return [row for make in frames for row in rows_of(cell, make)]

def row_of(cell: Cell, method: str, **found) -> dict:
    "What a row of the record says of a cell and a method, and `found`."
    return cell._asdict() | dict(seeds=[cell.seeds[0], cell.seeds[-1] + 1], method=method) | found

def rows_of(cell: Cell, make: Callable) -> list:
    "A row for each method of a table that `accuracy` makes."
    found = []
    for name, own in make().groupby("method", sort=False):
        row = row_of(cell, name)
        if cell.part == "read":
            row |= {x: round(own[x].mean(), 5) for x in ("density", "error")}
            row["bytes"] = round((own.bytes / own.dense_bytes).mean(), 5)
        found.append(row | dict(right=own.exact.astype(int).tolist(), answers=own.answer.tolist()))
    return found

def of_cell(row: dict) -> tuple:
    "What tells a row's cell from others."
    return row["part"], row["model"], row["task"], row["length"], *row["seeds"]

def right(rows: list, method: str, parts: tuple = PARTS[:4]) -> dict:
    "(model, task, seed) -> is the answer of a method right? Of the first of these parts that asked it."
    found = {}
    for row in sorted(rows, key=lambda row: PARTS.index(row["part"]), reverse=True):
        if row["method"] != method or row["part"] not in parts: continue
        found |= {(row["model"], row["task"], row["seeds"][0] + i): x for i, x in enumerate(row["right"])}
    return found

def gains(
    rows: list,            # of a record of `real_model`
    method: str,           # its name in the part
    part: str = "answers", # one of `PARTS`
    model: str = "qwen",   # likewise
    least: float = 0.5,    # share of its prompts on which exact attention must be right, for a task to count
) -> pd.DataFrame:         # task, exact and own: right or not, a row for each prompt that both were asked
    "Answers of a method beside those of exact attention to the same prompts."
    exact, own = right(rows, "exact", ("answers", "quest")), right(rows, method, (part,))
    table = pd.DataFrame([(task, exact[name, task, seed], x) for (name, task, seed), x in own.items()
                          if name == model and (name, task, seed) in exact], columns=["task", "exact", "own"])
    can = pd.Series([x for (name, *_), x in exact.items() if name == model], dtype=float).groupby(
        [task for name, task, _ in exact if name == model]).mean()
    return table[table.task.map(can) >= least].reset_index(drop=True)

def losses(
    rows: list,  # of a record of `real_model`
    asked: dict, # label -> (part, name of a method there)
) -> pd.DataFrame: # a row for each label: prompts, right answers of exact attention and of the method, points lost
    "Right answers lost against exact attention, over the tasks on which it is right at least half of the time."
    found = {}
    for label, (part, name) in asked.items():
        table = gains(rows, name, part)
        low, lost, high = (100 * x for x in paired_interval((table.exact - table.own).astype(float)))
        counts = dict(prompts=len(table), exact=table.exact.sum(), right=table.own.sum())
        found[label] = counts | dict(lost=lost, low=low, high=high)
    return pd.DataFrame(found).T.astype(dict(prompts=int, exact=int, right=int))

def draw_losses(table: pd.DataFrame, ax, colours: dict):
    "Points lost and their intervals of a table of `losses`; colours: of labels."
    for i, (label, row) in enumerate(table.iterrows()):
        ax.errorbar(row.lost, i, xerr=[[row.lost - row.low], [row.high - row.lost]], fmt="o", capsize=3,
                    color=colours.get(label, "0.35"))
    ax.axvline(0, color="0.6", lw=0.8)
    ax.set_yticks(range(len(table)), [f"{label}, {n} prompts" for label, n in table.prompts.items()])
    ax.set_ylim(len(table) - 0.4, -0.6)
    ax.set(xlabel="right answers lost against exact attention, points", title="Qwen2.5-Coder 1.5B, 16,384 tokens")


def real_model(recorder) -> dict:
    "Evaluate every cell that the file lacks, and write it after each, with what the names mean."
    told = lambda methods: {name: f"{x(2)!r} from layer 2 on" if callable(x) else repr(x)
                            for name, x in methods.items()}
    about = dict(decode=told(decoders() | only_read() | need_queries() | quests()), prefill=told(prefills()))
    filled_in(recorder, evaluate, cells(recorder.quick, recorder.gpu), of_cell, about)
    return about
