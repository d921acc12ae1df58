"""Text from a model: one token after the other, with temperature, top-k and top-p (nucleus) sampling.

Each token is read once. A recurrent state is as large after a thousand tokens as after one; the memory of a transformer
grows with every token and is of no use beyond the lengths it was trained on. When it has grown to a window it is given
up, and the last half window of the text is read afresh, at positions that begin anew: what was written before is
forgotten, and no token is predicted from less than half a window, where there is as much text.

Shapes: D width, K candidates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from reefknot.encoders.contract import Encoded
from reefknot.errors import SettingsError
from reefknot.models.language_model import LanguageModel, evaluating
from reefknot.text.vocabulary import Vocabulary

COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures that float32 can divide by; below the first, the best word is taken as if it were 0."""


def prompt_ids(words: list[str], vocabulary: Vocabulary) -> list[int]:
    """What a model reads before it goes on: the start of a line and these words, at least one id."""
    ids = vocabulary.encode_inputs(words)
    return [vocabulary.eos, *ids] if vocabulary.eos is not None else ids or [0]


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: list[int],
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    never: tuple[int, ...] = (),
    seed: int = 0,
    window: int | None = None,
) -> Iterator[int]:
    """Yield `length` ids that follow the prompt.

    A model in training is in training between the ids. One in evaluation mode must stay as it is until the last id was
    taken: class vectors that a network computes are computed once.

    Arguments:
        prompt: at least one id; begin with <eos> for the start of a line.
        temperature: divides the log-probabilities; 0 takes the best word every time.
        top_k, top_p: keep the k best words, or the fewest words whose probabilities reach p; both may be given.
        never: ids that are not to be produced, such as <unk>.
        window: tokens that an encoder which does not carry its state keeps in memory, at most; others need no limit.
    """
    if not 0.0 <= temperature <= HOTTEST:
        raise SettingsError(f"temperature {temperature}: must be a number from 0 to {HOTTEST:g}")
    reader = _Reader(model, window)
    generator = torch.Generator(reader.device).manual_seed(seed)
    wanted = 1 if temperature < COLDEST else top_k
    plain = temperature == 1.0 and top_k is None and top_p is None
    unread = prompt
    settled = not model.training
    with evaluating(model) if settled else nullcontext():
        for _ in range(length):
            with nullcontext() if settled else evaluating(model):
                h_1D = reader.read(unread)
                token = int(model.output.sample(h_1D, generator)) if plain else None
                if token is None or token in never:
                    # A draw that is not allowed, followed by one among the allowed, is exact.
                    logp_K, ids_K = _candidates(model, h_1D, wanted, never)
                    token = int(ids_K[_draw(logp_K, temperature, top_p, generator)])
            yield token
            unread = [token]


class _Reader:
    """The model with what it has read so far."""

    def __init__(self, model: LanguageModel, window: int | None) -> None:
        if window is not None and window < 1:
            raise SettingsError(f"window = {window}: must be at least 1 token, or left out")
        self.device = next(model.parameters()).device
        self._model = model
        self._window = None if model.encoder.carries else window
        self._state = model.memory(1)
        self._held = 0
        # What a new memory begins with; nothing where none will be.
        self._last: deque[int] = deque(maxlen=max(1, self._window // 2) if self._window else 0)

    def read(self, ids: list[int]) -> Tensor:
        """The hidden state after these ids, h_1D."""
        self._last.extend(ids)
        self._held += len(ids)
        if self._window and self._held > self._window:
            ids = list(self._last)
            self._state, self._held = self._model.memory(1), len(ids)
        encoded: Encoded = self._model(torch.tensor([ids], device=self.device), self._state)
        self._state = encoded.state
        return encoded.output[:, -1]


def _candidates(model: LanguageModel, h_1D: Tensor, k: int | None, never: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The k best ids that may be produced, best first; an output end that need not look at every class does not."""
    size = model.output.vocab_size
    logp_1K, ids_1K = model.output.topk(h_1D, size if k is None else min(k + len(never), size))
    allowed_K = torch.isin(ids_1K[0], ids_1K.new_tensor(never), invert=True)
    return logp_1K[0, allowed_K][:k].float(), ids_1K[0, allowed_K][:k]


def _draw(logp_K: Tensor, temperature: float, top_p: float | None, generator: torch.Generator) -> int:
    if temperature < COLDEST:
        return 0
    probabilities = torch.softmax(logp_K / temperature, dim=-1)
    if top_p is not None:
        # A word stays while the words before it have not reached p, so the best one always stays.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = torch.where(before < top_p, probabilities, 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
