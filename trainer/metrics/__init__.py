"""The record of a run and where it goes: files, TensorBoard, Weights & Biases, the console."""
