"""`hpcgen doctor -c run.yaml`: each setting of a site that would break a run is named, with what to do."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcgen.doctor import containers, partitions, slurm_settings, storage
from hpcgen.doctor.check import Check
from hpcgen.doctor.containers import Software, known_faults, with_pyxis
from hpcgen.errors import ConfigErrors
from hpcgen.planning.image_record import read_image_record
from hpcgen.run_plan.plan import Plan
from tests.runs import big_run, planned
from trainer.contract.record import replaced

GOOD = {
    "SLURM_VERSION": "25.11.1",
    "KillWait": "30 sec",
    "JobRequeue": "1",
    "MaxArraySize": "1001",
    "MaxJobCount": "10000",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "SlurmdTimeout": "300 sec",
    "PropagateResourceLimits": "ALL",
    "PreemptType": "preempt/none",
    "PreemptMode": "OFF",
    "PrivateData": "none",
    "GresTypes": "gpu",
    "SelectType": "select/cons_tres",
    "TaskPlugin": "task/affinity,task/cgroup",
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return planned(tmp_path_factory.mktemp("plan"), big_run())


def bad(checks: Any) -> dict[str, tuple[str, str]]:
    """The checks that are not ok: name -> state and what was found. Each says what to do."""
    found = [check for check in checks if check.state in ("warning", "failed")]
    assert all(check.fix for check in found)
    return {check.name: (check.state, check.found) for check in found}


def test_usual_settings_have_nothing_to_complain_about(plan: Plan) -> None:
    assert bad(slurm_settings.checks(GOOD, plan)) == {}


@pytest.mark.parametrize(
    ("settings", "name", "state", "found"),
    [
        ({"SLURM_VERSION": "20.02.7"}, "Slurm version", "failed", "20.02.7, and the scripts need 20.11"),
        ({"SLURM_VERSION": "24.05.3"}, "Slurm version", "warning", "24.05.3, and the profile says 25.11"),
        ({"KillWait": "5 sec"}, "Slurm KillWait", "warning", "5 s between TERM and KILL"),
        ({"Prolog": "/etc/slurm/prolog"}, "Slurm PrologFlags", "warning", "runs only with the first step"),
        ({"MaxArraySize": "500"}, "Slurm MaxArraySize", "failed", "500, and the profile says 1001"),
        ({"MaxJobCount": "0"}, "Slurm MaxJobCount", "failed", "0, and the stages have 1 task"),
        ({"SlurmdTimeout": "0 sec"}, "Slurm SlurmdTimeout", "warning", "never notices a dead node"),
        (
            {"PreemptType": "preempt/qos", "PreemptMode": "GANG,SUSPEND"},
            "Slurm preemption",
            "failed",
            "training then hangs",
        ),
        (
            {"PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"},
            "Slurm preemption",
            "warning",
            "REQUEUE, without a warning before it",
        ),
        ({"GresTypes": ""}, "Slurm GPUs", "failed", "GresTypes = none, without gpu"),
        ({"SelectType": "select/linear"}, "Slurm GPUs", "warning", "select/linear"),
        ({"TaskPlugin": "task/none"}, "Slurm TaskPlugin", "warning", "CPU masks of ranks have no effect"),
    ],
)
def test_a_setting_that_breaks_a_run_is_named(
    plan: Plan, settings: dict[str, str], name: str, state: str, found: str
) -> None:
    [(named, (is_state, shown))] = bad(slurm_settings.checks({**GOOD, **settings}, plan)).items()
    assert (named, is_state) == (name, state)
    assert found in shown


def test_a_segment_needs_the_topology_of_blocks(tmp_path: Path) -> None:
    segmented = planned(tmp_path, big_run(slurm={"train": {"nodes": 16, "time": "1:00:00", "segment": 8}}))
    assert "Slurm topology" in bad(
        slurm_settings.checks({**GOOD, "TopologyPlugin": "topology/tree"}, segmented)
    )
    assert bad(slurm_settings.checks({**GOOD, "TopologyPlugin": "topology/block"}, segmented)) == {}


PARTITION = "PartitionName=hpc AllowAccounts=ALL AllowQos=ALL Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP"
NODE = "NodeName=n{index} Gres=gpu:h100:8(S:0-1) Partitions=hpc,all State={state} OS=Linux 6.8 #1 SMP"


def partition(
    plan: Plan, row: str = PARTITION, count: int = 16, state: str = "IDLE", gpus: int = 8
) -> dict[str, Any]:
    lines = [NODE.format(index=index, state=state).replace(":8", f":{gpus}") for index in range(count)]
    stage = plan.stages["train"]
    return bad(partitions.checks(stage, partitions.rows([row]), partitions.rows(lines)))


def test_a_partition_is_compared_with_the_job(plan: Plan) -> None:
    assert partition(plan) == {}
    assert partition(plan, state="IDLE+CLOUD+POWERED_DOWN") == {}
    assert partition(plan, PARTITION.replace("=hpc", "=cpu")) == {
        "partition hpc": ("failed", "Slurm has no such partition")
    }
    [(_, (state, found))] = partition(plan, PARTITION.replace("State=UP", "State=DRAIN")).items()
    assert (state, found) == ("failed", "its state is DRAIN")
    [(name, (state, found))] = partition(
        plan, PARTITION.replace("MaxTime=UNLIMITED", "MaxTime=12:00:00")
    ).items()
    assert (name, state, found) == ("partition hpc: time", "failed", "1-00:00:00, and MaxTime is 12:00:00")
    [(_, (state, found))] = partition(plan, PARTITION.replace("MaxNodes=UNLIMITED", "MaxNodes=8")).items()
    assert (state, found) == ("failed", "16, and MaxNodes is 8")
    [(_, (state, found))] = partition(plan, state="DOWN+NOT_RESPONDING").items()
    assert (state, found) == ("warning", "0 usable nodes with 8 GPUs of 16 (16 down); the job needs 16")
    [(_, (state, found))] = partition(plan, gpus=4).items()
    assert (state, found) == ("failed", "0 usable nodes with 8 GPUs of 16; the job needs 16")


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("IDLE", ""),
        ("IDLE+CLOUD", ""),
        ("MIXED+PLANNED", ""),
        ("ALLOCATED+COMPLETING", ""),
        ("IDLE+CLOUD+POWERED_DOWN", "switched off or starting"),
        ("IDLE+CLOUD+POWER", "switched off or starting"),
        ("IDLE+POWERING_DOWN", "switched off or starting"),
        ("ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", "switched off or starting"),
        ("DOWN+CLOUD+POWERED_DOWN", "down"),
        ("IDLE*+CLOUD", "down"),
        ("IDLE+NOT_RESPONDING", "down"),
        ("IDLE+FAIL+NOT_RESPONDING", "down"),
        ("DOWN+NOT_RESPONDING", "down"),
        ("FUTURE", "down"),
        ("INVAL+INVALID_REG", "down"),
        ("MIXED+DRAIN", "drained"),
        ("IDLE+CLOUD+DRAIN+POWERED_DOWN", "drained"),
        ("IDLE+RESERVED", "reserved"),
        ("IDLE+MAINTENANCE+RESERVED", "in maintenance"),
        ("MAINT", "in maintenance"),
    ],
)
def test_states_of_nodes(plan: Plan, state: str, word: str) -> None:
    """Spellings of Slurm 20.11 to 25.11. With the job's own reservation, reserved nodes are usable."""
    [check] = shown(plan, [state])
    assert f"(1 {word})" in check.found if word else "(" not in check.found
    assert (check.state == "ok") == (word in ("", "switched off or starting"))
    [check] = shown(plan, [state], reservation="mine")
    assert (check.state == "ok") == (word not in ("down", "drained"))


def test_cloud_nodes_that_slurm_hides_may_come(plan: Plan) -> None:
    """Without PrivateData=cloud, Slurm 22.05 to 25.11 show no cloud node that is switched off."""
    [check] = shown(plan, ["IDLE", "DOWN"], hidden=4, nodes=5)
    assert check.state == "ok"
    hidden = "4 that Slurm does not show, such as cloud nodes that are switched off"
    assert check.found == f"1 usable node with 8 GPUs of 6 (1 down, {hidden}); the job needs 5"
    [check] = shown(plan, ["IDLE"], hidden=4, nodes=6)
    assert check.state == "failed"


def shown(
    plan: Plan, states: Sequence[str], *, hidden: int = 0, nodes: int = 1, reservation: str | None = None
) -> list[Check]:
    """The check of a partition whose nodes have these states; further ones are hidden."""
    stage = plan.stages["train"]
    settings = replaced(stage.allocation.settings, reservation=reservation)
    stage = replaced(stage, allocation=replaced(stage.allocation, nodes=nodes, settings=settings))
    lines = [NODE.format(index=index, state=state) for index, state in enumerate(states)]
    row = f"{PARTITION} TotalNodes={len(states) + hidden}"
    return list(partitions.checks(stage, partitions.rows([row]), partitions.rows(lines)))


@pytest.mark.parametrize(
    ("software", "issues"),
    [
        (Software(slurm="25.11.1", pyxis="0.21.0", pmix="4", mpi="pmix"), ["#175"]),
        (Software(slurm="25.11.1", pyxis="0.24.0", pmix="4", mpi="pmix"), []),
        (Software(slurm="25.11.1", pyxis="0.21.0", mpi="none"), []),
        (Software(slurm="24.11.5", task_prolog="/etc/slurm/prolog"), ["#163"]),
        (Software(slurm="25.05.2", task_prolog="/etc/slurm/prolog"), []),
        (Software(slurm="24.05.1", task_prolog="/etc/slurm/prolog"), []),
    ],
)
def test_versions_that_are_known_to_fail_are_named(software: Software, issues: list[str]) -> None:
    found = list(known_faults(software))
    assert [issue for issue in issues if any(issue in reason for reason, _ in found)] == issues
    assert len(found) == len(issues)


def test_the_version_of_pyxis_is_read_from_its_plugin(tmp_path: Path) -> None:
    plugin, configuration = tmp_path / "spank_pyxis.so", tmp_path / "plugstack.conf"
    plugin.write_bytes(b"\x7fELF\0pyxis: version 0.21.0\0")
    configuration.write_text(f"required {plugin} runtime_path=/run/pyxis\n")
    settings = {"PlugStackConfig": str(configuration)}
    assert with_pyxis(Software(slurm="25.11.1"), settings).pyxis == "0.21.0"
    plugin.write_bytes(b"\x7fELF\0glibc 2.39\0")
    assert with_pyxis(Software(slurm="25.11.1"), settings).pyxis == ""
    assert with_pyxis(Software(slurm="25.11.1"), {"PlugStackConfig": str(tmp_path / "absent")}).pyxis == ""


# ==== image ====


def image_run(directory: Path, record: str | None, **sections: Any) -> dict[str, Any]:
    """A run with an image file, and a record with these lines."""
    image = directory / "gpt.sqsh"
    image.write_bytes(b"hsqs" + bytes(96))
    if record is not None:
        mtime = int(image.stat().st_mtime)
        Path(f"{image}.record").write_text(f"sha256 abc\nsize 100\nmtime {mtime}\n{record}")
    return big_run(container={"image": str(image)}, **sections)


def images(plan: Plan) -> dict[str, Check]:
    return {check.name: check for check in containers.image_checks(plan)}


def test_the_image_is_compared_with_its_record(tmp_path: Path) -> None:
    record = "found torch 2.7.0a0, CUDA 12.8\nfound te 2.1.0\n"
    plan = planned(tmp_path, image_run(tmp_path, record))
    image = tmp_path / "gpt.sqsh"
    assert [check.state for check in images(plan).values()] == ["ok", "ok"]
    assert images(plan)["image record"].found == "torch 2.7.0a0, CUDA 12.8, te 2.1.0"
    found = read_image_record(str(image))
    assert found is not None
    assert found.cuda == "12.8"
    os.utime(image, (1, 1))
    assert images(plan)["image record"].state == "warning"
    image.write_bytes(b"hsqs")
    assert images(plan)["image record"].found == "the file has 4 bytes, and its record says 100"
    image.write_bytes(b"<html>")
    assert images(plan)["image"].state == "failed"
    Path(f"{image}.record").unlink()
    assert images(plan)["image record"].state == "warning"
    image.unlink()
    assert images(plan)["image"].state == "failed"


@pytest.mark.parametrize(
    ("version", "recipe", "is_refused"),
    [
        ("2.1.0", "tensorwise", True),
        ("2.2.0", "tensorwise", False),
        ("2.1.0", "delayed", False),
        ("", "tensorwise", False),
    ],
)
def test_an_fp8_recipe_that_the_image_lacks_is_refused_before_the_queue(
    tmp_path: Path, version: str, recipe: str, is_refused: bool
) -> None:
    record = f"found te {version}\n" if version else ""
    values = image_run(tmp_path, record, training={"fp8": "hybrid", "fp8_recipe": recipe})
    if not is_refused:
        planned(tmp_path, values)
        return
    with pytest.raises(ConfigErrors) as error:
        planned(tmp_path, values)
    [message] = error.value.messages
    assert "training.fp8_recipe = tensorwise needs Transformer Engine 2.2 or newer" in message
    assert f"has 2.1.0 ({tmp_path}/gpt.sqsh.record)" in message


@pytest.mark.parametrize(
    ("version", "training", "said"),
    [
        ("2.1.0", {}, "Transformer Engine 2.1.0 has no cross entropy"),
        ("2.10.0", {"z_loss_coeff": 1e-4}, "in Transformer Engine 2.10.0, its gradients are wrong if tokens"),
        ("2.10.0", {}, ""),
        ("2.11.0", {"z_loss_coeff": 1e-4}, ""),
    ],
)
def test_a_cross_entropy_that_the_image_lacks_or_computes_wrongly_is_refused_before_the_queue(
    tmp_path: Path, version: str, training: dict[str, float], said: str
) -> None:
    values = image_run(
        tmp_path, f"found te {version}\n", training={"cross_entropy_fusion_impl": "te", **training}
    )
    if not said:
        planned(tmp_path, values)
        return
    with pytest.raises(ConfigErrors) as error:
        planned(tmp_path, values)
    [message] = error.value.messages
    assert (
        f"training.cross_entropy_fusion_impl = te is not possible in the image {tmp_path}/gpt.sqsh" in message
    )
    assert said in message


# ==== storage ====


def test_paths_and_space_are_compared_with_the_plan(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    there = dataclasses.replace(plan.config.paths, run_dir=str(tmp_path / "run"))
    config = dataclasses.replace(plan.config, paths=there)
    stage = dataclasses.replace(plan.stages["train"], secrets=("WANDB_API_KEY",))
    found = bad(storage.checks(dataclasses.replace(plan, config=config, stages={"train": stage})))
    assert found["secrets"] == ("failed", "not set in this shell: WANDB_API_KEY")
    assert found["required paths"][0] == "warning"
    assert "/shared/images/gpt.sqsh" in found["required paths"][1]
    assert found["disk"][0] == "failed"
    assert "6 checkpoints take 14.7 TB (quotas are not seen)" in found["disk"][1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_directory_without_write_access_is_named(plan: Plan) -> None:
    paths = dataclasses.replace(plan.config.paths, run_dir="/proc/run")
    config = dataclasses.replace(plan.config, paths=paths)
    assert bad(storage.checks(dataclasses.replace(plan, config=config)))["run directory"][0] == "failed"
