"""The rules for a run. Each is a small function with its source; `check` collects their violations."""

from hpcgen.planning.rules.check import check
from hpcgen.planning.rules.facts import Facts, World

__all__ = ["Facts", "World", "check"]
