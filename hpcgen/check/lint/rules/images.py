"""Container images: names, paths, tags and registries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.rules.containers import is_tested
from hpcgen.check.lint.template import ANY

SUFFIXES = (".sqsh", ".squashfs")
"""Suffixes of image files."""
PATH_STARTS = ("/", ".")
"""Beginnings of the images that pyxis reads as files."""
REFERENCE = re.compile(
    r"(?P<scheme>dockerd?://)?(?P<user>[^@/#]+@(?!sha\d+:))?([^#]+#|(?P<host>[^/#]*[.:][^/#]*)/)?"
    r"(?P<repository>[^:@#]+)(:(?P<tag>[^:@]+))?(@(?P<digest>.+))?"
)
"""The name of an image for enroot (src/docker.sh). A registry ends in #, or since 4.0 in / if it has a dot or a port.
`host` is a registry that ends in /."""


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
            if re.search("[#:]", option.text) or option.text.endswith(SUFFIXES):
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
    for image in _images(job):
        if image.is_file and not image.text.startswith(PATH_STARTS) and not _begins_unknown(image.text):
            yield Hit.at(
                image.line,
                f"pyxis looks for {image.text} in a registry",
                "write the absolute path, or ./ before the name",
            )


def _begins_unknown(text: str) -> bool:
    return text.startswith(("$", "`")) or ANY.match(text) is not None


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
    for image in _images(job):
        name = image.reference
        if name and name["tag"] in (None, "latest") and not name["digest"]:
            yield Hit.at(
                image.line,
                f"{image.text} can be a different image tomorrow",
                "use a tag or a digest, or import the image into a .sqsh file",
            )


@rule("image-registry", "note", "a slash after the registry's name", source="enroot 4.0, release notes")
def image_registry(job: Job) -> Iterator[Hit]:
    """Before 4.0, enroot expects # after the registry. It looks for nvcr.io/nvidia/pytorch on Docker Hub."""
    for image in _images(job):
        name = image.reference
        if name and name["host"] and name["scheme"] != "dockerd://":
            does = f"refuses {image.text}" if ":" in name["host"] else f"looks for {image.text} on Docker Hub"
            yield Hit.at(
                image.line,
                f"before 4.0, enroot {does}, because it expects # after the registry's name",
                f"{name['user'] or ''}{name['host']}#{image.text[name.start('repository') :]}",
            )


@rule(
    "image-name",
    "error",
    "an image name in upper case",
    source="enroot, doc/cmd/import.md; measured on enroot 4.1",
)
def image_name(job: Job) -> Iterator[Hit]:
    """Image names must be in lower case, or enroot refuses them. Users, registries and tags can have upper case."""
    for image in _images(job):
        name = image.reference
        if name and re.search("[A-Z]", name["repository"]):
            start, end = name.span("repository")
            yield Hit.at(
                image.line,
                f"{image.text} has upper-case letters in its name",
                image.text[:start] + name["repository"].lower() + image.text[end:],
            )


@dataclass(frozen=True)
class _Image:
    """An image that a step names."""

    line: int
    text: str
    known: bool
    """True if `text` is exactly what srun gets. With a <name>, it is not."""

    @property
    def is_file(self) -> bool:
        """True for a path, including one that pyxis reads as the name of an image."""
        return self.text.startswith(PATH_STARTS) or self.text.endswith(SUFFIXES)

    @property
    def reference(self) -> re.Match[str] | None:
        """The parts of an image's name; None for a file and for an unknown name."""
        return REFERENCE.fullmatch(self.text) if self.known and not self.is_file else None


def _images(job: Job) -> Iterator[_Image]:
    for step in job.steps:
        for option in step.all("container-image"):
            if word := option.value:
                yield _Image(word.line, option.text, word.known and not ANY.search(option.text))
