"""Cross entropy of a large vocabulary, without the logits in memory: `cross_entropy(hidden, weight, labels)`."""

from tilekern.kernels.cross_entropy import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.cross_entropy.api import cross_entropy
from tilekern.kernels.cross_entropy.kernel import cross_entropy_forward, cross_entropy_parts
from tilekern.kernels.cross_entropy.reference import reference

__all__ = ["cross_entropy", "cross_entropy_forward", "cross_entropy_parts", "reference"]
