"""Triton and its tools: from source to machine code, its cache and its resources."""
