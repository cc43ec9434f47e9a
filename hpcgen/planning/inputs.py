"""The files that stages read: who makes each of them, and what to do if it is missing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from hpcgen.config import corpus as corpora
from hpcgen.config.corpus import CorpusConfig
from hpcgen.config.presets import missing_tokenizer
from hpcgen.config.program import ProgramConfig
from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from hpcgen.files import no_access
from hpcgen.planning.paths import chat_of, manifest_of, trainer_data
from hpcgen.planning.resuming import loaded
from hpcgen.planning.runtimes import Container
from hpcgen.text import nearest
from trainer.contract.files.index_header import SUFFIXES
from trainer.contract.record import record

Exists = Callable[[str], bool]
"""Returns True if a path exists on the login node."""
_SCRIPT = re.compile(r"(?!-)[^\s{}]+\.(py|sh)")


@record
class Input:
    """A host file that a stage reads. It can be checked on the login node."""

    path: str
    hint: str = ""
    """Advice if it is missing."""
    needed: str = "it"
    """The file in "Stage train needs it"."""
    key: str = ""
    """Key of the run file whose value is wrong if the file is missing; empty if the file itself is reported."""
    is_dataset: bool = False
    """The job checks it once and not on every node, because there may be thousands of such files."""
    is_made: bool = False
    """The data stages make it, so it may be missing until they have run."""

    def missing(self, stage: str, exists: Exists) -> Problem:
        """The mistake if the file does not exist, although `stage` needs it."""
        return Problem("", f"no such file. Stage {stage} needs {self.needed}", self.hint, where=self.path)


@record
class PairFile(Input):
    """One of the two files of a .bin/.idx pair."""

    def missing(self, stage: str, exists: Exists) -> Problem:
        """The mistake in the key that names the pair."""
        path = PurePosixPath(self.path)
        doubled = PurePosixPath(path.stem).suffix
        hint = "use the path of a .bin/.idx pair without the suffix"
        if doubled in SUFFIXES:
            hint = f"remove {doubled} from it"
        elif similar := _similar_path(self.path):
            hint = f"did you mean {similar.removesuffix(path.suffix)}?"
        return Problem(
            self.key, f"is not a .bin/.idx pair. Stage {stage} needs {path}, which does not exist", hint
        )


@record
class TokenizerFile(Input):
    """The tokenizer.json of the run."""

    preset: str | None = None
    """Preset of the run, which may name a repository that contains the file."""

    def missing(self, stage: str, exists: Exists) -> Problem:
        """The mistake in the key that names the file."""
        return missing_tokenizer(self.preset, self.path, stage)


@record
class Checkpoints(Input):
    """The file that proves that checkpoint.load names checkpoints."""

    load: str = ""

    def missing(self, stage: str, exists: Exists) -> Problem:
        """The mistake in checkpoint.load, with a hint if a related directory has checkpoints."""
        load, parent = self.load, str(Path(self.load).parent)
        if exists(f"{load}/checkpoints"):
            hint = f"did you mean {load}/checkpoints?"
        elif exists(f"{load}/config.json"):
            hint = f"to start from a Hugging Face model, run hpcgen checkpoint import {load} --to DIR and use DIR"
        elif not exists(load) and (similar := _similar_path(load)):
            hint = f"did you mean {similar}?"
        elif not exists(load) and exists(parent) and load.startswith(f"{parent}/iter_"):
            hint = f"use a checkpoint that is in {parent}"
        else:
            hint = "use a directory that contains iter_... directories, or one iter_... directory"
        why = loaded(load).lack if exists(load) else "does not exist"
        return Problem(self.key, f"has no checkpoint for stage {stage}: {load} {why}", hint)


def manifest(corpus: CorpusConfig) -> Input:
    """The list of the corpus's files."""
    hint = "run hpcgen data plan with this run file first"
    return Input(manifest_of(corpus), hint=hint, needed="this manifest")


def blend_files(config: RunConfig) -> Iterator[Input]:
    """Yields the files of the pairs that the trainer reads."""
    made = _made(config)
    for key, blend in trainer_data(config).blends.items():
        for index, dataset in enumerate(blend):
            yield from _pair(dataset.prefix, f"data.{key}[{index}].prefix", made, is_dataset=True)


def text_files(config: RunConfig) -> Iterator[Input]:
    """Yields the files of the pairs that evaluations read."""
    made = _made(config)
    for index, text in enumerate(config.evaluation.data):
        yield from _pair(text.prefix, f"evaluation.data[{index}].prefix", made)


def _made(config: RunConfig) -> set[str]:
    """Prefixes of the pairs that the data stages make."""
    corpus = config.data.corpus
    blend = {} if corpus is None else corpora.blend(corpus)
    return {pair.prefix for pairs in blend.values() for pair in pairs}


def _pair(prefix: str, key: str, made: set[str], *, is_dataset: bool = False) -> Iterator[PairFile]:
    for suffix in SUFFIXES:
        yield PairFile(prefix + suffix, key=key, is_dataset=is_dataset, is_made=prefix in made)


def tokenizer_files(config: RunConfig) -> tuple[Input, ...]:
    """The files of the tokenizer that the run file names."""
    tokenizer = config.data.tokenizer
    named = (tokenizer.vocab_file, tokenizer.merges_file)
    return (*tokenizer_file(config), *(Input(path) for path in named if path is not None))


def tokenizer_file(config: RunConfig) -> tuple[Input, ...]:
    """The tokenizer.json; empty if the run file names none."""
    path, key = config.data.tokenizer.tokenizer_file, "data.tokenizer.tokenizer_file"
    return () if path is None else (TokenizerFile(path, key=key, preset=config.preset),)


def chat_template_file(config: RunConfig) -> tuple[Input, ...]:
    """The chat template that the run file names; empty if it names none."""
    path = chat_of(config).chat_template_file
    return () if path is None else (Input(path),)


def chat_template_options(config: RunConfig) -> dict[str, str | None]:
    """The options of trainer.huggingface for the chat template that the run file names."""
    chat = chat_of(config)
    return {"--chat-template": chat.chat_template_file, "--chat-template-name": chat.chat_template}


def checkpoints(load: str) -> Input:
    """The file that proves that the directory `load` contains checkpoints."""
    return Checkpoints(loaded(load).proof, key="checkpoint.load", load=load)


def _similar_path(path: str) -> str | None:
    """An existing path whose names are spelled almost like the names in `path`; None if there is none."""
    found = Path("/")
    for name in Path(path).parts[1:]:
        try:
            near = (
                name if (found / name).exists() else nearest(name, [entry.name for entry in found.iterdir()])
            )
        except OSError:
            return None
        if near is None:
            return None
        found /= near
    return str(found)


def missing_script_warnings(
    program: ProgramConfig, container: Container | None, exists: Exists
) -> Iterator[Problem]:
    """Yields a warning if the script in the command does not exist.

    The script is the first argument that ends in .py or .sh. Nothing is reported if it is in the container's image, or
    if this machine does not even have the first directory of its path.
    """
    index = next((i for i, argument in enumerate(program.command) if _SCRIPT.fullmatch(argument)), None)
    if index is None:
        return
    name = program.command[index]
    path = os.path.normpath(Path(program.directory, name))
    on_host = path if container is None else container.host_path(path)
    if on_host is not None and not exists(on_host) and exists("/" + on_host.split("/")[1]):
        hint = "" if name.startswith("/") else ", or set program.directory, at which it starts"
        closed = no_access(on_host)
        reason = f"cannot be read ({closed})" if closed else f"does not exist ({on_host})"
        yield Problem(f"program.command[{index}]", reason, f"correct the path{hint}")
