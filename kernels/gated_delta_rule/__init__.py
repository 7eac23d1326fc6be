"""The gated delta rule of linear attention: `gated_delta_rule(query, key, value, beta, log_decay)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.gated_delta_rule.api import gated_delta_rule
from tilekern.kernels.gated_delta_rule.reference import reference

__all__ = ["gated_delta_rule", "reference"]

__getattr__ = moved(__name__, delta_rule_by_channel="channels", gated_delta_rule_forward="kernel")
