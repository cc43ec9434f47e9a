"""From a hand-written batch script that runs Megatron-LM to a run file."""
