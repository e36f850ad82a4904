"""Run the notebooks and save their outputs, or render them to plain HTML without Quarto."""
import argparse
import os
import re
from pathlib import Path

import pypandoc
import yaml
from execnb.nbio import mk_cell, nb2str, read_nb
from execnb.shell import CaptureShell
from fastcore.xtras import working_directory
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.process import extract_directives
from nbdev.serve import proc_nbs

STYLE = """<style>
div.sourceCode, details pre { background: #f4f4f4; padding: 0 0.8em }
div.cell { overflow-x: auto }
table.dataframe { border: 0; width: auto }
</style>"""


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


def _page(text, source_format, to, **metadata):
    to.parent.mkdir(parents=True, exist_ok=True)
    pypandoc.convert_text(text, "html", format=source_format, outputfile=str(to), extra_args=[
        "--standalone", "--embed-resources", "--mathml", "--toc", "--variable=maxwidth=60em", f"--variable=header-includes={STYLE}",
        *(f"--metadata={k}={v}" for k, v in metadata.items())])


def _visible(cell):
    "The cells that show `cell` as the site does: options applied, their lines removed, folded code in a details element."
    if cell.cell_type != "code": return [cell]
    options = extract_directives(cell, remove=False)
    source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
    folded = options.get("code-fold:") == ["true"]
    cell.set_source("" if folded or options.get("echo:") == ["false"] else source)
    is_text = lambda output: "text/markdown" in output.get("data", {})
    texts = ["".join(output.data["text/markdown"]) for output in cell.outputs if is_text(output)]
    cell.outputs = [output for output in cell.outputs if not is_text(output)]
    for output in cell.outputs: output.update(execution_count=0)  # pandoc reads numbers only
    if folded: texts.insert(0, f"<details><summary>Code</summary>\n\n```python\n{source}\n```\n\n</details>")
    cells = [mk_cell(text, "markdown") for text in texts]
    return [*cells, cell] if folded else [cell, *cells]


def preview(out):
    "Render README.md and every notebook below `out`."
    processed, links = proc_nbs(n_workers=0), []
    for path in sorted(p.relative_to(get_config().config_path) for p in nbglob(as_path=True)):
        nb = read_nb(processed / path)
        front = yaml.safe_load(nb.cells.pop(0).source.strip().strip("-"))
        nb.cells = [shown for cell in nb.cells for shown in _visible(cell)]
        page = path.with_suffix(".html")
        _page(nb2str(nb), "ipynb+fenced_divs+link_attributes", out / page, title=front["title"], subtitle=front.get("description", ""))
        links.append(f"- [{front['title']}]({page.as_posix()}): {front.get('description', '')}\n")
    readme = re.sub(r"\.ipynb\b", ".html", Path("README.md").read_text(encoding="utf-8"))
    _page(readme + "\n## Every chapter\n" + "".join(links), "gfm", out / "index.html", pagetitle="sparse_nb")
    print(f"open {out / 'index.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("execute", help="run one notebook and save it with its outputs")
    run.add_argument("path", type=Path)
    run.add_argument("--flags", default="", help="blank-separated test flags whose cells are run too: slow, cuda")
    commands.add_parser("preview", help="render every notebook below _preview/ without Quarto")
    args = parser.parse_args()
    execute(args.path, args.flags) if args.command == "execute" else preview(Path("_preview"))
