"""How often steps of vAttention with SAAP's ranks break their guarantee, head by head, on the pocket model and on the
SmolLM2"""
import time

import pandas as pd

from sparse_nb.core.exact import attention, attention_weights
from sparse_nb.core.selection import weighted_attention
from sparse_nb.metrics import clopper_pearson, relative_error
from sparse_nb.models.capturing import Captured
from benchmarks.machine import machine
from experiments.archive.saap_heads import asked_heads
from sparse_nb.saap import Saap
from sparse_nb.vattention import VAttention, select_with_guarantee


GUARANTEES = {"denominator": (0.2, 0.2), "output": (0.1, 0.1)}  # guarantee -> eps, delta
ENDS, CLUSTERS, HEAVY, BASE = dict(sinks=4, window=32), 64, 0.03, 0.05

def vattention_with(
    guarantee: str, # in `GUARANTEES`
    index: str,     # "SAAP" or "oracle"
) -> VAttention:
    "The method that is asked."
    eps, delta = GUARANTEES[guarantee]
    predictor = Saap(clusters=CLUSTERS, **ENDS) if index == "SAAP" else index
    return VAttention(eps, delta, guarantee=guarantee, predictor=predictor, topk=HEAVY, base=BASE, share=False, **ENDS)

def failed_steps(
    x: Captured,        # a layer, of one sequence
    method: VAttention, # of `vattention_with`
    times: int,         # steps
    i: int = -2,        # number of the query
) -> tuple:             # which fail [H, times], bool; mean share of the keys that a step reads, a float
    "Steps of one query by every head of a layer."
    (q, k, v), state = x.seen(i), method.new_state()
    if state is not None: state.append(k, v, k_pre_rope=x.k_pre_rope[:, :, :k.shape[2]])
    each = q.expand(-1, -1, times, -1)
    chosen, certificate = select_with_guarantee(each, k, v, method, state, seed=7, scale=x.scale)
    if method.guarantee == "denominator":
        own = attention_weights(q, k, scale=x.scale).expand(-1, -1, times, -1).gather(-1, chosen.index)
        error = ((own * chosen.weight).sum(-1) - 1).abs()
    else:
        out = weighted_attention(each, k, v, chosen, scale=x.scale)
        error = relative_error(out, attention(q, k, v, scale=x.scale).expand_as(out))
    return (error > method.eps)[0], float(certificate.density.double().mean())


MODELS = {"pocket": "multikey", "smollm2": "multikey:keys=2"}  # the task of each
LENGTH, PROMPTS, STEPS = 2048, 2, 100

def saap_guarantee(recorder):
    "Count failures of every head of both models. FileNotFoundError without SmolLM2."
    quick, rows, began = recorder.quick, recorder.rows, time.monotonic()
    length, prompts, times = (700, 1, 20) if quick else (LENGTH, PROMPTS, STEPS)
    for model, task in [*MODELS.items()][:1 if quick else None]:
        for seed in range(prompts):
            for x in asked_heads(task, length, seed, model):
                for guarantee in GUARANTEES:
                    for index in "SAAP", "oracle":
                        failed, read = failed_steps(x, vattention_with(guarantee, index), times)
                        rows.append(dict(model=model, task=task, seed=seed, layer=x.layer, guarantee=guarantee,
                                         index=index, failed=failed.sum(-1).tolist(), density=round(read, 4)))
            recorder.say(f"{time.monotonic() - began:.0f} s: {model}, prompt {seed}")
    return machine("cpu") | dict(length=length, prompts=prompts, steps=times, guarantees=GUARANTEES, clusters=CLUSTERS,
                                 topk=HEAVY, base=BASE, **ENDS)


def broken_guarantees(
    rows: list,   # of the record
    times: int,   # steps of a case
) -> pd.DataFrame: # a row for each model, guarantee and index
    "Failures over cases. Those that `surely` break a guarantee do so at 5 % for all cases of the row together."
    found = {}
    for key, own in pd.DataFrame(rows).groupby(["model", "guarantee", "index"], sort=False):
        failed, (_, delta) = own.failed.explode().astype(int), GUARANTEES[key[1]]
        sure = [clopper_pearson(int(x), times, 1 - 0.05 / len(failed)).low > delta for x in failed]
        found[key] = dict(cases=len(failed), delta=delta, failing=failed.mean() / times, worst=failed.max() / times,
                          surely=sum(sure), read=own.density.mean())
    return pd.DataFrame(found).T.rename_axis(["model", "guarantee", "index"])
