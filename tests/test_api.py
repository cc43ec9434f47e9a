"""The functions as a Python user calls them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hpcgen
from hpcgen import api
from tests.runs import minimal_run, write_yaml


@pytest.fixture
def run(tmp_path: Path) -> hpcgen.api.Run:
    return hpcgen.load_run(
        write_yaml(tmp_path / "run.yaml", minimal_run(paths={"run_dir": str(tmp_path / "run")}))
    )


def test_names_are_found_where_type_checkers_find_them() -> None:
    """PLACES repeats the imports for type checkers, which read no tables."""
    tree = ast.parse(Path(api.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imports = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imports == api.PLACES
    assert sorted(imports) == api.__all__
    for name in hpcgen.__all__:
        assert getattr(hpcgen, name) is not None


def test_load_plan_render(run: hpcgen.api.Run) -> None:
    planned = hpcgen.plan(run)
    assert planned.layout is not None
    assert hpcgen.render(planned, "train").startswith("#!/bin/bash -p\n#SBATCH --job-name=mini\n")


def test_one_stage_and_one_override_may_be_plain_text(tmp_path: Path) -> None:
    run = hpcgen.load_run(write_yaml(tmp_path / "run.yaml", minimal_run()), "name=other")
    assert run.config.name == "other"
    assert list(hpcgen.plan(run, "train").stages) == ["train"]


def test_the_stages_of_a_corpus(tmp_path: Path) -> None:
    """The pairs that one stage makes are what the next one reads."""
    corpus = {"directory": "data", "source": {"directory": "text"}, "num_output_files": 2}
    values = minimal_run(paths={"run_dir": "run"}, data={"corpus": corpus})
    run = hpcgen.load_run(write_yaml(tmp_path / "run.yaml", values))
    with pytest.raises(hpcgen.HpcgenError, match=r"manifest\.jsonl: no such file.*hpcgen data plan"):
        hpcgen.plan(run, ["prepare", "train"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.jsonl").touch()
    planned = hpcgen.plan(run, ["prepare", "train"])
    assert list(planned.stages) == ["prepare", "train"]
    assert planned.trainer is not None
    assert [dataset.prefix for dataset in planned.trainer.data.datasets] == [
        f"{tmp_path}/data/tokens/corpus-0000{number}-of-00002" for number in (0, 1)
    ]


def test_mistakes_name_the_valid_choices(run: hpcgen.api.Run, tmp_path: Path) -> None:
    planned = hpcgen.plan(run)
    with pytest.raises(hpcgen.HpcgenError, match="'tokenize' is not in the plan; planned stages: train"):
        hpcgen.render(planned, "tokenize")
    with pytest.raises(hpcgen.HpcgenError, match="unknown launcher 'pbs'; use slurm or local"):
        hpcgen.submit(planned, launcher="pbs")  # type: ignore[arg-type]
    with pytest.raises(hpcgen.HpcgenError, match="contains no templates"):
        hpcgen.render(planned, "train", [tmp_path])


def test_a_missing_secret_is_noticed_before_anything_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    values = minimal_run(secrets=["WANDB_API_KEY"], paths={"run_dir": str(tmp_path / "run")})
    planned = hpcgen.plan(hpcgen.load_run(write_yaml(tmp_path / "run.yaml", values)))
    with pytest.raises(hpcgen.HpcgenError, match="WANDB_API_KEY, not set in this environment"):
        hpcgen.submit(planned)
    assert not (tmp_path / "run").exists()


def test_mistakes_are_reported_together(tmp_path: Path) -> None:
    values = minimal_run(share="everybody", cluster="orion", parallelism={"tensor_model_parallel_size": 3})
    with pytest.raises(hpcgen.ConfigErrors) as error:
        hpcgen.load_run(write_yaml(tmp_path / "run.yaml", values))
    assert len(error.value.messages) == 2
    values = minimal_run(secrets=["A"], environment={"A": "x"}, parallelism={"tensor_model_parallel_size": 3})
    run = hpcgen.load_run(write_yaml(tmp_path / "run.yaml", values))
    assert run.mistakes == ()
    with pytest.raises(hpcgen.ConfigErrors) as error:
        hpcgen.plan(run)
    assert len(error.value.messages) == 2
