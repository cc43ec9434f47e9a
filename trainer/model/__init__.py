"""This rank's part of the GPT: layers, kernels, initial weights and CUDA graphs."""
