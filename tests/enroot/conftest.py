"""A build of an image without NVIDIA's image: on the real enroot where it is on PATH, and always on a stand-in.

The stand-in (stand_in_enroot) keeps enroot's files and refusals and runs nothing in a container. With the real
enroot the base image is an empty one that shows this machine's programs, so install-inside.sh runs for real.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENROOT = ROOT / "enroot"
STAND_IN = Path(__file__).parent / "stand_in_enroot"
MAGIC = b"hsqs"
CODE = "hpcgen-0.1.0-abc"

# Before one of its calls, the complete build is killed, as by Slurm; or after it, with half of its output.
SHIM = """\
#!/bin/bash
echo "{name} $*" >>"$SHIM_LOG"
call=$(wc -l <"$SHIM_LOG")
[[ $call != "${{KILL_BEFORE-}}" ]] || kill -KILL 0
[[ {name} != "${{KILL_DURING-}}" && "{name} $1" != "${{KILL_DURING-}}" ]] || {{
    {program} "$@"
    [[ $2 != --output ]] || truncate --size=100 "$3"
    kill -KILL 0
}}
exec {program} "$@"
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass
class ImageBuild:
    """A build of `output`, and what is done to it on its way."""

    folder: Path
    enroot: str
    """Path of the program, either the real one or the stand-in."""
    base: str
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()
    """A command that runs the build, its arguments."""

    @property
    def output(self) -> Path:
        return self.folder / "images/hpc.sqsh"

    @property
    def record(self) -> Path:
        return self.folder / "images/hpc.sqsh.record"

    @property
    def is_stand_in(self) -> bool:
        return self.enroot == str(STAND_IN)

    def run(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """One build in a session of its own, so that it can be killed with all that it started."""
        (self.folder / "calls").write_text("")
        command = [
            *self.within,
            str(ENROOT / "build-image.sh"),
            f"--output={self.output}",
            f"--base={self.base}",
        ]
        return subprocess.run(
            [*command, f"--work={self.folder / 'work'}", *self.options, *options],
            env={
                **os.environ,
                "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "SHIM_LOG": str(self.folder / "calls"),
                **self.environment,
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )

    def calls(self) -> list[str]:
        """The watched programs that the last build called."""
        return (self.folder / "calls").read_text().splitlines()

    def leftovers(self) -> list[str]:
        """Files other than the image and its record."""
        images = {path.name for path in (self.folder / "images").iterdir()} - {
            self.output.name,
            self.record.name,
        }
        return sorted(images | {path.name for path in (self.folder / "work").iterdir()})

    def is_whole(self) -> bool:
        """True if the file under the final name is a complete image."""
        if not self.is_stand_in:
            done = subprocess.run(
                ["unsquashfs", "-quiet", "-stat", self.output], capture_output=True, check=False
            )
            return done.returncode == 0
        with self.output.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return False
            with tarfile.open(fileobj=file) as archive:
                return "./started" in archive.getnames()

    def recorded(self) -> dict[str, str]:
        """The record, line by line; of several lines of one name the last."""
        return dict(line.split(" ", 1) for line in self.record.read_text().splitlines())

    def fits_its_record(self) -> bool:
        """The values that batch scripts compare before they start a job from the image."""
        found, status = self.recorded(), self.output.stat()
        return (found["sha256"], int(found["size"]), int(found["mtime"])) == (
            hashlib.sha256(self.output.read_bytes()).hexdigest(),
            status.st_size,
            int(status.st_mtime),
        )


def make_build(folder: Path, enroot: str, base: str) -> ImageBuild:
    for name in ("bin", "images", "work"):
        (folder / name).mkdir()
    for name, program in (("enroot", enroot), ("mv", "/bin/mv"), ("sync", "/bin/sync")):
        executable(folder / "bin" / name, SHIM.format(name=name, program=program))
    return ImageBuild(folder, enroot, base)


@pytest.fixture
def stand_in_build(tmp_path: Path) -> ImageBuild:
    """A build on the stand-in, from a registry's image."""
    return on_stand_in(tmp_path)


def on_stand_in(folder: Path) -> ImageBuild:
    build = make_build(folder, str(STAND_IN), "nvcr.io#nvidia/pytorch:25.03-py3")
    build.options = [f"--code={code_directory(folder)}"]
    return build


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> ImageBuild:
    """A build on the stand-in that has come to its end. Tests get a copy of it."""
    build = on_stand_in(tmp_path_factory.mktemp("finished"))
    done = build.run()
    assert done.returncode == 0, done.stderr
    return build


@pytest.fixture
def finished_build(finished: ImageBuild, tmp_path: Path) -> ImageBuild:
    """Like `stand_in_build`, after a build."""
    subprocess.run(["cp", "--archive", f"{finished.folder}/.", tmp_path], check=True)
    return ImageBuild(tmp_path, finished.enroot, finished.base, [f"--code={tmp_path / CODE}"])


@pytest.fixture
def real_build(tmp_path: Path) -> ImageBuild:
    """A build on the real enroot, from an imported image."""
    enroot = shutil.which("enroot")
    if enroot is None or shutil.which("mksquashfs") is None:
        pytest.skip("enroot is not installed here; the stand-in takes its place")
    build = make_build(tmp_path, enroot, str(base_image(tmp_path)))
    build.options = [f"--code={code_directory(tmp_path)}", "--package=none", "--need=zstd,topology"]
    build.environment = {"ENROOT_CONFIG_PATH": str(tmp_path / "config")}
    return build


def base_image(folder: Path) -> Path:
    """A .sqsh with nothing in it. The user's mounts.d shows this machine's programs in each container."""
    rootfs = folder / "rootfs"
    for name in ("etc", "tmp", "proc", "sys", "dev", "opt", "mnt", "root", "home", "var"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "etc/environment").write_text("")
    shown = {
        Path("/usr"),
        *(path for path in map(Path, ("/bin", "/lib", "/lib64", "/sbin")) if path.exists()),
    }
    for path in [path for path in shown if path.is_symlink()]:
        (rootfs / path.name).symlink_to(path.readlink())
        shown.remove(path)
    shown |= {path for path in (Path(sys.prefix), Path(sys.base_prefix)) if not path.is_relative_to("/usr")}
    mounts = folder / "config/mounts.d"
    mounts.mkdir(parents=True)
    lines = [f"{path} {path} none x-create=dir,rbind,ro 0 -1\n" for path in sorted(shown)]
    (mounts / "host.fstab").write_text("".join(lines))
    image = folder / "base.sqsh"
    subprocess.run(["mksquashfs", rootfs, image, "-all-root", "-quiet"], check=True, capture_output=True)
    return image


def code_directory(folder: Path) -> Path:
    """A small code directory like that of `hpcgen install-code`, readable only by its owner."""
    code = folder / CODE
    (code / "hello").mkdir(parents=True)
    (code / "hello/__init__.py").write_text("GREETING = 'from the image'\n")
    digest = hashlib.sha256((code / "hello/__init__.py").read_bytes()).hexdigest()
    manifest = {
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "versions": {"hpcgen": "0.1.0", "megatron-core": "0.16.1"},
        "files": {"hello/__init__.py": digest},
    }
    (code / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    for path in code.rglob("*"):
        path.chmod(stat.S_IRWXU if path.is_dir() else stat.S_IRUSR | stat.S_IWUSR)
    return code
