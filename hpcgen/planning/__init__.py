"""Computes what a job needs: its resources, environment, container and memory, and the rules that they follow."""
