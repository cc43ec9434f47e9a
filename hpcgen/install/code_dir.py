"""Code directory for the compute nodes: hpcgen, the trainer, and their dependencies that a PyTorch image lacks.

The directory is first on PYTHONPATH, so its packages hide those of the image. Packages in `LEFT_TO_IMAGE` must not be
hidden. The other packages are missing from images, or work with the image's packages even if they are newer. The
directory's name contains a hash of its content, and the content never changes.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcgen.errors import HpcgenError
from hpcgen.install.directory_name import directory_name
from hpcgen.install.extras import project_name, requirements
from hpcgen.resources import SHIPPED_FOLDERS, shipped
from hpcgen.text import counted, few
from trainer.contract.files.regular_file import read_bytes, read_text
from trainer.contract.files.system_calls import sync_path

LEFT_TO_IMAGE = frozenset(
    (
        # Built together for the image's CUDA, so they must not be mixed.
        *("torch", "triton", "transformer-engine", "apex", "numpy"),
        # Dependencies of torch, which are installed wherever torch is.
        *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy"),
        # Compiled packages with many dependencies, used only to show results.
        *("matplotlib", "tensorboard"),
    )
)

# Installed without their declared dependencies: the image has torch and numpy for megatron-core, and the hub client
# of tokenizers is never used.
WITHOUT_DEPENDENCIES = frozenset(("megatron-core", "tokenizers"))

# Dependencies that pip would miss: one of megatron-core, and one of awkward for Python below 3.12 (pip evaluates such
# conditions for the running Python, not for the target version).
EXTRA_DEPENDENCIES = ("packaging>=24.2", "importlib-metadata>=4.13")

JOB_EXTRAS = ("data", "submit", "train")
"""Extras of hpcgen that jobs need."""

# Jobs unpickle objects that the login node pickled, so both sides need the same versions.
SAME_VERSION_AS_HERE = ("submitit", "cloudpickle")

# Wheels must work with the oldest glibc of current nodes and images: 2.28 (AlmaLinux 8).
PLATFORMS = {
    architecture: (
        *(f"manylinux_2_{minor}_{architecture}" for minor in range(28, 4, -1)),
        f"manylinux2014_{architecture}",
    )
    for architecture in ("x86_64", "aarch64")
}
"""Instruction set of the nodes -> platform tags of wheels."""

# The newest supported versions. 0.17 and later need Python 3.12. Without a pin, pip 23.2 in Python 3.11 silently takes
# 0.16.1 for Python 3.12.
MEGATRON_CORE = {"3.10": "0.16.1", "3.11": "0.16.1"}
NEWEST_MEGATRON_CORE = "0.19.2"

MANIFEST = "manifest.json"


def install_code(
    parent: Path,
    python_version: str,
    on_phase: Callable[[str], None] = lambda phase: None,
    architecture: str = "x86_64",
) -> Path:
    """Builds the code directory for `python_version` ("3.12") below `parent`, or finds it there. Returns its path.

    `architecture` is a key of `PLATFORMS`.

    An existing directory with the same name is compared file by file. `on_phase` is called with a description before
    each step that takes long.

    Raises:
        HpcgenError: `python_version` is not a Python version, pip fails, `parent` is not writable, or an existing
            directory was modified.
    """
    if not re.fullmatch(r"3\.\d{2}", python_version):
        raise HpcgenError(
            f"--python-version = {python_version!r} is not a Python version",
            "use major and minor, such as 3.12",
        )
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".hpcgen-", dir=parent) as private:
            tree = Path(private) / "code"
            tree.mkdir()
            copy_own_packages(tree)
            install_needs(tree, python_version, on_phase, architecture)
            on_phase(f"hashing and syncing the files in {parent}")
            return publish(tree, parent, python_version, architecture)
    except OSError as error:
        raise HpcgenError(f"cannot install the code in {parent}: {error}") from error


def copy_own_packages(tree: Path) -> None:
    """Copies the running hpcgen, with the folders that it ships, and the trainer."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    for name in ("hpcgen", "trainer"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, tree / name, ignore=ignore)
    for folder in SHIPPED_FOLDERS:
        shutil.copytree(shipped(folder), tree / "hpcgen" / folder, ignore=ignore, dirs_exist_ok=True)
    version = installed_version()
    metadata = tree / f"hpcgen-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: hpcgen\nVersion: {version}\n", encoding="utf-8")


def install_needs(
    tree: Path,
    python_version: str,
    on_phase: Callable[[str], None] = lambda phase: None,
    architecture: str = "x86_64",
) -> None:
    """Installs the dependencies of hpcgen and the trainer that an image may lack into `tree`, with pip."""
    alone, together = (
        [],
        [f"{name}=={version}" for name in SAME_VERSION_AS_HERE if (version := version_here(name))],
    )
    for requirement in (*own_requirements(), *EXTRA_DEPENDENCIES):
        name = project_name(requirement)
        if name in WITHOUT_DEPENDENCIES:
            alone.append(_pinned_megatron_core(python_version) if name == "megatron-core" else requirement)
        elif name not in LEFT_TO_IMAGE:
            together.append(requirement)
    platforms = (f"--platform={platform}" for platform in PLATFORMS[architecture])
    # pip before 23.1 accepts --platform only together with --target, even in a dry run.
    target = (f"--target={tree}", f"--python-version={python_version}", *platforms)
    on_phase("pip chooses the versions of the dependencies")
    resolved = pip_install("--dry-run", "--ignore-installed", "--report=-", *target, *together)
    found = [entry["metadata"] for entry in json.loads(resolved)["install"]]
    kept = [one for one in found if project_name(one["name"]) not in LEFT_TO_IMAGE]
    pinned = [f"{one['name']}=={one['version']}" for one in kept]
    on_phase(f"pip downloads and installs {counted(len(pinned) + len(alone), 'package')} (about 40 MB)")
    # Old versions (23.2) compare Requires-Python with the Python that runs pip. The tags of the wheels must fit anyway.
    pip_install("--no-deps", "--no-compile", "--ignore-requires-python", *target, *pinned, *alone)
    # Scripts in bin/ would start this machine's Python. The manifest replaces pip's records, which list the scripts.
    shutil.rmtree(tree / "bin", ignore_errors=True)
    for record in ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json"):
        for file in tree.glob(f"*.dist-info/{record}"):
            file.unlink()


def _pinned_megatron_core(python_version: str) -> str:
    return f"megatron-core=={MEGATRON_CORE.get(python_version, NEWEST_MEGATRON_CORE)}"


def own_requirements() -> Iterator[str]:
    """Requirements that hpcgen declares for itself and for the extras that jobs need."""
    for extra, requirement in requirements():
        if extra is None or extra in JOB_EXTRAS:
            yield requirement


def installed_version() -> str:
    """The version of hpcgen; raises HpcgenError if it is not installed."""
    version = version_here("hpcgen")
    if version is None:
        raise HpcgenError(
            f"hpcgen is not installed in {sys.prefix}",
            "install it with pip (in a checkout: pip install -e .)",
        )
    return version


def version_here(name: str) -> str | None:
    """The version of a distribution in the running environment; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip_install(*arguments: str) -> str:
    """Runs `pip install` and returns its stdout.

    Raises:
        HpcgenError: pip fails; the message ends with the last lines of its output.
    """
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *arguments)
    result = subprocess.run(command, text=True, capture_output=True)
    if result.returncode != 0:
        output = "\n".join(result.stderr.strip().splitlines()[-8:])
        pip = importlib.metadata.version("pip")
        raise HpcgenError(
            f"pip {pip} cannot get the packages for the code directory; run this on a machine with access to a package "
            "index, or set one (PIP_INDEX_URL, or PIP_FIND_LINKS for a folder). If a package is there, update pip "
            f"({sys.executable} -m pip install --upgrade pip). Output of pip:\n{output}"
        )
    return result.stdout


def publish(tree: Path, parent: Path, python_version: str, architecture: str = "x86_64") -> Path:
    """Renames a finished tree to its content-based name below `parent`. Verifies and keeps an existing tree."""
    files = content(tree)
    manifest = {
        "python_version": python_version,
        "versions": {one.name: one.version for one in importlib.metadata.distributions(path=[str(tree)])},
        "files": files,
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    (tree / MANIFEST).write_text(text, encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    target = parent / directory_name(installed_version(), architecture, digest)
    settle(tree)
    try:
        tree.rename(target)
        sync_path(parent)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        verify(target, files)
    return target


def megatron_core_version(target: Path) -> str:
    """Version of megatron-core in a code directory. pip chooses it for the Python of the jobs."""
    versions: dict[str, str] = json.loads(read_text(target / MANIFEST))["versions"]
    return next(version for name, version in versions.items() if project_name(name) == "megatron-core")


def content(tree: Path) -> dict[str, str]:
    """SHA-256 of every file of a code directory by relative path, and what else it contains that is not a directory."""
    return {
        path.relative_to(tree).as_posix(): _identity(path)
        for path in sorted(tree.rglob("*"))
        if (path.is_symlink() or not path.is_dir()) and path != tree / MANIFEST
    }


def _identity(path: Path) -> str:
    """SHA-256 of a file. Python would also import a module through a link, which is not followed here."""
    if path.is_symlink() or not path.is_file():
        return "not a file"
    return hashlib.sha256(read_bytes(path)).hexdigest()


def remove_caches(tree: Path) -> None:
    """Removes Python's bytecode caches. Their content cannot be verified, and jobs make them again.

    Raises:
        HpcgenError: a cache belongs to someone else.
    """
    for cache in [path for path in tree.rglob("__pycache__") if path.is_dir() and not path.is_symlink()]:
        try:
            shutil.rmtree(cache)
        except FileNotFoundError:
            continue  # another process removes it, too
        except OSError as error:
            raise HpcgenError(
                f"{cache} cannot be removed ({error.strerror}), and jobs would run what it contains",
                "have its owner remove it, or install into another directory",
            ) from error


def verify(target: Path, files: dict[str, str]) -> None:
    """Checks that an existing directory has exactly `files`, after removing Python's caches.

    Raises:
        HpcgenError: files were added, removed or changed.
    """
    remove_caches(target)
    there = content(target)
    changed = sorted(path for path in files.keys() | there.keys() if files.get(path) != there.get(path))
    if changed:
        raise HpcgenError(
            f"{counted(len(changed), 'file')} changed since the installation ({few(changed)})",
            "remove the directory when no job uses it, and run this again",
            where=target,
        )


def settle(tree: Path) -> None:
    """Sets the permissions that the umask allows, without write access for others, and syncs everything to disk."""
    umask = os.umask(0o077)
    os.umask(umask)
    for path in (*tree.rglob("*"), tree):
        wanted = 0o777 if path.is_dir() or path.stat().st_mode & 0o100 else 0o666
        path.chmod(wanted & ~umask & ~0o002)
        sync_path(path)
