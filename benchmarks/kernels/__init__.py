"""Measures the kernels of a GPU, from which hpcgen predicts the time of a step. See __main__.py."""
