"""The tokenize stage: makes a pair from each file that the stage concat has made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.stages.concat import CONCAT
from hpcgen.data.stages.pairs import PairStage
from hpcgen.data.unit import Unit, made_input

if TYPE_CHECKING:
    from hpcgen.data.manifest import Manifest


class Tokenize(PairStage):
    """The stage tokenize, whose units are the concatenated files."""

    name = "tokenize"
    before = CONCAT

    def units(self, job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
        """A unit for each output of the stage concat."""
        for maker in CONCAT.units(job, manifest):
            size = maker.size // len(maker.outputs)
            for output in maker.outputs:
                item = made_input(job.directory, maker, output, size=size)
                yield self.unit(job, (item,), [PurePosixPath(output).stem])


TOKENIZE = Tokenize()
