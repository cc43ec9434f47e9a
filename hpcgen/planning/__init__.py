"""Computes the plan of a run from its configuration."""
