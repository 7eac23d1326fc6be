"""Group norms of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """x[batch, side, side, channels], weight[channels] and bias[channels]."""

    name: str
    batch: int
    side: int
    channels: int
    num_groups: int = 32
    eps: float = 1e-5
    activation: str | None = "silu"

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `group_norm`, and of its reference."""
        return {"num_groups": self.num_groups, "eps": self.eps, "activation": self.activation}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random x, standard normal around 1; a weight around 1, and a bias around 0."""
        for_x, for_weight, for_bias = jax.random.split(key, 3)
        x = 1 + jax.random.normal(for_x, (self.batch, self.side, self.side, self.channels), dtype)
        weight = 1 + 0.1 * jax.random.normal(for_weight, (self.channels,), dtype)
        return x, weight, 0.1 * jax.random.normal(for_bias, (self.channels,), dtype)

    def small(self) -> Case:
        """A smaller case for fast tests: at most three groups, of fewer channels, and few pixels."""
        size = shrunk(self.channels // self.num_groups)
        groups = min(3, self.num_groups)
        return replace(
            self,
            name=f"{self.name}_small",
            batch=min(2, self.batch),
            side=min(self.side, 5),
            channels=groups * size,
            num_groups=groups,
        )


CASES = (
    # https://huggingface.co/stable-diffusion-v1-5/stable-diffusion-v1-5: unet/config.json, block_out_channels and
    # norm_num_groups, for a latent of 64², two samples for guidance
    Case("stable_diffusion_64", 2, 64, 320),
    Case("stable_diffusion_32", 2, 32, 640),
    Case("stable_diffusion_8", 2, 8, 1280),
    # its transformer blocks begin with a norm without activation
    Case("stable_diffusion_attention", 2, 16, 1280, eps=1e-6, activation=None),
    # Big Transfer (Kolesnikov et al. 2020, https://arxiv.org/abs/1912.11370): ResNet-50 with 32 groups
    Case("resnet50_gn_56", 8, 56, 64, activation=None),
    Case("resnet50_gn_7", 8, 7, 2048, activation=None),
    # https://huggingface.co/facebook/wav2vec2-base: feat_extract_norm "group", a group for each channel; here in 2d
    Case("instance_norm", 4, 32, 64, num_groups=64, activation=None),
    Case("one_group", 4, 14, 384, num_groups=1, activation=None),  # https://arxiv.org/abs/2111.11418, PoolFormer
)

# Too large for a program of one sample: moments and results are kernels of their own.
LARGE = (
    # https://huggingface.co/stabilityai/sd-vae-ft-mse: the decoder at 512², block_out_channels
    Case("vae_decoder_512", 1, 512, 128, eps=1e-6),
    Case("sdxl_128", 2, 128, 320),  # https://huggingface.co/stabilityai/stable-diffusion-xl-base-1.0
)
