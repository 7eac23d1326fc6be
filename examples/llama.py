"""Models of the Llama architecture: their numbers, and weights and tokens from a folder as Hugging Face's hub has it.

    model, weights = read(Path("Llama-3.2-1B"))

The folder has `config.json`, `tokenizer.json`, and the weights in one or several files `*.safetensors`. What the
forward pass of `examples/generate.py` does not compute, such as biases or a window, is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from examples.train import Block, Config, Weights

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True)
class Model:
    """The numbers of a model that its weights do not tell.

    Attributes:
      layers: blocks.
      kv_heads: heads of keys and values of a block.
      head_dim: elements of a head.
      epsilon: of the norms.
      frequencies: radians per position of each pair of elements of a head; None for powers of 10,000.
      stops: the tokens that end a text.
    """

    layers: int
    kv_heads: int
    head_dim: int
    epsilon: float = 1e-6
    frequencies: tuple[float, ...] | None = None
    stops: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Model:
        """The numbers of a model of `examples/train.py`.

        Raises:
          ValueError: it has experts.
        """
        if config.experts:
            raise ValueError(f"expected a model without experts; got experts={config.experts}")
        return cls(config.layers, config.kv_heads, config.head_dim)

    @property
    def turns(self) -> Mapping[str, Any]:
        """The keyword arguments of `rope`."""
        return {} if self.frequencies is None else {"frequencies": jnp.asarray(self.frequencies, jnp.float32)}


# --- a folder ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> tuple[Model, Weights]:
    """The model in a folder: its numbers, and its weights in the dtype of the files, with a tuple of blocks.

    Raises:
      ValueError: the folder has no such model, or its weights do not fit `config.json`.
      ImportError: the package safetensors is not installed.
    """
    config = _json(folder, "config.json")
    model = _model(config, _stops(folder, config))
    tensors = _tensors(folder)
    weights = _weights(config, model, tensors)
    if tensors:
        _refuse(folder, "the weights of a Llama model and no others", ", ".join(sorted(tensors)[:4]))
    return model, weights


def tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder: `encode(text).ids` are tokens, `decode(tokens)` is text.

    Raises:
      ValueError: the folder has none.
      ImportError: the package tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError("tokenizer.json needs the package tokenizers: pip install tokenizers") from error
    path = folder / "tokenizer.json"
    if not path.exists():
        _refuse(folder, "a file tokenizer.json", "none")
    return Tokenizer.from_file(str(path))


def _refuse(folder: Path | str, expected: str, got: str) -> NoReturn:
    raise ValueError(f"{folder} has no model that can be read: expected {expected}; got {got}")


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.exists():
        _refuse(folder, f"a file {name}", "none")
    return json.loads(path.read_text(encoding="utf-8"))


def _stops(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text, by `generation_config.json` if the folder has one, else by `config.json`."""
    has_own = (folder / "generation_config.json").exists()
    ends = (_json(folder, "generation_config.json") if has_own else config).get("eos_token_id")
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),)


def _model(config: Mapping[str, Any], stops: tuple[int, ...]) -> Model:
    """The numbers of `config.json`.

    Raises:
      ValueError: it describes another architecture, or one with parts that the forward pass does not have.
    """
    names = config.get("architectures") or ["no architecture"]
    if names[0] not in ARCHITECTURES:
        _refuse("config.json", f"one of {', '.join(ARCHITECTURES)}", str(names[0]))
    for name, plain in (
        ("attention_bias", False), ("mlp_bias", False), ("sliding_window", None), ("hidden_act", "silu"),
    ):  # fmt: skip
        if config.get(name, plain) != plain:
            _refuse("config.json", f"{name} = {plain}", f"{name} = {config[name]}")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    frequencies = tuple(map(float, _frequencies(config, head_dim)))
    return Model(config["num_hidden_layers"], kv_heads, head_dim, config.get("rms_norm_eps", 1e-6), frequencies, stops)


def _frequencies(config: Mapping[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """float64[head_dim / 2]: radians per position, scaled for long texts if the model is.

    Llama 3.1 divides the frequencies of waves longer than the texts of the first training by `factor`, keeps those of
    short waves, and takes a mean of both between them: `rope_scaling` of type "llama3" in Hugging Face's documentation.
    """
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    base = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    frequencies = float(base) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind != "llama3":
        _refuse("config.json", "a rope_type of default, linear or llama3", str(kind))
    waves = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in a text of that length
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    own = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return frequencies * (own + (1 - own) / scaling["factor"])


# --- weights ----------------------------------------------------------------------------------------------------------


def _tensors(folder: Path) -> dict[str, jax.Array]:
    """All arrays of the files `*.safetensors`, by name."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError("*.safetensors need the package safetensors: pip install safetensors") from error
    tensors = dict[str, jax.Array]()
    for path in _files(folder):
        with safe_open(path, framework="flax") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no dict
    return tensors


def _files(folder: Path) -> Sequence[Path]:
    """The files of weights, by the index if the folder has one.

    Raises:
      ValueError: there are none, or one of the index is missing.
    """
    if not (folder / "model.safetensors.index.json").exists():
        return sorted(folder.glob("*.safetensors")) or _refuse(folder, "files *.safetensors", "none")
    names = sorted(set(_json(folder, "model.safetensors.index.json")["weight_map"].values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        _refuse(folder, "the files of model.safetensors.index.json", f"no {', '.join(missing)}")
    return [folder / name for name in names]


def _weights(config: Mapping[str, Any], model: Model, tensors: dict[str, jax.Array]) -> Weights:
    """The weights, which are taken out of `tensors`: matrices there are [outputs, inputs], and here [inputs, outputs].

    Raises:
      ValueError: one is missing, or has another shape.
    """
    vocabulary, width, hidden = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    columns, kv_columns = config["num_attention_heads"] * model.head_dim, model.kv_heads * model.head_dim

    def take(name: str, *shape: int) -> jax.Array:
        array = tensors.pop(f"{name}.weight", None)
        if array is None or array.shape != shape:
            got = "none" if array is None else f"{list(array.shape)}"
            _refuse("the folder", f"{name}.weight of shape {list(shape)}", got)
        return array

    def matrix(name: str, inputs: int, outputs: int) -> jax.Array:
        return take(name, outputs, inputs).T

    def blocks() -> Iterator[Block]:
        for number in range(model.layers):
            at = f"model.layers.{number}"
            tensors.pop(f"{at}.self_attn.rotary_emb.inv_freq", None)  # old files keep the frequencies, too
            yield Block(
                attention_norm=take(f"{at}.input_layernorm", width),
                query=matrix(f"{at}.self_attn.q_proj", width, columns),
                key=matrix(f"{at}.self_attn.k_proj", width, kv_columns),
                value=matrix(f"{at}.self_attn.v_proj", width, kv_columns),
                out=matrix(f"{at}.self_attn.o_proj", columns, width),
                hidden_norm=take(f"{at}.post_attention_layernorm", width),
                router=None,
                gate=matrix(f"{at}.mlp.gate_proj", width, hidden),
                up=matrix(f"{at}.mlp.up_proj", width, hidden),
                down=matrix(f"{at}.mlp.down_proj", hidden, width),
            )

    embedding, in_order = take("model.embed_tokens", vocabulary, width), tuple(blocks())
    if config.get("tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
        head = embedding.T
    else:
        head = matrix("lm_head", width, vocabulary)
    return Weights(embedding, in_order, take("model.norm", width), head)
