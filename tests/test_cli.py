"The command as a user meets it: a process of its own, with a tiny random model"
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")

from sparse_nb.pocket import byte_tokenizer

ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
ENV.pop("TRITON_INTERPRET", None)

def run(*args, cwd=None, code=None, **env):
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "sparse_nb.cli"]
    root = os.path.dirname(os.path.dirname(__file__))
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([*start, *args], capture_output=True, text=True, timeout=120, cwd=cwd, env=ENV | {"PYTHONPATH": path} | env)

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
    result = run("demo", "--model", tiny, "--context", "512", "--density", "0.1", "--task", "kv", "--samples", "7", "--json", "--out", "report.html", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == "saved report.html\n"
    rows = json.loads(result.stdout)
    assert [r["method"] for r in rows] == ["exact", "streaming", "topk", "topp", "uniform", "santa"]
    for r in rows: assert list(r) == ["method", "answer", "expected", "correct", "relative_error", "keys_read", "values_read", "ms_per_token"]
    assert rows[0]["relative_error"] == 0 and rows[0]["keys_read"] == rows[0]["values_read"] == 1
    for r in rows[1:]: assert r["relative_error"] > 0 and r["ms_per_token"] > 0
    for r in rows[1:5]: assert abs(r["values_read"] - 0.1) < 0.02 and r["keys_read"] == (1 if r["method"].startswith("top") else r["values_read"])
    assert rows[5]["keys_read"] == 1 and 0 < rows[5]["values_read"] <= 7 / 400
    page = (tmp_path / "report.html").read_text()
    assert page.count("<tr>") == 7 and "data:image/png;base64," in page and "http" not in page

def test_the_table_and_the_default_picture(tiny, tmp_path):
    result = run("demo", "--model", tiny, "--context", "256", cwd=tmp_path)
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
    one_line(run("demo", *model, *options, cwd=tmp_path), *words)
    assert [x.name for x in tmp_path.iterdir()] == ["folder.png"]

@pytest.mark.skipif(os.name == "nt" or getattr(os, "geteuid", lambda: 0)() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tiny, tmp_path):
    tmp_path.chmod(0o500)
    one_line(run("demo", "--model", tiny, "--out", str(tmp_path / "report.html")), "--out: no permission")

def test_a_broken_model_folder(tiny, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    one_line(run("demo", "--model", str(tmp_path), "--context", "512"), "--model: cannot load")

def test_a_model_that_cannot_be_sparse(tiny, tmp_path):
    tokenizer = byte_tokenizer()
    transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=4096)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    one_line(run("demo", "--model", str(tmp_path), "--context", "512"), "gemma2 uses softcap")

@pytest.mark.parametrize("args", [["demos"], ["--colour"]])
def test_wrong_commands_take_one_line(args): one_line(run(*args))

@pytest.mark.parametrize("package", ["typer", "transformers", "matplotlib"])
def test_a_missing_package_is_named(tiny, package):
    code = f"import sys; sys.modules[{package!r}] = None; from sparse_nb.cli import main; main(['demo', '--model', {tiny!r}, '--context', '512'])"
    one_line(run(code=code), f"{package} is missing", "pip install 'sparse_nb[cli]'")

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
    result = run("doctor")
    assert result.returncode == 0 and result.stderr == ""
    for word in ("python", "torch", torch.__version__, "transformers", transformers.__version__, "sparse_nb", "triton", "devices", "CPU", "kernels", "pocket model"):
        assert word in result.stdout

def test_doctor_without_triton():
    code = "import sys; sys.modules['triton'] = None; from sparse_nb.cli import main; main(['doctor'])"
    assert "the PyTorch reference is used" in " ".join(run(code=code).stdout.split())

def test_doctor_runs_a_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    assert "interprets kernels on the CPU" in " ".join(run("doctor", TRITON_INTERPRET="1").stdout.split())

def test_help_is_light():
    code = "import sys, sparse_nb.cli; print([m for m in ('torch', 'transformers', 'matplotlib', 'pandas') if m in sys.modules])"
    assert run(code=code).stdout == "[]\n"
    assert "demo" in run("--help").stdout and run().stdout == run("--help").stdout

def test_the_pocket_model_answers():
    rows = json.loads(run("demo", "--context", "2048", "--json").stdout)
    assert rows[0]["method"] == "exact" and rows[0]["answer"] == rows[0]["expected"] and rows[0]["correct"]

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
def test_bad_options_of_the_bench(options, words): one_line(run("bench", "decode", *options), *words)

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_the_bench_needs_a_gpu(tmp_path):
    one_line(run("bench", "decode", "--out", str(tmp_path / "new")), "there is no CUDA device here")
    assert list(tmp_path.iterdir()) == []

def test_the_bench_is_light_until_it_runs():
    code = "import sys; from sparse_nb.cli import main\ntry: main(['bench', 'decode', '--help'])\nfinally: print([m for m in ('torch', 'transformers', 'matplotlib', 'pandas') if m in sys.modules])"
    result = run(code=code)
    assert result.returncode == 0 and result.stdout.endswith("[]\n") and "--lengths" in result.stdout
    assert "decode" in run("bench", "--help").stdout
