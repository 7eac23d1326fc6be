"""Good blocks without tuning: amounts of work from the block IR, and analytic models that turn them into seconds."""

from tilekern.blocks.choose import fastest, model_of
from tilekern.blocks.tiling import tiling

__all__ = ["fastest", "model_of", "tiling"]
