"""A translation model, its training and its beam search in plain torch: the baseline of `bench translation`.

    PlainTranslator         nn.Transformer between embeddings; the loss stores the scores of all classes
    PlainTraining           one update of its training
    search_without_cache    a beam search in which every step computes all target steps so far

Shapes: B pairs, S source tokens, T target tokens, U = S + T, V classes, D dimensions; in the search W hypotheses per
pair, N = B x W hypotheses, P = W x V continuations of a pair, Q = 2 x W of them that are looked at.
"""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.kernels.scores import IGNORE
from reefknot.lab.bench.measure import Unavailable
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
    """An nn.Transformer with the sizes, dropout rates and ties of a reefknot model. Its weights are new."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        encoder, output = model.encoder, model.output
        if not isinstance(encoder, EncoderDecoder):
            raise Unavailable(f"nn.Transformer cannot express the encoder {type(encoder).__name__}")
        if type(output) is not Softmax or type(output.classifier) is not Plain:
            raise Unavailable("only an output end whose class vectors are rows of a table has a plain form")
        embeddings: dict[nn.Module, nn.Embedding] = {}
        self.source, self.source_scale = _get_embedding(model.source, embeddings)
        self.target, self.target_scale = _get_embedding(model.input, embeddings)
        self.transformer = _build_transformer(encoder)
        has_bias = output.classifier.bias is not None
        self.generator = nn.Linear(encoder.dim, output.vocab_size, bias=has_bias)
        if output.classifier.table in embeddings:
            self.generator.weight = embeddings[output.classifier.table].weight
        self.dropout = encoder.dropout
        self.smoothing = output.smoothing

    def forward(self, source_BS: Tensor, inputs_BT: Tensor) -> Tensor:
        """Return the scores of all classes at every target step, scores_BTV."""
        padding_BS = source_BS == PAD
        num_steps = inputs_BT.shape[1]
        causal_mask_TT = torch.ones(num_steps, num_steps, dtype=torch.bool, device=inputs_BT.device).triu(1)
        attended_BTD = self.transformer(
            self._add_positions(self.source_scale * self.source(source_BS.masked_fill(padding_BS, 0))),
            self._add_positions(self.target_scale * self.target(inputs_BT)),
            tgt_mask=causal_mask_TT,
            src_key_padding_mask=padding_BS,
            memory_key_padding_mask=padding_BS,
            tgt_is_causal=True,
        )
        scores_BTV: Tensor = self.generator(attended_BTD)
        return scores_BTV

    def loss(self, pairs_BU: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss summed over all targets."""
        scores_BTV = self(*split_sides(pairs_BU, targets_BT))
        return F.cross_entropy(
            scores_BTV.flatten(0, 1),
            targets_BT.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.smoothing,
        )

    def _add_positions(self, hidden_BTD: Tensor) -> Tensor:
        positions_TD = sinusoids(0, hidden_BTD.shape[1], hidden_BTD.shape[2], hidden_BTD.device).to(hidden_BTD.dtype)
        return F.dropout(hidden_BTD + positions_TD, self.dropout, self.training)


class PlainTraining:
    """One update: gradients, clipping, optimiser. The learning rate is too small to change the weights."""

    def __init__(self, model: PlainTranslator, settings: TrainingSettings, device: torch.device) -> None:
        self.model = model.to(device).train()
        self.settings, self.device = settings, device
        optimiser = settings.optimiser.model_copy(update={"learning_rate": 1e-12})
        self.parameters = list(self.model.parameters())
        self.optimiser = OPTIMISERS.build(optimiser, {"parameters": self.parameters})

    def __call__(self, pairs_BU: Tensor, targets_BT: Tensor, count: int) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        num_chunks = self.settings.accumulate
        for x, y in zip(pairs_BU.chunk(num_chunks), targets_BT.chunk(num_chunks), strict=True):
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
    batch_size, beam_width = len(source_BS), settings.beam
    device = source_BS.device
    max_lengths = [settings.limit(length) for length in (source_BS != PAD).sum(dim=1).tolist()]
    state = {
        name: tensor.repeat_interleave(beam_width, dim=1) for name, tensor in model.encode_source(source_BS).items()
    }
    prefix_NT = source_BS.new_full((batch_size * beam_width, 1), eos)
    # All hypotheses of a pair are equal at first, so only the first one may be continued.
    log_probs_BW = torch.full((batch_size, beam_width), -math.inf, device=device)
    log_probs_BW[:, 0] = 0.0
    first_row_B1 = beam_width * torch.arange(batch_size, device=device)[:, None]
    finished: list[list[Hypothesis]] = [[] for _ in max_lengths]

    def add_hypothesis(pair: int, row: int, logp: float, length: int, has_eos: bool) -> None:
        """Add a row of `prefix_NT` to the hypotheses of a pair."""
        ids = prefix_NT[row, 1:].tolist()
        finished[pair].append(Hypothesis(tuple(ids), logp, settings.score(logp, length), has_eos))

    for length in range(1, max(max_lengths) + 1):
        log_probs_NV = model.output.log_probs(model(prefix_NT, state).output[:, -1])
        vocab_size = log_probs_NV.shape[1]
        total_BP = (log_probs_BW.flatten()[:, None] + log_probs_NV.float()).reshape(batch_size, -1)
        # Twice the beam width: at most half of these end with <eos>, so enough are left to continue.
        best_BQ, index_BQ = total_BP.topk(2 * beam_width)
        row_BQ, token_BQ = first_row_B1 + index_BQ // vocab_size, index_BQ % vocab_size
        active_pairs = [
            pair
            for pair, max_length in enumerate(max_lengths)
            if length <= max_length and len(finished[pair]) < beam_width
        ]
        best, tokens, rows = (tensor[:, :beam_width].tolist() for tensor in (best_BQ, token_BQ, row_BQ))
        for pair in active_pairs:
            for logp, token, row in zip(best[pair], tokens[pair], rows[pair], strict=True):
                if token == eos and logp > -math.inf:
                    add_hypothesis(pair, row, logp, length, True)
        # A stable sort moves the continuations with <eos> to the end and keeps the order of the others.
        continued_BW = (token_BQ == eos).to(torch.int8).argsort(dim=1, stable=True)[:, :beam_width]
        log_probs_BW, rows_BW, tokens_BW = (tensor.gather(1, continued_BW) for tensor in (best_BQ, row_BQ, token_BQ))
        prefix_NT = torch.cat([prefix_NT[rows_BW.flatten()], tokens_BW.flatten()[:, None]], dim=1)
        for pair in active_pairs:
            if length == max_lengths[pair] and not finished[pair]:
                add_hypothesis(pair, pair * beam_width, float(log_probs_BW[pair, 0]), length, False)
        if all(length >= limit or len(finished[pair]) >= beam_width for pair, limit in enumerate(max_lengths)):
            break
    return [max(hypotheses, key=lambda hypothesis: hypothesis.score) for hypotheses in finished]


def _get_embedding(end: InputEnd, embeddings: dict[nn.Module, nn.Embedding]) -> tuple[nn.Embedding, float]:
    """Return an embedding for the table of an input end, and its scale. Ends with the same table share it."""
    if not isinstance(end, Lookup) or not isinstance(end.table, WordTable) or end.dim != end.table.dim:
        raise Unavailable("only an input end that looks up rows of a table has a plain form")
    if end.table not in embeddings:
        embeddings[end.table] = nn.Embedding(end.table.vocab_size, end.table.dim)
        nn.init.normal_(embeddings[end.table].weight, std=end.table.dim**-0.5)
    return embeddings[end.table], end.scale


def _build_transformer(encoder: EncoderDecoder) -> nn.Transformer:
    """Build encoder and decoder. nn.Transformer takes a single dropout rate, so the other rates are set afterwards."""
    block = encoder.source_blocks[0]
    assert isinstance(block, ResidualBlock)
    num_layers = len(encoder.source_blocks)
    norm_first = block.norm == "pre"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        transformer = nn.Transformer(
            encoder.dim,
            encoder.heads,
            num_layers,
            num_layers,
            block.ffn_in.out_features,
            encoder.dropout,
            batch_first=True,
            norm_first=norm_first,
        )
    if not norm_first:
        transformer.encoder.norm = transformer.decoder.norm = None
    for layer in (*transformer.encoder.layers, *transformer.decoder.layers):
        layer.dropout.p = block.dropout_relu
        for attention in (layer.self_attn, getattr(layer, "multihead_attn", layer.self_attn)):
            attention.dropout = block.dropout_attention
    return transformer
