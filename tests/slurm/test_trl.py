"""docs/fine-tuning.md on a real Slurm: a model learns chats, and TRL tunes it on preferences in the stage run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.chat_corpora import chat, write_chats, write_tokenizer
from tests.examples.exports import run_hpcgen
from tests.patience import wait_until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import profile_text
from tests.slurm.test_run import submit

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
QUESTIONS = {"How many legs has a spider?": "Eight.", "And an ant?": "Six."}


def write_run_file(directory: Path, name: str) -> Path:
    """A run file of the page, on the test's cluster."""
    page = (ROOT / "docs/fine-tuning.md").read_text(encoding="utf-8")
    [text] = re.findall(rf"```yaml\n(# {name}\n.*?)```", page, re.DOTALL)
    text = text.replace("cluster: local", "cluster: ./cluster.yaml").replace("python3", sys.executable)
    (directory / name).write_text(text)
    return directory / name


def write_inputs(directory: Path) -> None:
    """Starting point of the page: a tokenizer with its template, chats, preferences, and the program."""
    (directory / "cluster.yaml").write_text(profile_text())
    write_tokenizer(directory / "model")
    turns = [turn for pair in QUESTIONS.items() for turn in pair]
    write_chats(directory / "chats/part-0.jsonl", [chat(*turns)] * 300)
    lines = []
    for question, answer in QUESTIONS.items():
        [prompt, chosen] = chat(question, answer)["messages"]
        rejected = chosen | {"content": f"I believe that it is: {answer}"}
        lines.append({"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]})
    (directory / "preferences.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copy(ROOT / "examples/trl_dpo.py", directory)
    (directory / "runs/dpo").mkdir(parents=True)


def test_a_model_of_chats_is_tuned_on_preferences_with_a_killed_rank_and_a_stop(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a rank in the first attempt, the warning in the second one. The steps are those of one attempt."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    chats, dpo = (write_run_file(tmp_path, name) for name in ("chats.yaml", "dpo.yaml"))
    run_hpcgen("data", "plan", "-c", chats)
    run_hpcgen("submit", "prepare", "train", "-c", chats, "--launcher", "local")
    run_hpcgen("checkpoint", "export", "runs/chats", "--to", "sft", "-c", chats)
    job_id = submit(slurm_cluster, dpo, "environment.OMP_NUM_THREADS=1")
    checkpoints = tmp_path / "runs/dpo/checkpoints"
    wait_until(lambda: any(checkpoints.glob("checkpoint-*/trainer_state.json")), interval_s=0.1)
    find = ["pgrep", "-f", f"^{sys.executable} trl_dpo.py .*{tmp_path}"]
    ranks = subprocess.run(find, capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    killed_at = newest(checkpoints)
    wait_until(lambda: newest(checkpoints) > killed_at, interval_s=0.1)
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    state = slurm_cluster.wait(job_id)
    log = (tmp_path / f"runs/dpo/run-{job_id}.log").read_text()
    assert state == "COMPLETED", log
    assert re.search(r"ended with status \d+ after progress to \d+: starting it again", log)
    assert "stopped with status 0 before the time limit at progress " in log
    assert "2 of 2 pairs fit in 2048 tokens" in log
    assert log.endswith("hpcgen: done at progress 20\n")
    history = json.loads((checkpoints / "checkpoint-20/trainer_state.json").read_text())["log_history"]
    steps = [line for line in history if "loss" in line]
    assert [line["step"] for line in steps] == [*range(1, 21)]
    assert steps[-1]["loss"] < steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    run_hpcgen("checkpoint", "import", "runs/dpo/model", "--to", "dpo")
    assert (tmp_path / "dpo/latest_checkpointed_iteration.txt").exists()


def newest(checkpoints: Path) -> int:
    """The newest complete step."""
    return max(
        int(path.parent.name.split("-")[1]) for path in checkpoints.glob("checkpoint-*/trainer_state.json")
    )
