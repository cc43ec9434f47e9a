"""Converts Megatron-LM's options that separate the documents of a sample."""

from __future__ import annotations

from hpcgen.check.lint.megatron import DOCUMENT_MASK, PACKED_DOCUMENTS, ignores_document_mask
from hpcgen.check.migration.leftover import Carried
from hpcgen.check.migration.values import Flags, carry_as, shown

KEY = "data.reset_attention_mask"


def carry_documents(flags: Flags, carried: Carried) -> None:
    """Converts the document mask, and the packed documents of core 0.19, whose positions begin at 0."""
    mask, packed = flags.get(DOCUMENT_MASK), flags.get(PACKED_DOCUMENTS)
    carried.seen |= flags.keys() & {DOCUMENT_MASK, PACKED_DOCUMENTS}
    if packed:
        carried.put(KEY, True)
        carried.put("data.reset_position_ids", True)
    elif mask and ignores_document_mask(flags):
        why = (
            "Megatron-LM's attention ignores this mask (NVIDIA/Megatron-LM, issue 2357), so the script trains across "
            "documents: true separates them, and false trains as the script does"
        )
        carried.refuse(mask.line, shown(mask), why, KEY)
    elif mask:
        carry_as(KEY, mask, carried)
    _drop_positions_of_rope(flags, carried)


def _drop_positions_of_rope(flags: Flags, carried: Carried) -> None:
    """Positions that Megatron-Core ignores (models/gpt/gpt_model.py, _preprocess)."""
    positions = flags.get("reset-position-ids")
    if positions and carried.get("model.position_embedding_type") == "rope" and not carried.get(KEY):
        carried.drop("data.reset_position_ids")
        why = "Megatron-Core computes rope from the number of tokens, and does not read the positions"
        carried.leave(positions.line, shown(positions), why)
