"""Tokens drawn from logits: `sample`, `sample_hidden` of a product; drafts, as chains and as trees, verified."""

from tilekern.kernels.sample.api import sample, verify_draft_tree, verify_drafts
from tilekern.kernels.sample.hidden import sample_hidden
from tilekern.kernels.sample.reference import hidden_reference, reference

__all__ = ["hidden_reference", "reference", "sample", "sample_hidden", "verify_draft_tree", "verify_drafts"]
