"""The checkpoints of a run for people: which there are, what each holds, which of them may go.

What makes a checkpoint whole, and which stay, is decided by trainer.checkpoint_files, for the trainer and here alike.
Nothing here needs torch.
"""
