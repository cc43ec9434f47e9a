"""Arithmetic of the model and its layout: sizes, batches, experts, pipeline stages, FLOPs."""
