"""AdamW, parameter groups and learning-rate schedule."""
