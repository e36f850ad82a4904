"""README's tables, figure and shown output, made from benchmarks/results, the ledger and its own snippets: `make
readme`.

A part of README between `<!-- name -->` and `<!-- /name -->` is what `PARTS[name]` returns. Only numbers are made here:
the sentences around them are written by hand."""
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from experiments import real_model  # noqa: E402
from sparse_nb.metrics import paired_interval  # noqa: E402
README, FIGURE = ROOT / "README.md", ROOT / "nbs" / "images" / "front.png"
MISSING = "–"
EXACT = {"method": "Exact"}
CAN = 0.5  # a task and length counts where exact attention is right in this share of the prompts

# The configurations of README, by the settings that they are timed and evaluated at:
# name -> (key in `plots`, what it is called, settings, number of keys -> settings that change with it).
# vAttention: an eps for each length at which it reads about a tenth of the keys.
CONFIGURATIONS = {
    "santa": ("santa", "SANTA, 128 draws", dict(method="Santa", samples=128, scheme="systematic", eps=None,
                                                keys="exact"), {}),
    "santa_int8": ("santa", "SANTA, 128 draws, int8 keys", dict(method="Santa", samples=128, scheme="systematic",
                                                                eps=None, keys="int8"), {}),
    "vattention": ("vattention", "vAttention, 10 % of keys", dict(method="VAttention", topk=0.05, base=0.025),
                   {32768: dict(eps=0.3), 131072: dict(eps=0.15), 524288: dict(eps=0.1)}),
    "vattention_eps": ("vattention", "vAttention, eps 0.1", dict(method="VAttention", topk=0.05, base=0.025, eps=0.1),
                       {}),
    "saap": ("saap", "SAAP, 5 % of keys", dict(method="Saap", budget=0.05, clusters=128, tail="first_order"), {}),
    "sketch_walk": ("sketch_walk", "Sketch&Walk, 10 % of blocks", dict(
        method="SketchWalk", density=0.1, block=64, index="fine4", heads="group", walk=None, pool="mean"), {}),
    "quest": ("quest", "Quest, 10 %", dict(method="Quest", budget=0.1, page=16), {}),
    "adamas": ("adamas", "Adamas, 10 %", dict(method="Adamas", budget=0.1), {}),
    "double_sparsity": ("double_sparsity", "Double Sparsity, 10 %", dict(method="DoubleSparsity", budget=0.1,
                                                                        channels=16, chosen=None), {}),
    "magicpig": ("magicpig", "MagicPIG, 8 bits", dict(method="MagicPIG", bits=8, tables=32), {}),
    "topk": ("topk", "top-k (oracle), 10 %", dict(method="TopK", budget=0.1), {}),
}
DRAWN = "santa", "vattention", "saap", "sketch_walk"  # one configuration of each of the papers' decoding methods
OURS = [name for name, (key, *_) in CONFIGURATIONS.items() if key in ("santa", "vattention", "saap", "sketch_walk")]
LENGTHS = {32768: "32k", 131072: "131k", 524288: "524k"}
MODELS = {"pocket": "pocket (8M)", "smollm2": "SmolLM2 (135M)", "qwen": "Qwen2.5-Coder (1.5B)"}


@functools.cache
def result(name, machine="nvidia_h200"):
    "What a file of benchmarks/results holds."
    from benchmarks.recorder import read_record
    return read_record(ROOT / "benchmarks" / "results" / f"{machine}_{name}.json")


def rows(name): return result(name)["rows"]


def has(settings, row):
    "Does a method, as a dict, have these settings?"
    return all(row.get(name) == x for name, x in settings.items())


def table(*lines):
    "A Markdown table, its head first; numbers stand on the right."
    head, *body = [[str(cell) for cell in line] for line in lines]
    number = [all(re.match(r"[−+\d]|–|\*\*", line[k]) for line in body) for k in range(len(head))]
    rule = ["--:" if x else "---" for x in number]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


def times(x): return f"{x:.2f}×" if x < 10 else f"{x:.1f}×"


# Whole models

def whole_models(n, batch=1):
    "The compiled steps of the 8B-shaped model with a static cache on one GPU: (settings, row)."
    return [(json.loads(row["method"]), row) for row in rows("generate")
            if row.get("tuned") and row["static"] and row.get("gpus", 1) == 1 and row.get("method")
            and (row["n"], row["batch"]) == (n, batch)]


def whole_model(name, n, batch=1):
    "The row of a configuration of `CONFIGURATIONS` (or \"exact\"), or None."
    settings = EXACT
    if name != "exact":
        _, _, settings, change = CONFIGURATIONS[name]
        settings = settings | change.get(n, {})
    found = [row for method, row in whole_models(n, batch) if has(settings, method)]
    if len(found) > 1: raise ValueError(f"{name} must be one row at {n} keys and batch {batch}, got {len(found)}")
    return found[0] if found else None


def stock(n):
    "The quickest that transformers' own attention was, ms."
    found = [row["median_us"] / 1000 for row in rows("generate")
             if row["way"] == "the model alone" and row["n"] == n and row["batch"] == 1]
    return min(found, default=None)


def ms(row): return "–" if row is None else f"{row['median_us'] / 1000:.1f} ms"


PLACES = [*((n, 1) for n in LENGTHS), (32768, 8)]


def speed():
    "Table A: the speedup of a token."
    head = ["8B-shaped model", *(f"{name} keys" for name in LENGTHS.values()), "8 sequences, 32k"]
    own = ["exact attention, transformers'", *(f"{stock(n):.1f} ms" for n in LENGTHS), "–"]
    lines = [own, ["exact attention, ours", *(ms(whole_model("exact", *place)) for place in PLACES)]]
    for name in OURS:
        found = [whole_model(name, *place) for place in PLACES]
        lines.append([CONFIGURATIONS[name][1], *(times(row["ratio"]) if row else MISSING for row in found)])
    return table(head, *lines)


# Kernels and prompts

def dense_of(name, n, **like):
    "The time of the fastest dense kernel of a record, microseconds."
    return min(row["median_us"] for row in rows(name) if row["n"] == n and "variant" in row and has(like, row))


def steps(name, n, **like):
    "The speedup of a whole decoding step of a layer over the fastest dense kernel of its record, or None."
    found = [row["median_us"] for row in rows(name) if row["n"] == n and row.get("launch") == "merge"
             and row.get("memory") == "device" and has(like, row)]
    same = {key: x for key, x in like.items() if key == "H"}
    return dense_of(name, n, **same) / min(found) if found else None


def santa_step(n):
    return next((row["ratio_to_fastest_dense"] for row in rows("decode") if row["n"] == n and has(dict(
        method="santa_systematic", mode="graph", H=32, B=1, samples=128), row)), None)


def prompt(method, n):
    "The speedup of a layer's attention over the fastest dense kernel, for a whole prompt of 32 heads."
    at = {row["method"]: row["median_us"] for row in rows("prefill") if row.get("method") and row["n"] == n
          and row["H"] == 32}
    dense = [at[x] for x in ("sdpa_flash", "sdpa_cudnn", "fa4") if x in at]
    return min(dense) / at[method] if dense and method in at else None


def first_token(way, n):
    "The speedup of the first token of a whole model over the faster dense kernel."
    at = {row["way"]: row["median_us"] for row in rows("first_token") if row["n"] == n}
    return min(at["cuDNN"], at["FlashAttention-2"]) / at[way] if way in at else None


def kernels():
    "Table B: single layers and whole prompts."
    lengths = {32768: "32k keys", 131072: "131k", 524288: "524k", 1048576: "1M"}
    walk = dict(H=32, index="fine4", block=64, heads="group", asked=0.1)
    lines = {
        "SANTA, 128 draws": santa_step,
        "vAttention, 10 %": lambda n: steps("vattention", n, density=0.1),
        "SAAP, 4.4 %": lambda n: steps("saap_launches", n, H=32),
        "Sketch&Walk, 10 %": lambda n: steps("sketch_walk_launches", n, **walk),
        "Delta, prompt": lambda n: prompt("tangent", n),
        "Sketch&Walk, prompt": lambda n: prompt("sketch_walk_10", n),
        "Delta, first token": lambda n: first_token("tangent", n),
        "Sketch&Walk, first token": lambda n: first_token("Sketch&Walk 10%", n),
    }
    cells = {what: [call(n) for n in lengths] for what, call in lines.items()}
    return table(["kernels", *lengths.values()],
                 *([what, *("–" if x is None else times(x) for x in found)] for what, found in cells.items()))


# Answers

def evaluations():
    """Answers that were decoded by a method: (model, file, part, set-up, settings, the name there).

    A record names its methods; `prompt` sets of sketch_walk are prompts that the method read, and are left out."""
    for model in MODELS:
        for file, setup in ("two_models", "prompt"), ("sketch_walk", "context"), ("saap", "prompt"):
            methods = result(file)["meta"]["methods"].get(model, {})
            yield from ((model, file, model, setup, method, name) for name, method in methods.items()
                        if isinstance(method, dict))
    measured = result("real_model")["meta"]["decode"]
    for part, methods in (("answers", real_model.decoders()), ("need_queries", real_model.need_queries())):
        for name, method in methods.items():
            settings = dict(method=type(method).__name__) | dataclasses.asdict(method)
            if isinstance(method, real_model.SketchWalk): del settings["tail"]  # of prompts alone
            if measured[name] == repr(method): yield "qwen", "real_model", part, None, settings, name
    schemes = dict(method="Santa", scheme="systematic", eps=None, delta=None, bound="clt", tile=128)
    for samples in result("santa_pocket")["meta"]["budgets"]:
        yield "pocket", "santa_pocket", "accuracy", "A", schemes | dict(samples=samples), f"systematic-{samples}"


# settings that came after a record, and what they were in it
LATER = dict(Santa=dict(keys="exact"), SketchWalk=dict(refine=1, least=2))


def right_answers(file, part, setup, name):
    "(task, length) -> [right or not for each prompt] of a method of a record."
    return {(row["task"], row["length"]): [int(x) for x in row["right"]] for row in rows(file)
            if (row["part"], row.get("setup"), row.get("method")) == (part, setup, name) and "right" in row
            and "seed" not in row}


def gaps_of(file, part, setup, called):
    "Exact attention's right answers less a method's, of each prompt of the tasks and lengths that count."
    if file == "real_model":
        found = real_model.gains(rows(file), called, part, least=CAN)
        return (found.exact - found.own).astype(float).tolist()
    own, exact = (right_answers(file, part, setup, x) for x in (called, "exact"))
    cells = [cell for cell in own if cell in exact and len(own[cell]) == len(exact[cell])
             and sum(exact[cell]) >= CAN * len(exact[cell])]
    return [float(a - b) for cell in cells for a, b in zip(exact[cell], own[cell])]


def evaluations_of(name, model):
    "Those of `evaluations` that are of a configuration, whose method has the settings that it is timed with."
    _, _, settings, change = CONFIGURATIONS[name]
    if change: return  # not one setting
    for where, file, part, setup, method, called in evaluations():
        method = LATER.get(method["method"], {}) | method
        if where == model and has(settings, method): yield file, part, setup, method, called


@functools.cache
def lost(name, model):
    """How many points fewer answers are right than with exact attention on the same prompts: (low, mean, high), or None
    where that setting was not evaluated."""
    for file, part, setup, _, called in evaluations_of(name, model):
        if gaps := gaps_of(file, part, setup, called): return tuple(100 * x for x in paired_interval(gaps))
    return None


def told():
    "The configurations whose answers are told: those that were evaluated, and one of each of the papers' methods."
    return [name for name in CONFIGURATIONS if name in DRAWN or any(lost(name, model) for model in MODELS)]


def evaluated():
    "The models that some configuration was evaluated on."
    return [model for model in MODELS if any(lost(name, model) for name in CONFIGURATIONS)]


def said_of(found):
    if found is None: return MISSING
    low, mean, high = (round(x, 1) + 0.0 for x in found)  # no minus before a zero
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]".replace("-", "−")


def answers():
    "Table C: the speedup of a token and the answers that it costs, at one setting."
    models = evaluated()
    head = ["setting", "speedup, 131k keys", *(f"lost, {MODELS[model]}" for model in models)]
    lines = []
    for name in told():
        row = whole_model(name, 131072)
        lines.append([CONFIGURATIONS[name][1], times(row["ratio"]) if row else MISSING,
                      *(said_of(lost(name, model)) for model in models)])
    return table(head, *lines)


def advice():
    "What to start with: the method that loses fewest answers of the largest model, and what prompts lose there."
    own = {"SAAP": "saap", "Sketch&Walk": "sketch_walk", "Adamas": "adamas", "Quest": "quest"}
    found = real_model.losses(rows("real_model"), {name: ("answers", x) for name, x in own.items()})
    best = found.lost.idxmin()
    prompts = {"FlexPrefill": "flexprefill", "Delta": "delta", "Sketch&Walk": "sketch_walk-max-refine"}
    read = real_model.losses(rows("real_model"), {name: ("prompts", x) for name, x in prompts.items()})
    say = lambda table, name: said_of(table.loc[name, ["low", "lost", "high"]])
    return (f"Start with {best}: with 10 % of the keys it loses {say(found, best)} on the largest model, "
            "with 4 % [more on small ones](nbs/08_saap.ipynb). Reading prompts, "
            + ", ".join(f"{name} {say(read, name)}" for name in read.index) + ".")


def headline():
    "The best speedup, and the range of what is lost, in two sentences."
    n = max(LENGTHS)
    best = max(((row["ratio"], CONFIGURATIONS[name][1]) for name in CONFIGURATIONS if (row := whole_model(name, n))))
    gaps = [found[1] for name in CONFIGURATIONS for model in MODELS if (found := lost(name, model))]
    return (f"**At {LENGTHS[n]} keys a token is up to {best[0]:.1f} times as fast ({best[1]}). Methods lose "
            f"{max(0, min(gaps)):.1f} to {max(gaps):.0f} of 100 right answers, where measured.**")


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
    return f"Of {found.total()} claims, {', '.join(most)} and {last}: [the ledger](nbs/90_claims.ipynb)."


def title(path):
    "The title of a notebook."
    cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
    return "".join(cells[0]["source"]).split("\n")[0].removeprefix("# ")


CHAPTERS = {  # page -> what one learns there
    "nbs/01_why_a_token_is_slow.ipynb": "bytes",
    "nbs/04_exact.ipynb": "softmax in pieces",
    "nbs/06_selection.ipynb": "a few weighted keys for all",
    "nbs/02_pocket.ipynb": "for experiments",
    "nbs/04_santa.ipynb": "drawn values",
    "nbs/08_bounds.ipynb": "error bounds",
    "nbs/20_vattention.ipynb": "an (eps, delta) guarantee",
    "nbs/60_baselines.ipynb": "Quest, Double Sparsity, Adamas, MagicPIG",
    "nbs/08_saap.ipynb": "clusters of keys",
    "nbs/64_eviction.ipynb": "H2O, SnapKV",
    "nbs/30_delta.ipynb": "prompts that correct themselves",
    "nbs/50_sketch_walk.ipynb": "blocks of keys",
    "nbs/62_patterns.ipynb": "MInference, FlexPrefill, HiP",
    "kernels/santa.ipynb": "Triton",
    "nbs/80_bench.ipynb": "honest comparisons",
    "nbs/70_hf.ipynb": "transformers",
    "nbs/86_two_models.ipynb": "the verdict so far",
}


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
         "claims": claims, "chapters": chapters, "output": output}


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
    from sparse_nb.plots import METHOD_COLOURS, METHOD_LABELS, METHOD_MARKERS
    for name in ("exact", *DRAWN):
        found = {n: row["median_us"] / 1000 for n in LENGTHS if (row := whole_model(name, n))}
        label = CONFIGURATIONS[name][1] if name in CONFIGURATIONS else f"{METHOD_LABELS[name]} attention, ours"
        ax.plot(found.keys(), found.values(), label=label, color=METHOD_COLOURS[name], marker=METHOD_MARKERS[name],
                markersize=8, markeredgecolor="white")
    ax.set(xscale="log", xlabel="keys in the cache", ylabel="ms per token", ylim=(0, None),
           title="An 8B-shaped model, one token")
    ax.set_xticks(list(LENGTHS), LENGTHS.values())
    ax.xaxis.set_minor_locator(plt.NullLocator())
    ax.legend(loc="upper left")


def plot_lost(ax):
    "Right answers lost by each configuration."
    from sparse_nb.plots import SERIES
    models = evaluated()
    names = told()
    for k, model in enumerate(models):
        for i, name in enumerate(names):
            if (found := lost(name, model)) is None: continue
            low, mean, high = found
            place = i + 0.36 * (k - (len(models) - 1) / 2)
            ax.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="osD"[k], color=SERIES[k], markersize=6,
                        capsize=2, label=MODELS[model])
    for i, name in enumerate(names):
        if not any(lost(name, m) for m in models): ax.text(1, i, "not measured", va="center", color="0.45", fontsize=9)
    handles = dict(zip(*reversed(ax.get_legend_handles_labels())))
    ax.axvline(0, color="0.6", linewidth=0.8)
    ax.set_yticks(range(len(names)), [CONFIGURATIONS[name][1] for name in names])
    ax.invert_yaxis()
    ax.set(xlabel="right answers lost against exact attention, points", title="What it costs in answers")
    ax.legend(handles.values(), handles.keys(), loc="upper right", frameon=True)


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
