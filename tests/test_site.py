"""The docs site builds without a warning, links lead to headings, and the reference names all that the code defines."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from hpcgen.cli.main import SECTIONS
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.run import RunConfig
from tests.test_docs import PAGES, ROOT
from trainer.contract.config import OptimizerConfig

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


@cache
def reference() -> ModuleType:
    """The module that writes the pages of the reference."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/site/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def text(page: str) -> str:
    """A page as the site has it: a page of the reference with what is generated for it."""
    written = (ROOT / page).read_text(encoding="utf-8")
    folder, _, name = page.removesuffix(".md").rpartition("/")
    return written + (reference().PAGES[name]() if folder == "docs/reference" else "")


@cache
def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, which count those with the same words."""
    found: set[str] = set()
    outside_code = re.sub(r"^ *```.*?^ *```", "", text(page), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} (.*)", outside_code, re.MULTILINE):
        anchor = reference().anchor(re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading).replace("\\", ""))
        found.add(next(name for n in range(99) if (name := f"{anchor}-{n}" if n else anchor) not in found))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_heading(page: str) -> None:
    for link, anchor in re.findall(r"\]\(((?!https:)[^)#\s]*)#([^)\s]+)\)", text(page)):
        target = (ROOT / page).parent.joinpath(link).resolve() if link else ROOT / page
        assert anchor in anchors(target.relative_to(ROOT).as_posix()), f"{link}#{anchor}"


def test_the_reference_has_every_key_command_and_variable() -> None:
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
        shown = text(f"docs/reference/{page}.md")
        assert [name for name in names if name not in shown] == [], page


@pytest.mark.slow
@needs_sphinx
def test_the_first_page_leads_to_the_readme(site: Path) -> None:
    target = re.search(r'url=([^"]+)"', (site / "index.html").read_text())
    assert target is not None
    assert (site / target[1]).exists()


@pytest.mark.slow
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
