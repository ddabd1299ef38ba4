"""Measurements of a running stack: `python -m benchmarks.serve --help`; beside others: `benchmarks/peers`."""
