"""Strategies of Hypothesis: arrays, shapes, dtypes, extents that are awkward for tiles, and whole tile programs.

Hypothesis is imported when a strategy is made. The extra `tilekern[test]` installs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilekern.errors import DependencyError
from tilekern.ir.core import Array
from tilekern.ir.types import DTYPES, DType, Kind, kind_of
from tilekern.testing.programs import FEATURES, Program, build

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["arrays", "dtypes", "lengths", "programs", "shapes"]


def arrays(dtype: Any, shape: Sequence[int], specials: Sequence[float] = ()) -> SearchStrategy[Array]:
    """Arrays of standard normal numbers (small integers for integer dtypes), a few of them replaced by `specials`.

    Integers are in [-8, 8]. An array shrinks towards one without specials, not to smaller numbers.
    """
    st = hypothesis_strategies()
    size = math.prod(shape)
    places = st.integers(0, max(size - 1, 0))
    planted = st.dictionaries(places, st.sampled_from(specials), max_size=4) if specials and size else st.just({})

    def make(seed: int, planted: dict[int, float]) -> Array:
        random = np.random.default_rng(seed)
        if kind_of(np.dtype(dtype)) == "float":
            flat = random.standard_normal(size).astype(dtype)
        else:
            flat = random.integers(-8, 9, size).astype(dtype)
        for place, special in planted.items():
            flat[place] = special
        return flat.reshape(shape)

    return st.builds(make, st.integers(0, 2**16), planted)


def lengths(block: int) -> SearchStrategy[int]:
    """Extents that are awkward for tiles of `block`: 0, 1, primes, multiples of the block and their neighbours."""
    return hypothesis_strategies().sampled_from(awkward(block))


def awkward(block: int) -> list[int]:
    """The extents of `lengths`, in order."""
    primes = [n for n in range(2, 2 * block) if all(n % d for d in range(2, n))]
    near = {block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1}
    return sorted({0, 1, *near, *primes[len(primes) // 2 :: 3]})


def shapes(blocks: Sequence[int]) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of one dim for each of the blocks, of extents that are awkward for tiles of it."""
    return hypothesis_strategies().tuples(*map(lengths, blocks))


def dtypes(*kinds: Kind) -> SearchStrategy[DType]:
    """Dtypes of the language, of some kinds: "float", "signed", "unsigned", "bool"; of all kinds if none is given."""
    return hypothesis_strategies().sampled_from([d for d in DTYPES.values() if not kinds or kind_of(d) in kinds])


def programs(
    features: Sequence[str] = FEATURES, dtypes: Sequence[DType] = tuple(DTYPES.values())
) -> SearchStrategy[Program]:
    """Random programs of the block IR, with inputs, and the bound of what two correct backends may differ by.

    Args:
      features: some of `tilekern.testing.FEATURES`; leave out those that a backend rejects.
      dtypes: the dtypes of values; positions and masks are int32 and bool besides.
    """
    st = hypothesis_strategies()

    def make(draw: Any) -> Program:
        def choose(most: int) -> int:
            return draw(st.integers(0, most))

        return build(choose, features, dtypes)

    return st.composite(make)()


def hypothesis_strategies() -> Any:
    """The module `hypothesis.strategies`.

    Raises:
      DependencyError: Hypothesis is not installed.
    """
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise DependencyError(
            "random test input needs Hypothesis",
            expected="the package hypothesis",
            got=f"{type(error).__name__}: {error}",
            fix="pip install hypothesis",
        ) from error
    return strategies
