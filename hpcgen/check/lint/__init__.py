"""Reads batch scripts of any origin and reports mistakes in them."""
