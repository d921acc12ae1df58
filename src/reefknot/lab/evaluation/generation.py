"""Generate text with a language model, token by token, with temperature, top-k and top-p (nucleus) sampling.

Start with `generate`. `beam.py` uses the functions at the end of this file to sample translations.

Each token is read once. A recurrent state has a fixed size. The KV cache of a transformer grows with every token, but
the model has learned only positions up to the length of its training samples. So the cache is limited to a window, a
maximum number of tokens. When the window is full, the cache is dropped, and the last half window of the text is read
again, at positions that start from 0. Earlier text is forgotten. Every token is predicted from at least half a window
of context, unless the text is shorter.

Shapes: N rows (1 for a single text), D hidden dimension, K candidates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.encoders.contract import Encoded
from reefknot.nn.models.language_model import LanguageModel, evaluating

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
"""Range of temperatures that float32 can divide by. A lower temperature is treated as 0: the best word is chosen."""


def encode_prompt(words: list[str], vocabulary: Vocabulary) -> list[int]:
    """Return the ids of a prompt that starts a line: <eos>, if the vocabulary has it, then the words. Never empty."""
    ids = vocabulary.encode_inputs(words)
    if vocabulary.eos is not None:
        return [vocabulary.eos, *ids]
    return ids or [0]


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: list[int],
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    banned: tuple[int, ...] = (),
    seed: int = 0,
    window: int | None = None,
) -> Iterator[int]:
    """Yield `length` ids that follow the prompt.

    A model in training mode is back in training mode whenever an id is yielded. The weights of a model in evaluation
    mode must not change until the last id is yielded, because its class vectors are computed only once.

    Args:
        model: The language model.
        prompt: At least one id. <eos> at the beginning means the start of a line.
        length: Number of ids to generate.
        temperature: Divisor of the log-probabilities. With 0, the most probable word is always chosen.
        top_k: Sample from the k most probable words only.
        top_p: Sample from the fewest words whose probabilities add up to p. It can be combined with `top_k`.
        banned: Ids that are never generated, such as <unk>.
        seed: Seed of the random numbers.
        window: Maximum number of tokens in the KV cache of an encoder that does not carry its state. Other encoders
            ignore it.
    """
    check_sampling_options(temperature, top_k, top_p)
    reader = _IncrementalReader(model, window)
    generator = torch.Generator(reader.device).manual_seed(seed)
    num_candidates = 1 if temperature < MIN_TEMPERATURE else top_k
    # Without restrictions, the output end can sample a word without computing all log-probabilities.
    is_unrestricted = temperature == 1.0 and top_k is None and top_p is None
    unread_ids = prompt
    was_evaluating = not model.training
    # A model in evaluation mode keeps its class vectors for the whole text. A model in training mode is put into
    # evaluation mode for each token only, because its weights may change in between.
    with evaluating(model) if was_evaluating else nullcontext():
        for _ in range(length):
            with nullcontext() if was_evaluating else evaluating(model):
                h_1D = reader.read(unread_ids)
                token = int(model.output.sample(h_1D, generator)) if is_unrestricted else None
                if token is None or token in banned:
                    # Sampling again from the allowed words after a rejection gives exactly their distribution.
                    logp_1K, ids_1K = top_candidates(model, h_1D, num_candidates, banned)
                    p_1K = sampling_weights(logp_1K, temperature, top_p)
                    token = int(ids_1K[0, torch.multinomial(p_1K[0], 1, generator=generator)])
            yield token
            unread_ids = [token]


class _IncrementalReader:
    """A model that reads a text a few tokens at a time, and keeps its state or KV cache between calls."""

    def __init__(self, model: LanguageModel, window: int | None) -> None:
        if window is not None and window < 1:
            raise SettingsError(f"window = {window}: must be at least 1 token, or left out")
        self.device = next(model.parameters()).device
        self._model = model
        self._window = None if model.encoder.carries_state else window
        self._state = model.decoding_state(1)
        self._cached_tokens = 0
        # The last half window of the text, which is read again when the KV cache is dropped. It is empty without a
        # window.
        self._recent_ids: deque[int] = deque(maxlen=max(1, self._window // 2) if self._window else 0)

    def read(self, ids: list[int]) -> Tensor:
        """Read ids and return the hidden state after the last id, h_1D."""
        self._recent_ids.extend(ids)
        self._cached_tokens += len(ids)
        if self._window and self._cached_tokens > self._window:
            ids = list(self._recent_ids)
            self._state, self._cached_tokens = self._model.decoding_state(1), len(ids)
        encoded: Encoded = self._model(torch.tensor([ids], device=self.device), self._state)
        self._state = encoded.state
        return encoded.output[:, -1]


def check_sampling_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise an error if the sampling options are out of range."""
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise SettingsError(f"temperature {temperature}: must be a number from 0 to {MAX_TEMPERATURE:g}")
    if top_k is not None and top_k < 1:
        raise SettingsError(f"top_k = {top_k}: must be at least 1, or left out")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise SettingsError(f"top_p = {top_p}: must be above 0 and at most 1, or left out")


def top_candidates(model: LanguageModel, h_ND: Tensor, k: int | None, banned: Collection[int]) -> tuple[Tensor, Tensor]:
    """Return the k most probable ids of each row that are not in `banned`, (logp_NK, ids_NK), best first.

    k = None returns all ids. An adaptive output end may find the best ids without scoring all of them.
    """
    vocab_size = model.output.vocab_size
    banned = {token for token in banned if 0 <= token < vocab_size}
    num_allowed = vocab_size - len(banned)
    if not num_allowed:
        raise SettingsError(f"all {vocab_size} words are excluded from generation; allow at least one")
    k = num_allowed if k is None else min(k, num_allowed)
    logp_NK, ids_NK = model.output.topk(h_ND, k + len(banned))
    if banned:
        # One comparison per id, because the host would wait while it copies a list of ids to the device.
        is_banned_NK = torch.stack([ids_NK == token for token in banned]).any(0)
        allowed_NK = is_banned_NK.sort(dim=-1, stable=True).indices[:, :k]
        logp_NK, ids_NK = logp_NK.gather(1, allowed_NK), ids_NK.gather(1, allowed_NK)
    return logp_NK, ids_NK


def sampling_weights(logp_NK: Tensor, temperature: float, top_p: float | None) -> Tensor:
    """Return the weights p_NK for sampling among candidates, best first. They may not add up to one."""
    if temperature < MIN_TEMPERATURE:
        return torch.zeros_like(logp_NK).index_fill(1, logp_NK.new_zeros(1, dtype=torch.long), 1.0)
    p_NK = torch.softmax(logp_NK.float() / temperature, dim=-1)
    if top_p is not None:
        # Keep a word if the better words add up to less than top_p, so the best word is always kept.
        p_of_better_NK = p_NK.cumsum(-1) - p_NK
        p_NK = torch.where(p_of_better_NK < top_p, p_NK, 0.0)
    return p_NK
