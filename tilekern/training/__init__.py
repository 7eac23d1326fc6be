"""Parts of training steps besides layers: losses on the log probabilities of tokens, and optimizers."""

from tilekern.training.adamw import AdamWState, InPlaceOptimizer, adamw
from tilekern.training.muon import MuonState, Optimizer, muon, newton_schulz
from tilekern.training.policies import Preferences, dpo_loss, grpo_loss, token_log_probabilities

__all__ = [
    "AdamWState",
    "InPlaceOptimizer",
    "MuonState",
    "Optimizer",
    "Preferences",
    "adamw",
    "dpo_loss",
    "grpo_loss",
    "muon",
    "newton_schulz",
    "token_log_probabilities",
]
