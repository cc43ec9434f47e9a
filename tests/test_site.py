"""The docs site builds without a warning, and its reference names everything that the code defines."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen.cli.main import SECTIONS
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.run import RunConfig
from trainer.contract.config import OptimizerConfig

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[1]

needs_sphinx = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton")
    ),
    reason="no Sphinx here; pip install -e '.[docs]'",
)


def build(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-W",
            "--keep-going",
            "-q",
            "-c",
            source / "docs/site",
            source,
            output,
        ],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("site")
    built = build(ROOT, output)
    assert built.returncode == 0, built.stderr
    return output


def text(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))


@needs_sphinx
def test_the_reference_has_every_key_command_and_variable(site: Path) -> None:
    reference = site / "docs/reference"
    expected = {
        "run-file": [field.name for cls in (RunConfig, OptimizerConfig) for field in dataclasses.fields(cls)],
        "cluster-profile": [field.name for field in dataclasses.fields(ClusterConfig)],
        "node-type": ["gpus_per_node", "bus_id", "fail_below_gb_s"],
        "commands": [
            *(f"hpcgen {name}" for commands in SECTIONS.values() for name in commands),
            "hpcgen data plan",
            "--launcher",
            "hpcgen render train -c run.yaml | sbatch\n",  # an example in a block of its own
        ],
        "environment": ["NCCL_PXN_DISABLE", "PYTHONSAFEPATH", "MASTER_ADDR", "HPCGEN_TEMPLATES"],
    }
    for page, names in expected.items():
        shown = text(reference / f"{page}.html")
        assert [name for name in names if name not in shown] == [], page


@needs_sphinx
def test_the_first_page_leads_to_the_readme(site: Path) -> None:
    target = re.search(r'url=([^"]+)"', (site / "index.html").read_text())
    assert target is not None
    assert (site / target[1]).exists()


@needs_sphinx
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "docs").mkdir(parents=True)
    shutil.copytree(ROOT / "docs/site", source / "docs/site")
    (source / "README.md").write_text("# Short\n\n[page](docs/page.md)\n")
    (source / "docs/training.md").write_text("# Training\n")
    links = ("training.md#no-such-heading", "no-such-page.md")
    (source / "docs/page.md").write_text("# Page\n\n" + "\n\n".join(f"[broken]({link})" for link in links))
    built = build(source, tmp_path / "output")
    assert built.returncode != 0
    for line, name in ((3, "no-such-heading"), (5, "no-such-page.md")):
        assert re.search(rf"docs/page.md:{line}: .*{re.escape(name)}", built.stderr), built.stderr


def test_every_variable_that_hpcgen_reads_is_documented() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    read = {
        name
        for path in (ROOT / "hpcgen").rglob("*.py")
        for name in re.findall(r'environ\.get\("(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert {name for name in read if f"`{name}`" not in page} <= {"PYTHONSAFEPATH"}  # set by hpcgen itself
