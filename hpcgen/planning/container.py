"""How a stage's tasks are wrapped: one model of image, mounts, environment and options for every runtime."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.container import MOUNTABLE, Mount, Runtime
from hpcgen.config.run import RunConfig
from hpcgen.config.validation import show
from hpcgen.errors import HpcgenError, Problem
from hpcgen.planning.software import runtime

CONTAINER_NAME = "hpcgen"
"""Name of the container that runtime enroot makes on each node, in a data directory of the job's own."""

ENROOT_START = (
    "names=(--env STARTED); while read -r name; do "
    'case $name in SLURM_* | SLURMD_* | SUBMITIT_* | CUDA_VISIBLE_DEVICES) names+=(--env "$name") ;; esac; '
    "done < <(compgen -e); "
    'export STARTED="${ENROOT_DATA_PATH:?}/started-$SLURM_STEP_ID-$SLURM_LOCALID"; rm -f -- "$STARTED"; '
    'exec 9>"$ENROOT_DATA_PATH/start.lock" && flock 9 || exit; '
    "( (until [[ -e $STARTED ]] || ! kill -0 $$; do sleep 0.1; done) & ) >/dev/null 2>&1; "
    'exec enroot start "${names[@]}" "$@"'
)
"""enroot passes no variable that is not named; which ones Slurm set is known in the task alone.

The tasks of a node start one after another, as enroot would have it itself. But enroot's lock fails after 30 s, and
its hooks may need longer for the GPUs of eight tasks. It closes all open files, so a process beside it holds our lock.
"""

ENROOT_STARTED = ("sh", "-c", ': >"$STARTED"; exec "$@"', "enroot_started")
"""Within the container, on the node's scratch: the next task's turn."""


@dataclass(frozen=True)
class Container:
    """The container of one stage."""

    runtime: Runtime
    image: str
    """A .sqsh, or a reference to a registry in the form that every enroot takes."""
    mounts: tuple[Mount, ...]
    """Each with a target; a directory stands before what lies in it."""
    workdir: str
    writable: bool
    environment: tuple[str, ...]
    """Names: a variable that the image sets wins over the job's unless it is named."""
    copy_image: bool
    """The image is copied to each node's scratch first."""

    @property
    def image_is_file(self) -> bool:
        """Whether the image is a .sqsh file rather than one of a registry."""
        return self.image.endswith(".sqsh")

    def words(self) -> tuple[str, ...]:
        """What stands between srun's options and the command: pyxis's options but for the image, or enroot's call."""
        return self._pyxis() if self.runtime == "pyxis" else self._enroot()

    def _pyxis(self) -> tuple[str, ...]:
        """The mounts are one option: of several, only the last would count."""
        mounts = (f"{m.source}:{m.target}{':ro' if m.read_only else ''}" for m in self.mounts)
        return (
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={self.workdir}",
            "--no-container-mount-home",
            "--container-writable" if self.writable else "--container-readonly",
            f"--container-env={','.join(self.environment)}",
        )

    def _enroot(self) -> tuple[str, ...]:
        """Mounts are colon-separated lines of fstab. enroot has no option for the working directory."""
        return (
            *("bash", "-c", ENROOT_START, "enroot_start"),
            *(["--rw"] if self.writable else []),
            *(
                f"--mount={m.source}:{m.target}:none:x-create=auto,rbind{',ro' if m.read_only else ''}"
                for m in self.mounts
            ),
            *(f"--env={name}" for name in self.environment),
            *(CONTAINER_NAME, *ENROOT_STARTED, "env", f"--chdir={self.workdir}"),
        )


def make_container(
    config: RunConfig,
    cluster: ClusterConfig,
    *,
    writes: Iterable[str],
    reads: Iterable[str],
    environment: Iterable[str],
) -> Container | None:
    """The container of a stage that writes to and reads from these host paths; None with runtime none.

    Raises:
        HpcgenError: one of the paths cannot be mounted.
    """
    asked = runtime(config, cluster)
    if asked == "none":
        return None
    run, site = config.container, cluster.container
    return Container(
        runtime=asked,
        image=image_reference(run.image or site.image or ""),
        mounts=_mounts([*site.mounts, *run.mounts], writes, reads),
        workdir=run.workdir or site.workdir or config.paths.run_dir,
        writable=_first(run.writable, site.writable),
        environment=tuple(sorted(set(environment))),
        copy_image=_first(run.copy_image, site.copy_image),
    )


def _first(*given: bool | None) -> bool:
    return next((value for value in given if value is not None), False)


def image_reference(image: str) -> str:
    """The image as every enroot takes it, the ones before 4.0 too (enroot, src/docker.sh).

    "nvcr.io/nvidia/pytorch:25.03-py3" becomes "nvcr.io#nvidia/pytorch:25.03-py3": those look for the first form on
    Docker Hub. "IMAGE:TAG@sha256:..." becomes "IMAGE:sha256:...": those know no "@", and all of them put what
    follows ":" into the registry's URL, where a digest may stand for a tag.
    """
    if image.endswith(".sqsh"):
        return image
    host, slash, name = image.partition("/")
    if slash and "#" not in host and re.search(r"[.:]", host):
        image = f"{host}#{name}"
    return re.sub(r"(:[A-Za-z0-9._-]+)?@(sha256:[0-9a-f]{64})$", r":\2", image)


def _mounts(given: list[Mount], writes: Iterable[str], reads: Iterable[str]) -> tuple[Mount, ...]:
    """The given mounts and what the stage needs that they do not show already under its own path.

    A directory stands before what lies in it, since a later mount hides an earlier one below it.
    """
    mounts = list(given)
    shown = {_target(mount): mount.source for mount in given}
    for read_only, paths in ((False, writes), (True, reads)):
        for path in sorted(set(paths)):
            _require_mountable(path, shown.get(path, path))
            if not any(_shows(mount, path, read_only) for mount in mounts):
                mounts.append(Mount(source=path, read_only=read_only))
    mounts.sort(key=_target)
    return tuple(
        Mount(source=mount.source, target=_target(mount), read_only=mount.read_only) for mount in mounts
    )


def _require_mountable(path: str, source: str) -> None:
    if reason := MOUNTABLE.reason(path):
        raise HpcgenError(
            f"{show(path)} cannot be mounted into the container: it {reason}", "move or link it"
        )
    if path == "/":
        raise HpcgenError(
            "/ cannot be mounted over the container's own", "keep the run's files in a directory"
        )
    if source != path:
        reason = f"the stage needs {path} of the host, and container.mounts shows {source} there"
        raise HpcgenError(reason, "give that mount another target")


def _target(mount: Mount) -> str:
    return mount.target or mount.source


def _shows(mount: Mount, path: str, read_only: bool) -> bool:
    same_place = mount.target in (None, mount.source)
    inside = PurePosixPath(path).is_relative_to(mount.source)
    return same_place and inside and (read_only or not mount.read_only)


def container_warnings(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """An image that is known to lack what a job needs, or whose tag may name another one tomorrow."""
    image = config.container.image or cluster.container.image or ""
    if runtime(config, cluster) == "none":
        return
    file: Literal["run", "cluster"] = "run" if config.container.image else "cluster"
    if "nvidia/pytorch" in image and not cluster.code_dir:
        reason = "holds neither Megatron-Core nor hpcgen, and the cluster profile names no code_dir"
        hint = "run hpcgen install-code and name its directory as code_dir, or use an image of your own"
        yield Problem("container.image", reason, hint, file)
    # NVIDIA does not move the tag of a release (25.03-py3)
    is_release = re.search(r"nvcr\.io[#/]nvidia/[^:]+:\d", image)
    if not image.endswith(".sqsh") and "@sha256:" not in image and not is_release:
        reason = "is named by a tag, which may mean another image tomorrow"
        yield Problem("container.image", reason, "add its digest: IMAGE:TAG@sha256:...", file)


def container_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """What pyxis refuses, or accepts and gets wrong: no image, an image without a runtime, two mounts on one target."""
    if runtime(config, cluster) == "none":
        yield from _unused(config)
    else:
        yield from _image_problems(config, cluster)
        yield from _target_problems(config, cluster)


def _unused(config: RunConfig) -> Iterator[Problem]:
    for key in ("image", "workdir", "mounts", "copy_image", "writable"):
        if getattr(config.container, key):
            verb, it = ("have", "them") if key == "mounts" else ("has", "it")
            hint = f"set container.runtime: pyxis or enroot, or remove {it}"
            yield Problem(f"container.{key}", f"{verb} no effect with runtime none", hint)


def _image_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    image = config.container.image or cluster.container.image
    file: Literal["run", "cluster"] = "run" if config.container.image or not image else "cluster"
    if not image:
        yield Problem("container.image", "is missing", "name a .sqsh file or REGISTRY#IMAGE:TAG")
    elif image.endswith(".sqsh"):
        return
    elif runtime(config, cluster) == "enroot":
        reason = "is in a registry, from which every node would fetch it; runtime enroot starts a .sqsh"
        yield Problem("container.image", reason, "make one: hpcgen render image", file)
    elif _first(config.container.copy_image, cluster.container.copy_image):
        where: Literal["run", "cluster"] = "cluster" if config.container.copy_image is None else "run"
        reason = f"has no effect on {image}, which is no .sqsh"
        yield Problem("container.copy_image", reason, "make one: hpcgen render image", where)


def _target_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    taken: set[str] = set()
    sections: tuple[tuple[Literal["run", "cluster"], tuple[Mount, ...]], ...] = (
        ("cluster", cluster.container.mounts),
        ("run", config.container.mounts),
    )
    for file, mounts in sections:
        for index, mount in enumerate(mounts):
            if _target(mount) in taken:
                path = f"container.mounts[{index}].{'target' if mount.target else 'source'}"
                reason = "is the target of another mount; pyxis would take one of them silently"
                yield Problem(path, reason, "give it another target", file)
            taken.add(_target(mount))
