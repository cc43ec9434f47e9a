"""Rules about keys of DeepSpeed's configuration together. Each names the code of DeepSpeed that it follows from."""

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
