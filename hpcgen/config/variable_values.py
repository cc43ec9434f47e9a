"""The forms of the values of known environment variables, and what is wrong with a value.

`known_variables.txt` names the form of each variable. Programs rarely report a wrong value: they ignore it, or read
only its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from hpcgen.text import misspelled, one_of

Mistake = tuple[str, str]
"""Why a value is wrong, in words that follow "VARIABLE is VALUE, which", and what to do."""

_FLAGS = frozenset(("0", "1", "true", "false", "yes", "no", "on", "off", "y", "n", "t", "f"))
_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_MOST_WORDS = 8
_RDMA_DEVICE = re.compile(r"(mlx[45]_|bnxt_re|cxi|rdmap|roce[po]|irdma|efa_|hfi1_|qedr)\w*")
"""Names of RDMA devices that are no names of network interfaces."""
_INTERFACE = re.compile(r"(ib|eth|hsn|bond|docker)\d+\w*|en[opsx]\w+|lo")
"""Names of network interfaces. RDMA devices may have such names too, if a site renames them."""
_LONGEST_INTERFACE = 15
"""Longest name of a network interface (IFNAMSIZ of Linux)."""


def value_mistake(form: str, value: str) -> Mistake | None:
    """The mistake in the value of a variable of this form; None if it may be correct or is empty."""
    kind, *arguments = form.split()
    return _FORMS[kind](value, arguments) if value else None


def is_interface(name: str) -> bool:
    """True for the usual name of a network interface, such as ib0 or eth0."""
    return bool(_INTERFACE.fullmatch(name))


def names_rdma_device(value: str) -> bool:
    """True if a value of NCCL_IB_HCA or UCX_NET_DEVICES names an RDMA device."""
    return any(_RDMA_DEVICE.fullmatch(name) for name in device_names(value))


def device_names(value: str) -> tuple[str, ...]:
    """The devices in a value of NCCL_IB_HCA or UCX_NET_DEVICES, without a prefix and ports."""
    return tuple(item.strip().partition(":")[0] for item in value.lstrip("^=").split(",") if item.strip())


def unknown_devices(form: str, value: str, devices: Sequence[str]) -> tuple[str, ...]:
    """The RDMA devices in a value that a node with `devices` does not have; empty for other forms and exclusions."""
    if form == "devices" and not value.startswith("^"):
        is_known = devices.__contains__ if value.startswith("=") else _begins_one_of(devices)
        return tuple(name for name in device_names(value) if not is_known(name))
    if form == "ports":
        return tuple(
            name for name in device_names(value) if _RDMA_DEVICE.fullmatch(name) and name not in devices
        )
    return ()


def idle_devices(form: str, value: str, devices: Sequence[str]) -> tuple[str, ...]:
    """The devices of a node that NCCL does not use with a value of NCCL_IB_HCA; empty for other forms."""
    if form != "devices":
        return ()
    excludes, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = device_names(value)
    is_named = names.__contains__ if exact else lambda device: device.startswith(names)
    return tuple(device for device in devices if bool(is_named(device)) == excludes)


def _begins_one_of(devices: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: any(device.startswith(name) for device in devices)


def _text(value: str, arguments: Sequence[str]) -> None:
    return None


def _integer(value: str, arguments: Sequence[str]) -> Mistake | None:
    low, high = map(int, arguments) if arguments else (None, None)
    numbers = f"a number from {low} to {high}" if arguments else "a plain number"
    if not re.fullmatch(r"[+-]?(\d+|0[xX][0-9a-fA-F]+)", value, re.ASCII):
        amount = re.fullmatch(r"(\d+)\s*([kKmMgG])(i?[bB])?", value, re.ASCII)
        if amount:
            number = int(amount[1]) * 1024 ** ("kmg".index(amount[2].lower()) + 1)
            return f"is no plain number. Of {value}, only {amount[1]} would be read", f"write {number}"
        return "is no number, so it is ignored or read as 0", f"use {numbers}"
    number = int(value, 16 if "x" in value.lower() else 10)
    if low is not None and high is not None and not low <= number <= high:
        return f"is not {numbers}", "use a number in this range"
    return None


def _integer_or_auto(value: str, arguments: Sequence[str]) -> Mistake | None:
    return None if value == "auto" else _integer(value, arguments)


def _flag(value: str, arguments: Sequence[str]) -> Mistake | None:
    return None if value.lower() in _FLAGS else ("is neither 0 nor 1", "use 0 or 1")


def _word(value: str, arguments: Sequence[str]) -> Mistake | None:
    if value.lower() in map(str.lower, arguments):
        return None
    return _unknown_word(value, arguments)


def _words(value: str, arguments: Sequence[str]) -> Mistake | None:
    """Checks words unless a value has a longer syntax, such as allreduce:LL."""
    if ":" in value:
        return None
    known = set(map(str.lower, arguments))
    for word in re.split("[,;]", value.lstrip("^")):
        if word != word.strip():
            return _blank(value)
        if word.lower() not in known:
            return _unknown_word(word, arguments)
    return None


def _unknown_word(word: str, known: Sequence[str]) -> Mistake:
    meant = misspelled(word, known) or (known if len(known) <= _MOST_WORDS else ())
    reason = f"has no meaning: {word} is not a known value"
    return reason, f"use {one_of(tuple(meant))}" if meant else "see the documentation of the variable"


def _level(value: str, arguments: Sequence[str]) -> Mistake | None:
    if value in _LEVELS or re.fullmatch(r"\d", value):
        return None
    meant = value.upper() if value.upper() in _LEVELS else next(iter(misspelled(value, _LEVELS)), "")
    names = f"{', '.join(_LEVELS[4:6])}, PHB or SYS"
    return "is not a level, so NCCL ignores it", f"use {meant or names}"


def _blank(value: str) -> Mistake:
    plain = "".join(value.split())
    return "contains a blank, which becomes part of a name", f'write "{plain}"'


def _devices(value: str, arguments: Sequence[str]) -> Mistake | None:
    if value.strip() != value or re.search(r"\s", value):
        return _blank(value)
    if value.startswith("=^"):
        return "begins with =^, which is no prefix", f"write ^={value[2:]}"
    for item in value.lstrip("^").removeprefix("=").split(","):
        if not item:
            return "contains an empty name", "remove the additional comma"
        if item.startswith(("=", "^")):
            return f"has {item[0]} within the list. It applies to all names and comes first", "remove it"
        name, colon, port = item.partition(":")
        if colon and not (port.isdigit() and int(port) > 0):
            return f"has port {port!r} of {name}, which is no number from 1", f"write {name}:1"
    return None


def _ports(value: str, arguments: Sequence[str]) -> Mistake | None:
    if re.search(r"\s", value):
        return _blank(value)
    for item in value.lstrip("^").split(","):
        name, colon, port = item.partition(":")
        if colon and not port.isdigit():
            return f"has port {port!r} of {name}, which is no number", f"write {name}:1"
        if not colon and _RDMA_DEVICE.fullmatch(name):
            return f"names the RDMA device {name} without a port, so UCX does not find it", f"write {name}:1"
    return None


def _interfaces(value: str, arguments: Sequence[str]) -> Mistake | None:
    if re.search(r"\s", value):
        return _blank(value)
    return _each_interface(value.lstrip("^").removeprefix("="))


def _gloo_interfaces(value: str, arguments: Sequence[str]) -> Mistake | None:
    if re.search(r"\s", value):
        return _blank(value)
    if value.startswith(("=", "^")):
        return f"begins with {value[0]}, which gloo takes as part of the name", "write the full name alone"
    return _each_interface(value)


def _each_interface(names: str) -> Mistake | None:
    for item in names.split(","):
        name = item.partition(":")[0]
        if not name:
            return "contains an empty name", "remove the additional comma"
        if _RDMA_DEVICE.fullmatch(name) and not name.startswith(("cxi", "roce")):
            return f"names {name}, which is an RDMA device", "use a network interface (ip -brief address)"
        if re.fullmatch(r"\d+\.\d+\.\d+\.\d+(/\d+)?", name):
            return f"names the address {name}", "use the name of its network interface (ip -brief address)"
        if len(name) > _LONGEST_INTERFACE:
            return f"names {name}, which is too long for a network interface", "correct the name"
    return None


def _path(value: str, arguments: Sequence[str]) -> Mistake | None:
    return None if value.startswith("/") else ("is not an absolute path", "write the path from / on")


_FORMS: Mapping[str, Callable[[str, Sequence[str]], Mistake | None]] = {
    "text": _text,
    "integer": _integer,
    "integer-or-auto": _integer_or_auto,
    "flag": _flag,
    "word": _word,
    "words": _words,
    "level": _level,
    "devices": _devices,
    "ports": _ports,
    "interfaces": _interfaces,
    "gloo-interfaces": _gloo_interfaces,
    "path": _path,
}
