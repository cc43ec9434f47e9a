"""A stage of a plan as a batch script, and the parts of that script that submitit runs around its own launch line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.errors import HpcgenError
from hpcgen.planning.container import CONTAINER_NAME
from hpcgen.planning.environment import Variable, library_path
from hpcgen.planning.plan import Plan
from hpcgen.planning.stage import StagePlan
from hpcgen.rendering.blocks import require_known_blocks
from hpcgen.rendering.environment import SHIPPED, ShellEnvironment, make_environment, template_origins
from hpcgen.rendering.render import render_template
from hpcgen.stages import STAGES
from hpcgen.version import __version__

LAUNCH = "# ==== launch ===="
CONCLUDE = "# ==== conclude ===="

UMASKS = {"private": ("077", "600", "700"), "group": ("007", "660", "2770")}
"""share -> umask, mode of files, mode of directories (setgid keeps the group of the run directory)."""


@dataclass(frozen=True)
class Script:
    """A rendered batch script."""

    text: str
    sources: tuple[Path, ...] = ()
    """The template files that it was made of."""
    is_of_site: bool = False
    """Whether one of them is a site's."""

    def directives(self) -> tuple[str, ...]:
        """What follows #SBATCH, in order."""
        return tuple(line[8:] for line in self.text.splitlines() if line.startswith("#SBATCH "))

    def around_launch(self) -> tuple[list[str], list[str]]:
        """The lines between the directives and the launch, and those after it.

        submitit writes its own directives and its own srun line: these go before and after it as its public
        `setup` and `teardown`, so both ways of submitting share one template, a site's blocks included.

        Raises:
            HpcgenError: a site's template replaced the markers around the launch.
        """
        lines = self.text.splitlines()
        if lines.count(LAUNCH) != 1 or lines.count(CONCLUDE) != 1:
            raise HpcgenError(
                f"the template has lost its lines {LAUNCH!r} and {CONCLUDE!r}, between which submitit launches",
                "extend hpcgen/slurm/base.sbatch.j2 and replace its blocks",
            )
        first = 1 + max(index for index, line in enumerate(lines) if line.startswith("#SBATCH "))
        return lines[first : lines.index(LAUNCH)], lines[lines.index(CONCLUDE) + 1 :]


def render_stage(plan: Plan, stage: str, site_directories: Sequence[Path] = ()) -> Script:
    """The batch script of one stage; the same plan and templates give the same bytes.

    Raises:
        HpcgenError: a template that is missing, unreadable or wrong.
    """
    environment = make_environment(site_directories, plan.run.cluster.trusted_groups)
    name = STAGES[stage].template
    origins = template_origins(environment, name)
    if site_directories:
        require_known_blocks(environment, name)
    context = template_context(plan, stage, origins)
    text = render_template(environment, name, context)
    is_of_site = any(not origin.startswith(SHIPPED) for origin in origins)
    return Script(text, template_sources(environment, origins), is_of_site)


def template_sources(environment: ShellEnvironment, origins: Sequence[str]) -> tuple[Path, ...]:
    """The files of `template_origins`."""
    ours = environment.directories[-1]
    return tuple(ours / origin.removeprefix(SHIPPED) for origin in origins)


def template_context(plan: Plan, stage_name: str, origins: tuple[str, ...]) -> dict[str, Any]:
    """What a template may use: plain values. templates/README.md documents each."""
    stage = plan.stages[stage_name]
    config, cluster = plan.config, plan.run.cluster
    umask, file_mode, directory_mode = UMASKS[config.share]
    container = stage.container
    context: dict[str, Any] = {
        "stage": stage.name,
        "title": f"{config.name}: {stage.name}",
        "directives": [_option(directive) for directive in stage.directives],
        "umask": umask,
        "file_mode": file_mode,
        "directory_mode": directory_mode,
        "run_dir": config.paths.run_dir,
        "job_files": [{"name": name, "text": text} for name, text in stage.files.items()],
        "is_array": stage.allocation.array is not None,
        "device": stage.device,
        "nodes": stage.allocation.nodes,
        "spare_nodes": stage.allocation.spare_nodes,
        "job_nodes": stage.allocation.nodes + stage.allocation.spare_nodes,
        "ntasks_per_node": stage.allocation.ntasks_per_node,
        "has_ranks": stage.kind.uses_gpus,
        "secrets": stage.secrets,
        "environment": [_variable(variable) for variable in stage.environment],
        "scratch": cluster.scratch,
        "directories": stage.directories,
        "striped_directories": stage.striped_directories,
        "required_files": list(dict.fromkeys(stage.required)),
        "runtime": container.runtime if container else "none",
        "image": container.image if container else "",
        "image_is_file": container is not None and container.image.endswith(".sqsh"),
        "copy_image": container is not None and container.copy_image,
        "container_words": container.words() if container else (),
        "container_name": CONTAINER_NAME,
        "library_path": ":".join(library_path(stage.kind, cluster)),
        "step_options": stage.allocation.srun_options(),
        "python": stage.python,
        "arguments": stage.arguments,
        **stage.values,
    }
    if stage.kind.trains:
        context["check_failed"] = _check_failed(stage)
    context["header"] = _header(plan, stage, context, origins)
    return context


def _variable(variable: Variable) -> dict[str, str]:
    return {
        "name": variable.name,
        "value": variable.value,
        "layer": variable.layer,
        "why": variable.why,
    }


def _check_failed(stage: StagePlan) -> str:
    where = "the image, container.image," if stage.container else "this Python"
    return (
        f"{stage.python} cannot run the trainer (above): install it into {where} "
        "or set the cluster's code_dir (hpcgen install-code)"
    )


def _option(directive: str) -> dict[str, str]:
    name, _, value = directive.removeprefix("--").partition("=")
    return {"name": name, "value": value}


def _header(plan: Plan, stage: StagePlan, context: dict[str, Any], origins: tuple[str, ...]) -> list[str]:
    inputs = json.dumps({"version": __version__, **context}, sort_keys=True, default=str)
    lines = [
        f"{context['title']} on {plan.run.cluster_name} ({plan.run.node_type.description})",
        f"made by hpcgen {__version__}: hpcgen render {stage.name}",
        f"profile: {', '.join(plan.run.cluster_files)}",
        f"templates: {', '.join(origins)}",
        f"inputs: sha256 {hashlib.sha256(inputs.encode()).hexdigest()}",
    ]
    if not all(file.startswith(SHIPPED) for file in plan.run.node_type_files):
        lines.insert(3, f"node type: {', '.join(plan.run.node_type_files)}")
    if plan.layout is not None and stage.kind.trains:
        lines.insert(1, f"layout: {plan.layout}")
    return lines
