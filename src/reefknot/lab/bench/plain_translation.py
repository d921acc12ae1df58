"""A translator in plain torch, which benchmarks compare with our translators.

    PlainTranslator         nn.Transformer between embeddings; the loss stores the scores of all classes
    PlainTraining           its training loop
    search_without_cache    a beam search in which every step computes all target steps so far

Shapes: B pairs, W hypotheses per pair, N = B x W, S source tokens, T target tokens, V classes, D dimensions.
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
from reefknot.nn.models.translator import PAD, Translator, split_sides
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable


class PlainTranslator(nn.Module):
    """An nn.Transformer with the sizes, dropout rates and ties of one of our models. Its weights are new."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        encoder, output = model.encoder, model.output
        if not isinstance(encoder, EncoderDecoder):
            raise Absent(f"nn.Transformer cannot express the encoder {type(encoder).__name__}")
        if type(output) is not Softmax or type(output.classifier) is not Plain:
            raise Absent("only an output end whose class vectors are rows of a table has a plain form")
        embeddings: dict[nn.Module, nn.Embedding] = {}
        self.source, self.source_scale = _embedding(model.source, embeddings)
        self.target, self.target_scale = _embedding(model.input, embeddings)
        self.transformer = _stacks(encoder)
        bias = output.classifier.bias is not None
        self.generator = nn.Linear(encoder.dim, output.vocab_size, bias=bias)
        if output.classifier.table in embeddings:
            self.generator.weight = embeddings[output.classifier.table].weight
        self.dropout = encoder.dropout
        self.smoothing = output.smoothing

    def forward(self, source_BS: Tensor, x_BT: Tensor) -> Tensor:
        """Return the scores of all classes at every target step, z_BTV."""
        padding_BS = source_BS == PAD
        steps = x_BT.shape[1]
        later_TT = torch.ones(steps, steps, dtype=torch.bool, device=x_BT.device).triu(1)
        h_BTD = self.transformer(
            self._with_positions(self.source_scale * self.source(source_BS.masked_fill(padding_BS, 0))),
            self._with_positions(self.target_scale * self.target(x_BT)),
            tgt_mask=later_TT,
            src_key_padding_mask=padding_BS,
            memory_key_padding_mask=padding_BS,
            tgt_is_causal=True,
        )
        scores: Tensor = self.generator(h_BTD)
        return scores

    def loss(self, x_BU: Tensor, y_BT: Tensor) -> Tensor:
        """Return the loss summed over all targets."""
        scores_BTV = self(*split_sides(x_BU, y_BT))
        return F.cross_entropy(
            scores_BTV.flatten(0, 1),
            y_BT.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.smoothing,
        )

    def _with_positions(self, x_BTD: Tensor) -> Tensor:
        positions_TD = sinusoids(0, x_BTD.shape[1], x_BTD.shape[2], x_BTD.device).to(x_BTD.dtype)
        return F.dropout(x_BTD + positions_TD, self.dropout, self.training)


class PlainTraining:
    """A training step: gradients, clipping, optimiser. The learning rate is too small to change the weights."""

    def __init__(self, model: PlainTranslator, settings: TrainingSettings, device: torch.device) -> None:
        self.model = model.to(device).train()
        self.settings, self.device = settings, device
        optimiser = settings.optimiser.model_copy(update={"learning_rate": 1e-12})
        self.parameters = list(self.model.parameters())
        self.optimiser = OPTIMISERS.build(optimiser, {"parameters": self.parameters})

    def __call__(self, x_BU: Tensor, y_BT: Tensor, count: int) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        parts = self.settings.accumulate
        for x, y in zip(x_BU.chunk(parts), y_BT.chunk(parts), strict=True):
            with autocast(self.device, self.settings.precision):
                loss = self.model.loss(x.to(self.device), y.to(self.device)) / count
            torch.autograd.backward(loss)
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimiser.step()


@torch.no_grad()
def search_without_cache(model: Translator, source_BS: Tensor, eos: int, settings: SearchSettings) -> list[Hypothesis]:
    """Return the best translation of each source, by the rules of `beam_search`, without a KV cache.

    In every step, the decoder reads the whole prefix. Finished sentences stay in the batch.
    """
    batch, width = len(source_BS), settings.beam
    limits = [settings.limit(tokens) for tokens in (source_BS != PAD).sum(dim=1).tolist()]
    state = {name: tensor.repeat_interleave(width, dim=1) for name, tensor in model.encode_source(source_BS).items()}
    ids_NT = source_BS.new_full((batch * width, 1), eos)
    logp_BW = torch.full((batch, width), -math.inf, device=source_BS.device)
    logp_BW[:, 0] = 0.0
    first_B1 = width * torch.arange(batch, device=source_BS.device)[:, None]
    ended: list[list[Hypothesis]] = [[] for _ in limits]

    def end(n: int, row: int, logp: float, length: int, finished: bool) -> None:
        ids = ids_NT[row, 1:].tolist()
        ended[n].append(Hypothesis(tuple(ids), logp, settings.score(logp, length), finished))

    for length in range(1, max(limits) + 1):
        logp_NV = model.output.log_probs(model(ids_NT, state).output[:, -1])
        total_BP = (logp_BW.flatten()[:, None] + logp_NV.float()).reshape(batch, -1)
        # Twice the beam width: at most half of these end with <eos>, so enough are left to continue.
        best_BQ, index_BQ = total_BP.topk(2 * width)
        row_BQ, token_BQ = first_B1 + index_BQ // logp_NV.shape[1], index_BQ % logp_NV.shape[1]
        unfinished = [n for n, limit in enumerate(limits) if length <= limit and len(ended[n]) < width]
        best, tokens, rows = (tensor[:, :width].tolist() for tensor in (best_BQ, token_BQ, row_BQ))
        for n in unfinished:
            for logp, token, row in zip(best[n], tokens[n], rows[n], strict=True):
                if token == eos and logp > -math.inf:
                    end(n, row, logp, length, True)
        stay_BW = (token_BQ == eos).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        logp_BW, rows_BW, tokens_BW = (tensor.gather(1, stay_BW) for tensor in (best_BQ, row_BQ, token_BQ))
        ids_NT = torch.cat([ids_NT[rows_BW.flatten()], tokens_BW.flatten()[:, None]], dim=1)
        for n in unfinished:
            if length == limits[n] and not ended[n]:
                end(n, n * width, float(logp_BW[n, 0]), length, False)
        if all(length >= limit or len(ended[n]) >= width for n, limit in enumerate(limits)):
            break
    return [max(hypotheses, key=lambda hypothesis: hypothesis.score) for hypotheses in ended]


def _embedding(end: InputEnd, embeddings: dict[nn.Module, nn.Embedding]) -> tuple[nn.Embedding, float]:
    """Return an embedding for the table of an input end, and its scale. Equal tables share one embedding."""
    if not isinstance(end, Lookup) or not isinstance(end.table, WordTable) or end.dim != end.table.dim:
        raise Absent("only an input end that looks up rows of a table has a plain form")
    if end.table not in embeddings:
        embeddings[end.table] = nn.Embedding(end.table.vocab_size, end.table.dim)
        nn.init.normal_(embeddings[end.table].weight, std=end.table.dim**-0.5)
    return embeddings[end.table], end.scale


def _stacks(encoder: EncoderDecoder) -> nn.Transformer:
    """Build encoder and decoder. nn.Transformer takes a single dropout rate, so the other rates are set afterwards."""
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
