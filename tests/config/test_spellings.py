"""Names of keys in other training programs."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config import spellings
from hpcgen.config.run import RunConfig
from hpcgen.config.type_hints import inner_class
from hpcgen.config.unknown_keys import TRANSLATED_SECTIONS
from hpcgen.errors import ConfigErrors
from tests.planning.test_plan import minimal_run, planned
from trainer.contract.config import field_hints

SECTIONS = {name: field_hints(inner_class(field_hints(RunConfig)[name])) for name in TRANSLATED_SECTIONS}
CLASSES = ("ModelParallelConfig", "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig")
KEYS = {key for section in SECTIONS.values() for key in section}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model.intermediate_size", "use model.ffn_hidden_size"),
        ("model.num-layers", "use model.num_layers"),
        ("training.seq_length", "use model.seq_length"),
        ("num_layers", "use model.num_layers"),
        ("parallelism.tensor_parallel_degree", "use parallelism.tensor_model_parallel_size"),
        ("parallelism.use_distributed_optimizer", "remove it, because the trainer always does this"),
        ("parallelism.use_fsdp", "hpcgen's trainer does not support sharded parameters (FSDP)"),
        ("model.moe_latent_size", "Megatron-Core has it, but hpcgen's trainer does not"),
        ("model.moe_z_loss", "did you mean moe_z_loss_coeff?"),
        ("model.moe_token_dispatcher", "did you mean parallelism.moe_token_dispatcher_type?"),
        ("model.moe_enabled", "docs/moe.md lists the keys of mixtures of experts"),
        ("model.top_k", "use model.moe_router_topk"),
        ("model.seq_aux", "use model.moe_router_load_balancing_type, with the value seq_aux_loss"),
        ("model.router_jitter_noise", "hpcgen's trainer does not support noise in the router"),
        (
            "model.moe_router_dtype",
            "hpcgen's trainer does not support routers in any type but fp32; remove the key",
        ),
        ("model.transformers_version", "remove it, because the trainer does not need it"),
        ("parallelism.expert_parallel", "use parallelism.expert_model_parallel_size"),
        ("parallelism.hsdp", "use parallelism.num_distributed_optimizer_instances"),
        ("training.zero_stage", "hpcgen's trainer does not support DeepSpeed's ZeRO-2 and ZeRO-3"),
        ("data.intra_document_masking", "use data.reset_attention_mask"),
        ("model.num_local_experts", "use model.num_moe_experts"),
        ("model.n_routed_experts", "use model.num_moe_experts"),
        ("model.num_experts_per_tok", "use model.moe_router_topk"),
        ("model.router_aux_loss_coef", "use model.moe_aux_loss_coeff"),
        ("model.norm_topk_prob", "use model.moe_router_pre_softmax, with the opposite value"),
        ("model.moe_grouped_gemm", "use parallelism.moe_grouped_gemm"),
        ("parallelism.num_experts", "use model.num_moe_experts"),
        ("parallelism.expert_parallel_degree", "use parallelism.expert_model_parallel_size"),
        ("training.qk_layernorm", "use model.qk_layernorm"),
        ("parallelism.window_size", "use model.window_size"),
        ("model.qk_norm", "use model.qk_layernorm"),
        ("model.sliding_window", "use model.window_size"),
        ("training.use_fsdp", "hpcgen's trainer does not support sharded parameters (FSDP)"),
        ("parallelism.fsdp2", "hpcgen's trainer does not support sharded parameters (FSDP)"),
        ("training.offload_modules", "use training.recompute_modules or a larger context_parallel_size"),
        ("training.cpu_offloading_num_layers", "use training.recompute_modules"),
        ("model.layernorm_zero_centered_gamma", "Megatron-Core has it, but hpcgen's trainer does not"),
        ("optimizer.start_weight_decay", "Megatron-LM has it, but hpcgen's trainer does not"),
        ("model.window_sze", "did you mean window_size?"),
        ("model.moe_router_top_k", "did you mean moe_router_topk"),
        ("model.moe_layer_frequency", "did you mean moe_layer_freq?"),
        ("parallelism.expert_model_parallel_sise", "did you mean expert_model_parallel_size"),
        ("model.moe_layer_recompute", "use training.recompute_modules, with the module moe"),
        ("parallelism.enable_deepep", "hpcgen's trainer does not support the DeepEP dispatcher"),
        ("data.packing", "use data.reset_attention_mask to separate the documents"),
        ("slurm.train.nodess", "did you mean nodes?"),
        (
            "slurm.train.segment",
            "known keys are account, constraint, cpus_per_task, extra_directives, max_restarts, mem, nodes, "
            "ntasks_per_node, partition, qos, reservation, signal_lead_s, time; "
            "for other options of sbatch, use extra_directives",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_what_to_use(tmp_path, key, hint):
    with pytest.raises(ConfigErrors) as error:
        planned(tmp_path, minimal_run(), overrides=[f"{key}=1"])
    [message] = error.value.messages
    assert message.startswith(f"--set {key}: {key} = 1 is not a known key; {hint}")


def test_a_cluster_profile_is_not_sent_to_keys_of_a_run_file(tmp_path):
    (tmp_path / "site.yaml").write_text("extends: azure-ndv5\ntp: 3\n")
    with pytest.raises(ConfigErrors, match="tp = 3 is not a known key") as error:
        planned(tmp_path, minimal_run(cluster="./site.yaml"))
    assert "parallelism" not in str(error.value)


def test_the_answers_name_existing_keys():
    for answer in spellings.KEYS.values():
        section: Any = RunConfig
        for key in re.match(r"[\w.]+", answer)[0].split("."):
            hint = field_hints(section).get(key)
            assert hint is not None, answer
            section = inner_class(hint)


def test_a_key_of_the_run_file_is_in_no_table():
    assert not KEYS & {*spellings.KEYS, *spellings.ALWAYS, *spellings.UNREAD, *spellings.FEATURES}


def test_every_option_of_megatron_core_is_answered():
    """The sources are only parsed, because importing Megatron-Core takes seconds."""
    core = Path(importlib.util.find_spec("megatron").submodule_search_locations[0]) / "core"
    files = ("model_parallel_config", "transformer/transformer_config", "optimizer/optimizer_config")
    names = set()
    for file in (*files, "distributed/distributed_data_parallel_config"):
        classes = ast.parse((core / f"{file}.py").read_text()).body
        fields = [field for cls in classes if getattr(cls, "name", "") in CLASSES for field in cls.body]
        names |= {field.target.id for field in fields if isinstance(field, ast.AnnAssign)}
    assert "sequence_parallel" in names
    functions = re.compile(
        r"timers|test_mode|.*_func|(output_layer_|embedding_)?init_method|pipeline_dtype|_.*"
    )
    options = {name for name in names - KEYS if not functions.fullmatch(name)}
    assert sorted(name for name in options if not spellings.answer(name)) == []
