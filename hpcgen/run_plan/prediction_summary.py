"""The prediction of a planned run in its summary: JSON data for scripts, and lines of text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcgen.planning.predicted_step import NoPrediction
from hpcgen.planning.run_time import RunTime
from hpcgen.planning.step_time.machine import BY_TUNE
from hpcgen.run_plan.plan import Plan, located_in
from hpcgen.run_plan.prediction import Prediction, predict
from hpcgen.text import between, counted, duration, rough, time_between
from trainer.contract.model.flops import FORMULA

PARTS = {
    "compute": "compute",
    "host": "waiting for the host",
    "tensor_parallel": "tensor parallel",
    "context_parallel": "context parallel",
    "expert_parallel": "expert parallel",
    "data_parallel": "data parallel",
    "pipeline_bubble": "pipeline bubble",
    "pipeline_transfers": "pipeline transfers",
    "optimizer": "optimizer",
}
"""Part of a step -> its name for people."""
SMALL_SHARE = 0.005
"""Parts below this share of the step are not shown to people."""


def in_json(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """The keys of the summary about the prediction, and warnings. Names of keys include the units."""
    try:
        found = predict(plan)
    except NoPrediction as reason:
        return {"prediction": None, "no_prediction": str(reason)}, []
    warnings = [str(located_in(plan.run, problem)) for problem in found.warnings]
    return {"prediction": figures(found), "no_prediction": None}, warnings


def figures(found: Prediction) -> dict[str, Any]:
    """A prediction as JSON data."""
    peak, full = found.trainer.peak_tflops, found.full_attention_tflops_per_gpu
    return {
        "step_time_s": found.step.total,
        "step_parts_s": {name: getattr(found.step, name) for name in PARTS},
        "stages": [{"forward_s": stage.forward, "backward_s": stage.backward} for stage in found.step.stages],
        "range": list(found.range),
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_gpu": found.tokens_per_s / found.trainer.world_size,
        "flop_formula": FORMULA,
        "tflops_per_gpu": found.tflops_per_gpu,
        "mfu": peak and found.tflops_per_gpu / peak,
        "full_attention_tflops_per_gpu": full,
        "full_attention_mfu": peak and full / peak,
        "remaining_tokens": found.remaining_tokens,
        "gpus": found.likely.resources.num_gpus,
        "job_kw": found.likely.resources.kilowatts,
        "price_per_gpu_hour": found.price_per_gpu_hour,
        "currency": found.currency,
        **{name: _of_run(found, getattr(found, name)) for name in ("low", "likely", "high")},
        "gpu_model": found.gpu_model,
        "kernels_measured": found.is_measured,
        "host_measured": found.step.host_is_measured,
        "guesses": list(found.guesses),
    }


def _of_run(found: Prediction, run: RunTime) -> dict[str, Any]:
    return {
        "days": run.total_s / 86400,
        "total_s": run.total_s,
        "steps_s": run.steps_s,
        "evaluation_s": run.evaluation_s,
        "saves_and_failures_s": run.saves_and_failures_s,
        "job_overhead_s": run.job_overhead_s,
        "jobs": run.num_jobs,
        "gpu_hours": run.gpu_hours,
        "energy_kwh": run.energy_kwh,
        "cost": found.cost(run),
    }


def for_people(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The prediction in a summary as headings and text."""
    found = summary["prediction"]
    if found is None:
        return [("prediction", f"none: {summary['no_prediction']}")]
    return [*lines(found, is_fp8=summary["fp8"] is not None), ("guessed", _guessed(found))]


def lines(found: dict[str, Any], *, is_fp8: bool) -> list[tuple[str, str]]:
    """The times and resources of a prediction (`figures`) as headings and text."""
    return [
        ("step time", f"about {duration(found['step_time_s'])}: {_parts(found)}"),
        ("throughput", _throughput(found, is_fp8=is_fp8)),
        ("duration", _duration(found)),
        ("resources", _resources(found)),
    ]


def num_measurable(guesses: Sequence[str]) -> int:
    """Number of guessed constants that `hpcgen tune` measures on the cluster."""
    return sum(BY_TUNE in guess for guess in guesses)


def _guessed(found: dict[str, Any]) -> str:
    constants = f"{counted(len(found['guesses']), 'constant')} of the prediction; --json lists them"
    if number := num_measurable(found["guesses"]):
        constants += f", and hpcgen tune measures {number} of them"
    if found["kernels_measured"]:
        return constants
    return f"every time above, since kernels of {found['gpu_model']} were not measured: {constants}"


def _parts(found: dict[str, Any]) -> str:
    """The parts of a step, the largest first."""
    shares = {name: seconds / found["step_time_s"] for name, seconds in found["step_parts_s"].items()}
    ordered = sorted(shares, key=lambda name: -shares[name])
    return ", ".join(f"{PARTS[name]} {shares[name]:.0%}" for name in ordered if shares[name] >= SMALL_SHARE)


def _throughput(found: dict[str, Any], is_fp8: bool) -> str:
    peak = " of the FP8 peak" if is_fp8 else ""
    mfu = "" if found["mfu"] is None else f", MFU {found['mfu']:.0%}{peak}"
    return (
        f"about {rough(found['tokens_per_s'], 3)} tokens/s, {rough(found['tokens_per_s_per_gpu'], 3)} per GPU; "
        f"{found['tflops_per_gpu']:.0f} TFLOP/s per GPU{mfu} (causal attention counted half, as in Megatron-LM)"
    )


def _duration(found: dict[str, Any]) -> str:
    low, high = found["low"], found["high"]
    jobs = (
        f"{low['jobs']:,} to {high['jobs']:,} jobs"
        if low["jobs"] < high["jobs"]
        else counted(high["jobs"], "job")
    )
    time = time_between(low["total_s"], high["total_s"])
    return f"{time} for {found['remaining_tokens']:,} tokens, in {jobs}, without the time in the queue"


def _resources(found: dict[str, Any]) -> str:
    low, high = found["low"], found["high"]
    texts = [f"{between(low['gpu_hours'], high['gpu_hours'])} GPU-hours on {counted(found['gpus'], 'GPU')}"]
    texts.append(f"{between(low['energy_kwh'], high['energy_kwh'])} kWh without cooling")
    if found["price_per_gpu_hour"] is not None:
        price = f"at {found['price_per_gpu_hour']:g} {found['currency']} per GPU-hour"
        texts.append(f"{between(low['cost'], high['cost'])} {found['currency']} {price}")
    return ", ".join(texts)
