"""JSON Lines, tokenizers, and the .bin/.idx pairs that Megatron-Core trains on."""
