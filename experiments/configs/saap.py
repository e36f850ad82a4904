"""Partitions of other texts and of the prompt, ranks, tails and routers on the pocket model and on SmolLM2: which
questions are still answered, at equal rows"""
from dataclasses import dataclass, replace

import torch

from sparse_nb.methods.quest import Quest
from sparse_nb import Streaming, TopK
from sparse_nb.grid import Grid
from sparse_nb.hash_attention import HashAttention
from experiments.answers import evaluate
from sparse_nb.saap_partition import KINDS, make_partition, partition_path
from sparse_nb.methods.saap.state import Partition
from sparse_nb.saap import Saap
from sparse_nb.tasks import TASKS


PAGE = 64  # keys

class PageNumbers(Partition):
    "A `Partition` whose cluster is the number of a key's page."
    def place(self, first, last, end):
        "Give waiting keys the numbers of their pages."
        if self.held is None or not self.held.shape[2]: return
        begin = len(self) - self.held.shape[2]
        page = torch.arange(begin, len(self), device=self.rows.device) // PAGE
        ids = page.clamp(max=self.clusters - 1).to(torch.int16)[:, None].expand(*self.held.shape[:3], 1)
        self.rows, self.held, self.waits = torch.cat([self.rows[:, :, :begin], ids], 2), None, None

@dataclass(frozen=True)
class Pages(Saap):
    "SAAP with pages in place of clusters."
    def new_state(self):
        "`PageNumbers`."
        return PageNumbers(self.clusters, "spherical", 0, 0, self.before_rope)


DENSITIES = 0.02, 0.04, 0.1
MIDDLE = 0.04  # where all arms are asked
SINKS = 4

SIZE = 64  # of a head, in both models

def at_equal_bytes(method, s: Saap, length: int):
    "The method with so many rows more that it reads as many bytes as `s` does, index included, of a 16-bit cache."
    of_index = lambda x: 4 * x.clusters * (2 * SIZE + 2) + 4 * x.budget
    own, listed = of_index(s), isinstance(method, Saap)
    more = own - (of_index(method) if listed else method.index_bytes(SIZE) * length)
    return replace(method, budget=method.budget + round(more / (4 * SIZE + 4 * listed)))

def arms(model: str, kind: str, length: int, density: float, every: bool) -> dict:
    "What is asked at a density."
    rows = round(density * length)
    other, = KINDS.keys() - {kind}
    s = Saap(rows - SINKS - rows // 4, sinks=SINKS, window=rows // 4, before_rope=False)
    offline, pages = replace(s, partition=partition_path(model, other), **FREE), -(-length // PAGE) + 1
    found = {"offline": offline, "offline drop": replace(offline, tail="drop"),
             # close to published: a budget of keys in place of whole clusters, small networks, an estimate's rank
             "paper": replace(offline, router="mlp", rank="mass", tail="drop"),
             "context": s, "context drop": replace(s, tail="drop"),
             "pages": Pages(s.budget, sinks=SINKS, window=s.window, clusters=pages, before_rope=False),
             "quest-64": Quest(rows, 64), "topk": TopK(rows)}
    if model == "pocket": found["hash_attention"] = HashAttention(rows)
    alike = "quest-64", "hash_attention" if model == "pocket" else "pages"
    found |= {f"{name} bytes": at_equal_bytes(found[name], s, length) for name in alike}
    if every:
        found |= {"offline mass": replace(offline, rank="mass"),
                  "offline mass drop": replace(offline, rank="mass", tail="drop"),
                  "paper tail": replace(found["paper"], tail="first_order"),
                  "paper density": replace(found["paper"], rank="density"),
                  "centroid mass drop": replace(offline, router="centroid", rank="mass", tail="drop"),
                  "centroid drop": replace(offline, router="centroid", tail="drop"),
                  "offline second": replace(offline, tail="second_order"),
                  "offline fitted": replace(offline, tail="fitted"),
                  "context second": replace(s, tail="second_order"), "context before": replace(s, before_rope=True),
                  "context before drop": replace(s, before_rope=True, tail="drop"),
                  "seen": replace(offline, partition=partition_path(model, kind)),
                  "pages drop": replace(found["pages"], tail="drop"), "streaming": Streaming(SINKS, rows - SINKS)}
    return {f"{name} {density:.0%}": method for name, method in found.items()}

FREE = dict(clusters=None, before_rope=None)  # what a file says itself


PROMPTS = 200
LENGTH = {"pocket": 8192, "smollm2": 4096}  # tokens
LONGER, THERE = 16384, (0.02, 0.04)  # of the pocket's, for the first arms alone, and the densities there
ASKED = {"pocket": tuple(TASKS), "smollm2": ("needle", "multikey:keys=2", "multikey:keys=4", "kv")}
ROWS = {"pocket": 820_000, "smollm2": 205_000}  # tokens of the prompts decoded at once

def kind_of(task: str) -> str:
    "The kind of a task."
    return next(kind for kind, tasks in KINDS.items() if task.partition(":")[0] in tasks)

def grids() -> dict: # name -> `Grid`
    "All of the record, a grid for each model and task."
    found = {}
    for model, tasks in ASKED.items():
        for task in tasks:
            length = LENGTH[model] if task != "kv" or model == "pocket" else 1024
            methods = {}
            for density in DENSITIES: methods |= arms(model, kind_of(task), length, density, density == MIDDLE)
            found[f"{model}.{task.replace(':', '.')}.{length}"] = Grid(
                model, [task], [length], methods, prompts=PROMPTS, batch=ROWS[model])
    for task in ASKED["pocket"]:
        methods = {}
        for density in THERE: methods |= arms("pocket", kind_of(task), LONGER, density, False)
        found[f"pocket.{task}.{LONGER}"] = Grid(
            "pocket", [task], [LONGER], methods, prompts=PROMPTS, batch=ROWS["pocket"])
    return found

def quick_grids() -> dict: # name -> `Grid`
    "A task in small, on the pocket model, with the package's own partition."
    methods = arms("pocket", "retrieval", 700, 0.1, True)
    methods = {name: replace(x, partition="pocket") if getattr(x, "partition", "context") != "context" else x
               for name, x in methods.items()}
    return {"pocket.multikey.700": Grid("pocket", ["multikey"], [700], methods, prompts=3)}


def partitions_of(grid: Grid) -> set:
    "What has to be trained before a grid can be asked."
    used = {getattr(x, "partition", None) for x in grid.decode.values()}
    return {(grid.model, kind) for kind in KINDS if partition_path(grid.model, kind) in used}

def saap(recorder):
    "Evaluate both models, with partitions that are made where they are missing. Raises as `evaluate`."
    wanted = quick_grids() if recorder.quick else grids()
    for needed in sorted(set().union(*map(partitions_of, wanted.values()))):
        make_partition(*needed, progress=recorder.say)
    return evaluate(recorder, wanted)
