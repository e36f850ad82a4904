"""What clusters catch of the attention of the pocket model's heads, and how wrong the output is, by partition,
router, rank and tail; and the paper's figures, measured again; and SmolLM2's heads beside them"""
import itertools
import math
import tempfile
import time
from functools import cache
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

from sparse_nb import pocket
from sparse_nb.core.exact import attention, attention_weights, merge_states
from sparse_nb.core.selection import weighted_attention, weighted_state
from sparse_nb.grid import task_of
from sparse_nb.models import fetch
from sparse_nb.models.capturing import capture
from benchmarks.machine import machine
from benchmarks.recorder import read_record
from experiments.configs.saap import PAGE, Pages
from sparse_nb.saap_partition import KINDS, lesson_texts, make_partition
from sparse_nb.methods.saap.partition import nearest_cluster, partition_parts, router_scores, save_partition
from sparse_nb.methods.saap.state import Partition
from sparse_nb.methods.saap.step import newest_of_each, steps
from sparse_nb.saap import Saap, keys_to_read, tail_state
from sparse_nb.saap_training import Lessons, model_centroids
from sparse_nb.tasks import make, prompt_tokens


QUERIES, SINKS, WINDOW, LEAST = 8, 1, 127, 0.05
ASKED = "multikey", "multivalue", "kv", "frequent_words"
BUDGETS = 0.01, 0.02, 0.04, 0.08  # far keys that are read, of all keys

@cache
def loaded(name="pocket"): return pocket.load() if name == "pocket" else fetch.load(name)

def asked_heads(
    task: str,    # in `ASKED`, or as of `sparse_nb.grid.task_of`
    length: int,  # tokens
    seed: int,    # of the prompt
    name: str = "pocket", # of the model; or "smollm2"
) -> list:        # of `Captured`, one a layer
    "What the layers work on at the end of a prompt and its answer."
    (model, tokenizer), chat, (kind, settings) = loaded(name), name == "smollm2", task_of(task)
    x = make(kind, length, seed=seed, tokenizer=tokenizer, chat=chat, **settings)
    ids = torch.tensor(prompt_tokens(x, tokenizer, chat, f" {x.answer}")[1])
    return capture(model, ids, positions=range(len(ids) - QUERIES, len(ids)), before_rope=True)

def kind_of(task): return next(kind for kind, tasks in KINDS.items() if task_of(task)[0] in tasks)

def other_kind(task): return next(kind for kind in KINDS if kind != kind_of(task))

def far_mask(n, device="cpu"):
    "Which of the n keys that a query sees are far [n]."
    i = torch.arange(n, device=device)
    return (i >= SINKS) & (i < n - WINDOW)


RULES = {  # partition, router, rank
    "paper": ("other", "mlp", "mass"), "mlp, density": ("other", "mlp", "density"),
    "centroid": ("other", "centroid", "density"), "moments, mass": ("other", "moments", "mass"),
    "moments, density": ("other", "moments", "density"), "seen": ("seen", "moments", "density"),
    "seen, paper": ("seen", "mlp", "mass"), "seen, centroid": ("seen", "centroid", "density"),
    "context": ("context", "moments", "density"), "context before RoPE": ("before", "moments", "density")}
UNTRAINED = {x: RULES[x] for x in ("moments, density", "moments, mass", "centroid", "context")} | {
    "context, mass": ("context", "moments", "mass"), "context, centroid": ("context", "centroid", "density"),
    "context before RoPE": RULES["context before RoPE"], "pages": ("pages", "moments", "density")}
CEILINGS = {"other": "clusters by true density", "context": "the prompt's clusters by true density"}
TAILS = "drop", "first_order", "second_order", "fitted"

def rule_settings(
    rule: str,   # of `RULES` or `UNTRAINED`
    task: str,   # that is asked
    layer: int,  # its number
    files: dict, # kind or "all" -> file of a partition
) -> dict:       # for `Saap`
    "The settings of a rule but its budget."
    partition, router, rank = (RULES | UNTRAINED)[rule]
    where = dict(other=dict(partition=files.get(other_kind(task)), layer=layer), context=dict(before_rope=False),
                 seen=dict(partition=files.get("all"), layer=layer), before=dict(before_rope=True),
                 pages=dict(before_rope=False))[partition]
    return dict(router=router, rank=rank, sinks=SINKS, window=WINDOW, **where)

def relative(out, want): return ((out - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30))[0, :, 0]

def outputs_of(x, i, found, settings):
    "tail -> output [1, H, 1, D] of a `Step`."
    q, k, v = x.seen(i)
    outs = {"drop": weighted_attention(q, k, v, found.selection, scale=x.scale)}
    near = weighted_state(q, k, v, found.selection, scale=x.scale)
    file = settings.get("partition")
    factor = None if file is None else partition_parts(file, settings["layer"]).get("factor")
    for tail in TAILS[1:3 if factor is None else 4]:
        outs[tail] = merge_states(near, tail_state(q, found.rest, x.scale, tail, factor)).output()
    return outs

def oracles(
    weight: torch.Tensor, # attention of the groups [1, G, n], summed over their heads
    ids: dict,            # rule -> cluster of each key [1, G, n], int64
    budget: int,          # far keys to read
) -> dict:                # "top keys" and each rule of `ids` -> which keys are read [1, G, n], bool
    "What oracles read: the heaviest keys, and clusters in the order of what their keys truly weigh."
    far = far_mask(weight.shape[-1])
    top = weight.masked_fill(~far, -1).topk(budget).indices
    read = {"top keys": ~far | torch.zeros_like(weight).bool().scatter(-1, top, True)}
    for rule, own in ids.items():
        empty, own_far = weight.new_zeros(*own.shape[:2], int(own.max()) + 1), own[..., far]
        count = empty.scatter_add(2, own_far, torch.ones_like(own_far).to(weight.dtype)).long()
        mean = empty.scatter_add(2, own_far, weight[..., far]) / count.clamp(min=1)
        taken = keys_to_read(mean.masked_fill(count == 0, -math.inf), count, None, torch.tensor([budget]))
        read[rule] = ~far | newest_of_each(own, far[None], taken)
    return read


def rules_row(
    task: str,    # in `ASKED`, or as of `sparse_nb.grid.task_of`
    length: int,  # tokens
    seed: int,    # of the prompt
    files: dict,  # kind or "all" -> file of a partition
    rules=tuple(RULES),  # some of `RULES` or `UNTRAINED`
    name: str = "pocket", # of the model; or "smollm2"
    budgets=BUDGETS,     # far keys that are read, of all keys
    ceilings=("other",), # of `CEILINGS`, where a rule has such clusters
) -> list:        # of dicts: rule, budget, tail; recall and error, means over layers, heads and queries that count
    "Every rule at every budget on one prompt."
    sums = {}
    def add(key, recall, error, counts):
        old = sums.setdefault(key, torch.zeros(3, dtype=torch.float64))
        old += torch.stack([(y.double() * counts).sum() for y in (recall, error, torch.ones_like(recall))])
    for x in asked_heads(task, length, seed, name):
        states = {}
        for i in range(QUERIES):
            q, k, v = x.seen(i)
            n, repeats = k.shape[2], q.shape[1] // k.shape[1]
            want, weight = attention(q, k, v, scale=x.scale), attention_weights(q, k, scale=x.scale)[0, :, 0]
            far = far_mask(n)
            mass = weight[:, far].sum(-1)
            counts = mass >= LEAST
            if not counts.any(): continue
            recall = lambda dense: (weight * dense)[:, far].sum(-1) / mass.clamp(min=1e-30)
            for rule in rules:
                s, where = rule_settings(rule, task, x.layer, files), (RULES | UNTRAINED)[rule][0]
                if where == "pages": kind, s = Pages, s | dict(clusters=-(-x.k.shape[2] // PAGE))
                else: kind = Saap
                for budget in budgets:
                    method = kind(round(budget * length), **s)
                    if where not in states:
                        states[where] = method.new_state()
                        observed = dict(k_pre_rope=x.k_pre_rope) if states[where].before_rope else {}
                        states[where].append(x.k, x.v, **observed)
                    masks = dict(causal=False, kv_start=None, kv_end=torch.tensor([n]))
                    found = next(steps(method, q, x.k, x.v, states[where], masks, x.scale, x.q_pre_rope[:, :, [i]]))
                    caught = recall(found.selection.dense(x.k.shape[2])[0, :, 0, :n] > 0)
                    for tail, out in outputs_of(x, i, found, s).items():
                        add((rule, budget, tail), caught, relative(out, want), counts)
            ids = {CEILINGS[y]: states[y].rows[:, :, :n, 0].long() for y in ceilings if y in states}
            for budget in budgets if ids else ():
                of_groups = weight.view(1, -1, repeats, n).sum(2)
                for rule, dense in oracles(of_groups, ids, round(budget * length)).items():
                    dense = dense[0].repeat_interleave(repeats, 0)
                    part = weight * dense
                    out = (part / part.sum(-1, keepdim=True))[None, :, None] @ v.repeat_interleave(repeats, 1)
                    add((rule, budget, "drop"), recall(dense), relative(out, want), counts)
    return [dict(rule=rule, budget=budget, tail=tail, recall=float(a / n), error=float(b / n), queries=int(n))
            for (rule, budget, tail), (a, b, n) in sums.items() if n]


STRETCH = 512  # keys of a range of time

def figure_rows(
    task: str,    # in `ASKED`
    length: int,  # tokens
    seed: int,    # of the prompt
    files: dict,  # kind or "all" -> file of a partition
    roped: dict,  # kind -> layer -> centroids of keys after RoPE [G, C, D]
) -> list:        # of dicts: figure, layer, and what it shows
    "SAAP-1, 2, 3, 7 and 9 on one prompt."
    rows, several = [], []
    for x in asked_heads(task, length, seed):
        parts, at = partition_parts(files[other_kind(task)], x.layer), dict(layer=x.layer)
        repeats, clusters, n = x.q.shape[1] // x.k.shape[1], parts["centroids"].shape[1], x.k.shape[2]
        fits = {"none": (x.k_pre_rope, parts["centroids"]), "rope": (x.k, roped[other_kind(task)][x.layer])}
        for name, (k, fit) in fits.items():
            ids = nearest_cluster(k, fit[None], "spherical")[0]                      # [G, N]
            at_times = F.one_hot(ids[:, :n // STRETCH * STRETCH].unflatten(1, (-1, STRETCH)), clusters).double().mean(2)
            whole = at_times.mean(1, keepdim=True)
            drift = ((at_times - whole).square() / whole.clamp(min=1e-30)).sum(-1).mean()
            chance = ((whole > 0).sum() / len(whole) - 1) / STRETCH * (1 - STRETCH / n)
            rows.append(dict(figure="drift", rope=name, drift=float(drift), chance=float(chance), **at))
        ids = nearest_cluster(x.k_pre_rope, parts["centroids"][None], "spherical")[0]
        asked = x.q_pre_rope.unflatten(1, (-1, repeats)).flatten(2, 3)
        asked = nearest_cluster(asked, parts["centroids"][None], "spherical")
        p, q = (F.one_hot(y, clusters).double().mean(1) for y in (ids, asked[0]))
        products = torch.einsum("grqd,gnd->grqn", x.q_pre_rope[0].unflatten(0, (-1, repeats)), x.k_pre_rope[0])
        rows.append(dict(figure="apart", queries=float(q.amax(-1).mean()), keys=float(p.amax(-1).mean()),
                         variation=float((p - q).abs().sum(-1).mean() / 2),
                         negative=float((products < 0).double().mean()), **at))
        seen = attention_weights(*x.seen(QUERIES - 1)[:2], scale=x.scale)[0, :, 0]
        far = seen[:, far_mask(n)].sort(descending=True).values
        enough = far.sum(-1) >= LEAST
        for name, count in ("256", 256), ("1/64", n // 64):
            share = far[enough][:, :count].sum(-1) / far[enough].sum(-1)
            if len(share): rows.append(dict(figure="few keys", count=name, share=float(share.mean()), **at))
        several += batched_rows(x, ids, parts) + selectivity_rows(x, task, files)
    return rows + over_layers(several)

def over_layers(rows):
    "Rows that differ in recall, read or mse alone, as means."
    means, found = {"recall", "read", "mse"}, {}
    for row in rows: found.setdefault(tuple((x, y) for x, y in row.items() if x not in means), []).append(row)
    return [dict(key) | {x: sum(row[x] for row in own) / len(own) for x in own[0] if x in means}
            for key, own in found.items()]


def batched_rows(x, ids, parts):
    "Fig. 9 for the last query of a layer: a list a head, or one a group."
    q, k, _ = x.seen(QUERIES - 1)
    far, repeats = far_mask(k.shape[2]), q.shape[1] // k.shape[1]
    weight = attention_weights(q, k, scale=x.scale)[0, :, 0][:, far].unflatten(0, (-1, repeats))      # [G, R, n]
    count = F.one_hot(ids[:, far], parts["centroids"].shape[1]).sum(1)[None].float()
    share = router_scores(x.q_pre_rope[:, :, [-1]], parts, "mlp").softmax(-1)[0, :, 0].unflatten(0, (-1, repeats))
    share = share.masked_fill(count[0][:, None] == 0, 0)
    rows, enough = [], weight.sum(-1) >= LEAST
    for probes in (4, 8, 16):
        own = torch.zeros_like(share).scatter(-1, share.topk(probes).indices, 1)
        shared = torch.zeros_like(share[:, 0]).scatter(-1, share.sum(1).topk(probes).indices, 1)[:, None].expand_as(own)
        union = own.amax(1, keepdim=True)
        for name, chosen, read in ("own", own, union), ("shared", shared, shared[:, :1]):
            caught = (weight * chosen.gather(-1, ids[:, None, far].expand(weight.shape))).sum(-1) / weight.sum(-1)
            if enough.any(): rows.append(dict(
                figure="batched", lists=name, probes=probes, recall=float(caught[enough].mean()),
                read=float(((read[:, 0] * count[0]).sum(-1) / far.sum()).mean())))
    return rows

def selectivity_rows(x, task, files):
    "Table 5 for the last query of a layer, with the network that has seen the kind of the task, and the other."
    rows = []
    for name, file in ("seen", files[kind_of(task)]), ("other", files[other_kind(task)]):
        parts = partition_parts(file, x.layer)
        ids = nearest_cluster(x.k_pre_rope, parts["centroids"][None], "spherical")[0][:, far_mask(x.k.shape[2])]
        count = F.one_hot(ids, parts["centroids"].shape[1]).sum(1).float()
        scores = router_scores(x.q_pre_rope[:, :, [-1]], parts, "mlp").softmax(-1)[0, :, 0]
        share = scores.unflatten(0, (len(ids), -1)).sum(1)
        for probes in (1, 2, 4, 8, 16):
            read = count.gather(1, share.topk(probes).indices).sum(-1) / ids.shape[1]
            rows.append(dict(figure="selectivity", partition=name, probes=probes, read=float(read.mean())))
    return rows


SIZES = 32, 128, 512
TRAINED = 1024, 4096  # tokens of the texts of centroids in the table of lengths

def size_rows(task, length, seed, fits):
    "Fig. 10 on one prompt, with centroids `fits` (kind, C) -> layer -> [G, C, D], the rest dropped."
    rows = []
    for x in asked_heads(task, length, seed):
        q, k, v = x.seen(QUERIES - 1)
        want = attention(q, k, v, scale=x.scale)
        mass = attention_weights(q, k, scale=x.scale)[0, :, 0][:, far_mask(k.shape[2])].sum(-1)
        for clusters in dict.fromkeys(size for _, size in fits):
            state = Partition(clusters, "spherical", 0, 0, True, fits[other_kind(task), clusters][x.layer])
            state.append(x.k, x.v, k_pre_rope=x.k_pre_rope)
            method = Saap(probes=clusters // 32, router="centroid", tail="drop", sinks=SINKS, window=WINDOW)
            found = next(steps(method, q, x.k, x.v, state, dict(causal=False, kv_start=None, kv_end=None), x.scale,
                               x.q_pre_rope[:, :, [-1]]))
            error = relative(found.out, want).square()[mass >= LEAST]
            read = (found.far[0, :, 0] / k.shape[2])[mass >= LEAST]
            if len(error): rows.append(dict(figure="sizes", clusters=clusters, mse=float(error.mean()),
                                            read=float(read.mean())))
    return over_layers(rows)

def length_rows(task, length, seed, fits):
    "SAAP-5 on one prompt: recall at 4 % of the keys by centroids `fits` (kind, trained, rope?) of some length."
    found = {}
    for x in asked_heads(task, length, seed):
        q, k, _ = x.seen(QUERIES - 1)
        weight, far = attention_weights(q, k, scale=x.scale)[0, :, 0], far_mask(k.shape[2])
        mass = weight[:, far].sum(-1)
        for trained in TRAINED:
            for rope in (True, False):
                fit = fits[other_kind(task), trained, rope][x.layer]
                state = Partition(fit.shape[1], "spherical", 0, 0, not rope, fit)
                state.append(x.k, x.v, **({} if rope else dict(k_pre_rope=x.k_pre_rope)))
                for router in "centroid", "moments":
                    method = Saap(round(0.04 * length), router=router, tail="drop", sinks=SINKS, window=WINDOW)
                    read = next(steps(method, q, x.k, None, state, dict(causal=False, kv_start=None, kv_end=None),
                                      x.scale, x.q_pre_rope[:, :, [-1]])).selection.dense(k.shape[2])[0, :, 0] > 0
                    caught = ((weight * read)[:, far].sum(-1) / mass.clamp(min=1e-30)).tolist()
                    found.setdefault((trained, rope, router), []).extend(
                        round(y, 4) if m >= LEAST else None for y, m in zip(caught, mass))
    return [dict(figure="lengths", trained=trained, tested=length, rope=rope, router=router, heads=heads)
            for (trained, rope, router), heads in found.items()]


PROMPTS, LENGTH = 6, 4096

def centroids_for(tokenizer, model, kinds, lengths, each, name="pocket", **settings):
    "k-means on texts of `kinds` and prose, of some lengths: kind -> layer -> [G, C, D]"
    settings = dict(clusters=128, kmeans="spherical", before_rope=True, seed=0) | settings
    return {kind: model_centroids(Lessons(model, lesson_texts(name, tokenizer, KINDS[kind], each, lengths), 64, 0),
                                  **settings) for kind in kinds}

MEASURED = ("recall", "error", "queries", "read", "mse", "drift", "chance", "variation", "keys", "negative", "share",
            "heads", "far", "left", "drop", "first_order", "right", "bits")

def condensed_rows(
    rows: list, # of dicts, with task and seed
) -> list:      # of dicts: the same, but seed and `MEASURED` are lists over the prompts, numbers of four digits
    "A row for what differs in the prompt alone."
    found, short = {}, lambda y: float(f"{y:.4g}") if isinstance(y, float) else y
    for row in rows:
        key = tuple((x, y) for x, y in row.items() if x not in (*MEASURED, "seed"))
        own = found.setdefault(key, {x: [] for x in row if x in (*MEASURED, "seed")})
        for x in own: own[x].append(short(row[x]))
    return [dict(key) | own for key, own in found.items()]

def figures_of(
    path, # file of the record
) -> dict: # figure -> DataFrame, a row for each prompt
    "The record as tables. Raises as `read_record`."
    rows = {}
    for row in read_record(path)["rows"]: rows.setdefault(row["figure"], []).append(row)
    return {name: pd.concat([pd.DataFrame(row) for row in own], ignore_index=True) for name, own in rows.items()}


def saap_heads(recorder):
    """Measure single heads of the pocket model; in the quick form of one prompt, with the package's own partition.

    The rows `enough` and `told` of the stored record are of a rule that reads until a guessed share of the attention is
    left, which the library does not have: they are not made again.
    """
    (model, tokenizer), quick, say = loaded(), recorder.quick, recorder.say
    length, tasks, prompts, each = (700, ASKED[1:2], 1, 1) if quick else (LENGTH, ASKED, PROMPTS, 4)
    files = dict.fromkeys([*KINDS, "all"], "pocket")
    if not quick: files |= {kind: str(make_partition("pocket", kind, progress=say)) for kind in KINDS}
    kinds = [other_kind(task) for task in tasks] if quick else [*KINDS]
    lengths = {600: (600,), 601: (600,)} if quick else {n: (n,) for n in TRAINED}
    sizes = {(kind, c): fit for c in SIZES[:2 if quick else None] for kind, fit in centroids_for(
        tokenizer, model, kinds, (length if quick else 2048,), each, clusters=c).items()}
    fits = cache(lambda texts, rope: centroids_for(tokenizer, model, kinds, texts, each, before_rope=not rope))
    trained = {(kind, n, rope): fit for n, texts in zip(TRAINED, lengths.values()) for rope in (True, False)
               for kind, fit in fits(texts, rope).items()}
    roped = {kind: trained[kind, TRAINED[1], True] for kind in kinds}
    say("centroids made")
    rows, began = [], time.monotonic()
    rules = [x for x in RULES if not (quick and x.startswith("seen, "))]  # of one partition they are others again
    for task in tasks:
        for seed in range(prompts):
            found = [row | dict(figure="rules") for row in rules_row(task, length, seed, files, rules)]
            found += figure_rows(task, length, seed, files, roped) + size_rows(task, length, seed, sizes)
            for n in (length,) if quick else TRAINED: found += length_rows(task, n, seed, trained)
            rows += [dict(task=task, seed=seed) | row for row in found]
            say(f"{time.monotonic() - began:.0f} s: {task}, prompt {seed}")
    recorder.rows += condensed_rows(rows)
    return machine("cpu") | dict(model="pocket", length=length, prompts=prompts, queries=QUERIES, sinks=SINKS,
                                 window=WINDOW, least=LEAST)


MODELS = {"pocket": ("needle", "multikey"), "smollm2": ("needle", "multikey:keys=2")}  # tasks of each
SHARES = (*BUDGETS, 0.1)
TAUGHT = 3, 2048  # prompts of a task that centroids are made of, and their tokens

def saap_heads_smollm2(recorder):
    "Measure single heads of both models by rules that need no network. FileNotFoundError without SmolLM2."
    quick, say = recorder.quick, recorder.say
    length, prompts, (each, long) = (700, 1, (1, 600)) if quick else (LENGTH, 4, TAUGHT)
    models = {"pocket": MODELS["pocket"][1:]} if quick else MODELS
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, tasks in models.items():
            model, tokenizer = loaded(name)
            kind, file = other_kind(tasks[0]), str(Path(folder) / name)
            fits = centroids_for(tokenizer, model, [kind], (long,), each, name)[kind]
            save_partition({f"{layer}.centroids": fit for layer, fit in fits.items()}, file, model)
            say(f"{time.monotonic() - began:.0f} s: centroids, {name}")
            for task, seed in itertools.product(tasks, range(prompts)):
                found = rules_row(task, length, seed, {kind: file}, UNTRAINED, name, SHARES, CEILINGS)
                rows += [dict(figure="rules", model=name, task=task, seed=seed) | row for row in found]
                say(f"{time.monotonic() - began:.0f} s: {name}, {task}, prompt {seed}")
    recorder.rows += condensed_rows(rows)
    return machine("cpu") | dict(length=length, prompts=prompts, queries=QUERIES, sinks=SINKS, window=WINDOW,
                                 least=LEAST)
