"""Triton source of each op."""
