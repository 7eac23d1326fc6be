"""The treatment of a kernel's call by XLA's partitioner."""

from __future__ import annotations

from typing import Literal

type Partitioning = Literal["partitioned", "replicated", "refused"]
"""The treatment of a call in a program that XLA partitions among devices.

"partitioned": its operations are partitioned as all others. "replicated": each device gathers the arguments, and
computes the whole result. "refused": XLA cannot compile such a program."""
