"""How a stage's tasks are wrapped: pyxis flags for srun, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.container import MOUNTABLE, Mount
from hpcgen.config.run import RunConfig
from hpcgen.config.validation import show
from hpcgen.errors import HpcgenError, Problem


@dataclass(frozen=True)
class Container:
    """What pyxis needs for one stage."""

    image: str
    mounts: tuple[str, ...]
    """SOURCE:TARGET or SOURCE:TARGET:ro."""
    workdir: str
    writable: bool
    environment: tuple[str, ...]
    """Names: a variable that the image sets wins over the job's unless it is named."""

    def srun_flags(self) -> tuple[str, ...]:
        """pyxis's options. The mounts are one option: of several, only the last would count."""
        return (
            f"--container-image={self.image}",
            f"--container-mounts={','.join(self.mounts)}",
            f"--container-workdir={self.workdir}",
            "--no-container-mount-home",
            "--container-writable" if self.writable else "--container-readonly",
            f"--container-env={','.join(self.environment)}",
        )


def runtime(config: RunConfig, cluster: ClusterConfig) -> str:
    """The container runtime of the run: its own choice, else the cluster's, else none."""
    return config.container.runtime or cluster.container.runtime or "none"


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
        HpcgenError: pyxis cannot mount one of the paths.
    """
    if runtime(config, cluster) == "none":
        return None
    run, site = config.container, cluster.container
    image = run.image or site.image or ""
    writable = next((given for given in (run.writable, site.writable) if given is not None), False)
    return Container(
        image=image,
        mounts=_mounts([*site.mounts, *run.mounts], writes, reads),
        workdir=run.workdir or site.workdir or config.paths.run_dir,
        writable=writable,
        environment=tuple(sorted(set(environment))),
    )


def _mounts(given: list[Mount], writes: Iterable[str], reads: Iterable[str]) -> tuple[str, ...]:
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
    return tuple(f"{mount.source}:{_target(mount)}{':ro' if mount.read_only else ''}" for mount in mounts)


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
    """An image that is known to lack what a job needs."""
    image = config.container.image or cluster.container.image or ""
    if runtime(config, cluster) == "pyxis" and "nvidia/pytorch" in image and not cluster.code_dir:
        file: Literal["run", "cluster"] = "run" if config.container.image else "cluster"
        reason = "holds neither Megatron-Core nor hpcgen, and the cluster profile names no code_dir"
        hint = "run hpcgen install-code and name its directory as code_dir, or use an image of your own"
        yield Problem("container.image", reason, hint, file)


def container_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """What pyxis refuses, or accepts and gets wrong: no image, an image without pyxis, two mounts on one target."""
    run, site = config.container, cluster.container
    if runtime(config, cluster) == "none":
        for key in ("image", "workdir"):
            if getattr(run, key) is not None:
                yield Problem(
                    f"container.{key}",
                    "has no effect with runtime none",
                    "set container.runtime: pyxis, or remove it",
                )
        if run.mounts:
            yield Problem(
                "container.mounts",
                "have no effect with runtime none",
                "set container.runtime: pyxis, or remove them",
            )
        return
    if not (run.image or site.image):
        yield Problem("container.image", "is missing", "name a .sqsh file or REGISTRY#IMAGE:TAG")
    taken = {_target(mount) for mount in site.mounts}
    for index, mount in enumerate(run.mounts):
        target = _target(mount)
        if target in taken:
            path = f"container.mounts[{index}].{'target' if mount.target else 'source'}"
            yield Problem(path, "is the target of another mount; pyxis would take one of them silently")
        taken.add(target)
