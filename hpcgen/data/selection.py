"""Which files of a source make the corpus: by their names, into splits, and a sample of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgspec

from hpcgen.config.corpus import SPLITS, WHOLE, CorpusConfig, has_own_splits
from hpcgen.data.listed_files import SUFFIXES, problems
from hpcgen.data.manifest import ManifestFile
from hpcgen.errors import ConfigErrors, HpcgenError, Mistake
from hpcgen.text import counted, few


@dataclass(frozen=True)
class Selection:
    """The files of a corpus."""

    files: Sequence[ManifestFile]
    """With their splits, in the order of the source."""
    not_data: int
    """Files whose names do not end as data does, where no patterns say what to take."""
    not_included: int
    """Files that no pattern of `include` names."""
    in_no_split: Sequence[str]
    """Names that no pattern of `splits` names."""
    not_sampled: int
    """Files that the sample leaves out."""


def select(files: Sequence[ManifestFile], corpus: CorpusConfig, source: str) -> Selection:
    """What `corpus` takes of the files of its source.

    Raises:
        ConfigErrors: everything that is wrong with the names and sizes of what would be taken.
        HpcgenError: nothing would be taken, or a sample cannot have a file of each split.
    """
    included = [file for file in files if _is_included(file.name, corpus)]
    if not included:
        wanted = (
            f"matches {few([repr(text) for text in corpus.include])}" if corpus.include else "is JSON Lines"
        )
        raise HpcgenError(f"{source}: of {counted(len(files), 'file')} none {wanted}", _what_there_is(files))
    in_splits, in_no_split = _by_split(included, corpus)
    wrong = list(problems(in_splits))
    if empty := [repr(file.name) for file in in_splits if file.size == 0]:
        hint = "fetch them again, or leave them out with data.corpus.include"
        wrong.append((f"{counted(len(empty), 'file')} of 0 bytes: {few(empty)}", hint))
    if wrong:
        raise ConfigErrors([Mistake.at(source, reason, hint) for reason, hint in wrong])
    taken = _sample(in_splits, corpus)
    left_out = len(files) - len(included)
    return Selection(
        files=taken,
        not_data=0 if corpus.include else left_out,
        not_included=left_out if corpus.include else 0,
        in_no_split=in_no_split,
        not_sampled=len(in_splits) - len(taken),
    )


def matches(name: str, pattern: str) -> bool:
    """Whether the whole of `name` fits: * and ? also stand for slashes, `**/` for any number of folders, even none.

    [abc] is one of these characters, and case matters: the rules of Python's fnmatch, which huggingface_hub's
    allow_patterns follows too.
    """
    return any(fnmatchcase(name, variant) for variant in _variants(pattern))


def _variants(pattern: str) -> list[str]:
    """`pattern` for fnmatch, which does not know that `**/` may be nothing."""
    head, folders, rest = pattern.partition("**/")
    if not folders:
        return [pattern]
    return [head + middle + variant for variant in _variants(rest) for middle in ("", "*/")]


def _what_there_is(files: Sequence[ManifestFile]) -> str:
    """The hint where nothing fits."""
    names = [file.name for file in files]
    if any(name.endswith(".parquet") for name in names):
        return "make JSON Lines of its Parquet files, and name their directory as the source"
    return f"its files are {few(names)}" if names else "it is empty"


def _is_included(name: str, corpus: CorpusConfig) -> bool:
    if not corpus.include:
        return name.endswith(SUFFIXES)
    return any(matches(name, pattern) for pattern in corpus.include)


def _by_split(files: Sequence[ManifestFile], corpus: CorpusConfig) -> tuple[list[ManifestFile], list[str]]:
    """The files with their splits, and the names of those that are in none."""
    if not has_own_splits(corpus):
        return [msgspec.structs.replace(file, split=WHOLE) for file in files], []
    found: list[ManifestFile] = []
    in_none: list[str] = []
    in_two: list[str] = []
    used: Counter[str] = Counter()
    for file in files:
        splits = [
            split
            for split in SPLITS
            if any(matches(file.name, pattern) for pattern in getattr(corpus.splits, split))
        ]
        used.update(splits)
        if not splits:
            in_none.append(file.name)
        elif len(splits) > 1:
            in_two.append(f"{file.name} ({' and '.join(splits)})")
        else:
            found.append(msgspec.structs.replace(file, split=splits[0]))
    if in_two:
        raise HpcgenError(
            f"data.corpus.splits: in two splits at once: {few(in_two)}",
            "give patterns that have no file in common",
        )
    for split in SPLITS:
        if getattr(corpus.splits, split) and not used[split]:
            raise HpcgenError(
                f"data.corpus.splits.{split} = {few([repr(text) for text in getattr(corpus.splits, split)])} "
                "matches no file",
                f"the files are {few([file.name for file in files])}",
            )
    return found, in_none


def _sample(files: Sequence[ManifestFile], corpus: CorpusConfig) -> list[ManifestFile]:
    by_split: dict[str, list[int]] = {}
    for index, file in enumerate(files):
        by_split.setdefault(file.split, []).append(index)
    total = len(files)
    if corpus.sample_files is not None:
        total = corpus.sample_files
    elif corpus.sample_fraction is not None:
        total = max(len(by_split), round(len(files) * corpus.sample_fraction))
    sizes = sample_sizes({split: len(indices) for split, indices in by_split.items()}, total)
    taken = [
        indices[place]
        for split, indices in by_split.items()
        for place in evenly_spread(len(indices), sizes[split])
    ]
    return [files[index] for index in sorted(taken)]


def sample_sizes(counts: Mapping[str, int], total: int) -> dict[str, int]:
    """How many of `total` files each split gives, in proportion to the files it has, at least one each.

    Raises:
        HpcgenError: there are more splits than files to take.
    """
    if total >= sum(counts.values()):
        return dict(counts)
    if total < len(counts):
        raise HpcgenError(
            f"a sample of {counted(total, 'file')} cannot have one of each of {', '.join(counts)}",
            f"use a data.corpus.sample_files of {len(counts)} or more, or a larger sample_fraction",
        )
    taken = dict.fromkeys(counts, 1)
    for _ in range(total - len(counts)):
        # the split that is furthest below its share (the method of Webster, as seats go to parties)
        open_splits = [split for split in counts if taken[split] < counts[split]]
        taken[min(open_splits, key=lambda split: (2 * taken[split] + 1) / counts[split])] += 1
    return taken


def evenly_spread(count: int, taken: int) -> list[int]:
    """`taken` of `count` indices: the middles of `taken` runs of about equal length."""
    return [(2 * index + 1) * count // (2 * taken) for index in range(taken)]
