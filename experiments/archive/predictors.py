"""What predictors find of the heaviest tenth of the keys, and how wrong the output is, in prompts of 3,000 and of
32,000 tokens"""

import torch

from sparse_nb import pocket
from sparse_nb.hash_attention import HashAttention
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.quest import Quest
from sparse_nb.core.exact import attention, attention_weights
from sparse_nb import Streaming, TopK
from sparse_nb.core.learnt import weights_id
from sparse_nb.core.selection import select_topk, weighted_attention
from sparse_nb.metrics import coverage, relative_error
from sparse_nb.models.capturing import capture
from benchmarks.machine import machine
from sparse_nb.tasks import make


BUDGET, QUERIES, TASKS, LENGTHS = 0.1, 4, ("multikey", "frequent_words"), (3072, 10000, 32000)

PREDICTORS = {"topk": lambda i: TopK(BUDGET), "quest": lambda i: Quest(BUDGET),
              "double_sparsity": lambda i: DoubleSparsity(BUDGET), "adamas": lambda i: Adamas(BUDGET),
              "hash_attention": lambda i: HashAttention(BUDGET, "pocket", i),
              "streaming": lambda i: Streaming(4, BUDGET)}

def measure(
    layers: list, # what `capture` caught
) -> list:        # of dicts: keys, method, layer, head, recall, mass, error; means over the queries
    "What each method finds at the end of one prompt, and how wrong it is."
    rows = []
    for i, (q, k, v) in enumerate((x.q, x.k, x.v) for x in layers):
        exact, weights = attention(q, k, v, causal=True), attention_weights(q, k, causal=True)
        best = select_topk(q, k, budget=BUDGET, causal=True)
        top = best.dense(k.shape[2]) > 0
        for name, method in PREDICTORS.items():
            chosen = method(i).select(q, k, causal=True)
            found = (top & (chosen.dense(k.shape[2]) > 0)).sum(-1) / top.sum(-1)
            mass = coverage(weights, chosen) / coverage(weights, best)
            error = relative_error(weighted_attention(q, k, v, chosen), exact)
            of_heads = zip(*(x[0].mean(-1).tolist() for x in (found, mass, error)))
            rows += [dict(keys=k.shape[2], method=name, layer=i, head=h, recall=round(r, 5), mass=round(m, 5),
                          error=round(e, 5)) for h, (r, m, e) in enumerate(of_heads)]
    return rows


def predictors(recorder):
    "Recall, mass and error of every predictor on each head, for each task and length."
    (model, tokenizer), quick, rows = pocket.load(), recorder.quick, recorder.rows
    for length in (640,) if quick else LENGTHS:
        for task in TASKS[:1] if quick else TASKS:
            ids = tokenizer(make(task, length, seed=1, tokenizer=tokenizer).prompt, return_tensors="pt").input_ids
            with torch.no_grad(): layers = capture(model, ids, positions=range(-QUERIES, 0))
            rows += [dict(task=task, length=length) | row for row in measure(layers)]
            recorder.say(f"{task}, {ids.shape[1]:,} keys: {len(rows)} rows")
    return machine("cpu") | dict(budget=BUDGET, queries=QUERIES, most=model.config.max_position_embeddings,
                                 weights=dict(pocket=weights_id(model)))
