"""Sources of a corpus's files. Each module lists one kind of source; none of them downloads data.

A new kind also needs keys in `hpcgen.config.corpus`. `hpcgen.data.download` supports only http and https.
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
    """Lists every file of the corpus's source, in the order of the manifest.

    Raises:
        HpcgenError: the source is missing, denies access or does not answer; or a list of files is invalid.
    """
    source = job.corpus.source
    # Local imports: a directory needs neither the hub's client nor an HTTP client.
    if source.directory is not None:
        from hpcgen.data.sources.directory import list_directory

        return list_directory(Path(source.directory), exclude=job.directory)
    if source.manifest is not None:
        from hpcgen.data.sources.file_list import read_file_list

        return read_file_list(Path(source.manifest), has_token=source.token_variable is not None)
    if source.huggingface is not None:
        from hpcgen.data.sources.hub import list_repository

        return list_repository(source.huggingface, source.token_variable)
    if source.url is not None:
        from hpcgen.data.sources.url import list_urls

        return list_urls(source.url, source.token_variable)
    raise HpcgenError("data.corpus.source is empty", "set huggingface, url, directory or manifest")


def check_source(left: Mapping[DataStage, Sequence[Unit]], job: CorpusJob) -> None:
    """Checks that the first and the last source file of the units `left` to make in each stage are available.

    Called before arrays are submitted, so that a missing source causes one message instead of one per task. Files to
    download are requested from their server; local files must exist.

    Raises:
        HpcgenError: a file is missing, access is denied, or the server does not answer.
    """
    for units in left.values():
        own = [item for unit in units for item in unit.inputs if item.made_by is None and unit.url is None]
        for item in (*own[:1], *own[-1:]):
            item.require()
    if downloads := left.get("download"):
        from hpcgen.data.sources.url import probe

        ends = dict.fromkeys((downloads[0].url, downloads[-1].url))
        probe([url for url in ends if url], job.corpus.source.token_variable)
