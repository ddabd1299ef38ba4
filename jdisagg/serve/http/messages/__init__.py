"""Anthropic's Messages API: blocks in, blocks out."""
