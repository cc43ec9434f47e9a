"""Sphinx's configuration for the docs site; `make docs` builds it.

The source directory is the repository's root, so a link between two Markdown files is the same on the site and on a
code host.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import reference  # noqa: E402

from hpcgen.version import __version__  # noqa: E402

project = "hpcgen"
version = release = __version__
html_title = f"hpcgen {__version__}"

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/**.md",
    "templates/README.md",
    "topologies/README.md",
    "examples/*/README.md",
]
exclude_patterns = [
    path.name
    for path in ROOT.iterdir()
    if path.is_dir() and path.name not in ("docs", "examples", "templates", "topologies")
]
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]  # excerpts of scripts and templates need not be complete

myst_heading_anchors = 4
"""Headings get the anchors that code hosts give them."""
smartquotes = False
"""Two hyphens are the start of an option."""
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_copy_source = html_show_sourcelink = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]

CONTENTS = {
    "Start": [
        "docs/first-day",
        "docs/planning",
        "docs/layouts",
        "docs/install",
        "docs/architecture",
        "docs/glossary",
    ],
    "Train": [
        *(
            "docs/training",
            "docs/training-options",
            "docs/fine-tuning",
            "docs/moe",
            "docs/deepseek",
            "docs/long-context",
            "docs/resuming",
            "docs/stages",
            "docs/tune",
            "docs/sweeps",
            "docs/performance",
        ),
        *("docs/program", "docs/deepspeed", "examples/deepspeed/README"),
        *("docs/generation", "docs/inner-loop", "docs/python"),
    ],
    "Data": ["docs/data", "docs/tokenization", "docs/sampling"],
    "Watch and repair": [
        *(
            "docs/operate",
            "docs/report",
            "docs/metrics",
            "docs/faults",
            "docs/checkpoints",
            "docs/storage",
            "docs/exchange",
        ),
    ],
    "Use a model elsewhere": ["docs/huggingface"],
    "Set up a cluster": [
        *("docs/admins", "docs/images", "docs/health", "docs/environment", "topologies/README"),
        *("docs/templates", "templates/README", "docs/lint"),
    ],
    "Reference": [*(f"docs/reference/{page}" for page in reference.PAGES), "docs/trainer"],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
}
"""Caption -> pages, as the sidebar lists them."""
PLACEHOLDER = "`make docs` adds"
"""Start of the last paragraph of a page of the reference, which stands for what is generated."""

_listed = {page for pages in CONTENTS.values() for page in pages}
if _others := {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")} - _listed:
    CONTENTS["More"] = sorted(_others)


def complete_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the contents of the site to the README, and to a page of the reference what is generated for it."""
    if docname == root_doc:
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
            for caption, pages in CONTENTS.items()
        )
    directory, _, page = docname.rpartition("/")
    if directory == "docs/reference":
        introduction, _, _ = source[0].partition(PLACEHOLDER)
        source[0] = introduction + reference.PAGES[page]()


def completed_pages(*_: object) -> list[str]:
    """Pages that are read in every build: what `complete_page` adds may change while their files do not."""
    return [root_doc, *(f"docs/reference/{page}" for page in reference.PAGES)]


def setup(app: Sphinx) -> None:
    """Connects the functions above to Sphinx."""
    app.connect("source-read", complete_page)
    app.connect("env-get-outdated", completed_pages)
