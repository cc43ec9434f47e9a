"""Fine-tune a chat model with TRL and DeepSpeed on chats that hpcgen prepared, fully or with LoRA (PEFT).

The data is a directory of `hpcgen data export`: token IDs with a mask of the answers, which are all that is learned.
The program saves checkpoints, stops after SIGUSR1, resumes, and writes the model, or with LoRA its adapter, to
DIRECTORY/model at the end. One process per GPU; see README.md.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import load_dataset
from peft import LoraConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Train until --steps, or until the signal."""
    options = parse_options()
    trainer = build_trainer(options, StopSignal())
    trainer.train(resume_from_checkpoint=newest_checkpoint(Path(trainer.args.output_dir)))
    if trainer.state.global_step >= options.steps:
        trainer.save_model(str(options.directory / "model"))
        if trainer.is_world_process_zero():
            (options.directory / "done").touch()
    dist.barrier()
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed_config", required=True, help="DeepSpeed's JSON file")
    parser.add_argument(
        "--model", type=Path, required=True, help="directory of a Hugging Face model and tokenizer"
    )
    parser.add_argument("--data", type=Path, required=True, help="directory of exported chats")
    parser.add_argument(
        "--directory", type=Path, required=True, help="directory for checkpoints and the result"
    )
    parser.add_argument("--steps", type=int, required=True, help="number of optimizer steps")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="chats per GPU in a microbatch")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="microbatches per step")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--max-length", type=int, default=2048, help="tokens after which a chat is cut")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument(
        "--lora-rank", type=int, help="train adapters of this rank and keep the model's weights"
    )
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--fp32", action="store_true", help="train in fp32, for CPUs")
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def build_trainer(options: argparse.Namespace, stop: StopSignal) -> SFTTrainer:
    """TRL's trainer. It leaves out chats of which no answer begins in the first --max-length tokens.

    Raises:
        SystemExit: the data has no mask of the answers, or no answer is left.
    """
    chats = load_dataset("parquet", data_files=str(options.data / "**/*.parquet"), split="train")
    if "assistant_masks" not in chats.column_names:
        raise SystemExit(
            f"{options.data} has no column assistant_masks: export pairs of chats (data.corpus.chat)"
        )
    config = SFTConfig(
        output_dir=str(options.directory / "checkpoints"),
        deepspeed=options.deepspeed_config,  # fills each "auto" in this file from the arguments here
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 20,
        bf16=not options.fp32,
        use_cpu=not torch.cuda.is_available(),
        max_length=options.max_length,
        gradient_checkpointing=options.activation_checkpointing,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        seed=options.seed,
    )
    # With a path and not a model, TRL creates the model after `config`, so that ZeRO-3 partitions it while loading.
    trainer = SFTTrainer(
        model=str(options.model),
        args=config,
        train_dataset=chats,
        peft_config=lora(options.lora_rank) if options.lora_rank else None,
        callbacks=[stop],
    )
    count = len(trainer.train_dataset)
    if trainer.is_world_process_zero():
        print(f"{count} of {len(chats)} chats have an answer in {options.max_length} tokens", flush=True)
    if not count:
        raise SystemExit("there is nothing to train on; raise --max-length")
    return trainer


def lora(rank: int) -> LoraConfig:
    """Adapters on every linear layer except the output layer."""
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


class StopSignal(TrainerCallback):
    """Saves and stops after a step in which hpcgen's signal came."""

    def __init__(self) -> None:
        self._is_received = False
        signal.signal(signal.SIGUSR1, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self._is_received = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Agree with the other ranks: the signal does not reach all in the same step."""
        flag = torch.tensor(int(self._is_received), device=args.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag:
            control.should_save = control.should_training_stop = True


def newest_checkpoint(directory: Path) -> str | None:
    """The newest complete checkpoint. transformers writes trainer_state.json last; a killed job writes a part of it."""
    states = directory.glob("checkpoint-*/trainer_state.json")
    complete = [path.parent for path in states if path.read_text().endswith("}\n")]
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


if __name__ == "__main__":
    main()
