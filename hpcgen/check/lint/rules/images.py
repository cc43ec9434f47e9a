"""Container images: names, paths, tags and registries."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.rules.containers import is_tested
from hpcgen.check.lint.template import ANY

SUFFIXES = (".sqsh", ".squashfs")
"""Suffixes of image files."""


@rule(
    "container-without-image",
    "error",
    "the step runs on the host",
    source="pyxis, args.c, pyxis_args_enabled",
)
def container_without_image(job: Job) -> Iterator[Hit]:
    """Container options without an image are ignored, and the program runs on the host."""
    if {"container-image", "container-name"} & job.script.options.keys() or job.script.settings(
        "PYXIS_CONTAINER_IMAGE"
    ):
        return
    for step in job.steps:
        given = [
            option
            for name in ("container-mounts", "container-env", "container-workdir", "container-writable")
            for option in step.all(name)
        ]
        if given and not step.has_container and not step.is_open:
            yield Hit.at(
                given[0].word.line,
                f"--{given[0].name} without --container-image: the step runs on the host",
                "give --container-image",
            )


@rule("container-option", "error", "the step runs on the host", source="Slurm, man srun, --container")
def container_option(job: Job) -> Iterator[Hit]:
    """--container is Slurm's option for an OCI bundle. With the name of an image, the step runs on the host."""
    for step in job.steps:
        for option in step.all("container"):
            if re.search(r"[#:]|\.sqsh$", option.text):
                yield Hit.at(
                    option.word.line,
                    "--container is Slurm's option for an OCI bundle, not for an image",
                    f"--container-image={option.text}",
                )


@rule(
    "image-path",
    "error",
    "a path is read as a registry name",
    source="pyxis, pyxis_slurmstepd.c, squashfs_path",
)
def image_path(job: Job) -> Iterator[Hit]:
    """pyxis reads an image as a file only if it begins with / or a dot. The shell does not expand ~ after =."""
    for line, text, _ in _images(job):
        if text.endswith(SUFFIXES) and not text.startswith(("/", ".", "$", "`")):
            yield Hit.at(
                line,
                f"pyxis looks for {text} in a registry",
                "write the absolute path, or ./ before the name",
            )


@rule("image-empty", "warning", "no image is named", source='pyxis, args.c, "argument required"')
def image_empty(job: Job) -> Iterator[Hit]:
    """srun refuses an empty --container-image.

    A variable that the environment may set or that the script tests is not reported.
    """
    for step in job.steps:
        option = step.option("container-image")
        word = option.value if option else None
        if word and word.known and word.certain and not word.text and not word.assumed:
            # the option may be in another variable: STEP="srun --container-image=$IMAGE"
            names = re.findall(r"--container-image[= ]\"?\$\{?(\w+)", "\n".join(job.script.lines))
            if not any(is_tested(job, name) for name in names):
                name = names[0] if names else "the name"
                yield Hit.at(word.line, "--container-image is empty, which srun refuses", f"set {name}")


@rule("image-pin", "note", "the image may change", source="enroot, doc/cmd/import.md")
def image_pin(job: Job) -> Iterator[Hit]:
    """Without a tag, or with the tag latest, the image can change between two jobs."""
    for line, text, known in _images(job):
        is_file = text.endswith(SUFFIXES) or text.startswith(("/", ".", "$"))
        name = text.rpartition("/")[2]
        if (
            known
            and text
            and not is_file
            and "@" not in text
            and (":" not in name or name.endswith(":latest"))
        ):
            yield Hit.at(
                line,
                f"{text} can be a different image tomorrow",
                "use a tag or a digest, or import the image into a .sqsh file",
            )


@rule("image-registry", "note", "a slash after the registry's name", source="enroot 4.0, release notes")
def image_registry(job: Job) -> Iterator[Hit]:
    """Before 4.0, enroot expects # after the registry. It looks for nvcr.io/nvidia/pytorch on Docker Hub."""
    for line, text, known in _images(job):
        found = re.match(r"(?:docker://)?([\w-]+(?:\.[\w-]+)+(?::\d+)?)/(.+)", text)
        if known and found and "#" not in text and not text.endswith(SUFFIXES):
            yield Hit.at(
                line,
                f"before 4.0, enroot looks for {text} on Docker Hub, because it expects # after the registry's name",
                f"{found[1]}#{found[2]}",
            )


@rule(
    "image-name",
    "error",
    "an image name in upper case",
    source="enroot, doc/cmd/import.md; measured on enroot 4.1",
)
def image_name(job: Job) -> Iterator[Hit]:
    """Image names must be in lower case, or enroot refuses them."""
    for line, text, known in _images(job):
        name = text.partition("#")[2] or text
        repository = name.partition("@")[0].rpartition(":")[0] or name
        if (
            known
            and not text.startswith(("/", "./"))
            and not text.endswith(SUFFIXES)
            and re.search("[A-Z]", repository)
        ):
            yield Hit.at(
                line,
                f"{text} has upper-case letters in its name",
                f"{text.replace(repository, repository.lower())}",
            )


def _images(job: Job) -> Iterator[tuple[int, str, bool]]:
    """Line and text of each image, and whether the text is known. A <name> is unknown."""
    for step in job.steps:
        for option in step.all("container-image"):
            if option.value:
                yield option.value.line, option.text, option.value.known and not ANY.search(option.text)
