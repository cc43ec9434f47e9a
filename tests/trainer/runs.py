"""Runs the trainer as a launcher would: one process per rank, with its ranks in the environment."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from tests.patience import PATIENCE_S
from tests.trainer.forked import ROOT, ForkedPython

GPT = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "vocab_size": 1000,
}
LLAMA = GPT | {
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
QWEN = LLAMA | {
    "add_qkv_bias": True,
    "qk_layernorm": True,
    "window_size": 9,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
"""Every option of the attention, at once."""
DEEPSEEK = LLAMA | {
    "num_layers": 2,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
    "qk_layernorm": True,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "mtp_num_layers": 2,
}
"""Latent attention and multi-token prediction. No two widths are the same."""

DEEPSEEK_V3 = DEEPSEEK | {
    "layernorm_epsilon": 1e-6,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1],
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_router_topk_scaling_factor": 2.5,
}
"""Everything that DeepSeek-V3 has."""

MOE = LLAMA | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 1e-2,
}
"""The router of DeepSeek-V3 with every loss, after a dense layer."""

TWO_LAYERS = {"num_layers": 2, "moe_layer_freq": [0, 1]}
"""One dense layer and one with experts."""


SHARES_GPU = os.environ.get("TESTS_SHARE_GPU") == "1"
"""Whether the ranks of a test share one GPU (make test-gpu-shared)."""

NCCL_ON_A_SHARED_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
"""NCCL refuses two ranks of a node on one GPU. With hosts of their own, they communicate over sockets."""

EOD = 999
"""End-of-document token of corpora with short documents."""


@dataclass(frozen=True)
class Run:
    """A run's directory, and the exit statuses of its ranks."""

    directory: Path
    statuses: tuple[int, ...]
    log: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[tuple[int, float, float, float]]:
        """Iteration, loss, gradient norm and learning rate of each step."""
        names = ("iteration", "loss", "grad_norm", "lr")
        return [tuple(e[name] for name in names) for e in self.events if e["event"] == "step"]

    @property
    def evaluations(self) -> list[tuple[int, str, float]]:
        return [(e["iteration"], e["split"], e["loss"]) for e in self.events if e["event"] == "evaluation"]

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def saved_iteration(self) -> str:
        return (self.checkpoints / "latest_checkpointed_iteration.txt").read_text()


class Ranks:
    """The processes of one attempt of a run."""

    def __init__(self, config: dict[str, Any], *arguments: str, port: str | None = None) -> None:
        self.directory = Path(config["run_dir"])
        self.directory.mkdir(parents=True, exist_ok=True)
        config_file = self.directory / "config.json"
        config_file.write_text(json.dumps(config))
        self._log = self.directory / "log"
        port = port or free_port()
        start = new_process if config["device"] == "cuda" else ForkedPython  # a fork has the CPU's stand-ins
        self.processes = [
            start(
                ["-m", "trainer", "--config", str(config_file), *arguments],
                environment(rank, config["world_size"], port),
                self._log,
            )
            for rank in range(config["world_size"])
        ]

    def wait(self) -> Run:
        try:
            statuses = tuple(process.wait(timeout=PATIENCE_S) for process in self.processes)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        return Run(self.directory, statuses, self._log.read_text())

    def wait_for_step(self) -> None:
        """Returns when the first step is recorded."""
        metrics = self.directory / "metrics.jsonl"
        while not (metrics.exists() and '"step"' in metrics.read_text()):
            assert all(process.poll() is None for process in self.processes), self._log.read_text()
            time.sleep(0.05)

    def send(self, number: signal.Signals, rank: int = 0) -> None:
        self.processes[rank].send_signal(number)


def new_process(arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Runs `python ARGUMENTS` and appends its output to `log`."""
    command = [sys.executable, *arguments]
    with log.open("a") as output:
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def environment(rank: int, world_size: int, port: str) -> dict[str, str]:
    launchers = ("SLURM_", "TORCHELASTIC_", "PYTEST_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    if SHARES_GPU:
        inherited |= NCCL_ON_A_SHARED_GPU | {"NCCL_HOSTID": f"host-of-rank-{rank}"}
    return inherited | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TRAINER_RENDEZVOUS_ID": f"{os.getpid()}-{port}",
        "OMP_NUM_THREADS": "1",
    }


def run(config: dict[str, Any], *arguments: str) -> Run:
    return Ranks(config, *arguments).wait()


def finished(config: dict[str, Any], *arguments: str) -> Run:
    result = run(config, *arguments)
    assert set(result.statuses) == {0}, result.log
    return result


def write_corpus(
    prefix: Path,
    documents: int,
    first_token: int = 0,
    eod: int | None = None,
    lengths: tuple[int, int] = (20, 200),
) -> str:
    """Documents that count upwards, so that there is something to learn, and end with `eod`.

    The lengths include the first bound, and not the second.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = numpy.random.default_rng(first_token)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(documents):
        start, length = random.integers(0, 400), random.integers(*lengths)
        document = first_token + (start + numpy.arange(length)) % 500
        if eod is not None:
            document[-1] = eod
        builder.add_document(document, [int(length)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def gpt_config(corpus: str, run_dir: Path, model: dict[str, Any] = GPT) -> dict[str, Any]:
    return {
        "name": "test",
        "run_dir": str(run_dir),
        "device": "cpu",
        "world_size": 1,
        "model": copy.deepcopy(model),
        "parallelism": {},
        "training": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "train_iters": 6,
            "precision": "fp32",
            "eval_iters": 0,
        },
        "optimizer": {"lr": 1e-2, "lr_warmup_iters": 1},
        "data": {"datasets": [{"prefix": corpus}], "split": "8,1,1", "num_workers": 0},
        "logging": {"tensorboard": False},
    }
