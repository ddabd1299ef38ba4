"""Prompts as vectors: pooled states of the last layer, and how near two of them are."""
