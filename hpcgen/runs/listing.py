"""The runs below a directory, or those with a job or on a node."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpcgen.errors import HpcgenError
from hpcgen.runs.find import FoundRuns, find_runs, has_job
from hpcgen.runs.look import RunWatcher
from hpcgen.runs.node_lists import node_names
from hpcgen.runs.slurm import Queue, ask_job, ask_node
from hpcgen.runs.status import RunStatus
from hpcgen.text import counted
from trainer.contract.record import record


@record(kw_only=True)
class ListedRuns:
    """Runs, the most recently active first."""

    runs: tuple[RunStatus, ...]
    problems: tuple[str, ...]
    """Directories that could not be looked at, and why."""


def list_runs(
    root: Path, depth: int, now: float, *, job: str | None = None, node: str | None = None
) -> ListedRuns:
    """The status of the runs below `root` at the time `now` (Unix time in seconds).

    `job`: only the run of this job. `node`: only runs with a job on this node. Those that Slurm names need not be below
    `root`.

    Raises:
        HpcgenError: `root` cannot be read, or `job` is no job ID.
    """
    asked = _asked(job, node)
    known = sorted(
        {run for queued in asked.jobs if (run := queued.run_dir) is not None and not queued.is_over}
    )
    found = FoundRuns(directories=(), closed=0)
    if not known and (job is not None or node is None or asked.problem):
        found = _find(root, depth)
    directories = [*known, *found.directories]
    if job is not None and not known:
        directories = [run for run in directories if has_job(run, job)]
    runs, problems = _look(directories, now)
    if node is not None and not known:
        runs = [run for run in runs if _is_on(run, node)]
    runs.sort(key=lambda run: -(run.active or 0.0))
    said = {problem for run in runs for problem in run.problems} | {asked.problem} - {""}
    closed = f"{counted(found.closed, 'directory', 'directories')} below {root} may not be read"
    return ListedRuns(
        runs=tuple(runs), problems=(*sorted(said), *problems, *([closed] if found.closed else []))
    )


def _asked(job: str | None, node: str | None) -> Queue:
    if job is not None:
        return ask_job(job)
    return ask_node(node) if node is not None else Queue()


def _find(root: Path, depth: int) -> FoundRuns:
    try:
        return find_runs(root, depth)
    except OSError as error:
        raise HpcgenError(f"cannot be read ({error.strerror})", "give a directory", where=root) from error


def _look(directories: Iterable[Path], now: float) -> tuple[list[RunStatus], list[str]]:
    """The status of each run that can be read, and why others cannot."""
    watcher = RunWatcher(tuple(directories), reads_logs=False, counts_outputs=False, leaves_out=True)
    return watcher.look(now), watcher.problems


def _is_on(run: RunStatus, node: str) -> bool:
    """True if a job of the run is on a node, as far as its files say."""
    if run.state not in ("running", "silent", "hung"):
        return False
    in_use = (attempt.nodes for attempt in run.attempts if attempt.state in ("running", "unknown"))
    return any(node in node_names(nodes) for nodes in in_use)
