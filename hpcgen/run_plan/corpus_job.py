"""The corpus of a run file as its stages read it: the job of a data stage, and the array that runs it."""

from __future__ import annotations

import json
from pathlib import Path

from hpcgen.config.corpus import CorpusJob, problems
from hpcgen.config.loader import Run, load_run
from hpcgen.config.presets import missing_tokenizer
from hpcgen.config.run import RunConfig
from hpcgen.config.validation import located
from hpcgen.data.manifest import require_selection
from hpcgen.data.sources.directory import directory_problem
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.planning.allocation import Array
from hpcgen.planning.paths import absolute_paths, corpus_job, planning_job
from hpcgen.planning.request import make_array
from hpcgen.stages import STAGES
from trainer.contract.config import ConfigError, from_dict
from trainer.contract.files.shared_files import read_configuration


def read_job(config: Path, overrides: tuple[str, ...]) -> CorpusJob:
    """The corpus of a run file or of a job's corpus.json.

    Raises:
        ConfigErrors: the file is invalid.
        HpcgenError: the file cannot be read, or the existing manifest was planned for another selection of files.
    """
    if config.suffix == ".json":
        job = _read_job_file(config, overrides)
    else:
        run = load_run(config, overrides)
        absolute = absolute_paths(run.config, run.directory)
        _require_valid(run, _corpus_problems(absolute))
        job = corpus_job(absolute)
    require_selection(job)
    return job


def read_job_to_plan(config: Path, overrides: tuple[str, ...]) -> tuple[CorpusJob, tuple[str, ...]]:
    """The corpus of a run file, including its source, and warnings.

    Only planning reads the source, so only here its directory is checked. A missing tokenizer is a warning, because
    planning does not need it.

    Raises:
        ConfigErrors: the file is invalid.
        HpcgenError: the file cannot be read or is not a run file.
    """
    if config.suffix == ".json":
        raise HpcgenError(f"{config} is a job's input and names no source", "use -c with the run file")
    run = load_run(config, overrides)
    absolute = absolute_paths(run.config, run.directory)
    _require_valid(run, [*_corpus_problems(absolute), *_source_problems(absolute)])
    tokenizer = absolute.data.tokenizer.tokenizer_file
    warnings: tuple[str, ...] = ()
    if tokenizer and not Path(tokenizer).exists():
        problem = missing_tokenizer(absolute.preset, tokenizer, "prepare")
        warnings = (str(located(problem, run.document, run.config)),)
    return planning_job(absolute), warnings


def planned_array(stage: str, config: Path, overrides: tuple[str, ...], num_tasks: int | None) -> Array:
    """The array of a stage as planned by the run file, or with `num_tasks`.

    Raises:
        HpcgenError: the file is invalid, or is a job's corpus.json and `num_tasks` is missing.
    """
    if config.suffix == ".json":
        if num_tasks is None:
            raise HpcgenError(f"{config} does not contain the number of tasks", "add --num-tasks")
        return Array(num_tasks)
    run = load_run(config, overrides)
    planned = make_array(STAGES[stage], run.config, run.cluster)
    assert planned is not None
    return planned if num_tasks is None else Array(num_tasks, planned.array_parallelism)


def _read_job_file(config: Path, overrides: tuple[str, ...]) -> CorpusJob:
    if overrides:
        raise HpcgenError(
            f"--set cannot change {config}, which is a job's input", "use --set with the run file"
        )
    try:
        document = json.loads(read_configuration(config))
        return from_dict(CorpusJob, document, where=str(config))
    except OSError as error:
        raise HpcgenError(f"cannot read {config}: {error.strerror}") from error
    except ValueError as error:
        raise HpcgenError(str(error), where=config) from error
    except ConfigError as error:
        raise ConfigErrors(error.mistakes) from error


def _corpus_problems(absolute: RunConfig) -> list[Problem]:
    """The mistakes in the corpus and its tokenizer, the only sections that data stages need."""
    corpus = absolute.data.corpus
    return [] if corpus is None else list(problems(corpus, absolute.data.tokenizer))


def _source_problems(absolute: RunConfig) -> list[Problem]:
    """The mistakes in the directory of the source."""
    corpus = absolute.data.corpus
    if corpus is None or not corpus.source.directory:
        return []
    problem = directory_problem(Path(corpus.source.directory), exclude=Path(corpus.directory))
    return [] if problem is None else [problem]


def _require_valid(run: Run, wrong: list[Problem]) -> None:
    if wrong:
        raise ConfigErrors([located(problem, run.document, run.config) for problem in wrong])
