"""Every command and every program in the documentation runs, in the order of its page.

In a page, `console` blocks are typed after a `$`, `sh` blocks as they stand. `<!-- exits 2 -->` before a block
says that its commands fail so. `make` lines are checked for their targets alone: continuous integration runs them.
A `yaml` block that begins with `# NAME.yaml`, a relative path, is written to that file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hpcgen.cli.main import cli
from hpcgen.config import document
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.defaults import Defaults
from hpcgen.config.inheritance import inherit
from hpcgen.config.presets import PresetConfig
from hpcgen.config.validation import build
from hpcgen.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from hpcgen.data.sample import write_sample
from hpcgen.resources import shipped as shipped_folder
from tests.data.chat_corpora import chat, write_chats, write_tokenizer
from tests.recorded_run import write_recorded_runs
from tests.rendering.golden import GOLDEN, OTHER_SITES
from tests.slurm.cluster import SlurmCluster, missing_slurm
from tests.user_programs import write_user_programs
from trainer.contract.files.index_header import bin_path, idx_path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "t*/README.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
)

RUN = """\
name: tiny
cluster: ./tiny-cluster.yaml
paths: {run_dir: run}
slurm: {train: {time: "10:00"}}
data:
  num_workers: 0
  split: 9,1,0
  tokenizer: {kind: bytes}
  corpus: {directory: data, source: {directory: corpus}, num_output_files: 2}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, seq_length: 32}
training: {micro_batch_size: 2, global_batch_size: 8, train_iters: 2, precision: fp32, eval_iters: 0}
optimizer: {lr: 1.0e-3}
"""

TRAIN = "hpcgen submit download prepare train -c run.yaml --launcher local"
"""The training with which docs/generation.md begins. Its `sh` blocks and its Python start from it, too."""

CHECK = "hpcgen templates check"
CHECK_FEW = """\
import sys
from pathlib import Path
from hpcgen.check import representative
from hpcgen.cli.main import main

templates = Path(sys.argv[sys.argv.index("--templates") + 1], "slurm").iterdir()
names = {path.name.partition(".")[0] for path in templates}
representative.STAGES = {name: stage for name, stage in representative.STAGES.items() if name in names}
main()
"""
"""Checks the scripts of the stages whose templates are in the directory, since each takes seconds.

tests/check/test_site.py checks every stage.
"""

INSTALL = "hpcgen install-code"
INSTALL_FEW = """\
from hpcgen.cli.main import main
from hpcgen.install import code_dir

code_dir.own_requirements = lambda: ["megatron-core"]
main()
"""
"""Installs Megatron-Core and what submit needs. A slow test of tests/install/test_code_dir.py installs everything."""

LESS_WORK = {
    CHECK: "check-few",
    "hpcgen data sample corpus/sample.jsonl.zst": "hpcgen data sample corpus/sample.jsonl.zst --max-mb 1",
    "hpcgen submit train -c": "hpcgen submit train --set training.train_iters=2 --set training.eval_iters=0 -c",
}
"""Start of a command -> what runs in its place."""

LONG_PAGES = ("docs/deepseek.md", "docs/inner-loop.md", "docs/long-context.md", "docs/moe.md")
"""Pages with several trainings, which run in slow tests. docs/generation.md and docs/trainer.md train in all."""


ANSWERS = {
    "README.md": 1,
    "docs/first-day.md": 1,
    "docs/layouts.md": 6,
    "docs/planning.md": 5,
    "docs/storage.md": 1,
}
"""Page -> number of its blocks that show what PREDICTING commands print."""
PREDICTING = re.compile(r"hpcgen (init|validate|layouts) [^|]*")
"""Commands that one test runs to compare what they print. They take up to a second each."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    status: int

    def commands(self) -> Iterator[str]:
        """The commands that a reader would type, without comments and output."""
        for line in self.text.splitlines():
            if self.language == "console":
                if line.startswith("$ "):
                    yield line[2:]
            elif command := re.sub(r"(^|\s)#.*", "", line).strip():
                yield command


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = re.finditer(r"(<!-- exits (\d) -->\n)?```(\w+)\n(.*?)```", text, re.DOTALL)
    return [Block(fence[3], fence[4], int(fence[2] or 0)) for fence in fences]


def pages_with(language: str) -> list[str]:
    """The pages that have a block of this language."""
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def pages_to_run(language: str) -> list[str]:
    """The pages that have commands in blocks of this language, unless what all of them print is compared anyway."""
    commands = {page: list(commands_of(page, language)) for page in pages_with(language)}
    return [
        page
        for page, lines in commands.items()
        if page not in ANSWERS or not all(map(PREDICTING.fullmatch, lines))
    ]


def commands_of(page: str, language: str) -> Iterator[str]:
    """The commands of a page in blocks of this language."""
    return (command for block in blocks(page) if block.language == language for command in block.commands())


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster | None]:
    if missing_slurm():
        yield None
        return
    with SlurmCluster(partitions=("gpu", "hpc")) as started:
        # Jobs of the profile azure-ndv5 are queued and never start: they would run on this machine.
        started.run("scontrol", "update", "PartitionName=hpc", "State=DOWN")
        yield started


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `hpcgen install-code` runs. The first page that has the command runs it for all pages."""
    return tmp_path_factory.mktemp("installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, stand_in: str) -> Path:
    """The files of a reader: a corpus in several forms, one with a bad line, a run file, and two earlier runs."""
    folder = tmp_path_factory.mktemp("folder")
    lines = [
        json.dumps({"text": f"document {number} " + "words and more words " * 40}) for number in range(3000)
    ]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    lines[1870] = '{"content": "x", "id": 7}'
    (folder / "broken.jsonl").write_text("\n".join(lines))
    write_sample(folder / "corpus.jsonl.zst", max_mb=0.1)
    shutil.copy(folder / "corpus.jsonl.zst", folder / "corpus-1.jsonl.zst")
    (folder / "corpus").mkdir()
    shutil.copy(folder / "corpus.jsonl", folder / "corpus" / "part-0.jsonl")
    shutil.copy(folder / "corpus.jsonl.zst", folder / "corpus" / "part-1.jsonl.zst")
    (folder / "tiny-cluster.yaml").write_text(f"extends: local\npython: {stand_in}\nstartup_time_s: 1\n")
    (folder / "run.yaml").write_text(RUN)
    write_pairs(folder / "pairs", "web", "code", "math")
    write_tokenizer(folder / "model")
    turns = ("How many legs has a spider?", "Eight.", "And an ant?", "Six.")
    write_chats(folder / "chats" / "part-0.jsonl", [chat(*turns, system="Answer briefly.")] * 300)
    (folder / "run").mkdir()
    (folder / "examples").mkdir()
    for example in ROOT.glob("examples/custom_*.py"):
        shutil.copy(example, folder / "examples")
    not_shipped = shutil.ignore_patterns("runs", "text", "data", "__pycache__")
    shutil.copytree(ROOT / "examples/deepspeed", folder / "examples/deepspeed", ignore=not_shipped)
    write_recorded_runs(folder)
    return folder


def write_pairs(directory: Path, *names: str) -> None:
    """Pairs of 3,000 documents that were tokenized by bytes."""
    directory.mkdir()
    lengths = np.full(3000, 100, np.int64)
    for name in names:
        prefix = directory / name
        with bin_path(prefix).open("wb") as file, IndexedDatasetWriter(file, token_dtype(257)) as writer:
            writer.add_documents(np.full(lengths.sum(), ord(name[0]), token_dtype(257)), lengths)
            with idx_path(prefix).open("wb") as index:
                writer.write_index(index)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader after the first commands of docs/generation.md."""
    reader = tmp_path_factory.mktemp("trained")
    shutil.copytree(folder, reader, dirs_exist_ok=True)
    done = run(f"hpcgen data plan -c run.yaml && {TRAIN}", reader, None)
    assert done.returncode == 0, done.stderr
    return reader


@pytest.fixture
def reader(folder: Path, tmp_path: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader who has hpcgen on PATH."""
    programs = write_user_programs(tmp_path / "programs", stand_in)
    for name, program, command in (
        ("check-few", CHECK_FEW, CHECK),
        ("install-few", INSTALL_FEW, INSTALL),
    ):
        words = command.removeprefix("hpcgen ")
        (programs / name).write_text(f"#!/bin/sh\nexec {stand_in} -c '{program}' {words} \"$@\"\n")
        (programs / name).chmod(0o755)
    path = (programs, Path(sys.executable).parent, os.environ["PATH"])
    monkeypatch.setenv("PATH", ":".join(map(str, path)))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def write_trainer_config(folder: Path, command: str) -> None:
    """docs/trainer.md's own run.json, for as many ranks as the command starts, and shorter."""
    [example] = [block.text for block in blocks("docs/trainer.md") if block.language == "json"]
    ranks = re.search(r"--nproc-per-node (\d+)|srun -n (\d+)", command)
    world_size = int(ranks[1] or ranks[2]) if ranks else 1
    config = json.loads(example) | {
        "world_size": world_size,
        "run_dir": str(folder / f"by-hand-{world_size}"),
    }
    config["training"]["train_iters"] = 3
    (folder / "run.json").write_text(json.dumps(config))


def copy_run(trained: Path, folder: Path) -> None:
    """Make what docs/generation.md starts from: a run with its checkpoint, and prompts."""
    for name in ("run", "data"):
        shutil.copytree(trained / name, folder / name, dirs_exist_ok=True)
    (folder / "prompts.jsonl").write_text('{"prompt": "Once"}\n')


def install_once(command: str, installed: Path) -> str:
    """`command`, with the output of `hpcgen install-code` where a page before has run it."""
    match = re.search(rf"{INSTALL} (.*?)\./code", command)
    if match is None:
        return command
    if not (installed / "code").exists():
        done = run(match[0].replace(INSTALL, "install-few"), installed, None)
        assert done.returncode == 0, done.stderr
    [directory] = (installed / "code").glob("hpcgen-*")
    return command.replace(match[0], f"echo {directory}")


def elsewhere(command: str) -> str:
    """`command` with a file system that this machine does not have. On one that it has, missing files are errors."""
    return command.replace("/lustre/", "/absent/")


def write_named_file(block: Block, folder: Path) -> None:
    """Writes a block that begins with the name of its file."""
    name = re.match(r"# ([\w-][\w/-]*\.yaml)\n", block.text)
    if name is not None:
        (folder / name[1]).parent.mkdir(parents=True, exist_ok=True)
        (folder / name[1]).write_text(block.text)


def run(command: str, folder: Path, cluster: SlurmCluster | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env={
            **(cluster.env if cluster else {}),
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29871",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("page", "language"),
    [
        pytest.param(page, language, marks=[pytest.mark.slow] if page in LONG_PAGES else [])
        for language in ("console", "sh")
        for page in pages_to_run(language)
    ],
)
def test_every_command_runs(
    page: str,
    language: str,
    reader: Path,
    cluster: SlurmCluster | None,
    installed: Path,
    request: pytest.FixtureRequest,
) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # Tasks that are queued on this page must not be done before it asks which are missing.
    state = "DOWN" if (page, language) == ("docs/data.md", "sh") else "UP"
    if cluster is not None:
        cluster.run("scontrol", "update", "PartitionName=gpu", f"State={state}")
    for block in blocks(page):
        if block.language == "yaml":
            write_named_file(block, reader)
        for command in block.commands() if block.language == language else ():
            if command.startswith("make "):
                assert set(re.findall(r"make ([a-z-]+)", command)) <= targets, command
                continue
            if command.startswith("hpcgen init run.yaml"):
                (reader / "run.yaml").unlink(missing_ok=True)
            if page == "docs/trainer.md":
                write_trainer_config(reader, command)
            if page == "docs/generation.md" and (language == "sh" or command == TRAIN):
                copy_run(request.getfixturevalue("trained"), reader)
                if command == TRAIN:
                    continue
            if page == "docs/first-day.md" and command.startswith("hpcgen report"):
                shutil.copytree(reader / "run-a", reader / "runs/gpt", dirs_exist_ok=True)
            if cluster is None and re.search(
                r"\b(sbatch|srun|scancel|squeue)\b|hpcgen submit (download )?prepare .*yaml$", command
            ):
                continue
            command = install_once(elsewhere(command), installed)
            for long, short in LESS_WORK.items():
                command = command.replace(long, short)
            done = run(command, reader, cluster)
            assert done.returncode == block.status, f"{page}: {command}\n{done.stdout}\n{done.stderr}"
    if cluster is not None:
        cluster.run("scancel", "--user=root", check=False)


@pytest.mark.process
@pytest.mark.parametrize("page", LONG_PAGES)
def test_what_a_long_page_trains_is_valid(page: str, reader: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            write_named_file(block, reader)
        for command in block.commands() if block.language == "console" else ():
            if re.match(r"hpcgen (submit train|validate) |cp examples/", command):
                # no training of this page has left a checkpoint
                others = re.sub(r" --launcher local| --set checkpoint\.(load|finetune)=\S+", "", command)
                done = run(others.replace("submit train", "validate"), reader, None)
                assert done.returncode == block.status, f"{page}: {command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.process
@pytest.mark.parametrize("page", pages_with("python"))
def test_every_program_runs(page: str, reader: Path, stand_in: str, request: pytest.FixtureRequest) -> None:
    program = "\n".join(block.text for block in blocks(page) if block.language == "python")
    if page == "docs/inner-loop.md":
        write_trainer_config(reader, "python -m trainer")
    if page == "docs/generation.md":
        copy_run(request.getfixturevalue("trained"), reader)
    if page in ("docs/layouts.md", "docs/planning.md"):
        assert run("hpcgen init 13b.yaml --preset 13b", reader, None).returncode == 0
    # submitting is shown in full; here everything up to it
    program = re.sub(r"^jobs = submit\(.*\n", "", program, flags=re.MULTILINE)
    program = program.replace("overrides=[", 'overrides=["data.mock=true", ')
    done = subprocess.run(
        [stand_in, "-c", f"import warnings\nwarnings.simplefilter('error')\n{program}"],
        cwd=reader,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{page}:\n{done.stderr}"


@pytest.mark.process
def test_excerpts_of_a_script_are_lines_of_the_rendered_one(reader: Path) -> None:
    init = "hpcgen init 1.3b.yaml --preset 1.3b --cluster azure-ndv5"
    render = "hpcgen render train -c 1.3b.yaml --set training.train_iters=200"
    done = run(f"{init} && {render}", reader, None)
    assert done.returncode == 0, done.stderr
    script = done.stdout.splitlines()
    for page in ("README.md", "docs/first-day.md"):
        excerpts = [block.text for block in blocks(page) if block.language == "bash"]
        assert excerpts
        lines = [line for excerpt in excerpts for line in excerpt.splitlines()]
        assert [line for line in lines if line not in script] == [], page


def test_the_profiles_in_the_admins_guide_are_right() -> None:
    shipped = document.read(shipped_folder("clusters") / "azure-ndv5.yaml")
    texts = [block.text for block in blocks("docs/admins.md") if block.language == "yaml"]
    # tests/rendering/test_other_sites.py checks these
    files = [
        path for site in OTHER_SITES for path in (GOLDEN / site).rglob("*.yaml") if path.name != "run.yaml"
    ]
    of_sites = {path.read_text(encoding="utf-8") for path in files}
    assert of_sites <= set(texts)
    profiles = [text for text in texts if "defaults.yaml" not in text and text not in of_sites]
    for profile in profiles:
        whole = inherit(ClusterConfig, [document.parse(profile, "x"), shipped])
        assert build(ClusterConfig, whole)[1] == ()
    assert len(profiles) > 2


@pytest.mark.parametrize(
    ("page", "file", "cls"),
    [
        ("docs/admins.md", "defaults.yaml", Defaults),
        ("docs/training.md", "presets/ours-7b.yaml", PresetConfig),
    ],
)
def test_the_files_of_a_site_in_the_guides_are_right(page: str, file: str, cls: type) -> None:
    [text] = [block.text for block in blocks(page) if block.text.partition("\n")[0].endswith(f"/{file}")]
    assert build(cls, document.parse(text, file))[1] == ()


@pytest.mark.parametrize(("page", "answers"), ANSWERS.items())
def test_the_guides_predict_what_the_command_predicts(
    page: str, answers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line must be printed exactly so, except `train`: only the reader of the first day has built its image."""
    monkeypatch.chdir(tmp_path)
    checked, printed = 0, ""
    is_only_here = page not in pages_to_run("console")
    for block in blocks(page):
        if block.language == "yaml":
            write_named_file(block, tmp_path)
        elif block.language == "text" and re.search("hpcgen (validate|layouts)", printed):
            shown = [
                line for line in block.text.splitlines() if line != "..." and not line.startswith("train ")
            ]
            lines = {*printed.splitlines()}
            assert [line for line in shown if line not in lines] == []
            checked, printed = checked + 1, ""
        else:
            printed = "".join(
                predicted(command, block.status if is_only_here else None) for command in block.commands()
            )
    assert checked == answers


def predicted(command: str, status: int | None) -> str:
    """Lines that `init`, `validate` and `layouts` print, after the command; nothing for other commands and for JSON."""
    if not PREDICTING.fullmatch(command):
        return ""
    # arithmetic expressions of the shell
    plain = re.sub(r"\$\(\((.*)\)\)", lambda found: str(int(eval(found[1]))), command)
    done = CliRunner().invoke(cli, shlex.split(plain)[1:])
    assert status is None or (done.exit_code == 0) is (status == 0), (
        f"{command}\n{done.output}{done.exception or ''}"
    )
    return f"{command}\n{done.output}{done.exception or ''}"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    for link in links:
        assert link.startswith("https://") or (ROOT / page).parent.joinpath(link).exists(), link
