"""What training steps compute besides layers: losses on the log probabilities of tokens."""

from tilekern.training.policies import Preferences, dpo_loss, grpo_loss, token_log_probabilities

__all__ = ["Preferences", "dpo_loss", "grpo_loss", "token_log_probabilities"]
