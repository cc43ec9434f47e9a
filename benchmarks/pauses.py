"""Measures what validation, answers and early stopping add to a training on one GPU.

    python -m benchmarks.pauses [--rounds N] [--json] [--cpu]

Trains GPT 1.3B. After every eight steps it validates two batches, answers eight prompts with 64 tokens each, and
decides whether to stop early. The numbers are from metrics.jsonl and the log of answers. The first round is not
counted. With --cpu, a tiny shape shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import runs, train
from benchmarks.documents import write_corpus
from benchmarks.train_cases import GPT_1_3B, Case

INTERVAL = 8
BATCHES = 2
PROMPTS = 8
NEW_TOKENS = 64
NUM_TOKENS = 3_000_000
TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128}


def main() -> int:
    """Train, and print the medians of the rounds."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=4, help="number of counted rounds")
    options.add_argument("--json", action="store_true", help="print a JSON object")
    options.add_argument("--cpu", action="store_true", help="train a tiny shape on a CPU")
    options.set_defaults(one_rank=False, environment={})
    arguments = options.parse_args()
    runs.end_like_ctrl_c()
    if not arguments.cpu:
        runs.count_gpus(options)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        result = measured(Path(scratch).resolve(), arguments)
    print(json.dumps(result) if arguments.json else line(result))
    return 0


def measured(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step, of the first step after a pause, of an evaluation and of all answers."""
    case = Case("pauses", GPT_1_3B, micro_batch_size=4, global_batch_size=16)
    if arguments.cpu:
        case = dataclasses.replace(case, model=GPT_1_3B | TINY)
    config = train.configuration(case, write_corpus(scratch / "corpus", NUM_TOKENS), scratch / "run")
    if arguments.cpu:
        train.use_cpu(config)
    prompts = scratch / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": "ab" * 20 + str(each)}) + "\n" for each in range(PROMPTS))
    )
    config["data"]["split"] = "9,1,0"
    config["training"] |= {
        "eval_interval": INTERVAL,
        "eval_iters": BATCHES,
        "early_stopping": {"patience": 1000},
    }
    config["answers"] = {"prompts": str(prompts), "tokenizer": "bytes", "max_new_tokens": NEW_TOKENS}
    end = (arguments.rounds + 2) * INTERVAL
    lines = train.run_until(
        config,
        lambda lines: bool(steps := runs.steps(lines)) and steps[-1]["iteration"] >= end,
        case,
        arguments,
    )
    log = (scratch / "run/log").read_text()
    answers = [float(each) for each in re.findall(r"iteration [1-9]\d*: \d+ answers in ([\d.]+) s", log)]
    timed = [each for each in runs.steps(lines) if INTERVAL < each["iteration"] <= end]
    after = [each for each in timed if each["iteration"] % INTERVAL == 1]
    evaluations = [each["evaluation_s"] for each in lines if each["event"] == "evaluation"]
    return {
        "step_s": statistics.median(each["step_time_s"] for each in timed if each not in after),
        "step_after_s": statistics.median(each["step_time_s"] for each in after[1:]),
        "evaluation_s": evaluations,
        "answers_s": answers,
        "peak_memory_gib": max(each.get("peak_memory_gib") or 0.0 for each in timed),
    }


def line(result: dict[str, Any]) -> str:
    """The numbers in words."""
    evaluation, answers = (statistics.median(result[name][1:]) for name in ("evaluation_s", "answers_s"))
    return (
        f"{result['step_s'] * 1e3:.1f} ms per step, {result['step_after_s'] * 1e3:.1f} ms after a pause; {BATCHES} "
        f"batches of validation take {evaluation:.2f} s, {PROMPTS} answers of {NEW_TOKENS} tokens {answers:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
