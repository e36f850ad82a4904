"""What a page of the book shows of a notebook: nbdev applies `Pages` (settings.ini) for Quarto's site and for the preview.

Exported code is on the page, under the names that it defines: open where it is short, a kernel, or marked `#| exports`;
else folded, below what its signature and docstring say. Names of the library in text and docstrings are links.
No cell is run."""
import ast
import copy
import inspect
import io
import os
import re
import runpy
import textwrap
import tokenize
from functools import lru_cache
from pathlib import Path

from execnb.nbio import mk_cell
from nbdev.config import get_config
from nbdev.doclinks import _nbpath2html, nbglob
from nbdev.process import Processor

LONG = 15  # lines of exported code above which it is folded
DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


@lru_cache(None)
def definitions():
    "Public functions and classes of the library: full name -> notebook, relative to the root."
    root = get_config().config_path
    notebooks = {_nbpath2html(path.relative_to(root)).as_posix(): path.relative_to(root) for path in nbglob(as_path=True)}
    modules = runpy.run_path(str(get_config().lib_path / "_modidx.py"))["d"]["syms"]
    return {name: notebooks[page.split("#")[0]] for module, names in modules.items() for name, (page, _) in names.items()
            if re.fullmatch(r"\.[^_.]\w*", name.removeprefix(module)) and page.split("#")[0] in notebooks}


@lru_cache(None)
def full_name(name, module):
    "What `name` means on the page of `module`: its own definition, or the only one of the library. None: neither, or several."
    tail = name.removeprefix(get_config().lib_name + ".")
    for part in tail, tail.split(".")[0], tail.split(".")[-1] if tail != name else tail:
        if f"{module}.{part}" in definitions(): return f"{module}.{part}"
        if len(found := [full for full in definitions() if full.endswith("." + part)]) == 1: return found[0]


def linked(text, module, page, known=()):
    "Markdown `text` with each `name` of the library as a link, but for headings, links, code, formulas and the names `known`."
    def link(found):
        full = full_name(found[1], module) if found[1] else None
        if full is None or full in known: return found[0]
        target = Path(os.path.relpath(definitions()[full], page.parent)).as_posix() if definitions()[full] != page else ""
        return f"[{found[0]}]({target}#{full})"
    skipped = r"^#.*$|^(?:```+|~~~+)[\s\S]*?^(?:```+|~~~+)$|\[[^\]]*\]\([^)]*\)|``.*?``|\$\$[\s\S]*?\$\$|\$[^$\n]+\$|<[^>\n]+>"
    return re.sub(rf"{skipped}|`([^`\s]+?)(?:\(\))?`", link, text, flags=re.M)


def plain(text):
    "Text of a docstring or comment as Markdown, in which only `code` and links are marked."
    return re.sub(r"`[^`]*`|[*<^~$|\\\"]", lambda found: found[0] if len(found[0]) > 1 else "\\" + found[0], text)


def table(*rows):
    "A Markdown table, the first row its head, without the columns that are empty."
    columns = [column for column in zip(*rows) if any(column[1:])]
    widths = [min(60, max(map(len, column))) for column in columns]
    lines = ["| " + " | ".join(row) + " |" for row in zip(*columns)]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def code(node):
    return f"`{ast.unparse(node)}`" if node is not None else ""


def signature(function, types=False):
    "The call of `function`: names and defaults, with types on request."
    args = copy.deepcopy(function.args)
    args.args = [arg for arg in args.args if arg.arg not in ("self", "cls")]
    for arg in ast.walk(args):
        if isinstance(arg, ast.arg) and not types: arg.annotation = None
    returns = f" -> {ast.unparse(function.returns)}" if types and function.returns else ""
    return f"{function.name}({ast.unparse(args)}){returns}"


def said_of_function(function, comments):
    "Signature, docstring and parameters of a function."
    args, last = function.args, function.lineno
    named = [*args.posonlyargs, *args.args]
    defaults = dict(zip(reversed(named), reversed(args.defaults))) | dict(zip(args.kwonlyargs, args.kw_defaults))
    rows = [("parameter", "type", "default", "meaning")]
    for arg in filter(None, [*named, args.vararg, *args.kwonlyargs, args.kwarg]):
        last = max(node.end_lineno for node in (arg, defaults.get(arg)) if node is not None)
        rows.append((f"`{arg.arg}`", code(arg.annotation), code(defaults.get(arg)), plain(comments.get(last, ""))))
    returned = [comments[line] for line in range(last + 1, function.body[0].lineno) if line in comments]
    if returned: rows.append(("returns", code(function.returns), "", plain(returned[-1])))
    described = any(row[-1] for row in rows[1:])
    call = textwrap.fill(signature(function, types=not described), 110, subsequent_indent=" " * (len(function.name) + 1),
                         break_long_words=False, break_on_hyphens=False)
    yield f"```python\n{call}\n```"
    yield plain(inspect.cleandoc(ast.get_docstring(function) or ""))
    if described: yield table(*rows)


def said_of_class(kind, comments):
    "Docstring, fields and public methods of a class."
    yield f"```python\nclass {kind.name}{'(' + ', '.join(map(ast.unparse, kind.bases)) + ')' if kind.bases else ''}\n```"
    yield plain(inspect.cleandoc(ast.get_docstring(kind) or ""))
    fields = [node for node in kind.body if isinstance(node, ast.AnnAssign) and not node.target.id.startswith("_")]
    if fields: yield table(("setting", "type", "default", "meaning"), *(
        (f"`{field.target.id}`", code(field.annotation), code(field.value), plain(comments.get(field.end_lineno, ""))) for field in fields))
    methods = [(node, ast.get_docstring(node)) for node in kind.body if isinstance(node, DEFINITIONS[:2])]
    methods = [(f"`{node.name if any(ast.unparse(d).endswith('property') for d in node.decorator_list) else signature(node)}`",
                plain(" ".join(said.split("\n\n")[0].split()))) for node, said in methods if said and not node.name.startswith("_")]
    if methods: yield table(("method", "what it does"), *methods)


def is_kernel(node):
    return any(re.search(r"\bjit\b", ast.unparse(decorator)) for decorator in node.decorator_list)


class Pages(Processor):
    "Show exported code with its documentation, fold long code and claims, and link names."
    def __init__(self, nb):
        super().__init__(nb)
        self.module = None
        for cell in nb.cells:  # nbdev's own processors, which come first, hide what is marked `export`
            for option in "export", "exporti":
                if option in cell.directives_: cell.directives_["shown"] = cell.directives_.pop(option)
            if "default_exp" in cell.directives_: self.module = f"{get_config().lib_name}.{cell.directives_['default_exp'][0]}"

    def end(self):
        self.page = Path(self.nb.path_).resolve().relative_to(get_config().config_path.resolve())
        cells, level = [], 1
        for cell in self.nb.cells:
            if cell.cell_type == "markdown":
                headings = re.findall(r"^(#+) ", re.sub(r"^```[\s\S]*?^```", "", cell.source, flags=re.M), flags=re.M)
                level = len(headings[-1]) if headings else level
                cell.source = self.linked(cell.source)
            elif cell.cell_type == "code":
                if cell.source and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(cell.source).body):
                    self.fold(cell, "Imports")
                elif cell.directives_.keys() & {"shown", "exports"}: cells += self.documentation(cell, level + 1)
                elif re.search(r"^claim\(", cell.source, flags=re.M): self.fold(cell, "Code of the claim")
                for output in cell.outputs:
                    if said := output.get("data", {}).get("text/markdown"):
                        output.data["text/markdown"] = self.linked("".join(said)).splitlines(keepends=True)
            cells.append(cell)
        self.nb.cells = cells

    def linked(self, text, known=()):
        return linked(text, self.module, self.page, known)

    def fold(self, cell, summary):
        if "code-fold:" not in cell.directives_:
            cell.source = f"#| code-fold: true\n#| code-summary: \"{summary}\"\n{cell.source}"

    def documentation(self, cell, level):
        "The Markdown cells that precede a cell of exported code, which is folded if it is long."
        nodes = [node for node in ast.parse(cell.source).body if isinstance(node, DEFINITIONS)]
        public = [node for node in nodes if not node.name.startswith("_")]
        heads = [f"{self.module}.{node.name}" for node in public]
        lines = sum(not line.startswith("#|") for line in cell.source.strip().splitlines())
        mark = "#" * min(level, 6)
        if lines <= LONG or "exports" in cell.directives_ or any(map(is_kernel, nodes)):
            names = ", ".join(f"`{node.name}`" for node in public)
            others = "".join(f"[]{{#{head}}}" for head in heads[1:])
            return [mk_cell(f"{mark} {names}{others} {{#{heads[0]} .definition}}", "markdown")] if public else []
        tokens = tokenize.generate_tokens(io.StringIO(cell.source).readline)
        comments = {token.start[0]: token.string.lstrip("#").strip() for token in tokens if token.type == tokenize.COMMENT}
        named = [node.name for node in nodes] or re.findall(r"^(\w+)(?:: .*?)? = ", cell.source, flags=re.M)
        self.fold(cell, f"Code of {', '.join(named)}: {lines} lines" if named else f"Code, {lines} lines")
        texts = []
        for node, head in zip(public, heads):
            said = said_of_class if isinstance(node, ast.ClassDef) else said_of_function
            texts.append(f"{mark} `{node.name}` {{#{head} .definition}}\n\n" + "\n\n".join(
                self.linked(part, known=(head,)) for part in said(node, comments) if part))
        return [mk_cell("\n\n".join(texts), "markdown")] if texts else []
