"""Checks of a site's templates: what the scripts made of them lost, and what their shell code does wrong."""
