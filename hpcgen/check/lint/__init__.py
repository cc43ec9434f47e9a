"""Reads batch scripts, hpcgen's and others, and says what is wrong with them."""
