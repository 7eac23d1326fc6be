"""The error for a keyword that a public function lacks: it names the argument that other libraries call so."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tilekern.errors import ArgumentError
from tilekern.lang.tiles import describe

_SYNONYMS = (
    ("eps", "epsilon", "variance_epsilon"),
    ("axis", "dim", "axes"),
    ("scale", "weight", "gamma", "kernel"),
    ("scale", "sm_scale", "softmax_scale"),
    ("bias", "beta"),
    ("causal", "is_causal", "use_causal_mask"),
    ("mask", "attn_mask", "attention_mask"),
    ("window", "local_window_size", "window_size", "sliding_window"),
    ("softcap", "logit_cap", "logits_soft_cap", "soft_cap"),
    ("dropout_rate", "dropout_p", "dropout"),
    ("return_logsumexp", "return_residual", "return_lse", "return_attn_probs"),
    ("query", "q"),
    ("key", "k"),
    ("value", "v"),
    ("labels", "target", "targets"),
    ("num_groups", "groups"),
    ("out_dtype", "preferred_element_type", "dtype"),
    ("log_decay", "g", "gate"),
    ("kv_lens", "context_lens", "cache_seqlens", "seq_lens"),
    ("page_indices", "block_tables", "block_table", "page_table"),
    ("x", "input", "inputs", "hidden_states"),
)
"""Names of one argument in JAX, Flax, PyTorch, Triton's and CUDA's libraries of attention."""


def unknown_keyword(
    function: str, keyword: str, value: object, parameters: Iterable[str], options: Iterable[str] = ()
) -> ArgumentError:
    """The error for a keyword that is neither a parameter nor an option of a function.

    Args:
      function: the name of the function.
      keyword: the keyword.
      value: its value in the call.
      parameters: the names of the parameters.
      options: the names of options that the function takes besides.
    """
    names = [*parameters, *options]
    named = _same_argument(keyword, names)
    return ArgumentError(
        f"{function} has no keyword argument {keyword!r}",
        expected=f"{named}=..., the name of the argument here" if named else f"one of {', '.join(names)}",
        got=f"{keyword} = {describe(value)}",
        fix=f"write {named}= in the place of {keyword}=" if named else f"see help({function})",
    )


def _same_argument(keyword: str, names: list[str]) -> str:
    """The name that other libraries spell so, or that is spelled alike; "" if there is none."""
    for synonyms in _SYNONYMS:
        if keyword in synonyms and (shared := [name for name in synonyms if name in names]):
            return shared[0]
    return next(iter(difflib.get_close_matches(keyword, names, n=1, cutoff=0.9)), "")
