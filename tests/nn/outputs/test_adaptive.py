"""The adaptive softmax: torch's own as the authority, one band as the plain softmax, exact search, ties, refusals.

Shapes: N rows, D width, V classes.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import IGNORE
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.adaptive import AdaptiveLookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs import adaptive
from reefknot.nn.outputs.adaptive import FILL, AdaptiveSoftmax
from reefknot.nn.outputs.contract import Plan
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

V, D, CUTOFFS, FACTOR = 23, 12, [7, 15], 2


def build(seed: int = 0, head: bool = False, **options: object) -> AdaptiveSoftmax:
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


def as_torch(ours: AdaptiveSoftmax) -> nn.AdaptiveLogSoftmaxWithLoss:
    """torch's module with our weights."""
    theirs = nn.AdaptiveLogSoftmaxWithLoss(D, V, CUTOFFS, div_value=FACTOR).double()
    assert ours.clusters is not None
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat([ours.tables()[0].weight, ours.clusters]))
        for tail, table, matrix in zip(theirs.tail, ours.tables()[1:], ours.projections.bands, strict=True):
            down, up = tail  # type: ignore[misc]
            down.weight.copy_(matrix.T)
            up.weight.copy_(table.weight)
    return theirs


def test_parity_with_torch() -> None:
    ours, h_ND, y_N = build(), hidden(), targets()
    theirs = as_torch(ours)
    torch.testing.assert_close(ours.log_probs(h_ND), theirs.log_prob(h_ND), rtol=0, atol=1e-12)
    expected = theirs(h_ND, y_N)
    torch.testing.assert_close(ours.target_log_probs(h_ND, y_N), expected.output, rtol=0, atol=1e-12)
    loss = ours.loss(h_ND, y_N, ours.prepare(y_N))["nll"]
    torch.testing.assert_close(loss.sum / loss.count, expected.loss, rtol=0, atol=1e-12)

    for each in (loss.sum / loss.count, expected.loss):
        each.backward(inputs=[h_ND, *(ours if each is not expected.loss else theirs).parameters()])
    assert ours.clusters is not None
    head = torch.cat([ours.tables()[0].weight.grad, ours.clusters.grad])  # type: ignore[list-item]
    torch.testing.assert_close(head, theirs.head.weight.grad)
    for tail, table, matrix in zip(theirs.tail, ours.tables()[1:], ours.projections.bands, strict=True):
        down, up = tail  # type: ignore[misc]
        torch.testing.assert_close(matrix.grad.T, down.weight.grad)
        torch.testing.assert_close(table.weight.grad, up.weight.grad)


def test_parity_with_torch_in_float32() -> None:
    ours = build()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(0.3)
    theirs, h_ND, y_N = as_torch(ours).float(), hidden().detach().float(), targets()
    torch.testing.assert_close(ours.float().target_log_probs(h_ND, y_N), theirs(h_ND, y_N).output, rtol=1e-6, atol=1e-6)


def test_one_band_is_the_softmax_without_bias() -> None:
    torch.manual_seed(0)
    bands = BandedTable(V, D, cutoffs=[])
    adaptive = AdaptiveSoftmax(bands, BandProjections(bands, D, head=False)).double()
    plain = Softmax(Plain(bands.tables[0], bias=False))
    h_ND, y_N = hidden(), targets()
    assert adaptive.clusters is None
    assert [id(p) for p in adaptive.parameters()] == [id(bands.tables[0].weight)]
    torch.testing.assert_close(adaptive.log_probs(h_ND), plain.log_probs(h_ND))
    torch.testing.assert_close(adaptive.target_log_probs(h_ND, y_N), plain.target_log_probs(h_ND, y_N))
    assert adaptive.search(h_ND, 3).opened == 0.0


def test_formula() -> None:
    """log p of a word of the third band, written out."""
    ours, h_ND = build(), hidden()
    assert ours.clusters is not None
    tables = ours.tables()
    head = torch.log_softmax(h_ND @ torch.cat([tables[0].weight, ours.clusters]).T, -1)
    tail = torch.log_softmax((h_ND @ ours.projections.bands[1]) @ tables[2].weight.T, -1)
    torch.testing.assert_close(ours.log_probs(h_ND)[:, 15 + 4], head[:, 7 + 1] + tail[:, 4])


@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("k", [1, 5, 9, V])
def test_search_is_exact(k: int, scale: float) -> None:
    ours = build()
    h_ND = scale * hidden(200).detach()
    found = ours.search(h_ND, k)
    values, _ = ours.log_probs(h_ND).topk(k)
    torch.testing.assert_close(found.log_probs, values)
    torch.testing.assert_close(ours.log_probs(h_ND).gather(1, found.ids), values)
    assert (found.ids.sort(-1).values.diff() > 0).all()
    assert 0.0 <= found.opened <= 1.0
    if k == V:
        assert found.opened == 1.0


def test_search_leaves_improbable_tails_closed() -> None:
    ours = build()
    assert ours.clusters is not None
    with torch.no_grad():
        ours.clusters.zero_()
        ours.clusters[0] = 100.0  # for a positive context all mass on the second band
    h_ND = hidden(50).detach().abs()
    found = ours.search(h_ND, 2)
    assert found.opened == 0.5
    assert ((found.ids >= 7) & (found.ids < 15)).all()
    torch.testing.assert_close(found.log_probs, ours.log_probs(h_ND).topk(2).values)


def test_a_closed_tail_runs_no_label_network(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    classifier = [Drill(band, depth=1) for band in bands.tables]
    ours = AdaptiveSoftmax(classifier, BandProjections(bands, D, head=False)).eval()
    with torch.no_grad():
        assert ours.cluster_bias is not None
        ours.cluster_bias.fill_(-1000.0)
    ran = []
    for band, each in enumerate(classifier):
        monkeypatch.setattr(each, "weight", lambda *_, band=band, own=each.weight: ran.append(band) or own())
    h_ND = hidden(5).detach().float()
    assert ours.search(h_ND, 3).opened == 0.0
    assert (ours.sample(h_ND) < 7).all()
    assert set(ran) == {0}


def test_clusters_have_biases_where_words_have() -> None:
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


def test_ties_at_the_kth_place_keep_the_values() -> None:
    ours = build()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    h_ND = hidden(3).detach()
    torch.testing.assert_close(ours.topk(h_ND, 9)[0], ours.log_probs(h_ND).topk(9).values)


@pytest.mark.parametrize("k", [0, V + 1])
def test_asking_for_more_than_there_is(k: int) -> None:
    for output in (build(), Softmax(Plain(WordTable(V, D)))):
        with pytest.raises(SettingsError, match=f"k = {k}: the best of {V} classes need a k from 1 to {V}"):
            output.topk(hidden(2), k)


def test_a_band_without_rows_gets_zero_gradients() -> None:
    ours, h_ND = build(), hidden(6)
    y_N = torch.tensor([0, 1, 2, 3, IGNORE, 20])  # nothing in the second band
    ours.loss(h_ND, y_N, ours.prepare(y_N))["nll"].sum.backward()
    second = ours.tables()[1].weight.grad
    assert second is not None
    assert not second.any()
    assert ours.tables()[2].weight.grad is not None
    assert ours.tables()[2].weight.grad.any()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_the_plan_is_found_on_the_host_and_optional() -> None:
    ours, h_ND, y_N = build(), hidden(), targets()
    plan = ours.prepare(y_N.view(4, 10))
    assert sum(int((words != IGNORE).sum()) for _, words in plan.tails) == int((y_N >= 7).sum())
    assert plan.count == 40
    prepared = ours.loss(h_ND, y_N, plan)["nll"].sum
    torch.testing.assert_close(ours.loss(h_ND, y_N, Plan(40))["nll"].sum, prepared)


def test_rows_that_fill_up_a_tail_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for _ in range(2):
        ours, h_ND, y_N = build(), hidden(300), targets(300)
        y_N[::7] = IGNORE
        plan = ours.prepare(y_N)
        loss = ours.loss(h_ND, y_N, plan)["nll"]
        loss.sum.backward()
        found.append((loss, plan, [h_ND.grad, *(parameter.grad for parameter in ours.parameters())]))
        monkeypatch.setattr(adaptive, "_padded", lambda rows, words, total: (rows, words))
    (filled, more, ours_grads), (bare, fewer, grads) = found
    assert filled.count == bare.count
    torch.testing.assert_close(filled.sum, bare.sum)
    torch.testing.assert_close(ours_grads, grads)
    for (rows, words), (few, _) in zip(more.tails, fewer.tails, strict=True):
        assert len(rows) % FILL == 0
        assert len(rows) > len(few)
        assert len(rows.unique()) == len(rows)
        assert torch.equal(rows[: len(few)], few)
        assert (words[len(few) :] == IGNORE).all()


def test_pieces_of_an_update_have_tails_of_one_length() -> None:
    """As long as the longest wants, or as long as a piece is, and the loss is the one of each piece by itself."""
    ours, h_ND, y_N = build(), hidden(310), targets(310)
    y_N[:100] = 0
    parts = list(zip(h_ND.split(100), y_N.split(100), strict=True))
    plans = ours.prepare_micro_batches([y for _, y in parts])
    assert [[len(words) for _, words in plan.tails] for plan in plans] == [[32, 64], [32, 64], [32, 64], [10, 10]]
    for (h, y), plan in zip(parts, plans, strict=True):
        inputs = [h_ND, *ours.parameters()]
        together, alone = (ours.loss(h, y, each)["nll"] for each in (plan, ours.prepare(y)))
        assert together.count == alone.count == len(y)
        torch.testing.assert_close(together.sum, alone.sum)
        gradients = [torch.autograd.grad(each.sum, inputs, retain_graph=True) for each in (together, alone)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("rows", "filled"), [(0, 0), (1, 32), (32, 32), (400, 416), (513, 576), (4_100, 4_608)])
def test_how_far_a_tail_is_filled(rows: int, filled: int) -> None:
    ours, y_N = build(), torch.zeros(5_000, dtype=torch.long)
    y_N[5_000 - rows :] = 20
    (_, (found, _)) = ours.prepare(y_N).tails
    assert len(found) == filled
    assert len(found.unique()) == filled
    (_, (found, _)) = ours.prepare(y_N[5_000 - rows - 1 :]).tails
    assert len(found) == min(filled, rows + 1), "there are no more rows to fill up with"


@pytest.mark.parametrize(
    ("rows", "pieces", "most"), [(4_096, 1, 40), (65_536, 1, 12), (65_536, 4, 16), (65_536, 8, 20)]
)
def test_few_shapes_over_many_batches(rows: int, pieces: int, most: int) -> None:
    """Words of the tails come in clumps, as they do in text: their share differs from block to block, and so from piece
    to piece of an update."""
    ours, draw = build(), torch.Generator().manual_seed(0)
    shapes = set()
    for _ in range(200):
        shares = 0.1 * torch.rand(rows // 512, 1, generator=draw) * torch.tensor([1.4, 0.6])
        picks = torch.rand(rows // 512, 512, generator=draw)
        y_N = torch.where(picks < shares[:, :1], 7, torch.where(picks > 1 - shares[:, 1:], 15, 0)).flatten()
        plans = ours.prepare_micro_batches(y_N.chunk(pieces))
        shapes.add(tuple(len(words) for plan in plans for _, words in plan.tails))
    assert 1 < len(shapes) <= most


@pytest.mark.parametrize("head_projection", ["none", "own", "shared"])
def test_head_projection(head_projection: str) -> None:
    ours = build(head=head_projection == "shared", head_projection=head_projection)
    h_ND = hidden()
    matrix = {"none": None, "own": ours.head.weight if ours.head else None, "shared": ours.projections.bands[0].T}
    projected = h_ND if matrix[head_projection] is None else F.linear(h_ND, matrix[head_projection])
    assert ours.clusters is not None
    head = torch.log_softmax(projected @ torch.cat([ours.tables()[0].weight, ours.clusters]).T, -1)
    torch.testing.assert_close(ours.log_probs(h_ND)[:, :7], head[:, :7])
    assert ours.vectors().shape == (V, D)
    extra = {"none": 0, "own": D * D, "shared": D * D}[head_projection]
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in build().parameters()) + extra


def test_a_projection_in_front() -> None:
    torch.manual_seed(0)
    bands = BandedTable(V, 6, sizes=[7, 8], factor=1)
    ours = AdaptiveSoftmax(bands, BandProjections(bands, 6, head=False), context_dim=D, project_to=6).double()
    assert ours.front is not None
    assert ours.context_dim == D
    counts = {name: parameter.numel() for name, parameter in ours.named_parameters()}
    assert counts["front.weight"] == 6 * D
    assert counts["clusters"] == 2 * 6
    torch.testing.assert_close(ours.log_probs(hidden()).exp().sum(-1), torch.ones(40, dtype=torch.float64))


def test_matrices_of_its_own_start_as_those_of_the_bands() -> None:
    """Xavier's bound, not torch's for a linear layer."""
    wide = 64
    bands = BandedTable(V, 4, sizes=[7, 8], factor=1)
    projections = BandProjections(bands, 4, head=False)
    ours = AdaptiveSoftmax(bands, projections, context_dim=wide, project_to=4, head_projection="own")
    assert ours.front is not None
    assert ours.head is not None
    for matrix in (ours.front.weight, ours.head.weight):
        bound = (6 / sum(matrix.shape)) ** 0.5
        assert matrix.shape[1] ** -0.5 < matrix.abs().max() <= bound


def test_labels_may_come_in_a_module_list() -> None:
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    classifier = nn.ModuleList(Plain(band) for band in bands.tables)
    ours = AdaptiveSoftmax(classifier, BandProjections(bands, D, head=False))  # type: ignore[arg-type]
    assert [ours.tables()[band] is bands.tables[band] for band in range(3)] == [True] * 3
    assert ours.vocab_size == V


def test_dropouts_act_apart() -> None:
    """Tail dropout leaves the head alone; softmax dropout does not; neither acts in evaluation."""
    h_ND = hidden().detach()
    for options, head_changes in (({"tail_dropout": 0.5}, False), ({"softmax_dropout": 0.5}, True)):
        ours = build(**options)
        exact = ours.eval().log_probs(h_ND)
        torch.testing.assert_close(exact, build().log_probs(h_ND))
        dropped = ours.train().log_probs(h_ND)
        assert torch.allclose(dropped[:, :7], exact[:, :7]) != head_changes
        assert not torch.allclose(dropped[:, 7:], exact[:, 7:])


def test_drill_in_every_band() -> None:
    torch.manual_seed(0)
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    ours = AdaptiveSoftmax([Drill(band, depth=2) for band in bands.tables], BandProjections(bands, D, head=False))
    h_ND = hidden().detach().float()
    torch.testing.assert_close(ours.log_probs(h_ND).exp().sum(-1), torch.ones(40))
    layers = sum(p.numel() for name, p in ours.named_parameters() if ".layers." in name)
    assert layers == sum(2 * (width * width + width) for width in (12, 6, 3))


def test_penalties_of_the_bands_add_up() -> None:
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    classifier = [Projected(band, band.dim, penalty=0.5) for band in bands.tables]
    ours = AdaptiveSoftmax(classifier, BandProjections(bands, D, head=False))
    expected = sum(each.penalties()["projection"] for each in classifier)
    torch.testing.assert_close(ours.penalties(), {"projection": expected})


def test_what_is_shared_is_shared() -> None:
    """Vectors and projections are shared independently; cluster vectors never are."""
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    shared = BandProjections(bands, D)
    both = LanguageModel(AdaptiveLookup(bands, shared), LSTM(D, D, 1), AdaptiveSoftmax(bands, shared))
    own = BandProjections(bands, D, head=False)
    vectors = LanguageModel(AdaptiveLookup(bands, shared), LSTM(D, D, 1), AdaptiveSoftmax(bands, own))
    other = BandedTable(V, D, sizes=[7, 8], factor=2)
    nothing = LanguageModel(
        AdaptiveLookup(bands, shared), LSTM(D, D, 1), AdaptiveSoftmax(other, BandProjections(other, D, head=False))
    )
    assert both.tied
    assert vectors.tied
    assert not nothing.tied
    sizes = [sum(model.parameter_counts().values()) for model in (both, vectors, nothing)]
    tails, table = D * 6 + D * 3, sum(p.numel() for p in bands.parameters())
    assert sizes[1] - sizes[0] == tails
    assert sizes[2] - sizes[1] == table
    for model in (both, vectors, nothing):
        clusters = model.output.clusters
        assert not any(clusters is parameter for parameter in model.input.parameters())
    assert copy.deepcopy(both).tied


def test_a_matrix_that_nobody_uses_is_refused() -> None:
    bands = BandedTable(V, D, sizes=[7, 8], factor=2)
    inner, outer = BandProjections(bands, D), BandProjections(bands, D)
    with pytest.raises(SettingsError, match=r"no end uses; .* head = false"):
        LanguageModel(AdaptiveLookup(bands, inner), LSTM(D, D, 1), AdaptiveSoftmax(bands, outer))


def test_refusals() -> None:
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
