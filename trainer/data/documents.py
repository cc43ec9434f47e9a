"""Documents in a sample: where they begin, positions that start over, and the loss at their ends.

A sample is cut from a continuous stream of documents. A document ends with the end-of-document token, so the next one
begins after it. The semantics are those of Megatron-LM's get_ltor_masks_and_position_ids.
Shapes: b samples, s tokens of the complete sequence.
"""

from __future__ import annotations

import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from trainer.contract.config import ConfigError
from trainer.contract.files.index_header import CHECKED_DOCUMENTS


def first_tokens(tokens: torch.Tensor, eod_id: int) -> torch.Tensor:
    """True at the first token of each document and of each sample: [b, s] -> [b, s]."""
    is_first = torch.ones_like(tokens, dtype=torch.bool)
    is_first[:, 1:] = tokens[:, :-1] == eod_id
    return is_first


def positions(is_first: torch.Tensor) -> torch.Tensor:
    """Position of each token in its document [b, s]."""
    index = torch.arange(is_first.shape[1], device=is_first.device)
    return index - torch.where(is_first, index, 0).cummax(dim=1).values


def boundaries(is_first: torch.Tensor) -> torch.Tensor:
    """First token of each document, and the end of the last one, in the samples one after the other: [documents + 1].

    These are the cumulative sequence lengths of the documents as one packed sequence.
    """
    return torch.cat([is_first.flatten().nonzero()[:, 0], torch.tensor([is_first.numel()])])


def tokens_after(boundaries: torch.Tensor, samples: int, length: int) -> torch.Tensor:
    """Number of tokens that follow each token in its document [b, s], given the `boundaries` of b samples of s tokens.

    On a GPU, the host does not wait for it.
    """
    size = samples * length
    last = (boundaries[1:] - 1).repeat_interleave(boundaries.diff(), output_size=size)
    return (last - torch.arange(size, device=boundaries.device)).view(samples, length)


def document_numbers(boundaries: torch.Tensor, samples: int) -> torch.Tensor:
    """Number of the document of each token [b, s], given the `boundaries` of the documents of b samples."""
    lengths = boundaries.diff()
    return torch.arange(len(lengths)).repeat_interleave(lengths).view(samples, -1)


def require_ends(prefix: str, corpus: IndexedDataset, eod_id: int, advice: str) -> None:
    """Refuse a corpus whose documents do not end with `eod_id`, judging by its beginning. `advice` says what to do.

    Raises:
        ConfigError: no document ends with it, so no boundary would be found.
    """
    ends = [int(end) for end in corpus.document_indices[1 : CHECKED_DOCUMENTS + 1]]
    last = [int(corpus[end - 1][-1]) for end in ends if end and len(corpus[end - 1])]
    if last and eod_id not in last:
        raise ConfigError(
            f"none of its first {len(last)} documents ends with the token {eod_id} (data.eod_id); the first "
            f"ends with {last[0]}. {advice}",
            where=prefix,
        )
