"""The container runtime of a job on this machine, versions that do not work together, and the image with its record."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hpcgen.doctor.check import Check
from hpcgen.doctor.slurm_settings import version_of
from hpcgen.planning.image_record import read_image_record
from hpcgen.planning.software import runtime
from hpcgen.run_plan.plan import Plan
from hpcgen.slurm.programs import Answer, Settings, ask
from hpcgen.text import size_text
from trainer.contract.record import record, replaced

PLUGIN = re.compile(r"(/\S*spank_pyxis\.so)")
MOST_PLUGIN_BYTES = 4 << 20
SQUASHFS = b"hsqs"
"""First bytes of a .sqsh file."""


@record(kw_only=True)
class Software:
    """Versions of what starts a container; "" if a version is unknown."""

    slurm: str
    pyxis: str = ""
    enroot: str = ""
    pmix: str = ""
    mpi: str = ""
    """Kind of MPI that srun prepares for the tasks."""
    task_prolog: str = ""


def known_faults(software: Software) -> Iterator[tuple[str, str]]:
    """Yields what is known to fail with these versions, and what to do.

    Sources: github.com/NVIDIA/pyxis issues 175 and 163, read 2026-11.
    """
    slurm, pyxis = _numbers(software.slurm), _numbers(software.pyxis)
    if software.mpi.startswith("pmix") and slurm[:2] == (25, 11) and pyxis[:2] in ((), (0, 21)):
        shown = (
            f"pyxis {software.pyxis or '(version unknown)'} with PMIx {software.pmix or '(version unknown)'}"
        )
        reason = (
            f"Slurm {software.slurm} and {shown}: 25.11.1, 0.21.0 and 4.2.9 are known to hang without a log "
            "(NVIDIA/pyxis#175)"
        )
        yield (
            reason,
            "Set mpi: none in the profile: hpcgen's ranks need no MPI. Then try a step: hpcgen doctor --nodes 1.",
        )
    if software.task_prolog and (24, 11) <= slurm[:2] < (25, 6) and slurm < (25, 5, 2):
        reason = (
            f"Slurm {software.slurm} with TaskProlog = {software.task_prolog}: it needs libslurmfull.so inside of the "
            "container (NVIDIA/pyxis#163, fixed in Slurm 25.05.2)"
        )
        yield (
            reason,
            "Ask the admins for Slurm 25.05.2, or mount the directory of libslurmfull.so into the container.",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def checks(plan: Plan, settings: Settings) -> Iterator[Check]:
    """Yields checks of the container runtime, if a stage uses one."""
    kind = runtime(plan.config, plan.run.cluster)
    mpi = plan.run.cluster.mpi or settings.get("MpiDefault", "")
    offered = ask("srun", "--mpi=list")  # printed to stderr by older releases
    yield from _mpi(plan.run.cluster.mpi, offered)
    if not any(stage.container for stage in plan.stages.values()):
        yield Check("container", "skipped", f"container.runtime is {kind}")
        return
    software = Software(
        slurm=version_of(settings), mpi=mpi, task_prolog=settings.get("TaskProlog", ""), pmix=_pmix(offered)
    )
    if kind == "pyxis":
        has_option = "--container-image" in ask("srun", "--help").text
        software = with_pyxis(software, settings)
        if not has_option:
            fix = "Ask the admins to install pyxis, or set container.runtime to enroot or apptainer."
            yield Check("pyxis", "failed", "srun here has no option --container-image", fix)
        else:
            yield Check(
                "pyxis", "ok", software.pyxis or "installed; its version is not recorded in its plugin"
            )
    if kind in ("pyxis", "enroot"):
        answer = ask("enroot", "version")
        found = answer.problem or answer.text
        yield Check(
            "enroot",
            "skipped" if answer.problem else "ok",
            found + (" (nodes may have it)" if answer.problem else ""),
        )
    elif kind == "apptainer":
        answer = ask("apptainer", "--version")
        yield Check("apptainer", "skipped" if answer.problem else "ok", answer.problem or answer.text)
    faults = list(known_faults(software))
    for reason, fix in faults:
        yield Check("versions", "warning", reason, fix)
    if not faults:
        yield Check("versions", "ok", "no fault is known of these versions")


def _mpi(asked: str | None, offered: Answer) -> Iterator[Check]:
    if asked is None:
        return
    names = " ".join(offered.all_lines).split()
    if offered.problem and not names:
        yield Check("MPI", "skipped", offered.problem)
    elif asked in names:
        yield Check("MPI", "ok", f"srun has {asked}")
    else:
        fix = "Set mpi in the profile to a name that srun --mpi=list prints, or remove it."
        yield Check("MPI", "failed", f"srun has no {asked}", fix)


def _pmix(offered: Answer) -> str:
    found = re.search(r"pmix_v(\d+)", " ".join(offered.all_lines))
    return found[1] if found else ""


def with_pyxis(software: Software, settings: Settings) -> Software:
    """Adds the version of pyxis that is written into its plugin, if this machine has the plugin."""
    configuration = Path(settings.get("PlugStackConfig") or "/etc/slurm/plugstack.conf")
    texts = [configuration, *configuration.parent.glob("plugstack.conf.d/*")]
    for path in texts:
        try:
            plugin = PLUGIN.search(path.read_text(errors="replace"))
            data = Path(plugin[1]).read_bytes()[:MOST_PLUGIN_BYTES] if plugin else b""
        except OSError:
            continue
        if version := re.search(rb"(?:version |^|\0)v?(0\.\d{1,2}\.\d{1,2})\0", data):
            return replaced(software, pyxis=version[1].decode())
    return software


def image_checks(plan: Plan) -> Iterator[Check]:
    """Yields checks of the image file and its record."""
    images = {stage.container.image: stage for stage in plan.stages.values() if stage.container}
    for image, stage in images.items():
        assert stage.container is not None
        if not stage.container.image_is_file:
            found = f"{image} is in a registry; each node imports it when the job starts"
            yield Check("image", "ok" if image else "skipped", found if image else "none is set")
            continue
        yield _file(image)
        yield _record(image)


def _file(image: str) -> Check:
    try:
        with Path(image).open("rb") as file:
            start, size = file.read(4), os.fstat(file.fileno()).st_size
    except OSError as error:
        fix = "Correct container.image, or build it: hpcgen render image."
        return Check("image", "failed", f"{image}: {error.strerror}", fix)
    if image.endswith(".sqsh") and start != SQUASHFS:
        return Check(
            "image", "failed", f"{image} is not a squashfs file", "Build it again: hpcgen render image."
        )
    return Check("image", "ok", f"{image}, {size_text(size)}")


def _record(image: str) -> Check:
    name = "image record"
    try:
        found, status = read_image_record(image), Path(image).stat()
    except OSError as error:
        return Check(name, "skipped", f"{error.filename}: {error.strerror}")
    if found is None:
        fix = "Images of hpcgen render image have a record, with which jobs check the file."
        return Check(name, "warning", f"there is no {image}.record, so its content is not known", fix)
    software = ", ".join(
        f"{part} {found.found[part]}" for part in ("torch", "te", "nccl") if part in found.found
    )
    if found.size is not None and found.size != status.st_size:
        fix = "Copy the image again with its record (cp -p), or build it again."
        return Check(
            name, "failed", f"the file has {status.st_size:,} bytes, and its record says {found.size:,}", fix
        )
    if found.mtime is not None and found.mtime != int(status.st_mtime):
        return Check(
            name, "warning", "the time differs, so each job hashes the file", "Copy images with cp -p."
        )
    return Check(name, "ok", software or "fits the file")
