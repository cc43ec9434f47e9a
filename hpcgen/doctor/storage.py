"""Paths of a run on this machine: whether they exist, can be written, are on shared storage, and have room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hpcgen.doctor.check import Check
from hpcgen.planning.host_doubts import MOUNTS, NETWORK_FILE_SYSTEMS, file_system
from hpcgen.planning.inputs import tokenizer_files
from hpcgen.planning.paths import checkpoint_directory
from hpcgen.run_plan import storage_summary
from hpcgen.run_plan.plan import Plan
from hpcgen.text import counted, few, size_text

LEAST_HOME_BYTES = 1 << 30
"""Free space that downloads of a tokenizer or a list of files need in the cache."""


def checks(plan: Plan) -> Iterator[Check]:
    """Yields checks of the paths and of the space."""
    run_dir = plan.config.paths.run_dir
    yield _writable("run directory", run_dir)
    yield from _shared(run_dir, plan.run.cluster_name)
    saved = checkpoint_directory(plan.config)
    if plan.trainer is not None and not Path(saved).is_relative_to(run_dir):
        yield _writable("checkpoint directory", saved)
    yield from _required(plan)
    yield from _tokenizer(plan)
    if plan.trainer is not None:
        yield _space(plan, saved)
    yield from _secrets(plan)
    yield from _cache(plan)


def existing(path: str) -> Path:
    """The path, or the nearest directory above it that exists."""
    found = Path(path)
    while not found.exists() and found != found.parent:
        found = found.parent
    return found


def _writable(name: str, path: str) -> Check:
    there = existing(path)
    if not os.access(there, os.W_OK | os.X_OK):
        fix = "Use a directory of your own on shared storage, or ask for access."
        return Check(name, "failed", f"{there} is not writable for you", fix)
    return Check(name, "ok", path if there == Path(path) else f"{path} will be made in {there}")


def _shared(run_dir: str, cluster: str) -> Iterator[Check]:
    """Yields whether nodes can see the run directory. The profile `local` describes this machine alone."""
    mounts = MOUNTS.read_text(encoding="utf-8", errors="replace") if MOUNTS.exists() else ""
    kind = file_system(str(existing(run_dir).resolve()), mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        yield Check("shared storage", "ok", f"{run_dir} is on {kind}")
    elif cluster == "local":
        yield Check("shared storage", "skipped", "the profile local is for this machine")
    else:
        fix = "Use storage that all nodes mount. hpcgen doctor --nodes checks whether they see it."
        found = (
            f"{run_dir} is on {kind or 'an unknown file system'}, which may be a disk of this machine alone"
        )
        yield Check("shared storage", "warning", found, fix)


def _required(plan: Plan) -> Iterator[Check]:
    """Yields paths that every node must have, and that this machine lacks."""
    paths = dict.fromkeys(path for stage in plan.stages.values() for path in stage.required_everywhere())
    missing = [path for path in paths if not os.access(path, os.R_OK)]
    if missing:
        fix = "Correct the paths, or mount their storage here. Devices may exist on nodes only."
        yield Check("required paths", "warning", f"not readable here: {few(missing)}", fix)
    elif paths:
        yield Check("required paths", "ok", counted(len(paths), "path"))


def _tokenizer(plan: Plan) -> Iterator[Check]:
    files = tokenizer_files(plan.config)
    missing = [file.path for file in files if not os.access(file.path, os.R_OK)]
    if missing:
        fix = (
            "Correct data.tokenizer, or download the file. Training does not read it, but the data stages do."
        )
        yield Check("tokenizer", "warning", f"not readable: {few(missing)}", fix)
    elif files:
        yield Check("tokenizer", "ok", few([file.path for file in files]))


def _space(plan: Plan, saved: str) -> Check:
    """Compares the free space with the checkpoints that the run keeps. Quotas are not seen."""
    needed, _ = storage_summary.in_json(plan, None)
    found, name = needed["storage"], "disk"
    kept, total = found["kept_checkpoints"], found["kept_checkpoint_bytes"]
    there = existing(saved)
    state = os.statvfs(there)
    free = state.f_bavail * state.f_frsize
    saves = f"{counted(kept, 'checkpoint')} take {size_text(total)}"
    shown = f"{size_text(free)} free in {there}; {saves} (quotas are not seen)"
    if kept and free < total / kept:
        return Check(name, "failed", shown, "Free space, or save to other storage: checkpoint.save.")
    if free < total:
        return Check(
            name, "warning", shown, "Set checkpoint.keep_last, or free space before the run needs it."
        )
    return Check(name, "ok", shown)


def _secrets(plan: Plan) -> Iterator[Check]:
    names = dict.fromkeys(name for stage in plan.stages.values() for name in stage.secrets)
    if missing := [name for name in names if not os.environ.get(name)]:
        yield Check(
            "secrets", "failed", f"not set in this shell: {few(missing)}", "Export them where you submit."
        )
    elif names:
        yield Check("secrets", "ok", f"set: {few(list(names))}")


def _cache(plan: Plan) -> Iterator[Check]:
    """Yields the cache of the Hugging Face Hub, if the corpus is there. Training jobs do not use it."""
    corpus = plan.config.data.corpus
    if corpus is None or corpus.source.huggingface is None:
        return
    cache = os.environ.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
    there = existing(cache)
    state = os.statvfs(there)
    if not os.access(there, os.W_OK):
        yield Check(
            "Hugging Face cache",
            "failed",
            f"{there} is not writable",
            "Set HF_HOME to a directory of your own.",
        )
    elif state.f_bavail * state.f_frsize < LEAST_HOME_BYTES:
        yield Check(
            "Hugging Face cache",
            "warning",
            f"less than 1 GiB free in {there}",
            "Set HF_HOME to other storage.",
        )
    else:
        yield Check("Hugging Face cache", "ok", cache)
