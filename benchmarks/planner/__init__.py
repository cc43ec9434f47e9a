"""Compares predicted steps with measured ones: published runs, and runs of our own."""
