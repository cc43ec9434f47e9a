"""Makes the container of a stage from its settings, and finds mistakes in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import PurePosixPath
from typing import Literal

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.container import MOUNTABLE, ContainerConfig, Mount, Runtime, is_image_file
from hpcgen.config.fabric import Fabric
from hpcgen.config.run import RunConfig
from hpcgen.config.shown import show
from hpcgen.errors import HpcgenError, Problem
from hpcgen.planning.runtimes import RUNTIMES, Container, ContainerRuntime, target_of
from hpcgen.planning.software import runtime
from trainer.contract.wording import one_of

SYSTEM_DIRECTORIES = frozenset((
    "/", "/bin", "/lib", "/lib32", "/lib64", "/sbin", "/usr", "/usr/bin", "/usr/lib", "/usr/lib64",
    "/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/sbin",
))  # fmt: skip
"""Directories of an image that no mount may hide."""
IMAGE_DIRECTORIES = ("/etc", "/opt", "/usr/local")
"""Directories in which images of NVIDIA and others have files that programs need."""


def make_container(
    config: RunConfig,
    cluster: ClusterConfig,
    *,
    writes: Iterable[str],
    reads: Iterable[str],
    environment: Iterable[str],
    fabric: Fabric | None = None,
    uses_gpus: bool = False,
) -> Container | None:
    """The container of a stage that uses these host paths and this network; None with runtime none.

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
        uses_gpus=uses_gpus,
        site_environment=run.environment or site.environment,
        annotations=_annotations(config, cluster, fabric),
    )


def _annotations(config: RunConfig, cluster: ClusterConfig, fabric: Fabric | None) -> Mapping[str, str]:
    """Annotations of the fabric, unless the site's environment definition file has its own; then the settings'."""
    has_own = config.container.environment or cluster.container.environment
    of_fabric = fabric.annotations if fabric and not has_own else {}
    return {**of_fabric, **cluster.container.annotations, **config.container.annotations}


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
    shown = {target_of(mount): mount.source for mount in given}
    for read_only, paths in ((False, writes), (True, reads)):
        for path in sorted(set(paths)):
            _require_mountable(path, shown.get(path, path))
            if not any(_shows(mount, path, read_only) for mount in mounts):
                mounts.append(Mount(source=path, read_only=read_only))
    mounts.sort(key=target_of)
    return tuple(
        Mount(source=mount.source, target=target_of(mount), read_only=mount.read_only) for mount in mounts
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
        if target_of(mount) in IMAGE_DIRECTORIES:
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

    Nothing is reported if this machine does not even have the first directory of the path. In /home, each directory can
    be a file system of its own.
    """

    def is_missing(path: str) -> bool:
        top = "/".join(path.split("/")[: 3 if path.startswith("/home/") else 2])
        return not exists(path) and exists(top)

    image = config.container.image or cluster.container.image or ""
    kind = RUNTIMES.get(runtime(config, cluster))
    if kind and is_image_file(image) and is_missing(image):
        file: Literal["run", "cluster"] = "run" if config.container.image else "cluster"
        hint = f"correct the path, or build the image with {kind.recipe}"
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


def not_run_warnings(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yields a warning if hpcgen's authors could not run the container runtime."""
    asked = runtime(config, cluster)
    if asked in RUNTIMES and (source := RUNTIMES[asked].not_run):
        reason = f"was not run by hpcgen's authors, and follows {source}"
        hint = "test it with hpcgen render nccl-test first"
        yield Problem("container.runtime", reason, hint, "run" if config.container.runtime else "cluster")


def container_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yields container settings that would fail or have no effect."""
    if runtime(config, cluster) == "none":
        yield from _unused(config)
    else:
        yield from _image_problems(config, cluster)
        yield from _target_problems(config, cluster)
        yield from _engine_problems(config, cluster)


_OF_HOST = ("runtime", "torch_version")
"""Keys of the section container that have an effect without a container."""


def _unused(config: RunConfig) -> Iterator[Problem]:
    for key in (each.name for each in fields(ContainerConfig)):
        if key not in _OF_HOST and getattr(config.container, key):
            verb, it = ("have", "them") if key in ("mounts", "annotations") else ("has", "it")
            hint = f"set container.runtime: {one_of([*RUNTIMES])}, or remove {it}"
            yield Problem(
                f"container.{key}", f"{verb} no effect with runtime none", hint, about=("container.runtime",)
            )


def _image_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    image, asked = config.container.image or cluster.container.image, runtime(config, cluster)
    kind = RUNTIMES[asked]
    file: Literal["run", "cluster"] = "run" if config.container.image or not image else "cluster"
    if not image:
        if asked != "ce" or not (config.container.environment or cluster.container.environment):
            registry = " or REGISTRY#IMAGE:TAG" if kind.takes_registry else ""
            yield Problem("container.image", "is missing", f"name a {kind.suffix} file{registry}")
    elif not kind.starts(image):
        is_file = is_image_file(image)
        what = f"a {PurePosixPath(image).suffix} file" if is_file else "a registry reference"
        reason = f"is {what}, but runtime {asked} needs a {kind.suffix} file"
        hint = f"build one with {_recipe(kind, image)}"
        yield Problem("container.image", reason, hint, file, about=("container.runtime",))
    elif _first(config.container.copy_image, cluster.container.copy_image):
        yield from _copy_problems(config, image, asked)


def _recipe(kind: ContainerRuntime, image: str) -> str:
    """The command that makes an image file, of this image if it is in a registry."""
    reference = image.replace("#", "/")
    return kind.recipe if is_image_file(image) else kind.recipe.replace("REGISTRY/IMAGE:TAG", reference)


def _copy_problems(config: RunConfig, image: str, asked: Runtime) -> Iterator[Problem]:
    """Yields a problem if `copy_image` has nothing to copy, or if the runtime does not start copies."""
    file: Literal["run", "cluster"] = "cluster" if config.container.copy_image is None else "run"
    if not is_image_file(image):
        reason, hint = f"because {image} is not a file", ", or build a .sqsh with hpcgen render image"
    elif not RUNTIMES[asked].copies_images:
        reason, hint = f"because runtime {asked} mounts the image itself", ""
    else:
        return
    yield Problem("container.copy_image", f"has no effect, {reason}", f"remove it{hint}", file)


def _engine_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yields settings of the container engine that another runtime ignores, or that the engine would refuse."""
    asked = runtime(config, cluster)
    sections: tuple[tuple[Literal["run", "cluster"], ContainerConfig], ...] = (
        ("cluster", cluster.container),
        ("run", config.container),
    )
    for file, section in sections:
        for key in ("environment", "annotations"):
            if (
                asked != "ce"
                and getattr(section, key)
                and not (section is cluster.container and config.container.runtime)
            ):
                verb, it = ("have", "them") if key == "annotations" else ("has", "it")
                reason = f"{verb} no effect with runtime {asked}"
                hint = f"set container.runtime: ce, or remove {it}"
                yield Problem(f"container.{key}", reason, hint, file, about=("container.runtime",))
    names = {**cluster.container.annotations, **config.container.annotations}
    for name in names:
        if any(other.startswith(f"{name}.") for other in names):
            in_run = name in config.container.annotations
            reason = "is the beginning of another annotation's name, which TOML does not allow"
            yield Problem(
                f"container.annotations.{name}", reason, "remove one of them", "run" if in_run else "cluster"
            )
    if asked == "ce" and config.share == "group":
        reason = "is not allowed with share: group, since others could replace the file that describes the container"
        yield Problem("container.runtime", reason, "use share: private", about=("share",))


def _target_problems(config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    taken: set[str] = set()
    for place, mount in _given_mounts(config, cluster):
        if target_of(mount) in taken:
            reason = "is already the target of another mount, and the container would show only one of them"
            yield replace(place, reason=reason, hint="choose another target")
        elif target_of(mount) in SYSTEM_DIRECTORIES:
            reason = "would hide the programs and libraries of the image, so the container could not start"
            yield replace(place, reason=reason, hint="mount it at another target, such as /host/...")
        taken.add(target_of(mount))


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
