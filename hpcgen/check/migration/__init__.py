"""Converts a hand-written batch script that runs Megatron-LM into a run file."""
