"""Every method on the pocket model and on SmolLM2: seven tasks at four lengths, and prose, against exact
attention on the same prompts"""
from functools import cache
from pathlib import Path

from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity, heavy_channels
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.quest import Quest
from sparse_nb.compose import Then
from sparse_nb import Streaming, TopK, TopP, Uniform
from sparse_nb.eviction import H2O, SnapKV
from sparse_nb.grid import Grid, load_named, needs_queries
from sparse_nb.results import read_results
from sparse_nb.hash_attention import HashAttention
from sparse_nb.models.capturing import capture
from experiments.answers import answered, condensed, equal_grid, finish
from sparse_nb.santa import Santa
from sparse_nb.tasks import TASKS
from sparse_nb.text import speeches
from sparse_nb.vattention import VAttention


DENSITY = 0.1

@cache
def channels_of(model: str) -> tuple:
    "Double Sparsity's channels, chosen offline as its paper does: on 1,024 tokens of a message that is not asked."
    it, tokenizer = load_named(model)
    ids = tokenizer(speeches(1980)[0], truncation=True, max_length=1024, return_tensors="pt").input_ids
    return tuple(heavy_channels(x.q, x.k, 16) for x in capture(it, ids.to(it.device)))

def halved(predictor) -> VAttention:
    "Half of `DENSITY` heavy keys, half a sample of the others, and more where nine tenths of the rest could be wrong."
    return VAttention(eps=0.9, delta=0.5, sinks=0, window=0, topk=DENSITY / 2, base=DENSITY / 2, predictor=predictor,
                      share=False)

def methods_of(model: str, channels: tuple | None = None) -> dict:
    "What is asked of a model; HashAttention has learnt its signatures on the pocket model alone."
    alone = {"quest-16": Quest(DENSITY, 16), "quest-64": Quest(DENSITY, 64),
             "double_sparsity": DoubleSparsity(DENSITY, chosen=channels), "adamas": Adamas(DENSITY)}
    if model == "pocket": alone |= {"hash_attention": HashAttention(DENSITY)}
    methods = {"topk": TopK(DENSITY), "topp": TopP(0.9),
               "streaming": Streaming(4, DENSITY), "uniform": Uniform(DENSITY), "santa": Santa(64),
               "magicpig": MagicPIG(8, 32), "double_sparsity-prompt": DoubleSparsity(DENSITY)} | alone
    methods |= {f"half+{name}": halved(method) for name, method in ({"topk": "oracle"} | alone).items()}
    methods |= {"then": Then(Quest(0.2, 16), Santa(64)), "h2o": H2O(DENSITY), "snapkv": SnapKV(DENSITY)}
    return methods | {"guarantee": VAttention(0.1, 0.1, sinks=4, window=16, topk=0.025, base=0.025, share=False)}


LENGTHS = 1024, 2048, 4096, 8192
# of the pocket's other tasks SmolLM2 was hardly ever right
ASKED = {"pocket": [*TASKS, "text"],
         "smollm2": ["needle", "multikey:keys=2", "multikey:keys=4", "multikey", "kv", "text"]}

def cells() -> list:
    "(model, task, length) of every grid of the record, shortest prompts first."
    every = [(model, task, length) for model, tasks in ASKED.items() for task in tasks
             for length in ((4096,) if task == "text" else LENGTHS)]
    return sorted(every, key=lambda cell: cell[2])

def grid_of(model: str, task: str, length: int, quick: bool = False) -> Grid:
    "What one file of the record holds."
    methods, prose = methods_of(model, None if quick else channels_of(model)), task == "text"
    if quick: methods = {name: methods[name] for name in ("topk", "quest-16", "half+quest-16")}
    if prose: methods = {name: method for name, method in methods.items() if not needs_queries(method)}
    return Grid(model, [task], [length], methods, prompts=3 if quick else 8 if prose else 100,
                batch=4 * length if prose else min(100 * length, 400_000), every=256,
                texts=speeches(1990)[::-1] if prose else ())

def look_grid(length: int, chat: bool) -> Grid:
    "What SmolLM2 with exact attention is asked to see which tasks it can do."
    return Grid("smollm2", [*TASKS, "multikey:keys=2", "multikey:keys=4"], [min(length, 8000)], {}, prompts=50,
                chat=chat, batch=50 * length)  # a batch needs room for its longest answer: the model holds 8,192 tokens

def rows_of_two(files: list) -> list:
    "`condensed`, with the parts pocket, smollm2, and, of what `look_grid` asked, plain and chat."
    rows = []
    for file in files:
        about, of_equal, looks = read_results(file)[0], ".equal." in Path(file).name, ".look." in Path(file).name
        own = [row for row in condensed([file]) if not (of_equal and row["method"] == "exact")]
        if looks: own = [row | dict(part="chat" if about["chat"] else "plain") for row in own]
        rows += own
    return rows

def two_models(recorder):
    "Evaluate both models; in the quick form one task, a short prompt, the pocket model. Raises as `finish`."
    out, quick, say = recorder.out, recorder.quick, recorder.say
    files = [] if quick else [
        finish(look_grid(length, chat), out, f"look.{'chat' if chat else 'plain'}.{length}", say)
        for length in LENGTHS for chat in (True, False)]
    for model, task, length in [("pocket", "needle", 700)] if quick else cells():
        grid, name = grid_of(model, task, length, quick), f"{model}.{task.replace(':', '.')}.{length}"
        files.append(finish(grid, out, name, say))
        if task == "text": continue
        alone = {x: x.replace("half", "equal") for x in grid.decode if x.startswith("half+") and x != "half+topk"}
        files.append(finish(equal_grid(grid, files[-1], alone), out, f"equal.{name}", say))
    return answered(recorder, files, rows_of_two(files))
