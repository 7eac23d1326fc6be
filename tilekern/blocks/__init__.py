"""Good blocks without tuning: amounts of work from the block IR, and analytic models that turn them into seconds."""

from tilekern.blocks.choose import by_speed, model_of
from tilekern.blocks.good_blocks import good_blocks
from tilekern.blocks.reader import tiling

__all__ = ["by_speed", "good_blocks", "model_of", "tiling"]
