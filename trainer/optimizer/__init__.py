"""AdamW, the parameter groups and the learning rate."""
