"""Every result file: which function measures it, which file it becomes, and what it holds.

A measurement is a function of one argument, the runner's `benchmarks.recorder.Recorder`: it adds rows to it (most by
`measure_row`) and returns what `meta` says beside machine and command. One that writes its file itself returns None.
"""
import importlib
from collections.abc import Callable
from typing import NamedTuple


class Entry(NamedTuple):
    "What a result file is, and where its function is."
    path: str        # "module:function"
    file: str        # below benchmarks/results, or, with a folder, below the clone; {gpu} stands for the machine's name
    what: str        # one line
    gpu: bool = True # is a GPU needed for anything but the quick form?

    def load(self) -> Callable:
        "The function. Raises ImportError where its module is missing."
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name)


_SPEED = {  # name -> module of benchmarks, what it holds
    "decode": ("decode", "a decode step of SANTA and of the dense baselines"),
    "exact": ("attention", "one query that reads all its keys"),
    "gather": ("attention", "attention over chosen rows"),
    "host": ("attention", "rows from host memory"),
    "blocks": ("tiles", "attention over chosen blocks"),
    "choose": ("attention", "steps that choose keys, launch by launch"),
    "paged": ("paged", "decode steps over a cache in pages, beside keys that lie side by side"),
    "batch": ("batch", "one layer that decodes for 64 sequences at once: dense kernels, and a tenth of the keys"),
    "audit": ("attention", "an audit of a step, by the reference"),
    "cache_lines": ("launches", "a step after a cache full of written lines, and of lines that were read"),
    "santa_steps": ("attention", "SANTA's kernels, step by step"),
    "vattention_launches": ("launches", "vAttention's kernels, launch by launch"),
    "saap_launches": ("launches", "SAAP's kernels, launch by launch, and its index"),
    "sketch_walk_launches": ("launches", "Sketch&Walk's kernels, launch by launch"),
    "sketch_walk_tiles": ("tiles", "Sketch&Walk's kernels, with other tiles"),
    "sketch_walk_tiles_walk": ("tiles", "a walk over the blocks of a prompt"),
    "prefill": ("prefill", "a prompt: ours, dense baselines, and launches"),
    "generate": ("generate", "a whole model, token by token"),
    "first_token": ("end_to_end", "a whole model's first token"),
    "answers": ("answers", "right answers that every method costs a model, what it reads and its error", False),
    "table": ("table", "every method at one configuration: speed and answers, composed from the other files", False),
}
_ANSWERS = {  # name -> module of experiments, what it holds, is a GPU needed?
    "santa_pocket": ("santa_pocket", "the pocket model's answers with SANTA", True),
    "vattention_pocket": ("vattention_pocket", "the pocket model's answers with vAttention, and its guarantee", True),
    "vattention_smollm2": ("configs.vattention_smollm2",
                           "vAttention's answers on SmolLM2, and texts that it writes", True),
    "two_models": ("configs.two_models", "every method on the pocket model and on SmolLM2", True),
    "real_model": ("real_model", "every method on a model of 1.5 billion weights: answers, reads, ideas", False),
    "santa_budgets": ("santa_budgets", "SANTA's draws against right answers of GSM8K and MMLU, on the same model",
                      True),
    "paper_tables": ("paper_tables", "the papers' tables of answers, and LongPPL, on the same model", True),
    "delta": ("configs.delta", "corrections of a sparse prefill on both models: prose and answers", True),
    "delta_bases": ("configs.delta", "corrections of streaming, HiP and MInference: the pocket model's answers, prose",
                    False),
    "saap": ("configs.saap", "SAAP's partitions, ranks, tails and routers on both models", True),
    "sketch_walk": ("configs.sketch_walk", "ways to choose blocks on both models: answers and losses", True),
    "eviction": ("configs.eviction", "the pocket model's answers with H2O and SnapKV", False),
    "presets": ("configs.presets", "methods as published and close to published: the pocket model's answers", False),
    "prose": ("prose", "bits per byte of long texts of five genres, read and decoded with less", False),
    "delta_parts": ("archive.delta_parts", "several tangents an anchor on both models' prose", False),
    "predictors": ("archive.predictors", "what predictors find in short and in long prompts of the pocket model",
                   False),
    "qwen_heads": ("archive.qwen_heads", "queries, keys and values of three heads of Qwen with biased keys", False),
    "saap_heads": ("archive.saap_heads", "what clusters catch of the attention of the pocket model's heads", False),
    "saap_heads_smollm2": ("archive.saap_heads", "the same for SmolLM2 beside the pocket model, without networks",
                           False),
    "saap_guarantee": ("archive.saap_guarantee",
                     "how often a guarantee on top of SAAP is broken, head by head, on both models", False),
    "saap_variants": ("archive.saap_variants", "variants of SAAP's query network, heads of the pocket model", False),
    "santa_schedule": ("archive.santa_schedule", "samples for each layer of the pocket model: learned, or not", False),
    "santa_schedule_jobs": ("archive.santa_schedule",
                            "samples for each layer of the pocket model, learned on the workers of Ray", False),
    "santa_schedule_printed": ("archive.santa_schedule",
                               "samples for each layer of the pocket model, learned by Algorithm 1 as printed", False),
    "santa_schedule_smollm2": ("archive.santa_schedule", "the same for SmolLM2", True),
    "santa_schedule_smollm2_jobs": ("archive.santa_schedule",
                                    "samples for each layer of SmolLM2, learned on the workers of Ray", True),
    "sketch_walk_rules": ("archive.sketch_walk_rules", "rules for blocks that were tried on SmolLM2: losses",
                          False),
    "sketch_walk_rules_prompts": ("archive.sketch_walk_rules",
                                  "rules for the lists of prompts that were tried on the pocket model", False),
    "pocket_model": ("train.pocket_model", "the pocket model and its scores", True),
    "hash_networks": ("train.hash_networks", "the hash functions of the pocket model", True),
    "saap_partition": ("train.saap_partition", "the partition of the pocket model's keys, its router and its factors",
                       False),
}
_FILES = {"table": "table.json",  # those that are not of a name
          "vattention_launches": "{gpu}_vattention.json", "pocket_model": "runs/pocket",
          "vattention_smollm2": "{gpu}_vattention_witness.json",  # made when SmolLM2 was called witness, as those below
          "saap_heads_smollm2": "{gpu}_saap_heads_witness.json",
          "santa_schedule_smollm2": "{gpu}_santa_schedule_witness.json",
          "santa_schedule_smollm2_jobs": "{gpu}_santa_schedule_witness_jobs.json",
          "qwen_heads": "experiments/data/qwen_heads.safetensors",
          "hash_networks": "sparse_nb/pocket_methods/hash_attention.safetensors",
          "saap_partition": "sparse_nb/pocket_methods/saap.safetensors"}

def _entry(name, folder, module, what, gpu=True):
    return Entry(f"{folder}.{module}:{name}", _FILES.get(name, f"{{gpu}}_{name}.json"), what, gpu)

REGISTRY = {name: _entry(name, "benchmarks", *row) for name, row in _SPEED.items()}
REGISTRY |= {name: _entry(name, "experiments", *row) for name, row in _ANSWERS.items()}
