"""Hugging Face's model families, and how their config.json becomes a section `model`."""
