"""On real GPUs (make test-gpu): precisions, kernels, saves on one, and layouts on two and four, over NCCL in bf16."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.trainer import runs
from tests.trainer.runs import DEEPSEEK, GPT, LLAMA, MOE, QWEN, Run, finished, gpt_config, write_corpus

TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
PP3_BEFORE_LOSS = {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Ett|ttm|L"}
PP3_TWO_BEFORE_LOSS = PP3_BEFORE_LOSS | {"pipeline_model_parallel_layout": "Ett|ttmm|L"}
TP2_PP2_SP = TP2_SP | PP2
TP_OVERLAP = {"tp_comm_overlap": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
GRAPHS = {"cuda_graph_impl": "transformer_engine"}
EP2 = {"expert_model_parallel_size": 2}
LATENT = DEEPSEEK | {"num_layers": 4, "mtp_num_layers": None, "qk_head_dim": 24, "v_head_dim": 16}
PREDICTING = LLAMA | {"mtp_num_layers": 1}
TIED = PREDICTING | {"untie_embeddings_and_output_weights": False}
SHAPES = {
    "predicting": PREDICTING,
    "predicting-tied": TIED,
    "gpt": GPT,
    "llama": LLAMA,
    "qwen": QWEN,
    "moe": MOE,
    "deepseek": DEEPSEEK | {"num_layers": 4},
    "latent": LATENT,
}
WIDE = {"hidden_size": 256, "seq_length": 128}

LOSS_TOLERANCE = 0.05
"""In bf16 the order of sums differs. The largest difference was 0.025 in 20 steps of a GPT with 150M parameters."""
DOCUMENTS_TOLERANCE = 0.02
"""In bf16 on a CPU, losses within documents differ from fp32 by at most 0.002 in 4 steps."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
with_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)


def on_gpus(
    corpus: str, directory: Path, world_size: int, layout: dict[str, Any], model: dict[str, Any]
) -> dict[str, Any]:
    config = gpt_config(corpus, directory, model | WIDE)
    config |= {"device": "cuda", "world_size": world_size, "parallelism": layout}
    config["training"] |= {"micro_batch_size": 1, "global_batch_size": 8}
    config["training"] |= {"precision": "bf16", "train_iters": 12}
    config["optimizer"] = {"lr": 1e-3, "lr_warmup_iters": 2, "lr_decay_iters": 12}
    return config


def assert_alike(found: Run, reference: Run) -> None:
    losses, expected = ([step[1] for step in each.steps] for each in (found, reference))
    numpy.testing.assert_allclose(losses, expected, rtol=0, atol=LOSS_TOLERANCE)
    assert losses[-1] < losses[0] - 0.5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Enough documents for one epoch, so that the order of samples does not depend on train_iters."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "long", documents=400)


@pytest.fixture(scope="module")
def one_gpu(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The GPT or the Llama on one GPU."""
    directory = tmp_path_factory.mktemp("one-gpu")
    return functools.cache(lambda name: finished(on_gpus(corpus, directory / name, 1, {}, SHAPES[name])))


def needs_gpus(count: int, *, shareable: bool = True) -> pytest.MarkDecorator:
    shared = shareable and runs.SHARES_GPU
    return pytest.mark.skipif(
        torch.cuda.device_count() < count and not shared, reason=f"needs {count} CUDA devices"
    )


def on(
    gpus: int, name: str, layout: dict[str, Any], title: str, training: dict[str, Any] | None = None
) -> Any:
    needs_engine = bool(training) or "tp_comm_overlap" in layout
    marks = [needs_gpus(gpus, shareable=not needs_engine)]
    if needs_engine:
        marks.append(with_engine)
    return pytest.param(gpus, name, layout, training or {}, id=f"{name}-{title}", marks=marks)


@pytest.mark.parametrize(
    ("gpus", "name", "layout", "training"),
    [
        on(2, "gpt", TP2_SP, "TP2+SP"),
        on(2, "gpt", PP2, "PP2"),
        on(2, "gpt", VPP2, "VPP2"),
        on(2, "gpt", OVERLAP, "DP2+overlap"),
        on(2, "llama", CP2, "CP2"),
        on(2, "qwen", CP2, "CP2"),
        on(2, "qwen", TP2_SP, "TP2+SP"),
        on(2, "llama", TP2_SP | TP_OVERLAP, "TP2+SP+tp_comm_overlap"),
        on(2, "gpt", TP2_SP, "TP2+SP+graphs", GRAPHS),
        on(2, "gpt", VPP2, "VPP2+graphs", GRAPHS),
        on(2, "llama", PP2, "PP2+graphs", GRAPHS),
        on(2, "llama", OVERLAP, "DP2+overlap+graphs", GRAPHS),
        on(2, "llama", TP2_SP | TP_OVERLAP, "TP2+SP+tp_comm_overlap+graphs", GRAPHS),
        on(2, "moe", EP2 | OVERLAP, "EP2+overlap"),
        on(2, "moe", EP2 | TP2_SP | {"expert_tensor_parallel_size": 1}, "EP2xTP2xETP1+SP"),
        on(2, "moe", TP2_SP, "TP2+SP"),
        on(2, "moe", EP2 | {"moe_grouped_gemm": False}, "EP2-ungrouped"),
        on(2, "moe", EP2 | {"moe_token_dispatcher_type": "allgather"}, "EP2-allgather"),
        on(2, "deepseek", TP2_SP, "TP2+SP"),
        on(2, "deepseek", PP2, "PP2"),
        on(2, "predicting-tied", PP2, "PP2"),
        on(2, "latent", CP2, "CP2"),
        on(3, "deepseek", PP3_TWO_BEFORE_LOSS, "PP3-before-loss"),
        on(3, "predicting-tied", PP3_BEFORE_LOSS, "PP3-before-loss"),
        on(4, "moe", EP2 | PP2, "EP2xPP2"),
        on(4, "gpt", TP2_PP2_SP, "TP2xPP2+SP"),
        on(4, "gpt", OVERLAP, "DP4+overlap"),
        on(4, "gpt", VPP2 | OVERLAP, "VPP2xDP2+overlap"),
        on(4, "gpt", {"tensor_model_parallel_size": 2} | CP2, "TP2xCP2"),
        on(4, "llama", TP2_PP2_SP, "TP2xPP2+SP"),
        on(4, "llama", TP2_SP | TP_OVERLAP | OVERLAP, "TP2xDP2+SP+tp_comm_overlap"),
        on(2, "gpt", CP2, "CP2+graphs", GRAPHS),
        on(4, "gpt", TP2_PP2_SP, "TP2xPP2+SP+graphs", GRAPHS),
        on(4, "gpt", VPP2 | OVERLAP, "VPP2xDP2+overlap+graphs", GRAPHS),
        on(4, "llama", TP2_SP | OVERLAP, "TP2xDP2+SP+overlap+graphs", GRAPHS),
    ],
)
def test_several_gpus_train_what_one_does(
    gpus: int,
    name: str,
    layout: dict[str, Any],
    training: dict[str, Any],
    corpus: str,
    tmp_path: Path,
    one_gpu: Callable[[str], Run],
) -> None:
    config = on_gpus(corpus, tmp_path / "run", gpus, layout, SHAPES[name])
    config["training"] |= training
    result = finished(config)
    assert_alike(result, one_gpu(name))
    assert ("layers recorded as CUDA graphs" in result.log) is (training == GRAPHS)


@pytest.mark.parametrize(
    ("name", "gpus", "layout", "gpus_then", "layout_then"),
    [
        pytest.param("gpt", 2, TP2_SP, 1, {}, id="TP2-to-one", marks=needs_gpus(2)),
        pytest.param("gpt", 1, {}, 2, PP2, id="one-to-PP2", marks=needs_gpus(2)),
        pytest.param("gpt", 4, TP2_PP2_SP, 2, PP2, id="TP2xPP2-to-PP2", marks=needs_gpus(4)),
        pytest.param("moe", 2, EP2, 1, {}, id="EP2-to-one", marks=needs_gpus(2)),
    ],
)
def test_a_checkpoint_resumes_at_another_layout(
    name: str,
    gpus: int,
    layout: dict[str, Any],
    gpus_then: int,
    layout_then: dict[str, Any],
    corpus: str,
    tmp_path: Path,
    one_gpu: Callable[[str], Run],
) -> None:
    first = on_gpus(corpus, tmp_path / "run", gpus, layout, SHAPES[name])
    first["training"]["train_iters"] = 6
    second = copy.deepcopy(first) | {"world_size": gpus_then, "parallelism": layout_then}
    second["training"]["train_iters"] = 12
    finished(first)
    assert_alike(finished(second), one_gpu(name))


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(
    "training",
    [
        pytest.param({"transformer_impl": "torch"}, id="torch"),
        pytest.param({"cross_entropy_fusion_impl": "native"}, id="native-cross-entropy"),
        pytest.param({"precision": "fp16"}, id="fp16"),
        pytest.param({"fp8": "hybrid"}, id="fp8-tensorwise", marks=with_engine),
        pytest.param({"fp8": "hybrid", "fp8_recipe": "delayed"}, id="fp8-delayed", marks=with_engine),
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            id="full-recompute",
        ),
        pytest.param({"recompute_granularity": "selective"}, id="selective-recompute"),
        pytest.param({"deterministic_mode": True}, id="deterministic"),
        pytest.param(GRAPHS, id="graphs", marks=with_engine),
        pytest.param(GRAPHS | {"fp8": "hybrid"}, id="graphs-fp8", marks=with_engine),
        pytest.param(
            GRAPHS | {"recompute_granularity": "selective"},
            id="graphs-selective-recompute",
            marks=with_engine,
        ),
    ],
)
def test_kernels_and_precisions_learn_alike(
    name: str, training: dict[str, Any], corpus: str, tmp_path: Path, one_gpu: Callable[[str], Run]
) -> None:
    config = on_gpus(corpus, tmp_path / "run", 1, {}, SHAPES[name])
    config["training"] |= training
    if training.get("precision") == "fp16":
        config["optimizer"]["initial_loss_scale"] = 2.0**16  # of no overflow: each skips a step of the few
    assert_alike(finished(config), one_gpu(name))


@pytest.mark.parametrize(
    "training", [pytest.param({"transformer_impl": "torch"}, id="torch"), pytest.param(GRAPHS, id="graphs")]
)
@with_engine
def test_windows_norms_and_scaled_rope_are_alike_in_all_kernels(
    training: dict[str, Any], corpus: str, tmp_path: Path, one_gpu: Callable[[str], Run]
) -> None:
    config = on_gpus(corpus, tmp_path / "run", 1, {}, QWEN)
    config["training"] |= training
    assert_alike(finished(config), one_gpu("qwen"))


@with_engine
def test_latent_attention_and_multi_token_prediction_are_alike_in_torch(
    corpus: str, tmp_path: Path, one_gpu: Callable[[str], Run]
) -> None:
    config = on_gpus(corpus, tmp_path / "run", 1, {}, SHAPES["deepseek"])
    config["training"]["transformer_impl"] = "torch"
    assert_alike(finished(config), one_gpu("deepseek"))


@pytest.mark.parametrize(
    "training",
    [
        pytest.param({"transformer_impl": "torch"}, id="torch"),
        pytest.param({"fp8": "hybrid"}, id="fp8-tensorwise"),
        pytest.param({"deterministic_mode": True}, id="deterministic"),
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            id="full-recompute",
        ),
    ],
)
@with_engine
def test_experts_are_alike_in_all_kernels(
    training: dict[str, Any], corpus: str, tmp_path: Path, one_gpu: Callable[[str], Run]
) -> None:
    config = on_gpus(corpus, tmp_path / "run", 1, {}, MOE)
    config["training"] |= training
    assert_alike(finished(config), one_gpu("moe"))


@pytest.mark.parametrize(
    ("gpus", "name", "layout", "training"),
    [
        pytest.param(1, "gpt", {}, {}, id="gpt"),
        pytest.param(1, "qwen", {}, {}, id="qwen"),
        pytest.param(1, "qwen", {}, {"deterministic_mode": True}, id="qwen-deterministic"),
        pytest.param(1, "latent", {}, {}, id="latent"),
        pytest.param(1, "deepseek", {}, {}, id="deepseek"),
        pytest.param(2, "qwen", CP2, {}, id="qwen-CP2", marks=needs_gpus(2)),
        pytest.param(2, "predicting", CP2, {}, id="predicting-CP2", marks=needs_gpus(2)),
        pytest.param(2, "gpt", PP2, {}, id="gpt-PP2", marks=needs_gpus(2)),
        pytest.param(2, "llama", TP2_SP, {}, id="llama-TP2+SP", marks=needs_gpus(2)),
    ],
)
@with_engine
def test_documents_are_separated_as_on_a_cpu(
    gpus: int,
    name: str,
    layout: dict[str, Any],
    training: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both start from the same checkpoint, since GPUs draw other random numbers than CPUs."""
    monkeypatch.setattr(runs, "ForkedPython", runs.new_process)  # a fork has seen the GPU
    corpus = write_corpus(tmp_path / "corpus", documents=400, eod=999)
    config = on_gpus(corpus, tmp_path / "gpu", gpus, layout, SHAPES[name])
    config["data"] |= {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}
    config["data"]["eod_id"] = 999
    config["training"] |= {"train_iters": 4, "micro_batch_size": 2} | training
    reference = copy.deepcopy(config) | {"device": "cpu", "run_dir": str(tmp_path / "cpu")}
    reference |= {"world_size": 1, "parallelism": {}}
    reference["training"]["precision"] = "fp32"
    start = reference | {"run_dir": str(tmp_path / "start")}
    finished(start)
    for each in (config, reference):
        each["checkpoint"] = {"load": f"{start['run_dir']}/checkpoints", "finetune": True}
    losses, expected = ([step[1] for step in finished(each).steps] for each in (config, reference))
    numpy.testing.assert_allclose(losses, expected, rtol=0, atol=DOCUMENTS_TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "modules"),
    [
        pytest.param({"cp_comm_type": "all_gather"}, None, id="all_gather"),
        pytest.param({"cp_comm_type": "a2a"}, None, id="a2a"),
        pytest.param({}, ["core_attn", "mlp"], id="recompute-mlp"),
    ],
)
@needs_gpus(2)
@with_engine
def test_exchanges_and_recomputed_modules_train_alike(
    layout: dict[str, Any],
    modules: list[str] | None,
    corpus: str,
    tmp_path: Path,
    one_gpu: Callable[[str], Run],
) -> None:
    config = on_gpus(corpus, tmp_path / "run", 2, CP2 | layout, LLAMA)
    if modules:
        config["training"] |= {"recompute_granularity": "selective", "recompute_modules": modules}
    assert_alike(finished(config), one_gpu("llama"))


def test_deterministic_runs_are_equal_to_the_last_bit_through_a_background_save(
    corpus: str, tmp_path: Path
) -> None:
    config = on_gpus(corpus, tmp_path / "undisturbed", 1, {}, LLAMA)
    config["training"] |= {"deterministic_mode": True}
    undisturbed = finished(config)
    resumed = copy.deepcopy(config) | {"run_dir": str(tmp_path / "resumed")}
    resumed["checkpoint"] = {"save_interval": 3}
    finished(resumed)
    for newer in ("iter_0000006", "iter_0000009", "iter_0000012"):
        (tmp_path / "resumed" / "checkpoints" / newer / "COMPLETE").unlink()
    again = finished(resumed)
    assert "iter_0000003" in again.log
    assert again.steps == undisturbed.steps


@with_engine
def test_graphs_work_with_evaluations_saves_and_profiles(corpus: str, tmp_path: Path) -> None:
    config = on_gpus(corpus, tmp_path / "plain", 1, {}, LLAMA)
    config["training"] |= {"eval_interval": 5, "eval_iters": 2}
    config["checkpoint"] = {"save_interval": 4}
    config["logging"] |= {"profile_step_start": 6}
    plain = finished(config)
    recorded = copy.deepcopy(config) | {"run_dir": str(tmp_path / "recorded")}
    recorded["training"] |= GRAPHS
    result = finished(recorded)
    assert_alike(result, plain)
    found, expected = ([loss for _, _, loss in each.evaluations] for each in (result, plain))
    numpy.testing.assert_allclose(found, expected, rtol=0, atol=LOSS_TOLERANCE)
    (result.checkpoints / "iter_0000012" / "COMPLETE").unlink()
    assert_alike(finished(recorded), plain)


@with_engine
def test_a_run_in_fp8_resumes_exactly(corpus: str, tmp_path: Path) -> None:
    config = on_gpus(corpus, tmp_path / "run", 1, {}, LLAMA)
    config["training"] |= {"fp8": "hybrid", "fp8_recipe": "delayed"}
    undisturbed = finished(copy.deepcopy(config) | {"run_dir": str(tmp_path / "undisturbed")})
    config["training"]["train_iters"] = 6
    finished(config)
    config["training"]["train_iters"] = 12
    assert_alike(finished(config), undisturbed)


@pytest.mark.parametrize("name", ["deepseek", "moe"])
def test_a_gpu_generates_what_a_cpu_does(name: str, one_gpu: Callable[[str], Run], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("A", "in the beginning")))
    command = [sys.executable, "-m", "trainer.inference", str(one_gpu(name).directory), "--json"]
    command += [
        "--prompts",
        str(prompts),
        "--tokenizer",
        "bytes",
        "--max-new-tokens",
        "40",
        "--precision",
        "fp32",
    ]
    texts = []
    for device in ("cuda", "cpu"):
        done = subprocess.run(
            [*command, "--device", device], cwd=runs.ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1]
