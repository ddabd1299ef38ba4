"""Structured output: what a client asks of an answer's form, as a grammar."""
