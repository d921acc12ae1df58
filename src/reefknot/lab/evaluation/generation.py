"""Generate text with a language model, token by token, with temperature, top-k and top-p (nucleus) sampling.

Start with `generate`:

    prompt = encode_prompt(["the", "cat"], vocabulary)
    ids = list(generate(model, prompt, 20, temperature=0.8, top_p=0.9))
    words = vocabulary.decode(ids)

For every token, `_IncrementalReader` runs the model on the tokens that it has not read yet, and `_TokenSampler` samples
the next token from the hidden state. `beam.py` uses the functions at the end of this file to sample translations.

The output end (`model.output`) turns hidden states into probabilities of the next token. It has a class vector for each
token of the vocabulary.

Shapes: N texts that are generated together (N = 1 in `generate`), T tokens of a text, D hidden dimension, K candidates
for the next token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.encoders.contract import Encoded
from reefknot.nn.models.context import context_length
from reefknot.nn.models.language_model import LanguageModel, evaluating

MIN_TEMPERATURE = 1e-6
"""The smallest temperature that float32 can divide by. A lower one is treated as 0: the best token is chosen."""
MAX_TEMPERATURE = 1e6
"""The largest temperature."""


def encode_prompt(words: list[str], vocabulary: Vocabulary) -> list[int]:
    """Return the ids of a prompt that starts a line: <eos>, if the vocabulary has it, then the words. Never empty."""
    ids = vocabulary.encode_inputs(words)
    if vocabulary.eos is not None:
        return [vocabulary.eos, *ids]
    if not ids:
        return [0]
    return ids


def banned_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the ids that are not generated, because they are not words: the id of <unk>, if the vocabulary has it."""
    if vocabulary.unk is None:
        return ()
    return (vocabulary.unk,)


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: list[int],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    banned: tuple[int, ...] = (),
    seed: int = 0,
    window: int | None = None,
) -> Iterator[int]:
    """Yield the ids of `num_tokens` tokens that follow the prompt.

    If the model is in training mode, it is switched to evaluation mode to compute each token, and back before the id is
    yielded. If the model is in evaluation mode, its weights must not change until the last id is yielded, because its
    class vectors are computed only once.

    Args:
        model: The language model.
        prompt: At least one id. <eos> at the beginning means the start of a line.
        num_tokens: Number of tokens to generate.
        temperature: Divisor of the log-probabilities. With 0, the most probable token is always chosen.
        top_k: Sample from the k most probable tokens only.
        top_p: Sample from the fewest tokens whose probabilities add up to p. It can be combined with `top_k`.
        banned: Ids that are never generated, such as <unk>.
        seed: Seed of the random numbers.
        window: Maximum number of tokens in the KV cache of a transformer. Recurrent encoders ignore it.
    """
    check_sampling_options(temperature, top_k, top_p)
    reader = _IncrementalReader(model, prompt, window)
    generator = torch.Generator(reader.device).manual_seed(seed)
    sampler = _TokenSampler(model, generator, temperature=temperature, top_k=top_k, top_p=top_p, banned=banned)

    def generate_token() -> int:
        hidden_ND = reader.read()
        token = sampler.sample(hidden_ND)
        reader.append(token)
        return token

    if model.training:
        for _ in range(num_tokens):
            with evaluating(model):  # for each token, because the weights may change before the next token
                token = generate_token()
            yield token
    else:
        with evaluating(model):  # once, so that class vectors are computed once for the whole text
            for _ in range(num_tokens):
                yield generate_token()


class _IncrementalReader:
    """Runs a model on a growing text. Each token is read once, and the state or KV cache is kept between calls.

    A recurrent state has a fixed size, but the KV cache of a transformer grows with every token. So it is limited to a
    window, a maximum number of tokens. When it is full, it is dropped, and the last half window of the text is read
    again, at positions that start from 0 (`context_length`). For example, with window = 4, reading one token at a time:

        token     a      b        c          d            e        f
        cache     a      a b      a b c      a b c d      d e      d e f
    """

    def __init__(self, model: LanguageModel, prompt: list[int], window: int | None) -> None:
        if window is not None and window < 1:
            raise SettingsError(f"window = {window}: must be at least 1 token, or left out")
        self.device = next(model.parameters()).device
        self._model = model
        self._unread_ids = list(prompt)
        # A recurrent encoder carries a state of fixed size instead of a KV cache, so it needs no window.
        self._window = None if model.encoder.carries_state else window
        self._state = model.decoding_state(1)
        self._num_tokens = 0
        self._num_cached = 0
        self._recent_ids: deque[int] = deque(maxlen=self._window or 0)
        """The last tokens of the text, some of which are read again when the KV cache is dropped."""

    def append(self, token: int) -> None:
        """Add a token to the text."""
        self._unread_ids.append(token)

    def read(self) -> Tensor:
        """Read the tokens that were added since the last call. Return the hidden state after the last token, (N, D)."""
        ids = self._unread_ids
        self._unread_ids = []
        self._recent_ids.extend(ids)
        self._num_tokens += len(ids)
        self._num_cached += len(ids)
        context = context_length(self._num_tokens, self._window)
        if context != self._num_cached:
            ids = list(self._recent_ids)[-context:]
            self._state = self._model.decoding_state(1)
            self._num_cached = context
        inputs_NT = torch.tensor([ids], device=self.device)
        encoded: Encoded = self._model(inputs_NT, self._state)
        self._state = encoded.state
        return encoded.output[:, -1]


@dataclass(frozen=True)
class _TokenSampler:
    """Samples the next token of a text. The fields are the arguments of `generate`."""

    model: LanguageModel
    generator: torch.Generator
    temperature: float
    top_k: int | None
    top_p: float | None
    banned: tuple[int, ...]

    def sample(self, hidden_ND: Tensor) -> int:
        """Sample a token that follows a text with this last hidden state.

        Without temperature, top-k and top-p, the output end can sample a token without computing all probabilities. If
        that token is banned, it is rejected, and a token is sampled from the allowed tokens. This gives exactly the
        distribution of the allowed tokens. For example, with p = 0.5, 0.3, 0.2 and the last token banned, the first
        token has the probability 0.5 + 0.2 x (0.5 / 0.8) = 0.625 = 0.5 / 0.8.
        """
        if self.temperature == 1.0 and self.top_k is None and self.top_p is None:
            token = int(self.model.output.sample(hidden_ND, self.generator))
            if token not in self.banned:
                return token
        return self._sample_allowed(hidden_ND)

    def _sample_allowed(self, hidden_ND: Tensor) -> int:
        """Sample one of the allowed tokens, from the probabilities of the best candidates."""
        num_candidates = self.top_k
        if self.temperature < MIN_TEMPERATURE:
            num_candidates = 1
        log_probs_NK, ids_NK = top_candidates(self.model, hidden_ND, num_candidates, self.banned)
        weights_NK = sampling_weights(log_probs_NK, self.temperature, self.top_p)
        candidate = torch.multinomial(weights_NK[0], 1, generator=self.generator)
        return int(ids_NK[0, candidate])


def check_sampling_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise an error if the sampling options are out of range."""
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise SettingsError(f"temperature {temperature}: must be a number from 0 to {MAX_TEMPERATURE:g}")
    if top_k is not None and top_k < 1:
        raise SettingsError(f"top_k = {top_k}: must be at least 1, or left out")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise SettingsError(f"top_p = {top_p}: must be above 0 and at most 1, or left out")


def top_candidates(
    model: LanguageModel, hidden_ND: Tensor, k: int | None, banned: Collection[int]
) -> tuple[Tensor, Tensor]:
    """Return the k most probable ids of each row that are not in `banned`, (log_probs_NK, ids_NK), best first.

    k = None returns all ids. An adaptive softmax may find the best ids without scoring all of them. The best
    k + len(banned) ids always contain the best k allowed ids, so only these are computed.
    """
    vocab_size = model.output.vocab_size
    banned = {token for token in banned if 0 <= token < vocab_size}
    num_allowed = vocab_size - len(banned)
    if not num_allowed:
        raise SettingsError(f"all {vocab_size} words are excluded from generation; allow at least one")
    k = num_allowed if k is None else min(k, num_allowed)
    log_probs_NK, ids_NK = model.output.topk(hidden_ND, k + len(banned))
    if not banned:
        return log_probs_NK, ids_NK

    # Compare with one id at a time: copying the list of ids to the device would make the host wait.
    is_banned_NK = torch.stack([ids_NK == token for token in banned]).any(0)
    # A stable sort of the booleans puts the allowed ids first and keeps their order.
    allowed_columns_NK = is_banned_NK.sort(dim=-1, stable=True).indices[:, :k]
    return log_probs_NK.gather(1, allowed_columns_NK), ids_NK.gather(1, allowed_columns_NK)


def sampling_weights(log_probs_NK: Tensor, temperature: float, top_p: float | None) -> Tensor:
    """Return the weights weights_NK for sampling among candidates, best first. They may not add up to one.

    For example, top_p = 0.6 turns the probabilities 0.5, 0.3, 0.2 into the weights 0.5, 0.3, 0.
    """
    if temperature < MIN_TEMPERATURE:
        # All weight is on the first candidate, the best.
        first_column = log_probs_NK.new_zeros(1, dtype=torch.long)
        return torch.zeros_like(log_probs_NK).index_fill(1, first_column, 1.0)
    probs_NK = torch.softmax(log_probs_NK.float() / temperature, dim=-1)
    if top_p is None:
        return probs_NK
    # Keep a candidate if the better candidates add up to less than top_p, so the best one is always kept.
    sum_of_better_NK = probs_NK.cumsum(-1) - probs_NK
    return torch.where(sum_of_better_NK < top_p, probs_NK, 0.0)
