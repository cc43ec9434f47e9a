"""The section program.deepspeed of a run: its mistakes, DeepSpeed's complete configuration, and its memory.

Most programs have no such section, so these modules are imported only for those that do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from hpcgen.config.loader import Run
from hpcgen.config.node_type import NodeType
from hpcgen.config.program import DeepSpeedConfig
from hpcgen.errors import HpcgenError, Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.deepspeed import batch
from hpcgen.planning.deepspeed.check import deepspeed_problems
from hpcgen.planning.deepspeed.facts import ZERO, problem
from hpcgen.planning.deepspeed.file import config_with
from hpcgen.planning.deepspeed.fit import configured_fit, fit_problems
from hpcgen.planning.deepspeed.model import model_size
from hpcgen.planning.memory import GIB
from hpcgen.planning.software import runtime


@dataclass(frozen=True)
class Section:
    """The section, whose paths are absolute, and the allocation of the job."""

    settings: DeepSpeedConfig
    allocation: Allocation

    def problems(self, run: Run) -> Iterator[Problem]:
        """Yields mistakes in the section, and in the configuration of DeepSpeed in it. Without any, yields what does
        not fit, unless memory_check makes that a warning.
        """
        mistakes = list(_mistakes(run, self.settings, self.allocation))
        yield from mistakes
        if not mistakes and run.config.memory_check == "error":
            for problem in self.memory_problems(run):
                yield replace(problem, hint=f"{problem.hint}, or use --set memory_check=warning")

    def memory_problems(self, run: Run) -> Iterator[Problem]:
        """Yields a problem if DeepSpeed needs more memory than a GPU or a node has, according to the estimate."""
        fit = configured_fit(self.settings, self.allocation, run.node_type)
        yield from fit_problems(self.settings, fit) if fit is not None else ()

    def complete_config(self, values: Mapping[str, str]) -> dict[str, Any]:
        """DeepSpeed's complete configuration. `values` replace the placeholders in its strings."""
        return config_with(self._filled(), values)

    def summary(self, node_type: NodeType) -> dict[str, Any]:
        """The batch, the ZeRO stage and the memory, as `validate --json` has them."""
        fit = configured_fit(self.settings, self.allocation, node_type)
        return {
            "train_batch_size": self._filled().get(batch.TRAIN),
            "zero_stage": self.settings.config.get("zero_optimization", {}).get("stage", 0),
            "memory_gib_per_gpu": fit and fit.estimate.gpu / GIB,
            "memory_gib_per_node": fit and fit.estimate.host / GIB,
            "nvme_gib_per_node": fit and fit.estimate.nvme / GIB,
        }

    def _filled(self) -> dict[str, Any]:
        copies = self.allocation.nodes * self.allocation.ranks_per_node // self.settings.model_parallel_size
        return batch.filled(self.settings.config, copies)


def _mistakes(run: Run, section: DeepSpeedConfig, allocation: Allocation) -> Iterator[Problem]:
    ranks_per_node = allocation.ranks_per_node
    yield from deepspeed_problems(
        section, allocation.nodes * ranks_per_node, ranks_per_node, allocation.nvlink_nodes
    )
    yield from _swap_problems(run, section.config)
    if section.model is not None and section.parameters is not None:
        yield Problem(
            "program.deepspeed.parameters",
            "is ignored, because model is set",
            "remove one of them",
            about=("program.deepspeed.model",),
        )
    try:
        model_size(section)
    except HpcgenError as error:
        mistake = error.mistakes[0]
        yield Problem("program.deepspeed.model", f"cannot be used: {mistake.sentence}", mistake.hint)


def _swap_problems(run: Run, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields each nvme_path that is not a mount. Its swap files would be in the container's own file system."""
    zero = config.get(ZERO)
    if not isinstance(zero, Mapping) or runtime(run.config, run.cluster) == "none":
        return
    mounts = (*run.cluster.container.mounts, *run.config.container.mounts)
    visible = [run.cluster.scratch, *(mount.target or mount.source for mount in mounts)]
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        path = section.get("nvme_path") if isinstance(section, Mapping) else None
        if not isinstance(path, str) or not path.startswith("/"):
            continue
        if not any(PurePosixPath(path).is_relative_to(place) for place in visible):
            hint = 'use "{SCRATCH}", or add the directory to container.mounts'
            yield problem(f"{ZERO}.{name}.nvme_path", "is not mounted in the container", hint)
