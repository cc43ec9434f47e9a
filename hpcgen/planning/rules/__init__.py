"""What a run must obey, each rule a small function with its source; `check` collects what they find."""

from hpcgen.planning.rules.check import check
from hpcgen.planning.rules.facts import Facts, World

__all__ = ["Facts", "World", "check"]
