"""Computes the plan of a run: the stages that it needs, each with its resources, its environment and its command."""
