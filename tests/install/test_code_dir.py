"""`hpcgen install-code`: what it installs runs on an image's torch, hides nothing of it, never changes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import py_compile
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcgen import load_run, plan
from hpcgen.cli.install_code import command
from hpcgen.errors import HpcgenError
from hpcgen.install import code_dir
from hpcgen.install.directory_name import architecture_of
from hpcgen.planning.paths import corpus_job
from hpcgen.resources import SHIPPED_FOLDERS
from tests.cli.command import hpcgen
from tests.install.environment import link, with_needs
from tests.runs import minimal_run, write_yaml
from trainer.contract.config import to_dict

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


ALL = pytest.param("all", marks=pytest.mark.slow)
"""Every package, which takes pip most of a minute."""


@pytest.fixture(scope="module", params=["few", ALL])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A code directory for the running Python, made by pip from the index `make test` was set up from."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "few":
            require_few(patch)
        return code_dir.install_code(tmp_path_factory.mktemp("nodes"), RUNNING)


def require_few(patch: pytest.MonkeyPatch) -> None:
    """Has `install_code` install submitit and what the trainer imports."""
    core = f"megatron-core=={importlib.metadata.version('megatron-core')}"
    patch.setattr(code_dir, "own_requirements", lambda: ["msgspec", "psutil", core])
    patch.setattr(code_dir, "EXTRA_DEPENDENCIES", ("packaging",))


with_all = pytest.mark.parametrize("installed", [ALL], indirect=True)


@pytest.fixture(scope="module")
def torch_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of an image: torch, numpy and their dependencies, without the rest of this environment."""
    image = tmp_path_factory.mktemp("image")
    link(with_needs("torch", "numpy"), image)
    return image


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A finished tree to publish, small."""
    tree = tmp_path / "private" / "code"
    (tree / "trainer").mkdir(parents=True)
    (tree / "trainer" / "__init__.py").write_text("")
    (tree / "trainer" / "run.sh").write_text("true\n")
    (tree / "trainer" / "run.sh").chmod(0o755)
    return tree


@pytest.fixture
def few_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code directories of this test have few packages."""
    require_few(monkeypatch)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def distribution_names(directory: Path) -> set[str]:
    found = importlib.metadata.distributions(path=[str(directory)])
    return {code_dir.project_name(distribution.name) for distribution in found}


def run_isolated(code: str, *path: Path) -> str:
    """Output of a Python that sees the standard library and `path`, in this order."""
    start = f"import sys; sys.path[:0] = {[str(entry) for entry in path]}; "
    python = (sys.executable, "-I", "-S", "-B", "-W", "ignore", "-c", start + code)
    result = subprocess.run(python, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_torch_is_the_images_and_the_rest_its_own(installed: Path, torch_image: Path) -> None:
    code = """
import jinja2, trainer, submitit, hpcgen, psutil
from importlib.util import find_spec
for names in (("torch", "numpy", "jinja2"), ("trainer", "megatron.core", "submitit", "hpcgen", "psutil")):
    print(*(find_spec(name).origin for name in names))
"""
    of_image, of_code = run_isolated(code, installed, torch_image).splitlines()
    assert all(file.startswith(f"{torch_image}/") for file in of_image.split())
    assert all(file.startswith(f"{installed}/") for file in of_code.split())


@pytest.mark.slow
def test_megatron_imports_with_only_torch(installed: Path, torch_image: Path) -> None:
    """Slow: Python compiles what it imports, in a directory that keeps no bytecode."""
    code = """
from megatron.core.datasets import helpers_cpp
from megatron.core.models.gpt import GPTModel
print(helpers_cpp.__file__)
"""
    assert run_isolated(code, installed, torch_image).startswith(f"{installed}/")


@with_all
def test_hpcgen_imports_and_finds_its_files(installed: Path, torch_image: Path) -> None:
    code = """
import hpcgen.data.stages, hpcgen.data.transfer, hpcgen.data.tokenize
import awkward, gigatoken, tokenizers, msgspec, zstandard, pydantic, ruamel.yaml, click, rich
import importlib.metadata
from hpcgen.resources import shipped
print(importlib.metadata.version("hpcgen"), *(shipped(folder) for folder in ("templates", "topologies")))
"""
    version, *folders = run_isolated(code, installed, torch_image).split()
    assert version == importlib.metadata.version("hpcgen")
    assert folders == [f"{installed}/hpcgen/templates", f"{installed}/hpcgen/topologies"]


@with_all
def test_a_data_stage_runs_from_it(installed: Path, torch_image: Path, tmp_path: Path) -> None:
    """As a job runs it: from what the script wrote, with worker processes of its own."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_text('{"text": "Hello world"}\n')
    corpus = {"directory": "data", "source": {"directory": "text"}, "num_output_files": 1}
    run_file = write_yaml(tmp_path / "run.yaml", minimal_run(data={"corpus": corpus}))
    assert hpcgen("data", "plan", "-c", run_file).status == 0
    job = corpus_job(plan(load_run(run_file), ["prepare"]).config)
    (tmp_path / "corpus.json").write_text(json.dumps(to_dict(job)))
    arguments = ["data", "prepare", "--config", str(tmp_path / "corpus.json"), "--task-id", "0"]
    told = run_isolated(f"from hpcgen.cli.main import main; main({arguments})", installed, torch_image)
    assert "1 in = 1 out + 0 skipped + 0 rejected" in told
    tokens = (tmp_path / "data/tokens/corpus-00000-of-00001.bin").read_bytes()
    assert tokens == b"".join(token.to_bytes(2, "little") for token in (15496, 995, 50256))


def test_a_wheel_contains_the_data_files(tmp_path: Path) -> None:
    checkout = Path(code_dir.__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, checkout],
        check=True,
    )
    [wheel] = tmp_path.glob("hpcgen-*.whl")
    with zipfile.ZipFile(wheel) as content:
        for name in ("encoder.json", "vocab.bpe", "LICENSE"):
            assert content.read(f"hpcgen/gpt2/{name}") == (checkout / "hpcgen/gpt2" / name).read_bytes()
        assert {f"hpcgen/{folder}" for folder in SHIPPED_FOLDERS} <= {
            "/".join(name.split("/")[:2]) for name in content.namelist()
        }
        parsed = json.loads(content.read("hpcgen/config/shipped.json"))
        yaml = [name for name in content.namelist() if name.endswith(".yaml")]
        texts = [content.read(name) for name in yaml if not name.startswith("hpcgen/releases/")]
        assert {hashlib.sha256(text).hexdigest() for text in texts} == set(parsed)


def test_it_hides_nothing_of_the_image(installed: Path, torch_image: Path) -> None:
    names = distribution_names(installed)
    assert not names & code_dir.LEFT_TO_IMAGE
    assert not {name for name in names if name.startswith("nvidia")}
    hidden = {entry.name for entry in installed.iterdir()} & {entry.name for entry in torch_image.iterdir()}
    # A newer typing_extensions serves torch as well, and pydantic needs a new one.
    assert {name for name in hidden if not name.startswith("typing_extensions")} == set()


@with_all
def test_it_contains_every_dependency_that_an_image_lacks(installed: Path) -> None:
    names = distribution_names(installed)
    declared = set(map(code_dir.project_name, code_dir.own_requirements()))
    assert {"megatron-core", "submitit", "torch"} <= declared
    assert declared - names <= code_dir.LEFT_TO_IMAGE


@pytest.mark.slow
@pytest.mark.usefixtures("few_needs")
@pytest.mark.parametrize("installed", ["few"], indirect=True)
def test_the_same_content_is_the_same_directory(installed: Path) -> None:
    again = CliRunner().invoke(command, [str(installed.parent), "--python-version", RUNNING])
    assert again.exit_code == 0, again.output
    assert again.stdout == f"{installed}\n"
    assert list(installed.parent.iterdir()) == [installed]
    version = importlib.metadata.version("hpcgen")
    assert re.fullmatch(rf"hpcgen-{re.escape(version)}-[0-9a-f]{{12}}", installed.name)


@pytest.mark.slow
@pytest.mark.usefixtures("few_needs")
def test_another_python_gets_its_own_wheels(tmp_path: Path) -> None:
    other = "3.12" if RUNNING != "3.12" else "3.11"
    made = code_dir.install_code(tmp_path / "new" / "folder", other)
    assert json.loads((made / "manifest.json").read_text())["python_version"] == other
    compiled = re.findall(r"\.cpython-(\d+)", " ".join(file.name for file in made.rglob("*.so")))
    assert other.replace(".", "") in compiled
    assert RUNNING.replace(".", "") not in compiled


@pytest.mark.slow
@pytest.mark.usefixtures("few_needs")
def test_an_older_pip_resolves_and_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip 23.0.1 comes with Debian 12's venv. It takes --platform only next to --target, even in a dry run."""
    get = (sys.executable, "-m", "pip", "install", "--quiet", f"--target={tmp_path / 'old'}", "pip==23.0.1")
    subprocess.run(get, check=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "old"))
    version = subprocess.run((sys.executable, "-m", "pip", "--version"), capture_output=True, text=True)
    assert version.stdout.startswith("pip 23.0.1 ")
    (tmp_path / "tree").mkdir()
    code_dir.install_needs(tmp_path / "tree", RUNNING)
    assert distribution_names(tmp_path / "tree") == {
        "megatron-core",
        "msgspec",
        "packaging",
        "psutil",
        "submitit",
        "cloudpickle",
        "typing-extensions",
    }


def test_the_manifest_names_versions_and_every_file(installed: Path) -> None:
    manifest = json.loads((installed / "manifest.json").read_text())
    assert manifest["versions"]["submitit"] == importlib.metadata.version("submitit")
    assert manifest["files"] == code_dir.content(installed)


@pytest.mark.parametrize("python_version", ["3", "2.7", "3.12.1", "3.12\n", "3.12; id", "--help"])
def test_a_wrong_python_version_is_refused(tmp_path: Path, python_version: str) -> None:
    with pytest.raises(HpcgenError, match=r"not a Python version; use major and minor, such as 3\.12"):
        code_dir.install_code(tmp_path / "nodes", python_version)
    assert not (tmp_path / "nodes").exists()


def test_without_an_index_pip_is_quoted_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(HpcgenError, match=r"(?s)a package index.*ERROR: No matching distribution found"):
        code_dir.install_code(tmp_path, RUNNING)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_wheels_are_for_the_processors_of_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    calls: list[tuple[str, ...]] = []

    def pip_install(*arguments: str) -> str:
        calls.append(arguments)
        return '{"install": []}'

    monkeypatch.setattr(code_dir, "pip_install", pip_install)
    made = code_dir.install_code(tmp_path, RUNNING, architecture=architecture)
    assert len(calls) == 2
    for arguments in calls:
        tags = [word for word in arguments if word.startswith("--platform=")]
        assert len(tags) == 25
        assert all(tag.endswith(f"_{architecture}") for tag in tags)
    assert architecture_of(f"{made}/") == architecture


@pytest.mark.parametrize(
    "name", ["code", "hpcgen-0.2.0", "hpcgen-0.2.0-riscv", "hpcgen-0.2.0-0123456789abcd"]
)
def test_other_directories_have_no_architecture(name: str) -> None:
    assert architecture_of(f"/shared/{name}") is None


@pytest.mark.parametrize(
    ("python_version", "megatron_core"), [("3.10", "0.16.1"), ("3.12", "0.19.2"), ("3.13", "0.19.2")]
)
def test_no_other_megatron_core_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_version: str, megatron_core: str
) -> None:
    """pip does not fall back to an older version if it cannot install this one."""
    calls: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> str:
        calls.append(arguments)
        return '{"install": []}'

    monkeypatch.setattr(code_dir, "pip_install", pip)
    phases: list[str] = []
    code_dir.install_needs(tmp_path, python_version, phases.append)
    assert f"megatron-core=={megatron_core}" in calls[-1]
    assert len(phases) == len(calls) == 2


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HpcgenError, match=f"cannot install the code in {tmp_path}/file/nodes: "):
        code_dir.install_code(tmp_path / "file" / "nodes", RUNNING)


def test_an_existing_directory_is_kept_and_verified(tmp_path: Path, tree: Path) -> None:
    """A planted cache would run in place of the source, so caches are removed."""
    copy = tmp_path / "copy"
    subprocess.run(("cp", "-a", tree, copy), check=True)
    first = code_dir.publish(tree, tmp_path, "3.12")
    inode, source = first.stat().st_ino, first / "trainer" / "__init__.py"
    content = source.read_text()
    source.write_text("print('planted')")
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.write_text(content)
    assert run_isolated("import trainer", first) == "planted\n"
    assert code_dir.publish(copy, tmp_path, "3.12") == first
    assert first.stat().st_ino == inode
    assert run_isolated("import trainer", first) == ""


def planted_module(trainer: Path) -> str:
    (trainer / "torch.py").write_text("import os")
    return "torch.py"


def planted_bytecode(trainer: Path) -> str:
    (trainer / "torch.pyc").write_bytes(b"import os")
    return "torch.pyc"


def planted_package(trainer: Path) -> str:
    (trainer.parents[1] / "torch").mkdir()
    (trainer / "torch").symlink_to(trainer.parents[1] / "torch")
    return "torch"


def planted_link(trainer: Path) -> str:
    """With the same content, which its owner may change later."""
    (trainer / "__init__.py").rename(trainer.parents[1] / "elsewhere.py")
    (trainer / "__init__.py").symlink_to(trainer.parents[1] / "elsewhere.py")
    return "__init__.py"


def planted_cache(trainer: Path) -> str:
    (trainer.parents[1] / "cache").mkdir()
    (trainer / "__pycache__").symlink_to(trainer.parents[1] / "cache")
    return "__pycache__"


def edited(trainer: Path) -> str:
    (trainer / "__init__.py").write_text("import os")
    return "__init__.py"


def removed(trainer: Path) -> str:
    (trainer / "__init__.py").unlink()
    return "__init__.py"


@pytest.mark.parametrize(
    "change",
    [planted_module, planted_bytecode, planted_package, planted_link, planted_cache, edited, removed],
)
def test_a_changed_directory_is_refused(tmp_path: Path, tree: Path, change: Callable[[Path], str]) -> None:
    copy = tmp_path / "copy"
    subprocess.run(("cp", "-a", tree, copy), check=True)
    name = change(code_dir.publish(tree, tmp_path, "3.12") / "trainer")
    with pytest.raises(HpcgenError, match=rf"1 file changed since .* \(trainer/{name}\)"):
        code_dir.publish(copy, tmp_path, "3.12")


def test_other_content_or_another_python_is_another_directory(tmp_path: Path, tree: Path) -> None:
    for copy in ("same content", "other content"):
        subprocess.run(("cp", "-a", tree, tmp_path / copy), check=True)
    (tmp_path / "other content" / "trainer" / "__init__.py").write_text("import os")
    published = {
        code_dir.publish(tree, tmp_path, "3.12"),
        code_dir.publish(tmp_path / "same content", tmp_path, "3.11"),
        code_dir.publish(tmp_path / "other content", tmp_path, "3.12"),
    }
    assert len(published) == 3


@pytest.mark.parametrize(
    ("mask", "directory", "file"), [(0, 0o775, 0o664), (0o027, 0o750, 0o640), (0o077, 0o700, 0o600)]
)
def test_rights_follow_the_umask_but_others_never_write(
    tmp_path: Path, tree: Path, umask: None, mask: int, directory: int, file: int
) -> None:
    os.umask(mask)
    published = code_dir.publish(tree, tmp_path, "3.12")
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (published, *published.rglob("*"))}
    assert modes == {
        published.name: directory,
        "trainer": directory,
        "run.sh": directory,
        "__init__.py": file,
        "manifest.json": file,
    }
