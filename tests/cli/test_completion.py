from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpcgen.cli.data import SECTIONS as DATA_SECTIONS
from hpcgen.cli.main import SECTIONS
from hpcgen.config.presets import PRESETS
from tests.cli.command import hpcgen


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell):
    found = hpcgen("completion", shell)
    assert (found.status, found.stderr) == (0, "")
    assert "_HPCGEN_COMPLETE" in found.stdout


@pytest.mark.process
def test_bash_can_read_its_script():
    script = hpcgen("completion", "bash").stdout
    assert (
        subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""
    )


def completions(words: str) -> set[str]:
    """Completions of the last word that bash would offer, through click's protocol."""
    environment = {**os.environ, "_HPCGEN_COMPLETE": "bash_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(words.count(" "))
    program = "import sys; from hpcgen.cli.main import main; sys.argv = ['hpcgen']; main()"
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert found.stderr == ""
    return {line.partition(",")[2] for line in found.stdout.splitlines()}


@pytest.mark.process
def test_commands_presets_and_clusters_complete():
    assert completions("hpcgen ") == set().union(*SECTIONS.values())
    assert completions("hpcgen init --preset llama") == {name for name in PRESETS if name.startswith("llama")}
    assert completions("hpcgen init --cluster az") == {"azure-ndv5"}
    assert completions("hpcgen render t") == {"tokenize", "train", "tensorboard", "tune"}
    assert completions("hpcgen submit p") == {"prepare"}
    assert completions("hpcgen env index") == {"index-cache"}


@pytest.mark.process
def test_the_commands_of_a_group_complete():
    assert completions("hpcgen data ") == set().union(*DATA_SECTIONS.values())
    assert completions("hpcgen data prepare --num-") == {"--num-tasks"}
