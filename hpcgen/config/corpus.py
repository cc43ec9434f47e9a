"""The corpus of a run: where it comes from, how it is cut into output files, and where each stage writes.

`directory` of a corpus holds manifest.jsonl (the frozen list of files), download/, extract/, concat/ and tokens/.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from hpcgen.config.fields import EnvironmentName, FilePath, Text
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import Problem
from hpcgen.sharing import Share
from trainer.contract.config import FORBID_UNKNOWN_KEYS, Count, Dataset, Fraction, NonNegative

RepositoryName = Annotated[
    str,
    Text(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", "the name of a repository: owner/name"),
]
Revision = Annotated[str, Text(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", "a branch, a tag or a commit")]
UrlTemplate = Annotated[
    str,
    Text(
        r"https?://[^\s{}]+(\{index(:0?\d{1,2}d?)?\}[^\s{}]*)?",
        "an http or https address with {index} or {index:05d} where the number of the file goes",
    ),
]
Pattern = Annotated[
    str, Text(r"(?!/)(?!.*(^|/)\.\.(/|$)).{1,500}", "a pattern of names such as train/*.jsonl.zst")
]

SPLITS = ("train", "valid", "test")
WHOLE = "corpus"
"""Names the output files of a corpus that is not cut by its own files."""


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A dataset repository of the Hugging Face hub; HF_ENDPOINT names another hub."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    repo_id: RepositoryName
    """The repository: owner/name."""
    revision: Revision = "main"
    """Branch, tag or commit; planning freezes the commit that it stands for."""


@dataclass(frozen=True, kw_only=True)
class UrlSource:
    """Numbered files of a web server."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    template: UrlTemplate
    """The address, with {index} or {index:05d} where the number goes."""
    first: NonNegative = 0
    """The first number."""
    count: Count = 1
    """How many files there are."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where the files of a corpus come from: exactly one of four ways."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    huggingface: HubSource | None = None
    """First way: a dataset repository of the Hugging Face hub."""
    url: UrlSource | None = None
    """Second way: numbered files of a web server."""
    directory: FilePath | None = None
    """Third way: a directory of files that are there already."""
    manifest: FilePath | None = None
    """Fourth way: a list of files, a JSON object per line: name, url or path, and size and sha256 where known."""
    token_variable: EnvironmentName | None = None
    """Environment variable that holds the token for hub or server; its value is never written."""


@dataclass(frozen=True, kw_only=True)
class SplitPatterns:
    """The corpus's own files for each split, by patterns of their names; all empty splits by documents."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    train: tuple[Pattern, ...] = ()
    """Files to train on."""
    valid: tuple[Pattern, ...] = ()
    """Files to validate on."""
    test: tuple[Pattern, ...] = ()
    """Files to test on."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """A corpus from its source to .bin/.idx pairs."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    directory: FilePath
    """Directory of the manifest and of everything that the stages make, on storage that every node sees."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """Where the files come from."""
    include: tuple[Pattern, ...] = ()
    """Patterns of the names to take; empty takes every .jsonl, .jsonl.zst and .jsonl.gz."""
    splits: SplitPatterns = field(default_factory=SplitPatterns)
    """Which of the corpus's own files are for training, validation and test."""
    sample_files: Count | None = None
    """Take only this many files, spread evenly over the corpus; null takes all."""
    sample_fraction: Fraction | None = None
    """Take only this share of the files, spread evenly over the corpus; null takes all."""
    num_output_files: Count = 72
    """Number of .bin/.idx pairs of the training files (of the whole corpus, where `splits` is empty)."""
    num_eval_output_files: Count = 1
    """Number of .bin/.idx pairs of the validation files, and of the test files, each."""
    json_key: str = "text"
    """Key of the text in each JSON object."""
    drop_empty: bool = False
    """Leave out documents without text; false writes them as Megatron-LM does."""
    bad_documents: Literal["fail", "skip"] = "fail"
    """What a line without a readable text does: end its task, or go to a side file."""
    max_bad_fraction: Fraction = 0.001
    """With skip: the largest share of bad documents in one output, or in all that one file feeds; more end its task."""
    verify_fraction: Fraction = 0.0001
    """Share of the documents whose token ids are compared with those of the library tokenizers."""
    download_connections: Count = 8
    """Files that one download task fetches at once."""


@dataclass(frozen=True, kw_only=True)
class CorpusJob:
    """All that an array task must know, as plain data: hpcgen writes it into the job, the task reads it back."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    corpus: CorpusConfig
    """The corpus, with absolute paths. Of its source the stages need the token's variable alone."""
    tokenizer: TokenizerConfig
    """Its tokenizer, with absolute paths."""
    share: Share = "private"
    """Who may read what the stages write."""
    selection: dict[str, str] = field(default_factory=dict)
    """Which files the run file takes (see `selection`), for the comparison with the manifest; empty: not compared."""

    @cached_property
    def directory(self) -> Path:
        """The corpus's directory."""
        return Path(self.corpus.directory)


def has_own_splits(corpus: CorpusConfig) -> bool:
    """Whether the corpus's own files say what is for training, validation and test."""
    return any(getattr(corpus.splits, split) for split in SPLITS)


def selection(corpus: CorpusConfig) -> dict[str, str]:
    """All that decides which files a manifest lists: key of data.corpus -> its value, for people; unset keys aside.

    An address is given without its query, which may be a signature: a hash stands for that.
    """
    source, found = corpus.source, dict[str, str]()
    if source.huggingface is not None:
        found["source.huggingface"] = f"{source.huggingface.repo_id} at {source.huggingface.revision}"
    if source.url is not None:
        address, mark, query = source.url.template.partition("?")
        digest = f"?... (SHA-256 {hashlib.sha256(query.encode()).hexdigest()[:12]})" if mark else ""
        found["source.url"] = f"{address}{digest}, {source.url.count} from {source.url.first} on"
    lists = {
        "include": corpus.include,
        **{f"splits.{split}": getattr(corpus.splits, split) for split in SPLITS},
    }
    single = {
        "source.directory": source.directory,
        "source.manifest": source.manifest,
        "sample_files": corpus.sample_files,
        "sample_fraction": corpus.sample_fraction,
    }
    found |= {key: str(value) for key, value in single.items() if value is not None}
    return found | {key: ", ".join(patterns) for key, patterns in lists.items() if patterns}


def num_outputs(corpus: CorpusConfig) -> dict[str, int]:
    """How many output files each split gets; one nameless split (WHOLE) where documents are split later."""
    if not has_own_splits(corpus):
        return {WHOLE: corpus.num_output_files}
    counts = {"train": corpus.num_output_files}
    return {
        split: counts.get(split, corpus.num_eval_output_files)
        for split in SPLITS
        if getattr(corpus.splits, split)
    }


def output_names(split: str, count: int) -> list[str]:
    """train-00000-of-00072 and so on: names of a split's output files, without suffix."""
    return [f"{split}-{index:05d}-of-{count:05d}" for index in range(count)]


def blend(corpus: CorpusConfig) -> dict[str, tuple[Dataset, ...]]:
    """The pairs that the stages make, by field of trainer.contract.config.BlendConfig: datasets, or train, valid, test.

    No weights: the trainer then weighs by the tokens that each pair has in a split.
    """
    directory = f"{corpus.directory}/tokens"
    return {
        "datasets" if split == WHOLE else split: tuple(
            Dataset(prefix=f"{directory}/{name}") for name in output_names(split, count)
        )
        for split, count in num_outputs(corpus).items()
    }


def problems(corpus: CorpusConfig, path: str = "data.corpus") -> Iterator[Problem]:
    """What no type can say of a corpus at `path` of the run file. Reads no file."""
    ways = ("huggingface", "url", "directory", "manifest")
    given = [way for way in ways if getattr(corpus.source, way) is not None]
    if not given:
        yield Problem(f"{path}.source", "names no source", f"give one of {', '.join(ways)}")
    for way in given[1:]:
        yield Problem(f"{path}.source.{way}", f"is a second source beside {given[0]}", "keep one of them")
    url = corpus.source.url
    # told of `url`, and not of its template: messages show the value, which may hold a password or a signature
    if url is not None and "{index" not in url.template and url.count > 1:
        yield Problem(f"{path}.source.url", "has the same address for every file", "write {index} in it")
    if url is not None and _has_user(url.template):
        yield Problem(
            f"{path}.source.url",
            "has a template with a user's name or password in it",
            "take it out, and name the variable that holds the token in source.token_variable",
        )
    if corpus.source.token_variable and not (corpus.source.huggingface or url or corpus.source.manifest):
        yield Problem(f"{path}.source.token_variable", "is not read for a directory", "remove it")
    if corpus.sample_files is not None and corpus.sample_fraction is not None:
        yield Problem(f"{path}.sample_fraction", "is a second sample beside sample_files", "keep one of them")
    if corpus.sample_fraction == 0:
        yield Problem(f"{path}.sample_fraction", "takes no file", "use a fraction above 0, or null for all")
    if has_own_splits(corpus) and not corpus.splits.train:
        yield Problem(
            f"{path}.splits.train", "is empty while valid or test is not", "name the files to train on"
        )


def _has_user(template: str) -> bool:
    try:
        return "@" in urlsplit(template).netloc
    except ValueError:
        return False  # no address at all, which listing it says
