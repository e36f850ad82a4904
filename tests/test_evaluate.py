"Scoring: each row of a batch is its own run, padding and set-ups included, and the intervals say what they should"
import json
import math

import pandas as pd
import pytest
import torch

transformers = pytest.importorskip("transformers")

from sparse_nb import evaluate, hf, tasks
from sparse_nb.attention import Exact, Method, Streaming, TopK, Uniform, attention_scores
from sparse_nb.evaluate import accuracy, compare, denominator_errors, forced_decode, pareto_methods, prefill_rows, promise_counts, read_record, record_vattention, summary
from sparse_nb.pocket import byte_tokenizer
from sparse_nb.santa import Santa
from sparse_nb.vattention import VAttention

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

@pytest.mark.parametrize("setup, task, length, settings", [("A", "multikey", 700, dict(keys=6)), ("B", "multiquery", 400, dict(keys=4, queries=2))])
def test_each_row_of_a_padded_batch_is_its_own_run(tiny, monkeypatch, setup, task, length, settings):
    model, tokenizer = tiny
    ragged(monkeypatch)
    run = lambda batch: accuracy(model, tokenizer, task, length, METHODS, prompts=4, batch=batch, setup=setup, chunk=length // 2, task_settings=settings).set_index(["method", "seed"]).answer
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

def test_denominator_errors_are_those_of_the_sum_over_drawn_keys():
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 1, 16), torch.randn(2, 2, 50, 16)
    error, chosen = denominator_errors(Uniform(samples=10), q, k, times=7, seed=3)
    terms = torch.exp(attention_scores(q.double(), k.double())).expand(-1, -1, 7, -1)
    torch.testing.assert_close(error, (terms * chosen.dense(50)).sum(-1) / terms.sum(-1) - 1)
    assert error.dtype == torch.float64 and len(error.unique()) == error.numel() and torch.equal(error, denominator_errors(Uniform(samples=10), q, k, times=7, seed=3)[0])
    for bad, words in ((dict(times=0), "times: got 0"), (dict(q=q.expand(-1, -1, 2, -1)), "q: got 2 queries")):
        with pytest.raises(ValueError, match=words): denominator_errors(**dict(method=Exact(), q=q, k=k, times=1) | bad)
    with pytest.raises(TypeError, match="times"): denominator_errors(Exact(), q, k, times=1.5)

def test_promise_counts_are_counts_of_denominator_errors():
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 1, 16), torch.randn(2, 2, 600, 16)
    kept = dict(sinks=4, window=16, topk=8)
    row, = [x for x in promise_counts(q, k, times=9, levels=(0.1, 0.2), seed=5, **kept) if (x["kind"], x["eps"], x["delta"]) == ("plain", 0.1, 0.2)]
    error, chosen = denominator_errors(VAttention(eps=0.1, delta=0.2, plugin="plain", share=False, **kept), q, k, times=9, seed=5)
    assert row["failures"] == (error.abs() > 0.1).sum(-1).flatten().tolist() and row["head"] == list(range(12)) and row["times"] == 9
    assert row["density"] == pytest.approx(chosen.density(600).mean(-1).flatten().tolist(), rel=1e-3) and row["error"] == pytest.approx(error.abs().mean(-1).flatten().tolist(), rel=1e-3)

def test_forced_decoding_is_decoding_one_token_after_another(tiny):
    model, _ = tiny
    torch.manual_seed(1)
    ids, methods = torch.randint(32, 127, (2, 60)), {0: TopK(0.2), 1: Streaming(2, 10)}
    at_once = forced_decode(model, ids, methods, read=20, every=15)
    assert at_once.position.tolist() == [20, 20, 35, 35, 50, 50] and at_once.layer.tolist() == [0, 1] * 3
    cache = hf.prefill(model, ids[:, :20])
    for begin, end in ((20, 35), (35, 50), (50, 59)):
        nats = []
        with torch.no_grad(), hf.sparsify(model, decode=methods, setup="B", audit=True) as session:
            for t in range(begin, end): nats.append(torch.nn.functional.cross_entropy(model(input_ids=ids[:, [t]], past_key_values=cache).logits[:, -1], ids[:, t + 1]).item())
        rows, one = at_once[at_once.position == begin], session.stats().groupby("layer")[["density", "error"]].mean()
        assert rows[["density", "error"]].to_numpy() == pytest.approx(one.to_numpy(), rel=1e-4) and rows.bits.tolist() == pytest.approx([sum(nats) / len(nats) / math.log(2)] * 2, rel=1e-4)
    drawn = [forced_decode(model, ids, Uniform(0.2), read=20, every=15, seed=s).error.tolist() for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]

@pytest.mark.parametrize("bad, error, words", [
    (dict(read=0), ValueError, "read: got 0, allowed is 1 to 58"), (dict(read=59), ValueError, "read: got 59"), (dict(every=0), ValueError, "every: got 0"), (dict(every=1.5), TypeError, "every"),
    (dict(method=3), TypeError, "method: got int"), (dict(method={7: Exact()}), ValueError, "there is no layer 7")])
def test_forced_decoding_refuses_bad_input(tiny, bad, error, words):
    with pytest.raises(error, match=words): forced_decode(**dict(model=tiny[0], ids=torch.full((1, 60), 65), method=Exact(), read=20) | bad)

LITTLE = dict(prompts=1, device="cpu", length=1280, times=3, texts=1, every=400, captures=1, tasks=("multikey",), densities=(0.1,), pareto=(0.1,))

@pytest.fixture(params=["one task", pytest.param("all tasks", marks=pytest.mark.slow)])
def little(request, monkeypatch):
    "Settings of a small record, and the tasks that are asked for `pareto`."
    whole, ask = evaluate.setup_methods, evaluate._Record.ask
    monkeypatch.setattr(evaluate, "setup_methods", lambda *x: {name: m for name, m in whole(*x).items() if name in ("exact", "magicpig-8-75", "streaming-10")})
    if request.param == "all tasks": return LITTLE, ("flat_words", "multikey", "frequent_words")
    monkeypatch.setattr(evaluate._Record, "ask", lambda self, part, task, *args, **kwargs: task == "flat_words" and ask(self, part, task, *args, **kwargs))
    return LITTLE, ("flat_words",)

def test_a_record_of_vattention_in_small(tmp_path, little):
    settings, _ = little
    path = record_vattention(tmp_path / "x.json", **settings, parts=("promise",))
    before = path.read_text()
    record_vattention(path, **settings, parts=("setups",))
    meta, parts = read_record(path)
    assert set(parts) == {"promise", "setups"} and set(meta["methods"]) == {"setups"} and {x.split()[0] for x in meta["seconds"]} == set(parts)
    assert [row for row in json.loads(before)["rows"]] == json.loads(path.read_text())["rows"][:len(json.loads(before)["rows"])]
    promise = parts["promise"]
    assert (promise.groupby(["kept", "kind", "eps", "delta"])["head"].nunique() == 36).all() and promise.failures.between(0, 3).all()
    assert promise.density.between(promise.kept.map(dict(usual=256, few=4 + 16 + 1 + 32)) / 1280, 1).all()  # what is kept, and with few of them the base sample too
    assert set(parts["setups"].setup) == {"A", "B"} and set(parts["setups"].length) == {640}
    with pytest.raises(ValueError, match="were made with times = 3, got 4"): record_vattention(path, **settings | dict(times=4), parts=("pareto",))
    for bad, words in ((dict(parts=("speed",)), "parts: got 'speed', allowed are promise"), (dict(texts=10**6), "texts: got 1000000 of 1280 bytes, the held-out text has")):
        with pytest.raises(ValueError, match=words): record_vattention(path, **settings | bad)
    assert read_record(path)[0] == meta

def test_a_record_of_what_methods_read_in_small(tmp_path, little):
    settings, tasks = little
    meta, parts = read_record(record_vattention(tmp_path / "x.json", **settings, parts=("pareto",)))
    pareto = parts["pareto"].set_index(["task", "method"])
    names = list(pareto_methods(6, (0.1,)))
    assert pareto.index.tolist() == [(task, name) for task in tasks for name in names] and len(names) == 1 + 4 + 4 + 3 + 2 * 4
    for name in ("topk", "quest", "double_sparsity", "adamas", "hash_attention", "uniform"): assert pareto.xs(f"{name}-10", level="method").density.between(0.1, 0.103).all()
    assert (pareto.error.dropna() > 0).all() and len(pareto.error.dropna()) == len(pareto) - len(tasks)
    assert (pareto.error.xs("topk-10", level="method") < pareto.error.xs("quest-10", level="method")).all() and (pareto.error.xs("quest-10", level="method") < pareto.error.xs("uniform-10", level="method")).all()
    said = meta["methods"]["pareto"]
    assert [x["predictor"]["layer"] for x in said["vattention+hash_attention-10"]] == list(range(6)) and Method.from_json(json.dumps(said["quest-10"])) == pareto_methods(6, (0.1,))["quest-10"]

def test_a_record_says_whether_an_answer_is_that_of_exact_attention(tmp_path):
    rows = [dict(part="pareto", task="t", length=8, setup="A", method="exact", right="10", characters=0.5), dict(part="pareto", task="t", length=8, setup="A", method="x", right="11", characters=1.0, same="10", density=0.1, error=0.2)]
    (tmp_path / "x.json").write_text(json.dumps(dict(meta={}, rows=rows)))
    table = read_record(tmp_path / "x.json")[1]["pareto"]
    assert table.exact.tolist() == [True, False, True, True] and table.same[2:].tolist() == [True, False] and table.same[:2].isna().all()
    assert table.density.isna().tolist() == [True, True, False, False] and table.exact.dtype == bool and table.seed.tolist() == [0, 1, 0, 1]

@pytest.mark.gpu
def test_a_gpu_gives_the_same_answers_with_the_kernel_and_with_the_reference():
    from sparse_nb import pocket
    model, tokenizer = pocket.load("cuda")
    methods = {"exact": Exact(), "kernel": Santa(samples=64), "reference": evaluate._Reference(Santa(samples=64))}
    answers = accuracy(model, tokenizer, "multikey", 4096, methods, prompts=16, batch=16).pivot(index="seed", columns="method", values="answer")
    assert (answers.kernel == answers.reference).mean() >= 0.9 and (answers.exact == answers.reference).mean() >= 0.9
