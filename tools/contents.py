"""The list of pages, nbs/contents.yml. Run as a command, it writes the list into the sidebar of _quarto.yml."""
import re
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


if __name__ == "__main__":
    settings = ROOT / "_quarto.yml"
    settings.write_text(quarto(settings.read_text(encoding="utf-8")), encoding="utf-8")
