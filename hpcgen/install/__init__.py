"""Code directory for the compute nodes, with what a container image lacks."""
