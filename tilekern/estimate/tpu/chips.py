"""The TPUs of the estimate: clocks, bandwidths, and the other figures of a core that the simulation needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chip:
    """One device of JAX: a TensorCore of v5e, v6e and 7x, both TensorCores of a v5p.

    Sources: peak rates and bandwidths are Google's (https://cloud.google.com/tpu/docs/v5e, v5p, v6e, tpu7x), per core,
    as in `jax.experimental.pallas.tpu.get_tpu_info_for_chip`. The clock is the peak over the operations of a cycle.
    The delay slots are seen in libtpu's dumps: so many bundles after a branch are guarded by its predicate, or empty.

    Attributes:
      topology: the smallest slice, as libtpu names it.
      ghz: clock, in 10⁹ bundles a second.
      bandwidth: bytes a second between a core and HBM.
      mxus: matrix units of a core.
      macs: bfloat16 multiply-adds of one matrix unit in a cycle.
      delay_slots: bundles after a branch that still run.
      cores: TensorCores that share the grid of one kernel ("megacore").
      faster: the rate of products relative to bfloat16's, for dtypes with a higher rate.
    """

    topology: str
    ghz: float
    bandwidth: float
    mxus: int
    macs: int
    delay_slots: int
    cores: int = 1
    faster: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def latency(self) -> float:
        """Cycles from the start of a DMA to its first byte.

        450 ns make the estimate of a v5e matmul with 128³ blocks meet the 11.8 ms of JAX's Pallas documentation
        (docs/pallas/tpu/matmul). Not calibrated for v6e and 7x.
        """
        return 450.0 * self.ghz

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes of HBM traffic of a core per cycle."""
        return self.bandwidth / (self.ghz * 1e9)

    @property
    def peak(self) -> float:
        """bfloat16 operations per second of a core; a multiply-add counts as two."""
        return 2e9 * self.ghz * self.mxus * self.macs

    def rate(self, dtype: str) -> float:
        """Operations per second of a core on operands of a dtype."""
        return self.peak * self.faster.get(dtype, 1.0)


CHIPS = {
    "v5e": Chip("v5e:2x2", 1.50, 0.82e12, 4, 128 * 128, 4, faster={"int8": 2}),
    "v5p": Chip("v5p:2x2x1", 1.75, 1.23e12, 4, 128 * 128, 4, cores=2, faster={"int8": 2}),
    # v6e and 7x: units of 256×256 that take two rows a cycle.
    "v6e": Chip("v6e:2x2", 1.75, 1.64e12, 2, 2 * 256 * 256, 4, faster={"int8": 2}),
    "7x": Chip("tpu7x:2x2x1", 2.20, 3.70e12, 2, 2 * 256 * 256, 6, faster={"float8_e4m3fn": 2}),
}


def chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
      KeyError: nobody knows it.
    """
    if name not in CHIPS:
        raise KeyError(f"chip = {name!r}; expected one of {', '.join(CHIPS)}")
    return CHIPS[name]
