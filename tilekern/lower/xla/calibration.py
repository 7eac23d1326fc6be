"""Numbers of the portable backend that were chosen, with their units and dates."""

from __future__ import annotations

BATCH_BYTES = 2 << 20
"""Bytes that the largest tile of all programs of a batch may take together.

So the tiles of a batch stay in a CPU's caches, and scratch memory does not grow with the arrays. Chosen on 2026-11-20.
"""

ASSUMED_MEMORY = 16 << 30
"""Bytes of main memory of a machine whose system does not tell. Chosen on 2026-11-22."""
