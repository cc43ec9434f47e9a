"""Optimizers, parameter groups and learning-rate schedule."""
