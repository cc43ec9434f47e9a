"""Converts the common state of checkpoints to and from Megatron-LM's form, so that each program resumes the other's.

In both programs, weights and optimizer state are Megatron-Core's and have the same names. Only the common state
differs: Megatron-LM's has `args`, the parsed flags, and a schedule that counts samples instead of iterations.

Sources, in Megatron-LM 0.16.1 and 0.19.0: megatron/training/checkpointing.py (`generate_state_dict`,
`check_checkpoint_args`, `load_args_from_checkpoint`, `load_checkpoint`), megatron/training/training.py
(`get_optimizer_param_scheduler`), megatron/training/arguments.py, megatron/core/optimizer_param_scheduler.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.megatron_lm_experts import current_expert_layout, saved_expert_layout
from trainer.checkpoint.megatron_lm_model import FIXED_MODEL, model_args, model_section, unsupported_model
from trainer.contract.config import ParallelismConfig, TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.optimizers import OPTIMIZERS, optimizer_of

OPTIMIZER = ("lr_warmup_init", "clip_grad", *(key for optimizer in OPTIMIZERS for key in optimizer.keys))
FP16 = ("loss_scale", "loss_scale_window", "hysteresis")
"""Fields of OptimizerConfig that are also arguments of the same name. The fields in FP16 apply only with --fp16."""

FP8 = ("fp8", "fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo")
"""Fields of TrainingConfig that are also arguments of the same name. They only apply with --fp8."""

FIXED_TRAINING = {
    "use_precision_aware_optimizer": False,
    "decoupled_lr": None,
    "weight_decay_incr_style": "constant",
    "dataloader_type": "single",
    "sft": False,
    "fim_data": False,
}
"""Arguments that change the optimizer or the samples, with the only value that this trainer supports."""

DOCUMENTS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
"""Fields of BlendConfig that are also arguments of the same name."""

GPT2_VOCABULARY = 50257

RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space")
"""Optimizer state that loads at any layout. Megatron-LM's default, dp_reshardable, loads at any DP."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The common state of Megatron-LM's checkpoint in this trainer's terms."""

    iteration: int
    """Number of completed steps."""
    consumed_samples: int
    """Number of training samples that these steps have read."""
    sections: dict[str, dict[str, Any]]
    """Known keys of the sections that COMPLETE would have, as in JSON."""
    content_metadata: dict[str, Any]
    """Options of Core's sharding of the tensors."""
    precision: str | None = None
    """Value of training.precision."""
    tokenizer_type: str | None = None
    """Value of --tokenizer-type."""


def common_state(config: TrainerConfig, iteration: int, consumed_samples: int) -> dict[str, Any]:
    """Entries that pretrain_gpt.py needs in a checkpoint in addition to Megatron-Core's. `config` is resolved."""
    return {
        "args": _args(config, iteration, consumed_samples),
        "opt_param_scheduler": _schedule(config, iteration),
    }


def resumed(common: Mapping[str, Any], layout: ParallelismConfig, *, weights_only: bool = False) -> Resumed:
    """Read the common state of a checkpoint of Megatron-LM.

    With `weights_only`, it may be any checkpoint that Megatron-Core saved. Missing values are then not compared.

    Raises:
        TrainerError: this trainer cannot resume from it; the message says what to do.
    """
    if "args" not in common:
        if weights_only:
            return Resumed(iteration=0, consumed_samples=0, sections={}, content_metadata={})
        raise TrainerError(
            "neither this trainer nor Megatron-LM's pretrain_gpt.py wrote it (it has no COMPLETE and no args). "
            "Only its weights can be loaded, with checkpoint.load and checkpoint.finetune: true"
        )
    args = vars(common["args"])
    _refuse([*_differing(args, FIXED_MODEL), *unsupported_model(args)])
    sections = {"model": model_section(args)}
    batch, iteration = args["global_batch_size"], common["iteration"]
    if not weights_only:
        _refuse([*_unknown_optimizer(args), *_differing(args, FIXED_TRAINING)])
        _check_optimizer_state(common, args, layout)
        sections |= {
            "training": _training(args),
            "optimizer": _optimizer(args, common["opt_param_scheduler"], iteration),
            "data": _data(args),
        }
    return Resumed(
        iteration=iteration,
        consumed_samples=args.get("consumed_train_samples", iteration * batch),
        sections=sections,
        content_metadata=dict(common.get("content_metadata") or {}),
        precision=_precision(args),
        tokenizer_type=args.get("tokenizer_type"),
    )


def _differing(args: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {args[name]!r}" for name in fixed if args.get(name) not in (None, fixed[name])]


def _unknown_optimizer(args: Mapping[str, Any]) -> list[str]:
    name = args.get("optimizer")
    return (
        [] if name in (None, *(optimizer.megatron for optimizer in OPTIMIZERS)) else [f"optimizer = {name!r}"]
    )


def _refuse(options: list[str]) -> None:
    if options:
        raise TrainerError(
            f"it was trained with options that this trainer does not support: {', '.join(options)}"
        )


def _check_optimizer_state(
    common: Mapping[str, Any], args: Mapping[str, Any], layout: ParallelismConfig
) -> None:
    only_weights = "load only its weights, with checkpoint.load and checkpoint.finetune: true"
    if common.get("optimizer") is None or "opt_param_scheduler" not in common:
        raise TrainerError(
            f"it was saved without the optimizer state (--no-save-optim). You can {only_weights}"
        )
    if not args.get("use_distributed_optimizer"):
        raise TrainerError(
            "its optimizer state is not the distributed optimizer's. Save it in Megatron-LM with "
            f"--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable, or {only_weights}"
        )
    sharding = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if sharding is None:
        raise TrainerError(
            "it does not say how its optimizer state is sharded, as is usual for old versions of megatron-core. Load "
            f"and save it once in a newer Megatron-LM, or {only_weights}"
        )
    if sharding in RESHARDABLE:
        return
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
    )
    saved = {name: args.get(name) for name in names}
    current = {name: getattr(layout, name) for name in names}
    if args.get("num_experts") is not None:
        saved |= saved_expert_layout(args)
        current |= current_expert_layout(layout)
    if saved != current:
        sizes = ", ".join(f"{name}: {size}" for name, size in saved.items() if size is not None)
        raise TrainerError(
            f"its optimizer state ({sharding}) loads only with the layout that saved it ({sizes}). Use that layout, or "
            "save it once in Megatron-LM with --dist-ckpt-optim-fully-reshardable"
        )


def _training(args: Mapping[str, Any]) -> dict[str, Any]:
    rampup = args.get("rampup_batch_size")
    return {
        "global_batch_size": args["global_batch_size"],
        "seed": args["seed"],
        "rampup_batch_size": None if rampup is None else [int(number) for number in rampup],
        "precision": _precision(args),
        **{name: args.get(name) for name in (FP8 if args.get("fp8") else ("fp8",))},
    }


def _precision(args: Mapping[str, Any]) -> str:
    return "fp16" if args.get("fp16") else "bf16" if args.get("bf16") else "fp32"


def _optimizer(args: Mapping[str, Any], schedule: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """The schedule that the run followed, which may differ from that of its flags.

    It counts samples. `lr_warmup_iters` and `lr_decay_iters` are chosen so that the decay continues as in Megatron-LM.
    After a batch-size ramp-up they are larger than the samples of the flags divided by the full batch size.
    """
    batch = args["global_batch_size"]
    ramped = iteration * batch - schedule["num_steps"]

    def iterations(samples: int) -> float:
        whole, rest = divmod(samples, batch)
        return samples / batch if rest else whole

    result = {
        "lr": schedule["max_lr"],
        "min_lr": schedule["min_lr"],
        "lr_decay_style": schedule["lr_decay_style"],
        "lr_warmup_iters": iterations(schedule["lr_warmup_steps"] + ramped),
        "lr_decay_iters": iterations(schedule["lr_decay_steps"] + ramped),
        "weight_decay": schedule["end_wd"],
        **{name: args[name] for name in OPTIMIZER if args.get(name) is not None},
    }
    if schedule["lr_decay_style"] == "WSD":
        samples = args.get("lr_wsd_decay_samples") or (args.get("lr_wsd_decay_iters") or 0) * batch
        result["lr_wsd_decay_iters"] = iterations(samples)
        result["lr_wsd_decay_style"] = args["lr_wsd_decay_style"]
    if args.get("fp16"):
        result |= {name: args[name] for name in FP16}
    return result


def _data(args: Mapping[str, Any]) -> dict[str, Any]:
    """The data of the training samples, as far as the flags specify it."""
    documents = _documents(args)
    if args.get("data_path"):
        split = str(args["split"]).replace(" ", "")
        return {"datasets": _blend(args["data_path"]), "split": split, **documents}
    if args.get("train_data_path"):
        return {"train": _blend(args["train_data_path"]), **documents}
    return documents


def _documents(args: Mapping[str, Any]) -> dict[str, bool]:
    """How the documents of a sample were trained.

    The mask of --reset-attention-mask is read only by local layers without the fused softmax (NVIDIA/Megatron-LM, issue
    2357). --dataloader-inter-document-masking of core 0.19 separates documents and their positions.
    """
    given = {name: bool(args.get(name)) for name in DOCUMENTS}
    if args.get("dataloader_inter_document_masking"):
        return {**given, "reset_attention_mask": True, "reset_position_ids": True}
    is_local = args.get("transformer_impl", "local") == "local" and not args.get("masked_softmax_fusion")
    return given if is_local else {**given, "reset_attention_mask": False}


def _blend(paths: list[str]) -> list[dict[str, Any]]:
    """The datasets of --data-path: prefixes, or alternating weights and prefixes."""
    try:
        weights = [float(weight) for weight in paths[::2]] if len(paths) % 2 == 0 else []
    except ValueError:
        weights = []
    prefixes = paths[1::2] if weights else paths
    return [
        {"prefix": prefix, "weight": weight} for prefix, weight in itertools.zip_longest(prefixes, weights)
    ]


def _args(config: TrainerConfig, iteration: int, consumed_samples: int) -> argparse.Namespace:
    """The arguments that pretrain_gpt.py compares with its own, or uses with --use-checkpoint-args.

    Only plain values, since torch's safe loading accepts nothing else.
    """
    model, layout, training = config.model, config.parallelism, config.training
    optimizer = optimizer_of(config.optimizer)
    return argparse.Namespace(
        **model_args(model),
        **{name: value for name, value in FIXED_TRAINING.items() if value is not None},
        **{name: getattr(config.data, name) for name in DOCUMENTS},
        # Compared if --vocab-file is given; --use-checkpoint-args uses tokenizer_type. The tokenizer is not known here,
        # but a vocabulary of this size is GPT-2's.
        make_vocab_size_divisible_by=128,
        tokenizer_type="GPT2BPETokenizer" if model.vocab_size == GPT2_VOCABULARY else None,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        **current_expert_layout(layout),
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        train_iters=training.train_iters,
        seed=training.seed,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        calculate_per_token_loss=True,
        data_parallel_random_init=False,
        consumed_train_samples=consumed_samples,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        iteration=iteration,
        ckpt_format="torch_dist",
        optimizer=optimizer.megatron,
        use_distributed_optimizer=optimizer.sharding == "distributed",
        no_save_optim=False,
        # Each step seeds its own generators, so there is no state to load.
        no_save_rng=True,
    )


def _schedule(config: TrainerConfig, iteration: int) -> dict[str, Any]:
    """State of Core's OptimizerParamScheduler, which counts samples as steps.

    `num_steps` is the iteration times the full batch size, not the number of consumed samples, so that the rate
    also fits the iteration after a batch-size ramp-up. Megatron-LM refuses the name of a decay that it does not have,
    unless its flags override it.
    """
    optimizer, training = config.optimizer, config.training
    assert optimizer.lr_warmup_iters is not None
    assert optimizer.lr_decay_iters is not None
    batch = training.global_batch_size
    return {
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_warmup_steps": optimizer.lr_warmup_iters * batch,
        "num_steps": iteration * batch,
        "lr_decay_style": optimizer.lr_schedule or optimizer.lr_decay_style,
        "lr_decay_steps": optimizer.lr_decay_iters * batch,
        "start_wd": optimizer.weight_decay,
        "end_wd": optimizer.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": training.train_iters * batch,
    }
