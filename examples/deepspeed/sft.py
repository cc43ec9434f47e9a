"""Fine-tune a chat model with TRL and DeepSpeed on conversations in JSON Lines, fully or with LoRA (PEFT).

Each line of the data is {"messages": [{"role": "user", "content": "..."}, ...]}. The model is trained on the answers of
the role assistant only. The program saves checkpoints, stops after SIGUSR1, resumes, and writes the model, or with LoRA
its adapter, to DIRECTORY/model at the end. One process per GPU; see README.md.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

IGNORED = -100
"""Label of a token that the model is not trained to predict."""


def main() -> None:
    """Train until --steps, or until the signal."""
    options = parse_options()
    stop = StopSignal()
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
        train_dataset=load_answers(options, config),
        peft_config=lora(options.lora_rank) if options.lora_rank else None,
        callbacks=[stop],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(Path(config.output_dir)))
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
    parser.add_argument("--data", type=Path, required=True, help="conversations in JSON Lines")
    parser.add_argument(
        "--directory", type=Path, required=True, help="directory for checkpoints and the result"
    )
    parser.add_argument("--steps", type=int, required=True, help="number of optimizer steps")
    parser.add_argument(
        "--micro-batch-size", type=int, default=1, help="conversations per GPU in a microbatch"
    )
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="microbatches per step")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument(
        "--max-length", type=int, default=2048, help="tokens after which a conversation is cut"
    )
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument(
        "--lora-rank", type=int, help="train adapters of this rank and keep the model's weights"
    )
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--fp32", action="store_true", help="train in fp32, for CPUs")
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args()


def load_answers(options: argparse.Namespace, config: SFTConfig) -> Dataset:
    """The conversations as tokens and labels, without those that have no answer in the first --max-length tokens."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    conversations = load_dataset("json", data_files=str(options.data), split="train")

    def label(example: dict, index: int) -> dict[str, list[int]]:
        try:
            return label_answers(tokenizer, example["messages"], options.max_length)
        except ValueError as error:
            raise SystemExit(f"conversation {index + 1} of {options.data}: {error}") from error

    with config.main_process_first():  # the other processes read its cache
        labeled = conversations.map(label, with_indices=True, remove_columns=conversations.column_names)
        answers = labeled.filter(lambda example: any(label != IGNORED for label in example["labels"]))
    if config.process_index == 0:
        print(f"{len(answers)} of {len(conversations)} conversations have an answer to train on", flush=True)
    if not len(answers):
        raise SystemExit("there is nothing to train on; check the roles and --max-length")
    return answers


def label_answers(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], max_length: int
) -> dict[str, list[int]]:
    """Tokens of a conversation, with labels for the answers.

    An answer is what the chat template writes after the prompt for it. So the token at its end counts, and the role in
    front does not. TRL's assistant_only_loss needs a template with {% generation %}, which published models lack.
    """
    tokens = tokenizer.apply_chat_template(messages, return_dict=False)
    labels = [IGNORED] * len(tokens)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise ValueError("it begins with an answer. Put a question in front")
        prompt = tokenizer.apply_chat_template(
            messages[:number], add_generation_prompt=True, return_dict=False
        )
        answered = tokenizer.apply_chat_template(messages[: number + 1], return_dict=False)
        if answered[: len(prompt)] != prompt or tokens[: len(answered)] != answered:
            raise ValueError(
                f"the chat template writes message {number + 1} in another way if others follow, so its tokens are "
                "unknown. Use conversations that end with their first answer, or another template"
            )
        labels[len(prompt) : len(answered)] = answered[len(prompt) :]
    return {"input_ids": tokens[:max_length], "labels": labels[:max_length]}


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
