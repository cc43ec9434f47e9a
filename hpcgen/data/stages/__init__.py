"""The data stages: steps from a corpus's files to its .bin/.idx pairs, one module for each.

To add a stage, add its module, its object in DATA_STAGES, its row in hpcgen/config/stages.py and its template. The row
makes it a job too (hpcgen/stages/data.py).

Layout of the corpus's directory:
    manifest.jsonl            frozen list of files
    download/NAME             as in the source
    extract/NAME              as plain JSON Lines, without .zst or .gz; plain .jsonl files are not copied
    concat/train-00000-of-00072.jsonl
    tokens/train-00000-of-00072.bin, .idx
The record of a unit (hpcgen.data.record) is next to its first output and shows whether the unit is done. Outputs for
another num_output_files have other names. They are kept because they may be in use, as are outputs of files that a
new manifest drops. No stage reads them, and they may be removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.stages.base import DataStage
from hpcgen.data.stages.concat import CONCAT
from hpcgen.data.stages.download import DOWNLOAD
from hpcgen.data.stages.extract import EXTRACT
from hpcgen.data.stages.prepare import PREPARE
from hpcgen.data.stages.tokenize import TOKENIZE
from hpcgen.data.unit import Unit

if TYPE_CHECKING:
    from hpcgen.data.manifest import Manifest

DATA_STAGES: Mapping[str, DataStage] = {
    stage.name: stage for stage in (DOWNLOAD, EXTRACT, CONCAT, TOKENIZE, PREPARE)
}
"""All data stages by name, in the order in which they run."""

PAIR_STAGES = tuple(stage for stage in DATA_STAGES.values() if stage.makes_pairs)
"""Stages that produce pairs."""

ROUTES = tuple(sorted((stage.route for stage in PAIR_STAGES), key=len))
"""Each sequence of stages from the source to pairs, shortest first."""


def units(stage: str, job: CorpusJob, manifest: Manifest) -> list[Unit]:
    """All units of a stage, in the order of the manifest. `units_of_task` assigns them to tasks.

    Raises:
        HpcgenError: the manifest has no file for a split of the configuration.
    """
    return list(DATA_STAGES[stage].units(job, manifest))


def configuration(stage: str, job: CorpusJob) -> str:
    """Hash of all settings that determine the bytes of a stage's outputs."""
    return DATA_STAGES[stage].configuration(job)
