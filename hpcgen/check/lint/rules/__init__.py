"""The rules, in one module for each part of a script."""
