"""States of runs and of their attempts."""

from __future__ import annotations

from typing import Literal

RunState = Literal["new", "waiting", "running", "silent", "hung", "stopped", "died", "failed", "done"]
"""new: no job has started. silent: no sign of activity for 15 minutes. died: it ended without a verdict of its own."""
AttemptState = Literal["running", "killed", "unknown", "done", "requeued", "stopped", "terminated", "failed"]
"""The verdict of the job's script. Without one: running, killed, or unknown if Slurm does not answer."""
