"""Run the notebooks and save their outputs, or render the book to plain HTML without Quarto."""
import argparse
import base64
import html
import io
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, unquote

import pypandoc
import yaml
from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell
from fastcore.xtras import working_directory
from nbdev.config import get_config
from nbdev.doclinks import _nbpath2html
from nbdev.process import extract_directives
from nbdev.processors import FilterDefaults
from PIL import Image
from pygments import token
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # nbdev imports tools.pages


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


def entries(contents, section=None):
    "(section, address, title or None) of the sidebar's lines, in reading order."
    for entry in contents:
        if isinstance(entry, str): yield section, entry, None
        elif "section" in entry: yield from entries(entry["contents"], entry["section"])
        else: yield section, entry["href"], entry["text"]


def read(path):
    "(title, subtitle, cells or text) of a page: a notebook as nbdev and `tools.pages` leave it, or a Markdown file."
    if path.suffix == ".ipynb":
        nb = read_nb(ROOT / path)
        FilterDefaults()(nb)
        return nb.frontmatter_["title"], nb.frontmatter_.get("description", ""), nb.cells[1:]
    contents = lambda name: (ROOT / path.parent / name).read_text(encoding="utf-8")
    text = re.sub(r"\A---\n[\s\S]*?\n---\n", "", contents(path.name))
    text = re.sub(r"\{\{< include (\S+) >\}\}", lambda name: contents(name[1]), text)
    title = re.search(r"^# (.+)\n", text, flags=re.M)
    return title[1], "", text.replace(title[0], "", 1)


def raw(text):
    "HTML that pandoc passes on."
    return f"\n\n```````{{=html}}\n{text}\n```````\n\n"


def shown_output(output, picture, alt):
    "One output of a cell as Markdown; `picture` saves a picture and returns its address."
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items() if isinstance(text, (str, list))}
    if output.output_type == "stream": data = {"text/plain": "".join(output.text)}
    if output.output_type == "error": data = {"text/plain": "\n".join(output.traceback)}
    if "image/png" in data:
        address = picture(base64.b64decode(data["image/png"]))
        size = output.get("metadata", {}).get("image/png", {})
        size = "".join(f' {side}="{size[side]}"' for side in ("width", "height") if side in size)
        return raw(f'<img class="figure" src="{address}" alt="{html.escape(alt)}"{size}>')
    if "text/html" in data: return raw(f'<div class="output">{data["text/html"]}</div>')
    if "text/markdown" in data: return f"\n\n::: output\n{data['text/markdown']}\n:::\n\n"
    return raw(f'<pre class="output">{html.escape(data.get("text/plain", ""))}</pre>')


def shown_cell(cell, picture):
    "A cell as Markdown, by options that Quarto reads too: echo, code-fold, code-summary, fig-alt."
    if cell.cell_type != "code": return f"\n\n{cell.source}\n\n" if cell.cell_type == "markdown" else ""
    options = dict(re.findall(r"^#\| *([\w-]+): *(.*)$", cell.source, flags=re.M))
    options = {name: yaml.safe_load(value) for name, value in options.items()}
    source, text = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M).strip(), ""
    if source and options.get("echo") is not False:
        text = f"\n\n```````python\n{source}\n```````\n\n"
        if options.get("code-fold") is True:
            text = raw(f"<details><summary>{options.get('code-summary', 'Code')}</summary>") + text + raw("</details>")
    return text + "".join(shown_output(output, picture, options.get("fig-alt", "")) for output in cell.outputs)


def boxed(text):
    "The Markdown `text` with the heading of each callout as a line of its own: Quarto makes it the title of the box."
    return re.sub(r"^(::: *\{\.callout-[^}\n]*\}\n+)#+ +(.+)$", r"\1[\2]{.callout-title}", text, flags=re.M)


PYTHON = PythonLexer(stripnl=False, ensurenl=False)
COLOURS = {token.Comment: "comment", token.String: "string", token.Keyword: "keyword", token.Operator.Word: "keyword",
           token.Number: "number", token.Name.Decorator: "decorator"}


def coloured(page):
    "The HTML `page` with Python code in colours, by pygments, with no span for what has none."
    def colour(code):
        parts = []
        for kind, word in PYTHON.get_tokens(html.unescape(code[1])):
            name = next((name for of, name in COLOURS.items() if kind in of), None)
            word = html.escape(word, quote=False)
            parts.append(f'<span class="{name}">{word}</span>' if name else word)
        return f'<pre class="python"><code>{"".join(parts)}</code></pre>'

    return re.sub(r'<pre\s+class="python"><code>([\s\S]*?)</code></pre>', colour, page)


class Book:
    "The pages of the sidebar of _quarto.yml, rendered below `out` by pandoc."
    def __init__(self, out):
        settings = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
        self.out, self.lines = out, list(entries(settings["website"]["sidebar"]["contents"]))
        self.order = [Path(address) for _, address, _ in self.lines if "#" not in address]
        self.pages = {path: read(path) for path in self.order}
        self.targets = {path: _nbpath2html(path) if path.suffix == ".ipynb" else path.with_suffix(".html")
                        for path in self.order}
        self.copied = set()

    def title(self, path):
        return next(title or self.pages[path][0] for _, address, title in self.lines if Path(address) == path)

    def address(self, link, page):
        "Where a link of the source of `page` leads on its rendered page; a file that is no page is noted for copying."
        path, mark, fragment = link.partition("#")
        if not path or re.match(r"[a-z]+:|//", path): return link
        source = Path(os.path.normpath(page.parent / unquote(path)))
        if (index := source / "index.qmd") in self.targets: source = index
        target = self.targets.get(source)
        if target is None:
            if not (ROOT / source).is_file(): return link
            target = source if source.suffix else source.with_suffix(".txt")
            self.copied.add((source, target))
        return quote(Path(os.path.relpath(target, self.targets[page].parent)).as_posix()) + mark + fragment

    def near(self, there, page):
        return self.address(os.path.relpath(there, page.parent), page)

    def sidebar(self, page):
        "The contents of the book as HTML, as seen from `page`."
        parts, last = [], None
        for section, address, title in self.lines:
            if section != last: parts.append(f"<h2>{html.escape(section)}</h2>")
            last, here = section, ' aria-current="page"' if Path(address) == page else ""
            title = html.escape(title or self.title(Path(address)))
            parts.append(f'<a href="{self.near(address, page)}"{here}>{title}</a>')
        return "\n".join(parts)

    def variables(self, page):
        "What the template asks for."
        title, subtitle, _ = self.pages[page]
        yield from {"title": html.escape(title), "subtitle": html.escape(subtitle), "sidebar": self.sidebar(page),
                    "home": self.near(self.order[0], page),
                    "style": os.path.relpath("style.css", self.targets[page].parent)}.items()
        k = self.order.index(page)
        for name, there in ("previous", self.order[k - 1:k]), ("next", self.order[k + 1:k + 2]):
            for path in there:
                yield name, self.near(path, page)
                yield f"{name}-title", html.escape(self.title(path))

    def render(self, page):
        target, content = self.out / self.targets[page], self.pages[page][2]
        pictures = target.with_suffix("")

        def picture(data):
            pictures.mkdir(parents=True, exist_ok=True)
            name = f"{len(list(pictures.iterdir())) + 1}.png"
            (pictures / name).write_bytes(data)
            return f"{pictures.name}/{name}"

        target.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, str): content = "".join(shown_cell(cell, picture) for cell in content)
        content = boxed(content)
        text = pypandoc.convert_text(content, "html", "markdown-implicit_figures+autolink_bare_uris", extra_args=[
            "--wrap=none", "--mathml", "--toc", "--toc-depth=6", "--syntax-highlighting=none",
            f"--template={ROOT / 'tools' / 'page.html'}",
            *(f"--variable={name}={value}" for name, value in self.variables(page))])
        link = lambda found: f'{found[1]}="{html.escape(self.address(html.unescape(found[2]), page))}"'
        text = re.sub(r"(?<=<!-- main -->)[\s\S]*(?=<!-- /main -->)",
                      lambda main: re.sub(r'\b(href|src)="([^"]*)"', link, coloured(main[0])), text)
        target.write_text(text, encoding="utf-8")


def preview(out):
    "Render the book below `out`, which is emptied first."
    shutil.rmtree(out, ignore_errors=True)
    book = Book(out)
    with ThreadPoolExecutor(2) as pool: list(pool.map(book.render, book.order))
    for source, target in {*book.copied, (Path("tools/style.css"), Path("style.css"))}:
        (out / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, out / target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("execute", help="run one notebook and save it with its outputs")
    run.add_argument("path", type=Path)
    run.add_argument("--flags", default="", help="blank-separated test flags whose cells are run too: slow, cuda")
    commands.add_parser("preview", help="render the book below _preview/ without Quarto")
    args = parser.parse_args()
    if args.command == "execute": execute(args.path, args.flags)
    else:
        preview(Path("_preview"))
        print(f"open {Path('_preview') / 'index.html'}")
