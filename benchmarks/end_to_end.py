"""A whole model with random weights, from end to end: its cache filled with a prompt, the time of each token, and how
long it takes to read a prompt exactly, by a window, and with the window's corrections"""
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparse_nb.bench import quartiles
from sparse_nb import Method, Streaming
from sparse_nb.delta import Delta
from sparse_nb.methods.flex_prefill import FlexPrefill
from sparse_nb.methods.vertical_slash import VerticalSlash
from sparse_nb.sketch_walk import SketchWalk
from benchmarks.machine import machine
from benchmarks.recorder import Recorder, read_record


LLAMA = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8, vocab_size=128256, max_position_embeddings=1048576,
             rope_parameters=dict(rope_type="default", rope_theta=5e5))  # Llama-3.1-8B
TINY = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, max_position_embeddings=4096)


class Ranks(NamedTuple):
    "The processes that share a model, each with a GPU of its own."
    rank: int = 0  # number of this one
    count: int = 1

    def any(self, x):
        "Is it so in any of them? All have to ask."
        if self.count == 1: return bool(x)
        found = torch.tensor(int(bool(x)))
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return bool(found)

def bytes_here(*tensors: torch.Tensor) -> int:
    "What this process holds of them."
    return sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)

def weight_bytes(model) -> int:
    "Bytes of weights that a token reads: all but the embedding, of which it reads a row, unless the head shares it."
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return bytes_here(*model.parameters()) - (0 if table is head else bytes_here(table))

def random_model(shape: Mapping, device: str, ranks: Ranks = Ranks(), dtype: torch.dtype = torch.bfloat16):
    "A Llama of this shape with random weights."
    from transformers import AutoModelForCausalLM, LlamaConfig
    torch.manual_seed(0)
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device(device): model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if ranks.count == 1: return model
    from transformers.distributed import DistributedConfig
    given = dict(config=config, state_dict=model.cpu().state_dict(), dtype=dtype) # a part would hold all of it
    return type(model).from_pretrained(None, **given, distributed_config=DistributedConfig(tp_plan="auto")).eval()


class Filled(NamedTuple):
    "Keys and values of a prompt, from which every way goes on."
    ids: torch.Tensor # the prompt [B, n + 1], whose last token has no key yet
    keys: list        # of each layer [B, G, room, D]
    values: list      # likewise
    how: str          # "read" or "drawn"

    @property
    def n(self): return self.ids.shape[1] - 1

    def static(self, model):
        "A static cache that holds them, and shares their memory: what is written behind them counts for nobody."
        from transformers import StaticCache
        class Passing(StaticCache):  # as one of `generate`'s own, which is dropped after the answer
            _is_user_defined = property(lambda self: False, lambda self, given: None)
        cache = Passing(config=model.config, max_cache_len=self.keys[0].shape[2])
        for layer, k, v in zip(cache.layers, self.keys, self.values):
            layer.lazy_initialization(k[:, :, :0], v[:, :, :0])
            layer.keys, layer.values = k, v
            for x in k, v: torch._dynamo.mark_static_address(x)
            layer.cumulative_length.fill_(self.n)
        return cache

    def growing(self, model):
        "A growing cache that holds them; it takes memory of its own with its first token."
        from transformers import DynamicCache
        cache = DynamicCache(config=model.config)
        for layer, k, v in zip(cache.layers, self.keys, self.values):
            layer.lazy_initialization(k, v)
            layer.keys, layer.values = k[:, :, :self.n], v[:, :, :self.n]
        return cache

    def offloaded(self, model):
        "One that transformers keeps in host memory."
        from transformers import DynamicCache
        cache = DynamicCache(config=model.config, offloading=True)
        for i, (k, v) in enumerate(zip(self.keys, self.values)): cache.update(k[:, :, :self.n], v[:, :, :self.n], i)
        return cache


@torch.no_grad()
def fill(
    model,                   # a transformers decoder
    input_ids: torch.Tensor, # [B, n + 1]
    room: int,               # tokens that the cache can hold, at least
    read: bool = True,       # read the prompt? Else keys and values are drawn
    ranks: Ranks = Ranks(),  # which of the heads are here
) -> Filled:
    "Keys and values of all tokens but the last."
    from transformers import DynamicCache
    config, (rows, n) = model.config, (len(input_ids), input_ids.shape[1] - 1)
    shape = rows, config.num_key_value_heads // ranks.count, -(-room // 64) * 64, config.head_dim
    new = lambda: [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(config.num_hidden_layers)]
    keys, values = new(), new()
    if not read:
        torch.manual_seed(ranks.rank)
        for x in keys + values: x[:, :, :n].normal_()
        return Filled(input_ids, keys, values, "drawn")
    fastest = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    for b in range(rows):
        cache = DynamicCache(config=config)
        with sdpa_kernel(fastest, set_priority=True):
            model.base_model(input_ids=input_ids[b:b + 1, :n], past_key_values=cache, use_cache=True)
        for layer, k, v in zip(cache.layers, keys, values):
            k[b:b + 1, :, :n], v[b:b + 1, :, :n] = layer.keys, layer.values
            layer.keys = layer.values = None
    return Filled(input_ids, keys, values, "read")


def _clock(marks, held, tokens):
    "A stopping criterion that marks when each token ends, and writes down what the device holds then."
    from transformers import StoppingCriteria, StoppingCriteriaList
    class Clock(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            if ids.is_cuda:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record(torch.cuda.current_stream(ids.device))
            else: marks.append(time.perf_counter())
            held.append(torch.cuda.memory_allocated(ids.device) if ids.is_cuda else 0)
            return torch.full((len(ids),), len(marks) > tokens + 4, device=ids.device)
    return StoppingCriteriaList([Clock()])

def _between(marks):
    "Microseconds from each mark to the next."
    if isinstance(marks[0], float): return [1e6 * (b - a) for a, b in zip(marks, marks[1:])]
    marks[-1].synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in zip(marks, marks[1:])]

def token_times(
    model,                          # a transformers decoder
    input_ids: torch.Tensor,        # prompts [B, N]
    tokens: int = 32,               # to time, after four that are not
    session: Mapping | None = None, # arguments of `sparse_nb.hf.sparsify`; None: the model alone
    **settings,                     # of `generate`
) -> tuple: # microseconds of each token (list), the tokens [B, 4 + tokens], bytes that the device holds at the last one
    "Generate greedily and take the time of each token. Raises as `sparsify` and `generate`."
    from sparse_nb.hf import sparsify
    marks, held, most = [], [], tokens + 5
    with nullcontext() if session is None else sparsify(model, **session):
        out = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=most,
                             min_new_tokens=most, do_sample=False, stopping_criteria=_clock(marks, held, tokens),
                             **settings)
    return _between(marks)[4:], out[:, input_ids.shape[1]:][:, :tokens + 4], held[-1]


@dataclass(frozen=True)
class Nothing(Method):
    "Attention that returns its queries."
    decode = None

    def prefill(self, q, k, v, *, seed=None, scale=None, kv_start=None):
        "The queries."
        return q

def reading_ways(window: int = 2048, gamma: int = 64, tail: int = 128, densities: Sequence = (0.1, 0.2)) -> dict:
    "What is compared."
    def delta(correction): return Delta(window=window, gamma=gamma, tail=tail, correction=correction)
    return {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
            "streaming": Streaming(sinks=4, window=window), "Eq. 6": delta("delta"), "tangent": delta("tangent"),
            **{f"Sketch&Walk {x:.0%}": SketchWalk(density=x, pool="mean", refine=1, tail=0) for x in densities},
            **{f"Sketch&Walk {x:.0%}, refined": SketchWalk(density=x, tail=tail) for x in densities},
            "FlexPrefill": FlexPrefill(), "vertical-slash": VerticalSlash(500, 1500), "no attention": Nothing()}

@torch.no_grad()
def time_first_token(
    model,                   # a transformers decoder
    input_ids: torch.Tensor, # prompt [1, N]
    way,                     # one of `reading_ways`
) -> tuple:                  # microseconds, number of the token
    "Read a prompt in one piece, and take the time until the first token is known."
    from sparse_nb.hf import sparsify
    with sdpa_kernel(way) if isinstance(way, SDPBackend) else sparsify(model, prefill=way):
        if input_ids.is_cuda: torch.cuda.synchronize()
        start = time.perf_counter()
        token = int(model(input_ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return 1e6 * (time.perf_counter() - start), token


LENGTHS = (32768, 3), (131072, 1)  # tokens of the prompt, runs of each way, by turns

@torch.no_grad()
def bench_first_token(recorder: Recorder, *, lengths=LENGTHS, shape: Mapping = LLAMA, ways: Mapping | None = None,
                      limit_s: float = 400) -> dict: # what meta says
    "Measure every way at every length; after each the result is written, with what the file held of other lengths."
    ways, say, model = reading_ways() if ways is None else ways, recorder.say, random_model(shape, recorder.device)
    about = machine(recorder.device) | dict(
        shape=dict(shape), dtype="bfloat16", seed=0, weights_bytes=bytes_here(*model.parameters()),
        methods={name: m.to_json() for name, m in ways.items() if isinstance(m, Method)})
    say(f"{about['weights_bytes'] / 1e9:.1f} GB of weights after {recorder.seconds():.0f} s")
    old = read_record(recorder.out) if recorder.out.exists() else dict(meta={}, rows=[])
    known, own = [dict(date=old["meta"]["date"]) | row for row in old["rows"]], []
    for n, runs in lengths:
        if recorder.seconds() > limit_s:
            say(f"n={n}: not measured, the time is over")
            continue
        ids = torch.randint(1, shape["vocab_size"], (1, n), generator=torch.Generator().manual_seed(0))
        ids, times = ids.to(model.device), {name: [] for name in ways}
        warm = ["no attention"] if own else ways  # kernels are compiled once; memory is taken anew
        for run in range(-1, runs):
            for name in [*times] if run >= 0 else warm:
                try: took = time_first_token(model, ids, ways[name])[0]
                except torch.OutOfMemoryError:
                    say(f"n={n}, {name}: not measured, out of memory")
                    del times[name]
                    continue
                if run >= 0: times[name].append(took)
        for name, found in times.items():
            own.append(dict(way=name, n=n, runs=runs, date=about["date"]) | quartiles(found)._asdict())
            say(f"n={n}, {name}: {own[-1]['median_us'] / 1e6:.2f} s, {recorder.seconds():.0f} s")
        recorder.rows = [row for row in known if row["n"] not in {x["n"] for x in own}] + own
        recorder.write(**about)
    return about

def first_token(recorder):
    "A whole model's first token in every way; a tiny model in the quick form."
    if not recorder.quick: return bench_first_token(recorder)
    ways = reading_ways(32, 8, 8)
    if not recorder.gpu: del ways["cuDNN"]
    return bench_first_token(recorder, lengths=((300, 2), (310, 1)), shape=TINY, ways=ways)
