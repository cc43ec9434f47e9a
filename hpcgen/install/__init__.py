"""Installation: the extras of hpcgen, and the code directory for the compute nodes."""
