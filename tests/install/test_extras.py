"""The extras: what works with the base installation alone, and what a command says that needs more."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcgen import api, load_run, plan
from hpcgen.install.extras import missing_package, project_name, requirements
from hpcgen.resources import SHIPPED_FOLDERS
from tests.cli.command import Ended, hpcgen, listing
from tests.install.environment import link, size_in_bytes, with_needs
from tests.recorded_run import write_checkpoint
from tests.runs import big_run, minimal_run, write_yaml

Command = Callable[..., "subprocess.CompletedProcess[str]"]
CHECKOUT = Path(__file__).parents[2]
INSTALL_PAGE = CHECKOUT / "docs" / "install.md"
WORKS = {
    "validate": ["validate", "-c", "run.yaml"],
    "render": ["render", "train", "-c", "run.yaml"],
    "init": ["init", "new.yaml", "--preset", "1.3b"],
    "cluster": ["cluster", "show", "azure-ndv5"],
    "topology": ["topology", "draw", "ndv5"],
    "templates": ["templates", "list"],
    "data-help": ["data", "prepare", "--help"],
    "render-planned": ["render", "train", "-c", "corpus.yaml"],
    "validate-planned": ["validate", "-c", "corpus.yaml"],
    "checkpoint-list": ["checkpoint", "list", "earlier"],
    "checkpoint-inspect": ["checkpoint", "inspect", "earlier", "--verify"],
}
MISSING = {
    "data plan": (["-c", "corpus.yaml"], "data"),
    "data prepare": (["-c", "corpus.yaml"], "data"),
    "data sample": (["sample.jsonl.zst"], "data"),
    "data tokenize": (["text.jsonl", "--output-prefix", "pair"], "data"),
    "data inspect": (["pair"], "data"),
    "data export": (["pair", "--output", "out"], "parquet"),
    "submit": (["train", "-c", "mini.yaml"], "submit"),
    "lint": (["script.sh"], "lint"),
    "templates check": ([], "lint"),
    "init": (["other.yaml", "--from", "script.sh", "--cluster", "azure-ndv5"], "lint"),
    "report": (["run"], "report"),
    "generate": (["--checkpoint", "earlier", "--tokenizer", "bytes", "--prompt", "x"], "train,data"),
}


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a virtual environment with hpcgen and what it declares without an extra, and nothing else."""
    directory = tmp_path_factory.mktemp("base") / "venv"
    venv.create(directory, symlinks=True)
    [site_packages] = directory.glob("lib/python*/site-packages")
    link(with_needs("hpcgen"), site_packages)
    return directory / "bin" / "python"


@pytest.fixture
def base_hpcgen(base_python: Path, tmp_path: Path) -> Command:
    """`hpcgen` with the base installation, in a directory with run files and scripts."""
    work = tmp_path / "work"
    write_yaml(work / "run.yaml", big_run())
    write_yaml(work / "mini.yaml", minimal_run(paths={"run_dir": "run"}))
    corpus = {"directory": "corpus", "source": {"directory": "text"}, "num_output_files": 1}
    write_yaml(work / "corpus.yaml", minimal_run(data={"corpus": corpus}))
    (work / "script.sh").write_text("#!/bin/bash\nsrun python pretrain_gpt.py\n")
    (work / "text.jsonl").write_text('{"text": "Hello world"}\n')
    (work / "corpus").mkdir()
    (work / "corpus/manifest.jsonl").write_text('{"hpcgen_manifest":1,"source":"text","files":0}\n')
    (work / "run").mkdir()
    write_checkpoint(work / "earlier/checkpoints", 5)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [base_python, "-B", "-m", "hpcgen", *arguments]
        return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("arguments", WORKS.values(), ids=WORKS)
def test_a_login_node_needs_no_extra(base_hpcgen: Command, arguments: list[str]) -> None:
    found = base_hpcgen(*arguments)
    assert (found.returncode, found.stdout != "" or arguments[0] == "init") == (0, True), found.stderr


def test_pairs_that_were_not_checked_are_a_warning_in_json(base_hpcgen: Command) -> None:
    summary = json.loads(base_hpcgen("validate", "-c", "corpus.yaml", "--json").stdout)
    assert any("the pairs were not compared with the manifest" in text for text in summary["warnings"])


@pytest.mark.parametrize("command", MISSING)
def test_a_missing_extra_is_named_before_anything_is_written(
    base_hpcgen: Command, tmp_path: Path, command: str
) -> None:
    arguments, extra = MISSING[command]
    before = listing(tmp_path)
    found = base_hpcgen(*command.split(), *arguments)
    assert (found.returncode, found.stdout) == (2, "")
    message = [line for line in found.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(message) == 1, found.stderr
    assert message[0].startswith(f"hpcgen {command} needs ")
    assert message[0].endswith(f". Install it with: pip install 'hpcgen[{extra}]'")
    assert listing(tmp_path) == before


def test_conversion_names_the_extra_that_brings_all_it_needs(base_hpcgen: Command, tmp_path: Path) -> None:
    found = base_hpcgen("checkpoint", "import", "model", "--to", "weights")
    assert (found.returncode, found.stdout) == (2, "")
    message = "hpcgen checkpoint import needs safetensors. Install it with: pip install 'hpcgen[hf]'"
    assert found.stderr.strip() == message


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_the_size_of_the_base_installation_is_documented(page: str) -> None:
    """Without pip and without byte code."""
    found = re.search(r"(\d+) packages,\s+(\d+)\s+MB", (CHECKOUT / page).read_text())
    assert found
    names = with_needs("hpcgen")
    assert {"click", "jinja2", "pydantic", "rich", "ruamel-yaml"} <= names
    folders = [CHECKOUT / name for name in ("hpcgen", "trainer", *SHIPPED_FOLDERS)]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    own = sum(path.stat().st_size for path in files if path.suffix != ".pyc")
    megabytes = (own + size_in_bytes(names)) / 1e6
    assert len(names) == int(found[1])
    assert abs(megabytes - int(found[2])) < 1.5  # other versions and platforms have other sizes


def test_commands_of_a_login_node_import_only_base_packages(tmp_path: Path) -> None:
    """The import graph, in this environment: an import that is guarded or optional counts as well."""
    write_yaml(tmp_path / "run.yaml", big_run())
    commands = [WORKS[name] for name in ("render", "validate", "init", "cluster", "topology")]
    program = f"""
import sys
started = set(sys.modules)
from hpcgen.cli.main import main
for arguments in {commands}:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0, arguments
print("\\0", *sys.modules.keys() - started, file=sys.stderr)
"""
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    imported = {module.partition(".")[0] for module in found.stderr.rpartition("\0")[2].split()}
    distributions = importlib.metadata.packages_distributions()
    names = {project_name(name) for module in imported for name in distributions.get(module, ())}
    assert "click" in names
    assert names <= with_needs("hpcgen")


def test_a_package_that_is_missing_among_others_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are made in worker processes: the import must fail before they start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_text('{"text": "Hello world"}\n')
    corpus = {"directory": "corpus", "source": {"directory": "text"}, "num_output_files": 1}
    write_yaml(tmp_path / "run.yaml", minimal_run(data={"corpus": corpus}))
    without = (
        "import sys; from hpcgen.cli.main import main; sys.modules['zstandard'] = None; main(sys.argv[1:])"
    )
    for command in ("plan", "prepare"):
        before = listing(tmp_path)
        arguments = [sys.executable, "-B", "-c", without, "data", command, "-c", "run.yaml"]
        refused = subprocess.run(arguments, capture_output=True, text=True)
        assert refused.returncode == 2
        needs = f"hpcgen data {command} needs zstandard. Install it with: pip install 'hpcgen[data]'\n"
        assert (refused.stderr, listing(tmp_path)) == (needs, before)
        assert hpcgen("data", command, "-c", "run.yaml").status == 0


def test_training_here_needs_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(
        load_run(write_yaml(tmp_path / "run.yaml", minimal_run(paths={"run_dir": "run"}))), ["train"]
    )
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ModuleNotFoundError) as error:
        api.submit(planned, "local")
    assert not (tmp_path / "run").exists()
    message = missing_package(error.value, "hpcgen submit")
    assert str(message) == "hpcgen submit needs megatron-core. Install it with: pip install 'hpcgen[train]'"


def test_the_smallest_extra_with_a_package_is_named() -> None:
    error = ModuleNotFoundError("No module named 'numpy'", name="numpy")
    message = str(missing_package(error, "hpcgen layouts"))
    assert message == "hpcgen layouts needs numpy. Install it with: pip install 'hpcgen[report]'"


def test_an_import_that_no_extra_provides_keeps_its_traceback() -> None:
    program = (
        "import sys; from hpcgen.cli.main import main; sys.modules['rich.table'] = None; main(['presets'])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 1
    assert "Traceback" in found.stderr
    assert "ModuleNotFoundError: import of rich.table halted" in found.stderr


def test_the_extra_all_has_every_capability() -> None:
    capabilities = ("data", "submit", "lint", "report", "hf", "train")
    declared = list(requirements())
    every = {requirement for extra, requirement in declared if extra == "all"}
    assert every == {requirement for extra, requirement in declared if extra in capabilities}


@pytest.mark.slow
def test_without_gigatoken_the_pairs_are_the_same_and_a_task_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes miss it too: its stand-in is on PYTHONPATH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"text/{name}.jsonl").write_text('{"text": "Hello world, naïve café"}\n' * 20)
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "gigatoken.py").write_text("raise ModuleNotFoundError('no gigatoken', name='gigatoken')\n")
    prepare = ("data", "prepare", "--workers", "2", "-c", "run.yaml")

    def without_gigatoken() -> Ended:
        command = [sys.executable, "-m", "hpcgen", *prepare]
        environment = {**os.environ, "PYTHONPATH": str(missing)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return Ended(done.returncode, done.stdout, done.stderr)

    pairs, said = [], []
    for run in (lambda: hpcgen(*prepare), without_gigatoken):
        directory = tmp_path / f"corpus{len(pairs)}"
        corpus = {"directory": str(directory), "source": {"directory": "text"}, "num_output_files": 2}
        write_yaml(tmp_path / "run.yaml", minimal_run(data={"corpus": corpus}))
        assert hpcgen("data", "plan", "-c", "run.yaml").status == 0
        found = run()
        assert found.status == 0, found.stderr
        said.append([line for line in found.stderr.splitlines() if "gigatoken" in line])
        pairs.append(
            {
                file.name: file.read_bytes()
                for file in (directory / "tokens").iterdir()
                if file.suffix != ".json"
            }
        )
    assert pairs[0] == pairs[1]
    assert any(name.endswith(".bin") for name in pairs[0])
    note = "tokenizers gives the same token IDs, but takes many times as long"
    assert said == [[], [f"warning: gigatoken is not installed (pip install 'hpcgen[data]'); {note}"]]


def test_the_table_of_extras_has_every_extra() -> None:
    rows = re.findall(
        r"^\| `pip install (?:'hpcgen\[(\w+)\]'|hpcgen)` \|", INSTALL_PAGE.read_text(), re.MULTILINE
    )
    assert sorted(filter(None, rows)) == sorted({extra for extra, _ in requirements() if extra})
