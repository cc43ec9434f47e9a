"""Converts a call of apptainer or singularity into settings of the container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcgen.check.lint.words import Word
from hpcgen.check.lint.wrappers import CONTAINERS
from hpcgen.check.migration.account import shown_words
from hpcgen.check.migration.leftover import Carried, is_sure, unknown
from hpcgen.config.container import Image, MountPath
from hpcgen.config.fields import constraint_problems

PROGRAMS = ("apptainer", "singularity")
_BIND = ("-B", "--bind")
_DIRECTORY = ("--pwd", "--cwd")
_IMPLIED = frozenset(("--nv", "--no-home", "--no-eval", "--no-mount=home", "--no-mount=home,cwd", "--quiet"))
"""Options that hpcgen sets itself, or that change only messages."""


@dataclass(frozen=True)
class Call:
    """`apptainer exec OPTION... IMAGE`."""

    options: tuple[tuple[str, Word], ...]
    """Names with their values; an option without a value has itself as its value."""
    image: Word

    def binds(self) -> Iterator[Word]:
        """Yields the values of --bind."""
        return (value for name, value in self.options if name in _BIND)


def read_call(words: tuple[Word, ...]) -> Call | None:
    """The call that these words in front of a program are; None if they are another one, or have an unknown image."""
    name = words[0].text.rpartition("/")[2] if words else ""
    verb = next((index for index, word in enumerate(words) if word.text == "exec"), None)
    if name not in PROGRAMS or verb is None:
        return None
    options: list[tuple[str, Word]] = []
    rest = [*words[1:verb], *words[verb + 1 :]]
    while rest and rest[0].text.startswith("-"):
        word = rest.pop(0)
        option, equals, value = word.text.partition("=")
        if equals and option in CONTAINERS[name].with_value:
            options.append((option, replace(word, text=value)))
        elif option in CONTAINERS[name].with_value and rest:
            options.append((option, rest.pop(0)))
        else:
            options.append((word.text, word))
    is_image = len(rest) == 1 and is_sure(rest[0]) and rest[0].text.endswith(".sif")
    return Call(tuple(options), rest[0]) if is_image and not _problems(Image, rest[0].text) else None


def carry_call(call: Call, carried: Carried) -> None:
    """Carries over the image, the directory and whether the container is writable. Lists other options."""
    carried.put("container.image", call.image.text)
    for name, value in call.options:
        if name in _DIRECTORY and is_sure(value) and not _problems(MountPath, value.text):
            carried.put("container.workdir", value.text)
        elif name in _DIRECTORY:
            carried.leave(value.line, f"{name} {value.text}", unknown(value))
        elif name == "--writable-tmpfs":
            carried.put("container.writable", True)
        elif name not in (*_BIND, *_IMPLIED):
            what = name if value.text == name else f"{name} {shown_words([value])}"
            carried.leave(value.line, what, "hpcgen calls apptainer with options of its own")


def _problems(hint: object, value: str) -> bool:
    return any(constraint_problems(hint, value))
