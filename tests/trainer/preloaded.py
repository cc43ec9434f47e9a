"""Modules that prepared_python.py imports: all that the trainer imports on a CPU."""

import gc
import os
import sys

SEARCHED = list(sys.path)
"""Without what tests have added to theirs."""

gc.disable()  # as in trainer/__main__.py: collecting among imported modules takes a fifth of the time
os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported; two ranks on two cores

from trainer.distributed import device  # noqa: E402
from trainer.metrics.console import quiet_libraries  # noqa: E402

quiet_libraries()
device.prepare("cpu")

import trainer.train  # noqa: E402, F401  # after the stand-ins

gc.freeze()
gc.enable()
