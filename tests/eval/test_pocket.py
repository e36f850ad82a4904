"""The pocket model's tokenizer, corpus, training and files."""
import itertools
import json
import shutil
import subprocess
import sys
import time
import warnings
from email.message import Message
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_nb import pocket
from benchmarks.recorder import Recorder
from experiments.train import pocket_model
from sparse_nb import corpus
from sparse_nb.tasks import TASKS, make

TOKENIZER = pocket.byte_tokenizer()


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))))
@settings(max_examples=200, deadline=None)
def test_tokens_are_bytes(text):
    if "<s>" in text or "<pad>" in text: return
    ids = TOKENIZER(text)["input_ids"]
    assert ids == [pocket.BOS, *text.encode()]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_batches_are_padded_on_the_left():
    batch = TOKENIZER(["a", "abc"], return_tensors="pt", padding=True)
    assert batch.input_ids.tolist() == [[pocket.PAD, pocket.PAD, pocket.BOS, 97], [pocket.BOS, 97, 98, 99]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


class Package:
    "Enough of an installed distribution for `licence`."
    def __init__(self, *fields):
        self.metadata = Message()
        for name, value in fields: self.metadata[name] = value


@pytest.mark.parametrize("fields, permissive", [
    ([("License-Expression", "MIT")], True),
    ([("License-Expression", "Apache-2.0 AND BSD-3-Clause")], True),
    ([("Classifier", "License :: OSI Approved :: BSD License")], True),
    ([("License", "Apache 2.0")], True),
    ([("License-Expression", "MPL-2.0")], False),
    ([("License-Expression", "MIT AND LGPL-3.0-only")], False),
    ([("Classifier", "License :: OSI Approved :: GNU General Public License (GPL)"), ("License", "BSD")], False),
    ([("Classifier", "License :: Other/Proprietary License")], False),
    ([("License", "NVIDIA Proprietary Software")], False),
    ([], False)])
def test_only_permissive_licences(fields, permissive): assert bool(corpus.licence(Package(*fields))) is permissive


def test_held_out_text_is_not_read_for_training(monkeypatch):
    held_out, sources = corpus.texts(corpus.HELD_OUT)
    assert {s.name for s in sources} == set(corpus.HELD_OUT)
    wanted = [
        d for d in corpus.metadata.distributions() if d.metadata["Name"] in ("pip", *corpus.HELD_OUT)
    ]   # pip holds a copy of rich
    monkeypatch.setattr(corpus.metadata, "distributions", lambda: wanted)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: "nowhere")
    read, sources = corpus.texts()
    assert {s.name for s in sources} == {"pip"} and not set(read) & set(held_out)
    with pytest.raises(ValueError, match="names must be installed packages with text to read, got"):
        corpus.texts(("no such package",))


def test_rows_teach_answers_only():
    text = "some text to fill the rows with. " * 3000
    new = lambda: pocket_model.Rows(memoryview(text.encode()), 2048, 0)
    for ids, weight in [row for row, _ in zip(new(), range(60))]:
        assert ids.shape == weight.shape == (2048,) and ids[0] == pocket.BOS and weight[0] == 0
        if weight.max() > 1: assert set(weight.tolist()) == {0, 8} and TOKENIZER.decode(ids[weight > 1]).count(".") >= 1
        else: assert (weight[1:] == 1).all()
    assert [i.tolist() for (i, _), _ in zip(new(), range(3))] == [i.tolist() for (i, _), _ in zip(new(), range(3))]


def trained(tmp_path, monkeypatch, peak=2e-2, minutes=0.5, **shape):
    "Train on a pattern, stop, resume, train to the end, and make a record of it"
    source, whole = corpus.Source("pattern", "1", "MIT", 9_000), pocket.config
    monkeypatch.setattr(pocket_model, "texts", lambda names=(): (["abcdefgh " * 1_000], [source]))
    monkeypatch.setattr(pocket_model, "config", lambda: whole().__class__(**whole().to_dict() | shape))
    # a clock that gains a second at each reading, so that a slow machine takes the same steps;
    # peaks so high that little of their warm-up is enough
    monkeypatch.setattr(
        pocket_model, "time", SimpleNamespace(monotonic=itertools.count().__next__, strftime=time.strftime)
    )
    phases = ((peak, ((1024, 2048, minutes), (1024, 4096, 0.1))), (peak / 2, ((1024, 2048, 0.1),)))
    pocket_model.train(tmp_path, phases, stop_after=0.3, workers=0, say=lambda line: None)
    first = torch.load(tmp_path / "state.pt")
    with pytest.raises(ValueError, match="out must hold a run through the phases"):
        pocket_model.train(tmp_path, phases[:1], workers=0)
    folder = pocket_model.train(tmp_path, phases, workers=0, say=lambda line: None)
    last = torch.load(tmp_path / "state.pt")
    assert first["phase"] == 0 and last["phase"] == 2 and last["optimizer"] is None
    assert 0 < first["step"] < last["step"] and first["total"] < last["total"]
    model, _ = pocket.load(folder=folder)
    assert (
        pocket_model.bits_per_byte(model, "abcdefgh " * 300, window=1024)[0] < 7
    )   # an untrained model needs log2(264) = 8.04
    monkeypatch.setattr(pocket_model, "QUICK_PHASES", phases)
    pocket_model.pocket_model(Recorder("pocket_model", tmp_path, quick=True, say=lambda line: None))
    scores, card = json.loads((folder / "scores.json").read_text()), (folder / "README.md").read_text()
    assert scores["log"][-1]["step"] == last["step"] and [row["step"] for row in scores["log"]] == sorted(
        row["step"] for row in scores["log"]
    )
    assert "| pattern | 1 | MIT | 0.01 |" in card and all(
        f"| {task} | 0/1 |" in card for task in TASKS if task != "frequent_words"
    )
    assert [(row["task"], row["length"], row["prompts"]) for row in scores["rows"]] == [
        (task, 1024, 1) for task in TASKS
    ]


def test_training_learns_stops_resumes_and_is_scored(tmp_path, monkeypatch):
    tiny = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    trained(tmp_path, monkeypatch, peak=1e-1, minutes=0.5, **tiny)


@pytest.mark.slow
def test_the_whole_model_learns_stops_resumes_and_is_scored(tmp_path, monkeypatch): trained(tmp_path, monkeypatch)


def test_the_learning_rate_warms_up_and_falls():
    rates = [pocket_model._rate(2.0, step, step / 2000) for step in range(2000)]
    assert (
        rates[0] == pytest.approx(2.0 / 300)
        and max(rates) == max(rates[290:310])
        and rates[-1] == pytest.approx(0.04, rel=1e-3)
    )
    assert all(a < b for a, b in zip(rates[:290], rates[1:])) and all(a > b for a, b in zip(rates[310:], rates[311:]))


@pytest.fixture(scope="module")
def shipped(): return pocket.load()


def test_shipped_model_answers(shipped):
    model, tokenizer = shipped
    scored = pocket_model.score_model(model, tokenizer, "kv", 1024, prompts=4, batch=4)
    assert (scored["exact"], scored["characters"]) == (4, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_exact_attention_is_right_in_the_demo(seed):
    run = subprocess.run(
        [sys.executable, "-m", "sparse_nb.cli", "demo", "--json", "--seed", str(seed)],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {row["method"]: row for row in json.loads(run.stdout)}
    assert rows["exact"]["correct"] and rows["exact"]["relative_error"] == 0 and not rows["streaming"]["correct"]


def test_wrong_answers_are_counted(shipped, monkeypatch):
    model, tokenizer = shipped
    wrong = lambda *a, **k: make(*a, **k).__class__(**{**vars(make(*a, **k)), "answer": "0" * 4})
    monkeypatch.setattr(pocket_model, "make", wrong)
    assert pocket_model.score_model(model, tokenizer, "kv", 1024, prompts=2)["exact"] == 0


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda m, t: pocket_model.bits_per_byte(m, "abc"), "text must have at least window = 4096 bytes, got 3"),
        (
            lambda m, t: pocket_model.score_model(m, t, "needle", 40_000),
            "length must be at least 1 and at most 33024, got 40000",
        ),
        (lambda m, t: pocket_model.score_model(m, t, "needle", 1024, prompts=0), "prompts must be at least 1, got 0"),
        (lambda m, t: pocket_model.score_model(m, t, "needle", 1024, batch=0), "batch must be at least 1, got 0"),
        (lambda m, t: pocket_model.score_model(m, t, "needles", 1024), "task must be one of needle, .*, got 'needles'"),
        (lambda m, t: pocket_model.train("nowhere", workers=-1), "workers must be at least 0, got -1"),
    ],
)
def test_bad_requests(shipped, call, text):
    with pytest.raises(ValueError, match=text): call(*shipped)


def copied(folder, without=(), text=None, **settings):
    "A copy of the pocket model's folder without some files, with other `text` in some, with other settings"
    folder.mkdir()
    for file in pocket.path().iterdir():
        if file.name not in without: shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    for name, words in (text or {}).items(): (folder / name).write_text(words)
    return folder


@pytest.mark.parametrize(
    "changed, error, words",
    [
        (
            dict(num_hidden_layers=8),
            ValueError,
            r"path must hold every weight of its config, got '.*' without 18, model\.layers\.6\.",
        ),
        (dict(tie_word_embeddings=False), ValueError, r"without 1, lm_head\.weight"),
        (
            dict(head_dim=32),
            ValueError,
            r"path must hold weights in the shapes of its config, .* with 24 others: .* is \[128, 384\], not \[64, ",
        ),
        (dict(vocab_size=300), ValueError, r"1 others: model\.embed_tokens\.weight is \[264, 384\], not \[300, 384\]"),
        (
            dict(num_attention_heads=5),
            ValueError,
            "path must hold a configuration, .*not a multiple of the number of attention heads",
        ),
        (dict(num_key_value_heads=0), ValueError, "path must hold a causal language model, .*ZeroDivisionError"),
        (dict(hidden_size="many"), ValueError, "path must hold a configuration, .*expected int, got str"),
        (dict(model_type="nothing"), ValueError, "path must hold a configuration, .*model type `nothing`"),
        (dict(without=("tokenizer.json", "tokenizer_config.json")), ValueError, "path must hold a tokenizer, got"),
        (dict(without=("model.safetensors",)), OSError, "no file named model.safetensors"),
        (dict(text={"config.json": "{"}), OSError, "not a valid JSON file"),
        (dict(text={"model.safetensors": "cut short"}), ValueError, "SafetensorError"),
        (dict(text={"tokenizer.json": "{"}), ValueError, "path must hold a tokenizer, got"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_in_one_line(tmp_path, changed, error, words):
    folder = copied(tmp_path / "copy", **changed)
    with pytest.raises(error, match=words) as refused: pocket.load_checkpoint(folder)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


def test_weights_without_a_place_are_told_of(tmp_path):
    with pytest.warns(UserWarning, match=r"no place for: 18, model\.layers\.4\."):
        model, _ = pocket.load_checkpoint(copied(tmp_path / "copy", num_hidden_layers=4))
    assert model.config.num_hidden_layers == 4


def test_a_whole_checkpoint_is_loaded(tmp_path, shipped):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, tokenizer = pocket.load_checkpoint(copied(tmp_path / "copy"))
    assert model.dtype == torch.bfloat16 and not model.training and tokenizer("ab")["input_ids"] == [pocket.BOS, 97, 98]
    for (name, x), y in zip(model.named_parameters(), shipped[0].parameters(), strict=True):
        assert torch.equal(x.float(), y), name
    with pytest.raises(OSError, match="path must be a folder with a model, got"):
        pocket.load_checkpoint(tmp_path / "nowhere")


def test_files_agree():
    files = {p.name for p in pocket.path().iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "scores.json",
        "README.md",
    }
    shape, stored = pocket.config().to_dict(), json.loads((pocket.path() / "config.json").read_text())
    assert all(
        stored[k] == shape[k]
        for k in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        )
    )
    assert (
        json.loads((pocket.path() / "tokenizer.json").read_text())["model"]["vocab"]
        == json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]["vocab"]
    )
    with pytest.raises(OSError): pocket.load(folder=pocket.path() / "nowhere")
