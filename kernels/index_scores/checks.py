"""The arguments of the public functions, checked and brought to one form."""

from __future__ import annotations

from typing import Any

from tilekern.authoring import hide_frames
from tilekern.kernels.checks import is_float, require
from tilekern.kernels.paged_attention.checks import QUANTIZED

hide_frames(__file__)


def keys_of_queries(function: str, query: Any, head_weights: Any, key_pages: Any) -> Any:
    """The keys [pages, page, D], for query[T, J, D] and head_weights[T, J].

    Raises:
      ArgumentError: shapes or dtypes do not fit.
    """
    keys = key_pages
    if getattr(keys, "ndim", 0) == 4 and keys.shape[2] == 1:
        keys = keys.reshape(*keys.shape[:2], keys.shape[3])
    fits = is_float(query) and query.ndim == 3 and is_float(head_weights) and head_weights.shape == query.shape[:2]
    fits = fits and getattr(keys, "ndim", 0) == 3 and keys.shape[2] == query.shape[2] and keys.shape[1] > 0
    fits = fits and (keys.dtype == query.dtype or str(keys.dtype) in QUANTIZED)
    require(
        fits,
        function,
        expected="query[T, J, D] and head_weights[T, J] of float dtypes, and key_pages[pages, page, D] or "
        f"[pages, page, 1, D] of the query's dtype or {', '.join(QUANTIZED)}",
        fix="cast query with .astype: a query of 8 bits is exact in bfloat16, and its scale belongs to head_weights",
        query=query,
        head_weights=head_weights,
        key_pages=key_pages,
    )
    return keys
