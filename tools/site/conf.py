"""The site, by Sphinx, MyST-NB and the theme Shibuya: make site."""
import html
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "site")]

import contents  # noqa: E402
import shown_cells  # noqa: E402
from sphinx.util.fileutil import copy_asset  # noqa: E402

project, html_title, root_doc = "sparse_nb", "sparse_nb", "index"
extensions = ["myst_nb"]
source_suffix = dict.fromkeys((".ipynb", ".md", ".qmd"), "myst-nb")
include_patterns = contents.pages()
exclude_patterns = [".*", "_*", "build", "dist", "runs", "benchmarks", "sparse_nb", "tests"]
suppress_warnings = ["mystnb.unknown_mime_type"]

nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_merge_streams = True
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_dmath_allow_digits = myst_dmath_allow_space = False
myst_heading_anchors = 6

html_theme = "shibuya"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
templates_path = ["templates"]
html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # it would be fetched, which no browser does from the disk
html_theme_options = {"show_ai_links": False, "ethical_ads_publisher": "", "accent_color": "blue"}
mathjax_path = "mathjax/tex-chtml.js"


def read_source(app, docname, source):
    "Notebooks are prepared, the front page gets the list of pages, and {{< include >}}, which is Quarto's, is done."
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".ipynb": source[0] = shown_cells.shown(source[0])
    source[0] = re.sub(r"\{\{< include (\S+) >\}\}",
                       lambda name: (path.parent / name[1]).read_text(encoding="utf-8"), source[0])
    source[0] = re.sub(r"README\.md(?=[)#])", "index.qmd", source[0])  # these pages are README, where they lie
    if docname == root_doc:
        for part, pages in contents.parts().items():
            lines = "\n".join(f"/{Path(page).with_suffix('')}" for page in pages)
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {part}\n\n{lines}\n```\n"


def add_menu(app, pagename, template, context, doctree):
    "The menu in place of the theme's: the parts, folded but for the one of the page."
    here = {pagename: ' aria-current="page"'}

    def part(name, pages):
        docs = [str(Path(page).with_suffix("")) for page in pages]
        titles = [html.escape(app.env.titles[doc].astext()) for doc in docs]
        links = []
        for doc, title in zip(docs, titles):
            address = app.builder.get_relative_uri(pagename, doc) or "#"
            links.append(f'<li><a href="{address}"{here.get(doc, "")}>{title}</a></li>')
        opened = ' open="open"' if pagename in docs else ""
        return f"<details{opened}><summary>{html.escape(name)}</summary><ul>{''.join(links)}</ul></details>"
    context["toctree"] = lambda **options: "".join(part(*each) for each in contents.parts().items())


def copy_mathematics(app, failure):
    "MathJax 3.2.2 and its fonts, of the package sphinx-mathjax-offline."
    package = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
    there = Path(app.outdir) / "_static" / "mathjax"
    copy_asset(package / "tex-chtml.js", there)
    copy_asset(package / "output/chtml/fonts/woff-v2", there / "output/chtml/fonts/woff-v2")


def setup(app):
    app.connect("source-read", read_source)
    app.connect("html-page-context", add_menu)
    app.connect("build-finished", copy_mathematics)
