"""Containers: pyxis's options on srun, and what it accepts without a word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpcgen.lint.job import Job
from hpcgen.lint.launch import Step
from hpcgen.lint.rule import Hit, rule

PYXIS = "pyxis 0.24 and enroot 4.1, tried"
PASSED = re.compile(
    r"(NCCL|UCX|SHARP|GLOO|TORCH|NVTE|OMPI_MCA|TORCH_NCCL)_\w+"
    r"|MASTER_(ADDR|PORT)|WORLD_SIZE|OMP_NUM_THREADS|CUDA_DEVICE_\w+|PYTORCH_CUDA_ALLOC_CONF"
)
"""Variables that must reach the tasks as the script says."""
OF_THE_IMAGE = ("PATH", "LD_LIBRARY_PATH", "HOME")
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
    """The mounts of an option's value."""
    found = []
    for entry in filter(None, text.split(",")):
        source, _, rest = entry.partition(":")
        target, _, flags = rest.partition(":")
        found.append(Mount(source, target or source, tuple(flags.split(":")) if flags else ()))
    return found


def _named(step: Step) -> set[str]:
    return {name for option in step.all("container-env")[-1:] for name in option.text.split(",")}


@rule("container-env-gap", "warning", "the image's value wins over the script's", source=PYXIS)
def container_env_gap(job: Job) -> Iterator[Hit]:
    """A variable that the image sets keeps the image's value, unless --container-env names it.

    NGC images set NCCL and UCX variables, and enroot's PyTorch hook sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE
    and OMP_NUM_THREADS.
    """
    exported = {item.name for item in job.script.exports if PASSED.fullmatch(item.name)}
    by_command = {id(launch.step.command): launch for launch in job.launches if launch.step}
    for step in job.work_steps:
        option = step.option("container-env")
        if not step.has_container or step.is_open or (option and option.value and not option.value.known):
            continue
        launch = by_command.get(id(step.command))
        missing = sorted(exported - _named(step) - (launch.environment if launch else frozenset()))
        if missing:
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            names = ",".join(sorted(_named(step) | set(missing)))
            yield Hit(
                option.word.line if option else step.line,
                f"a value in the image wins over the exported {shown}",
                f"--container-env={names}",
            )


@rule("container-env-value", "error", "--container-env takes names", source=PYXIS)
def container_env_value(job: Job) -> Iterator[Hit]:
    """--container-env=FOO=bar does not set FOO to bar: the option takes names, and the rest is garbage."""
    for step in job.steps:
        for option in step.all("container-env"):
            if "=" in option.text:
                yield Hit(
                    option.word.line,
                    f"{option.text.partition('=')[0]} is followed by a value",
                    "export them, and give the names alone",
                )


@rule("container-env-path", "error", "the host's paths in the container", source=PYXIS)
def container_env_path(job: Job) -> Iterator[Hit]:
    """PATH, LD_LIBRARY_PATH and HOME name directories of the host: the container has others, or none."""
    for step in job.steps:
        for option in step.all("container-env"):
            for name in set(option.text.split(",")) & set(OF_THE_IMAGE):
                yield Hit(option.word.line, f"the host's {name} replaces the image's", f"leave {name} out")


@rule("container-mounts-repeated", "error", "mounts are lost", source=PYXIS)
def container_mounts_repeated(job: Job) -> Iterator[Hit]:
    """Of several --container-mounts pyxis takes the last one, without a word."""
    for step in job.steps:
        options = step.all("container-mounts")
        if len(options) > 1:
            yield Hit(
                options[-1].word.line, "only the last --container-mounts has effect", "join them with commas"
            )


@rule("container-without-image", "error", "the step runs on the host", source=PYXIS)
def container_without_image(job: Job) -> Iterator[Hit]:
    """Container options without an image are ignored, and the program runs on the host."""
    if "container-image" in job.script.options:
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


@rule("container-option", "error", "the step runs on the host", source=PYXIS)
def container_option(job: Job) -> Iterator[Hit]:
    """--container is Slurm's option for an OCI bundle. With an image's name the step runs on the host."""
    for step in job.steps:
        for option in step.all("container"):
            if re.search(r"[#:]|\.sqsh$", option.text):
                yield Hit(
                    option.word.line,
                    "--container names an OCI bundle of Slurm's, not an image",
                    f"--container-image={option.text}",
                )


@rule("image-path", "error", "a path that is taken for a registry name", source=PYXIS)
def image_path(job: Job) -> Iterator[Hit]:
    """pyxis takes a .sqsh for a file only when it begins with / or ./, and no shell expands ~ after a =."""
    for line, text, _ in _images(job):
        if text.endswith((".sqsh", ".squashfs")) and not text.startswith(("/", "./", "$")):
            yield Hit(line, f"{text} is looked for in a registry", "give the absolute path")


@rule("image-pin", "note", "the image may change", source="enroot, README")
def image_pin(job: Job) -> Iterator[Hit]:
    """Without a tag, or with latest, the image is whatever the registry has on that day."""
    for line, text, known in _images(job):
        is_file = text.endswith((".sqsh", ".squashfs")) or text.startswith(("/", "./", "$"))
        name = text.rpartition("/")[2]
        if known and not is_file and "@" not in text and (":" not in name or name.endswith(":latest")):
            yield Hit(
                line, f"{text} has no fixed version", "name a tag or a digest, or import it into a .sqsh"
            )


@rule("image-registry", "note", "a registry's name with a slash", source="enroot 4.0, release notes")
def image_registry(job: Job) -> Iterator[Hit]:
    """Before enroot 4.0 the registry ends with #: nvcr.io/nvidia/pytorch is looked for on Docker Hub."""
    for line, text, known in _images(job):
        found = re.match(r"(?:docker://)?([\w-]+(?:\.[\w-]+)+(?::\d+)?)/(.+)", text)
        if known and found and "#" not in text and not text.endswith(".sqsh"):
            yield Hit(line, f"enroot before 4.0 looks for {text} on Docker Hub", f"{found[1]}#{found[2]}")


@rule("image-name", "error", "an image name in capitals", source=PYXIS)
def image_name(job: Job) -> Iterator[Hit]:
    """Names of images are lower case; enroot refuses others."""
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
                line, f"{text} has capitals in its name", f"{text.replace(repository, repository.lower())}"
            )


def _images(job: Job) -> Iterator[tuple[int, str, bool]]:
    """Line and text of each image, and whether the text is known."""
    for step in job.steps:
        for option in step.all("container-image"):
            if option.value:
                yield option.value.line, option.text, option.value.known


@rule("mount-source", "error", "pyxis refuses a mount", source=PYXIS)
def mount_source(job: Job) -> Iterator[Hit]:
    """The source of a mount is an absolute path without blanks. pyxis knows neither ~ nor relative paths."""
    for line, mount in _mounts(job):
        bad = re.match(r"[~.]", mount.source) or (mount.source and re.match(r"[A-Za-z0-9_-]", mount.source))
        if bad or re.search(r"\s", mount.source + mount.target):
            reason = "has a blank in it" if not bad else "is no absolute path"
            yield Hit(line, f"the mount {mount.source!r} {reason}", "give an absolute path without blanks")


@rule("mount-flags", "error", "a mount's flags are not read", source=PYXIS)
def mount_flags(job: Job) -> Iterator[Hit]:
    """Flags of a mount are joined by + (:ro+noexec). pyxis accepts others, and they do nothing."""
    for line, mount in _mounts(job):
        flags = "+".join(mount.flags)
        wrong = [flag for flag in flags.split("+") if flag and flag not in MOUNT_FLAGS and "$" not in flag]
        if wrong or len(mount.flags) > 1:
            right = "+".join(flag for flag in flags.split("+") if flag in MOUNT_FLAGS) or "ro"
            yield Hit(
                line,
                f"the flags :{':'.join(mount.flags)} of {mount.source} are not what they seem",
                f":{right}",
            )


@rule("mount-target-twice", "error", "a mount hides another", source=PYXIS)
def mount_target_twice(job: Job) -> Iterator[Hit]:
    """Of two mounts on one target, one is not seen; pyxis accepts both."""
    for step in job.steps:
        for option in step.all("container-mounts")[-1:]:
            sources: dict[str, str] = {}
            for mount in mounts_of(option.text):
                other = sources.setdefault(mount.target, mount.source)
                if other != mount.source:
                    yield Hit(
                        option.word.line,
                        f"{other} and {mount.source} are both mounted on {mount.target}",
                        "give one of them another target",
                    )


@rule("mount-unset", "warning", "an empty variable swallows the command", source=PYXIS)
def mount_unset(job: Job) -> Iterator[Hit]:
    """--container-mounts $MOUNTS without quotes: when MOUNTS is empty, the option takes the next word as its value."""
    set_here = {item.name for item in job.script.assignments}
    for step in job.steps:
        for option in step.options:
            value = option.value
            if not option.name.startswith("container-") or value is None or value is option.word:
                continue
            found = re.fullmatch(r"\$\{?(\w+)\}?", value.source)
            apart = "=" not in option.word.text
            if found and apart and found[1] not in set_here and not found[1].startswith("SLURM"):
                yield Hit(
                    option.word.line,
                    f"when {found[1]} is empty, --{option.name} takes the next word for its value",
                    f'--{option.name}="${{{found[1]}:?}}"',
                )


def _mounts(job: Job) -> Iterator[tuple[int, Mount]]:
    """Every mount whose source is known where it matters."""
    for step in job.steps:
        for option in step.all("container-mounts"):
            for mount in mounts_of(option.text):
                if not mount.source.startswith(("$", "`")):
                    yield option.value.line if option.value else option.word.line, mount


@rule("container-home", "note", "packages in the home directory", source="Azure CycleCloud's enroot.conf")
def container_home(job: Job) -> Iterator[Hit]:
    """Where enroot mounts the home directory (ENROOT_MOUNT_HOME), ~/.local hides the image's Python packages."""
    for step in job.work_steps:
        said = step.option("no-container-mount-home", "container-mount-home")
        if step.has_container and not said and not step.is_open and not job.exported("PYTHONNOUSERSITE"):
            yield Hit(
                step.line,
                "the home directory may be mounted, and ~/.local hides packages of the image",
                "--no-container-mount-home",
            )


@rule("container-writable", "error", "writable and read-only", source=PYXIS)
def container_writable(job: Job) -> Iterator[Hit]:
    """--container-writable and --container-readonly exclude each other: srun refuses the step."""
    for step in job.steps:
        option = step.option("container-writable")
        if option and step.option("container-readonly"):
            yield Hit(
                option.word.line, "the container is to be writable and read-only", "keep one of the two"
            )


@rule("topology-not-mounted", "error", "NCCL does not find its topology file", source="NCCL, NCCL_TOPO_FILE")
def topology_not_mounted(job: Job) -> Iterator[Hit]:
    """A topology file of the host must be mounted; without it NCCL goes on, and pairs GPUs with the wrong NICs."""
    setting = job.exported("NCCL_TOPO_FILE")
    if setting is None or setting.value is None or not setting.value.text:
        return
    path = setting.value.text
    for step in job.work_steps:
        if step.has_container and not step.is_open and not _is_mounted(step, path):
            yield Hit(
                setting.line,
                f"{path} is not mounted into the container",
                f"--container-mounts={path}:{path}:ro,...",
            )


@rule("path-not-mounted", "error", "a path that the container does not have", source=PYXIS)
def path_not_mounted(job: Job) -> Iterator[Hit]:
    """What lies under no mount is missing in the container; what is written there ends with the job.

    Looked at are the paths that Megatron-LM's options name.
    """
    names = (
        "save", "load", "tensorboard-dir", "data-cache-path", "vocab-file", "merge-file", "tokenizer-model",
        "data-path", "train-data-path", "valid-data-path", "test-data-path", "wandb-save-dir",
    )  # fmt: skip
    for launch in job.megatron:
        step = launch.step
        if step is None or not step.option("container-image") or step.is_open:
            continue
        for name in names:
            for word in launch.flags[name].values if name in launch.flags else ():
                if (
                    word.known
                    and word.certain
                    and word.text.startswith("/")
                    and not _is_mounted(step, word.text)
                ):
                    yield Hit(
                        word.line,
                        f"--{name} {word.text} lies under no mount of the container",
                        "mount its directory",
                    )


def _is_mounted(step: Step, path: str) -> bool:
    """Whether a mount shows `path`, or is not known well enough to say that it does not."""
    for option in step.all("container-mounts")[-1:]:
        for mount in mounts_of(option.text):
            target = mount.target.rstrip("/")
            if path == target or path.startswith(f"{target}/") or ("$" in target and "$" not in path):
                return True
    return False
