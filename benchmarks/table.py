"""One table: what each method of the registry reads, how fast it is and which right answers it costs, at one
configuration each; every number comes from a record of benchmarks/results, which its cell names:

    python -m benchmarks.run table

The method that README tells its readers to start with is `default`: **the fastest at 131,072 keys** among those that

1. need no oracle, and keep the whole cache: what is evicted for one question is lost to the next, which no record asks;
2. are faster there than our exact attention in a whole model, timed in the same run;
3. were evaluated on the largest model **with the settings of that time**;
4. lose fewer than `MARGIN` points of its right answers: the upper end of the paired 95 % interval lies below it; and in
   no other record of the same settings and that model does the lower end lie above it.

Few prompts give a wide interval, whose upper end is high: nothing wins by not having been measured. The fourth point
is a test of non-inferiority with a margin, at a one-sided level of 2.5 %, where "not significantly worse than the best"
would take any method that was asked ten prompts. Where no method passes, README recommends exact attention.
"""
import json
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from sparse_nb import Method
from sparse_nb.core.registry import METHODS
from sparse_nb.core.settings import GoneSetting, present, read_method
from sparse_nb.metrics import paired_interval
from benchmarks.answers import READ, gains
from benchmarks.baselines import DENSE
from benchmarks.configurations import DECODE, LENGTHS, MODELS, PLACES, PROMPT, SANTA, Decode, Prompt
from benchmarks.recorder import read_record, results, write_record

MARGIN = 5.0  # points of right answers that README's default may lose
PAPERS = "santa", "vattention", "saap", "sketch_walk", "delta"
HEAD = 128  # numbers in a key of the models that are timed, and of the largest that is evaluated
_ASK = "python -m benchmarks.run answers"
_TIME = "python -m benchmarks.parts generate --static --tuned --append --decode METHOD --lengths {} --batch {}"
COLUMNS = {  # name -> what it is, the command that measures it
    "keys": ("share of the keys whose values a token reads, in the answers below", _ASK),
    "bytes": ("share of the bytes of keys and values that a token reads, index included, in the answers below", _ASK),
    "error": ("relative error of the outputs of a layer, in the answers below", _ASK),
    "keys_timed": ("share of the keys whose values a token reads, in the whole model of 131,072 keys", _TIME.format(
        *PLACES["131k"])),
    "index_bytes": (f"bytes of the index that a token reads for each key, of heads of {HEAD} numbers", ""),
    "index_share": ("the same as a share of the bytes of a key and its value in bfloat16", ""),
} | {f"kernel_{x}": ("speedup of one layer's decoding step over the fastest dense kernel",
                       f"sparse-nb bench --decode METHOD --length {n}") for x, n in LENGTHS.items()} | {
    f"model_{x}": ("speedup of a token of a whole model, 8B-shaped, over our exact attention, and ms",
                   _TIME.format(*place)) for x, place in PLACES.items()} | {
    f"lost_{model}": (f"points of right answers lost, {said}, decoding", _ASK) for model, said in MODELS.items()} | {
    "pairs": ("share of a prompt's pairs of query and key that are read", _ASK)} | {
    f"{kind}_{x}": (what, f"python -m benchmarks.run {file}") for kind, what, file in (
        ("prompt", "speedup of one layer's attention of a whole prompt over the fastest dense kernel", "prefill"),
        ("first", "speedup of the first token of a whole model over the faster dense kernel", "first_token"))
    for x in ("32k", "131k")} | {
    f"read_{model}": (f"points of right answers lost, {said}, reading the prompt", _ASK)
    for model, said in MODELS.items()}


@cache
def record(name: str, machine: str = "nvidia_h200") -> dict:
    "A record of this name, from a machine; without rows where there is none."
    path = results() / f"{machine}_{name}.json"
    return read_record(path) if path.exists() else dict(meta={}, rows=[])

def rows_of(name: str) -> list:
    "The rows of a record of the machine whose times are told."
    return record(name)["rows"]

def said(settings: dict) -> str:
    "A method as it is written in Python, with these settings."
    text = lambda x: said(x) if isinstance(x, dict) else repr(x)
    return f"{settings['method']}({', '.join(f'{k}={text(x)}' for k, x in settings.items() if k != 'method')})"

def has(settings: dict, found) -> bool:
    "Does a method, as a dict, have these settings?"
    return isinstance(found, dict) and all(
        has(x, found.get(name)) if isinstance(x, dict) else found.get(name) == x for name, x in settings.items())

# settings that came after some records, and what they were in them; for those that are gone see `core.settings.GONE`
LATER = dict(Santa=dict(keys="exact"), SketchWalk=dict(refine=1, least=2, tail=0))

def meant(settings: dict, role: str) -> dict:
    """Settings of a record with those that came later, without those that are gone, and with what a None of Sketch&Walk
    stands for in a role. Raises `GoneSetting` for a method that today's code does not have."""
    settings = present(LATER.get(settings["method"], {}) | settings)
    if settings["method"] != "SketchWalk": return settings
    method = Method.from_json(json.dumps(settings))
    pool, refine = (method.step_pool, 1) if role == "decode" else (method.prompt_pool, method.prompt_refine)
    return settings | dict(pool=pool, refine=refine)

def source(name: str, row: dict | None = None) -> dict:
    "What a cell says of the record that it comes from."
    return dict(record=f"nvidia_h200_{name}", date=(row or {}).get("date") or record(name)["meta"].get("date"))


# Answers

class Asked(NamedTuple):
    "What a record holds of a method and a model"
    model: str
    role: str      # "decode" or "prompt"
    settings: dict
    name: str      # of the method there
    record: str
    date: str
    rows: list     # answers of it and of exact attention, as `benchmarks.answers.gains` takes them
    watched: list  # rows that say what it read

def _settings(text):
    "Settings of a method that was written as its `repr`; why it has none today, or None if it is not of the registry"
    try: return json.loads(read_method(text, stored=True).to_json())
    except GoneSetting as error: return error
    except ValueError: return None

def _now(settings, role):
    "`meant`, or why there is no such method today"
    try: return meant(settings, role)
    except GoneSetting as error: return error

def _answers():
    "Parts of the record `answers`: record, machine, role, models, methods, answers, rows that say what was read"
    made = record("answers")
    for role, methods in made["meta"].get("methods", {}).items():
        if role == "context": continue  # another protocol, which `benchmarks.answers.by_setup` tells of
        own = [row for row in made["rows"] if row["role"] == role or row["method"] == "exact"]
        yield "nvidia_h200_answers", made, "prompt" if role in READ else "decode", MODELS, {
            name: _settings(text) for name, text in methods.items()}, own, own

def _real_model(machine):
    "The same of `real_model`, where the prompts that were watched are not those that count"
    made = record("real_model", machine)
    asked = [row for part in ("quest", "answers") for row in made["rows"] if row["part"] == part
             and row["method"] == "exact"]
    exact = {(row["model"], row["task"], row["length"], seed): x for row in asked
             for seed, x in enumerate(row["right"], row["seeds"][0])}
    exact = [dict(method="exact", model=model, task=task, length=length, seeds=[seed, seed + 1], right=[x])
             for (model, task, length, seed), x in exact.items()]
    parts = dict(answers=("decode", "decode", "read"), need_queries=("decode", "decode", "read"),
                 prompts=("prompt", "prefill", "pairs"))
    for part, (role, kind, watched) in parts.items():
        methods = {name: _settings(text) for name, text in made["meta"].get(kind, {}).items()}
        own = [row for row in made["rows"] if row["part"] == part and row["method"] != "exact"]
        seen = [row for row in made["rows"] if row["part"] == watched]
        yield f"{machine}_real_model", made, role, MODELS, methods, exact + own, seen

def _paper_tables():
    "The same of `paper_tables`"
    made = record("paper_tables")
    density = {x: "decode" for x in made["meta"].get("methods", {}) if x.startswith("density")}
    parts = density | dict(saap="decode", delta="prompt", sketch_walk="decode")
    for part, role in parts.items():
        methods = {name: _settings(text) for name, text in made["meta"].get("methods", {}).get(part, {}).items()}
        if part == "sketch_walk": methods = {name: x for name, x in methods.items() if name.startswith("step")}
        yield ("nvidia_h200_paper_tables", made, role, MODELS, methods,
               *([row for row in made["rows"] if row["part"] in x] for x in (
                   {part, "density"} if part in density else {part}, {"reads"})))

def _grid(file, setups, machine="nvidia_h200"):
    "The same of grids, whose answers are words of 0 and 1; nothing of a cell of which not all prompts were asked"
    made = record(file, machine)
    methods = made["meta"].get("methods") or {"pocket": {  # SANTA's, which names them by their draws
        f"systematic-{x}": SANTA | dict(samples=x) for x in made["meta"].get("budgets", ())}}
    for model in filter(methods.__contains__, MODELS):  # in this order, which is that of what is written
        for setup, role in setups.items():
            own = [row | dict(model=model, seeds=[0, len(row["right"])], right=[*map(int, row["right"])])
                   for row in made["rows"] if row.get("part") in (model, "accuracy") and row.get("setup") == setup
                   and "right" in row and "seed" not in row]
            full = {(row["task"], row["length"]): len(row["right"]) for row in own if row["method"] == "exact"}
            own = [row for row in own if len(row["right"]) == full.get((row["task"], row["length"]))]
            pairs = [row for row in made["rows"] if row.get("part") in ("pairs", "work") and role == "prompt"]
            # where the question is decoded, too, the record tells of its own method alone
            kept = {name: x for name, x in methods[model].items() if setup != "context" or has(dict(
                method="SketchWalk"), x)}
            yield f"{machine}_{file}", made, role, [model], kept, own, own + pairs

@cache
def _every():
    "`every`, and what `left_out` tells of answers."
    parts = [*_answers(), *_real_model("nvidia_h200"), *_real_model("cpu"), *_paper_tables(),
             *_grid("two_models", dict(prompt="decode")), *_grid("saap", dict(prompt="decode")),
             *_grid("sketch_walk", dict(context="decode", prompt="prompt")), *_grid("santa_pocket", dict(A="decode")),
             *_grid("delta", dict(prompt="prompt")), *_grid("eviction", dict(prompt="decode"), "cpu")]
    found, left = [], {}
    for file, made, role, models, methods, own, watched in parts:
        now = {name: _now(x, role) if isinstance(x, dict) else x for name, x in methods.items() if x is not None}
        left.setdefault(file, {}).update((name, str(x)) for name, x in now.items() if isinstance(x, GoneSetting))
        found += [Asked(model, role, settings, name, file, made["meta"].get("date"),
                        [row for row in own if row["method"] in ("exact", name) and row["model"] == model],
                        [row for row in watched if row["method"] == name and row["model"] == model
                         and "density" in row])
                  for model in models for name, settings in now.items() if isinstance(settings, dict)]
    return found, {file: names for file, names in left.items() if names}

def every() -> list:
    "What all records say of answers; the first of two with as many prompts stands in the table."
    return _every()[0]

def left_out() -> dict: # record -> name there -> why
    "Methods that were evaluated with settings that today's code does not have, which no row of the table is about."
    return _every()[1]

def lost(x: Asked) -> dict | None:
    "What a method loses; None where no prompt counts. protocol: \"context\" where it decoded the question, too."
    if not {"exact", x.name} <= {row["method"] for row in x.rows}: return None
    found = gains(x.rows, x.model)
    if found.empty: return None
    low, mean, high = (round(100 * end, 4) for end in paired_interval((found.exact - found.own).astype(float)))
    return dict(value=mean, low=low, high=high, prompts=len(found), exact=round(float(found.exact.sum()), 2),
                right=round(float(found.own.sum()), 2), tasks=sorted({*found.task}),
                lengths=sorted({*map(int, found.length)}), record=x.record, date=x.date) | (
                    dict(protocol="context") if x.rows[0].get("setup") == "context" else {})

def settings_of(line: Decode | Prompt) -> Iterable:
    "Settings whose answers may be told, as (settings, what a cell says of them); a line's own first, unless they vary."
    own = () if getattr(line, "at", {}) else ((line.settings, {}),)
    return *own, *((x, dict(settings=said(x))) for x in line.asked)

def answers(line: Decode | Prompt, role: str, model: str) -> dict | None:
    """The cell of a line: of its own settings if any record has them, and of those that have, of the most prompts; what
    the others say stands beside it."""
    for settings, about in settings_of(line):
        found = [cell for x in every() if (x.model, x.role) == (model, role) and has(settings, x.settings)
                 and (cell := lost(x))]
        if not found: continue
        best = max(found, key=lambda cell: cell["prompts"])
        return best | about | dict(also=[cell for cell in found if cell is not best])
    return None

def reads(line: Decode | Prompt, role: str) -> dict:
    "Cells of what a line read of the largest model that was watched: density, bytes and error."
    for model in reversed(MODELS):
        for settings, about in settings_of(line):
            found = [x for x in every() if (x.model, x.role) == (model, role) and x.watched
                     and has(settings, x.settings)]
            if not found: continue
            best = max(found, key=lambda x: len(x.watched))
            lengths = sorted({row["length"] for row in best.watched})
            cells = {}
            for what in "density", "bytes", "error":
                values = [row[what] for row in best.watched if what in row]
                if values: cells[what] = dict(value=round(sum(values) / len(values), 5), model=model, lengths=lengths,
                                              record=best.record, date=best.date) | about
            return cells
    return {}


# Times

@cache
def whole_models() -> list:
    "The compiled steps of the whole model on one GPU with a static cache, as (settings, row), the newest first."
    found = [(_now(json.loads(row["method"]), "decode"), row) for row in rows_of("generate") if row.get("tuned")
             and row["static"] and row.get("gpus", 1) == 1 and row.get("method")]
    return sorted((x for x in found if isinstance(x[0], dict)), key=lambda x: x[1]["date"], reverse=True)

def timed(line: Decode, n: int, batch: int) -> dict | None:
    "The row of a line in a whole model."
    return next((row for settings, row in whole_models() if (row["n"], row["batch"]) == (n, batch)
                 and has(line.settings | line.at.get(n, {}), settings)), None)

def kernel(line: Decode, n: int) -> dict | None:
    "The speedup of a layer's step."
    if not line.kernel: return None
    name, like = line.kernel
    own = [row for row in rows_of(name) if row["n"] == n]
    found = min((row for row in own if like.items() <= row.items()), key=lambda row: row["median_us"], default=None)
    if found is None: return None
    same = [row["median_us"] for row in own if row["method"] in DENSE and all(
        row.get(x) == found.get(x) for x in ("H", "B", "mode"))]
    share = found.get("asked", record(name)["meta"].get("density"))
    return dict(value=round(min(same) / found["median_us"], 5), us=found["median_us"], share=share) | source(name)

def prompt(line: Prompt, n: int) -> dict | None:
    "The speedup of a layer's attention of a whole prompt of 32 heads."
    at = {row["method"]: row["median_us"] for row in rows_of("prefill") if row.get("method") and (row["n"], row["H"])
          == (n, 32)}
    dense = [at[x] for x in ("sdpa_flash", "sdpa_cudnn", "fa4") if x in at]
    if line.kernel not in at or not dense: return None
    about = dict(settings=said(line.other)) if line.other else {}
    return dict(value=round(min(dense) / at[line.kernel], 5), us=at[line.kernel]) | about | source("prefill")

def first_token(line: Prompt, n: int) -> dict | None:
    "The speedup of the first token of a whole model."
    at = {row["way"]: row["median_us"] for row in rows_of("first_token") if row["n"] == n}
    name = next((x for x in line.first if x in at), None)
    dense = [at[x] for x in ("cuDNN", "FlashAttention-2") if x in at]
    if name is None or not dense: return None
    about = dict(settings=said(line.other)) if name != line.first[0] else {}
    return dict(value=round(min(dense) / at[name], 5), ms=round(at[name] / 1000, 2)) | about | source("first_token")


# The table

def beside_exact(row: dict) -> bool:
    "Was exact attention timed in the run of a row of a whole model, and is its time what the row is compared with?"
    made, place = record("generate"), ("n", "batch", "static", "tuned", "date")
    return any(x["way"] == "exact kernel" == row["rival"] and all(x.get(key) == row.get(key) for key in place)
               for x in (*made["rows"], *made["meta"].get("replaced", ())))

def whole_model(line: Decode, n: int, batch: int) -> dict | None:
    "The cell of a line in a whole model; alone: exact attention was timed in another run."
    row = timed(line, n, batch)
    if row is None: return None
    density = row.get("density")
    if density is not None:  # layers that attend exactly read all
        exact = row["exact_layers"] / record("generate")["meta"]["shape"]["num_hidden_layers"]
        density = round(exact + (1 - exact) * density, 5)
    own = dict(value=row["ratio"], ms=round(row["median_us"] / 1000, 5), density=density)
    if not beside_exact(row): own |= dict(alone=True)
    return own | dict(settings=said(present(json.loads(row["method"])))) | source("generate", row)

def index(line: Decode) -> dict:
    "Cells of the bytes of an index."
    row = timed(line, *PLACES["131k"])
    method = Method.from_json(row["method"] if row else json.dumps(line.settings))
    about = dict(settings=repr(method.predictor)) if hasattr(method, "predictor") else {}
    size = getattr(method, "predictor", method).index_bytes(HEAD)
    return dict(index_bytes=dict(value=size) | about, index_share=dict(value=round(size / (4 * HEAD), 5)) | about)

def decoded(line: Decode) -> dict:
    "The cells of a method that decodes."
    cells = {name.replace("density", "keys"): x for name, x in reads(line, "decode").items()} | index(line)
    cells |= {f"model_{x}": whole_model(line, *place) for x, place in PLACES.items()}
    cells |= {f"kernel_{x}": kernel(line, n) for x, n in LENGTHS.items()}
    at = cells["model_131k"]
    if at and at["density"] is not None: cells["keys_timed"] = at | dict(value=at["density"])
    return cells | {f"lost_{model}": answers(line, "decode", model) for model in MODELS}

def prompted(line: Prompt) -> dict:
    "The cells of a method that reads prompts."
    density = reads(line, "prompt").get("density")
    cells = {f"{kind}_{x}": call(line, LENGTHS[x]) for kind, call in (("prompt", prompt), ("first", first_token))
             for x in ("32k", "131k")}
    return cells | dict(pairs=density) | {f"read_{model}": answers(line, "prompt", model) for model in MODELS}

def call(settings: dict) -> str:
    "A method as a user writes it: what its class does not do by default."
    usual = meant(json.loads(read_method(f"{settings['method']}()").to_json()), "decode")
    return said({x: y for x, y in settings.items() if x == "method" or usual.get(x) != y})

def row_of(name: str) -> dict:
    "A row: what it is of, and a cell, or None where nothing was measured, for each of `COLUMNS`."
    line, reader = DECODE.get(name), PROMPT.get(name)
    own = line.of or name if line else name
    oracle = "oracle" in METHODS[own].reads.split(":")[0].replace(",", " ").split()
    row = dict(name=name, method=own, second=own != name, label=(line or reader).label,
               group="papers" if own in PAPERS else "decode" if line else "prompts",
               oracle=oracle, evicts="evicted" in METHODS[own].reads, settings=line and said(line.settings),
               call=line and call(line.settings),
               reader=reader and said(reader.settings), reader_label=reader and reader.label)
    return row | dict.fromkeys(COLUMNS) | (decoded(line) if line else {}) | (prompted(reader) if reader else {})

def stock() -> dict:
    "The row of transformers' own attention: the quickest that it was, of whichever cache."
    cells = {}
    for x, (n, batch) in PLACES.items():
        own = [row for row in rows_of("generate") if (row["way"], row["n"], row["batch"]) == ("the model alone", n,
                                                                                             batch)]
        if own:
            row = min(own, key=lambda row: row["median_us"])
            cells[f"model_{x}"] = dict(value=None, ms=round(row["median_us"] / 1000, 5)) | source("generate", row)
    return dict(name="stock", method="exact", second=True, label="exact attention, transformers'", group="decode",
                oracle=False, evicts=False, settings=None, call=None, reader=None, reader_label=None) | dict.fromkeys(
                    COLUMNS) | cells

def refusals(
    row: dict,              # of the table
    margin: float = MARGIN, # points that may be lost
) -> list:                  # words; none for a row that may be the default
    "Why a row of the table may not be README's default: what it lacks of the rule at the top."
    found = ["needs an oracle"] * row["oracle"] + ["evicts keys that a later question may need"] * row["evicts"]
    fast, gap = row["model_131k"], row[f"lost_{[*MODELS][-1]}"]
    if fast is None or fast["value"] is None: found.append("not timed in a whole model at 131k keys")
    elif fast.get("alone"): found.append("exact attention was timed in another run")
    elif fast["value"] <= 1: found.append("not faster than exact attention at 131k keys")
    if gap is None: return [*found, "not evaluated on the largest model"]
    if "settings" in gap: found.append("evaluated on the largest model with other settings")
    if gap["high"] >= margin: found.append(f"may lose {gap['high']:.1f} points, by {gap['prompts']} prompts")
    elif any(x["low"] > margin for x in gap["also"]): found.append("loses more in another record")
    return found

def default(
    rows: list,             # of the table
    margin: float = MARGIN, # points that may be lost
) -> str | None:            # the name of a row; None: exact attention
    "The method that README recommends, by the rule at the top."
    fit = [row for row in rows if not refusals(row, margin)]
    return max(fit, key=lambda row: row["model_131k"]["value"])["name"] if fit else None

def made() -> dict:
    "meta and rows, from the records alone."
    names = dict.fromkeys([*DECODE, *PROMPT])
    rows = [stock(), *map(row_of, names)]
    meta = dict(command="python -m benchmarks.run table", default=default(rows), margin=MARGIN, models=MODELS,
                left_out=left_out(),
                columns={name: dict(what=what, command=command) for name, (what, command) in COLUMNS.items()})
    return dict(meta=meta, rows=rows)

def table(recorder):
    "Write the table; it is composed, and nothing is measured."
    write_record(recorder.out, **made())
