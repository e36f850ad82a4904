"""Answers, variances and different keys of SANTA's schemes, measured on a GPU with hundreds of long prompts"""
from dataclasses import asdict, dataclass

import torch

from sparse_nb import Exact, TopK
from sparse_nb.core.streams import fold_in
from experiments.answers import SANTA_TASKS, PocketModel
from sparse_nb.santa import (
    Santa, bernoulli_decode, bernoulli_scores, select_santa, unique_keys, variance_trace, variance_trace_replicates)


SCHEMES = "iid", "stratified", "systematic" # of SANTA, unbiased

def value_statistics(
    q: torch.Tensor,       # one query for each layer [L, H, 1, D]
    k: torch.Tensor,       # keys [L, G, N, D]
    v: torch.Tensor,       # values [L, G, N, D]
    *,
    samples: tuple,        # numbers of draws S
    replicates: int = 64,  # repetitions of systematic sampling, for its variance
    seed: int = 0,         # of the draws
) -> list: # a dict for each scheme and S: scheme, samples, variance (in units of a single draw's), unique
    """Variance and different keys of SANTA's three unbiased schemes (App. L and M of the paper).

    Means over heads and layers. Raises as `santa.variance_trace`.
    """
    single, rows = variance_trace(q, k, v, samples=1, scheme="iid").mean(), []
    for scheme in SCHEMES:
        for s in samples:
            if scheme != "systematic": trace = variance_trace(q, k, v, samples=s, scheme=scheme)
            else: trace = variance_trace_replicates(q, k, v, samples=s, scheme=scheme, replicates=replicates, seed=seed)
            draws = [select_santa(q, k, samples=s, scheme=scheme, seed=fold_in(seed, i)) for i in range(4)]
            unique = torch.stack([unique_keys(x, k.shape[2]) for x in draws]).double().mean().item()
            rows.append(dict(scheme=scheme, samples=s, variance=(trace.mean() / single).item(), unique=unique))
    return rows


FEATURES = 1, 2, 4, 8, 16 # Bernoulli samples B

def feature_statistics(
    q: torch.Tensor,       # one query for each layer [L, H, 1, D]
    k: torch.Tensor,       # keys [L, G, N, D]
    v: torch.Tensor,       # values [L, G, N, D]
    *,
    seed: int = 0,         # of the draws
) -> list: # a dict for each kind and B of `FEATURES`: mean_group, features, and the shares read, head and group
    """Share of the key features that Bernoulli scores read (Tables 5 and 6 of the paper).

    `head` is for one head, `group` for the heads of a group together; both are means over layers. Raises as
    `santa.bernoulli_scores`.
    """
    rows = []
    for mean_group in (False, True):
        for b in FEATURES:
            read = bernoulli_scores(q, k, samples=b, mean_group=mean_group, seed=seed)[1]
            group = read.unflatten(1, (k.shape[1], -1)).any(2).double().mean().item()
            rows.append(dict(mean_group=mean_group, features=b, head=read.double().mean().item(), group=group))
    return rows


class Reference:
    "A SANTA method on its PyTorch reference, on any device"
    def __init__(self,
        method, # a `Santa`
    ): self.method = method

    def decode(self, q, k, v, **kwargs):
        "That of the method, with `backend` torch"
        return self.method.decode(q, k, v, backend="torch", **kwargs)

class Bernoulli:
    "Attention on Bernoulli scores, with all values or with sampled ones"
    def __init__(self, features: int, mean_group: bool, samples: int = None,
    ): self.features, self.mean_group, self.samples = features, mean_group, samples

    def decode(self, q, k, v, *, seed, **visible):
        "The attention outputs [B, H, 1, D], drawn with `seed`"
        kept = dict(visible, mean_group=self.mean_group, seed=seed)
        if self.samples: return bernoulli_decode(q, k, v, features=self.features, samples=self.samples, **kept)
        weights = bernoulli_scores(q, k, samples=self.features, **kept)[0].softmax(-1)
        by_group = weights.reshape(q.shape[0], k.shape[1], -1, k.shape[2])
        return (by_group @ v.to(weights.dtype)).reshape(q.shape).to(q.dtype)


SANTA_BUDGETS = 4, 8, 16, 32, 64, 128, 256 # samples S, and keys k of top-k

def santa_methods(budgets: tuple = SANTA_BUDGETS) -> dict:
    "The methods whose answers the record compares."
    methods = {"exact": Exact()}
    for s in budgets:
        methods[f"topk-{s}"] = TopK(s)
        for scheme in SCHEMES: methods[f"{scheme}-{s}"] = Reference(Santa.paper(scheme, s))
    return methods

def onehot_methods(layers: int) -> dict:
    "SANTA with a single sample in one layer and 128 in the others, for each layer (Fig. 8)."
    usual, one = Reference(Santa(samples=128)), Reference(Santa(samples=1))
    return {"none": usual} | {str(i): {j: one if i == j else usual for j in range(layers)} for i in range(layers)}

def bernoulli_methods() -> dict: # "exact", "plain-B", "mean-B", and "both-S"
    "Bernoulli scores, plain and with a group's mean query, and those of B = 4 with sampled values (Tables 5 to 7)."
    alone = {f"{name}-{b}": Bernoulli(b, name == "mean") for b in FEATURES for name in ("plain", "mean")}
    return {"exact": Exact()} | alone | {f"both-{s}": Bernoulli(4, True, s) for s in (8, 32, 128)}


@dataclass(frozen=True)
class Size:
    "How much is asked"
    prompts: int   # of each task and length
    captures: int  # prompts of each length whose attention is looked at
    lengths: tuple # tokens of a prompt
    budgets: tuple # samples S, and keys k of top-k
    tokens: int    # of the prompts read at once

FULL = Size(prompts=200, captures=30, lengths=(8192, 16384), budgets=SANTA_BUDGETS, tokens=1_700_000)
QUICK = Size(prompts=1, captures=1, lengths=(768,), budgets=(4,), tokens=768)

def _gathered(rows):
    "Rows that differ in their floats only, as one row with lists of five digits"
    lists = {}
    for row in rows:
        same = {x: y for x, y in row.items() if not isinstance(y, float)}
        one = lists.setdefault(tuple(same.items()), same | {x: [] for x in row if x not in same})
        for x in row.keys() - same.keys(): one[x].append(float(f"{row[x]:.5g}"))
    return list(lists.values())

def _captured_rows(pocket, length, captures):
    "Statistics of captured heads"
    rows = []
    for seed in range(captures):
        q, k, v = pocket.captured("multikey", length, seed)
        values = value_statistics(q, k, v, samples=(8, 16, 32, 64, 128, 256), seed=seed)
        rows += [dict(part="values", length=length, **x) for x in values]
        rows += [dict(part="features", length=length, **x) for x in feature_statistics(q, k, v, seed=seed)]
    return _gathered(rows)


def _questions(size, layers):
    "Part, task, length, methods and set-up of each step with answers, in the order of the file"
    two = "multikey", "frequent_words"
    for length in size.lengths:
        for label in SANTA_TASKS: yield "accuracy", label, length, santa_methods(size.budgets), "A"
    for length in size.lengths:
        for label in two: yield "onehot", label, length, onehot_methods(layers), "A"
    for label in two: yield "bernoulli", label, size.lengths[0], bernoulli_methods(), "A"
    few = size.budgets[1:4:2] or size.budgets
    for label in ("multikey", "flat_words"): yield "accuracy", label, size.lengths[0], santa_methods(few), "B"

def santa_pocket(recorder):
    "Measure what `SANTA, measured` says of the pocket model's answers and attention, step by step."
    size, pocket, steps = QUICK if recorder.quick else FULL, PocketModel(), {}
    for length in size.lengths:
        steps[f"values and features {length}"] = lambda length=length: _captured_rows(pocket, length, size.captures)
    for part, label, length, methods, setup in _questions(size, len(pocket.layers)):
        def answered(given=(part, label, length, methods), setup=setup):
            return pocket.evaluate(*given, prompts=size.prompts, tokens=size.tokens, setup=setup)
        steps[f"{part} {label} {length} {setup}"] = answered
    settings = {name: x for name, x in asdict(size).items() if name != "tokens"}
    tasks = {label: dict(task=task, **own) for label, (task, own) in SANTA_TASKS.items()}
    recorder.grow(steps, **pocket.about, **settings, tasks=tasks)
