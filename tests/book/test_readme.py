"""README: its tables are what the results say, its snippets run and print what it shows, and it stays short."""
import json
import re
import statistics
import sys
from pathlib import Path

import pytest
from scipy import stats

from sparse_nb.core.registry import METHODS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.recorder import read_record  # noqa: E402
from benchmarks.served import speedup  # noqa: E402
from tools import front  # noqa: E402

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = front.blocks(TEXT)
PAPERS = {"santa": "2605.01910", "vattention": "2510.05688", "delta": "2505.11254", "saap": "2502.08246",
          "sketch_walk": "2602.07397"}


def record(name): return read_record(ROOT / f"benchmarks/results/nvidia_h200_{name}.json")["rows"]


def cells(part):
    "The table of a part of README: first cell of a line -> the others."
    lines = TEXT.split(f"<!-- {part} -->\n")[1].split(f"\n<!-- /{part} -->")[0].splitlines()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {line[0]: line[1:] for line in lines[2:]}


def test_parts_are_what_the_script_makes():
    assert front.filled(TEXT, front.PARTS.keys() - {"output"}) == TEXT, "run `make readme`"


def test_the_figure_is_of_these_results():
    assert front.drawn_from(front.FIGURE) == front.drawn(), "run `make readme`"


def test_a_part_that_is_missing_is_named():
    with pytest.raises(ValueError, match="README.md must have one part speed, got 0"):
        front.filled(TEXT.replace("<!-- speed -->", ""), ["speed"])


def test_speed_is_what_the_record_of_whole_models_says():
    places = (32768, 1), (131072, 1), (524288, 1), (32768, 8)
    static = {(row["way"], (row["n"], row["batch"])): row for row in record("generate")
              if row["static"] and row.get("tuned") and row.get("gpus", 1) == 1}
    shown = cells("speed")
    exact = [static["exact kernel", place] for place in places]
    assert shown["exact attention, ours"] == [f"{row['median_us'] / 1000:.1f} ms" for row in exact]
    own = {"SANTA, 128 draws": "SANTA, 128 samples", "SANTA, 128 draws, int8 keys": "SANTA, 128 samples, int8 keys",
           "vAttention, 10 %, random maps": "vAttention, 10 %", "SAAP, 5 % of keys": "SAAP, 5 %",
           "Sketch&Walk, 10 % of blocks": "Sketch&Walk, 10 %"}
    for label, way in own.items():
        found = [static[way, place] for place in places]
        assert shown[label] == [f"{row['ratio']:.2f}×" for row in found]
        assert all(row["rival"] == "exact kernel" and row["replay"] for row in found)
        options = [{name: x for name, x in row["compiler"].items() if name != "clock"} for row in (*found, *exact)]
        assert all(x == options[0] for x in options)  # all were compiled alike
    eps = [json.loads(static["vAttention, 10 %", (n, 1)]["method"])["eps"] for n in front.LENGTHS.values()]
    assert "eps {}, {} and {} at the three lengths".format(*eps) in TEXT


def test_speed_inside_vllm_is_of_one_run():
    at = {(row["method"], row["case"]): row["ms_a_step"] for row in record("vllm")
          if (row["part"], row["what"]) == ("speed", "speed")}
    for column, case in ((1, "131072 x 1"), (3, "32768 x 8")):
        own, saap = at["vLLM's own", case], at["Saap(budget=0.1)", case]
        assert cells("speed")["exact attention, vLLM's"][column] == f"{own:.1f} ms"
        assert cells("speed")["SAAP, 10 % of keys, in vLLM"][column] == f"{own / saap:.2f}×"
    assert f"with 32 sequences of 32k {speedup('Saap(budget=0.1)', '32768 x 32', 'two_speed'):.2f}×" in TEXT


def test_kernels_are_what_their_records_say():
    shown = cells("kernels")
    decode = {row["n"]: row["ratio_to_fastest_dense"] for row in record("decode") if (
        row["method"], row["mode"], row["H"], row["B"], row["samples"]) == ("santa_systematic", "graph", 32, 1, 128)}
    assert shown["SANTA, 128 draws"] == [f"{decode[n]:.2f}×" for n in (32768, 131072, 524288, 1048576)]
    at = {row["method"]: row["median_us"] for row in record("prefill") if row.get("method") and row["n"] == 131072}
    dense = min(at[x] for x in ("sdpa_flash", "sdpa_cudnn", "fa4"))
    assert shown["Delta, prompt"][1] == f"{dense / at['tangent']:.1f}×"
    assert shown["Sketch&Walk, prompt, fastest rule"][1] == f"{dense / at['sketch_walk_10']:.2f}×"
    first = {row["way"]: row["median_us"] for row in record("first_token") if row["n"] == 131072}
    assert shown["Delta, first token"][1] == f"{first['cuDNN'] / first['tangent']:.2f}×"
    walk = dict(asked=0.1, index="fine4", block=64, heads="group")
    for what, name, like in (("vAttention, 10 %", "vattention", dict(density=0.1)),
                             ("SAAP, 4.4 %", "saap_launches", {}), ("Sketch&Walk, 10 %", "sketch_walk_launches", walk)):
        rows = [row for row in record(name) if row["n"] == 1048576 and row["memory"] == "device"
                and row.get("H", 32) == 32]
        [step] = [row["median_us"] for row in rows if row.get("launch") == "merge" and like.items() <= row.items()]
        dense = min(row["median_us"] for row in rows if row["method"].startswith("sdpa"))
        assert shown[what][3] == front.times(dense / step)


def test_answers_are_the_difference_on_the_same_prompts():
    exact, adamas = ({(row["task"], row["length"]): row["right"] for row in record("two_models")
                      if (row["part"], row["method"]) == ("smollm2", name) and "right" in row}
                     for name in ("exact", "adamas"))
    gaps = [int(a) - int(b) for x in exact if exact[x].count("1") >= len(exact[x]) / 2
            for a, b in zip(exact[x], adamas[x], strict=True)]
    assert cells("answers")["Adamas, 10 %"][2].startswith(f"{100 * statistics.mean(gaps):.1f} [")
    n, lost, won = len(gaps) + 2, gaps.count(1) + 1, gaps.count(-1) + 1  # Bonett and Price
    half = stats.t.ppf(0.975, n - 1) * (((lost + won) / n - ((lost - won) / n)**2) / n)**0.5
    low, high = (100 * ((lost - won) / n + x) for x in (-half, half))
    assert cells("answers")["Adamas, 10 %"][2].endswith(f"[{low:.1f}, {high:.1f}]")

def test_answers_of_the_largest_model_are_differences_on_the_same_prompts():
    rows = json.loads((ROOT / "benchmarks" / "results" / "nvidia_h200_real_model.json").read_text())["rows"]
    right = {name: {(row["task"], row["seeds"][0] + i): x for row in rows
                    if (row["part"], row["method"]) == ("answers", name) for i, x in enumerate(row["right"])}
             for name in ("exact", "quest", "sketch_walk")}
    tasks = {task for task, _ in right["exact"]}
    of = lambda name, task: [x for (own, _), x in right[name].items() if own == task]
    tasks = {task for task in tasks if sum(of("exact", task)) >= len(of("exact", task)) / 2}
    lost = {name: statistics.mean(x - right[name][at] for at, x in right["exact"].items() if at[0] in tasks)
            for name in right}
    assert len(tasks) == 7 and cells("answers")["Quest, 10 %"][3].startswith(f"{100 * lost['quest']:.1f} [")
    assert cells("answers")["Sketch&Walk, 10 % of blocks"][3].startswith(f"{100 * lost['sketch_walk']:.1f} [")
    right = {method: {(row["task"], i): x for row in record("answers") if (row["model"], row["method"]) == (
        "qwen", method) for i, x in enumerate(row["right"], row["seeds"][0])} for method in ("exact", "saap_5")}
    able = {task for task, _ in right["exact"] if statistics.mean(
        x for (own, _), x in right["exact"].items() if own == task) >= 0.5}
    gap = statistics.mean(right["exact"][at] - x for at, x in right["saap_5"].items() if at[0] in able)
    assert cells("answers")["SAAP, 5 % of keys"][3].startswith(f"{100 * gap:.1f} [")


def test_what_a_token_reads():
    meta = read_record(ROOT / "benchmarks" / "results" / "nvidia_h200_generate.json")["meta"]
    shape = meta["shape"]
    head = shape["hidden_size"] // shape["num_attention_heads"]
    cache = 131072 * 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    assert f"reads {meta['weights_read_bytes'] / 1e9:.0f} GB of weights and {cache / 1e9:.0f} GB" in TEXT


# The snippets.

def test_the_first_snippet_prints_what_is_shown_twice_in_a_row():
    shown = TEXT.split("<!-- output -->\n```text\n")[1].split("```")[0]
    names = {}
    assert [front.printed(SNIPPETS[0], names) for _ in range(2)] == [shown, shown]
    assert names["answer"]() == names["question"].answer.strip()
    assert names["model"].config._attn_implementation == "sdpa"  # the session gave the model back


@pytest.mark.parametrize("k", range(1, len(SNIPPETS)))
def test_other_snippets_stand_alone(k):
    names = {}
    front.printed(SNIPPETS[k], names)
    assert names["out"].shape == (1, 8, 1, 64)


def test_shell_lines_name_what_there_is():
    lines = [line.split("#")[0].strip() for block in re.findall(r"^```sh\n(.*?)^```", TEXT, flags=re.M | re.S)
             for line in block.splitlines()]
    targets = re.findall(r"^([\w-]+)(?: [\w-]+)*:", (ROOT / "Makefile").read_text(), flags=re.M)
    asked = {word for line in [*lines, *re.findall(r"`(make [^`]+)`", TEXT)] if line.startswith("make ")
             for word in re.sub(r'"[^"]*"', "", line).split()[1:] if "=" not in word}
    assert asked >= {"demo", "test", "lab", "site"} and asked <= {*targets}
    folder = next(line for line in lines if line.startswith("pip wheel")).split("-w ")[1].split()[0]
    assert f'pip install "$(ls {folder}/sparse_nb-*.whl)[cli]"' in lines


# Its length, links and names.

def plain(text):
    "What a reader of the rendered page reads, but for code in blocks."
    text = re.sub(r"^```[\s\S]*?^```$", "", text, flags=re.M)
    text = re.sub(r"<!--[\s\S]*?-->|</?\w+>", "", text)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def words(text): return re.findall(r"\w[\w.,%×&'/-]*", text)


def test_it_is_short():
    open_ = re.sub(r"<details>.*?</details>", "", TEXT, flags=re.S)  # a folded list grows with the methods
    assert len(words(plain(open_))) <= 880
    paragraphs = [part for part in plain(TEXT).split("\n\n") if not re.match(r"\||\d+\. ", part.strip())]
    assert not [part for part in paragraphs if len(words(part)) > 100]


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    away = {link for link in links if ":" in link}
    assert away == {f"https://arxiv.org/abs/{number}" for number in PAPERS.values()}
    assert not [link for link in {*links} - away if not (ROOT / link.split('#')[0]).is_file()]
    assert set(re.findall(r"<(https?:[^>]+)>", TEXT)) == set()


def test_every_method_is_named():
    names = {row.path.split(":")[1] for row in METHODS.values()}
    listed = TEXT.split("## Methods")[1].split("## Chapters")[0]
    assert {name for name in re.findall(r"`(\w+)`", listed)} == names
    more = listed.split("<summary>")[1]
    count = len(METHODS) - len(PAPERS)
    assert len(re.findall(r"`\w+`", more)) == count and f"{count} more" in more
    for name, number in PAPERS.items():
        line = next(x for x in listed.splitlines() if f"abs/{number}" in x)
        assert f"| `{METHODS[name].path.split(':')[1]}` |" in line and f"kernels/{name}.ipynb" in line


def test_pages_are_called_by_their_titles():
    named = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| \[(.+?)\]\((.+?)\) \|$", TEXT, flags=re.M)
    assert f"<summary>{sum(methods.count('`') for methods, *_ in named) // 2} more methods" in TEXT
    for _, name, page in named: assert front.title(page) == name
