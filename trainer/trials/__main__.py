"""`python -m trainer.trials`: one rank of a trial, which trains some steps on random samples.

The trial's result is a file. Rank 0 writes it after the last step. A rank that fails writes why, unless another has.
Exit status: 0 if the trial was measured, 1 if it did not fit or failed, 2 for an invalid configuration, 4 if it hung.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Literal

from trainer.contract.config import ConfigError, read_as
from trainer.contract.errors import Exit, LostPeersError, TrainerError
from trainer.contract.files.run_directory import publish
from trainer.contract.trials import TrialConfig, TrialResult, TrialsConfig, result_path, result_text
from trainer.distributed import device
from trainer.distributed.rendezvous import find_ranks
from trainer.distributed.slurm_job import job_id, node_name
from trainer.faults.hang import current_line
from trainer.faults.stopping import leave
from trainer.metrics.console import quiet_libraries


def main() -> int:
    """Parse the arguments and run the trial as one rank. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.trials", description="Trains some steps of one of several configurations."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="configuration (JSON)")
    parser.add_argument("--trial", metavar="KEY", required=True, help="key of the trial")
    arguments = parser.parse_args()
    try:
        config = read_as(TrialsConfig, arguments.config)
        found = [trial for trial in config.trials if trial.key == arguments.trial]
        if not found:
            raise ConfigError(f"no trial has this key: {arguments.trial}", where=arguments.config)
    except TrainerError as error:
        print(f"trial: ERROR: {error}", file=sys.stderr)
        return error.exit_code
    return _Rank(config, found[0]).run()


class _Rank:
    """One rank of a trial."""

    def __init__(self, config: TrialsConfig, trial: TrialConfig) -> None:
        self._config, self._trial = config, trial
        self._result = result_path(trial.trainer.run_dir, trial.key)

    def run(self) -> int:
        """Run the trial. Returns the exit status."""
        set_variables(self._trial.environment)
        limit = threading.Timer(self._config.time_limit_s, self._leave_hung)
        limit.daemon = True
        limit.start()
        quiet_libraries()
        trainer, name = self._trial.trainer, self._trial.name
        try:
            device.prepare(trainer.device)
            if trainer.training.deterministic_mode:
                device.make_deterministic()
            from trainer.trials import trial  # imports megatron.core, so it must come after `device.prepare`
        except Exception as error:
            leave(self._report(error, self._ended("failed", f"{error}")))
        try:
            self._write(trial.measure(trainer, self._config.warmup_steps, self._config.steps, name))
        except LostPeersError as error:
            leave(error.exit_code, str(error))  # the rank that ended first, or the job, says why
        except Exception as error:
            leave(self._report(error, trial.failure(error, trainer, name)))
        return Exit.DONE

    def _report(self, error: Exception, failure: TrialResult) -> Exit:
        """Write why this rank failed. Returns the exit status."""
        self._write(failure)
        if isinstance(error, TrainerError) or failure.status == "out of memory":
            print(f"trial: {failure.reason}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        return error.exit_code if isinstance(error, TrainerError) else Exit.FAULT

    def _leave_hung(self) -> None:
        """Report where this rank is, and end it. Runs in a thread."""
        ranks, limit_s = find_ranks(os.environ), self._config.time_limit_s
        reason = f"no result after {limit_s} s; rank {ranks.rank} on {node_name()} was at {current_line()}"
        faulthandler.dump_traceback()
        self._write(self._ended("hung", reason))
        leave(Exit.HUNG, reason)

    def _ended(self, status: Literal["failed", "hung"], reason: str) -> TrialResult:
        """The result of a trial that this rank has ended."""
        return TrialResult(
            name=self._trial.name, status=status, job=job_id(), nodes=(node_name(),), reason=reason
        )

    def _write(self, result: TrialResult | None) -> None:
        """Write the result, unless another rank has."""
        if result is not None and not self._result.exists():
            self._result.parent.mkdir(parents=True, exist_ok=True)
            publish(self._result, result_text(result))


def set_variables(environment: dict[str, str]) -> None:
    """Set variables of this process before it imports what reads them. Unset those with an empty value."""
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value


if __name__ == "__main__":
    sys.exit(main())
