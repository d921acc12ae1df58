"""Class vectors are computed once per update or evaluation, with unchanged gradients, and not cached for longer.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.kernels.scores import IGNORE
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
MICRO_BATCHES = [slice(start, start + 2) for start in range(0, len(TARGETS), 2)]


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
def encode_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[Classifier]:
    """Count per classifier the computations of all class vectors."""
    counts: Counter[Classifier] = Counter()
    for kind in (Classifier, Drill, Dual):
        encode = kind.encode

        def counted(self: Classifier, ids: Tensor | None = None, encode: Callable[..., Tensor] = encode) -> Tensor:
            counts[self] += ids is None
            return encode(self, ids)

        monkeypatch.setattr(kind, "encode", counted)
    return counts


def build_seeded(build: Callable[[], OutputEnd]) -> OutputEnd:
    """Build an output end in float64 with a fixed seed."""
    torch.manual_seed(0)
    return build().double()


def micro_batch_loss(output: OutputEnd, rows: slice) -> Tensor:
    """Return the summed loss of some rows of a fixed batch."""
    hidden_ND = torch.randn(len(TARGETS), DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets_N = TARGETS[rows]
    return output.loss(hidden_ND[rows], targets_N, output.prepare(targets_N))["nll"].sum


def backward(output: OutputEnd) -> None:
    """Add up the gradients of all micro-batches, each with its own class vectors."""
    for rows in MICRO_BATCHES:
        micro_batch_loss(output, rows).backward()


def backward_with_sharing(output: OutputEnd) -> None:
    """Add up the gradients of all micro-batches, with class vectors that they share."""
    with output.cache_for_step() as announce_last_micro_batch:
        for rows in MICRO_BATCHES:
            if rows is MICRO_BATCHES[-1]:
                announce_last_micro_batch()
            micro_batch_loss(output, rows).backward()


def assert_equal_gradients(output: OutputEnd, reference: OutputEnd) -> None:
    for (name, parameter), expected in zip(output.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-15, msg=name)


@every_end
def test_shared_class_vectors_give_equal_gradients(
    build: Callable[[], OutputEnd], encode_counts: Counter[Classifier]
) -> None:
    """The second of two steps must use the updated parameters, not class vectors of the first step."""
    sharing, separate = build_seeded(build), build_seeded(build)
    for _ in range(2):
        for output, run_backward in ((sharing, backward_with_sharing), (separate, backward)):
            output.zero_grad()
            run_backward(output)
        assert_equal_gradients(sharing, separate)
        with torch.no_grad():
            for output in (sharing, separate):
                for parameter in output.parameters():
                    parameter.sub_(0.5 * parameter.grad)
    counts = {classifier: count for classifier, count in encode_counts.items() if classifier in set(sharing.modules())}
    assert len(counts) == (3 if build is adaptive else 1)
    assert set(counts.values()) == {2}


@every_end
def test_gradients_of_tables_arrive_with_the_last_micro_batch(build: Callable[[], OutputEnd]) -> None:
    """Processes exchange gradients during the last backward pass, so all gradients must be complete by then."""
    output = build_seeded(build)
    tables = [table.weight for table in output.tables()]
    with output.cache_for_step() as announce_last_micro_batch:
        micro_batch_loss(output, MICRO_BATCHES[0]).backward()
        assert all(weight.grad is None for weight in tables)
        announce_last_micro_batch()
        micro_batch_loss(output, MICRO_BATCHES[1]).backward()
        assert all(weight.grad is not None for weight in tables)


def test_sharing_one_micro_batch_gives_bitwise_equal_gradients() -> None:
    output, reference = build_seeded(drill), build_seeded(drill)
    with output.cache_for_step() as announce_last_micro_batch:
        announce_last_micro_batch()
        micro_batch_loss(output, slice(None)).backward()
    micro_batch_loss(reference, slice(None)).backward()
    for parameter, expected in zip(output.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected.grad is not None
        assert torch.equal(parameter.grad, expected.grad)


@pytest.mark.parametrize("classifier", [Plain, lambda table: Drill(table, depth=0)])
def test_weight_that_is_a_parameter_is_not_copied(classifier: Callable[[WordTable], Classifier]) -> None:
    output = Softmax(classifier(WordTable(WORDS, DIM)))
    weight = output.classifier.table.weight
    with output.cache_for_step() as announce_last_micro_batch:
        assert output.classifier.weight() is weight
        announce_last_micro_batch()
        assert output.classifier.weight() is weight
    with output.cache_for_evaluation(), torch.no_grad():
        assert output.classifier.weight() is weight


def test_micro_batches_of_an_update_share_a_dropout_mask() -> None:
    output = build_seeded(lambda: drill(dropout=0.5, variational=False))
    assert isinstance(output, Softmax)
    assert not torch.equal(output.classifier.weight(), output.classifier.weight())
    with output.cache_for_step() as announce_last_micro_batch:
        first = output.classifier.weight()
        assert torch.equal(output.classifier.weight(), first)
        announce_last_micro_batch()
        assert torch.equal(output.classifier.weight(), first)


def test_shared_class_vectors_are_float32_under_autocast() -> None:
    """Under autocast a network without residuals returns bfloat16 class vectors."""
    output = build_seeded(lambda: drill(residual=False)).float()
    assert isinstance(output, Softmax)
    with torch.autocast("cpu", torch.bfloat16):
        assert output.classifier.weight().dtype == torch.bfloat16
        with output.cache_for_step() as announce_last_micro_batch:
            leaf = output.classifier.weight()
            announce_last_micro_batch()
            assert leaf.dtype == output.classifier.weight().dtype == torch.float32
    assert leaf.is_leaf


def test_sharing_without_announcement_raises_an_error() -> None:
    output = build_seeded(drill)
    with pytest.raises(RuntimeError, match="before the last micro-batch"), output.cache_for_step():
        backward(output)
    assert_cache_is_empty(output)


@every_end
def test_evaluation_computes_class_vectors_once(
    build: Callable[[], OutputEnd], encode_counts: Counter[Classifier]
) -> None:
    output = build_seeded(build).eval()
    expected = [output.target_log_probs(torch.ones(2, DIM).double(), TARGETS[rows]) for rows in MICRO_BATCHES]
    encode_counts.clear()
    with output.cache_for_evaluation(), torch.no_grad():
        actual = [output.target_log_probs(torch.ones(2, DIM).double(), TARGETS[rows]) for rows in MICRO_BATCHES]
        output.log_probs(torch.ones(2, DIM).double())
    assert all(torch.equal(log_probs, reference) for log_probs, reference in zip(actual, expected, strict=True))
    assert set(encode_counts.values()) == {1}
    assert_cache_is_empty(output)


def test_evaluation_mode_cache_does_not_block_gradients() -> None:
    output, reference = build_seeded(drill).eval(), build_seeded(drill).eval()
    with output.cache_for_evaluation():
        with torch.no_grad():
            output.vectors()
        backward(output)
    backward(reference)
    assert_equal_gradients(output, reference)


def test_vectors_read_without_gradients_do_not_change_gradients() -> None:
    output, reference = build_seeded(drill), build_seeded(drill)
    with output.cache_for_step() as announce_last_micro_batch:
        with torch.no_grad():
            output.vectors()
        announce_last_micro_batch()
        micro_batch_loss(output, slice(None)).backward()
    micro_batch_loss(reference, slice(None)).backward()
    assert_equal_gradients(output, reference)


def assert_cache_is_empty(output: OutputEnd) -> None:
    """Check that class vectors follow a change of the parameters."""
    with torch.no_grad():
        before = output.vectors()
        for table in output.tables():
            table.weight.add_(torch.randn_like(table.weight))
        assert not torch.equal(output.vectors(), before)


@pytest.mark.parametrize("context", [OutputEnd.cache_for_evaluation, OutputEnd.cache_for_step])
def test_exception_empties_the_cache(context: Callable[[OutputEnd], Any]) -> None:
    output = build_seeded(adaptive)

    def fail() -> None:
        with context(output):
            micro_batch_loss(output, MICRO_BATCHES[0]).backward()
            with torch.no_grad():
                output.vectors()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_cache_is_empty(output)
    fresh = deepcopy(output)
    for end in (output, fresh):
        end.zero_grad()
        backward(end)
    assert_equal_gradients(output, fresh)


def test_inner_context_restores_the_cache_of_the_outer_one(encode_counts: Counter[Classifier]) -> None:
    output = build_seeded(drill)
    with torch.no_grad(), output.cache_for_evaluation():
        first = output.vectors()
        with output.cache_for_evaluation():
            assert output.vectors() is not first
        assert output.vectors() is first
    assert set(encode_counts.values()) == {2}


def test_deepcopy_does_not_copy_the_cache() -> None:
    output = build_seeded(drill)
    with torch.no_grad(), output.cache_for_evaluation():
        output.vectors()
        copy = deepcopy(output)
    assert_cache_is_empty(copy)


def test_class_subset_is_computed_again_with_gradients() -> None:
    output = build_seeded(drill)
    assert isinstance(output, Softmax)
    ids = torch.tensor([4, 1])
    with output.cache_for_step() as announce_last_micro_batch:
        subset = output.classifier.weight(ids)
        assert subset.grad_fn is not None
        torch.testing.assert_close(subset, output.classifier.weight()[ids])
        announce_last_micro_batch()
