"""What a token would gain: `sparse_nb.bench.bench` on this machine, with a stand-in for CUDA, and `sparse-nb bench`."""
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from sparse_nb import bench
from sparse_nb.attention import assert_close, attention
from sparse_nb.bench import LLAMA, Model, Protocol, Shape, decode_call, model_of, step_times
from sparse_nb import Exact, Method, Uniform
from sparse_nb.core.registry import CLASSES, method_class
from sparse_nb.methods.hip import HiP
from sparse_nb.sketch_walk import SketchWalk

transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")
from commands import one_line, run  # noqa: E402

QUICK, TINY = Protocol(warmup=1, runs=2, buffer_mb=0), Model("tiny", 4, Shape(4, 2, 16), 10**6)
DECODERS = sorted(name for name in CLASSES if hasattr(method_class(name)(), "decode"))


def problem(n=300, B=1, shape=TINY.shape, dtype=torch.float32):
    (H, G, D), draw = shape, torch.Generator().manual_seed(n)
    return [torch.randn(B, heads, rows, D, generator=draw).to(dtype) for heads, rows in ((H, 1), (G, n), (G, n))]


def timed(methods, model=TINY, length=300, batch=1, say=lambda line: None):
    return bench.bench(methods, model, length, batch, device="cpu", protocol=QUICK, say=say)


# the step

@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("name", DECODERS)
def test_every_method_decodes_with_an_index_of_all_keys(name, B):
    method = method_class(name)()
    shape = Shape(6, 2, 64) if name == "HashAttention" else TINY.shape  # that its networks were trained for
    q, k, v = problem(B=B, shape=shape)
    if hasattr(method, "at_layer"): method = method.at_layer(2)
    out = decode_call(method, q, k, v)()
    assert out.shape == q.shape and out.isfinite().all()
    if name == "Exact": assert_close(out, attention(q, k, v), rtol=1e-6)


def test_the_newest_key_is_in_the_index():
    q, k, v = problem()
    k[:, :, -1] = 8 * q.view(1, 2, 2, 16).mean(2)  # above all others for both heads of its group
    for name in "Quest", "DoubleSparsity", "Adamas":
        out = decode_call(method_class(name)(0.05), q, k, v)()
        assert_close(out, attention(q, k, v), rtol=0.2)


def test_a_call_draws_the_same_each_time():
    step = decode_call(Uniform(0.1), *problem())
    assert torch.equal(step(), step())


def test_outputs_that_are_wrong_are_not_timed():
    q = problem()[0]
    with pytest.raises(ValueError, match=r"out must have the shape \[1, 4, 1, 16\], got \[4, 1, 16\]"):
        step_times(lambda: q[0], q, QUICK)
    for bad in math.nan, math.inf:
        with pytest.raises(ValueError, match="out must be finite"): step_times(lambda: q * bad, q, QUICK)


class OnGpu(torch.Tensor):
    "A tensor that says that it lies on a GPU."
    is_cuda = True


@pytest.fixture
def cuda(monkeypatch):
    "In place of CUDA: what waits raises in the debug mode, and a graph writes its output when it is replayed."
    seen = SimpleNamespace(mode="default", modes=[], captured=0)
    def set_mode(mode):
        seen.mode = mode
        seen.modes.append(mode)
    def captured(call):
        seen.captured += 1
        out = torch.zeros_like(call())
        return lambda: out.copy_(call()), out
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(bench, "captured", captured)
    return seen


def test_a_step_is_timed_from_a_graph_unless_it_waits(cuda):
    q = problem()[0]
    def waits():
        if cuda.mode == "error": raise RuntimeError("called a synchronizing CUDA operation")
        return q * 2
    assert step_times(lambda: q * 2, q.as_subclass(OnGpu), QUICK)[1] is True
    assert cuda.captured == 1 and cuda.mode == "default" and "error" in cuda.modes
    assert step_times(waits, q.as_subclass(OnGpu), QUICK)[1] is False
    assert cuda.captured == 1 and cuda.mode == "default"


def test_what_a_graph_writes_is_checked(cuda, monkeypatch):
    q = problem()[0]
    monkeypatch.setattr(bench, "captured", lambda call: (lambda: None, torch.zeros_like(q)))  # does nothing
    with pytest.raises(ValueError, match="out must be finite"): step_times(lambda: q * 2, q.as_subclass(OnGpu), QUICK)


# the dense kernels

def test_flashinfer_is_asked_in_its_own_layout(monkeypatch):
    def single(q, k, v, kv_layout, use_tensor_cores):  # [H, D], [N, G, D]
        assert kv_layout == "NHD" and k.is_contiguous() and v.is_contiguous()
        return attention(q[None, :, None], *(x.transpose(0, 1)[None] for x in (k, v)))[0, :, 0]
    class Paged:
        def __init__(self, workspace, kv_layout, use_tensor_cores): assert kv_layout == "NHD"
        def plan(self, pages, numbers, last, H, G, D, page, **dtypes):
            assert last.tolist() == [page] * (len(pages) - 1) and numbers.tolist() == list(range(pages[-1]))
            self.pages = pages.tolist()
        def run(self, q, cache):  # [B, H, D], [pages, 16, G, D]
            ends = zip(self.pages, self.pages[1:])
            rows = [[x[a:b].flatten(0, 1).transpose(0, 1)[None] for x in cache] for a, b in ends]
            return torch.cat([attention(x[None, :, None], *kv)[:, :, 0] for x, kv in zip(q, rows)])
    fake = SimpleNamespace(single_decode_with_kv_cache=single, BatchDecodeWithPagedKVCacheWrapper=Paged)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    for B in 1, 3:
        q, k, v = problem(320, B)
        for name in "flashinfer", "flashinfer_tc":
            (call,) = bench.DENSE[name](q, k, v).values()
            assert_close(call(), attention(q, k, v), rtol=1e-6)
    with pytest.raises(ValueError, match="k must hold whole pages of 16 keys, got 300"):
        bench.DENSE["flashinfer"](*problem(300, 2))


def test_every_way_to_ask_pytorch_is_right():
    q, k, v = problem(B=2)
    for call in bench.DENSE["sdpa"](q, k, v).values(): assert_close(call(), attention(q, k, v), rtol=1e-5)


def test_the_fastest_dense_kernel_is_named(monkeypatch):
    times = iter([30.0, 10.0, 20.0])
    def fake(call, q, protocol, buffer): return bench.Quartiles(next(times), 0.0, 0.0), True
    def broken(q, k, v): raise RuntimeError("no kernel\nmore")
    monkeypatch.setattr(bench, "step_times", fake)
    dense = dict(a=lambda *x: {"one": None}, b=lambda *x: {"one": None, "two": None}, c=broken)
    monkeypatch.setattr(bench, "DENSE", dense)
    said = []
    assert bench._dense_step(*problem(), QUICK, None, said.append)[0] == "b, one" and said == ["c: no kernel"]
    monkeypatch.setattr(bench, "DENSE", dict(c=broken))
    with pytest.raises(ValueError, match="length must be one that a dense kernel can do, none could with 300 keys"):
        bench._dense_step(*problem(), QUICK, None, said.append)


# the sum

def test_a_token_is_its_weights_and_its_layers(monkeypatch):
    at = {"Exact": 500.0, "Uniform": 100.0, "SketchWalk": 200.0}
    monkeypatch.setattr(bench, "bandwidth", lambda *a, **k: dict(copy_gb_s=1.0, read_gb_s=2.0))
    monkeypatch.setattr(bench, "_dense_step", lambda *a: ("fast", bench.Quartiles(400.0, 0.0, 0.0), True))
    monkeypatch.setattr(bench, "decode_call", lambda method, *a: type(method).__name__)
    monkeypatch.setattr(bench, "step_times", lambda name, *a: (bench.Quartiles(at[name], 0.0, 0.0), name != "Uniform"))
    gb_s, rows = timed(dict(uniform=Uniform(0.1), walk=SketchWalk(dense_layers=1), same=Exact()))
    weights = 1e6 / 2e9 * 1e3  # ms
    ms = [weights + x for x in (1.6, 2.0, 0.4, 0.5 + 3 * 0.2, 2.0)]
    assert gb_s == 2 and [row["method"] for row in rows] == ["dense: fast", "exact, ours", "uniform", "walk", "same"]
    assert [row["ms"] for row in rows] == pytest.approx(ms)
    assert [row["times"] for row in rows] == pytest.approx([1, 0.8, 4, 2, 0.8])
    assert [row["gain"] for row in rows] == pytest.approx([ms[0] / x for x in ms])
    assert [row["graph"] for row in rows] == [True, True, False, True, True]


def test_a_method_that_cannot_is_said_and_the_others_are_timed():
    class Broken(Exact):
        def decode(self, *args, **kwargs): raise RuntimeError("no such step\nmore")
    said = []
    _, rows = timed(dict(broken=Broken(), uniform=Uniform(0.1)), say=said.append)
    assert [row["method"] for row in rows[1:]] == ["exact, ours", "uniform"] and "broken: no such step" in said


@pytest.mark.parametrize("given, why", [
    (dict(length=1), "length must"), (dict(batch=0), "batch must"), (dict(length=2.5), "length must")])
def test_bad_calls(given, why):
    with pytest.raises((ValueError, TypeError), match=why): timed({}, **given)


def test_a_cache_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))
    with pytest.raises(ValueError, match="length must fit: 131072 keys of 2 sequences need 3.2 GB, there are 1.0"):
        bench.bench({}, LLAMA, 131072, 2, device="cuda")


# a model's shape

def test_the_shape_and_the_weights_of_a_model():
    sizes = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=50)
    config = transformers.LlamaConfig(num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    every = sum(x.numel() for x in model.parameters())
    assert model_of(config, "mine") == Model("mine", 3, Shape(4, 2, 16), 2 * (every - 50 * 64))
    tied = transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, head_dim=32, **sizes)
    every = sum(x.numel() for x in transformers.LlamaForCausalLM(tied).parameters())
    assert model_of(tied) == Model("llama", 3, Shape(4, 2, 32), 2 * every)


# the command

@pytest.fixture
def gpu(monkeypatch):
    "A machine that says that it has a GPU, where the bench is timed on the CPU."
    given, real = [], bench.bench
    def on_cpu(methods, model, length, batch, say):
        given.append((methods, model, length, batch))
        return real(methods, TINY, length, batch, device="cpu", protocol=QUICK, say=say)
    for name, answer in dict(is_available=True, get_device_name="Fake GPU-1").items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, answer=answer: answer)
    monkeypatch.setattr(bench, "bench", on_cpu)
    monkeypatch.setenv("COLUMNS", "120")
    return given


def test_the_command_prints_one_table(gpu):
    found = run("bench", "--decode", "topk", "--decode", "hashattention", "--length", 300, "--batch", 2)
    assert found.returncode == 0, found
    lines = [line for line in found.stdout.splitlines() if line.strip()]
    assert lines[0].strip() == "Fake GPU-1, Llama-3.1-8B, 300 keys, 2 sequences, bfloat16"
    for name in "dense: sdpa", "exact, ours", "topk":
        (line,) = [x for x in lines if name in x]
        numbers = [float(x.rstrip("*")) for x in line.replace("│", " ").split()[-4:]]
        assert all(x > 0 for x in numbers) and "*" in line
    assert "hashattention: " in found.stderr and not any("hashattention" in line for line in lines)
    ((methods, model, length, batch),) = gpu
    assert model == LLAMA and (length, batch) == (300, 2) and all(isinstance(x, Method) for x in methods.values())


def test_the_shape_may_be_a_models_own_and_methods_need_not_be_named(gpu):
    assert run("bench", "--model", "pocket", "--length", 200).returncode == 0
    ((methods, model, *_),) = gpu
    assert model.name == "pocket" and model.shape == Shape(6, 2, 64) and len(methods) == 4


@pytest.mark.parametrize("args, words", [
    (["--length", 1], ["--length must be at least 2, got 1"]), (["--batch", 0], ["--batch must be at least 1, got 0"]),
    (["--decode", "hip"], ["--decode must be a method that decodes, got 'hip'"]),
    (["--decode", "tpok"], ["--decode", "must be one of", "'tpok'"]),
    (["--model", "./nowhere"], ["--model", "nowhere"])])
def test_bad_options_are_one_line(gpu, args, words): one_line(run("bench", *args), *words)


def test_a_cache_that_does_not_fit_is_one_line(gpu, monkeypatch):
    def full(*args, **kwargs): raise ValueError("length must fit: 9 keys need 2.0 GB, there are 1.0")
    monkeypatch.setattr(bench, "bench", full)
    one_line(run("bench"), "--length must fit: 9 keys")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so():
    one_line(run("bench"), "bench needs a CUDA device and Triton, which this machine has not")


def test_prompt_methods_cannot_decode(): assert not hasattr(HiP(), "decode")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_steps_come_from_graphs():
    said, methods = [], {name: method_class(name)() for name in DECODERS if name not in ("HashAttention", "H2O")}
    _, rows = bench.bench(methods, LLAMA, 8192, say=said.append)
    assert {row["method"] for row in rows[2:]} == {*methods}, said
    graphs = {row["method"] for row in rows if row["graph"]}
    assert {"exact, ours", "Santa", "VAttention", "Saap", "SketchWalk"} <= graphs, graphs
