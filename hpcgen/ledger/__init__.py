"""Accounts for the time of a run: which part of it went into steps that count, and where the rest went.

`parts` names the kinds of time, `timeline` adds them up, `account` divides the time of a run, `failures` measures how
often it failed, `ledger` has the figures, and `read` reads them from a run directory.
"""
