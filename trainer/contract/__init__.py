"""What hpcgen and the trainer share: configuration, checkpoint files, run directory, errors. Standard library only."""
