"""Datasets, their index files, and the microbatches of this rank."""
