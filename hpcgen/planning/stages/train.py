"""The training stage: the trainer on every GPU."""

from __future__ import annotations

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.paths import import_files, trainer_data
from hpcgen.planning.resuming import proof_of_checkpoints
from hpcgen.planning.stages.config_text import config_text
from hpcgen.planning.stages.node_check import node_check
from hpcgen.planning.stages.work import Work
from trainer.contract.config import TrainerConfig, fingerprint


def work(run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None) -> Work:
    """What the training stage runs; `trainer` is None while mistakes leave it open."""
    data, checkpoint = trainer_data(config), config.checkpoint
    datasets = (*data.datasets, *data.train, *data.valid, *data.test)
    files = tuple(f"{dataset.prefix}{suffix}" for dataset in datasets for suffix in (".idx", ".bin"))
    inputs = (*files, *import_files(config))
    if checkpoint.load:
        inputs = (*inputs, proof_of_checkpoints(checkpoint.load))
    checkpoints = checkpoint.save or f"{config.paths.run_dir}/checkpoints"
    return Work(
        arguments=("-m", "trainer"),
        inputs=inputs,
        datasets=files,
        reads=(checkpoint.load,) if checkpoint.load else (),
        writes=(data.cache_dir,) if data.cache_dir else (),
        large=(checkpoints,),
        files=_files(trainer),
        values={
            "train_iters": config.training.train_iters,
            "fingerprint": "" if trainer is None else fingerprint(trainer),
            "max_restarts": allocation.max_restarts,
            "checkpoints": checkpoints,
            "preflight": config.preflight.node_health or config.preflight.spare_nodes > 0,
            "max_exclusions": config.preflight.max_exclusions,
            **node_check(run),
        },
    )


def _files(trainer: TrainerConfig | None) -> dict[str, str]:
    if trainer is None:
        return {}
    return {"trainer.json": config_text(trainer)}
