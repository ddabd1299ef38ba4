"""Backends of the pool that all workers share, behind `Store` by names; each is there where its package is."""
