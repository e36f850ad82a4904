"""Settings that are read and refused, by name and in one line; the entry point beside a mock of vLLM; paged keys."""
import json
import sys
from dataclasses import replace
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sparse_nb import Santa
from sparse_nb.core.registry import METHODS, method_class
from sparse_nb.core.settings import read_method
from sparse_nb.models.rng import Streams
from sparse_nb.vllm.paged import box_view, boxes_of, parts_of, rows_of, streams_at, write_boxes
from sparse_nb.vllm.serving import (
    GPU_WORKER, NO_WINDOW, RELEASES, WORKER, check_engine, prepare, read_serving, register, why_not)

LAYERS = 4
PLAIN = "model must be one with plain causal attention, got "


def config(given=None, block=128, **other):
    "A configuration with the parts that are looked at; `other` changes some, by part__name."
    parts = dict(
        model=dict(runner_type="generate", use_mla=False, is_encoder_decoder=False, is_hybrid=False,
                   is_mm_prefix_lm=False, rswa_window=None, dtype=torch.bfloat16, max_model_len=1024,
                   get_total_num_hidden_layers=lambda: LAYERS, model_arch_config=SimpleNamespace(rswa_window=None)),
        cache=dict(cache_dtype="auto", block_size=block), device=dict(device_type="cpu"),
        parallel=dict(decode_context_parallel_size=1, prefill_context_parallel_size=1, worker_extension_cls="",
                      worker_cls="vllm.v1.worker.gpu_worker.Worker"),
        attention=dict(backend=None))
    for name, x in other.items():
        part, _, key = name.partition("__")
        if key: parts[part][key] = x
    parts = {f"{name}_config": SimpleNamespace(**x) for name, x in parts.items()}
    parts |= dict(speculative_config=other.get("speculative"), kv_transfer_config=other.get("kv_transfer"))
    return SimpleNamespace(**parts, additional_config={} if given is None else dict(sparse_nb=given),
                           use_v2_model_runner=other.get("use_v2_model_runner", True))


@pytest.mark.parametrize("given, methods", [
    (dict(decode="Quest(budget=0.2)", dense_layers=[0]), [None, *["Quest(budget=0.2, page=16)"] * 3]),
    (dict(decode="exact"), [None] * 4),
    (dict(decode={"1": "topk", "3": "Santa(samples=8)"}), [None, "TopK(budget=0.1)", None, repr(Santa(samples=8))]),
])
def test_settings_say_what_sparsify_says(given, methods):
    found = read_serving(json.loads(json.dumps(given)), LAYERS)
    assert [m and repr(m) for m in found.methods.values()] == methods
    assert found.page == (16 if "Quest" in str(given) else 0) and found.seed == 0


@pytest.mark.parametrize("given, error, said", [
    ([], TypeError, "sparse_nb must be an object of settings, got []"),
    ({}, ValueError, "sparse_nb must have the setting decode, got none"),
    (dict(decode="topk", layers=2), ValueError, "sparse_nb has no setting 'layers', it has decode, dense_layers, seed"),
    (dict(decode=3), TypeError, "decode must be a method in a line, got 3"),
    (dict(decode="quest(pages=3)"), ValueError, "Quest has no setting 'pages'"),
    (dict(decode="delta"), ValueError, "decode must be a method that can decode, got Delta, which cannot"),
    (dict(decode={"4": "topk"}), ValueError, "decode must be for layers 0 to 3, got 4"),
    (dict(decode={"all": "topk"}), ValueError, "decode must be for layers 0 to 3, got 'all'"),
    (dict(decode={"0": "Quest(page=8)", "1": "Quest"}), ValueError,
     "decode must have pages of one size in all layers, got 8 and 16"),
    (dict(decode="topk", dense_layers=2), TypeError, "dense_layers must be a list of layer numbers, got 2"),
    (dict(decode="topk", dense_layers=[True]), TypeError, "dense_layers must be a list of layer numbers, got [True]"),
    (dict(decode="topk", dense_layers=[4]), ValueError, "dense_layers must be among layers 0 to 3, got 4"),
    (dict(decode="topk", seed=-1), ValueError, "seed must lie in [0, 2**63), got -1"),
    (dict(decode="topk", seed=None), TypeError, "seed must be an int or an integer tensor, got NoneType"),
    (dict(decode="VAttention(predictor=Saap())"), ValueError, "got VAttention with Saap, which keeps clusters"),
])
def test_wrong_settings_are_named(given, error, said):
    with pytest.raises(error) as found: read_serving(given, LAYERS)
    assert said in str(found.value) and "\n" not in str(found.value)


def test_every_method_is_served_or_refused_by_its_name():
    served = set()
    for row in METHODS.values():
        name = row.path.partition(":")[2]
        if not callable(getattr(method_class(name), "decode", None)): continue
        try: read_serving(dict(decode=name), LAYERS)
        except ValueError as error: assert f"got {name}" in str(error), error
        else: served.add(name)
    assert served == {"Exact", "Streaming", "TopK", "TopP", "Uniform", "Santa", "VAttention", "Quest", "OneList",
                      "Then"}


@pytest.mark.parametrize("change, said", [
    (dict(device__device_type="xpu"), "device must be cpu or cuda, got xpu"),
    (dict(device__device_type="cuda"), "vLLM must be release 0.26.0 on cuda, got 0.32.0"),
    (dict(model__runner_type="pooling"), "model must be one that generates text, got pooling"),
    (dict(model__use_mla=True), PLAIN + "multi-head latent attention"),
    (dict(model__is_encoder_decoder=True), PLAIN + "an encoder"),
    (dict(model__is_hybrid=True), PLAIN + "state-space layers"),
    (dict(model__is_mm_prefix_lm=True), PLAIN + "a prefix without a causal mask"),
    (dict(model__rswa_window=128), PLAIN + "a window beside the prompt"),
    (dict(model__dtype=torch.float64), "dtype must be float16, bfloat16, float32, got float64"),
    (dict(cache__cache_dtype="fp8"), "kv_cache_dtype must be auto or the dtype of the model, got fp8"),
    (dict(speculative=object()), "speculative_config must be None, got one"),
    (dict(kv_transfer=object()), "kv_transfer_config must be None, got one"),
    (dict(parallel__decode_context_parallel_size=2), "decode_context_parallel_size must be 1, got 2"),
    (dict(parallel__prefill_context_parallel_size=2), "prefill_context_parallel_size must be 1, got 2"),
    (dict(block=40), "block_size must be a multiple of 16, the keys in a page of the method, got 40"),
])
def test_an_engine_that_was_not_tried_is_refused(change, said):
    asked = dict(decode="quest", dense_layers=[0])
    assert check_engine(config(asked), RELEASES["cpu"] + "+cpu").page == 16
    with pytest.raises(ValueError) as found: check_engine(config(asked, **change), RELEASES["cpu"])
    assert str(found.value) == f"sparse_nb: {said}"
    assert check_engine(config(None, **change), "0.1.0") is None  # no settings, nothing to refuse


@pytest.mark.parametrize("change, said", [
    (dict(model__dtype=torch.float32), "dtype must be float16, bfloat16, got float32"),
    (dict(block=48), "block_size must be a power of two of at least 16, got 48"),
    (dict(block=8), "block_size must be a power of two of at least 16, got 8"),
    (dict(attention__backend=SimpleNamespace(name="FLASHINFER")),
     "attention_backend must be auto, FLASH_ATTN or CUSTOM, got FLASHINFER"),
    (dict(parallel__worker_cls="my.Worker"), "worker_cls must be auto, got my.Worker"),
    (dict(use_v2_model_runner=False), "VLLM_USE_V2_MODEL_RUNNER must be 1, or unset for a model that it is for, got 0"),
    (dict(decode="vattention"), "decode must be a method that has kernels here, Exact, Streaming, TopK, Santa, Quest, "
                                "got VAttention"),
    (dict(decode="Quest(page=32)", block=16),
     "block_size must be a multiple of 32, the keys in a page of the method, got 16"),
])
def test_an_engine_on_a_gpu_that_was_not_tried_is_refused(change, said):
    asked, gpu = dict(decode=change.pop("decode", "quest")), dict(device__device_type="cuda")
    assert check_engine(config(dict(decode="quest"), **gpu), RELEASES["cuda"]).page == 16
    with pytest.raises(ValueError) as found: check_engine(config(asked, **gpu, **change), RELEASES["cuda"])
    assert str(found.value) == f"sparse_nb: {said}"
    assert check_engine(config(None, **gpu, **change), "0.1.0") is None


def test_exact_attention_is_the_engines_own_on_a_cpu_and_a_kernel_on_a_gpu():
    given = dict(decode="exact", dense_layers=[1])
    assert set(read_serving(given, 2).methods.values()) == {None}
    assert [m and repr(m) for m in read_serving(given, 2, "cuda").methods.values()] == ["Exact()", None]


def test_another_release_is_refused_and_the_tried_one_is_named():
    with pytest.raises(ValueError, match=r"sparse_nb: vLLM must be release 0\.32\.0 on cpu, got 0\.33\.0"):
        check_engine(config(dict(decode="topk")), "0.33.0+cpu")


def test_what_the_backend_needs_is_asked_for_once_settings_are_given():
    without, given = config(), config(dict(decode="topk"))
    own = config(dict(decode="topk"), parallel__worker_extension_cls="my.Worker")
    for x in (without, given, own): prepare(x, RELEASES["cpu"])
    assert [x.parallel_config.worker_extension_cls for x in (without, given, own)] == ["", WORKER, "my.Worker"]
    assert [x.model_config.model_arch_config.rswa_window for x in (without, given)] == [None, NO_WINDOW]
    given.model_config.rswa_window = NO_WINDOW
    assert check_engine(given, RELEASES["cpu"]) is not None  # as a worker asks again


def test_on_a_gpu_backend_and_worker_are_this_packages(mock):
    without, given = config(device__device_type="cuda"), config(dict(decode="topk"), device__device_type="cuda")
    for x in (without, given): prepare(x, RELEASES["cuda"])
    assert [x.parallel_config.worker_cls for x in (without, given)] == ["vllm.v1.worker.gpu_worker.Worker", GPU_WORKER]
    assert [x.attention_config.backend for x in (without, given)] == [None, mock.enum["CUSTOM"]]
    assert given.model_config.model_arch_config.rswa_window is None
    assert check_engine(given, RELEASES["cuda"]) is not None


@pytest.fixture
def mock(monkeypatch):
    "A mock of vLLM: the release, the function that makes a configuration, and the table of backends."
    class EngineArgs:
        made = config()
        def create_engine_config(self): return self.made
    table = {}
    parts = {"vllm": dict(__version__=RELEASES["cpu"]), "vllm.engine": {}}
    parts["vllm.engine.arg_utils"] = dict(EngineArgs=EngineArgs)
    parts |= {f"vllm.v1{x}": {} for x in ("", ".attention", ".attention.backends")}
    enum = Enum("AttentionBackendEnum", "CPU_ATTN CUSTOM")
    parts["vllm.v1.attention.backends.registry"] = dict(AttentionBackendEnum=enum, register_backend=table.__setitem__)
    for name, names in parts.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(args=EngineArgs, table=table, enum=enum)


def test_the_entry_point_may_be_called_twice(mock):
    register()
    once = mock.args.create_engine_config
    register()
    assert mock.args.create_engine_config is once
    assert mock.table == {mock.enum["CPU_ATTN"]: "sparse_nb.vllm.cpu.SparseBackend"}
    assert mock.args().create_engine_config() is mock.args.made
    mock.args.made = config(dict(decode="saap"))
    with pytest.raises(ValueError, match="sparse_nb: decode must .*, got Saap, which keeps clusters"):
        mock.args().create_engine_config()


def test_the_release_for_a_gpu_gets_the_backend_for_one(mock):
    sys.modules["vllm"].__version__ = RELEASES["cuda"]
    register()
    assert mock.table == {mock.enum["CUSTOM"]: "sparse_nb.vllm.cuda.SparseBackend"}


def test_another_release_keeps_its_backend(mock):
    sys.modules["vllm"].__version__ = "0.33.0+cpu"
    register()
    assert mock.table == {} and mock.args().create_engine_config() is mock.args.made
    mock.args.made = config(dict(decode="topk"))
    with pytest.raises(ValueError, match="got 0.33.0"): mock.args().create_engine_config()


def test_queries_behind_the_prompt_are_decoded():
    torch.manual_seed(0)
    for _ in range(50):
        lengths, known, prompts = (torch.randint(a, b, (4,)) for a, b in ((0, 6), (0, 9), (1, 12)))
        starts, ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), known + lengths
        found = parts_of(starts, ends, prompts)
        every = [(i, int(starts[i]) + j, int(known[i]) + j) for i in range(4) for j in range(lengths[i])]
        assert [*zip(found.row, found.token, found.keys)] == [(i, t, p + 1) for i, t, p in every if p >= prompts[i]]
        assert found.tokens.tolist() == [t for i, t, p in every if p < prompts[i]]
        for i, a, b, end in zip(found.rows, found.starts, found.starts[1:], found.ends):
            assert end == known[i] + b - a <= prompts[i] and 0 < b - a


def test_streams_are_those_of_a_sequence_alone():
    module = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=3, num_attention_heads=4), parameters=lambda: [])
    own = Streams(7).at(module, 1, 4, torch.tensor([11]))
    for layer in range(3):
        assert torch.equal(streams_at(7, layer, torch.arange(4), 11), own[layer])
        assert torch.equal(streams_at(7, layer, torch.tensor([2, 3]), 11), own[layer][:, 2:])  # a worker's heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [4, 16])
def test_boxes_in_blocks_are_those_of_the_method(page, dtype):
    "Written in steps of any length, in blocks in any order, for queries that see a part of what is written."
    torch.manual_seed(page)
    size, groups, dim, n = 32, 2, 8, 117
    inner = groups * size * 2 * dim
    memory = torch.full((7, inner + inner // page), torch.nan, dtype=dtype)
    cache = memory[:, :inner].view(7, groups, size, 2 * dim)
    place = torch.randperm(size * dim)
    keys = cache.view(7, groups, 2 * size, dim)[:, :, :size]
    k, blocks = torch.randn(1, groups, n, dim).to(dtype), torch.tensor([5, 0, 3, 6])
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:n]
    held = torch.zeros(7, groups, size, dim, dtype=dtype)
    done = 0
    for step in (1, 50, 3, 40, 1, 1, 21):
        new = slots[done:done + step]
        held[new // size, :, new % size] = k[0, :, done:done + step].transpose(0, 1)
        keys.copy_(torch.zeros(7, groups, size * dim, dtype=dtype).scatter(
            2, place.expand(7, groups, -1), held.flatten(2)).view_as(keys))
        write_boxes(box_view(cache, page), keys, place, torch.cat([new, torch.tensor([-1])]))
        done += step
        for seen in (done, max(1, done - 2)):
            rows = rows_of(keys, place, blocks[:-(-seen // size)])[:, :, :seen]
            assert torch.equal(rows, k[:, :, :seen])
            found = boxes_of(box_view(cache, page), page, blocks[:-(-seen // size)], rows)
            method = replace(read_method("quest"), page=page)
            assert torch.equal(found.rows, method.build(rows).rows)
            q = torch.randn(1, 4, 1, dim).to(dtype)
            assert torch.equal(method.decode(q, rows, rows, state=found), method.decode(q, rows, rows))
    assert done == n and why_not(method) == ""
