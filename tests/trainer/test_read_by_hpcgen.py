"""`hpcgen report` and `hpcgen checkpoint` read the trainer's files without torch."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.runs import GPT, Run

pytestmark = pytest.mark.process

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from hpcgen.cli.main import main; main()"


def hpcgen(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_report_of_a_real_run(single_gpt: Run, tmp_path: Path) -> None:
    [summary] = json.loads(hpcgen("report", single_gpt.directory, "--json", "-o", tmp_path / "report.html"))
    last = single_gpt.steps[-1]
    assert (summary["state"], summary["iteration"], summary["train_iters"]) == ("done", last[0], 6)
    assert summary["loss"] == pytest.approx(last[1])
    assert summary["consumed_tokens"] == 6 * 4 * GPT["seq_length"]
    assert summary["checkpoints"] == 1
    assert {"data_wait", "communication", "update", "idle"} == summary["shares"].keys()
    assert 0 < summary["productive_share"] <= 1
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for chart in ("loss", "grad-norm", "lr", "tokens", "flops", "shares", "memory", "checkpoints"):
        assert f'<figure class="card" id="{chart}">' in page


def test_a_report_shows_the_configuration_that_trained(single_gpt: Run, tmp_path: Path) -> None:
    """In the second copy, a later job with another model was refused."""
    copies = [tmp_path / name / "run" for name in ("first", "second")]
    for copy in copies:
        shutil.copytree(single_gpt.directory, copy)
    other = json.loads((copies[1] / "config.json").read_text())
    other["model"]["num_layers"], other["optimizer"]["lr"] = 2, 5e-2
    later = copies[1] / "jobs" / "local-2" / "trainer.json"
    later.parent.mkdir(parents=True)
    later.write_text(json.dumps(other))
    hpcgen("report", *copies, "-o", tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert '"num_layers": 4' in page
    assert '"num_layers": 2' not in page
    assert "Configuration differences" not in page


def test_a_real_checkpoint(single_gpt: Run, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(single_gpt.checkpoints, checkpoints)
    found = json.loads(hpcgen("checkpoint", "inspect", checkpoints, "--verify", "--tensors", "--json"))
    assert (found["iteration"], found["is_complete"], found["verified"], found["problems"]) == (
        6,
        True,
        True,
        [],
    )
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert tensors["embedding.word_embeddings.weight"]["shape"] == [1024, GPT["hidden_size"]]
    assert tensors["decoder.layers.mlp.linear_fc1.weight"]["shape"] == [4, 256, 64]
    assert {tensor["dtype"] for tensor in tensors.values()} == {"float32"}
    text = hpcgen("checkpoint", "inspect", checkpoints, "--tensors")
    assert "consumed    24 samples, 1,536 tokens\n" in text
    assert "embedding.word_embeddings.weight " in text
    hpcgen("checkpoint", "pin", checkpoints / "iter_0000006")
    [entry] = json.loads(hpcgen("checkpoint", "list", checkpoints, "--json"))
    assert (entry["state"], entry["is_pinned"], entry["kept_by"]) == ("complete", True, "pinned")
