"""Cells of work on all GPUs of a machine, several processes on each, and their rows as they come"""
import gc
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import parent_process

import torch
import torch.multiprocessing as processes

from benchmarks.recorder import read_record

PER_GPU = int(os.environ.get("PER_GPU", 3)) # processes on a GPU, which share its memory
TRIES = 3                                   # of a cell

def _serve(gpu, work, todo, done):
    "A process that does what it is given, on one GPU, until it runs out of memory, which it then leaves to others"
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    while parent_process().is_alive() and (cell := todo.get()) is not None:
        began = time.monotonic()
        try: done.put((gpu, cell, work(cell), time.monotonic() - began, None))
        except torch.OutOfMemoryError as error: return done.put((gpu, cell, [], None, str(error)))
        except Exception as error: done.put((gpu, cell, [], 0, f"{type(error).__name__}: {error}"))
        gc.collect()
        torch.cuda.empty_cache()  # another process has the same GPU

def evaluated(
    work: Callable, # a cell -> its rows; a function of a module, for processes import it
    every: list,    # cells, which can be pickled
    gpus: int,      # of this machine; 0: all is done in this process
): # yields (cell, rows, seconds) as they come
    """Do all cells, `PER_GPU` processes on each GPU, fewer after each that runs out of memory, whose cell is done by
    another. RuntimeError, when all others are done, for those that failed `TRIES` times; without a GPU, what `work`
    raises."""
    if not gpus:
        for cell in every:
            began = time.monotonic()
            yield cell, work(cell), time.monotonic() - began
        return
    context = processes.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for cell in every: todo.put(cell)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    on = seen.split(",") * PER_GPU
    start = lambda gpu: context.Process(target=_serve, args=(gpu, work, todo, done), daemon=True).start()
    alive = on[:len(every)]
    for gpu in alive: start(gpu)
    left, failed, given_up = len(every), [], []
    while left:
        gpu, cell, rows, seconds, why = done.get()
        ended, alone = seconds is None, alive.count(gpu) == 1
        if ended and alone: start(gpu)
        elif ended: alive.remove(gpu)
        if why is None:
            left -= 1
            yield cell, rows, seconds
        elif ended and not alone:
            print(f"{alive.count(gpu)} processes go on, after {why}: {cell}", file=sys.stderr, flush=True)
            todo.put(cell)
        elif failed.count(cell) + 1 == TRIES:
            left -= 1
            given_up.append(f"{cell}: {why}")
        else:
            print(f"again, after {why}: {cell}", file=sys.stderr, flush=True)
            failed.append(cell)
            todo.put(cell)
    for _ in alive: todo.put(None)
    if given_up: raise RuntimeError("; ".join(given_up))

def filled_in(
    recorder,         # of the measurement
    work: Callable,   # as of `evaluated`
    every: list,      # cells: tuples that end with a range of seeds
    of_cell: Callable, # a row -> its cell's fields, first seed and end of the seeds last
    about: dict,      # for `meta`
):
    "Do the cells that the recorder's file lacks, and write it after each, so that what was stopped goes on."
    if recorder.out.exists(): recorder.rows = read_record(recorder.out)["rows"]
    known = {of_cell(row) for row in recorder.rows}
    lacking = [cell for cell in every if (*cell[:-1], cell[-1][0], cell[-1][-1] + 1) not in known]
    for cell, rows, seconds in evaluated(work, lacking, torch.cuda.device_count()):
        recorder.rows += [row | dict(seconds=round(seconds, 1)) for row in rows]
        recorder.write(**about)
        recorder.say(f"{recorder.seconds():.0f} s: {', '.join(map(str, cell))}: {seconds:.0f} s")
