"""What is installed where: the extras of hpcgen, and the code directory of the compute nodes."""
