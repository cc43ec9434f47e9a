"""Topology of a node's CPUs, GPUs and NICs: from its node type, from an NCCL topology file, and from a live node."""
