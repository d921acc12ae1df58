"""Text from a model: one token after the other, with temperature, top-k and top-p (nucleus) sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.models.language_model import LanguageModel, evaluating

COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures that float32 can divide by; below the first, the best word is taken as if it were 0."""


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
    for _ in range(length):
        with evaluating(model):
            encoded = model(fed, state)
            logp_V = model.output.log_probs(encoded.output[:, -1])[0].float()
        state = encoded.state
        logp_V[list(never)] = -torch.inf
        token = _draw(logp_V, temperature, top_k, top_p, generator)
        yield token
        fed = torch.tensor([[token]], device=device)


def _draw(
    logp_V: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    if temperature < COLDEST:
        return int(logp_V.argmax())
    logp, ids = (logp_V / temperature).sort(descending=True)
    probabilities = torch.softmax(logp[:top_k], dim=-1)
    if top_p is not None:
        # A word stays while the words before it have not reached p, so the best one always stays.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = torch.where(before < top_p, probabilities, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
