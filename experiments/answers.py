"""What the records of answers share: the tasks, the model that is asked, what is kept of grids, and their reader"""
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from sparse_nb import hf, pocket
from sparse_nb import Exact, TopK
from sparse_nb.evaluate import accuracy, compare
from sparse_nb.grid import CELL, frame_of, run
from sparse_nb.results import read_results
from sparse_nb.metrics import Interval, bootstrap_interval
from benchmarks.recorder import read_record
from sparse_nb.tasks import make


SANTA_TASKS = { # label -> task and its settings
    "multikey": ("multikey", {}), "multivalue": ("multivalue", {}), "frequent_words": ("frequent_words", {}),
    "flat_words": ("frequent_words", dict(ratio=3)), "flatter_words": ("frequent_words", dict(ratio=2))}

def labelled_task(
    label: str, # in `SANTA_TASKS`, or the name of a task
) -> tuple: # name of the task and its settings
    "What a label in a record stands for"
    return SANTA_TASKS.get(label, (label, {}))


def stacked(
    captured: list, # of `hf.capture`, with one position
) -> tuple: # q [L, H, 1, D], k and v [L, G, N, D] in at least float32
    "The layers of a capture of one prompt as one batch."
    return tuple(torch.cat(x).float() for x in zip(*(layer.seen(-1) for layer in captured)))


class PocketModel:
    "The pocket model, on a GPU (in bfloat16) if there is one, asked by the labels of `SANTA_TASKS`"
    def __init__(self):
        gpu = torch.cuda.is_available()
        self.model, self.tokenizer = pocket.load("cuda", torch.bfloat16) if gpu else pocket.load()
        self.layers = range(self.model.config.num_hidden_layers)
        self.about = dict(dtype=str(self.model.dtype).removeprefix("torch."), model="pocket")

    def captured(self,
        label: str,  # of the task
        length: int, # tokens of the prompt
        seed: int,   # of the prompt
    ) -> tuple: # as `stacked`
        "What the layers' attention works on at the end of a prompt"
        task, settings = labelled_task(label)
        example = make(task, length, seed=seed, tokenizer=self.tokenizer, **settings)
        ids = torch.tensor([self.tokenizer(example.prompt)["input_ids"]], device=self.model.device)
        return stacked(hf.capture(self.model, ids, positions=[-1]))

    def evaluate(self,
        part: str,          # of the record
        label: str,         # of the task
        length: int,        # tokens of a prompt
        methods: Mapping,   # name -> method, or dict or function from layer to method; one is "exact" if watched
        *,
        prompts: int,       # how many, seeds 0 and following
        tokens: int,        # of the prompts read at once
        setup: str = "A",   # as in `accuracy`
        watch: bool = False, # also: density and error of decode steps, and whether answers are those of exact attention
    ) -> list: # a row for each method
        "Answers of several methods to a task"
        task, settings = labelled_task(label)
        frame = accuracy(self.model, self.tokenizer, task, length, methods, prompts=prompts, setup=setup,
                         batch=max(1, tokens // length), task_settings=settings, chunk=length, watch=watch)
        exact = frame.answer[frame.method == "exact"].to_numpy()
        digits = lambda x: "".join("01"[bool(y)] for y in x)
        rows = []
        for name, group in frame.groupby("method", sort=False):
            rows.append(dict(part=part, task=label, length=length, setup=setup, method=name, right=digits(group.exact),
                             characters=round(group.characters.mean(), 4)))
            if not watch or isinstance(methods[name], Exact): continue
            rows[-1] |= dict(same=digits(group.answer.to_numpy() == exact))
            rows[-1] |= {x: float(f"{group[x].mean():.5g}") for x in ("density", "error")}
        return rows


def _spread(rows):
    "Rows whose lists become a row for each of their items"
    for row in rows:
        for name, new in (("right", "exact"), ("same", "same")):
            if name in row: row[new] = [c == "1" for c in row.pop(name)]
        if "seed" not in row: row["seed"] = list(range(max(len(x) for x in row.values() if isinstance(x, list))))
    lists = dict.fromkeys(name for row in rows for name, x in row.items() if isinstance(x, list))
    size = lambda row: max(len(x) for x in row.values() if isinstance(x, list))
    tables = [pd.DataFrame(row | {x: [None] * size(row) for x in lists if x not in row}) for row in rows]
    return pd.concat(tables, ignore_index=True).infer_objects()

def read_answers(
    path, # file of a record of answers
) -> tuple: # meta (dict), and part -> DataFrame with a row for each prompt (or what else the part has lists of)
    """A record as tables, those of answers as from `accuracy`.

    Their `characters`, `density` and `error` are means over the prompts. Raises as `read_record`.
    """
    record, parts = read_record(path), {}
    for row in record["rows"]: parts.setdefault(row.pop("part"), []).append(row)
    return record["meta"], {part: _spread(rows) for part, rows in parts.items()}


def gap_of(
    frame: pd.DataFrame, # as of `accuracy`
    method: str,         # a name in its column method
    other: str,          # another
) -> Interval:
    "By how much more often one method is right than another, on the same prompts. Raises as `compare`."
    found = compare(frame, method, other)
    return Interval(found.low, found.difference, found.high)

def interval_of_means(
    how,    # of the means, such as `numpy.divide`
    *parts, # arrays whose rows are independent, of other units each [n, ..]
) -> Interval:
    """Interval of a function of means: `bootstrap_interval` of each part's pseudo-values (Tukey's jackknife).

    The intervals of several parts are joined as those of independent numbers are. Raises as `bootstrap_interval`.
    """
    means, off = [x.mean(0) for x in parts], [0.0, 0.0]
    value = float(how(*means))
    for k, x in enumerate(parts):
        left = [how(*means[:k], np.delete(x, i, 0).mean(0), *means[k + 1:]) for i in range(len(x))]
        pseudo = len(x) * value - (len(x) - 1) * np.array(left)
        if np.ptp(pseudo) == 0: continue
        low, mean, high = bootstrap_interval(pseudo)
        off = [a + b**2 for a, b in zip(off, (mean - low, high - mean))]
    return Interval(value - off[0]**0.5, value, value + off[1]**0.5)

def together(
    files: list, # of `grid.run`
) -> dict:       # (model, setup) -> the rows of `frame_of` of all of them, by seed
    """The rows of files of results, each prompt of a task, length and pair of methods once: as the first file has it.

    What methods a file's header names does not matter: `answered` notes names that mean several.
    """
    frames = {}
    for file in files:
        about = read_results(file)[0]
        frames.setdefault((about["model"], about["setup"]), []).append(frame_of(file))
    return {key: pd.concat(own).drop_duplicates([*CELL, "seed"]).sort_values("seed", kind="stable")
            for key, own in frames.items()}

def condensed(
    files: list, # of `grid.run`
) -> list:       # of dicts, the rows of a record of answers
    """What is kept of files of results: a row for each model (`part`), task, length and method.

    right and same have a digit a prompt; bits, seed, long_bits and long_tokens of texts are lists; the others means.
    Answers have a list of seeds where these are not 0, 1, 2 and so on.
    The method is the one that decodes, or the one that reads, or both with a bar between. Files may hold parts of a
    grid, other prompts or other methods; of what several hold, the first counts (`together`).
    """
    rows, digits = [], lambda x: "".join("01"[bool(y)] for y in x)
    for (part, setup), frame in together(files).items():
        for (task, length, reads, decodes), own in frame.groupby(CELL, sort=False):
            name = decodes if reads == "exact" else reads if decodes == "exact" else f"{reads} | {decodes}"
            row = dict(part=part, task=task, length=length, setup=setup, method=name)
            if task == "text":
                lists = [x for x in ("bits", "seed", "long_bits", "long_tokens") if x in own]
                row |= {x: own[x].round(6).tolist() for x in lists}
            else:
                row |= dict(right=digits(own.right), same=digits(own.same),
                            characters=round(float(own.characters.mean()), 4))
                if (seeds := own.seed.tolist()) != list(range(len(own))): row["seed"] = seeds
            means = {x: own[x].mean() for x in ("density", "error", "perplexity") if x in own and own[x].notna().all()}
            if "dense_bytes" in own: means["bytes"] = (own.bytes / own.dense_bytes).mean()
            rows.append(row | {x: float(f"{y:.5g}") for x, y in means.items()})
    return rows


def equal_grid(
    grid,           # a `grid.Grid`
    file: Path,     # of its results
    names: Mapping, # name of a vAttention of the grid -> what its predictor alone is called
):                  # a `grid.Grid`
    "The predictors alone, with as many rows as vAttention has read with them."
    read, alone = frame_of(file).groupby("decode").density.mean(), {}
    for name, new in names.items():
        predictor = grid.decode[name].predictor
        alone[new] = replace(TopK() if predictor == "oracle" else predictor, budget=float(f"{read[name]:.4f}"))
    return replace(grid, decode=alone)

def finish(
    grid,      # a `grid.Grid`
    out: Path, # the record's file; the grid's stands beside it
    name: str, # of the grid
    say=print, # is told what was done
) -> Path: # of the grid's results
    "Do what the grid lists and its file lacks. Raises as `grid.run`; RuntimeError for jobs that failed."
    file = Path(out).with_suffix(f".{name}.jsonl")
    done, failed = run(grid, file)
    say(f"{file.name}: {done} jobs done, {failed} failed")
    if failed: raise RuntimeError(f"{failed} jobs failed in {file}: see `sparse-nb eval --show {file}`")
    return file

def answered(
    recorder,    # gets the rows
    files: list, # of `grid.run`
    rows=None,   # of what the files hold; None: `condensed`
) -> dict:       # what meta says of the machine
    """Rows and meta of what files of grids hold, which may have been made on another machine.

    ValueError for files of several machines, versions or weights.
    """
    headers, about = [read_results(file)[0] for file in files], {}
    for x in headers:
        for name in ("device", "sparse_nb", "torch", "transformers", "dtype"):
            if about.setdefault(name, x[name]) != x[name]:
                raise ValueError(f"files must agree in {name}, got {about[name]!r} and {x[name]!r}")
    weights, methods = {}, {}
    for x in headers:
        if weights.setdefault(x["model"], x["weights"]) != x["weights"]:
            raise ValueError(f"files must be of the same weights, got others of {x['model']!r}")
        for name, method in (x["prefill"] | x["decode"]).items():
            own = methods.setdefault(x["model"], {})
            own[name] = method if own.get(name, method) == method else "another in each file"
    newest = time.gmtime(max(Path(file).stat().st_mtime for file in files))
    recorder.rows += condensed(files) if rows is None else rows
    return dict(gpu=about.pop("device")) | about | dict(date=time.strftime("%Y-%m-%d %H:%M UTC", newest),
                                                        weights=weights, methods=methods)

def evaluate(
    recorder,
    grids: Mapping, # name -> `Grid`
) -> dict:          # what meta says
    "Do what every grid lists, one file each beside the result, and take over the rows."
    return answered(recorder, [finish(grid, recorder.out, name, recorder.say) for name, grid in grids.items()])
