"""Cross entropy of a large vocabulary, without the logits in memory: `cross_entropy(hidden, weight, labels)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.cross_entropy import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.cross_entropy.api import cross_entropy
from tilekern.kernels.cross_entropy.reference import reference

__all__ = ["cross_entropy", "reference"]

__getattr__ = moved(__name__, cross_entropy_forward="kernel", cross_entropy_parts="kernel")
