"""Trials: some steps of a training on random samples, as all of its ranks or as one alone, and what they measured."""
