"""The corpus of a run: its source, its output files, and the directory of each data stage.

The `directory` of a corpus contains manifest.jsonl (the frozen list of files), download/, extract/, concat/ and
tokens/.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from hpcgen.config.fields import EnvironmentName, Text
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import Problem
from hpcgen.files import Share
from trainer.contract.config import Count, Dataset, FilePath, Fraction, NonNegative, Range
from trainer.contract.record import config_section

PairCount = Annotated[int, Range(at_least=1, at_most=99_999)]
"""Names of pairs have five digits."""
RepositoryName = Annotated[
    str,
    Text(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", "the name of a repository: owner/name"),
]
Revision = Annotated[str, Text(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", "a branch, a tag or a commit")]
WEB_SCHEMES = ("https", "http")
OBJECT_SCHEMES = ("s3", "gs", "az")
"""Amazon S3, Google Cloud Storage, Azure Blob Storage."""
FILE_SCHEMES = ("file",)
SCHEMES = (*WEB_SCHEMES, *OBJECT_SCHEMES, *FILE_SCHEMES)
"""Schemes of the URLs that files are downloaded from."""
UrlTemplate = Annotated[
    str,
    Text(
        rf"({'|'.join(SCHEMES)})://[^\s{{}}]+(\{{index(:0?\d{{1,2}}d?)?\}}[^\s{{}}]*)?",
        "a URL (https, http, s3, gs, az or file) with {index} or {index:05d} where the number of the file goes",
    ),
]
TemplateName = Annotated[str, Text(r"[A-Za-z0-9][\w.-]{0,95}", "the name of a chat template")]
Date = Annotated[str, Text(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", "a date, as YYYY-MM-DD")]
Pattern = Annotated[
    str, Text(r"(?!/)(?!.*(^|/)\.\.(/|$)).{1,500}", "a pattern of names such as train/*.jsonl.zst")
]

SPLITS = ("train", "valid", "test")
WHOLE = "corpus"
"""Name of the output files of a corpus without `splits`."""


@config_section
class HubSource:
    """A dataset repository on the Hugging Face hub. Set HF_ENDPOINT to use another hub."""

    repo_id: RepositoryName
    """Repository, as owner/name."""
    revision: Revision = "main"
    """Branch, tag or commit. `hpcgen data plan` resolves it to a commit and records that."""


@config_section
class UrlSource:
    """Files on a web server, in an object store or on a disk, to be downloaded."""

    template: UrlTemplate
    """URL with {index} or {index:05d} in place of the number. With s3://, gs://, az:// and file://, it may instead be a
    pattern such as s3://bucket/train/*.jsonl.zst: * stands for any part of a name, ** for any directories."""
    first: NonNegative = 0
    """First number."""
    count: Count = 1
    """Number of files."""


@config_section
class SourceConfig:
    """Source of a corpus's files. Set exactly one of huggingface, url, directory and manifest."""

    huggingface: HubSource | None = None
    """Option 1: a dataset repository on the Hugging Face hub."""
    url: UrlSource | None = None
    """Option 2: files on a web server, in an object store or on a disk, by number or by pattern."""
    directory: FilePath | None = None
    """Option 3: a directory of existing files."""
    manifest: FilePath | None = None
    """Option 4: a JSON Lines file with an object per file: name, url or path, and size and sha256 if known."""
    token_variable: EnvironmentName | None = None
    """Name of the environment variable with the access token of the hub or web server. Its value is never written.
    Object stores have variables of their own, which `secrets` names."""


@config_section
class SplitPatterns:
    """Name patterns of the corpus files for each split. If all are empty, the corpus is split by documents."""

    train: tuple[Pattern, ...] = ()
    """Training files."""
    valid: tuple[Pattern, ...] = ()
    """Validation files."""
    test: tuple[Pattern, ...] = ()
    """Test files."""


@config_section
class ChatConfig:
    """How chats become text. A document has `messages`, or `prompt` and `completion`, and may have `tools`."""

    chat_template_file: FilePath | None = None
    """Path of a chat template (Jinja). Default: the tokenizer's own, in chat_template.jinja or tokenizer_config.json
    next to data.tokenizer.tokenizer_file."""
    chat_template: TemplateName | None = None
    """Name of the chat template to use if the tokenizer has several."""
    date: Date | None = None
    """Date (YYYY-MM-DD) for chat templates that write today's date (strftime_now). Such templates require it, because
    the pairs would otherwise depend on the day."""


@config_section
class CorpusConfig:
    """A corpus and its conversion to .bin/.idx pairs."""

    directory: FilePath
    """Directory of the manifest and of all output of the data stages, on storage shared by all nodes."""
    source: SourceConfig = field(default_factory=SourceConfig)
    """Source of the files. Set exactly one of huggingface, url, directory and manifest."""
    include: tuple[Pattern, ...] = ()
    """Name patterns of the files to use. Default: all .jsonl, .jsonl.zst, .jsonl.gz and .parquet files."""
    splits: SplitPatterns = field(default_factory=SplitPatterns)
    """Name patterns of the corpus files for training, validation and test. Default: split by documents."""
    sample_files: Count | None = None
    """Number of files to use, spread evenly over the corpus. Default: all."""
    sample_fraction: Fraction | None = None
    """Fraction of the files to use, spread evenly over the corpus. Default: all."""
    num_output_files: PairCount = 1
    """Number of .bin/.idx pairs for the training files, or for the entire corpus if `splits` is empty. A task makes one
    or more pairs, so a large corpus needs several: one for 16 GB of compressed files."""
    num_eval_output_files: PairCount = 1
    """Number of .bin/.idx pairs for the validation files, and the same number for the test files."""
    json_key: str = "text"
    """Key of the text in each JSON object, or name of the column with the text in Parquet files."""
    chat: ChatConfig | None = None
    """The documents are chats (`chat: {}` for the tokenizer's own chat template). Their pairs get a loss mask, so that
    only the assistant's answers are learned."""
    drop_empty: bool = False
    """Drop documents without text. Default: keep them, as Megatron-LM does."""
    bad_documents: Literal["fail", "skip"] = "fail"
    """Lines or rows without readable text: fail ends the task, skip writes them to a separate file."""
    max_bad_fraction: Fraction = 0.001
    """With bad_documents = skip: maximum fraction of bad documents in one output, or in all outputs of one input file.
    The task fails above it."""
    verify_fraction: Fraction = 0.0001
    """Fraction of documents whose token IDs are compared with those of Hugging Face tokenizers."""
    download_connections: Count = 8
    """Number of files that a download task fetches in parallel."""


@config_section
class CorpusJob:
    """The input of an array task: hpcgen writes it into the job as JSON, and the task reads it."""

    corpus: CorpusConfig
    """The corpus with absolute paths. Its source has no kind, only how files are read."""
    tokenizer: TokenizerConfig
    """The tokenizer with absolute paths."""
    share: Share = "private"
    """Read access to the output of the stages."""
    selection: dict[str, str] = field(default_factory=dict)
    """Selection of files (see `selection`), compared with the manifest. Empty skips the comparison."""

    @cached_property
    def directory(self) -> Path:
        """The corpus's directory."""
        return Path(self.corpus.directory)


def has_own_splits(corpus: CorpusConfig) -> bool:
    """Returns True if the corpus is split by files rather than by documents."""
    return any(getattr(corpus.splits, split) for split in SPLITS)


def selection(corpus: CorpusConfig) -> dict[str, str]:
    """The settings that determine which files a manifest lists: key of data.corpus -> its value as text.

    Unset keys are omitted. The query of a URL may be a signature, so it is replaced by its hash.
    """
    source, found = corpus.source, dict[str, str]()
    if source.huggingface is not None:
        found["source.huggingface"] = f"{source.huggingface.repo_id} at {source.huggingface.revision}"
    if source.url is not None:
        address, mark, query = source.url.template.partition("?")
        digest = f"?... (SHA-256 {hashlib.sha256(query.encode()).hexdigest()[:12]})" if mark else ""
        numbers = "" if "*" in address else f", {source.url.count} from {source.url.first} on"
        found["source.url"] = f"{address}{digest}{numbers}"
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
    """The number of output files of each split; a single entry WHOLE if documents are split later."""
    if not has_own_splits(corpus):
        return {WHOLE: corpus.num_output_files}
    counts = {"train": corpus.num_output_files}
    return {
        split: counts.get(split, corpus.num_eval_output_files)
        for split in SPLITS
        if getattr(corpus.splits, split)
    }


def output_names(split: str, count: int) -> list[str]:
    """Names of a split's output files without suffix, such as train-00000-of-00072."""
    return [f"{split}-{index:05d}-of-{count:05d}" for index in range(count)]


def blend(corpus: CorpusConfig) -> dict[str, tuple[Dataset, ...]]:
    """The pairs that the stages produce, by field of BlendConfig: datasets, or train, valid and test.

    They have no weights, so the trainer weights each pair by its number of tokens in a split.
    """
    directory = f"{corpus.directory}/tokens"
    return {
        "datasets" if split == WHOLE else split: tuple(
            Dataset(prefix=f"{directory}/{name}") for name in output_names(split, count)
        )
        for split, count in num_outputs(corpus).items()
    }


def problems(
    corpus: CorpusConfig, tokenizer: TokenizerConfig, path: str = "data.corpus"
) -> Iterator[Problem]:
    """Yields the problems of a corpus at `path` in the run file that types cannot express. Reads no files."""
    kinds = ("huggingface", "url", "directory", "manifest")
    given = [kind for kind in kinds if getattr(corpus.source, kind) is not None]
    if not given:
        yield Problem(f"{path}.source", "has no source", f"set one of {', '.join(kinds)}")
    for kind in given[1:]:
        yield Problem(
            f"{path}.source.{kind}", f"is a second source in addition to {given[0]}", "keep one of them"
        )
    url = corpus.source.url
    if url is not None:
        yield from _url_problems(url, corpus.source.token_variable, f"{path}.source")
    if corpus.source.token_variable and not (corpus.source.huggingface or url or corpus.source.manifest):
        yield Problem(f"{path}.source.token_variable", "has no effect for a directory", "remove it")
    if corpus.sample_files is not None and corpus.sample_fraction is not None:
        yield Problem(f"{path}.sample_fraction", "conflicts with sample_files", "keep one of them")
    if corpus.sample_fraction == 0:
        yield Problem(
            f"{path}.sample_fraction", "selects no files", "use a fraction above 0, or null for all"
        )
    if corpus.chat is not None:
        yield from _chat_problems(corpus, corpus.chat, tokenizer, path)
    if has_own_splits(corpus) and not corpus.splits.train:
        yield Problem(
            f"{path}.splits.train", "is empty, but valid or test is not", "set it to the training files"
        )


def _chat_problems(
    corpus: CorpusConfig, chat: ChatConfig, tokenizer: TokenizerConfig, path: str
) -> Iterator[Problem]:
    if tokenizer.kind != "huggingface":
        reason = f"needs a tokenizer with tokens that end a turn, but data.tokenizer.kind = {tokenizer.kind}"
        hint = "set data.tokenizer to the tokenizer.json of the model that you fine-tune"
        yield Problem(f"{path}.chat", reason, hint, about=("data.tokenizer.kind",))
    for key in ("json_key", "drop_empty"):
        if getattr(corpus, key) != getattr(CorpusConfig, key):
            hint = "remove it; chats are read from the keys messages, or prompt and completion"
            yield Problem(f"{path}.{key}", f"has no effect with {path}.chat", hint)
    if chat.date is not None and not _is_date(chat.date):
        yield Problem(f"{path}.chat.date", "is not in the calendar", "use an existing date, as YYYY-MM-DD")
    if chat.chat_template is not None and chat.chat_template_file is not None:
        reason = "has no effect with chat_template_file, which is a single template"
        yield Problem(f"{path}.chat.chat_template", reason, "keep one of them")


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _url_problems(url: UrlSource, token_variable: str | None, path: str) -> Iterator[Problem]:
    # reported for `url` and not for its template, whose value may contain a password or a signature
    scheme = url.template.partition(":")[0]
    if "{index" not in url.template and url.count > 1:
        yield Problem(f"{path}.url", "has the same URL for every file", "add {index} to its template")
    if _has_user(url.template):
        yield Problem(
            f"{path}.url",
            "contains a user name or password in its template",
            "remove it, and set source.token_variable to the variable with the token",
        )
    if scheme in WEB_SCHEMES and "*" in url.template:
        yield Problem(
            f"{path}.url",
            "contains * in its template, but a web server cannot list its files",
            "number them with {index}, or write a list and set source.manifest",
        )
    elif re.search(r"[^/]\*\*|\*\*[^/]", url.template):
        yield Problem(f"{path}.url", "has ** in a part of a name in its template", "write **/*.jsonl")
    if scheme not in WEB_SCHEMES and token_variable:
        yield Problem(
            f"{path}.token_variable",
            f"has no effect for {scheme}://",
            "remove it; `secrets` names the variables with the store's credentials"
            if scheme in OBJECT_SCHEMES
            else "remove it",
        )


def _has_user(template: str) -> bool:
    try:
        return "@" in urlsplit(template).netloc
    except ValueError:
        return False  # not a URL; `hpcgen data plan` reports it
