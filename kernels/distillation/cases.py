"""Pairs of student and teacher, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.distillation.options import Divergence
from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """hidden[tokens, width], weight[width, vocabulary]; the teacher's have `of_teacher` for `width`."""

    name: str
    tokens: int
    width: int
    of_teacher: int
    vocabulary: int
    divergence: Divergence = "forward_kl"
    temperature: float = 1.0
    softcap: float | None = None
    teacher_softcap: float | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `distillation`, and of its reference."""
        names = "divergence", "temperature", "softcap", "teacher_softcap"
        return {name: getattr(self, name) for name in names}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
        """Random hidden and weight of student and teacher, whose logits are standard normal."""
        sizes = (self.tokens, self.width), (self.width, self.vocabulary), (self.tokens, self.of_teacher)
        shapes = *sizes, (self.of_teacher, self.vocabulary)
        keys = jax.random.split(key, 4)
        hidden, weight, teacher, of_teacher = (
            jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)
        )
        return hidden, weight / self.width**0.5, teacher, of_teacher / self.of_teacher**0.5

    def small(self) -> Case:
        """A smaller case for fast tests: sizes below 96 with their remainders modulo 32."""
        sizes = {name: shrunk(getattr(self, name)) for name in ("tokens", "width", "of_teacher", "vocabulary")}
        return replace(self, name=f"{self.name}_small", **sizes)


CASES = (
    # https://huggingface.co/meta-llama/Llama-3.2-1B from https://huggingface.co/meta-llama/Llama-3.1-8B
    Case("llama3_1b_of_8b", 4096, 2048, 4096, 128256),
    # https://huggingface.co/google/gemma-2-2b, trained by distillation, from gemma-2-27b
    Case("gemma2_2b_of_27b", 4096, 2304, 4608, 256000, softcap=30.0, teacher_softcap=30.0),
    # https://huggingface.co/Qwen/Qwen2.5-0.5B from Qwen2.5-1.5B, on the student's own samples (GKD's defaults in TRL)
    Case("qwen2_half_of_3_halves", 2048, 896, 1536, 151936, "jensen_shannon", temperature=0.9),
    # DistilGPT2, https://huggingface.co/distilbert/distilgpt2: a vocabulary of odd size, a temperature of 2
    Case("distilgpt2", 1024, 768, 768, 50257, temperature=2.0),
    # MiniLLM, https://arxiv.org/abs/2306.08543, minimises the reverse divergence: GPT-2 from GPT-2 XL
    Case("minillm", 1000, 768, 1600, 50257, "reverse_kl"),
)
