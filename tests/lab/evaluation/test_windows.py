"""Windows: every token is scored once, with exactly the context of its window, for any batching."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import WINDOWS
from reefknot.lab.config.settings import Count
from reefknot.lab.evaluation import contexts as reading
from reefknot.lab.evaluation import perplexity as scoring
from reefknot.lab.evaluation.frequency import loss_by_frequency
from reefknot.lab.evaluation.perplexity import build_stream, score
from reefknot.lab.evaluation.windows import Complete, Lines, Sliding, Windows, batch_windows, parse_windows
from reefknot.lab.runs.modes import MAX_TOKENS
from reefknot.lab.text.dataset import Dataset
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.contract import Encoder
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

Open = Callable[..., Dataset]
ENCODERS = {"transformer": lambda: Transformer(8, 2, 2, 16, dropout=0.5), "lstm": lambda: LSTM(8, 8, dropout=0.5)}
ALL_WINDOWS = [
    Sliding(0, 7),
    Sliding(5, 1),
    Sliding(13, 4),
    Sliding(3, 10),
    Sliding(1000, 9),
    Complete(6),
    Complete(6, 5),
    Complete(17),
    Lines(),
]


def make_model(words: int, encoder: Encoder | None = None) -> LanguageModel:
    """Return a float64 model with dropout, whose predictions are far from uniform."""
    torch.manual_seed(0)
    table = WordTable(words, 8)
    model = LanguageModel(Lookup(table), encoder or ENCODERS["transformer"](), Softmax(Plain(table)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.double()


def spans_of(windows: Windows, y: list[int], eos: int | None = 0) -> list[tuple[int, int, int]]:
    spans = windows.spans(torch.tensor(y), eos)
    return list(zip(*(column.tolist() for column in spans), strict=True))


@torch.no_grad()
def one_token_at_a_time(model: LanguageModel, dataset: Dataset, windows: Windows) -> list[float]:
    """Return the loss of each token from its full distribution after the part of its window before it."""
    inputs_1T, targets_1T = build_stream(dataset.splits["test"], dataset.vocabulary)
    model.eval()
    losses = {}
    for start, scored, stop in spans_of(windows, targets_1T[0].tolist(), dataset.vocabulary.eos):
        for position in range(scored, stop):
            hidden_1TD = model(inputs_1T[:, start : position + 1]).output
            losses[position] = -model.output.log_probs(hidden_1TD[:, -1])[0, targets_1T[0, position]].item()
    return [losses[position] for position in range(len(losses))]


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("windows", ALL_WINDOWS, ids=lambda windows: windows.name)
def test_losses_equal_one_token_at_a_time(opened: Open, windows: Windows, encoder: str) -> None:
    dataset = opened(test="the cat saw a zebra\n\na dog sat on the zürich mat\nand ran\n\n" * 2)
    model = make_model(len(dataset.vocabulary), ENCODERS[encoder]())
    result = score(model, dataset.splits["test"], dataset.vocabulary, windows=windows)
    assert len(result.nll) == dataset.splits["test"].tokens
    np.testing.assert_allclose(result.nll, one_token_at_a_time(model, dataset, windows), rtol=1e-6)


def test_sliding_spans_match_values_by_hand() -> None:
    text = [1] * 10
    assert spans_of(Sliding(0, 4), text) == [(0, 0, 4), (4, 4, 8), (8, 8, 10)]
    # The first windows have less context, and the last one has fewer tokens to score.
    assert spans_of(Sliding(6, 4), text) == [(0, 0, 4), (0, 4, 8), (2, 8, 10)]
    assert spans_of(Sliding(2, 1), text[:4]) == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 3, 4)]
    assert spans_of(Sliding(50, 50), text) == [(0, 0, 10)]
    assert spans_of(Sliding(3, 4), text, None) == [(0, 0, 4), (1, 4, 8), (5, 8, 10)]


def test_complete_spans_match_values_by_hand() -> None:
    text = [1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0]  # lines of 3, 2, 1, 8 and 2 tokens

    def blocks(length: int) -> list[int]:
        """Return the ends of the blocks."""
        spans = spans_of(Complete(length), text)
        assert all(start == scored for start, scored, _ in spans)
        return [stop for _, _, stop in spans]

    assert blocks(1) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    assert blocks(3) == [3, 6, 9, 12, 14, 16]
    # The line of 8 tokens is alone: its last block of 3 tokens is not filled with the next line.
    assert blocks(5) == [5, 6, 11, 14, 16]
    assert blocks(6) == [6, 12, 14, 16]
    assert blocks(8) == [6, 14, 16]
    assert blocks(10) == [6, 16]
    assert blocks(14) == [14, 16]
    assert blocks(100) == [16]
    assert spans_of(Complete(4), [1, 0, 1, 1]) == [(0, 0, 4)]  # the text may end inside a line
    # With context, the same blocks are scored, and the first ones have less context.
    assert spans_of(Complete(8, context=7), text) == [(0, 0, 6), (0, 6, 14), (7, 14, 16)]


def fairseq_windows(targets: list[int], length: int, context: int) -> list[tuple[list[int], list[int]]]:
    """Return what fairseq's context window reads and scores: the inputs and the scored positions of each window.

    Whole lines fill a sample of at most `length` tokens. The last `context` inputs that were read so far are put in
    front of the next sample.
    """
    samples: list[list[int]] = [[]]
    line: list[int] = []
    for position, target in enumerate(targets):
        line.append(position)
        if target == 0:
            if samples[-1] and len(samples[-1]) + len(line) > length:
                samples.append([])
            samples[-1] += line
            line = []
    inputs = [0, *targets[:-1]]
    past: list[int] = []
    windows = []
    for sample in samples:
        window_inputs = past + [inputs[position] for position in sample]
        windows.append((window_inputs, sample))
        past = window_inputs[-context:]
    return windows


@pytest.mark.parametrize("seed", range(10))
def test_complete_windows_with_context_equal_fairseq_if_every_line_fits(seed: int) -> None:
    random = np.random.default_rng(seed)
    length, context = (int(number) for number in random.integers(4, 20, 2))
    targets = []
    for line_length in random.integers(1, length + 1, 30).tolist():
        targets += [*random.integers(1, 50, line_length - 1).tolist(), 0]
    inputs = [0, *targets[:-1]]
    spans = Complete(length, context).spans(torch.tensor(targets), 0)
    windows = [
        (inputs[start:stop], list(range(scored_start, stop)))
        for start, scored_start, stop in zip(*(edges.tolist() for edges in spans), strict=True)
    ]
    assert windows == fairseq_windows(targets, length, context)


def test_line_spans_match_values_by_hand() -> None:
    assert spans_of(Lines(), [1, 0, 0, 1, 1, 0]) == [(0, 0, 2), (2, 2, 3), (3, 3, 6)]
    assert spans_of(Lines(), [1, 0, 1]) == [(0, 0, 2), (2, 2, 3)]
    assert spans_of(Lines(), [1]) == [(0, 0, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_scored_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = int(random.integers(1, 200))
    targets_T = torch.from_numpy(random.integers(0, int(random.integers(2, 12)), tokens))
    inputs_T = torch.arange(1, tokens + 1)  # inputs are positions, starting at 1; 0 is padding
    context, stride, length, budget = (int(number) for number in random.integers(1, 60, 4))
    for windows in (Sliding(context - 1, stride), Complete(length), Complete(length, context), Lines()):
        spans = windows.spans(targets_T, 0)
        seen = []
        for batch in batch_windows(inputs_T, spans, budget):
            assert len(batch.inputs) == 1 or batch.inputs.numel() <= budget
            assert torch.equal(
                batch.inputs.flatten()[batch.scored_indices] - 1, batch.positions
            )  # each scored row reads the token before its target
            seen += batch.positions.tolist()
            for row in batch.inputs.tolist():
                inside = [token for token in row if token]
                assert row == inside + [0] * (len(row) - len(inside))  # padding is only on the right
                assert inside == list(range(inside[0], inside[0] + len(inside)))
        assert sorted(seen) == list(range(tokens))
        assert (spans.start <= spans.scored_start).all()


@pytest.mark.parametrize("windows", ALL_WINDOWS, ids=lambda windows: windows.name)
def test_losses_are_independent_of_batching(opened: Open, monkeypatch: pytest.MonkeyPatch, windows: Windows) -> None:
    dataset = opened()
    model = make_model(len(dataset.vocabulary))
    reference = score(model, dataset.splits["test"], dataset.vocabulary, windows=windows)
    for tokens, rows in ((1, 1), (40, 3), (10**6, 10**6)):
        monkeypatch.setattr(reading, "TOKENS_AT_ONCE", tokens)
        monkeypatch.setattr(scoring, "ROWS_AT_ONCE", rows)
        result = score(model, dataset.splits["test"], dataset.vocabulary, windows=windows)
        np.testing.assert_allclose(result.nll, reference.nll, rtol=1e-6)
        assert result.definition == reference.definition


def test_window_that_covers_the_text_scores_like_a_stream(opened: Open) -> None:
    dataset = opened()
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    model = make_model(len(vocabulary), ENCODERS["lstm"]())
    stream = score(model, split, vocabulary)
    for windows in (Sliding(0, split.tokens), Sliding(7, 10**6), Complete(split.tokens), Sliding(split.tokens, 50)):
        result = score(model, split, vocabulary, windows=windows)
        np.testing.assert_allclose(result.nll, stream.nll, rtol=1e-6)
        assert (len(result.nll), result.words, result.bytes) == (len(stream.nll), stream.words, stream.bytes)


def test_context_reaches_exactly_as_far_as_stated(opened: Open) -> None:
    """A changed token affects exactly the losses whose windows include it."""
    dataset = opened()
    model = make_model(len(dataset.vocabulary))
    inputs_1T, targets_1T = build_stream(dataset.splits["test"], dataset.vocabulary)
    spans = Sliding(6, 3).spans(
        targets_1T[0], None
    )  # the third window scores 6 to 8 and begins at 0, the fourth begins at 3
    before = scoring.window_losses(model, inputs_1T[0], targets_1T[0], spans)
    inputs_1T[0, 2] = (inputs_1T[0, 2] + 1) % len(dataset.vocabulary)
    changed = np.flatnonzero(scoring.window_losses(model, inputs_1T[0], targets_1T[0], spans) != before)
    assert changed.tolist() == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_autocast_is_close_and_stated_in_the_definition(opened: Open, precision: str) -> None:
    dataset = opened()
    model = make_model(len(dataset.vocabulary)).float()
    exact = score(model, dataset.splits["test"], dataset.vocabulary, windows=Sliding(8, 8))
    rounded = score(model, dataset.splits["test"], dataset.vocabulary, windows=Sliding(8, 8), precision=precision)
    assert rounded.mean == pytest.approx(exact.mean, rel=0.02)
    assert rounded.mean != exact.mean
    assert f"computed in {precision}; independent of how windows are computed together" in rounded.definition


def test_windows_score_sub_words_and_frequencies(opened: Open) -> None:
    dataset = opened(bpe={"merges": 3})
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    result = score(make_model(len(vocabulary)), split, vocabulary, windows=Complete(20))
    assert (result.words, len(result.nll)) == (12 * 19, split.tokens)
    total_bits = result.nll.sum() / np.log(2) + 8 * 12 * 13  # the bytes of zebra and zürich
    assert result.summary().bits_per_byte == pytest.approx(total_bits / split.bytes)
    assert sum(band.tokens for band in loss_by_frequency(result, split, vocabulary).previous) == split.tokens


def test_output_end_computes_only_scored_rows(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = opened()
    rows = []
    plain = Softmax.target_log_probs

    def counted(output: Softmax, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_ND))
        return plain(output, hidden_ND, targets_N)

    monkeypatch.setattr(Softmax, "target_log_probs", counted)
    score(make_model(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary, windows=Sliding(30, 5))
    assert sum(rows) == dataset.splits["test"].tokens


@pytest.mark.parametrize(
    ("windows", "line"),
    [
        (
            Sliding(2560, 512),
            "context: windows of 3,072 tokens, of which the last 512 are scored, each computed independently; "
            "the first windows have less context; <eos> precedes the first token, and every token is scored",
        ),
        (Sliding(0, 512), "context: blocks of 512 tokens, each computed independently; <eos> precedes the first token"),
        (
            Complete(512),
            "context: blocks of whole lines of at most 512 tokens, each computed independently; a longer line is split "
            "into blocks of its own; <eos> precedes",
        ),
        (Lines(), "context: single lines, each computed independently; <eos> precedes the first token"),
    ],
)
def test_definition_describes_the_windows(opened: Open, windows: Windows, line: str) -> None:
    dataset = opened()
    result = score(make_model(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary, windows=windows)
    assert f"\n{line}" in result.definition
    assert result.definition.endswith("computed in float32; independent of how windows are computed together")
    assert result.summary().windows == windows.name


def test_windows_of_lines_need_eos(opened: Open) -> None:
    dataset = opened(end_of_line=False)
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    model = make_model(len(vocabulary))
    result = score(model, split, vocabulary, windows=Sliding(4, 4))
    assert len(result.nll) == split.tokens - 1
    for windows in (Complete(10), Lines()):
        with pytest.raises(SettingsError, match="no line ends to cut it at"):
            score(model, split, vocabulary, windows=windows)


def test_streams_need_an_encoder_that_carries_state(opened: Open) -> None:
    dataset = opened()
    model = make_model(len(dataset.vocabulary))
    with pytest.raises(SettingsError, match="Transformer carries no state"):
        score(model, dataset.splits["test"], dataset.vocabulary)
    with pytest.raises(SettingsError, match="streams = 4: evaluation windows are independent"):
        score(model, dataset.splits["test"], dataset.vocabulary, streams=4, windows=Lines())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Sliding(-1, 4), "context = -1, stride = 4: context must be at least 0"),
        (lambda: Sliding(4, 0), "context = 4, stride = 0"),
        (lambda: Sliding(MAX_TOKENS + 1, 1), "context = 1000000001, stride = 1: .* at most 1,000,000,000"),
        (lambda: Sliding(0, MAX_TOKENS + 1), "stride = 1000000001: .* at most 1,000,000,000"),
        (lambda: Complete(0), "length = 0: must be at least 1"),
        (lambda: Complete(MAX_TOKENS + 1), "length = 1000000001: .* at most 1,000,000,000"),
    ],
)
def test_invalid_windows_are_rejected(build: Callable[[], Windows], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build()


def test_longest_training_block_equals_the_longest_window() -> None:
    TypeAdapter(Count).validate_python(MAX_TOKENS)
    with pytest.raises(ValidationError):
        TypeAdapter(Count).validate_python(MAX_TOKENS + 1)


@pytest.mark.parametrize(
    "windows",
    [*ALL_WINDOWS, Sliding(MAX_TOKENS, MAX_TOKENS), Complete(MAX_TOKENS), Complete(5, MAX_TOKENS)],
    ids=lambda windows: windows.name,
)
def test_windows_can_be_restored_from_their_name(windows: Windows) -> None:
    restored = parse_windows(windows.name)
    assert type(restored) is type(windows)
    assert vars(restored) == vars(windows)


@pytest.mark.parametrize(
    "name", ["", "sliding", "context-5", "complete-0", "Lines", "context-5-stride-05", "context-0-complete-2"]
)
def test_unknown_window_name_is_rejected(name: str) -> None:
    with pytest.raises(SettingsError, match=r"unknown windows .*: use context-C-stride-S, complete-L, context-C-comp"):
        parse_windows(name)


def test_registry_lists_every_kind_of_window() -> None:
    assert [WINDOWS.load(kind) for kind in WINDOWS] == [Sliding, Complete, Lines]
