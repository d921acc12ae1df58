"""Text from a model: one token after the other, with temperature, top-k and top-p (nucleus) sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

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
) -> Iterator[int]:
    """Yield `length` ids that follow the prompt.

    Arguments:
        prompt: at least one id; begin with <eos> for the start of a line.
        temperature: divides the log-probabilities; 0 takes the best word every time.
        top_k, top_p: keep the k best words, or the fewest words whose probabilities reach p; both may be given.
        never: ids that are not to be produced, such as <unk>.
    """
    if not 0.0 <= temperature <= HOTTEST:
        raise SettingsError(f"temperature {temperature}: must be a number from 0 to {HOTTEST:g}")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    state = None
    fed = torch.tensor([prompt], device=device)
    wanted = 1 if temperature < COLDEST else top_k
    plain = temperature == 1.0 and top_k is None and top_p is None
    for _ in range(length):
        with evaluating(model):
            encoded = model(fed, state)
            h_1D = encoded.output[:, -1]
            token = int(model.output.sample(h_1D, generator)) if plain else None
            if token is None or token in never:
                # A draw that is not allowed, followed by one among the allowed, is exact.
                logp_K, ids_K = _candidates(model, h_1D, wanted, never)
                token = int(ids_K[_draw(logp_K, temperature, top_p, generator)])
        state = encoded.state
        yield token
        fed = torch.tensor([[token]], device=device)


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
