"""What each stage runs: one module for a stage, each with a function `work`."""
