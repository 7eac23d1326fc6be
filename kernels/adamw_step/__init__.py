"""The step of AdamW on one array, in place: `adamw_step(param, gradient, first, second, factors)`.

`tilekern.training.adamw` is the optimizer.
"""

from tilekern.kernels.adamw_step.kernel import adamw_step
from tilekern.kernels.adamw_step.reference import reference

__all__ = ["adamw_step", "reference"]
