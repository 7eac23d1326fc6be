"""Parts of training steps besides layers: losses on the log probabilities of tokens, and optimizers."""

from tilekern.training.adamw import AdamWState, InPlaceOptimizer, adamw_in_place
from tilekern.training.muon import MuonState, muon, newton_schulz
from tilekern.training.policies import Preferences, dpo_loss, grpo_loss, token_log_probabilities
from tilekern.training.transformations import GradientTransformation, adamw

__all__ = [
    "AdamWState",
    "GradientTransformation",
    "InPlaceOptimizer",
    "MuonState",
    "Preferences",
    "adamw",
    "adamw_in_place",
    "dpo_loss",
    "grpo_loss",
    "muon",
    "newton_schulz",
    "token_log_probabilities",
]
