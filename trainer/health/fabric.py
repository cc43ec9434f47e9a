"""Process groups for measurements: all ranks, the ranks of one node, or the ranks of several nodes."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

import torch
from torch.distributed import PrefixStore, ProcessGroup, destroy_process_group, init_process_group, new_group

from trainer.contract.errors import TrainerError
from trainer.distributed.rendezvous import select_gpu
from trainer.health.diagnosis import Group
from trainer.health.meeting import Meeting


class Fabric:
    """Ranks by node, and process groups of them. NCCL starts when the first group is created."""

    def __init__(self, device: str, meeting: Meeting) -> None:
        if device == "cuda":
            if not torch.cuda.is_available():
                raise TrainerError(f"torch {torch.__version__} sees no GPU", where=meeting.ranks)
            select_gpu(meeting.ranks)
            self.device = torch.device("cuda", torch.cuda.current_device())
            version = ".".join(map(str, torch.cuda.nccl.version()))
            self.software = f"NCCL {version}, torch {torch.__version__}"
        else:
            torch.set_num_threads(1)  # the ranks of a host share its cores
            self.device = torch.device("cpu")
            self.software = f"gloo, torch {torch.__version__}"
        self._meeting = meeting
        self._round = 0
        self._world: ProcessGroup | None = None
        self._ranks_of: dict[str, list[int]] = {}
        for rank, node in enumerate(meeting.gather("nodes", meeting.node)):
            self._ranks_of.setdefault(node, []).append(rank)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes in the order of their ranks."""
        return tuple(self._ranks_of)

    def world(self) -> ProcessGroup:
        """Process group of all ranks."""
        if self._world is None:
            ranks = self._meeting.ranks
            init_process_group(
                backend="nccl" if self.device.type == "cuda" else "gloo",
                store=PrefixStore("world", self._meeting.store),
                rank=ranks.rank,
                world_size=ranks.world_size,
                # Longer than any step, because the meeting names the ranks that hang, whereas torch would only abort.
                timeout=datetime.timedelta(hours=1),
            )
            self._world = torch.distributed.group.WORLD
        assert self._world is not None
        return self._world

    def measure_groups(
        self, groups: Sequence[Group], measure: Callable[[ProcessGroup], float]
    ) -> list[float]:
        """Call `measure` for all groups of nodes at the same time. Returns the same list on every rank."""
        self.world()
        mine: float | None = None
        made = [new_group([rank for node in group for rank in self._ranks_of[node]]) for group in groups]
        for group, process_group in zip(groups, made, strict=True):
            if self._meeting.node in group:
                mine = measure(process_group)
                destroy_process_group(process_group)
        self._round += 1
        values = self._meeting.gather(f"groups-{self._round}", mine)
        return [values[self._ranks_of[group[0]][0]] for group in groups]

    def close(self) -> None:
        """Destroy the process group of all ranks."""
        if self._world is not None:
            destroy_process_group()
