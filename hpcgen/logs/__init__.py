"""Finds the root failure in the logs of a job: which rank failed first, why, and what followed from it."""
