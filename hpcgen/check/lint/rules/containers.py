"""Containers: pyxis's options on srun, and mistakes that it accepts silently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Step
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.template import ANY
from hpcgen.check.lint.words import PLACEHOLDER

PYXIS = "pyxis 0.24, args.c and pyxis_slurmstepd.c; measured with enroot 4.1"
PASSED = re.compile(
    r"(NCCL|UCX|SHARP|GLOO|TORCH|NVTE|OMPI_MCA|TORCH_NCCL)_\w+"
    r"|MASTER_(ADDR|PORT)|WORLD_SIZE|OMP_NUM_THREADS|CUDA_DEVICE_\w+|PYTORCH_CUDA_ALLOC_CONF"
)
"""Variables that must reach the tasks with the values of the script."""
SET_BY_IMAGE = ("PATH", "LD_LIBRARY_PATH", "HOME")
MOUNT_FLAGS = frozenset((
    "ro", "rw", "bind", "rbind", "nosuid", "suid", "nodev", "dev", "noexec", "exec", "noatime", "relatime",
    "nodiratime", "private", "rprivate", "slave", "rslave", "shared", "rshared", "unbindable", "runbindable",
    "sync", "async", "nofail", "silent", "defaults", "x-create=dir", "x-create=file", "x-create=auto",
    "x-move", "x-detach", "strictatime", "mand", "nomand", "dirsync", "remount", "loud", "iversion",
))  # fmt: skip
"""Flags of a mount, joined by +: enroot's, from fstab(5)."""


@dataclass(frozen=True)
class Mount:
    """One entry of --container-mounts, as far as it is known."""

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


def _named(step: Step) -> set[str]:
    return {name for option in step.all("container-env")[-1:] for name in option.text.split(",")}


@rule(
    "container-env-gap",
    "note",
    "the image's value overrides the script's",
    source="pyxis, args.c, help of --container-env; enroot, conf/hooks/extra/50-slurm-pytorch.sh",
)
def container_env_gap(job: Job) -> Iterator[Hit]:
    """A variable that the image sets keeps the image's value, unless --container-env lists it.

    enroot's PyTorch hook, if the site installed it, sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE and OMP_NUM_THREADS.
    Only reported if --container-env lists some variables and omits others.
    """
    exported = {item.name for item in job.script.exports if PASSED.fullmatch(item.name)}
    by_command = {id(launch.step.command): launch for launch in job.launches if launch.step}
    for step in job.work_steps:
        option = step.option("container-env")
        if (
            option is None
            or not step.has_container
            or step.is_open
            or (option.value and not option.value.known)
        ):
            continue
        launch = by_command.get(id(step.command))
        missing = sorted(exported - _named(step) - (launch.environment if launch else frozenset()))
        if missing:
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            names = ",".join(sorted(_named(step) | set(missing)))
            yield Hit(
                option.word.line,
                f"--container-env omits {shown}: if the image sets it too, the image's value is used",
                f"--container-env={names}",
            )


@rule("container-env-value", "error", "--container-env takes names", source=PYXIS)
def container_env_value(job: Job) -> Iterator[Hit]:
    """--container-env=FOO=bar does not set FOO to bar: the option takes names only.

    A warning if the text of the step's `bash -c` sets the same names itself.
    """
    for step in job.steps:
        own = {
            item.name
            for item in job.script.assignments
            if item.outer is not None and job.script.commands[item.outer] is step.command
        }
        for option in step.all("container-env"):
            given = [
                name for name, equals, _ in (part.partition("=") for part in option.text.split(",")) if equals
            ]
            if given:
                yield Hit(
                    option.word.line,
                    f"--container-env takes names, and {given[0]} has a value here",
                    "export the variables, and list only their names",
                    severity="warning" if own.issuperset(given) else None,
                )


@rule("container-env-path", "warning", "paths of the host in the container", source=PYXIS)
def container_env_path(job: Job) -> Iterator[Hit]:
    """PATH, LD_LIBRARY_PATH and HOME name directories of the host, which the container may not have."""
    for step in job.steps:
        for option in step.all("container-env"):
            for name in set(option.text.split(",")) & set(SET_BY_IMAGE):
                yield Hit(
                    option.word.line,
                    f"the host's {name} replaces the image's",
                    f"remove {name} from the list",
                )


@rule(
    "container-mounts-repeated", "error", "mounts are lost", source="measured on pyxis 0.24 with Slurm 22.05"
)
def container_mounts_repeated(job: Job) -> Iterator[Hit]:
    """If --container-mounts is given several times, pyxis silently uses only the last one.

    A warning if a loop adds one per iteration: the loop may have only one.
    """
    for item in job.script.assignments if any(step.all("container-mounts") for step in job.steps) else ():
        words = item.items or ((item.value,) if item.value else ())
        grows = item.append or any(item.name in word.variables for word in words)
        adds = any(re.search(r"--container-mounts\b", word.text) for word in words)
        if item.loop and grows and adds and any(item.loop in word.variables for word in words):
            yield Hit(
                item.line,
                "every iteration of the loop adds a --container-mounts, and only the last takes effect",
                f"join the mounts with commas in the loop: mounts+=${item.loop}, and give one --container-mounts",
                severity="warning",
            )
    for step in job.steps:
        options = step.all("container-mounts")
        if len(options) > 1:
            yield Hit(
                options[-1].word.line,
                "only the last --container-mounts takes effect",
                "join them with commas",
            )


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
            yield Hit(
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
                yield Hit(
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
        if text.endswith((".sqsh", ".squashfs")) and not text.startswith(("/", ".", "$", "`")):
            yield Hit(
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
            if not any(_is_tested(job, name) for name in names):
                name = names[0] if names else "the name"
                yield Hit(word.line, "--container-image is empty, which srun refuses", f"set {name}")


def _is_tested(job: Job, name: str) -> bool:
    """True if the script tests a variable."""
    tests = (line for line in job.script.lines if re.search(r"(^|\W)(\[|test)\s", line))
    return any(re.search(rf"\b{re.escape(name)}\b", line) for line in tests)


@rule("image-pin", "note", "the image may change", source="enroot, doc/cmd/import.md")
def image_pin(job: Job) -> Iterator[Hit]:
    """Without a tag, or with the tag latest, the image can change between two jobs."""
    for line, text, known in _images(job):
        is_file = text.endswith((".sqsh", ".squashfs")) or text.startswith(("/", ".", "$"))
        name = text.rpartition("/")[2]
        if (
            known
            and text
            and not is_file
            and "@" not in text
            and (":" not in name or name.endswith(":latest"))
        ):
            yield Hit(
                line,
                f"{text} can be a different image tomorrow",
                "use a tag or a digest, or import the image into a .sqsh file",
            )


@rule("image-registry", "note", "a slash after the registry's name", source="enroot 4.0, release notes")
def image_registry(job: Job) -> Iterator[Hit]:
    """Before 4.0, enroot expects # after the registry. It looks for nvcr.io/nvidia/pytorch on Docker Hub."""
    for line, text, known in _images(job):
        found = re.match(r"(?:docker://)?([\w-]+(?:\.[\w-]+)+(?::\d+)?)/(.+)", text)
        if known and found and "#" not in text and not text.endswith(".sqsh"):
            yield Hit(
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
    """Image names must be lower case. enroot refuses others."""
    for line, text, known in _images(job):
        name = text.partition("#")[2] or text
        repository = name.partition("@")[0].rpartition(":")[0] or name
        if (
            known
            and not text.startswith(("/", "./"))
            and not text.endswith(".sqsh")
            and re.search("[A-Z]", repository)
        ):
            yield Hit(
                line,
                f"{text} has upper-case letters in its name",
                f"{text.replace(repository, repository.lower())}",
            )


def _images(job: Job) -> Iterator[tuple[int, str, bool]]:
    """Line and text of each image, and whether the text is known. A <name> is not."""
    for step in job.steps:
        for option in step.all("container-image"):
            if option.value:
                yield option.value.line, option.text, option.value.known and not ANY.search(option.text)


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
                yield Hit(
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
            yield Hit(line, why, f":{'+'.join(known)}", cause="mount flags")
        elif {*wrong} & {"r", "readonly", "RO"}:
            why = f"pyxis has no flag {written}: {mount.source} stays writable"
            yield Hit(line, why, ":ro", cause="mount flags", severity="warning")
        elif wrong:
            what = "a Docker flag" if {*wrong} <= {"z", "Z"} else "not a mount flag"
            why = f":{':'.join(wrong)} of {mount.source} is {what}; pyxis ignores it"
            yield Hit(line, why, "remove it", cause="mount flags", severity="note")


@rule("mount-target-twice", "error", "a mount hides another", source=PYXIS)
def mount_target_twice(job: Job) -> Iterator[Hit]:
    """pyxis accepts two mounts on one target, and one of them is hidden."""
    for step in job.steps:
        for option in step.all("container-mounts")[-1:]:
            sources: dict[str, str] = {}
            for mount in mounts_of(option.text):
                other = sources.setdefault(mount.target, mount.source)
                if other != mount.source:
                    yield Hit(
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
            is_handled = name in handled or name.startswith("SLURM") or _is_tested(job, name)
            if name and not is_handled:
                yield Hit(
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
    "container-writable",
    "error",
    "a container is writable and read-only",
    source="pyxis, args.c, spank_option_container_writable",
)
def container_writable(job: Job) -> Iterator[Hit]:
    """--container-writable and --container-readonly are mutually exclusive: srun refuses the step."""
    for step in job.steps:
        option = step.option("container-writable")
        if option and step.option("container-readonly"):
            yield Hit(
                option.word.line,
                "--container-writable and --container-readonly are both given",
                "remove one of them",
            )


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
            yield Hit(
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
                    yield Hit(
                        word.line,
                        f"--{name} {word.text} is not mounted into the container on line {step.line}",
                        "mount its directory",
                        cause="path",
                    )


def _paths_of_host(job: Job) -> Iterator[Hit]:
    """Arguments in the source of a mount, and in no target."""
    for step in job.steps:
        if not step.option("container-image") or step.is_open or not step.option("container-mounts"):
            continue
        mounts = [mount for option in step.all("container-mounts")[-1:] for mount in mounts_of(option.text)]
        sources = {
            mount.source.rstrip("/"): mount.target
            for mount in mounts
            if re.match(r"/\w", mount.source)
            and not _SYSTEM_DIRECTORIES.match(mount.source)
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
                yield Hit(
                    word.line,
                    f"{path} is a host path: the container on line {step.line} has {source} at {sources[source]}",
                    sources[source] + path.removeprefix(source),
                    cause="path",
                )


_SYSTEM_DIRECTORIES = re.compile(
    r"/(bin|dev|etc|home|lib\w*|opt|proc|root|run|sbin|sys|tmp|usr|var|workspace)(/|$)"
)
"""Directories that images contain, or that pyxis may mount."""

_SET_BY_ENVIRONMENT = ("IMAGE", "MOUNTS", "WORKDIR", "NAME", "SAVE", "ENV")


@rule("container-settings-twice", "warning", "pyxis ignores an exported setting", source="pyxis 0.24, args.c")
def container_settings_twice(job: Job) -> Iterator[Hit]:
    """pyxis reads PYXIS_CONTAINER_MOUNTS and similar variables only if srun lacks the option.

    The values are not joined: the mounts of the variable are missing in a step with --container-mounts.
    """
    for suffix in _SET_BY_ENVIRONMENT:
        name, option_name = f"PYXIS_CONTAINER_{suffix}", f"container-{suffix.lower()}"
        setting = job.exported(name)
        for step in job.steps if setting else ():
            option = step.option(option_name)
            if option and setting and name not in (option.value.variables if option.value else ()):
                yield Hit(
                    option.word.line,
                    f"--{option_name} overrides {name} on line {setting.line}",
                    f"put all of it into --{option_name}, or remove the option",
                )


def _is_mounted(step: Step, path: str) -> bool:
    """True if a mount contains `path`, or may contain it."""
    for option in step.all("container-mounts")[-1:]:
        for mount in mounts_of(option.text):
            target = mount.target.rstrip("/")
            if path == target or path.startswith(f"{target}/") or ("$" in target and "$" not in path):
                return True
    return False
