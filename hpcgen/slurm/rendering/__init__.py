"""Renders scripts from a plan and templates. Nothing here writes a file or runs a command."""
