"""Class vectors computed once: the gradients of every piece on its own, and nothing that outlives its context.

Shapes: N rows, D width, V classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.kernels.linear_cross_entropy import IGNORE
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.dual import Dual
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

WORDS, DIM = 11, 6
TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, 7, 9, 1])
PIECES = [slice(start, start + 2) for start in range(0, len(TARGETS), 2)]


def drill(**settings: Any) -> OutputEnd:
    return Softmax(Drill(WordTable(WORDS, DIM), depth=2, **settings))


def dual() -> OutputEnd:
    return Softmax(Dual(WordTable(WORDS, DIM), DIM, joint_dim=4))


def unit_norm() -> OutputEnd:
    return Softmax(Plain(WordTable(WORDS, DIM, unit_norm=True)))


def adaptive() -> OutputEnd:
    bands = BandedTable(WORDS, DIM, sizes=[3, 4], factor=2)
    return AdaptiveSoftmax([Drill(table, depth=2) for table in bands.tables], BandProjections(bands, DIM, head=False))


def mixture() -> OutputEnd:
    return MixtureOfSoftmaxes(Drill(WordTable(WORDS, DIM), depth=1), DIM, experts=3)


every_end = pytest.mark.parametrize("build", [drill, dual, unit_norm, adaptive, mixture])


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[Classifier]:
    """How often classifiers have computed the vectors of all classes."""
    counts: Counter[Classifier] = Counter()
    for kind in (Classifier, Drill, Dual):
        encode = kind.encode

        def counted(self: Classifier, ids: Tensor | None = None, encode: Callable[..., Tensor] = encode) -> Tensor:
            counts[self] += ids is None
            return encode(self, ids)

        monkeypatch.setattr(kind, "encode", counted)
    return counts


def made(build: Callable[[], OutputEnd]) -> OutputEnd:
    torch.manual_seed(0)
    return build().double()


def piece_loss(output: OutputEnd, rows: slice) -> Tensor:
    h_ND = torch.randn(len(TARGETS), DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y_N = TARGETS[rows]
    return output.loss(h_ND[rows], y_N, output.prepare(y_N))["nll"].sum


def backward(output: OutputEnd) -> None:
    for rows in PIECES:
        piece_loss(output, rows).backward()


def backward_sharing(output: OutputEnd) -> None:
    with output.sharing() as join:
        for rows in PIECES:
            if rows is PIECES[-1]:
                join()
            piece_loss(output, rows).backward()


def assert_equal_gradients(one: OutputEnd, other: OutputEnd) -> None:
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-15, msg=name)


@every_end
def test_shared_gradients_are_those_of_every_piece_on_its_own(
    build: Callable[[], OutputEnd], computed: Counter[Classifier]
) -> None:
    """In two steps: the second sees the parameters that the first has made, and nothing else of it."""
    shared, alone = made(build), made(build)
    for _ in range(2):
        for output, make_gradients in ((shared, backward_sharing), (alone, backward)):
            output.zero_grad()
            make_gradients(output)
        assert_equal_gradients(shared, alone)
        with torch.no_grad():
            for output in (shared, alone):
                for parameter in output.parameters():
                    parameter.sub_(0.5 * parameter.grad)
    counts = {classifier: count for classifier, count in computed.items() if classifier in set(shared.modules())}
    assert len(counts) == (3 if build is adaptive else 1)
    assert set(counts.values()) == {2}


@every_end
def test_the_networks_gradients_come_with_the_last_piece(build: Callable[[], OutputEnd]) -> None:
    """Where processes exchange what they have."""
    output = made(build)
    tables = [table.weight for table in output.tables()]
    with output.sharing() as join:
        piece_loss(output, PIECES[0]).backward()
        assert all(weight.grad is None for weight in tables)
        join()
        piece_loss(output, PIECES[1]).backward()
        assert all(weight.grad is not None for weight in tables)


def test_a_step_of_one_piece_is_what_it_was_to_the_bit() -> None:
    output, other = made(drill), made(drill)
    with output.sharing() as join:
        join()
        piece_loss(output, slice(None)).backward()
    piece_loss(other, slice(None)).backward()
    for one, another in zip(output.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert another.grad is not None
        assert torch.equal(one.grad, another.grad)


@pytest.mark.parametrize("classifier", [Plain, lambda table: Drill(table, depth=0)])
def test_a_weight_that_is_the_parameter_stays_the_parameter(classifier: Callable[[WordTable], Classifier]) -> None:
    output = Softmax(classifier(WordTable(WORDS, DIM)))
    weight = output.classifier.table.weight
    with output.sharing() as join:
        assert output.classifier.weight() is weight
        join()
        assert output.classifier.weight() is weight
    with output.holding(), torch.no_grad():
        assert output.classifier.weight() is weight


def test_a_step_has_one_dropout_mask() -> None:
    output = made(lambda: drill(dropout=0.5, variational=False))
    assert isinstance(output, Softmax)
    assert not torch.equal(output.classifier.weight(), output.classifier.weight())
    with output.sharing() as join:
        first = output.classifier.weight()
        assert torch.equal(output.classifier.weight(), first)
        join()
        assert torch.equal(output.classifier.weight(), first)


def test_collected_gradients_are_not_rounded_under_autocast() -> None:
    """A network without residuals ends in half precision there."""
    output = made(lambda: drill(residual=False)).float()
    assert isinstance(output, Softmax)
    with torch.autocast("cpu", torch.bfloat16):
        assert output.classifier.weight().dtype == torch.bfloat16
        with output.sharing() as join:
            leaf = output.classifier.weight()
            join()
            assert leaf.dtype == output.classifier.weight().dtype == torch.float32
    assert leaf.is_leaf


def test_gradients_that_nobody_takes_on_are_an_error() -> None:
    output = made(drill)
    with pytest.raises(RuntimeError, match="before the last micro-batch"), output.sharing():
        backward(output)
    assert_nothing_held(output)


@every_end
def test_evaluation_computes_once(build: Callable[[], OutputEnd], computed: Counter[Classifier]) -> None:
    output = made(build).eval()
    expected = [output.target_log_probs(torch.ones(2, DIM).double(), TARGETS[rows]) for rows in PIECES]
    computed.clear()
    with output.holding(), torch.no_grad():
        found = [output.target_log_probs(torch.ones(2, DIM).double(), TARGETS[rows]) for rows in PIECES]
        output.log_probs(torch.ones(2, DIM).double())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert set(computed.values()) == {1}
    assert_nothing_held(output)


def test_gradients_in_evaluation_are_not_cut_off() -> None:
    output, other = made(drill).eval(), made(drill).eval()
    with output.holding():
        with torch.no_grad():
            output.vectors()
        backward(output)
    backward(other)
    assert_equal_gradients(output, other)


def test_a_look_without_gradients_does_not_spoil_a_step() -> None:
    output, other = made(drill), made(drill)
    with output.sharing() as join:
        with torch.no_grad():
            output.vectors()
        join()
        piece_loss(output, slice(None)).backward()
    piece_loss(other, slice(None)).backward()
    assert_equal_gradients(output, other)


def assert_nothing_held(output: OutputEnd) -> None:
    """A change of the parameters shows at once."""
    with torch.no_grad():
        before = output.vectors()
        for table in output.tables():
            table.weight.add_(torch.randn_like(table.weight))
        assert not torch.equal(output.vectors(), before)


@pytest.mark.parametrize("context", [OutputEnd.holding, OutputEnd.sharing])
def test_an_exception_leaves_nothing_held(context: Callable[[OutputEnd], Any]) -> None:
    output = made(adaptive)

    def fail() -> None:
        with context(output):
            piece_loss(output, PIECES[0]).backward()
            with torch.no_grad():
                output.vectors()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_nothing_held(output)
    fresh = deepcopy(output)
    for each in (output, fresh):
        each.zero_grad()
        backward(each)
    assert_equal_gradients(output, fresh)


def test_an_inner_context_gives_back_what_the_outer_one_holds(computed: Counter[Classifier]) -> None:
    output = made(drill)
    with torch.no_grad(), output.holding():
        first = output.vectors()
        with output.holding():
            assert output.vectors() is not first
        assert output.vectors() is first
    assert set(computed.values()) == {2}


def test_a_copy_holds_nothing() -> None:
    output = made(drill)
    with torch.no_grad(), output.holding():
        output.vectors()
        copy = deepcopy(output)
    assert_nothing_held(copy)


def test_some_classes_are_computed_for_whoever_asks() -> None:
    output = made(drill)
    assert isinstance(output, Softmax)
    ids = torch.tensor([4, 1])
    with output.sharing() as join:
        some = output.classifier.weight(ids)
        assert some.grad_fn is not None
        torch.testing.assert_close(some, output.classifier.weight()[ids])
        join()
