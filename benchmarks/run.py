"""Make a result file of the book anew, a small form of it, or a comparison with what was measured before.

    python -m benchmarks.run --list
    python -m benchmarks.run NAME [--quick] [--out FILE] [--compare FILE]
    python -m benchmarks.run answers [--model FOLDER]

`--compare` prints the time of each row over its time in a stored file. `python -m experiments.run` does the same for
what asks models for answers.
"""
import argparse
import sys
from pathlib import Path

from benchmarks.recorder import read_record, run_record
from benchmarks.registry import REGISTRY

MEASURED = {"median_us", "q1_us", "q3_us", "error", "ratio", "ratio_to_fastest_dense", "tflops", "gb_s", "date", "runs",
            "held_bytes", "same_tokens", "checked", "rival"}  # what differs from run to run


def setting_of(row):
    "What a row is of: all but what was measured."
    return tuple(sorted((name, repr(x)) for name, x in row.items() if name not in MEASURED))


def compare(
    new: list,    # rows
    stored: list, # rows
) -> list:        # (setting, times new over stored), of the rows that both have
    "How long each row takes, over how long it took. ValueError where no timed row is in both."
    times = {setting_of(row): row["median_us"] for row in stored if "median_us" in row}
    found = [(row, row["median_us"] / times[setting_of(row)]) for row in new if setting_of(row) in times]
    if not found: raise ValueError("--compare must be a file with a timed row of the same settings, found none")
    return [({k: x for k, x in row.items() if k not in MEASURED}, ratio) for row, ratio in found]


def check_file(name, path):
    "Raise ValueError unless `path` ends in .json."
    if path is not None and path.suffix != ".json": raise ValueError(f"{name} must end in .json, got {str(path)!r}")


def run(given, names):
    "Do what was asked. Raises ValueError and OSError."
    if given.list == (given.name is not None): raise ValueError("give a NAME or --list, and not both")
    if given.list:
        for name in names:
            print(f"{name:26} {REGISTRY[name].what}{' (needs a GPU)' if REGISTRY[name].gpu else ''}")
        return
    if given.name not in names: raise ValueError(f"NAME must be one of {', '.join(names)}, got {given.name!r}")
    check_file("--out", given.out)
    check_file("--compare", given.compare)
    stored = given.compare and read_record(given.compare)["rows"]
    if given.model and given.name != "answers": raise ValueError(f"--model goes with answers alone, got {given.name}")
    path = run_record(given.name, given.out, quick=given.quick, say=lambda said: print(said, file=sys.stderr),
                      model=given.model)
    print(f"saved {path}", file=sys.stderr)
    for row, ratio in compare(read_record(path)["rows"], stored) if stored else ():
        print(f"{ratio:7.3f}  {', '.join(f'{k}={x}' for k, x in row.items())}")


def main(
    args: list | None = None,   # None: the process's own
    package: str = "benchmarks", # or "experiments"
):
    "The command. SystemExit with 2 after one line for bad input."
    parser = argparse.ArgumentParser(prog=f"python -m {package}.run", description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", metavar="NAME", help="which file to make")
    parser.add_argument("--list", action="store_true", help="list what there is and stop")
    parser.add_argument("--quick", action="store_true", help="the same in small, on a CPU too: checks, no times")
    parser.add_argument("--out", type=Path, metavar="FILE", help="its place in benchmarks/results if not given")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print each row's time over that of this file")
    parser.add_argument("--model", default="", metavar="FOLDER",
                        help="of `answers`: your model, or qwen, smollm2 or pocket; if not given, these three. It "
                             "takes hours and says beforehand how many, goes on where it was stopped if given again, "
                             "and writes GPU_answers_FOLDER.json in benchmarks/results unless --out is given")
    speed = package == "benchmarks"
    names = [name for name, entry in REGISTRY.items() if entry.path.startswith("benchmarks.") == speed]
    try: run(parser.parse_args(args), names)
    except (ValueError, OSError) as error: parser.exit(2, f"{parser.prog}: {' '.join(str(error).split())}\n")


if __name__ == "__main__": main()
