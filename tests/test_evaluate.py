"Scoring: each row of a batch is its own run, padding and set-ups included, and the intervals say what they should"
import json
import math

import pandas as pd
import pytest
import torch

transformers = pytest.importorskip("transformers")

from sparse_nb import evaluate, hf, tasks
from sparse_nb.attention import Exact, Method, Streaming, TopK, Uniform
from sparse_nb.evaluate import accuracy, compare, prefill_rows, read_record, summary
from sparse_nb.pocket import byte_tokenizer
from sparse_nb.santa import Santa

@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        initializer_range=0.5, max_position_embeddings=4096, bos_token_id=tokenizer.bos_token_id, eos_token_id=None)).eval(), tokenizer

METHODS = {"exact": Exact(), "streaming": Streaming(window=32), "topk": TopK(16), "uniform": Uniform(samples=32), "santa": Santa(samples=16)}

@pytest.mark.parametrize("setup", ["A", "B"])
def test_a_batch_of_one_is_hf_answer(tiny, setup):
    model, tokenizer = tiny
    frame = accuracy(model, tokenizer, "multikey", 700, METHODS, prompts=2, seed=3, batch=1, setup=setup)
    for row in frame.itertuples():
        example = tasks.make("multikey", 700, seed=row.seed, tokenizer=tokenizer)
        ids = torch.tensor([tokenizer(example.prompt)["input_ids"]])
        own = len(example.question) if setup == "B" else 1
        got = hf.answer(model, hf.prefill(model, ids[:, :-own]), ids[:, -own:], METHODS[row.method], tokenizer=tokenizer,
                        max_new_tokens=len(example.answer) + 2, seed=row.seed, stop="")
        assert got.text == row.answer, row

def ragged(monkeypatch):
    "Prompts of one length asked for that differ by up to forty tokens"
    whole = tasks.make
    monkeypatch.setattr(evaluate, "make", lambda task, length, seed, **settings: whole(task, length - 20 * (seed % 3), seed=seed, **settings))

@pytest.mark.parametrize("setup, task", [("A", "multikey"), ("B", "multiquery")])
def test_each_row_of_a_padded_batch_is_its_own_run(tiny, monkeypatch, setup, task):
    model, tokenizer = tiny
    ragged(monkeypatch)
    run = lambda batch: accuracy(model, tokenizer, task, 700, METHODS, prompts=5, batch=batch, setup=setup, chunk=300, task_settings=dict(keys=6)).set_index(["method", "seed"]).answer
    batched, alone = run(3), run(1)
    same = batched == alone.reindex(batched.index)
    assert same.all(), pd.DataFrame({"batched": batched, "alone": alone})[~same]
    assert batched.nunique() > 10  # the random model says different things

class Spy(Method):
    "Exact attention that notes what it was asked"
    random = True
    def __init__(self): self.seeds, self.starts = [], []
    def decode(self, q, k, v, *, seed, **kwargs):
        assert q.shape[2] == 1 and not kwargs.get("causal")
        self.seeds += seed.flatten().tolist()
        self.starts += [0] if kwargs["kv_start"] is None else kwargs["kv_start"].tolist()
        return Exact().decode(q, k, v, **kwargs)

def test_no_two_calls_share_a_seed_and_padding_is_hidden(tiny, monkeypatch):
    model, tokenizer = tiny
    ragged(monkeypatch)
    spy = Spy()
    frame = accuracy(model, tokenizer, "needle", 300, {"spy": spy, "exact": Exact()}, prompts=6, batch=3, setup="B")
    assert len(set(spy.seeds)) == len(spy.seeds) > 2 * 2 * 50
    assert min(spy.starts) == 0 and max(spy.starts) == 40
    assert (frame[frame.method == "spy"].answer.to_numpy() == frame[frame.method == "exact"].answer.to_numpy()).all()

def test_the_cache_is_left_alone_and_layers_may_differ(tiny):
    model, tokenizer = tiny
    one, other = Santa(samples=1), Santa(samples=500)
    given = {"mixed": {0: one, 1: other}, "function": lambda layer: [one, other][layer], "other": other, "again": {0: one, 1: other}}
    answers = accuracy(model, tokenizer, "multikey", 700, given, prompts=6, batch=6).pivot(index="seed", columns="method", values="answer")
    assert (answers.mixed == answers.function).all() and (answers.mixed == answers.again).all() and (answers.mixed != answers.other).any()

def test_a_left_padded_prefill_equals_single_ones_and_odd_caches_are_refused(tiny):
    model, tokenizer = tiny
    torch.manual_seed(1)
    ids, start = torch.randint(32, 127, (3, 120)), torch.tensor([0, 7, 119])
    cache = prefill_rows(model, ids, start, chunk=50)
    for row, first in enumerate(start.tolist()):
        alone = hf.prefill(model, ids[[row], first:])
        for a, b in zip(cache.layers, alone.layers):
            torch.testing.assert_close(a.keys[[row], :, first:], b.keys, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a.values[[row], :, first:], b.values, rtol=1e-4, atol=1e-5)
    for bad in ([0, 0], [0, 0, -1], [0, 0, 120]):
        with pytest.raises(ValueError, match="start: got"): prefill_rows(model, ids, torch.tensor(bad))
    windowed = transformers.MistralForCausalLM(transformers.MistralConfig(vocab_size=264, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                                                          num_attention_heads=2, num_key_value_heads=1, sliding_window=16)).eval()
    with pytest.raises(ValueError, match="mistral has a layer that does not keep every key"): prefill_rows(windowed, ids, torch.zeros(3, dtype=torch.int64))

@pytest.mark.parametrize("bad, error, words", [
    (dict(methods=[Exact()]), TypeError, "methods: got list"), (dict(methods={}), ValueError, "methods: got none"), (dict(methods={"x": 3}), TypeError, r"methods\['x'\]: got int"),
    (dict(methods={"x": {9: Exact()}}), ValueError, r"methods\['x'\]: there is no layer 9"),
    (dict(setup="C"), ValueError, "setup: got 'C'"), (dict(prompts=0), ValueError, "prompts: got 0"), (dict(batch=0), ValueError, "batch: got 0"), (dict(prompts=1.5), TypeError, "prompts"),
    (dict(seed=-1), ValueError, "seed"), (dict(length=5000), ValueError, "length: got 5000 tokens, the model holds 4096"), (dict(task="haystack"), ValueError, "task: got 'haystack'"),
    (dict(task_settings=dict(keys=10**4)), ValueError, "length")])
def test_bad_input(tiny, bad, error, words):
    model, tokenizer = tiny
    given = dict(model=model, tokenizer=tokenizer, task="multikey", length=700, methods={"exact": Exact()}, prompts=1) | bad
    with pytest.raises(error, match=words): accuracy(**given)

def answers(**right):
    "A table of answers from strings of digits"
    return pd.DataFrame([dict(method=m, task="t", length=10, seed=i, exact=c == "1", characters=float(c)) for m, digits in right.items() for i, c in enumerate(digits)])

def test_summary_counts_and_its_intervals():
    table = summary(answers(a="1" * 20, b="10" * 10))
    assert table.loc[("a", "t", 10), ["prompts", "exact", "exact_high"]].tolist() == [20, 1, 1] and math.isnan(table.characters_low.iloc[0])
    assert table.exact_low.iloc[0] == pytest.approx(0.025 ** (1 / 20))  # Clopper and Pearson's closed form for all of n
    assert table.exact.iloc[1] == 0.5 and table.characters_low.iloc[1] < 0.5 < table.characters_high.iloc[1]
    narrow = summary(answers(b="10" * 10), confidence=0.5)
    assert narrow.exact_low.iloc[0] > table.exact_low.iloc[1]
    for bad, error in ((answers(a="1").drop(columns="task"), ValueError), (answers(a="1")[:0], ValueError), ([1], TypeError)):
        with pytest.raises(error, match="frame"): summary(bad)

def test_compare_pairs_prompts():
    frame = answers(a="11110000", b="11000000", c="11110000")
    ab = compare(frame, "a", "b")
    assert (ab.prompts, ab.better, ab.worse, ab.difference) == (8, 2, 0, 0.25) and 0 <= ab.low < 0.25 < ab.high
    same = compare(frame, "a", "c")
    assert same.difference == 0 and same.high == -same.low == pytest.approx(1 - 0.025 ** (1 / 8))
    twice = pd.concat([frame, frame.assign(exact=True)])
    assert compare(twice, "a", "b").difference == 0.125  # the share of right answers to each prompt
    with pytest.raises(ValueError, match="has no method 'z', it has a, b, c"): compare(frame, "a", "z")
    with pytest.raises(ValueError, match="did not answer the same prompts"): compare(frame.drop(index=0), "a", "b")

def test_compare_covers_the_true_difference():
    "Intervals of 90 % for 200 samples of 200 prompts: fewer than 158 that cover happen to a correct interval less than once in 100,000 tries (binomial)"
    rng, covered = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        hard = torch.rand(200, generator=rng)
        a, b = ((torch.rand(200, generator=rng) < 0.9 * (1 - hard) + x).int().tolist() for x in (0.1, 0.0))
        got = compare(answers(a="".join(map(str, a)), b="".join(map(str, b))), "a", "b", confidence=0.9)
        covered += got.low <= 0.1 <= got.high
    assert 158 <= covered < 200

def test_a_record_reads_back(tmp_path):
    rows = [dict(part="accuracy", task="t", length=8, setup="A", method="exact", right="101", characters=0.7),
            dict(part="values", length=8, scheme="iid", samples=4, variance=[0.25, 0.26], unique=[3.0, 2.5])]
    (tmp_path / "x.json").write_text(json.dumps(dict(meta=dict(model="pocket"), rows=rows)))
    meta, parts = read_record(tmp_path / "x.json")
    assert meta == dict(model="pocket") and parts["accuracy"].exact.tolist() == [True, False, True] and parts["accuracy"].seed.tolist() == [0, 1, 2]
    assert parts["values"]["variance"].tolist() == [0.25, 0.26] and parts["values"]["unique"].tolist() == [3.0, 2.5]
    with pytest.raises(OSError): read_record(tmp_path / "y.json")

@pytest.mark.gpu
def test_a_gpu_gives_the_same_answers_with_the_kernel_and_with_the_reference():
    from sparse_nb import pocket
    model, tokenizer = pocket.load("cuda")
    methods = {"exact": Exact(), "kernel": Santa(samples=64), "reference": evaluate._Reference(Santa(samples=64))}
    answers = accuracy(model, tokenizer, "multikey", 4096, methods, prompts=16, batch=16).pivot(index="seed", columns="method", values="answer")
    assert (answers.kernel == answers.reference).mean() >= 0.9 and (answers.exact == answers.reference).mean() >= 0.9
