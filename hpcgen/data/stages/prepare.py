"""The prepare stage: makes the pairs directly from the files of the corpus, compressed or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.assignment import shares
from hpcgen.data.stages.download import DOWNLOAD, source_input
from hpcgen.data.stages.pairs import PairStage
from hpcgen.data.unit import Unit

if TYPE_CHECKING:
    from hpcgen.data.manifest import Manifest


class Prepare(PairStage):
    """The stage prepare, whose units are the files of the corpus."""

    name = "prepare"
    before = DOWNLOAD
    reads_source = True

    def units(self, job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
        """A unit for each share of the corpus (see hpcgen.data.assignment.shares)."""
        for files, names in shares(job, manifest):
            inputs = tuple(source_input(job.directory, file) for file in files)
            yield self.unit(job, inputs, names)


PREPARE = Prepare()
