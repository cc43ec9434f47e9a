"""Megatron-LM's checkpoint options."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch
from hpcgen.check.lint.megatron import integer, is_of_a_fork, word_of
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.rules.megatron import ARGUMENTS
from hpcgen.check.lint.rules.signals import pids_of_trainings, signal_of
from hpcgen.text import counted

MIN_RUN_ITERS, MIN_RUN_SAMPLES = 5000, 1_000_000
"""Minimum length of a run that is not a benchmark."""


@rule(
    "checkpoint-worker",
    "warning",
    "the persistent checkpoint worker is unused",
    source=f"{ARGUMENTS}, --use-persistent-ckpt-worker",
)
def checkpoint_worker(job: Job) -> Iterator[Hit]:
    """--use-persistent-ckpt-worker only works with --async-save. Otherwise, saves still block the training."""
    for launch in job.megatron:
        flag = launch.flags.get("use-persistent-ckpt-worker")
        if flag and "async-save" not in launch.flags and not launch.is_open:
            yield Hit.at(
                flag.line,
                "--use-persistent-ckpt-worker has no effect without --async-save",
                "add --async-save, or remove it",
            )


@rule("save-without-load", "warning", "a restart begins at iteration 0", source=f"{ARGUMENTS}, --load")
def save_without_load(job: Job) -> Iterator[Hit]:
    """A restarted job resumes only if --load names the directory of --save. Otherwise, it overwrites the checkpoints.

    With --finetune and another directory in --load, a requeued job starts again from the weights in that directory.
    """
    for launch in job.like_megatron:
        flag = launch.flags.get("save")
        if flag and "load" not in launch.flags and not launch.is_open and job.script.is_batch:
            yield Hit.at(
                flag.line,
                "without --load, the next run starts from iteration 0 and overwrites the checkpoints of this one",
                "add --load with the same directory",
            )
        elif job.script.is_batch and "no-requeue" not in job.script.options and _loads_others_again(launch):
            yield Hit.at(
                launch.flags["load"].line,
                "--finetune loads the weights of --load at every start: a requeued job begins again at iteration 0",
                "once --save has a checkpoint, use its directory in --load, without --finetune",
            )


def _loads_others_again(launch: Launch) -> bool:
    """True if --finetune certainly loads from another directory than --save writes to."""
    flags = launch.flags
    if not {"save", "load", "save-interval", "finetune"} <= flags.keys() or launch.is_open:
        return False
    save, load = flags["save"].value, flags["load"].value
    if not (flags["finetune"].word.certain and save and load and save.certain and load.certain):
        return False
    if save.assumed or load.assumed or not (save.text.startswith("/") and load.text.startswith("/")):
        return False
    # the known parts of both paths, up to the first variable, must differ
    starts = [re.split(r"[$`{]", word.text.rstrip("/") + "/")[0] for word in (save, load)]
    return not starts[0].startswith(starts[1]) and not starts[1].startswith(starts[0])


@rule(
    "resume-without-optimizer",
    "warning",
    "a restart loses the optimizer state",
    source="Megatron-LM, megatron/training/checkpointing.py, load_checkpoint",
)
def resume_without_optimizer(job: Job) -> Iterator[Hit]:
    """With --no-load-optim, every restart of a run begins with Adam's moments at zero, and the loss jumps.

    With --no-save-optim, the checkpoints cannot be resumed. Only reported if --save and --load name the same directory.
    """
    for launch in job.megatron:
        save, load = (flag and flag.value for flag in map(launch.flags.get, ("save", "load")))
        if "finetune" in launch.flags or not (save and load):
            continue
        if save.text != load.text or not (save.certain and load.certain):
            continue
        for name, effect in (
            ("no-load-optim", "every restart of this run begins with an empty optimizer state"),
            ("no-save-optim", "without the optimizer state, this run cannot resume from its checkpoints"),
        ):
            flag = launch.flags.get(name)
            if flag and flag.word.certain:
                yield Hit.at(flag.line, f"--{name}: {effect}", f"remove --{name}")


@rule(
    "save-interval",
    "error",
    "Megatron-LM does not start",
    source=f"{ARGUMENTS}, validate_args, v2.0 to core 0.19: assert args.save_interval is not None",
)
def save_interval(job: Job) -> Iterator[Hit]:
    """With --save, Megatron-LM requires --save-interval. Without it, every rank stops with an AssertionError.

    A warning if the script has options of a fork, which may have a default.
    """
    for launch in job.megatron:
        flag = launch.flags.get("save")
        if flag and not {"save-interval", "yaml-cfg"} & launch.flags.keys() and not launch.is_open:
            yield Hit.at(
                flag.line,
                "with --save and without --save-interval, Megatron-LM stops at the start (AssertionError)",
                "add --save-interval",
                severity="warning" if is_of_a_fork(launch) or not flag.word.certain else None,
            )


@rule(
    "no-exit-handler",
    "note",
    "no checkpoint at the time limit",
    source=f"{ARGUMENTS}, --exit-duration-in-mins; Slurm, slurm.conf, KillWait",
)
def no_exit_handler(job: Job) -> Iterator[Hit]:
    """At its time limit, a job gets SIGTERM and, 30 seconds later, SIGKILL: too late for a checkpoint.

    --exit-duration-in-mins saves before the limit, and --exit-signal-handler at a signal. This is only a warning if the
    script has --exit-signal-handler but nothing in it sends an earlier signal. Only reported if the script has --time.
    """
    for launch in job.megatron:
        flags = launch.flags
        has_limit = job.time_limit_s or "time-min" in job.script.options
        if "save" not in flags or launch.is_open or not has_limit:
            continue
        handler = flags.get("exit-signal-handler")
        if {"exit-duration-in-mins", "exit-interval"} & flags.keys() or (handler and _sends_signals(job)):
            continue
        yield Hit.at(
            handler.line if handler else launch.line,
            "nothing sends a signal before the time limit: SIGTERM comes 30 s before SIGKILL, too late for a checkpoint"
            if handler
            else "at the time limit, the training since the last checkpoint is lost",
            f"add --exit-duration-in-mins {_minutes_before(job.time_limit_s)}"
            if job.time_limit_s
            else "add --exit-duration-in-mins, a few minutes below --time",
            severity="warning" if handler else None,
        )


def _sends_signals(job: Job) -> bool:
    """True if a directive or a command of the script can send a signal before the time limit."""
    senders = {"kill", "pkill", "killall", "scancel", "timeout"}
    own = [command.name for command in job.script.commands]
    own += [word.text.rpartition("/")[2] for step in job.steps for word in step.program]
    asked = "signal" in job.script.options or any(step.option("signal") for step in job.steps)
    return asked or not senders.isdisjoint(own)


def _minutes_before(limit_s: int) -> int:
    """The minutes after which a training should end to save a checkpoint before the limit."""
    minutes = limit_s // 60
    return max(1, minutes - min(10, 1 + minutes // 10))


@rule(
    "exit-signal",
    "warning",
    "Megatron-LM dies at the signal instead of saving",
    source=f"{ARGUMENTS}, --exit-signal-handler; megatron/training/dist_signal_handler.py",
)
def exit_signal(job: Job) -> Iterator[Hit]:
    """--exit-signal-handler saves a checkpoint at SIGTERM, or at the signal in --exit-signal of newer releases.

    Any other signal ends the program without a checkpoint. Reported are signals of --signal to the steps, and those
    that a trap sends to srun, which forwards USR1 and USR2.
    """
    for launch in job.megatron:
        own = word_of(launch, "exit-signal")
        if launch.is_open or "exit-signal-handler" not in launch.flags or launch.step is None:
            continue
        handled = own.text.upper().removeprefix("SIG") if own else "TERM"
        for line, name in _signals_to_step(job, launch):
            if name != handled:
                yield Hit.at(
                    line,
                    f"--exit-signal-handler saves at {handled}, but {name} reaches the training and ends it",
                    f"add --exit-signal SIG{name}, or use --signal=TERM@... without B:",
                )


def _signals_to_step(job: Job, launch: Launch) -> Iterator[tuple[int, str]]:
    """The line and the name of USR1 or USR2 that Slurm or a trap sends to a training."""
    signal = signal_of(job)
    if signal and "B" not in signal[0] and signal[1] in ("USR1", "USR2") and launch.launcher == "python":
        yield job.script.option_line("signal"), signal[1]
    for command in job.script.commands:
        if command.name == "trap" and len(command.words) > 2:
            sent = re.findall(
                r"\bkill\s+-(?:s\s+)?(?:SIG)?(USR[12])\s+[\"']?\$\{?(\w+)", command.words[1].text
            )
            if signal and "B" in signal[0] and any(pid in pids_of_trainings(job) for _, pid in sent):
                yield command.line, sent[0][0]


@rule(
    "exit-after-limit",
    "warning",
    "Slurm ends the training before it saves",
    source=f"{ARGUMENTS}, --exit-duration-in-mins; Slurm, man sbatch, --time",
)
def exit_after_limit(job: Job) -> Iterator[Hit]:
    """--exit-duration-in-mins saves a checkpoint and exits. Beyond --time, Slurm ends the job before that.

    Not reported if the training also exits at a signal.
    """
    limit_s = job.time_limit_s
    for launch in job.megatron:
        minutes = integer(launch, "exit-duration-in-mins")
        by_signal = "exit-signal-handler" in launch.flags and _sends_signals(job)
        if limit_s and minutes and 60 * minutes >= limit_s and not by_signal:
            yield Hit.at(
                launch.flags["exit-duration-in-mins"].line,
                f"--exit-duration-in-mins {minutes} is not below the time limit of {counted(limit_s // 60, 'minute')}",
                f"use --exit-duration-in-mins {_minutes_before(limit_s)}, or raise --time",
            )


@rule("no-save", "warning", "the training saves no checkpoint", source=f"{ARGUMENTS}, --save")
def no_save(job: Job) -> Iterator[Hit]:
    """Without --save, Megatron-LM writes no checkpoint. Short runs, which can be benchmarks, are not reported."""
    for launch in job.megatron:
        iterations, samples = integer(launch, "train-iters"), integer(launch, "train-samples")
        is_long = (iterations or 0) >= MIN_RUN_ITERS or (samples or 0) >= MIN_RUN_SAMPLES
        if is_long and "save" not in launch.flags and not launch.is_open and job.script.is_batch:
            length = f"{iterations} iterations" if iterations else f"{samples} samples"
            yield Hit.at(
                launch.line,
                f"no --save: a training of {length} writes no checkpoint",
                "add --save and --load",
            )
