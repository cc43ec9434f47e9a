"""All rules, in the order in which their violations are reported."""

from __future__ import annotations

from trainer.contract.rules import (
    batch,
    checkpoint,
    context_parallel,
    cuda_graphs,
    data,
    evaluation,
    experts,
    latent_attention,
    logging,
    model,
    multi_token,
    optimizer,
    parallelism,
    precision,
    recompute,
    schedule,
)
from trainer.contract.rules.facts import Rule

ERRORS: tuple[Rule, ...] = (
    *model.RULES,
    *parallelism.RULES,
    *experts.RULES,
    *latent_attention.RULES,
    *multi_token.RULES,
    *context_parallel.RULES,
    *batch.RULES,
    *recompute.RULES,
    *schedule.RULES,
    *optimizer.RULES,
    *data.RULES,
    *precision.RULES,
    *cuda_graphs.RULES,
    *checkpoint.RULES,
    *logging.RULES,
    *evaluation.RULES,
)
"""Rules that a run must obey. Causes precede their consequences, because the first violation is reported."""

WARNINGS: tuple[Rule, ...] = (
    *model.WARNINGS,
    *experts.WARNINGS,
    *precision.WARNINGS,
    *optimizer.WARNINGS,
    *evaluation.WARNINGS,
)
"""Rules that a run may break at the cost of speed, memory or quality."""
