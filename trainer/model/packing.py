"""Packs the documents of a microbatch for attention within documents, without a mask of all queries and keys.

The documents become one sequence (the format thd), and Transformer Engine's kernels are given their lengths.
Only the attention packs them. All other parts of Megatron-Core keep samples of one length, so pipelines, sequence
parallelism and rotary embeddings work as without documents.

With context parallelism, each rank gathers the keys and values of the others. The pieces of documents in its two chunks
are its packed queries. The keys of a piece begin with its document, which may be in an earlier chunk. Transformer
Engine's own context parallelism would need each document padded to a multiple of 2 x CP tokens.

Shapes: s sequence on this context-parallel rank, S complete sequence, b microbatch, t packed tokens, n heads and
g query groups on this tensor-parallel rank, d width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents that are the packed queries of a rank, and their keys."""

    cu_seqlens_q: torch.Tensor
    """Cumulative lengths of the pieces (int32)."""
    cu_seqlens_kv: torch.Tensor
    """Cumulative numbers of their keys (int32)."""
    max_seqlen_q: int
    max_seqlen_kv: int
    keys: tuple[tuple[int, int, int], ...]
    """Keys of each chunk: the sample, the first key and the end. Empty if the keys are all keys of all samples."""

    def arguments(self) -> dict[str, object]:
        """Arguments of the forward pass of Transformer Engine's attention."""
        return {
            "qkv_format": "thd",
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_kv": self.cu_seqlens_kv,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_kv": self.max_seqlen_kv,
            # The last query of a piece sees all of its keys.
            "attn_mask_type": "padding_causal_bottom_right" if self.keys else "padding_causal",
        }


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pieces], torch.Tensor]
"""Attention of packed queries [t, n, d] to packed keys and values [t, g, d]: [t, n*d]."""


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor | None,
    cp_group: torch.distributed.ProcessGroup,
    attend: Attend,
) -> torch.Tensor:
    """Pack the documents, attend, and unpack the result: query [s, b, n, d] -> [s, b, n*d].

    Without `boundaries`, as in a validation set of texts, each sample is one document.
    """
    length, samples = query.shape[:2]
    if boundaries is None:
        boundaries = torch.arange(samples + 1) * length * cp_group.size()
    pieces = find_pieces(tuple(boundaries.tolist()), samples, cp_group.rank(), cp_group.size(), query.device)
    keys, values = (_keys(x, pieces, cp_group) for x in (key, value))
    context = attend(query.transpose(0, 1).flatten(0, 1), keys, values, pieces)
    return context.view(samples, length, -1).transpose(0, 1).contiguous()


def _keys(x: torch.Tensor, pieces: Pieces, cp_group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Packed keys or values [t, g, d] of the pieces, from this rank's keys or values [s, b, g, d]."""
    if not pieces.keys:
        return x.transpose(0, 1).flatten(0, 1)
    size = cp_group.size()
    gathered = gather_from_sequence_parallel_region(x.contiguous(), group=cp_group)
    early, late = gathered.unflatten(0, (size, 2, -1)).unbind(1)  # [CP, S / 2 CP, b, g, d]
    in_order = torch.cat([early, late.flip(0)]).flatten(0, 1)  # [S, b, g, d]
    return torch.cat([in_order[first:end, sample] for sample, first, end in pieces.keys])


@functools.lru_cache(maxsize=64)
def find_pieces(
    boundaries: tuple[int, ...], samples: int, rank: int, size: int, device: torch.device
) -> Pieces:
    """The pieces of documents on the context-parallel rank `rank` of `size`. All layers share them."""
    sequence = boundaries[-1] // samples
    if size == 1:
        ends = torch.tensor(boundaries, dtype=torch.int32)
        longest = _rounded(ends, sequence)
        cu_seqlens = ends.to(device, non_blocking=True)
        return Pieces(cu_seqlens, cu_seqlens, longest, longest, ())
    width = sequence // (2 * size)
    queries, keys, ranges = [0], [0], []
    for sample in range(samples):
        for chunk in (rank, 2 * size - 1 - rank):
            begin = sample * sequence + chunk * width
            end = begin + width
            first = max(boundary for boundary in boundaries if boundary <= begin)
            starts = [first, *(boundary for boundary in boundaries if begin < boundary < end)]
            for start, stop in zip(starts, [*starts[1:], end], strict=True):
                queries.append(queries[-1] + stop - max(start, begin))
                keys.append(keys[-1] + stop - start)
            ranges.append((sample, first - sample * sequence, end - sample * sequence))
    cumulative = torch.tensor([queries, keys], dtype=torch.int32)
    longest_q, longest_kv = (_rounded(ends, sequence) for ends in cumulative)
    cu_seqlens_q, cu_seqlens_kv = cumulative.to(device, non_blocking=True)
    return Pieces(cu_seqlens_q, cu_seqlens_kv, longest_q, longest_kv, tuple(ranges))


def _rounded(ends: torch.Tensor, sequence: int) -> int:
    """Length of the longest piece, rounded up to a power of two or to the complete sequence.

    The kernels need an upper bound, and cuDNN builds them again for every other value.
    """
    return min(1 << (int(ends.diff().max()) - 1).bit_length(), sequence)
