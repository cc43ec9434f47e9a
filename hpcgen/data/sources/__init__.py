"""Where the files of a corpus come from. Each module lists one kind of source; none of them fetches data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.manifest import Manifest
from hpcgen.data.sources.listing import Listing
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.data.unit import Unit


def list_source(job: CorpusJob) -> Listing:
    """Every file of the corpus's source, in the order that the manifest freezes.

    Raises:
        HpcgenError: the source is gone, refuses us, or does not answer; or a list of files is wrong.
    """
    source = job.corpus.source
    # imported where they are used: a directory needs neither a hub's client nor a web client
    if source.directory is not None:
        from hpcgen.data.sources.directory import list_directory

        return list_directory(Path(source.directory), besides=job.directory)
    if source.manifest is not None:
        from hpcgen.data.sources.file_list import read_file_list

        return read_file_list(Path(source.manifest), has_token=source.token_variable is not None)
    if source.huggingface is not None:
        from hpcgen.data.sources.hub import list_repository

        return list_repository(source.huggingface, source.token_variable)
    if source.url is not None:
        from hpcgen.data.sources.url import list_urls

        return list_urls(source.url, source.token_variable)
    raise HpcgenError("data.corpus.source names no source", "give huggingface, url, directory or manifest")


def check_source(job: CorpusJob, manifest: Manifest) -> None:
    """Asks the server for the first and the last file that are not downloaded yet; for nothing where none is missing.

    For the moment before an array of downloads is submitted: what is wrong then is one message, and not one from
    each of its tasks.

    Raises:
        HpcgenError: one of the two is gone, refused, or the server does not answer.
    """
    from hpcgen.data.unit import configuration, done_record, units

    downloads = units("download", job, manifest)
    of_configuration = configuration("download", job)

    def is_missing(unit: Unit) -> bool:
        return done_record(unit, job, of_configuration) is None

    first = next(filter(is_missing, downloads), None)
    if first is None:
        return
    last = next(filter(is_missing, reversed(downloads)))

    from hpcgen.data.sources.url import probe

    probe([url for url in dict.fromkeys((first.url, last.url)) if url], job.corpus.source.token_variable)
