"""lm-eval's interface to a model of the trainer. Computes what lm-eval's own model `hf` computes on the exported model.

Log-probabilities are computed in fp32 over the vocabulary without its padding. `hf` normalizes them in the data type of
the model. A text without context begins as documents did in the model's training (`HarnessModel._without_context`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from trainer.contract.errors import TrainerError
from trainer.contract.evaluation import EvaluationSettings, Metric, TaskResult
from trainer.evaluate.replicas import Pair, Replicas
from trainer.evaluate.tasks import Tasks
from trainer.inference.generation import Options, require_beginning

MAX_NEW_TOKENS = 256
"""Maximum number of new tokens where a task sets none, as in lm-eval's `hf`."""

GREEDY = 0.0
"""Temperature at which the most likely token is always chosen."""

GENERATION_KWARGS = {
    "do_sample",
    "max_gen_toks",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "until",
}
"""Names in generation_kwargs of a task, after lm-eval has replaced other names of max_gen_toks."""

Encoded = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as text, and their tokens."""


class HarnessModel(TemplateLM):
    """The replicas as a model of lm-eval. To lm-eval, they are a single process."""

    def __init__(self, replicas: Replicas, options: EvaluationSettings) -> None:
        super().__init__()
        self._replicas = replicas
        self._batch_size = options.batch_size
        self._max_length = replicas.model.max_length
        self._training = replicas.model.config.data
        self._token_of_document_end = replicas.tokenizer.eod_id
        self._text_of_document_end = replicas.tokenizer.spell([self.eot_token_id]) or None

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token. It also precedes a text without context, as each document in training."""
        assert self._token_of_document_end is not None  # see `checks`
        return self._token_of_document_end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token IDs of a text. The trainer's tokenizers never add special tokens."""
        return self._replicas.tokenizer.encode(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would produce it."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Encoded], **kwargs: Any) -> list[tuple[float, bool]]:
        parts: list[list[Pair]] = []
        for (given, text), context, continuation in requests:
            if not 0 < len(continuation) <= self._max_length:
                raise TrainerError(
                    f"the answer {text[:60]!r} of a task has {len(continuation)} tokens, but the model computes 1 to "
                    f"{self._max_length} (model.max_position_embeddings). Remove the task from evaluation.tasks"
                )
            if given.strip():
                parts.append([(context, continuation)])
                continue
            if self._training.eod_mask_loss:
                raise TrainerError(
                    f"a task compares {text[:60]!r} with other texts without a context, but the model was trained with "
                    "data.eod_mask_loss and has not learned how likely a first token is. Remove the task from "
                    "evaluation.tasks"
                )
            parts.append(self._without_context(continuation))
        return self._score(parts)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text. Long texts are cut into windows, as lm-eval does."""
        parts = [self._without_context(self.tok_encode(request.args[0])) for request in requests]
        return [log_likelihood for log_likelihood, _ in self._score(parts)]

    def _without_context(self, tokens: list[int]) -> list[Pair]:
        """Contexts and continuations whose log-likelihoods add up to the log-likelihood of a text.

        The text follows the end of a document. If the model was trained on separate documents, only its first token
        sees this end. With eod_mask_loss, the first token is not predicted.
        """
        prefix, pairs = self.prefix_token_id, []
        if tokens and not self._replicas.model.follows_documents:
            if not self._training.eod_mask_loss:
                pairs.append(([prefix], tokens[:1]))
            prefix, tokens = tokens[0], tokens[1:]
        windows = get_rolling_token_windows(
            token_list=tokens, prefix_token=prefix, max_seq_len=self._max_length, context_len=1
        )
        return [*pairs, *map(make_disjoint_window, windows)]

    def _score(self, parts: Sequence[Sequence[Pair]]) -> list[tuple[float, bool]]:
        """Sum of the log-likelihoods of the parts of each text, and whether greedy decoding would produce it."""
        found = iter(self._replicas.score([pair for each in parts for pair in each]))
        by_text = (list(itertools.islice(found, len(each))) for each in parts)
        return [
            (math.fsum(value for value, _ in each), all(greedy for _, greedy in each)) for each in by_text
        ]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """New text for each context, up to the first stop string."""
        prompts = []
        for request in requests:
            context, arguments = request.args
            given = normalize_gen_kwargs(arguments, MAX_NEW_TOKENS)
            options = self._generation_options(given, request.task_name)
            room = self._max_length - given["max_gen_toks"]
            if room < 1:
                raise TrainerError(
                    f"the task {request.task_name} generates up to {given['max_gen_toks']} tokens, but the model has "
                    f"{self._max_length} positions for the question and the answer (model.max_position_embeddings). "
                    "Lower max_gen_toks in generation_kwargs of the task"
                )
            tokens = self.tok_encode(context)[-room:]
            if not tokens:
                require_beginning(self._replicas.model, f"a question of the task {request.task_name}")
                tokens = [self.prefix_token_id]
            prompts.append((tokens, options))
        return self._replicas.generate(prompts)

    def _generation_options(self, given: Mapping[str, Any], task: str | None) -> Options:
        """The options of a task, with the defaults of `hf`."""
        unknown = sorted(
            given.keys() - GENERATION_KWARGS - ({"num_beams"} if given.get("num_beams") == 1 else set())
        )
        if unknown:
            raise TrainerError(
                f"the task {task} sets {unknown[0]} = {given[unknown[0]]!r} in generation_kwargs, which the trainer "
                f"does not have. Use {', '.join(sorted(GENERATION_KWARGS))}, or remove the task from evaluation.tasks"
            )
        temperature = float(given.get("temperature", GREEDY)) if given["do_sample"] else GREEDY
        draws = temperature > GREEDY
        until = handle_stop_sequences(given["until"], self._text_of_document_end)
        return Options(
            # Every text contains the empty string, so this stop string ends a text after its first token.
            max_new_tokens=1 if "" in until else given["max_gen_toks"],
            temperature=temperature,
            top_k=(given.get("top_k") or None) if draws else None,
            top_p=given.get("top_p") if draws else None,
            repetition_penalty=given.get("repetition_penalty", 1.0),
            stop=tuple(string for string in until if string),
            batch_size=self._batch_size,
        )


def run_tasks(
    replicas: Replicas, tasks: Tasks, settings: EvaluationSettings
) -> tuple[list[TaskResult], list[dict[str, Any]]]:
    """Results of all tasks, and the answers to each question. Only rank 0 calls this; the other ranks serve."""
    tasks.reset(settings.num_fewshot)
    # Not simple_evaluate, which also describes the machine with the help of other programs.
    found = evaluate(
        lm=HarnessModel(replicas, settings),
        task_dict={"tasks": tasks.tasks, "groups": tasks.groups},
        limit=settings.limit,
    )
    replicas.release()
    assert found is not None
    results = [_task_result(name, found) for name in found["results"]]
    samples = [_sample(name, sample) for name, each in found["samples"].items() for sample in each]
    return [result for result in results if result.metrics], samples


def _task_result(name: str, found: dict[str, Any]) -> TaskResult:
    values = found["results"][name]
    version = str(found["versions"].get(name))
    num_fewshot = found["n-shot"].get(name)
    metrics = []
    for key, value in values.items():
        metric, separator, filtered = key.partition(",")
        if not separator or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        metrics.append(
            Metric(
                name=metric,
                filter=filtered,
                value=_finite(value),
                stderr=_finite(values.get(f"{metric}_stderr,{filtered}")),
                higher_is_better=found["higher_is_better"].get(name, {}).get(metric),
            )
        )
    return TaskResult(
        name=name,
        is_group=name not in found["n-samples"],
        version=None if version in ("None", "N/A", "Yaml") else version,  # lm-eval's words for none
        num_fewshot=num_fewshot if isinstance(num_fewshot, int) else None,
        documents=values["sample_len"],
        metrics=tuple(metrics),
    )


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _sample(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """The answers to a question, without its text."""
    names = ("doc_id", "filter", "target", "resps", "filtered_resps", *sample["metrics"])
    return {"task": task, **{name: sample[name] for name in names}}
