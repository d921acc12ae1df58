"""The adaptive softmax (Grave et al. 2017): frequent words are classified directly, rarer words in two steps.

The vocabulary is cut into bands: groups of words of similar frequency, most frequent first. The *head* is a softmax
over the words of the first band and one *cluster* per later band, which stands for all words of that band. A *tail* is
a softmax over the words of a later band:

    p(y | h) = p(y | head)                                  for a word y of the first band
    p(y | h) = p(cluster of band i | head) p(y | tail i)    for a word y of band i

Start reading at `AdaptiveSoftmax`. A tail is computed only for the rows (tokens) whose target lies in its band, so rare
words are cheap. The input counterpart, `nn/inputs/adaptive.py`, may share the tables and projections.

Shapes: N rows (one row per token), D dimensions, V classes, H classes of the head, S classes of a tail, R rows of a
tail, K best classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError, describe_type
from reefknot.kernels.losses import row_losses, summed_loss
from reefknot.kernels.reference import linear_scores
from reefknot.kernels.scores import IGNORE
from reefknot.nn.bounds import Dim, Probability, check_rates
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan, RowLoss, add_scalars
from reefknot.nn.outputs.rows import any_leading_shape, any_leading_shape_with_targets, rows_only
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_by_band, count_matrix_weights
from reefknot.nn.tables import BandedTable, BandProjections, WordTable, build_projection, check_banded, group_by_band

if TYPE_CHECKING:
    from reefknot.kernels.parallel import ClassShard

HeadProjection = Literal["none", "own", "shared"]

PAD_MULTIPLE = 32
"""The rows of a tail are padded to a multiple of this number (see `_compute_padded_length`)."""


@dataclass(frozen=True)
class BandPlan(Plan):
    """The plan of a batch: its targets, grouped by band.

    With two bands, the ids 0 to 9 and 10 to 99, the targets 3, 42, 7 give

        head    3, 10, 7        42 lies in the second band, whose cluster is class 10 of the head
        tails   ([1], [32])     row 1 has word 42, which is word 32 of its band
    """

    head: Tensor
    """The target of each of the N rows in the head: a word of the first band, or the cluster of a later band."""
    tails: tuple[tuple[Tensor, Tensor], ...]
    """For each tail, rows_R and targets_R: the rows whose target lies in its band, and these targets, counted from the
    first id of the band. Rows of other bands may follow as padding, with the target `IGNORE`. All rows of a tail are
    distinct."""

    def pad(self, lengths: Sequence[int]) -> BandPlan:
        """Return the plan with each tail padded to its length in `lengths`, but to at most N rows."""
        max_length = len(self.head)
        padded_tails = []
        for (rows_R, targets_R), length in zip(self.tails, lengths, strict=True):
            padded_tails.append(_pad_tail(rows_R, targets_R, min(length, max_length)))
        return replace(self, tails=tuple(padded_tails))


class SearchResult(NamedTuple):
    """The k best classes of every row, and the share of the tails that was computed to find them."""

    log_probs: Tensor
    """Log-probabilities of the k best classes, with shape (N, k), best first."""
    ids: Tensor
    """Ids of the k best classes, with shape (N, k)."""
    computed_share: float
    """The share of all (row, tail) pairs that were computed, from 0 to 1."""


class AdaptiveSoftmax(OutputEnd):
    """A softmax over frequent words, and a smaller softmax for each band of rarer words (Grave et al. 2017).

    Training is faster than with a full softmax, because the rare words are scored only where the target is rare. To tie
    it to an adaptive input, give both the same banded table and the same projections:

        table = BandedTable(267_744, 1024, sizes=[20_000, 40_000])
        projections = BandProjections(table, 1024)
        input = AdaptiveLookup(table, projections)
        output = AdaptiveSoftmax(table, projections)

    Args:
        classifier: One classifier per band. A banded table stands for plain classifiers without biases.
        projections: The matrices that map the hidden state to the dimensions of the bands. An adaptive lookup may
            share them.
        context_dim: Dimension of the hidden state. The default is the dimension of the projections.
        head_projection: The matrix between the hidden state and the head: `none` (best in the paper), its `own`, or the
            `shared` one of the first band in `projections`.
        softmax_dropout: Dropout rate of the hidden state, for head and tails (fairseq; not in the paper).
        tail_dropout: Dropout rate of the projected hidden state of the tails (in the paper).
        project_to: First map the hidden state to this dimension, by a matrix without bias. By default it is not mapped.
    """

    divides_classes = True
    synchronizes = True  # `topk` and `target_log_probs` read from the GPU which rows need a tail

    def __init__(
        self,
        classifier: Sequence[Classifier] | BandedTable,
        projections: BandProjections,
        context_dim: int | None = None,
        head_projection: HeadProjection = "none",
        softmax_dropout: Probability = 0.0,
        tail_dropout: Probability = 0.0,
        project_to: Dim | None = None,
    ) -> None:
        super().__init__()
        _check_settings(head_projection, softmax_dropout, tail_dropout)
        if isinstance(classifier, BandedTable | WordTable):
            check_banded(classifier, "adaptive softmax")
            classifiers: Sequence[Classifier] = [Plain(table, bias=False) for table in classifier.tables]
        elif not isinstance(classifier, Sequence | nn.ModuleList):
            raise SettingsError(
                f"adaptive softmax: needs a banded table or a list of classifiers; {describe_type(classifier)} is "
                "not one; pass BandedTable(vocab_size, dim, sizes=...)"
            )
        else:
            classifiers = classifier
        self.context_dim = projections.dim if context_dim is None else context_dim
        dim = project_to or self.context_dim
        _check_dimensions(classifiers, projections, dim, head_projection)

        # The first id of every band, and the end of the last band.
        self.bounds = (0, *accumulate(band_classifier.vocab_size for band_classifier in classifiers))
        self.vocab_size = self.bounds[-1]
        self.bands = len(classifiers)
        self.head_projection = head_projection
        self.softmax_dropout = softmax_dropout
        self.tail_dropout = tail_dropout
        self.classifiers = nn.ModuleList(classifiers)
        self.projections = projections

        # The optional maps of the hidden state: `front` for head and tails, `head` for the head only.
        head_classifier = classifiers[0]
        self.front = build_projection(self.context_dim, dim) if project_to else None
        self.head = build_projection(dim, head_classifier.context_dim) if head_projection == "own" else None

        # The vectors and biases of the clusters, which the head scores together with the words of the first band.
        num_tails = len(classifiers) - 1
        self.clusters: nn.Parameter | None = None
        self.cluster_bias: nn.Parameter | None = None
        if num_tails:
            self.clusters = nn.Parameter(torch.empty(num_tails, head_classifier.dim))
            nn.init.xavier_uniform_(self.clusters)
            if head_classifier.bias is not None:
                self.cluster_bias = nn.Parameter(torch.zeros(num_tails))

    def prepare(self, targets: Tensor) -> BandPlan:
        """Assign the targets to the head and the tails. An unknown class raises an `ArgumentError`.

        Args:
            targets: Target classes on the host, with any shape. Targets of -100 are ignored.
        """
        return self.prepare_micro_batches([targets])[0]

    def prepare_micro_batches(self, micro_batches: Sequence[Tensor]) -> list[BandPlan]:
        """Return one plan for each micro-batch of an optimiser step. A tail has the same length in all plans.

        Args:
            micro_batches: The target classes of each micro-batch, on the host.
        """
        plans = [self._plan_without_padding(targets.reshape(-1)) for targets in micro_batches]
        padded_lengths = []
        for tail_index in range(len(self.classifiers) - 1):
            max_rows = 0
            for plan in plans:
                rows_R, _ = plan.tails[tail_index]
                max_rows = max(max_rows, len(rows_R))
            padded_lengths.append(_compute_padded_length(max_rows))
        return [plan.pad(padded_lengths) for plan in plans]

    @rows_only
    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the negative log-likelihood of the targets as the part `nll`.

        The head is computed for all rows, a tail only for the rows whose target lies in its band.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        if not isinstance(plan, BandPlan):
            plan = self.prepare(targets_N)
        plan = plan.to(hidden_ND.device)
        hidden_ND = self._project_and_drop(hidden_ND)

        head = self._head_inputs(hidden_ND)
        band_losses = [head.summed_loss(plan.head)]
        for band, (rows_R, targets_R) in enumerate(plan.tails, start=1):
            # A tail without rows takes part too, because other processes expect a gradient of its parameters.
            tail = self._tail_inputs(band, hidden_ND.index_select(0, rows_R))
            band_losses.append(tail.summed_loss(targets_R))

        return {"nll": LossPart(add_scalars(band_losses), plan.count)}

    def penalties(self) -> dict[str, Tensor]:
        """Return the penalties of the bands' classifiers. Penalties of the same name are added."""
        totals: dict[str, Tensor] = {}
        for band in range(len(self.classifiers)):
            for name, penalty in self._classifier(band).penalties().items():
                if name in totals:
                    totals[name] = totals[name] + penalty
                else:
                    totals[name] = penalty
        return totals

    @any_leading_shape
    def log_probs(self, hidden_ND: Tensor) -> Tensor:
        hidden_ND = self._project_and_drop(hidden_ND)
        head_log_probs_NH = self._head_log_probs(hidden_ND)
        band_log_probs = [head_log_probs_NH[:, : self.bounds[1]]]
        for band in range(1, len(self.classifiers)):
            cluster_log_probs_N = head_log_probs_NH[:, self._cluster_class(band)]
            band_log_probs.append(cluster_log_probs_N[:, None] + self._tail_log_probs(band, hidden_ND))
        return torch.cat(band_log_probs, dim=-1)

    @any_leading_shape_with_targets
    def target_log_probs(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._target_log_probs_of_all_rows(hidden_ND, targets_N)
        return -self._compute_row_nll(hidden_ND, self._plan_without_padding(targets_N))

    def loss_per_row(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, RowLoss]:
        if not isinstance(plan, BandPlan):
            plan = self.prepare(targets_N)
        return {"nll": RowLoss(self._compute_row_nll(hidden_ND, plan.to(hidden_ND.device)))}

    def _compute_row_nll(self, hidden_ND: Tensor, plan: BandPlan) -> Tensor:
        """Return the negative log-likelihood of the target of each row, (N,)."""
        hidden_ND = self._project_and_drop(hidden_ND)
        head = self._head_inputs(hidden_ND)
        nll_N = row_losses(head.context, head.weight, head.bias, plan.head).nll
        for band, (rows_R, targets_R) in enumerate(plan.tails, start=1):
            tail = self._tail_inputs(band, hidden_ND.index_select(0, rows_R))
            tail_nll_R = row_losses(tail.context, tail.weight, tail.bias, targets_R).nll
            nll_N = nll_N.index_add(0, rows_R, tail_nll_R)
        return nll_N

    def _target_log_probs_of_all_rows(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Compute `target_log_probs` with every tail for every row, because the rows of a tail depend on values.

        A compiled or exported graph knows no values.
        """
        hidden_ND = self._project_and_drop(hidden_ND)
        head_targets_N = targets_N
        tail_losses = []
        for band, (first_id, end_id) in enumerate(pairwise(self.bounds[1:]), start=1):
            is_in_band_N = (targets_N >= first_id) & (targets_N < end_id)
            head_targets_N = torch.where(is_in_band_N, self._cluster_class(band), head_targets_N)
            band_targets_N = torch.where(is_in_band_N, targets_N - first_id, IGNORE)
            tail = self._tail_inputs(band, hidden_ND)
            # Rows of other bands are ignored, so their loss is zero.
            tail_losses.append(row_losses(tail.context, tail.weight, tail.bias, band_targets_N).nll)
        head = self._head_inputs(hidden_ND)
        nll_N = row_losses(head.context, head.weight, head.bias, head_targets_N).nll
        for tail_nll_N in tail_losses:
            nll_N = nll_N + tail_nll_N
        return -nll_N

    @any_leading_shape
    def topk(self, hidden_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        result = self.search(hidden_ND, k)
        return result.log_probs, result.ids

    @rows_only
    def search(self, hidden_ND: Tensor, k: int) -> SearchResult:
        """Find the k best classes of each row without computing every tail. The result is exact.

        No word of a tail is more probable than its cluster. So a tail is not computed for a row in which the cluster is
        less probable than the k-th best class so far. With k = 2, if the best words of the head have probabilities 0.5
        and 0.2 and the cluster of a tail has 0.1, then no word of that tail can be among the best two.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            k: Number of classes to return, from 1 to V.
        """
        self.check_topk_size(k)
        hidden_ND = self._project_and_drop(hidden_ND)
        head_log_probs_NH = self._head_log_probs(hidden_ND)

        # Start with the best words of the head. -inf marks places that no class has taken yet.
        best_NK = head_log_probs_NH.new_full((len(hidden_ND), k), -torch.inf)
        ids_NK = torch.zeros_like(best_NK, dtype=torch.long)
        head_k = min(k, self.bounds[1])
        head_best, head_ids = head_log_probs_NH[:, : self.bounds[1]].topk(head_k)
        best_NK[:, :head_k] = head_best
        ids_NK[:, :head_k] = head_ids

        num_computed = 0
        for band in range(1, len(self.classifiers)):
            # Compute the tail only for the rows in which one of its words may be among the best.
            cluster_log_probs_N = head_log_probs_NH[:, self._cluster_class(band)]
            rows_R = (cluster_log_probs_N > best_NK[:, -1]).nonzero().squeeze(-1)
            if not len(rows_R):
                continue
            num_computed += len(rows_R)
            tail_RS = cluster_log_probs_N[rows_R, None] + self._tail_log_probs(band, hidden_ND[rows_R])
            tail_best, tail_words = tail_RS.topk(min(k, tail_RS.shape[1]))

            # Merge the best classes so far with the best words of this tail.
            candidate_log_probs = torch.cat([best_NK[rows_R], tail_best], dim=-1)
            candidate_ids = torch.cat([ids_NK[rows_R], tail_words + self.bounds[band]], dim=-1)
            best_RK, indices_RK = candidate_log_probs.topk(k)
            best_NK = best_NK.index_copy(0, rows_R, best_RK)
            ids_NK = ids_NK.index_copy(0, rows_R, candidate_ids.gather(1, indices_RK))

        num_pairs = len(hidden_ND) * (len(self.classifiers) - 1)
        computed_share = num_computed / num_pairs if num_pairs else 0.0
        return SearchResult(best_NK, ids_NK, computed_share)

    @any_leading_shape
    def sample(self, hidden_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one class per hidden state: from the head and, if this gives a cluster, from its tail.

        The result has shape (...).

        Args:
            hidden_ND: Hidden states, with shape (..., D).
            generator: Random number generator on the device of `hidden_ND`. The default is torch's own.
        """
        hidden_ND = self._project_and_drop(hidden_ND)
        ids_N = _sample_classes(self._head_log_probs(hidden_ND), generator)
        for band in range(1, len(self.classifiers)):
            rows_R = (ids_N == self._cluster_class(band)).nonzero().squeeze(-1)
            if not len(rows_R):
                continue
            words_R = _sample_classes(self._tail_log_probs(band, hidden_ND[rows_R]), generator)
            # Shift the ids out of the vocabulary, so that no word of this tail looks like the cluster of a later band.
            ids_N = ids_N.index_copy(0, rows_R, words_R + self.bounds[band] + self.vocab_size)
        return torch.where(ids_N < self.vocab_size, ids_N, ids_N - self.vocab_size)

    def vectors(self) -> Tensor:
        """Return one vector per class in the dimension of the projections, (V, dim), for example to find neighbours.

        If the class vectors of a classifier do not have the dimension of its band, the vectors of its table are used.
        """
        band_vectors = []
        for band in range(len(self.classifiers)):
            classifier = self._classifier(band)
            if classifier.dim == classifier.table.dim:
                vectors = classifier.weight()
            else:
                vectors = classifier.table.vectors()
            if band > 0:
                vectors = self.projections.to_model_dim(band, vectors)
            elif self.head_projection == "shared":
                vectors = self.projections.to_model_dim(0, vectors)
            elif self.head is not None:
                vectors = F.linear(vectors, self.head.weight.T)
            band_vectors.append(vectors)
        return torch.cat(band_vectors)

    def tables(self) -> list[WordTable]:
        """Return the tables of the bands' classifiers. An input end that uses one of them is tied to this end."""
        return [self._classifier(band).table for band in range(len(self.classifiers))]

    def maps_hidden(self) -> bool:
        return True

    def flops(self, targets_N: Tensor) -> int:
        # The head is computed for all targets, a tail for the targets of its band.
        num_targets = len(targets_N)
        rows_per_band = [num_targets, *count_by_band(targets_N, self.bounds)[1:]]
        dim = self.projections.dim

        # The work of every target in addition to the classifiers.
        weights_per_target = 0
        if self.front is not None:
            weights_per_target += count_matrix_weights(self.front)
        if self.clusters is not None:
            weights_per_target += self.clusters.numel()
        if self.head_projection != "none":
            weights_per_target += dim * self.projections.band_dims[0]
        total = FLOPS_PER_WEIGHT * num_targets * weights_per_target

        # The classifiers, and the projections of the tails.
        for band, num_rows in enumerate(rows_per_band):
            total += self._classifier(band).flops(num_rows)
            if band > 0:
                total += FLOPS_PER_WEIGHT * num_rows * dim * self.projections.band_dims[band]
        return total

    def untrained_parameters(self) -> list[tuple[nn.Parameter, str]]:
        """Return the matrix of the first band in the projections, unless the head uses it."""
        if not self.projections.has_head or self.head_projection == "shared":
            return []
        message = (
            "adaptive softmax: its projections have a matrix for the first band that no end uses; "
            "share them with the input end, or make them with head = false"
        )
        return [(self.projections.bands[0], message)]

    # -- head and tails --------------------------------------------------------------------------------------------

    def _classifier(self, band: int) -> Classifier:
        return cast(Classifier, self.classifiers[band])

    def _cluster_class(self, band: int) -> int:
        """Return the class of the head that stands for all words of a later band."""
        return self.bounds[1] + band - 1

    def _plan_without_padding(self, targets_N: Tensor) -> BandPlan:
        count = super().prepare(targets_N).count
        tails = group_by_band(targets_N, self.bounds)[1:]
        head_targets_N = targets_N.clone()
        for band, (rows_R, _) in enumerate(tails, start=1):
            head_targets_N[rows_R] = self._cluster_class(band)
        return BandPlan(count, head_targets_N, tuple(tails))

    def _project_and_drop(self, hidden_ND: Tensor) -> Tensor:
        """Apply the steps that head and tails share: the projection of `project_to`, if any, and dropout."""
        if self.front is not None:
            hidden_ND = self.front(hidden_ND)
        return F.dropout(hidden_ND, self.softmax_dropout, self.training)

    def _head_inputs(self, hidden_ND: Tensor) -> _SoftmaxInputs:
        """Return the inputs of the head's softmax. Words and clusters are scored with the same context."""
        classifier = self._classifier(0)
        if self.head is not None:
            hidden_ND = self.head(hidden_ND)
        elif self.head_projection == "shared":
            hidden_ND = self.projections.to_band_dim(0, hidden_ND)
        context_ND = classifier.context(hidden_ND)

        shard = classifier.shard
        if self.clusters is None:
            return _SoftmaxInputs(context_ND, classifier.weight(), classifier.bias, shard)
        num_clusters = len(self.clusters)
        if shard is not None:
            # The clusters are the last classes, so the last process scores them.
            if not shard.has_last_class(len(classifier.weight())):
                num_clusters = 0
            shard = replace(shard, num_classes=shard.num_classes + len(self.clusters))
        bias_H = None
        if classifier.bias is not None:
            bias_H = torch.cat([classifier.bias, cast(Tensor, self.cluster_bias)[:num_clusters]])
        weight_HD = torch.cat([classifier.weight(), self.clusters[:num_clusters]])
        return _SoftmaxInputs(context_ND, weight_HD, bias_H, shard)

    def _tail_inputs(self, band: int, hidden_RD: Tensor) -> _SoftmaxInputs:
        """Return the inputs of a tail's softmax for some rows of the batch.

        The rows are distinct, so the gradient of their selection involves no sum whose order could vary.
        """
        classifier = self._classifier(band)
        projected = self.projections.to_band_dim(band, hidden_RD)
        projected = F.dropout(projected, self.tail_dropout, self.training)
        context_RD = classifier.context(projected)
        return _SoftmaxInputs(context_RD, classifier.weight(), classifier.bias, classifier.shard)

    def _head_log_probs(self, hidden_ND: Tensor) -> Tensor:
        head = self._head_inputs(hidden_ND)
        return torch.log_softmax(linear_scores(head.context, head.weight, head.bias), dim=-1)

    def _tail_log_probs(self, band: int, hidden_RD: Tensor) -> Tensor:
        tail = self._tail_inputs(band, hidden_RD)
        return torch.log_softmax(linear_scores(tail.context, tail.weight, tail.bias), dim=-1)


class _SoftmaxInputs(NamedTuple):
    """The arguments of the softmax of a band: hidden states mapped for its classifier, class vectors and biases."""

    context: Tensor
    weight: Tensor
    bias: Tensor | None
    shard: ClassShard | None
    """Where the classes lie, if other processes have more of them."""

    def summed_loss(self, targets_N: Tensor) -> Tensor:
        """Return the sum of the losses of the targets of a plan."""
        return summed_loss(self.context, self.weight, self.bias, targets_N, shard=self.shard, has_checked_targets=True)


def _check_settings(head_projection: str, softmax_dropout: float, tail_dropout: float) -> None:
    if head_projection not in get_args(HeadProjection):
        options = ", ".join(get_args(HeadProjection))
        raise SettingsError(f"adaptive softmax: head_projection = {head_projection!r}: must be one of {options}")
    check_rates("adaptive softmax", softmax_dropout=softmax_dropout, tail_dropout=tail_dropout)


def _check_dimensions(
    classifiers: Sequence[Classifier], projections: BandProjections, dim: int, head_projection: str
) -> None:
    """Raise an error unless classifiers, projections and a hidden state of dimension `dim` fit together."""
    if len(projections.band_dims) != len(classifiers):
        raise SettingsError(
            f"adaptive softmax: {len(classifiers)} classifiers but projections for {len(projections.band_dims)} bands; "
            "make both from one table"
        )
    if projections.dim != dim:
        raise SettingsError(
            f"adaptive softmax: the projections have dim = {projections.dim} but the hidden state has {dim} numbers; "
            f"make the projections with dim = {dim}, or map the hidden state with project_to = {projections.dim}"
        )
    head_dim = dim if head_projection == "none" else projections.band_dims[0]
    received_dims = (head_dim, *projections.band_dims[1:])
    for band, (classifier, received_dim) in enumerate(zip(classifiers, received_dims, strict=True)):
        if classifier.context_dim == received_dim:
            continue
        if band == 0:
            advice = "make the table's dim equal to the model's, or use head_projection = 'own'"
        else:
            advice = "make classifiers and projections from one table"
        raise SettingsError(
            f"adaptive softmax: the classifier of band {band + 1} reads {classifier.context_dim} numbers but "
            f"receives {received_dim}; {advice}"
        )
    if head_projection == "shared" and not projections.has_head:
        raise SettingsError(
            "adaptive softmax: head_projection = 'shared' needs projections with a matrix for the first band; "
            "give the same projections to the input end, or make them with head = true"
        )


def _compute_padded_length(num_rows: int) -> int:
    """Return the padded number of rows of a tail.

    It is a multiple of `PAD_MULTIPLE`. From 512 rows on, it is a multiple of an eighth of the largest power of two up
    to `num_rows`. A training step is captured in a CUDA graph once for each shape, so there should be few shapes: for
    4,096 tokens of text there are about 24.
    """
    next_power_of_two = 1 << num_rows.bit_length()
    multiple = max(PAD_MULTIPLE, next_power_of_two // 16)
    return math.ceil(num_rows / multiple) * multiple


def _pad_tail(rows_R: Tensor, targets_R: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the rows and targets of a tail, padded to `length` rows.

    The padding consists of the first rows of other bands, which do not have a target in this tail.
    """
    is_free = torch.ones(length, dtype=torch.bool, device=rows_R.device)
    is_free[rows_R[rows_R < length]] = False
    padding_rows = is_free.nonzero().squeeze(-1)[: length - len(rows_R)]
    padding_targets = torch.full_like(padding_rows, IGNORE)
    return torch.cat([rows_R, padding_rows]), torch.cat([targets_R, padding_targets])


def _sample_classes(log_probs_NV: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one class per row."""
    return torch.multinomial(log_probs_NV.exp(), 1, generator=generator).squeeze(-1)
