"""`python -m trainer.calibration`, one process per GPU: measures what hpcgen's predictions need of these nodes.

The result is a JSON file with the sections of a table of measurements, as in topologies/kernels. Exit status: 0 if it
is written, 1 if ranks are missing or hang, 2 for an invalid configuration. Rows that cannot be measured are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from trainer.calibration.machine import gpu_name, machine
from trainer.calibration.measuring import measured
from trainer.contract.calibration import CalibrationConfig
from trainer.contract.config import read_as
from trainer.contract.errors import Exit, TrainerError
from trainer.contract.files.run_directory import publish
from trainer.contract.wording import counted
from trainer.distributed import device
from trainer.distributed.rendezvous import find_ranks
from trainer.distributed.slurm_job import node_name
from trainer.health.fabric import Fabric
from trainer.health.meeting import Meeting, MissingRanksError
from trainer.metrics.console import quiet_libraries

PROGRAM = "calibration"
TIMEOUT_S = 300.0
"""Longest time for which ranks wait for each other, in addition to the budget (seconds)."""


def main() -> int:
    """Parse the arguments and measure. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.calibration", description="Measures what predictions need of these nodes."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="configuration (JSON)")
    parser.add_argument(
        "--result", type=Path, metavar="FILE", required=True, help="file for the result (JSON)"
    )
    arguments = parser.parse_args()
    quiet_libraries()
    ranks = None
    try:
        config = read_as(CalibrationConfig, arguments.config)
        ranks = find_ranks(os.environ)
        device.prepare(config.device)
        node = node_name()
        timeout_s = config.budget_s + TIMEOUT_S
        with Meeting(ranks, node, os.environ, timeout_s, PROGRAM) as meeting:
            fabric = Fabric(config.device, meeting)
            rows = measured(config, meeting, fabric)
            if ranks.rank == 0:
                measured_by = machine(config.device) | {"nodes": fabric.nodes}
                table = {
                    "device": config.device,
                    "gpu": gpu_name(config.device),
                    "measured": measured_by,
                    **rows,
                }
                publish(arguments.result, json.dumps(table, indent=1) + "\n")
                print(f"{PROGRAM}: {counted(sum(map(len, rows.values())), 'row')} measured", flush=True)
            meeting.gather("written", None)
            fabric.close()
    except TrainerError as error:
        if not isinstance(error, MissingRanksError) or ranks is None or ranks.rank == 0:
            print(f"{PROGRAM}: ERROR: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{PROGRAM}: ERROR: {arguments.result} cannot be written: {error.strerror}", file=sys.stderr)
        return Exit.FAULT
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
