"""#SBATCH values as the real sbatch reads them; it prints its options before it looks for a cluster."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hpcgen.errors import HpcgenError
from tests.patience import PATIENCE_S
from tests.rendering.scripts import HOSTILE_WORDS, rendered

SLURM_CONF = """
ClusterName=none
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
CryptoType=crypto/none
MessageTimeout=1
NodeName=n1 NodeHostname=localhost CPUs=1
PartitionName=p Nodes=ALL Default=YES
"""
FIT = [
    *(
        "gpu",
        "a b",
        "a #b",
        "a;b",
        "[rack1|rack2]&ib",
        "a(b)",
        "50%",
        "x=y",
        "-x",
        "--wrap=x",
        "../x",
        "*",
        "~",
    ),
    "größe",
]


def comment_that_sbatch_reads(script: str, directory: Path) -> list[str]:
    (directory / "slurm.conf").write_text(SLURM_CONF)
    (directory / "job.sh").write_text(script)
    result = subprocess.run(
        ["sbatch", "-v", "job.sh"],
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "SLURM_CONF": str(directory / "slurm.conf"), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    options = result.stderr.partition("-------------------- --------------------\n")[2].partition(
        "sbatch: ----"
    )[0]
    return [line.removeprefix("sbatch: ") for line in options.splitlines() if " : " in line]


@pytest.mark.process
@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed")
@pytest.mark.parametrize("value", FIT)
def test_sbatch_reads_the_value_and_nothing_else(value: str, tmp_path: Path) -> None:
    script = "#!/bin/bash\n" + rendered(tmp_path / "t", "#SBATCH --comment={{ v | directive }}\n", v=value)
    assert comment_that_sbatch_reads(script, tmp_path) == [
        f"comment             : {value}",
        "verbose             : 1",
    ]


@pytest.mark.parametrize("value", [v for v in HOSTILE_WORDS if not v or set(v) & set("\"'\\$`")])
def test_what_sbatch_cannot_quote_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match=r"it\.j2:1: .*(#SBATCH)"):
        rendered(tmp_path, "#SBATCH --comment={{ v | directive }}\n", v=value)


def test_plain_values_stay_plain(tmp_path: Path) -> None:
    text = (
        "#SBATCH --{{ name | directive }}={{ value | directive }}\n#SBATCH --nodes={{ nodes | directive }}\n"
    )
    script = rendered(tmp_path, text, name="signal", value="B:USR2@300", nodes=16)
    assert script == "#SBATCH --signal=B:USR2@300\n#SBATCH --nodes=16\n"
