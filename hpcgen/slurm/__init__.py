"""Slurm jobs: `rendering` writes their scripts, `submit` queues them, `local` runs them on this machine."""
