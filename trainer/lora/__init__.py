"""LoRA: adapters next to the linear layers of a frozen model."""
