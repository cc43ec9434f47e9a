"""Swap directories of DeepSpeed in a container."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from hpcgen.config.loader import Run
from hpcgen.errors import Problem
from hpcgen.planning.deepspeed.facts import ZERO, problem
from hpcgen.planning.software import runtime


def swap_problems(run: Run, config: Mapping[str, Any]) -> Iterator[Problem]:
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
