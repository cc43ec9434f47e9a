"""Sources of a corpus's files. Each module lists one kind of source; none of them downloads data.

A new kind also needs keys in `hpcgen.config.corpus`. Files with URLs are downloaded from `hpcgen.data.stores`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.concurrent_map import concurrent_map
from hpcgen.data.listed_files import Listing
from hpcgen.data.sources.directory import list_directory
from hpcgen.data.sources.file_list import read_file_list
from hpcgen.data.sources.url import list_urls, probe
from hpcgen.errors import HpcgenError
from hpcgen.text import counted

if TYPE_CHECKING:
    from hpcgen.data.unit import Unit


def list_source(job: CorpusJob) -> Listing:
    """Lists every file of the corpus's source, in the order of the manifest.

    Raises:
        HpcgenError: the source is missing, denies access or does not answer; or a list of files is invalid.
    """
    source = job.corpus.source
    if source.directory is not None:
        return list_directory(Path(source.directory), exclude=job.directory)
    if source.manifest is not None:
        return read_file_list(Path(source.manifest), has_token=source.token_variable is not None)
    if source.huggingface is not None:
        # needs the hub's client, which only an extra installs
        from hpcgen.data.sources.hub import list_repository

        return list_repository(source.huggingface, source.token_variable)
    if source.url is not None:
        return list_urls(source.url, source.token_variable)
    raise HpcgenError("data.corpus.source is empty", "set huggingface, url, directory or manifest")


def check_source(left: Mapping[str, Sequence[Unit]], job: CorpusJob) -> None:
    """Checks that the source files of the units `left` to make in each stage are available and unchanged.

    Called before arrays are submitted, so that a missing source causes one message instead of one per task. Local files
    must have their planned sizes and times, and the first and the last of them must exist. Of the files to download,
    the first and the last are requested from their server.

    Raises:
        HpcgenError: a file is missing or has changed, access is denied, or the server does not answer.
    """
    for units in left.values():
        own = [item for unit in units for item in unit.inputs if item.made_by is None and item.url is None]
        for item in (*own[:1], *own[-1:]):
            item.require()
        changed = [
            item
            for item, is_changed in zip(own, concurrent_map(own, lambda item: item.is_changed()), strict=True)
            if is_changed
        ]
        if changed:
            more = f" (and {counted(len(changed) - 1, 'more file')})" if len(changed) > 1 else ""
            raise HpcgenError(
                f"{changed[0].path}{more} has changed since the corpus was planned",
                "restore it, or plan again with hpcgen data plan --replan",
            )
    urls = [item.url for units in left.values() for unit in units for item in unit.inputs if item.url]
    if urls:
        probe(dict.fromkeys((urls[0], urls[-1])), job.corpus.source.token_variable)
