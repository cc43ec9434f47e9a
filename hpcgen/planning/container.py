"""The container of a stage: image, mounts, environment and options, independent of the runtime."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Literal

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.container import MOUNTABLE, Mount, Runtime, is_image_file
from hpcgen.config.run import RunConfig
from hpcgen.config.shown import show
from hpcgen.errors import HpcgenError, Problem
from hpcgen.planning.software import runtime
from trainer.contract.record import record

SYSTEM_DIRECTORIES = frozenset((
    "/", "/bin", "/lib", "/lib32", "/lib64", "/sbin", "/usr", "/usr/bin", "/usr/lib", "/usr/lib64",
    "/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/sbin",
))  # fmt: skip
"""Directories of an image that no mount may hide."""
IMAGE_DIRECTORIES = ("/etc", "/opt", "/usr/local")
"""Directories in which images of NVIDIA and others have files that programs need."""
CONTAINER_NAME = "hpcgen"
"""Name of the container that runtime enroot creates on each node, in a data directory specific to the job."""

ENROOT_START = (
    "names=(--env STARTED); while read -r name; do "
    'case $name in SLURM_* | SLURMD_* | SUBMITIT_* | CUDA_VISIBLE_DEVICES) names+=(--env "$name") ;; esac; '
    "done < <(compgen -e); "
    'export STARTED="${ENROOT_DATA_PATH:?}/started-$SLURM_STEP_ID-$SLURM_LOCALID"; rm -f -- "$STARTED"; '
    'exec 9>"$ENROOT_DATA_PATH/start.lock" && flock 9 || exit; '
    "( (until [[ -e $STARTED ]] || ! kill -0 $$; do sleep 0.1; done) & ) >/dev/null 2>&1; "
    'exec enroot start "${names[@]}" "$@"'
)
"""Shell code of a task that calls enroot. It names Slurm's variables, which only the task knows. Others are not passed.

The tasks of a node start one after another, as with enroot's own lock. That lock times out after 30 s, but the hooks
may need longer for the GPUs of eight tasks. enroot closes all open files, so a background process holds this
lock.
"""

ENROOT_STARTED = ("sh", "-c", ': >"$STARTED"; exec "$@"', "enroot_started")
"""Runs in the container: marks the task as started, so that the next task of the node can start."""


@record
class Container:
    """The container of one stage."""

    runtime: Runtime
    image: str
    """Path of a .sqsh file, or a registry reference in the form that every enroot version accepts."""
    mounts: tuple[Mount, ...]
    """Mounts with targets, parents before their subdirectories."""
    workdir: str
    writable: bool
    environment: tuple[str, ...]
    """Names of variables to pass. For other variables, a value set in the image overrides the job's."""
    copy_image: bool
    """The image is copied to each node's scratch first."""

    @property
    def image_is_file(self) -> bool:
        """Returns True for a .sqsh file and False for a registry reference."""
        return is_image_file(self.image)

    def host_path(self, path: str) -> str | None:
        """The path on the host for a path in the container; None if no mount provides it."""
        for mount in reversed(self.mounts):  # subdirectories before their parents
            if PurePosixPath(path).is_relative_to(_target(mount)):
                return str(PurePosixPath(mount.source, PurePosixPath(path).relative_to(_target(mount))))
        return None

    def words(self) -> tuple[str, ...]:
        """The words between srun's options and the command: pyxis's options without the image, or enroot's call."""
        return self._pyxis() if self.runtime == "pyxis" else self._enroot()

    def _pyxis(self) -> tuple[str, ...]:
        """pyxis's options. All mounts are one option, because only the last --container-mounts counts."""
        mounts = (f"{m.source}:{m.target}{':ro' if m.read_only else ''}" for m in self.mounts)
        return (
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={self.workdir}",
            "--no-container-mount-home",
            "--container-writable" if self.writable else "--container-readonly",
            f"--container-env={','.join(self.environment)}",
        )

    def _enroot(self) -> tuple[str, ...]:
        """enroot's call. Mounts are colon-separated fstab entries; enroot has no option for the working directory."""
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
    """The container of a stage that uses these host paths; None with runtime none.

    Raises:
        HpcgenError: a path cannot be mounted.
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
    """The image in the form that every enroot version accepts, including those before 4.0 (enroot, src/docker.sh).

    "nvcr.io/nvidia/pytorch:25.03-py3" becomes "nvcr.io#nvidia/pytorch:25.03-py3", because versions before 4.0 look for
    the first form on Docker Hub. "IMAGE:TAG@sha256:..." becomes "IMAGE:sha256:...", because they do not support "@".
    All versions put the text after ":" into the registry's URL, where a digest is valid in place of a tag.
    """
    if is_image_file(image):
        return image
    host, slash, name = image.partition("/")
    if slash and "#" not in host and re.search(r"[.:]", host):
        image = f"{host}#{name}"
    return re.sub(r"(:[A-Za-z0-9._-]+)?@(sha256:[0-9a-f]{64})$", r":\2", image)


def _mounts(given: list[Mount], writes: Iterable[str], reads: Iterable[str]) -> tuple[Mount, ...]:
    """The given mounts, plus mounts for the stage's paths that they do not provide.

    Parents precede their subdirectories, because a later mount hides earlier ones below it.
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
    if problem := MOUNTABLE.problem(path, path):
        raise HpcgenError(
            f"{show(path)} cannot be mounted into the container: it {problem.reason}",
            "move the file, or use a symbolic link",
        )
    if path == "/":
        raise HpcgenError(
            "/ cannot be mounted over the container's root", "put the run's files in a directory"
        )
    if source != path:
        reason = f"the stage needs the host's {path}, but container.mounts mounts {source} there"
        raise HpcgenError(reason, "give that mount another target")


def _target(mount: Mount) -> str:
    return mount.target or mount.source


def _shows(mount: Mount, path: str, read_only: bool) -> bool:
    same_place = mount.target in (None, mount.source)
    inside = PurePosixPath(path).is_relative_to(mount.source)
    return same_place and inside and (read_only or not mount.read_only)


def container_warnings(
    config: RunConfig, cluster: ClusterConfig, *, runs_trainer: bool = True
) -> Iterator[Problem]:
    """Yields warnings about images that lack the trainer, if jobs run hpcgen's code, or whose tag can change, and about
    mounts that hide files of the image."""
    image = config.container.image or cluster.container.image or ""
    if runtime(config, cluster) == "none":
        return
    file: Literal["run", "cluster"] = "run" if config.container.image else "cluster"
    if runs_trainer and "nvidia/pytorch" in image and not cluster.code_dir:
        reason = "contains neither Megatron-Core nor hpcgen, and code_dir is not set in the cluster profile"
        hint = "run hpcgen install-code and set code_dir to its directory, or build an image with hpcgen render image"
        yield Problem("container.image", reason, hint, file)
    for place, mount in _given_mounts(config, cluster):
        if _target(mount) in IMAGE_DIRECTORIES:
            reason = "hides the image's own files there"
            yield replace(place, reason=reason, hint="mount what is needed at another target")
    # NVIDIA does not change release tags such as 25.03-py3
    is_release = re.search(r"nvcr\.io[#/]nvidia/[^:]+:\d", image)
    if not is_image_file(image) and "@sha256:" not in image and not is_release:
        reason = "uses a tag, which can refer to another image later"
        yield Problem("container.image", reason, "add the digest: IMAGE:TAG@sha256:...", file)


def missing_file_warnings(
    config: RunConfig, cluster: ClusterConfig, exists: Callable[[str], bool]
) -> Iterator[Problem]:
    """Yields warnings about an image file, a code_dir and a Python that do not exist.

    Nothing is reported if this machine does not even have the first directory of the path.
    """

    def is_missing(path: str) -> bool:
        return not exists(path) and exists("/" + path.split("/")[1])

    image = config.container.image or cluster.container.image or ""
    if runtime(config, cluster) != "none" and image.endswith(".sqsh") and is_missing(image):
        file: Literal["run", "cluster"] = "run" if config.container.image else "cluster"
        hint = "correct the path, or build the image with hpcgen render image"
        yield Problem("container.image", "does not exist", hint, file)
    if cluster.code_dir and is_missing(cluster.code_dir):
        hint = "set it to the directory that hpcgen install-code prints"
        yield Problem("code_dir", "does not exist", hint, "cluster")
    if "/" in cluster.python and not cluster.python.startswith("/"):
        reason = "is a relative path, so jobs find it only if they are submitted from the directory above it"
        yield Problem("python", reason, "use an absolute path, or a command on PATH", "cluster")
    # in a container, it is the image's
    if runtime(config, cluster) == "none" and cluster.python.startswith("/") and is_missing(cluster.python):
        yield Problem("python", "does not exist", "set it to the Python interpreter of the nodes", "cluster")


def missing_package_warnings(
    packages: Mapping[str, str], config: RunConfig, cluster: ClusterConfig, exists: Callable[[str], bool]
) -> Iterator[Problem]:
    """Yields a warning for each module (with the key that needs it) that the jobs' Python cannot import.

    Known are NVIDIA's PyTorch image, which has none of them, and a virtual environment on this machine without a
    container. Modules in code_dir count.
    """
    image = config.container.image or cluster.container.image or ""
    folders: list[str] = []
    if runtime(config, cluster) == "none":
        where, folders = f"python = {cluster.python}", _site_packages(cluster.python, exists)
        is_known = bool(folders)
    else:
        where, is_known = f"the image {image}", "nvidia/pytorch" in image
    if cluster.code_dir:
        where, folders = f"{where} or code_dir", [cluster.code_dir, *folders]
        is_known &= exists(cluster.code_dir)  # a missing one has its own warning, or is on another machine
    for module, key in packages.items() if is_known else ():
        if not any(exists(f"{folder}/{module}") for folder in folders):
            reason = f"needs the package {module}, which is not in {where}"
            hint = f"use an image or environment with it (pip install {module.replace('_', '-')}), or remove the key"
            yield Problem(key, reason, hint)


def _site_packages(python: str, exists: Callable[[str], bool]) -> list[str]:
    """The directories with the packages of an interpreter that is named by its path, if this machine has them."""
    prefix = PurePosixPath(python).parent.parent
    folders = (f"{prefix}/lib/python3.{minor}/site-packages" for minor in range(10, 20))
    return [folder for folder in folders if exists(folder)] if python.startswith("/") else []


def container_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yields container settings that would fail or have no effect."""
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
            yield Problem(
                f"container.{key}", f"{verb} no effect with runtime none", hint, about=("container.runtime",)
            )


def _image_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    image = config.container.image or cluster.container.image
    file: Literal["run", "cluster"] = "run" if config.container.image or not image else "cluster"
    if not image:
        yield Problem("container.image", "is missing", "name a .sqsh file or REGISTRY#IMAGE:TAG")
    elif is_image_file(image):
        return
    elif runtime(config, cluster) == "enroot":
        reason = "is a registry reference, but runtime enroot needs a .sqsh file"
        yield Problem(
            "container.image",
            reason,
            "build one with hpcgen render image",
            file,
            about=("container.runtime",),
        )
    elif _first(config.container.copy_image, cluster.container.copy_image):
        where: Literal["run", "cluster"] = "cluster" if config.container.copy_image is None else "run"
        reason = f"has no effect, because {image} is not a .sqsh file"
        yield Problem(
            "container.copy_image", reason, "remove it, or build a .sqsh with hpcgen render image", where
        )


def _target_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    taken: set[str] = set()
    for place, mount in _given_mounts(config, cluster):
        if _target(mount) in taken:
            reason = "is already the target of another mount, and pyxis would silently use only one of them"
            yield replace(place, reason=reason, hint="choose another target")
        elif _target(mount) in SYSTEM_DIRECTORIES:
            reason = "would hide the programs and libraries of the image, so the container could not start"
            yield replace(place, reason=reason, hint="mount it at another target, such as /host/...")
        taken.add(_target(mount))


def _given_mounts(config: RunConfig, cluster: ClusterConfig) -> Iterator[tuple[Problem, Mount]]:
    """Yields the mounts of both files, each with a problem at the place of its target that has no reason yet."""
    sections: tuple[tuple[Literal["run", "cluster"], tuple[Mount, ...]], ...] = (
        ("cluster", cluster.container.mounts),
        ("run", config.container.mounts),
    )
    for file, mounts in sections:
        for index, mount in enumerate(mounts):
            key = "target" if mount.target else "source"
            yield Problem(f"container.mounts[{index}].{key}", "", file=file), mount
