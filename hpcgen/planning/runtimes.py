"""The container runtimes: which images each one starts, the words that start a task, and what its jobs do first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import PurePosixPath

from hpcgen.config.container import Mount, Runtime, is_image_file
from hpcgen.config.stages import RENDEZVOUS, RENDEZVOUS_ID
from trainer.contract.record import record

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


APPTAINER_START = (
    'while [[ $1 != -- ]]; do [[ ! -v $1 ]] || export "APPTAINERENV_$1=${!1}"; shift; done; shift; '
    'exec apptainer exec "$@"'
)
"""Shell code of a task that calls apptainer. A variable of the host loses against one of the image, unless a variable
with this prefix repeats it. --env would show the value to everyone on the node."""

PREFIX = "HPCGEN_ENV_"
"""Prefix under which a job of runtime ce repeats its variables. No image uses it."""

SET_JOB_VARIABLES = (
    'for name in $(env | sed -n "s/^$1\\([A-Za-z0-9_]*\\)=.*/\\1/p"); do '
    'eval "[ -z \\"\\${$1$name+x}\\" ] || export $name=\\"\\$$1$name\\""; unset -v "$1$name"; done; shift; exec "$@"'
)
"""Shell code that runs in the container of runtime ce, where a variable of the image wins over the host's. The job
repeats its variables with the prefix in $1. No value is evaluated."""

ENVIRONMENT_FILE = "container.toml"
"""Name of the file in the job's directory that describes the container of runtime ce."""


@record
class Container:
    """The container of one stage."""

    runtime: Runtime
    image: str
    """Path of an image file, or a registry reference in the form that every enroot version accepts."""
    mounts: tuple[Mount, ...]
    """Mounts with targets, parents before their subdirectories."""
    workdir: str
    writable: bool
    environment: tuple[str, ...]
    """Names of variables to pass. For other variables, a value set in the image overrides the job's."""
    copy_image: bool
    """The image is copied to each node's scratch first."""
    uses_gpus: bool = False
    site_environment: str | None = None
    """The site's environment definition file, by path or name."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations of runtime ce."""

    @property
    def title(self) -> str:
        """The source of the container, for messages."""
        return self.image or self.site_environment or ""

    @property
    def image_is_file(self) -> bool:
        """Returns True for an image file and False for a registry reference."""
        return is_image_file(self.image)

    @property
    def kind(self) -> ContainerRuntime:
        """The row of its runtime."""
        return RUNTIMES[self.runtime]

    def host_path(self, path: str) -> str | None:
        """The path on the host for a path in the container; None if no mount provides it."""
        for mount in reversed(self.mounts):  # subdirectories before their parents
            if PurePosixPath(path).is_relative_to(target_of(mount)):
                return str(PurePosixPath(mount.source, PurePosixPath(path).relative_to(target_of(mount))))
        return None

    def words(self) -> tuple[str, ...]:
        """The words between srun's options and the command."""
        return self.kind.words(self)


def target_of(mount: Mount) -> str:
    """The path of a mount in the container."""
    return mount.target or mount.source


def _pyxis(container: Container) -> tuple[str, ...]:
    """pyxis's options. All mounts are one option, because only the last --container-mounts counts."""
    mounts = (f"{m.source}:{m.target}{':ro' if m.read_only else ''}" for m in container.mounts)
    return (
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={container.workdir}",
        "--no-container-mount-home",
        "--container-writable" if container.writable else "--container-readonly",
        f"--container-env={','.join(container.environment)}",
    )


def _enroot(container: Container) -> tuple[str, ...]:
    """enroot's call. Mounts are colon-separated fstab entries; enroot has no option for the working directory."""
    return (
        *("bash", "-c", ENROOT_START, "enroot_start"),
        *(["--rw"] if container.writable else []),
        *(
            f"--mount={m.source}:{m.target}:none:x-create=auto,rbind{',ro' if m.read_only else ''}"
            for m in container.mounts
        ),
        *(f"--env={name}" for name in container.environment),
        *(CONTAINER_NAME, *ENROOT_STARTED, "env", f"--chdir={container.workdir}"),
    )


def _apptainer(container: Container) -> tuple[str, ...]:
    """apptainer's call. Without --no-eval, it would run `$(...)` in the value of a variable."""
    return (
        *("bash", "-c", APPTAINER_START, "apptainer_start", *container.environment, "--"),
        *("--no-eval", "--no-mount=home,cwd", f"--pwd={container.workdir}"),
        *(["--nv"] if container.uses_gpus else []),
        *(["--writable-tmpfs"] if container.writable else []),
        *(f"--bind={m.source}:{m.target}{':ro' if m.read_only else ''}" for m in container.mounts),
        container.image,
    )


def _ce(container: Container) -> tuple[str, ...]:
    """srun's option, whose file the job writes, and the code that sets the job's variables."""
    return (f"--environment={ENVIRONMENT_FILE}", "sh", "-c", SET_JOB_VARIABLES, "job_variables", PREFIX)


def _variables_before_tasks(container: Container) -> tuple[str, ...]:
    """The variables that the job knows before its rendezvous, whose variables no image sets."""
    later = {*RENDEZVOUS, *RENDEZVOUS_ID}
    return tuple(name for name in container.environment if name not in later)


def environment_file(container: Container) -> str:
    """The environment definition file of runtime ce (TOML). Types of the settings exclude what TOML would escape."""
    base, image = container.site_environment, container.image
    mounts = (f"{m.source}:{m.target}{':ro' if m.read_only else ''}" for m in container.mounts)
    lines = [
        *([f'base_environment = ["{base}"]'] if base else []),
        *([f'image = "{image}"'] if image else []),
        *([] if base and not container.writable else [f"writable = {str(container.writable).lower()}"]),
        f'workdir = "{container.workdir}"',
        *("mounts = [", *(f'    "{mount}",' for mount in mounts), "]"),
        *(["", "[annotations]"] if container.annotations else []),
        *(f'{name} = "{value}"' for name, value in sorted(container.annotations.items())),
    ]
    return "\n".join(lines) + "\n"


@record(kw_only=True)
class ContainerRuntime:
    """A program that starts containers, and how it differs from the others."""

    words: Callable[[Container], tuple[str, ...]]
    """The words that start a task in the container."""
    suffix: str
    """Suffix of its image files."""
    takes_registry: bool
    """True if it also starts an image of a registry."""
    library: str = ""
    """The file in templates/lib whose `create_containers` runs before the first task."""
    settings: Callable[[Container], Mapping[str, str | tuple[str, ...]]] | None = None
    """Shell variables of the script that the library reads."""
    file: Callable[[Container], str] | None = None
    """The text of ENVIRONMENT_FILE, if the job writes one."""
    has_enroot_hooks: bool = False
    """True if enroot's hooks expose devices to the container."""
    copies_images: bool = True
    """True if it starts a copy of an image file on the node."""
    computes: str = ""
    """Prefix of the variables that its library sets."""
    leaks: tuple[str, ...] = ()
    """Patterns of variables of the submitting shell that would change its containers."""
    recipe: str = "hpcgen render image"
    """Command that makes an image file."""
    not_run: str = ""
    """Source and date of its rules, if hpcgen's authors could not run it."""

    def starts(self, image: str) -> bool:
        """Returns True if it can start this image: a file, or a registry reference."""
        return image.endswith(self.suffix) if is_image_file(image) else self.takes_registry and bool(image)


RUNTIMES: Mapping[Runtime, ContainerRuntime] = {
    "pyxis": ContainerRuntime(words=_pyxis, suffix=".sqsh", takes_registry=True, has_enroot_hooks=True),
    "enroot": ContainerRuntime(
        words=_enroot,
        suffix=".sqsh",
        takes_registry=False,
        library="enroot",
        settings=lambda container: {"container_name": CONTAINER_NAME},
        has_enroot_hooks=True,
        computes="ENROOT_",
    ),
    "apptainer": ContainerRuntime(
        words=_apptainer,
        suffix=".sif",
        takes_registry=False,
        library="apptainer",
        computes="APPTAINER_",
        leaks=("APPTAINER_*", "APPTAINERENV_*", "SINGULARITY_*", "SINGULARITYENV_*"),
        recipe="apptainer build IMAGE.sif docker://REGISTRY/IMAGE:TAG",
        not_run="Apptainer's user guide and source of 2026-08 (1.1 or newer)",
    ),
    "ce": ContainerRuntime(
        words=_ce,
        suffix=".sqsh",
        takes_registry=True,
        library="ce",
        settings=lambda container: {"job_variables": _variables_before_tasks(container)},
        file=environment_file,
        has_enroot_hooks=True,
        copies_images=False,
        leaks=(f"{PREFIX}*",),
        not_run="eth-cscs/cscs-docs of 2026-08, docs/software/container-engine",
    ),
}
"""Every runtime except none."""
