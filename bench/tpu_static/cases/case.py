"""The parts of every case: a name, a lower bound of the time, and the programs of the contestants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from tilekern.estimate.tpu.chips import Chip


class Case(ABC):
    """A computation on arrays of one size, and its contestants."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name, for tables, keys of records and `--only`."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Operations of the matrix products that the result needs; a multiply-add counts as two."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the arguments and the results."""

    @property
    def operands(self) -> str:
        """The dtype of the products' operands."""
        return "bfloat16"

    @abstractmethod
    def ours(self, chip: str) -> str:
        """The program that calls our kernel, for `estimate`."""

    @abstractmethod
    def peers(self) -> Mapping[str, str]:
        """The programs of peers, by "peer setting"; of each peer the fastest setting counts."""

    def bound(self, machine: Chip) -> float:
        """The lower bound of the time, in microseconds, by the matrix units or the HBM of a device."""
        rate = machine.rate(self.operands) * machine.cores
        return max(self.flops / rate, self.nbytes / (machine.bandwidth * machine.cores)) * 1e6
