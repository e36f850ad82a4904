"""lm-evaluation-harness, where it is installed, reads the same prompts as `gsm8k` and `mmlu`, and gives the same texts,
likelihoods and scores"""
import json
from pathlib import Path

import pytest
import yaml

lm_eval = pytest.importorskip("lm_eval")
evaluator = pytest.importorskip("lm_eval.evaluator")
HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM

from sparse_nb import data
from sparse_nb.evaluate import accuracy
from sparse_nb.exams import EXAMS
from sparse_nb.models import fetch
from sparse_nb.pocket import byte_tokenizer
from sparse_nb.tasks import choice_tokens, make

TASKS = Path(lm_eval.__file__).parent / "tasks"
SUMS = dict(examples=[[f"{i} + 1?", f"{i} + 1 = {i + 1}. So the answer is {i + 1}."] for i in range(8)],
            questions=[[f"{i} + {i}?", f"{2 * i:,}. So the answer is {2 * i:,}.", f"{2 * i:,}"] for i in (4, 600, 7)])
LAW = dict(examples=dict(civil_law=[[f" Who {i}? ", ["a", "b", "c", "d"], i % 4] for i in range(5)]),
           questions=[["civil_law", f"What {i}?", [f"{i}", f"not {i}", "both", "none"], i % 4] for i in range(6)])
REAL = [pytest.mark.slow, pytest.mark.smollm2, pytest.mark.data, pytest.mark.budget(1800)]


@pytest.fixture(scope="module", params=["pocket", pytest.param("smollm2", marks=REAL)])
def asked(request):
    "A model, its tokenizer, and sets of questions: a few made-up ones of the small model, else of the real sets."
    if request.param == "pocket":
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = tokenizer.pad_token  # which the harness needs
        return request.getfixturevalue("pocket")[0], tokenizer, SUMS, LAW
    mmlu = data.load("mmlu")
    some = [x for x in mmlu["questions"] if x[0] == "marketing"]
    return *fetch.load("smollm2"), data.load("gsm8k"), dict(mmlu, questions=some)


def harness(asked, folder, name, config, rows, **parts):
    "What the harness finds: question number -> filter -> sample."
    for part, some in (dict(test=rows) | parts).items():
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    files = {part: str(folder / f"{part}.jsonl") for part in ("test", *parts)}
    config |= dict(task=name, dataset_path="json", dataset_kwargs=dict(data_files=files), dataset_name=None)
    model = HFLM(pretrained=asked[0], tokenizer=asked[1], batch_size=len(rows), max_length=8192)
    found = evaluator.simple_evaluate(model=model, tasks=[config], bootstrap_iters=0)["samples"][name]
    numbered = {}
    for sample in found: numbered.setdefault(sample["doc_id"], {})[sample["filter"]] = sample
    return numbered


@pytest.mark.budget(120)
def test_a_chain_of_thought_is_the_same_text(asked, tmp_path):
    model, tokenizer, held, _ = asked
    count = min(10, len(held["questions"]))
    own = yaml.safe_load((TASKS / "gsm8k" / "gsm8k.yaml").read_text())
    for split in ("training_split", "fewshot_split"): del own[split]
    own |= dict(num_fewshot=8, fewshot_config=dict(sampler="first_n", samples=[
        dict(question=question, answer=solution) for question, solution in held["examples"]]))
    own["generation_kwargs"] |= dict(max_gen_toks=EXAMS["gsm8k"].tokens)
    own["filter_list"][0]["filter"][0]["regex_pattern"] = r"(?:####|[Tt]he answer is) (\-?[$0-9\.\,]+)"
    rows = [dict(question=question, answer=f"#### {number}") for question, _, number in held["questions"][:count]]
    theirs = harness(asked, tmp_path, "gsm8k_here", own, rows)
    mine = accuracy(model, tokenizer, "gsm8k", 4096, {"exact": None}, prompts=count, batch=count,
                    task_settings=dict(data=held))
    for row in mine.itertuples():
        last, stated = (theirs[row.seed][name] for name in ("flexible-extract", "strict-match"))
        prompt = make("gsm8k", 4096, seed=row.seed, tokenizer=tokenizer, data=held).prompt
        assert last["arguments"][0][0] == prompt and last["resps"][0][0] == row.answer
        assert (last["exact_match"], stated["exact_match"]) == (row.exact, row.characters)


@pytest.mark.budget(120)
def test_letters_are_as_likely(asked, tmp_path):
    model, tokenizer, _, held = asked
    subject, = {question[0] for question in held["questions"]}
    own = yaml.safe_load((TASKS / "mmlu" / "default" / "_default_template_yaml").read_text())
    told = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    own |= dict(num_fewshot=5, description=told)
    row = lambda question, choices, answer: dict(question=question, choices=choices, answer=answer)
    theirs = harness(asked, tmp_path, "mmlu_here", own, [row(*question[1:]) for question in held["questions"][:10]],
                     dev=[row(*example) for example in held["examples"][subject]])
    seeds = {EXAMS["mmlu"].number(held, seed): seed for seed in range(len(held["questions"]))}
    for number, samples in theirs.items():
        sample, = samples.values()
        given = dict(seed=seeds[number], tokenizer=tokenizer, data=held)
        prompt = make("mmlu", 4096, **given).prompt
        [mine] = accuracy(model, tokenizer, "mmlu", 4096, {"exact": None}, prompts=1, seed=seeds[number],
                          task_settings=dict(data=held)).to_dict("records")
        assert [x[0] for x in sample["arguments"]] == [prompt] * 4
        likely = [x[0][0] for x in sample["resps"]]
        shared = len(choice_tokens(make("mmlu", 4096, **given), tokenizer)[1]) - len(tokenizer(prompt)["input_ids"])
        if not shared: assert mine["likelihoods"] == pytest.approx(likely, abs=1e-3)
        differences = lambda x: [y - x[0] for y in x]
        assert differences(mine["likelihoods"]) == pytest.approx(differences(likely), abs=1e-3)
        assert mine["answer"] == "ABCD"[likely.index(max(likely))] and sample["acc"] == mine["exact"]
