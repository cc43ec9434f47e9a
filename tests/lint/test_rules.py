from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hpcgen.check.lint.check import RULES, Finding, lint
from tests.lint.examples import EXAMPLES, FURTHER, SOUND, Example, edited
from tests.lint.messages import MESSAGES
from tests.lint.pairs import PAIRS, Pair
from tests.rendering.golden import one_of_each_template
from tests.selection import select

ROOT = Path(__file__).parents[2]
GOLDEN = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests/golden").rglob("*")
    if path.suffix in (".sbatch", ".sh", ".slurm")
)


def names(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings}


def test_every_rule_has_its_examples() -> None:
    assert set(EXAMPLES) == set(RULES)


def test_the_correct_script_has_no_findings() -> None:
    assert lint(SOUND) == []


ALL = [*EXAMPLES.items(), *FURTHER.values()]
NAMES = [*EXAMPLES, *FURTHER]


@pytest.mark.parametrize(("rule", "example"), ALL, ids=NAMES)
def test_a_script_that_breaks_a_rule_breaks_that_one(rule: str, example: Example) -> None:
    text = edited(example.fails)
    found = lint(text)
    assert rule in names(found)
    notes = {finding.rule for finding in found if finding.severity == "note"}
    assert names(found) - notes - {rule} <= example.also
    for finding in found:
        if finding.rule == rule:
            assert example.at in text.split("\n")[finding.line - 1]
            assert finding.problem.reason
            assert finding.problem.hint


@pytest.mark.parametrize(("rule", "example"), ALL, ids=NAMES)
def test_a_script_that_nearly_breaks_it_does_not(rule: str, example: Example) -> None:
    assert lint(edited(example.passes), rules=[rule]) == []


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_the_first_of_a_pair_breaks_its_rule_and_the_second_does_not(pair: Pair) -> None:
    found = lint(pair.breaks)
    notes = {finding.rule for finding in found if finding.severity == "note"}
    assert names(found) - notes - {pair.rule} == set()
    broken = [finding for finding in found if finding.rule == pair.rule]
    assert {finding.line for finding in broken} == pair.lines
    assert all(finding.problem.reason and finding.problem.hint for finding in broken)
    assert lint(pair.nearly, rules=[pair.rule]) == []


def test_a_script_that_submits_itself_by_its_name() -> None:
    text = "#!/bin/bash\n#SBATCH --time=60\nsbatch convert.slurm\npython convert.py\n"
    assert names(lint(text, "jobs/convert.slurm")) == {"resubmits-itself"}
    assert lint(text, "jobs/export.slurm") == []
    elsewhere = text.replace("sbatch", "cd /shared/next\nsbatch")
    assert lint(elsewhere, "jobs/convert.slurm") == []
    assert lint(edited((("--time=60", "--time=60 --job-name=a-convert"),), elsewhere), "convert.slurm") != []


def test_bash_accepts_the_examples() -> None:
    """A syntax error would hide the mistake that an example shows."""
    edits = [edits for rule, each in ALL if rule != "syntax" for edits in (each.fails, each.passes)]
    pairs = [script for pair in PAIRS.values() for script in (pair.breaks, pair.nearly)]
    for script in [*map(edited, edits), *pairs]:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}{script}"


@pytest.mark.parametrize("matter", MESSAGES)
def test_the_message_of_a_rule(matter: str) -> None:
    rule, message = MESSAGES[matter]
    found = lint(message.script, rules=[rule], slurm_version=message.slurm)
    assert len(found) == bool(message.why), found
    for finding in found:
        assert message.why in finding.problem.reason
        assert message.fix in finding.problem.hint
        assert message.severity in (finding.severity, "")


OFTEN = {
    path.relative_to(ROOT).as_posix()
    for path in one_of_each_template()
    if path.stem in ("image", "nccl-test", "node-health", "prepare", "run", "train")
}
"""Scripts with the most code of their own."""


@pytest.mark.parametrize("path", select(GOLDEN, OFTEN))
def test_rendered_scripts_have_no_findings(path: str) -> None:
    assert lint((ROOT / path).read_text(encoding="utf-8"), path) == []


OF_AZURE = [path for path in GOLDEN if re.search(r"/azure.*-(pyxis|enroot|none)/train\.", path)]


@pytest.mark.parametrize("path", select(OF_AZURE, [path for path in OF_AZURE if "-enroot/" in path]))
def test_the_training_step_of_rendered_scripts_is_found(path: str) -> None:
    """Through functions, arrays, and the `bash -c` that starts enroot."""
    text = (ROOT / path).read_text(encoding="utf-8")
    assert names(lint(edited(((" --kill-on-bad-exit=1\n", "\n"),), text))) == {"no-kill-on-bad-exit"}
