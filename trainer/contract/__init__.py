"""Code shared by hpcgen and the trainer: configuration, checkpoint files, run directory, errors.

These modules import only the standard library, so that hpcgen can use them without torch.
"""
