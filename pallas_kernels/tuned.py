"""Measured block sizes, written by `python -m pallas_kernels.tune`: fields of `tuning.Key` -> parts of the kernel."""

TUNED: dict[tuple[str | int, ...], dict[str, int]] = {}
