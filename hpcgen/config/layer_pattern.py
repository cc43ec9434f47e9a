"""The layers with experts as Megatron-LM's --moe-layer-freq gives them."""

from __future__ import annotations

import ast
import re

MOST_LAYERS = 10_000
"""Longest list of --moe-layer-freq that is computed."""


def layer_pattern(text: str, num_layers: int | None) -> list[int] | None:
    """The zeros and ones of --moe-layer-freq; None if they are unknown or invalid.

    N stands for experts in every N-th layer, beginning with the first, and the text of a Python list for itself
    (arguments.py, moe_freq_type; gpt_layer_specs.py, get_gpt_decoder_layer_specs).
    """
    if num_layers is None or num_layers > MOST_LAYERS:
        return None
    if re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
        return [int(layer % int(text) == 0) for layer in range(num_layers)]
    try:
        pattern = _list(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return pattern if {*pattern} <= {0, 1} else None


def _list(node: ast.expr) -> list[int]:
    """The value of a Python expression of lists of integers, with + and *.

    Raises:
        ValueError: it is anything else, or too long.
    """
    match node:
        case ast.List(elts=elements):
            return [_integer(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = _list(left) + _list(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            items, times = (left, right) if isinstance(left, ast.List | ast.BinOp) else (right, left)
            found = _list(items) * min(_integer(times), MOST_LAYERS)
        case _:
            raise ValueError("not a list")
    if len(found) > MOST_LAYERS:
        raise ValueError("too long")
    return found


def _integer(node: ast.expr) -> int:
    if not (isinstance(node, ast.Constant) and type(node.value) is int):
        raise ValueError("not an integer")
    return node.value
