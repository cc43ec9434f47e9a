"""Identities of the files that a run depends on besides its configuration: users' code and tokenized pairs.

Each checkpoint records them (`origins`), so that the next attempt notices a file that was edited, overwritten or
rebuilt in between. hpcgen compares them too, before it queues a job.

A pair is unchanged if its .idx has the same hash and its .bin has the same size and modification time. After a copy, a
restore or a rebuild, the time differs, and only a hash can tell whether the content differs. Reading every .bin at
every start would take too long, so the hash comes from the record that hpcgen wrote next to the pair. On a login node,
the .idx is not read either.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.contract.code import user_code
from trainer.contract.code.code_record import SHA256_DIGITS, CodeRecord
from trainer.contract.code.imports import named
from trainer.contract.code.user_code import UserCode
from trainer.contract.config import TrainerConfig
from trainer.contract.files.hashing import file_sha256, num_threads
from trainer.contract.files.index_header import idx_path
from trainer.contract.files.loss_mask import has_mask
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.resuming.change import Change, and_more
from trainer.contract.resuming.hyperparameters import SECTIONS
from trainer.contract.resuming.pair_identity import (
    SECOND,
    Identity,
    compare,
    compare_content,
    content_suffixes,
    differs,
    is_same_pair,
    same_age,
)
from trainer.contract.resuming.record_shape import origins

PAIRS = ("data.datasets", "data.train")
"""Keys that name training pairs. The pairs of data.valid and data.test may change freely."""

RECORD_FILE = ".record.json"
"""Suffix of the record that hpcgen writes next to the pairs that it makes (hpcgen/data/record.py)."""


@dataclass
class Examination:
    """Comparison of a configuration's files with the files that a checkpoint was trained with."""

    origins: dict[str, Any]
    """Record for the checkpoints of this attempt: {"code": {key: ...}, "pairs": {key: [...]}}."""
    saved: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's sections, with updated paths for files that were moved but have not changed."""
    changes: list[Change] = field(default_factory=list)
    """Files whose path is the same but whose content differs from the checkpoint's."""
    to_hash: dict[str, Identity] = field(default_factory=dict)
    """Expected size and sha256 of the .bin and .mask files, by path, that must be read to tell whether they
    changed."""

    def add_changed_pairs(self, paths: list[str], name: str) -> None:
        """Add the files of `to_hash` that turned out to differ. `name` is the key that names the pairs."""
        for pair in filter(None, self.origins["pairs"].get(name, [])):
            for suffix in content_suffixes(pair):
                if f"{pair['prefix']}.{suffix}" in paths:
                    pair[suffix]["sha256"] = None
        if paths:
            sha256 = self.to_hash[paths[0]]["sha256"]
            after = f"different content{and_more(len(paths))}"
            self.changes.append(
                Change(name, f"{paths[0]} (SHA-256 {sha256[:SHA256_DIGITS]})", after, is_content=True)
            )


def examine(
    config: TrainerConfig,
    record: Mapping[str, Any] | None = None,
    *,
    thorough: bool = True,
    codes: Mapping[str, UserCode] | None = None,
) -> Examination:
    """Examine the files of the resolved `config`, and compare them with those in a checkpoint's `record` if given.

    Missing files are not an error here. Without `thorough`, as on a login node, pairs are not read and modules are not
    searched for. Files that cannot be compared in this way count as unchanged.

    Raises:
        OSError: a file cannot be read.
    """
    earlier = origins(record)
    saved = {name: copy.deepcopy(record[name]) for name in SECTIONS if name in record} if record else {}
    found = Examination({"code": {}, "pairs": {}}, saved)
    codes = read_code(config) if thorough and codes is None else codes or {}
    for name, path in named(config).items():
        before = earlier.get("code", {}).get(name)
        code = codes.get(path)
        now = CodeRecord.of(code) if code else None if thorough else CodeRecord.found(path, before)
        if now is not None:
            _examine_code(name, path, now, before, found)
    of_directory = functools.cache(recorded)  # many pairs share a directory and its record
    for name in PAIRS:
        prefixes = [dataset.prefix for dataset in _value(config, name)]
        before = earlier.get("pairs", {}).get(name, [])
        # Pairs are compared by their places in the list. A list of another length is a change of the key itself.
        comparable = bool(before) and len(before) == len(prefixes) == len(_saved_pairs(name, found))
        known = before if comparable else [None] * len(prefixes)
        if thorough:
            _read_indices(prefixes)
        pairs = [
            _identify_pair(prefix, earlier_pair, of_directory, reads=thorough)
            for prefix, earlier_pair in zip(prefixes, known, strict=True)
        ]
        if pairs:
            found.origins["pairs"][name] = pairs
        if comparable:
            _compare_pairs(name, known, pairs, found, hashes=thorough)
        if thorough and record:
            _recognize_pairs(_pairs_read(record), pairs, found)
    return found


def identify_pair(prefix: str) -> dict[str, Any] | None:
    """Identities of a pair's files; None if a file is missing.

    Raises:
        OSError: a file cannot be read.
    """
    return _identify_pair(prefix, None, recorded, reads=True)


def pairs_key(config: TrainerConfig) -> str:
    """The key that names the training pairs."""
    return "data.datasets" if config.data.datasets else "data.train"


def read_code(config: TrainerConfig) -> dict[str, UserCode]:
    """Read the code of the user's functions, by import path.

    Raises:
        OSError: a file cannot be read.
    """
    return user_code.read(named(config).values())


def identify(path: Path) -> Identity:
    """Identity of a file, which is read.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    status = path.stat()
    # Different content may have the same size and time, but not the same inode and time of change.
    sha256 = _sha256(path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
    return {"size": status.st_size, "sha256": sha256, "modified_ns": status.st_mtime_ns}


def _identify_unread(path: Path, known: Any) -> Identity:
    """Identity of a file, with the hash in `known` if size and time are the same."""
    status = path.stat()
    now = {"size": status.st_size, "sha256": None, "modified_ns": status.st_mtime_ns}
    return known if isinstance(known, dict) and same_age(now, known) else now


def _examine_code(
    name: str, path: str, now: CodeRecord, before: Mapping[str, Any] | None, found: Examination
) -> None:
    found.origins["code"][name] = now.entry()
    section, _, key = name.partition(".")
    saved = before and found.saved[section].get(key)
    if not before or not saved:
        return
    change = now.change(name, before)
    if change is None:
        if saved.rpartition(":")[2] == path.rpartition(":")[2]:
            found.saved[section][key] = path
    elif saved == path:
        found.changes.append(change)


def _compare_pairs(
    name: str, before: Sequence[Any], pairs: Sequence[Any], found: Examination, *, hashes: bool
) -> None:
    """Compare pairs by their positions in the blend. With `hashes`, add pairs that must be read to `found.to_hash`."""
    differing: list[Change] = []
    moved: dict[str, str] = {}
    for dataset, known, pair in zip(_saved_pairs(name, found), before, pairs, strict=True):
        if known is None or pair is None:
            continue
        verdict = compare(known, pair)
        if verdict == "hash" and hashes:
            _expect(known, pair, found)
        if verdict in ("same", "hash"):
            moved[dataset["prefix"]] = pair["prefix"]
            dataset["prefix"] = pair["prefix"]
        elif dataset["prefix"] == pair["prefix"]:
            change = _change(name, known, pair)
            doubt = "; its SHA-256 is unknown, so the content may differ" if verdict == "unknown" else ""
            differing.append(replace(change, after=f"{change.after}{doubt}"))
    for stage in found.saved["data"].get("stages", []):
        for dataset in stage["train"]:
            dataset["prefix"] = moved.get(dataset["prefix"], dataset["prefix"])
    if differing:
        first = differing[0]
        found.changes.append(replace(first, after=f"{first.after}{and_more(len(differing))}"))


def _pairs_read(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Identities of all pairs that a checkpoint's run has read."""
    latest = origins(record).get("pairs", {}).values()
    streams = (record.get("sampling") or {}).get("streams", [])
    return [*(pair for pairs in latest for pair in pairs if pair), *(stream["pair"] for stream in streams)]


def _recognize_pairs(read: Sequence[Mapping[str, Any]], pairs: Sequence[Any], found: Examination) -> None:
    """Add to `found.to_hash` the pairs that may be in `read`, but must be hashed to tell."""
    for pair in filter(None, pairs):
        if not any(is_same_pair(known, pair) for known in read):
            alike = [known for known in read if compare(known, pair) == "hash"]
            if alike:
                _expect(max(alike, key=lambda known: known["prefix"] == pair["prefix"]), pair, found)


def _expect(known: Mapping[str, Any], pair: dict[str, Any], found: Examination) -> None:
    """Assume that files have their earlier hashes. The ranks verify this before training starts."""
    for suffix in content_suffixes(pair):
        if compare_content(known[suffix], pair[suffix]) == "hash":
            sha256 = known[suffix]["sha256"]
            found.to_hash[f"{pair['prefix']}.{suffix}"] = {"bytes": pair[suffix]["size"], "sha256": sha256}
            pair[suffix] = {**pair[suffix], "sha256": sha256}


def _saved_pairs(name: str, found: Examination) -> list[dict[str, Any]]:
    """The checkpoint's datasets under the key `name`."""
    pairs: list[dict[str, Any]] = found.saved["data"].get(name.partition(".")[2], [])
    return pairs


def _read_indices(prefixes: Sequence[str]) -> None:
    """Hash the .idx files in threads. `identify` then finds the hashes in its cache."""
    from concurrent.futures import ThreadPoolExecutor  # imports logging, which hpcgen does not need

    def read(prefix: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            identify(idx_path(prefix))

    with ThreadPoolExecutor(num_threads()) as threads:
        list(threads.map(read, prefixes))


def _identify_pair(
    prefix: str, known: Any, recorded: Callable[[Path], Mapping[str, Identity]], *, reads: bool
) -> dict[str, Any] | None:
    """Identities of a pair's files, with the mask of chats; None if a file is missing."""
    known = known or {}
    try:
        index = idx_path(prefix)
        index_now = identify(index) if reads else _identify_unread(index, known.get("idx"))
        contents = {
            suffix: _identify_content(Path(f"{prefix}.{suffix}"), known.get(suffix), recorded)
            for suffix in ("bin", *(["mask"] if has_mask(prefix) else []))
        }
    except FileNotFoundError:
        return None
    return {"prefix": prefix, "idx": index_now, **contents}


def _identify_content(
    path: Path, known: Any, recorded: Callable[[Path], Mapping[str, Identity]]
) -> dict[str, Any]:
    """Identity of a .bin or .mask, whose hash comes from `known` or from hpcgen's record next to it."""
    now = _identify_unread(path, known)
    if now["sha256"] is None:
        made = recorded(path.parent).get(path.name)
        if made is not None and same_age(now, made):  # otherwise the file was rewritten after the record
            now = {**now, "sha256": made["sha256"]}
    return dict(now)


def _change(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Change:
    """The file of the pair that differs, in its old and its current state."""
    files = [suffix for suffix in ("idx", "mask", "bin") if suffix in before and suffix in now]
    suffix = next((suffix for suffix in files if differs(before[suffix], now[suffix])), "bin")
    texts = []
    for identity in (before[suffix], now[suffix]):
        modified = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(identity["modified_ns"] / SECOND))
        sha256 = f", SHA-256 {identity['sha256'][:SHA256_DIGITS]}" if identity["sha256"] else ""
        texts.append(f"{now['prefix']}.{suffix} ({identity['size']:,} bytes, modified {modified}{sha256})")
    return Change(name, texts[0], texts[1], is_content=True)


@functools.cache
def _sha256(path: Path, *status: int) -> str:
    """SHA-256 of a file. Cached, so that a process reads each file of a given `status` only once."""
    return file_sha256(path)[0]


def recorded(directory: Path) -> dict[str, Identity]:
    """Identities of the files in a directory by name, from hpcgen's records. A record may cover several pairs."""
    found = {}
    for path in directory.glob(f"*{RECORD_FILE}"):
        try:
            for output in json.loads(read_bytes(path))["outputs"]:
                found[Path(output["name"]).name] = {
                    "size": output["size"],
                    "sha256": output["sha256"],
                    "modified_ns": output["modified_ns"],
                }
        except (OSError, ValueError, KeyError, TypeError):
            continue  # as if the pair had no record
    return found


def _value(config: TrainerConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)
