"""The public functions: checks and leading dims."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import as_int32, as_real, as_rows
from tilekern.kernels.sample import checks
from tilekern.kernels.sample.arguments import Rates
from tilekern.kernels.sample.drafts import verified
from tilekern.kernels.sample.kernel import drawable_logits, sampled_tokens
from tilekern.kernels.sample.trees import verified_tree

hide_frames(__file__)


@takes_python_numbers
def sample(
    logits: jax.Array,
    key: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    counts: jax.Array | None = None,
    repetition_penalty: jax.Array | float | None = None,
    presence_penalty: jax.Array | float | None = None,
    frequency_penalty: jax.Array | float | None = None,
    target: str | None = None,
    block_v: int | None = None,
) -> jax.Array:
    """A token for each row of logits, drawn from softmax(logits / temperature).

    Penalties come first, then the temperature, `min_p`, `top_k` and `top_p`, each of the tokens that those before keep.
    Tokens of equal logits are kept or dropped together. All decisions are in integers: every backend and every block
    draws the same tokens. Random bits depend on a row's key and on the number of a token alone.

    Sources: Holtzman et al. 2020, https://arxiv.org/abs/1904.09751 (top_p); Nguyen et al. 2024,
    https://arxiv.org/abs/2407.01082 (min_p); Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1
    (repetition_penalty).

    Args:
      logits: [*B, V], float32, bfloat16, float16 or float64, taken as float32; V up to 2^19. NaN stands for -inf. A
        token of -inf is not drawn, unless all are.
      key: of `jax.random`, or its data, split over the rows; or keys [*B], so that the tokens of a row do not depend
        on the rows beside it.
      temperature: a number, or one for each row, [*B], as all rates are. 0 takes the largest logit, of equal ones
        the first.
      top_k: keep the k most likely tokens; None or 0 for all.
      top_p: keep the most likely tokens until their probabilities add up to p, rounded to a multiple of 2^-16. None or
        1 for all; 0 keeps the most likely one.
      min_p: keep tokens that are at least p times as likely as the most likely one; None or 0 for all.
      counts: integers [*B, V], how often each token was generated, which penalties need; negative for tokens of the
        prompt alone.
      repetition_penalty: divide positive logits of tokens with a count by it, and multiply negative ones; 1 or None
        for no penalty.
      presence_penalty: subtract it from the logits of tokens with a positive count.
      frequency_penalty: subtract it times the count, of up to 4095, from the logits of tokens with a positive count.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_v: tokens of a tile, instead of the schedule's; no block changes the result.

    Returns:
      int32[*B], from 0 to V - 1.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or a number is out of its range.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.sample import sample
      >>> logits = jnp.array([[0.0, 3.0, 2.0], [9.0, 0.0, 0.0]])
      >>> sample(logits, jax.random.key(0), temperature=jnp.array([0.0, 0.7]), top_p=0.9)
      Array([1, 0], dtype=int32)
    """
    checks.logits_of_rows("sample", logits)
    *batch, vocabulary = logits.shape
    shape = tuple(batch)
    keys = checks.keys_of_rows("sample", key, shape)
    rates = checks.rates_of_rows("sample", shape, vocabulary, temperature, top_k, top_p, min_p)
    penalties = checks.penalties_of_rows(
        "sample", shape, vocabulary, counts, repetition_penalty, presence_penalty, frequency_penalty
    )
    if logits.size == 0:
        return jnp.zeros(shape, jnp.int32)
    if as_real(temperature) == 0 and penalties is None:
        x = logits.astype(jnp.float32)
        return jnp.argmax(jnp.where(jnp.isnan(x), -jnp.inf, x), axis=-1).astype(jnp.int32)
    tokens = sampled_tokens(as_rows(logits), as_rows(keys), rates, penalties, target=target, block_v=block_v)
    return tokens.reshape(shape)


@takes_python_numbers
def verify_drafts(
    logits: jax.Array,
    draft_tokens: jax.Array,
    key: jax.Array,
    draft_logits: jax.Array | None = None,
    draft_lens: jax.Array | None = None,
    *,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    target: str | None = None,
    block_v: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The tokens of speculative decoding: drafts as far as they are accepted, and one more token of the model.

    With p, what `sample` draws from, and q, what a draft x was drawn from, x is accepted with probability
    min(1, p(x) / q(x)). The token behind the last accepted draft is drawn from max(p - q, 0), and from p if all drafts
    are accepted. So all tokens are draws from p. Sources: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192,
    algorithm 1; Chen et al. 2023, https://arxiv.org/abs/2302.01318, algorithm 2.

    Args:
      logits: [B, K + 1, V], of the model: behind the last token, and behind each draft.
      draft_tokens: integers [B, K].
      key: of `jax.random`, or keys [B], as for `sample`.
      draft_logits: [B, K, V], whose softmax is q; None if the drafts are certain, as those of a greedy model or of a
        search in the text are.
      draft_lens: integers [B], the number of drafts of each row; None for K.
      temperature: of the model's tokens, a number or [B], as for `sample`. With 0, drafts are accepted as long as they
        are the model's most likely tokens.
      top_k: as for `sample`.
      top_p: as for `sample`.
      min_p: as for `sample`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_v: tokens of a tile, instead of the schedule's.

    Returns:
      (tokens, lens): int32[B, K + 1], the new tokens of each row, and -1 behind them; int32[B], their number, from 1
      to K + 1.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or a number is out of its range.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.sample import verify_drafts
      >>> logits = jnp.array([[[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]]])
      >>> verify_drafts(logits, jnp.array([[1, 1]]), jax.random.key(0), temperature=0.0)
      (Array([[ 1,  0, -1]], dtype=int32), Array([2], dtype=int32))
    """
    checks.logits_of_rows("verify_drafts", logits)
    checks.drafts_of_rows("verify_drafts", logits, draft_tokens, draft_logits, draft_lens)
    rows, places, _ = logits.shape
    keys = checks.keys_of_rows("verify_drafts", key, (rows,))
    logarithms = _logarithms("verify_drafts", logits, temperature, top_k, top_p, min_p, target, block_v)
    if rows == 0:
        return jnp.zeros((0, places), jnp.int32), jnp.zeros(0, jnp.int32)
    lens = _lens(draft_lens, draft_tokens)
    return verified(logarithms, as_int32(draft_tokens), keys, draft_logits, lens, target=target, block_v=block_v)


@takes_python_numbers
def verify_draft_tree(
    logits: jax.Array,
    draft_tokens: jax.Array,
    parents: jax.Array,
    key: jax.Array,
    draft_logits: jax.Array | None = None,
    draft_lens: jax.Array | None = None,
    *,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    target: str | None = None,
    block_v: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens of speculative decoding with a tree of drafts: a path of accepted drafts, and one more token.

    From the root down, the children of the last accepted draft are visited in their order. With r, at first what
    `sample` draws from behind this draft, and q, what a child x was drawn from, x is accepted with probability
    min(1, r(x) / q(x)). If it is not, r becomes max(r - q, 0), normalised, for the next child. The last token is drawn
    from r, where no child is accepted. So all tokens are draws from the model. A chain gives the tokens of
    `verify_drafts`. Source: Miao et al. 2024, SpecInfer, https://arxiv.org/abs/2305.09781, algorithm 2.

    Args:
      logits: [B, N + 1, V], of the model: behind the last token, and behind each draft on its path from the root.
      draft_tokens: integers [B, N], the nodes of the trees, a parent before its children.
      parents: integers [N], or [B, N] for trees of different forms: the number of each node's parent, -1 for children
        of the root. A node whose parent is neither -1 nor an earlier node is never visited.
      key: of `jax.random`, or keys [B], as for `sample`.
      draft_logits: [B, N, V], whose softmax is q; siblings are independent draws. None if the drafts are certain, such
        as the most likely tokens of a smaller model: siblings then differ.
      draft_lens: integers [B], the number of nodes of each row; None for N.
      temperature: of the model's tokens, a number or [B], as for `sample`. With 0, drafts are accepted that are the
        model's most likely tokens.
      top_k: as for `sample`.
      top_p: as for `sample`.
      min_p: as for `sample`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_v: tokens of a tile, instead of the schedule's.

    Returns:
      (tokens, lens, nodes): int32[B, N + 1], the new tokens of each row, and -1 behind them; int32[B], their number;
      int32[B, N], the accepted nodes, one less than tokens, and -1 behind them: the places of their keys and values in
      a cache.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or a number is out of its range.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.sample import verify_draft_tree
      >>> logits = jnp.array([[[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]]])
      >>> verify_draft_tree(logits, jnp.array([[0, 1]]), jnp.array([-1, -1]), jax.random.key(0), temperature=0.0)
      (Array([[ 1,  1, -1]], dtype=int32), Array([2], dtype=int32), Array([[ 1, -1]], dtype=int32))
    """
    checks.logits_of_rows("verify_draft_tree", logits)
    checks.drafts_of_rows("verify_draft_tree", logits, draft_tokens, draft_logits, draft_lens)
    checks.parents_of_rows("verify_draft_tree", parents, draft_tokens)
    rows, places, _ = logits.shape
    keys = checks.keys_of_rows("verify_draft_tree", key, (rows,))
    logarithms = _logarithms("verify_draft_tree", logits, temperature, top_k, top_p, min_p, target, block_v)
    if rows == 0:
        return jnp.zeros((0, places), jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros((0, places - 1), jnp.int32)
    drafts, lens = as_int32(draft_tokens), _lens(draft_lens, draft_tokens)
    of_rows = jnp.broadcast_to(as_int32(parents), drafts.shape)
    return verified_tree(logarithms, drafts, of_rows, keys, draft_logits, lens, target=target, block_v=block_v)


def _logarithms(
    function: str, logits: jax.Array, temperature: Any, top_k: Any, top_p: Any, min_p: Any, target: Any, block_v: Any
) -> jax.Array:
    """float32[B, K, V] of `drawable_logits`, with the rates of rows [B]."""
    rows, places, vocabulary = logits.shape
    rates = checks.rates_of_rows(function, (rows,), vocabulary, temperature, top_k, top_p, min_p)
    of_places = Rates(*(None if rate is None else jnp.repeat(rate, places) for rate in rates))
    if rows == 0:
        return jnp.zeros(logits.shape, jnp.float32)
    return drawable_logits(as_rows(logits), of_places, None, target=target, block_v=block_v).reshape(logits.shape)


def _lens(draft_lens: jax.Array | None, draft_tokens: jax.Array) -> jax.Array:
    """int32[B]: the number of drafts of each row, from 0 to K."""
    rows, most = draft_tokens.shape
    return jnp.full(rows, most, jnp.int32) if draft_lens is None else jnp.clip(as_int32(draft_lens), 0, most)
