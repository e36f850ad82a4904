"""Settings that are read and refused, by name and in one line; the entry point beside a mock of vLLM; paged keys."""
import asyncio
import json
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file

from sparse_nb import Adamas, DoubleSparsity, Quest, Santa, pocket
from sparse_nb.core.registry import METHODS, method_class
from sparse_nb.core.settings import read_method
from sparse_nb.models.rng import Streams
from sparse_nb.vllm.kept import Kept, row_keys
from sparse_nb.vllm.metrics import Meter, follow
from sparse_nb.vllm.paged import parts_of, streams_at
from sparse_nb.vllm.prompt import whole_prompts
from sparse_nb.vllm.serving import (
    GPU_WORKER, NO_WINDOW, RELEASES, SIZES, WORKER, check_engine, prepare, read_serving, register, why_not)

LAYERS = 4
WHOLE = dict(enable_chunked_prefill=False, long_prefill_token_threshold=0)
KERNELS = "decode must be a method that has kernels here, Exact, Streaming, TopK, Santa, Quest, HashAttention, " \
    "OneList, VAttention, Saap, SketchWalk, got"
PLAIN = "model must be one with plain causal attention, got "


def config(given=None, block=128, **other):
    "A configuration with the parts that are looked at; `other` changes some, by part__name."
    parts = dict(
        model=dict(runner_type="generate", use_mla=False, is_encoder_decoder=False, is_hybrid=False,
                   is_mm_prefix_lm=False, rswa_window=None, dtype=torch.bfloat16, max_model_len=1024,
                   enable_sleep_mode=False,
                   get_total_num_hidden_layers=lambda: LAYERS, model_arch_config=SimpleNamespace(rswa_window=None),
                   model=str(pocket.path())),
        cache=dict(cache_dtype="auto", block_size=block), device=dict(device_type="cpu"),
        parallel=dict.fromkeys(SIZES, 1) | dict(
            worker_extension_cls="", worker_cls="vllm.v1.worker.gpu_worker.Worker"),
        attention=dict(backend=None), scheduler={})
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


def test_prompts_are_read_by_a_method_of_their_own():
    found = read_serving(dict(prefill="sketchwalk", dense_layers=[3]), LAYERS)
    assert [*found.methods.values()] == [None] * LAYERS and found.page == 0
    assert [m and type(m).__name__ for m in found.prefills.values()] == [None, None, "SketchWalk", None]
    asked = dict(decode="quest", prefill={"1": "Delta(window=64)", "2": "exact"})
    found = read_serving(json.loads(json.dumps(asked)), LAYERS, "cuda")
    assert [m and m.window for m in found.prefills.values()] == [None, 64, None, None] and found.page == 16
    assert read_serving(dict(decode="quest"), LAYERS).prefills == dict.fromkeys(range(LAYERS))
    for other in ("Delta(base=HiP())", "xattention"):
        assert type(read_serving(dict(prefill=other), LAYERS).prefills[3]).__name__.lower() in other.lower()
        with pytest.raises(ValueError, match="prefill must be a method that has kernels here, Delta, SketchWalk, got "):
            read_serving(dict(prefill=other), LAYERS, "cuda")


@pytest.mark.parametrize("change, said", [
    (dict(enable_chunked_prefill=True), "enable_chunked_prefill must be False with prefill, whose method reads whole "
                                        "prompts, got True"),
    (dict(long_prefill_token_threshold=64), "long_prefill_token_threshold must be 0 with prefill, whose method reads "
                                            "whole prompts, got 64")])
def test_prompts_in_parts_are_refused(change, said):
    asked = dict(decode="quest", prefill="sketchwalk(dense_layers=0)")
    plain = {f"scheduler__{x}": y for x, y in dict(WHOLE, **change).items()}
    with pytest.raises(ValueError) as found: check_engine(config(asked, **plain), RELEASES["cpu"])
    assert str(found.value) == f"sparse_nb: {said}"
    for fine in (dict(decode="quest"), dict(prefill="exact", decode="quest"), dict(asked, dense_layers=[0, 1, 2, 3])):
        assert check_engine(config(fine, **plain), RELEASES["cpu"]) is not None
    assert check_engine(config(asked, **{f"scheduler__{x}": y for x, y in WHOLE.items()}), RELEASES["cpu"]) is not None


def test_below_the_crossover_layers_decode_exactly(monkeypatch):
    asked = dict(decode={"0": "Quest(budget=0.1)", "1": "Santa(samples=64)", "2": "topk"}, dense_layers=[3])
    for given, want in ((None, [0] * 4), (0, [0] * 4), (512, [512] * 3 + [0])):
        found = read_serving(json.loads(json.dumps(dict(asked, crossover=given))), LAYERS)
        assert [found.crossover_of(i) for i in range(LAYERS)] == want
    assert read_serving(asked, LAYERS).crossover_of(0) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("what reads settings must not look at a GPU"))
    found = read_serving(dict(asked, crossover="auto"), LAYERS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpu, want in {"NVIDIA H200": [524288, 4096, 0, 0], "another": [0] * 4}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
        assert [found.crossover_of(i) for i in range(LAYERS)] == want


def test_layers_may_keep_rows_of_other_numbers_of_keys():
    asked = {"0": "Quest(page=24)", "1": "SketchWalk(block=16)", "2": "santa(keys='int8')"}
    assert read_serving(dict(decode=asked), LAYERS).page == 48
    assert read_serving(dict(decode="sketchwalk"), LAYERS).methods[1] is None  # its first two layers are exact
    for index, keys in dict(fine4=4, fine16=16, mean=64).items():  # whole blocks on a CPU, on a GPU what a mean is of
        found = [read_serving(dict(decode=f"SketchWalk(index='{index}')"), LAYERS, x).page for x in ("cpu", "cuda")]
        assert found == [64, keys]


@pytest.mark.parametrize("given, error, said", [
    ([], TypeError, "sparse_nb must be an object of settings, got []"),
    ({}, ValueError, "sparse_nb must have the setting decode or prefill, got none"),
    (dict(decode="topk", layers=2), ValueError,
     "sparse_nb has no setting 'layers', it has decode, prefill, dense_layers, crossover, seed"),
    (dict(prefill=3), TypeError, "prefill must be a method in a line, got 3"),
    (dict(prefill="quest"), ValueError, "prefill must be a method that can prefill, got Quest, which cannot"),
    (dict(prefill={"4": "delta"}), ValueError, "prefill must be for layers 0 to 3, got 4"),
    (dict(prefill="sketchwalk(walk='softmax')"), ValueError, "prefill must be a method that reads each layer by "
                                                             "itself, got SketchWalk, which hands scores from layer"),
    (dict(prefill="sketchwalk(index='random')"), ValueError, "by itself, got SketchWalk, which draws"),
    (dict(prefill="sketchwalk(block=16)"), ValueError, "block must be 32, 64 or 128"),
    (dict(decode=3), TypeError, "decode must be a method in a line, got 3"),
    (dict(decode="quest(pages=3)"), ValueError, "Quest has no setting 'pages'"),
    (dict(decode="delta"), ValueError, "decode must be a method that can decode, got Delta, which cannot"),
    (dict(decode={"4": "topk"}), ValueError, "decode must be for layers 0 to 3, got 4"),
    (dict(decode={"all": "topk"}), ValueError, "decode must be for layers 0 to 3, got 'all'"),
    (dict(decode="adamas"), ValueError, "got Adamas, which codes keys less the mean of all keys of a request"),
    (dict(decode="sketchwalk(walk='softmax')"), ValueError, "got SketchWalk, which hands scores from layer to layer"),
    (dict(decode="topk", dense_layers=2), TypeError, "dense_layers must be a list of layer numbers, got 2"),
    (dict(decode="topk", dense_layers=[True]), TypeError, "dense_layers must be a list of layer numbers, got [True]"),
    (dict(decode="topk", dense_layers=[4]), ValueError, "dense_layers must be among layers 0 to 3, got 4"),
    (dict(decode="topk", seed=-1), ValueError, "seed must lie in [0, 2**63), got -1"),
    (dict(decode="topk", seed=None), TypeError, "seed must be an int or an integer tensor, got NoneType"),
    (dict(decode="topk", crossover=-1), ValueError, "crossover must be at least 0, got -1"),
    (dict(decode="topk", crossover=0.5), TypeError, "crossover must be an int, got float"),
    (dict(decode="topk", crossover=[8]), TypeError, "crossover must be an int, got list"),
    (dict(decode="topk", crossover=True), TypeError, "crossover must be an int, got bool"),
    (dict(decode="topk", crossover="soon"), ValueError, "crossover must be a count of keys or 'auto', got 'soon'"),
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
    assert served == {"Exact", "Streaming", "TopK", "TopP", "Uniform", "Santa", "VAttention", "Quest", "HashAttention",
                      "OneList", "SketchWalk", "Then"}


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
    (dict(parallel__pipeline_parallel_size=2), "pipeline_parallel_size must be 1, got 2"),
    (dict(parallel__data_parallel_size=2), "data_parallel_size must be 1, got 2"),
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
    (dict(model__enable_sleep_mode=True), "enable_sleep_mode must be False, got True"),
    (dict(use_v2_model_runner=False), "VLLM_USE_V2_MODEL_RUNNER must be 1, or unset for a model that it is for, got 0"),
    (dict(decode="vattention"), f"{KERNELS} VAttention but for guarantee='denominator', bound='clt', "
     "predictor=HashAttention()"),
    (dict(decode="Santa(eps=0.1, delta=0.1)"), f"{KERNELS} Santa but for a number of samples and keys='exact'"),
    (dict(decode="Saap(router='centroid')"), f"{KERNELS} Saap, whose index they do not read"),
    (dict(decode="SketchWalk(index='oracle')"),
     f"{KERNELS} SketchWalk, whose index must be one of fine4, fine16, mean, got 'oracle'"),
    (dict(decode="SketchWalk(heads='averaged')"), f"{KERNELS} SketchWalk, whose heads must be one of group, each, got "
                                                  "'averaged'"),
    (dict(decode="SketchWalk(index='mean')", block=16),
     "block_size must be a multiple of 64, the keys in a page of the method, got 16"),
    (dict(decode="OneList(guess=DoubleSparsity())"),
     "decode must be a method that keeps nothing of a request, got OneList with DoubleSparsity, which codes keys less "
     "the mean of all keys of a request"),
    (dict(decode="OneList(guess=Saap())"), "decode must be a method that keeps nothing of a request, got OneList with "
                                           "Saap, which keeps clusters of all keys of a request"),
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


def test_clusters_of_a_request_are_served_on_a_gpu_alone():
    given = dict(decode="Saap(budget=0.1)")
    assert read_serving(given, 2, "cuda").page == 0  # they are no rows of a block
    with pytest.raises(ValueError, match="got Saap, which keeps clusters"): read_serving(given, 2)


def test_another_release_is_refused_and_the_tried_one_is_named():
    with pytest.raises(ValueError, match=r"sparse_nb: vLLM must be release 0\.32\.0 on cpu, got 0\.33\.0"):
        check_engine(config(dict(decode="topk")), "0.33.0+cpu")


def test_what_the_backend_needs_is_asked_for_once_settings_are_given():
    without, given = config(), config(dict(decode="topk"))
    own = config(dict(decode="topk"), parallel__worker_extension_cls="my.Worker")
    assert [prepare(x, RELEASES["cpu"]) for x in (without, given, own)] == [False, True, True]
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


@pytest.mark.parametrize("decode", ["hashattention", "OneList(guess=HashAttention())"])
def test_networks_of_another_model_are_refused(tmp_path, decode):
    asked = dict(decode=decode)
    assert prepare(config(asked), RELEASES["cpu"])
    with pytest.raises(ValueError, match="sparse_nb: model must be a folder with safetensors files, got "):
        prepare(config(asked, model__model=str(tmp_path)), RELEASES["cpu"])
    with pytest.raises(ValueError, match="sparse_nb: maps must be 'pocket' or a safetensors file of networks, got"):
        prepare(config(dict(decode="hashattention(maps='no')")), RELEASES["cpu"])
    weights = load_file(pocket.path() / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="sparse_nb: model must have the weights that the networks 'pocket' were tr"):
        prepare(config(asked, model__model=str(tmp_path)), RELEASES["cpu"])


@pytest.fixture
def mock(monkeypatch):
    "A mock of vLLM: the release, the function that makes a configuration, and the table of backends."
    class EngineArgs:
        made = config()
        def create_engine_config(self): return self.made
    class AsyncLLM:
        async def do_log_stats(self): self.printed = True
    table, own = {}, AsyncLLM.do_log_stats
    parts = {"vllm": dict(__version__=RELEASES["cpu"]), "vllm.engine": {}, "vllm.v1.engine": {}}
    parts["vllm.v1.engine.async_llm"] = dict(AsyncLLM=AsyncLLM)
    parts["vllm.engine.arg_utils"] = dict(EngineArgs=EngineArgs)
    parts |= {f"vllm.v1{x}": {} for x in ("", ".attention", ".attention.backends")}
    enum = Enum("AttentionBackendEnum", "CPU_ATTN CUSTOM")
    parts["vllm.v1.attention.backends.registry"] = dict(AttentionBackendEnum=enum, register_backend=table.__setitem__)
    for name, names in parts.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(args=EngineArgs, table=table, enum=enum, engine=AsyncLLM, own=own)


def test_the_entry_point_may_be_called_twice(mock):
    register()
    once = mock.args.create_engine_config
    register()
    assert mock.args.create_engine_config is once
    assert mock.table == {mock.enum["CPU_ATTN"]: "sparse_nb.vllm.cpu.SparseBackend"}
    assert mock.args().create_engine_config() is mock.args.made and mock.engine.do_log_stats is mock.own
    mock.args.made = config(dict(decode="topk"))
    for _ in range(2): mock.args().create_engine_config()
    assert mock.engine.do_log_stats.__wrapped__ is mock.own
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


def test_prompts_that_a_step_reads_from_end_to_end_are_whole():
    torch.manual_seed(0)
    for _ in range(50):
        lengths, known, prompts = (torch.randint(a, b, (4,)) for a, b in ((0, 6), (0, 3), (0, 6)))
        starts, ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), known + lengths
        found, other = whole_prompts(starts, ends, prompts), 0
        for i in range(4):
            at = [p for p in range(known[i], ends[i]) if p < prompts[i]]  # places of its prompt in the step
            if at and len(at) == prompts[i]:
                assert found.spans[found.rows.index(i)] == (starts[i], starts[i] + prompts[i])
            else:
                assert i not in found.rows
                other += len(at)
        assert found.dense == other


def test_streams_are_those_of_a_sequence_alone():
    module = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=3, num_attention_heads=4), parameters=lambda: [])
    own = Streams(7).at(module, 1, 4, torch.tensor([11]))
    for layer in range(3):
        assert torch.equal(streams_at(7, layer, torch.arange(4), 11), own[layer])
        assert torch.equal(streams_at(7, layer, torch.tensor([2, 3]), 11), own[layer][:, 2:])  # a worker's heads


IN_BLOCKS = ("Quest(page=4)", "Quest(page=16)", "Quest(page=1)", "SketchWalk(block=8)",
             "SketchWalk(block=16, index='fine16')", "SketchWalk(block=32, index='random')",
             "Santa(eps=0.3, delta=0.1)", "Santa(keys='int8')", "Santa(keys='rescored')", "HashAttention(layer=2)",
             "VAttention(predictor=Quest(page=8), guarantee='output')", "OneList(guess=HashAttention(layer=1))")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decode", IN_BLOCKS)
def test_an_index_in_blocks_is_that_of_the_method(decode, dtype):
    "Written in steps of any length, in blocks in any order, for queries that see a part of what is written."
    torch.manual_seed(0)
    method, size, groups, dim, n = read_method(decode), 32, 2, 64, 117
    kept, inner = Kept(method, size, groups, dim, dtype), groups * size * 2 * dim
    memory = torch.full((7, inner + kept.room // dtype.itemsize), torch.nan, dtype=dtype)
    cache, place = memory[:, :inner].view(7, groups, size, 2 * dim), torch.randperm(size * dim)
    keys, values = cache.view(7, groups, 2 * size, dim).chunk(2, 2)
    k, v, q = torch.randn(3, 1, groups, n, dim).to(dtype)
    blocks, q = torch.tensor([5, 0, 3, 4]), torch.cat([q - 1, q, q + 1], 1)[:, :, :1]
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:n]
    held, done = torch.zeros(2, 7, groups, size, dim, dtype=dtype), 0
    for step in (1, 50, 3, 40, 1, 1, 21):
        new, some = slots[done:done + step], slice(done, done + step)
        for part, half, x in zip(held, (keys, values), (k, v)):
            part[new // size, :, new % size] = x[0, :, some].transpose(0, 1)
            half.copy_(torch.zeros(7, groups, size * dim, dtype=dtype).scatter(
                2, place.expand(7, groups, -1), part.flatten(2)).view_as(half))
        rows = [torch.cat([x[0, :, some].transpose(0, 1), x[0, :, :1].transpose(0, 1)]) for x in (k, v)]
        kept.write(cache, keys, place, rows, torch.cat([new, torch.tensor([-1])]))  # the last is none
        done += step
        for seen in (done, max(1, done - 2)):
            found = kept.index(cache, blocks[:-(-seen // size)], k[:, :, :seen])
            own = method.new_state()
            own.append(k[:, :, :seen], v[:, :, :seen], **{x: None for x in own.observes})
            for name in ("rows", *getattr(own, "beside", ())):
                assert torch.equal(getattr(found, name), getattr(own, name))
            given, seed = (q, k[:, :, :seen], v[:, :, :seen]), dict(seed=1) if method.random else {}
            assert torch.equal(method.decode(*given, state=found, **seed), method.decode(*given, state=own, **seed))
    assert done == n and why_not(method) == ""
    untouched = memory[[1, 2, 6], inner:]
    assert untouched.isnan().all()  # blocks of others


def test_blocks_with_too_little_room_are_not_written():
    kept, memory = Kept(Quest(), 32, 1, 8, torch.float32), torch.zeros(3, 32 * 16 + 8)
    with pytest.raises(RuntimeError, match="a block must have space for 128 bytes beside its keys and values, got 32"):
        kept.view(memory[:, :32 * 16].view(3, 1, 32, 16), kept.parts[0])


def test_codes_less_a_mean_are_no_rows_of_a_block():
    "Why Adamas and Double Sparsity are refused: a shared key has other codes in another request."
    torch.manual_seed(0)
    shared, rest = torch.randn(1, 1, 32, 16), torch.randn(2, 1, 1, 64, 16) * 2
    for method in (Adamas(), DoubleSparsity(channels=4, chosen=((0, 3, 5, 9),))):
        first, second = (method.build(torch.cat([shared, x], 2)).rows[:, :, :32] for x in rest)
        assert not torch.equal(first, second)
    first, second = (Quest().build(torch.cat([shared, x], 2)).rows[:, :, :2] for x in rest)
    assert torch.equal(first, second) and row_keys(Quest().new_state()) == 16


def rows(queries, read, layers=(1, 2), heads=2):
    return [dict(layer=i, head=h, queries=queries, density=0.1, visible=100., keys_scored=read, values_read=read / 2)
            for i in layers for h in range(heads)]


def counted(registry, model):
    "The counters of layer 1."
    names = "decoded_tokens", "visible_keys", "keys_read", "values_read"
    labels = dict(model_name=model, layer="1")
    return [registry.get_sample_value(f"sparse_nb:{name}_total", labels) for name in names]


def test_counters_grow_by_what_came():
    registry = CollectorRegistry()
    meter = Meter("a", registry)
    assert meter.add([]) == ""
    said = meter.add(rows(5, 10., [1]) + rows(5, 30., [2]))
    assert said == ("sparse_nb: 5 decoded tokens, read 20.0% of the keys and 10.0% of the values they see; keys by "
                    "layer: 10.0% (layer 1) to 30.0% (layer 2)")
    assert counted(registry, "a") == [5, 1000, 100, 50] and meter.add(rows(5, 10., [1])) == ""
    meter.add(rows(8, 10., [1]))
    assert counted(registry, "a") == [8, 1600, 160, 80]
    meter.add(rows(2, 10., [1]))  # a worker that was started anew
    assert counted(registry, "a") == [10, 2000, 200, 100]
    unknown = dict(values_read=float("nan"))  # as SANTA's on a GPU, and what vAttention reads there
    assert "of the keys they see; keys by layer" in Meter("c", registry).add([x | unknown for x in rows(1, 10.)])
    unknown["keys_scored"] = float("nan")
    said = Meter("d", registry).add([x | unknown for x in rows(1, 10.)])
    assert said.endswith("of which the workers cannot know what they read") and "nan" not in said
    assert counted(registry, "c") == [1, 200, 20, None]
    known = Meter("e", registry)
    known.add(rows(2, 100.))  # all below the crossover, and read; then one more, of which the worker cannot know
    known.add([x | dict(values_read=float("nan")) for x in rows(3, 100.)])
    assert counted(registry, "e") == [3, 600, 600, 200]
    Meter("b", registry).add(rows(1, 20.))
    assert counted(registry, "b") == [1, 200, 40, 20] and counted(registry, "a")[0] == 10


def engine(given, rows, errored=False, client=0):
    "A mock of vLLM's server engine, that counts how often its workers are asked."
    class Engine:
        vllm_config = config(given)
        model_config, engine_core = SimpleNamespace(served_model_name="mock"), SimpleNamespace(client_index=client)
        asked = printed = 0
        async def do_log_stats(self): self.printed += 1
        async def collective_rpc(self, method):
            self.asked += 1
            assert method == "sparse_nb_stats"
            if isinstance(rows, Exception): raise rows
            return rows
    Engine.errored = errored
    for _ in range(2): follow(Engine)
    return Engine()


def test_a_server_asks_its_workers_when_it_prints(caplog):
    caplog.set_level("INFO", "vllm.sparse_nb")
    asked = engine(dict(decode="topk"), [rows(3, 10., layers=[0]), rows(3, 10., layers=[1])])
    for _ in range(2): asyncio.run(asked.do_log_stats())
    assert (asked.printed, asked.asked) == (2, 2) and caplog.text.count("3 decoded tokens") == 1
    for other in (engine(None, rows(3, 10.)), engine(dict(decode="topk"), [], errored=True),
                  engine(dict(decode="topk"), [], client=1)):
        asyncio.run(other.do_log_stats())
        assert (other.printed, other.asked) == (1, 0)
    broken = engine(dict(decode="topk"), RuntimeError("no such method"))
    asyncio.run(broken.do_log_stats())
    assert broken.printed == 1 and "the workers do not give any: no such method" in caplog.text
