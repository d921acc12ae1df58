"""Protocols of papers against the loops of their programs, and their arithmetic by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from reefknot.errors import DataError, SettingsError
from reefknot.lab.evaluation import perplexity as module
from reefknot.lab.evaluation.perplexity import stream_losses
from reefknot.lab.evaluation.protocols import Counting, get_protocol, score_by_protocol
from reefknot.lab.text.dataset import Dataset, Split
from reefknot.nn.models.language_model import LanguageModel

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]


def text_of(tokens: int, name: str = "test") -> Split:
    return Split(name, np.zeros(tokens, dtype=np.int32), words=tokens, lines=1, bytes=tokens, unknown=0)


@torch.no_grad()
def windows_of(model: LanguageModel, ids: np.ndarray, streams: int, steps: int) -> list[torch.Tensor]:
    """Return the losses (streams, steps) of each window; the state is carried, and the last window may be short."""
    model.eval()
    length = len(ids) // streams
    data = torch.from_numpy(ids[: streams * length].astype(np.int64)).view(streams, length)
    state, windows = None, []
    for start in range(0, length - 1, steps):
        stop = min(start + steps, length - 1)
        encoded = model(data[:, start:stop], state)
        state = encoded.state
        logp = model.output.log_probs(encoded.output.flatten(0, 1)).view(streams, stop - start, -1)
        windows.append(-logp.gather(2, data[:, start + 1 : stop + 1, None])[..., 0].double())
    return windows


def test_zaremba_scores_only_full_windows(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    splits = dataset.splits
    countings = get_protocol("zaremba", batch=4, steps=9)
    assert countings is not None
    scores = score_by_protocol("paper", model, splits, countings)
    whole = [window for window in windows_of(model, splits["valid"].ids, 4, 9) if window.shape[1] == 9]
    total = sum(float(window.sum()) / 4 for window in whole)
    assert scores.valid.nll == pytest.approx(total / (9 * len(whole)), rel=1e-6)
    # 228 tokens: 57 in each of 4 streams, of which 54 of 56 targets fill six windows.
    assert scores.valid.tokens == 4 * 54
    steps = windows_of(model, splits["test"].ids, 1, 1)
    assert len(steps) == scores.test.tokens == 227
    assert scores.test.perplexity == pytest.approx(math.exp(sum(map(float, steps)) / 227), rel=1e-6)


def test_awd_divides_by_rows_including_one_without_target(opened: Open, model_for: Build) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary))
    splits = dataset.splits
    countings = get_protocol("awd", batch=4, steps=9)
    assert countings is not None
    scores = score_by_protocol("paper", model, splits, countings)
    for name, streams, rows in (("valid", 10, 22), ("test", 1, 228)):
        total = sum(
            len(window[0]) * float(window.mean()) for window in windows_of(model, splits[name].ids, streams, 70)
        )
        assert getattr(scores, name).nll == pytest.approx(total / rows, rel=1e-6)
        assert getattr(scores, name).tokens == streams * (rows - 1)


def test_means_match_values_computed_by_hand() -> None:
    nll_BT = np.array([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]], dtype=np.float32)
    assert Counting(2).mean(nll_BT) == 4.0
    assert Counting(2, rows_without_target=1).mean(nll_BT) == 3.0
    # Penn Treebank's validation text: the published program's perplexity is low by about 0.03 at 60.
    ptb = text_of(73_760, "valid")
    awd = get_protocol("awd", 20, 70)
    assert awd is not None
    assert awd["valid"].targets_per_stream(ptb) == 7_375
    low = awd["valid"].mean(np.full((10, 7_375), math.log(60.0), dtype=np.float32))
    assert 60.0 - math.exp(low) == pytest.approx(0.033, abs=1e-3)


def test_target_counts_match_values_computed_by_hand() -> None:
    # 103 tokens are 10 streams of 10 tokens, with 3 left over. 9 targets are two windows of 4 and one token.
    assert Counting(10, window=4).targets_per_stream(text_of(103)) == 8
    assert Counting(10).targets_per_stream(text_of(103)) == 9
    assert Counting(1).targets_per_stream(text_of(2)) == 1


def test_definition_states_what_was_counted() -> None:
    text = Counting(10, window=4).describe(text_of(103, "valid"))
    assert text.startswith(
        "valid text: 10 contiguous streams of 10 tokens; each starts with an empty state, which is carried"
    )
    assert "the last 3 tokens of the text are dropped" in text
    assert "the last 1 of a stream, which do not fill a window of 4, are dropped" in text
    assert text.endswith("80 of 103 tokens are scored and the total is divided by 80")
    one = Counting(1, rows_without_target=1).describe(text_of(50))
    assert "one stream of 50 tokens" in one
    assert "dropped" not in one
    assert one.endswith("49 of 50 tokens are scored and the total is divided by 50")


def test_default_definition_has_no_protocol() -> None:
    assert get_protocol("definition", batch=4, steps=9) is None


@pytest.mark.parametrize(("counting", "tokens"), [(Counting(10), 19), (Counting(4, window=9), 39), (Counting(1), 1)])
def test_too_short_text_is_rejected(counting: Counting, tokens: int) -> None:
    with pytest.raises(DataError, match=rf"test text has {tokens} tokens, but .* need {tokens + 1}"):
        counting.targets_per_stream(text_of(tokens))
    assert counting.targets_per_stream(text_of(tokens + 1)) == counting.window


def cut_losses(model: LanguageModel, split: Split, counting: Counting) -> np.ndarray:
    return stream_losses(model, *counting.inputs_and_targets(split))


def test_losses_are_independent_of_the_memory_bound(
    opened: Open, model_for: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened()
    model = model_for(len(dataset.vocabulary)).train()
    reference = cut_losses(model, dataset.splits["test"], Counting(4))
    assert reference.shape == (4, 56)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 12)
    np.testing.assert_allclose(cut_losses(model, dataset.splits["test"], Counting(4)), reference, atol=1e-5)
    assert model.training


def test_spelled_inputs_are_read(opened: Open, model_for: Build) -> None:
    dataset = opened(keep_spellings=True)
    model = model_for(len(dataset.vocabulary) + 2)
    spelled = cut_losses(model, dataset.splits["test"], Counting(1))
    assert abs(spelled.mean() - cut_losses(model, opened().splits["test"], Counting(1)).mean()) > 1e-3


def test_encoder_without_state_is_rejected(opened: Open, transformer_for: Build) -> None:
    dataset = opened()
    countings = get_protocol("awd", batch=4, steps=9)
    assert countings is not None
    with pytest.raises(SettingsError, match="carries its state, but Transformer carries none"):
        score_by_protocol("paper", transformer_for(len(dataset.vocabulary)), dataset.splits, countings)
