"""What was measured, on which machine, by which command: one table, one writer, one reader"""
import importlib
import json
import math
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

import sparse_nb
from sparse_nb.bench import Protocol, bandwidth, captured, cold_times, quartiles
from sparse_nb.device import kernel_device
from benchmarks.baselines import DENSE
from benchmarks.timing import Case, Refused, check_dense


def _version(package):
    try: return metadata.version(package)
    except metadata.PackageNotFoundError: return None

def _driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try: said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError): return None
    return said.split("\n")[0].strip()

def machine(
    device: str = "cuda", # "cuda" or "cpu"
) -> dict:                # gpu ("CPU" for a processor), driver, cuda, cudnn, python, versions of packages or None, date
    "Where and when something is measured."
    gpu = torch.device(device).type == "cuda"
    packages = dict(triton="triton", transformers="transformers", flashinfer="flashinfer-python")
    return dict(gpu=torch.cuda.get_device_name() if gpu else "CPU", driver=_driver() if gpu else None,
                cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version() if gpu else None,
                python=platform.python_version(), torch=torch.__version__,
                **{name: _version(package) for name, package in packages.items()},
                date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))


def write_record(
    path: Path, # file ending in .json; its folder is made where it is missing
    meta: dict, # where the rows come from
    rows: list, # of dicts
) -> Path:      # the file
    "Write meta and rows as JSON, a row a line."
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(map(json.dumps, rows))
    text = '{\n"meta": ' + json.dumps(meta, indent=1) + ',\n"rows": [\n' + lines + "\n]\n}\n"
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    os.replace(path.with_suffix(".part"), path)
    return path

def read_record(
    path: Path,
) -> dict:      # meta, rows
    "A record. Raises OSError where there is no file, ValueError with its name unless it holds meta and rows."
    try: record = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error: raise ValueError(f"{Path(path).name} must be JSON, got {error}") from None
    if not isinstance(record, dict) or not {"meta", "rows"} <= record.keys():
        raise ValueError(f"{Path(path).name} must hold meta and rows")
    return record


class Record(NamedTuple):
    "What a record is, where its function is, and which file it writes."
    path: str        # "module:function"
    file: str        # below benchmarks/results, or, with a folder, below the clone; {gpu} stands for the machine's name
    what: str        # one line
    gpu: bool = True # is a GPU needed for anything but the quick form?

    def load(self) -> Callable: # record(out, *, quick=False, say=print)
        "The function. Raises ImportError where its module is missing."
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name)

RECORDS = {
    "decode": Record("benchmarks.decode:record", "{gpu}_decode.json", "a decode step of SANTA and of dense rivals"),
    "santa_steps": Record("benchmarks.santa_steps:record", "{gpu}_santa_steps.json", "SANTA's kernels, step by step"),
    "vattention_launches": Record("benchmarks.vattention_launches:record", "{gpu}_vattention.json",
                                  "vAttention's kernels, launch by launch"),
    "saap_launches": Record("benchmarks.saap_launches:record", "{gpu}_saap_launches.json",
                            "SAAP's kernels, launch by launch, and its index"),
    "sketch_walk_launches": Record("benchmarks.sketch_walk_launches:record", "{gpu}_sketch_walk_launches.json",
                                   "Sketch&Walk's kernels, launch by launch"),
    "sketch_walk_tiles": Record("benchmarks.sketch_walk_tiles:record", "{gpu}_sketch_walk_tiles.json",
                                "Sketch&Walk's kernels, with other tiles"),
    "sketch_walk_tiles_walk": Record("benchmarks.sketch_walk_tiles:record_walk", "{gpu}_sketch_walk_tiles_walk.json",
                                     "a walk over the blocks of a prompt"),
    "gather": Record("benchmarks.gather:record", "{gpu}_gather.json", "attention over chosen rows"),
    "host": Record("benchmarks.host:record", "{gpu}_host.json", "rows from host memory"),
    "blocks": Record("benchmarks.blocks:record", "{gpu}_blocks.json", "attention over chosen blocks"),
    "generate": Record("benchmarks.generate:record", "{gpu}_generate.json", "a whole model, token by token"),
    "santa_pocket": Record("experiments.santa_pocket:record", "{gpu}_santa_pocket.json",
                           "the pocket model's answers with SANTA"),
    "santa_schedule": Record("experiments.archive.santa_schedule:record", "{gpu}_santa_schedule.json",
                             "samples for each layer of the pocket model: learned, or not", gpu=False),
    "santa_schedule_jobs": Record("experiments.archive.santa_schedule:record_jobs", "{gpu}_santa_schedule_jobs.json",
                                  "samples for each layer of the pocket model, learned on the workers of Ray",
                                  gpu=False),
    "santa_schedule_witness": Record("experiments.archive.santa_schedule:record_witness",
                                     "{gpu}_santa_schedule_witness.json",
                                     "the same for the witness"),
    "santa_schedule_witness_jobs": Record("experiments.archive.santa_schedule:record_witness_jobs",
                                          "{gpu}_santa_schedule_witness_jobs.json",
                                          "samples for each layer of the witness, learned on the workers of Ray"),
    "vattention_pocket": Record("experiments.vattention_pocket:record", "{gpu}_vattention_pocket.json",
                                "the pocket model's answers with vAttention, and its promise"),
    "vattention_witness": Record("experiments.vattention_witness:record", "{gpu}_vattention_witness.json",
                                 "vAttention's answers on the witness, and texts that it writes"),
    "two_models": Record("experiments.two_models:record", "{gpu}_two_models.json",
                         "every method on the pocket model and on the witness"),
}


RECORDS |= {
    "exact": Record("benchmarks.exact:record", "{gpu}_exact.json", "one query that reads all its keys"),
    "cache_lines": Record("benchmarks.cache_lines:record", "{gpu}_cache_lines.json",
                          "a step after a cache full of written lines, and of lines that were read"),
    "audit": Record("benchmarks.audit:record", "{gpu}_audit.json", "an audit of a step, by the reference"),
    "choose": Record("benchmarks.choose:record", "{gpu}_choose.json", "steps that choose keys, launch by launch"),
    "prefill": Record("benchmarks.prefill:record", "{gpu}_prefill.json", "a prompt: ours, dense rivals, and launches"),
    "first_token": Record("benchmarks.first_token:record", "{gpu}_first_token.json", "a whole model's first token"),
    "delta": Record("experiments.delta:record", "{gpu}_delta.json",
                    "corrections of a sparse prefill on both models: prose and answers"),
    "delta_parts": Record("experiments.archive.delta_parts:record", "{gpu}_delta_parts.json",
                          "several tangents an anchor on both models' prose", gpu=False),
    "saap": Record("experiments.saap:record", "{gpu}_saap.json",
                   "SAAP's partitions, ranks, tails and routers on both models"),
    "saap_heads": Record("experiments.archive.saap_heads:record", "{gpu}_saap_heads.json",
                         "what clusters catch of the attention of the pocket model's heads", gpu=False),
    "saap_heads_witness": Record("experiments.archive.saap_heads:record_witness", "{gpu}_saap_heads_witness.json",
                                 "the same for the witness beside the pocket model, without networks", gpu=False),
    "saap_promise": Record("experiments.archive.saap_promise:record", "{gpu}_saap_promise.json",
                           "how often a promise on top of SAAP is broken, head by head, on both models", gpu=False),
    "predictors": Record("experiments.archive.predictors:record", "{gpu}_predictors.json",
                         "what predictors find in short and in long prompts of the pocket model", gpu=False),
    "eviction": Record("experiments.eviction:record", "{gpu}_eviction.json",
                       "the pocket model's answers with H2O and SnapKV", gpu=False),
    "saap_partition": Record("sparse_nb.saap_partition:record", "sparse_nb/pocket_methods/saap.safetensors",
                             "the partition of the pocket model's keys, its router and its factors", gpu=False),
    "sketch_walk": Record("experiments.sketch_walk:record", "{gpu}_sketch_walk.json",
                          "ways to choose blocks on both models: answers and losses"),
    "sketch_walk_rules": Record("experiments.archive.sketch_walk_rules:record", "{gpu}_sketch_walk_rules.json",
                                "rules for blocks that were tried on the witness: losses", gpu=False),
    "sketch_walk_rules_prompts": Record("experiments.archive.sketch_walk_rules:record_prompts",
                                        "{gpu}_sketch_walk_rules_prompts.json",
                                        "rules for the lists of prompts that were tried on the pocket model",
                                        gpu=False),
    "pocket_model": Record("experiments.train.pocket_model:record", "runs/pocket",
                           "the pocket model and its scores"),
    "hash_networks": Record("experiments.train.hash_networks:record",
                            "sparse_nb/pocket_methods/hash_attention.safetensors",
                            "the hash functions of the pocket model"),
}


def _record(name):
    if name not in RECORDS: raise ValueError(f"name must be one of {', '.join(RECORDS)}, got {name!r}")
    return RECORDS[name]

def results() -> Path: # benchmarks/results
    "The folder of the recorded results. Raises FileNotFoundError where the package is not in a clone."
    folder = Path(sparse_nb.__file__).parents[1] / "benchmarks" / "results"
    if not folder.is_dir(): raise FileNotFoundError(f"{folder} is missing: recorded results are in a clone only")
    return folder

def record_path(
    name: str,  # one of `RECORDS`
    out=None,   # a file, or a folder for one; None: its place in the clone
) -> Path:
    "The file that a record is written to. Raises ValueError for an unknown name, FileNotFoundError outside a clone."
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    file = Path(_record(name).file.format(gpu=re.sub("[^a-z0-9]+", "_", gpu.lower()).strip("_")))
    if out is None: return results() / file if len(file.parts) == 1 else results().parents[1] / file
    return Path(out) if Path(out).suffix else Path(out) / file.name

def recorded(
    name: str,   # one of `RECORDS`
    folder=None, # of the files; None: benchmarks/results of the clone
) -> dict:       # GPU -> record
    "All records of one name, by GPU. Raises ValueError for an unknown name and a broken file."
    files = sorted(Path(folder or results()).glob(_record(name).file.format(gpu="*")))
    found = [read_record(path) for path in files]
    return {record["meta"].get("gpu") or record["meta"]["device"]: record for record in found}


def need_gpu(
    name: str, # of the record, for the message
):
    "Raise ValueError without a CUDA device."
    if not torch.cuda.is_available():
        raise ValueError(f"{name}: there is no CUDA device here, and times of anything else are not recorded")

def run_record(
    name: str,             # one of `RECORDS`
    out=None,              # file, or a folder for it; None: its place in the clone, or a new folder for the quick form
    quick: bool = False,   # a small form of the same?
    say: Callable = print, # told what happens, line by line
) -> Path:                 # the file
    """Measure and write a record.

    Without a CUDA device the quick form runs kernels in Triton's interpreter, for whatever imports Triton after this.
    Raises ValueError for an unknown name, and without a CUDA device where one is needed.
    """
    record = _record(name)
    if record.gpu and not quick: need_gpu(name)
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1": kernel_device()
    path = record_path(name, tempfile.mkdtemp() if quick and out is None else out)
    record.load()(path, quick=quick, say=say)
    return path


class Recorder:
    "Rows of a record of this machine. Raises ValueError without a CUDA device, but for the quick form."
    def __init__(
        self,
        name: str,             # of the record
        *,
        quick: bool = False,   # few runs, on a CPU where there is no GPU?
        say: Callable = print, # told what happens, line by line
    ):
        if not quick: need_gpu(name)
        self.command, self.say = f"python -m benchmarks.run {name}" + " --quick" * quick, say
        self.rows, self.began = [], time.perf_counter()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        on_gpu = Protocol(warmup=3, runs=5) if quick else Protocol()
        self.protocol = on_gpu if self.device == "cuda" else Protocol(warmup=1, runs=1, buffer_mb=0)
        self.buffer = self.protocol.buffer(self.device)

    def measure_row(
        self,
        call: Callable,                # returns the tensor that it fills
        check: Callable | None = None, # gets that tensor, returns its error or raises `Refused`: then there is no row
        *,
        plain: Protocol | None = None, # of a call so long that its launches do not count: then it takes no graph
        **row,                         # what the row says beside its times
    ):
        "Check a call, time it, and check what the last replay wrote."
        protocol = plain or self.protocol
        if self.device == "cuda" and not plain: replay, out = captured(call)
        else:
            out = call()
            replay = lambda: out.copy_(call())
        out.fill_(math.nan)
        replay()
        try:
            if check: check(out)
            times = quartiles(cold_times(replay, protocol, device=self.device, buffer=self.buffer))
            error = check(out) if check else None  # of the last replay
        except Refused as why: return self.say(f"{row}: not recorded, {why}")
        if error is not None: row["error"] = float(f"{error:.3g}")
        self.rows.append(row | times._asdict())
        self.say(f"{row}: {times.median_us:.1f} us, {time.perf_counter() - self.began:.0f} s")

    def write(
        self,
        out,     # file ending in .json
        **about, # what else `meta` says
    ) -> Path:   # the file
        "Write the record, with the bandwidths of the machine."
        gpu = self.device == "cuda"
        how = dict(command=self.command, dtype="bfloat16", inputs="Gaussian", mode="graph" if gpu else "eager",
                   l2="cold" if self.buffer.numel() else "warm", runs=self.protocol.runs)
        meta = machine(self.device) | how | about | bandwidth(self.device, gigabytes=4 if gpu else 0.01)
        self.say(f"{out}: {len(self.rows)} rows, {time.perf_counter() - self.began:.0f} s")
        return write_record(out, meta, self.rows)


_RIVALS = "sdpa_cudnn", "sdpa_flash", "flashinfer_tc"

def measure_dense(
    recorder: Recorder,
    case: Case,
    kernels: tuple = _RIVALS, # names in `DENSE`
    **row,                    # what the rows say beside method, variant, n and bytes
):
    "Time dense kernels of PyTorch and FlashInfer; one that this machine cannot run is said and left out."
    row |= dict(n=case.n, nbytes=2 * case.k.nbytes)
    for name in kernels:
        try:
            for variant, call in DENSE[name].build(case).items():
                recorder.measure_row(call, lambda out: check_dense(out, case), method=name, variant=variant, **row)
        except Exception as error: recorder.say(f"{name}: {type(error).__name__}: {str(error)[:100]}")

def to_host(
    *tensors: torch.Tensor, # [B, G, N, D]
) -> list:                  # copies, the token outermost; pinned where there is a GPU
    "Copies in host memory, as `sparse_nb.models.cache.offload` keeps keys and values."
    def copy(x):
        new = torch.empty(x.permute(2, 0, 1, 3).shape, dtype=x.dtype, pin_memory=torch.cuda.is_available())
        return new.permute(1, 2, 0, 3).copy_(x)
    return [copy(x) for x in tensors]

def measure_copy(
    recorder: Recorder,
    near: list,         # tensors of one shape [B, G, N, D], where the recorder measures
    far: list,          # `to_host` of them
    **row,              # what the row says beside method, n and bytes
):
    "Time bringing tensors from host memory."
    outermost = near[0].permute(2, 0, 1, 3)
    both = torch.empty(len(near), *outermost.shape, dtype=outermost.dtype, device=recorder.device)
    both = both.permute(0, 2, 3, 1, 4)
    def bring():
        for to, x in zip(both, far): to.permute(2, 0, 1, 3).copy_(x.permute(2, 0, 1, 3), non_blocking=True)
        return both
    def same(out):
        if not torch.equal(out, torch.stack(near)): raise Refused("the rows differ")
        return 0.0
    recorder.measure_row(bring, same, method="copy", n=near[0].shape[2], nbytes=both.nbytes, **row)
