"""README's tables, figure and shown output, made from benchmarks/results (table.json, and the record inside vLLM), the
ledger and its own snippets: `make readme`.

A part of README between `<!-- name -->` and `<!-- /name -->` is what `PARTS[name]` returns. Only numbers are made here:
the sentences around them are written by hand. What a number is and which record it comes from: benchmarks/table.py."""
import contextlib
import hashlib
import importlib
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import served

README, FIGURE = ROOT / "README.md", ROOT / "nbs" / "images" / "front.png"
MISSING = "–"
FOUND = json.loads((ROOT / "benchmarks" / "results" / "table.json").read_text(encoding="utf-8"))
TABLE, MODELS = {row["name"]: row for row in FOUND["rows"]}, FOUND["meta"]["models"]
LENGTHS = {"32k": 32768, "131k": 131072, "524k": 524288}
DRAWN = "santa", "vattention", "saap", "sketch_walk"  # one configuration of each of the papers' decoding methods
OURS = [name for name, row in TABLE.items() if row["group"] == "papers" and row["model_131k"]
        and name != "vattention_eps"]  # slower than exact attention at most lengths: in the one table
TOLD = [*dict.fromkeys(["santa", "vattention_adamas", "saap", "sketch_walk", FOUND["meta"]["default"] or "santa",
                        "quest", "adamas", "double_sparsity", "magicpig_6", "topk"])]  # whose answers README tells


def table(*lines):
    "A Markdown table, its head first; numbers stand on the right."
    head, *body = [[str(cell) for cell in line] for line in lines]
    number = [all(re.match(r"[−+\d]|–|\*\*", line[k]) for line in body) for k in range(len(head))]
    rule = ["--:" if x else "---" for x in number]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


def times(x): return f"{x:.2f}×" if x < 10 else f"{x:.1f}×"


# Speed

PLACES = {"32k": "32k keys", "131k": "131k keys", "524k": "524k keys", "32k_8": "8 sequences, 32k"}


def of(name, column, what="value", form=str):
    "What a cell of the table holds, in words; a dash where there is nothing."
    cell = TABLE[name][column]
    return MISSING if cell is None or cell.get(what) is None else form(cell[what])


def ms(x): return f"{x:.1f} ms"


def inside_vllm():
    "Lines of table A inside vLLM: its own attention, and SAAP over it in the same run."
    at, cases, own, saap = served.steps(), ("131072 x 1", "32768 x 8"), served.OWN, "Saap(budget=0.1)"
    return [[label, MISSING, long, MISSING, eight] for label, (long, eight) in (
        ("exact attention, vLLM's", [ms(at[own, case]) for case in cases]),
        (f"{TABLE['saap_10']['label']}, in vLLM", [times(at[own, case] / at[saap, case]) for case in cases]))]


def speed():
    "Table A: the speedup of a token."
    lines = [[label, *(of(name, f"model_{x}", "ms", ms) for x in PLACES)] for name, label in (
        ("stock", TABLE["stock"]["label"]), ("exact", "exact attention, ours"))]
    lines += [[TABLE[name]["label"], *(of(name, f"model_{x}", form=times) for x in PLACES)] for name in OURS]
    lines += inside_vllm()
    return table(["8B-shaped model", *PLACES.values()], *lines)


def kernels():
    "Table B: single layers and whole prompts."
    lengths, lines = {"32k": "32k keys", "131k": "131k", "524k": "524k", "1M": "1M"}, []
    for name in DRAWN:
        row, cells = TABLE[name], [TABLE[name][f"kernel_{x}"] for x in lengths]
        share = next(cell["share"] for cell in cells if cell)
        label = row["label"] if share is None else f"{row['label'].split(',')[0]}, {100 * share:.3g} %"
        lines.append([label, *(of(name, f"kernel_{x}", form=times) for x in lengths)])
    for kind, said in ("prompt", "prompt"), ("first", "first token"):
        for name in "delta", "sketch_walk":
            cells = [TABLE[name].get(f"{kind}_{x}") for x in lengths]
            how = ", fastest rule" * any(cell and "settings" in cell for cell in cells)
            lines.append([f"{TABLE[name]['label'].split(',')[0]}, {said}{how}",
                          *(times(cell["value"]) if cell else MISSING for cell in cells)])
    return table(["kernels", *lengths.values()], *lines)


# Answers

def lost(name, model):
    """How many points fewer answers are right than with exact attention on the same prompts: (low, mean, high), or None
    where the setting that is timed was not evaluated."""
    cell = TABLE[name][f"lost_{model}"]
    return None if cell is None or "settings" in cell else ends(cell)


def ends(cell): return cell["low"], cell["value"], cell["high"]


def said_of(found, protocol=""):
    if found is None: return MISSING
    low, mean, high = (round(x, 1) + 0.0 for x in found)  # no minus before a zero
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]{protocol}".replace("-", "−")


def protocol(name, model):
    "A mark where the method decoded the question, too."
    return "‡" if (TABLE[name][f"lost_{model}"] or {}).get("protocol") else ""


def answers():
    "Table C: the speedup of a token and the answers that it costs, at one setting."
    head = ["setting", "speedup, 131k keys", *(f"lost, {said}" for said in MODELS.values())]
    lines = [[TABLE[name]["label"], of(name, "model_131k", form=times),
              *(said_of(lost(name, model), protocol(name, model)) for model in MODELS)] for name in TOLD]
    return table(head, *lines)


def safe_prompts():
    "Methods that make the first token of 32k earlier and lose less than the margin on the largest model."
    largest, margin = [*MODELS][-1], FOUND["meta"]["margin"]
    return [row["label"] for row in TABLE.values() if (row["first_32k"] or {}).get("value", 0) > 1
            and (row[f"read_{largest}"] or {}).get("high", margin) < margin]


def advice():
    "What to start with, by the rule of benchmarks/table.py, and what methods that read prompts lose."
    largest, name = [*MODELS][-1], FOUND["meta"]["default"]
    start = "exact attention" if name is None else f"`{TABLE[name]['call']}`"
    shown = [x for x in ("flex_prefill", "delta", "sketch_walk") if TABLE[x][f"read_{largest}"]]
    first = lambda row: times(row["first_32k"]["value"]) if row["first_32k"] else MISSING
    return (f"Start with {start} ([why](nbs/appendix/one_table.ipynb#what-to-start-with)). Read prompts with "
            f"{' or '.join(safe_prompts()) or 'exact attention'} (first token of 32k, points lost at 16k): "
            + ", ".join(f"{TABLE[x]['label'].split(',')[0]} {first(TABLE[x])}, "
                        f"{said_of(ends(TABLE[x][f'read_{largest}']))}" for x in shown) + ".")


def headline():
    "What the default gains and loses, in a sentence."
    name = FOUND["meta"]["default"]
    if name is None: return "**No method passed [the rule](nbs/appendix/one_table.ipynb#what-to-start-with).**"
    row, sizes = TABLE[name], {"qwen": "1.5B", "smollm2": "135M"}
    of = lambda x: (f"a {sizes[x]} model loses {said_of(lost(name, x))} ({row[f'lost_{x}']['prompts']:,} prompts)"
                    if lost(name, x) else f"what a {sizes[x]} model loses is not measured")
    return (f"**{row['label']}: a speedup of {row['model_131k']['value']:.2f} per token after 131k keys. Of 100 right "
            f"answers {', '.join(map(of, sizes))}.**")


# The rest

VERDICTS = {"holds": "hold", "reproduced": "were reproduced", "same shape": "show the same trend on smaller models",
            "corrected": "needed a correction", "not here": "need larger models"}


def verdicts():
    "The verdicts of the ledger: of papers, and of this project."
    found = {"papers": Counter(), "ours": Counter()}
    for path in (ROOT / "nbs" / "claims").glob("*.json"):
        row = json.loads(path.read_text(encoding="utf-8"))
        found["ours" if row["id"].startswith("OURS") else "papers"][row["verdict"]] += 1
    return found


def claims():
    "What held up, in a line."
    found = verdicts()["papers"]
    *most, last = (f"{found[name]} {said}" for name, said in VERDICTS.items())
    return f"Of {found.total()} claims, {', '.join(most)} and {last}: [the ledger](nbs/appendix/ledger.ipynb)."


def title(path):
    "The title of a notebook."
    cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
    return "".join(cells[0]["source"]).split("\n")[0].removeprefix("# ")


CHAPTERS = {  # page -> what one learns there
    "nbs/01_why_a_token_is_slow.ipynb": "bytes",
    "nbs/02_softmax_in_pieces.ipynb": "merging, weights",
    "nbs/03_a_model_to_try.ipynb": "tasks, bytes, intervals",
    "nbs/04_santa.ipynb": "drawn values",
    "nbs/05_how_many_draws.ipynb": "error bounds",
    "nbs/06_vattention.ipynb": "an (eps, delta) guarantee",
    "nbs/07_heavy_keys.ipynb": "Quest, Double Sparsity, Adamas, MagicPIG",
    "nbs/08_saap.ipynb": "clusters of keys",
    "nbs/09_eviction.ipynb": "H2O, SnapKV",
    "nbs/10_delta.ipynb": "corrected prompts",
    "nbs/11_sketch_walk.ipynb": "blocks of keys",
    "nbs/12_patterns.ipynb": "MInference, FlexPrefill, HiP",
    "nbs/13_a_kernel_in_four_steps.ipynb": "Triton",
    "nbs/14_timing.ipynb": "honest comparisons",
    "nbs/15_transformers_and_vllm.ipynb": "sessions, graphs, pages",
    "nbs/16_which_method.ipynb": "speed and answers at once",
}


SHARED = {  # page -> methods that it explains beside others; every other method has a page of its own
    "nbs/02_softmax_in_pieces.ipynb": ("exact", "streaming", "topk", "topp", "uniform"),
    "nbs/07_heavy_keys.ipynb": ("quest", "double_sparsity", "adamas", "magicpig", "one_list", "hash_attention",
                                "reformer", "kdeformer", "then"),
    "nbs/09_eviction.ipynb": ("h2o", "snapkv"),
    "nbs/12_patterns.ipynb": ("vertical_slash", "flex_prefill", "xattention", "hip", "oracle_blocks", "random_blocks"),
}


def page_of(name):
    "The page that explains a method: a shared one, or the notebook that its module is made of."
    from sparse_nb.core.registry import METHODS
    shared = next((page for page, names in SHARED.items() if name in names), None)
    if shared: return shared
    source = importlib.import_module(METHODS[name].path.split(":")[0]).__file__
    made = re.search(r"File to edit: (?:\.\./)+(\S+\.ipynb)", Path(source).read_text(encoding="utf-8"))
    return made[1]


def more_methods():
    "Methods that are not those of the five papers, by the page that explains them."
    from sparse_nb.core.registry import METHODS
    papers = [name for name, row in TABLE.items() if row["group"] == "papers" or name == "delta"]
    names, pages = [name for name in METHODS if name not in papers], {}
    for name in names: pages.setdefault(page_of(name), []).append(f"`{METHODS[name].path.split(':')[1]}`")
    lines = [[", ".join(own), f"[{title(page)}]({page})"] for page, own in pages.items()]
    return (f"<details><summary>{len(names)} more methods, baselines and controls</summary>\n\n"
            + table(["methods", "page"], *lines) + "\n\n</details>")


def chapters():
    "A line for each of the main chapters."
    return "\n".join(f"{k}. [{title(path)}]({path}): {said}" for k, (path, said) in enumerate(CHAPTERS.items(), 1))


def blocks(text):
    "The Python snippets of a Markdown text."
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def printed(code, names):
    "What a snippet prints; it runs in `names`."
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        exec(compile(code, "README.md", "exec"), names)
    return out.getvalue()


def output():
    "What README's first snippet prints."
    said = printed(blocks(README.read_text(encoding="utf-8"))[0], {})
    return f"```text\n{said}```"


PARTS = {"headline": headline, "speed": speed, "kernels": kernels, "answers": answers, "advice": advice,
         "claims": claims, "methods": more_methods, "chapters": chapters, "output": output}


def filled(text, names=PARTS):
    "README's `text` with the parts `names` made anew."
    for name in names:
        found = re.compile(rf"(<!-- {name} -->\n)[\s\S]*?(\n<!-- /{name} -->)")
        text, count = found.subn(lambda marks: marks[1] + PARTS[name]() + marks[2], text)
        if count != 1: raise ValueError(f"README.md must have one part {name}, got {count}")
    return text


def plot_speed(ax):
    "Milliseconds per token against the number of keys."
    import matplotlib.pyplot as plt
    from sparse_nb.plots import METHOD_COLOURS, METHOD_MARKERS
    for name in ("exact", *DRAWN):
        found = {n: cell["ms"] for x, n in LENGTHS.items() if (cell := TABLE[name][f"model_{x}"])}
        label = TABLE[name]["label"] if name in DRAWN else "exact attention, ours"
        ax.plot(found.keys(), found.values(), label=label, color=METHOD_COLOURS[name], marker=METHOD_MARKERS[name],
                markersize=8, markeredgecolor="white")
    ax.set(xscale="log", xlabel="keys in the cache", ylabel="ms per token", ylim=(0, None),
           title="An 8B-shaped model, one token")
    ax.set_xticks([*LENGTHS.values()], [*LENGTHS])
    ax.xaxis.set_minor_locator(plt.NullLocator())
    ax.legend(loc="upper left")


def plot_lost(ax):
    "Right answers lost by each configuration."
    from sparse_nb.plots import SERIES
    for k, model in enumerate(MODELS):
        for i, name in enumerate(TOLD):
            if (found := lost(name, model)) is None: continue
            low, mean, high = found
            place = i + 0.26 * (k - (len(MODELS) - 1) / 2)
            ax.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="osD"[k], color=SERIES[k], markersize=6,
                        capsize=2, label=MODELS[model])
    for i, name in enumerate(TOLD):
        if any(lost(name, m) for m in MODELS): continue
        said = "other settings" if any(TABLE[name][f"lost_{m}"] for m in MODELS) else "not measured"
        ax.text(-1, i, said, va="center", ha="right", color="0.45", fontsize=9)
    handles = dict(zip(*reversed(ax.get_legend_handles_labels())))
    ax.axvline(0, color="0.6", linewidth=0.8)
    ax.set_yticks(range(len(TOLD)), [TABLE[name]["label"] for name in TOLD])
    ax.set(ylim=(len(TOLD) - 0.4, -1.5), xlabel="right answers lost against exact attention, points",
           title="What it costs in answers")
    ax.legend(handles.values(), handles.keys(), loc="upper right", ncols=3, fontsize=9, columnspacing=0.6,
              handletextpad=0.2)


def drawn():
    "What the figure is drawn from, as a short text."
    return hashlib.sha256((speed() + answers()).encode()).hexdigest()[:16]


def drawn_from(path):
    "What the figure in a file was drawn from."
    from PIL import Image
    with Image.open(path) as image: return image.text.get("drawn")


def figure():
    "Make the two panels of README."
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo
    from sparse_nb.plots import style
    style()
    fig, axes = plt.subplots(1, 2, figsize=(11.5, 4.4))
    plot_speed(axes[0])
    plot_lost(axes[1])
    fig.savefig(buffer := io.BytesIO(), format="png", dpi=130)
    plt.close(fig)
    (about := PngInfo()).add_text("drawn", drawn())
    image = Image.open(buffer).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(FIGURE, "png", optimize=True, pnginfo=about)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
    figure()
