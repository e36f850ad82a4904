"""How many draws does an answer take? SANTA's budgets on questions that people know, GSM8K and MMLU, beside exact
attention and top-k, on a model of 1.5 billion weights"""
import math
from typing import NamedTuple

import pandas as pd

from sparse_nb import TopK
from sparse_nb.evaluate import accuracy
from sparse_nb.exams import last_number
from sparse_nb.metrics import clopper_pearson, paired_interval
from sparse_nb.santa import Santa
from benchmarks.answers import loaded
from benchmarks.workers import filled_in

BUDGETS = 1, 4, 16, 64, 256, 1024
LENGTHS = {"gsm8k": 2048, "mmlu": 4096}  # tokens of a prompt with its reply, at most
QUESTIONS = {"gsm8k": 1319, "mmlu": 1531}
AT_ONCE = {"written": 220, "all": 44} # questions of a cell: prompts that draw take long
BATCH = {"gsm8k": 220, "mmlu": 44} # prompts read together
QUICK = { # in place of the data sets, which the quick form does without
    "gsm8k": dict(examples=[["1 + 1?", "1 + 1 = 2. So the answer is 2."]],
                  questions=[["2 + 2?", "2 + 2 = 4. So the answer is 4.", "4"],
                             ["3 + 3?", "So the answer is 6.", "6"]]),
    "mmlu": dict(examples=dict(sums=[["1 + 1?", ["1", "2", "3", "4"], 1]]),
                 questions=[["sums", "2 + 2?", ["4", "5", "6", "7"], 0],
                            ["sums", "3 + 3?", ["4", "5", "6", "7"], 2]])}
PARTS = {"written": "from the prompt's last token on", "all": "all, the prompt's too"} # which queries are the method's


class Cell(NamedTuple):
    "Questions of one task, which all methods of a part answer"
    part: str    # one of `PARTS`
    model: str
    task: str    # in `LENGTHS`
    length: int  # tokens
    seeds: range # numbers of questions

def methods() -> dict:
    "name -> method: as many draws, or keys, as the number says."
    made = dict(systematic=lambda s: Santa(s), iid=lambda s: Santa(s, "iid"), topk=TopK)
    return {f"{name}-{size}": make(size) for name, make in made.items() for size in BUDGETS}

def cells(quick: bool = False) -> list:
    "Those of the record, a batch of questions of both tasks before the next one; written replies to all queries last."
    if quick: return [Cell(part, "pocket", task, 1024, range(2)) for part in PARTS for task in LENGTHS]
    of = lambda part, task: [Cell(part, "qwen", task, LENGTHS[task], range(a, min(a + AT_ONCE[part], QUESTIONS[task])))
                             for a in range(0, QUESTIONS[task], AT_ONCE[part])]
    found = [x for part, task in (("written", "mmlu"), ("written", "gsm8k"), ("all", "mmlu")) for x in of(part, task)]
    return sorted(found, key=lambda cell: cell.seeds[0]) + of("all", "gsm8k")

def of_cell(row: dict) -> tuple:
    "What tells a row's cell from others."
    return row["part"], row["model"], row["task"], row["length"], *row["seeds"]

def asked(cell: Cell) -> list:
    "Of a cell tables of methods, each with what reads the prompts: one reading for all that only decode."
    own = methods()
    if cell.model == "pocket": own = {"systematic-4": own["systematic-4"]}
    if cell.part == "written": return [({"exact": None} | own, None)]
    return [({name: method}, method) for name, method in own.items() if name.startswith("systematic")]

def evaluate(cell: Cell) -> list:
    "A row for each method: what is right, question by question, what was found in the replies, how long these are."
    model, tokenizer = loaded(cell.model)
    more = dict(task_settings=dict(data=QUICK[cell.task])) if cell.model == "pocket" else {}
    frames = [accuracy(model, tokenizer, cell.task, cell.length, some, prompts=len(cell.seeds), seed=cell.seeds[0],
                       batch=BATCH[cell.task], chunk=512, prefill=prefill, **more) for some, prefill in asked(cell)]
    return [_row(cell, tokenizer, *own) for frame in frames for own in frame.groupby("method", sort=False)]

def _row(cell, tokenizer, method, own):
    "The row of a method, of a table that `accuracy` makes"
    row = cell._asdict() | dict(seeds=[cell.seeds[0], cell.seeds[-1] + 1], method=method,
                                right=own.exact.astype(int).tolist())
    if cell.task == "mmlu": return row | dict(answers="".join(own.answer))
    tokens = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in own.answer]
    return row | dict(stated=own.characters.astype(int).tolist(), answers=[*map(last_number, own.answer)],
                      tokens=tokens)

def table_of(rows: list) -> pd.DataFrame:
    """Of each task, part and method of a record: questions, share of right answers, points lost against exact attention
    on the same questions, both with intervals, and tokens of a reply."""
    right, tokens = {}, {}
    for row in rows:
        key = row["task"], row["part"], row["method"]
        right.setdefault(key, {}).update(zip(range(*row["seeds"]), row["right"]))
        tokens.setdefault(key, []).extend(row.get("tokens", []))
    exact, found = {}, {}
    for (task, _, method), own in right.items():
        if method == "exact": exact.setdefault(task, {}).update(own)
    for (task, part, method), own in right.items():
        low, share, high = clopper_pearson(sum(own.values()), len(own))
        both = [exact[task][seed] - x for seed, x in own.items() if seed in exact.get(task, {})]
        less, lost, more = (100 * x for x in paired_interval(both)) if both else [math.nan] * 3
        mean = sum(tokens[task, part, method]) / max(1, len(tokens[task, part, method])) or math.nan
        found[task, part, method] = dict(questions=len(own), right=share, low=low, high=high, lost=lost, lost_low=less,
                                         lost_high=more, tokens=mean)
    return pd.DataFrame(found).T.rename_axis(["task", "part", "method"])


def santa_budgets(recorder) -> dict:
    "Evaluate every cell that the file lacks, and write it after each."
    about = dict(methods={name: repr(method) for name, method in methods().items()}, parts=PARTS,
                 prompts="plain text; gsm8k: 8 examples with their steps, up to 256 tokens written greedily; mmlu: "
                         "validation part, 5 examples, the likeliest of four letters")
    filled_in(recorder, evaluate, cells(recorder.quick), of_cell, about)
    return about
