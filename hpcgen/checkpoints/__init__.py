"""The checkpoints of a run for people: which there are, what each holds, which of them may go.

trainer.contract.checkpoint_files decides what makes a checkpoint complete and which checkpoints stay, here and in the
trainer. Nothing here needs torch.
"""
