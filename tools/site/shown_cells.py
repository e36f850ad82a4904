"""A notebook as its page shows it: options of cells, `#| ...`, become what MyST-NB understands.

The algorithm is open; tests, claims, imports and the code of figures are folded. `#| code-fold` decides where it is
given, and what is marked `#| exports` is always open."""
import ast
import json
import re

import yaml

LONG = 40  # lines of exported code above which it is folded
EMPTY = r"(<t[dh][^>]*>)\s*(?:NaN|nan|None|NaT|&lt;NA&gt;)\s*(?=</t[dh]>)"


def options_of(source):
    "The options of a cell and the source without them."
    lines = re.findall(r"^#\| *([\w-]+):? *(.*)$", source, flags=re.M)
    options = {name: yaml.safe_load(value) if value else True for name, value in lines}
    return options, re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip()


def is_test(node):
    "Is a statement a check, or a block of checks?"
    if isinstance(node, (ast.For, ast.With)): return all(map(is_test, node.body))
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    return isinstance(node, ast.Assert) or getattr(called, "id", "").startswith("test_")


def kind_of(source, outputs):
    "What kind of cell that is not exported has its code folded, or None."
    if re.search(r"^[%!]", source, flags=re.M): return None
    body = ast.parse(source).body
    lines = lambda nodes: sum(node.end_lineno - node.lineno + 1 for node in nodes)
    if all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body): return "Imports"
    if re.search(r"^claim\(", source, flags=re.M): return "Code of the claim"
    if any("image/png" in output.get("data", {}) for output in outputs): return "Code of the figure"
    if 2 * lines(filter(is_test, body)) >= lines(body): return "Test"


def fold_of(options, source, outputs):
    "The line below which the code of a cell is folded, or None where it is open."
    count = len(source.splitlines())
    if "code-fold" in options:
        return options.get("code-summary", f"Code, {count} lines") if options["code-fold"] is True else None
    if not options.keys() & {"export", "exporti", "exports"}: return kind_of(source, outputs)
    if count <= LONG or "exports" in options or re.search(r"^@\S*\bjit\b", source, flags=re.M): return None
    named = re.findall(r"^(?:def|class) (\w+)|^(\w+)(?:: .*?)? = ", source, flags=re.M)
    return f"Code of {', '.join(map(''.join, named))}: {count} lines"


def shown_markdown(text):
    "Markdown with what only Quarto knows as MyST has it: callouts, numbered equations and references to them."
    text = re.sub(r"^::: *\{\.callout-\w+ collapse=\"true\"\}\n+#+ +(.+)\n([\s\S]*?)^:::$",
                  r"<details>\n<summary>\1</summary>\n\n\2\n</details>", text, flags=re.M)
    text = re.sub(r"^::: *\{\.callout-(\w+)\}\n+#+ +(.+)\n([\s\S]*?)^:::$",
                  r"::::{admonition} \2\n:class: \1\n\3::::", text, flags=re.M)
    text = re.sub(r"^\$\$ \{#(eq-[\w-]+)\}$", r"$$ (\1)", text, flags=re.M)
    return re.sub(r"(?<![\w`])@(eq-[\w-]+)", r"Eq. {eq}`\1`", text)


def shown_output(output):
    "An output whose tables have a dash where they have nothing."
    data = output.get("data", {})
    if "text/html" in data:
        page = re.sub(r"<style[\s\S]*?</style>\s*", "", "".join(data["text/html"]))
        data["text/html"] = re.sub(EMPTY, r"\1–", page)
    return output


def shown_code(cell):
    "A code cell, or None where it has nothing to show."
    options, source = options_of("".join(cell["source"]))
    outputs = [shown_output(output) for output in cell["outputs"]]
    if not source: return None
    shown, tags = {}, []
    if options.get("echo") is False: tags.append("remove-input")
    elif summary := fold_of(options, source, outputs):
        tags.append("hide-input")
        shown |= {"code_prompt_show": summary, "code_prompt_hide": summary}
    if "fig-alt" in options: shown["image"] = {"alt": options["fig-alt"]}
    return cell | {"source": source, "outputs": outputs, "metadata": {"tags": tags, "mystnb": shown}}


def shown(text):
    "The JSON of a notebook, ready for MyST-NB."
    notebook, cells = json.loads(text), []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown": cell["source"] = shown_markdown("".join(cell["source"]))
        if cell["cell_type"] == "code": cell = shown_code(cell)
        if cell: cells.append(cell)
    return json.dumps(notebook | {"cells": cells, "metadata": {"language_info": {"name": "python"}}})
