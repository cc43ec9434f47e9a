"""Calibration: measures the kernels, the network and the host of a cluster, from which hpcgen predicts step times."""
