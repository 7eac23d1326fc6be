"""The gated delta rule of linear attention: `gated_delta_rule(query, key, value, beta, log_decay)`."""

from tilekern.kernels.gated_delta_rule.api import gated_delta_rule
from tilekern.kernels.gated_delta_rule.channels import delta_rule_by_channel
from tilekern.kernels.gated_delta_rule.kernel import gated_delta_rule_forward
from tilekern.kernels.gated_delta_rule.reference import reference

__all__ = ["delta_rule_by_channel", "gated_delta_rule", "gated_delta_rule_forward", "reference"]
