"The command: in this process, with a tiny random and with the pocket model, and as a user meets it, in a process of its own"
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pandas as pd
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")

from sparse_nb.pocket import byte_tokenizer

ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
ENV.pop("TRITON_INTERPRET", None)

def run(*args, cwd=None, code=None, input=None, **env):
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "sparse_nb.cli"]
    root = os.path.dirname(os.path.dirname(__file__))
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([*start, *args], capture_output=True, text=True, encoding="utf-8", timeout=120, cwd=cwd, input=input, env=ENV | {"PYTHONPATH": path} | env)

def called(*args, cwd=None):
    "The same in this process: exit code, standard output and standard error."
    from sparse_nb.cli import main
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setenv("COLUMNS", "100")
        patch.chdir(cwd or before)
        main([*map(str, args)])
    return subprocess.CompletedProcess(args, stop.value.code, out.getvalue(), err.getvalue())

def generated(file, *args): return called("generate", "--prompt-file", file, *args)

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, bos_token_id=tokenizer.bos_token_id, eos_token_id=None))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)

def one_line(result, *words):
    assert result.returncode == 2, result
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("sparse-nb: "), result.stderr
    for word in words: assert word in result.stderr

def test_json_is_one_list_and_the_report_stands_alone(tiny, tmp_path):
    result = called("demo", "--model", tiny, "--context", "512", "--density", "0.1", "--task", "kv", "--samples", "7", "--json", "--out", "report.html", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == "saved report.html\n"
    rows = json.loads(result.stdout)
    assert [r["method"] for r in rows] == ["exact", "streaming", "topk", "topp", "uniform", "santa"]
    for r in rows: assert list(r) == ["method", "answer", "expected", "correct", "relative_error", "keys_read", "values_read", "ms_per_token"]
    assert rows[0]["relative_error"] < 1e-5 and rows[0]["keys_read"] == rows[0]["values_read"] == 1
    for r in rows[1:]: assert r["relative_error"] > 0 and r["ms_per_token"] > 0
    for r in rows[1:5]: assert abs(r["values_read"] - 0.1) < 0.02 and r["keys_read"] == (1 if r["method"].startswith("top") else r["values_read"])
    assert rows[5]["keys_read"] == 1 and 0 < rows[5]["values_read"] <= 7 / 400
    page = (tmp_path / "report.html").read_text()
    assert page.count("<tr>") == 7 and "data:image/png;base64," in page and "http" not in page

def test_the_table_and_the_default_picture(tiny, tmp_path):
    result = called("demo", "--model", tiny, "--context", "256", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == "saved sparse-nb-demo.png\n"
    for word in ("streaming", "top-k (oracle)", "top-p (oracle)", "uniform sample", "SANTA", "keys read", "values read", "right answer"): assert word in result.stdout
    assert (tmp_path / "sparse-nb-demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

@pytest.mark.parametrize("options, words", [
    (["--task", "haystack"], ["--task: got 'haystack'", "needle"]),
    (["--density", "0"], ["--density: got 0.0"]),
    (["--density", "1.5"], ["--density: got 1.5"]),
    (["--density", "nan"], ["--density: got nan"]),
    (["--density", "few"], ["--density"]),
    (["--samples", "0"], ["--samples: got 0", "1 to 65536"]),
    (["--samples", "65537"], ["--samples: got 65537"]),
    (["--samples", "2.5"], ["--samples"]),
    (["--seed", "-1"], ["--seed: got -1"]),
    (["--context", "many"], ["--context"]),
    (["--context", "4097"], ["--context: got 4097", "at most 4096"]),
    (["--context", "20"], ["--context: ", "20 tokens are too few"]),
    (["--context", "0"], ["--context: got 0"]),
    (["--model", "./nowhere"], ["--model: there is no folder './nowhere'"]),
    (["--model", "nobody/nothing"], ["--model: cannot load 'nobody/nothing'"]),
    (["--out", "report.docx"], ["--out: got 'report.docx'", ".html"]),
    (["--out", "nowhere/report.html"], ["--out: there is no folder 'nowhere'"]),
    (["--out", "folder.png"], ["--out: 'folder.png' is a folder"]),
    (["--colour", "red"], ["--colour"]),
    (["stray"], ["stray"]),
])
def test_wrong_options_take_one_line(tiny, tmp_path, options, words):
    (tmp_path / "folder.png").mkdir()
    model = [] if "--model" in options else ["--model", tiny]
    one_line(called("demo", *model, *options, cwd=tmp_path), *words)
    assert [x.name for x in tmp_path.iterdir()] == ["folder.png"]

@pytest.mark.skipif(os.name == "nt" or getattr(os, "geteuid", lambda: 0)() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tiny, tmp_path):
    tmp_path.chmod(0o500)
    one_line(called("demo", "--model", tiny, "--out", str(tmp_path / "report.html")), "--out: no permission")

def test_a_broken_model_folder(tiny, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    one_line(called("demo", "--model", str(tmp_path), "--context", "512"), "--model: cannot load")

def test_a_model_that_cannot_be_sparse(tiny, tmp_path):
    tokenizer = byte_tokenizer()
    transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=4096)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    one_line(called("demo", "--model", str(tmp_path), "--context", "512"), "gemma2 uses softcap")

@pytest.mark.parametrize("args", [["demos"], ["--colour"]])
def test_wrong_commands_take_one_line(args): one_line(run(*args))

def test_a_missing_package_is_named(tiny):
    code = f"import sys; sys.modules['typer'] = None; from sparse_nb.cli import main; main(['demo', '--model', {tiny!r}, '--context', '512'])"
    one_line(run(code=code), "typer is missing", "pip install 'sparse_nb[cli]'")

@pytest.mark.parametrize("package", ["transformers", "matplotlib"])
def test_another_missing_package_is_named(tiny, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    one_line(called("demo", "--model", tiny, "--context", "512"), f"{package} is missing", "pip install 'sparse_nb[cli]'")

@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to a child there")
def test_ctrl_c_in_the_prefill(tiny, tmp_path):
    code = """
import os, signal
from sparse_nb import hf
whole = hf.prefill
def prefill(model, ids, progress):
    def interrupt(done, total):
        if done >= 64: os.kill(os.getpid(), signal.SIGINT)
    return whole(model, ids, chunk=32, progress=interrupt)
hf.prefill = prefill
from sparse_nb.cli import main
main()
"""
    one_line(run("demo", "--model", tiny, "--context", "4096", code=code, cwd=tmp_path), "stopped by Ctrl-C")
    assert list(tmp_path.iterdir()) == []

def test_doctor_says_what_is_here():
    result = called("doctor")
    assert result.returncode == 0 and result.stderr == ""
    for word in ("python", "torch", torch.__version__, "transformers", transformers.__version__, "sparse_nb", "triton", "devices", "CPU", "kernels", "pocket model"):
        assert word in result.stdout

def test_doctor_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "the PyTorch reference is used" in " ".join(called("doctor").stdout.split())

def test_doctor_runs_a_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    assert "interprets kernels on the CPU" in " ".join(run("doctor", TRITON_INTERPRET="1").stdout.split())

def test_help_is_light():
    code = "import sys, sparse_nb.cli; print([m for m in ('torch', 'transformers', 'matplotlib', 'pandas') if m in sys.modules])"
    assert run(code=code).stdout == "[]\n"
    said = run("--help").stdout
    assert "demo" in said and called().stdout == called("--help").stdout == said

def test_the_pocket_model_answers():
    rows = json.loads(called("demo", "--context", "1024", "--json").stdout)
    assert rows[0]["method"] == "exact" and rows[0]["answer"] == rows[0]["expected"] and rows[0]["correct"]

@pytest.fixture(scope="module")
def needle(pocket):
    from sparse_nb import tasks
    return tasks.make("needle", 400, seed=1, tokenizer=pocket[1])

@pytest.fixture(scope="module")
def files(needle, tmp_path_factory):
    "Files with the needle's prompt, and with its context alone"
    folder = tmp_path_factory.mktemp("prompts")
    for name in "prompt", "context": (folder / name).write_bytes(getattr(needle, name).encode())
    return folder

def text_of(result, err=""):
    assert result.returncode == 0 and result.stderr == err, result
    return result.stdout

def by_hand(pocket, prompt, cut=None, *, prefill=None, decode=None, seed=0, dense_layers=(), **settings):
    "What `model.generate` writes in a session, and its statistics; `cut`: where the context ends, for set-up B"
    from sparse_nb import hf
    model, tokenizer = pocket
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    with hf.sparsify(model, prefill=prefill, decode=decode, seed=seed, dense_layers=dense_layers, setup="B" if cut else "A", audit=True) as session:
        cache = hf.prefill(model, ids[:, :cut]) if cut else None
        torch.manual_seed(seed)
        new = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **{"do_sample": False, "max_new_tokens": 12} | settings)
    return tokenizer.decode(new[0, ids.shape[1]:], skip_special_tokens=True) + "\n", session.stats()

@pytest.mark.parametrize("text, want", [
    ("exact", "Exact()"), ("EXACT", "Exact()"), ("topk", "TopK(budget=0.1)"), ("TopK:budget=128", "TopK(budget=128)"), ("topk:budget=1.0", "TopK(budget=1.0)"), ("topp:mass=1", "TopP(mass=1.0)"),
    (" uniform : samples = 2e-1 ", "Uniform(samples=0.2)"), ("streaming:window=.5,sinks=0", "Streaming(sinks=0, window=0.5)"),
    ("santa:samples=64,scheme=flash", "Santa(samples=64, scheme='flash', tile=128, eps=None, delta=None, bound='clt')"),
    ("Santa:eps=0.1,delta=5e-2,bound=bernstein,scheme=iid", "Santa(samples=128, scheme='iid', tile=128, eps=0.1, delta=0.05, bound='bernstein')"),
    ("santa:eps=None", "Santa(samples=128, scheme='systematic', tile=128, eps=None, delta=None, bound='clt')")])
def test_methods_are_read_from_text(text, want):
    from sparse_nb.cli import method_from
    assert repr(method_from("--decode", text)) == want

@pytest.mark.parametrize("text, words", [
    ("", ["got ''", "adamas, doublesparsity, exact", "quest, santa", "vattention"]), ("magic", ["got 'magic'", "santa"]), ("topk=3", ["got 'topk=3'"]),
    ("topk:", ["got 'topk:'", "name:setting=value"]), ("topk:0.1", ["name:setting=value"]), ("topk:=0.1", ["name:setting=value"]), ("topk:budget=1,", ["name:setting=value"]),
    ("topk:size=3", ["topk has no setting 'size', it has budget"]), ("topk:Budget=3", ["no setting 'Budget'"]), ("topk:scores_all=true", ["no setting 'scores_all'"]), ("exact:mass=1", ["exact has no setting 'mass', it has none"]),
    ("topk:budget=1,budget=2", ["sets budget twice"]), ("topk:budget=", ["got str"]), ("topk:budget=none", ["got str"]), ("topk:budget=0", ["at least 1 key, got 0"]), ("topk:budget=1.5", ["(0, 1]", "got 1.5"]), ("topp:mass=nan", ["got nan"]),
    ("santa:samples=2.5", ["samples must be an int, got float"]), ("santa:samples=many", ["got str"]), ("santa:samples=65537", ["at most 65536, got 65537"]), ("santa:scheme=none", ["scheme must be one of", "'none'"]), ("santa:eps=0.1", ["delta"])])
def test_bad_methods_are_named(text, words):
    from sparse_nb.cli import method_from
    with pytest.raises(ValueError) as error: method_from("--prefill", text)
    assert str(error.value).startswith("--prefill: ") and "\n" not in str(error.value)
    for word in words: assert word in str(error.value)

@pytest.mark.parametrize("spec", ["exact", "santa:samples=8", "uniform", "topk:budget=0.05", "streaming:window=9"])
def test_generate_writes_what_the_model_generates(pocket, needle, files, spec):
    from sparse_nb.cli import method_from
    want, _ = by_hand(pocket, needle.prompt, decode=None if spec == "exact" else method_from("--decode", spec), seed=3)
    assert text_of(generated(files / "prompt", "--decode", spec, "--max-new-tokens", 12, "--seed", 3)) == want
    if spec in ("exact", "santa:samples=8"): assert want.strip().startswith(needle.answer)

def test_methods_are_those_of_the_package_whatever_else_has_their_names():
    from sparse_nb.attention import Method
    from sparse_nb.cli import method_from
    from sparse_nb.santa import Santa
    own = type("Santa", (Method,), {})
    assert own in Method.__subclasses__()
    assert method_from("--decode", "santa:samples=3") == Santa(samples=3)

def test_keys_in_host_memory_write_the_same(files):
    options = ["--decode", "santa:samples=16", "--max-new-tokens", 12]
    assert text_of(generated(files / "prompt", *options, "--offload")) == text_of(generated(files / "prompt", *options))

def test_a_cache_that_the_model_asks_for_does_not_meet_that_of_the_context(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "static")
    (folder / "generation_config.json").write_text(json.dumps(dict(cache_implementation="static", num_return_sequences=2, do_sample=True, eos_token_id=None, bos_token_id=None)))
    (tmp_path / "text").write_text("a context of a few words")
    assert generated(tmp_path / "text", "--model", str(folder), "--question", "why", "--decode", "topk", "--max-new-tokens", 3).returncode == 0

def test_a_folder_without_a_model(tmp_path):
    (tmp_path / "text").write_text("some words")
    one_line(generated(tmp_path / "text", "--model", str(tmp_path)), f"--model: the folder {str(tmp_path)!r} has no config.json")

def test_prefill_and_dense_layers_are_passed_on(pocket, needle, files):
    from sparse_nb.attention import Streaming, TopK
    method = dict(prefill=Streaming(2, 16), decode=TopK(3), dense_layers=[0, 4])
    got = text_of(generated(files / "prompt", "--prefill", "streaming:sinks=2,window=16", "--decode", "topk:budget=3", "--dense-layers", "0, 4", "--max-new-tokens", 12))
    assert got == by_hand(pocket, needle.prompt, **method)[0] != by_hand(pocket, needle.prompt)[0]

def test_drawn_tokens_follow_the_seed(pocket, needle, files):
    draw = lambda seed: text_of(generated(files / "prompt", "--decode", "santa:samples=4", "--temperature", 1.5, "--seed", seed, "--max-new-tokens", 12))
    from sparse_nb.santa import Santa
    assert draw(5) == draw(5) == by_hand(pocket, needle.prompt, decode=Santa(4), seed=5, do_sample=True, temperature=1.5)[0] != draw(6)

@pytest.mark.parametrize("prefill", ["exact", "streaming:window=0.5"])
def test_a_question_is_decoded(pocket, needle, files, prefill, tmp_path):
    from sparse_nb.cli import method_from
    from sparse_nb.santa import Santa
    cut = len(pocket[1](needle.context)["input_ids"])
    want, stats = by_hand(pocket, needle.prompt, cut, prefill=method_from("", prefill), decode=Santa(8), seed=2)
    got = generated(files / "context", "--question", needle.question, "--prefill", prefill, "--decode", "santa:samples=8", "--seed", 2, "--max-new-tokens", 12, "--audit", "--stats-out", tmp_path / "s.csv")
    assert got.returncode == 0 and got.stdout == want
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "s.csv", index_col=["layer", "head"]), stats)
    assert set(stats.queries) == {len(needle.question) + 11}

def test_tokens_are_those_of_the_joined_text(pocket, files, tmp_path):
    (tmp_path / "half").write_bytes("The café is open. The caf".encode())
    got = text_of(generated(tmp_path / "half", "--question", "é is", "--max-new-tokens", 5))
    assert got == by_hand(pocket, "The café is open. The café is", max_new_tokens=5)[0]

def test_the_table_and_the_csv_say_what_was_read(pocket, needle, files, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    from sparse_nb.attention import TopK
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
    assert rows == [[str(layer), f"{100 * m.density:.1f}", "%", f"{m.values_read:.1f}", f"{100 * m.bytes / m.dense_bytes:.1f}", "%", f"{m.error:.3f}"] for layer, m in mean.iterrows()]
    assert len(rows) == 7 and rows[5][1:4] == ["100.0", "%", f"{mean.loc[5].values_read:.1f}"]
    quiet = generated(files / "prompt", *options, "--stats-out", tmp_path / "quiet.csv")
    assert quiet.stderr == f"saved {tmp_path / 'quiet.csv'}\n" and "error" not in pd.read_csv(tmp_path / "quiet.csv")

def test_one_token_comes_from_the_reading(pocket, needle, files):
    got = generated(files / "prompt", "--decode", "santa", "--max-new-tokens", 1, "--stats")
    assert got.stdout == by_hand(pocket, needle.prompt, max_new_tokens=1)[0] and "nothing was counted" in got.stderr

def test_a_prompt_of_one_token(tiny, tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    assert len(text_of(generated(tmp_path / "a", "--model", tiny, "--decode", "topk:budget=1", "--max-new-tokens", 3))) > 0

def test_a_prompt_from_standard_input(pocket, needle, monkeypatch):
    result = run("generate", "--prompt-file", "-", "--decode", "santa:samples=8", "--seed", "3", "--max-new-tokens", "12", input=needle.prompt)
    from sparse_nb.santa import Santa
    assert text_of(result) == by_hand(pocket, needle.prompt, decode=Santa(8), seed=3)[0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    one_line(generated("-"), "--prompt-file: '-' is empty")

@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals there")
def test_bars_on_a_terminal_stay_out_of_the_text(files, pocket, needle):
    import pty
    import threading
    ours, theirs = pty.openpty()
    shown = []
    def listen():
        try:
            while part := os.read(ours, 65536): shown.append(part)
        except OSError: pass
    process = subprocess.Popen([sys.executable, "-m", "sparse_nb.cli", "generate", "--prompt-file", str(files / "context"), "--question", needle.question, "--max-new-tokens", "12"],
                               stdout=subprocess.PIPE, stderr=theirs, env=ENV | {"TERM": "xterm"}, cwd=os.path.dirname(os.path.dirname(__file__)))
    os.close(theirs)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    out, _ = process.communicate(timeout=120)
    listener.join(10)
    assert process.returncode == 0 and out.decode() == by_hand(pocket, needle.prompt)[0]
    assert b"reading the context" in b"".join(shown) and needle.answer.encode() not in b"".join(shown)

@pytest.mark.skipif(os.name == "nt", reason="no such pipes there")
def test_a_reader_that_leaves_is_no_crash(files):
    code = f"import os; r, w = os.pipe(); os.dup2(w, 1); os.close(w); os.close(r); from sparse_nb.cli import main; main(['generate', '--prompt-file', {str(files / 'prompt')!r}, '--max-new-tokens', '12'])"
    result = run(code=code)
    assert result.returncode == 1 and result.stderr == ""

@pytest.mark.parametrize("options, words", [
    ([], ["--prompt-file"]), (["--prompt-file", "none"], ["--prompt-file: cannot read 'none'", "No such file"]), (["--prompt-file", "."], ["--prompt-file: cannot read '.'"]), (["--prompt-file", "empty"], ["--prompt-file: 'empty' is empty"]),
    (["--prompt-file", "bytes"], ["'bytes' is not UTF-8: byte 2 is 0xff"]),
    (["--decode", "topq"], ["--decode: got 'topq'", "topk"]), (["--decode", "topk:budget=0"], ["--decode: budget must be at least 1 key"]), (["--prefill", "nothing"], ["--prefill: got 'nothing'"]), (["--prefill", "santa"], ["--prefill: Santa cannot prefill"]),
    (["--dense-layers", "0,x"], ["--dense-layers: got '0,x'", "whole numbers"]), (["--dense-layers", "-1"], ["--dense-layers: got '-1'"]), (["--dense-layers", ""], ["--dense-layers: got ''"]), (["--dense-layers", "2"], ["--dense-layers: there is no layer 2, layers are 0 to 1"]), (["--offload"], ["offload: no layer decodes with a method"]),
    (["--question", ""], ["--question: got an empty text"]), (["--max-new-tokens", "0"], ["--max-new-tokens: got 0"]), (["--max-new-tokens", "1.5"], ["--max-new-tokens"]),
    (["--max-new-tokens", "4085"], ["--prompt-file: 12 tokens and 4085 new ones (--max-new-tokens) make 4097", "at most 4096"]), (["--question", "why", "--max-new-tokens", "4082"], ["15 tokens with the question and 4082 new ones"]),
    (["--seed", "-1"], ["--seed: got -1"]), (["--seed", str(2**63)], ["--seed: got"]), *[(["--temperature", x], [f"--temperature: got {float(x)}", "0.001"]) for x in ("-1", "nan", "inf", "1e-9")], (["--temperature", "hot"], ["--temperature"]),
    (["--stats-out", "s.xlsx"], ["--stats-out: got 's.xlsx'", ".csv"]), (["--stats-out", "none/s.csv"], ["--stats-out: there is no folder 'none'"]), (["--stats-out", "folder.csv"], ["--stats-out: 'folder.csv' is a folder"]),
    (["--model", "./nowhere"], ["--model: there is no folder './nowhere'"]), (["--model", "nobody/nothing"], ["--model: cannot load 'nobody/nothing'"]), (["--setup", "B"], ["--setup"]), (["stray"], ["stray"]),
    (["--decode", "streaming:window=99"], ["window must be at most the number of keys, 13, got 99"]), (["--decode", "topk:budget=99", "--question", "why"], ["budget must be at most the number of keys, 13, got 99"])])
def test_wrong_options_of_generate_take_one_line(tiny, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good").write_bytes(b"hello world")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bytes").write_bytes(b"ab\xffc")
    (tmp_path / "folder.csv").mkdir()
    before = sorted(tmp_path.iterdir())
    if not options: result = called("generate")
    else: result = generated("good", *([] if "--model" in options else ["--model", tiny]), *options)
    one_line(result, *words)
    assert sorted(tmp_path.iterdir()) == before

def test_what_can_be_checked_is_checked_before_the_model_is_loaded(tmp_path, monkeypatch):
    from sparse_nb import cli
    monkeypatch.setattr(cli, "load_model", lambda *args: pytest.fail("loaded"))
    (tmp_path / "good").write_bytes(b"hello")
    for options in (["--stats-out", "s.txt"], ["--decode", "topq"], ["--prefill", "santa"], ["--dense-layers", "a"], ["--temperature", "-1"], ["--prompt-file", str(tmp_path)]): one_line(generated(tmp_path / "good", *options))

def right_wherever_exact_is(seeds, context):
    "How often exact attention is right; wherever it is, SANTA must be"
    from sparse_nb import hf, pocket, tasks
    from sparse_nb.attention import Exact
    from sparse_nb.cli import equal_methods, split_prompt
    model, tokenizer = pocket.load("cuda" if torch.cuda.is_available() else "cpu")
    santa, exact = equal_methods(0.05, context, 0.9)["santa"], 0
    assert santa.samples == 128 and santa.scheme == "systematic"
    for seed in seeds:
        example = tasks.make("needle", context, seed=seed, tokenizer=tokenizer)
        prompt, question = (ids.to(model.device) for ids in split_prompt(tokenizer, example))
        cache = hf.prefill(model, prompt)
        right = [tasks.score(hf.answer(model, cache, question, method, tokenizer=tokenizer, max_new_tokens=8, seed=seed, stop=".\n").text, example.answer).exact
                 for method in (Exact(), santa)]
        assert right[1] or not right[0], f"seed {seed}"
        exact += right[0]
    return exact

@pytest.mark.gpu
def test_santa_is_right_at_16k_wherever_exact_attention_is():
    assert right_wherever_exact_is(range(20), 16384) >= 18

@pytest.mark.slow
def test_santa_is_right_at_16k_on_three_seeds(): assert right_wherever_exact_is(range(3), 16384) >= 2

@pytest.mark.parametrize("options, words", [
    (["--lengths", "4k"], ["--lengths: got '4k'", "whole numbers"]), (["--lengths", ""], ["--lengths: got ''"]), (["--batches", "1,-2"], ["--batches: got '1,-2'"]), (["--batches", "0"], ["batches must be at least 1, got 0"]),
    (["--shapes", "llama9"], ["shapes must be of llama3, pocket, got 'llama9'"]), (["--methods", "flashinfer,magic"], ["methods must be of flashinfer", "got 'magic'"]), (["--methods", ","], ["--methods: got ','"]),
    (["--samples", "0"], ["samples must be at least 1"]), (["--dtype", "float64"], ["--dtype: got 'float64'"]), (["--colour"], ["--colour"])])
def test_bad_options_of_the_bench(options, words): one_line(called("bench", "decode", *options), *words)

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_the_bench_needs_a_gpu(tmp_path):
    one_line(called("bench", "decode", "--out", str(tmp_path / "new")), "there is no CUDA device here")
    assert list(tmp_path.iterdir()) == []

def test_the_bench_is_light_until_it_runs():
    code = "import sys; from sparse_nb.cli import main\ntry: main(['bench', 'decode', '--help'])\nfinally: print([m for m in ('torch', 'transformers', 'matplotlib', 'pandas') if m in sys.modules])"
    result = run(code=code)
    assert result.returncode == 0 and result.stdout.endswith("[]\n") and "--lengths" in result.stdout
    assert "decode" in called("bench", "--help").stdout
