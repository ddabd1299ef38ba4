"""Backends of the shared pool: a `Store` by page names; each needs its own package."""
