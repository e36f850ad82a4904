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

class GivenUp(RuntimeError):
    "Names the cells that failed `TRIES` times, and why."

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
    another. `GivenUp`, when all others are done, for those that failed `TRIES` times; without a GPU, what `work`
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
    if given_up: raise GivenUp("; ".join(given_up))

def lacking(
    recorder,          # of the measurement; its rows are read from its file
    every: list,       # cells: named tuples that begin with four fields that tell them apart, and have a range of seeds
    of_cell: Callable, # a row -> its cell's first four fields, first seed and end of the seeds
    names: Callable | None = None, # a cell -> the methods that its rows are of; None: a cell with any row is done
    together: int = 10**9,         # methods of a cell that are evaluated and written at once, the others after them
) -> list:
    "What the file lacks of the cells: where that is not all methods, they stand in the field `names`."
    if recorder.out.exists(): recorder.rows = read_record(recorder.out)["rows"]
    known, found = {}, []
    for row in recorder.rows: known.setdefault(of_cell(row), {*()}).add(row.get("method"))
    for cell in every:
        there, every_name = known.get((*cell[:4], cell.seeds[0], cell.seeds[-1] + 1)), names(cell) if names else ()
        left = [name for name in every_name if name not in (there or ())]
        if there is None and len(left) <= together: found.append(cell)
        else: found += [cell._replace(names=tuple(left[i:i + together])) for i in range(0, len(left), together)]
    return found

def filled_in(
    recorder,       # as of `lacking`
    work: Callable, # as of `evaluated`
    every: list,    # as of `lacking`, as the next and the last
    of_cell: Callable,
    about: dict,    # for `meta`
    *pieces,        # names and together, likewise
):
    "Do what the recorder's file lacks of the cells, and write it after each, so that what was stopped goes on."
    left = lacking(recorder, every, of_cell, *pieces)
    for cell, rows, seconds in evaluated(work, left, torch.cuda.device_count()):
        recorder.rows += [row | dict(seconds=round(seconds, 1)) for row in rows]
        recorder.write(**about)
        said = ", ".join(str(x) for x in cell if x != ())
        recorder.say(f"{recorder.seconds():.0f} s: {said}: {seconds:.0f} s")
