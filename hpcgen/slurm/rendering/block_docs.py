"""Documentation of blocks, from the table in templates/README.md. Needs no Jinja, so that --help is fast."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcgen.resources import shipped


@dataclass(frozen=True)
class BlockDoc:
    """A row of the table, in plain text."""

    holds: str
    site_may: str


def block_docs() -> dict[str, BlockDoc]:
    """Block -> its documentation, in the order of the script.

    The README is shipped with the templates, and a test checks that its table lists every block.
    """
    readme = (shipped("templates") / "README.md").read_text(encoding="utf-8")
    _, _, section = readme.partition("\n## Blocks\n")
    table, _, _ = section.partition("\n## ")
    docs = {}
    for row in re.findall(r"^\| `.*\|$", table, re.MULTILINE):
        names, holds, site_may = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:4])
        for name in re.findall(r"`(\w+)`", names):
            docs[name] = BlockDoc(_plain(holds), _plain(site_may))
    return docs


def _plain(cell: str) -> str:
    return cell.replace("`", "").replace("\\|", "|")
