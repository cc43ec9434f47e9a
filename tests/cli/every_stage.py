"""A run file that says what each stage needs, and the script of a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcgen import render
from hpcgen.stages import STAGES
from tests.runs import MODEL_STAGES, big_run, planned
from tests.selection import select

RUNTIMES = ("pyxis", "enroot", "none")
STAGES_AND_RUNTIMES = select(
    {f"{stage}-{runtime}": (stage, runtime) for stage in STAGES for runtime in RUNTIMES},
    [*(f"{stage}-pyxis" for stage in STAGES), *(f"train-{runtime}" for runtime in RUNTIMES)],
)
"""Every stage in pyxis, and training in each runtime."""


def run_of_stage(stage: str, runtime: str, **sections: Any) -> dict[str, Any]:
    """The values of a run file, with a program for the stage that runs one; `sections` replace its own."""
    image = {} if runtime == "none" else {"image": "/shared/images/gpt.sqsh"}
    values = big_run(
        container={"runtime": runtime, **image},
        image={"output": "/shared/images/new.sqsh", "code": "/shared/code/abc"},
        data={"corpus": {"directory": "/shared/c4", "source": {"directory": "/shared/text"}}},
        evaluation={"data": [{"name": "wikitext", "prefix": "/shared/wikitext"}]},
        generation={"prompts": "/shared/prompts.jsonl"},
        export={"directory": "/shared/models/exported"},
        slurm={"defaults": {"time": "2:00:00"}, "train": {"nodes": 16}},
        **sections,
    )
    if stage not in MODEL_STAGES:
        values["program"] = {"command": ["true"], "directory": "/shared/program"}
        for section in ("preset", "checkpoint", "evaluation", "generation", "export"):
            del values[section]
    return values


def script_of(directory: Path, stage: str, runtime: str, **sections: Any) -> str:
    """The rendered script; its run file is left in `directory` as run.yaml."""
    return render(planned(directory, run_of_stage(stage, runtime, **sections), [stage]), stage)
