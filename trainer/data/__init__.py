"""Datasets, their index files, and the micro-batches of this rank."""
