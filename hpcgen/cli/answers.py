"""hpcgen answers: show what a model answered while it trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from hpcgen.cli.options import json_option
from hpcgen.cli.run_argument import run_directories
from hpcgen.errors import HpcgenError
from hpcgen.runs.answers import Answer, read_answers
from hpcgen.text import counted, harmless


@click.command("answers")
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
@click.option("--all", "shows_all", is_flag=True, help="All iterations.  [default: the first and the last]")
@json_option
def command(run: Path | None, shows_all: bool, as_json: bool) -> None:
    """RUN is a run directory, or a run file with the directory in paths.run_dir. Default: run.yaml, or this directory.

    Shows the answers to the prompts of answers.prompts. JSON has those of all iterations.
    """
    [directory] = run_directories(() if run is None else (run,))
    answers = read_answers(directory)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(answer) for answer in answers], indent=1))
        return
    if not answers:
        raise HpcgenError(
            "the run has no answers", "set answers.prompts in its run file, and submit it", where=directory
        )
    iterations = list(dict.fromkeys(answer.iteration for answer in answers))
    shown = iterations if shows_all else sorted({iterations[0], iterations[-1]})
    for number in sorted({answer.number for answer in answers}):
        _show([each for each in answers if each.number == number and each.iteration in shown])
    if len(shown) < len(iterations):
        click.echo(f"{counted(len(iterations) - len(shown), 'more iteration')}: --all shows them")


def _show(answers: list[Answer]) -> None:
    """Prints a prompt and its answers."""
    prompt = None
    for answer in answers:
        if answer.prompt != prompt:
            prompt = answer.prompt
            click.secho(harmless(prompt, keep="\n\t"), bold=True)
        end = "" if answer.finish_reason in ("eod", "stop") else f" [ends by {answer.finish_reason}]"
        text = harmless(answer.answer, keep="\n\t") or "(nothing)"
        click.echo(f"  {answer.iteration:,}: {text}{end}")
    click.echo()
