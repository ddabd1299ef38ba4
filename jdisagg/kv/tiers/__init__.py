"""Stores of KV pages below HBM; the policy decides which pages are kept."""
