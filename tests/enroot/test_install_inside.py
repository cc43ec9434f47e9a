"""install-inside.sh as the container runs it, with this machine's programs, in a namespace where it may write.

Folders of the test are laid over those that it writes to, so the machine itself stays as it is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.enroot.conftest import ENROOT, code_directory, executable

OVERLAY = """\
set -e
for name in opt etc mnt var; do
    mount --bind {folder}/$name /$name
done
exec "$@"
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The folders of an image that change, and the recipe's files in its /mnt."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine gives no user namespaces")
    for name in ("opt", "etc", "mnt/topology", "var/lib/apt/lists"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc/environment").write_text("FROM_IMAGE=1\nPYTHONPATH=/old")  # without its last newline
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    for name in ("install-inside.sh", "health_check.py"):
        shutil.copy(ENROOT / name, tmp_path / "mnt")
    shutil.copy(ENROOT / "topology/ndv5-topo.xml", tmp_path / "mnt/topology")
    return tmp_path


def inside(
    image: Path, *words: str, path: str = str(Path(sys.executable).parent)
) -> subprocess.CompletedProcess[str]:
    overlaid = ["unshare", "-Urm", "bash", "-c", OVERLAY.format(folder=image), "inside"]
    return subprocess.run(
        [*overlaid, "bash", "/mnt/install-inside.sh", *words],
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        umask=0o077,
    )


# ==== a directory of install-code ====


def test_a_code_directory_comes_first_on_pythonpath(image: Path) -> None:
    code = code_directory(image / "mnt")
    done = inside(image, "code", "directory", f"/mnt/{code.name}", "0.16.1")
    assert done.returncode == 0, done.stderr
    assert (image / "etc/environment").read_text() == "FROM_IMAGE=1\nPYTHONPATH=/opt/hpcgen/python\n"
    module = image / "opt/hpcgen/python/hello/__init__.py"
    assert "from the image" in module.read_text()
    assert (image / "opt/microsoft/ndv5-topo.xml").is_file()


def test_everyone_may_read_what_is_installed(image: Path) -> None:
    """Users of the image are neither root nor its builder."""
    code = code_directory(image / "mnt")
    assert inside(image, "code", "directory", f"/mnt/{code.name}", "0.16.1").returncode == 0
    for path in (image / "opt").rglob("*"):
        mode = path.stat().st_mode
        assert mode & 0o004, path
        assert not mode & 0o022, path
        assert not path.is_dir() or mode & 0o001, path


def test_a_directory_for_another_python_is_refused(image: Path) -> None:
    code = code_directory(image / "mnt")
    manifest = json.loads((code / "manifest.json").read_text())
    (code / "manifest.json").write_text(json.dumps({**manifest, "python_version": "3.99"}))
    done = inside(image, "code", "directory", f"/mnt/{code.name}", "0.16.1")
    assert done.returncode == 1
    assert "hpcgen install-code --python-version" in done.stderr
    assert not (image / "opt/hpcgen/python").exists()


def test_a_changed_file_is_refused(image: Path) -> None:
    code = code_directory(image / "mnt")
    (code / "hello/__init__.py").write_text("GREETING = 'changed'\n")
    done = inside(image, "code", "directory", f"/mnt/{code.name}", "0.16.1")
    assert (done.returncode, "hello/__init__.py is missing or was changed" in done.stderr) == (1, True)


def test_only_what_the_manifest_names_is_installed(image: Path) -> None:
    """Python would import these, too."""
    code = code_directory(image / "mnt")
    for name in ("torch.py", "hello/__pycache__/__init__.cpython-312.pyc"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).write_text("planted")
    done = inside(image, "code", "directory", f"/mnt/{code.name}", "0.16.1")
    assert done.returncode == 0, done.stderr
    installed = image / "opt/hpcgen/python"
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    manifest = json.loads((code / "manifest.json").read_text())
    assert files == {"manifest.json", *manifest["files"]}


# ==== pip ====


def wheel(folder: Path, name: str, version: str, requires: str = "") -> Path:
    """The smallest wheel there is."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip and a torch of NVIDIA's own build."""
    folder = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    [site] = (folder / "venv/lib").glob("python3*/site-packages")
    # not `import pip`, after which setuptools cannot be imported
    shutil.copytree(str(importlib.metadata.distribution("pip").locate_file("pip")), site / "pip")
    own = wheel(folder, "torch", "2.7.0a0+7c8ec84dab.nv25.3")
    installing = [folder / "venv/bin/python", "-m", "pip", "install", "-q", "--no-index", own]
    subprocess.run(installing, check=True, capture_output=True)
    return folder / "venv"


@pytest.fixture
def image_with_pip(image: Path, venv: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image with this Python, and an index of a few packages."""
    shutil.copytree(venv, image / "opt/venv", symlinks=True)
    index = image / "opt/index"
    index.mkdir()
    for name, version in (
        ("psutil", "7"),
        ("tqdm", "4"),
        ("packaging", "25"),
        ("torch", "2.9"),
        ("zstandard", "0.25"),
        ("apex", "0.9"),
    ):
        wheel(index, name, version)
    wheel(index, "megatron_core", "0.16.1", "torch>=99")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/opt/index")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    # NVIDIA's image pins what it does not even have
    (image / "etc/constraint.txt").write_text("tqdm==3\n")
    monkeypatch.setenv("PIP_CONSTRAINT", "/etc/constraint.txt")
    return image


def pip_inside(image: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The script's output, and the packages of the image's Python afterwards."""
    done = inside(image, *words, path=str(image / "opt/venv/bin"))
    [site] = (image / "opt/venv/lib").glob("python3*/site-packages")
    installed = importlib.metadata.distributions(path=[str(site)])
    return done, {one.metadata["Name"]: one.version for one in installed}


@pytest.mark.parametrize("refused", ["torch>=2.8", pytest.param("apex", marks=pytest.mark.slow)])
def test_pip_keeps_the_images_packages(image_with_pip: Path, refused: str) -> None:
    """Megatron-Core declares a torch that the image does not have, and hpcgen one that it has."""
    for requires in (refused, "torch>=2.6"):
        extra = 'Provides-Extra: data\nRequires-Dist: zstandard; extra == "data"'
        hpcgen = wheel(image_with_pip / "mnt", "hpcgen", "0.1", f"{requires}\n{extra}")
        done, found = pip_inside(image_with_pip, "code", "wheel", f"/mnt/{hpcgen.name}", "0.16.1")
        assert (done.returncode == 0) == (requires == "torch>=2.6"), done.stderr
        assert found["torch"] == "2.7.0a0+7c8ec84dab.nv25.3"
        assert "apex" not in found
    assert {"hpcgen", "psutil", "tqdm", "zstandard"} <= found.keys()
    assert "0.16.1" in found.values()


# ==== DeepSpeed ====


def lock(image: Path, *wheels: Path) -> None:
    """Write deepspeed.txt with these wheels and their hashes."""
    lines = ["# made by a test"]
    for path in wheels:
        name, version, *_ = path.name.split("-")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"{name.replace('_', '-')}=={version} --hash=sha256:{digest}")
    (image / "mnt/deepspeed.txt").write_text("\n".join(lines) + "\n")


def test_deepspeed_adds_only_what_the_image_lacks(image_with_pip: Path) -> None:
    index = image_with_pip / "opt/index"
    deepspeed = wheel(index, "deepspeed", "0.19", "hjson")
    lock(image_with_pip, wheel(index, "hjson", "3.1"), wheel(index, "torch", "2.99"), deepspeed)
    checkout = image_with_pip / "mnt/checkout"
    (checkout / "megatron/data").mkdir(parents=True)
    (checkout / "megatron/data/Makefile").write_text("default:\n\t@echo built >helpers.so\n")
    done, found = pip_inside(image_with_pip, "deepspeed", "/mnt/checkout")
    assert done.returncode == 0, done.stderr
    assert (found["deepspeed"], found["hjson"]) == ("0.19", "3.1")
    assert found["torch"] == "2.7.0a0+7c8ec84dab.nv25.3"
    helper = image_with_pip / "opt/hpcgen/Megatron-DeepSpeed/megatron/data/helpers.so"
    assert helper.read_text() == "built\n"
    assert helper.stat().st_mode & 0o004
    again, found = pip_inside(image_with_pip, "deepspeed")
    assert (again.returncode, found["deepspeed"]) == (0, "0.19"), again.stderr


def test_a_package_with_another_hash_is_refused(image_with_pip: Path) -> None:
    index = image_with_pip / "opt/index"
    lock(image_with_pip, wheel(index, "hjson", "3.1"))
    wheel(index, "hjson", "3.1", "tqdm")
    done, found = pip_inside(image_with_pip, "deepspeed")
    assert (done.returncode, "DO NOT MATCH THE HASHES" in done.stderr) == (1, True)
    assert "hjson" not in found


def test_a_package_that_needs_another_torch_is_named(image_with_pip: Path) -> None:
    index = image_with_pip / "opt/index"
    lock(image_with_pip, wheel(index, "trl", "1.16", "torch>=2.8"))
    done, _ = pip_inside(image_with_pip, "deepspeed")
    assert done.returncode == 1
    assert (
        "do not suit DeepSpeed's: trl 1.16 has requirement torch>=2.8, but you have torch 2.7" in done.stderr
    )


# ==== Debian packages ====

APT_GET = """\
#!/bin/bash
echo "apt-get $*" >>/opt/apt.log
[[ " $* " == *' --simulate '* ]] || exit 0
printf '%s\\n' 'Inst perftest (4.5 Debian:12 [amd64])' "$(cat /opt/inst 2>/dev/null)"
"""


@pytest.fixture
def image_with_apt(image: Path) -> Path:
    """An image where zstd is installed and perftest is not."""
    programs = image / "opt/bin"
    programs.mkdir()
    executable(programs / "apt-get", APT_GET)
    executable(programs / "dpkg-query", "#!/bin/bash\n[[ ${!#} != zstd ]] || printf installed\n")
    return image


def apt_calls(image: Path) -> list[str]:
    log = image / "opt/apt.log"
    return log.read_text().splitlines() if log.exists() else []


def test_installed_packages_are_not_requested(image_with_apt: Path) -> None:
    assert inside(image_with_apt, "packages", "none", "zstd", path="/opt/bin").returncode == 0
    assert apt_calls(image_with_apt) == []


def test_missing_packages_are_added_and_nothing_is_removed(image_with_apt: Path) -> None:
    done = inside(image_with_apt, "packages", "none", "zstd", "perftest", path="/opt/bin")
    assert done.returncode == 0, done.stderr
    assert (
        apt_calls(image_with_apt)[2] == "apt-get install -y -qq --no-install-recommends --no-remove perftest"
    )


def test_a_package_that_replaces_another_is_refused(image_with_apt: Path) -> None:
    (image_with_apt / "opt/inst").write_text("Inst libibverbs1 [2410mlnx54-1] (50.0 Ubuntu:24.04 [amd64])")
    done = inside(image_with_apt, "packages", "none", "perftest", path="/opt/bin")
    assert (done.returncode, "would replace packages of the image: libibverbs1" in done.stderr) == (1, True)
    assert [call for call in apt_calls(image_with_apt) if "-y" in call] == []


def test_help_and_usage_errors() -> None:
    script = ENROOT / "install-inside.sh"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "install-inside.sh packages DOCA|none NAME..." in done.stdout
    assert subprocess.run([script, "bogus"], capture_output=True, check=False).returncode == 2
