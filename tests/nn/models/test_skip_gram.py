"""Skip-gram: initialisation, tied tables and loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from reefknot.errors import SettingsError
from reefknot.nn.models.skip_gram import SkipGram
from reefknot.nn.tables import WordTable


def test_untied_tables_are_initialised_as_in_word2vec() -> None:
    model = SkipGram.create(vocab_size=500, dim=10)
    assert not model.tied
    assert not model.output.weight.any()
    values = model.input.weight.detach()
    assert 0.049 < float(values.max()) <= 0.05
    assert -0.05 <= float(values.min()) < -0.049
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 * 500 * 10


def test_tied_table_is_initialised_like_the_input_table() -> None:
    torch.manual_seed(1)
    tied = SkipGram.create(vocab_size=500, dim=10, tied=True)
    torch.manual_seed(1)
    untied = SkipGram.create(vocab_size=500, dim=10)
    assert tied.tied
    assert tied.input.weight is tied.output.weight
    assert len(list(tied.parameters())) == 1
    assert float(tied.input.weight.detach().abs().max()) <= 0.05
    assert tied.input.weight.shape == untied.input.weight.shape


@pytest.mark.parametrize("tied", [False, True])
def test_loss_equals_the_sum_over_pairs_and_negatives(tied: bool) -> None:
    torch.manual_seed(0)
    table = WordTable(7, 3).double()
    model = SkipGram(table, table if tied else WordTable(7, 3).double())
    centres = torch.tensor([1, 4])
    contexts = torch.tensor([2, 4])
    negatives = torch.tensor([[3, 1, 3], [0, 6, 5]])
    total = torch.zeros((), dtype=torch.float64)
    for centre, context, pair_negatives in zip(centres, contexts, negatives, strict=True):
        context_vector = model.input.weight[context]
        total = total - F.logsigmoid(model.output.weight[centre] @ context_vector)
        for negative in pair_negatives:
            if negative != centre:  # a negative that equals the centre word is skipped
                total = total - F.logsigmoid(-(model.output.weight[negative] @ context_vector))
    torch.testing.assert_close(model.loss(centres, contexts, negatives), total)


def test_mismatched_or_unit_norm_tables_are_rejected() -> None:
    with pytest.raises(SettingsError, match=r"7 words of dimension 3, the output 7 of dimension 4"):
        SkipGram(WordTable(7, 3), WordTable(7, 4))
    with pytest.raises(SettingsError, match="without unit_norm"):
        SkipGram(WordTable(7, 3, unit_norm=True), WordTable(7, 3))
