"""What each method saves of a token, for a GPU, a model, a length and a batch, from the records: what could be had,
what was had, and below which length it is a loss"""
import json
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from sparse_nb.bench import SHAPES, Shape
from benchmarks.end_to_end import LLAMA, random_model, weight_bytes
from benchmarks.generate import add_baselines, generate_methods
from benchmarks.recorder import recorded
from benchmarks.baselines import DENSE


SOURCES = "decode", "vattention_launches", "saap_launches", "sketch_walk_launches", "generate", "first_token"
_KERNELS = {"vAttention, 10 %": ("vattention_launches", dict(method="vattention")), # rows of whole steps in each record
            "SAAP, 5 %": ("saap_launches", dict(method="saap", H=32)),
            "Sketch&Walk, 10 %": ("sketch_walk_launches", dict(method="sketch_walk", H=32, block=64, index="fine4",
                                                              asked=0.1))}

def records_of(gpu: str) -> dict:
    "What was recorded on a GPU. ValueError for one that nothing was recorded on."
    every = {name: recorded(name) for name in SOURCES}
    known = sorted({gpu for records in every.values() for gpu in records})
    if gpu not in known: raise ValueError(f"gpu must be one of {', '.join(known)}, got {gpu!r}")
    return {name: records[gpu] for name, records in every.items() if gpu in records}

def kernel_times(records: Mapping, heads: Shape = SHAPES["llama3"]) -> list:
    "Times of one layer's attention for one query of each sequence, beside the fastest dense kernel of the same record."
    found = []
    def add(method, source, row, dense):
        best = min(dense, key=lambda x: x["median_us"])
        found.append(dict(method=method, n=row["n"], batch=row.get("B", 1), kernel_us=row["median_us"],
                          dense_us=best["median_us"], rival=best["method"], source=source))
    rows = [x for x in records.get("decode", dict(rows=[]))["rows"]
            if (x["H"], x["G"], x["D"]) == heads and x["mode"] == "graph"]
    place = lambda x: (x["n"], x.get("B", 1), x.get("H"))
    for x in rows:
        if x["method"] != "santa_systematic": continue
        add("SANTA, 128 samples", "decode", x, [y for y in rows if place(y) == place(x)
                                                and y["method"] in DENSE])
    if heads != SHAPES["llama3"]: return found
    for method, (source, wanted) in _KERNELS.items():
        rows = [x for x in records.get(source, dict(rows=[]))["rows"] if x["memory"] == "device"]
        for x in rows:
            if (x.get("launch"), x.get("heads", "group")) != ("merge", "group"): continue
            if any(x[name] != y for name, y in wanted.items()): continue
            add(method, source, x, [y for y in rows if place(y) == place(x) and y["method"] in DENSE])
    return found


@lru_cache
def _weight_bytes(shape): return weight_bytes(random_model(json.loads(shape), "meta"))  # shape: as JSON

def _at(rows, n, what):
    "A time at n keys, between measured ones; None outside."
    rows = sorted(rows, key=lambda row: row["n"])
    if not rows or not rows[0]["n"] <= n <= rows[-1]["n"]: return None
    return float(np.interp(n, [row["n"] for row in rows], [row[what] for row in rows]))

def _in_model(records, method, n, batch, shape):
    "What a whole model took on one GPU with a method and its baseline, ms, which cache (static if both) and steps."
    record, known = records.get("generate"), dict.fromkeys(("model_ms", "model_dense_ms", "cache", "replay"))
    if record is None or dict(record["meta"]["shape"]) != dict(shape): return known
    rows = add_baselines([dict(batch=1, static=False, gpus=1) | row for row in record["rows"]])
    place = lambda row: tuple(row[x] for x in ("way", "n", "batch", "gpus"))
    own = [row for row in rows if place(row) == (method, n, batch, 1) and row["rival"]]
    if not own: return known
    row = max(own, key=lambda row: row["static"])
    return dict(model_ms=row["median_us"] / 1e3, model_dense_ms=row["ratio"] * row["median_us"] / 1e3,
                cache="static" if row["static"] else "growing", replay=bool(row.get("replay")))

def worth(records: Mapping, n: int, batch: int = 1, shape: Mapping = LLAMA) -> list:
    """What each method saves of a token.

    Raises ValueError for counts below 1, and for a GPU and heads that nothing was recorded of.
    """
    for name, x in (("n", n), ("batch", batch)):
        if x < 1: raise ValueError(f"{name} must be at least 1, got {x}")
    if isinstance(records, str): records = records_of(records)
    H, G = shape["num_attention_heads"], shape["num_key_value_heads"]
    heads = Shape(H, G, shape.get("head_dim") or shape["hidden_size"] // H)
    if heads not in SHAPES.values():
        raise ValueError(f"shape must have heads that were recorded, {list(SHAPES.values())}, got {heads}")
    meta, layers = records["decode"]["meta"], shape["num_hidden_layers"]
    weights = _weight_bytes(json.dumps(dict(shape), sort_keys=True))
    weights /= max(meta["copy_gb_s"], meta["read_gb_s"]) * 1e6  # ms
    found, times, known = [], kernel_times(records, heads), generate_methods()
    for method in dict.fromkeys(row["method"] for row in times):
        rows = [row for row in times if (row["method"], row["batch"]) == (method, batch)]
        kernel, dense = _at(rows, n, "kernel_us"), _at(rows, n, "dense_us")
        row = dict(method=method, kernel_us=kernel, dense_us=dense)
        if kernel is not None:
            exact = getattr(known.get(method), "dense_layers", 0)
            own, of_dense = ((layers - exact) * kernel + exact * dense) / 1e3, layers * dense / 1e3
            row |= dict(times=of_dense / own, share=of_dense / (weights + of_dense), least_ms=weights + own,
                        dense_least_ms=weights + of_dense, least_times=(weights + of_dense) / (weights + own))
        row |= _in_model(records, method, n, batch, shape)
        row["model_times"] = row["model_ms"] and row["model_dense_ms"] / row["model_ms"]
        found.append(row)
    return found
