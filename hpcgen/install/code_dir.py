"""A directory of code for the compute nodes: hpcgen, the trainer, and what both need besides a PyTorch image.

It comes first on PYTHONPATH, so whatever lies in it hides the image's own. `LEFT_TO_IMAGE` must not be
hidden; the rest is what an image lacks, or what serves the image's packages as well when it is newer.
The directory is named by its content and never changes.
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
from collections.abc import Iterator
from pathlib import Path

from hpcgen.errors import HpcgenError
from hpcgen.files import sync_path
from hpcgen.install.extras import project_name, requirements
from hpcgen.resources import SHIPPED_FOLDERS, shipped
from hpcgen.text import counted

LEFT_TO_IMAGE = frozenset(
    (
        # Built together for the image's CUDA, so never to be mixed.
        *("torch", "triton", "transformer-engine", "apex", "numpy"),
        # What torch itself needs: wherever torch is, these are.
        *("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy"),
        # Compiled, with many needs of their own, and only for showing results.
        *("matplotlib", "tensorboard"),
    )
)

# Installed without what they declare: megatron-core's torch and numpy are the image's, and tokenizers' hub client
# is never asked for anything.
WITHOUT_THEIR_NEEDS = frozenset(("megatron-core", "tokenizers"))

# Needs that no one else states: megatron-core's, and awkward's below Python 3.12 (pip asks the running Python
# whether such a condition holds, not the one that it installs for).
FURTHER_NEEDS = ("packaging>=24.2", "importlib-metadata>=4.13")

JOB_EXTRAS = ("data", "submit", "train")
"""Extras of hpcgen that jobs need."""

# What one side pickles the other unpickles, so both have the versions of the running environment.
SAME_AS_HERE = ("submitit", "cloudpickle")

# Wheels for the oldest C library (2.28, AlmaLinux 8) that the nodes or an image of today have.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)), "manylinux2014_x86_64")

MANIFEST = "manifest.json"


def install_code(parent: Path, python_version: str) -> Path:
    """Build the code directory for `python_version` ("3.12") below `parent`, or find it there; its path.

    What is there under the same name is compared file by file. Raises HpcgenError: no such Python version,
    pip fails, `parent` can't be written, or the directory that is there was changed.
    """
    if not re.fullmatch(r"3\.\d{2}", python_version):
        raise HpcgenError(
            f"--python-version = {python_version!r} is not a Python version", "give two numbers, as in 3.12"
        )
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".hpcgen-", dir=parent) as private:
            tree = Path(private) / "code"
            tree.mkdir()
            copy_own_packages(tree)
            install_needs(tree, python_version)
            return publish(tree, parent, python_version)
    except OSError as error:
        raise HpcgenError(f"can't install the code in {parent}: {error}") from error


def copy_own_packages(tree: Path) -> None:
    """Copy hpcgen with the folders that it ships, and the trainer, from where they run now."""
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


def install_needs(tree: Path, python_version: str) -> None:
    """Install what hpcgen and the trainer need and the image may lack into `tree`, with pip."""
    alone, together = [], [f"{name}=={version}" for name in SAME_AS_HERE if (version := version_here(name))]
    for requirement in (*own_requirements(), *FURTHER_NEEDS):
        name = project_name(requirement)
        if name in WITHOUT_THEIR_NEEDS:
            alone.append(requirement)
        elif name not in LEFT_TO_IMAGE:
            together.append(requirement)
    platforms = (f"--platform={platform}" for platform in PLATFORMS)
    # pip before 23.1 takes --platform only together with --target, also in a dry run.
    target = (f"--target={tree}", f"--python-version={python_version}", *platforms)
    resolved = pip_install("--dry-run", "--ignore-installed", "--report=-", *target, *together)
    found = [entry["metadata"] for entry in json.loads(resolved)["install"]]
    kept = [one for one in found if project_name(one["name"]) not in LEFT_TO_IMAGE]
    pinned = [f"{one['name']}=={one['version']}" for one in kept]
    pip_install("--no-deps", "--no-compile", *target, *pinned, *alone)
    # Scripts would start this machine's Python, and pip's records list them; the manifest takes their place.
    shutil.rmtree(tree / "bin", ignore_errors=True)
    for record in ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json"):
        for file in tree.glob(f"*.dist-info/{record}"):
            file.unlink()


def own_requirements() -> Iterator[str]:
    """What hpcgen declares that jobs need."""
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
    """What `pip install` prints on stdout; raises HpcgenError with what it says when it fails."""
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *arguments)
    result = subprocess.run(command, text=True, capture_output=True)
    if result.returncode != 0:
        said = "\n".join(result.stderr.strip().splitlines()[-8:])
        raise HpcgenError(
            "pip could not get the packages for the code directory; run this where it reaches an index of "
            f"packages, or name one (PIP_INDEX_URL, or PIP_FIND_LINKS for a folder). It says:\n{said}"
        )
    return result.stdout


def publish(tree: Path, parent: Path, python_version: str) -> Path:
    """Rename a finished tree to its name by content below `parent`; what is there is checked and kept."""
    files = content(tree)
    manifest = {
        "python_version": python_version,
        "versions": {one.name: one.version for one in importlib.metadata.distributions(path=[str(tree)])},
        "files": files,
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    (tree / MANIFEST).write_text(text, encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    target = parent / f"hpcgen-{installed_version()}-{digest}"
    settle(tree)
    try:
        tree.rename(target)
        sync_path(parent)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        verify(target, files)
    return target


def content(tree: Path) -> dict[str, str]:
    """The SHA-256 of every file of a code directory by relative path, without what Python caches there."""
    return {
        path.relative_to(tree).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path != tree / MANIFEST
    }


def verify(target: Path, files: dict[str, str]) -> None:
    """Raise HpcgenError unless the directory that is there holds exactly `files`."""
    there = content(target)
    changed = sorted(path for path in files.keys() | there.keys() if files.get(path) != there.get(path))
    if changed:
        raise HpcgenError(
            f"{target}: {counted(len(changed), 'file')} changed since the installation ({', '.join(changed[:3])})",
            "remove the directory when no job uses it, and run this again",
        )


def settle(tree: Path) -> None:
    """Give everything the rights that the umask allows, but never let others write, and bring it to disk."""
    umask = os.umask(0o077)
    os.umask(umask)
    for path in (*tree.rglob("*"), tree):
        wanted = 0o777 if path.is_dir() or path.stat().st_mode & 0o100 else 0o666
        path.chmod(wanted & ~umask & ~0o002)
        sync_path(path)
