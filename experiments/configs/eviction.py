"""H2O and SnapKV beside streaming, Quest and top-k, at equal rows and at equal bytes: the pocket model's answers,
with the question known and not known"""
from sparse_nb.methods.quest import Quest
from sparse_nb import Streaming, TopK
from sparse_nb.eviction import H2O, SnapKV
from sparse_nb.grid import Grid
from experiments.answers import evaluate


SHARE = 0.2  # of the keys, or of the bytes of all keys and values

def equal_rows(share: float = SHARE) -> dict:
    "Methods that read as many rows."
    return {"streaming": Streaming(4, share), "topk": TopK(share), "quest": Quest(share), "h2o": H2O(share),
            "snapkv": SnapKV(share)}

def equal_bytes(head_dim: int, share: float = SHARE) -> dict:
    "Methods that read as many bytes, index included. ValueError where the index alone takes more."
    quest = share - Quest().index_bytes(head_dim) / (4 * head_dim)
    if quest <= 0: raise ValueError(f"share must be more than an index reads, {share - quest:.4g}, got {share}")
    return {"streaming": Streaming(4, share), "quest": Quest(quest), "h2o": H2O(share / (1 + 1 / head_dim)),
            "snapkv": SnapKV(share)}


TASKS, LENGTH, PROMPTS, SETUPS = ("multikey", "kv"), 576, 50, ("prompt", "context")

def grid_of(setup: str, quick: bool = False) -> Grid:
    "What one file of the record holds."
    methods = equal_rows() | {"quest-bytes": equal_bytes(64)["quest"]}  # of H2O that would be a key less
    if quick: methods = {name: methods[name] for name in ("quest", "snapkv")}
    tasks, prompts = (TASKS[:1], 3) if quick else (TASKS, PROMPTS)
    return Grid("pocket", list(tasks), [LENGTH], methods, prompts=prompts, setup=setup, batch=10 * LENGTH)

def eviction(recorder):
    "Evaluate the pocket model. Raises as `evaluate`."
    return evaluate(recorder, {setup: grid_of(setup, recorder.quick) for setup in SETUPS}) | dict(share=SHARE)
