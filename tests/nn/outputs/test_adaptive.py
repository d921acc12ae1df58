"""The adaptive softmax equals torch's and, with one band, the plain softmax; its search is exact.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs import adaptive
from reefknot.nn.outputs.adaptive import PAD_MULTIPLE, AdaptiveSoftmax
from reefknot.nn.outputs.contract import Plan
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

V, D, CUTOFFS, FACTOR = 23, 12, [7, 15], 2


def build(seed: int = 0, head: bool = False, **options: object) -> AdaptiveSoftmax:
    """Build a float64 adaptive softmax with three bands and random parameters."""
    torch.manual_seed(seed)
    bands = BandedTable(V, D, cutoffs=CUTOFFS, factor=FACTOR)
    built = AdaptiveSoftmax(bands, BandProjections(bands, D, head=head), **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_()
    return built


def hidden(rows: int = 40) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, D, dtype=torch.float64, requires_grad=True)


def targets(rows: int = 40) -> Tensor:
    torch.manual_seed(2)
    return torch.randint(V, (rows,))


def torch_module(softmax: AdaptiveSoftmax) -> nn.AdaptiveLogSoftmaxWithLoss:
    """Return torch's module with the same weights."""
    reference = nn.AdaptiveLogSoftmaxWithLoss(D, V, CUTOFFS, div_value=FACTOR).double()
    assert softmax.clusters is not None
    with torch.no_grad():
        reference.head.weight.copy_(torch.cat([softmax.tables()[0].weight, softmax.clusters]))
        for tail, table, matrix in zip(reference.tail, softmax.tables()[1:], softmax.projections.bands, strict=True):
            down, up = tail  # type: ignore[misc]
            down.weight.copy_(matrix.T)
            up.weight.copy_(table.weight)
    return reference


def test_log_probs_loss_and_gradients_equal_torch() -> None:
    softmax, hidden_ND, targets_N = build(), hidden(), targets()
    reference = torch_module(softmax)
    torch.testing.assert_close(softmax.log_probs(hidden_ND), reference.log_prob(hidden_ND), rtol=0, atol=1e-12)
    expected = reference(hidden_ND, targets_N)
    torch.testing.assert_close(softmax.target_log_probs(hidden_ND, targets_N), expected.output, rtol=0, atol=1e-12)
    loss = softmax.loss(hidden_ND, targets_N, softmax.prepare(targets_N))["nll"]
    torch.testing.assert_close(loss.sum / loss.count, expected.loss, rtol=0, atol=1e-12)

    for module, mean in ((softmax, loss.sum / loss.count), (reference, expected.loss)):
        mean.backward(inputs=[hidden_ND, *module.parameters()])
    assert softmax.clusters is not None
    head = torch.cat([softmax.tables()[0].weight.grad, softmax.clusters.grad])  # type: ignore[list-item]
    torch.testing.assert_close(head, reference.head.weight.grad)
    for tail, table, matrix in zip(reference.tail, softmax.tables()[1:], softmax.projections.bands, strict=True):
        down, up = tail  # type: ignore[misc]
        torch.testing.assert_close(matrix.grad.T, down.weight.grad)
        torch.testing.assert_close(table.weight.grad, up.weight.grad)


def test_float32_target_log_probs_equal_torch() -> None:
    softmax = build()
    with torch.no_grad():
        for parameter in softmax.parameters():
            parameter.mul_(0.3)
    reference, hidden_ND, targets_N = torch_module(softmax).float(), hidden().detach().float(), targets()
    torch.testing.assert_close(
        softmax.float().target_log_probs(hidden_ND, targets_N),
        reference(hidden_ND, targets_N).output,
        rtol=1e-6,
        atol=1e-6,
    )


def test_one_band_equals_softmax_without_bias() -> None:
    torch.manual_seed(0)
    bands = BandedTable(V, D, cutoffs=[])
    adaptive = AdaptiveSoftmax(bands, BandProjections(bands, D, head=False)).double()
    plain = Softmax(Plain(bands.tables[0], bias=False))
    hidden_ND, targets_N = hidden(), targets()
    assert adaptive.clusters is None
    assert [id(parameter) for parameter in adaptive.parameters()] == [id(bands.tables[0].weight)]
    torch.testing.assert_close(adaptive.log_probs(hidden_ND), plain.log_probs(hidden_ND))
    torch.testing.assert_close(
        adaptive.target_log_probs(hidden_ND, targets_N), plain.target_log_probs(hidden_ND, targets_N)
    )
    assert adaptive.search(hidden_ND, 3).computed_share == 0.0


def test_tail_log_prob_is_cluster_plus_word_log_prob() -> None:
    """Compute log p of a word of the third band from its definition."""
    softmax, hidden_ND = build(), hidden()
    assert softmax.clusters is not None
    tables = softmax.tables()
    head = torch.log_softmax(hidden_ND @ torch.cat([tables[0].weight, softmax.clusters]).T, -1)
    tail = torch.log_softmax((hidden_ND @ softmax.projections.bands[1]) @ tables[2].weight.T, -1)
    torch.testing.assert_close(softmax.log_probs(hidden_ND)[:, 15 + 4], head[:, 7 + 1] + tail[:, 4])


@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("k", [1, 5, 9, V])
def test_search_equals_topk_of_all_log_probs(k: int, scale: float) -> None:
    softmax = build()
    hidden_ND = scale * hidden(200).detach()
    result = softmax.search(hidden_ND, k)
    values, _ = softmax.log_probs(hidden_ND).topk(k)
    torch.testing.assert_close(result.log_probs, values)
    torch.testing.assert_close(softmax.log_probs(hidden_ND).gather(1, result.ids), values)
    assert (result.ids.sort(-1).values.diff() > 0).all()
    assert 0.0 <= result.computed_share <= 1.0
    if k == V:
        assert result.computed_share == 1.0


def test_search_does_not_open_improbable_tails() -> None:
    softmax = build()
    assert softmax.clusters is not None
    with torch.no_grad():
        softmax.clusters.zero_()
        softmax.clusters[0] = 100.0  # for a positive context the second band has all the probability
    hidden_ND = hidden(50).detach().abs()
    result = softmax.search(hidden_ND, 2)
    assert result.computed_share == 0.5
    assert ((result.ids >= 7) & (result.ids < 15)).all()
    torch.testing.assert_close(result.log_probs, softmax.log_probs(hidden_ND).topk(2).values)


def test_closed_tails_compute_no_class_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    classifiers = [Drill(band, depth=1) for band in bands.tables]
    softmax = AdaptiveSoftmax(classifiers, BandProjections(bands, D, head=False)).eval()
    with torch.no_grad():
        assert softmax.cluster_bias is not None
        softmax.cluster_bias.fill_(-1000.0)
    computed_bands = []
    for band, classifier in enumerate(classifiers):
        weight = classifier.weight
        monkeypatch.setattr(
            classifier, "weight", lambda *_, band=band, weight=weight: computed_bands.append(band) or weight()
        )
    hidden_ND = hidden(5).detach().float()
    assert softmax.search(hidden_ND, 3).computed_share == 0.0
    assert (softmax.sample(hidden_ND) < 7).all()
    assert set(computed_bands) == {0}


def test_clusters_have_biases_if_words_have() -> None:
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    projections = BandProjections(bands, D, head=False)
    with_bias = AdaptiveSoftmax([Plain(band) for band in bands.tables], projections)
    assert with_bias.cluster_bias is not None
    assert with_bias.cluster_bias.shape == (2,)
    assert AdaptiveSoftmax(bands, projections).cluster_bias is None
    with torch.no_grad():
        with_bias.cluster_bias.copy_(torch.tensor([50.0, 0.0]))
    ids = with_bias.topk(hidden().detach().float(), 1)[1]
    assert ((ids >= 7) & (ids < 15)).all()


def test_topk_with_equal_scores_returns_the_right_values() -> None:
    softmax = build()
    with torch.no_grad():
        for parameter in softmax.parameters():
            parameter.zero_()
    hidden_ND = hidden(3).detach()
    torch.testing.assert_close(softmax.topk(hidden_ND, 9)[0], softmax.log_probs(hidden_ND).topk(9).values)


@pytest.mark.parametrize("k", [0, V + 1])
def test_topk_outside_the_vocabulary_size_is_rejected(k: int) -> None:
    for output in (build(), Softmax(Plain(WordTable(V, D)))):
        with pytest.raises(SettingsError, match=f"k = {k}: the best of {V} classes need a k from 1 to {V}"):
            output.topk(hidden(2), k)


def test_band_without_rows_has_zero_gradients() -> None:
    softmax, hidden_ND = build(), hidden(6)
    targets_N = torch.tensor([0, 1, 2, 3, IGNORE, 20])  # nothing in the second band
    softmax.loss(hidden_ND, targets_N, softmax.prepare(targets_N))["nll"].sum.backward()
    second = softmax.tables()[1].weight.grad
    assert second is not None
    assert not second.any()
    assert softmax.tables()[2].weight.grad is not None
    assert softmax.tables()[2].weight.grad.any()
    assert all(parameter.grad is not None for parameter in softmax.parameters())


def test_loss_is_equal_with_and_without_a_prepared_plan() -> None:
    softmax, hidden_ND, targets_N = build(), hidden(), targets()
    plan = softmax.prepare(targets_N.view(4, 10))
    assert sum(int((words != IGNORE).sum()) for _, words in plan.tails) == int((targets_N >= 7).sum())
    assert plan.count == 40
    prepared = softmax.loss(hidden_ND, targets_N, plan)["nll"].sum
    torch.testing.assert_close(softmax.loss(hidden_ND, targets_N, Plan(40))["nll"].sum, prepared)


def test_padding_rows_of_tails_do_not_change_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for _ in range(2):
        softmax, hidden_ND, targets_N = build(), hidden(300), targets(300)
        targets_N[::7] = IGNORE
        plan = softmax.prepare(targets_N)
        loss = softmax.loss(hidden_ND, targets_N, plan)["nll"]
        loss.sum.backward()
        results.append((loss, plan, [hidden_ND.grad, *(parameter.grad for parameter in softmax.parameters())]))
        monkeypatch.setattr(adaptive, "_pad_tail", lambda rows, words, total: (rows, words))
    (padded, plan, gradients), (unpadded, unpadded_plan, expected_gradients) = results
    assert padded.count == unpadded.count
    torch.testing.assert_close(padded.sum, unpadded.sum)
    torch.testing.assert_close(gradients, expected_gradients)
    for (rows, words), (few, _) in zip(plan.tails, unpadded_plan.tails, strict=True):
        assert len(rows) % PAD_MULTIPLE == 0
        assert len(rows) > len(few)
        assert len(rows.unique()) == len(rows)
        assert torch.equal(rows[: len(few)], few)
        assert (words[len(few) :] == IGNORE).all()


def test_micro_batches_have_tails_of_equal_length() -> None:
    """Tails are padded to the longest one or to the whole micro-batch, which does not change the loss."""
    softmax, hidden_ND, targets_N = build(), hidden(310), targets(310)
    targets_N[:100] = 0
    hidden_batches = hidden_ND.split(100)
    target_batches = targets_N.split(100)
    plans = softmax.prepare_micro_batches(target_batches)
    assert [[len(words) for _, words in plan.tails] for plan in plans] == [[32, 64], [32, 64], [32, 64], [10, 10]]
    for batch_hidden, batch_targets, plan in zip(hidden_batches, target_batches, plans, strict=True):
        inputs = [hidden_ND, *softmax.parameters()]
        padded = softmax.loss(batch_hidden, batch_targets, plan)["nll"]
        alone = softmax.loss(batch_hidden, batch_targets, softmax.prepare(batch_targets))["nll"]
        assert padded.count == alone.count == len(batch_targets)
        torch.testing.assert_close(padded.sum, alone.sum)
        gradients = [torch.autograd.grad(part.sum, inputs, retain_graph=True) for part in (padded, alone)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("rows", "padded"), [(0, 0), (1, 32), (32, 32), (400, 416), (513, 576), (4_100, 4_608)])
def test_tails_are_padded_to_few_lengths(rows: int, padded: int) -> None:
    softmax, targets_N = build(), torch.zeros(5_000, dtype=torch.long)
    targets_N[5_000 - rows :] = 20
    (_, (indices, _)) = softmax.prepare(targets_N).tails
    assert len(indices) == padded
    assert len(indices.unique()) == padded
    (_, (indices, _)) = softmax.prepare(targets_N[5_000 - rows - 1 :]).tails
    assert len(indices) == min(padded, rows + 1), "padding cannot use more rows than there are"


@pytest.mark.parametrize(
    ("rows", "micro_batches", "max_shapes"), [(4_096, 1, 40), (65_536, 1, 12), (65_536, 4, 16), (65_536, 8, 20)]
)
def test_tail_lengths_take_few_values_over_many_batches(rows: int, micro_batches: int, max_shapes: int) -> None:
    """As in text, rare words occur in clusters, so their share differs between micro-batches of an update."""
    softmax, generator = build(), torch.Generator().manual_seed(0)
    shapes = set()
    for _ in range(200):
        shares = 0.1 * torch.rand(rows // 512, 1, generator=generator) * torch.tensor([1.4, 0.6])
        picks = torch.rand(rows // 512, 512, generator=generator)
        targets_N = torch.where(picks < shares[:, :1], 7, torch.where(picks > 1 - shares[:, 1:], 15, 0)).flatten()
        plans = softmax.prepare_micro_batches(targets_N.chunk(micro_batches))
        shapes.add(tuple(len(words) for plan in plans for _, words in plan.tails))
    assert 1 < len(shapes) <= max_shapes


@pytest.mark.parametrize("head_projection", ["none", "own", "shared"])
def test_head_projection_applies_the_chosen_matrix(head_projection: str) -> None:
    softmax = build(head=head_projection == "shared", head_projection=head_projection)
    hidden_ND = hidden()
    matrix = {
        "none": None,
        "own": softmax.head.weight if softmax.head else None,
        "shared": softmax.projections.bands[0].T,
    }
    projected = hidden_ND if matrix[head_projection] is None else F.linear(hidden_ND, matrix[head_projection])
    assert softmax.clusters is not None
    head = torch.log_softmax(projected @ torch.cat([softmax.tables()[0].weight, softmax.clusters]).T, -1)
    torch.testing.assert_close(softmax.log_probs(hidden_ND)[:, :7], head[:, :7])
    assert softmax.vectors().shape == (V, D)
    extra = {"none": 0, "own": D * D, "shared": D * D}[head_projection]
    assert (
        sum(parameter.numel() for parameter in softmax.parameters())
        == sum(parameter.numel() for parameter in build().parameters()) + extra
    )


def test_project_to_adds_a_projection_before_the_bands() -> None:
    torch.manual_seed(0)
    bands = BandedTable(V, 6, sizes=[7, 8], factor=1)
    softmax = AdaptiveSoftmax(bands, BandProjections(bands, 6, head=False), context_dim=D, project_to=6).double()
    assert softmax.front is not None
    assert softmax.context_dim == D
    counts = {name: parameter.numel() for name, parameter in softmax.named_parameters()}
    assert counts["front.weight"] == 6 * D
    assert counts["clusters"] == 2 * 6
    torch.testing.assert_close(softmax.log_probs(hidden()).exp().sum(-1), torch.ones(40, dtype=torch.float64))


def test_own_matrices_are_initialised_xavier_uniform() -> None:
    """The bound is Xavier's, not that of torch's linear layers."""
    context_dim = 64
    bands = BandedTable(V, 4, sizes=[7, 8], factor=1)
    projections = BandProjections(bands, 4, head=False)
    softmax = AdaptiveSoftmax(bands, projections, context_dim=context_dim, project_to=4, head_projection="own")
    assert softmax.front is not None
    assert softmax.head is not None
    for matrix in (softmax.front.weight, softmax.head.weight):
        bound = (6 / sum(matrix.shape)) ** 0.5
        assert matrix.shape[1] ** -0.5 < matrix.abs().max() <= bound


def test_classifiers_can_be_a_module_list() -> None:
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    classifiers = nn.ModuleList(Plain(band) for band in bands.tables)
    softmax = AdaptiveSoftmax(classifiers, BandProjections(bands, D, head=False))  # type: ignore[arg-type]
    assert [softmax.tables()[band] is bands.tables[band] for band in range(3)] == [True] * 3
    assert softmax.vocab_size == V


def test_tail_and_softmax_dropout_act_in_different_places() -> None:
    """Tail dropout changes the tails, softmax dropout changes head and tails, and neither acts in evaluation."""
    hidden_ND = hidden().detach()
    for options, head_changes in (({"tail_dropout": 0.5}, False), ({"softmax_dropout": 0.5}, True)):
        softmax = build(**options)
        exact = softmax.eval().log_probs(hidden_ND)
        torch.testing.assert_close(exact, build().log_probs(hidden_ND))
        dropped = softmax.train().log_probs(hidden_ND)
        assert torch.allclose(dropped[:, :7], exact[:, :7]) != head_changes
        assert not torch.allclose(dropped[:, 7:], exact[:, 7:])


def test_every_band_can_have_a_drill_classifier() -> None:
    torch.manual_seed(0)
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    softmax = AdaptiveSoftmax([Drill(band, depth=2) for band in bands.tables], BandProjections(bands, D, head=False))
    hidden_ND = hidden().detach().float()
    torch.testing.assert_close(softmax.log_probs(hidden_ND).exp().sum(-1), torch.ones(40))
    layers = sum(parameter.numel() for name, parameter in softmax.named_parameters() if ".layers." in name)
    assert layers == sum(2 * (width * width + width) for width in (12, 6, 3))


def test_penalties_of_the_bands_add_up() -> None:
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    classifiers = [Projected(band, band.dim, penalty=0.5) for band in bands.tables]
    softmax = AdaptiveSoftmax(classifiers, BandProjections(bands, D, head=False))
    expected = sum(classifier.penalties()["projection"] for classifier in classifiers)
    torch.testing.assert_close(softmax.penalties(), {"projection": expected})


def test_tables_and_projections_can_be_shared_independently() -> None:
    """Vectors and projections are shared independently; cluster vectors never are."""
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    shared = BandProjections(bands, D)
    both = LanguageModel(AdaptiveLookup(bands, shared), LSTM(D, D, 1), AdaptiveSoftmax(bands, shared))
    separate = BandProjections(bands, D, head=False)
    vectors = LanguageModel(AdaptiveLookup(bands, shared), LSTM(D, D, 1), AdaptiveSoftmax(bands, separate))
    other = BandedTable(V, D, sizes=[7, 8], factor=2)
    nothing = LanguageModel(
        AdaptiveLookup(bands, shared), LSTM(D, D, 1), AdaptiveSoftmax(other, BandProjections(other, D, head=False))
    )
    assert both.tied
    assert vectors.tied
    assert not nothing.tied
    sizes = [sum(model.parameter_counts().values()) for model in (both, vectors, nothing)]
    tails, table = D * 6 + D * 3, sum(parameter.numel() for parameter in bands.parameters())
    assert sizes[1] - sizes[0] == tails
    assert sizes[2] - sizes[1] == table
    for model in (both, vectors, nothing):
        clusters = model.output.clusters
        assert not any(clusters is parameter for parameter in model.input.parameters())
    assert copy.deepcopy(both).tied


def test_unused_head_projection_is_rejected() -> None:
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    inner, outer = BandProjections(bands, D), BandProjections(bands, D)
    with pytest.raises(SettingsError, match=r"no end uses; .* head = false"):
        LanguageModel(AdaptiveLookup(bands, inner), LSTM(D, D, 1), AdaptiveSoftmax(bands, outer))


def test_invalid_settings_are_rejected() -> None:
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    fitting = BandProjections(bands, D, head=False)
    with pytest.raises(SettingsError, match="3 classifiers but projections for 2 bands"):
        AdaptiveSoftmax(bands, BandProjections(BandedTable(V, D, sizes=[7], factor=2), D))
    with pytest.raises(SettingsError, match=r"have dim = 12 but the hidden state has 16 .* project_to = 12"):
        AdaptiveSoftmax(bands, fitting, context_dim=16)
    with pytest.raises(SettingsError, match="the classifier of band 1 reads 12 numbers but receives 16"):
        AdaptiveSoftmax(bands, BandProjections(bands, 16, head=False))
    with pytest.raises(SettingsError, match="'shared' needs projections with a matrix for the first band"):
        AdaptiveSoftmax(bands, fitting, head_projection="shared")
    with pytest.raises(SettingsError, match="needs a table with bands"):
        BandProjections(WordTable(V, D), D)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="adaptive softmax: needs a table with bands"):
        AdaptiveSoftmax(WordTable(V, D), fitting)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="head_projection = 'shard': must be one of none, own, shared"):
        AdaptiveSoftmax(bands, fitting, head_projection="shard")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"tail_dropout = 1\.5: must be at least 0"):
        AdaptiveSoftmax(bands, fitting, tail_dropout=1.5)


def test_compiled_target_log_probs_stay_in_one_graph() -> None:
    softmax, hidden_ND, targets_N = build().eval(), hidden().detach(), targets()
    targets_N[3] = IGNORE
    torch.compiler.reset()
    compiled = torch.compile(softmax.target_log_probs, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden_ND, targets_N), softmax.target_log_probs(hidden_ND, targets_N))
