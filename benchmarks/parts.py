"""Measure a part of a result file: `python -m benchmarks.parts decode | prefill | generate [OPTIONS]`.

`python -m benchmarks.run NAME` makes a whole file; here lengths, methods and rows to keep are chosen."""
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from sparse_nb.cli import items_of, method_from

METHODS = Annotated[list[str], typer.Option("--decode", help="Method; may stand several times.", show_default=False)]


def say(*said): print(*said, file=sys.stderr, flush=True)


bench = typer.Typer(help="Measure a part of a result file.", add_completion=False)
OUT = Annotated[Path, typer.Option(help="File ending in .json, or a folder; benchmarks/results if not given.",
                                   show_default=False)]

def _check_bench(out, **amounts):
    "Raise ValueError for a file of another kind, and for what is to be had of nothing."
    if out is not None and out.suffix not in ("", ".json"):
        raise ValueError(f"--out must end in .json, or be a folder, got {str(out)!r}")
    for name, x in amounts.items():
        if not x > 0: raise ValueError(f"--{name} must be above 0, got {x}")

def _command(): return re.sub(r" --out[ =]\S+", "", " ".join(["python -m benchmarks.parts", *sys.argv[1:]]))

@bench.command()
def decode(
    lengths: Annotated[str, typer.Option(help="Numbers of keys; six from 4096 to 1048576 if not given.",
                                         show_default=False)] = None,
    batches: Annotated[str, typer.Option(help="Numbers of sequences; 1,8,32 if not given.", show_default=False)] = None,
    shapes: Annotated[str, typer.Option(help="Shapes of the heads; llama3,pocket if not given.",
                                        show_default=False)] = None,
    methods: Annotated[str, typer.Option(help="Methods and baselines; all if not given.", show_default=False)] = None,
    samples: Annotated[int,
                       typer.Option(help="Values that SANTA draws for each head; flash draws 16 times as many.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of the cache: bfloat16, float16 or float32.")] = "bfloat16",
    out: OUT = None,
    append: Annotated[bool,
                      typer.Option("--append", help="Keep the cases of the file that are not measured again.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two lengths, one sequence, one shape, ten runs.")] = False,
    budget: Annotated[float, typer.Option(help="Largest cache to measure, in GB.")] = 20,
    seconds: Annotated[float, typer.Option(help="Start no case later than this.")] = 330,
):
    "Time one decode step of attention: ours and its baselines, checked first, with a cold cache."
    _check_bench(out, budget=budget, seconds=seconds)
    import torch
    from sparse_nb.bench import SHAPES
    from benchmarks import decode as room
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"--dtype must be bfloat16, float16 or float32, got {dtype!r}")
    lists = {"lengths": (lengths, room.LENGTHS), "batches": (batches, room.BATCHES), "shapes": (shapes, tuple(SHAPES)),
             "methods": (methods, None)}
    chosen = {name: default if text is None else items_of(name, text, name in ("lengths", "batches"))
              for name, (text, default) in lists.items()}
    path = room.bench_decode(**chosen, samples=samples, dtype=getattr(torch, dtype), out=out, append=append,
                             quick=quick,
                             budget_gb=budget, limit_s=seconds, command=_command(), say=say)
    print(f"{'saved' if path.exists() else 'nothing was measured, so there is no'} {path}", file=sys.stderr)


@bench.command("prefill")
def _prefill(
    lengths: Annotated[str, typer.Option(help="Positions; nine from 2048 to 1048576 if not given.",
                                         show_default=False)] = None,
    out: OUT = None,
):
    "Time the attention of whole prompts: ours and its baselines, checked first, with a cold cache."
    _check_bench(out)
    from benchmarks import prefill as room
    chosen = room.LENGTHS if lengths is None else items_of("lengths", lengths, number=True)
    print(f"saved {room.bench_prefill(lengths=chosen, out=out, command=_command(), say=say)}", file=sys.stderr)

@bench.command("generate")
def _generate(
    decode: METHODS = (),
    lengths: Annotated[str, typer.Option(help="Tokens of the prompt; 32768,131072 if not given.",
                                         show_default=False)] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    static: Annotated[bool, typer.Option("--static", help="With a static cache: steps are compiled, and those of "
                                                          "methods recorded and played back.")] = False,
    tuned: Annotated[bool, typer.Option("--tuned", help="With --static: matrix products by kernels that the compiler "
                                                        "searches for.")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="Also with the cache in host memory.")] = False,
    filled: Annotated[bool, typer.Option("--filled", help="Draw keys and values instead of reading a prompt.")] = False,
    baselines: Annotated[bool, typer.Option(help="Time dense attention and a token without keys, too; those of the "
                                                 "file count if not.")] = True,
    kernels: Annotated[bool, typer.Option(help="Time the attention alone, too.")] = True,
    tokens: Annotated[int, typer.Option(help="To time in each run.")] = 24,
    layers: Annotated[int, typer.Option(help="Layers of the model; 32 if not given.", show_default=False)] = None,
    out: OUT = None,
    append: Annotated[bool, typer.Option("--append", help="Keep the rows of the file that are not measured again."
                                         )] = False,
    seconds: Annotated[float, typer.Option(help="Begin no way later than this.")] = 540,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and a short prompt; on a CPU, too.")] = False,
):
    """Time the tokens of a model like Llama-3.1-8B, with random weights: with methods, as many as --decode says, and
    with dense attention."""
    _check_bench(out, seconds=seconds)
    import torch
    from benchmarks import generate as room
    for name, x in (("batch", batch), ("tokens", tokens)) + (() if layers is None else (("layers", layers),)):
        if x < 1: raise ValueError(f"--{name} must be at least 1, got {x}")
    if static and offload: raise ValueError("--offload must not stand with --static: that cache stays on the GPU")
    if tuned and not static: raise ValueError("--tuned must stand with --static: other steps are not compiled")
    methods = room.named({text: method_from("--decode", text) for text in decode}) or None
    device = "cpu" if quick and not torch.cuda.is_available() else "cuda"
    shape = dict(room.TINY if quick else room.LLAMA) | ({} if layers is None else dict(num_hidden_layers=layers))
    chosen = [400] if quick and lengths is None else None if lengths is None else items_of("lengths", lengths, True)
    chosen = {} if chosen is None else dict(lengths=[(n, 1) for n in chosen])
    path = room.bench_generate(**chosen, **dict(read=0) if filled else {}, methods=methods, batch=batch, static=static,
                               tuned=tuned, offload=offload, baselines=baselines, kernels=kernels, tokens=tokens,
                               shape=shape, device=device, out=out, append=append, limit_s=seconds,
                               command=_command(), say=say)
    print(f"saved {path}", file=sys.stderr)


def main(
    args: list | None = None, # None: the process's own
):
    "The command. SystemExit with 2 after one line for bad input."
    try: bench(args, standalone_mode=False, prog_name="python -m benchmarks.parts")
    except (ValueError, OSError) as error: message = error
    except Exception as error:
        if not hasattr(error, "format_message"): raise
        message = error.format_message()  # a usage error of typer's
    else: return
    print("benchmarks.parts:", " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__": main()
