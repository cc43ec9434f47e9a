"""The GPT of this rank: its layers, kernels, initial weights and CUDA graphs."""
