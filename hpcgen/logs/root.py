"""Chooses the root failure among the evidence of an attempt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from hpcgen.logs.evidence import Evidence
from hpcgen.logs.failure import UNKNOWN, Consequence, Failure
from hpcgen.logs.signatures import KINDS, known_cause, match_line, rank_numbers
from trainer.contract.record import replaced
from trainer.contract.wording import rank_list

NodeOf = Callable[[int], str | None]

_LOOK_AT = re.compile(r"Look first at (?P<ranks>ranks? [\d, and-]+?)(?: on (?P<node>[^\s,]+))?,")
"""The sentence of trainer.contract.hang_report."""
_OWN_NAME = re.compile(r"\b[Rr]ank (?P<rank>\d{1,7})(?: on (?P<node>[A-Za-z][\w.-]*)|[:,]| at )")
_NODE = re.compile(r"\bnode:? (?P<node>[A-Za-z][\w-]*\d[\w.-]*)")
_STEP_FRAME = re.compile(r", in (?:forward|backward|step|train_step|training_step)\b")
_LOAD_FRAME = re.compile(r", in (?:_?load_(?:\w+_)?checkpoint|load_state_dict|_load_base_checkpoint)\b")
MAX_RANKS = 1_000_000
_PRECEDENCE = (("fact",), ("root", "stop"), ("wait", "exit"))
"""Roles from the one that explains most."""


def find_root(
    evidence: Iterable[Evidence], node_of: NodeOf, failed: str = "", num_ranks: int = 0
) -> Failure | None:
    """The root failure and its consequences. None without any evidence.

    `failed`: text of the marker FAILED, the trainer's own verdict. `node_of`: the node of a rank. `num_ranks`: how many
    ranks there are, or 0 if unknown.
    """
    found = sorted(evidence, key=lambda each: each.order)
    if not found and not failed:
        return None
    root = _choose(found, failed) or _silent(found, num_ranks)
    if root is None:
        return _unknown(found)
    same = [root, *(each for each in found if each is not root and _is_same(each, root))]
    ranks = _ranks_of(root, same) or (_silent_ranks(found, num_ranks) if root.role == "wait" else ())
    node = _node(root, ranks, _nodes_of_ranks(found), node_of)
    ranks = _ranks_of_workers(root, found) or ranks
    rank = ranks[0] if ranks else None
    traceback = root.traceback or _context(root, rank, found)
    kind = _kind(root.kind, traceback)
    return Failure(
        kind=kind,
        title=KINDS[kind].title,
        rank=rank,
        ranks=ranks,
        node=node,
        time=root.time,
        message=root.message,
        traceback=traceback,
        cascade=_consequences(found, {id(each) for each in same}, set(ranks)),
        place=f"{root.source}:{root.number}" if root.source else "",
        fix=_fix(kind),
    )


def _kind(kind: str, traceback: str) -> str:
    """The kind of a root failure, which its traceback can make more precise."""
    if kind == "gpu-memory" and _builds_model(traceback):
        return "model-memory"
    if kind == "exception" and _LOAD_FRAME.search(traceback):
        return "checkpoint"
    return kind


def _builds_model(traceback: str) -> bool:
    """True if a module was being made. Then no activations exist yet, whatever the size of a microbatch."""
    return ", in __init__" in traceback and _STEP_FRAME.search(traceback) is None


def _choose(found: Sequence[Evidence], failed: str) -> Evidence | None:
    """The evidence that explains the rest."""
    if verdict := failed.strip():
        said = [each for each in found if verdict.splitlines()[0] in each.message]
        if said:
            return said[0]
        text = f"trainer: {verdict.splitlines()[0]}"
        match = match_line(text)
        if match is not None and match.role in ("fact", "root"):
            order = found[0].order if found else 0
            return Evidence(
                kind=match.kind, role="root", order=order, rank=None, message=text, source="FAILED", number=1
            )
    for roles in _PRECEDENCE:
        if candidates := [each for each in found if each.role in roles]:
            first = candidates[0]
            earlier = [each for each in found if each.role in ("wait", "exit") and each.order < first.order]
            if first.role == "stop" and earlier:
                candidates = earlier
            return _explained(_most_precise(candidates))
    return None


def _silent(found: Sequence[Evidence], num_ranks: int) -> Evidence | None:
    """If most ranks say that they lost their peers, the ranks that say nothing are these peers."""
    silent = _silent_ranks(found, num_ranks)
    lost = [each for each in found if each.kind == "lost-peers"]
    if not silent or not lost:
        return None
    message = f"{rank_list(silent)} wrote nothing, and the others lost their peers"
    return replaced(
        lost[0], kind="silent", role="exit", rank=silent[0], ranks=silent, message=message, traceback=""
    )


def _silent_ranks(found: Sequence[Evidence], num_ranks: int) -> tuple[int, ...]:
    """The ranks about which nothing was said, if most ranks said something."""
    told = {rank for each in found for rank in _own_ranks(each)}
    silent = tuple(rank for rank in range(min(num_ranks, MAX_RANKS)) if rank not in told)
    return silent if len(silent) <= num_ranks / 2 else ()


def _explained(root: Evidence) -> Evidence:
    """An end without a reason, with the reason that the rank's last lines give, if they do."""
    if root.kind != "exit":
        return root
    for line in reversed(root.traceback.splitlines()[-3:]):
        if cause := known_cause(line):
            return replaced(root, kind=cause.kind, message=line.strip())
    return root


def _most_precise(candidates: Sequence[Evidence]) -> Evidence:
    """The first one, unless a later one says more about the same event."""
    first = candidates[0]
    if first.role == "fact":
        better = [each for each in candidates if each.kind == first.kind and (each.ranks or each.node)]
    elif first.role == "exit":
        better = [each for each in candidates if each.kind in ("killed", "crash")]
        better.sort(key=lambda each: not each.ranks)
    elif first.kind == "launch":  # pyxis and enroot write the reason after the result
        better = [each for each in candidates if each.kind == "disk-full" and "pyxis:" in each.message]
    elif first.kind == "canceled":
        better = [each for each in candidates if each.kind in ("time-limit", "preempted")]
    else:
        better = []
    return (better or candidates)[0]


def _is_same(each: Evidence, root: Evidence) -> bool:
    """True for the error of the root on another rank."""
    return each.kind == root.kind and each.role == root.role and _shape(each.message) == _shape(root.message)


def _shape(message: str) -> str:
    """A message without the numbers and names that differ between ranks."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", message)[:200]


def _ranks_of(root: Evidence, same: Sequence[Evidence]) -> tuple[int, ...]:
    """The ranks that failed, the first one first. Empty if the log does not say."""
    if look := _LOOK_AT.search(root.message):
        return rank_numbers(look["ranks"])
    if root.role == "wait":  # those who waited are not those who failed
        return ()
    return root.ranks or tuple(dict.fromkeys(rank for each in same for rank in _own_ranks(each)))


def _ranks_of_workers(root: Evidence, found: Sequence[Evidence]) -> tuple[int, ...]:
    """The rank that torchrun's table names. Under torchrun, the number before each line is that of torchrun's task."""
    if root.ranks or root.rank is None or root.role == "wait":
        return ()
    tables = (each.ranks for each in found if each.role == "exit" and each.rank == root.rank and each.ranks)
    return next(tables, ())


def _own_ranks(each: Evidence) -> tuple[int, ...]:
    """The rank that a message names as its own, or that wrote it."""
    if named := re.findall(r"\bon ranks? (\d[\d, and]*)", each.message):
        return rank_numbers(named[0])
    if own := _OWN_NAME.search(each.message):
        return (int(own["rank"]),)
    return () if each.rank is None else (each.rank,)


def _nodes_of_ranks(found: Sequence[Evidence]) -> dict[int, str]:
    """The nodes that srun names when tasks end."""
    return {rank: each.node for each in found if each.node and each.rank is None for rank in each.ranks}


def _node(root: Evidence, ranks: Sequence[int], known: Mapping[int, str], node_of: NodeOf) -> str | None:
    if root.node:
        return root.node
    if ranks and (node := node_of(ranks[0]) or known.get(ranks[0])):
        return node
    named = (pattern.search(root.message) for pattern in (_LOOK_AT, _OWN_NAME, _NODE))
    return next((found["node"] for found in named if found and found["node"]), None)


def _context(root: Evidence, rank: int | None, found: Sequence[Evidence]) -> str:
    """The first traceback of the rank that failed, or all observations of the same event."""
    if root.role == "fact" or root.kind == "launch":
        same = [each.message for each in found if each.role == root.role and each.kind == root.kind]
        return "\n".join(dict.fromkeys(same)) if len(same) > 1 else ""
    own = (each.traceback for each in found if rank is not None and each.rank == rank and each.traceback)
    return next(own, "")


def _consequences(found: Sequence[Evidence], root: set[int], ranks: set[int]) -> tuple[Consequence, ...]:
    """The consequences by kind. A rank counts once, with the first thing it said."""
    ranks_of: dict[str, dict[int, None]] = {}
    lines_of: dict[str, int] = {}
    counted = set(ranks)
    for each in found:
        if id(each) in root or each.role == "exit":
            continue
        kind = each.kind if each.role == "cascade" else "teardown"
        own = [rank for rank in (_own_ranks(each) or each.ranks) if rank not in counted]
        if own:
            counted.update(own)
            ranks_of.setdefault(kind, {}).update(dict.fromkeys(own))
        elif each.role == "cascade" and not (each.ranks or _own_ranks(each)):
            lines_of[kind] = lines_of.get(kind, 0) + 1
    by_rank = [
        Consequence(kind=kind, title=KINDS[kind].title, ranks=tuple(sorted(own)), count=len(own))
        for kind, own in ranks_of.items()
    ]
    by_line = [
        Consequence(kind=kind, title=KINDS[kind].title, ranks=(), count=count)
        for kind, count in lines_of.items()
        if kind not in ranks_of
    ]
    return tuple(by_rank + by_line)


def _unknown(found: Sequence[Evidence]) -> Failure:
    """Only consequences were seen: shows the first traceback and names no cause."""
    first = next((each for each in found if each.traceback), found[0])
    return Failure(
        kind=UNKNOWN,
        title=KINDS[UNKNOWN].title,
        time=first.time,
        message=first.message,
        traceback=first.traceback,
        cascade=_consequences(found, set(), set()),
        place=f"{first.source}:{first.number}" if first.source else "",
        fix=_fix(UNKNOWN),
    )


def _fix(kind: str) -> str:
    return f"faults.md#{KINDS[kind].fix}" if KINDS[kind].fix else ""
