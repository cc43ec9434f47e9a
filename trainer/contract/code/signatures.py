"""The arguments with which the user's own functions are called, and whether a function takes them.

hpcgen reads a function's arguments from its source code, and the trainer from the function. Both describe them as an
`inspect.Signature`.
"""

from __future__ import annotations

import inspect

from trainer.contract.code import imports

FUNCTIONS: dict[str, type] = {
    "model.layer_spec": imports.LayerSpec,
    "model.model_provider": imports.ModelProvider,
    "optimizer.lr_schedule": imports.Rate,
    "data.dataset": imports.SampleProvider,
    "training.loss": imports.TokenLoss,
    "training.metrics": imports.Metric,
}
"""Protocol of the function that each key names. Arguments that it has after * are passed by name, all others by
position."""
CLASSES: dict[str, tuple[type, type | None]] = {
    "model.model_provider": (imports.ModelProvider, None),
    "data.dataset": (imports.SampleProvider, None),
    "training.loss": (imports.LossClass, imports.TokenLoss),
}
"""Protocols of the keys that can also name a class: of the class, and of its instances if they are called too."""


def function_problem(key: str, signature: inspect.Signature) -> str:
    """Why the function that `key` names cannot be called, and what its arguments must be. Empty if it can be called."""
    protocol = FUNCTIONS.get(_without_index(key))
    return "" if protocol is None else _problem(protocol, signature, "takes")


def class_problem(
    key: str, made: inspect.Signature | None, called: inspect.Signature | None, *, is_called: bool
) -> str:
    """Why the class that `key` names cannot be used. Empty if it can be, or if nothing is known about such a class.

    `made` has the arguments of the class, and `called` those of its instances, without self; None if not known.
    `is_called` is false if it is certain that instances cannot be called.
    """
    of_class, of_instance = CLASSES.get(_without_index(key), (None, None))
    found = ""
    if of_instance is not None and not is_called:
        return "is a class without __call__"
    if of_class is not None and made is not None:
        found = _problem(of_class, made, "is a class whose __init__ takes")
    if not found and of_instance is not None and called is not None:
        found = _problem(of_instance, called, "is a class whose instances take")
    return found


def example(key: str, name: str) -> str:
    """An example of a function called `name`, as a hint."""
    return f"write def {name}({', '.join(_expected(FUNCTIONS[_without_index(key)]))})"


def _without_index(key: str) -> str:
    return key.partition("[")[0]


def _expected(protocol: type) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(protocol.__call__).parameters.items())[1:])  # without self


def _problem(protocol: type, signature: inspect.Signature, takes: str) -> str:
    expected = _expected(protocol)
    by_name = [name for name, each in expected.items() if each.kind is each.KEYWORD_ONLY]
    by_position = [name for name in expected if name not in by_name]
    try:
        signature.bind(*by_position, **dict.fromkeys(by_name))
    except TypeError:
        how = "by name" if by_name else "by position"
        return f"{takes} {_shown(signature)}, but is called with ({', '.join(expected)}) {how}"
    return ""


def _shown(signature: inspect.Signature) -> str:
    """The arguments without their types. A default value, which may be long, is three dots."""
    parts = [
        each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else ...)
        for each in signature.parameters.values()
    ]
    return str(inspect.Signature(parts)).replace("Ellipsis", "...")
