"""`examples/llama.py`: a small random Llama in Hugging Face's format, beside a forward pass in NumPy from its names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from examples.generate import Rows, Server, Settings, forward, plain
from examples.llama import read, tokenizer
from tilekern import testing

LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": False, "vocab_size": 97,
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "eos_token_id": 2,
}  # fmt: skip
PROMPTS = [[1, 5, 9], [*range(3, 40)], [7]]
SETTINGS = Settings(new=10, slots=2, page=8, pages=24, chunk=16)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight by its name, as Hugging Face's Llama has them."""
    v, d, f, h = (config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"))
    q, kv = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    block = {
        "input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    }  # fmt: skip
    layers = range(config["num_hidden_layers"])
    blocks = {f"model.layers.{n}.{name}.weight": shape for n in layers for name, shape in block.items()}
    own_head = {} if config.get("tie_word_embeddings") else {"lm_head.weight": (v, d)}
    return {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), **blocks, **own_head}


def saved(folder: Path, config: dict[str, Any], dtype: Any = jnp.float32, files: int = 1) -> dict[str, jax.Array]:
    """Random weights, written to a folder in so many files, with `config.json` and `tokenizer.json`."""
    random = np.random.default_rng(0)
    tensors = {
        name: jnp.asarray(
            1 + 0.1 * random.normal(size=shape) if len(shape) == 1 else random.normal(size=shape) * 0.2, dtype
        )
        for name, shape in shapes(config).items()
    }
    names = [[*tensors][n::files] for n in range(files)]
    titles = [f"model-{n:05}-of-{files:05}.safetensors" for n in range(files)] if files > 1 else ["model.safetensors"]
    for title, part in zip(titles, names, strict=True):
        save_file({name: tensors[name] for name in part}, str(folder / title))
    if files > 1:
        places = {name: title for title, part in zip(titles, names, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(config["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return tensors


def logits_of(config: dict[str, Any], tensors: dict[str, Any], tokens: list[int], xp: Any, dtype: Any) -> Any:
    """[T, vocabulary] by the definition of the architecture, from the names of the files.

    Args:
      config: `config.json`.
      tensors: the weights.
      tokens: T of them.
      xp: NumPy or `jax.numpy`.
      dtype: to compute in.
    """
    weights = {name: xp.asarray(x, dtype) for name, x in tensors.items()}
    width, group = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]

    def norm(x: Any, name: str) -> Any:
        return x / xp.sqrt(xp.mean(x * x, -1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def heads(x: Any, name: str) -> Any:
        return (x @ weights[f"{name}.weight"].T).reshape(len(tokens), -1, width).swapaxes(0, 1)

    def turned(x: Any) -> Any:
        angles = np.arange(len(tokens))[:, None] * frequencies(config)
        cos, sin = (xp.asarray(np.tile(f(angles), 2), dtype) for f in (np.cos, np.sin))
        return x * cos + xp.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin

    x: Any = weights["model.embed_tokens.weight"][np.array(tokens)]
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        normed = norm(x, f"{at}.input_layernorm")
        query, key, value = (heads(normed, f"{at}.self_attn.{n}_proj") for n in "qkv")
        query, key, value = turned(query), xp.repeat(turned(key), group, 0), xp.repeat(value, group, 0)
        scores = xp.where(np.tri(len(tokens), dtype=bool), query @ key.swapaxes(1, 2) / math.sqrt(width), -np.inf)
        shares = xp.exp(scores - scores.max(-1, keepdims=True))
        attended = (shares / shares.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(len(tokens), -1)
        x = x + attended @ weights[f"{at}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (normed @ weights[f"{at}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + xp.exp(-gate)) * up) @ weights[f"{at}.mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


def frequencies(config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The frequencies, case by case as the documentation of `rope_scaling` has them."""
    scaling, result = config.get("rope_scaling") or config.get("rope_parameters") or {}, list[float]()
    for n in range(0, config["head_dim"], 2):
        frequency = scaling.get("rope_theta", config.get("rope_theta")) ** -(n / config["head_dim"])
        if scaling.get("rope_type") == "linear":
            frequency /= scaling["factor"]
        if scaling.get("rope_type") == "llama3":
            length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            wave = 2 * math.pi / frequency
            smooth = (length / wave - low) / (high - low)
            between = (1 - smooth) * frequency / factor + smooth * frequency
            frequency = frequency if wave < length / high else frequency / factor if wave > length / low else between
        result.append(frequency)
    return np.array(result)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("changes", "files"),
    [
        ({}, 1),
        ({"tie_word_embeddings": True}, 3),
        ({"rope_scaling": LLAMA_3}, 1),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0}}, 2),
    ],
    ids=["plain", "tied", "llama3", "linear"],
)
def test_logits_are_those_of_the_architecture(tmp_path: Path, changes: Any, files: int, dtype: Any) -> None:
    config, tokens = {**CONFIG, **changes}, PROMPTS[1]
    tensors = saved(tmp_path, config, dtype, files)
    model, weights = read(tmp_path)
    pools = tuple(jnp.zeros((8, 8, 4, 16), dtype) for _ in range(2))
    count = np.array([len(tokens)], np.int32)
    rows = Rows(np.array(tokens), np.arange(len(tokens)), count, np.arange(8)[None], np.array([0, *count]))
    logits = forward(model, 2, weights, pools, jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), rows))[1]
    exact = logits_of(config, tensors, tokens, np, np.float64)
    testing.assert_close(logits, exact, logits_of(config, tensors, tokens, jnp, dtype), length=80)


@pytest.mark.parametrize("drafts", [0, 2])
def test_greedy_tokens_are_those_of_a_plain_loop(tmp_path: Path, drafts: int) -> None:
    saved(tmp_path, {**CONFIG, "rope_scaling": LLAMA_3})
    model, weights = read(tmp_path)
    settings = Settings(**{**vars(SETTINGS), "drafts": drafts})
    assert Server(model, weights, settings).run(PROMPTS).tokens == plain(model, weights, PROMPTS, 10).tokens


def test_texts_end_with_their_last_token(tmp_path: Path) -> None:
    saved(tmp_path, CONFIG)
    model, weights = read(tmp_path)
    assert model.stops == (2,)
    whole = plain(model, weights, PROMPTS, 10).tokens
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [whole[0][4], 2]}))
    stopping, _ = read(tmp_path)
    tokens = Server(stopping, weights, SETTINGS).run(PROMPTS).tokens
    assert tokens == plain(stopping, weights, PROMPTS, 10).tokens
    first = whole[0].index(whole[0][4]) + 1
    assert tokens[0] == whole[0][:first]


def test_a_tokenizer_of_the_folder(tmp_path: Path) -> None:
    saved(tmp_path, CONFIG)
    codec = tokenizer(tmp_path)
    assert codec.encode("w5 w17").ids == [5, 17]
    assert codec.decode([5, 17]) == "w5 w17"
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"expected a file tokenizer.json; got none"):
        tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "one of LlamaForCausalLM, MistralForCausalLM; got MambaForCausalLM"),
        ({"attention_bias": True}, "attention_bias = False; got attention_bias = True"),
        ({"sliding_window": 4096}, "sliding_window = None; got sliding_window = 4096"),
        ({"hidden_act": "gelu"}, "hidden_act = silu; got hidden_act = gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "default, linear or llama3; got yarn"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight of shape [48]; got none"),
        ({"num_hidden_layers": 1}, "no others; got model.layers.1."),
        ({"intermediate_size": 96}, "mlp.gate_proj.weight of shape [96, 48]; got [80, 48]"),
    ],
)
def test_models_that_do_not_fit(tmp_path: Path, changes: Any, message: str) -> None:
    saved(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path)


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a file config.json; got none"):
        read(tmp_path)
    saved(tmp_path, CONFIG, files=2)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"files of model.safetensors.index.json; got no model-00001-of-00002"):
        read(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-00000-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected files \*.safetensors; got none"):
        read(tmp_path)
