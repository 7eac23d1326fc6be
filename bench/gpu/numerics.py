"""The kernels on the device against their float64 references, by the rule of `tilekern.testing`.

Inputs are fresh, outputs lie in memory full of NaN before each run, and three runs must agree in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu import kernels, trained, warp_specialised
from bench.gpu.item import Item, Record, lowerings_of
from bench.gpu.kernels import Kernel
from tilekern.ir.types import kind_of
from tilekern.lower.lowering import Lowering
from tilekern.lower.target import Target
from tilekern.testing import assert_close, in_float64

RUNS = 3
SPECIALS = (np.nan, np.inf, -np.inf, 0.0)
KERNELS = kernels.KERNELS | warp_specialised.KERNELS | trained.KERNELS


@dataclass(frozen=True)
class Prepared:
    """Inputs, the oracle, and the naive computation, as flat lists of NumPy arrays.

    The oracle is computed in float64; outputs of integers, such as tokens, are the naive computation's.
    """

    inputs: list[Any]
    oracle: list[Any]
    low: list[Any]


@dataclass(frozen=True)
class Check(Item):
    """One kernel on one case.

    Attributes:
      kernel: name in `KERNELS`.
      case: makes the arrays, and has the keywords.
      dtype: dtype of the arrays.
      specials: True if a few elements are NaN or infinite.
    """

    kernel: str
    case: Any
    dtype: str
    specials: bool = False
    seconds: float = 2.0

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] -- items are immutable
        """The unique name in the plan."""
        return f"numerics {self.kernel} {self.case.name} {self.dtype}{' specials' if self.specials else ''}"

    @property
    def call(self) -> Callable[..., Any]:
        """tilekern's function, with the keywords of the case."""
        return partial(KERNELS[self.kernel].call, **self.keywords)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the call and of the reference."""
        return getattr(self.case, "keywords", {})

    def inputs(self, seed: int) -> list[Any]:
        """The arrays, different for every check."""
        own = crc32(self.name.encode()) ^ (seed & 0xFFFFFFFF)
        arrays = [np.array(x) for x in jax.tree.leaves(self.case.arrays(jax.random.key(own), self.dtype))]
        random = np.random.default_rng(own)
        for x in arrays if self.specials else []:
            if x.dtype == jnp.dtype(self.dtype):
                x.reshape(-1)[random.integers(0, x.size, len(SPECIALS))] = SPECIALS
        return arrays

    def lowerings(self, target: Target, seed: int) -> Iterator[Lowering]:
        avals = jax.eval_shape(partial(self.case.arrays, dtype=jnp.dtype(self.dtype)), jax.random.key(0))
        return lowerings_of(self.call, jax.tree.leaves(avals), target)

    def prepare(self, seed: int) -> Prepared:
        inputs = self.inputs(seed)
        wide = jax.tree.leaves(in_float64(partial(KERNELS[self.kernel].reference, **self.keywords), *inputs))
        low = self._low(inputs)
        return Prepared(inputs, [w if kind_of(w.dtype) == "float" else n for w, n in zip(wide, low, strict=True)], low)

    def _low(self, inputs: list[Any]) -> list[Any]:
        """The reference's results, computed in the inputs' dtype, or by default where that changes a result's dtype."""
        kernel = KERNELS[self.kernel]
        low = jax.tree.leaves(kernel.reference(*inputs, **self.keywords))
        if kernel.dtyped:
            narrow = jax.tree.leaves(kernel.reference(*inputs, **self.keywords, dtype=jnp.dtype(self.dtype)))
            low = [n if n.dtype == wide.dtype else wide for n, wide in zip(narrow, low, strict=True)]
        return [np.asarray(x) for x in low]

    def run(self, seed: int, prepared: Prepared) -> Record:
        first, *repeats = poisoned(self.call, [jax.device_put(x) for x in prepared.inputs])
        length = KERNELS[self.kernel].length(*prepared.inputs)
        faults: list[str] = []
        for repeat in repeats:
            with _noting(faults):
                _require_same_bits(first, repeat)
        for n, (out, oracle, low) in enumerate(zip(first, prepared.oracle, prepared.low, strict=True)):
            with _noting(faults, f"output {n}: "):
                if kind_of(oracle.dtype) == "float":
                    assert_close(out, oracle, low, length=length, factor=KERNELS[self.kernel].factor)
                else:
                    np.testing.assert_array_equal(out, oracle, strict=True)
        errors = {"errors": [_error(x, o) for x, o in zip(first, prepared.oracle, strict=True)]}
        return {"ok": not faults} | errors | ({"text": "\n".join(faults)} if faults else {})

    def launch(self, seed: int) -> None:
        poisoned(self.call, [jax.device_put(x) for x in self.inputs(seed)])


def poisoned(function: Callable[..., Any], arrays: Sequence[Any]) -> list[list[np.ndarray]]:
    """Run a function `RUNS` times, with outputs and temporaries in memory that held NaN; return the results.

    Arrays of the outputs' types, full of NaN, or of the least integer, are donated, so that XLA reuses them for the
    outputs. Other NaN arrays are freed right before, so that the allocator reuses their memory for temporaries.
    """
    types = jax.tree.leaves(jax.eval_shape(function, *arrays))

    def run(poison: Any, *arrays: Any) -> list[Any]:
        del poison
        return jax.tree.leaves(function(*arrays))

    donated, results = jax.jit(run, donate_argnums=0, keep_unused=True), []
    for _ in range(RUNS):
        poison = [jax.device_put(np.full(t.shape, _poison(t.dtype), t.dtype)) for t in types]
        freed = [jax.device_put(np.full(size, np.nan, np.float32)) for size in (1 << 8, 1 << 14, 1 << 18, 1 << 22)]
        jax.block_until_ready((freed, poison))
        del freed
        results.append([np.asarray(x) for x in donated(poison, *arrays)])
    return results


def checks(table: Mapping[str, Kernel] = KERNELS) -> list[Check]:
    """The checks of some kernels, in the order of the table; of each kernel, cases of many tiles come first."""
    items: list[Check] = []
    for name, kernel in table.items():
        items += [Check(name, case, dtype) for case in kernel.large for dtype in kernel.dtypes]
        items += [Check(name, case.small(), "bfloat16") for case in kernel.cases]
        if kernel.specials:
            # A skipped tile of a causal mask hides values that are not finite, as the definition's 0 * NaN does not.
            case = next(case for case in kernel.large if not getattr(case, "causal", False))
            items.append(Check(name, case, "float32" if "float32" in kernel.dtypes else "bfloat16", True))
    return items


@contextmanager
def _noting(faults: list[str], place: str = "") -> Generator[None]:
    """Add the text of an AssertionError, behind `place`, to `faults`; so each output of a wrong kernel is judged."""
    try:
        yield
    except AssertionError as error:
        faults.append(f"{place}{error}")


def _poison(dtype: Any) -> Any:
    return np.nan if kind_of(dtype) == "float" else np.iinfo(dtype).min


def _error(out: Any, oracle: Any) -> float:
    """`‖out - oracle‖ / ‖oracle‖` over the finite elements of the oracle, for the record."""
    finite = np.isfinite(oracle)
    norm = np.linalg.norm(oracle[finite])
    return float(np.linalg.norm(out[finite].astype(np.float64) - oracle[finite]) / norm) if norm else 0.0


def _require_same_bits(first: Sequence[np.ndarray], repeat: Sequence[np.ndarray]) -> None:
    for n, (x, y) in enumerate(zip(first, repeat, strict=True)):
        if x.tobytes() != y.tobytes():
            places = np.argwhere((x != y) & ~((x != x) & (y != y)))
            raise AssertionError(
                f"output {n} differs between runs on the same inputs: {len(places)} of {x.size} elements, "
                f"first at {places[:1].tolist()}"
            )
