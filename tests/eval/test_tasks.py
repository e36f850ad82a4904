"""Prompts of every length and tokenizer, answers that are in them, and requests that are refused."""
import random
import re
from collections import Counter
from hashlib import sha256

import pytest
from scipy.stats import kstest

from sparse_nb.tasks import (TASKS, Example, Score, filler_text, make, plant, prompt_texts, prompt_tokens,
                             reply_tokens, score, score_reply)

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


TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
DATA = dict(paragraphs=[["T", f"Town {i} lies at the river Ré, was built in {1000 + i} and has the bell {i}{i}."]
                        for i in range(40)],
            questions=[[i, f"When was town {i} built?", [f"{1000 + i}", f"in {1000 + i}"]] for i in range(40)])


@pytest.fixture(scope="module")
def talking(words):
    words.chat_template = TEMPLATE
    yield words
    words.chat_template = None


def settings_of(task): return dict(data=DATA) if task == "qa" else {}


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
    (lambda: make("qa", 80, data=DATA), ValueError, "task 'qa', got 80 tokens: the document takes"),
    (lambda: make("kv", 20), ValueError, "task 'kv', got 20 tokens: two pairs take 24 characters"),
    (lambda: make("frequent_words", 200), ValueError, "got 200 tokens: counting 25 words takes 348"),
    (lambda: make("multikey", 300), ValueError, "got 300 tokens: chars must hold the facts, which take"),
    (lambda: score("1", ""), ValueError, "expected must be a right answer, got an empty string")])
def test_bad_requests(call, error, text):
    with pytest.raises(error, match=re.escape(text)): call()


# what the pocket model was trained on, and the results that rest on it

OLD = {"needle": "df7b752ea7de34ae", "multikey": "9875e5eac437d9e8", "kv": "3e68cdf9123d0794",
       "multivalue": "7fc3b76de03e57d5", "multiquery": "635b9b41067458c3", "variable_tracking": "c5409f55a9965a82",
       "frequent_words": "e07000c4869e79cc"}

@pytest.mark.parametrize("task", TASKS)
def test_plain_prompts_are_what_they_were(task):
    some = [make(task, length, seed=seed) for length, seed in ((1500, 3), (4096, 0), (16384, 11))]
    assert sha256("|".join(f"{e.prompt} {e.answer}" for e in some).encode()).hexdigest()[:16] == OLD[task]


# dialogues

@pytest.mark.parametrize("task", (*TASKS, "qa"))
def test_dialogues_say_what_will_be_asked_and_ask_it(task, talking):
    for length, seed in ((1500, 0), (1500, 1), (6000, 2)):
        given = dict(seed=seed, tokenizer=talking, chat=True, **settings_of(task))
        e = make(task, length, **given)
        told, asked, begun = e.turns
        context, prompt = prompt_texts(e, talking)
        assert prompt == f"<|user|>{told}{e.context.strip()}{asked}\n<|assistant|>{begun}"
        assert prompt.startswith(context)
        assert told and "{" not in told + asked + begun
        names = re.findall(r"\b[a-z]{5}\b|\d{4}", e.question) if task not in ("frequent_words", "qa") else []
        names = [x for x in names if x in e.context]
        assert all(x in asked for x in names) and (names or task in ("frequent_words", "qa"))
        assert all(part not in asked + begun for part in e.parts) and all(part in e.context for part in e.parts)
        used = len(prompt_tokens(e, talking, chat=True)[1]) + reply_tokens(e, talking, chat=True)
        assert 0.98 * length <= used <= length
        assert e == make(task, length, **given) and e.context != make(task, length, **given | dict(seed=9)).context


def example(task, answer, *others): return Example(task, "", "", answer, 0, 0, others)


THREE = example("multivalue", "4821, 0359, 1575")
QUERIES = example("multiquery", "abcde is 4821, fghij is 0359")
YEAR = example("qa", "the Denver Broncos", "Broncos, Denver")

@pytest.mark.parametrize("asked, written, found", [
    (THREE, " 4821, 0359, and 1575.", 1), (THREE, "\n- 1575\n- **4821**\n- 0359", 1),
    (THREE, "4821,0359,1575", 1),
    (THREE, "4821, 0359.", 2 / 3), (THREE, "4821, 0359, 15751", 2 / 3), (THREE, "4821, 0359, 91575", 2 / 3),
    (THREE, "4821, 0359, 1575.5", 2 / 3), (THREE, "4821, 0359, 3.1575", 2 / 3), (THREE, "482103591575", 0),
    (THREE, "", 0), (THREE, "4821, 4821, 4821", 1 / 3),
    (QUERIES, "fghij is 0359 and that of abcde is 4821", 1), (QUERIES, "abcde, fghij", 0),
    (example("multiquery", "abcis is 4821, is123 is 0359"), "4821, 0359", 1),
    (example("variable_tracking", "abcde, fghij"), "fghij and xabcde", 0.5),
    (YEAR, " Denver broncos!", 1), (YEAR, "They were The Denver  Broncos, who won.", 1), (YEAR, "broncos denver", 1),
    (YEAR, "Denver", 0), (YEAR, "the Denver Broncosaurs", 0), (YEAR, "", 0),
    (example("qa", "1,233"), "It is 1233 km.", 1), (example("qa", "233"), "1,233 km", 0),
    (example("qa", "The"), "x", 0)])
def test_replies_of_several_answers(asked, written, found):
    assert score_reply(asked, written, chat=True) == Score(found == 1, pytest.approx(found))


def test_replies_of_one_answer_and_plain_ones_are_scored_to_the_letter():
    one = example("kv", "4821")
    for written in (" 4821.", "4820", "48213", "it is 4821"):
        assert score_reply(one, written, chat=True) == score_reply(one, written) == score(written, "4821")
    for mark in "\"'*`": assert score_reply(one, f" {mark}4821{mark}.", chat=True).exact
    assert not score_reply(one, ' "4821".').exact and not score_reply(one, ' "48210".', chat=True).exact
    assert not score_reply(THREE, "0359, 4821, 1575").exact and score_reply(THREE, " 4821, 0359, 1575.\n").exact


def test_there_is_room_for_several_answers():
    e = make("multivalue", 3000)
    assert reply_tokens(e) == len(e.answer) + 2
    assert reply_tokens(e, chat=True) >= len("".join(f"\n- {e.turns[0][:4]}{part}" for part in e.parts))


# questions of SQuAD

@pytest.mark.parametrize("length", (300, 700, 4000, 20_000))
def test_a_paragraph_among_others(length):
    places = []
    for seed in range(30):
        e = make("qa", length, seed=seed, data=DATA)
        number = int(re.search(r"town (\d+)", e.question)[1])
        gold, = re.findall(rf"Document (\d+):\n{re.escape(DATA['paragraphs'][number][1])}\n\n", e.context) or [None]
        titles = re.findall(r"Document (\d+):", e.context)
        assert titles == [str(i + 1) for i in range(len(titles))]
        assert [e.answer, *e.others] == DATA["questions"][number][2]
        assert e == make("qa", length, seed=seed, data=DATA)
        used = len(e.prompt.encode()) + 1 + reply_tokens(e)
        assert 0.9 * length < used <= length
        places.append(int(gold) / len(titles))
    if length == 4000: assert kstest(places, "uniform").pvalue > FALSE_ALARM


def test_each_paragraph_once_before_any_again():
    texts = re.findall(r"Town (\d+) lies.*?bell \d+\.", make("qa", 3500, data=DATA).context)
    assert 20 < len(texts) == len({*texts})
