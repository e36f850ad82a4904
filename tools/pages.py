"""What a page of the book shows of a notebook: nbdev applies `Pages` (settings.ini), for Quarto's site and the preview.

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
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


@lru_cache(None)
def definitions():
    "Public functions and classes of the library: full name -> notebook, relative to the root."
    root = get_config().config_path
    notebooks = [path.relative_to(root) for path in nbglob(as_path=True)]
    notebooks = {_nbpath2html(path).as_posix(): path for path in notebooks}
    found = {}
    for module, names in runpy.run_path(str(get_config().lib_path / "_modidx.py"))["d"]["syms"].items():
        for name, (address, _) in names.items():
            notebook = notebooks.get(address.split("#")[0])
            if notebook and re.fullmatch(r"\.[^_.]\w*", name.removeprefix(module)): found[name] = notebook
    return found


@lru_cache(None)
def full_name(name, module, imported=frozenset()):
    """What `name` means on the page of `module`: its own definition, or the library's only one of that name, or None.

    A bare lower-case word may mean anything (`generate`): elsewhere it counts only where the notebook imports it."""
    tail = name.removeprefix(get_config().lib_name + ".")
    for part in tail, tail.split(".")[0], tail.split(".")[-1] if tail != name else tail:
        if f"{module}.{part}" in definitions(): return f"{module}.{part}"
        if re.fullmatch("[a-z]+", name) and name not in imported: continue
        if len(found := [full for full in definitions() if full.endswith("." + part)]) == 1: return found[0]


NO_LINKS = "|".join([r"^#.*$", r"^(?:```+|~~~+)[\s\S]*?^(?:```+|~~~+)$", r"\[[^\]]*\]\([^)]*\)", r"``.*?``",
                     r"\$\$[\s\S]*?\$\$", r"\$[^$\n]+\$", r"<[^>\n]+>"])


def linked(text, module, page, imported=frozenset(), known=()):
    "Markdown with each `name` of the library as a link, but for headings, links, code, formulas and the names `known`."
    def link(found):
        full = full_name(found[1], module, imported) if found[1] else None
        if full is None or full in known: return found[0]
        notebook = definitions()[full]
        address = "" if notebook == page else Path(os.path.relpath(notebook, page.parent)).as_posix()
        return f"[{found[0]}]({address}#{full})"
    return re.sub(rf"{NO_LINKS}|`([^`\s]+?)(?:\(\))?`", link, text, flags=re.M)


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
    "Signature, docstring and parameters of a function; `comments` are those of its cell, by line."
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
    call = textwrap.wrap(signature(function, types=not described), 110, break_long_words=False, break_on_hyphens=False)
    yield "```python\n" + f"\n{' ' * len(function.name)} ".join(call) + "\n```"
    yield plain(inspect.cleandoc(ast.get_docstring(function) or ""))
    if described: yield table(*rows)


def said_of_class(kind, comments):
    "Docstring, fields and public methods of a class; `comments` are those of its cell, by line."
    bases = ", ".join(map(ast.unparse, kind.bases))
    yield f"```python\nclass {kind.name}{f'({bases})' if bases else ''}\n```"
    yield plain(inspect.cleandoc(ast.get_docstring(kind) or ""))
    fields, methods = [("setting", "type", "default", "meaning")], [("method", "what it does")]
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and not node.target.id.startswith("_"):
            comment = plain(comments.get(node.end_lineno, ""))
            fields.append((code(node.target), code(node.annotation), code(node.value), comment))
        elif isinstance(node, FUNCTIONS) and not node.name.startswith("_") and ast.get_docstring(node):
            attribute = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
            first = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
            methods.append((f"`{node.name if attribute else signature(node)}`", plain(first)))
    for rows in fields, methods:
        if len(rows) > 1: yield table(*rows)


def is_kernel(node):
    return any(re.search(r"\bjit\b", ast.unparse(decorator)) for decorator in node.decorator_list)


class Pages(Processor):
    "Show exported code with its documentation, fold long code, imports and claims, and link names."
    def __init__(self, nb):
        super().__init__(nb)
        self.module, self.imported = None, frozenset()
        for cell in nb.cells:  # before nbdev's own processors, which hide what is marked `export`
            for option in "export", "exporti":
                if option in cell.directives_: cell.directives_["shown"] = cell.directives_.pop(option)
            if "default_exp" in cell.directives_:
                self.module = f"{get_config().lib_name}.{cell.directives_['default_exp'][0]}"

    def end(self):
        self.page = Path(self.nb.path_).resolve().relative_to(get_config().config_path.resolve())
        code = [cell.source for cell in self.nb.cells if cell.cell_type == "code"]
        for node in (node for source in code for node in ast.parse(source).body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(get_config().lib_name):
                self.imported |= {alias.name for alias in node.names}
        cells, level = [], 1
        for cell in self.nb.cells:
            if cell.cell_type == "markdown":
                headings = re.findall(r"^(#+) ", re.sub(r"^```[\s\S]*?^```", "", cell.source, flags=re.M), flags=re.M)
                level = len(headings[-1]) if headings else level
                cell.source = self.linked(cell.source)
            elif cell.cell_type == "code":
                cells += self.prepared(cell, level + 1)
            cells.append(cell)
        self.nb.cells = cells

    def linked(self, text, known=()):
        return linked(text, self.module, self.page, self.imported, known)

    def fold(self, cell, summary):
        if "code-fold:" not in cell.directives_:
            cell.source = f"#| code-fold: true\n#| code-summary: \"{summary}\"\n{cell.source}"

    def prepared(self, cell, level):
        "The Markdown cells that go before a code cell, which is folded where it should be."
        for output in cell.outputs:
            if said := output.get("data", {}).get("text/markdown"):  # whose headings are not the page's
                said = re.sub(r"^#+ (.+)$", r"**\1**", "".join(said), flags=re.M)
                output.data["text/markdown"] = self.linked(said).splitlines(keepends=True)
        body = ast.parse(cell.source).body
        if body and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body): self.fold(cell, "Imports")
        elif cell.directives_.keys() & {"shown", "exports"}: return self.documentation(cell, level)
        elif re.search(r"^claim\(", cell.source, flags=re.M): self.fold(cell, "Code of the claim")
        return []

    def documentation(self, cell, level):
        "The headings of a cell of exported code, with what its docstrings say where the code is folded."
        nodes = [node for node in ast.parse(cell.source).body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
        public = [node for node in nodes if not node.name.startswith("_")]
        ids = [f"{self.module}.{node.name}" for node in public]
        lines = sum(not line.startswith("#|") for line in cell.source.strip().splitlines())
        mark = "#" * min(level, 6)
        if lines <= LONG or "exports" in cell.directives_ or any(map(is_kernel, nodes)):
            names = ", ".join(f"`{node.name}`" for node in public)
            others = "".join(f"\n\n::: {{#{name}}}\n:::" for name in ids[1:])
            return [mk_cell(f"{mark} {names} {{#{ids[0]} .definition}}{others}", "markdown")] if public else []
        tokens = tokenize.generate_tokens(io.StringIO(cell.source).readline)
        comments = {t.start[0]: t.string.lstrip("#").strip() for t in tokens if t.type == tokenize.COMMENT}
        named = [node.name for node in nodes] or re.findall(r"^(\w+)(?:: .*?)? = ", cell.source, flags=re.M)
        self.fold(cell, f"Code of {', '.join(named)}: {lines} lines" if named else f"Code, {lines} lines")
        texts = []
        for node, name in zip(public, ids):
            said = (said_of_class if isinstance(node, ast.ClassDef) else said_of_function)(node, comments)
            texts.append(f"{mark} `{node.name}` {{#{name} .definition}}")
            texts += [self.linked(part, known=[name]) for part in said if part]
        return [mk_cell("\n\n".join(texts), "markdown")] if texts else []
