"""Topology of a node's CPUs, GPUs and NICs: as its node type has it, as NCCL reads it, and as a live node shows it."""
