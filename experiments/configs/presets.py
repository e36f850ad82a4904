"""Methods as published, beside what is close to published and what this book makes of them: the pocket model's
answers"""
from dataclasses import replace

from sparse_nb.methods.adamas import Adamas
from sparse_nb.grid import Grid
from experiments.answers import evaluate
from sparse_nb.saap import Saap
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vattention import VAttention


DENSITY = 0.2                                                  # of Sketch&Walk
NEAR = dict(sinks=4, window=128)                               # keys that vAttention and SAAP always read
GUARANTEE = dict(eps=0.1, delta=0.1, topk=0.025, base=0.025)     # of vAttention, for the denominator
PROBES, CLUSTERS = 6, 128                                      # of SAAP, whose clusters are those of "pocket"

def walks() -> dict:
    "Sketch&Walk as published, under a mask, without the walk, and by mean shares, the default of steps."
    paper, means = SketchWalk.paper(DENSITY), dict(pool="mean", refine=1, tail=0)
    return {"as published": paper, "close to published": replace(paper, walk="literal"),
            "no walk": replace(paper, walk=None), "default": SketchWalk(density=DENSITY, **means),
            "random": SketchWalk(density=DENSITY, index="random", **means)}

def samplers() -> dict:
    "vAttention as published, and with bounds and a base sample that is kept, over two predictors."
    found = {}
    for name, predictor in ("oracle", "oracle"), ("adamas", Adamas(0.025)):
        found |= {f"as published, {name}": VAttention.paper(**GUARANTEE, **NEAR, predictor=predictor),
                  f"close to published, {name}": VAttention(**GUARANTEE, **NEAR, predictor=predictor, share=False)}
    return found

def clusters(length: int) -> dict:
    "SAAP as published, with a budget of as many keys by estimated mass, and by moments, with a tail, our default."
    budget = round(length * PROBES / CLUSTERS)
    paper = Saap.paper("pocket", PROBES, **NEAR)
    close = replace(paper, probes=None, budget=budget, rank="mass")
    return {"as published": paper, "close to published": close,
            "default": Saap(budget, **NEAR, dense_layers=1)}

def grids(length: int = 2048, prompts: int = 20, tasks=("multikey", "kv")) -> dict: # name -> `Grid`
    "The answers of each method; Sketch&Walk reads the question, too, as in the record of a GPU."
    others = {f"vattention, {name}": m for name, m in samplers().items()}
    others |= {f"saap, {name}": m for name, m in clusters(length).items()}
    about, found = dict(prompts=prompts, batch=4 * length, chunk=length), {}
    for task in tasks:
        found[f"walk.{task}"] = Grid("pocket", [task], [length], {f"walk, {name}": m for name, m in walks().items()},
                                     setup="context", dense_layers=(0, 1), **about)
        found[f"others.{task}"] = Grid("pocket", [task], [length], others, **about)
    return found


def presets(recorder):
    "Evaluate the pocket model. Raises as `evaluate`."
    return evaluate(recorder, grids(700, 2, ("needle",)) if recorder.quick else grids())
