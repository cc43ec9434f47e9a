"""Small imported models, texts and tasks to evaluate, and what lm-eval and transformers compute for them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from tests.patience import PATIENCE_S
from tests.trainer.forked import ForkedPython
from tests.trainer.huggingface.models import VOCAB_SIZE, save_model, transformers_process
from tests.trainer.runs import environment, free_port, new_process
from trainer.contract.evaluation import EvaluationResult, read_result, result_file, samples_file
from trainer.huggingface.exporting import Options, export
from trainer.huggingface.importing import import_model

EOD = "<eod>"
WORDS = "the cat sat on a mat and the dog saw it run over to some other animals in their house"
TASKS = {
    # A context with a trailing space, answers of several tokens, and answers of one token each (digits).
    "choice": """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "letters": """
include: choice.yaml
task: letters
num_fewshot: 2
target_delimiter: " "
fewshot_split: test
doc_to_choice: ["A", "B", "C"]
metadata: {version: 2.0}
""",
    "answer": """
task: answer
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
""",
    "suite": """
group: suite
task: [choice, letters]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
""",
}


@dataclass(frozen=True)
class Imported:
    """A model of transformers as a checkpoint, and its export."""

    checkpoint: Path
    exported: Path
    tokenizer: Path


def import_case(case: str, directory: Path) -> Imported:
    """A model whose embedding is padded from 300 to 384 rows."""
    save_model(case, directory / "original")
    tokenizer = write_tokenizer(directory)
    import_model(directory / "original", directory / "checkpoints", lambda line: None)
    checkpoint = directory / "checkpoints/iter_0000000"
    options = Options(tokenizer=tokenizer, eos_token=EOD)
    export(checkpoint, directory / "exported", options, lambda line: None)
    return Imported(checkpoint, directory / "exported", tokenizer)


def write_tokenizer(directory: Path) -> Path:
    """A tokenizer.json of 300 byte-level tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator([WORDS] * 10, trainer)
    assert library.get_vocab_size() == VOCAB_SIZE
    path = directory / "tokenizer.json"
    library.save(str(path))
    return path


def write_tasks(directory: Path) -> None:
    """Task files, and documents of which one does not fit into 128 positions."""
    words = WORDS.split()
    documents = [
        {
            "question": " ".join(words[number : number + 5] * (40 if number == 3 else 1))
            + " " * (number % 2),
            "choices": [f"{' ' * (1 - number % 2)}{words[-number - shift]} {shift}" for shift in range(1, 4)],
            "answer": number % 3,
        }
        for number in range(7)
    ]
    directory.mkdir()
    data = directory / "documents.jsonl"
    data.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    for name, text in TASKS.items():
        (directory / f"{name}.yaml").write_text(text.replace("DATA", str(data)))


def write_text(prefix: Path, num_tokens: int = 500) -> numpy.ndarray:
    """A pair of random tokens in documents of up to 90 tokens. Returns the stream of tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokens = numpy.random.default_rng(1).integers(0, VOCAB_SIZE, num_tokens).astype(numpy.uint16)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for first in range(0, num_tokens, 90):
        document = tokens[first : first + 90]
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return tokens


def configuration(checkpoint: Path, run_dir: Path, world_size: int = 1, **settings: Any) -> dict[str, Any]:
    run_dir.mkdir(exist_ok=True)
    return {
        "name": "test",
        "run_dir": str(run_dir),
        "device": "cpu",
        "world_size": world_size,
        "checkpoint": str(checkpoint),
        "tensorboard": False,
        "settings": {"batch_size": 4, "precision": "fp32", **settings},
    }


def start(config: dict[str, Any], ranks: int | None = None) -> list[Any]:
    """The ranks of an evaluation job. Default: as many as it is configured for."""
    ranks = ranks or config["world_size"]
    directory = Path(config["run_dir"])
    (directory / "evaluation.json").write_text(json.dumps(config))
    arguments = ["-m", "trainer.evaluate", "--config", str(directory / "evaluation.json")]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    caches = {"HF_HOME": str(directory / "huggingface")}
    port = free_port()
    process = new_process if config["device"] == "cuda" else ForkedPython
    return [
        process(
            arguments,
            environment(rank, ranks, port) | offline | caches,
            directory / "log",
        )
        for rank in range(ranks)
    ]


def finish(config: dict[str, Any], ranks: int | None = None) -> tuple[list[int], str]:
    """Exit statuses of the ranks, and the log."""
    processes = start(config, ranks)
    try:
        statuses = [process.wait(timeout=PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return statuses, (Path(config["run_dir"]) / "log").read_text()


def evaluated(config: dict[str, Any], iteration: int = 0) -> tuple[EvaluationResult, list[dict[str, Any]]]:
    """The results of a job, and the answers of its tasks."""
    statuses, log = finish(config)
    assert set(statuses) == {0}, log
    directory = Path(config["run_dir"])
    samples = samples_file(directory, iteration)
    lines = samples.read_text().splitlines() if samples.exists() else []
    return read_result(result_file(directory, iteration)), [json.loads(line) for line in lines]


def reference_tasks(exported: Path, tasks: Path, names: Sequence[str]) -> dict[str, Any]:
    """Results and samples of lm-eval's own model `hf`."""
    return transformers_process().submit(_reference_tasks, exported, tasks, list(names)).result()


def reference_loss(exported: Path, windows: list[list[int]]) -> float:
    """Mean loss of transformers over all targets of the windows."""
    return transformers_process().submit(_reference_loss, exported, windows).result()


def _reference_tasks(exported: Path, tasks: Path, names: list[str]) -> dict[str, Any]:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tasks / "huggingface"),
        "TQDM_DISABLE": "1",
    }
    warnings.simplefilter("ignore")
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=1)
    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(names)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=1234)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    found = evaluate(model, loaded)
    return {"results": found["results"], "samples": found["samples"]}


def _reference_loss(exported: Path, windows: list[list[int]]) -> float:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    total = 0.0
    with torch.no_grad():
        for window in windows:
            logits = model(torch.tensor([window[:-1]])).logits[0]
            total += float(
                torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum")
            )
    return total / sum(len(window) - 1 for window in windows)
