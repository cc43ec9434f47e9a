"""The stage evaluate: computes perplexity and tasks of lm-eval for the checkpoints of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.config.tokenizer import tokenizer_name, tokenizer_problems
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.config_text import config_text
from hpcgen.planning.inputs import Input, text_files, tokenizer_files
from hpcgen.planning.kind import ONE_THREAD, Export, Stage, Work
from hpcgen.planning.paths import checkpoint_directory
from hpcgen.planning.resuming import model_of_adapters
from trainer.contract.config import TrainerConfig
from trainer.contract.evaluation import DIRECTORY, EvaluationConfig, is_task_file
from trainer.contract.rules.engine import ANY_RUN
from trainer.contract.rules.evaluation import job_has_work
from trainer.contract.task_files import code_of


class Evaluate(Stage):
    """Runs trainer.evaluate."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Evaluates the checkpoints that are due; without `evaluation.every`, the newest one."""
        settings, checkpoints = config.evaluation, checkpoint_directory(config)
        tokenizer = config.data.tokenizer
        evaluation = EvaluationConfig(
            name=config.name,
            run_dir=config.paths.run_dir,
            device=run.node_type.device,
            world_size=allocation.num_tasks,
            checkpoint=checkpoints,
            tokenizer=tokenizer_name(tokenizer) if settings.tasks else None,
            eod_token=tokenizer.eod_token if settings.tasks else None,
            settings=settings,
            tensorboard=config.logging.tensorboard,
            wandb_project=config.logging.wandb_project,
            wandb_entity=config.logging.wandb_entity,
        )
        task_files = (Input(task) for task in settings.tasks if is_task_file(task))
        return Work(
            arguments=("-m", "trainer.evaluate"),
            inputs=(*text_files(config), *task_files, *(tokenizer_files(config) if settings.tasks else ())),
            reads=(checkpoints, *model_of_adapters(config)),
            # datasets are locked in their cache while they are read
            writes=(settings.hf_home,) if settings.hf_home else (),
            files={self.config_file: config_text(evaluation)},
            values={
                "checkpoints": checkpoints,
                "evaluation_every": settings.every or 0,
                "hf_home": settings.hf_home or "",
            },
        )

    def problems(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields mistakes that leave the job without work, or lm-eval without the tokenizer of the model."""
        yield from job_has_work(dataclasses.replace(ANY_RUN, evaluation=config.evaluation))
        if config.evaluation.tasks:
            yield from tokenizer_problems(config.data.tokenizer, "evaluation.tasks")

    def packages(self, config: RunConfig) -> dict[str, str]:
        """lm-eval, for tasks."""
        return {"lm_eval": "evaluation.tasks"} if config.evaluation.tasks else {}

    def warnings(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields a warning for each task file that runs code."""
        for index, task in enumerate(config.evaluation.tasks):
            if not is_task_file(task):
                continue
            try:
                code = code_of(Path(task))
            except OSError:  # a missing file is reported as an input
                continue
            if code:
                reason = f"runs the code of {', '.join(map(str, code))} (!function) as you"
                yield Problem(f"evaluation.tasks[{index}]", reason, "name only task files that you trust")

    def results(self, config: RunConfig) -> str:
        """The directory with a file per checkpoint."""
        return f"{config.paths.run_dir}/{DIRECTORY}"

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Yields variables for offline mode and threads."""
        yield ONE_THREAD
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            yield Export(name, "1", "Keeps ranks from contacting the Hugging Face Hub while GPUs wait.")
        if config.evaluation.hf_home is not None:
            yield Export("HF_HOME", config.evaluation.hf_home, "Data sets of the tasks (evaluation.hf_home).")


EVALUATE = Evaluate.of("evaluate")
STAGES = (EVALUATE,)
