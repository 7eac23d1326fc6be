"""Good blocks without tuning: amounts of work from the block IR, and analytic models that turn them into seconds."""

from tilekern.estimate.blocks.choose import fastest, model_of
from tilekern.estimate.blocks.tiling import tiling

__all__ = ["fastest", "model_of", "tiling"]
