"""Checkpoints in Megatron-LM's directory layout (torch_dist), loadable at another TP, PP, VPP or DP.

`saving` writes them while training continues; `loading` finds the newest valid one and loads the state from it; `state`
defines their contents. `trainer.contract.checkpoint_files` handles them as files.
"""

from trainer.checkpoint.loading import Source, find, load
from trainer.checkpoint.saving import Checkpoints, SaveEvent

__all__ = ["Checkpoints", "SaveEvent", "Source", "find", "load"]
