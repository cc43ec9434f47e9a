"""Prediction of the time of a training step."""

from hpcgen.planning.step_time.result import StageTime, StepTime

__all__ = ["StageTime", "StepTime"]
