"""Checks of a corpus that read the first documents of its files before a job does.

Not read: files that are not downloaded yet, files removed after `extract`, and Parquet files without the extra
`parquet`.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcgen.config.corpus import WHOLE, CorpusJob, num_outputs
from hpcgen.data.assignment import Share, assign
from hpcgen.data.documents import document_reader, documents
from hpcgen.data.hashed_files import CheckedFile
from hpcgen.data.jsonl import Texts
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest
from hpcgen.data.stages.download import source_input
from hpcgen.data.suffixes import PARQUET
from hpcgen.data.unit_checker import UnitChecker
from hpcgen.errors import HpcgenError, Problem
from hpcgen.text import counted, few
from trainer.chats.memory import limited_memory
from trainer.contract.files import git_lfs

_SHORT_FILE_BLOCKS = 2
"""A file with more blocks of about 4 MiB has enough documents for any usual number of outputs."""
_SMALL_CORPUS = 64 * 1024 * 1024
"""Maximum size in bytes of a corpus whose documents are counted to check data.split. Only small corpora can fail this
check."""


@limited_memory()  # the templates of chats run here
def check_first_documents(job: CorpusJob, manifest: Manifest) -> None:
    """Checks that documents can be read, and that each file has enough of them for the outputs that it feeds.

    Reads the beginning of the first and the last file, and at least one file of each output, up to 8 MiB of each. Very
    small files may be pointers of git-lfs, so their first bytes are read.

    Raises:
        HpcgenError: a file differs from the manifest, is damaged or a pointer of git-lfs, has a bad document that is
            not to be skipped, or is too small for the number of outputs.
    """
    if pointers := list(filter(None, map(_pointer_problem, manifest.files))):
        first, *others = pointers
        more = f" (and {counted(len(others), 'more pointer')})" if others else ""
        raise HpcgenError(replace(first, reason=f"{first.reason}{more}"))
    for file in (manifest.files[0], manifest.files[-1]):
        next(_texts(file, job), None)
    for split, count in num_outputs(job.corpus).items():
        _check_count(split, count, manifest.of_split(split), job)


def _pointer_problem(file: ManifestFile) -> Problem | None:
    is_small = file.path is not None and (file.size or 0) <= git_lfs.MAX_BYTES
    return git_lfs.pointer_problem(Path(str(file.path))) if is_small else None


@limited_memory()
def documents_of_pairs(job: CorpusJob, manifest: Manifest) -> list[int] | None:
    """Number of documents with text in each pair of a small corpus that is split by documents; None for others."""
    files = manifest.of_split(WHOLE)
    if sum(file.size or 0 for file in files) > _SMALL_CORPUS:
        return None
    counts = list[int]()
    for share in assign([file.size for file in files], num_outputs(job.corpus)[WHOLE]):
        lines = [_lines_with_text(files[index], job) for index in share.inputs]
        known = [numbers for numbers in lines if numbers is not None]
        if len(known) < len(lines):
            return None
        outputs = len(share.outputs)
        counts += np.bincount(np.concatenate(known) % outputs, minlength=outputs).tolist()
    return counts


def _check_count(split: str, count: int, files: list[ManifestFile], job: CorpusJob) -> None:
    """Refuses more outputs than the files of a split have documents for."""
    lines_of = functools.cache(functools.partial(_lines_with_text, job=job))

    def is_filled(share: Share) -> bool:
        """Returns whether each output of the share gets a document with text, as far as short files tell."""
        outputs = len(share.outputs)
        found = (lines_of(files[index]) for index in share.inputs)
        return any(lines is None or len(np.unique(lines % outputs)) == outputs for lines in found)

    def unfilled(count: int) -> Share | None:
        shares = assign([file.size for file in files], count)
        return next((share for share in shares if not is_filled(share)), None)

    if (share := unfilled(count)) is None:
        return
    paths = [str(source_input(job.directory, files[index]).path) for index in share.inputs]
    documents_with_text = sum(
        len(lines) for index in share.inputs if (lines := lines_of(files[index])) is not None
    )
    if unfilled(1):
        raise HpcgenError(f"{few(paths)}: no document has text", "leave out files without text")
    most = 1 + bisect_left(range(2, count), True, key=lambda number: unfilled(number) is not None)
    key = "num_output_files" if split in ("train", WHOLE) else "num_eval_output_files"
    raise HpcgenError(
        f"data.corpus.{key} = {count} is too many: {counted(len(share.outputs), 'pair')} would be made of "
        f"{counted(documents_with_text, 'document')} with text in {few(paths, 1)}",
        f"use at most {most}",
    )


def _lines_with_text(file: ManifestFile, job: CorpusJob) -> NDArray[np.int64] | None:
    """Numbers of the lines with text in a short file; None for a file that is long or cannot be read here."""
    found = list(itertools.islice(_texts(file, job), _SHORT_FILE_BLOCKS + 1))
    if not found or len(found) > _SHORT_FILE_BLOCKS:
        return None
    return np.concatenate([part.lines[[bool(text) for text in part.texts]] for part in found])


def _texts(file: ManifestFile, job: CorpusJob) -> Iterator[Texts]:
    """Yields the documents of a file, in blocks. Yields nothing if the file cannot be read, or can no longer be read.

    Raises:
        HpcgenError: the file is damaged or differs from the manifest, or a document is bad and is not to be skipped.
    """
    item = source_input(job.directory, file)
    if item.maker is not None and UnitChecker(job).done_record(item.maker) is None:
        return
    if not item.path.exists() or (
        item.path.suffix == PARQUET and importlib.util.find_spec("pyarrow") is None
    ):
        return
    read = document_reader(job.corpus, job.tokenizer)
    with CheckedFile(item) as source:
        yield from map(read, documents(item, source, job.corpus))
