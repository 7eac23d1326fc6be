"""The prebuilt kernels: a folder for each. `from tilekern.kernels import softmax` gives the function, not the folder.

A function is imported when it is asked for, so that users wait for no kernel that they do not use.
"""

import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any

from tilekern import source
from tilekern.kernels.conventions import with_names_of

if TYPE_CHECKING:
    from tilekern.kernels.adamw_step import adamw_step
    from tilekern.kernels.causal_conv1d import causal_conv1d
    from tilekern.kernels.cross_entropy import cross_entropy
    from tilekern.kernels.distillation import distillation
    from tilekern.kernels.flash_attention import flash_attention
    from tilekern.kernels.gated_delta_rule import gated_delta_rule
    from tilekern.kernels.group_norm import group_norm
    from tilekern.kernels.index_scores import index_scores, select_keys, write_index_keys
    from tilekern.kernels.layer_norm import layer_norm
    from tilekern.kernels.linear_attention import linear_attention, ssd
    from tilekern.kernels.matmul import fused_matmul, matmul, quantized_matmul, symmetric_matmul
    from tilekern.kernels.mla_attention import mla_attention, write_latents
    from tilekern.kernels.paged_attention import copy_pages, paged_attention, ragged_paged_attention, write_pages
    from tilekern.kernels.quantized_array import QuantizedArray
    from tilekern.kernels.ragged_dot import fused_ragged_dot, ragged_contracting_dot, ragged_dot
    from tilekern.kernels.rg_lru import rg_lru
    from tilekern.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized
    from tilekern.kernels.rope import rms_norm_rope, rope
    from tilekern.kernels.sample import sample, sample_hidden, verify_draft_tree, verify_drafts
    from tilekern.kernels.selective_scan import selective_scan
    from tilekern.kernels.softmax import log_softmax, softmax
    from tilekern.kernels.swiglu import swiglu

__all__ = [
    "QuantizedArray",
    "adamw_step",
    "add_rms_norm",
    "causal_conv1d",
    "copy_pages",
    "cross_entropy",
    "distillation",
    "flash_attention",
    "fused_matmul",
    "fused_ragged_dot",
    "gated_delta_rule",
    "group_norm",
    "index_scores",
    "layer_norm",
    "linear_attention",
    "log_softmax",
    "matmul",
    "mla_attention",
    "paged_attention",
    "quantized_matmul",
    "ragged_contracting_dot",
    "ragged_dot",
    "ragged_paged_attention",
    "rg_lru",
    "rms_norm",
    "rms_norm_quantized",
    "rms_norm_rope",
    "rope",
    "sample",
    "sample_hidden",
    "select_keys",
    "selective_scan",
    "softmax",
    "ssd",
    "swiglu",
    "symmetric_matmul",
    "verify_draft_tree",
    "verify_drafts",
    "write_index_keys",
    "write_latents",
    "write_pages",
]

# The folder of each function that has another name than its folder.
_FOLDERS = {
    "QuantizedArray": "quantized_array",
    "add_rms_norm": "rms_norm",
    "copy_pages": "paged_attention",
    "fused_matmul": "matmul",
    "fused_ragged_dot": "ragged_dot",
    "log_softmax": "softmax",
    "quantized_matmul": "matmul",
    "ragged_contracting_dot": "ragged_dot",
    "ragged_paged_attention": "paged_attention",
    "rms_norm_quantized": "rms_norm",
    "rms_norm_rope": "rope",
    "sample_hidden": "sample",
    "select_keys": "index_scores",
    "ssd": "linear_attention",
    "symmetric_matmul": "matmul",
    "verify_draft_tree": "sample",
    "verify_drafts": "sample",
    "write_index_keys": "index_scores",
    "write_latents": "mla_attention",
    "write_pages": "paged_attention",
}


class _Functions(types.ModuleType):
    """The package. Its attribute `softmax` is the function, also after the folder `softmax` was imported."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=self)
        return getattr(importlib.import_module(f"{__name__}.{_FOLDERS.get(name, name)}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Python's import system sets the attribute of each folder, at the end of the folder's import.
        if name in __all__ and isinstance(value, types.ModuleType):
            value = with_names_of(value, getattr(value, name))
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


source.register_kernels(os.path.dirname(__file__))
sys.modules[__name__].__class__ = _Functions
