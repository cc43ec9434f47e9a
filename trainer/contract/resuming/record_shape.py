"""Checks the types of the values in a checkpoint's record.

The checksum in COMPLETE shows that the record is unchanged, but not that this trainer wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.contract.problem import Problem

CONFIRMED = "confirmed"
"""Key of the names in checkpoint.changed that are used (`trainer.contract.resuming.confirmations`)."""

LAST_TIME = 253402300799
"""Unix time of the last second of the year 9999, the last that `datetime` can represent."""

LARGEST = 2**63 - 1

KEYS: Mapping[str, type] = {
    "consumed_samples": int,
    "world_size": int,
    "precision": str,
    "layout": dict,
    "versions": dict,
    "model": dict,
    "training": dict,
    "optimizer": dict,
    "model.seq_length": int,
    "training.train_iters": int,
    "training.global_batch_size": int,
    "training.micro_batch_size": int,
}
"""Keys that every record of this format has."""

NAMES = {
    bool: "true or false",
    int: "a non-negative integer",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "a list",
    type(None): "null",
}

DOCUMENTS = {"first": int, "end": int, "tokens": int}
STREAM = {"pair": dict, "documents": dict, "seq_length": int, "orders": list, "read": int}
PACKING = {"samples": int, "tokens": int, "packed": bool}
PORTION = {"stream": int, "weight": float, "start": int}
PHASES = "sampling.phases[...]"


def problem(record: Mapping[str, Any], known_format: int) -> Problem | None:
    """The first value of a record with an invalid type; None if all types are valid.

    For a record in a later format than `known_format`, only the keys that all formats share are checked.
    """
    return next(_problems(record, known_format), None)


def origins(record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Where the code, the pairs and the weights of a record came from, by kind. Empty for a record without origins."""
    found: dict[str, Any] = (record or {}).get("origins") or {}
    return found


def _problems(record: Mapping[str, Any], known_format: int) -> Iterator[Problem]:
    yield from _not(record.get("format", known_format), int, "format")
    yield from _not(record.get("iteration"), int, "iteration")
    yield from _not(record.get("files"), dict, "files")
    for name, file in record["files"].items():
        if name in {"", ".", ".."} or "/" in name or "\0" in name:
            yield Problem("files", f"names {name!r}, which is not a valid file name in a checkpoint")
        yield from _not(file, dict, f"files[{name!r}]")
        yield from _not(file.get("bytes"), int, f"files[{name!r}].bytes")
        yield from _not(file.get("sha256"), str, f"files[{name!r}].sha256")
    is_later = record.get("format", known_format) > known_format
    time = record.get("time")
    if not (is_later and time is None) and not _is_time(time):
        yield Problem("time", f"is {_show(time)}, not a time in Unix seconds")
    if is_later:  # the other keys may have other types there
        return
    for key, kind in KEYS.items():
        section, _, name = key.rpartition(".")
        yield from _not((record[section] if section else record).get(name), kind, key)
    yield from _not(record.get("consumed_tokens", 0), int, "consumed_tokens")
    if (rampup := record["training"].get("rampup_batch_size")) is not None:
        yield from _not(rampup, list, "training.rampup_batch_size")
    for name, version in record["versions"].items():
        yield from _not(version, str, f"versions.{name}")
    yield from _data_problems(record.get("data") or {})
    yield from _not(record.get(CONFIRMED, {}), dict, CONFIRMED)
    for name, use in record.get(CONFIRMED, {}).items():
        yield from _not(use, dict, f"{CONFIRMED}[{name!r}]")
        yield from _not(use.get("iteration"), int, f"{CONFIRMED}[{name!r}].iteration")
    yield from _lora_problems(record)
    yield from _sampling_problems(record.get("sampling"))
    if (dataset := record.get("dataset")) is not None:
        yield from _not(dataset, dict, "dataset")
        yield from _not(dataset.get("first"), int, "dataset.first")
        for name, kind in (("length", int), ("state", dict)):
            if dataset.get(name) is not None:
                yield from _not(dataset[name], kind, f"dataset.{name}")


def _lora_problems(record: Mapping[str, Any]) -> Iterator[Problem]:
    """Checks what `trainer.contract.resuming.base_model` reads."""
    lora, sources = record.get("lora"), record.get("origins")
    if lora is not None:
        yield from _not(lora, dict, "lora")
    if sources is not None:
        yield from _not(sources, dict, "origins")
    if lora is None or lora.get("rank") is None:
        return
    yield from _not(lora["rank"], int, "lora.rank")
    if type(lora.get("alpha")) is not int:
        yield from _not(lora.get("alpha"), float, "lora.alpha")
    base: Any = origins(record).get("base")
    yield from _not(base, dict, "origins.base")
    for name in ("path", "sha256"):
        yield from _not(base.get(name), str, f"origins.base.{name}")


def _sampling_problems(sampling: Any) -> Iterator[Problem]:
    """Checks what `trainer.contract.resuming.sampling.from_dict` reads."""
    if sampling is None:
        return
    # only the first problem is read, so each line relies on the checks above it
    yield from _is(sampling, {"streams": list, "phases": list}, "sampling")
    for stream in sampling["streams"]:
        is_packed = isinstance(stream, dict) and "packing" in stream
        kinds = {**STREAM, "packing": dict} if is_packed else STREAM
        yield from _is(stream, kinds, "sampling.streams[...]")
        yield from _packing_problems(stream.get("packing"))
        yield from _not(stream["pair"].get("prefix"), str, "sampling.streams[...].pair.prefix")
        for suffix in ("idx", "bin", *(["mask"] if "mask" in stream["pair"] else [])):
            yield from _identity_problems(stream["pair"].get(suffix), f"sampling.streams[...].pair.{suffix}")
        yield from _is(stream["documents"], DOCUMENTS, "sampling.streams[...].documents")
        if stream["documents"]["tokens"] == 0 or stream["seq_length"] == 0:
            yield Problem("sampling.streams[...]", "has no samples")
        for order in stream["orders"]:
            yield from _is(order, {"seed": int, "num_samples": int}, "sampling.streams[...].orders[...]")
    for phase in sampling["phases"]:
        split = isinstance(phase, dict) and phase.get("split")
        yield from _is(phase, {"first": int, "split": str if split else type(None), "portions": list}, PHASES)
        for portion in phase["portions"]:
            yield from _is(portion, PORTION, f"{PHASES}.portions[...]")
            if portion["stream"] >= len(sampling["streams"]):
                reason = f"is {portion['stream']}, which is not the number of a stream"
                yield Problem(f"{PHASES}.portions[...].stream", reason)
            if not 0 < portion["weight"] <= 1:
                yield Problem(f"{PHASES}.portions[...].weight", f"is {portion['weight']}, not a fraction")


def _packing_problems(packing: Any) -> Iterator[Problem]:
    if packing is not None:
        yield from _is(packing, PACKING, "sampling.streams[...].packing")
        if packing["samples"] == 0:
            yield Problem("sampling.streams[...].packing", "has no samples")


def _identity_problems(identity: Any, key: str) -> Iterator[Problem]:
    yield from _not(identity, dict, key)
    yield from _not(identity.get("size"), int, f"{key}.size")
    yield from _not(identity.get("modified_ns"), int, f"{key}.modified_ns")
    if identity.get("sha256") is not None:
        yield from _not(identity["sha256"], str, f"{key}.sha256")


def _is(value: Any, kinds: Mapping[str, type], key: str) -> Iterator[Problem]:
    """Yields a problem unless `value` is an object with exactly these keys and types."""
    yield from _not(value, dict, key)
    if value.keys() != kinds.keys():
        yield Problem(key, f"has the keys {_show(sorted(value))}, not {_show(sorted(kinds))}")
    for name, kind in kinds.items():
        yield from _not(value[name], kind, f"{key}.{name}")


def _data_problems(data: Any) -> Iterator[Problem]:
    yield from _not(data, dict, "data")
    for name in ("datasets", "train"):
        yield from _dataset_problems(data.get(name) or [], f"data.{name}")
    yield from _not(data.get("stages", []), list, "data.stages")
    for stage in data.get("stages", []):
        yield from _not(stage, dict, "data.stages[...]")
        yield from _dataset_problems(stage.get("train"), "data.stages[...].train")


def _dataset_problems(datasets: Any, key: str) -> Iterator[Problem]:
    yield from _not(datasets, list, key)
    for dataset in datasets:
        yield from _not(dataset, dict, f"{key}[...]")
        yield from _not(dataset.get("prefix"), str, f"{key}[...].prefix")


def _not(value: Any, kind: type, key: str) -> Iterator[Problem]:
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= LARGEST):
        yield Problem(key, f"is {_show(value)}, not {NAMES[kind]}")


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LAST_TIME


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
