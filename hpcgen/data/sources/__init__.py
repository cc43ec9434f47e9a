"""Where the files of a corpus come from. Each module lists one kind of source; none of them fetches data.

A new kind also needs its keys in `hpcgen.config.corpus`, and `hpcgen.data.download` fetches http and https alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.sources.listing import Listing
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.data.unit import DataStage, Unit


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


def check_source(left: Mapping[DataStage, Sequence[Unit]], job: CorpusJob) -> None:
    """Looks for the first and the last of the source's files that the units `left` of each stage will read.

    For the moment before arrays are submitted: what is wrong then is one message, and not one from each of their
    tasks. Servers are asked for files to download; files that lie in a directory have to be there.

    Raises:
        HpcgenError: one of the two is gone or refused, or the server does not answer.
    """
    for units in left.values():
        own = [item for unit in units for item in unit.inputs if item.made_by is None and unit.url is None]
        for item in (*own[:1], *own[-1:]):
            item.require()
    if downloads := left.get("download"):
        from hpcgen.data.sources.url import probe

        ends = dict.fromkeys((downloads[0].url, downloads[-1].url))
        probe([url for url in ends if url], job.corpus.source.token_variable)
