"""Mounts of containers, and paths that are not mounted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Step
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.rules.containers import PYXIS, is_tested
from hpcgen.check.lint.words import PLACEHOLDER

MOUNT_FLAGS = frozenset((
    "ro", "rw", "bind", "rbind", "nosuid", "suid", "nodev", "dev", "noexec", "exec", "noatime", "relatime",
    "nodiratime", "private", "rprivate", "slave", "rslave", "shared", "rshared", "unbindable", "runbindable",
    "sync", "async", "nofail", "silent", "defaults", "x-create=dir", "x-create=file", "x-create=auto",
    "x-move", "x-detach", "strictatime", "mand", "nomand", "dirsync", "remount", "loud", "iversion",
))  # fmt: skip
"""Flags of a mount in enroot, joined with +. Most are from fstab(5)."""


@dataclass(frozen=True)
class Mount:
    """The known parts of one entry of --container-mounts."""

    source: str
    target: str
    flags: tuple[str, ...]


def mounts_of(text: str) -> list[Mount]:
    """The mounts of an option's value. Commas and colons within an expansion are not separators."""
    entries: list[list[str]] = [[""]]
    for part in re.findall(r"\$\([^()]*\)|\$\{[^{}]*\}|`[^`]*`|.", text, re.DOTALL):
        if part == ",":
            entries.append([""])
        elif part == ":":
            entries[-1].append("")
        else:
            entries[-1][-1] += part
    found = []
    for source, *rest in entries:
        if source or rest:
            found.append(Mount(source, (rest and rest[0]) or source, tuple(filter(None, rest[1:]))))
    return found


@rule(
    "container-mounts-repeated", "error", "mounts are lost", source="measured on pyxis 0.24 with Slurm 22.05"
)
def container_mounts_repeated(job: Job) -> Iterator[Hit]:
    """If --container-mounts is given several times, pyxis silently uses only the last one.

    A warning if a loop adds one per iteration, since the loop may run only once.
    """
    for item in job.script.assignments if any(step.all("container-mounts") for step in job.steps) else ():
        words = item.items or ((item.value,) if item.value else ())
        grows = item.append or any(item.name in word.variables for word in words)
        adds = any(re.search(r"--container-mounts\b", word.text) for word in words)
        if item.loop and grows and adds and any(item.loop in word.variables for word in words):
            yield Hit.at(
                item.line,
                "every iteration of the loop adds a --container-mounts, and only the last takes effect",
                f"join the mounts with commas in the loop: mounts+=${item.loop}, and give one --container-mounts",
                severity="warning",
            )
    for step in job.steps:
        options = step.all("container-mounts")
        if len(options) > 1:
            yield Hit.at(
                options[-1].word.line,
                "only the last --container-mounts takes effect",
                "join them with commas",
            )


@rule("mount-source", "error", "pyxis refuses a mount", source="pyxis, args.c, add_mount")
def mount_source(job: Job) -> Iterator[Hit]:
    """Source and target of a mount must begin with / or a dot, except for the sources tmpfs and umount.

    The shell does not expand ~ after --container-mounts= or after a comma. srun refuses such a mount.
    """
    for line, mount in _mounts(job):
        for what, path in (("source", mount.source), ("target", mount.target)):
            is_path = (
                not path or PLACEHOLDER.search(path) or path[0] in "./$`\"'" or path in ("tmpfs", "umount")
            )
            if not is_path:
                yield Hit.at(
                    line,
                    f"the mount {what} {path!r} is not a path: it does not begin with / or a dot",
                    "join flags with +, as in :ro+noexec"
                    if path in MOUNT_FLAGS
                    else 'write "$HOME" for ~, and ./ before a relative path',
                    cause="mount",
                )
                break


@rule(
    "mount-flags",
    "error",
    "flags of a mount are ignored",
    source="enroot, doc/configuration.md; fstab(5); measured on pyxis 0.24",
)
def mount_flags(job: Job) -> Iterator[Hit]:
    """Flags of a mount are joined with + (:ro+noexec). Flags joined with a colon are ignored.

    pyxis silently ignores unknown flags. This is a warning if :r or :readonly was meant to be :ro, and a note
    otherwise: :z and :Z are Docker's SELinux labels.
    """
    for line, mount in _mounts(job):
        flags = "+".join(mount.flags).split("+") if mount.flags else []
        wrong = [flag for flag in flags if flag and flag not in MOUNT_FLAGS and "$" not in flag]
        if mount.source in ("tmpfs", "umount") or any("=" in flag for flag in flags):
            continue  # these have mount options of their own, see mount(8)
        known = [flag for flag in flags if flag in MOUNT_FLAGS]
        written = f":{':'.join(mount.flags)}"
        if known and len(mount.flags) > 1:
            why = f"the flags {written} of {mount.source} have no effect: flags are joined with +"
            yield Hit.at(line, why, f":{'+'.join(known)}", cause="mount flags")
        elif {*wrong} & {"r", "readonly", "RO"}:
            why = f"pyxis has no flag {written}: {mount.source} stays writable"
            yield Hit.at(line, why, ":ro", cause="mount flags", severity="warning")
        elif wrong:
            what = "a Docker flag" if {*wrong} <= {"z", "Z"} else "not a mount flag"
            why = f":{':'.join(wrong)} of {mount.source} is {what}; pyxis ignores it"
            yield Hit.at(line, why, "remove it", cause="mount flags", severity="note")


@rule("mount-target-twice", "error", "a mount hides another", source=PYXIS)
def mount_target_twice(job: Job) -> Iterator[Hit]:
    """pyxis accepts two mounts on one target, and one of them is hidden."""
    for step in job.steps:
        for option in step.all("container-mounts")[-1:]:
            sources: dict[str, str] = {}
            for mount in mounts_of(option.text):
                other = sources.setdefault(mount.target, mount.source)
                if other != mount.source:
                    yield Hit.at(
                        option.word.line,
                        f"{other} and {mount.source} are both mounted on {mount.target}",
                        "use another target for one of them",
                    )


@rule(
    "mount-unset",
    "note",
    "with an empty variable, an option takes the command as its value",
    source="man bash, Word Splitting",
)
def mount_unset(job: Job) -> Iterator[Hit]:
    """With --container-mounts $MOUNTS and an empty MOUNTS, the option takes the next word as its value.

    Variables that the script sets, tests or gives a default are not reported. Neither is --container-image, without
    which the step is pointless.
    """
    handled = {item.name for item in job.script.assignments} | {"PWD", "HOME", "USER", "TMPDIR"}
    handled |= {use.name for use in job.script.uses if use.guarded}
    for step in job.steps:
        for option in step.options:
            value = option.value
            if not option.name.startswith("container-") or option.name == "container-image":
                continue
            if value is None or value is option.word:
                continue
            found = re.fullmatch(r"\$\{?(\w+)\}?", value.source)
            name = found[1] if found and "=" not in option.word.text else ""
            is_handled = name in handled or name.startswith("SLURM") or is_tested(job, name)
            if name and not is_handled:
                yield Hit.at(
                    option.word.line,
                    f"if {name} is empty, --{option.name} takes the next word as its value",
                    f'--{option.name}="${{{name}:?}}"',
                )


def _mounts(job: Job) -> Iterator[tuple[int, Mount]]:
    """Every mount whose source begins with known text."""
    for step in job.steps:
        for option in step.all("container-mounts"):
            for mount in mounts_of(option.text):
                if not mount.source.startswith(("$", "`", '"')):
                    yield option.value.line if option.value else option.word.line, mount


@rule(
    "topology-not-mounted",
    "error",
    "NCCL does not find its topology file",
    source="NCCL user guide, NCCL_TOPO_FILE",
)
def topology_not_mounted(job: Job) -> Iterator[Hit]:
    """The host's topology file must be mounted. Without it, NCCL continues and pairs GPUs with the wrong NICs."""
    setting = job.exported("NCCL_TOPO_FILE")
    if setting is None or setting.value is None or not setting.value.text.startswith("/"):
        return
    path = setting.value.text
    for launch in job.trainings:
        step = launch.step
        if step and step.has_container and not step.is_open and not _is_mounted(step, path):
            yield Hit.at(
                setting.line,
                f"{path} is not mounted into the container on line {step.line}",
                f"--container-mounts={path}:{path}:ro,...",
            )


@rule("path-not-mounted", "warning", "a path is not mounted into the container", source=PYXIS)
def path_not_mounted(job: Job) -> Iterator[Hit]:
    """A path outside all mounts is missing in the container. Files written there are lost when the job ends.

    The rule checks paths in Megatron-LM's options, except in directories of images, and any program's
    arguments in the source of a mount with another target. A cluster may add mounts (enroot's mounts.d).
    """
    names = (
        "save", "load", "tensorboard-dir", "data-cache-path", "vocab-file", "merge-file", "tokenizer-model",
        "data-path", "train-data-path", "valid-data-path", "test-data-path", "wandb-save-dir",
    )  # fmt: skip
    in_images = ("/workspace/", "/opt/", "/root/", "/usr/", "/tmp/", "/dev/shm/")
    yield from _paths_of_host(job)
    for launch in job.megatron:
        step = launch.step
        if step is None or not step.option("container-image") or step.is_open:
            continue
        for name in names:
            for word in launch.flags[name].values if name in launch.flags else ():
                is_path = word.known and word.certain and word.text.startswith("/")
                if is_path and not word.text.startswith(in_images) and not _is_mounted(step, word.text):
                    yield Hit.at(
                        word.line,
                        f"--{name} {word.text} is not mounted into the container on line {step.line}",
                        "mount its directory",
                        cause="path",
                    )


def _paths_of_host(job: Job) -> Iterator[Hit]:
    """Arguments that are in the source of a mount, but in no target."""
    for step in job.steps:
        if not step.option("container-image") or step.is_open or not step.option("container-mounts"):
            continue  # the site's configuration of enroot may mount what it needs
        mounts = [mount for option in step.all("container-mounts")[-1:] for mount in mounts_of(option.text)]
        sources = {
            mount.source.rstrip("/"): mount.target
            for mount in mounts
            if re.match(r"/\w", mount.source)
            and not _SYSTEM_DIRECTORIES.match(mount.source)  # images have these themselves
            and "$" not in mount.source
        }
        launches = [launch for launch in job.launches if launch.step and launch.step.command is step.command]
        for word in (*step.program, *(word for launch in launches for word in launch.arguments)):
            path = re.sub(r"^--?[\w-]+=", "", word.text)
            if (
                not (word.known and word.certain)
                or not re.fullmatch(r"/[\w./+-]+", path)
                or _is_mounted(step, path)
            ):
                continue
            source = next((source for source in sources if f"{path}/".startswith(f"{source}/")), None)
            if source:
                yield Hit.at(
                    word.line,
                    f"{path} is a host path: the container on line {step.line} has {source} at {sources[source]}",
                    sources[source] + path.removeprefix(source),
                    cause="path",
                )


_SYSTEM_DIRECTORIES = re.compile(
    r"/(bin|dev|etc|home|lib\w*|opt|proc|root|run|sbin|sys|tmp|usr|var|workspace)(/|$)"
)
"""Directories that images contain, or that pyxis may mount."""


def _is_mounted(step: Step, path: str) -> bool:
    """True if a mount contains `path`, or may contain it."""
    for option in step.all("container-mounts")[-1:]:
        for mount in mounts_of(option.text):
            target = mount.target.rstrip("/")
            if path == target or path.startswith(f"{target}/") or ("$" in target and "$" not in path):
                return True
    return False
