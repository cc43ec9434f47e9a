"""The golden cases: each a folder of tests/golden with a run file, maybe its profile, and scripts."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from unittest import mock

from hpcgen.config.loader import load_run
from hpcgen.config.program import ProgramConfig, ProgressConfig, StopConfig
from hpcgen.resources import shipped
from hpcgen.run_plan.plan import Plan, plan
from hpcgen.slurm.rendering.script import render_stage
from hpcgen.stages import STAGES

GOLDEN = Path(__file__).parents[1] / "golden"
PROFILES = ("azure-ndv5", "local")
RUNTIMES = ("pyxis", "enroot", "none")
OTHER_SITES = ("a100-none", "alps-gh200", "aws-p5en", "gb200-nvl72", "gcp-a3-mega")
"""Sites that are not Azure, with their profiles. docs/admins.md shows them."""
CASES = (
    *(f"{profile}-{runtime}" for profile in PROFILES for runtime in RUNTIMES),
    *("site-group", "site-apptainer"),
    *OTHER_SITES,
)
"""One for each shipped profile and runtime, and profiles of sites."""

PROGRAM = ProgramConfig(
    command=("python", "train.py", "--out={RUN_DIR}/out", "--addr={MASTER_ADDR}:{MASTER_PORT}", "it's {{a}}"),
    directory="/code/program",
    progress=ProgressConfig(checkpoints="/runs/out/step_*"),
    stop=StopConfig(signal="USR1"),
)

SCRIPTS = (
    *((case, "train") for case in CASES),
    *(("azure-ndv5-pyxis", stage) for stage in STAGES if stage != "train"),
    ("azure-ndv5-enroot", "nccl-test"),
    ("local-none", "prepare"),
    ("site-group", "node-health"),
)
"""Cases that differ in more than a few values."""

EVALUATION = "evaluation.data=[{name: wikitext, prefix: /shared/data/wikitext}]"
"""Work for the stage evaluate. The run file of site-group has its own, with `every`."""

OVERRIDES = (
    'generation={prompts: /shared/prompts.jsonl, temperature: 0.8, stop: ["a b"]}',
    "export.directory=/shared/models/exported",
    "tune.calibrate=false",
)
"""Work for the stages generate and export. What a calibration measures changes with the predictions."""


HASH = "# inputs: sha256 "
"""Beginning of the line of the header that identifies what a script was rendered from."""


def render(case: str, stage: str) -> str:
    """The script of a stage, by shipped templates and profiles, whatever this machine has besides."""
    return render_stage(planned_case(case), stage).text


rendered = functools.cache(render)
"""As `render`, once for all tests."""


def folded(script: str) -> str:
    """The script as it is in git: wherever the checkout is, and without what the image stage carries from enroot/."""
    script = script.replace(str(GOLDEN), "tests/golden")
    if script.count(HASH) > 1:  # it carries another script, whose header names files of the checkout
        before, _, after = script.partition(HASH)
        script = f"{before}{HASH}(of this checkout)\n{after.partition(chr(10))[2]}"
    enroot = shipped("enroot")
    for path in sorted(enroot.rglob("*")):
        if path.is_file() and len(text := path.read_text(encoding="utf-8")) > 500:
            script = script.replace(text, f"(the text of enroot/{path.relative_to(enroot)})\n")
    return script


def one_of_each_template() -> list[Path]:
    """The shortest golden script of each template, and the longest of all, which uses most of the libraries."""
    longest, *others = sorted(GOLDEN.glob("*/*.sbatch"), key=lambda path: -path.stat().st_size)
    templates = {(shipped("templates") / f"slurm/{path.stem}.sbatch.j2").read_text(): path for path in others}
    return [longest, *templates.values()]


def planned_case(case: str) -> Plan:
    """The plan of all stages of a case, with PROGRAM next to the model: a run file can have only one of them."""
    overrides = OVERRIDES if case == "site-group" else (EVALUATION, *OVERRIDES)
    with mock.patch.dict(os.environ, {"XDG_CONFIG_HOME": "/nonexistent"}):
        run = load_run(GOLDEN / case / "run.yaml", overrides)
        config = dataclasses.replace(run.config, program=PROGRAM)
        # --set changes no golden script, and is not in the record of its submission
        with_program = dataclasses.replace(run, config=config, overrides=())
        return plan(with_program, STAGES, exists=lambda path: True)
