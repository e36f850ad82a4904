"Tiny random models, methods and networks for them, what they write, and stand-ins for a GPU's graphs"
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparse_nb.attention import fold_in
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.quest import Quest
from sparse_nb.core.registry import CLASSES, METHODS, method_class
from sparse_nb.hash_attention import PARTS
from sparse_nb.hf import attention_override
from sparse_nb.models import cache as cache_room, graphs, replay
from sparse_nb.pocket import byte_tokenizer
from sparse_nb.saap import save_partition
from sparse_nb.santa import Santa
from inputs import GREEDY, IDS

OLD = Version(transformers.__version__) < Version("5.20")  # of its faults, tests say which they meet

SMALL = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2,
             max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)

def rope(**kwargs): return dict(rope_parameters=dict(rope_type="default", rope_theta=1e4) | kwargs)

FAMILIES = {
    "llama": ("Llama", {}),
    "llama3 scaling": ("Llama", rope(rope_type="llama3", factor=4.0, original_max_position_embeddings=64,
                                     low_freq_factor=1.0, high_freq_factor=4.0)),
    "yarn": ("Llama", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral, window": ("Mistral", dict(sliding_window=16)),
    "qwen2, window": ("Qwen2", dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    "qwen3, key norm": ("Qwen3", dict(head_dim=16)),
    "gemma2, capped": ("Gemma2", dict(head_dim=16, sliding_window=16, attn_implementation="eager")),
    "gemma3, window": ("Gemma3Text", dict(head_dim=16, sliding_window=16)),
    "phi3, fused": ("Phi3", {}),
    "phi, partial": ("Phi", rope(partial_rotary_factor=0.5)),
    "gpt-neox, partial, fused": ("GPTNeoX", rope(partial_rotary_factor=0.25)),
    "cohere, interleaved": ("Cohere", {}),
    "cohere2, layers without rope": ("Cohere2", dict(sliding_window=16, num_hidden_layers=4)),
    "glm, partial, interleaved": ("Glm", dict(head_dim=16)),
    "smollm3, layers without rope": ("SmolLM3", dict(num_hidden_layers=4)),
    "granite, own scale": ("Granite", dict(attention_multiplier=0.3)),
    "gpt-oss, sinks": ("GptOss", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)),
}
REFUSED = {"gemma2, capped": "softcap", "gpt-oss, sinks": "s_aux"}

def whole_layers(model):
    "Layers whose mask has no sliding window"
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if getattr(config, "sliding_window", None)
                                                     else "full_attention"] * config.num_hidden_layers
    return [i for i, kind in enumerate(kinds) if kind != "sliding_attention"]

def build(family):
    torch.manual_seed(0)
    name, settings = FAMILIES[family]
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers,
        name + "Config")(**SMALL | settings)).eval()

TWO, FOUR = dict(layer_types=["sliding_attention", "full_attention"]), dict(num_hidden_layers=4,
    num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2)
GEMMA3N = FOUR | dict(head_dim=16, sliding_window=16, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
                      laurel_rank=4, intermediate_size=[64] * 4, activation_sparsity_pattern=[0.0] * 4)

class Letters:
    "A tokenizer that writes token i as a character and never a line break"
    def decode(self, ids, **kwargs): return "".join(chr(0x4E00 + i) for i in ids)

def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=64,
        bos_token_id=1, eos_token_id=2)).eval()

def save_llama(folder, vocabulary=None, **settings):
    "A tiny random Llama that reads bytes."
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2,
                 max_position_embeddings=4096, bos_token_id=tokenizer.bos_token_id, eos_token_id=None)
    config = transformers.LlamaConfig(vocab_size=vocabulary or len(tokenizer), **sizes | settings)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)

FOLDER = tempfile.TemporaryDirectory()

@lru_cache
def random_maps(size=16, heads=6, groups=2, layers=3, planes=False):
    "A file of random networks, or, with `planes`, of random hyperplanes, the same for queries and keys"
    g = torch.Generator().manual_seed(size)
    def network(n):
        if not planes:
            return (torch.randn(n, size, 64, generator=g) * size**-0.5, torch.randn(n, 64, generator=g),
                    torch.randn(n, 64, 32, generator=g) / 8, torch.randn(n, 32, generator=g))
        drawn, eye = torch.randn(size, 32, generator=torch.Generator().manual_seed(5)), torch.eye(32)
        return tuple(x.repeat(n, *[1] * x.ndim)
                     for x in (torch.cat([drawn, -drawn], 1), torch.zeros(64), torch.cat([eye, -eye]), torch.zeros(32)))
    path = Path(FOLDER.name) / f"{heads}-{groups}-{size}-{layers}-{planes}.safetensors"
    save_file({f"{layer}.{part}": x.half() for layer in range(layers)
               for part, x in zip(PARTS, (*network(groups), *network(heads)))}, path)
    return str(path)

@lru_cache
def random_clusters(size=16, heads=4, groups=2, clusters=6):
    "A file of random centroids and networks for `build('llama')`, whose keys are divided after RoPE."
    g = torch.Generator().manual_seed(size)
    r = lambda *shape: torch.randn(*shape, generator=g)
    parts = {f"{i}.{name}": x for i in range(2) for name, x in dict(
        centroids=r(groups, clusters, size), mlp_w1=r(heads, size, 5), mlp_b1=r(heads, 5), mlp_w2=r(heads, 5, clusters),
        mlp_b2=r(heads, clusters)).items()}
    path = Path(FOLDER.name) / f"clusters-{heads}-{groups}-{size}.safetensors"
    save_partition(parts, path, build("llama"), kmeans="plain", before_rope=False)
    return str(path)

# settings of methods for prompts of some hundred tokens, where defaults read all of them or an argument is needed ...
SETTINGS = {
    "streaming": dict(sinks=4, window=128), "topk": dict(budget=0.1), "topp": dict(mass=0.9),
    "uniform": dict(samples=0.5), "quest": dict(budget=0.25), "double_sparsity": dict(budget=0.25),
    "hash_attention": dict(budget=0.25), "adamas": dict(budget=0.25), "snapkv": dict(budget=0.5),
    "h2o": dict(budget=0.5), "sketch_walk": dict(density=0.3, dense_layers=0, tail=0),
    "delta": dict(window=64, gamma=16), "saap": dict(budget=0.25), "one_list": dict(guess=Adamas(budget=0.25)),
    "then": dict(keys=Quest(0.5), values=Santa(samples=64))}
BLOCKS = dict(block=32)
TINY = {            # ... and for prompts of 40 tokens and heads of 16 numbers, over these
    "streaming": dict(sinks=2, window=6), "topk": dict(budget=7), "topp": dict(mass=0.5), "uniform": dict(samples=8),
    "santa": dict(samples=6), "vattention": dict(sinks=1, window=4, topk=8, base=8, eps=0.9, delta=0.2),
    "quest": dict(budget=12, page=4), "double_sparsity": dict(budget=8, channels=4), "adamas": dict(budget=8),
    "hash_attention": dict(budget=8, maps=random_maps(16, 4)), "one_list": dict(guess=Quest(12, page=4)),
    "magicpig": dict(bits=3, tables=6, sinks=1, window=3), "reformer": dict(bins=4, sinks=1, window=2),
    "kdeformer": dict(bins=4, sinks=1, window=2), "h2o": dict(budget=12), "snapkv": dict(budget=12, window=4),
    "saap": dict(budget=4, sinks=2, window=8, clusters=4), "sketch_walk": dict(block=32, dense_layers=0),
    "delta": dict(window=8, gamma=8, sinks=2, tail=0),
    "vertical_slash": dict(vertical=16, slash=16, sinks=2, window=8) | BLOCKS,
    "flex_prefill": dict(gamma=0.5, min_keys=32) | BLOCKS, "xattention": dict(density=0.3, stride=4) | BLOCKS,
    "hip": dict(stages=((16, 64), (4, 32)), sinks=8, window=32) | BLOCKS,
    "oracle_blocks": dict(density=0.3) | BLOCKS, "random_blocks": dict(density=0.3) | BLOCKS,
    "then": dict(keys=Quest(16, page=4), values=Santa(samples=5))}

def method_of(name, tiny=False):
    "A method of the table, as a person would write it for a short prompt; `tiny`: for 40 tokens, heads of 16 numbers."
    given = SETTINGS.get(name, {}) | (TINY.get(name, {}) if tiny else {})
    return method_class(METHODS[name].path.partition(":")[2])(**given)

def methods_that(role, heads, size):
    "Class name -> method of the table, for small models of these heads with two groups"
    own = dict(DoubleSparsity=dict(channels=4), HashAttention=dict(maps=random_maps(size, heads)),
               SketchWalk=dict(dense_layers=0))
    return {name: method_class(name)(**own.get(name, {})) for name in CLASSES if hasattr(method_class(name), role)}

def ids_of(model, ids=IDS, **kwargs):
    settings = GREEDY | dict(attention_mask=torch.ones_like(ids)) | kwargs
    return model.generate(ids, **settings)[:, ids.shape[1]:]

def step_by_step(model, method, ids, new, seed=0):
    "Greedy tokens of one sequence: the prompt exactly, then each query and head by itself, with streams written out"
    cache, exact = DynamicCache(config=model.config), ALL_ATTENTION_FUNCTIONS["sdpa"]
    def attend(module, query, key, value, mask, scaling=None, **kwargs):
        if query.shape[2] > 1 or kwargs.get("sliding_window") is not None:
            return exact(module, query, key, value, mask, scaling=scaling, **kwargs)
        streams = fold_in(fold_in(seed, 0), module.layer_idx, torch.arange(query.shape[1]), key.shape[2] - 1)[None]
        return method.decode(query, key, value, scale=scaling, seed=streams if method.random
                             else None).transpose(1, 2), None
    with torch.no_grad(), attention_override(model, attend, mask="sdpa"):
        found = [model(ids, past_key_values=cache).logits[:, -1].argmax(-1)]
        for _ in range(new - 1): found.append(model(found[-1][:, None], past_key_values=cache).logits[:, -1].argmax(-1))
    return torch.stack(found, 1)

def forget(model):
    "Compile anew."
    torch.compiler.reset()
    model.__dict__.pop("_compiled_call", None)

def compiling(backend="eager"):
    "How `generate` is to compile its steps: into one graph, on a CPU, too."
    config = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config

def taped(found):
    "Stands for `captured`: what is recorded runs again, from and to the same places, and adds a number to `found`."
    def tape(run, device, pools=None):
        first = []
        def play():
            out = run()
            found.append(len(found))
            if not first: first.append(out)
            for x, y in zip(tree_leaves(first[0]), tree_leaves(out)):
                if isinstance(x, torch.Tensor): x.copy_(y)
            return first[0]
        return play
    return tape

def play_on_a_cpu(monkeypatch):
    "Recorded parts run again, from and to the same places; a number for each. Rooms are of 64 keys."
    found = []
    monkeypatch.setattr(replay, "captured", taped(found))
    monkeypatch.setattr(cache_room, "SPARE", 0)
    for name in ("can_graph", "on_a_gpu"): monkeypatch.setattr(graphs, name, lambda x: True)
    return found
