"""The guide's table of rules matches the rules."""

from __future__ import annotations

import re
from pathlib import Path

from hpcgen.check.lint.check import RULES

GUIDE = Path(__file__).parents[2] / "docs/lint.md"


def test_the_guide_lists_every_rule() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| (\w+) \| (.*) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert rows == sorted((rule.id, rule.severity, rule.title) for rule in RULES.values())
