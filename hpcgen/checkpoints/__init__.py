"""Listing, inspecting and pruning of a run's checkpoints, without torch.

Here and in the trainer, trainer.contract.checkpoint_files decides which checkpoints are complete and which are kept.
"""
