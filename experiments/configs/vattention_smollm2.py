"""Does a sample beside the heavy keys bring answers, does it matter who reads the question, and what becomes of a
text that vAttention writes itself? Asked of a model that has read books, and of long texts"""
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.quest import Quest
from sparse_nb.core.exact import attention
from sparse_nb import Exact, Streaming, TopK
from sparse_nb.core.streams import fold_in
from sparse_nb.grid import Grid, load_named
from sparse_nb.hash_attention import HashAttention
from sparse_nb.hf import attention_layers, attention_override, by_layer, prefill
from sparse_nb.metrics import relative_error
from sparse_nb.models.cache import fork_cache
from experiments.answers import answered, condensed, equal_grid, finish
from benchmarks.recorder import Recorder
from sparse_nb.text import token_bits
from sparse_nb.vattention import VAttention


def with_guarantee(eps: float, delta: float, topk: float, base: float, **settings) -> VAttention:
    "vAttention whose heads choose for themselves."
    return VAttention(eps, delta, topk=topk, base=base, share=False, **dict(sinks=4, window=16) | settings)

def sampled_arms() -> dict: # name -> `VAttention`
    "What is asked first. A name says tolerance and predictor."
    return {"vattention 0.05": with_guarantee(0.05, 0.05, 0.025, 0.025),
            "vattention 0.1": with_guarantee(0.1, 0.1, 0.025, 0.025),
            "vattention 0.4": with_guarantee(0.4, 0.2, 0.02, 0.015),
            "vattention+adamas 0.1": with_guarantee(0.1, 0.1, 0.025, 0.025, predictor=Adamas(0.025))}

def little_arms() -> dict: # name -> method
    "Methods that read about a fortieth of the keys, and MagicPIG as its paper sets it (8 bits, 75 tables)."
    return {"magicpig-8-75": MagicPIG(8, 75), "magicpig-10-32": MagicPIG(10, 32), "topk-2.5": TopK(0.025),
            "topk-0.5": TopK(0.005), "quest-2.5": Quest(0.025, 16), "double_sparsity-2.5": DoubleSparsity(0.025),
            "adamas-2.5": Adamas(0.025), "streaming-2.5": Streaming(4, 0.025),
            "vattention 0.4": sampled_arms()["vattention 0.4"]}


def drafted(
    model,               # a transformers decoder
    cache,               # of the text but its last token; it grows
    last: torch.Tensor,  # [1, 1]
    noise: torch.Tensor, # of the next tokens [T, vocabulary]
) -> torch.Tensor: # [T]
    "The next tokens, one by one, by the model's own attention."
    found = []
    for g in noise:
        last = (model(input_ids=last, past_key_values=cache, use_cache=True).logits[:, -1] + g).argmax(-1, keepdim=True)
        found.append(last[0])
    return torch.cat(found)

def decoded(
    model,
    cache,               # of the text but its last token; it grows
    ids: torch.Tensor,   # the text's last token, and those that were drafted after it but the last [1, T]
    noise: torch.Tensor, # of the next tokens [T, vocabulary]
    methods: dict,       # layer -> method
    seed: int,           # of the method's draws
) -> tuple: # next tokens after each [T], and density and error of each query [2, T]: means of layers and heads
    "What the method writes after each of the given tokens."
    told = []
    def attend(module, q, k, v, mask, scaling=None, **_):
        layer, seen = module.layer_idx, dict(causal=True, scale=scaling)
        out, stats = methods[layer].decode(q, k, v, seed=fold_in(seed, k.shape[2], layer), return_stats=True, **seen)
        error = relative_error(out, attention(q, k, v, **seen))
        told.append(torch.stack([stats.density.double().mean((0, 1)), error.double().mean((0, 1))]))
        return out.transpose(1, 2), None
    with attention_override(model, attend): z = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
    return (z + noise).argmax(-1), torch.stack(told).mean(0)

@torch.no_grad()
def write_alone(
    model,             # a transformers decoder
    ids: torch.Tensor, # how the text begins [1, N]
    method,            # with `decode`, or a dict from layer to one; None: the model's own attention
    tokens: int,       # to write
    *,
    draft: int = 32,   # tokens that exact attention writes ahead
    seed: int = 0,     # of the text
) -> tuple: # the tokens [T], and for each density, error and agreement with exact attention [3, T]; None for none
    "A text of the method's own, drawn from what the model says. Texts of one seed differ only where a choice does."
    cache, last, rng = prefill(model, ids[:, :-1]), ids[:, -1:], torch.Generator().manual_seed(seed)
    spread = torch.rand(tokens + draft, model.config.vocab_size, generator=rng).clamp(min=1e-20)
    noise, methods = -(-spread.log()).log(), by_layer("method", method or Exact(), attention_layers(model), "decode")
    written, told = ids.new_empty(0), []
    while len(written) < tokens:
        ahead, some = fork_cache(cache), noise[len(written):len(written) + draft].to(ids.device)
        new = drafted(model, ahead, last, some)
        if method is None: cache = ahead
        else:
            given = torch.cat([last[0], new[:-1]])[None]
            own, seen = decoded(model, cache, given, some, methods, seed)
            agree = (own == new).long().cumprod(0)
            new = own[:min(int(agree.sum()) + 1, len(own))]
            told.append(torch.cat([seen, agree[None]])[:, :len(new)])
            if len(new) < len(own): cache.crop(len(new) - len(own))  # what was drafted after it
        written, last = torch.cat([written, new]), new[None, -1:]
    return written[:tokens], torch.cat(told, 1)[:, :tokens].cpu() if told else None


BEGIN = "import numpy as np\n\n\ndef mean_of(values):\n    " # of the texts that are written

@dataclass(frozen=True)
class Size:
    "How much is asked"
    model: str    # that answers
    tasks: tuple  # for answers; the last two in both set-ups
    length: int   # tokens of a prompt
    prompts: int  # of a task; half as many in both set-ups
    each: int     # prompts of a step
    texts: int    # that are written by each method
    tokens: int   # of a text
    every: int    # tokens of a stretch that is told

FULL = Size("smollm2", ("needle", "multikey:keys=2", "multikey:keys=4"), 4096, 200, 50, 2, 4096, 256)
QUICK = Size("pocket", ("needle", "multikey"), 700, 2, 2, 1, 64, 32)

def writers(model) -> dict:
    "The paper's setting for long generations, with the oracle and with learned signatures, and exact attention."
    paper = VAttention.paper()
    hashed = {i: replace(paper, predictor=HashAttention(0.025, layer=i)) for i in attention_layers(model)}
    return {"vattention": paper, "vattention+hash": hashed, "exact": None}

def grids(size: Size) -> dict:
    "What is asked: `answers` at equal reads, and `prompt` and `context`, the two set-ups."
    found = {}
    def add(what, task, arms, prompts, at_once, **settings):
        for first in range(0, prompts, size.each):
            found[f"{what}.{task.replace(':', '.')}.{first}"] = Grid(
                size.model, [task], [size.length], arms, prompts=min(size.each, prompts - first), seed=first,
                chat=False, batch=at_once * size.length, **settings)
    for task in size.tasks: add("answers", task, sampled_arms(), size.prompts, 25)
    for task in size.tasks[-2:]:  # a question has twenty queries
        for setup, at_once in (("prompt", 25), ("context", 10)):
            add(setup, task, little_arms(), size.prompts // 2, at_once, setup=setup)
    return found


TEXTS = "exact", "vattention+hash", "vattention"  # names of `writers`

def text_rows(name: str, text: int, size: Size) -> list:
    "What is told of a text that a method writes."
    model, tokenizer = load_named("pocket")
    ids, method = tokenizer(BEGIN, return_tensors="pt").input_ids.to(model.device), writers(model)[name]
    written, told = write_alone(model, ids, method, size.tokens, seed=text)
    read = torch.cat([ids, written[None]], 1)
    told = {} if told is None else dict(zip(("density", "error", "agree"), told))
    told["bits"] = token_bits(model, read, read=ids.shape[1] - 1)[0][0]
    means = {x: [float(f"{y:.5g}") for y in z.double().view(-1, size.every).mean(1).tolist()] for x, z in told.items()}
    return [dict(part="generation", method=name, text=text, position=list(range(0, size.tokens, size.every)), **means)]

def vattention_smollm2(recorder):
    "Ask and write everything; in the quick form a few short prompts and a line of text. Raises as `finish`."
    size, files = QUICK if recorder.quick else FULL, []
    for name, grid in grids(size).items():
        files.append(finish(grid, recorder.out, name, recorder.say))
        if name.startswith("answers"):
            alone = {x: x.replace("vattention", "alone", 1) for x in grid.decode if x != "exact"}
            files.append(finish(equal_grid(grid, files[-1], alone), recorder.out, f"equal.{name}", recorder.say))
    texts = Recorder(recorder.name, recorder.out.with_suffix(".generation.json"), quick=recorder.quick,
                     say=recorder.say)
    texts.grow({f"{name} {text}": partial(text_rows, name, text, size) for name in TEXTS for text in range(size.texts)})
    about = answered(recorder, sorted(files), condensed(sorted(files)) + texts.rows)
    return about | dict(wrote=[texts.meta["gpu"]], size=asdict(size))
