"""Text out of a decoder: a cache as a plan, padding as documents, draws that belong to their row.

The decoder knows nothing of a cache. While one is attached, `core_attention` of each layer puts
its keys and values behind those of the calls before, and attends to all of them; a state-space
mixer goes on from the state it left. So the prompt is computed once, and then each token alone:

    cached          prompt -> t1     t1 -> t2            t2 -> t3
    recomputed      prompt -> t1     prompt t1 -> t2     prompt t1 t2 -> t3

Prompts of unequal length are padded on the left, and the padding needs no mask of its own: each
padding token is another document, of position 0, that ends before the prompt begins.

    tokens        _  _  _  a  b  c  d ...
    positions     0  0  0  0  1  2  3        a position 0 begins a document
    document      1  2  3  4  4  4  4        and no document sees another

Proven in tests/test_generate.py: token for token as transformers, and as without the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_lite.config import ConfigError
from torchtitan_lite.models.attention import RowMask
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder, DecoderLayer
from torchtitan_lite.models.init import generator_of
from torchtitan_lite.models.mamba import MambaLayer, MambaState
from torchtitan_lite.observe.logging import logger


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    num_samples: int = 1,
    seed: int = 0,
    eos_ids: Collection[int] = (),
    cache: bool = True,
    group: ProcessGroup | None = None,
    on_token: Callable[[int, int, bool], None] | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, in `num_samples` rows of their own, prompt by prompt.

    A row ends with one of `eos_ids`, after `max_new_tokens`, or where the context of the model
    does. Temperature 0 takes the likeliest token; else tokens are drawn, by a generator that
    (seed, prompt, sample) name, from what `warp` leaves. All ranks of `group`, the tensor-parallel
    one, call this and get the same tokens. `on_token(row, token, last)` hears each as it is chosen.
    Without `cache` every token computes its whole row again.

    Raises ConfigError where check_prompts does; warns when the context will end a row.
    """
    check_prompts(decoder.config, prompts)
    rows = [prompt for prompt in prompts for _ in range(num_samples)]
    limits = _new_token_limits(decoder.config, rows, max_new_tokens)
    first, steps = max(map(len, rows)), max(limits)  # first: the place of the first new token
    tokens, positions = _left_padded(decoder, rows, first + steps)
    uniforms = _uniforms(seed, len(prompts), num_samples, steps).to(tokens.device)
    out: list[list[int]] = [[] for _ in rows]
    alive = {row for row, limit in enumerate(limits) if limit > 0}
    with _attached(decoder, positions, batch_size=len(rows), cache=cache) as forward:
        for step in range(steps):
            logits = forward(tokens[:, : first + step])
            chosen = logits.argmax(-1)
            if temperature > 0:
                scores = warp(logits, temperature=temperature, top_k=top_k, top_p=top_p)
                chosen = draw(scores, uniforms[:, step])
            if group is not None:  # sums in another order may have made another choice elsewhere
                dist.broadcast(chosen, group=group, group_src=0)
            tokens[:, first + step] = chosen
            choice = chosen.tolist()
            for row in sorted(alive):
                out[row].append(choice[row])
                last = choice[row] in eos_ids or len(out[row]) == limits[row]
                if last:
                    alive.remove(row)
                if on_token is not None:
                    on_token(row, choice[row], last)
            if not alive:
                break
    return out


def warp(logits: Tensor, *, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Scores (batch, vocab) to draw from: logits / temperature, and -inf for what is left out.

    In this order: the `top_k` likeliest are kept, and with them whoever equals the last; of those
    the fewest that have a probability of `top_p` together, at least one (nucleus sampling,
    arXiv:1904.09751).
    """
    scores = logits.float() / temperature
    if top_k is not None:
        kth = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_p < 1.0:
        ascending, order = scores.sort()
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        scores = scores.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
    return scores


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row from softmax(scores); (batch,) uniforms in [0, 1) are the randomness."""
    # fp64: its steps are finer than the probability of any token.
    cumulative = scores.softmax(-1).double().cumsum(-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _uniforms(seed: int, num_prompts: int, num_samples: int, steps: int) -> Tensor:
    """(prompts * samples, steps) fp64, drawn on the CPU: the same on every kind of device."""
    rows = product(range(num_prompts), range(num_samples))
    streams = [generator_of(f"{seed}:{prompt}:{sample}") for prompt, sample in rows]
    drawn = [torch.rand(steps, dtype=torch.float64, generator=stream) for stream in streams]
    return torch.stack(drawn)


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> None:
    """ConfigError for a prompt that is longer than the context of the model."""
    assert prompts and all(prompts), "a prompt has at least one token"
    context = _context(config)
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) > context:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens and the context of the model {context}; "
                "shorten it"
            )


def _context(config: ModelConfig) -> float:
    """The longest row of tokens that the model is for; a state that forgets knows no longest."""
    return math.inf if config.layer_type == "state_space" else config.max_position_embeddings


def _new_token_limits(
    config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[int]:
    """How many tokens may follow each prompt."""
    longest, context = max(map(len, prompts)), _context(config)
    if longest + max_new_tokens > context:
        logger.warning(
            f"a prompt of {longest} tokens and {max_new_tokens} more exceed the context of the "
            f"model: its text ends after {context} tokens"
        )
    return [int(min(max_new_tokens, context - len(prompt))) for prompt in prompts]


def _left_padded(
    decoder: Decoder, rows: Sequence[Sequence[int]], length: int
) -> tuple[Tensor, Tensor]:
    """Tokens (batch, length), zeros where none is yet, and the position of each.

    Positions are (1, length) where no row is padded: 0 then stands at the first place alone.
    """
    device = decoder.lm_head.weight.device  # type: ignore[union-attr]
    first = max(map(len, rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, prompt in enumerate(rows):
        tokens[row, first - len(prompt) : first] = torch.tensor(prompt)
    padding = [first - len(prompt) for prompt in rows]
    positions = torch.arange(length) - torch.tensor(padding if any(padding) else [0])[:, None]
    # A row at its end runs on, unread, beside the others: no position may be outside of a table.
    positions = positions.clamp(0, decoder.config.max_position_embeddings - 1)
    return tokens.to(device), positions.to(device)


# --- the cache --------------------------------------------------------------------------------


@contextmanager
def _attached(
    decoder: Decoder, positions: Tensor, *, batch_size: int, cache: bool
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, a function from all tokens so far (batch, n) to the next one's logits (batch, vocab).

    What it changes in the decoder is as before when it ends.
    """
    assert decoder.lm_head is not None, "a stage without the head has no logits"
    with ExitStack() as undo:
        undo.callback(setattr, decoder, "document_mask", decoder.document_mask)
        decoder.document_mask = positions.shape[0] > 1
        # The logits of the prompt are not wanted, and may be many.
        hook = decoder.lm_head.register_forward_pre_hook(lambda module, args: (args[0][:, -1:],))
        undo.callback(hook.remove)
        kept = Cache(decoder, positions, batch_size, undo) if cache else None
        # nn.Module looks its parameters and parts up in Python, which is a fifth of what a step of
        # a small model costs beside its matmuls: as attributes they are found at once.
        for module in decoder.modules():
            held = {**module._parameters, **module._modules}
            vars(module).update(held)
            for name in held:
                undo.callback(vars(module).pop, name)
        yield kept or (lambda tokens: decoder(tokens, positions[:, : tokens.shape[1]])[:, -1])


class Cache:
    """A decoder that is given all tokens so far, and computes those that it has not seen.

    positions: (batch, length) of every token that can come, or (1, length) if all rows agree.
    Memory: keys and values of `length` tokens a layer, of the heads that this rank holds.
    `undo` is told how the decoder forgets all of it.
    """

    def __init__(
        self, decoder: Decoder, positions: Tensor, batch_size: int, undo: ExitStack
    ) -> None:
        self.decoder = decoder
        self.positions = positions
        self.length = 0  # tokens seen
        self.mask: RowMask | None = None  # of this call
        if decoder.rotary is not None:  # the angles of all positions, computed once
            # None past the context: frequencies that follow the longest place would change.
            num_places = min(positions.shape[1], decoder.config.max_position_embeddings)
            places = torch.arange(num_places, device=positions.device)[None]
            cos, sin = (angles[0] for angles in decoder.rotary(places))  # (length, 1, head_dim)
            decoder.rotary.forward = lambda p: (cos[p], sin[p])  # type: ignore[method-assign, assignment]
            undo.callback(delattr, decoder.rotary, "forward")
        for layer in decoder.layers.values():
            if isinstance(layer, MambaLayer):
                dtype, device = layer.mixer.in_proj.weight.dtype, positions.device
                layer.mixer.state = MambaState.empty(
                    decoder.config, batch_size, dtype=dtype, device=device
                )
                undo.callback(setattr, layer.mixer, "state", None)
            else:
                assert isinstance(layer, DecoderLayer)
                core = layer.self_attn.core_attention
                core.forward = KeyValues(self, core.forward)  # type: ignore[method-assign, assignment]
                undo.callback(delattr, core, "forward")

    def __call__(self, tokens: Tensor) -> Tensor:
        """(batch, n) tokens so far -> (batch, vocab) logits of the next."""
        first, self.length = self.length, tokens.shape[1]
        positions = self.positions[:, : self.length]
        documents, num_new = self.decoder.document_mask, self.length - first
        self.mask = RowMask.of(positions, documents=documents, num_queries=num_new)
        return self.decoder(tokens[:, first:], positions[:, first:])[:, -1]


class KeyValues:
    """Stands for `compute`, a core attention, and attends to the tokens of former calls too."""

    def __init__(self, cache: Cache, compute: Callable[..., Tensor]) -> None:
        self.cache, self.compute = cache, compute
        self.kept: tuple[Tensor, ...] = ()  # k and v, (batch, kv_heads, length, head_dim)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        """As CoreAttention.forward, but for the mask: that is the cache's."""
        if not self.kept:
            length = self.cache.positions.shape[1]
            self.kept = tuple(t.new_empty(*t.shape[:2], length, t.shape[3]) for t in (k, v))
        end, num_tokens = self.cache.length, k.shape[2]
        for all_tokens, new in zip(self.kept, (k, v), strict=True):
            all_tokens.narrow(2, end - num_tokens, num_tokens).copy_(new)
        k, v = (all_tokens.narrow(2, 0, end) for all_tokens in self.kept)
        return self.compute(q, k, v, self.cache.mask)
