"""The decks of the course, one for each session, as HTML in _slides/: make slides.

nbs/course/slides.yml says which parts of which chapters a slide shows; they are taken from the chapters as they are in
the repository, and a part that is not there is an error. The decks need no network: reveal.js is that of the package
sphinx-revealjs, MathJax 3.2.2 that of sphinx-mathjax-offline; both are copied beside them."""
import importlib.util
import re
import shutil
import sys
from html import escape
from pathlib import Path

import nbformat
import yaml
from nbconvert import SlidesExporter
from nbconvert.preprocessors import TagRemovePreprocessor

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT, NARROW = 1280, 720, 88  # pixels of a slide; columns of code that fit in large letters
KINDS = "text", "formula", "figure", "code", "run", "output", "say"  # the parts of a slide


def module(path):
    "A Python file as a module."
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


# as on the site: dashes for what is empty
shown_output = module(ROOT / "tools" / "site" / "shown_cells.py").shown_output


def sessions(root=ROOT):
    "Number of a session -> its title and its slides."
    return yaml.safe_load((root / "nbs" / "course" / "slides.yml").read_text(encoding="utf-8"))


def cells_of(page, root=ROOT):
    return nbformat.read(root / "nbs" / f"{page}.ipynb", 4).cells


def title_of(cells): return cells[0]["source"].splitlines()[0].removeprefix("# ")


def paragraphs(cells):
    "The paragraphs of a page, as they are written, without callouts' fences and headings."
    text = "\n\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r"^(:::.*|#+ .*)$", "", text, flags=re.M)
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def for_a_slide(text):
    "Markdown without comments, labels of equations, and links that lead from page to page."
    text = re.sub(r" ?<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r" \{#eq-[\w-]+\}", "", text)
    if there := re.search(r"@eq-[\w-]+", text): raise ValueError(f"{there[0]} means nothing on a slide: {text[:60]}")
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


def one(found, what):
    "The only thing of a list."
    if len(found) != 1: raise ValueError(f"{what}: {len(found)} places, expected is 1")
    return found[0]


def code_of(cell):
    "A code cell's source without its options."
    return re.sub(r"^#\|.*\n", "", cell["source"], flags=re.M).strip()


def markdown(text): return nbformat.v4.new_markdown_cell(text)


def part(kind, key, page, cells):
    "A part of a slide as a cell."
    where = f"{page}: {kind} {key!r}"
    if kind == "say": return markdown(key)
    if kind in ("text", "formula"):
        fits = (lambda x: x.startswith(key)) if kind == "text" else (lambda x: x.startswith("$$") and key in x)
        return markdown(for_a_slide(one([x for x in paragraphs(cells) if fits(x)], where)))
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    if kind == "figure":
        drawn = [cell for cell in code if any("image/png" in x.get("data", {}) for x in cell["outputs"])]
        if not 1 <= key <= len(drawn): raise ValueError(f"{where}: the page has {len(drawn)} figures")
        picture = next(x["data"]["image/png"] for x in drawn[key - 1]["outputs"] if "image/png" in x.get("data", {}))
        alt = re.search(r'^#\| fig-alt: "(.*)"$', drawn[key - 1]["source"], re.M)
        return markdown(f'<img src="data:image/png;base64,{picture.strip()}" alt="{escape(alt[1] if alt else "")}">')
    cell = one([cell for cell in code if key in cell["source"]], where)
    made = nbformat.v4.new_code_cell(code_of(cell))
    if kind != "code": made.outputs = [shown_output(x) for x in cell["outputs"] if "image/png" not in x.get("data", {})]
    said = [] if kind == "code" else [line for x in made.outputs for line in x.get("text", "").splitlines()]
    longest = max(map(len, said + ([] if kind == "output" else made.source.splitlines())), default=0)
    made.metadata = {"tags": ["hide-input"] * (kind == "output") + ["narrow"] * (longest <= NARROW)}
    return made


def slide_of(entry, root=ROOT):
    "The cells of a slide."
    page = entry.get("page")
    cells = cells_of(page, root) if page else []
    made = [markdown(f"## {entry['title']}")]
    for each in entry["show"]:
        (kind, key), = each.items()
        if kind not in KINDS: raise ValueError(f"{entry['title']}: {kind!r} is none of {', '.join(KINDS)}")
        made.append(part(kind, key, page, cells))
    if page:
        made.append(markdown(f'<p class="source">{escape(title_of(cells))}</p>'))
    return made


def deck(session, root=ROOT):
    "The slides of a session as a notebook: a first slide with its title, then those of the list."
    number, content = session
    pages = {entry["page"]: title_of(cells_of(entry["page"], root)) for entry in content["slides"] if "page" in entry}
    aims = "\n".join(f"- {x}" for x in content["aims"])
    slides = [[markdown(f"# Session {number}: {content['title']}\n\nAfter it you can\n\n{aims}\n\n"
                        f"From the chapters {', '.join(pages.values())}")]]
    slides += [slide_of(entry, root) for entry in content["slides"]]
    cells = []
    for slide in slides:
        for place, cell in enumerate(slide):
            cell.metadata = {**cell.metadata, "slideshow": {"slide_type": "slide" if place == 0 else "-"}}
            cells.append(cell)
    return nbformat.v4.new_notebook(cells=cells, metadata={"title": f"Session {number}: {content['title']}"})


def html(notebook):
    "A deck as HTML that loads what lies in assets/ beside it."
    exporter = SlidesExporter(
        template_name="deck", extra_template_basedirs=[str(ROOT / "tools")], reveal_url_prefix="assets/reveal",
        reveal_theme="white", reveal_width=str(WIDTH), reveal_height=str(HEIGHT), exclude_input_prompt=True,
        exclude_output_prompt=True, exclude_anchor_links=True)
    exporter.register_preprocessor(TagRemovePreprocessor(remove_input_tags={"hide-input"}, enabled=True), enabled=True)
    return exporter.from_notebook_node(notebook)[0]


def copy_assets(there):
    "reveal.js and MathJax, from the packages that hold them."
    place = lambda name: Path(importlib.util.find_spec(name).origin).parent
    reveal = place("sphinx_revealjs") / "_static" / "revealjs"
    for name in "dist", "plugin/notes": shutil.copytree(reveal / name, there / "reveal" / name, dirs_exist_ok=True)
    shutil.copy(reveal / "LICENSE", there / "reveal")
    mathjax = place("sphinx-mathjax-offline") / "static" / "mathjax"
    fonts = Path("output/chtml/fonts/woff-v2")
    shutil.copytree(mathjax / fonts, there / "mathjax" / fonts, dirs_exist_ok=True)
    shutil.copy(mathjax / "tex-chtml.js", there / "mathjax")


def build(out, root=ROOT):
    "Write all decks into a folder: their files."
    out.mkdir(parents=True, exist_ok=True)
    copy_assets(out / "assets")
    files = []
    for session in sessions(root).items():
        files.append(out / f"session_{session[0]}.html")
        files[-1].write_text(html(deck(session, root)), encoding="utf-8")
    return files


if __name__ == "__main__":
    for file in build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "_slides")): print(f"open {file}")
