"""A GPT trainer on megatron.core."""
