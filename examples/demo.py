"""The main job: a byte-level causal transformer, with the attention of tilekern, reads and learns Python's own source.

First a model with random weights reads 4096 bytes, as one program under `jax.jit`. Then a smaller model is trained,
each step one program. The same models on `jax.nn.dot_product_attention` show whether the results are right, and how
much time and memory attention takes. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.flash_attention.arguments import Config as AttentionConfig
from tilekern.kernels.flash_attention.arguments import Extras
from tilekern.kernels.flash_attention.kernel import flash_attention_forward

BYTES = 256
Array = jax.Array
Attention = Callable[[Array, Array, Array], Array]

ATTENTIONS: dict[str, Attention] = {
    "tilekern": partial(flash_attention, causal=True),
    "jax.nn": partial(jax.nn.dot_product_attention, is_causal=True),
}


@dataclass(frozen=True)
class Config:
    """The size of the model and of its text."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 4096  # bytes of text
    rounds: int = 3  # timed calls of each model
    seed: int = 0

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.width // self.heads


# --- the model ------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """The weights of one block; the model stacks the weights of its blocks along a leading dim."""

    qkv: Array  # [width, 3, heads, head_dim]
    out: Array  # [heads, head_dim, width]
    up: Array  # [width, 4 width]
    down: Array  # [4 width, width]


class Weights(NamedTuple):
    """All weights of the model."""

    embedding: Array  # [BYTES, width]
    blocks: Block


def init(config: Config) -> Weights:
    """Normal weights, scaled by the square root of the number of inputs of each output."""
    keys = iter(jax.random.split(jax.random.key(config.seed), 5))
    n, d, h, f = config.layers, config.width, config.heads, config.head_dim

    def normal(shape: tuple[int, ...], inputs: int) -> Array:
        return jax.random.normal(next(keys), shape) * inputs**-0.5

    blocks = Block(
        qkv=normal((n, d, 3, h, f), d),
        out=normal((n, h, f, d), d),
        up=normal((n, d, 4 * d), d),
        down=normal((n, 4 * d, d), 4 * d),
    )
    return Weights(normal((BYTES, d), d), blocks)


def rms_norm(x: Array) -> Array:
    """Rows of x scaled to a root mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x: Array) -> Array:
    """Rotary position embedding (arXiv:2104.09864) of x[batch, time, heads, head_dim], pairs half a head apart."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    x1, x2 = x[..., :half], x[..., half:]
    return jnp.concatenate([x1 * jnp.cos(angle) - x2 * jnp.sin(angle), x1 * jnp.sin(angle) + x2 * jnp.cos(angle)], -1)


def block(x: Array, weights: Block, attention: Attention) -> Array:
    """One pre-norm transformer block on x[batch, time, width]."""
    q, k, v = jnp.einsum("btd,dchf->cbthf", rms_norm(x), weights.qkv)
    x += jnp.einsum("bthf,hfd->btd", attention(rotate(q), rotate(k), v), weights.out)
    return x + jax.nn.gelu(rms_norm(x) @ weights.up) @ weights.down


def model(weights: Weights, tokens: Array, attention: Attention) -> tuple[Array, Array]:
    """The mean loss (nats a byte) of predicting each of tokens[batch, time + 1], and the logits[batch, time, BYTES]."""
    x = weights.embedding[tokens[:, :-1]]
    x, _ = jax.lax.scan(lambda x, layer: (block(x, layer, attention), None), x, weights.blocks)
    logits = rms_norm(x) @ weights.embedding.T
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -jnp.mean(log_likelihood), logits


# --- the comparison -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The results of one compiled model."""

    loss: float  # nats a byte
    logits: np.ndarray[Any, np.dtype[np.float32]]
    seconds: float  # median of one call
    temporary_bytes: int  # from XLA's memory analysis


@dataclass(frozen=True)
class Report:
    """The runs of the model, one for each attention, and the block IR of tilekern's kernel."""

    source: Path
    runs: dict[str, Run]
    ir: str

    @property
    def difference(self) -> float:
        """The largest difference of the logits."""
        return float(np.max(np.abs(self.runs["tilekern"].logits - self.runs["jax.nn"].logits)))


def text(length: int) -> tuple[Path, Array]:
    """A file of the standard library, and its first bytes as tokens[1, length]."""
    path = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    data = path.read_bytes()[:length]
    assert len(data) == length, f"{path} has only {len(data)} bytes"
    return path, jnp.asarray(np.frombuffer(data, np.uint8)[None], jnp.int32)


def run(config: Config) -> Report:
    """Compile and run the model once with each attention."""
    source, tokens = text(config.length + 1)
    weights = init(config)
    runs = {name: run_model(config, weights, tokens, attention) for name, attention in ATTENTIONS.items()}
    return Report(source, runs, block_ir(config))


def run_model(config: Config, weights: Weights, tokens: Array, attention: Attention) -> Run:
    """Compile the whole model as one XLA program, and time its calls."""
    compiled = jax.jit(partial(model, attention=attention)).lower(weights, tokens).compile()
    loss, logits = jax.block_until_ready(compiled(weights, tokens))  # untimed: the first call warms up
    seconds: list[float] = []
    for _ in range(config.rounds):
        time.sleep(0.1)
        start = time.perf_counter()
        jax.block_until_ready(compiled(weights, tokens))
        seconds.append(time.perf_counter() - start)
    memory = compiled.memory_analysis().temp_size_in_bytes
    return Run(float(loss), np.asarray(logits), statistics.median(seconds), memory)


def block_ir(config: Config) -> str:
    """The block IR of the attention that the model calls."""
    aval = jax.ShapeDtypeStruct((1, config.length, config.heads, config.head_dim), jnp.float32)
    statics = {"config": AttentionConfig(config.head_dim**-0.5, causal=True), "return_logsumexp": False}
    return str(flash_attention_forward.trace(aval, aval, aval, Extras(), **statics).ir)


# --- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """The training of a small model."""

    model: Config = Config(layers=2, width=128, heads=4, length=256)
    steps: int = 250
    batch: int = 4
    rate: float = 1e-3


class State(NamedTuple):
    """The weights, and the running means of Adam (arXiv:1412.6980) over their gradients."""

    weights: Weights
    mean: Weights
    square: Weights
    step: Array


def rounded(query: Array, key: Array, value: Array) -> Array:
    """The attention of jax.nn with a random rounding error in each input and output: one epsilon, up or down."""

    def moved(x: Array, seed: int) -> Array:
        return x * (1 + jnp.finfo(x.dtype).eps * jax.random.rademacher(jax.random.key(seed), x.shape, x.dtype))

    return moved(ATTENTIONS["jax.nn"](moved(query, 0), moved(key, 1), moved(value, 2)), 3)


# The third attention measures how far two correct runs may differ: training amplifies every rounding error.
TRAINED: dict[str, Attention] = {**ATTENTIONS, "jax.nn, rounded": rounded}


def train_step(state: State, tokens: Array, attention: Attention, rate: float) -> tuple[State, Array]:
    """One step of Adam on tokens[batch, time + 1], and the loss before it."""
    loss, gradients = jax.value_and_grad(lambda w: model(w, tokens, attention)[0])(state.weights)
    step = state.step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradients)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state.square, gradients)
    rate = rate * jnp.minimum(1, step / 20)  # a warm-up

    def moved(w: Array, m: Array, v: Array) -> Array:
        return w - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.99**step)) + 1e-8)

    return State(jax.tree.map(moved, state.weights, mean, square), mean, square, step), loss


def batches(training: Training) -> Array:
    """Random parts of the standard library's source: tokens[steps, batch, time + 1]."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("[a-d]*.py"))), np.uint8)
    random, width = np.random.default_rng(training.model.seed), training.model.length + 1
    starts = random.integers(0, len(data) - width, (training.steps, training.batch, 1))
    return jnp.asarray(data[starts + np.arange(width)], jnp.int32)


@dataclass(frozen=True)
class Learned:
    """The losses of each step, by attention, in nats a byte; and the seconds of a step."""

    losses: dict[str, np.ndarray[Any, np.dtype[np.float32]]]
    seconds: dict[str, float]

    def difference(self, name: str) -> float:
        """The largest difference of the losses from the losses of jax.nn, in nats a byte."""
        return float(np.max(np.abs(self.losses[name] - self.losses["jax.nn"])))

    @property
    def same(self) -> bool:
        """True if rounding errors explain the difference between tilekern and jax.nn, by the rule of tilekern.testing.

        The bound is three times the effect of the random rounding errors of `rounded`, plus one rounding of the loss.
        The learning rate must be one at which training is stable: at 3e-3 any difference grows tenfold in 25 steps.
        """
        resolution = float(np.spacing(np.max(self.losses["jax.nn"])))
        return self.difference("tilekern") <= 3 * self.difference("jax.nn, rounded") + resolution


def train(training: Training) -> Learned:
    """Train the same weights on the same batches once with each attention."""
    tokens = batches(training)
    losses: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for name, attention in TRAINED.items():
        weights = init(training.model)
        zeros = jax.tree.map(jnp.zeros_like, weights)
        state = State(weights, zeros, zeros, jnp.zeros((), jnp.int32))
        step = jax.jit(partial(train_step, attention=attention, rate=training.rate)).lower(state, tokens[0]).compile()
        start, step_losses = time.perf_counter(), []
        for batch in tokens:
            state, loss = step(state, batch)
            step_losses.append(loss)
        losses[name] = np.asarray(jax.block_until_ready(jnp.stack(step_losses)))
        seconds[name] = (time.perf_counter() - start) / training.steps
    return Learned(losses, seconds)


def draw(learned: Learned, path: Path) -> None:
    """Write a PNG of the losses and of their differences.

    Raises:
      ImportError: matplotlib is not installed (the extra `demo` has it).
    """
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for name, style, colour in (("jax.nn", "-", "#e0a458"), ("tilekern", "--", "#0b6e4f")):
        above.plot(learned.losses[name], style, label=name, color=colour)
    for name, colour in (("jax.nn, rounded", "#6c757d"), ("tilekern", "#0b6e4f")):
        below.semilogy(np.abs(learned.losses[name] - learned.losses["jax.nn"]), label=f"{name} - jax.nn", color=colour)
    above.set_ylabel("loss, nats a byte")
    below.set_ylabel("difference of losses")
    below.set_xlabel("step")
    for panel in (above, below):
        panel.legend(frameon=False)
        panel.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


# --- the printed text -----------------------------------------------------------------------------------------------

READ_ON = """\
The kernel is in kernels/flash_attention/kernel.py. The ops of the block IR are defined in tilekern/ir/.
Start with README.md; CONTRIBUTING.md is the map of the tree. `make bench` measures speed and memory with care."""


def render(config: Config, report: Report) -> str:
    """The report as text."""
    largest = float(np.max(np.abs(report.runs["jax.nn"].logits)))
    size = f"{config.layers} blocks, {config.heads} heads of {config.head_dim}"
    lines = [
        f"A transformer ({size}) reads {config.length} bytes of {report.source}",
        "",
        f"{'attention':<12}{'loss (nats a byte)':>20}{'time':>12}{'temporary memory':>20}",
    ]
    for name, r in report.runs.items():
        memory = f"{r.temporary_bytes / 1e6:.1f} MB"
        lines.append(f"{name:<12}{r.loss:>20.6f}{r.seconds * 1e3:>9.0f} ms{memory:>20}")
    lines += ["", f"largest difference of the logits: {report.difference:.2g} (largest logit: {largest:.2g})"]
    lines += ["", "The block IR of the attention kernel:", "", report.ir.rstrip(), ""]
    return "\n".join(lines)


def render_training(training: Training, learned: Learned) -> str:
    """The losses of the training, as text."""
    config = training.model
    size = f"{config.layers} blocks, {config.heads} heads of {config.head_dim}"
    lines = [
        f"A transformer ({size}) learns from {training.steps} batches of {training.batch} × {config.length} bytes",
        "",
        f"{'attention':<18}{'first loss':>14}{'last loss':>14}{'time of a step':>18}",
    ]
    for name, losses in learned.losses.items():
        step = f"{learned.seconds[name] * 1e3:.0f} ms"
        lines.append(f"{name:<18}{losses[0]:>14.6f}{losses[-1]:>14.6f}{step:>18}")
    ours, noise = learned.difference("tilekern"), learned.difference("jax.nn, rounded")
    verdict = "no more than rounding errors explain" if learned.same else "MORE THAN ROUNDING ERRORS EXPLAIN"
    lines += [
        "",
        f"largest difference of the losses: {ours:.2g}, {verdict} (jax.nn with random rounding errors: {noise:.2g})",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run and print. The arguments are the fields of Config, and the steps and the plot of the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Config()).items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar=default)
    parser.add_argument(
        "--steps", type=int, default=Training.steps, metavar=Training.steps, help="of training; 0: none"
    )
    parser.add_argument("--plot", type=Path, default=Path("build/demo.png"), metavar="build/demo.png")
    arguments = vars(parser.parse_args())
    steps, plot = arguments.pop("steps"), arguments.pop("plot")
    config, training = Config(**arguments), Training(steps=steps)
    print(render(config, run(config)))
    if steps:
        learned = train(training)
        print(render_training(training, learned))
        try:
            draw(learned, plot)
            print(f"plot: {plot}")
        except ImportError as error:
            print(f"no plot: {error}")
    print(f"\n{READ_ON}")


if __name__ == "__main__":
    main()
