"""`hpcgen init --from`: the model and its layout are those that Megatron-LM computes."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.reader import read
from hpcgen.check.migration.leftover import Carried
from hpcgen.check.migration.training import carry_training
from hpcgen.check.migration.values import num_values
from hpcgen.config.megatron_options import rows
from hpcgen.config.presets import PRESETS
from tests.cli.command import hpcgen
from tests.lint.migrations import ROPE, WHOLE, init, left, migrated, refused, written
from trainer.contract.config import ModelConfig, from_dict
from trainer.contract.config.resolve import resolve_model

pytestmark = pytest.mark.usefixtures("workplace")


EXPERTS = "--num-experts 8 --disable-bias-linear"
MOE = {"num_moe_experts": 8, "add_bias_linear": False, "activation_func": "gelu"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ("--disable-bias-linear", {"add_bias_linear": False, "activation_func": "gelu"}),
        ("--no-bias-gelu-fusion", {"activation_func": "gelu"}),
        (
            "--squared-relu --disable-bias-linear",
            {"add_bias_linear": False, "activation_func": "squared_relu"},
        ),
        ("--openai-gelu", {}),
        (
            "--swiglu --disable-bias-linear --add-qkv-bias",
            {"swiglu": True, "add_bias_linear": False, "add_qkv_bias": True, "ffn_hidden_size": 2048},
        ),
        ("--qk-layernorm --window-size 4095,0", {"qk_layernorm": True, "window_size": 4096}),
        ("--window-size '(4095,0)'", {"window_size": 4096}),
        ("--num-experts 8", {"num_moe_experts": 8}),
        (
            f"{EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 1e-2",
            MOE | {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.01},
        ),
        (f"{EXPERTS} --moe-layer-freq 4", MOE | {"moe_layer_freq": [1, 0, 0, 0] * 3}),
        (f"{EXPERTS} --moe-layer-freq '([0]*1+[1]*11)'", MOE | {"moe_layer_freq": [0, *[1] * 11]}),
        (f"{EXPERTS} --moe-layer-freq [0]*1+[1]*11", MOE | {"moe_layer_freq": [0, *[1] * 11]}),
        (f"{EXPERTS} --moe-layer-freq 1 --moe-expert-capacity-factor -1", MOE),
        (f"{EXPERTS} --moe-router-bias-update-rate 1e-2 --moe-token-drop-policy position", MOE),
        (
            f"{EXPERTS} --moe-router-bias-update-rate 1e-2 --moe-router-score-function sigmoid "
            "--moe-router-enable-expert-bias",
            MOE
            | {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 0.01,
            },
        ),
        ("--moe-router-topk 4 --moe-grouped-gemm", {}),
        (f"{ROPE} --use-rope-scaling", {"position_embedding_type": "rope", "rope_scaling": LLAMA3}),
        ("--use-rope-scaling", {}),
        (f"{ROPE} --rotary-seq-len-interpolation-factor 1", {"position_embedding_type": "rope"}),
    ],
)
def test_the_model_is_the_one_that_megatron_computes(options: str, model: dict[str, object]) -> None:
    plain, _ = migrated("")
    found, _ = migrated(options, "--force")
    assert found["model"] == plain["model"] | model


def test_lists_of_layers_need_no_quotes() -> None:
    """The shell keeps such a pattern if it matches no file. shfmt reads it as an index in arrays."""
    ended = init(f"LAYERS=(--moe-layer-freq [0]*1+[1]*11)\n{WHOLE} --num-experts 8 ${{LAYERS[@]}}\n")
    assert ended.status == 0, ended.stderr
    assert written()["model"]["moe_layer_freq"] == [0, *[1] * 11]


def test_the_layout_of_experts_is_converted() -> None:
    options = f"{EXPERTS} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --moe-grouped-gemm"
    found, leftovers = migrated(
        f"{options} --moe-token-dispatcher-type flex --moe-layer-recompute", "--force"
    )
    assert found["parallelism"] == {
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "moe_grouped_gemm": True,
    }
    assert leftovers["--moe-token-dispatcher-type"] == "the trainer has alltoall and allgather"
    assert found["training"]["recompute_modules"] == ["core_attn", "moe"]
    scripts = (
        ("--moe-router-pre-softmax", "--moe-router-score-function sigmoid"),
        ("--moe-aux-loss-coeff 1e-2", "--moe-router-load-balancing-type none"),
    )
    for unused, reason in scripts:
        found, leftovers = migrated(f"{EXPERTS} {unused} {reason}", "--force")
        assert leftovers[unused].startswith("it has no effect with model.moe_router_")
        assert unused.split()[0].removeprefix("--").replace("-", "_") not in found["model"]
    _, leftovers = migrated(f"{EXPERTS} --moe-router-num-groups 2", "--force")
    assert leftovers["--moe-router-num-groups 2"] == "it only applies with model.moe_router_group_topk"
    _, leftovers = migrated("--moe-grouped-gemm", "--force")
    assert leftovers["--moe-grouped-gemm"] == "it only applies with --num-experts"


MIXTRAL = """\
#!/bin/bash
#SBATCH --nodes=8 --gpus-per-node=8 --ntasks-per-node=8 --time=1-00:00:00
export CUDA_DEVICE_MAX_CONNECTIONS=1
MODEL="--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768
    --position-embedding-type rope --no-position-embedding --rotary-base 1000000 --swiglu --disable-bias-linear
    --normalization RMSNorm --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.01 --no-masked-softmax-fusion"
EXPERTS="--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion"
LAYOUT="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 8 --use-distributed-optimizer --sequence-parallel
    --overlap-grad-reduce --overlap-param-gather"
TRAINING="--micro-batch-size 1 --global-batch-size 256 --train-iters 500000 --bf16 --lr 1e-4 --min-lr 1e-5
    --lr-decay-iters 320000 --lr-decay-style cosine --lr-warmup-iters 500 --weight-decay 0.1 --clip-grad 1"
srun python pretrain_gpt.py $MODEL $EXPERTS $LAYOUT $TRAINING --mock-data --vocab-size 32000 \\
    --tokenizer-type NullTokenizer --save /shared/checkpoints
"""


def test_a_script_for_mixtral_becomes_the_preset() -> None:
    ended = init(MIXTRAL, "--set", "data.tokenizer.kind=bytes", "--set", "model.vocab_size=32000")
    assert ended.status == 0, ended.stderr
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 0, checked.stderr
    preset, values = PRESETS["mixtral-8x7b"].sections, written()
    expected = resolve_model(from_dict(ModelConfig, preset["model"], "preset"))
    converted = resolve_model(from_dict(ModelConfig, values["model"], "run.yaml"))
    assert converted == dataclasses.replace(expected, padded_vocab_size=converted.padded_vocab_size)
    assert values["parallelism"] == {
        **preset["parallelism"],
        "tensor_model_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }
    assert "disables it" in left(ended)["--sequence-parallel"]


def test_missing_nodes_are_as_many_as_the_experts_need() -> None:
    script = MIXTRAL.replace("--nodes=8 ", "")
    ended = init(script, "--set", "data.tokenizer.kind=bytes", "--set", "model.vocab_size=32000")
    assert written()["slurm"]["train"]["nodes"] == 4  # 4 stages of 8 expert-parallel ranks
    assert left(ended)["the number of nodes"].endswith("its parallel sizes need 4")


def test_values_that_megatron_derives_are_derived() -> None:
    found, leftovers = migrated(
        "--swiglu --group-query-attention --sequence-parallel --normalization rmsnorm --optimizer adam "
        "--lr-decay-style WSD --lr-wsd-decay-style 1-sqrt --lr-wsd-decay-iters 10 --save /shared/a/../b"
    )
    assert found["model"] == found["model"] | {
        "ffn_hidden_size": 2048,  # a multiple of 64 near 8/3 of the hidden size
        "num_query_groups": 1,
        "normalization": "RMSNorm",
    }
    assert "parallelism" not in found
    assert "Megatron-LM disables it" in leftovers["--sequence-parallel"]
    assert found["optimizer"]["lr_wsd_decay_style"] == "minus_sqrt"
    assert found["checkpoint"]["save"] == "/shared/b"


MLA = f"{ROPE} --multi-latent-attention"


def test_latent_attention_has_megatron_lms_defaults() -> None:
    ended = init(f"{WHOLE} {MLA} --q-lora-rank 96 --qk-layernorm --kv-channels 64")
    model = written()["model"]
    assert {key: model[key] for key in ("multi_latent_attention", "q_lora_rank", "kv_lora_rank")} == {
        "multi_latent_attention": True,
        "q_lora_rank": 96,
        "kv_lora_rank": 32,
    }
    assert "rope_scaling" not in model
    assert left(ended)["--kv-channels 64"] == "latent attention does not use it"
    assert "kv_channels" not in model


def test_latent_attention_ignores_options_of_standard_attention() -> None:
    found, leftovers = migrated(f"{MLA} --add-qkv-bias --num-query-groups 4 --kv-channels 64")
    assert found["model"].keys().isdisjoint({"add_qkv_bias", "num_query_groups", "kv_channels"})
    assert leftovers["--add-qkv-bias"] == leftovers["--kv-channels 64"] == "latent attention does not use it"


def test_models_that_megatron_or_the_trainer_refuses_with_latent_attention() -> None:
    found = refused(init(f"{WHOLE} {MLA} --group-query-attention --num-query-groups 4"))
    assert found["--group-query-attention"].startswith(
        "Megatron-LM stops if it is combined with --multi-latent"
    )
    for positions in ("", "--position-embedding-type learned_absolute"):
        [why] = refused(init(f"{WHOLE} --multi-latent-attention {positions}")).values()
        assert "also adds learned positions" in why
    rope = ("--set", "model.position_embedding_type=rope")
    assert init(f"{WHOLE} --multi-latent-attention", *rope).status == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--rotary-scaling-factor 40", {}),
        (
            "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 0.7",
            {"mscale": 1.0, "mscale_all_dim": 0.7},
        ),
    ],
)
def test_yarn_of_latent_attention_has_megatron_cores_defaults(options: str, expected: dict) -> None:
    assert init(f"{WHOLE} {MLA} --rope-type yarn {options}").status == 0
    assert written()["model"]["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        **expected,
    }


def test_a_factor_without_yarn_is_refused() -> None:
    ended = init(f"{WHOLE} {MLA} --rope-type rope --rotary-scaling-factor 40")
    why = "Megatron-LM scales the scores of attention without scaling the rotary embedding"
    assert refused(ended)["--rope-type rope"].startswith(why)


def test_widths_without_latent_attention_are_left_out() -> None:
    found, reasons = migrated("--kv-lora-rank 64 --mscale 0.7")
    assert "kv_lora_rank" not in found["model"]
    for option in ("--kv-lora-rank 64", "--mscale 0.7"):
        assert reasons[option] == "it only applies with --multi-latent-attention"


def test_mtp_layers_are_converted() -> None:
    untied = "--untie-embeddings-and-output-weights"
    assert init(f"{WHOLE} {ROPE} {untied} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3").status == 0
    model = written()["model"]
    assert (model["mtp_num_layers"], model["mtp_loss_scaling_factor"]) == (1, 0.3)


PLAIN = "--bf16 --attention-dropout 0 --hidden-dropout 0 --cuda-graph-impl"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (f"{PLAIN} transformer_engine", None),
        (f"{PLAIN} local", "the trainer records graphs with transformer_engine"),
        (f"{PLAIN} transformer_engine {EXPERTS}", "it cannot record layers with experts"),
        (f"{PLAIN} transformer_engine {MLA} --mtp-num-layers 1", "it is not tested with model.multi_latent"),
        ("--bf16 --cuda-graph-impl transformer_engine", "model.attention_dropout would not follow"),
    ],
)
def test_graphs_that_the_trainer_does_not_record_are_left_out(options: str, reason: str | None) -> None:
    found, leftovers = migrated(options, "--force")
    assert found["training"].get("cuda_graph_impl") == (None if reason else "transformer_engine")
    left_out = next((why for what, why in leftovers.items() if what.startswith("--cuda-graph-impl")), None)
    assert (left_out is None) if reason is None else left_out.startswith(reason)


def test_keys_of_an_uneven_pipeline_are_left_out_without_a_pipeline() -> None:
    found, leftovers = migrated(
        "--account-for-loss-in-pipeline-split --pipeline-model-parallel-layout Et*12L", "--force"
    )
    assert "parallelism" not in found
    assert set(leftovers.values()) >= {"it only applies with parallelism.pipeline_model_parallel_size > 1"}
    assert "--account-for-loss-in-pipeline-split" in leftovers


def test_a_module_converts_or_lists_every_option_that_it_carries():
    """The table says which module does. An option that the module forgets would be lost without a word."""
    named = [row for row in rows().values() if row.carried_by]
    options = [f"--{row.name}{_value(row)}" for row in named]
    job = Job(read(f"#!/bin/bash\nsrun python pretrain_gpt.py {' '.join(options)}\n", "job.sh"))
    [launch] = job.launches

    def outcome(arguments):
        carried = Carried()
        carry_training(job, dataclasses.replace(launch, arguments=arguments), carried)
        return carried

    flags, without = launch.flags, outcome(())
    assert len(flags) == len(named) > 100
    lost = [name for name, flag in flags.items() if outcome((flag.word, *flag.values)) == without]
    assert lost == []


def _value(row):
    values = num_values(row.key if row.kind == "key" else None)
    return "" if row.takes == "0" or values == 0 else " 3"
