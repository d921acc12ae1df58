"""A translation model, its training and its beam search in plain torch: the baseline of `bench translation`.

    PlainTranslator         nn.Transformer between embeddings; the loss stores the scores of all classes
    PlainTraining           one update of its training
    search_without_cache    a beam search in which every step computes all target steps so far

Shapes: B sentence pairs, S source tokens, T target tokens, U = S + T, V classes, D dimensions. In the search: W
hypotheses per pair (the beam width), N = B x W hypotheses, P = W x V continuations of a pair, and Q = 2 x W, the best
continuations of a pair.
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
    """An nn.Transformer with the sizes, dropout rates and ties of a reefknot model. Its weights are new.

    Raises:
        Unavailable: nn.Transformer cannot express the model.
    """

    def __init__(self, model: Translator) -> None:
        super().__init__()
        encoder = model.encoder
        output = model.output
        if not isinstance(encoder, EncoderDecoder):
            raise Unavailable(f"nn.Transformer cannot express the encoder {type(encoder).__name__}")
        if type(output) is not Softmax or type(output.classifier) is not Plain:
            raise Unavailable("only an output end whose class vectors are rows of a table has a plain form")

        if output.softcap is not None:
            raise Unavailable("the plain form of an output end does not cap its scores")

        # Two ends are tied if they have the same table. They then share an embedding.
        embeddings: dict[nn.Module, nn.Embedding] = {}  # by table
        self.source, self.source_scale = _get_embedding(model.source, embeddings)
        self.target, self.target_scale = _get_embedding(model.input, embeddings)
        self.transformer = _build_transformer(encoder)
        classifier = output.classifier
        self.generator = nn.Linear(encoder.dim, output.vocab_size, bias=classifier.bias is not None)
        if classifier.table in embeddings:
            self.generator.weight = embeddings[classifier.table].weight
        self.dropout = encoder.dropout
        self.smoothing = output.smoothing

    def forward(self, source_BS: Tensor, inputs_BT: Tensor) -> Tensor:
        """Return the scores of all classes at every target step, scores_BTV."""
        padding_BS = source_BS == PAD
        num_steps = inputs_BT.shape[1]
        causal_mask_TT = torch.ones(num_steps, num_steps, dtype=torch.bool, device=inputs_BT.device).triu(1)
        # Arguments are not named, because a name would keep another tensor in memory, and memory is measured.
        hidden_BTD = self.transformer(
            self._add_positions(self.source_scale * self.source(source_BS.masked_fill(padding_BS, 0))),
            self._add_positions(self.target_scale * self.target(inputs_BT)),
            tgt_mask=causal_mask_TT,
            src_key_padding_mask=padding_BS,
            memory_key_padding_mask=padding_BS,
            tgt_is_causal=True,
        )
        scores_BTV: Tensor = self.generator(hidden_BTD)
        return scores_BTV

    def loss(self, pairs_BU: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss summed over all targets."""
        source_BS, inputs_BT = split_sides(pairs_BU, targets_BT)
        scores_BTV = self(source_BS, inputs_BT)
        return F.cross_entropy(
            scores_BTV.flatten(0, 1),
            targets_BT.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.smoothing,
        )

    def _add_positions(self, embedded_BTD: Tensor) -> Tensor:
        """Add sinusoidal position vectors to embeddings, and apply dropout."""
        _, num_steps, dim = embedded_BTD.shape
        positions_TD = sinusoids(0, num_steps, dim, embedded_BTD.device).to(embedded_BTD.dtype)
        return F.dropout(embedded_BTD + positions_TD, self.dropout, self.training)


class PlainTraining:
    """One update: gradients, clipping, optimiser. The learning rate is too small to change the weights."""

    def __init__(self, model: PlainTranslator, settings: TrainingSettings, device: torch.device) -> None:
        self.model = model.to(device).train()
        self.settings = settings
        self.device = device
        self.parameters = list(self.model.parameters())
        optimiser_settings = settings.optimiser.model_copy(update={"learning_rate": 1e-12})
        self.optimiser = OPTIMISERS.build(optimiser_settings, {"parameters": self.parameters})

    def __call__(self, pairs_BU: Tensor, targets_BT: Tensor, num_targets: int) -> None:
        """Train on a window in micro-batches. `num_targets` is the number of its target tokens, without padding."""
        self.optimiser.zero_grad(set_to_none=True)
        pair_chunks = pairs_BU.chunk(self.settings.accumulate)
        target_chunks = targets_BT.chunk(self.settings.accumulate)
        for pair_chunk, target_chunk in zip(pair_chunks, target_chunks, strict=True):
            with autocast(self.device, self.settings.precision):
                summed_loss = self.model.loss(pair_chunk.to(self.device), target_chunk.to(self.device))
                loss = summed_loss / num_targets
            torch.autograd.backward(loss)
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimiser.step()


@torch.no_grad()
def search_without_cache(model: Translator, source_BS: Tensor, eos: int, settings: SearchSettings) -> list[Hypothesis]:
    """Return the best translation of each source, by the rules of `beam_search`, without a KV cache.

    In every step, the decoder reads the whole prefix. Finished sentences stay in the batch.

    Args:
        model: The translator.
        source_BS: Source sentences.
        eos: The id of the token that ends a sentence.
        settings: Beam width, length penalty and largest length.
    """
    batch_size = len(source_BS)
    beam_width = settings.beam
    device = source_BS.device
    source_lengths = (source_BS != PAD).sum(dim=1).tolist()
    max_lengths = [settings.limit(length) for length in source_lengths]
    source_state = model.encode_source(source_BS)
    state = {name: tensor.repeat_interleave(beam_width, dim=1) for name, tensor in source_state.items()}
    prefix_NT = source_BS.new_full((batch_size * beam_width, 1), eos)
    # All hypotheses of a pair are equal at first, so only the first one may be continued.
    log_probs_BW = torch.full((batch_size, beam_width), -math.inf, device=device)
    log_probs_BW[:, 0] = 0.0
    first_row_B1 = beam_width * torch.arange(batch_size, device=device)[:, None]
    finished: list[list[Hypothesis]] = [[] for _ in max_lengths]

    def add_hypothesis(pair: int, row: int, log_prob: float, length: int, has_eos: bool) -> None:
        """Add a row of `prefix_NT` to the finished hypotheses of a pair."""
        ids = prefix_NT[row, 1:].tolist()
        score = settings.score(log_prob, length)
        finished[pair].append(Hypothesis(tuple(ids), log_prob, score, has_eos))

    for length in range(1, max(max_lengths) + 1):
        # Score all continuations of all hypotheses by one token.
        log_probs_NV = model.output.log_probs(model(prefix_NT, state).output[:, -1])
        vocab_size = log_probs_NV.shape[1]
        total_BP = (log_probs_BW.flatten()[:, None] + log_probs_NV.float()).reshape(batch_size, -1)

        # Twice the beam width: at most half of these end with <eos>, so enough are left to continue.
        best_BQ, index_BQ = total_BP.topk(2 * beam_width)
        row_BQ = first_row_B1 + index_BQ // vocab_size
        token_BQ = index_BQ % vocab_size

        # Hypotheses that end with <eos> are finished.
        active_pairs = [
            pair
            for pair, max_length in enumerate(max_lengths)
            if length <= max_length and len(finished[pair]) < beam_width
        ]
        best = best_BQ[:, :beam_width].tolist()
        tokens = token_BQ[:, :beam_width].tolist()
        rows = row_BQ[:, :beam_width].tolist()
        for pair in active_pairs:
            for log_prob, token, row in zip(best[pair], tokens[pair], rows[pair], strict=True):
                if token == eos and log_prob > -math.inf:
                    add_hypothesis(pair, row, log_prob, length, has_eos=True)

        # A stable sort moves the continuations with <eos> to the end and keeps the order of the others.
        continued_BW = (token_BQ == eos).to(torch.int8).argsort(dim=1, stable=True)[:, :beam_width]
        log_probs_BW = best_BQ.gather(1, continued_BW)
        rows_BW = row_BQ.gather(1, continued_BW)
        tokens_BW = token_BQ.gather(1, continued_BW)
        prefix_NT = torch.cat([prefix_NT[rows_BW.flatten()], tokens_BW.flatten()[:, None]], dim=1)

        # A pair without a finished hypothesis at its largest length gets the best unfinished one.
        for pair in active_pairs:
            if length == max_lengths[pair] and not finished[pair]:
                add_hypothesis(pair, pair * beam_width, float(log_probs_BW[pair, 0]), length, has_eos=False)
        if all(length >= limit or len(finished[pair]) >= beam_width for pair, limit in enumerate(max_lengths)):
            break
    return [max(hypotheses, key=lambda hypothesis: hypothesis.score) for hypotheses in finished]


def _get_embedding(end: InputEnd, embeddings: dict[nn.Module, nn.Embedding]) -> tuple[nn.Embedding, float]:
    """Return an embedding for the table of an input end, and the scale of the end.

    A new embedding is added to `embeddings`, so that ends with the same table share it.
    """
    if not isinstance(end, Lookup) or not isinstance(end.table, WordTable) or end.dim != end.table.dim:
        raise Unavailable("only an input end that looks up rows of a table has a plain form")
    table = end.table
    if table not in embeddings:
        embedding = nn.Embedding(table.vocab_size, table.dim)
        nn.init.normal_(embedding.weight, std=table.dim**-0.5)
        embeddings[table] = embedding
    return embeddings[table], end.scale


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
        transformer.encoder.norm = None
        transformer.decoder.norm = None
    for layer in (*transformer.encoder.layers, *transformer.decoder.layers):
        layer.dropout.p = block.dropout_relu
        for attention in (layer.self_attn, getattr(layer, "multihead_attn", layer.self_attn)):
            attention.dropout = block.dropout_attention
    return transformer
