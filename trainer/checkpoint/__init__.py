"""Checkpoints in Megatron-LM's directory layout (torch_dist), loadable at another TP, PP, VPP or DP.

`saving` writes them, while training goes on; `loading` finds the newest that is whole and fills the state
from it; `state` is what is in one. What they are as files is in `trainer.contract.checkpoint_files`.
"""

from trainer.checkpoint.loading import Source, find, load
from trainer.checkpoint.saving import Checkpoints, SaveEvent

__all__ = ["Checkpoints", "SaveEvent", "Source", "find", "load"]
