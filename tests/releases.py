"""Writes the record of a release: `make release-record` before a release is tagged.

The record holds the YAML files that hpcgen ships, the defaults of all keys, and the variables and directives that its
code sets.
`hpcgen explain --diff VERSION` reads it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.keys import defaults
from hpcgen.config.run import RunConfig
from hpcgen.resources import shipped
from hpcgen.run_plan.release import own_directives, own_variables
from hpcgen.stages import STAGES


def write_record(directory: Path) -> None:
    """Writes the record of this checkout."""
    for folder in map(shipped, ("clusters", "presets", "topologies")):
        for file in folder.rglob("*.yaml"):
            target = directory / folder.name / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    record = {
        "defaults": {"run file": defaults(RunConfig), "cluster profile": defaults(ClusterConfig)},
        "variables": {stage: own_variables(stage) for stage in STAGES},
        "directives": {stage: own_directives(stage) for stage in STAGES},
    }
    (directory / "record.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_record(Path(sys.argv[1]))
