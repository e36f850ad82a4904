"""Variants of the query network that section 6.5 of the SAAP paper reports as no improvement, on the pocket model"""
import math

import torch
import torch.nn.functional as F

from sparse_nb.attention import attention_weights
from sparse_nb.models.capturing import capture
from sparse_nb.saap import keys_to_read
from sparse_nb.saap_partition import KINDS
from sparse_nb.saap_training import Lessons, cluster_shares, fit_router, model_centroids
from sparse_nb.tasks import make, prompt_tokens
from sparse_nb.text import speeches, windows
from sparse_nb.methods.saap.partition import nearest_cluster, router_scores
from sparse_nb.methods.saap.step import newest_of_each
from benchmarks.machine import machine
from experiments.archive.saap_heads import LEAST, SINKS, WINDOW, far_mask, loaded

CLUSTERS, LAST, BUDGET = 64, 8, 0.04  # C; queries of a prompt that are asked; far keys that are read, of all keys
LENGTH, TEXTS, QUERIES, STEPS, HIDDEN = 2048, 12, 256, 800, 64
TUNED = dict(queries=128, steps=100, rate=1e-3)  # on the prompt itself


def side_by_side(layers: list) -> list: # of lists a text
    "A text's `Captured` layers, heads of all layers in one: q, k, q_pre_rope, k_pre_rope, positions, scale."
    found = []
    for x in layers:
        cat = lambda name, x=x: torch.cat([getattr(y, name)[0] for y in x])
        found.append((cat("q"), cat("k"), cat("q_pre_rope"), cat("k_pre_rope"), x[0].positions, x[0].scale))
    return found

def examples_of(texts, ids, reach=WINDOW, causal=False):
    "For `fit_router`: queries, shares of the clusters `ids` (of each text [G, N]), and which count."
    found = []
    for (q, k, q_pre_rope, _, at, scale), own in zip(texts, ids):
        found.append((q_pre_rope, *cluster_shares(q, k, own, at, CLUSTERS, sinks=SINKS, window=WINDOW, reach=reach,
                                                causal=causal, scale=scale)))
    return found

def tuned(parts, examples, queries, steps, rate):
    "The networks after some more steps of Adam on the queries of one prompt."
    (x, share, counts), names = examples, ("mlp_w1", "mlp_b1", "mlp_w2", "mlp_b2")
    own = {name: parts[name].clone().requires_grad_() for name in names}
    adam = torch.optim.Adam(own.values(), rate)
    for _ in range(steps):
        said = router_scores(x[None], own, "mlp")[0].log_softmax(-1)
        loss = (F.kl_div(said, share, reduction="none").sum(-1) * counts).sum(1) / counts.sum(1).clamp(min=1)
        adam.zero_grad()
        loss.sum().backward()
        adam.step()
    return {name: y.detach() for name, y in own.items()}

def key_lessons(texts, parts):
    "What a classifier of keys learns: of each key, the clusters that the queries which attend to it name."
    found = []
    for q, k, q_pre_rope, k_pre_rope, at, scale in texts:
        said, (groups, n) = router_scores(q_pre_rope[None], parts, "mlp")[0].softmax(-1), k.shape[:2]
        near = (at[:, None] - torch.arange(n)).abs() < WINDOW
        near[:, :SINKS] = True
        scores = q.unflatten(0, (groups, -1)) @ k[:, None].transpose(-1, -2) * scale
        weight = scores.masked_fill(near, -math.inf).softmax(-1).flatten(1, 2)   # [G, R n_q, N]
        named = weight.transpose(1, 2) @ said.unflatten(0, (groups, -1)).flatten(1, 2)
        mass = named.sum(-1, keepdim=True)
        found.append((k_pre_rope, named / mass.clamp(min=1e-30), mass[..., 0] > 1e-6))
    return found


def recall_of(text, ids, parts):
    "Share of the far attention that the clusters catch which the networks name, for the last queries, at `BUDGET`."
    q, k, q_pre_rope, _, at, scale = text
    caught, groups = [], len(k)
    for i in range(-LAST, 0):
        n = int(at[i]) + 1
        far = far_mask(n)
        weight = attention_weights(q[None, :, [i]], k[None, :, :n], scale=scale)[0, :, 0]
        mass = (weight * far).sum(-1)
        count = F.one_hot(ids[:, :n][:, far], CLUSTERS).sum(1)[None]
        named = router_scores(q_pre_rope[None, :, [i]], parts, "mlp")[0, :, 0].softmax(-1).unflatten(0, (groups, -1))
        rank = named.sum(1)[None].masked_fill(count == 0, -math.inf)
        taken = keys_to_read(rank, count, None, torch.tensor([round(BUDGET * n)]))
        read = newest_of_each(ids[None, :, :n], far[None], taken)[0].repeat_interleave(len(q) // groups, 0)
        counts = mass >= LEAST
        caught.append(((weight * (read & far)).sum(-1) / mass)[counts])
    return float(torch.cat(caught).mean())

def asked(task, seed, length):
    "A prompt with its answer: the queries to tune on, then the last ones, as of `side_by_side`."
    model, tokenizer = loaded()
    x = make(task, length, seed=seed, tokenizer=tokenizer)
    ids = torch.tensor(prompt_tokens(x, tokenizer, False, f" {x.answer}")[1])
    n, g = len(ids), torch.Generator().manual_seed(seed)
    some = n // 8 + torch.randperm(n - n // 8 - 2 * LAST, generator=g)[:TUNED["queries"]]
    return side_by_side([capture(model, ids, before_rope=True,
                                 positions=[*some.sort().values.tolist(), *range(n - LAST, n)])])[0]

def lessons_of(kind, tokenizer, count, length):
    "Token ids of texts: prose, as the paper's books, or prompts that ask for something far, as its summaries."
    if kind == "prose": return [x.ids for x in windows(tokenizer, speeches(1950)[:12], length, count)]
    tasks = KINDS["retrieval"]
    found = [make(tasks[i % len(tasks)], length, seed=200_000 + i, tokenizer=tokenizer) for i in range(count)]
    return [torch.tensor(prompt_tokens(x, tokenizer, False, f" {x.answer}")[1]) for x in found]

def networks(texts, fit, quick):
    "name -> (networks, classifier of keys or None), of the variants that are trained once."
    ids = {kind: [nearest_cluster(x[3][None], fit[None], "spherical")[0] for x in own] for kind, own in texts.items()}
    how = dict(hidden=HIDDEN, steps=20 if quick else STEPS, queries=128)
    learn = lambda kind="prose", own=None, hidden=HIDDEN, **more: fit_router(
        examples_of(texts[kind], own or ids[kind], **more), **how | dict(hidden=hidden))
    base = learn()
    of_keys = fit_router(key_lessons(texts["prose"], base), **how)
    new = [router_scores(x[3][None], of_keys, "mlp")[0].argmax(-1) for x in texts["prose"]]
    return {"as the paper": (base, None), "wider": (learn(hidden=4 * HIDDEN), None),
            "causal mask": (learn(causal=True), None), "no filter": (learn(reach=0), None),
            "other texts": (learn("retrieval"), None), "keys by a network": (learn(own=new), of_keys)}

def saap_variants(recorder):
    "Train each variant on prose, and see what it catches of lists, a kind that none has seen."
    (model, tokenizer), quick = loaded(), recorder.quick
    count, length, prompts = (2, 700, 1) if quick else (TEXTS, LENGTH, 6)
    lessons = {kind: Lessons(model, lessons_of(kind, tokenizer, count, length), QUERIES, 0)
               for kind in ("prose", "retrieval")}
    fit = torch.cat([*model_centroids(lessons["prose"], CLUSTERS, "spherical", True, 0).values()])
    texts = {kind: side_by_side(x.captured()) for kind, x in lessons.items()}
    trained = networks(texts, fit, quick)
    recorder.say("trained")
    for task in KINDS["lists"][:1 if quick else None]:
        for seed in range(prompts):
            x = asked(task, seed, length)
            ids, row = nearest_cluster(x[3][None], fit[None], "spherical")[0], dict(task=task, seed=seed)
            for name, (parts, of_keys) in trained.items():
                own = ids if of_keys is None else router_scores(x[3][None], of_keys, "mlp")[0].argmax(-1)
                row[name] = recall_of(x, own, parts)
            before = (x[0][:, :-LAST], x[1], x[2][:, :-LAST], x[3], x[4][:-LAST], x[5])
            more = tuned(trained["as the paper"][0], examples_of([before], [ids])[0], **TUNED)
            recorder.rows.append(row | {"tuned to the prompt": recall_of(x, ids, more)})
            recorder.say(f"{task}, prompt {seed}: {row['as the paper']:.3f}")
    return machine("cpu") | dict(model="pocket", clusters=CLUSTERS, hidden=HIDDEN, texts=count, length=length,
                                 queries=QUERIES, steps=STEPS, budget=BUDGET, window=WINDOW, tuned=TUNED)
