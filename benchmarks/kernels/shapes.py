"""The rows of the tables in topologies/kernels, without their results: shapes of well-known models and layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.kernels import launches
from trainer.calibration.collectives import IN_A_RING, PAIRWISE
from trainer.calibration.products import PASSES
from trainer.contract.calibration import Job, Section, moved_bytes

Row = dict[str, Any]

DENSE = (
    # tokens of a microbatch, (outputs, inputs) of the products of a layer
    ((4096, 8192, 16384), ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192))),  # GPT 1.3B
    ((4096, 8192), ((3072, 2048), (2048, 1024), (4096, 2048), (2048, 4096))),  # the same, TP 2
    ((2048, 8192, 16384), ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),  # Llama 8B
    ((8192, 16384), ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168))),  # the same, TP 2
    ((8192,), ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))),  # Llama 70B
    ((4096, 8192), ((2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168))),  # the same, TP 4
    ((8192,), ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))),  # the same, TP 8
    ((4096, 8192), ((2304, 16384), (16384, 2048), (13312, 16384), (16384, 6656))),  # Llama 405B, TP 8
    ((2048, 4096), ((9216, 12288), (12288, 3072), (12288, 12288))),  # GPT 175B, TP 4
    ((2048, 4096), ((4608, 12288), (12288, 1536), (6144, 12288), (12288, 6144))),  # the same, TP 8
    (
        (4096,),
        ((1536, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384)),
    ),  # DeepSeek-V3, latent attention
    ((4096,), ((12288, 1536), (16384, 512), (7168, 8192))),  # the same, TP 2
)
GROUPED = (
    # tokens of all groups, groups, (outputs, inputs)
    (16384, (8, 4, 2), ((28672, 4096), (4096, 14336))),  # Mixtral 8x7B
    (8192, (8,), ((28672, 4096), (4096, 14336))),
    (32768, (32, 8, 4), ((4096, 7168), (7168, 2048))),  # DeepSeek-V3
    (32768, (32, 8), ((1536, 2048), (2048, 768))),  # Qwen3 30B
    (32768, (16, 4), ((3072, 4096), (4096, 1536))),  # Qwen3 235B
)
OUTPUT = (
    # tokens, vocabulary / TP, hidden size. The trainer computes these in bf16 also in runs with FP8.
    (8192, 50304, 2048),
    (4096, 50304, 2048),
    (8192, 25152, 2048),
    (2048, 12576, 12288),
    (2048, 6288, 12288),
    (8192, 128256, 4096),
    (16384, 128256, 4096),
    (16384, 64128, 4096),
    (8192, 32064, 8192),
    (8192, 16032, 16384),
    (4096, 129280, 7168),
)
ATTENTION = (
    # seq, batch, heads, kv_heads, qk_dim, v_dim
    (1024, 8, 16, 16, 64, 64),
    (2048, 4, 16, 16, 64, 64),
    (2048, 1, 16, 16, 128, 128),
    (2048, 4, 16, 16, 128, 128),
    (2048, 8, 16, 16, 128, 128),
    (2048, 4, 8, 8, 128, 128),
    (2048, 1, 24, 24, 128, 128),
    (2048, 1, 12, 12, 128, 128),
    (4096, 1, 32, 8, 128, 128),
    (4096, 2, 32, 8, 128, 128),
    (4096, 1, 32, 4, 128, 128),
    (4096, 1, 16, 2, 128, 128),
    (4096, 1, 128, 128, 192, 128),
    (4096, 1, 64, 64, 192, 128),
    (4096, 1, 16, 16, 192, 128),
    (8192, 1, 8, 1, 128, 128),
    (8192, 1, 16, 2, 128, 128),
    (8192, 1, 16, 4, 128, 128),
    (8192, 1, 32, 8, 128, 128),
    (8192, 2, 32, 8, 128, 128),
    (16384, 1, 32, 8, 128, 128),
    (32768, 1, 8, 2, 128, 128),
    (32768, 1, 32, 8, 128, 128),
)
ACTIVATIONS = ((8192, 2048), (4096, 4096), (16384, 4096), (8192, 8192), (2048, 12288), (8192, 16384))
MIXTURES = ((8192, 4096, 8, 2), (4096, 7168, 256, 8), (4096, 2048, 128, 8), (4096, 4096, 128, 8))
"""Tokens, hidden size, experts and experts of a token."""
MOVED: dict[str, tuple[tuple[int, int], ...]] = {
    "norm": ACTIVATIONS,
    "layer_norm": ((8192, 2048), (16384, 2048), (2048, 12288)),
    "swiglu": ((8192, 14336), (16384, 14336), (8192, 7168), (4096, 6656), (32768, 2048)),
    "weighted_swiglu": ((16384, 14336), (32768, 2048), (32768, 768)),
    "gelu": ((8192, 8192), (16384, 8192), (8192, 4096), (2048, 12288)),
    "rope": ((8192, 4096), (16384, 4096), (8192, 1024), (8192, 2048)),
    "residual": ACTIVATIONS,
    "cross_entropy": ((8192, 50304), (16384, 50304), (8192, 128256), (8192, 16032)),
    "cast_current": (*ACTIVATIONS, (8192, 14336), (16384, 14336), (14336, 8192)),
    "cast_delayed": (*ACTIVATIONS, (8192, 14336), (16384, 14336), (14336, 8192)),
    "adam": ((2**26, 1), (2**28, 1), (2**30, 1)),
    "copy_parameters": ((2**26, 1), (2**28, 1), (2**30, 1)),
    "gradient_norm": ((2**26, 1), (2**28, 1), (2**30, 1)),
    "scale_gradients": ((2**26, 1), (2**28, 1), (2**30, 1)),
    "zero_gradients": ((2**26, 1), (2**28, 1), (2**30, 1)),
    "accumulate": ((2**22, 1), (2**26, 1)),
    "embedding": ((8192, 2048), (8192, 4096), (8192, 8192)),
}
KIB = 2**10
TRANSFERS = tuple(KIB * size for size in (64, 256, 2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**21))
BESIDE = tuple(KIB * size for size in (2**16, 2**18, 2**20))
LOADS = ("fp8_products", "bf16_products", "attention", "memory")
TINY = (
    *(
        Job(
            section="products",
            row={"pass": each, "precision": "bf16", "m": 32, "n": 48, "k": 16, "groups": 1},
        )
        for each in PASSES
    ),
    *(
        Job(
            section="attention",
            row={"pass": each, "seq": 16, "batch": 2, "heads": 4, "kv_heads": 2, "qk_dim": 8, "v_dim": 8},
        )
        for each in ("forward", "backward")
    ),
    Job(section="memory", row={"kernel": "accumulate", "pass": "forward", "tokens": 1024, "width": 1}),
    Job(section="memory", row={"kernel": "embedding", "pass": "forward", "tokens": 32, "width": 16}),
    Job(section="memory", row={"kernel": "embedding", "pass": "backward", "tokens": 32, "width": 16}),
    *(
        Job(section="collectives", row={"collective": each, "ranks": 2, "bytes": 4096})
        for each in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "exchange")
    ),
)
"""Rows with which CPUs try the program."""


def jobs(num_gpus: int, power_s: float) -> tuple[Job, ...]:
    """All rows of a table that `num_gpus` GPUs of one NVLink domain can measure."""
    sections: dict[Section, Iterator[Row]] = {
        "collectives": _transfers(num_gpus, TRANSFERS),
        "products": _products(),
        "attention": _attention(),
        "memory": _memory(),
        "beside": _beside(num_gpus),
        "power": iter([{"load": load, "seconds": power_s} for load in LOADS[:num_gpus]]),
    }
    others = (Job(section=name, row=row) for name, rows in sections.items() for row in rows)
    return (*launches.jobs(num_gpus), *others)


def _products() -> Iterator[Row]:
    dense = [(m, n, k, 1) for tokens, layer in DENSE for m in tokens for n, k in layer]
    grouped = [(m, n, k, g) for m, groups, layer in GROUPED for g in groups for n, k in layer]
    shapes = [("bf16", *shape) for shape in (*dense, *grouped, *((m, n, k, 1) for m, n, k in OUTPUT))]
    shapes += [("fp8", *shape) for shape in (*dense, *grouped)]
    for precision, m, n, k, groups in shapes:
        for each in PASSES:
            yield {"pass": each, "precision": precision, "m": m, "n": n, "k": k, "groups": groups}


def _attention() -> Iterator[Row]:
    keys = ("seq", "batch", "heads", "kv_heads", "qk_dim", "v_dim")
    for each in ("forward", "backward"):
        for shape in ATTENTION:
            yield {"pass": each, **dict(zip(keys, shape, strict=True))}


def _memory() -> Iterator[Row]:
    for kernel, sizes in MOVED.items():
        for tokens, width in sizes:
            yield from _passes({"kernel": kernel, "tokens": tokens, "width": width})
    for kernel in ("permute", "unpermute", "router"):
        for tokens, width, experts, topk in MIXTURES:
            mixture = {"experts": experts, "topk": topk}
            yield from _passes({"kernel": kernel, "tokens": tokens, "width": width, **mixture})


def _passes(row: Row) -> Iterator[Row]:
    yield {**row, "pass": "forward"}
    if moved_bytes(row)[1]:
        yield {**row, "pass": "backward"}


def _transfers(num_gpus: int, sizes: tuple[int, ...]) -> Iterator[Row]:
    """Transfers among 2 ranks, 4, and so on."""
    for ranks in itertools.takewhile(lambda ranks: ranks <= num_gpus, (2**power for power in range(1, 8))):
        for collective in (*IN_A_RING, *PAIRWISE * (ranks == 2)):
            yield from ({"collective": collective, "ranks": ranks, "bytes": size} for size in sizes)


def _beside(num_gpus: int) -> Iterator[Row]:
    """Transfers next to products."""
    for row in _transfers(num_gpus, BESIDE):
        if row["collective"] not in ("all_reduce", "exchange"):
            yield row
