"""The run's directory as the launchers make it, with the access that `share` allows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from hpcgen.errors import HpcgenError
from hpcgen.planning.plan import Plan
from hpcgen.sharing import shared_as


def sharing(plan: Plan) -> AbstractContextManager[None]:
    """The umask that `share` stands for, while files of the run are written (submitit's pickles are 0644 else)."""
    return shared_as(plan.config.share)


def make_run_directory(plan: Plan) -> Path:
    """The run's directory and submitit's folder in it, which holds pickles and so is nobody else's to write.

    Raises:
        HpcgenError: it cannot be made, or submitit's folder belongs to another user.
    """
    run_dir = Path(plan.config.paths.run_dir)
    folder = run_dir / "submitit"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise HpcgenError(f"{folder}: cannot be made ({error.strerror})", "mend paths.run_dir") from error
    return run_dir
