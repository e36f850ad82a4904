"""Guarantees, answers, errors and long texts, measured on a GPU with hundreds of long prompts"""
import json
from dataclasses import asdict, dataclass
from functools import partial

import torch

from sparse_nb import hf
from sparse_nb.hash_attention import HashAttention
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.quest import Quest
from sparse_nb.core.checks import check_count
from sparse_nb.core.exact import attention_weights
from sparse_nb import Exact, Method, Streaming, TopK, TopP, Uniform
from sparse_nb.core.selection import Selection
from sparse_nb.evaluate import forced_decode
from experiments.answers import PocketModel
from sparse_nb.corpus import HELD_OUT, texts
from sparse_nb.vattention import VAttention


def denominator_errors(
    method: Method,  # with weights that estimate sums over all keys
    q: torch.Tensor, # one query for each head [B, H, 1, D]
    k: torch.Tensor, # keys [B, G, N, D]
    *,
    times: int,      # independent decode steps
    seed: int = 0,   # of the draws
) -> tuple[torch.Tensor, Selection]: # D_hat / D - 1 [B, H, times] in float64, and what the steps read
    """Errors of the denominator in repeated decode steps of the same queries.

    Raises TypeError or ValueError for `times` and `q` that do not fit, and as the method's `select`.
    """
    check_count("times", times)
    if q.shape[2] != 1: raise ValueError(f"q must have one query for each head, got {q.shape[2]}")
    chosen = method.select(q.expand(-1, -1, times, -1), k, seed=seed)
    weights = attention_weights(q.double(), k.double()).expand(-1, -1, times, -1)
    return (weights.gather(-1, chosen.index) * chosen.weight.double()).sum(-1) - 1, chosen


GUARANTEE_KINDS = {"plain": dict(plugin="plain"), "clt": {}, "bernstein": dict(bound="bernstein"),
                 "hoeffding": dict(bound="hoeffding")} # settings of `VAttention`

def _digits(x): return [float(f"{y:.4g}") for y in x.double().mean(-1).flatten().tolist()]

def guarantee_counts(
    q: torch.Tensor,  # one query for each layer [L, H, 1, D]
    k: torch.Tensor,  # keys [L, G, N, D]
    *,
    times: int,       # decode steps of each head
    levels: tuple = (0.05, 0.1, 0.2), # eps, and delta
    seed: int = 0,    # of the draws
    **kept,           # settings of `VAttention`: what is kept
) -> list: # a dict for each kind, eps and delta: these, times, and for each layer and head failures, density and error
    """How often vAttention's denominator is off by more than eps.

    `failures` is a count, density and (relative) error are means. Raises as `denominator_errors`.
    """
    rows = []
    for kind, settings in GUARANTEE_KINDS.items():
        for eps, delta in ((eps, delta) for eps in levels for delta in levels):
            method = VAttention(eps=eps, delta=delta, share=False, **settings, **kept)
            error, chosen = denominator_errors(method, q, k, times=times, seed=seed)
            failures = (error.abs() > eps).sum(-1).flatten().tolist()
            rows.append(dict(kind=kind, eps=eps, delta=delta, times=times, head=list(range(len(failures))),
                             failures=failures, density=_digits(chosen.density(k.shape[2])),
                             error=_digits(error.abs())))
    return rows


VATTENTION_SETTINGS = { # density -> settings that read about as much of 16,384 keys (0.01: half as much again)
    0.01: dict(topk=0.003, base=0.0025, eps=0.9, guarantee="output", plugin="plain"),
    0.025: dict(topk=0.01, base=0.003, eps=0.55, guarantee="output", plugin="plain"),
    0.05: dict(topk=0.02, base=0.005, eps=0.27, guarantee="output", plugin="plain"),
    0.1: dict(topk=0.05, base=0.005, eps=0.065), 0.2: dict(topk=0.05, base=0.005, eps=0.025)}
OUTPUT_SETTINGS = dict(topk=0.05, base=0.005, eps=0.125, guarantee="output", plugin="plain") # about 10 %

def vattention_of(density: float, predictor="oracle"):
    """vAttention that reads about this share of long contexts on the pocket model, each head with a choice of its own.

    Shorter contexts need a larger share for the same guarantee. Raises ValueError for another density.
    """
    if density not in VATTENTION_SETTINGS:
        raise ValueError(f"density must be one of {', '.join(map(str, VATTENTION_SETTINGS))}, got {density!r}")
    return VAttention(delta=0.1, sinks=4, window=16, predictor=predictor, share=False, **VATTENTION_SETTINGS[density])

def _name(name, density): return f"{name}-{100 * density:g}"

def vattention_methods(densities: tuple = (0.1, 0.05, 0.025, 0.01)) -> dict:
    "Top-k and vAttention of equal density; output-10 guarantees something about the output."
    methods = {"exact": Exact()}
    for d in densities: methods |= {_name("topk", d): TopK(d), _name("vattention", d): vattention_of(d)}
    return methods | {"output-10": VAttention(delta=0.1, sinks=4, window=16, share=False, **OUTPUT_SETTINGS)}


def _predicted(layers, density):
    "Top-k, a uniform sample, and every predictor of heavy keys, alone and in vAttention"
    hashed = {i: HashAttention(density, layer=i) for i in range(layers)}
    alone = {"quest": Quest(density), "double_sparsity": DoubleSparsity(density), "adamas": Adamas(density),
             "hash_attention": hashed}
    methods = {"topk": TopK(density), "uniform": Uniform(density), "vattention+topk": vattention_of(density)}
    for name, method in alone.items():
        if isinstance(method, dict): inside = {i: vattention_of(density, one) for i, one in method.items()}
        else: inside = vattention_of(density, method)
        methods |= {name: method, f"vattention+{name}": inside}
    return {_name(name, density): method for name, method in methods.items()}

def _magicpig(tables): return {f"magicpig-{bits}-{n}": MagicPIG(bits, n) for bits, n in tables}

def pareto_methods(layers: int, densities: tuple = (0.025, 0.05, 0.1, 0.2)) -> dict:
    "Every predictor of heavy keys alone and in vAttention, and methods that stand alone."
    methods = {"exact": Exact()} | {_name("topp", x): TopP(x) for x in (0.7, 0.85, 0.95, 0.98)}
    methods |= _magicpig(((10, 32), (8, 32), (6, 16), (6, 32)))
    for d in densities: methods |= _predicted(layers, d)
    return methods

def setup_methods(layers: int, density: float = 0.025) -> dict:
    "Methods that read little, among them the paper's MagicPIG with 8 bits and 75 tables (Table 10)."
    few = {_name("topk", density / 5): TopK(density / 5), _name("streaming", density): Streaming(4, density)}
    return {"exact": Exact()} | _magicpig(((8, 75), (10, 32))) | _predicted(layers, density) | few


FOUR = "frequent_words", "flat_words", "flatter_words", "multivalue" # asked at every density

@dataclass(frozen=True)
class Size:
    "How much is asked"
    prompts: int           # of each task; half as many for `setups` and `pareto`
    length: int            # tokens of a prompt; half as many for `setups` and `pareto`
    times: int             # decode steps of each captured head
    texts: int             # that are decoded
    every: int             # tokens of a text that are decoded at once
    tokens: int            # of the prompts read at once
    captures: tuple        # tasks of the prompts for `guarantee`
    tasks: tuple           # for `accuracy`
    setup_tasks: tuple     # for `setups`
    pareto_tasks: tuple    # for `pareto`
    densities: tuple       # of `accuracy`: all for the tasks in `FOUR`, the first for the others
    pareto: tuple          # and of `pareto`; the first for `setups`

FULL = Size(
    prompts=200, length=16384, times=56, texts=2, every=256, tokens=1_700_000,
    captures=("flat_words", "multikey", "variable_tracking", "kv"),
    tasks=(*FOUR, "multikey", "variable_tracking", "kv", "multiquery", "needle"),
    setup_tasks=("multikey", "flat_words"), pareto_tasks=("flat_words", "multikey", "frequent_words"),
    densities=(0.1, 0.05, 0.025, 0.01), pareto=(0.025, 0.05, 0.1, 0.2))
QUICK = Size(
    prompts=1, length=800, times=2, texts=1, every=200, tokens=800, captures=("multikey",), tasks=("flat_words",),
    setup_tasks=("flat_words",), pareto_tasks=("flat_words",), densities=(0.1,), pareto=(0.1,))

def method_settings(name: str, method, layers):
    "Name and settings of what a row was measured with, for `meta`."
    each = [json.loads(m.to_json()) for m in hf.by_layer(name, method, layers, "decode").values()]
    return each[0] if all(x == each[0] for x in each) else each


def guarantee_steps(pocket, size):
    "Failures of the guarantee on captured heads, with the usual keys kept and with few"
    def rows(at, name):
        q, k, _ = pocket.captured(name, size.length, 1000 + at)
        about = dict(part="guarantee", task=name, length=size.length, seed=1000 + at)
        usual = guarantee_counts(q, k, times=size.times, seed=at)
        few = guarantee_counts(q, k, times=size.times, seed=at, levels=(0.1,), sinks=4, window=16, topk=1)
        return [about | dict(kept=kept) | row for kept, counts in (("usual", usual), ("few", few)) for row in counts]
    return {f"guarantee {name} {size.length}": partial(rows, at, name) for at, name in enumerate(size.captures)}

def _asked(pocket, size, part, names, methods, *, half=False, setups="A"):
    "Steps of watched answers, and the methods that give them"
    length, prompts = (size.length // 2, max(1, size.prompts // 2)) if half else (size.length, size.prompts)
    def rows(name, setup):
        given = dict(prompts=prompts, tokens=size.tokens, setup=setup, watch=True)
        return pocket.evaluate(part, name, length, methods, **given)
    return {f"{part} {name} {length} {setup}": partial(rows, name, setup) for name in names for setup in setups}

def answer_steps(pocket, size):
    "Steps of the parts `accuracy`, `setups` and `pareto`; and part -> method name -> method"
    layers, few = len(pocket.layers), vattention_methods(size.densities[:1])
    methods = {"accuracy": vattention_methods(size.densities), "setups": setup_methods(layers, size.pareto[0]),
               "pareto": pareto_methods(layers, size.pareto)}
    accuracy = {}
    for name in size.tasks:
        accuracy |= _asked(pocket, size, "accuracy", [name], methods["accuracy"] if name in FOUR else few)
    setups = _asked(pocket, size, "setups", size.setup_tasks, methods["setups"], half=True, setups="BA")
    pareto = _asked(pocket, size, "pareto", size.pareto_tasks, methods["pareto"], half=True)
    return dict(accuracy=accuracy, setups=setups, pareto=pareto), methods


def held_out_ids(pocket, size):
    "Tokens of texts spread evenly over what the model has not read [texts, length]; ValueError for more than there is"
    corpus, length = "\n\n".join(texts(HELD_OUT)[0]), size.length
    if (most := len(corpus) // length) < size.texts: raise ValueError(f"texts must be at most {most}, got {size.texts}")
    begin = [i * (len(corpus) - length) // max(1, size.texts - 1) for i in range(size.texts)]
    ids = [pocket.tokenizer(corpus[i:i + length - 1])["input_ids"] for i in begin]
    return torch.tensor(ids, device=pocket.model.device)

def _rounded(column): return [float(f"{y:.5g}") if isinstance(y, float) else y for y in column.tolist()]

def generation_rows(pocket, size):
    "Long texts decoded by vAttention, by top-k and streaming of the density that it read, and exactly; and the methods"
    ids = held_out_ids(pocket, size)
    methods, rows = {"vattention": vattention_of(size.densities[0])}, []
    for name in ("vattention", "topk", "streaming", "exact"):
        frame = forced_decode(pocket.model, ids, methods[name], every=size.every)
        if name == "vattention":
            budget = float(f"{frame.density.mean():.4f}")
            methods |= {"topk": TopK(budget), "streaming": Streaming(4, budget), "exact": Exact()}
        for layer, lines in frame.groupby("layer"):
            columns = {x: _rounded(lines[x]) for x in ("position", "density", "error", "bits")}
            rows.append(dict(part="generation", method=name, texts=size.texts, seed=0, layer=layer, **columns))
    return rows, methods


def vattention_pocket(recorder):
    "Measure what the vAttention chapter says of the pocket model at full length, step by step."
    size, pocket = QUICK if recorder.quick else FULL, PocketModel()
    asked, methods = answer_steps(pocket, size)
    settings = {name: x for name, x in asdict(size).items() if name != "tokens"}
    told = lambda given: {name: method_settings(name, m, pocket.layers) for name, m in given.items()}
    settings["methods"] = {part: told(given) for part, given in methods.items()}

    def generation():
        rows, used = generation_rows(pocket, size)
        recorder.meta["methods"]["generation"] = told(used)
        return rows

    steps = guarantee_steps(pocket, size) | asked["accuracy"] | asked["setups"]
    recorder.grow(steps | {f"generation {size.length}": generation} | asked["pareto"], **pocket.about, **settings)
