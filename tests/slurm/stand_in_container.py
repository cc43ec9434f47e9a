#!/usr/bin/env python3
"""Stand-ins for apptainer and for srun with CSCS's container engine, where neither can be installed.

They are written after Apptainer's source (internal/pkg/util/env/create.go) and cscs-docs (container-engine/edf.md): a
variable of the image wins over one of the host, and $(...) in a value is run without --no-eval. Each notes in
STAND_IN_LOG how it was called. There is no container: the command runs on the host.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import tomllib

IMAGE = {"NCCL_DEBUG": "IMAGE", "GREETING": "IMAGE", "OF_IMAGE": "1"}
"""What the image sets."""


def note(**what: object) -> None:
    """Appends a line to the log."""
    with Path(os.environ["STAND_IN_LOG"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps(what) + "\n")


def apptainer(words: list[str]) -> None:
    """`apptainer exec OPTION... IMAGE COMMAND...`."""
    count = next(index for index, word in enumerate(words) if index and not word.startswith("-"))
    options, image, command = words[1:count], words[count], words[count + 1 :]
    prefix = "APPTAINERENV_"
    given = {
        name.removeprefix(prefix): value for name, value in os.environ.items() if name.startswith(prefix)
    }
    if "--no-eval" not in options:
        given = {
            name: subprocess.run(["sh", "-c", f'printf %s "{value}"'], capture_output=True, text=True).stdout
            for name, value in given.items()
        }
    own = {name: os.environ[name] for name in os.environ if name.startswith("APPTAINER_")}
    note(words=words, image=image, own=own, exists=Path(image).is_file())
    host = {name: value for name, value in os.environ.items() if not name.startswith("APPTAINER")}
    os.chdir(next(word.partition("=")[2] for word in options if word.startswith("--pwd=")))
    os.execvpe(command[0], command, {**host, **IMAGE, **given})


def srun(words: list[str]) -> None:
    """srun with the engine's option --environment. Other steps are as they are."""
    program = os.environ["REAL_SRUN"]
    chosen = [index for index, word in enumerate(words) if word.startswith("--environment=")]
    if not chosen:
        os.execv(program, [program, *words])
    index = chosen[-1]
    file = Path(words[index].partition("=")[2])
    environment = tomllib.loads(file.read_text(encoding="utf-8"))
    note(words=words, file=str(file), mode=stat.S_IMODE(file.stat().st_mode), environment=environment)
    image = [f"{name}={value}" for name, value in IMAGE.items()]
    os.execv(
        program, [program, *words[:index], "env", "-C", environment["workdir"], *image, *words[index + 1 :]]
    )


if __name__ == "__main__":
    {"apptainer": apptainer, "srun": srun}[Path(sys.argv[0]).name](sys.argv[1:])
