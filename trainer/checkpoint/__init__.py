"""Checkpoints in Megatron-LM's directory layout (torch_dist), loadable at another TP, PP, VPP or DP.

`saving` writes them while training continues; `finding` finds the newest valid one, and `loading` loads the state from
it; `state` defines their contents. `trainer.contract.files.checkpoint_files` handles them as files.
"""

from trainer.checkpoint.finding import Source, find
from trainer.checkpoint.loading import load
from trainer.checkpoint.saving import Checkpoints, SaveEvent

__all__ = ["Checkpoints", "SaveEvent", "Source", "find", "load"]
