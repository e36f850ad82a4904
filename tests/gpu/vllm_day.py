"""What a method does inside vLLM on one CUDA GPU; facts go to a file, a JSON object a line, as soon as each is known:

    python tests/gpu/vllm_day.py pocket FILE [--budget 180]   tokens of the pocket model against those of `sparsify`
    python tests/gpu/vllm_day.py qwen FILE [--budget 240]     the same of Qwen2.5-Coder-1.5B, which was fetched
    python tests/gpu/vllm_day.py speed FILE [--budget 350]    ms per token of an 8B shape, dummy weights, beside vLLM's
    python tests/gpu/vllm_day.py qwen_speed FILE [--budget 300]  the same of Qwen2.5-Coder's shape, with 32,768 keys
    python tests/gpu/vllm_day.py whole FILE [--budget 110]    the first part with prompts that a method reads whole
    python tests/gpu/vllm_day.py prompt FILE [--budget 260]   seconds to the first token of such, beside vLLM's
    python tests/gpu/vllm_day.py two FILE [--budget 330]      the first part on two GPUs that share the heads
    python tests/gpu/vllm_day.py two_speed FILE [--budget 200]  the third part on two such GPUs
    python tests/gpu/vllm_day.py record FILE PART.jsonl...    what these parts have found, as a record of the book

It needs vLLM 0.26.0 (`sparse_nb.vllm.serving.RELEASES`) and VLLM_ENABLE_V1_MULTIPROCESSING=0,
VLLM_ALLOW_INSECURE_SERIALIZATION=1, without FlashInfer also VLLM_USE_FLASHINFER_SAMPLER=0. One engine serves all
methods: layers are switched, and decode graphs captured anew. What fails is written down, and the next goes on.
"""
import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from importlib import metadata
from pathlib import Path

START = time.time()
sys.path.insert(0, str(Path(__file__).parents[2]))  # the clone, for `benchmarks`


def say(**fact):
    line = json.dumps(dict(part=ARGS.part, **ARGS.pages, **fact, at_s=round(time.time() - START, 1)))
    print(line, flush=True)
    with open(ARGS.file, "a") as f: f.write(line + "\n")


def attempt(name, run, *given):
    "The result of a measurement; what goes wrong is written down, and the rest goes on."
    left = ARGS.budget - (time.time() - START)
    if left < 8: return say(what=name, skipped=f"{left:.0f} s left")
    try: return run(*given)
    except Exception as error:
        say(what=name, error=f"{type(error).__name__}: {error}"[:600], tail=traceback.format_exc()[-2500:])


def switch(worker, line, dense, page, layers, prefill=None, crossover=None):
    "Another method in the running engine, with new graphs, and one for prompts; None: vLLM's own attention."
    import torch
    from sparse_nb.vllm.serving import read_serving
    settings = {name: x for name, x in dict(decode=line, prefill=prefill).items() if x}
    settings = settings | dict(dense_layers=dense) if settings else dict(decode="Exact", dense_layers=[*range(layers)])
    if crossover: settings["crossover"] = crossover
    serving = dataclasses.replace(read_serving(settings, layers, "cuda"), page=page)
    context = worker.vllm_config.compilation_config.static_forward_context
    for layer in context.values():
        impl = layer.impl
        impl.serving, impl.number, impl.method, impl.sums = serving, None, None, None
        if impl.read is not None: impl.read.clear()
    runner, began = worker.model_runner, time.time()
    for groups in runner.attn_groups:
        for group in groups: group.get_metadata_builder(0).reset_layers()
    manager = runner.cudagraph_manager
    if manager.needs_capture():
        torch.cuda.synchronize()
        manager.graphs.clear()
        manager.pool = torch.cuda.graph_pool_handle()  # PyTorch drops a pool with its last graph
        manager._graphs_captured = False
        runner.capture_model()
    for layer in context.values():
        if layer.impl.seen is not None: layer.impl.seen.counts.clear()
    return dict(capture_s=round(time.time() - began, 1), graphs=len(manager.graphs), mode=str(manager.cudagraph_mode))


def layout(worker):
    "How a layer's cache lies in memory."
    layers = worker.vllm_config.compilation_config.static_forward_context
    layer = next(iter(layers.values()))
    return dict(shape=list(layer.kv_cache.shape), strides=list(layer.kv_cache.stride()), impl=type(layer.impl).__name__,
                worker=type(worker).__name__, runner=type(worker.model_runner).__module__)


def started(llm, model, began):
    "Say how the engine has come up; from here on each fact says how its pages lie."
    import torch
    found = llm.collective_rpc(layout)[0]
    ARGS.pages = dict(block=ARGS.block, layout="HND" if found["strides"][1] > found["strides"][2] else "NHD")
    say(what="engine", model=model, seconds=round(time.time() - began, 1), gpu=torch.cuda.get_device_name(), **found)


def generate(llm, prompts, new):
    from vllm import SamplingParams
    how = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
    said = llm.generate([dict(prompt_token_ids=x) for x in prompts], how, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in said], [x.num_cached_tokens for x in said]


def two_gpus():
    "How an engine shares the heads between GPUs: by NCCL alone."
    return dict(tensor_parallel_size=ARGS.gpus, disable_custom_all_reduce=ARGS.gpus > 1)


def equal(a, b):
    "How many answers are equal, and where the first differs."
    first = [next((i for i, (x, y) in enumerate(zip(p, q)) if x != y), None) for p, q in zip(a, b)]
    return dict(equal=sum(x is None for x in first), of=len(a), first_difference=first)


# the pocket model

LENGTHS = ("needle", 900), ("multikey", 700), ("kv", 380), ("needle", 1300), ("multikey", 1030)
REAL = ("ruler_niah_single_2", 4096), ("ruler_niah_multikey_1", 8192), ("ruler_vt", 4096), ("ruler_fwe", 2048), \
    ("kv", 4096)
NEW = 16
LINES = "Saap(budget=0.1, clusters=32, window=64)", "Quest(budget=0.1)", "TopK(budget=0.1)", "Santa(samples=32)", \
    "Streaming(sinks=4, window=64)", "OneList(guess=Quest(budget=0.1))", "SketchWalk(density=0.1)", \
    "HashAttention(budget=0.1)", "VAttention(sinks=16, window=32, predictor=HashAttention())"
WHOLE = "Exact", "Saap(budget=1.0)", "Quest(budget=1.0)", "TopK(budget=1.0)", "Santa(samples=8192)"


def expected(model, line, prompts, prefill=None, crossover=None):
    import torch
    from sparse_nb import sparsify
    from sparse_nb.core.settings import read_method
    def written(prompt):
        found = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=NEW, do_sample=False)
        return found[0, len(prompt):].tolist()
    if line is None and prefill is None: return [written(x) for x in prompts]
    methods = {name: read_method(x) for name, x in dict(decode=line, prefill=prefill).items() if x}
    with sparsify(model, **methods, dense_layers=[0], seed=0, crossover=crossover):
        return [written(x) for x in prompts]


def pocket_part():
    import torch
    from sparse_nb import pocket, tasks
    prompts = [tasks.prompt_tokens(tasks.make(task, n, seed=i))[1] for i, (task, n) in enumerate(LENGTHS)]
    prompts += [prompts[1][:385], prompts[3][:193]]  # the last step of these reads one token of the prompt
    tokens_part(pocket.path(), lambda: pocket.load("cuda", torch.bfloat16)[0], prompts, LINES, 1536, 192)
    if ARGS.gpus == 1: attempt("refusals", refused)


def qwen_part():
    import torch
    from sparse_nb import tasks
    from sparse_nb.grid import task_of
    from sparse_nb.models import fetch
    model, tokenizer = fetch.load("qwen", "cuda", torch.bfloat16)
    made = [tasks.make(task_of(name)[0], n, seed=i, tokenizer=tokenizer, chat=True, **task_of(name)[1])
            for i, (name, n) in enumerate(REAL)]
    prompts = [tasks.prompt_tokens(x, tokenizer, True)[1] for x in made]
    tokens_part(fetch.path("qwen"), lambda: model, prompts, LINES[:-2], 9216, 2048)  # no networks of HashAttention


def tokens_part(path, load, prompts, lines, length, chunk):
    "Tokens of a model inside vLLM against those of `sparsify`; prompts are read in chunks."
    from vllm import LLM
    layers = json.loads((Path(path) / "config.json").read_text())["num_hidden_layers"]
    mixed = {str(i): LINES[1] for i in range(1, layers - 2)}
    mixed |= {str(layers - 2): LINES[0], str(layers - 1): LINES[3]}  # boxes, lists, draws
    began = time.time()
    llm = LLM(model=str(path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length, seed=0, **two_gpus(),
              max_num_batched_tokens=chunk, max_num_seqs=3, block_size=ARGS.block, disable_log_stats=False,
              gpu_memory_utilization=0.1, kv_cache_memory_bytes=4 << 30, enable_prefix_caching=True,
              compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 3]),
              additional_config=dict(sparse_nb=dict(decode=mixed, crossover=length)))
    started(llm, Path(path).name, began)
    model = load()
    def one(line, want, crossover=None):
        return told(f"{line}, crossover {crossover}" if crossover else line or "vLLM's own", want,
                    **llm.collective_rpc(switch, args=(line, [0], 16, layers, None, crossover))[0])
    def told(name, want, **made):
        began = time.time()
        llm.reset_prefix_cache()
        tokens, _ = generate(llm, prompts, NEW)
        took = time.time() - began
        rows = [x for w in llm.collective_rpc("sparse_nb_stats") for x in w]
        stats = {x: rows[0][x] for x in ("queries", "density", "keys_scored", "values_read")} if rows else None
        again, cached = generate(llm, prompts, NEW)
        say(what="tokens", method=name, **equal(tokens, want), seconds=round(took, 2), stats=stats,
            hits_equal=equal(again, tokens), cached=cached, tokens=tokens[0], **made)
        return tokens
    want = attempt("transformers' tokens", expected, model, None, prompts)
    attempt("as started", told, "as started, all below the crossover", want)
    dense = attempt("own tokens", one, None, want)
    for line in lines: attempt(line, lambda: one(line, expected(model, line, prompts)))
    least = sorted(map(len, prompts))[len(prompts) // 2] + NEW // 2  # one of the requests reaches it while it decodes
    for line in lines[:2]:
        attempt(f"{line}, crossover", lambda: one(line, expected(model, line, prompts, crossover=least), least))
    for line in WHOLE: attempt(line, lambda: one(line, dense))  # against vLLM's own


def refused():
    from sparse_nb import pocket
    from vllm.engine.arg_utils import EngineArgs
    for line, more in (("h2o", {}), ("VAttention", {}), ("Saap(router='centroid')", {}),
                       ("Quest", dict(dtype="float32")), ("Quest", dict(block_size=48)),
                       ("Quest(page=32)", dict(block_size=16))):
        try:
            given = dict(model=str(pocket.path()), dtype="bfloat16", skip_tokenizer_init=True) | more
            EngineArgs(**given, additional_config=dict(sparse_nb=dict(decode=line))).create_engine_config()
            say(what="refusal", method=line, more=str(more), refused=None)
        except (TypeError, ValueError) as error:
            say(what="refusal", method=line, more=str(more), refused=str(error))


# whole prompts

QUEST = "Quest(budget=0.1)"
READERS = ("Delta(window=16, gamma=32, tail=8)", "SketchWalk(block=32, density=0.1, tail=4)",
           "Delta(window=32, gamma=64, correction='delta', tail=8)")


def read_by(llm):
    "Tokens of prompts in the last layer: those that a method has read, and others."
    rows = [x for w in llm.collective_rpc("sparse_nb_stats") for x in w]
    return next(((x["prompt_tokens"], x["dense_tokens"]) for x in rows[::-1]), None)


def whole_part():
    import torch
    from vllm import LLM
    from sparse_nb import pocket, tasks
    prompts = [tasks.prompt_tokens(tasks.make(task, n, seed=i))[1] for i, (task, n) in enumerate(LENGTHS)]
    began = time.time()
    llm = LLM(model=str(pocket.path()), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1536, seed=0,
              enable_chunked_prefill=False, max_num_batched_tokens=2048, max_num_seqs=3, block_size=ARGS.block,
              gpu_memory_utilization=0.1, kv_cache_memory_bytes=4 << 30, enable_prefix_caching=False,
              compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 3]),
              additional_config=dict(sparse_nb=dict(decode=QUEST, prefill=READERS[0])))
    started(llm, "pocket", began)
    model = pocket.load("cuda", torch.bfloat16)[0]
    dense = expected(model, None, prompts)
    def one(line, prefill):
        made, want = llm.collective_rpc(switch, args=(line, [0], 16, 6, prefill))[0], expected(model, line, prompts,
                                                                                              prefill)
        tokens, _ = generate(llm, prompts, NEW)
        say(what="whole", prefill=prefill, method=line or "vLLM's own", **equal(tokens, want), read=read_by(llm),
            tokens_of_prompts=sum(map(len, prompts)), as_dense=equal(want, dense)["equal"], **made)
    for prefill in (None, *READERS):
        for line in (None, QUEST): attempt(f"{prefill}, {line}", one, line, prefill)


# ms a token

SHAPE = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336,
             num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=128256,
             max_position_embeddings=262144, rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu", bos_token_id=0,
             eos_token_id=1, tie_word_embeddings=False, dtype="bfloat16", torch_dtype="bfloat16")
QWEN = SHAPE | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=1536, intermediate_size=8960,
                    num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, vocab_size=151936,
                    rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True)
KEYS, SMALL, FEW = 131072, 32768, 8192
CASES = dict(speed={KEYS: (1,), SMALL: (8,), FEW: (1, 8)}, two_speed={KEYS: (1,), SMALL: (8, 32)},
             qwen_speed={SMALL: (1, 8, 32)})  # part -> keys -> sequences
SPED = "Saap(budget=0.1)", "SketchWalk(density=0.1)", "Saap(budget=0.05)", "Exact", "Santa(samples=128)", \
    "Streaming(sinks=4, window=0.1)", "OneList(guess=Quest(budget=0.1))", "Quest(budget=0.1)", "TopK(budget=0.1)", \
    "HashAttention(budget=0.1, maps='random')", \
    "VAttention(eps=0.3, delta=0.1, topk=0.05, base=0.025, plugin='plain', " \
    "predictor=HashAttention(budget=0.05, maps='random'))"


def steps_of(engine, prompts, new):
    "Decode new tokens of each prompt, step by step."
    from vllm import SamplingParams
    how = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
    for i, x in enumerate(prompts): engine.add_request(f"{time.time()} {i}", dict(prompt_token_ids=x), how)
    while engine.has_unfinished_requests():
        engine.step()
        yield


def ms(engine, prompts, new=96, timed=64):
    "Of the last steps, in which all decode (lists of SAAP are made anew in some), and of the first ones."
    took, began = [], time.time()
    for _ in steps_of(engine, prompts, new):
        took.append(1000 * (time.time() - began))
        began = time.time()
    last = took[-timed - 1:-1]
    return dict(ms_a_step=round(statistics.median(last), 3), mean=round(statistics.mean(last), 3),
                slowest=round(max(last), 3), steps=len(took), first_steps=[round(x, 2) for x in took[:4]])


def kernels_of(engine, prompts, skipped=16, watched=8):
    "Milliseconds of a step in each kernel, the longest first."
    import torch
    steps = steps_of(engine, prompts, skipped + watched + 2)
    for _ in range(skipped): next(steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(watched): next(steps)
        torch.cuda.synchronize()
    for _ in steps: pass
    found = sorted(((x.device_time_total / watched / 1000, x.key, x.count) for x in seen.key_averages()), reverse=True)
    return [dict(kernel=key[:80], ms=round(took, 4), launches=count / watched) for took, key, count in found[:24]]


def speed_part():
    import torch
    from benchmarks.generate import random_networks
    from vllm import LLM
    folder, sizes = Path(tempfile.mkdtemp()), CASES[ARGS.part]
    (folder / "config.json").write_text(json.dumps(ARGS.shape))
    mixed = {str(i): "Quest(budget=0.1)" for i in range(1, ARGS.layers)} | {"0": "Santa"}
    most, maps = max(sizes[SMALL]), random_networks(ARGS.shape, folder / "networks.safetensors")
    began = time.time()
    llm = LLM(model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0, **two_gpus(),
              max_model_len=max(sizes) + 256, max_num_batched_tokens=16384, max_num_seqs=most, block_size=ARGS.block,
              gpu_memory_utilization=0.85, enable_prefix_caching=True,
              compilation_config=dict(cudagraph_capture_sizes=[1, 2, 4, 8, 32][:4 + (most > 8)]),
              additional_config=dict(sparse_nb=dict(decode=mixed)))
    started(llm, ARGS.shape["model_type"], began)
    generator = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(10, 128000, (n,), generator=generator).tolist()
    cases = {f"{n} x {size}": prompts[:size] for n, few in sizes.items()
             for prompts in [[ids(n) for _ in range(max(few))]] for size in few}
    def first(prompts, name):
        began = time.time()
        generate(llm, prompts, 1)
        say(what="prompt", case=name, seconds=round(time.time() - began, 2))
    for name, prompts in cases.items(): attempt(f"prompts, {name}", first, prompts, name)
    def one(line, wanted=cases, crossover=None):
        own = line and line.replace("random", maps)
        made = llm.collective_rpc(switch, args=(own, [0], 16, ARGS.layers, None, crossover))[0]
        name = f"{line}, crossover {crossover}" if crossover else line or "vLLM's own"
        for case, prompts in wanted.items():
            say(what="speed", method=name, case=case, **ms(llm.llm_engine, prompts), **made)
        if ARGS.gpus == 1 and not crossover and line in (None, *SPED[:2], SPED[5]):
            say(what="profile", method=name, kernels=kernels_of(llm.llm_engine, cases[f"{max(sizes)} x 1"]))
    short = {name: prompts for name, prompts in cases.items() if name.startswith(f"{FEW} ")}
    for line in (None, *SPED[:6]): attempt(line, one, line)
    for line in SPED[:2] if short else (): attempt(f"{line}, crossover", one, line, short, 2 * FEW)
    for line in SPED[6:]: attempt(line, one, line)
    if ARGS.gpus > 1: return  # workers have memory of their own
    say(what="memory", peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 1),
        reserved_gb=round(torch.cuda.memory_reserved() / 1e9, 1))


# the first token

FAST = "pool='mean', refine=1"
PROMPTS = None, "Delta", f"SketchWalk(density=0.1, {FAST})", f"SketchWalk({FAST})", "SketchWalk"


def chunked(llm, tokens):
    "Let the scheduler of the running engine cut prompts, or not for None."
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.scheduler_config.enable_chunked_prefill = tokens is not None
    scheduler.max_num_scheduled_tokens = tokens or scheduler.scheduler_config.max_num_batched_tokens


def prompt_part():
    import torch
    from vllm import LLM
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(ARGS.shape))
    began = time.time()
    llm = LLM(model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
              max_model_len=KEYS + 256, max_num_batched_tokens=KEYS + 256, enable_chunked_prefill=False, max_num_seqs=2,
              block_size=ARGS.block, gpu_memory_utilization=0.85, enable_prefix_caching=False,
              compilation_config=dict(cudagraph_capture_sizes=[1, 2]),
              additional_config=dict(sparse_nb=dict(prefill="Delta")))
    started(llm, "8B", began)
    generator = torch.Generator().manual_seed(0)
    ids = {n: torch.randint(10, 128000, (n,), generator=generator).tolist() for n in (SMALL, KEYS)}
    def first(line, tokens=None):
        llm.collective_rpc(switch, args=(None, [], 0, ARGS.layers, line))
        chunked(llm, tokens)
        generate(llm, [ids[SMALL]], 1)  # compiles
        for n in (SMALL, KEYS):
            took = []
            for _ in range(2):
                began = time.time()
                generate(llm, [ids[n]], 1)
                took.append(round(time.time() - began, 3))
            say(what="first token", prefill=line or "vLLM's own", tokens=n, chunks=tokens or "none", seconds=took,
                read=read_by(llm), peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 1))
    for line in PROMPTS[:2]: attempt(f"first token, {line}", first, line)
    attempt("first token, chunks of 16384", first, None, 16384)
    for line in PROMPTS[2:]: attempt(f"first token, {line}", first, line)
    attempt("first token, chunks of 8192", first, None, 8192)


# the record

TIMED = "speed", "two_speed", "qwen_speed", "prompt"  # parts whose rows are compared, so that they are of one run


def same(row):
    "What tells rows of a part apart."
    return tuple(str(row.get(x)) for x in ("part", "what", "method", "prefill", "more"))


def join(out, files):
    "Write what parts have found as a record; what was not found anew keeps its rows, of timed parts all or none."
    from benchmarks.recorder import read_record, write_record
    facts = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    parts = {x["part"]: x["machine"] for x in facts if x["what"] == "start"}
    new = [x for x in facts if x["what"] not in ("start", "end") and not {"skipped", "error"} & x.keys()]
    for x in facts:
        if "error" in x: print(f"left out: {x['part']}, {x['what']}: {x['error']}", file=sys.stderr)
    old, found = read_record(out) if out.exists() else dict(meta={}, rows=[]), {same(x) for x in new}
    rows = [x for x in old["rows"] if not (x["part"] in parts and x["part"] in TIMED or same(x) in found)] + new
    dates = old["meta"].get("dates", {}) | {part: x["date"] for part, x in parts.items()}
    meta = parts[facts[-1]["part"]] | dict(dates=dates, command="python tests/gpu/vllm_day.py PART FILE")
    write_record(out, meta, [{name: x for name, x in row.items() if name != "at_s"} for row in rows])


def began():
    "Which machine, and which vLLM, a part runs on."
    from benchmarks.machine import machine
    say(what="start", machine=machine() | dict(vllm=metadata.version("vllm")))


PARTS = dict(pocket=pocket_part, qwen=qwen_part, speed=speed_part, whole=whole_part, prompt=prompt_part,
             two=pocket_part, two_speed=speed_part, qwen_speed=speed_part)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[*PARTS, "record"])
    parser.add_argument("file", type=Path)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--budget", type=float, default=200)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--layers", type=int)
    ARGS = parser.parse_args()
    if ARGS.part == "record": sys.exit(join(ARGS.file, ARGS.files))
    ARGS.gpus, ARGS.pages, ARGS.shape = 2 if ARGS.part.startswith("two") else 1, {}, SHAPE
    if ARGS.part == "qwen_speed": ARGS.shape = QWEN
    ARGS.layers = ARGS.layers or ARGS.shape["num_hidden_layers"]
    ARGS.shape = ARGS.shape | dict(num_hidden_layers=ARGS.layers)
    attempt("start", began)
    attempt(ARGS.part, PARTS[ARGS.part])
    say(what="end")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may wait for ever
