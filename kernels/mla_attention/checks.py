"""The arguments of the public functions, checked and brought to one form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from tilekern.authoring import describe, hide_frames
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_real, is_float, is_integer, refusal
from tilekern.kernels.mla_attention.arguments import Latents, Scales
from tilekern.kernels.paged_attention.checks import QUANTIZED, scale_of_cache

hide_frames(__file__)


def latents(function: str, name: str, rows: Any, kv_pages: Any, value_width: int) -> tuple[Latents, Latents]:
    """The queries or new latents, argument `name`, and the cache, whose widths are alike.

    Rows are queries [T, N, C + R] or new latents [T, C + R].

    Raises:
      ArgumentError: shapes or dtypes do not fit.
    """
    ours, cache = _latents(rows), _without_head(_latents(kv_pages))
    ndim = 3 if name == "query" else 2
    if ours is not None and cache is not None and _fit(ours, cache, ndim, value_width):
        return ours, cache
    form = "T, N, " if name == "query" else "T, "
    raise ArgumentError(
        f"the arrays of {function} do not fit",
        expected=f"{name}[{form}C + R] of a float dtype, and kv_pages[pages, page, C + R] or [pages, page, 1, C + R] "
        f"of its dtype or {', '.join(QUANTIZED)}; either may be a pair, [..., C] and [..., R]; C = value_width = "
        f"{value_width}",
        got=f"{name} = {_described(rows)}, kv_pages = {_described(kv_pages)}",
        fix=f"cast {name} with .astype; give value_width=, the width of a latent, if it is not 512",
    )


def scales(function: str, cache: Latents, latent_scale: Any, rope_scale: Any) -> Scales:
    """The scales as float32 arrays.

    Raises:
      ArgumentError: a scale is of another shape or dtype.
    """
    return Scales(
        _scale(function, "latent_scale", latent_scale, cache), _scale(function, "rope_scale", rope_scale, cache)
    )


def scale_of_scores(function: str, scale: Any) -> float:
    """The scale, which has no default: the width of a head before it was absorbed is not known here.

    Raises:
      ArgumentError: it is no number.
    """
    number = as_real(scale)
    if number is None:
        fix = "it is static, the width of a key before it was absorbed ** -0.5: (128 + 64) ** -0.5 for DeepSeek"
        raise refusal(function, "scale", "a number", scale, fix)
    return number


def selected(function: str, positions: Any, tokens: int) -> None:
    """Check the positions of selected keys; None are all keys.

    Raises:
      ArgumentError: they are no integers [T, k].
    """
    if positions is None or (is_integer(positions) and positions.ndim == 2 and positions.shape[0] == tokens):
        return
    expected = f"integers [{tokens}, k], positions of keys for each token, or None"
    raise refusal(function, "selected", expected, positions, "fill rows of fewer keys with -1")


def _latents(arrays: Any) -> Latents | None:
    if not isinstance(arrays, (tuple, list)):
        return Latents(arrays, None)
    pair = cast(Sequence[Any], arrays)
    return Latents(*pair) if len(pair) == 2 and pair[1] is not None else None


def _without_head(cache: Latents | None) -> Latents | None:
    """A cache [pages, page, 1, ...] as [pages, page, ...]; any other one as it is."""
    if cache is None or any(getattr(x, "ndim", 0) != 4 or x.shape[2] != 1 for x in cache if x is not None):
        return cache
    return Latents(*(x if x is None else x.reshape(*x.shape[:2], x.shape[3]) for x in cache))


def _fit(rows: Latents, cache: Latents, ndim: int, value_width: int) -> bool:
    """True if rows of `ndim` dims and the cache have one dtype, or the cache one of 8 bits, and the same widths."""
    if not (_agree(rows, ndim, is_float) and _agree(cache, 3, _is_array)):
        return False
    dtypes, widths = {str(x.dtype) for x in rows if x is not None}, rows.widths(value_width)
    if len(dtypes) > 1 or not all(str(x.dtype) in (*dtypes, *QUANTIZED) for x in cache if x is not None):
        return False
    return widths == cache.widths(value_width) and widths[0] == value_width and widths[1] > 0 < cache.latent.shape[1]


def _agree(arrays: Latents, ndim: int, is_right: Callable[[Any], bool]) -> bool:
    """True if the arrays have the right dtypes and numbers of dims, and shapes that are alike but for the last dim."""
    halves = [x for x in arrays if x is not None]
    return all(is_right(x) and x.ndim == ndim for x in halves) and len({x.shape[:-1] for x in halves}) == 1


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "ndim")


def _described(arrays: Any) -> str:
    if isinstance(arrays, (tuple, list)):
        return f"({', '.join(map(describe, cast(Sequence[Any], arrays)))})"
    return describe(arrays)


def _scale(function: str, name: str, scale: Any, cache: Latents) -> Any:
    return scale_of_cache(function, name, scale, [cache.latent.shape[:2]], "a scale for all, or for each key")
