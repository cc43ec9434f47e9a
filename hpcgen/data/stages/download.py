"""The download stage: fetches one file of the corpus from its server, complete and with the right hash, or fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.progress import Step
from hpcgen.data.record import FileIdentity, Record, publish_unit, write_record
from hpcgen.data.stages.base import Bounds, Context, DataStage
from hpcgen.data.stores import store_modules, store_of
from hpcgen.data.stores.base import Wanted
from hpcgen.data.stores.local import refuse_in_shared_corpus
from hpcgen.data.unit import Input, Unit, made_input
from hpcgen.data.urls import url_problem
from hpcgen.errors import HpcgenError
from trainer.contract.files.hashing import rest_sha256
from trainer.contract.files.regular_file import open_regular

if TYPE_CHECKING:
    from hpcgen.data.listed_files import ManifestFile
    from hpcgen.data.manifest import Manifest


class Download(DataStage):
    """The stage download, whose units are the files with a URL."""

    name = "download"
    folder = "download"
    downloads = True

    def units(self, job: CorpusJob, manifest: Manifest) -> Iterator[Unit]:
        """A unit for each file with a URL."""
        return (self.unit(job.directory, file) for file in manifest.files if file.url is not None)

    def unit(self, directory: Path, file: ManifestFile) -> Unit:
        """The unit that downloads a file. `directory` is the corpus's directory."""
        output = f"{self.folder}/{file.name}"
        wanted = Input(
            name=file.name,
            path=directory / output,
            size=file.size,
            sha256=file.sha256,
            version=file.version,
            url=file.url,
        )
        return Unit(stage=self.name, inputs=(wanted,), outputs=(output,))

    def make(self, unit: Unit, job: CorpusJob, context: Context) -> Record:
        """Downloads a file and publishes it with its record.

        An existing file with the size and hash of the manifest is kept as it is. Downloads by other tools are thus
        accepted.

        Raises:
            HpcgenError: the store denies access, sends other content, or fails too often; or the disk is full.
        """
        from hpcgen.data.transfer import fetched  # only tasks need it

        started = time.monotonic()
        [item], target = unit.inputs, job.directory / unit.name
        assert item.url is not None
        if problem := url_problem(item.url, "its URL"):
            raise HpcgenError(problem, "run hpcgen data plan again", where=item.name)
        refuse_in_shared_corpus([item.url], job.share)
        wanted = Wanted(
            name=item.name, url=item.url, size=item.size, sha256=item.sha256, version=item.version
        )

        def advance(num_bytes: int) -> None:
            context.advance(Step(bytes=num_bytes))

        def recorded(size: int, sha256: str) -> Record:
            return Record(
                stage=self.name,
                configuration=context.configuration,
                inputs=(FileIdentity(item.name, item.size, sha256, item.modified_ns, item.version),),
                outputs=(FileIdentity(unit.name, size, sha256),),
                seconds=time.monotonic() - started,
            )

        try:
            if item.sha256 and (size := _size_when_present(target, item, advance)) is not None:
                record = recorded(size, item.sha256)
                write_record(record, target)
                return record
            store = store_of(item.url, job.corpus.source.token_variable)
            with fetched(wanted, target, store, advance) as part:
                record = recorded(part.size, part.sha256)
                publish_unit([(part.file, target)], record, target)
        except OSError as error:
            raise HpcgenError(f"cannot write {target}: {error.strerror}") from error
        return record

    def modules(self, units: Sequence[Unit]) -> Iterator[str]:
        """The module for partial downloads, and the modules of the stores."""
        yield "hpcgen.data.transfer"
        yield from store_modules(item.url for unit in units for item in unit.inputs if item.url)

    def growth(self, file: ManifestFile) -> Bounds:
        """A copy of each file on a server."""
        return (0.0, 0.0) if file.url is None else (1.0, 1.0)

    def certain_bytes(self, item: Input) -> int:
        """The size in the manifest."""
        return item.size or 0

    def num_workers(self, job: CorpusJob) -> int:
        """A worker for each connection, because they mostly wait."""
        return job.corpus.download_connections


DOWNLOAD = Download()


def source_input(directory: Path, file: ManifestFile) -> Input:
    """A file of the corpus after download, or in place if it is local. `directory` is the corpus's directory."""
    if file.path is not None:
        return Input(
            name=file.name,
            path=Path(file.path),
            size=file.size,
            sha256=file.sha256,
            modified_ns=file.modified_ns,
        )
    maker = DOWNLOAD.unit(directory, file)
    return made_input(directory, maker, maker.name, size=file.size, sha256=file.sha256)


def _size_when_present(target: Path, wanted: Input, advance: Callable[[int], None]) -> int | None:
    """Size of the file at `target` if it has the size and the hash of `wanted`, otherwise None."""
    try:
        with open_regular(target, buffering=0) as file:
            if wanted.size not in (None, os.fstat(file.fileno()).st_size):
                return None
            digest, size = rest_sha256(file)
    except FileNotFoundError:
        return None
    if digest != wanted.sha256:
        return None
    advance(size)
    return size
