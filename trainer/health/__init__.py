"""Tests of a cluster's nodes and fabric, run as jobs: `nccl_test` over the allocation, `node` on each node."""
