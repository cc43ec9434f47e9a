"""The rows of the host in the tables of topologies/kernels: kinds of launches, and small trainings with such layers."""

from __future__ import annotations

from typing import Any

from trainer.contract.calibration import Job
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.config.resolve import resolve

MICROBATCHES = 8
LAYERS = (4, 12)
SMALL = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "ffn_hidden_size": 2048,
    "seq_length": 64,
    "vocab_size": 50257,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
KINDS = (
    # layer, tensor_parallel, graphs, precision
    ("dense", False, False, "bf16"),
    ("dense", False, True, "bf16"),
    ("dense", False, False, "fp8"),
    ("experts", False, False, "bf16"),
    ("dense", True, False, "bf16"),
    ("dense", True, True, "bf16"),
    ("experts", True, False, "bf16"),
)


def jobs(num_gpus: int) -> list[Job]:
    """The rows that `num_gpus` GPUs can measure."""
    keys = ("layer", "tensor_parallel", "graphs", "precision")
    rows = [dict(zip(keys, kind, strict=True)) for kind in KINDS]
    found = [Job(section="host", row=row, trainings=trainings(row)) for row in rows]
    return [job for job in found if job.trainings[0].world_size <= num_gpus]


def trainings(row: dict[str, Any]) -> tuple[TrainerConfig, ...]:
    """The two trainings of a row."""
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True} if row["tensor_parallel"] else {}
    training = {
        "micro_batch_size": 1,
        "global_batch_size": MICROBATCHES,
        "train_iters": 1000,
        "eval_iters": 0,
    }
    graphs = {"cuda_graph_impl": "transformer_engine"} if row["graphs"] else {}
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"} if row["precision"] == "fp8" else {}
    documents = [
        {
            "name": "host",
            "run_dir": "/tmp",
            "device": "cuda",
            "world_size": 2 if row["tensor_parallel"] else 1,
            "model": SMALL | {"num_layers": layers} | (EXPERTS if row["layer"] == "experts" else {}),
            "parallelism": layout,
            "training": training | graphs | fp8,
            "optimizer": {"lr": 1e-4},
            "data": {"mock": True},
            "logging": {"tensorboard": False},
        }
        for layers in LAYERS
    ]
    return tuple(resolve(from_dict(TrainerConfig, document, where="host")) for document in documents)
