"""Sweeps: several trainings that differ in some values of one run file, each a run of its own."""
