"""Names of keys in other training programs."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config import megatron_options, spellings
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.keys import inner_class, key_paths
from hpcgen.config.node_type import NodeType
from hpcgen.config.run import RunConfig
from hpcgen.config.slurm import OWN_OPTIONS
from hpcgen.config.unknown_keys import TRANSLATED_SECTIONS, unknown_key
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
        (
            "data.train_on_inputs",
            "data.sft: true learns only the answers of chats; texts (data.sft: false) learn all tokens",
        ),
        ("data.packing", "use data.sft_packing for chats, or data.reset_attention_mask for texts"),
        ("slurm.train.nodess", "did you mean nodes?"),
        (
            "slurm.train.preemption",
            "known keys are account, chain, constraint, cpus_per_task, extra_directives, max_restarts, mem, nodes, "
            "ntasks_per_node, partition, qos, reservation, segment, signal_lead_s, time; "
            "for other options of sbatch, use extra_directives",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_what_to_use(tmp_path, key, hint):
    with pytest.raises(ConfigErrors) as error:
        planned(tmp_path, minimal_run(), overrides=[f"{key}=1"])
    [message] = error.value.messages
    assert message.startswith(f"--set {key}: {key} = 1 is not a known key; {hint}")


WORDS = """
    optimizer.name optimizer.optimizer optimizer.type optimizer.muon muon -> does not support optimizers
    optimizer.schedule optimizer.scheduler scheduler -> use optimizer.lr_decay_style
    optimizer.betas -> use optimizer.adam_beta1 and
    data.schedule data.format data.streaming checkpoint.best optimizer.decay -> known keys are
    model.lora_rank lora_r -> use lora.rank
    peft training.adapters -> use the section lora
    lora.use_dora model.use_dora -> examples/deepspeed/lora.yaml
    qlora lora.qlora lora.load_in_4bit load_in_8bit model.quantization_config -> for QLoRA, run TRL with bitsandbytes
    dpo training.dpo training.grpo rlhf training.reward_model dpo_beta -> Run TRL in the stage run, as examples/trl_dpo.
    fsdp training.fsdp parallelism.use_torch_fsdp2 -> Divide parameters with parallelism.tensor_model_parallel_size
    model.prune pruning training.sparsity -> hpcgen checkpoint export writes a model for a program that prunes
    checkpoint.prune -> use checkpoint.keep_last
    sft data.chat_template training.loss_on_answers -> use data.sft: true
    model.tie_embeddings tie_word_embeddings -> use model.untie_embeddings_and_output_weights, with the opposite
    distillation training.distillation teacher -> use training.loss with examples/distillation.py
    label_smoothing training.loss_fn -> use training.loss, with a function such as smoothed in
    early_stopping training.patience early_stopping_patience -> use training.early_stopping
    checkpoint.save_best load_best_model_at_end -> use checkpoint.keep_best
    ema training.use_ema -> use training.ema_decay
    z-loss model.z_loss -> use training.z_loss_coeff, or model.moe_z_loss_coeff for routers
    mup model.use_mup optimizer.mup -> optimizer.parameter_groups sets learning rates by parameter
    freeze model.freeze training.freeze_layers -> use training.freeze
    resume checkpoint.resume resume_from_checkpoint -> remove it, because a run always resumes
    model.name model_name_or_path model.pretrained -> hpcgen init --from-hf
    run_name experiment_name -> use name
    epochs num_train_epochs training.epochs -> use training.train_iters
    checkpoint.interval checkpoint.every training.save_every -> use checkpoint.save_interval
    logging.every logging.interval training.log_every -> use logging.log_interval
    training.eval_every training.val_interval -> use training.eval_interval
    checkpoint.dir checkpoint.path paths.checkpoint_dir -> use checkpoint.save
    paths.output output_dir paths.log_dir logging.dir -> use paths.run_dir
    data.path data.files data_path paths.data -> use data.datasets
    data.mix data.weights -> use data.datasets, which has a weight
    data.val data.eval -> use data.valid
    gpus devices slurm.train.gpus slurm.gpus -> use slurm.train.nodes, the number of nodes with all
    slurm.train.queue queue slurm.queue -> use slurm.train.partition
    slurm.train.walltime time_limit -> use slurm.train.time
    slurm.train.dependency slurm.dependency -> use slurm.train.extra_directives with --dependency
    slurm.prepare.mem_per_cpu -> use slurm.prepare.mem, which is the memory per node
    slurm.train.gres slurm.gpus_per_task -> use slurm.train.nodes, the number of nodes with all
    slurm.train.job_name -> use name
    slurm.train.array slurm.run.open_mode -> because hpcgen sets --
    slurm.train.output slurm.train.error -> use paths.run_dir
    slurm.train.nodelists -> if you mean nodelist, use slurm.train.extra_directives with --nodelist
    optimizer.learning_rte -> if you mean learning_rate, use optimizer.lr
    training.num_train_epoch -> if you mean num_train_epochs, use training.train_iters
    training.early_stoping -> did you mean early_stopping
    model.tie_word_embedding -> if you mean tie_word_embeddings, use model.untie_embeddings
    parallelism.nodes training.nodes nodes -> use slurm.train.nodes
    evaluation.shots -> use evaluation.num_fewshot
    evaluation.prompts evaluation.foo paths.foo -> known keys are
    training.seeed seeed -> did you mean
    scratch node_type -> it is a key of the cluster profile
    slurm.train.image training.checkpoint -> is a section of its own | checkpoint is
    model.hidden -> names that begin with hidden: hidden_dropout, hidden_size
"""
ROWS = [row.strip().split(" -> ") for row in WORDS.strip().splitlines()]


@pytest.mark.parametrize(("key", "hint"), [(key, hint) for keys, hint in ROWS for key in keys.split()])
def test_a_word_is_answered_by_its_meaning(key, hint):
    problem = unknown_key(RunConfig, key, key.split("."))
    assert any(each.strip() in problem.hint for each in hint.split(" | "))


@pytest.mark.parametrize(
    ("cls", "key", "hint"),
    [
        (ClusterConfig, "queue", "use slurm.partition"),
        (ClusterConfig, "slurm.queue", "use slurm.partition"),
        (ClusterConfig, "gpus", "use node_type"),
        (ClusterConfig, "slurm.gres", "use gres"),
        (ClusterConfig, "scrach_dir", "if you mean scratch_dir, use scratch"),
        (ClusterConfig, "image_path", "use container.image"),
        (ClusterConfig, "prologue", "use a site's template"),
        (ClusterConfig, "lr", "hpcgen schema cluster lists all keys"),
        (ClusterConfig, "preset", "it is a key of the run file"),
        (NodeType, "vram", "use gpu_memory_gib"),
        (NodeType, "cores", "use cpus_per_node"),
        (NodeType, "gpu_cont", "if you mean gpu_count, use gpus_per_node"),
        (NodeType, "sources_", "did you mean sources?"),
        (NodeType, "sauces", "hpcgen schema node-type lists all keys"),
    ],
)
def test_a_word_in_a_profile_or_a_node_type(cls, key, hint):
    assert unknown_key(cls, key, key.split(".")).hint.startswith(hint)


@pytest.mark.parametrize(("cls", "section"), [(RunConfig, "slurm.train"), (ClusterConfig, "slurm")])
def test_an_option_of_sbatch_that_hpcgen_sets_is_not_sent_to_the_directives_that_refuse_it(cls, section):
    keys = {f"{section}.{option.replace('-', '_')}" for option in OWN_OPTIONS}
    hints = {key: unknown_key(cls, key, key.split(".")).hint for key in sorted(keys - {*key_paths(cls)})}
    assert f"{section}.gres" in hints
    for key, hint in hints.items():
        assert re.match("use |remove it, because hpcgen sets --", hint), key
        assert "extra_directives" not in hint, key


ENGLISH = (
    "apple bridge camera dinner eagle forest guitar hammer island jacket kitchen ladder mirror needle orange"
)


@pytest.mark.parametrize(
    "word", [*ENGLISH.split(), "terraform", "kubernetes", "hydra", "strategy", "accelerator"]
)
@pytest.mark.parametrize(
    "section", ["", *SECTIONS, "paths", "evaluation", "slurm", "slurm.train", "container"]
)
def test_any_other_word_gets_the_list_of_keys(section, word):
    key = f"{section}.{word}".lstrip(".")
    assert re.match("known keys are|hpcgen init lists", unknown_key(RunConfig, key, key.split(".")).hint)


@pytest.mark.parametrize(
    ("cls", "tables"),
    [
        (RunConfig, spellings.sections("RunConfig")),
        (RunConfig, {"slurm.train": spellings.slurm_names()}),
        (ClusterConfig, spellings.sections("ClusterConfig")),
        (NodeType, spellings.sections("NodeType")),
    ],
)
def test_the_names_of_a_section_mean_existing_keys_and_are_none(cls, tables):
    known = {*key_paths(cls), "data.datasets.prefix"}
    for section, names in tables.items():
        for name, use in names.items():
            key = spellings.key_of(use)
            assert key in known or f"{section}.{key}" in known, use
            if section != "slurm":  # its names apply in the sections below it
                assert f"{section}.{name}".lstrip(".") not in known


def test_a_cluster_profile_is_not_sent_to_keys_of_a_run_file(tmp_path):
    (tmp_path / "site.yaml").write_text("extends: azure-ndv5\ntp: 3\n")
    with pytest.raises(ConfigErrors, match="tp = 3 is not a known key") as error:
        planned(tmp_path, minimal_run(cluster="./site.yaml"))
    assert "parallelism" not in str(error.value)


def test_the_answers_name_existing_keys():
    for answer in spellings.table("keys").values():
        section: Any = RunConfig
        for key in re.match(r"[\w.]+", answer)[0].split("."):
            hint = field_hints(section).get(key)
            assert hint is not None, answer
            section = inner_class(hint)


def test_each_name_has_one_answer():
    """A name that is listed twice would lose its first answer."""
    text = Path(spellings.__file__).with_name("other_names.txt").read_text(encoding="utf-8")
    for section in re.split(r"^\[", text, flags=re.MULTILINE)[1:]:
        lines = [line.rpartition(": ")[2] for line in section.splitlines()[1:] if line and line[0] != "#"]
        listed = " ".join(lines).split()
        assert len(listed) == len(set(listed))
    sections = [spellings.table(section) for section in ("keys", "needless", "lacks", "instead")]
    assert sum(map(len, sections)) == len(set().union(*sections))


def test_the_table_of_options_is_not_repeated():
    """A name that the table of Megatron-LM's options answers is in no list of names, unless it has a remark."""
    text = Path(spellings.__file__).with_name("other_names.txt").read_text(encoding="utf-8")
    text = text.partition("\n[slurm]")[
        0
    ]  # names of one section can be those of options, which answer elsewhere
    for name, row in megatron_options.names().items():
        if row.key:
            [*answers] = re.findall(rf"^{re.escape(row.key)}: (?:.* )?{name}(?: .*)?$", text, re.MULTILINE)
            assert not answers, name


def test_a_key_of_the_run_file_is_in_no_table():
    assert not KEYS & {*spellings.table("keys"), *spellings.table("needless"), *spellings.table("lacks")}


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
