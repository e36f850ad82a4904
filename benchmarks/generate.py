"""What a token takes in a model with each method, what of it is weights, attention and the rest, and the fastest
dense attention in the same loop"""
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.magicpig import MagicPIG
from sparse_nb.methods.one_list import OneList
from sparse_nb.methods.quest import Quest
from sparse_nb.bench import Protocol, bandwidth, captured, cold_times, quartiles
from sparse_nb import Exact, Method, Streaming, TopK
from sparse_nb.eviction import SnapKV
from sparse_nb.grid import needs_queries
from sparse_nb.hash_attention import BITS, HashAttention
from benchmarks.end_to_end import (
    LLAMA, TINY, Filled, Ranks, bytes_here, fill, random_model, token_times, weight_bytes)
from benchmarks.machine import machine
from benchmarks.recorder import Recorder, read_record, record_path
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vattention import VAttention


SHARED = "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size" # of a shape, by processes


def ranks_of(shape: Mapping, device: str) -> Ranks:
    """The processes of `torchrun`, which are joined if they are not yet; without it there is one.

    Raises ValueError for a shape that so many cannot share.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_torchelastic_launched()): return Ranks()
    rank, count, here = (int(os.environ[x]) for x in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    for what in SHARED:
        if shape[what] % count: raise ValueError(f"shape must have a {what} that {count} processes can share out, got "
                                                 f"{shape[what]}")
    if count > 1 and not dist.is_initialized():
        own = torch.device(device, here) if device == "cuda" else None
        if own: torch.cuda.set_device(own)
        dist.init_process_group("cpu:gloo,cuda:nccl" if own else "gloo", device_id=own, timeout=timedelta(minutes=5))
    return Ranks(rank, count)


PAIR = "the model alone", "a session that does nothing"
EXACT, NO_KEYS, HOST = "exact kernel", "no keys", ", host"
OFFLOADED = "the model alone, offloaded by transformers"
DENSE_WAYS = PAIR[0], EXACT  # baselines of a loop
TUNED = {"triton.cudagraphs": True, "coordinate_descent_tuning": True, # of Inductor
         "realize_opcount_threshold": 4, # what the rows of a product share is computed once, not for each of them
         "triton.enable_pdl": True}      # a kernel starts while the one before it ends

class Way(NamedTuple):
    "How tokens are written."
    session: dict | None   # arguments of `sparsify`; None: the model alone
    cache: str = "growing" # method of `Filled` that makes it

def generate_methods() -> dict: # name -> method
    """The methods that `bench_generate` takes without a word.

    Networks of HashAttention are "random": `bench_generate` draws them for the model. vAttention reads what its
    guarantee takes; "10 %" is what it takes of 131,072 keys of the model with random weights.
    """
    signs = partial(HashAttention, maps="random")
    return {"SANTA, 128 samples": Santa(samples=128),
            "SANTA, 128 samples, int8 keys": Santa(samples=128, keys="int8"),
            "vAttention, eps 0.1": VAttention(eps=0.1, delta=0.1, topk=0.05, base=0.025, predictor=signs(0.05)),
            "vAttention, 10 %": VAttention(eps=0.15, delta=0.1, topk=0.05, base=0.025, plugin="plain",
                                           predictor=signs(0.05)),
            "Quest, 10 %": Quest(0.1), "Double Sparsity, 10 %": DoubleSparsity(0.1), "Adamas, 10 %": Adamas(0.1),
            "HashAttention, 10 %": signs(0.1), "MagicPIG, 8 bits": MagicPIG(8, 32), "SAAP, 5 %": Saap(0.05),
            "SAAP, 10 %": Saap(0.1), "Sketch&Walk, 10 %": SketchWalk(density=0.1),
            "Quest, 10 %, one list": OneList(Quest(0.1)), "window, 10 %": Streaming(sinks=128, window=0.1),
            "oracle top-k, 10 %": TopK(budget=0.1), "SnapKV, 10 %": SnapKV(0.1)}

def named(methods: Mapping) -> dict: # name -> method
    "Methods by what `generate_methods` calls them, others by the name that they have here."
    known = {repr(x): name for name, x in generate_methods().items()}
    return {known.get(repr(x), name): x for name, x in methods.items()}

def generate_ways(methods: Mapping | None = None, static: bool = False, offload: bool = False) -> dict:
    """What `bench_generate` compares.

    Steps of a static cache are recorded and played back, but for those of the model alone. A name that ends in `HOST`
    is the way of the same name with its cache in host memory.
    """
    cache, more = ("static", dict(replay=True)) if static else ("growing", {})
    ways = {PAIR[0]: Way(None, cache), EXACT: Way(dict(decode=Exact(), **more), cache)}
    if not static: ways[PAIR[1]] = Way({}, cache)
    if offload and not static: ways[OFFLOADED] = Way(None, "offloaded")
    for name, method in (generate_methods() if methods is None else methods).items():
        ways[name] = Way(dict(decode=method, **more), cache)
        if offload and not static: ways[name + HOST] = Way(dict(decode=method, offload=True), cache)
    return ways

def must_read(way: Way) -> bool:
    "Does its method need the queries of the prompt, so that it has to read the prompt itself?"
    return needs_queries((way.session or {}).get("decode"))


@torch.no_grad()
def asked_queries(
    model,                     # a transformers decoder
    filled: Filled,
) -> list:                     # of each layer [B, H, 1, D]
    "What the next token asks, with exact attention in every layer."
    from sparse_nb.hf import sparsify
    found = []
    class Asked(Method):
        def decode(self, q, k, v, **settings):
            found.append(q.clone())
            return Exact().decode(q, k, v, **settings)
    with sparsify(model, decode=Asked()):
        model(input_ids=filled.ids[:, -1:], attention_mask=torch.ones_like(filled.ids), use_cache=True,
              past_key_values=filled.static(model))
    return found


def _tell(state, filled, i, q, asks, fixed):
    """Let a state observe the prompt, and then its last key; to be `fixed`, it gets the room of the cache in between.

    One that `asks` observes drawn queries, too, but of the last key q, that of the next token.
    """
    k, v, n = filled.keys[i], filled.values[i], filled.n - 1
    drawn = dict(q=torch.randn_like(q.expand(-1, -1, n, -1))) if asks else {}
    state.append(k[:, :, :n], v[:, :, :n], **drawn)
    if not fixed: return state.append(k[:, :, n:n + 1], v[:, :, n:n + 1])
    state.to_static(k.shape[2])
    state.look_at(k[:, :, :n], v[:, :, :n])
    state.write(k, v, torch.full((1,), n, device=k.device), **(dict(q=q) if asks else {}))


def _attentions(model, filled, way, layers):
    "A call for the next token in `layers` layers from all over the model, how many, how many are exact instead"
    from sparse_nb.hf import Streams, attention_layers, by_layer, part_here
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    modules, (B, _, room, _) = attention_layers(model), filled.keys[0].shape
    methods = by_layer("decode", (way.session or {}).get("decode"), modules, "decode")
    dense = [i for i, m in methods.items() if isinstance(m, Exact)] if len(set(map(type, methods.values()))) > 1 else []
    others = [i for i in modules if i not in dense]
    chosen = others[len(others) // layers // 2::max(1, len(others) // layers)][:layers]
    q = dict(zip(modules, asked_queries(model, filled)))
    torch.manual_seed(0)
    seeds = Streams(0).heads(modules[chosen[0]], *q[chosen[0]].shape[:2], model.device)
    states = {i: m.new_state() for i in chosen if (m := methods[i]) is not None}
    asks = needs_queries((way.session or {}).get("decode"))
    static, fixed = way.cache == "static", way.cache == "static" or asks
    k, v = ([x if fixed else x[:, :, :filled.n] for x in of] for of in (filled.keys, filled.values))
    for i, state in states.items():
        if hasattr(state, "part"): state.part = part_here(modules[i], q[i].shape[1])
        if state is not None: _tell(state, filled, i, q[i], asks, fixed)
    ends = torch.tensor([[0], [filled.n]], device=model.device).expand(2, B).contiguous()
    sees = dict(zip(("kv_start", "kv_end"), ends)) if fixed else {}
    mask = (torch.arange(room, device=model.device) < filled.n).expand(B, 1, 1, room).contiguous() if static else None
    own = lambda i: ALL_ATTENTION_FUNCTIONS["sdpa"](modules[i], q[i], k[i], v[i], mask, scaling=modules[i].scaling)[0]
    def call(**more):
        step, out = methods[chosen[0]].new_step() if states else None, []
        for i in chosen:
            if methods[i] is None: out.append(own(i))
            else:
                given = dict(state=states[i], step=step) | sees | more
                given = {name: x for name, x in given.items() if x is not None}
                out.append(methods[i].decode(q[i], k[i], v[i], seed=seeds[i], scale=modules[i].scaling, **given))
        return out
    return call, len(chosen), len(dense)

@torch.no_grad()
def attention_time(model, filled: Filled, way: Way, layers: int = 4) -> tuple:
    "Time the attention of a token alone. Raises whatever the method raises where no graph can hold it."
    call, count, dense = _attentions(model, filled, way, layers)
    own = (way.session or {}).get("decode") is None
    read = None if own else float(torch.stack([x.density.mean() for _, x in call(return_stats=True)]).mean())
    if not filled.ids.is_cuda: return quartiles(cold_times(call, Protocol(1, 1, 0))).median_us / count, dense, read
    call()                                  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error") # a capture that fails half-way would leave the process unusable
    try: call()
    finally: torch.cuda.set_sync_debug_mode("default")
    replay, _ = captured(call)
    return quartiles(cold_times(replay, Protocol(3, 20), device="cuda")).median_us / count, dense, read


TRIED = Protocol(warmup=3, runs=20, buffer_mb=256, left="read", fills=16)
CLOCK = f"after reading {TRIED.fills} times {TRIED.buffer_mb} MB"

@contextmanager
def cold_tuning():
    "While this holds, Inductor times the kernels that it tries by `cold_times`, after a fill that outlasts a launch."
    from torch._inductor.runtime.benchmarking import benchmarker
    def clock(call, *_, **__): return quartiles(cold_times(call, TRIED, device="cuda")).median_us / 1000
    own = vars(benchmarker).get("benchmark_gpu")
    benchmarker.benchmark_gpu = clock
    try:
        with torch.compiler.config.patch(cache_key_tag=CLOCK): yield  # launches that another clock chose are not taken
    finally:
        if own is None: vars(benchmarker).pop("benchmark_gpu", None)
        else: benchmarker.benchmark_gpu = own


def random_networks(shape: Mapping, path: Path) -> str:
    "Write networks of HashAttention for a model of this shape: the time does not depend on what they have learnt."
    from safetensors.torch import save_file
    H, G = shape["num_attention_heads"], shape["num_key_value_heads"]
    D, M, draw = shape["hidden_size"] // H, 64, torch.Generator().manual_seed(0)
    sizes = dict(w1=(D, M), b1=(M,), w2=(M, BITS), b2=(BITS,))
    drawn = lambda *size: torch.randn(size, generator=draw) / 10
    save_file({f"{i}.{side}_{part}": drawn(heads, *size) for part, size in sizes.items()
               for side, heads in (("k", G), ("q", H)) for i in range(shape["num_hidden_layers"])}, str(path))
    return str(path)

def with_networks(method: Method, maps: str) -> Method:
    'The method with these networks wherever it says "random".'
    inner = {f.name: with_networks(x, maps) for f in fields(method) if isinstance(x := getattr(method, f.name), Method)}
    if getattr(method, "maps", None) == "random": inner["maps"] = maps
    return replace(method, **inner) if inner else method

def measure_way(model, filled: Filled, way: Way, tokens: int, tuned: bool = False) -> tuple:
    "Time the tokens of a way. On a GPU a static cache has its step compiled anew."
    from transformers import CompileConfig
    session = None if way.session is None else way.session | dict(seed=0)
    if way.cache == "static": torch._dynamo.reset()
    gc.collect()
    if filled.ids.is_cuda: torch.cuda.empty_cache()
    own = dict(compile_config=CompileConfig(mode=None, options=TUNED)) if tuned else {}
    if not must_read(way): own |= dict(past_key_values=getattr(filled, way.cache)(model))
    elif way.cache == "static": own |= dict(cache_implementation="static")
    with cold_tuning() if tuned else nullcontext():
        found = token_times(model, filled.ids, tokens, session, **own)
    return *found, "by itself" if must_read(way) else filled.how


def _place(row):
    return tuple(row.get(x, y) for x, y in (("way", ""), ("n", 0), ("batch", 1), ("static", False), ("gpus", 1)))

def add_baselines(rows: list) -> list:
    """Say of each row its fastest dense baseline, and its speedup over that.

    The baseline of a way with its cache in host memory is the cache that transformers offloads; others have one whose
    step was compiled alike, on as many GPUs. A row that has a baseline keeps it: it is one of its own record.
    """
    alike = lambda row: (*_place(row)[1:], row.get("tuned", False), row.get("compiler"))
    for row in rows:
        if row.get("rival"): continue
        able = [x for x in rows if alike(x) == alike(row)
                and x["way"] in ([OFFLOADED] if row["way"].endswith(HOST) else DENSE_WAYS)]
        rival = min(able, key=lambda x: x["median_us"], default=None)
        row.update(rival=rival and rival["way"], ratio=rival and round(rival["median_us"] / row["median_us"], 4))
    return rows

def add_parts(rows: list, meta: Mapping) -> list:
    """Say of each row with a `kernel_us` what of a token is weights, attention and the rest; None: not known.

    A row that says what its weights take keeps it: it is of its own record.
    """
    weights = round(meta["weights_read_bytes"] / max(meta["copy_gb_s"], meta["read_gb_s"]) / 1e3, 1)
    layers, rows_known = meta["shape"]["num_hidden_layers"], [row for row in rows if "kernel_us" in row]
    exact = {_place(row)[1:]: row["kernel_us"] for row in rows_known if row["way"] == EXACT}
    for row in rows_known:
        kernel, of_exact = row["kernel_us"], exact.get(_place(row)[1:]) if row["exact_layers"] else 0.0
        known = None not in (kernel, of_exact)
        own = row.setdefault("weights_us", weights)
        row["attention_us"] = round((layers - row["exact_layers"]) * kernel + row["exact_layers"] * of_exact,
                                    1) if known else None
        row["rest_us"] = round(row["median_us"] - own - row["attention_us"], 1) if known else None
    return rows


def join_records(records: list) -> dict:
    """One record of several: of rows of the same way, length, batch, cache and number of GPUs the last stands.

    Every row says the date of its record. `meta` is the last one's, with those before it under `earlier`, rows that
    do not stand under `replaced`, those that others disturbed under `disturbed`, and what failed and was never measured
    under `failed`. Raises ValueError for GPUs or shapes that differ.
    """
    aside = "replaced", "disturbed"
    metas = [meta for x in records for meta in (*x["meta"].get("earlier", []), x["meta"])]
    for what in "gpu", "shape":
        if any(meta[what] != metas[0][what] for meta in metas):
            raise ValueError(f"{what} must be the same in all records, got {[meta[what] for meta in metas]}")
    rows, (replaced, disturbed) = {}, ([row for x in records for row in x["meta"].get(name, [])] for name in aside)
    for row in [dict(date=x["meta"]["date"]) | row for x in records for row in x["rows"]]:
        if old := rows.pop(_place(row), None): replaced.append(old)
        rows[_place(row)] = row
    *earlier, last = [{name: x for name, x in meta.items() if name not in ("earlier", *aside)} for meta in metas]
    failed = {_place(x): x for meta in earlier for x in meta.get("failed", []) if _place(x) not in rows}
    failed |= {_place(x): x for x in last["failed"]}
    kept = dict(replaced=replaced, earlier=earlier, disturbed=disturbed)
    return dict(meta=last | dict(failed=list(failed.values())) | {name: x for name, x in kept.items() if x},
                rows=list(rows.values()))


def _taken(methods, maps, static, offload, baselines, device, alone):
    "What of `generate_ways` is asked for and can be done here; `alone`: the model without a session, too?"
    methods = {name: with_networks(m, maps) for name, m in (generate_methods() if methods is None else methods).items()}
    left_out = set() if baselines else {*PAIR, OFFLOADED, EXACT}
    if device != "cuda": left_out.add(OFFLOADED)
    if not alone: left_out.add(PAIR[0])
    return {name: way for name, way in generate_ways(methods, static, offload).items() if name not in left_out}

def _why(error, most):
    "An error as a line of so many characters."
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"

def _row(model, filled, name, way, runs, tokens, found, kernels, tuned):
    "A row of a way, but for its parts; `found`: what was written in the ways before; `kernels`: time its attention?"
    free = filled.ids.is_cuda and way.cache != "static"
    base = bytes_here(*model.parameters()) + free * bytes_here(*filled.keys, *filled.values)
    times, notes, start = [], {}, time.perf_counter()
    for _ in range(runs):
        of_run, wrote, held, how = measure_way(model, filled, way, tokens, tuned)
        times += of_run
    ready, near = (time.perf_counter() - start - sum(times) / 1e6) / runs, name.removesuffix(HOST)
    same = round(float((wrote == found[near]).double().mean()), 4) if near != name and near in found else None
    found[name], kernel, dense, read = wrote, None, 0, None
    if kernels and near == name:
        try: kernel, dense, read = attention_time(model, filled, way)
        except Exception as error: notes["no_kernel"] = _why(error, 200)
    method = (way.session or {}).get("decode")
    return dict(way=name, n=filled.n, batch=len(wrote), static=way.cache == "static", tuned=tuned, filled=how,
                compiler=TUNED | dict(clock=CLOCK) if tuned else None, replay=bool((way.session or {}).get("replay")),
                runs=runs, **quartiles(times)._asdict(), held_bytes=held - base if held else None, same_tokens=same,
                ready_s=round(ready, 2), kernel_us=None if kernel is None else round(kernel, 2), exact_layers=dense,
                asked="by the model", density=None if read is None else round(read, 4),
                method=None if method is None else method.to_json()) | notes

def _write(recorder, old, meta, rows):
    "Write the record so far: these rows and those of old records."
    every = join_records([*old, dict(meta=meta, rows=rows)])
    recorder.rows = add_baselines(add_parts(every["rows"], meta))
    recorder.write(**every["meta"])

def _said(row):
    "A row as a line."
    parts = [f"n={row['n']}, {row['way']}: {row['median_us'] / 1000:.2f} ms a token"]
    if row["gpus"] > 1: parts.append(f"{row['gpus']} GPUs")
    if row["attention_us"] is not None:
        parts.append(" + ".join(f"{row[x + '_us'] / 1000:.2f} {x}" for x in ("weights", "attention", "rest")))
    if row["ratio"] is not None: parts.append(f"a speedup of {row['ratio']:.2f} over {row['rival']}")
    if row["same_tokens"] is not None: parts.append(f"{row['same_tokens']:.0%} of the tokens as on the device")
    return ", ".join(parts)


def bench_generate(
    *,
    lengths=((32768, 1), (131072, 1)), # (tokens of the prompt, runs of each way)
    methods: Mapping | None = None, # name -> method; None: `generate_methods`
    batch: int = 1,                 # sequences
    static: bool = False,           # with a static cache, for which `generate` compiles the step on a GPU?
    tuned: bool = False,            # compile that step with `TUNED`?
    offload: bool = False,          # with the cache in host memory, too? Not with a static one
    read: int = 131072,             # longest prompt that is read; keys and values of longer ones are drawn
    baselines: bool = True,         # time the dense baselines, and a token without keys that the file lacks? Else the
                                    # file's count
    kernels: bool = True,           # time the attention alone, too?
    tokens: int = 24,               # to time in each run
    shape: Mapping = LLAMA,         # of a Llama
    device: str = "cuda",
    out=None,                       # file ending in .json, or a folder; None: benchmarks/results of the clone
    append: bool = False,           # keep the file's rows of other ways, lengths, batches, caches and numbers of GPUs?
    limit_s: float = 540,           # no way is begun later
    command: str = "",              # for the record
    say: Callable = print,          # told what happens, line by line
) -> Path:                          # the file
    """Measure a whole model with random weights in every one of `generate_ways` and write the record.

    Processes of `torchrun` share the model, each with its GPU, and the first of them writes and speaks. There compiled
    steps of the model alone are left out. Raises ValueError for device "cuda" without one, no sequence, no token, a
    static cache in host memory, tuning without a static cache, and a shape that the processes cannot share.
    """
    recorder = Recorder("generate", record_path("generate", out), quick=device != "cuda")
    for what, least in ("batch", batch), ("lengths", min(n for n, _ in lengths)):
        if least < 1: raise ValueError(f"{what} must be at least 1, got {least}")
    if static and offload: raise ValueError("offload must be False for a static cache, got True")
    if tuned and not static: raise ValueError("tuned must be False without a static cache, got True")
    ranks = ranks_of(shape, device)
    if ranks.rank: say = lambda line: None
    old = [read_record(recorder.out)] if append and recorder.out.exists() else []
    model = random_model(shape, device, ranks)
    maps = random_networks(shape, Path(tempfile.mkdtemp()) / "networks.safetensors")
    alone = not (static and ranks.count > 1 or tuned)  # its tuned step takes 214 ms at 131,072 keys
    ways = _taken(methods, maps, static, offload, baselines, device, alone)
    about = dict(shape=dict(shape), dtype="bfloat16", tokens=tokens, seed=0, command=command, gpus=ranks.count,
                 weights_bytes=bytes_here(*model.parameters()), weights_read_bytes=weight_bytes(model), failed=[])
    meta, rows = machine(device) | about | bandwidth(device, gigabytes=4 if device == "cuda" else 0.01), []
    join_records([*old, dict(meta=meta, rows=[])])  # records that do not go together are refused before the work
    say(f"{meta['weights_bytes'] / 1e9:.1f} GB of weights after {recorder.seconds():.0f} s")
    place = NO_KEYS, 16, batch, static, ranks.count
    known = any(row.get("tuned", False) == tuned and _place(row) == place for x in old for row in x["rows"])
    few = {NO_KEYS: Way(dict(replay=True), "static") if static else Way(None, "growing")}
    for n, runs, asked in [*((n, runs, ways) for n, runs in lengths), (16, 1, few if baselines and not known else {})]:
        ids = torch.randint(1, shape["vocab_size"], (batch, n + 1), generator=torch.Generator().manual_seed(0))
        filled, found = None, {}
        for name, way in asked.items():
            why = "the time is over" if ranks.any(recorder.seconds() > limit_s) else None
            row = dict(way=name, n=n, batch=batch, static=static, tuned=tuned, gpus=ranks.count)
            try:
                if not (why or filled): filled = fill(model, ids.to(device), n + tokens + 8, n <= read, ranks)
                if not why: row |= _row(model, filled, name, way, runs, tokens, found, kernels, tuned)
                if row.get("method"): row["method"] = row["method"].replace(json.dumps(maps), '"random"')
            except Exception as error: why = _why(error, 300)
            if ranks.any(why) and not why: why = "another process failed"
            if why: meta["failed"].append(row | dict(why=why))
            else: rows.append(row)
            if ranks.rank: continue
            _write(recorder, old, meta, rows)
            say(f"n={n}, {name}: not measured, {why}" if why else
                f"{_said(recorder.rows[-1])}, {recorder.seconds():.0f} s")
    return recorder.out


def quick_methods() -> dict: # name -> method
    "Some of `generate_methods`: one that draws, and one with an index."
    return {name: method for name, method in generate_methods().items() if type(method) in (Santa, Quest)}

def generate(recorder):
    "A whole model with a static cache and with a growing one; a tiny model in the quick form."
    given = dict(out=recorder.out, command=recorder.command, say=recorder.say, limit_s=float("inf"))
    static, growing = dict(static=True, lengths=((32768, 1), (131072, 1), (524288, 1))), dict(offload=True, append=True)
    if recorder.quick:
        small = dict(lengths=((200, 1),), tokens=2, shape=TINY, device=recorder.device)
        static, growing = static | small, growing | small | dict(methods=quick_methods())
    bench_generate(**given, **static)
    bench_generate(**given, **growing)


OF_EAGER = 8192, 1.15  # tokens, and times the model alone that a step may take that is not compiled
