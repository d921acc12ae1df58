"""FLOPs of a training step, compared with torch's counter of matrix products.

Our count differs by design: it leaves out padding and the masked half of attention, and counts the gradient of a
window's initial state, which torch does not compute.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from reefknot.kernels.choice import using
from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.bilinear import Bilinear
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.dual import Dual
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.encoders.contract import Encoded, Encoder, State
from reefknot.nn.encoders.highway import RecurrentHighway
from reefknot.nn.encoders.stacked import GRU, LSTM
from reefknot.nn.encoders.transformer import Transformer
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.inputs.char_cnn import CharCNN
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.inputs.spelling import spell
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs import adaptive
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.sampled import SampledSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

V, D, B, T = 40, 16, 3, 10


class IdentityEncoder(Encoder):
    """An encoder without operations, so that only the ends are counted."""

    def __init__(self, dim: int = D) -> None:
        super().__init__()
        self.input_dim = self.dim = dim

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        return {}

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        return Encoded(inputs_BTD, inputs_BTD, state)


def window() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    text = torch.randint(V, (B, T + 1))
    return text[:, :-1], text[:, 1:]


def torch_flops(model: LanguageModel) -> int:
    """Return torch's count for a forward and a backward pass; the reference kernel computes no score twice."""
    inputs_BT, targets_BT = window()
    model.double().train()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), using("reference"):
        model.loss(inputs_BT, targets_BT).sum().backward()
    return int(counter.get_total_flops())


def build_model(
    source: InputEnd | None = None, encoder: Encoder | None = None, output: OutputEnd | None = None
) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(
        source or Lookup(WordTable(V, D)), encoder or IdentityEncoder(), output or Softmax(Plain(WordTable(V, D)))
    )


def banded_table() -> BandedTable:
    return BandedTable(V, D, cutoffs=[8, 20], factor=2)


def test_lstm_and_softmax_equal_the_formula() -> None:
    assert build_model(encoder=LSTM(D, D, 2)).flops(*window()) == 6 * B * T * (2 * 8 * D * D + D * V)


def test_projected_lookup_and_softmax_equal_torch() -> None:
    built = build_model(Lookup(WordTable(V, 4), project_to=D))
    assert built.flops(*window()) == torch_flops(built) == 6 * B * T * (4 * D + D * V)


@pytest.mark.parametrize("encoder", [LSTM(D, D, 2), GRU(D, D, 1), RecurrentHighway(D, D, 3)])
def test_recurrent_encoders_equal_torch_except_initial_state(encoder: Encoder) -> None:
    """The initial state gets no gradient: one of 3 T recurrent products is not computed."""
    built = build_model(encoder=encoder)
    flops, expected = built.flops(*window()), torch_flops(built)
    assert expected < flops < expected * (1 + 1 / (3 * T) + 1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_transformer_equals_torch_except_masked_half(recompute: bool) -> None:
    built = build_model(encoder=Transformer(D, layers=2, heads=4, ffn_dim=24, recompute=recompute))
    half = 2 * B * 6 * T * T * D
    weights = 2 * (4 * D * D + 2 * D * 24)
    assert built.flops(*window()) == 6 * B * T * (weights + D * V) + half
    if not recompute:
        assert built.flops(*window()) == torch_flops(built) - half
    else:
        assert built.flops(*window()) < torch_flops(built) - half


@pytest.mark.parametrize("head_projection", ["none", "own", "shared"])
def test_adaptive_ends_equal_torch(head_projection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "PAD_MULTIPLE", 1)
    table = banded_table()
    shared = BandProjections(table, D)
    output = AdaptiveSoftmax(table, shared, head_projection=head_projection)  # type: ignore[arg-type]
    built = build_model(AdaptiveLookup(table, shared), output=output)
    assert built.flops(*window()) == torch_flops(built)


def test_padding_rows_of_adaptive_tails_do_not_count() -> None:
    table = banded_table()
    built = build_model(
        AdaptiveLookup(table, BandProjections(table, D)),
        output=AdaptiveSoftmax(table, BandProjections(table, D, head=False)),
    )
    assert built.flops(*window()) < torch_flops(built)


def test_projection_before_adaptive_softmax_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "PAD_MULTIPLE", 1)
    table = BandedTable(V, 8, cutoffs=[8, 20], factor=2)
    output = AdaptiveSoftmax(table, BandProjections(table, 8, head=False), context_dim=D, project_to=8)
    built = build_model(output=output)
    assert built.flops(*window()) == torch_flops(built)


def test_char_cnn_equals_torch_and_counts_each_word_once() -> None:
    words = [chr(97 + number // 26) + chr(97 + number % 26) for number in range(V)]
    built = build_model(CharCNN(spell(words), D, filters=[(1, 6), (2, 4)], byte_dim=5))
    assert built.flops(*window()) == torch_flops(built)
    longer = build_model(CharCNN(spell(["x" * 30, *words[1:]]), D, filters=[(1, 6), (2, 4)], byte_dim=5))
    inputs_BT, targets_BT = window()
    inputs_BT[0, 0] = 0
    added = longer.flops(inputs_BT, targets_BT) - built.flops(inputs_BT, targets_BT)
    assert added == 6 * 28 * 5 * (6 + 2 * 4), "windows beyond the end of shorter words do not count"


@pytest.mark.parametrize(
    "classifier",
    [
        lambda table: Projected(table, D),
        lambda table: Bilinear(table, D),
        lambda table: Dual(table, D, joint_dim=12),
        lambda table: Drill(table, depth=2),
    ],
)
def test_classifiers_equal_torch(classifier: object) -> None:
    built = build_model(output=Softmax(classifier(WordTable(V, D))))  # type: ignore[operator]
    assert built.flops(*window()) == torch_flops(built)


def test_mixture_of_softmaxes_equals_torch() -> None:
    built = build_model(output=MixtureOfSoftmaxes(Plain(WordTable(V, D)), D, experts=3))
    assert built.flops(*window()) == torch_flops(built)


@pytest.mark.parametrize("detach", [False, True])
def test_augmented_loss_does_not_count_recomputed_scores(detach: bool) -> None:
    table = WordTable(V, D)
    built = build_model(Lookup(table), output=Augmented(Plain(WordTable(V, D)), table, gamma=1.0, detach_target=detach))
    flops = built.flops(*window())
    distinct = len(window()[1].unique())
    assert flops == 6 * B * T * D * V + (6 if detach else 10) * distinct * D * V
    assert flops < torch_flops(built)


def test_sampled_softmax_counts_its_samples() -> None:
    built = build_model(output=SampledSoftmax(Plain(WordTable(V, D)), samples=7))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert built.flops(*window()) == 6 * B * T * D * 7
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)
    many = build_model(output=SampledSoftmax(Plain(WordTable(V, D)), samples=10 * V))
    assert many.flops(*window()) == 6 * B * T * D * V


def test_padding_does_not_count() -> None:
    built = build_model(encoder=Transformer(D, layers=1, heads=2, ffn_dim=24))
    inputs_BT, targets_BT = window()
    padded_x, padded_y = (
        nn.functional.pad(ids, (0, 5), value=fill) for ids, fill in ((inputs_BT, 0), (targets_BT, IGNORE))
    )
    assert built.flops(padded_x, padded_y) == built.flops(inputs_BT, targets_BT)
    targets_BT[1:] = IGNORE
    assert built.flops(inputs_BT, targets_BT) == built.flops(inputs_BT[:1], targets_BT[:1])
    assert built.flops(inputs_BT, torch.full_like(targets_BT, IGNORE)) == 0


class UncountedEncoder(IdentityEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(D, D)


class UncountedOutput(OutputEnd):
    def __init__(self) -> None:
        super().__init__()
        self.vocab_size, self.context_dim = V, D
        self.matrix = nn.Linear(D, D)
        self.table = WordTable(V, D)

    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        raise NotImplementedError


def test_default_count_applies_every_matrix_to_every_row() -> None:
    assert UncountedEncoder().flops(torch.tensor([2, 3])) == 6 * 5 * D * D
    assert UncountedOutput().flops(torch.zeros(5, dtype=torch.long)) == 6 * 5 * (D * D + D * V)
    assert Lookup(WordTable(V, D)).flops(torch.zeros(5, dtype=torch.long)) == 0
    assert Classifier(WordTable(V, D), D, bias=True).flops(5) == 6 * 5 * D * V


def test_wikitext_103_transformer_equals_the_formula() -> None:
    """WikiText-103: 6 FLOPs per weight of the blocks, attention over 512 tokens, and the two ends."""
    with torch.device("meta"):
        table = BandedTable(267_744, 1024, sizes=[20_000, 40_000], factor=4)
        shared = BandProjections(table, 1024)
        built = LanguageModel(AdaptiveLookup(table, shared), Transformer(1024), AdaptiveSoftmax(table, shared))
    text = torch.arange(1, 514)[None]
    per_token = built.flops(text[:, :-1], text[:, 1:]) / 512
    blocks = 16 * (4 * 1024**2 + 2 * 1024 * 4096)
    ends = 1024 * 1024 + 1024 * 20_002
    assert per_token == 6 * (blocks + 16 * 512 * 1024 + ends)
