"""What a result file says, in one table."""
import pandas as pd

from benchmarks.recorder import recorded
from benchmarks.registry import REGISTRY
from benchmarks.run import MEASURED

SIZES = "n", "length", "budget"  # what stands in the columns of a table, the first that rows have


def settings_of(frame):
    "Columns that say what a row is of, and in which rows differ."
    columns = [x for x in frame if x not in MEASURED | {"nbytes", "bytes", "tflop"}]
    return [x for x in columns if frame[x].map(repr).nunique() > 1]


def times(rows: list) -> pd.DataFrame:
    "Median times in microseconds: a line for each setting, a column for each number of keys."
    frame = pd.DataFrame(rows)
    size = next((x for x in SIZES if x in frame), None)
    index = [x for x in settings_of(frame) if x != size]
    frame[index] = frame[index].map(lambda x: "" if x is None or x != x else str(x))
    if size is None or not index: return frame[[*index, *([size] if size else []), "median_us"]]
    return frame.pivot_table(index=index, columns=size, values="median_us", sort=False, aggfunc="median").round(1)


def answers(rows: list) -> pd.DataFrame:
    "Right answers in percent: a line for each method, a column for each model or part and length."
    frame = pd.DataFrame([x for x in rows if isinstance(x.get("right"), str)])
    frame["right, %"] = [100 * x.count("1") / len(x) for x in frame.right]
    return frame.pivot_table(index="method", columns=[x for x in ("part", "length") if x in frame], values="right, %",
                             sort=False).round(0)


def others(rows: list) -> pd.DataFrame:
    "Means of all numbers, for each kind of row: of its first column of words."
    frame = pd.DataFrame(rows)
    words = [x for x in frame if frame[x].map(lambda x: isinstance(x, str)).all()]
    numbers = [x for x in frame if x not in words and pd.api.types.is_numeric_dtype(frame[x])]
    if not words: return frame[numbers].describe().loc[["count", "mean", "min", "max"]]
    return frame.groupby(words[:2], sort=False)[numbers].mean().round(4)


def table(
    name: str, # of a result file, one of `REGISTRY`
) -> dict:     # GPU, or "CPU" -> (where it comes from, table)
    "What was measured, for each machine. ValueError for an unknown name."
    found = {}
    for gpu, record in recorded(name).items():
        meta, rows = record["meta"], record["rows"]
        kind = times if any("median_us" in x for x in rows) else answers if any(
            isinstance(x.get("right"), str) for x in rows) else others
        rows = [x for x in rows if "median_us" in x] if kind is times else rows
        about = {x: meta[x] for x in ("command", "date", "torch", "triton", "transformers") if meta.get(x)}
        found[gpu] = f"{REGISTRY[name].what}; {gpu}, {len(record['rows'])} rows; " + ", ".join(
            f"{k} {x}" for k, x in about.items()), kind(rows)
    return found


def show(name: str):
    "Display `table` on a page; a long one is folded."
    from IPython.display import HTML, display
    for about, frame in table(name).values():
        html = frame.to_html(na_rep="–", float_format=lambda x: f"{x:.4g}", border=0)
        if len(frame) > 40: html = f"<details><summary>{len(frame)} lines</summary>{html}</details>"
        display(HTML(f"<p>{about}</p>{html}"))
