"""Tune a chat model on preferences with TRL's DPOTrainer, fully or with LoRA (PEFT): a program for the stage run.

The model is a Hugging Face directory with a tokenizer and its chat template, such as `hpcgen checkpoint export` writes.
Each line of the data is a prompt with a preferred and a rejected answer, as messages or as strings:

    {"prompt": [{"role": "user", "content": "..."}], "chosen": [{"role": "assistant", "content": "..."}],
     "rejected": [{"role": "assistant", "content": "..."}]}

The program saves checkpoints, stops after SIGUSR1, and resumes. At the end, it writes the model, or with LoRA its
adapter, to DIRECTORY/model. One process per GPU; trl_dpo.yaml runs it.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import DPOConfig, DPOTrainer


def main() -> None:
    """Train until --steps, or until the signal."""
    options = parse_options()
    stop = StopSignal()
    config = DPOConfig(
        output_dir=str(options.directory / "checkpoints"),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=options.lr,
        warmup_steps=options.steps // 10,
        beta=options.beta,
        max_length=options.max_length,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=options.activation_checkpointing,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        seed=options.seed,
    )
    # TRL loads the reference model from the same directory, also after a restart. With LoRA, it is the model without
    # its adapter.
    trainer = DPOTrainer(
        model=str(options.model),
        args=config,
        train_dataset=load_dataset("json", data_files=str(options.data), split="train"),
        peft_config=lora(options.lora_rank) if options.lora_rank else None,
        callbacks=[stop],
    )
    trainer.train_dataset = without_long_answers(trainer.train_dataset, config)
    trainer.train(resume_from_checkpoint=newest_checkpoint(Path(config.output_dir)))
    if trainer.state.global_step >= options.steps:
        trainer.save_model(str(options.directory / "model"))
        if trainer.is_world_process_zero():
            (options.directory / "done").touch()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="directory of a Hugging Face model and tokenizer"
    )
    parser.add_argument("--data", type=Path, required=True, help="preferences in JSON Lines")
    parser.add_argument(
        "--directory", type=Path, required=True, help="directory for checkpoints and the result"
    )
    parser.add_argument("--steps", type=int, required=True, help="number of optimizer steps")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="pairs per GPU in a microbatch")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="microbatches per step")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--beta", type=float, default=0.1, help="strength of the pull to the reference model")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens above which a pair is left out")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument(
        "--lora-rank", type=int, help="train adapters of this rank and keep the model's weights"
    )
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def without_long_answers(pairs: Dataset, config: DPOConfig) -> Dataset:
    """The tokenized pairs of which both answers end within --max-length. TRL would compare parts of the others.

    Raises:
        SystemExit: no pair is left.
    """

    def fits(pair: dict[str, list[int]]) -> bool:
        longest = max(len(pair["chosen_ids"]), len(pair["rejected_ids"]))
        return len(pair["prompt_ids"]) + longest <= config.max_length

    with config.main_process_first():  # the other processes read its cache
        found = pairs.filter(fits)
    if config.process_index == 0:
        print(f"{len(found)} of {len(pairs)} pairs fit in {config.max_length} tokens", flush=True)
    if not len(found):
        raise SystemExit("there is nothing to train on; check the data and --max-length")
    return found


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
        if dist.is_initialized():
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
