"""Text from a model: one token after the other, with temperature, top-k and top-p (nucleus) sampling.

Each token is read once. A recurrent state is as large after a thousand tokens as after one; the memory of a transformer
grows with every token and is of no use beyond the lengths it was trained on. When it has grown to a window it is given
up, and the last half window of the text is read afresh, at positions that begin anew: what was written before is
forgotten, and no token is predicted from less than half a window, where there is as much text.

Shapes: N rows (one text is one), D width, K candidates.
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
    check_choice(temperature, top_k, top_p)
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
                    logp_1K, ids_1K = candidates(model, h_1D, wanted, never)
                    p_1K = chances(logp_1K, temperature, top_p)
                    token = int(ids_1K[0, torch.multinomial(p_1K[0], 1, generator=generator)])
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


def check_choice(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse what no word can be chosen by."""
    if not 0.0 <= temperature <= HOTTEST:
        raise SettingsError(f"temperature {temperature}: must be a number from 0 to {HOTTEST:g}")
    if top_k is not None and top_k < 1:
        raise SettingsError(f"top_k = {top_k}: must be at least 1, or left out")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise SettingsError(f"top_p = {top_p}: must be above 0 and at most 1, or left out")


def candidates(model: LanguageModel, h_ND: Tensor, k: int | None, never: Collection[int]) -> tuple[Tensor, Tensor]:
    """The k best ids of each row that may be produced, or all that may: (logp_NK, ids_NK), best first. An output end
    that need not look at every class does not."""
    size = model.output.vocab_size
    never = {each for each in never if 0 <= each < size}
    allowed = size - len(never)
    if not allowed:
        raise SettingsError(f"all {size} words are never to be produced; allow one at least")
    k = allowed if k is None else min(k, allowed)
    logp_NK, ids_NK = model.output.topk(h_ND, k + len(never))
    if never:
        # One comparison for each: a list of them would have to be copied to the device, which the host waits for.
        banned_NK = torch.stack([ids_NK == each for each in never]).any(0)
        first_NK = banned_NK.sort(dim=-1, stable=True).indices[:, :k]
        logp_NK, ids_NK = logp_NK.gather(1, first_NK), ids_NK.gather(1, first_NK)
    return logp_NK, ids_NK


def chances(logp_NK: Tensor, temperature: float, top_p: float | None) -> Tensor:
    """What each of some candidates, best first, is drawn with: p_NK, which need not add up to one."""
    if temperature < COLDEST:
        return torch.zeros_like(logp_NK).index_fill(1, logp_NK.new_zeros(1, dtype=torch.long), 1.0)
    p_NK = torch.softmax(logp_NK.float() / temperature, dim=-1)
    if top_p is not None:
        # A word stays while the words before it have not reached p, so the best one always stays.
        before_NK = p_NK.cumsum(-1) - p_NK
        p_NK = torch.where(before_NK < top_p, p_NK, 0.0)
    return p_NK
