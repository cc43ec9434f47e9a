"""Measures how fast `hpcgen data prepare` makes .bin/.idx pairs, compared with its parts and with Megatron-LM's tools.

    python -m benchmarks.data [FILES...] [--megatron-lm DIRECTORY] [--json]

FILES are .jsonl, .jsonl.zst or .jsonl.gz, ideally at least one per core. Without FILES, text from this machine
(documentation, headers, sources) is packed into .jsonl.zst. Everything is measured in one run, since only ratios are
meaningful on a machine with other load: the CPU time of each part and the rate that they allow, the real command on
1, 2, 4 ... cores with its memory, the same text joined into two files of unequal size and into one, and a portable
program that does the work of Megatron-LM's preprocess_data.py. With a checkout of Megatron-LM, its two scripts are
measured too.

Rates are in MB (10^6 bytes) of uncompressed JSON Lines per second, without the start-up time. Each program gets enough
text to run four times as long as its start-up, if there is enough text.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prepare import LINE, TOKENIZER, join, run_prepare, without_start
from benchmarks.text import collect, default_roots, write_portion
from hpcgen.data.compression import content
from hpcgen.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from hpcgen.data.jsonl import read_blocks
from hpcgen.data.tokenizer import load_tokenizer, read_definition
from hpcgen.data.workers import cores

STARTS = 4
"""Minimum run time of a program, as a multiple of its start-up time."""


def main() -> None:
    arguments = parser().parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        result = measure(arguments, Path(scratch))
    if arguments.json:
        print(json.dumps(result))
    else:
        print_result(result)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("files", nargs="*", type=Path)
    options.add_argument(
        "--text", action="append", type=Path, help="directory of texts, instead of the default ones"
    )
    options.add_argument("--max-mb", type=float, default=1200, help="most text to collect without FILES")
    options.add_argument(
        "--baseline-mb", type=float, default=12, help="least JSON Lines for the slow programs"
    )
    options.add_argument("--megatron-lm", type=Path, help="a checkout of NVIDIA/Megatron-LM")
    options.add_argument("--directory", type=Path, help="where to write; the disk of it is measured too")
    options.add_argument("--json", action="store_true")
    return options


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    say("collecting text")
    files = [path.resolve() for path in arguments.files]
    if not files:
        roots = arguments.text or default_roots()
        files = collect(roots, scratch / "source", int(arguments.max_mb * 1e6), 6 * cores())
    counts = sorted({1, cores(), *itertools.takewhile(lambda n: n < cores(), (2**i for i in range(12)))})
    say("the parts")
    parts = parts_cost(files, scratch)
    say("hpcgen data prepare")
    prepare = {n: run_prepare(files, scratch / f"corpus{n}", n) for n in counts}
    say("fewer outputs than cores at the end")
    joined = {
        "two unequal outputs": run_prepare(
            join(files, scratch / "two", [0.6, 0.4]), scratch / "corpus-two", cores()
        ),
        "one output": run_prepare(join(files, scratch / "one", [1]), scratch / "corpus-one", cores()),
    }
    say("the portable baseline")
    most_bytes = int(arguments.baseline_mb * 1e6)
    others = {"preprocess_data.py's work, portable": baseline(files, scratch, most_bytes)}
    if arguments.megatron_lm:
        say("Megatron-LM's scripts")
        others |= megatron_lm(arguments.megatron_lm.resolve(), files, scratch, most_bytes)
    say("the parts again")
    again = parts_cost(files, scratch)
    parts = {name: (parts[name] + again[name]) / 2 for name in parts}
    cap = 1000 * cores() / sum(parts.values())
    ours = prepare[cores()]
    return {
        "files": len(files),
        "text_mb": ours.text_mb,
        "cores": cores(),
        "cpu_s_per_gb": parts,
        "cap_mb_s": cap,
        "prepare": {n: dataclasses.asdict(run) for n, run in prepare.items()},
        "joined": {name: dataclasses.asdict(run) for name, run in joined.items()},
        "share_of_cap": ours.rate / cap,
        "joined_share_of_cap": {name: run.rate / cap for name, run in joined.items()},
        "share_of_cpu": sum(parts.values()) / ours.cpu_s_per_gb,
        "others_mb_s": others,
        "times": {name: ours.rate / rate for name, rate in others.items()},
    }


def say(what: str) -> None:
    print(what, file=sys.stderr)


# Rates


def rate_of(run: Callable[[Path], float], files: list[Path], scratch: Path, most_bytes: int) -> float:
    """MB/s of a program that takes `run(path)` seconds. Doubles the text until the start-up is at most a quarter."""
    tiny = scratch / "tiny.jsonl"
    tiny.write_bytes(LINE)
    run(tiny)  # fills byte code and page caches
    start = run(tiny)
    while True:
        portion = write_portion(files, scratch / "portion.jsonl", most_bytes)
        size, seconds = portion.stat().st_size, run(portion)
        if seconds >= STARTS * start or size < most_bytes:  # no more text
            return size / 1e6 / without_start(seconds, start)
        most_bytes = int(most_bytes * max(2, STARTS * start / seconds))


# The parts


def parts_cost(files: list[Path], scratch: Path) -> dict[str, float]:
    """CPU seconds of each part per GB of JSON Lines, with all cores in use as in the real command."""
    with multiprocessing.get_context("spawn").Pool(cores()) as pool:
        shares = [(files[n :: cores()], scratch / f"parts{n}.bin") for n in range(cores())]
        costs = pool.starmap(cost_of_parts, [share for share in shares if share[0]])
    total: Counter[str] = sum(costs, Counter())
    size = total.pop("bytes")
    return {name: seconds / size * 1e9 for name, seconds in total.items()}


def cost_of_parts(files: list[Path], target: Path) -> Counter[str]:
    """CPU seconds of the library calls only, and the size of the JSON Lines in bytes."""
    import msgspec

    tokenizer = load_tokenizer(TOKENIZER)
    record: Any = msgspec.defstruct("Record", [("text", str)], gc=False)
    decode_lines = msgspec.json.Decoder(record).decode_lines
    costs: Counter[str] = Counter()
    write_hash = hashlib.sha256()
    dtype = token_dtype(tokenizer.vocab_size)

    def timed(part: str, function: Callable[..., Any], *values: Any) -> Any:
        begin = time.process_time()
        result = function(*values)
        costs[part] += time.process_time() - begin
        return result

    def parsed(data: bytes) -> list[str]:
        return [one.text for one in decode_lines(data)]

    def uncompressed(path: Path, file: Any) -> Iterator[bytes]:
        update = hashlib.sha256().update
        pieces = content(path, _Hashed(file, lambda data: timed("hash while decompressing", update, data)))
        while piece := timed("decompress", next, pieces, b""):
            yield piece

    with target.open("wb", buffering=0) as output:
        for path in files:
            with path.open("rb", buffering=0) as file:
                for block in read_blocks(path, uncompressed(path, file)):
                    found = timed("parse", parsed, block.data)
                    ids, _ = timed("tokenize", tokenizer.encode, found)
                    ids = ids.astype(dtype)
                    timed("hash", write_hash.update, ids.data)
                    timed("write", output.write, ids.data)
                    costs["bytes"] += len(block.data)
            timed("write", os.fsync, output.fileno())
    target.unlink()
    costs["decompress"] -= costs["hash while decompressing"]  # decompression includes reading
    costs["hash"] += costs.pop("hash while decompressing")
    return costs


class _Hashed:
    """A file that is hashed while it is read."""

    def __init__(self, file: Any, update: Callable[[bytes], None]) -> None:
        self._file = file
        self._update = update

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        self._update(data)
        return data


# Others


def baseline(files: list[Path], scratch: Path, most_bytes: int) -> float:
    """MB/s of the work of preprocess_data.py: a pool, json.loads and tokenizers for each document, one writer."""

    def run(path: Path) -> float:
        return seconds_of(lambda: encode_documents(path, scratch / f"baseline-{path.stem}"))

    return rate_of(run, files, scratch, most_bytes)


def seconds_of(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def encode_documents(portion: Path, prefix: Path) -> None:
    eod = load_tokenizer(TOKENIZER, "tokenizers").eod_id
    with (
        multiprocessing.get_context("spawn").Pool(cores(), initializer=load_reference) as pool,
        portion.open(encoding="utf-8") as lines,
    ):
        write_documents(pool.imap(encode_document, lines, 32), eod, prefix)


def write_documents(documents: Iterator[list[int]], eod: int, prefix: Path) -> None:
    """Write with Megatron-Core's builder if it is installed, else with hpcgen's."""
    dtype = token_dtype(load_tokenizer(TOKENIZER, "tokenizers").vocab_size)
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    except ImportError:
        with (
            Path(f"{prefix}.bin").open("wb") as bin_file,
            Path(f"{prefix}.idx").open("wb") as idx_file,
            IndexedDatasetWriter(bin_file, dtype) as writer,
        ):
            for ids in documents:
                writer.add_documents(np.array([*ids, eod], dtype), np.array([len(ids) + 1]))
            writer.write_index(idx_file)
        return
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
    for ids in documents:
        builder.add_document([*ids, eod], [len(ids) + 1])
    builder.finalize(f"{prefix}.idx")


_reference: Any = None


def load_reference() -> None:
    global _reference
    _reference = load_tokenizer(TOKENIZER, "tokenizers")


def encode_document(line: str) -> list[int]:
    ids: list[int] = _reference.encode([json.loads(line)["text"]])[0].tolist()
    return ids


def megatron_lm(checkout: Path, files: list[Path], scratch: Path, most_bytes: int) -> dict[str, float]:
    """MB/s of the two scripts. Their requirements, such as transformers, must be installed."""
    folder = scratch / "gpt2"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(read_definition(TOKENIZER)))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    end = "<|endoftext|>"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    common = [*tokenizer, "--append-eod"]
    scripts = {
        "preprocess_data.py": (most_bytes, ["--workers", str(cores())]),
        "preprocess_data_fast.py": (40 * most_bytes, ["--use-gigatoken"]),
    }
    rates = {}
    for name, (least_bytes, more) in scripts.items():

        def run(path: Path, name: str = name, more: list[str] = more) -> float:
            arguments = ["--input", str(path), "--output-prefix", str(scratch / f"{name}-{path.stem}")]
            command = [sys.executable, f"tools/{name}", *arguments, *common, *more]
            paths = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
            environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
            begin = time.perf_counter()
            done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
            return time.perf_counter() - begin

        rates[name] = rate_of(run, files, scratch, least_bytes)
    return rates


def print_result(result: dict[str, Any]) -> None:
    parts = result["cpu_s_per_gb"]
    print(f"{result['text_mb']:,.0f} MB of JSON Lines in {result['files']} files, {result['cores']} cores\n")
    print("| part | CPU seconds per GB |\n| --- | --- |")
    for name, seconds in parts.items():
        print(f"| {name} | {seconds:.2f} |")
    print(f"| all | {sum(parts.values()):.2f} |")
    print(f"\nThese parts allow {result['cap_mb_s']:.0f} MB/s on {result['cores']} cores.\n")
    print("| hpcgen data prepare | MB/s | CPU seconds per GB | start, s | peak MiB of a process |")
    print("| --- | --- | --- | --- | --- |")
    for count, run in result["prepare"].items():
        print(
            f"| {count} cores | {run['rate']:.1f} | {run['cpu_s_per_gb']:.2f} "
            f"| {run['start_seconds']:.1f} | {run['peak_mib']:.0f} |"
        )
    for name, run in result["joined"].items():
        print(
            f"| {name} | {run['rate']:.1f} | {run['cpu_s_per_gb']:.2f} "
            f"| {run['start_seconds']:.1f} | {run['peak_mib']:.0f} |"
        )
    shares = {f"{result['files']} outputs": result["share_of_cap"], **result["joined_share_of_cap"]}
    print(f"\nShare of the rate that the parts allow on idle cores, on {result['cores']} cores:")
    print(", ".join(f"{name} {share:.0%}" for name, share in shares.items()) + ".")
    print(f"{result['share_of_cpu']:.0%} of the CPU time went into these parts.\n")
    print("| other | MB/s | hpcgen is faster by |\n| --- | --- | --- |")
    for name, rate in result["others_mb_s"].items():
        print(f"| {name} | {rate:.1f} | {result['times'][name]:.1f} |")


if __name__ == "__main__":
    main()
