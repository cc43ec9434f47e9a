"""The training data: files that shell code selects or renames, and documents of a sample."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.megatron import DOCUMENT_MASK, PACKED_DOCUMENTS, ignores_document_mask
from hpcgen.check.lint.rule import Hit, rule


@rule(
    "files-by-count",
    "warning",
    "a fixed number of data files for validation and test",
    source="coreutils, head; Azure's GPT-3 175B example",
)
def files_by_count(job: Job) -> Iterator[Hit]:
    """head and tail with fixed counts select data files for training and test.

    With fewer files, the same files are used for both, or none remain for training. With more, some are never used.
    --split distributes the documents by weight, independent of files.
    """
    for pipeline in job.script.pipelines:
        lists = any(
            command.name in ("find", "ls") and re.search(r"\.(bin|idx|jsonl)\b", _joined(command.words))
            for command in pipeline
        )
        for command in pipeline if lists else ():
            count = re.search(r"-n\s*(\S+)|--lines=(\S+)|\s-(\d+)", _joined(command.words))
            if (
                command.name in ("head", "tail")
                and count
                and (count[1] or count[2] or count[3]) not in ("1", "+1", "+2")
            ):
                yield Hit.at(
                    command.line,
                    f"{command.name} selects a fixed number of data files, however many there are",
                    "use --split, or list the files by name",
                )
                break


@rule(
    "suffix-by-pattern",
    "error",
    "a suffix is also removed in the middle of a path",
    source="sed, Overview of basic regular expression syntax",
)
def suffix_by_pattern(job: Job) -> Iterator[Hit]:
    """In sed's pattern, a dot matches any character: s/.bin//g turns /mnt/robin/x.bin into /mnt/r/x."""
    for command in job.script.commands:
        for word in command.words[1:] if command.name == "sed" else ():
            if found := re.fullmatch(r"s([/|#,:])(\.\w{2,5})\1\1g?", word.text):
                yield Hit.at(
                    word.line,
                    f"{word.text} deletes {found[2][1:]} and the character before it, anywhere in the path",
                    f"s/\\{found[2]}$//",
                )


@rule(
    "document-mask-ignored",
    "warning",
    "--reset-attention-mask does not separate documents",
    source="NVIDIA/Megatron-LM, issue 2357; Megatron-Core 0.16 and 0.19, transformer_engine.py and fused_softmax.py",
)
def document_mask_ignored(job: Job) -> Iterator[Hit]:
    """Tokens attend to other documents of their sample, because causal attention does not read the document mask.

    Neither Transformer Engine's kernels nor the fused softmax of Megatron-Core's local layers do. The dataset still
    builds the mask for each sample.
    """
    for launch in job.megatron:
        flag = launch.flags.get(DOCUMENT_MASK)
        is_separated = PACKED_DOCUMENTS in launch.flags or not ignores_document_mask(launch.flags)
        if flag and flag.word.certain and not is_separated:
            yield Hit.at(
                flag.line,
                f"Megatron-LM's attention ignores the mask of --{DOCUMENT_MASK}",
                f"use --{PACKED_DOCUMENTS} (from core 0.19), or remove --{DOCUMENT_MASK}",
            )


def _joined(words: Sequence[object]) -> str:
    return " ".join(str(getattr(word, "text", "")) for word in words)
