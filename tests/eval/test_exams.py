"Questions with examples: what a model reads, which number counts, which letter it chooses, and what is refused"
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from sparse_nb import Exact, Streaming, TopK
from sparse_nb.evaluate import _ends, _reply, _rows, accuracy, answers
from sparse_nb.exams import EXAMS, last_number, same_number, stated_number
from sparse_nb.tasks import (Score, choice_tokens, make, prompt_texts, prompt_tokens, reply_ends, reply_tokens,
                             score_reply)
from experiments import santa_budgets

SUMS = dict(examples=[[f"{i} + 1?", f"{i} + 1 = {i + 1}. So the answer is {i + 1}."] for i in range(8)],
            questions=[[f"{i} + {i}?", f"{i} + {i} = {2 * i:,}. So the answer is {2 * i:,}.", f"{2 * i:,}"]
                       for i in range(600, 700)])
LAW = dict(examples={"civil_law": [[f" Who {i}? ", ["a", "b", "c", "d"], i % 4] for i in range(5)]},
           questions=[["civil_law", f"What {i}?", [f"{i}", f"not {i}", "both", "none"], i % 4] for i in range(40)])
PAPERS = dict(paragraphs=[[f"Title {i}", f"Text {i}. " * (60 * i + 10)] for i in range(8)],
              questions=[[i // 2, f"Is it {i}?", ["Yes" if i % 3 else "No"]] for i in range(16)])
DATA = dict(gsm8k=SUMS, mmlu=LAW)


# what is read

def test_the_words_of_gsm8k():
    example = make("gsm8k", 4096, seed=3, data=SUMS)
    assert example.prompt.startswith("Question: 0 + 1?\nAnswer: 0 + 1 = 1. So the answer is 1.\n\nQuestion: 1 + 1?\n")
    assert example.prompt.endswith("So the answer is 8.\n\nQuestion: 603 + 603?\nAnswer:")
    assert example.question == "Question: 603 + 603?\nAnswer:" and example.choices == ()
    assert (example.answer, example.others) == ("603 + 603 = 1,206. So the answer is 1,206.", ("1,206",))
    assert reply_tokens(example) == 256 and "Question:" in reply_ends(example)


def test_the_words_of_mmlu():
    example = make("mmlu", 4096, seed=3, data=LAW)
    number = EXAMS["mmlu"].number(LAW, 3)
    assert example.context.startswith("The following are multiple choice questions (with answers) about civil law.\n\n"
                                      "Who 0?\nA. a\nB. b\nC. c\nD. d\nAnswer: A\n\nWho 1?\n")
    assert example.question == f"What {number}?\nA. {number}\nB. not {number}\nC. both\nD. none\nAnswer:"
    assert example.answer == "ABCD"[number % 4] and example.choices == tuple("ABCD") and reply_tokens(example) == 1


def test_the_words_of_qasper():
    example = make("qasper", 20_000, seed=1, data=PAPERS)
    number = EXAMS["qasper"].number(PAPERS, 1, 20_000)
    title, text = PAPERS["paragraphs"][number // 2]
    assert example.context == f"Article: {title}\n\n{text}\n\n"
    assert example.question == f"Question: Is it {number}?\nAnswer with Yes or No.\nAnswer:"
    assert [example.answer] == PAPERS["questions"][number][2] and example.choices == ("Yes", "No")


def test_papers_that_fit_and_as_many_of_each_answer():
    counts = []
    for length in (40, 500, 1000, 3000):
        found = EXAMS["qasper"].order(PAPERS, length)
        answers = [PAPERS["questions"][i][2][0] for i in found]
        assert answers == ["Yes", "No"] * (len(found) // 2) and len({*found}) == len(found)
        assert all(len(PAPERS["paragraphs"][PAPERS["questions"][i][0]][1]) <= 3 * length for i in found)
        counts.append(len(found))
    assert counts == sorted(counts) and counts[0] == 2 and counts[-1] == 12
    with pytest.raises(ValueError, match="length must be enough for some question of this task, got 16 tokens"):
        make("qasper", 16, data=PAPERS)


def test_each_seed_is_another_question():
    for task, held in DATA.items():
        count = len(held["questions"])
        assert sorted(EXAMS[task].number(held, seed) for seed in range(count)) == [*range(count)]
    assert [EXAMS["gsm8k"].number(SUMS, seed) for seed in range(3)] == [0, 1, 2]
    assert [EXAMS["mmlu"].number(LAW, seed) for seed in range(40)] != [*range(40)]


@pytest.mark.parametrize("task", DATA)
def test_examples_that_do_not_fit_are_left_out(task):
    held, most = DATA[task], EXAMS[task].shots
    sizes = [len(make(task, 4096, data=held, shots=shots).prompt) + 1 + EXAMS[task].tokens for shots in range(most + 1)]
    assert sizes == sorted({*sizes}) and make(task, 4096, data=held) == make(task, 4096, data=held, shots=most)
    for size, shots in ((sizes[-1], most), (sizes[-1] - 1, most - 1), (sizes[0], 0)):
        assert make(task, size, data=held).prompt == make(task, 4096, data=held, shots=shots).prompt
    with pytest.raises(ValueError, match=f"task '{task}', which takes at least {sizes[0]} tokens, got {sizes[0] - 1}"):
        make(task, sizes[0] - 1, data=held)


class Marks:
    "A chat template"
    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"<{m['role']}>{m['content']}</{m['role']}>" for m in messages) + "<assistant>"


@pytest.mark.parametrize("task, shots, end", [
    ("gsm8k", 8, "So the answer is 8.\n\nQuestion: 600 + 600?</user><assistant>"),
    ("gsm8k", 0, "<user>Question: 600 + 600?</user><assistant>"),
    ("mmlu", 5, "C. both\nD. none</user><assistant>Answer:"),
    ("qasper", 0, "?\nAnswer with Yes or No.</user><assistant>Answer:")])
def test_in_a_dialogue_the_user_asks(task, shots, end):
    held = dict(DATA, qasper=PAPERS)[task]
    context, prompt = prompt_texts(make(task, 20_000, data=held, shots=shots), Marks())
    assert prompt.endswith(end) and prompt.startswith(context) and context.startswith("<user>")


@pytest.mark.parametrize("task, settings, words", [
    ("gsm8k", dict(seed=100), "seed must lie in 0 to 99, a question each, got 100"),
    ("mmlu", dict(seed=-1), "seed must lie in 0 to 39, a question each, got -1"),
    ("gsm8k", dict(shots=9), "shots must lie in 0 to 8, got 9"), ("mmlu", dict(shots=-1), "shots must lie in 0 to 5")])
def test_bad_requests_are_refused(task, settings, words):
    with pytest.raises(ValueError, match=words): make(task, 4096, data=DATA[task], **settings)
    with pytest.raises(TypeError): make(task, 4096, data=DATA[task], keys=3)


# which number counts

@pytest.mark.parametrize("reply, last, stated", [
    (" 2 + 2 = 4. So the answer is 4.", "4.", "4."), ("#### 1,234\nmore 7", "7", "1,234"), ("$18 in all", "$18", ""),
    ("the answer is $2,000.50 today", "$2,000.50", "$2,000.50"), ("from -3 to 5", "5", ""), ("nothing", "", ""),
    ("The answer is 7. But the answer is 8.", "8.", "7."), ("-12", "-12", "")])
def test_the_number_of_a_reply(reply, last, stated):
    assert last_number(reply) == last and stated_number(reply) == stated


@pytest.mark.parametrize("written, right, same", [
    ("$1,206.", "1,206", True), ("1206", "1,206", True), ("1206.0", "1206", False), ("", "4", False),
    ("-4", "4", False), ("4.", "4", True)])
def test_numbers_are_compared_as_the_harness_does(written, right, same): assert same_number(written, right) is same


def test_replies_are_scored():
    sums, law = make("gsm8k", 4096, data=SUMS), make("mmlu", 4096, data=LAW)
    for written, right, stated in ((sums.answer, True, 1), (" 1200", True, 0), ("The answer is 1200, not 3", False, 1),
                                   ("the answer is 3", False, 0)):
        assert score_reply(sums, written) == score_reply(sums, written, chat=True) == Score(right, stated)
    assert score_reply(law, law.answer) == Score(True, 1.0)
    assert score_reply(law, "ABCD"[("ABCD".index(law.answer) + 1) % 4]) == Score(False, 0.0)


# which letter is chosen

def test_the_choices_follow_what_they_share():
    law = make("mmlu", 4096, data=LAW)
    context, prompt, choices = choice_tokens(law)
    assert prompt == prompt_tokens(law)[1] + [ord(" ")] and choices == [*b"ABCD"]
    assert context == prompt[:len(context)]


def test_choices_of_several_tokens_are_refused():
    law = make("mmlu", 4096, data=LAW)
    with pytest.raises(ValueError, match="differ in their last token alone"):
        choice_tokens(law.__class__(**vars(law) | dict(choices=("Yes", "No"))))


@torch.no_grad()
def test_log_likelihoods_are_those_of_the_model_itself(pocket):
    model, tokenizer = pocket
    frame = accuracy(model, tokenizer, "mmlu", 2048, {"exact": None, "all": TopK(10**6)}, prompts=3, batch=3,
                     task_settings=dict(data=LAW), setup="context", watch=True)
    for row in frame.itertuples():
        _, prompt, choices = choice_tokens(make("mmlu", 2048, seed=row.seed, tokenizer=tokenizer, data=LAW), tokenizer)
        own = model(torch.tensor([prompt], device=model.device)).logits[0, -1].float().log_softmax(-1)[choices].tolist()
        assert row.likelihoods == pytest.approx(own, abs=1e-3)
        assert row.answer == "ABCD"[own.index(max(own))] and row.exact == (row.answer == row.expected)
    assert frame[frame.method == "all"].density.min() > 0.999


@pytest.mark.parametrize("setup", ["prompt", "context"])
def test_a_method_reads_what_the_set_up_gives_it(pocket, setup):
    "One query, or those of the question, its choices and the blank after it."
    law = make("mmlu", 2048, tokenizer=pocket[1], data=LAW)
    ids, start, taken, choices = _rows(pocket[1], [law], setup)
    assert taken.tolist() == [1 if setup == "prompt" else len(law.question) + 1]
    assert ids[0, start[0]:].tolist() == choice_tokens(law, pocket[1])[1] and choices.tolist() == [[*b"ABCD"]]


def test_each_way_to_read_the_prompt_gives_other_likelihoods(pocket):
    likely = lambda method, **given: torch.tensor(accuracy(
        *pocket, "mmlu", 2048, {"x": method}, prompts=3, batch=3, task_settings=dict(data=LAW), **given).likelihoods)
    window, exact = Streaming(1, 8), likely(None)
    ways = [likely(window), likely(window, setup="context"), likely(None, prefill=window)]
    for i, way in enumerate(ways):
        assert all((way - other).abs().mean() > 1e-2 for other in (exact, *ways[:i]))


def test_one_kind_at_a_time(pocket):
    both = [make("mmlu", 2048, tokenizer=pocket[1], data=LAW), make("kv", 300, tokenizer=pocket[1])]
    with pytest.raises(ValueError, match="examples must have the same number of choices"):
        answers(*pocket, both, {"exact": Exact()})


# how a reply ends

class Letters:
    "Tokens are letters; 0 ends a reply"
    eos_token_id = pad_token_id = 0
    def decode(self, ids, skip_special_tokens): return "".join(map(chr, ids))


@pytest.mark.parametrize("written, chat, reply", [
    (" 4.\n\nQuestion: more", False, " 4.\n\n"), (" 4\0 5", False, " 4"), (" 4\1 5", False, " 4"),
    (" 4</s> Question: 5", True, " 4"), ("\0", False, "")])
def test_a_chain_of_thought_ends_early(written, chat, reply):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[0, 1]))
    sums = make("gsm8k", 4096, data=SUMS)
    assert _reply(Letters(), sums, [*map(ord, written)], _ends(model, Letters(), sums, chat)) == reply


def test_another_task_goes_on():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    pairs = make("kv", 300)
    assert _reply(Letters(), pairs, [*b"1\0Question: 2"], _ends(model, Letters(), pairs, False)) == "1\0Question: 2"


# the experiment on SANTA's budgets

def test_cells_hold_each_question_once():
    asked = Counter((x.part, x.task, name, seed) for x in santa_budgets.cells() for seed in x.seeds
                    for some, _ in santa_budgets.asked(x) for name in some)
    assert {*asked.values()} == {1}
    kinds = Counter(key[:3] for key in asked)
    assert all(count == dict(gsm8k=1319, mmlu=1531)[task] for (_, task, _), count in kinds.items())
    assert {key[2] for key in kinds} == {"exact", *santa_budgets.methods()} and len(kinds) == 2 * 19 + 2 * 6


def test_a_cell_has_a_row_for_each_method_that_says_what_is_right():
    for part, methods in (("written", ["exact", "systematic-4"]), ("all", ["systematic-4"])):
        rows = santa_budgets.evaluate(santa_budgets.Cell(part, "pocket", "mmlu", 1024, range(1, 2)))
        assert [row["method"] for row in rows] == methods
        right = "AC"[EXAMS["mmlu"].number(santa_budgets.QUICK["mmlu"], 1)]
        assert all(row["seeds"] == [1, 2] and row["right"] == [int(row["answers"] == right)] for row in rows)
    read_by = {cell.part: {how is not None for _, how in santa_budgets.asked(cell)} for cell in santa_budgets.cells()}
    assert read_by == {"written": {False}, "all": {True}}  # who reads the prompts


def test_the_table_pairs_questions_with_exact_attention():
    row = dict(model="qwen", task="gsm8k", length=2048)
    rows = [row | dict(part="written", method="exact", seeds=[0, 3], right=[1, 1, 0], tokens=[9, 9, 9]),
            row | dict(part="written", method="exact", seeds=[3, 5], right=[1, 1], tokens=[9, 9]),
            row | dict(part="all", method="systematic-4", seeds=[2, 5], right=[0, 1, 0], tokens=[1, 2, 6])]
    exact, own = (santa_budgets.table_of(rows).loc["gsm8k", part, method]
                  for part, method in (("written", "exact"), ("all", "systematic-4")))
    assert (exact.questions, exact.right, exact.lost, exact.tokens) == (5, 0.8, 0, 9)
    assert (own.questions, own.right, own.tokens) == (3, 1 / 3, 3) and own.lost == pytest.approx(100 / 3)
    assert own.lost_low < own.lost < own.lost_high and own.low < own.right < own.high
