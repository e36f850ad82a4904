"""What the backend for CUDA takes of vLLM 0.26.0, in its place: the same names, arguments and layout of the cache, with
attention by the reference. vLLM's own classes need a GPU to be imported."""
import dataclasses
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace

import torch

from sparse_nb.core.exact import attention

AttentionCGSupport = Enum("AttentionCGSupport", "NEVER UNIFORM_SINGLE_TOKEN_DECODE UNIFORM_BATCH ALWAYS")
AttentionType = SimpleNamespace(DECODER="decoder", ENCODER="encoder")


@dataclass
class Spec:
    "Of a block of keys and values: `FullAttentionSpec`."
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    page_size_padded: int | None = None

    @property
    def unpadded_page_size_bytes(self):
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self): return self.page_size_padded or self.unpadded_page_size_bytes

    def cache(self, blocks, layout, device, fill):
        "A cache as vLLM cuts it out of its memory: blocks first, behind each what it is padded with."
        order = dict(NHD=(0, 2, 1, 3), HND=(0, 1, 2, 3))[layout]
        shape = FlashAttentionBackend.get_kv_cache_shape(blocks, self.block_size, self.num_kv_heads, self.head_size)
        inner = [shape[i] for i in order]
        room = self.page_size_bytes // self.dtype.itemsize
        memory = torch.full((blocks * room,), fill, dtype=self.dtype, device=device)
        strides = [room, *torch.empty(inner, device="meta").stride()[1:]]
        return memory.as_strided(inner, strides).permute([order.index(i) for i in range(4)])


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    _seq_lens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None
    _token_to_req_indices_cache: torch.Tensor | None = None

    def replace(self, **other): return dataclasses.replace(self, **other)


class FlashAttentionMetadataBuilder:
    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device
        self.model_config, self.num_heads_q = vllm_config.model_config, vllm_config.heads

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec): return cls._cudagraph_support

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        x = common_attn_metadata
        return SimpleNamespace(num_actual_tokens=x.num_actual_tokens, query_start_loc=x.query_start_loc,
                               seq_lens=x.seq_lens, block_table=x.block_table_tensor, scheduled=not fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class FlashAttentionImpl:
    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
                 kv_sharing_target_layer_name=None, sinks=None):
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.alibi_slopes, self.sinks, self.logits_soft_cap = alibi_slopes, sinks, logits_soft_cap or 0
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.attn_type, self.kv_sharing_target_layer_name = attn_type, kv_sharing_target_layer_name

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        at, size = slot_mapping >= 0, kv_cache.shape[2]
        kv_cache[slot_mapping[at] // size, :, slot_mapping[at] % size] = torch.cat([key, value], 2)[:len(at)][at]

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None):
        step = attn_metadata
        if step is None: return output.fill_(0)
        for i, (begin, end) in enumerate(zip(step.query_start_loc.tolist(), step.query_start_loc.tolist()[1:])):
            if begin == end: continue
            rows = kv_cache[step.block_table[i].long()].transpose(0, 1).flatten(1, 2)[None, :, :step.seq_lens[i]]
            out = attention(query[begin:end].transpose(0, 1)[None], *rows.chunk(2, 3), causal=True, scale=self.scale)
            output[begin:end] = out[0].transpose(0, 1).to(output.dtype)
        return output


class FlashAttentionBackend:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_impl_cls(): return FlashAttentionImpl


class Worker:
    def __init__(self, vllm_config, specs): self.vllm_config, self.specs, self.free = vllm_config, specs, 0

    def get_kv_cache_spec(self): return dict(self.specs)

    def determine_available_memory(self): return self.free

    def initialize_from_config(self, kv_cache_config): self.model_runner = kv_cache_config

    def compile_or_warm_up_model(self): return "times"


def put_in_place(monkeypatch, config, release):
    "Modules of vLLM with these names, until the test is over."
    backends = "vllm.v1.attention.backends"
    parts = {
        "vllm": dict(__version__=release), "vllm.config": dict(get_current_vllm_config=lambda: config),
        "vllm.distributed": dict(get_tensor_model_parallel_rank=lambda: 0,
                                 get_tensor_model_parallel_world_size=lambda: 1), "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.utils": dict(extract_layer_index=lambda name: int(name.split(".")[2])),
        "vllm.v1": {}, "vllm.v1.attention": {}, backends: {}, "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": dict(Worker=Worker),
        "vllm.v1.attention.backend": dict(AttentionCGSupport=AttentionCGSupport, AttentionType=AttentionType),
        f"{backends}.flash_attn": dict(
            FlashAttentionBackend=FlashAttentionBackend, FlashAttentionImpl=FlashAttentionImpl,
            FlashAttentionMetadataBuilder=FlashAttentionMetadataBuilder)}
    for name, names in parts.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("layer", "cuda"): monkeypatch.delitem(sys.modules, f"sparse_nb.vllm.{name}", raising=False)
