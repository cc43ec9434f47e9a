"""Checks of shell scripts: scripts rendered from a site's templates, and batch scripts of any origin."""
