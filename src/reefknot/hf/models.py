"""Our models as transformers models: `ReefknotForCausalLM` and `ReefknotForSeq2SeqLM`.

    reefknot export runs/demo/tied/seed0 --format hf -o folder

    import reefknot.hf                                                # registers the models with the Auto classes
    model = transformers.AutoModelForCausalLM.from_pretrained("folder")

The config of a model has the settings of the run that it was exported from, and the laboratory builds the model from
these settings. `logits` are log-probabilities, because not every output end has one score per class: an adaptive
softmax has several softmaxes, and a mixture adds them up.

Shapes: B texts (rows of a batch), T tokens, S source tokens, D dimensions, V classes, L columns that the logits keep.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils import ModelOutput

from reefknot.errors import ArgumentError, describe_type
from reefknot.hf.cache import ReefknotCache, read_tokens
from reefknot.hf.head_model import register_causal_model
from reefknot.kernels.scores import IGNORE
from reefknot.nn.models.context import context_length
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.translator import PAD, Translator

ALIGNMENT = 64
"""Size of the largest vector of a CPU in bytes."""


class ReefknotConfig(PreTrainedConfig):  # type: ignore[misc]
    """The config of a language model.

    Args:
        settings: The settings of the run, as in its config.json.
        vocab_size: Number of classes, V.
        words: The words of the vocabulary and of its spelled words, if the input end reads spellings.
        window: Maximum number of tokens that `generate` reads at once; None for recurrent encoders.
        unk_token_id: The id of <unk>, if the vocabulary has it.
    """

    model_type = "reefknot"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - Trainer appends to it, so it must be a list

    settings: dict[str, Any] | None = None
    vocab_size: int = 0
    words: list[str] | None = None
    window: int | None = None
    unk_token_id: int | None = None


class ReefknotSeq2SeqConfig(ReefknotConfig):
    """The config of a translator.

    Args:
        source_vocab_size: Number of words of the source.
        source_words: The words of the source, if its input end reads spellings.
    """

    model_type = "reefknot-seq2seq"

    source_vocab_size: int = 0
    source_words: list[str] | None = None
    is_encoder_decoder: bool = True


class _ReefknotModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """What both models share: building, tying, the output end, and generation."""

    base_model_prefix = "model"
    main_input_name = "input_ids"
    _is_stateful = True  # a recurrent state cannot go back, which assisted generation would need
    accepts_loss_kwargs = True
    model: LanguageModel

    def __init__(self, config: ReefknotConfig) -> None:
        super().__init__(config)
        self.model = _build_model(config)
        # Tied ends hold the same table, so its weight has several names. The first is saved.
        first_names: dict[int, str] = {}
        self._tied_weights_keys = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            first_name = first_names.setdefault(id(parameter), name)
            if first_name != name:
                self._tied_weights_keys[name] = first_name
        config.tie_word_embeddings = bool(self._tied_weights_keys)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """Load an exported model; see `transformers.PreTrainedModel`. Its outputs equal those of the run to the bit."""
        loaded = super().from_pretrained(*arguments, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # The loaded weights are parts of one file in memory. Sums are added up in another order if their addresses are
        # not multiples of a vector's size.
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
                parameter.data = parameter.data.clone()
        return loaded

    def get_input_embeddings(self) -> Any:
        """Return the input end of the model."""
        return self.model.input

    def get_output_embeddings(self) -> None:
        """Return None, because an output end computes log-probabilities and is not a linear layer."""
        return

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """Return the input end if the number of tokens stays the same; otherwise, raise an `ArgumentError`.

        Args:
            new_num_tokens: New number of tokens. It must be the old number.
            pad_to_multiple_of: The old number must be a multiple of this number.
            mean_resizing: Has no effect.
        """
        vocab_size = self.config.vocab_size
        if new_num_tokens not in (None, vocab_size) or vocab_size % (pad_to_multiple_of or 1):
            raise ArgumentError(
                f"resize_token_embeddings: the vocabulary of {describe_type(self)} is that of its run and cannot be "
                f"resized; leave it at {vocab_size} tokens, or train a run with another vocabulary"
            )
        return self.get_input_embeddings()

    def _init_weights(self, module: Any) -> None:
        """Keep the weights, because the laboratory has initialised them."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` creates the cache

    @classmethod
    def can_generate(cls) -> bool:
        """Return True."""
        return True

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """Generate tokens; see `transformers.GenerationMixin`. The class vectors are computed only once."""
        caching = nullcontext() if self.training else self.model.output.cache_for_evaluation()
        with caching:
            return super().generate(*arguments, **options)

    def _reorder_cache(self, cache: ReefknotCache, beam_idx: Tensor) -> ReefknotCache:
        return cache.select(beam_idx)

    def _log_probs(self, hidden_BTD: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        """Return the log-probabilities of all classes at the columns to keep, (B, L, V)."""
        columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if isinstance(columns, slice) and logits_to_keep == 0:
            columns = slice(None)
        kept_BLD = hidden_BTD[:, columns]
        log_probs_NV = self.model.output.log_probs(kept_BLD.flatten(0, 1))
        return log_probs_NV.view(*kept_BLD.shape[:2], -1)

    def _loss(self, hidden_BTD: Tensor, targets_BT: Tensor, num_items_in_batch: Any) -> Tensor:
        """Return the mean loss of the targets.

        In training mode, this is the loss of the output end, with its penalties. In evaluation mode, it is the negative
        log-likelihood.
        """
        if self.config.unk_token_id is not None:
            # A spelled word has an input id but is not a class.
            targets_BT = targets_BT.where(targets_BT < self.config.vocab_size, self.config.unk_token_id)
        if self.training:
            loss: Tensor = self.model.output(hidden_BTD, targets_BT, divisor=num_items_in_batch).loss
            return loss
        log_probs_N = self.model.output.target_log_probs(hidden_BTD.flatten(0, 1), targets_BT.reshape(-1))
        count = num_items_in_batch if num_items_in_batch is not None else (targets_BT != IGNORE).sum()
        return -log_probs_N.sum() / count


class ReefknotForCausalLM(_ReefknotModel):
    """A language model of the laboratory as a transformers model.

    Texts may be padded on the left, with an attention mask.

    Args:
        config: The config, with the settings of the model.
    """

    config_class = ReefknotConfig

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: ReefknotCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Any = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the log-probabilities of the next tokens as `logits`, (B, T, V), and the loss if there are labels.

        Args:
            input_ids: Token ids, with shape (B, T).
            attention_mask: 1 for tokens and 0 for padding, with shape (B, T). It may also cover the tokens in the
                cache.
            past_key_values: The cache that an earlier call returned. The tokens follow the tokens of that call.
            labels: Ids of the same tokens, with shape (B, T). They are shifted here. -100 is ignored.
            use_cache: Return a cache: the recurrent state, or the KV cache of a transformer.
            logits_to_keep: Number of last columns whose logits are computed, or their indices. 0 stands for all.
            num_items_in_batch: Number of targets of the whole optimiser step, which the loss is divided by.
            return_dict: Whether to return a `CausalLMOutputWithPast` and not a tuple.
            kwargs: Other arguments that transformers passes to every model. They have no effect.
        """
        has_cache = bool(use_cache) or past_key_values is not None
        hidden_BTD, cache = read_tokens(self.model, input_ids, attention_mask, past_key_values, has_cache)
        loss = None
        if labels is not None:
            targets_BT = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
            loss = self._loss(hidden_BTD, targets_BT, num_items_in_batch)
        outputs = CausalLMOutputWithPast(
            loss=loss, logits=self._log_probs(hidden_BTD, logits_to_keep), past_key_values=cache if use_cache else None
        )
        return outputs.to_tuple() if return_dict is False else outputs

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: ReefknotCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the tokens to read in the next step: the new tokens, or a new context if the window is full."""
        inputs = {"use_cache": use_cache, "logits_to_keep": logits_to_keep}
        num_columns = input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        has_whole_text = attention_mask.shape[1] == num_columns
        num_read = 0 if past_key_values is None else past_key_values.num_columns

        if self.config.window is not None and has_whole_text:
            context_B = [context_length(count, self.config.window) for count in attention_mask.sum(1).tolist()]
            new_tokens_B = attention_mask[:, num_read:].sum(1).tolist()
            cached_B = past_key_values.tokens if past_key_values is not None else []
            if [old + new for old, new in zip(cached_B, new_tokens_B, strict=False)] != context_B:
                # Read the context again, with an empty cache.
                limit_B1 = torch.tensor(context_B, device=input_ids.device)[:, None]
                is_context_BT = attention_mask.flip(1).cumsum(1).flip(1) <= limit_B1
                attention_mask = attention_mask * is_context_BT
                num_read = int(attention_mask.any(0).int().argmax())
                past_key_values = ReefknotCache(num_columns=num_read) if use_cache else None

        if has_whole_text:
            input_ids = input_ids[:, num_read:]
            attention_mask = attention_mask[:, num_read:]
        return inputs | {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}


class ReefknotForSeq2SeqLM(_ReefknotModel):
    """A translator of the laboratory as a transformers model.

    Sources end with <eos> and are padded on the right, with an attention mask. Targets start from <eos>.

    Args:
        config: The config, with the settings of the model.
    """

    config_class = ReefknotSeq2SeqConfig
    model: Translator

    def get_encoder(self, modality: str | None = None) -> Any:
        """Return a callable that encodes sources, as `generate` needs it."""
        return _SourceReader(self.model)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: ReefknotCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Any = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the log-probabilities of the next target tokens as `logits`, (B, T, V), and the loss of the labels.

        Args:
            input_ids: Ids of the source tokens, with shape (B, S).
            attention_mask: 1 for source tokens and 0 for padding, with shape (B, S).
            decoder_input_ids: Ids of the target tokens, with shape (B, T). By default, they are made from the labels.
            encoder_outputs: The encoded source, from `get_encoder()`. By default, the source is encoded here.
            past_key_values: The cache that an earlier call returned. The target tokens follow the tokens of that call.
            labels: Ids of the target, with shape (B, T), ending with <eos>. -100 is ignored.
            use_cache: Return a cache of the decoder's state.
            logits_to_keep: Number of last columns whose logits are computed, or their indices. 0 stands for all.
            num_items_in_batch: Number of targets of the whole optimiser step, which the loss is divided by.
            return_dict: Whether to return a `Seq2SeqLMOutput` and not a tuple.
            kwargs: Other arguments that transformers passes to every model. They have no effect.
        """
        if decoder_input_ids is None and labels is not None:
            start = self.config.decoder_start_token_id
            decoder_input_ids = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=start)
            decoder_input_ids = decoder_input_ids.where(decoder_input_ids != IGNORE, start)
        if decoder_input_ids is None:
            raise ArgumentError("ReefknotForSeq2SeqLM: pass labels or decoder_input_ids, the tokens of the target")

        if past_key_values is not None:
            ((_, state),) = past_key_values.groups
        else:
            if encoder_outputs is None:
                encoder_outputs = self.get_encoder()(input_ids, attention_mask)
            state = {name: tensor.transpose(0, 1) for name, tensor in encoder_outputs.items()}
            if use_cache:
                state = self.model.decoding_state(len(decoder_input_ids)) | state
        encoded = self.model(decoder_input_ids, state)
        cache = None
        if use_cache:
            num_columns = decoder_input_ids.shape[1] + (past_key_values.num_columns if past_key_values else 0)
            rows_B = torch.arange(len(decoder_input_ids), device=decoder_input_ids.device)
            cache = ReefknotCache([(rows_B, encoded.state)], num_columns)
        loss = None
        if labels is not None:
            loss = self._loss(encoded.output, labels, num_items_in_batch)
        outputs = Seq2SeqLMOutput(
            loss=loss, logits=self._log_probs(encoded.output, logits_to_keep), past_key_values=cache
        )
        return outputs.to_tuple() if return_dict is False else outputs

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: ReefknotCache | None = None,
        encoder_outputs: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the target tokens to read in the next step, and the encoded source."""
        num_read = 0 if past_key_values is None else past_key_values.num_columns
        return {
            "decoder_input_ids": input_ids[:, num_read:],
            "encoder_outputs": encoder_outputs,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }


class _SourceReader:
    """Encodes sources. The result has the tensors of the state, with the texts in the first dimension."""

    def __init__(self, model: Translator) -> None:
        self._model = model

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> ModelOutput:
        """Return the encoded sources; see `forward`."""
        return self.forward(input_ids, attention_mask)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ModelOutput:
        """Return the encoded sources.

        Args:
            input_ids: Ids of the source tokens, with shape (B, S).
            attention_mask: 1 for tokens and 0 for padding on the right, with shape (B, S).
        """
        if attention_mask is not None:
            is_token_BS = attention_mask.bool()
            if bool((is_token_BS[:, 1:] & ~is_token_BS[:, :-1]).any()):
                raise ArgumentError("a translator needs sources that are padded on the right; set padding_side='right'")
            input_ids = input_ids.where(is_token_BS, PAD)
        state = self._model.encode_source(input_ids)
        return ModelOutput({name: tensor.transpose(0, 1) for name, tensor in state.items()})


def _build_model(config: Any) -> Any:
    """Build the model that the settings in a config describe, with random weights."""
    from reefknot.lab.tasks import build_model, check_experiment
    from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair

    if config.settings is None:
        raise ArgumentError(
            f"{type(config).__name__} has no settings; export a run with `reefknot export RUN --format hf`, and load "
            "the folder with from_pretrained"
        )

    def describe_words(size: int, words: list[str] | None) -> Vocabulary | int:
        if words is None:
            return size
        return Vocabulary(tuple(words[:size]), counts=(0,) * size, spelled_words=tuple(words[size:]))

    target = describe_words(config.vocab_size, config.words)
    source = target
    if isinstance(config, ReefknotSeq2SeqConfig):
        source = describe_words(config.source_vocab_size, config.source_words)
    experiment = check_experiment(config.settings, type(config).__name__)
    return build_model(experiment, VocabularyPair(source, target))


def register_models() -> None:
    """Register the models with the Auto classes of transformers."""
    register_causal_model(ReefknotConfig, ReefknotForCausalLM)
    AutoConfig.register(ReefknotSeq2SeqConfig.model_type, ReefknotSeq2SeqConfig, exist_ok=True)
    AutoModelForSeq2SeqLM.register(ReefknotSeq2SeqConfig, ReefknotForSeq2SeqLM, exist_ok=True)
