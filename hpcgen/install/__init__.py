"""Code for the compute nodes: what a container image lacks, in a directory of its own."""
