"""Corrections of reductions and scans, which combine whole slices at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.types import F32, F64, kind_of
from tilekern.lower.triton.interpreter.triton_interpreter import Correction, TritonInterpreter

_Tensors = tuple[Any, ...]
_Combine = Callable[[list[Array], list[Array]], list[Array]]


def _reduce_slices(triton: TritonInterpreter) -> None:
    """`tl.reduce`, `tl.associative_scan`, and all functions that call them, combine slices of arrays.

    Triton's interpreter (3.6.0, 3.9.0) calls the combining function for each element, which takes seconds for a tile,
    and leaves numbers that it assigns as Python numbers. Its short cuts differ from the functions that they replace: a
    maximum of NaNs warns, argmax refuses NaN, and a sum of bfloat16 adds the bits.
    """

    def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **hints: Any) -> Any:
        return _on_tuples(triton, input, lambda inputs: _reduced(triton, inputs, axis, combine_fn, keep_dims))

    def scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **hints: Any) -> Any:
        return _on_tuples(triton, input, lambda inputs: _scanned(triton, inputs, axis, combine_fn, reverse))

    for module in (triton.language, triton.language.core):
        module.reduce, module.associative_scan = reduce, scan


CORRECTIONS: tuple[Correction, ...] = (_reduce_slices,)


def _on_tuples(triton: TritonInterpreter, input: Any, fold: Callable[[_Tensors], list[Array]]) -> Any:
    """Reduce or scan one tensor, or a tuple of tensors; the results have the same dtypes."""
    single = isinstance(input, triton.language.tensor)
    inputs: _Tensors = (input,) if single else tuple(input)
    results = tuple(triton.tensor(x, v.dtype) for x, v in zip(fold(inputs), inputs, strict=True))
    return results[0] if single else results


def _reduced(triton: TritonInterpreter, inputs: _Tensors, axis: Any, combine: Any, keep_dims: Any) -> list[Array]:
    rank, axis = len(inputs[0].shape), _number(axis)
    arrays: list[Array] = [x.handle.data for x in inputs]
    if axis is None:
        arrays = [x.reshape(-1) for x in arrays]
    dim = 0 if axis is None else axis % rank
    direct = _direct_reduction(triton, combine, arrays[0])
    if direct is not None:
        arrays = [direct.reduce(arrays[0], axis=dim, keepdims=True, dtype=arrays[0].dtype)]
    else:
        arrays = _reduce(arrays, dim, _combiner(triton, combine, inputs))
    if not _number(keep_dims):
        return [x.squeeze(dim) for x in arrays]
    return [x.reshape((1,) * rank) for x in arrays] if axis is None else arrays


def _scanned(triton: TritonInterpreter, inputs: _Tensors, axis: Any, combine: Any, reverse: Any) -> list[Array]:
    dim = _number(axis) % len(inputs[0].shape)
    arrays: list[Array] = [x.handle.data for x in inputs]
    if not _number(reverse):
        return _scan(arrays, dim, _combiner(triton, combine, inputs))
    turned = _scan([np.flip(x, dim) for x in arrays], dim, _combiner(triton, combine, inputs))
    return [np.flip(x, dim) for x in turned]


def _number(value: Any) -> Any:
    """The value of a `tl.constexpr`."""
    return getattr(value, "value", value)


def _direct_reduction(triton: TritonInterpreter, combine: Any, x: Array) -> np.ufunc | None:
    """NumPy's function for `combine`, for the most frequent reductions; None for other reductions.

    Sums of narrow floats have none, because NumPy does not round them at each step.
    """
    standard = triton.language.standard
    if combine is standard._sum_combine and (kind_of(x.dtype) != "float" or x.dtype in (F32, F64)):
        return np.add
    if combine is standard._elementwise_max:
        return np.fmax
    return np.fmin if combine is standard._elementwise_min else None


def _combiner(triton: TritonInterpreter, combine: Any, like: _Tensors) -> _Combine:
    """`combine`, a device function of two elements of each input, as a function of arrays."""

    def combined(left: list[Array], right: list[Array]) -> list[Array]:
        operands = [triton.tensor(x, v.dtype) for side in (left, right) for x, v in zip(side, like, strict=True)]
        result: Any = combine(*operands)
        results: _Tensors = (result,) if isinstance(result, triton.language.tensor) else tuple(result)
        dtypes, expected = [r.dtype for r in results], [v.dtype for v in like]
        if dtypes != expected:
            raise TypeError(f"a combining function must return {expected}, got {dtypes}")
        return [np.broadcast_to(r.handle.data, left[0].shape) for r in results]

    return combined


def _reduce(arrays: list[Array], dim: int, combine: _Combine) -> list[Array]:
    """Combine the first half with the second one until one slice is left, in the order of a GPU's threads."""
    while (size := arrays[0].shape[dim]) > 1:
        halves = [np.split(x, [size // 2], dim) for x in arrays]
        arrays = combine([first for first, _ in halves], [second for _, second in halves])
    return arrays


def _scan(arrays: list[Array], dim: int, combine: _Combine) -> list[Array]:
    """Combine each slice with all before it: after step s it covers 2ˢ slices (Hillis and Steele, 1986)."""
    size, distance = arrays[0].shape[dim], 1
    along = [size if d == dim else 1 for d in range(arrays[0].ndim)]
    number: Array = np.arange(size, dtype=np.int64).reshape(along)
    while distance < size:
        before = [np.roll(x, distance, dim) for x in arrays]
        joined = combine(before, arrays)
        arrays = [np.where(number >= distance, new, old) for new, old in zip(joined, arrays, strict=True)]
        distance *= 2
    return arrays
