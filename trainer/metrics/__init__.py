"""Metrics of a run, written to files, TensorBoard, Weights & Biases and the console."""
