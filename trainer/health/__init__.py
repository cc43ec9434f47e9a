"""Health tests that run as jobs: `nccl_test` over the entire allocation, `node` on each node."""
