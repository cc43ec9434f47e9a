"""Selection of a corpus's files: by name patterns, into splits, and as a sample."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgspec

from hpcgen.config.corpus import SPLITS, WHOLE, CorpusConfig, has_own_splits
from hpcgen.data.listed_files import ManifestFile, problems
from hpcgen.data.suffixes import PARQUET, SUFFIXES
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.text import counted, few


@dataclass(frozen=True)
class Selection:
    """Selected files of a corpus, and counts of those left out."""

    files: Sequence[ManifestFile]
    """Files with their splits, in the order of the source."""
    not_data: int
    """Number of files excluded by their suffix; only without `include` patterns."""
    not_included: int
    """Number of files that match no pattern of `include`."""
    in_no_split: Sequence[str]
    """Names that match no pattern of `splits`."""
    not_sampled: int
    """Number of files that are not in the sample."""


def select(files: Sequence[ManifestFile], corpus: CorpusConfig, source: str) -> Selection:
    """Selects the files of `corpus` from the files of its source.

    Raises:
        ConfigErrors: selected files have invalid names or sizes (all of them are listed).
        HpcgenError: no file is selected, or the sample is too small for a file from each split.
    """
    included = [file for file in files if _is_included(file.name, corpus)]
    if not included:
        wanted = (
            f"matches {few([repr(text) for text in corpus.include])}"
            if corpus.include
            else "is JSON Lines or Parquet"
        )
        raise HpcgenError(
            f"{source}: no file {wanted} ({counted(len(files), 'file')} found)", _available_files(files)
        )
    _require_one_format(included, corpus, source)
    in_splits, in_no_split = _by_split(included, corpus)
    wrong = list(problems(in_splits))
    if empty := [repr(file.name) for file in in_splits if file.size == 0]:
        hint = "download them again, or exclude them with data.corpus.include"
        wrong.append(Problem("", f"{counted(len(empty), 'file')} of 0 bytes: {few(empty)}", hint))
    if wrong:
        raise ConfigErrors(dataclasses.replace(problem, where=source) for problem in wrong)
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
    """Returns whether `pattern` matches all of `name`. `*` and `?` also match slashes.

    `**/` matches zero or more directories, and `[abc]` one of these characters. Case matters. Except for `**/`, this is
    as in Python's fnmatch, which huggingface_hub's allow_patterns follows too.
    """
    return any(fnmatchcase(name, variant) for variant in _variants(pattern))


def _variants(pattern: str) -> list[str]:
    """Expands `pattern` for fnmatch, where `**/` cannot match an empty string."""
    head, folders, rest = pattern.partition("**/")
    if not folders:
        return [pattern]
    return [head + middle + variant for variant in _variants(rest) for middle in ("", "*/")]


def _available_files(files: Sequence[ManifestFile]) -> str:
    """Hint if no file is selected."""
    names = [file.name for file in files]
    return f"its files are {few(names)}" if names else "the source is empty"


def _is_included(name: str, corpus: CorpusConfig) -> bool:
    if not corpus.include:
        return name.endswith(SUFFIXES)
    return any(matches(name, pattern) for pattern in corpus.include)


def _require_one_format(files: Sequence[ManifestFile], corpus: CorpusConfig, source: str) -> None:
    """Refuses JSON Lines next to Parquet files, which are probably the same documents, unless `include` asks for both.

    Raises:
        HpcgenError: there are both.
    """
    num_parquet = sum(file.name.endswith(PARQUET) for file in files)
    if num_parquet in (0, len(files)) or corpus.include:
        return
    raise HpcgenError(
        f"{source}: {counted(len(files) - num_parquet, 'file')} of JSON Lines and {counted(num_parquet, 'file')} of "
        "Parquet, which may be the same documents",
        "set data.corpus.include to the names to use, such as ['*.parquet'], or ['*.jsonl*', '*.parquet'] for both",
    )


def _by_split(files: Sequence[ManifestFile], corpus: CorpusConfig) -> tuple[list[ManifestFile], list[str]]:
    """Returns the files with their splits, and the names of files in no split."""
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
            f"data.corpus.splits: files that match two splits: {few(in_two)}",
            "use patterns that have no file in common",
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
    """Distributes `total` sampled files over the splits, in proportion to their file counts and at least one each.

    Raises:
        HpcgenError: `total` is smaller than the number of splits.
    """
    if total >= sum(counts.values()):
        return dict(counts)
    if total < len(counts):
        raise HpcgenError(
            f"a sample of {counted(total, 'file')} cannot have a file of each split ({', '.join(counts)})",
            f"set data.corpus.sample_files to at least {len(counts)}, or use a larger sample_fraction",
        )
    taken = dict.fromkeys(counts, 1)
    for _ in range(total - len(counts)):
        # Next: the split furthest below its share (Webster's method of apportionment).
        open_splits = [split for split in counts if taken[split] < counts[split]]
        taken[min(open_splits, key=lambda split: (2 * taken[split] + 1) / counts[split])] += 1
    return taken


def evenly_spread(count: int, taken: int) -> list[int]:
    """Chooses `taken` of `count` indices: the middles of `taken` intervals of about equal length."""
    return [(2 * index + 1) * count // (2 * taken) for index in range(taken)]
