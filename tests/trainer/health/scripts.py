"""Sites and rendered scripts for the cluster's own stages, run with stand-ins for Slurm's programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcgen import api
from hpcgen.config.loader import load_cluster_run

ROOT = Path(__file__).parents[3]


def write_site(directory: Path, node_type: dict[str, Any] | None = None, **profile: Any) -> Path:
    """A cluster profile over the local one, with a node type of its own; JSON is YAML."""
    values = {"extends": "local", "python": sys.executable, "scratch": str(directory), **profile}
    if node_type is not None:
        (directory / "topologies").mkdir(exist_ok=True)
        (directory / "topologies" / "site.yaml").write_text(json.dumps(node_type))
        values["node_type"] = "site"
    path = directory / "site.yaml"
    path.write_text(json.dumps(values))
    (directory / "run").mkdir(exist_ok=True)
    return path


def render(stage: str, site: Path, overrides: Sequence[str] = ()) -> str:
    """The script of one of the cluster's stages. Its run directory is `run` next to the profile."""
    run = load_cluster_run(str(site), str(site.parent / "run"), overrides)
    return api.render(api.plan(run, [stage]), stage)


def tasks(stage: str, nodes: int, ntasks_per_node: int) -> list[str]:
    """Overrides for this many nodes and tasks."""
    key = stage.replace("-", "_")
    return [f"slurm.{key}.nodes={nodes}", f"slurm.{key}.ntasks_per_node={ntasks_per_node}"]
