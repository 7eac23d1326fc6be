"""Tokens drawn from logits: `sample`, and `verify_drafts` for speculative decoding."""

from tilekern.kernels.sample.api import sample, verify_drafts
from tilekern.kernels.sample.reference import reference

__all__ = ["reference", "sample", "verify_drafts"]
