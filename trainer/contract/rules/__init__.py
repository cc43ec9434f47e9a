"""The rules for a run. Each is a small function with its source. Standard library only, like all of the contract."""
