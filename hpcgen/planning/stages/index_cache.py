"""The index-cache stage: Megatron-Core's sample indices, built on a CPU before GPUs wait for them."""

from __future__ import annotations

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.paths import trainer_data
from hpcgen.planning.stages.config_text import config_text
from hpcgen.planning.stages.work import Work
from trainer.contract.config import TrainerConfig


def work(run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None) -> Work:
    """What the index-cache stage runs; `trainer` is None while mistakes leave it open.

    It reads the training stage's own configuration: what the indices are called depends on it. The script adds
    where that lies.
    """
    data = trainer_data(config)
    datasets = (*data.datasets, *data.train, *data.valid, *data.test)
    files = tuple(f"{dataset.prefix}{suffix}" for dataset in datasets for suffix in (".idx", ".bin"))
    return Work(
        arguments=("-m", "trainer.data.index_cache"),
        inputs=files,
        datasets=files,
        writes=(data.cache_dir,) if data.cache_dir else (),
        files=_files(trainer),
    )


def _files(trainer: TrainerConfig | None) -> dict[str, str]:
    if trainer is None:
        return {}
    return {"trainer.json": config_text(trainer)}
