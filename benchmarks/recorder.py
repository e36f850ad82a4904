"""What was measured, on which machine, by which command: one runner, one writer, one reader"""
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import sparse_nb
from sparse_nb.bench import SHAPES, Protocol, Shape, bandwidth, captured, cold_times, quartiles
from benchmarks.timing import Case, Refused, check_dense
from sparse_nb.device import kernel_device
from benchmarks.baselines import DENSE
from benchmarks.machine import file_word, machine
from benchmarks.registry import REGISTRY


def write_record(
    path: Path, # file ending in .json; its folder is made where it is missing
    meta: dict, # where the rows come from
    rows: list, # of dicts
) -> Path:      # the file
    "Write meta and rows as JSON, a row a line. A measurement writes by `Recorder.write` and `Recorder.grow`."
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
    """A record. Old ones call SmolLM2 "witness", and are read as if they said "smollm2".

    Raises OSError where there is no file, ValueError with its name unless it holds meta and rows.
    """
    try: record = json.loads(Path(path).read_text(encoding="utf-8").replace('"witness"', '"smollm2"'))
    except json.JSONDecodeError as error: raise ValueError(f"{Path(path).name} must be JSON, got {error}") from None
    if not isinstance(record, dict) or not {"meta", "rows"} <= record.keys():
        raise ValueError(f"{Path(path).name} must hold meta and rows")
    return record


def _entry(name):
    if name not in REGISTRY: raise ValueError(f"name must be one of {', '.join(REGISTRY)}, got {name!r}")
    return REGISTRY[name]

def results() -> Path: # benchmarks/results
    "The folder of the recorded results. Raises FileNotFoundError where the package is not in a clone."
    folder = Path(sparse_nb.__file__).parents[1] / "benchmarks" / "results"
    if not folder.is_dir(): raise FileNotFoundError(f"{folder} is missing: recorded results are in a clone only")
    return folder

def record_path(
    name: str,  # one of `REGISTRY`
    out=None,   # a file, or a folder for one; None: its place in the clone
) -> Path:
    "The file that a record is written to. Raises ValueError for an unknown name, FileNotFoundError outside a clone."
    file = Path(_entry(name).file.format(gpu=file_word()))
    if out is None: return results() / file if len(file.parts) == 1 else results().parents[1] / file
    return Path(out) if Path(out).suffix else Path(out) / file.name

def recorded(
    name: str,   # one of `REGISTRY`
    folder=None, # of the files; None: benchmarks/results of the clone
) -> dict:       # GPU -> record
    "All records of one name, by GPU. Raises ValueError for an unknown name and a broken file."
    files = sorted(Path(folder or results()).glob(_entry(name).file.format(gpu="*")))
    found = [read_record(path) for path in files]
    return {record["meta"].get("gpu") or record["meta"]["device"]: record for record in found}


def need_gpu(
    name: str, # of the record, for the message
):
    "Raise ValueError without a CUDA device."
    if not torch.cuda.is_available():
        raise ValueError(f"{name}: there is no CUDA device here, and times of anything else are not recorded")

def run_record(
    name: str,             # one of `REGISTRY`
    out=None,              # file, or a folder for it; None: its place in the clone, or a new folder for the quick form
    quick: bool = False,   # a small form of the same?
    say: Callable = print, # told what happens, line by line
    model: str = "",       # name or folder of a model, for a measurement that takes one; its file is named for it
) -> Path:                 # the file
    """Measure and write a record.

    Without a CUDA device the quick form runs kernels in Triton's interpreter, for whatever imports Triton after this.
    Raises ValueError for an unknown name, and without a CUDA device where one is needed.
    """
    if _entry(name).gpu and not quick: need_gpu(name)
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1": kernel_device()
    path = record_path(name, tempfile.mkdtemp() if quick and out is None else out)
    if model and out is None: path = path.with_stem(f"{path.stem}_{Path(model).name}")
    recorder = Recorder(name, path, quick=quick, say=say, model=model)
    about = REGISTRY[name].load()(recorder)
    if about is not None: recorder.write(**about)
    say(f"{recorder.out}: {recorder.seconds():.0f} s")
    return recorder.out


class Recorder:
    "What a measurement is given, and its rows. ValueError without a CUDA device that it needs in full."
    def __init__(
        self,
        name: str,             # of the measurement
        out=None,              # its file
        *,
        quick: bool = False,   # few runs, on a CPU where there is no GPU?
        say: Callable = print, # told what happens, line by line
        model: str = "",       # name or folder of a model; "": those of the record
    ):
        if not quick and REGISTRY[name].gpu: need_gpu(name)
        self.name, self.out, self.quick, self.say, self.model = name, out and Path(out), quick, say, model
        package = REGISTRY[name].path.partition(".")[0]
        options = " --quick" * quick + f" --model {model}" * bool(model)
        self.speed = package == "benchmarks" and REGISTRY[name].gpu  # of what needs no GPU no time counts
        self.command = f"python -m {package}.run {name}{options}"
        self.meta, self.rows = {}, []
        self.began, self.gpu = time.perf_counter(), torch.cuda.is_available()
        self.device = "cuda" if self.gpu else "cpu"
        on_gpu = Protocol(warmup=3, runs=5) if quick else Protocol()
        self.protocol = on_gpu if self.gpu else Protocol(warmup=1, runs=1, buffer_mb=0)

    @cached_property
    def buffer(self):
        "What passes through the cache between calls."
        return self.protocol.buffer(self.device)

    def seconds(self) -> float:
        "Since it was made."
        return time.perf_counter() - self.began

    def cases(self, lengths, quick: int, cpu: int, shape: Shape):
        "Cases of Llama 3's heads, one by one; of one length in the quick form, which on a CPU has heads of its own."
        for n in lengths if not self.quick else (quick if self.gpu else cpu,):
            yield Case(SHAPES["llama3"] if self.gpu else shape, n, device=self.device)
            if self.gpu: torch.cuda.empty_cache()

    def measure_row(
        self,
        call: Callable,                # returns the tensor that it fills
        check: Callable | None = None, # gets that tensor, returns its error or raises `Refused`: then there is no row
        *,
        plain: Protocol | None = None, # of a call so long that its launches do not count: then it takes no graph
        **row,                         # what the row says beside its times; of a tflop (10**12 operations) also a rate
    ):
        "Check a call, time it, and check what the last replay wrote."
        protocol = plain or self.protocol
        if self.gpu and not plain: replay, out = captured(call)
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
        rate = dict(tflops=round(row["tflop"] / times.median_us * 1e6, 1)) if "tflop" in row else {}
        self.rows.append(row | times._asdict() | rate)
        self.say(f"{row}: {times.median_us:.1f} us, {self.seconds():.0f} s")

    def write(
        self,
        **about, # what else `meta` says; all of it, if it names a gpu: rows may have been made on another machine
    ) -> Path:   # the file
        "Write the rows; of times also how they were taken, and the bandwidths of the machine."
        meta = dict(command=self.command) | about
        if "gpu" not in about:
            how = dict(dtype="bfloat16", inputs="Gaussian", mode="graph" if self.gpu else "eager",
                       l2="cold" if self.buffer.numel() else "warm", runs=self.protocol.runs) if self.speed else {}
            meta = machine(self.device) | how | meta
            if self.speed: meta |= bandwidth(self.device, gigabytes=4 if self.gpu else 0.01)
        return write_record(self.out, meta, self.rows)

    def grow(
        self,
        steps: Mapping[str, Callable], # name -> function that gives rows, in the order of the file
        /,
        **settings,                    # of the result, for `meta`, where the seconds of each step stand, too
    ) -> Path:                         # the file
        """Make the steps that the file lacks, and write it after each: a file that is not complete is gone on with.

        Raises ValueError for one that was made in another way.
        """
        self.meta = json.loads(json.dumps(machine(self.device) | settings | dict(command=self.command, seconds={})))
        old = read_record(self.out) if self.out.exists() else dict(meta=self.meta, rows=[])
        if not {*steps} <= {*old["meta"]["seconds"]}:
            for name in self.meta.keys() - {"date", "seconds", "methods"}:
                if (there := old["meta"].get(name)) != self.meta[name]:
                    raise ValueError(f"out must hold a record made with {name} = {self.meta[name]!r}, got {there!r}")
            self.meta, self.rows = old["meta"], old["rows"]
        for name, rows_of in steps.items():
            if name in self.meta["seconds"]: continue
            began = time.monotonic()
            self.rows += rows_of()
            self.meta["seconds"][name] = round(time.monotonic() - began, 1)
            write_record(self.out, self.meta, self.rows)
            self.say(f"{self.meta['seconds'][name]:6.1f} s  {name}")
        return self.out


def up_to(
    step: Callable, # without arguments
    kernel: str,    # name of a Triton kernel that it launches
) -> Callable:
    "The step without its launches from the first one of this kernel on."
    from triton.runtime.jit import KernelInterface
    own = KernelInterface.__getitem__
    def call():
        over = []
        def launcher(self, grid):
            launch = own(self, grid)
            def run(*args, **kwargs):
                if self.__name__ == kernel: over.append(self)
                return None if over else launch(*args, **kwargs)
            return run
        with mock.patch.object(KernelInterface, "__getitem__", launcher): return step()
    return call

class Step(NamedTuple):
    "A step of a method that chooses keys, as its launches are timed one after the other."
    run: Callable   # gets keys and values [1, G, N, D]; returns the output
    check: Callable # as of `measure_row`
    launches: dict  # name -> the first kernel of this launch
    nbytes: dict    # name -> what this launch has to read
    row: dict       # what the rows say

def measure_launches(recorder: Recorder, case: Case, step: Step, names: Iterable | None = None):
    "Time a step up to each launch of these names, or of all; the whole step is checked."
    after, whole = dict(zip(step.launches, [*step.launches.values()][1:])), lambda: step.run(case.k, case.v)
    for name in step.launches if names is None else names:
        call = up_to(whole, after[name]) if name in after else whole
        recorder.measure_row(call, None if name in after else step.check, **step.row, launch=name, memory="device",
                             nbytes=step.nbytes[name])

def measure_host(recorder: Recorder, case: Case, steps: Iterable, **row):
    "Time whole steps with keys and values in host memory, and a copy of these; row: what that of the copy says."
    far = to_host(case.k, case.v)
    for step in steps:
        nbytes = sum(step.nbytes[name] for name in ("look", "sample", "read") if name in step.nbytes)
        recorder.measure_row(lambda: step.run(*far), step.check, **step.row, launch="merge", memory="host",
                             nbytes=nbytes)
    measure_copy(recorder, [case.k, case.v], far, **row, memory="host")


BASELINES = "sdpa_cudnn", "sdpa_flash", "flashinfer_tc"

def measure_dense(
    recorder: Recorder,
    case: Case,
    kernels: tuple = BASELINES, # names in `DENSE`
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
