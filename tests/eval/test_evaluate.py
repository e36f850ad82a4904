"Scoring: each row of a batch is its own run, padding and set-ups included, and the intervals say what they should"
import dataclasses
import json
import math
import string

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from torch.nn.functional import cross_entropy

transformers = pytest.importorskip("transformers")

from sparse_nb import hf, tasks
from sparse_nb.attention import Exact, Method, Streaming, TopK, Uniform, attention_scores
from sparse_nb.evaluate import accuracy, answers, compare, forced_decode, prefill_rows, summary
from sparse_nb.metrics import bootstrap_interval
from sparse_nb.pocket import byte_tokenizer
from benchmarks.recorder import Recorder, run_record
from experiments import vattention_pocket
from experiments.answers import PocketModel, gap_of, interval_of_means, read_answers
from experiments.santa_pocket import Reference
from experiments.vattention_pocket import answer_steps, denominator_errors, guarantee_counts, pareto_methods
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.vattention import VAttention
from inputs import fast
from models import methods_that, play_on_a_cpu

@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            initializer_range=0.5,
            max_position_embeddings=4096,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=None,
        )
    ).eval(), tokenizer

METHODS = {
    "exact": Exact(),
    "streaming": Streaming(window=32),
    "topk": TopK(16),
    "uniform": Uniform(samples=32),
    "santa": Santa(samples=16),
}

setups = pytest.mark.parametrize("setup", fast(["A", "B"], 0))

TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
TWO = dict(paragraphs=[["Rivers", "The Rhine is 1,233 km long."], ["Bridges", "The old bridge was built in 1357."]],
           questions=[[0, "How long is the Rhine?", ["1,233 km", "1,233"]]])

@pytest.fixture
def talking(tiny):
    model, tokenizer = tiny[0], byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer

@pytest.mark.parametrize("task", (*tasks.TASKS, "qa"))
def test_every_task_is_asked_in_a_dialogue(talking, task):
    own = dict(task_settings=dict(data=TWO)) if task == "qa" else {}
    frame = accuracy(*talking, task, 1100, {"exact": Exact(), "topk": TopK(16)}, prompts=2, chat=True,
                     watch=True, **own)
    assert len(frame) == 4 and frame.exact.dtype == bool and frame.characters.between(0, 1).all()
    assert (frame[frame.method == "exact"].density == 1).all() and (frame[frame.method == "topk"].density < 0.1).all()

def test_a_reply_ends_where_the_model_ends_it(talking):
    model, tokenizer = talking
    run = lambda: answers(model, tokenizer, [tasks.make("multivalue", 900, tokenizer=tokenizer, chat=True)],
                          {"exact": Exact()}, chat=True)[0]["answer"]
    whole = run()
    tokenizer.eos_token = (mark := whole[len(whole) // 2])
    assert run() == whole[:whole.index(mark)] and len(whole) > 20

def test_a_batch_stops_when_all_of_its_replies_have_ended(talking, monkeypatch):
    model, tokenizer = talking
    asked = [tasks.make("multivalue", 900, seed=s, tokenizer=tokenizer, chat=True) for s in range(3)]
    steps = []
    forward = type(model).forward
    monkeypatch.setattr(model, "forward", lambda *a, **given: steps.append(0) or forward(model, *a, **given))
    def run(**more):
        steps.clear()
        found = answers(model, tokenizer, asked, {"exact": Exact(), "topk": TopK(16)}, chat=True, **more)
        return [row["answer"] for row in found], len(steps)
    whole, most = run()
    mark = next(x for x in string.ascii_letters + string.digits if all(x in text for text in whole))
    tokenizer.eos_token = mark
    cut, fewer = run()
    assert cut == [text[:text.index(mark)] for text in whole] and len({*map(len, cut)}) > 2 and fewer < most - 20
    # what is measured is measured to the end of a right answer, however short a reply is
    again, some = run(watch=True)
    assert again == cut and fewer <= some < most
    tokenizer.eos_token = whole[0][0]
    assert run(watch=True)[1] >= 2 * max(len(tokenizer(f" {e.answer}.")["input_ids"]) for e in asked)

def test_several_answers_count_in_any_order_in_a_dialogue_alone(talking, monkeypatch):
    model, tokenizer = talking
    for chat, right in ((True, True), (False, False)):
        e = tasks.make("multivalue", 900, tokenizer=tokenizer, chat=chat)
        reply = ", ".join(reversed(e.parts)) + "."
        monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: reply)
        row, = answers(model, tokenizer, [e], {"exact": Exact()}, chat=chat)
        assert row["answer"] == reply and row["exact"] is right and (row["characters"] == 1) is right

@setups
def test_a_batch_of_one_is_hf_answer(tiny, setup):
    model, tokenizer = tiny
    frame = accuracy(model, tokenizer, "multikey", 700, METHODS, prompts=2, seed=3, batch=1, setup=setup)
    for row in frame.itertuples():
        example = tasks.make("multikey", 700, seed=row.seed, tokenizer=tokenizer)
        ids = torch.tensor([tokenizer(example.prompt)["input_ids"]])
        own = len(example.question) if setup == "B" else 1
        context = hf.prefill(model, ids[:, :-own])
        got = hf.answer(model, context, ids[:, -own:], METHODS[row.method], tokenizer=tokenizer,
                        max_new_tokens=len(example.answer) + 2, seed=row.seed, stop="")
        assert got.text == row.answer, row

def ragged(tokenizer, task, length, prompts, **settings):
    "Prompts that differ in length by up to forty tokens, and in their answers' length by one"
    examples = [
        tasks.make(task, length - 20 * (seed % 3), seed=seed, tokenizer=tokenizer, **settings)
        for seed in range(prompts)
    ]
    return [dataclasses.replace(e, answer=e.answer + "7" * (e.seed % 2)) for e in examples]

def unlike(tokenizer):
    "Prompts whose questions, contexts and answers differ in length"
    return [dataclasses.replace(e, question="Now: " * (e.seed % 2) + e.question[-9:])
            for e in ragged(tokenizer, "multikey", 300, 5, keys=3)]

@setups
def test_each_row_of_a_padded_batch_is_its_own_run(tiny, setup):
    model, tokenizer = tiny
    examples = unlike(tokenizer)
    assert len({len(e.question) for e in examples[:3]}) == 2 and len({len(e.prompt) for e in examples[:3]}) == 3
    run = lambda batch: answers(model, tokenizer, examples, METHODS, batch=batch, setup=setup, chunk=130)
    batched, alone = pd.DataFrame(run(3)), pd.DataFrame(run(1))
    same = batched.answer == alone.answer
    assert same.all() and batched.equals(alone), pd.DataFrame({"batched": batched.answer, "alone": alone.answer})[~same]
    assert batched.answer.nunique() > 10  # the random model says different things

READERS = {"streaming": Streaming(2, 40), "topk": TopK(2), "layers": {0: TopK(2), 1: None}}
READ = {f"{name}-{setup}": (setup, prefill, 130) for setup in "AB" for name, prefill in READERS.items()}
READ["uniform-A"] = "A", Uniform(samples=32), 2048  # draws anew where a chunk begins, which a batch may shift

@pytest.mark.parametrize("setup, prefill, chunk", fast(READ.values(), 1, 3, 6), ids=READ)
def test_each_row_of_a_padded_batch_is_read_as_it_is_alone(tiny, setup, prefill, chunk):
    model, tokenizer = tiny
    methods = {"exact": Exact(), "uniform": Uniform(samples=32)}
    run = lambda prefill, batch: pd.DataFrame(answers(model, tokenizer, unlike(tokenizer), methods, batch=batch,
                                                      setup=setup, chunk=chunk, prefill=prefill))
    batched, alone = run(prefill, 3), run(prefill, 1)
    assert batched.equals(alone), pd.DataFrame({"batched": batched.answer, "alone": alone.answer})
    assert (batched.answer != run(None, 3).answer).any()  # the reader changes what is said

@pytest.mark.slow
def test_a_reader_of_everything_changes_nothing(tiny):
    model, tokenizer = tiny
    run = lambda prefill: answers(model, tokenizer, unlike(tokenizer), METHODS, batch=3, setup="B", prefill=prefill)
    assert run(Exact()) == run(Streaming(window=4096)) == run(None)

@pytest.mark.budget(15)
@setups
def test_every_method_answers_as_on_a_gpu(tiny, monkeypatch, setup):
    "There the cache keeps room for keys to come."
    model, tokenizer = tiny
    methods = methods_that("decode", 6, 8)
    ask = lambda: answers(model, tokenizer, unlike(tokenizer)[:2], methods, setup=setup, watch=True)
    want, _ = ask(), play_on_a_cpu(monkeypatch)
    assert ask() == want and len(want) == 2 * len(methods)

@pytest.mark.parametrize("bad, error, words", [
    (3, TypeError, "prefill.* got int"), (Saap(), ValueError, "prefill must be a method that can prefill"),
    ({9: Exact()}, ValueError, "prefill must be for layers 0 to 1, got 9"), ("topk", TypeError, "prefill.* got str")])
def test_a_prefill_that_cannot_read_is_refused(tiny, bad, error, words):
    with pytest.raises(error, match=words): answers(*tiny, unlike(tiny[1]), {"exact": Exact()}, prefill=bad)

WATCHED = ["density", "error", "bytes", "dense_bytes"]

@setups
def test_a_watched_batch_counts_for_each_row_what_it_reads_alone(tiny, setup):
    model, tokenizer = tiny
    run = lambda batch, **more: pd.DataFrame(answers(model, tokenizer, unlike(tokenizer), METHODS, batch=batch,
                                                     setup=setup, **more))
    batched, alone, unwatched = run(3, watch=True), run(1, watch=True), run(3)
    assert batched.drop(columns=WATCHED).equals(unwatched) and alone.drop(columns=WATCHED).equals(unwatched)
    for name in WATCHED:
        assert batched[name].to_numpy() == pytest.approx(alone[name].to_numpy(), rel=1e-4, abs=1e-6), name
    exact = batched[batched.method == "exact"]
    assert (exact.density == 1).all() and (exact.error < 1e-5).all() and (exact.bytes == exact.dense_bytes).all()
    assert batched[batched.method == "topk"].error.nunique() == 5  # a row's own

class Spy(Method):
    "Exact attention that notes what it was asked"
    random = True
    def __init__(self): self.seeds, self.starts = [], []
    def decode(self, q, k, v, *, seed, **kwargs):
        assert q.shape[2] == 1 and not kwargs.get("causal")
        self.seeds += seed.flatten().tolist()
        self.starts += [0] if kwargs["kv_start"] is None else kwargs["kv_start"].tolist()
        return Exact().decode(q, k, v, **kwargs)

def test_no_two_calls_share_a_seed_and_padding_is_hidden(tiny):
    model, tokenizer = tiny
    spy, examples = Spy(), ragged(tokenizer, "needle", 300, 6)
    frame = pd.DataFrame(answers(model, tokenizer, examples, {"spy": spy, "exact": Exact()}, batch=3, setup="B"))
    assert len(set(spy.seeds)) == len(spy.seeds) > 2 * 2 * 50
    assert min(spy.starts) == 0 and max(spy.starts) == 40
    assert (frame[frame.method == "spy"].answer.to_numpy() == frame[frame.method == "exact"].answer.to_numpy()).all()

def test_the_cache_is_left_alone_and_layers_may_differ(tiny):
    model, tokenizer = tiny
    one, other = Santa(samples=1), Santa(samples=500)
    given = {
        "mixed": {0: one, 1: other},
        "function": lambda layer: [one, other][layer],
        "other": other,
        "again": {0: one, 1: other},
    }
    said = accuracy(model, tokenizer, "multikey", 700, given, prompts=6, batch=6).pivot(
        index="seed", columns="method", values="answer"
    )
    assert (said.mixed == said.function).all() and (said.mixed == said.again).all() and (said.mixed != said.other).any()

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
        with pytest.raises(ValueError, match="start must hold a number from 0 to 119 for each of 3 sequences, got"):
            prefill_rows(model, ids, torch.tensor(bad))
    windowed = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=16,
        )
    ).eval()
    with pytest.raises(
        ValueError, match="model must keep every key in every layer, got a sliding window in mistral"
    ): prefill_rows(windowed, ids, torch.zeros(3, dtype=torch.int64))

@pytest.mark.parametrize(
    "bad, error, words",
    [
        (dict(methods=[Exact()]), TypeError, "methods must be a dict from name to method, got list"),
        (dict(methods={}), ValueError, "methods must name at least one method, got none"),
        (dict(methods={"x": 3}), TypeError, r"methods\['x'\].* got int"),
        (dict(methods={"x": {9: Exact()}}), ValueError, r"methods\['x'\] must be for layers 0 to .*, got 9"),
        (dict(setup="C"), ValueError, "setup must be one of A, B, prompt, context, got 'C'"),
        (dict(setup=1), TypeError, "setup must be a string"),
        (dict(prompts=0), ValueError, "prompts must be at least 1, got 0"),
        (dict(prompts=1.5), TypeError, "prompts must be an int, got float"),
        (dict(batch=0), ValueError, "batch must be at least 1, got 0"),
        (dict(chunk=0), ValueError, "chunk must be at least 1, got 0"),
        (dict(seed=-1), ValueError, "seed"),
        (dict(length=5000), ValueError, "length must be at least 1 and at most 4096, got 5000"),
        (dict(length=7.5), TypeError, "length must be an int"),
        (dict(task="haystack"), ValueError, "task.*'haystack'"),
        (dict(task_settings=dict(keys=10**4)), ValueError, "length"),
    ],
)
def test_bad_input(tiny, bad, error, words):
    model, tokenizer = tiny
    given = (
        dict(model=model, tokenizer=tokenizer, task="multikey", length=700, methods={"exact": Exact()}, prompts=1) | bad
    )
    with pytest.raises(error, match=words): accuracy(**given)

@pytest.mark.parametrize(
    "bad, error, words",
    [
        ([], ValueError, "examples must hold at least one, got none"),
        ("a prompt", TypeError, "examples must be a list of `tasks.Example`, got str"),
        (["a prompt"], TypeError, "examples must be of type Example, got str"),
        (
            [tasks.make("needle", 4095)],
            ValueError,
            "examples must have at most the 4096 tokens that the model holds, got",
        ),
    ],
)
def test_answers_refuses_bad_examples(tiny, bad, error, words):
    if bad and isinstance(bad[0], tasks.Example): bad = [dataclasses.replace(bad[0], context="x" * 10 + bad[0].context)]
    with pytest.raises(error, match=words): answers(*tiny, bad, {"exact": Exact()})

def test_the_set_ups_have_two_names_each(tiny):
    examples = ragged(tiny[1], "multikey", 300, 2, keys=3)
    ask = lambda setup: answers(*tiny, examples, {"topk": TopK(4)}, setup=setup)
    assert ask("A") == ask("prompt") and ask("B") == ask("context") and ask("A") != ask("B")

def answered(**right):
    "A table of answers from strings of digits"
    return pd.DataFrame(
        [
            dict(method=m, task="t", length=10, seed=i, exact=c == "1", characters=float(c))
            for m, digits in right.items()
            for i, c in enumerate(digits)
        ]
    )

def test_summary_counts_and_its_intervals():
    table = summary(answered(a="1" * 20, b="10" * 10))
    assert table.loc[("a", "t", 10), ["prompts", "exact", "exact_high"]].tolist() == [20, 1, 1] and math.isnan(
        table.characters_low.iloc[0]
    )
    assert table.exact_low.iloc[0] == pytest.approx(0.025 ** (1 / 20))  # Clopper and Pearson's closed form for all of n
    assert table.exact.iloc[1] == 0.5 and table.characters_low.iloc[1] < 0.5 < table.characters_high.iloc[1]
    narrow = summary(answered(b="10" * 10), confidence=0.5)
    assert narrow.exact_low.iloc[0] > table.exact_low.iloc[1]
    for bad, error in (
        (answered(a="1").drop(columns="task"), ValueError),
        (answered(a="1")[:0], ValueError),
        ([1], TypeError),
    ):
        with pytest.raises(error, match="frame"): summary(bad)

def test_compare_pairs_prompts():
    frame = answered(a="11110000", b="11000000", c="11110000")
    ab = compare(frame, "a", "b")
    assert (ab.prompts, ab.better, ab.worse, ab.difference) == (8, 2, 0, 0.25) and ab.low < 0 < 0.25 < ab.high
    same = compare(frame, "a", "c")
    # Bonett and Price's closed form where no answer differs: variance 2 / 10 of 10 prompts, Student's quantile
    assert same.difference == 0 and same.high == -same.low == pytest.approx(
        scipy.stats.t.isf(0.025, 9) * (0.2 / 10) ** 0.5)
    twice = pd.concat([frame, frame.assign(exact=True)])
    assert compare(twice, "a", "b").difference == 0.125  # the share of right answers to each prompt
    with pytest.raises(ValueError, match="other must be one of a, b, c, got 'z'"): compare(frame, "a", "z")
    with pytest.raises(ValueError, match="frame must hold the same prompts for both"):
        compare(frame.drop(index=0), "a", "b")

def test_compare_covers_the_true_difference():
    """Intervals of 90 % for 200 samples of 60 prompts.

    Fewer than 158 that cover happen to a correct interval less than once in 100,000 tries (binomial).
    """
    rng, covered = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        hard = torch.rand(60, generator=rng)
        a, b = ((torch.rand(60, generator=rng) < 0.9 * (1 - hard) + x).int().tolist() for x in (0.1, 0.0))
        got = compare(answered(a="".join(map(str, a)), b="".join(map(str, b))), "a", "b", confidence=0.9)
        covered += got.low <= 0.1 <= got.high
    assert 158 <= covered < 200

def test_a_record_reads_back(tmp_path):
    rows = [dict(part="accuracy", task="t", length=8, setup="A", method="exact", right="101", characters=0.7),
            dict(part="values", length=8, scheme="iid", samples=4, variance=[0.25, 0.26], unique=[3.0, 2.5])]
    (tmp_path / "x.json").write_text(json.dumps(dict(meta=dict(model="pocket"), rows=rows)))
    meta, parts = read_answers(tmp_path / "x.json")
    assert (
        meta == dict(model="pocket")
        and parts["accuracy"].exact.tolist() == [True, False, True]
        and parts["accuracy"].seed.tolist() == [0, 1, 2]
    )
    assert parts["values"]["variance"].tolist() == [0.25, 0.26] and parts["values"]["unique"].tolist() == [3.0, 2.5]
    with pytest.raises(OSError): read_answers(tmp_path / "y.json")

def test_denominator_errors_are_those_of_the_sum_over_drawn_keys():
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 1, 16), torch.randn(2, 2, 50, 16)
    error, chosen = denominator_errors(Uniform(samples=10), q, k, times=7, seed=3)
    terms = torch.exp(attention_scores(q.double(), k.double())).expand(-1, -1, 7, -1)
    torch.testing.assert_close(error, (terms * chosen.dense(50)).sum(-1) / terms.sum(-1) - 1)
    assert (
        error.dtype == torch.float64
        and len(error.unique()) == error.numel()
        and torch.equal(error, denominator_errors(Uniform(samples=10), q, k, times=7, seed=3)[0])
    )
    for bad, words in (
        (dict(times=0), "times must be at least 1, got 0"),
        (dict(q=q.expand(-1, -1, 2, -1)), "q must have one query for each head, got 2"),
    ):
        with pytest.raises(ValueError, match=words): denominator_errors(**dict(method=Exact(), q=q, k=k, times=1) | bad)
    with pytest.raises(TypeError, match="times"): denominator_errors(Exact(), q, k, times=1.5)

def test_guarantee_counts_are_counts_of_denominator_errors():
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 1, 16), torch.randn(2, 2, 600, 16)
    kept = dict(sinks=4, window=16, topk=8)
    (row,) = [
        x
        for x in guarantee_counts(q, k, times=9, levels=(0.1, 0.2), seed=5, **kept)
        if (x["kind"], x["eps"], x["delta"]) == ("plain", 0.1, 0.2)
    ]
    error, chosen = denominator_errors(
        VAttention(eps=0.1, delta=0.2, plugin="plain", share=False, **kept), q, k, times=9, seed=5
    )
    assert (
        row["failures"] == (error.abs() > 0.1).sum(-1).flatten().tolist()
        and row["head"] == list(range(12))
        and row["times"] == 9
    )
    assert row["density"] == pytest.approx(chosen.density(600).mean(-1).flatten().tolist(), rel=1e-3) and row[
        "error"
    ] == pytest.approx(error.abs().mean(-1).flatten().tolist(), rel=1e-3)

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
            for t in range(begin, end):
                logits = model(input_ids=ids[:, [t]], past_key_values=cache).logits[:, -1]
                nats.append(cross_entropy(logits, ids[:, t + 1]).item())
        rows, one = at_once[at_once.position == begin], session.stats().groupby("layer")[["density", "error"]].mean()
        assert rows[["density", "error"]].to_numpy() == pytest.approx(one.to_numpy(), rel=1e-4)
        assert rows.bits.tolist() == pytest.approx([sum(nats) / len(nats) / math.log(2)] * 2, rel=1e-4)
    drawn = [forced_decode(model, ids, Uniform(0.2), read=20, every=15, seed=s).error.tolist() for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]

@pytest.mark.parametrize(
    "bad, error, words",
    [
        (dict(read=0), ValueError, "read must be at least 1 and at most 58, got 0"),
        (dict(read=59), ValueError, "read must be .*, got 59"),
        (dict(every=0), ValueError, "every must be at least 1, got 0"),
        (dict(every=1.5), TypeError, "every must be an int"),
        (dict(method=3), TypeError, "method.* got int"),
        (dict(method={7: Exact()}), ValueError, "no layer 7|got .*7"),
    ],
)
def test_forced_decoding_refuses_bad_input(tiny, bad, error, words):
    with pytest.raises(error, match=words):
        forced_decode(**dict(model=tiny[0], ids=torch.full((1, 60), 65), method=Exact(), read=20) | bad)

LITTLE = dataclasses.replace(vattention_pocket.QUICK, times=3)

def grown(path, steps, **settings):
    "The file of these steps."
    return Recorder("vattention_pocket", path, quick=True).grow(steps, **settings)

@pytest.fixture(scope="module")
def pocket_model(): return PocketModel()

def test_guarantees_in_a_record(pocket_model, tmp_path):
    size = dataclasses.replace(LITTLE, length=1280, captures=("flat_words",))
    path = grown(tmp_path / "x.json", vattention_pocket.guarantee_steps(pocket_model, size))
    guarantee = read_answers(path)[1]["guarantee"]
    assert (
        guarantee.groupby(["kept", "kind", "eps", "delta"])["head"].nunique() == 36
    ).all() and guarantee.failures.between(0, 3).all()
    kept = guarantee.kept.map(dict(usual=256, few=4 + 16 + 1 + 32))  # and with few of them the base sample too
    assert guarantee.density.between(kept / 1280, 1).all()

@pytest.mark.slow  # `make quick` makes the whole record
def test_answers_of_both_set_ups_in_a_record(pocket_model, tmp_path, monkeypatch):
    whole = vattention_pocket.setup_methods
    few = lambda *x: {name: m for name, m in whole(*x).items() if name in ("exact", "magicpig-8-75", "streaming-10")}
    monkeypatch.setattr(vattention_pocket, "setup_methods", few)
    steps, methods = answer_steps(pocket_model, LITTLE)
    setups = read_answers(grown(tmp_path / "x.json", steps["setups"]))[1]["setups"]
    assert (
        setups.setup.tolist() == ["B"] * 3 + ["A"] * 3
        and set(setups.length) == {400}
        and setups.method.tolist() == list(few(6, 0.1)) * 2
    )

def check_pareto(pocket_model, path, size):
    "Density and error of every predictor, alone and in vAttention, are what they should be"
    steps, methods = answer_steps(pocket_model, size)
    pareto = read_answers(grown(path, steps["pareto"]))[1]["pareto"].set_index(["task", "method"])
    names, tasks_ = list(methods["pareto"]), list(size.pareto_tasks)
    assert (
        pareto.index.tolist() == [(task, name) for task in tasks_ for name in names]
        and len(names) == 1 + 4 + 4 + 3 + 2 * 4
    )
    for name in ("topk", "quest", "double_sparsity", "adamas", "hash_attention", "uniform"):
        assert pareto.xs(f"{name}-10", level="method").density.between(0.1, 0.1 + 1.5 / (size.length // 2)).all()
    assert (pareto.error.dropna() > 0).all() and len(pareto.error.dropna()) == len(pareto) - len(tasks_)
    topk, quest, uniform = (pareto.error.xs(f"{name}-10", level="method") for name in ("topk", "quest", "uniform"))
    assert (topk < quest).all() and (quest < uniform).all()

@pytest.mark.slow  # as above
def test_errors_and_densities_in_a_record(pocket_model, tmp_path):
    check_pareto(pocket_model, tmp_path / "x.json", LITTLE)

@pytest.mark.slow
def test_errors_and_densities_of_three_tasks_in_a_record(pocket_model, tmp_path):
    tasks_ = "flat_words", "multikey", "frequent_words"
    check_pareto(pocket_model, tmp_path / "x.json", dataclasses.replace(LITTLE, length=1280, pareto_tasks=tasks_))

def test_methods_are_written_as_their_settings():
    settings = lambda name: vattention_pocket.method_settings(name, pareto_methods(6, (0.1,))[name], range(6))
    assert [x["predictor"]["layer"] for x in settings("vattention+hash_attention-10")] == list(range(6))
    assert Method.from_json(json.dumps(settings("quest-10"))) == pareto_methods(6, (0.1,))["quest-10"]

def test_a_record_has_no_more_texts_than_there_are(pocket_model):
    with pytest.raises(ValueError, match="texts must be at most .*, got 1000000"):
        vattention_pocket.held_out_ids(pocket_model, dataclasses.replace(LITTLE, texts=10**6))

def test_a_record_is_gone_on_with_or_made_anew_but_never_mixed(tmp_path):
    path, made = tmp_path / "x.json", []
    def steps(*names, broken=None):
        def rows(name):
            if name == broken: raise RuntimeError("cut short")
            made.append(name)
            return [dict(part="p", name=name, values=[1.0])]
        return {name: lambda name=name: rows(name) for name in names}
    with pytest.raises(RuntimeError): grown(path, steps("a", "b", "c", broken="c"), prompts=1)
    before = json.loads(path.read_text())
    assert [row["name"] for row in before["rows"]] == ["a", "b"] == list(before["meta"]["seconds"])
    with pytest.raises(ValueError, match="out must hold a record made with prompts = 2, got 1"):
        grown(path, steps("a", "b", "c"), prompts=2)
    assert json.loads(path.read_text()) == before
    grown(path, steps("a", "b", "c"), prompts=1)
    after = json.loads(path.read_text())
    assert after["rows"][:2] == before["rows"] and [row["name"] for row in after["rows"]] == ["a", "b", "c"] == made
    grown(path, steps("a", "b", "c"), prompts=2)  # complete, so made anew
    assert made == ["a", "b", "c"] * 2 and json.loads(path.read_text())["meta"]["prompts"] == 2

@pytest.mark.slow
def test_a_quick_record_has_every_part(tmp_path):
    said = []
    meta, parts = read_answers(run_record("vattention_pocket", tmp_path / "x.json", quick=True, say=said.append))
    assert list(parts) == ["guarantee", "accuracy", "setups", "generation", "pareto"] and set(meta["methods"]) == {
        "accuracy",
        "setups",
        "generation",
        "pareto",
    }
    assert len(said) == len(meta["seconds"]) + 1 and str(tmp_path / "x.json") in said[-1]
    assert meta["command"] == "python -m experiments.run vattention_pocket --quick"

@pytest.mark.skipif(torch.cuda.is_available(), reason="a whole record is made where there is a GPU")
def test_a_whole_record_asks_for_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="there is no CUDA device here"):
        run_record("vattention_pocket", tmp_path / "x.json")

def test_a_record_says_whether_an_answer_is_that_of_exact_attention(tmp_path):
    rows = [
        dict(part="pareto", task="t", length=8, setup="A", method="exact", right="10", characters=0.5),
        dict(
            part="pareto",
            task="t",
            length=8,
            setup="A",
            method="x",
            right="11",
            characters=1.0,
            same="10",
            density=0.1,
            error=0.2,
        ),
    ]
    (tmp_path / "x.json").write_text(json.dumps(dict(meta={}, rows=rows)))
    table = read_answers(tmp_path / "x.json")[1]["pareto"]
    assert (
        table.exact.tolist() == [True, False, True, True]
        and table.same[2:].tolist() == [True, False]
        and table.same[:2].isna().all()
    )
    assert (
        table.density.isna().tolist() == [True, True, False, False]
        and table.exact.dtype == bool
        and table.seed.tolist() == [0, 1, 0, 1]
    )

def test_gap_of_is_compare():
    frame = answered(a="1111000011", b="1000000011", c="1111000011")
    want = compare(frame, "a", "b")
    assert gap_of(frame, "a", "b") == (want.low, want.difference, want.high) and gap_of(frame, "a", "b").value == 0.3
    assert not gap_of(frame, "a", "c").within(0.1)  # ten prompts that agree are too few

def test_interval_of_means():
    "Of one mean it is `bootstrap_interval`; of a function of means it covers the truth, also of few numbers."
    rng = np.random.default_rng(0)
    x = rng.exponential(size=12)
    assert tuple(interval_of_means(lambda m: m, x)) == pytest.approx(tuple(bootstrap_interval(x)))
    assert interval_of_means(np.divide, np.full(6, 3.0), np.full(6, 2.0)) == (1.5, 1.5, 1.5)
    hits = sum(interval_of_means(np.divide, 1 + rng.exponential(size=8), 1 + 2 * rng.exponential(size=8)).covers(2 / 3)
               for _ in range(100))
    assert hits >= scipy.stats.binom.ppf(1e-6, 100, 0.94)
    logs = np.log([1.0, 2.0, 4.0])
    slope = lambda mean: np.polyfit(logs, np.log(mean), 1)[0]
    rows = rng.exponential(size=(40, 1)) * [1, 0.5, 0.25] * np.exp(rng.normal(size=(40, 3)) / 5)
    low, value, high = interval_of_means(slope, rows)
    assert low < -1 < high and value == slope(rows.mean(0)) and high - low < 0.3

@pytest.mark.gpu
def test_a_gpu_gives_the_same_answers_with_the_kernel_and_with_the_reference():
    from sparse_nb import pocket
    model, tokenizer = pocket.load("cuda")
    methods = {"exact": Exact(), "kernel": Santa(samples=64), "reference": Reference(Santa(samples=64))}
    said = accuracy(model, tokenizer, "multikey", 4096, methods, prompts=16, batch=16).pivot(
        index="seed", columns="method", values="answer"
    )
    assert (said.kernel == said.reference).mean() >= 0.9 and (said.exact == said.reference).mean() >= 0.9
