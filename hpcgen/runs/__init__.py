"""Reads the directories of runs: what happened, what state a run is in, and where its time went."""
