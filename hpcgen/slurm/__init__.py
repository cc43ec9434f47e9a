"""Submitting: the only code with side effects on a cluster."""
