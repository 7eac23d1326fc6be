"""Train a Llama-style transformer on the kernels of tilekern, on any mesh of devices.

    python examples/train.py --mesh data=2,model=2,sequence=2 --devices 8

The batch is divided over the axis `data`, and so are the weights where they lie (fully sharded data parallelism); heads
and hidden units, or experts, over the axis `model` (tensor and expert parallelism); and the time over `sequence`. The
mesh is all that says so: XLA and the kernels' sharding rules place the collectives, except in `ring_attention` and
`moe`. The same model on one device, and on plain `jnp`, shows whether the losses are right. Run it with `make train`.
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

from tilekern.distributed import moe, ring_attention, to_zigzag, ulysses_attention
from tilekern.kernels import cross_entropy, matmul, rms_norm, rope, swiglu
from tilekern.kernels.cross_entropy import reference as cross_entropy_reference
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.rms_norm import reference as rms_norm_reference
from tilekern.kernels.rope import reference as rope_reference
from tilekern.kernels.swiglu import reference as swiglu_reference

BYTES = 256
ROWS = ("data", "sequence")  # the axes that divide the rows of activations
Array = jax.Array


@dataclass(frozen=True)
class Config:
    """The model, its text and its training."""

    layers: int = 2
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 512
    experts: int = 0
    experts_per_token: int = 2
    attention: str = "ring"
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
    """The functions that a model is made of: kernels, or plain JAX. Rows belong to all sequences, in any order."""

    divide: Callable[[Array], Array]  # x[rows, width] itself, divided among devices along rows
    dense: Callable[[Array, Array], Array]  # x[rows, inner], w[inner, columns]
    norm: Callable[[Array, Array], Array]
    attend: Callable[[Array, Array, Array, Array], Array]  # query, key, value[rows, heads · head_dim], positions[rows]
    gate: Callable[[Array, Array], Array]
    mix: Callable[..., Array]  # x[rows, width], logits[rows, experts], and gate, up, down of each expert
    losses: Callable[[Array, Array, Array], Array]  # hidden[rows, width], head[width, BYTES], labels[rows]


def kernels(config: Config, mesh: Mesh) -> Functions:
    """Kernels, which a mesh divides by their rules; attention along the sequence, and experts, by `jax.shard_map`."""
    parts = mesh.shape["sequence"]
    local = {
        "ring": partial(ring_attention, axis_name="sequence", causal=True, layout="zigzag"),
        "ulysses": partial(ulysses_attention, axis_name="sequence", causal=True),
    }
    attend = local[config.attention] if parts > 1 else partial(flash_attention, causal=True)
    attend = of_rows(config, config.length // parts, rope, attend)
    if parts > 1:
        by_head = P(ROWS, "model")
        attend = jax.shard_map(attend, mesh=mesh, in_specs=(by_head, by_head, by_head, P(ROWS)), out_specs=by_head)
    rows, experts = P((*ROWS, "model")), P("model")
    mix = partial(moe, experts_per_token=config.experts_per_token, axis_name="model")
    mix = jax.shard_map(mix, mesh=mesh, in_specs=(rows, rows, experts, experts, experts), out_specs=rows)
    divide = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P(ROWS)))
    return Functions(divide, matmul, rms_norm, attend, swiglu, mix, cross_entropy)


def plain(config: Config, mesh: Mesh) -> Functions:
    """Plain JAX, of all experts for all rows."""

    def mix(x: Array, logits: Array, gate: Array, up: Array, down: Array) -> Array:
        best, experts = jax.lax.top_k(logits, config.experts_per_token)
        weights = jnp.einsum("rk,rke->re", jax.nn.softmax(best), jax.nn.one_hot(experts, config.experts))
        hidden = swiglu_reference(jnp.einsum("rd,edf->erf", x, gate), jnp.einsum("rd,edf->erf", x, up))
        return jnp.einsum("re,erf,efd->rd", weights, hidden, down)

    attend = partial(jax.nn.dot_product_attention, is_causal=True)
    return Functions(
        lambda x: x,
        jnp.matmul,
        rms_norm_reference,
        of_rows(config, config.length, rope_reference, attend),
        swiglu_reference,
        mix,
        lambda hidden, head, labels: cross_entropy_reference(hidden, head, labels),
    )


def of_rows(config: Config, length: int, rotate: Callable[..., Array], attend: Callable[..., Array]) -> Any:
    """Attention of rows, from `rotate` and `attend` on x[batch, length, heads, head_dim]."""

    def run(query: Array, key: Array, value: Array, positions: Array) -> Array:
        heads = (x.reshape(-1, length, x.shape[1] // config.head_dim, config.head_dim) for x in (query, key, value))
        q, k, v = heads
        places = positions.reshape(-1, length)
        return attend(rotate(q, places), rotate(k, places), v).reshape(query.shape)

    return run


# --- the model --------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """The weights of one block; the model stacks the weights of its blocks along a leading dim."""

    attention_norm: Any  # [width]
    query: Any  # [width, heads · head_dim]
    key: Any  # [width, kv_heads · head_dim]
    value: Any
    out: Any  # [heads · head_dim, width]
    hidden_norm: Any  # [width]
    router: Any  # [width, experts], None without
    gate: Any  # [width, hidden], with a leading dim of experts
    up: Any
    down: Any  # [hidden, width]


class Weights(NamedTuple):
    """All weights of the model."""

    embedding: Any  # [BYTES, width]
    blocks: Block
    norm: Any  # [width]
    head: Any  # [width, BYTES]


def shardings(config: Config) -> Weights:
    """For each weight the axes of a mesh that divide its dims.

    `model` divides the heads and hidden units, which are columns of some matrices and rows of others, or the experts.
    `data` divides another dim, which XLA gathers for each product. The losses need the head whole.
    """
    columns, rows, experts = P(None, "data", "model"), P(None, "model", "data"), P(None, "model", "data")
    attention = P(), columns, columns, columns, rows
    inner = (P(), experts, experts, experts) if config.experts else (None, columns, columns, rows)
    return Weights(P(None, "model"), Block(*attention, P(), *inner), P(), P())


def init(config: Config) -> Weights:
    """Normal weights on the host, scaled by the square root of the number of inputs of each output; norms of ones."""
    keys = iter(jax.random.split(jax.random.key(config.seed), 10))
    n, d, f, h = config.layers, config.width, config.hidden, config.head_dim
    stack = (n, config.experts) if config.experts else (n,)

    def normal(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    blocks = Block(
        attention_norm=jnp.ones((n, d)),
        query=normal(n, d, config.heads * h),
        key=normal(n, d, config.kv_heads * h),
        value=normal(n, d, config.kv_heads * h),
        out=normal(n, config.heads * h, d),
        hidden_norm=jnp.ones((n, d)),
        router=normal(n, d, config.experts) if config.experts else None,
        gate=normal(*stack, d, f),
        up=normal(*stack, d, f),
        down=normal(*stack, f, d),
    )
    return jax.device_get(Weights(normal(BYTES, d) * math.sqrt(BYTES), blocks, jnp.ones(d), normal(d, BYTES)))


class Rows(NamedTuple):
    """Tokens of a batch as rows, int32[rows] each."""

    inputs: Any
    labels: Any
    positions: Any


def block(use: Functions, x: Array, positions: Array, w: Block) -> Array:
    """One pre-norm block on x[rows, width]."""
    normed = use.norm(x, w.attention_norm)
    query, key, value = (use.dense(normed, matrix) for matrix in (w.query, w.key, w.value))
    x += use.dense(use.attend(query, key, value, positions), w.out)
    normed = use.norm(x, w.hidden_norm)
    if w.router is not None:
        return x + use.mix(normed, jnp.matmul(normed, w.router), w.gate, w.up, w.down)
    return x + use.dense(use.gate(use.dense(normed, w.gate), use.dense(normed, w.up)), w.down)


def loss(use: Functions, weights: Weights, rows: Rows) -> Array:
    """The mean loss, in nats a byte, of predicting each label."""

    @jax.checkpoint
    def layer(x: Array, w: Block) -> tuple[Array, None]:
        return use.divide(block(use, x, rows.positions, w)), None

    x, _ = jax.lax.scan(layer, use.divide(weights.embedding[rows.inputs]), weights.blocks)
    return use.losses(use.norm(x, weights.norm), weights.head, rows.labels).mean()


# --- training ---------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """The weights, and the optimizer's state, such as running means of gradients."""

    weights: Weights
    optimizer: Any


def optimizer(config: Config) -> Any:
    """AdamW with a warm-up, and gradients of bounded norm."""
    rates = optax.warmup_cosine_decay_schedule(0.0, config.rate, max(1, config.steps // 10), config.steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, weight_decay=0.1))


def mesh_of(text: str) -> Mesh:
    """The mesh that a text names, as "data=4,model=2"; axes that it leaves out have one device.

    Raises:
      ValueError: the text names other axes, or more devices than JAX has.
    """
    sizes = {"data": 1, "model": 1, "sequence": 1}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdigit() or not int(size):
            raise ValueError(f"--mesh expects data=N,model=N,sequence=N, got {part!r} in {text!r}")
        sizes[name] = int(size)
    count = math.prod(sizes.values())
    if count > jax.device_count():
        raise ValueError(
            f"--mesh {text} needs {count} devices, and there are {jax.device_count()}: add --devices {count}"
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=jax.devices()[:count])


def placed(config: Config, mesh: Mesh, state: State) -> State:
    """The shardings of a state: the optimizer's arrays for a weight are divided as the weight is."""
    weights = jax.tree.map(partial(NamedSharding, mesh), shardings(config))
    whole = NamedSharding(mesh, P())
    of_optimizer = optax.tree_map_params(
        optimizer(config), lambda _, s: s, state.optimizer, weights, transform_non_params=lambda _: whole
    )
    return State(weights, of_optimizer)


def start(config: Config, mesh: Mesh, weights: Weights) -> State:
    """The first state, divided over a mesh."""
    state = State(weights, optimizer(config).init(weights))
    return jax.device_put(state, placed(config, mesh, state))


Make = Callable[[Config, Mesh], Functions]


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def step(config: Config, mesh: Mesh, make: Make, state: State, rows: Rows) -> tuple[State, Array]:
    """One step of training, and the loss before it."""
    mean_loss, gradients = jax.value_and_grad(partial(loss, make(config, mesh)))(state.weights, rows)
    updates, optimizer_state = optimizer(config).update(gradients, state.optimizer, state.weights)
    moved = State(optax.apply_updates(state.weights, updates), optimizer_state)
    return jax.lax.with_sharding_constraint(moved, placed(config, mesh, moved)), mean_loss


def as_rows(config: Config, mesh: Mesh, tokens: np.ndarray[Any, Any]) -> Rows:
    """The rows of tokens[batch, time + 1], device after device; for `ring_attention` time is in a zigzag.

    Raises:
      ValueError: the mesh does not divide the batch, or the time.
    """
    data, parts = (mesh.shape[axis] for axis in ROWS)
    ring = parts > 1 and config.attention == "ring"
    if config.batch % data or config.length % (2 * parts if ring else parts):
        raise ValueError(
            f"--batch {config.batch} must be a multiple of data={data}, and --length {config.length} of "
            f"{'two parts for each of ' * ring}sequence={parts}"
        )
    order = np.arange(config.length)
    order = np.asarray(to_zigzag(jnp.asarray(order), parts, 0)) if ring else order

    def rows(x: np.ndarray[Any, Any]) -> Array:
        parted = x[:, order].reshape(data, config.batch // data, parts, config.length // parts)
        return jax.device_put(parted.swapaxes(1, 2).reshape(-1), NamedSharding(mesh, P(ROWS)))

    positions = np.broadcast_to(np.arange(config.length, dtype=np.int32), (config.batch, config.length))
    return Rows(rows(tokens[:, :-1]), rows(tokens[:, 1:]), rows(positions))


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
    make: Make,
    weights: Weights,
    folder: Path | None = None,
    name: str = "",
    every: int = 50,
) -> np.ndarray[Any, Any]:
    """Train from weights, or from the checkpoint in a folder; float32[steps] of the loss before each step.

    Args:
      config: the sizes of the model and the training.
      mesh: the devices.
      make: makes the functions of the model: `kernels` or `plain`.
      weights: the first weights.
      folder: the folder of the checkpoint; None for no checkpoint.
      name: the name of the progress bar; "" for no bar.
      every: the number of steps between two checkpoints.
    """
    state, losses = start(config, mesh, weights), np.zeros(0, np.float32)
    if folder is not None and (folder / "state.npz").exists():
        state, losses = restore(folder, state)
    with tqdm(total=config.steps, initial=len(losses), desc=name, disable=not name) as bar:
        for number, tokens in enumerate(batches(config)[len(losses) :], len(losses) + 1):
            state, mean_loss = step(config, mesh, make, state, as_rows(config, mesh, tokens))
            losses = np.append(losses, np.float32(mean_loss))
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
    """The state and the losses of the checkpoint in a folder, divided as the state `like` is.

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
        arrays = [jax.device_put(file[f"{n}"], x.sharding) for n, x in enumerate(leaves)]
        return jax.tree.unflatten(tree, arrays), file["losses"]


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
        """The largest difference of the losses from the losses of plain JAX, in nats a byte."""
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
    single = Mesh(mesh.devices[:1, :1, :1], mesh.axis_names, axis_types=mesh.axis_types)
    weights = init(config)
    runs: dict[str, tuple[Mesh, Make, Weights]] = {
        "the mesh": (mesh, kernels, weights),
        "one device": (single, kernels, weights),
        "jnp": (single, plain, weights),
        "jnp, rounded": (single, plain, rounded(weights)),
    }
    losses = {name: train(config, m, make, w, name=name if progress else "") for name, (m, make, w) in runs.items()}
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
    """The arguments of the command line: the fields of Config, the mesh, the folder, and what to compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Config()).items():
        choices = ("ring", "ulysses") if name == "attention" else None
        parser.add_argument(f"--{name}", type=type(default), default=default, metavar=default, choices=choices)
    parser.add_argument(
        "--mesh", default="", metavar="data=2,model=2,sequence=2", help="devices of each axis; 1 if left out"
    )
    parser.add_argument("--devices", type=int, default=0, metavar="8", help="virtual devices of a CPU")
    parser.add_argument("--compare", action="store_true", help="train on one device and in plain JAX, too, and compare")
    parser.add_argument("--folder", type=Path, default=Path("build/train"), help="for the checkpoint and the plot")
    return parser.parse_args()


def main() -> None:
    """Train, from a checkpoint if the folder has one; or compare."""
    options = vars(arguments())
    mesh, devices, folder, wants_all = (options.pop(name) for name in ("mesh", "devices", "folder", "compare"))
    if devices:
        jax.config.update("jax_num_cpu_devices", devices)
    config, begin = Config(**options), time.perf_counter()
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
        losses = {"loss": train(config, devices, kernels, init(config), folder, "training")}
    last = next(iter(losses.values()))[-1]
    print(f"last loss {last:.4f} nats a byte, {time.perf_counter() - begin:.0f} s, mesh {dict(devices.shape)}")
    try:
        draw(losses, folder / "losses.png")
        print(f"plot: {folder / 'losses.png'}")
    except ImportError as error:
        print(f"no plot: {error}")


if __name__ == "__main__":
    main()
