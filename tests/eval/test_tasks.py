"""Prompts of every length and tokenizer, answers that are in them, and requests that are refused."""
import random
import re
from collections import Counter

import pytest
from scipy.stats import kstest

from sparse_nb.tasks import TASKS, Score, filler_text, make, plant, score

FALSE_ALARM = 1e-7  # of each statistical check


@pytest.fixture(scope="module")
def words():
    "A tokenizer whose tokens are words and pieces of words."
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([make("multikey", 20_000, seed=s).prompt for s in range(3)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def whole(example): return f"{example.prompt} {example.answer}."


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", (1500, 4096, 32768, 131072))
def test_bytes_fill_the_length(task, length):
    example = make(task, length, seed=5)
    assert len(whole(example)) + 1 == length and example.prompt.isascii()
    assert example == make(task, length, seed=5) and example.prompt != make(task, length, seed=6).prompt


@pytest.mark.parametrize("task", TASKS)
def test_bytes_as_a_tokenizer_fill_it_too(task):
    from sparse_nb.pocket import byte_tokenizer
    for length in (1500, 32768):
        assert make(task, length, seed=2, tokenizer=byte_tokenizer()) == make(task, length, seed=2)


@pytest.mark.parametrize("task", TASKS)
def test_other_tokenizers_fit_from_below(task, words):
    for length in (1500, 8192):
        used = len(words(whole(make(task, length, seed=1, tokenizer=words)))["input_ids"])
        assert 0.98 * length <= used <= length


@pytest.mark.parametrize("seed", range(20))
def test_answers_follow_from_the_context(seed):
    "A reader with regular expressions finds every answer, and no other reader is needed."
    facts = lambda e: re.findall(r"The number of (\w{5}) is (\d{4})\.", e.context)
    for task in ("needle", "multikey"):
        e = make(task, 3000, seed=seed)
        assert dict(facts(e))[re.search(r"number of (\w+) is$", e.question)[1]] == e.answer
    e = make("multivalue", 3000, seed=seed)
    asked = re.search(r"numbers of (\w+) are", e.question)[1]
    assert ", ".join(v for k, v in facts(e) if k == asked) == e.answer
    e = make("multiquery", 3000, seed=seed)
    asked = re.findall(r"\w+", e.question.split("numbers of ")[1].split("?")[0].replace(" and ", " "))
    assert ", ".join(f"{k} is {dict(facts(e))[k]}" for k in asked) == e.answer
    e = make("kv", 3000, seed=seed)
    assert dict(re.findall(r"(\w{5}): (\d{4})\n", e.context))[e.question[1:6]] == e.answer
    e = make("variable_tracking", 3000, seed=seed)
    number = re.search(r"hold (\d+)", e.question)[1]
    chain = [re.search(rf"Store {number} in (\w+)\.", e.context)[1]]
    while found := re.search(rf"Copy {chain[-1]} to (\w+)\.", e.context): chain.append(found[1])
    assert ", ".join(chain) == e.answer
    e = make("frequent_words", 3000, seed=seed)
    (top, most), (_, second), *_ = Counter(e.context.split()).most_common()
    assert top == e.answer and most >= 5 * second


def test_needle_depth_is_uniform():
    depths = [e.context.index(e.answer) / len(e.context) for e in (make("needle", 4096, seed=s) for s in range(400))]
    assert kstest(depths, "uniform").pvalue > FALSE_ALARM


def test_every_pair_of_kv_is_asked():
    places = [e.context.index(e.question[1:6]) / len(e.context) for e in (make("kv", 4096, seed=s) for s in range(400))]
    assert kstest(places, "uniform").pvalue > FALSE_ALARM
    assert kstest([p ** 1.5 for p in places], "uniform").pvalue < FALSE_ALARM   # the check sees a lean to the front


def test_plant_keeps_order_and_length():
    for seed in range(50):
        text = plant(random.Random(seed), [f"<{i}>" for i in range(9)], 700)
        assert len(text) == 700 and re.findall(r"<(\d)>", text) == list("012345678")
    assert filler_text(random.Random(0), 0) == ""


def test_own_filler():
    e = make("needle", 600, filler=lambda rng, chars: "x" * chars)
    assert set(e.context.replace("The number of", "")) - set("x .is0123456789") <= set("abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize("written, expected, exact, characters", [
    (" 4821.", "4821", True, 1.0), ("4821\n4822", "4821", True, 1.0), ("4821", "4821", True, 1.0),
    ("4820", "4821", False, 0.75),
    ("", "4821", False, 0.0), ("\n", "4821", False, 0.0), ("48213", "4821", False, 1.0),
    ("ab, cd", "ab, cd", True, 1.0)])
def test_score(written, expected, exact, characters): assert score(written, expected) == Score(exact, characters)


@pytest.mark.parametrize("call, error, text", [
    (lambda: make("needles", 1000), ValueError, "task must be one of needle, multikey"),
    (lambda: make("needle", 30), ValueError, "length must be enough for task 'needle', got 30 tokens: chars must hold"),
    (lambda: make("needle", 0), ValueError, "got 0 tokens"),
    (lambda: make("needle", -5), ValueError, "got -5 tokens"),
    (lambda: make("needle", 1e4), TypeError, "length must be an int of tokens, got 10000.0"),
    (lambda: make("needle", True), TypeError, "length must be an int of tokens, got True"),
    (lambda: make("kv", 20), ValueError, "task 'kv', got 20 tokens: two pairs take 24 characters"),
    (lambda: make("frequent_words", 200), ValueError, "got 200 tokens: counting 25 words takes 348"),
    (lambda: make("multikey", 300), ValueError, "got 300 tokens: chars must hold the facts, which take"),
    (lambda: score("1", ""), ValueError, "expected must be a right answer, got an empty string")])
def test_bad_requests(call, error, text):
    with pytest.raises(error, match=re.escape(text)): call()
