"""The documentation has every section that the doctor names, and every name of a cause."""

from __future__ import annotations

import re
from pathlib import Path

from hpcgen.doctor.failure import FIXES
from hpcgen.logs.signatures import KINDS

ROOT = Path(__file__).parents[2]
SOURCES = "\n".join(path.read_text() for path in (ROOT / "hpcgen/doctor").glob("*.py"))


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_section_that_a_cause_names_exists() -> None:
    named = set(re.findall(r"\"([a-z-]+\.md)#([a-z0-9-]+)\"", SOURCES))
    assert len(named) > 5
    assert {(page, anchor) for page, anchor in named if anchor not in anchors(page)} == set()


def test_every_kind_of_failure_has_a_fix() -> None:
    headings = {kind.fix for kind in KINDS.values() if kind.fix}
    assert headings - FIXES.keys() == set()
    assert FIXES.keys() - anchors("faults.md") == set()


def test_every_cause_is_in_the_documentation() -> None:
    names = set(re.findall(r"name=\"([a-z-]+)\"", SOURCES))
    text = (ROOT / "docs/faults.md").read_text()
    assert {name for name in names if f"`{name}`" not in text} == set()
