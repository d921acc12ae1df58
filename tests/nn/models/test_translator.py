"""Translators: scores without effects of padding, tied tables, parameter counts, FLOPs and errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from reefknot.errors import ArgumentError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.attention_gru import AttentionGRU
from reefknot.nn.encoders.contract import SourceEncoder
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.encoders.stacked import GRU
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.translator import PAD, Translator, split_sides
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

V, D = 23, 16
KINDS = ("attention_gru", "encoder_decoder")


def build_encoder(kind: str) -> SourceEncoder:
    if kind == "attention_gru":
        return AttentionGRU(D, D, units=12)
    return EncoderDecoder(D, D, layers=2, heads=4, ffn_dim=32, dropout=0.0)


def translator(kind: str, tied_ends: int = 3) -> Translator:
    """Build a translator with one table for three ends, for two ends, or for one end each."""
    torch.manual_seed(3)
    words = WordTable(V, D)
    source = words if tied_ends == 3 else WordTable(V, D)
    classes = words if tied_ends > 1 else WordTable(V, D)
    model = Translator(Lookup(source), Lookup(words), build_encoder(kind), Softmax(Plain(classes)))
    return model.double().eval()


def pairs() -> tuple[Tensor, Tensor]:
    """Return three pairs: sources of 5, 3 and 1 words, targets of 4, 2 and 4."""
    torch.manual_seed(5)
    source_BS, inputs_BT, targets_BT = (torch.randint(V, (3, width)) for width in (5, 4, 4))
    source_BS[1, 3:] = source_BS[2, 1:] = PAD
    targets_BT[1, 2:] = IGNORE
    return torch.cat([source_BS, inputs_BT], dim=1), targets_BT


@pytest.mark.parametrize("kind", KINDS)
def test_pair_has_the_same_score_in_a_batch_and_alone(kind: str) -> None:
    model, (pairs_BU, targets_BT) = translator(kind), pairs()
    source_BS, inputs_BT = split_sides(pairs_BU, targets_BT)
    log_probs_BT, _ = model.target_log_probs(pairs_BU, targets_BT)
    for row in range(3):
        unpadded, scored = source_BS[row] != PAD, targets_BT[row] != IGNORE
        alone = torch.cat([source_BS[row, unpadded], inputs_BT[row, scored]])[None]
        log_probs_T, _ = model.target_log_probs(alone, targets_BT[row : row + 1, scored])
        assert torch.allclose(log_probs_T[0], log_probs_BT[row, scored], atol=1e-12)
    assert not log_probs_BT[targets_BT == IGNORE].any()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_equals_negative_sum_of_target_log_probs(kind: str) -> None:
    model, (pairs_BU, targets_BT) = translator(kind), pairs()
    log_probs_BT, _ = model.target_log_probs(pairs_BU, targets_BT)
    assert torch.allclose(model.loss(pairs_BU, targets_BT).sum(), -log_probs_BT.sum(), atol=1e-10)
    positions_M = (targets_BT.flatten() != IGNORE).nonzero()[:, 0]
    losses = model.loss(pairs_BU, targets_BT, positions_M=positions_M)
    assert torch.allclose(losses.sum(), -log_probs_BT.sum(), atol=1e-10)
    assert losses.parts["nll"].count == 10
    losses.mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_single_steps_equal_one_pass_over_the_target(kind: str) -> None:
    model, (pairs_BU, targets_BT) = translator(kind), pairs()
    source_BS, inputs_BT = split_sides(pairs_BU, targets_BT)
    whole = model(inputs_BT, model.encode_source(source_BS)).output
    state, steps = model.start_decoding(source_BS), []
    for step in range(4):
        encoded = model(inputs_BT[:, step : step + 1], state)
        state = encoded.state
        steps.append(encoded.output)
    assert torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_sums_to_one_and_is_zero_on_padding(kind: str) -> None:
    model, (pairs_BU, targets_BT) = translator(kind), pairs()
    source_BS, inputs_BT = split_sides(pairs_BU, targets_BT)
    a_BTS = model.attention(inputs_BT, model.encode_source(source_BS))
    assert torch.allclose(a_BTS.sum(-1), torch.ones(3, 4, dtype=torch.float64))
    assert not a_BTS.masked_select((source_BS == PAD)[:, None].expand_as(a_BTS)).any()


def test_ties_and_counts_follow_shared_tables() -> None:
    none, decoder, all_three = (translator("encoder_decoder", tied_ends) for tied_ends in (1, 2, 3))
    assert (none.tied, none.three_way) == (False, False)
    assert (decoder.tied, decoder.three_way) == (True, False)
    assert (all_three.tied, all_three.three_way) == (True, True)
    sizes = [sum(model.parameter_counts().values()) for model in (none, decoder, all_three)]
    assert sizes == [sizes[2] + 2 * V * D, sizes[2] + V * D, sizes[2]]
    assert all_three.parameter_counts()["source"] == 0


def test_drill_adds_the_published_parameters_to_the_base_model() -> None:
    with torch.device("meta"):
        words = WordTable(37_000, 512)
        ends = Lookup(words), Lookup(words), EncoderDecoder(512, 512)
        plain, drill = (
            sum(Translator(*ends, Softmax(classifier)).parameter_counts().values())
            for classifier in (Plain(words), Drill(words, depth=2))
        )
    assert drill - plain == 525_312


def test_invalid_parts_and_calls_are_rejected() -> None:
    words = WordTable(V, D)
    with pytest.raises(SettingsError, match="a GRU does not"):
        Translator(Lookup(words), Lookup(words), GRU(D, D), Softmax(Plain(words)))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="has dimension 8 but the encoder expects 16"):
        Translator(Lookup(WordTable(V, 8)), Lookup(words), build_encoder("attention_gru"), Softmax(Plain(words)))
    model = translator("attention_gru")
    with pytest.raises(ArgumentError, match="reads its source first"):
        model(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="needs targets"):
        model.loss(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_flops_equal_torch_counter(kind: str) -> None:
    """There is no padding; unlike our count, torch's includes the masked half of target attention."""
    model = translator(kind).float().train()
    torch.manual_seed(7)
    pairs_BU, targets_BT = torch.randint(V, (4, 11)), torch.randint(V, (4, 5))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.loss(pairs_BU, targets_BT).mean().backward()
    masked = 0 if kind == "attention_gru" else 6 * 4 * 2 * D * 5 * 5
    assert model.flops(pairs_BU, targets_BT) + masked == pytest.approx(counter.get_total_flops(), rel=0.1)
