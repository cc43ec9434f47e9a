"""CLUSTER.measured.json: what `hpcgen tune` has measured on the nodes of a cluster. Predictions of its runs read it.

The file is next to the profile of the cluster. If the profile is shipped with hpcgen, or the user cannot write to its
directory, the file is in the user's directory of profiles.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcgen import files
from hpcgen.config.directories import measured_places
from hpcgen.config.fields import is_profile_path
from hpcgen.config.known_gpus import gpu_called
from hpcgen.config.loader import Run
from hpcgen.config.node_type import NodeType
from hpcgen.config.trust import require_trusted_file
from hpcgen.errors import FileErrors, HpcgenError, Problem
from hpcgen.planning.step_time.measurements import (
    COLUMNS,
    Measurements,
    combined,
    gpu_key,
    row_mistakes,
    table_of,
    text_of,
)
from trainer.contract.files.regular_file import read_text

FORMAT = 1
MAX_MISTAKES = 10
"""Mistakes of a file that a message lists."""
AGAIN = "move the file away, and measure again with hpcgen tune"


def measured_on(run: Run) -> Measurements | None:
    """Measurements on the cluster of a run; None without any.

    Raises:
        HpcgenError: a file cannot be read or is not valid, or it is of another GPU.
    """
    is_named = is_profile_path(run.cluster_name)
    return measured_in(_places(run), run.node_type, looked_up=not is_named)


def measured_in(
    paths: Iterable[Path], node_type: NodeType, *, looked_up: bool = False
) -> Measurements | None:
    """Measurements in those of the files that exist; None without any. `looked_up` is True for files that were found
    by name.

    Raises:
        HpcgenError: see `measured_on`.
    """
    content = _content(paths, node_type, looked_up=looked_up)
    return None if content is None else _table(json.dumps(content))


def _places(run: Run) -> list[Path]:
    return measured_places(run.cluster_name, run.cluster_files)


@functools.lru_cache(maxsize=4)
def _table(text: str) -> Measurements:
    """The table of a file. The same object for the same text, since times of kernels are kept for each table."""
    content = json.loads(text)
    return table_of(content | {"gpu_model": content["gpu_model"] or ""})


def add_measured(run: Run, result: Path) -> Path:
    """Adds what a calibration has measured to the file of the run's cluster. Its rows replace those of the same key.

    Raises:
        HpcgenError: the result or the file is not valid, it is of another GPU, or the file cannot be written.
    """
    measured = _parsed(result)
    node_type = run.node_type
    found, expected = (gpu_called(str(name or "")) for name in (measured.get("gpu"), node_type.gpu_model))
    if found and expected and found != expected:
        reason = f"the nodes have {measured['gpu']}, but gpu_model of {run.cluster.node_type} is {node_type.gpu_model}"
        raise HpcgenError(reason, "correct the node type, or choose another one in the profile", where=result)
    measured.pop("gpu", None)
    content = {"format": FORMAT, "gpu_model": node_type.gpu_model, **measured}
    _require_valid(result, content, node_type)
    old = _content(_places(run), node_type, looked_up=not is_profile_path(run.cluster_name))
    target = _target(run)
    files.write_text(target, text_of(content if old is None else _merged(old, content)), 0o644)
    return target


def _target(run: Run) -> Path:
    """The first place that the user can write to."""
    *others, own = _places(run)
    return next((path for path in others if os.access(path.parent, os.W_OK | os.X_OK)), own)


def _content(paths: Iterable[Path], node_type: NodeType, *, looked_up: bool) -> dict[str, Any] | None:
    """The content of the files that exist; None without any. Rows of a later one replace others."""
    contents = []
    for path in paths:
        if os.path.lexists(path):
            content = _parsed(path)  # first, because it says so if the file cannot be read
            require_trusted_file(path, looked_up=looked_up)
            _require_valid(path, content, node_type)
            contents.append(content)
    contents.sort(key=lambda content: str(content["measured"]["date"]))
    found: dict[str, Any] | None = None
    for content in contents:
        found = content if found is None else _merged(found, content)
    return found


def _merged(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """The newer content, with those rows of the older one that it does not replace."""
    both = combined(*(table_of({**each, "gpu_model": ""}) for each in (older, newer)))
    return {**newer, **{name: rows for name in COLUMNS if (rows := list(getattr(both, name)))}}


def _parsed(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise HpcgenError(f"cannot be read ({reason})", AGAIN, where=path) from error
    if not isinstance(content, dict):
        raise HpcgenError("is not a table of measurements", AGAIN, where=path)
    return content


def _require_valid(path: Path, content: Mapping[str, Any], node_type: NodeType) -> None:
    """Refuses a file that another version wrote, that is of other devices, or whose rows are not valid.

    Raises:
        HpcgenError: see above. Lists the mistakes.
    """
    mistakes = list(_mistakes(content, node_type))
    if mistakes:
        more = len(mistakes) - MAX_MISTAKES
        shown = mistakes[:MAX_MISTAKES]
        if more > 0:
            shown.append(Problem("", f"has {more} more mistakes"))
        raise FileErrors(
            [Problem(each.path, each.reason, each.hint or AGAIN, where=str(path)) for each in shown]
        )


def _mistakes(content: Mapping[str, Any], node_type: NodeType) -> Iterator[Problem]:
    if content.get("format") != FORMAT:
        yield Problem("format", f"= {content.get('format')!r} is not {FORMAT}, the format of this version")
        return
    if content.get("device") != node_type.device:
        yield Problem(
            "device", f"= {content.get('device')!r} is not that of the node type, {node_type.device}"
        )
    elif gpu_key(str(content.get("gpu_model"))) != gpu_key(str(node_type.gpu_model)):
        reason = f"= {content.get('gpu_model')!r} is not the GPU of the node type, {node_type.gpu_model}"
        yield Problem("gpu_model", reason)
    measured = content.get("measured")
    date = measured.get("date") if isinstance(measured, dict) else None
    if not isinstance(date, str) or not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        yield Problem("measured.date", f"= {date!r} is not a date such as 2026-11-26")
    for section in COLUMNS:
        rows = content.get(section, [])
        if not isinstance(rows, list):
            yield Problem(section, "is not a list of rows")
            continue
        for index, row in enumerate(rows):
            yield from (Problem(f"{section}[{index}]", reason) for reason in row_mistakes(section, row))
