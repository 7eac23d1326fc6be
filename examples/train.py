"""Train a Llama-style transformer on the kernels of tilekern, on any mesh of devices.

    python examples/train.py --mesh data=4,model=2 --devices 8

The batch is divided over the axis `data`, and so are the weights where they lie (fully sharded data parallelism); heads
and hidden units are divided over the axis `model` (tensor parallelism). The mesh is all that says so: the code of the
model has no collectives, for XLA and the kernels' sharding rules place them. The same model on one device, and on plain
`jnp`, shows whether the losses are right. Run it with `make train`.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from tilekern.kernels import cross_entropy, matmul, rms_norm, rope, swiglu
from tilekern.kernels.flash_attention import flash_attention

BYTES = 256
Array = jax.Array


@dataclass(frozen=True)
class Config:
    """The model, its text and its training."""

    layers: int = 2
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 512
    length: int = 256
    batch: int = 8
    steps: int = 60
    rate: float = 3e-3
    seed: int = 0

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.width // self.heads


# --- the functions of the model ---------------------------------------------------------------------------------------


class Functions(NamedTuple):
    """What a model is made of: kernels, or plain JAX."""

    dense: Callable[[Array, Array], Array]  # x[rows, inner], w[inner, columns]
    norm: Callable[[Array, Array], Array]
    rotate: Callable[[Array], Array]
    attend: Callable[[Array, Array, Array], Array]
    gate: Callable[[Array, Array], Array]
    losses: Callable[[Array, Array, Array], Array]  # hidden[rows, width], head[width, BYTES], labels[rows]


KERNELS = Functions(
    matmul.matmul,
    rms_norm.rms_norm,
    rope.rope,
    partial(flash_attention, causal=True),
    swiglu.swiglu,
    cross_entropy.cross_entropy,
)
PLAIN = Functions(
    jnp.matmul,
    rms_norm.reference,
    rope.reference,
    partial(jax.nn.dot_product_attention, is_causal=True),
    swiglu.reference,
    lambda hidden, head, labels: cross_entropy.reference(hidden, head, labels)[0],
)


# --- the model --------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """The weights of one block; the model stacks those of its blocks along a leading dim."""

    attention_norm: Any  # [width]
    query: Any  # [width, heads · head_dim]
    key: Any  # [width, kv_heads · head_dim]
    value: Any
    out: Any  # [heads · head_dim, width]
    hidden_norm: Any  # [width]
    gate: Any  # [width, hidden]
    up: Any
    down: Any  # [hidden, width]


class Weights(NamedTuple):
    """All weights of the model."""

    embedding: Any  # [BYTES, width]
    blocks: Block
    norm: Any  # [width]
    head: Any  # [width, BYTES]


# How a mesh divides the weights: over `model` the heads and hidden units, which some matrices make (columns) and others
# use up (rows); over `data` the other dim, which XLA gathers for each product.
_MADE, _USED = P(None, "data", "model"), P(None, "model", "data")
SHARDINGS = Weights(
    embedding=P(None, "data"),
    blocks=Block(P(), _MADE, _MADE, _MADE, _USED, P(), _MADE, _MADE, _USED),
    norm=P(),
    head=P("data", None),
)


def init(config: Config) -> Weights:
    """Normal weights, scaled by the square root of the number of inputs of each output; norms of ones. On the host."""
    keys = iter(jax.random.split(jax.random.key(config.seed), 9))
    n, d, f, h = config.layers, config.width, config.hidden, config.head_dim

    def normal(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    blocks = Block(
        attention_norm=jnp.ones((n, d)),
        query=normal(n, d, config.heads * h),
        key=normal(n, d, config.kv_heads * h),
        value=normal(n, d, config.kv_heads * h),
        out=normal(n, config.heads * h, d),
        hidden_norm=jnp.ones((n, d)),
        gate=normal(n, d, f),
        up=normal(n, d, f),
        down=normal(n, f, d),
    )
    return jax.device_get(Weights(normal(BYTES, d) * math.sqrt(BYTES), blocks, jnp.ones(d), normal(d, BYTES)))


def block(config: Config, use: Functions, x: Array, w: Block) -> Array:
    """One pre-norm block on x[batch, time, width]."""
    batch, length, width = x.shape

    def dense(x: Array, matrix: Array) -> Array:
        return use.dense(x.reshape(batch * length, -1), matrix)

    def heads(x: Array) -> Array:
        return x.reshape(batch, length, -1, config.head_dim)

    normed = use.norm(x, w.attention_norm)
    query, key, value = (heads(dense(normed, matrix)) for matrix in (w.query, w.key, w.value))
    seen = use.attend(use.rotate(query), use.rotate(key), value)
    x += dense(seen, w.out).reshape(batch, length, width)
    normed = use.norm(x, w.hidden_norm)
    return x + dense(use.gate(dense(normed, w.gate), dense(normed, w.up)), w.down).reshape(batch, length, width)


def loss(config: Config, use: Functions, weights: Weights, tokens: Array) -> Array:
    """The mean loss, in nats a byte, of predicting each of tokens[batch, time + 1] but the first."""
    x = weights.embedding[tokens[:, :-1]]

    @jax.checkpoint
    def one(x: Array, w: Block) -> tuple[Array, None]:
        return block(config, use, x, w), None

    x, _ = jax.lax.scan(one, x, weights.blocks)
    hidden = use.norm(x, weights.norm).reshape(-1, config.width)
    return use.losses(hidden, weights.head, tokens[:, 1:].reshape(-1)).mean()


# --- training ---------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """The weights, and what the optimizer keeps of their gradients."""

    weights: Weights
    optimizer: Any


def optimizer(config: Config) -> Any:
    """AdamW with a warm-up, and gradients of bounded norm."""
    rates = optax.warmup_cosine_decay_schedule(0.0, config.rate, max(1, config.steps // 10), config.steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, weight_decay=0.1))


def mesh_of(text: str) -> Mesh:
    """The mesh that a text names, as "data=4,model=2"; axes that it leaves out have one device.

    Raises:
      ValueError: the text names other axes, or more devices than there are.
    """
    sizes = {"data": 1, "model": 1}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdigit() or not int(size):
            raise ValueError(f"--mesh expects data=N,model=N, got {part!r} in {text!r}")
        sizes[name] = int(size)
    count = math.prod(sizes.values())
    if count > jax.device_count():
        raise ValueError(
            f"--mesh {text} needs {count} devices, and there are {jax.device_count()}: add --devices {count}"
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=jax.devices()[:count])


def start(config: Config, mesh: Mesh, weights: Weights) -> State:
    """The first state, divided over a mesh."""
    shardings = jax.tree.map(partial(NamedSharding, mesh), SHARDINGS, is_leaf=lambda x: isinstance(x, P))
    divided = jax.device_put(weights, shardings)
    everywhere = NamedSharding(mesh, P())
    kept = optimizer(config).init(divided)
    return State(divided, jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, everywhere), kept))


def step(config: Config, use: Functions, state: State, tokens: Array) -> tuple[State, Array]:
    """One step of training, and the loss before it."""
    found, gradients = jax.value_and_grad(partial(loss, config, use))(state.weights, tokens)
    updates, kept = optimizer(config).update(gradients, state.optimizer, state.weights)
    return State(optax.apply_updates(state.weights, updates), kept), found


def batches(config: Config) -> np.ndarray[Any, Any]:
    """Random parts of the standard library's source: tokens[steps, batch, time + 1]."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("[a-d]*.py"))), np.uint8)
    random, width = np.random.default_rng(config.seed), config.length + 1
    starts = random.integers(0, len(data) - width, (config.steps, config.batch, 1))
    return data[starts + np.arange(width)].astype(np.int32)


def train(
    config: Config,
    mesh: Mesh,
    use: Functions,
    weights: Weights,
    folder: Path | None = None,
    name: str = "",
    every: int = 50,
) -> np.ndarray[Any, Any]:
    """Train from weights, or from the newest checkpoint in a folder; the loss of each step.

    Args:
      config: of the model and the training.
      mesh: the devices.
      use: the functions of the model.
      weights: the first ones.
      folder: for checkpoints, None for none.
      name: of the progress bar.
      every: how many steps lie between two checkpoints.
    """
    state, losses = start(config, mesh, weights), np.zeros(0, np.float32)
    if folder is not None and (folder / "state.npz").exists():
        state, losses = restore(folder, state)
    run = jax.jit(partial(step, config, use), donate_argnums=0)
    rows = NamedSharding(mesh, P("data"))
    with tqdm(total=config.steps, initial=len(losses), desc=name, disable=not name) as bar:
        for number, tokens in enumerate(batches(config)[len(losses) :], len(losses) + 1):
            state, found = run(state, jax.device_put(tokens, rows))
            losses = np.append(losses, np.float32(found))
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
            bar.update()
            if folder is not None and (number % every == 0 or number == config.steps):
                save(folder, state, losses)
    return losses


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save(folder: Path, state: State, losses: np.ndarray[Any, Any]) -> None:
    """Write a checkpoint: all of it or nothing. A state that is divided among processes needs orbax."""
    folder.mkdir(parents=True, exist_ok=True)
    leaves = {f"{n}": np.asarray(x) for n, x in enumerate(jax.tree.leaves(state))}
    part = folder / "state.part.npz"
    np.savez(part, losses=losses, **leaves)
    os.replace(part, folder / "state.npz")


def restore(folder: Path, like: State) -> tuple[State, np.ndarray[Any, Any]]:
    """The checkpoint in a folder, divided as a state is.

    Raises:
      ValueError: it is of another model.
    """
    with np.load(folder / "state.npz") as file:
        leaves, tree = jax.tree.flatten(like)
        shapes = [file[f"{n}"].shape if f"{n}" in file else None for n in range(len(leaves))]
        if shapes != [x.shape for x in leaves]:
            raise ValueError(
                f"{folder}/state.npz is of another model: train with its arguments, or into another folder"
            )
        kept = [jax.device_put(file[f"{n}"], x.sharding) for n, x in enumerate(leaves)]
        return jax.tree.unflatten(tree, kept), file["losses"]


# --- the comparison ---------------------------------------------------------------------------------------------------


def rounded(weights: Weights) -> Weights:
    """The weights with a random rounding error: one epsilon, up or down."""
    leaves, tree = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    errors = (jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True))
    moved = [np.asarray(x * (1 + jnp.finfo(x.dtype).eps * e)) for x, e in zip(leaves, errors, strict=True)]
    return jax.tree.unflatten(tree, moved)


@dataclass(frozen=True)
class Learned:
    """The losses of each step: on the mesh, on one device, in plain JAX, and in plain JAX from rounded weights."""

    losses: Mapping[str, np.ndarray[Any, Any]]

    def difference(self, name: str) -> float:
        """The largest difference of the losses from those in plain JAX."""
        return float(np.max(np.abs(self.losses[name] - self.losses["jnp"])))

    def same(self, name: str) -> bool:
        """True if rounding errors explain the difference from plain JAX.

        The bound is three times the effect of one rounding of the first weights, plus one rounding of the loss.
        """
        return self.difference(name) <= 3 * self.difference("jnp, rounded") + float(
            np.spacing(self.losses["jnp"].max())
        )


def compare(config: Config, mesh: Mesh, progress: bool = False) -> Learned:
    """Train the same weights on the same batches on the mesh, on one device, and in plain JAX."""
    one = Mesh(mesh.devices.reshape(-1)[:1].reshape(1, 1), mesh.axis_names, axis_types=mesh.axis_types)
    weights = init(config)
    runs: dict[str, tuple[Mesh, Functions, Weights]] = {
        "the mesh": (mesh, KERNELS, weights),
        "one device": (one, KERNELS, weights),
        "jnp": (one, PLAIN, weights),
        "jnp, rounded": (one, PLAIN, rounded(weights)),
    }
    losses = {name: train(config, m, use, w, name=name if progress else "") for name, (m, use, w) in runs.items()}
    return Learned(losses)


def draw(losses: Mapping[str, np.ndarray[Any, Any]], path: Path) -> None:
    """Write a PNG of the losses.

    Raises:
      ImportError: matplotlib is not installed (the extra `demo` has it).
    """
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 4), layout="constrained")
    panel = figure.subplots()
    for name, values in losses.items():
        panel.plot(values, label=name)
    panel.set_xlabel("step")
    panel.set_ylabel("loss, nats a byte")
    panel.legend(frameon=False)
    panel.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    """The arguments: the fields of Config, and where and how to train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Config()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, metavar=default)
    parser.add_argument("--mesh", default="", metavar="data=4,model=2", help="devices of each axis; 1 if left out")
    parser.add_argument("--devices", type=int, default=0, metavar="8", help="virtual devices of a CPU")
    parser.add_argument("--compare", action="store_true", help="train on one device and in plain JAX, too, and compare")
    parser.add_argument("--folder", type=Path, default=Path("build/train"), help="for the checkpoint and the plot")
    return parser.parse_args()


def main() -> None:
    """Train, from a checkpoint if there is one; or compare."""
    given = vars(arguments())
    mesh, devices, folder, wants_all = (given.pop(name) for name in ("mesh", "devices", "folder", "compare"))
    if devices:
        jax.config.update("jax_num_cpu_devices", devices)
    config, begin = Config(**given), time.perf_counter()
    devices = mesh_of(mesh)
    if wants_all:
        learned = compare(config, devices, progress=True)
        losses = learned.losses
        for name in ("the mesh", "one device"):
            verdict = (
                "no more than rounding errors explain" if learned.same(name) else "MORE THAN ROUNDING ERRORS EXPLAIN"
            )
            print(f"{name}: the losses differ from plain JAX by {learned.difference(name):.2g}, {verdict}")
        print(f"plain JAX from rounded weights: {learned.difference('jnp, rounded'):.2g}")
    else:
        losses = {"loss": train(config, devices, KERNELS, init(config), folder, "training")}
    last = next(iter(losses.values()))[-1]
    print(f"last loss {last:.4f} nats a byte, {time.perf_counter() - begin:.0f} s, mesh {dict(devices.shape)}")
    try:
        draw(losses, folder / "losses.png")
        print(f"plot: {folder / 'losses.png'}")
    except ImportError as error:
        print(f"no plot: {error}")


if __name__ == "__main__":
    main()
