"""Packing: which group each online request should live in, and how it gets there."""
