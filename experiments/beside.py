"""The papers' tables of answers, as they print them, and whether a difference between two methods that a record has
goes the same way"""
import math
from functools import cache
from pathlib import Path

import pandas as pd
import yaml

from benchmarks.answers import needed
from sparse_nb.metrics import Interval, bootstrap_interval, paired_interval

PRINTED = Path(__file__).parents[1] / "nbs" / "appendix" / "tables_of_the_papers.yml"
ALIKE = 3.0      # points that do not matter
ALIKE_BITS = .02 # bits per token that do not
LONG = 50        # tokens that need the long context, for a window to count for LongPPL


@cache
def _papers(): return yaml.safe_load(PRINTED.read_text(encoding="utf-8"))

def printed(
    paper: str,  # as in nbs/gallery.yml, or "SkyLight"
    number: str, # of the table or figure, as the paper prints it
) -> pd.DataFrame: # a row for each setting; `attrs` has what else the file says: model, task, unit, exact
    "The numbers of a paper's table that the file of the page has. Raises ValueError for one that it lacks."
    found = {x["number"]: x for x in _papers().get(paper, ())}
    if number not in found:
        raise ValueError(f"number must be one of {list(found)} of {paper}, got {number!r}")
    about = dict(found[number])
    table = pd.DataFrame(about.pop("rows"), columns=about.pop("columns"))
    table = table.set_index(table.columns[0])
    table.attrs = about
    return table

def outcomes(
    rows: list,       # of a record with `part`, `task`, `length`, `seeds`, `method` and `right`
    part: str,        # whose methods
    task: str = "",   # "": all
    least: float = 0, # as of `benchmarks.answers.needed`
) -> pd.DataFrame:    # index: task, length and seed; a column for each method: is it right, or a share of the answers
    """What each method of a part got right, prompt by prompt. Exact attention, which is the same in every part, is
    taken from another part where this one lacks it; without it no prompt counts."""
    kept = [x for x in rows if task in ("", x["task"]) and (x["part"] == part or x["method"] == "exact")]
    found = {(x["task"], x["length"], x["seeds"][0] + i, x["method"]): float(right)
             for x in sorted(kept, key=lambda x: x["part"] == part) for i, right in enumerate(x.get("right", ()))}
    keys = pd.MultiIndex.from_arrays([*zip(*found)] or [[]] * 4, names=["task", "length", "seed", "method"])
    table = pd.Series([*found.values()], keys, dtype=float).unstack("method")
    if "exact" not in table: table["exact"] = math.nan
    table = table[table.drop(columns="exact").notna().any(axis=1)]
    tasks = table.index.get_level_values("task")
    return table[table.exact.groupby(["task", "length"]).transform("mean") >= [needed(x, least) for x in tasks]]

def gap(
    table: pd.DataFrame,    # of `outcomes`
    method,                 # a column, or several, whose mean counts
    other="exact",          # likewise
) -> Interval | None:       # None where no prompt has all of them
    "Points that a method is above another, with the paired 95 % interval over the prompts that both were given."
    both = [[x] if isinstance(x, str) else [*x] for x in (method, other)]
    if not {*both[0], *both[1]} <= {*table.columns}: return None
    own, others = (table[x].mean(axis=1, skipna=False) for x in both)
    found = (own - others).dropna()
    return Interval(*(100 * x for x in paired_interval(found))) if len(found) else None

def verdict(
    theirs: float,         # points that one method is above another, as a paper prints it
    ours: Interval | None, # the same of a record
    alike: float = ALIKE,  # what is no difference
) -> str:                  # same, opposite, only there, only here, open, not measured
    """Does our difference go the paper's way? Less than `alike` is no difference, in the paper as here; open: the
    interval holds differences that would be called otherwise."""
    if ours is None: return "not measured"
    if abs(theirs) < alike:
        if ours.within(alike): return "same"
        return "only here" if ours.low >= alike or ours.high <= -alike else "open"
    if ours.covers(0): return "only there" if ours.within(alike) else "open"
    return "same" if ours.value * theirs > 0 else "opposite"

def trends(
    pairs: dict,          # what is compared -> (points in the paper, `Interval` of ours or None)
    alike: float = ALIKE, # as for `verdict`
) -> pd.DataFrame:        # paper, ours, low, high, verdict
    "A table of differences, the paper's beside ours."
    lines = {name: dict(paper=theirs, **(dict(ours=ours.value, low=ours.low, high=ours.high) if ours else {}),
                        verdict=verdict(theirs, ours, alike)) for name, (theirs, ours) in pairs.items()}
    return pd.DataFrame(lines).T.reindex(columns=["paper", "ours", "low", "high", "verdict"]).astype(
        dict.fromkeys(["paper", "ours", "low", "high"], float))

def summary(
    table: pd.DataFrame, # of `trends`
) -> str:
    "How many differences go which way, in words, those named that tell the paper and us together or apart."
    named = {"same": "as in the paper", "opposite": "against the paper", "only there": "in the paper alone",
             "only here": "here alone"}
    counted = {"open": "open, for there are too few prompts", "not measured": "not measured"}
    parts = []
    for word, says in (named | counted).items():
        lines = table.index[table.verdict == word]
        if len(lines): parts.append(f"{len(lines)} {says}" + f" ({'; '.join(lines)})" * (word in named))
    return f"Of {len(table)} differences: {', '.join(parts)}."

def spans(
    numbers: set, # whole ones
) -> str:         # "0 to 439, 660 to 1318"
    "Which numbers these are."
    first, last = (sorted(n for n in numbers if n + step not in numbers) for step in (-1, 1))
    return ", ".join(f"{a} to {b}" for a, b in zip(first, last))

def measured(
    rows: list,              # of a record
    each: tuple = (),        # further fields that tell apart what was timed by itself
) -> pd.DataFrame:           # a row for each part and task: tokens, prompts, their seeds, methods, seconds
    "What was run. The cells of a record say their seconds in each of their rows, and are counted once."
    found = {}
    for row in rows:
        line = found.setdefault((row["part"], row["task"]), dict(tokens=row["length"], prompts=set(), methods=set(),
                                                                cells={}))
        line["prompts"] |= {*range(*row["seeds"])}
        line["methods"].add(row["method"])
        line["cells"][(*row["seeds"], *(row[x] for x in each))] = row["seconds"]
    lines = {key: dict(tokens=x["tokens"], prompts=len(x["prompts"]),
                       seeds=spans(x["prompts"]), methods=len(x["methods"] - {"exact"}),
                       seconds=round(sum(x["cells"].values()))) for key, x in found.items()}
    return pd.DataFrame(lines.values(), pd.MultiIndex.from_tuples([*lines], names=["part", "task"]) if lines else None,
                        ["tokens", "prompts", "seeds", "methods", "seconds"])

def _bits(rows, kind):
    "Bits per token of the windows of a record, a column for each method, of LongPPL's tokens or of all"
    table = pd.DataFrame([x for x in rows if "perplexity" in x])
    if table.empty: return table
    bits = table.perplexity.map(math.log2) if kind == "PPL" else (
        table.long_bits / table.long_tokens).where(table.long_tokens >= LONG)
    return table.assign(bits=bits).pivot(index=["window", "document"], columns="method", values="bits").dropna()

def texts_of(
    rows: list,     # as of `bits_above`, with the genre of each window
) -> pd.DataFrame:  # of each genre: windows, those that count for LongPPL, those with 200 such tokens, the median
    "How many tokens of the windows need a long context."
    table = pd.DataFrame([x for x in rows if "perplexity" in x and x["method"] == "exact"])
    if table.empty: return table
    by, least = table.groupby("genre").long_tokens, lambda x: table.long_tokens.ge(x).groupby(table.genre).sum()
    return pd.DataFrame({"windows": by.size(), f"with at least {LONG} such tokens": least(LONG),
                         "with at least 200": least(200), "such tokens, median": by.median()})

def bits_above(
    rows: list,           # of a record: of each method and window its document, perplexity, long_tokens and long_bits
    kind: str,            # "LongPPL", of tokens that need a long context, in windows that have `LONG` of them, or "PPL"
    method: str,
    other: str = "exact",
) -> Interval | None:     # None where fewer than two texts have both
    "Bits per token that a method costs more than another, with `bootstrap_interval` over texts."
    bits = _bits(rows, kind)
    if not {method, other} <= {*bits}: return None
    above = bits[method] - bits[other]
    of = above.index.get_level_values("document")
    return bootstrap_interval(above, of) if above.nunique() > 1 and of.nunique() > 1 else None

def text_costs(
    rows: list,        # as of `bits_above`
    without: str = "", # a method: what it loses is what others give back
) -> pd.DataFrame:     # a row for each method; of LongPPL and PPL: windows, value, bits above exact, given back
    """Perplexity per token: 2 to the mean over windows of the mean bits; what a method gives back is a share of the
    perplexity that `without` is above exact attention."""
    found = {}
    for kind in ("LongPPL", "PPL"):
        bits = _bits(rows, kind)
        value = 2 ** bits.mean()
        for method in bits:
            above, lost = bits_above(rows, kind, method), value - value["exact"]
            found.setdefault(method, {}).update({
                (kind, "windows"): len(bits), (kind, "value"): round(value[method], 3),
                (kind, "bits above exact"): above and f"{above.value:.3f} [{above.low:.3f}, {above.high:.3f}]",
                (kind, "given back"): round(1 - lost[method] / lost[without], 3) if lost.get(without) else math.nan})
    return pd.DataFrame(found).T
