"""The lightning indexer of DeepSeek Sparse Attention: `index_scores` of all keys, and `select_keys`, the best ones.

`write_index_keys` appends keys to its cache; `copy_pages` of paged attention copies whole pages.
"""

from tilekern.kernels.index_scores import schedules as schedules  # the blocks of the kernel
from tilekern.kernels.index_scores.api import index_scores, select_keys
from tilekern.kernels.index_scores.pages import write_index_keys
from tilekern.kernels.index_scores.reference import reference, select_reference, write_reference

__all__ = [
    "index_scores",
    "reference",
    "select_keys",
    "select_reference",
    "write_index_keys",
    "write_reference",
]
