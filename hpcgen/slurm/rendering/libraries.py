"""Libraries of batch scripts: plain shell files in templates/lib, which scripts include in full."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from hpcgen.config.stages import TRAINER_FILE
from hpcgen.files import Share
from hpcgen.resources import shipped
from hpcgen.run_plan.stage import StagePlan
from hpcgen.slurm.rendering.settings import has_preflight
from trainer.contract.record import record


@record
class Library:
    """A file in templates/lib."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """The name in headers of scripts, such as lib/base.sh."""
        return f"lib/{self.path.name}"

    @property
    def sha256(self) -> str:
        """Hash of the file, as shown in the header of a script."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def stage_libraries(
    stage: StagePlan, *, hooks: bool, share: Share = "private", has_rule: bool = False
) -> tuple[Library, ...]:
    """The libraries that the script of a stage includes, in order.

    `hooks`: the site defines a prologue or epilogue. `has_rule`: the profile has a rule for the rendezvous.
    """
    directory = shipped("templates") / "lib"
    # a stage with few functions defines them in its template
    paths = [
        path for name in _names(stage, hooks, share, has_rule) if (path := directory / f"{name}.sh").exists()
    ]
    return tuple(Library(path, path.read_text(encoding="utf-8")) for path in paths)


def _names(stage: StagePlan, hooks: bool, share: Share, has_rule: bool) -> Iterator[str]:
    container = stage.container
    yield "base"
    yield "events"
    if share == "group" or "notify_command" in stage.values:
        yield "redactions"
    if share == "group":
        yield "share"
    if stage.modules:
        yield "modules"
    if hooks or "notify_command" in stage.values:  # both run the user's commands, with a time limit
        yield "bounded"
    if hooks:
        yield "hooks"
    if "notify_command" in stage.values:
        yield "notify"
    yield "scratch"
    if stage.environment_script:
        yield "node-environment"
    if stage.kind.has_ranks:
        yield "ranks"
    if has_rule:
        yield "rendezvous"
    if stage.kind.config_file == TRAINER_FILE:
        yield "datasets"
    if container is not None and container.image_is_file:
        yield "verify-image"
    if container is not None and container.copy_image:
        yield "copy-image"
    if container is not None and container.kind.library:
        yield container.kind.library
    if stage.checks_nodes:
        yield "node-check"
    if stage.kind.has_attempts:
        yield "attempts"
    if "chain" in stage.values or stage.queued is not None:
        yield "sbatch"
    if "chain" in stage.values:
        yield "chain"
    if "evaluation_every" in stage.values:
        yield "due-checkpoints"
    # stages with the same frame have the same work, which its library does
    yield stage.name if stage.kind.frame == "base" else stage.kind.frame
    if stage.queued is not None:
        yield f"{stage.queued.name}-queue"
    if has_preflight(stage):
        yield "preflight"
    if "nodes_per_segment" in stage.values:
        yield "segments"
