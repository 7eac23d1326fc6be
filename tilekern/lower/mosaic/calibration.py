"""Fitted and measured numbers of the TPU backend, each with its unit, source and date.

Limits of the hardware, which a vendor states, are in `chip.py`.
"""

from __future__ import annotations

OPS_PER_ROW = 16
"""Operations of Mosaic for each row that an access by rows reads or writes, at least. Counted, 2026-11-22."""

RESIDENT_GAIN = 2
"""Factor by which fetching the blocks of an input must move more bytes than fetching all of it once.

Only then all of the input is in VMEM: it is fetched before the first program, while no program computes.
"""
