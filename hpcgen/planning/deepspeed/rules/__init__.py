"""Rules between keys of DeepSpeed's configuration, each with the code of DeepSpeed from which it follows."""

from __future__ import annotations

from hpcgen.planning.deepspeed.rules import features, offload, optimizer, parallel, precision, zero

RULES = (
    *zero.RULES,
    *offload.RULES,
    *precision.RULES,
    *optimizer.RULES,
    *parallel.RULES,
    *features.RULES,
)
"""All rules. Each yields the problems of a configuration whose values have valid types."""
