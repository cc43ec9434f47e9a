"""Slurm jobs: `rendering` renders their scripts, `submit` queues them, `local` runs them on this machine."""
