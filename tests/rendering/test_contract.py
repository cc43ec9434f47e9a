"""What a site's blocks must leave in a script: the rendered one has it, and the same script with one change has not."""

from __future__ import annotations

import pytest

from hpcgen.rendering.contract import check_script
from hpcgen.rendering.findings import Finding
from hpcgen.rendering.settings import stage_settings
from tests.rendering.golden import planned_case, rendered

CASE = "azure-ndv5-pyxis"
COMMAND = "set -uo pipefail\n"

# What is replaced, what stands there instead, the rule and a part of what it says.
CHANGES = {
    "a directive is lost": ("#SBATCH --requeue\n", "", "directive-lost", "#SBATCH --requeue is missing"),
    "a directive is contradicted": (
        "#SBATCH --nodes=16\n",
        "#SBATCH --nodes=16\n#SBATCH --nodes=2\n",
        "directive-lost",
        "#SBATCH --nodes=2 changes #SBATCH --nodes=16: of two, sbatch takes the last",
    ),
    "a directive is too late": (
        COMMAND,
        f"{COMMAND}#SBATCH --comment=x\n",
        "directive-order",
        "#SBATCH --comment=x follows the first command",
    ),
    "a directive is cut": (
        "#SBATCH --nodes=16\n",
        "#SBATCH --nodes=16\n#SBATCH --comment=a #b\n",
        "directive-form",
        "#SBATCH --comment=a #b",
    ),
    "a setting is lost": ("\nscratch_root=/nvme\n", "\n", "setting-lost", "not set:"),
    "a variable is lost": ("    export NCCL_DEBUG=WARN\n", "", "variable-lost", "not exported:"),
}


def found(script: str) -> list[Finding]:
    plan = planned_case(CASE)
    stage = plan.stages["train"]
    return check_script(script, stage, stage_settings(plan, stage))


@pytest.mark.parametrize(("before", "after", "rule", "what"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_one_finding(before: str, after: str, rule: str, what: str) -> None:
    script = rendered(CASE, "train")
    assert script.count(before) == 1
    assert found(script) == []
    [finding] = found(script.replace(before, after))
    assert (finding.rule.name, finding.what) == (rule, what)
    if finding.names:
        assert any(name in before for name in finding.names)
