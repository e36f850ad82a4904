"""The list of pages, nbs/contents.yml. Run as a command, it writes the list into the sidebar of _quarto.yml, and the
methods of the registry into the names of the package."""
import json
import re
import sys
import textwrap
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FRONT = "index.qmd"


def parts(root=ROOT):
    "Part -> paths of its pages, relative to the root, in reading order; the front page is in none."
    return yaml.safe_load((root / "nbs" / "contents.yml").read_text(encoding="utf-8"))


def pages():
    "Paths of all pages in reading order."
    return [FRONT, *(page for part in parts().values() for page in part)]


def quarto(text):
    "The text of _quarto.yml with the list of pages as the contents of its sidebar."
    lines = ["      - text: sparse_nb", f"        href: {FRONT}"]
    for part, paths in parts().items():
        lines += [f"      - section: {part}", "        contents:", *(f"          - {path}" for path in paths)]
    return re.sub(r"(?<=\n    contents:\n)(?:      .*\n)+", lambda _: "\n".join(lines) + "\n", text)


def front_door(source):
    "The source of the package's cell of names, with every method of the registry among them."
    sys.path.insert(0, str(ROOT))
    from sparse_nb.core.registry import CLASSES
    known = re.findall(r'"(\w+)"', source.partition("_all_ = [")[2].partition("]")[0].partition("\n")[2])
    names = [name for name in known if name in CLASSES or not name[0].isupper() or name == "Method"]
    lines = ", ".join(f'"{name}"' for name in [*names, *(x for x in CLASSES if x not in names)])
    listed = textwrap.fill(lines, 120, initial_indent="    ", subsequent_indent="    ")
    return re.sub(r"(_all_ = \[[^\n]*\n)[^\]]*(?=\])", lambda m: m[1] + listed, source)


if __name__ == "__main__":
    door = ROOT / "nbs" / "library" / "front_door.ipynb"
    notebook = json.loads(door.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if "_all_ = [" in "".join(cell["source"]):
            cell["source"] = front_door("".join(cell["source"])).splitlines(keepends=True)
    door.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    settings = ROOT / "_quarto.yml"
    settings.write_text(quarto(settings.read_text(encoding="utf-8")), encoding="utf-8")
