"""Checks of shell scripts: those rendered from a site's templates, and batch scripts of any origin."""
