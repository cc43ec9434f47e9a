"""Memory test: one node runs a rank of each pipeline stage, alone, and measures the memory that training would need."""
