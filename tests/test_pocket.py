"""The pocket model's tokenizer, corpus, training and files."""
import itertools
import json
import subprocess
import sys
import time
from email.message import Message
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_nb import pocket
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
def test_only_permissive_licences(fields, permissive): assert bool(pocket.licence(Package(*fields))) is permissive


def test_held_out_text_is_not_read_for_training(monkeypatch):
    held_out, sources = pocket.texts(pocket.HELD_OUT)
    assert {s.name for s in sources} == set(pocket.HELD_OUT)
    wanted = [d for d in pocket.metadata.distributions() if d.metadata["Name"] in ("pip", *pocket.HELD_OUT)]   # pip holds a copy of rich
    monkeypatch.setattr(pocket.metadata, "distributions", lambda: wanted)
    monkeypatch.setattr(pocket.sysconfig, "get_path", lambda name: "nowhere")
    found, sources = pocket.texts()
    assert {s.name for s in sources} == {"pip"} and not set(found) & set(held_out)
    with pytest.raises(ValueError, match="names: no text found of"): pocket.texts(("no such package",))


def test_rows_teach_answers_only():
    text = "some text to fill the rows with. " * 3000
    rows = pocket.Rows(memoryview(text.encode()), 2048, 0)
    for ids, weight in [row for row, _ in zip(rows, range(60))]:
        assert ids.shape == weight.shape == (2048,) and ids[0] == pocket.BOS and weight[0] == 0
        if weight.max() > 1: assert set(weight.tolist()) == {0, 8} and TOKENIZER.decode(ids[weight > 1]).count(".") >= 1
        else: assert (weight[1:] == 1).all()
    assert [i.tolist() for (i, _), _ in zip(rows, range(3))] == [i.tolist() for (i, _), _ in zip(pocket.Rows(memoryview(text.encode()), 2048, 0), range(3))]


def test_training_learns_stops_resumes_and_is_scored(tmp_path, monkeypatch):
    source = pocket.Source("pattern", "1", "MIT", 9_000)
    monkeypatch.setattr(pocket, "texts", lambda names=(): (["abcdefgh " * 1_000], [source]))
    # a clock that gains a second at each reading, so that a slow machine takes the same steps; peaks so high that little of their warm-up is enough
    monkeypatch.setattr(pocket, "time", SimpleNamespace(monotonic=itertools.count().__next__, strftime=time.strftime))
    monkeypatch.setattr(pocket, "PHASES", ((2e-2, ((1024, 2048, 0.5), (1024, 4096, 0.1))), (1e-2, ((1024, 2048, 0.1),))))
    small = pocket.config()
    small.num_hidden_layers = 1
    monkeypatch.setattr(pocket, "config", lambda: small)
    pocket.train(tmp_path, stop_after=0.3, device="cpu", workers=0)
    first = torch.load(tmp_path / "state.pt")
    folder = pocket.train(tmp_path, device="cpu", workers=0)
    last = torch.load(tmp_path / "state.pt")
    assert first["phase"] == 0 and last["phase"] == 2 and last["optimizer"] is None
    assert 0 < first["step"] < last["step"] and first["total"] < last["total"]
    model, _ = pocket.load(folder=folder)
    assert pocket.bits_per_byte(model, "abcdefgh " * 300, window=1024)[0] < 7   # an untrained model needs log2(264) = 8.04
    (tmp_path / "log.jsonl").write_text(json.dumps(dict(step=1, seconds=60, tokens=10**9)) + "\n")
    monkeypatch.setattr(pocket, "evaluate", lambda m, t, task, length, **k: dict(task=task, length=length, prompts=1, exact=1, characters=1.0))
    assert pocket.record(tmp_path, prompts=1, device="cpu") == folder
    card = (folder / "README.md").read_text()
    assert "| pattern | 1 | MIT | 0.01 |" in card and all(f"| {task} | 1/1 | 1/1 | 1/1 |" in card for task in TASKS)


@pytest.fixture
def shipped(pocket): return pocket


def test_shipped_model_answers(shipped):
    model, tokenizer = shipped
    found = pocket.evaluate(model, tokenizer, "kv", 2048, prompts=4, batch=2)
    assert (found["exact"], found["characters"]) == (4, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_exact_attention_is_right_in_the_demo(seed):
    run = subprocess.run([sys.executable, "-m", "sparse_nb.cli", "demo", "--json", "--seed", str(seed)], capture_output=True, text=True, check=True)
    rows = {row["method"]: row for row in json.loads(run.stdout)}
    assert rows["exact"]["correct"] and rows["exact"]["relative_error"] == 0 and not rows["streaming"]["correct"]


def test_evaluate_counts_wrong_answers(shipped, monkeypatch):
    model, tokenizer = shipped
    wrong = lambda *a, **k: make(*a, **k).__class__(**{**vars(make(*a, **k)), "answer": "0" * 4})
    monkeypatch.setattr(pocket, "make", wrong)
    assert pocket.evaluate(model, tokenizer, "kv", 1024, prompts=2)["exact"] == 0


@pytest.mark.parametrize("call, text", [
    (lambda m, t: pocket.bits_per_byte(m, "abc"), "text: got 3 bytes"),
    (lambda m, t: pocket.evaluate(m, t, "needle", 40_000), "length: got 40000 tokens, the model holds 33024"),
    (lambda m, t: pocket.evaluate(m, t, "needle", 1024, prompts=0), "prompts, batch: got 0 and 8"),
    (lambda m, t: pocket.evaluate(m, t, "needles", 1024), "task: got 'needles'"),
    (lambda m, t: pocket.train(scale=0), "scale: got 0")])
def test_bad_requests(shipped, call, text):
    with pytest.raises(ValueError, match=text): call(*shipped)


def test_files_agree():
    files = {p.name for p in pocket.path().iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "scores.json", "README.md", "hash_attention.safetensors"}
    shape, stored = pocket.config().to_dict(), json.loads((pocket.path() / "config.json").read_text())
    assert all(stored[k] == shape[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"))
    assert json.loads((pocket.path() / "tokenizer.json").read_text())["model"]["vocab"] == json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]["vocab"]
    with pytest.raises(OSError): pocket.load(folder=pocket.path() / "nowhere")
