"""Large files on Lustre: a script stripes the directories that it makes, and leaves alone those that are there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpcgen import load_run, plan, render
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest, manifest_path, write_manifest
from tests.runs import minimal_run, write_yaml
from tests.standins import batch

pytestmark = pytest.mark.process

LFS = """\
#!/bin/bash
# Stands for Lustre's client program, which only notes how it was called.
echo "$*" >>"${0%/*}/called"
[[ ! -e ${0%/*}/elsewhere ]]
"""


def test_a_new_directory_is_striped_once(tmp_path: Path, stand_in: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "standins").mkdir()
    lfs = tmp_path / "standins" / "lfs"
    lfs.write_text(LFS)
    lfs.chmod(0o755)
    stripe = {"count": 4, "size": "16M"}
    write_yaml(tmp_path / "site.yaml", {"extends": "local", "python": stand_in, "stripe": stripe})
    data = {"tokenizer": {"kind": "bytes"}, "corpus": corpus_of_two_files(tmp_path)}
    values = minimal_run(cluster="./site.yaml", paths={"run_dir": "runs"}, data=data)
    script = render(plan(load_run(write_yaml(tmp_path / "run.yaml", values)), ["prepare"]), "prepare")
    for job_id in (1, 2):
        done = batch(script, tmp_path, job_id=job_id)
        assert done.status == 0, done.log
    assert (tmp_path / "corpus" / "tokens" / "corpus-00000-of-00001.bin").exists()
    called = (tmp_path / "standins" / "called").read_text().splitlines()
    assert called == [f"setstripe -E -1 -c 4 -S 16M {tmp_path}/corpus/tokens"]
    shutil.rmtree(tmp_path / "corpus" / "tokens")
    (tmp_path / "standins" / "elsewhere").touch()
    done = batch(script, tmp_path, job_id=3)
    assert done.status == 0, done.log
    assert f"{tmp_path}/corpus/tokens is not striped: it is not on Lustre" in done.log


def corpus_of_two_files(directory: Path) -> dict[str, object]:
    """A corpus with its manifest, as a run file names it."""
    text = directory / "text"
    text.mkdir()
    for name in ("a", "b"):
        (text / f"{name}.jsonl").write_text(json.dumps({"text": f"some words of {name}"}) + "\n")
    (directory / "corpus").mkdir()
    files = [ManifestFile(name=path.name, split="corpus", path=str(path)) for path in sorted(text.iterdir())]
    write_manifest(Manifest("two files", files), manifest_path(directory / "corpus"))
    return {"directory": "corpus", "source": {"directory": "text"}, "num_output_files": 1}
