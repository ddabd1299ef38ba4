"""Backends of the shared pool: a `PageStore` by page names; each needs its own package."""
