"""Where the CPUs, GPUs and NICs of a node lie: as facts say it, as NCCL reads it, and as a live node has it."""
