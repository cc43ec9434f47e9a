"""Listing, inspection and pruning of a run's checkpoints, without torch.

As in the trainer, trainer.contract.files.checkpoint_files decides which checkpoints are complete and which are kept.
"""
