"""Generate text with the transformer of `examples/train.py`, or a Llama: a server loop on the kernels of tilekern.

    python -m examples.generate --checkpoint build/train --drafts 4
    python -m examples.generate --safetensors Llama-3.2-1B --prompt "The kernel of a matrix" --new 40

Keys and values lie in pages of one pool for each layer. Each step takes a token of every sequence that generates, and
chunks of the prompts of new ones, in one call (continuous batching). With `--drafts` the model's first layers guess
the next tokens, and one step of the whole model verifies them (speculative decoding by the model itself). Greedy tokens
are those of a plain `jnp` loop, which is measured beside it. Run it with `make generate`.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from examples.llama import Model, read, tokenizer
from examples.train import Block, Config, Weights, init
from tilekern.kernels import matmul, ragged_paged_attention, rms_norm, rope, swiglu, verify_drafts
from tilekern.kernels.rms_norm import reference as rms_norm_reference
from tilekern.kernels.rope import reference as rope_reference
from tilekern.kernels.swiglu import reference as swiglu_reference

Array = jax.Array


@dataclass(frozen=True)
class Settings:
    """How the server runs.

    Attributes:
      new: tokens that are generated for each prompt.
      slots: sequences at once.
      page: tokens of a page.
      pages: pages of a pool.
      chunk: tokens of prompts in a step.
      drafts: tokens that are guessed before each step, for each sequence.
      draft_layers: the layers of the model that guess them.
      temperature: 0 for the most likely tokens.
      seed: of the random bits.
    """

    new: int = 64
    slots: int = 8
    page: int = 16
    pages: int = 128
    chunk: int = 256
    drafts: int = 0
    draft_layers: int = 1
    temperature: float = 0.0
    seed: int = 0


# --- the model --------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The tokens of a step, and where their keys and values lie; T rows of S sequences of at most P pages."""

    tokens: Any  # int32[T]
    positions: Any  # int32[T]
    lengths: Any  # int32[S], keys of a sequence with those of the step
    table: Any  # int32[S, P]
    starts: Any  # int32[S + 1]


def by_layer(model: Model, weights: Weights) -> Weights:
    """The weights with a tuple of blocks: XLA on CPUs would copy a slice of stacked weights in every step."""
    blocks = weights.blocks
    if isinstance(blocks, Block):
        blocks = tuple(jax.tree.map(lambda stacked, n=n: stacked[n], blocks) for n in range(model.layers))
    return jax.device_put(weights._replace(blocks=blocks))


def forward(
    model: Model, layers: int, weights: Weights, pools: tuple[Array, ...], rows: Rows
) -> tuple[tuple[Array, ...], Array]:
    """The pools with the keys and values of the rows, and the logits [T, vocabulary] of so many layers."""
    x, after = weights.embedding[rows.tokens], list(pools)
    for number in range(layers):
        w = weights.blocks[number]
        normed = rms_norm(x, w.attention_norm, eps=model.epsilon)
        heads = (matmul(normed, m).reshape(1, len(x), -1, model.head_dim) for m in (w.query, w.key, w.value))
        query, key, value = heads
        query, key = (rope(part, rows.positions[None], **model.turns)[0] for part in (query, key))
        tables = rows.lengths, rows.table, rows.starts
        out, pages = ragged_paged_attention(query, pools[number], *tables, new_keys=key, new_values=value[0])
        after[number] = pages.kv_pages
        x += matmul(out.reshape(len(x), -1), w.out)
        normed = rms_norm(x, w.hidden_norm, eps=model.epsilon)
        x += matmul(swiglu(matmul(normed, w.gate), matmul(normed, w.up)), w.down)
    return tuple(after), matmul(rms_norm(x, weights.norm, eps=model.epsilon), weights.head)


@cache
def steps(model: Model, settings: Settings) -> tuple[Any, Any]:
    """The two jitted steps, which take the pools over: of the layers that guess, and of the model."""

    def guess(weights: Weights, pools: tuple[Array, ...], rows: Rows) -> tuple[tuple[Array, ...], Array]:
        pools, logits = forward(model, settings.draft_layers, weights, pools, rows)
        return pools, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def verify(
        weights: Weights, pools: tuple[Array, ...], rows: Rows, places: Array, drafts: Array, lens: Array, key: Array
    ) -> tuple[tuple[Array, ...], Array, Array]:
        """places[S, drafts + 1]: the rows whose logits decide about each draft, and about the token behind them."""
        pools, logits = forward(model, model.layers, weights, pools, rows)
        tokens, counts = verify_drafts(logits[places], drafts, key, None, lens, temperature=settings.temperature)
        return pools, tokens, counts

    return jax.jit(guess, donate_argnums=1), jax.jit(verify, donate_argnums=1)


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass
class Text:
    """A sequence: `prompt` tokens, then its new ones, of which the first `cached` have keys and values in its pages.

    It ends with `end` tokens, or at the first that ends a text.
    """

    number: int
    prompt: int
    known: list[int]
    end: int
    pages: list[int] = field(default_factory=list[int])
    cached: int = 0

    @property
    def generates(self) -> bool:
        """True if only its last token has no key yet."""
        return self.cached == len(self.known) - 1


@dataclass
class Generated:
    """The new tokens of each prompt, the seconds, and how many drafts were accepted of those that were verified."""

    tokens: list[list[int]]
    seconds: float
    accepted: int = 0
    guessed: int = 0

    @property
    def rate(self) -> float:
        """New tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


class Server:
    """The pools, and the sequences in them."""

    def __init__(self, model: Model, weights: Weights, settings: Settings) -> None:
        if not 0 < settings.draft_layers <= model.layers:
            raise ValueError(f"expected draft_layers from 1 to {model.layers}; got {settings.draft_layers}")
        self._model, self._weights, self._settings = model, by_layer(model, weights), settings
        shape = (settings.pages, settings.page, 2 * model.kv_heads, model.head_dim)
        self._pools = tuple(jnp.zeros(shape, weights.embedding.dtype) for _ in range(model.layers))
        self._free = list(range(settings.pages))
        self._slots: list[Text | None] = [None] * settings.slots
        self._guess, self._verify = steps(model, settings)
        self._key = jax.random.key(settings.seed)
        self._count = 0

    def run(self, prompts: Sequence[Sequence[int]], progress: bool = False) -> Generated:
        """Generate for all prompts.

        Raises:
          ValueError: a prompt is empty, or longer than the pool.
        """
        settings, started = self._settings, time.perf_counter()
        texts = [Text(n, len(prompt), [*prompt], len(prompt) + settings.new) for n, prompt in enumerate(prompts)]
        for text in texts:
            if not text.known or self._needs(text) > settings.pages:
                most = settings.pages * settings.page - settings.new - settings.drafts
                raise ValueError(f"expected a prompt of 1 to {most} tokens; prompt {text.number} has {len(text.known)}")
        waiting, result = deque(texts), Generated([], 0.0)
        with tqdm(total=settings.new * len(texts), unit="token", disable=not progress) as bar:
            while waiting or any(self._slots):
                self._admit(waiting)
                bar.update(self._step(result))
        result.tokens = [text.known[text.prompt : text.end] for text in texts]
        result.seconds = time.perf_counter() - started
        return result

    def _needs(self, text: Text) -> int:
        """Pages of a sequence, with room for the drafts behind its end."""
        return -(-(text.end + self._settings.drafts) // self._settings.page)

    def _admit(self, waiting: deque[Text]) -> None:
        """Give slots and pages to sequences that wait, in their order."""
        for slot, text in enumerate(self._slots):
            if text is None and waiting and self._needs(waiting[0]) <= len(self._free):
                admitted = waiting.popleft()
                admitted.pages = [self._free.pop() for _ in range(self._needs(admitted))]
                self._slots[slot] = admitted

    def _step(self, result: Generated) -> int:
        """One step of the model for all slots; the number of new tokens."""
        settings, drafts = self._settings, self._drafts()
        chunk, spans, lens = settings.chunk, list[list[int]](), np.zeros(settings.slots, np.int32)
        for slot, text in enumerate(self._slots):
            if text is None:
                spans.append([])
            elif text.generates:
                lens[slot] = min(settings.drafts, text.end - len(text.known) - 1)
                spans.append([text.known[-1], *map(int, drafts[slot, : lens[slot]])])
            else:
                spans.append(text.known[text.cached : text.cached + chunk])
                chunk -= len(spans[-1])
        # Two sizes of steps, so that XLA compiles two programs: with room for prompts, and without.
        prompts = settings.chunk if chunk < settings.chunk else 0
        rows = self._rows(spans, settings.slots * (settings.drafts + 1) + prompts)
        # The last row of a prompt decides about its first new token, the rows of drafts about the drafts.
        first = rows.starts[1:] - 1 - lens
        places = np.maximum(0, first[:, None] + np.minimum(np.arange(settings.drafts + 1), lens[:, None]))
        key = jax.random.fold_in(self._key, self._count)
        self._count += 1
        self._pools, *found = self._verify(self._weights, self._pools, rows, places, drafts, lens, key)
        tokens, counts = map(np.asarray, found)
        made = 0
        for slot, (text, span) in enumerate(zip(self._slots, spans, strict=True)):
            if text is None or not span:
                continue
            ends_prompt = not text.generates and text.cached + len(span) == len(text.known)
            if text.generates:
                result.accepted += int(counts[slot]) - 1
                result.guessed += int(lens[slot])
                text.cached += int(counts[slot])
            else:
                text.cached += len(span)
                if not ends_prompt:
                    continue
            text.known += map(int, tokens[slot, : counts[slot]])
            made += int(counts[slot])
            ends = [n for n, token in enumerate(text.known[text.prompt :], 1) if token in self._model.stops]
            text.end = min([text.end, *(text.prompt + n for n in ends)])
            if len(text.known) >= text.end:
                self._free += text.pages
                self._slots[slot] = None
        return made

    def _drafts(self) -> np.ndarray[Any, Any]:
        """int32[slots, drafts]: for each sequence that generates, the next tokens by the first layers."""
        settings = self._settings
        drafts = np.zeros((settings.slots, settings.drafts), np.int32)
        for number in range(settings.drafts):
            spans = list[list[int]]()
            for slot, text in enumerate(self._slots):
                generates = text is not None and text.generates
                last = drafts[slot, number - 1] if number else text.known[-1] if text is not None else 0
                spans.append([int(last)] if generates else [])
            if not any(spans):
                break
            rows = self._rows(spans, settings.slots, number)
            self._pools, tokens = self._guess(self._weights, self._pools, rows)
            drafts[:, number] = np.asarray(tokens)[np.maximum(0, rows.starts[1:] - 1)]
        return drafts

    def _rows(self, spans: Sequence[Sequence[int]], count: int, ahead: int = 0) -> Rows:
        """The rows of each slot's tokens, which stand `ahead` behind those that are cached; `count` rows in all."""
        settings = self._settings
        tokens, positions = np.zeros(count, np.int32), np.zeros(count, np.int32)
        lengths, table = np.zeros(settings.slots, np.int32), np.zeros((settings.slots, settings.pages), np.int32)
        starts = np.concatenate([[0], np.cumsum([len(span) for span in spans])]).astype(np.int32)
        for slot, (text, span) in enumerate(zip(self._slots, spans, strict=True)):
            if text is None or not span:
                continue
            part = slice(starts[slot], starts[slot + 1])
            places = text.cached + ahead + np.arange(len(span))
            tokens[part], positions[part] = span, places
            lengths[slot] = places[-1] + 1
            table[slot, : len(text.pages)] = text.pages
        return Rows(tokens, positions, lengths, table, starts)


# --- the plain loop ---------------------------------------------------------------------------------------------------


@cache
def _plain_step(model: Model) -> Any:
    """The jitted step of `plain`: tokens[B, n] at positions[B, n], and caches [B, L, K, H] of each layer."""

    def step(weights: Weights, caches: Any, tokens: Array, positions: Array) -> tuple[Any, Array]:
        x, after = weights.embedding[tokens], list[Any]()
        sequences, length = tokens.shape
        batch = jnp.arange(sequences)[:, None]
        for number, cached in enumerate(caches):
            w = weights.blocks[number]
            normed = rms_norm_reference(x, w.attention_norm, eps=model.epsilon)
            heads = ((normed @ m).reshape(sequences, length, -1, model.head_dim) for m in (w.query, w.key, w.value))
            query, key, value = heads
            query, key = (rope_reference(part, positions, **model.turns) for part in (query, key))
            keys, values = (c.at[batch, positions].set(new) for c, new in zip(cached, (key, value), strict=True))
            after.append((keys, values))
            mask = jnp.arange(keys.shape[1]) <= positions[..., None]
            out = jax.nn.dot_product_attention(query, keys, values, mask=mask[:, None])
            x += out.reshape(sequences, length, -1) @ w.out
            normed = rms_norm_reference(x, w.hidden_norm, eps=model.epsilon)
            x += swiglu_reference(normed @ w.gate, normed @ w.up) @ w.down
        x = rms_norm_reference(x, weights.norm, eps=model.epsilon)
        return after, jnp.argmax(x @ weights.head, axis=-1)

    return jax.jit(step, donate_argnums=1)


def plain(model: Model, weights: Weights, prompts: Sequence[Sequence[int]], new: int) -> Generated:
    """The most likely tokens by plain `jnp`: all prompts at once, padded, and a cache for the longest.

    All texts have `new` tokens: those behind the first that ends a text do not count.
    """
    weights = by_layer(model, weights)
    started, step = time.perf_counter(), _plain_step(model)
    lengths = np.array([len(prompt) for prompt in prompts])
    longest, count = int(lengths.max()), len(prompts)
    shape, dtype = (count, longest + new, model.kv_heads, model.head_dim), weights.embedding.dtype
    caches: Any = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(model.layers)]
    tokens = np.array([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], np.int32)
    caches, best = step(weights, caches, tokens, np.broadcast_to(np.arange(longest), tokens.shape))
    # What a short prompt's padding wrote into the cache lies behind its tokens, and is overwritten in time.
    made = [np.asarray(best)[np.arange(count), lengths - 1]]
    for number in range(new - 1):
        caches, best = step(weights, caches, made[-1][:, None], (lengths + number)[:, None])
        made.append(np.asarray(best)[:, 0])
    seconds = time.perf_counter() - started
    return Generated([_until_stop(model, row) for row in np.stack(made, 1).tolist()], seconds)


def _until_stop(model: Model, tokens: list[int]) -> list[int]:
    """The tokens up to the first that ends a text, with it."""
    return next((tokens[:n] for n, token in enumerate(tokens, 1) if token in model.stops), tokens)


# --- the command ------------------------------------------------------------------------------------------------------


def restored(folder: Path, config: Config) -> Weights:
    """The weights of a checkpoint of `examples/train.py`.

    Raises:
      ValueError: it is of another model.
    """
    weights = init(config)
    leaves, tree = jax.tree.flatten(weights)
    with np.load(folder / "state.npz") as file:
        arrays = [file[f"{n}"] for n in range(len(leaves)) if f"{n}" in file]
    if [x.shape for x in arrays] != [x.shape for x in leaves]:
        raise ValueError(f"{folder}/state.npz is of another model: give the arguments of its training")
    return jax.tree.unflatten(tree, arrays)


def excerpts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 8 to 128 bytes, from the source of Python's `argparse`."""
    random, text = np.random.default_rng(seed), Path(argparse.__file__).read_bytes()
    starts, lengths = random.integers(0, len(text) - 128, count), random.integers(8, 129, count)
    return [list(text[s : s + n]) for s, n in zip(starts, lengths, strict=True)]


PROMPTS = ("The kernel of a matrix is", "Once upon a time there was", "def quicksort(numbers):", "Dear Sir or Madam,")


def main() -> None:
    """Generate, and compare with the plain loop."""
    options = _options()
    if options.safetensors:
        (model, weights), codec = read(options.safetensors), tokenizer(options.safetensors)
        prompts, decoded = [codec.encode(text).ids for text in options.prompt or PROMPTS], codec.decode
    else:
        config = Config(options.layers, options.width, options.heads, options.kv_heads, options.hidden)
        weights = restored(options.checkpoint, config) if options.checkpoint else init(config)
        model, prompts, decoded = Model.of(config), excerpts(options.prompts), _text_of_bytes
        prompts = [[*text.encode()] for text in options.prompt] or prompts
    longest = max(map(len, prompts)) + options.new + options.drafts
    names = ("new", "slots", "drafts", "draft_layers", "temperature", "seed")
    pages = options.slots * -(-longest // Settings.page)
    settings = Settings(pages=pages, **{name: getattr(options, name) for name in names})
    serve = partial(Server(model, weights, settings).run, prompts)
    serve()  # compiles
    result = serve(progress=True)
    for prompt, tokens in zip(prompts[: len(options.prompt) or 2], result.tokens, strict=False):
        print(decoded(prompt), "→", decoded(tokens), sep="")
    print(f"{result.rate:.0f} tokens a second; {result.accepted} of {result.guessed} drafts accepted")
    if settings.temperature == 0:
        plain(model, weights, prompts, settings.new)
        other = plain(model, weights, prompts, settings.new)
        same = sum(a == b for a, b in zip(result.tokens, other.tokens, strict=True))
        print(f"plain jnp: {other.rate:.0f} tokens a second; {same} of {len(prompts)} texts are the same")


def _options() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--checkpoint", type=Path, help="the folder of a checkpoint of examples/train.py")
    cli.add_argument(
        "--safetensors", type=Path, help="the folder of a Llama: config.json, tokenizer.json, *.safetensors"
    )
    cli.add_argument("--prompt", action="append", default=[], help="a prompt; more with more of them")
    cli.add_argument("--prompts", type=int, default=8, help="how many excerpts of a source, without --prompt")
    for name in ("layers", "width", "heads", "kv_heads", "hidden"):
        help_text = "of the model, without --safetensors"
        cli.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Config, name), help=help_text)
    for name in ("new", "slots", "drafts", "draft_layers", "seed"):
        cli.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Settings, name))
    cli.add_argument("--temperature", type=float, default=Settings.temperature)
    return cli.parse_args()


def _text_of_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


if __name__ == "__main__":
    main()
