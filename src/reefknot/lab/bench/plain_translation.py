"""A translator as people write it in plain torch: what ours is compared with.

    PlainTranslator     nn.Transformer between embeddings, and the scores of all classes stored for the loss
    PlainTraining       its training loop
    search_anew         a beam search without caches: every step computes all target steps so far

Shapes: B pairs, W hypotheses of each, N = B x W, S source tokens, T target tokens, V classes, D width.
"""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.kernels.scores import IGNORE
from reefknot.lab.bench.measure import Absent
from reefknot.lab.config.parts import OPTIMISERS
from reefknot.lab.evaluation.beam import Hypothesis, SearchSettings
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.training.settings import TrainingSettings
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.encoders.transformer import ResidualBlock, sinusoids
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.translator import PAD, Translator, sides
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable


class PlainTranslator(nn.Module):
    """nn.Transformer with the sizes, drop rates and ties of one of our models, and weights of its own."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        encoder, output = model.encoder, model.output
        if not isinstance(encoder, EncoderDecoder):
            raise Absent(f"an encoder of kind {type(encoder).__name__} is not that of nn.Transformer")
        if type(output) is not Softmax or type(output.classifier) is not Plain:
            raise Absent("an output end that is more than rows of a table has no plain form here")
        made: dict[nn.Module, nn.Embedding] = {}
        self.source, self.source_scale = _embedding(model.source, made)
        self.target, self.target_scale = _embedding(model.input, made)
        self.transformer = _stacks(encoder)
        bias = output.classifier.bias is not None
        self.generator = nn.Linear(encoder.dim, output.vocab_size, bias=bias)
        if output.classifier.table in made:
            self.generator.weight = made[output.classifier.table].weight
        self.dropout = encoder.dropout
        self.smoothing = output.smoothing

    def forward(self, source_BS: Tensor, x_BT: Tensor) -> Tensor:
        """The scores of all classes at every target step, z_BTV."""
        padding_BS = source_BS == PAD
        steps = x_BT.shape[1]
        later_TT = torch.ones(steps, steps, dtype=torch.bool, device=x_BT.device).triu(1)
        h_BTD = self.transformer(
            self._enter(self.source_scale * self.source(source_BS.masked_fill(padding_BS, 0))),
            self._enter(self.target_scale * self.target(x_BT)),
            tgt_mask=later_TT,
            src_key_padding_mask=padding_BS,
            memory_key_padding_mask=padding_BS,
            tgt_is_causal=True,
        )
        scores: Tensor = self.generator(h_BTD)
        return scores

    def loss(self, x_BU: Tensor, y_BT: Tensor) -> Tensor:
        """The sum over all targets."""
        scores_BTV = self(*sides(x_BU, y_BT))
        return F.cross_entropy(
            scores_BTV.flatten(0, 1),
            y_BT.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.smoothing,
        )

    def _enter(self, x_BTD: Tensor) -> Tensor:
        at_TD = sinusoids(0, x_BTD.shape[1], x_BTD.shape[2], x_BTD.device).to(x_BTD.dtype)
        return F.dropout(x_BTD + at_TD, self.dropout, self.training)


class PlainTraining:
    """The loop around it: gradients, clipping, optimiser, with a rate at which nothing changes."""

    def __init__(self, model: PlainTranslator, settings: TrainingSettings, device: torch.device) -> None:
        self.model = model.to(device).train()
        self.settings, self.device = settings, device
        still = settings.optimiser.model_copy(update={"learning_rate": 1e-12})
        self.parameters = list(self.model.parameters())
        self.optimiser = OPTIMISERS.build(still, {"parameters": self.parameters})

    def __call__(self, x_BU: Tensor, y_BT: Tensor, count: int) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        pieces = self.settings.accumulate
        for x, y in zip(x_BU.chunk(pieces), y_BT.chunk(pieces), strict=True):
            with autocast(self.device, self.settings.precision):
                loss = self.model.loss(x.to(self.device), y.to(self.device)) / count
            torch.autograd.backward(loss)
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimiser.step()


@torch.no_grad()
def search_anew(model: Translator, source_BS: Tensor, eos: int, settings: SearchSettings) -> list[Hypothesis]:
    """The best translation of each source, by the rules of `beam_search` but with nothing kept between the steps: the
    target stack reads all that was written so far, and sentences that are done stay in the batch."""
    batch, width = len(source_BS), settings.beam
    limits = [settings.limit(tokens) for tokens in (source_BS != PAD).sum(dim=1).tolist()]
    state = {name: each.repeat_interleave(width, dim=1) for name, each in model.read(source_BS).items()}
    ids_NT = source_BS.new_full((batch * width, 1), eos)
    logp_BW = torch.full((batch, width), -math.inf, device=source_BS.device)
    logp_BW[:, 0] = 0.0
    first_B1 = width * torch.arange(batch, device=source_BS.device)[:, None]
    found: list[list[Hypothesis]] = [[] for _ in limits]

    def keep(n: int, row: int, logp: float, length: int, finished: bool) -> None:
        ids = ids_NT[row, 1:].tolist()
        found[n].append(Hypothesis(tuple(ids), logp, settings.score(logp, length), finished))

    for length in range(1, max(limits) + 1):
        logp_NV = model.output.log_probs(model(ids_NT, state).output[:, -1])
        total_BP = (logp_BW.flatten()[:, None] + logp_NV.float()).reshape(batch, -1)
        # Of twice as many as go on, at most half are ended by <eos>.
        best_BQ, place_BQ = total_BP.topk(2 * width)
        row_BQ, token_BQ = first_B1 + place_BQ // logp_NV.shape[1], place_BQ % logp_NV.shape[1]
        open_ones = [n for n, limit in enumerate(limits) if length <= limit and len(found[n]) < width]
        best, tokens, rows = (each[:, :width].tolist() for each in (best_BQ, token_BQ, row_BQ))
        for n in open_ones:
            for logp, token, row in zip(best[n], tokens[n], rows[n], strict=True):
                if token == eos and logp > -math.inf:
                    keep(n, row, logp, length, True)
        stay_BW = (token_BQ == eos).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        logp_BW, rows_BW, tokens_BW = (each.gather(1, stay_BW) for each in (best_BQ, row_BQ, token_BQ))
        ids_NT = torch.cat([ids_NT[rows_BW.flatten()], tokens_BW.flatten()[:, None]], dim=1)
        for n in open_ones:
            if length == limits[n] and not found[n]:
                keep(n, n * width, float(logp_BW[n, 0]), length, False)
        if all(length >= limit or len(found[n]) >= width for n, limit in enumerate(limits)):
            break
    return [max(each, key=lambda hypothesis: hypothesis.score) for each in found]


def _embedding(end: InputEnd, made: dict[nn.Module, nn.Embedding]) -> tuple[nn.Embedding, float]:
    """An embedding for the table of an input end, the same for the same table, and what multiplies it."""
    if not isinstance(end, Lookup) or not isinstance(end.table, WordTable) or end.dim != end.table.dim:
        raise Absent("an input end that is more than rows of a table has no plain form here")
    if end.table not in made:
        made[end.table] = nn.Embedding(end.table.vocab_size, end.table.dim)
        nn.init.normal_(made[end.table].weight, std=end.table.dim**-0.5)
    return made[end.table], end.scale


def _stacks(encoder: EncoderDecoder) -> nn.Transformer:
    """Both stacks, whose one drop rate is set apart into ours."""
    block = encoder.source_blocks[0]
    assert isinstance(block, ResidualBlock)
    layers, pre = len(encoder.source_blocks), block.norm == "pre"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        stacks = nn.Transformer(
            encoder.dim,
            encoder.heads,
            layers,
            layers,
            block.ffn_in.out_features,
            encoder.dropout,
            batch_first=True,
            norm_first=pre,
        )
    if not pre:
        stacks.encoder.norm = stacks.decoder.norm = None
    for layer in (*stacks.encoder.layers, *stacks.decoder.layers):
        layer.dropout.p = block.dropout_relu
        for attention in (layer.self_attn, getattr(layer, "multihead_attn", layer.self_attn)):
            attention.dropout = block.dropout_attention
    return stacks
