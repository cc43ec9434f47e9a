"""Evaluation of checkpoints: `python -m trainer.evaluate`.

`job` evaluates one checkpoint after the other, `checks` finds all mistakes before the first one is loaded, `perplexity`
is the loss on tokenized texts, `tasks` loads tasks of lm-eval, `harness` computes them, `replicas` divides the work
among the ranks, and `results` and `boards` record what was found.
"""
