"""Run notebooks and save their outputs."""
import argparse
import base64
import io
import os
from pathlib import Path

from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell
from fastcore.xtras import working_directory
from nbdev.config import get_config
from nbdev.process import extract_directives
from PIL import Image


def smaller(picture):
    "A PNG, in base64, with a palette of 256 colours: a third of the size, and no pixel off by more than a few levels."
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    if image.mode == "P": return picture
    image = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def execute(path, flags):
    "Run the cells of `path` that `nbdev_test --flags` runs and save them; the others keep the outputs they have."
    skip = set(get_config().tst_flags.split()) - set(flags.split())

    def skipped(cell):
        if cell.cell_type != "code": return True
        directives = extract_directives(cell, remove=False)
        if skip & directives.keys() or directives.get("eval:") == ["false"]: return True
        cell.outputs = []

    os.environ["SPARSE_NB_LEDGER"] = str(get_config().config_path / "nbs" / "claims")  # claim cells write their rows
    with working_directory(path.parent):
        CaptureShell().execute(path.name, path.name, exc_stop=True, preproc=skipped)
    nb = read_nb(path)
    for output in (output for cell in nb.cells for output in cell.get("outputs", [])):
        if picture := output.get("data", {}).get("image/png"): output.data["image/png"] = smaller("".join(picture))
    write_nb(nb, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("execute", help="run one notebook and save it with its outputs")
    run.add_argument("path", type=Path)
    run.add_argument("--flags", default="", help="blank-separated test flags whose cells are run too: slow, cuda")
    args = parser.parse_args()
    execute(args.path, args.flags)
