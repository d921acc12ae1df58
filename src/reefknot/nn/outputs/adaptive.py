"""The adaptive softmax (Grave et al. 2017) with the ties of Baevski & Auli (2019): a short head, tails on demand.

    p(y | h) = p(y | head)                               for a word of the first band
    p(y | h) = p(band i | head) p(y | band i)            for a word of a later one

The head classifies the words of the first band and one cluster per later band. A tail meets the hidden state through
its band's projection, so its cost is that of a narrow classifier on the rows whose target lies in it.

Shapes: N rows, D width, V classes, H classes of the head, S of a tail, R rows whose target lies in a tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import row_losses, summed_loss
from reefknot.kernels.reference import linear_scores
from reefknot.kernels.scores import IGNORE
from reefknot.lab.config.parts import CLASSIFIERS
from reefknot.lab.config.settings import Dim, Probability, check_rates
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.contract import LossPart, OutputEnd, Plan
from reefknot.nn.tables import BandedTable, NamedProjections, WordTable, check_banded, projection, rows_by_band

HeadProjection = Literal["none", "own", "shared"]

FILL = 32
"""A tail's rows are filled up to a multiple of this, or, from 512 rows on, of an eighth of the power of two below them:
a training step is captured once for each of its shapes, and few should be. Text of 4,096 tokens has about 24. Where an
update is made in pieces, it is the longest of theirs that is filled up so, and the others to its length."""


@dataclass(frozen=True)
class BandPlan(Plan):
    """Which rows belong to which tail, found on the host: no later step has to ask the device."""

    head: Tensor
    """y_N of the head's classifier: a word of the first band, or the cluster of its band."""
    tails: tuple[tuple[Tensor, Tensor], ...]
    """Per tail its rows, and their words counted from the band's first; then other rows, to fill up, without a word
    (`IGNORE`). All rows of a tail are distinct."""

    def filled(self, lengths: Sequence[int]) -> BandPlan:
        """The same with tails so long, or with all rows that there are."""
        pairs = zip(self.tails, lengths, strict=True)
        return replace(self, tails=tuple(_filled(*tail, min(length, len(self.head))) for tail, length in pairs))


class Search(NamedTuple):
    """What a search for the best classes found, and how much it had to look at."""

    log_probs: Tensor
    ids: Tensor
    opened: float
    """Share of the tails (rows x tails) that were opened."""


class AdaptiveSoftmax(OutputEnd):
    """A head of frequent words and clusters, and a narrower softmax for each band of rarer words."""

    waits = True  # which rows open a tail

    def __init__(
        self,
        classifier: Annotated[Sequence[Classifier] | BandedTable, CLASSIFIERS],
        projections: NamedProjections,
        context_dim: int | None = None,
        head_projection: Annotated[
            HeadProjection,
            Field(
                description="a matrix before the classes of the head: none (the paper's best), its own, or the shared"
            ),
        ] = "none",
        softmax_dropout: Annotated[
            Probability, Field(description="drop rate of the hidden state, for head and tails (fairseq, not the paper)")
        ] = 0.0,
        tail_dropout: Annotated[
            Probability, Field(description="drop rate of the projected hidden state of the tails (the paper's)")
        ] = 0.0,
        project_to: Annotated[
            Dim | None, Field(description="first map the hidden state to this width, by a matrix without bias")
        ] = None,
    ) -> None:
        """`classifier`: one for each band; a banded table stands for plain ones without biases."""
        super().__init__()
        if head_projection not in get_args(HeadProjection):
            options = ", ".join(get_args(HeadProjection))
            raise SettingsError(f"adaptive softmax: head_projection = {head_projection!r}: must be one of {options}")
        check_rates("adaptive softmax", softmax_dropout=softmax_dropout, tail_dropout=tail_dropout)
        if isinstance(classifier, BandedTable | WordTable):
            check_banded(classifier, "adaptive softmax")
            classifier = [Plain(table, bias=False) for table in classifier.tables]
        self.classifiers = nn.ModuleList(classifier)
        self.projections = projections
        self.context_dim = projections.dim if context_dim is None else context_dim
        self.head_projection = head_projection
        self.softmax_dropout = softmax_dropout
        self.tail_dropout = tail_dropout
        self.bounds = (0, *accumulate(each.vocab_size for each in classifier))
        self.vocab_size = self.bounds[-1]
        width = project_to or self.context_dim
        _check_widths(classifier, projections.widths, projections.dim, width, head_projection)
        if head_projection == "shared" and not projections.head:
            raise SettingsError(
                "adaptive softmax: head_projection = 'shared' needs projections with a matrix for the first band; "
                "give the same projections to the input end, or make them with head = true"
            )
        self.front = projection(self.context_dim, width) if project_to else None
        self.head = projection(width, classifier[0].context_dim) if head_projection == "own" else None
        clusters = torch.empty(len(classifier) - 1, classifier[0].dim)
        self.clusters = nn.Parameter(nn.init.xavier_uniform_(clusters)) if len(classifier) > 1 else None
        biased = len(classifier) > 1 and classifier[0].bias is not None
        self.cluster_bias = nn.Parameter(torch.zeros(len(clusters))) if biased else None

    @staticmethod
    def scope(settings: Any, given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """One classifier for each band: its own table, and the width at which the hidden state reaches it."""
        name = settings.classifier.table
        table = given["tables"][name]
        check_banded(table, "adaptive output")
        widths = [band.dim for band in table.tables]
        if settings.head_projection == "none":
            widths[0] = settings.project_to or given["context_dim"]
        return [
            {**given, "tables": {**given["tables"], name: band}, "context_dim": width}
            for band, width in zip(table.tables, widths, strict=True)
        ]

    def prepare(self, y_cpu: Tensor) -> BandPlan:
        return self.prepare_pieces([y_cpu])[0]

    def prepare_pieces(self, pieces: Sequence[Tensor]) -> list[BandPlan]:
        """A tail is filled up to the same length in all of them."""
        plans = [self._bands(y_cpu.reshape(-1)) for y_cpu in pieces]
        by_tail = zip(*(plan.tails for plan in plans), strict=True)
        lengths = [_length(max(len(rows_R) for rows_R, _ in tails)) for tails in by_tail]
        return [plan.filled(lengths) for plan in plans]

    def loss(self, h_ND: Tensor, y_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        plan = (plan if isinstance(plan, BandPlan) else self.prepare(y_N)).to(h_ND.device)
        h_ND = self._front(h_ND)
        bands = [summed_loss(self._head_context(h_ND), *self._head_classes(), plan.head)]
        for band, (rows_R, words_R) in enumerate(plan.tails, start=1):
            # A tail without rows still takes part: its parameters get a gradient of zero, as other processes expect.
            bands.append(summed_loss(*self._tail(band, h_ND, rows_R), words_R))
        return {"nll": LossPart(torch.stack(bands).sum(), plan.count)}

    def penalties(self) -> dict[str, Tensor]:
        """Those of the bands' classifiers added up, each kind under its name."""
        found: dict[str, Tensor] = {}
        for band in range(len(self.classifiers)):
            for name, penalty in self._classifier(band).penalties().items():
                found[name] = found[name] + penalty if name in found else penalty
        return found

    def log_probs(self, h_ND: Tensor) -> Tensor:
        h_ND = self._front(h_ND)
        head_NH = self._head_log_probs(h_ND)
        bands = [head_NH[:, : self.bounds[1]]]
        for band in range(1, len(self.classifiers)):
            bands.append(head_NH[:, self._cluster(band), None] + self._tail_log_probs(band, h_ND))
        return torch.cat(bands, dim=-1)

    def target_log_probs(self, h_ND: Tensor, y_N: Tensor) -> Tensor:
        plan = self._bands(y_N)
        h_ND = self._front(h_ND)
        nll_N = row_losses(self._head_context(h_ND), *self._head_classes(), plan.head).nll
        for band, (rows_R, words_R) in enumerate(plan.tails, start=1):
            nll_N = nll_N.index_add(0, rows_R, row_losses(*self._tail(band, h_ND, rows_R), words_R).nll)
        return -nll_N

    def topk(self, h_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        found = self.search(h_ND, k)
        return found.log_probs, found.ids

    def search(self, h_ND: Tensor, k: int) -> Search:
        """The exact k best classes. No word of a tail is likelier than its cluster, so a tail whose cluster does not
        reach a row's k-th best stays closed for that row."""
        self.check_k(k)
        h_ND = self._front(h_ND)
        head_NH = self._head_log_probs(h_ND)
        best_NK = head_NH.new_full((len(h_ND), k), -torch.inf)
        ids_NK = torch.zeros_like(best_NK, dtype=torch.long)
        in_head = min(k, self.bounds[1])
        best_NK[:, :in_head], ids_NK[:, :in_head] = head_NH[:, : self.bounds[1]].topk(in_head)
        opened = 0
        for band in range(1, len(self.classifiers)):
            cluster_N = head_NH[:, self._cluster(band)]
            rows_R = (cluster_N > best_NK[:, -1]).nonzero().squeeze(-1)
            if not len(rows_R):
                continue
            opened += len(rows_R)
            tail_RS = cluster_N[rows_R, None] + self._tail_log_probs(band, h_ND[rows_R])
            found, words = tail_RS.topk(min(k, tail_RS.shape[1]))
            together = torch.cat([best_NK[rows_R], found], dim=-1)
            best_RK, places_RK = together.topk(k)
            best_NK = best_NK.index_copy(0, rows_R, best_RK)
            known = torch.cat([ids_NK[rows_R], words + self.bounds[band]], dim=-1)
            ids_NK = ids_NK.index_copy(0, rows_R, known.gather(1, places_RK))
        tails = len(h_ND) * (len(self.classifiers) - 1)
        return Search(best_NK, ids_NK, opened / tails if tails else 0.0)

    def sample(self, h_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw from the head; only the rows that drew a cluster draw again, from its words."""
        h_ND = self._front(h_ND)
        ids_N = _draw(self._head_log_probs(h_ND), generator)
        for band in range(1, len(self.classifiers)):
            rows_R = (ids_N == self._cluster(band)).nonzero().squeeze(-1)
            if not len(rows_R):
                continue
            words_R = _draw(self._tail_log_probs(band, h_ND[rows_R]), generator)
            # Beyond the vocabulary, so that no word drawn here is taken for the cluster of a later band.
            ids_N = ids_N.index_copy(0, rows_R, words_R + self.bounds[band] + self.vocab_size)
        return torch.where(ids_N < self.vocab_size, ids_N, ids_N - self.vocab_size)

    def vectors(self) -> Tensor:
        """The class vectors at the width that the projections share (that of `project_to`, where it is set); for
        classifiers
        of another width than their band's, its words' vectors."""
        found = []
        for band in range(len(self.classifiers)):
            classifier = self._classifier(band)
            seen = classifier.weight() if classifier.dim == classifier.table.dim else classifier.table.vectors()
            if band:
                seen = self.projections.up(band, seen)
            elif self.head_projection == "shared":
                seen = self.projections.up(0, seen)
            elif self.head is not None:
                seen = F.linear(seen, self.head.weight.T)
            found.append(seen)
        return torch.cat(found)

    def tables(self) -> list[WordTable]:
        return [self._classifier(band).table for band in range(len(self.classifiers))]

    def left_to_others(self) -> list[tuple[nn.Parameter, str]]:
        if not self.projections.head or self.head_projection == "shared":
            return []
        sentence = (
            "adaptive softmax: its projections have a matrix for the first band that no end uses; "
            "share them with the input end, or make them with head = false"
        )
        return [(self.projections.bands[0], sentence)]

    # -- head and tails --------------------------------------------------------------------------------------------

    def _bands(self, y_N: Tensor) -> BandPlan:
        """The plan before its tails are filled up."""
        head_N = y_N.clone()
        tails = rows_by_band(y_N, self.bounds)[1:]
        for band, (rows_R, _) in enumerate(tails, start=1):
            head_N[rows_R] = self._cluster(band)
        return BandPlan(super().prepare(y_N).count, head_N, tuple(tails))

    def _tail(self, band: int, h_ND: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """A tail's rows as its classes meet them, the classes, and their biases."""
        classifier = self._classifier(band)
        # Rows are distinct, so the gradient of this adds nothing up, and in no order.
        return self._tail_context(band, h_ND.index_select(0, rows_R)), classifier.weight(), classifier.bias

    def _classifier(self, band: int) -> Classifier:
        return cast(Classifier, self.classifiers[band])

    def _cluster(self, band: int) -> int:
        """The class of a later band among those of the head."""
        return self.bounds[1] + band - 1

    def _front(self, h_ND: Tensor) -> Tensor:
        if self.front is not None:
            h_ND = self.front(h_ND)
        return F.dropout(h_ND, self.softmax_dropout, self.training)

    def _head_context(self, h_ND: Tensor) -> Tensor:
        if self.head is not None:
            h_ND = self.head(h_ND)
        elif self.head_projection == "shared":
            h_ND = self.projections.down(0, h_ND)
        return self._classifier(0).context(h_ND)

    def _head_classes(self) -> tuple[Tensor, Tensor | None]:
        """Vectors and biases of the head. Clusters are classes like its words, and meet the same context."""
        classifier = self._classifier(0)
        if self.clusters is None:
            return classifier.weight(), classifier.bias
        bias = None if classifier.bias is None else torch.cat([classifier.bias, cast(Tensor, self.cluster_bias)])
        return torch.cat([classifier.weight(), self.clusters]), bias

    def _head_log_probs(self, h_ND: Tensor) -> Tensor:
        return torch.log_softmax(linear_scores(self._head_context(h_ND), *self._head_classes()), dim=-1)

    def _tail_context(self, band: int, h_RD: Tensor) -> Tensor:
        narrow = F.dropout(self.projections.down(band, h_RD), self.tail_dropout, self.training)
        return self._classifier(band).context(narrow)

    def _tail_log_probs(self, band: int, h_RD: Tensor) -> Tensor:
        classifier = self._classifier(band)
        return torch.log_softmax(
            linear_scores(self._tail_context(band, h_RD), classifier.weight(), classifier.bias), dim=-1
        )


def _check_widths(
    classifier: Sequence[Classifier], widths: tuple[int, ...], dim: int, width: int, head_projection: str
) -> None:
    if len(widths) != len(classifier):
        raise SettingsError(
            f"adaptive softmax: {len(classifier)} classifiers but projections for {len(widths)} bands; "
            "make both of one table"
        )
    if dim != width:
        raise SettingsError(
            f"adaptive softmax: the projections are for a model {dim} wide but the hidden state has {width} numbers; "
            f"make the projections' dim {width}, or map the hidden state with project_to = {dim}"
        )
    reaching = (width if head_projection == "none" else widths[0], *widths[1:])
    for band, (each, found) in enumerate(zip(classifier, reaching, strict=True)):
        if each.context_dim != found:
            advice = "make the table's dim as wide as the model, or use head_projection = 'own'"
            raise SettingsError(
                f"adaptive softmax: the classifier of band {band + 1} reads {each.context_dim} numbers but {found} "
                f"reach it; {'make classifiers and projections of one table' if band else advice}"
            )


def _length(rows: int) -> int:
    step = max(FILL, (1 << rows.bit_length()) // 16)
    return -(-rows // step) * step


def _filled(rows_R: Tensor, words_R: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A tail's rows and words, with the first rows of other words for company: they have no target here."""
    others = torch.ones(length, dtype=torch.bool, device=rows_R.device)
    others[rows_R[rows_R < length]] = False
    filling = others.nonzero().squeeze(-1)[: length - len(rows_R)]
    return torch.cat([rows_R, filling]), torch.cat([words_R, torch.full_like(filling, IGNORE)])


def _draw(logp_NV: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(logp_NV.exp(), 1, generator=generator).squeeze(-1)
