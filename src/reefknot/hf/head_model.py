"""Transformers models whose head is one of our output ends.

    ReefknotHeadForCausalLM, ReefknotHeadForMaskedLM, ReefknotHeadForSeq2SeqLM
        language_model      the transformers model; `HiddenStateLayer` takes the place of its output layer
        end                 the output end
        token_order         the order of the tokens by frequency, for an adaptive end only

`replace_head` makes such a model. Its config has a `model_type` of its own, so that transformers without Reefknot
rejects a saved model instead of loading it with another head. The config of the transformers model is nested in it, as
`text_config`, and `head` describes the output end (`description`).

Shapes: B texts, T tokens, D dimensions of the hidden state, V tokens of the vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bart.modeling_bart import shift_tokens_right

from reefknot.errors import ArgumentError, DataError
from reefknot.hf.bands import TokenOrder
from reefknot.hf.description import Description, build_end, change_vocab_size, describe_end
from reefknot.hf.output_layer import HiddenStateLayer, remove_output_layer
from reefknot.kernels.scores import IGNORE
from reefknot.nn.outputs.contract import OutputEnd
from reefknot.nn.tables import WordTable


class ReefknotHeadConfig(PretrainedConfig):  # type: ignore[misc]
    """The config of a transformers model with one of our output ends.

    Args:
        text_config: The config of the transformers model, or the same as a dictionary.
        head: The description of the output end.
        hidden_scale: Factor of the hidden states, for models that scale their logits.
        shift_labels: Whether position t predicts label t + 1. Some causal models expect labels that are shifted.
        return_logits: Whether `forward` returns the logits. By default only if it gets no labels.
        tie_word_embeddings: Whether the end is tied to the input embedding.
        kwargs: Settings of every config of transformers.
    """

    model_type = "reefknot_head"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012

    def __init__(
        self,
        text_config: Any = None,
        head: Description | None = None,
        hidden_scale: float = 1.0,
        shift_labels: bool = True,
        return_logits: bool | None = None,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        kwargs["is_encoder_decoder"] = bool(getattr(text_config, "is_encoder_decoder", False))
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):  # Trainer reads them
            kwargs.setdefault(name, getattr(text_config, name, None))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        # Set after the constructor of the base class, which would reset the attention of nested configs.
        self.text_config = text_config
        self.head = head
        self.hidden_scale = hidden_scale
        self.shift_labels = shift_labels
        self.return_logits = return_logits

    @property
    def vocab_size(self) -> int:
        """Number of tokens, V."""
        return int(self.text_config.get_text_config().vocab_size)

    @property
    def use_cache(self) -> bool | None:
        """Whether the transformers model returns a KV cache if `forward` gets no `use_cache`. Trainer disables it."""
        return getattr(self.text_config.get_text_config(), "use_cache", None)

    @use_cache.setter
    def use_cache(self, value: bool) -> None:
        self.text_config.get_text_config().use_cache = value

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        """Return the part of the nested config that describes the text model, as transformers does."""
        text_config = vars(self).get("text_config")  # transformers asks while the config is built
        return self if text_config is None else text_config.get_text_config(*args, **kwargs)


class ReefknotHeadMaskedLMConfig(ReefknotHeadConfig):
    """The config of a masked language model of transformers with one of our output ends."""

    model_type = "reefknot_head_masked_lm"
    __init__ = ReefknotHeadConfig.__init__  # transformers 5 would make one from the class attributes


class ReefknotHeadSeq2SeqConfig(ReefknotHeadConfig):
    """The config of an encoder-decoder model of transformers with one of our output ends."""

    model_type = "reefknot_head_seq2seq"
    __init__ = ReefknotHeadConfig.__init__


class ReefknotHeadModel(PreTrainedModel):  # type: ignore[misc]
    """A language model of transformers with one of our output ends as its head.

    With labels, `forward` returns the loss of the end. The logits are log-probabilities. `replace_head` makes such a
    model, and `from_pretrained` loads it.

    Args:
        config: The config of the model.
        language_model: The transformers model, without its output layer. By default it is built from the config.
        end: The output end. By default it is built from the config.
        token_order: The order of the tokens by frequency, for an adaptive end.
    """

    base_model_prefix = "language_model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self,
        config: Any,
        language_model: PreTrainedModel | None = None,
        end: OutputEnd | None = None,
        token_order: TokenOrder | None = None,
    ) -> None:
        super().__init__(config)
        is_built_here = language_model is None
        if language_model is None:
            language_model = _build_language_model(config.text_config)
            remove_output_layer(language_model)
        embedding = language_model.get_input_embeddings()
        if end is None:
            assert config.head is not None
            has_bands = _has_bands(config.head)
            token_order = TokenOrder(embedding.num_embeddings) if has_bands else None
            end = build_end(config.head, embedding, token_order)
        self.language_model = language_model
        self.token_order = token_order
        self.end = end
        self._declare_ties()
        self._no_split_modules = language_model._no_split_modules
        if not is_built_here:
            # transformers would initialise modules again that it has not initialised itself.
            for module in self.modules():
                module._is_hf_initialized = True
        self.post_init()

    def _declare_ties(self) -> None:
        """Declare to transformers which parameters of the end are those of the input embedding, or occur twice.

        transformers 5 reads both names of a parameter. transformers 4 reads only the keys.
        """
        first_names = {id(parameter): name for name, parameter in self.named_parameters()}
        # In Marian, the input embedding itself is tied to another one, whose name is saved.
        ties = getattr(self.language_model, "all_tied_weights_keys", {})
        sources = {f"language_model.{key}": f"language_model.{value}" for key, value in ties.items()}
        self._tied_weights_keys = {
            f"end.{name}": sources.get(first_names[id(parameter)], first_names[id(parameter)])
            for name, parameter in self.end.named_parameters(remove_duplicate=False)
            if first_names[id(parameter)] != f"end.{name}"
        }

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, because the constructors of the end have initialised its parameters."""

    def initialize_weights(self) -> None:
        """Initialise the weights and buffers that are not loaded, first those of the transformers model."""
        # Inside a model of another library, transformers 5 would leave out some modules, such as those of Falcon-H1.
        self.language_model.initialize_weights()
        super().initialize_weights()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a saved model, as any model of transformers. Missing weights of the end raise a `DataError`.

        Args:
            args: The folder, and other arguments of transformers.
            output_loading_info: Also return which weights were missing.
            kwargs: Keyword arguments of transformers.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = sorted(name for name in info["missing_keys"] if name.startswith(("end.", "token_order.")))
        if missing:
            raise DataError(f"{args[0]}: the weight {missing[0]} of the output end is missing; save the model again")
        for module in model.end.modules():
            if isinstance(module, WordTable) and module.constructor_arguments.get("frozen"):
                module.weight.requires_grad_(False)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model, as any model of transformers.

        Args:
            args: The folder, and other arguments of transformers.
            kwargs: Keyword arguments of transformers.
        """
        if isinstance(self.end, OutputEnd):  # PEFT has wrapped it otherwise, and saves only adapters
            embedding = self.get_input_embeddings()
            is_tied = any(parameter is embedding.weight for parameter in self.end.parameters())
            if self.config.tie_word_embeddings and not is_tied:  # `modules_to_save` of PEFT copies the table
                self.config.head = describe_end(self.end, embedding)
                self.config.tie_word_embeddings = False
                self._declare_ties()
        return super().save_pretrained(*args, **kwargs)

    # -- loss and logits ----------------------------------------------------------------------------------------------

    def _call_model(
        self,
        inputs: dict[str, Any],
        targets_BT: Tensor | None,
        logits_to_keep: int | Tensor,
        return_logits: bool | None,
        return_dict: bool | None,
        num_items_in_batch: Tensor | int | None,
    ) -> Any:
        """Run the transformers model and the end.

        Args:
            inputs: Arguments of the transformers model. None stands for its default.
            targets_BT: The token that each position predicts, with shape (B, T). -100 is ignored.
            logits_to_keep: As in `forward`.
            return_logits: As in `forward`.
            return_dict: As in `forward`.
            num_items_in_batch: As in `forward`.
        """
        given_inputs = {name: value for name, value in inputs.items() if value is not None}
        layer = cast(HiddenStateLayer, self.language_model.get_submodule(self.language_model._reefknot_layer))
        layer.expect()
        outputs = self.language_model(**given_inputs, return_dict=True)
        hidden_BTD = layer.take()
        if self.config.hidden_scale != 1.0:
            hidden_BTD = hidden_BTD * self.config.hidden_scale

        loss = None
        if targets_BT is not None:
            loss = self._compute_loss(hidden_BTD, targets_BT, num_items_in_batch)
            loss = loss + self._auxiliary_loss(outputs, loss)
        if return_logits is None:
            return_logits = loss is None if self.config.return_logits is None else self.config.return_logits
        logits = self._compute_logits(hidden_BTD, logits_to_keep) if return_logits else None

        fields = {**outputs, "loss": loss, "logits": logits}
        result = type(outputs)(**fields)
        is_dict = self.config.return_dict if return_dict is None else return_dict
        return result if is_dict else result.to_tuple()

    def _compute_loss(self, hidden_BTD: Tensor, targets_BT: Tensor, count: Tensor | int | None) -> Tensor:
        """Return the loss of the end, divided by the number of labels."""
        if self.token_order is not None:
            targets_BT = self.token_order.to_ranks(targets_BT.to(self.token_order.ranks.device))
        divisor = None
        if count is not None:
            divisor = torch.as_tensor(count, device=hidden_BTD.device).clamp(min=1)
        loss: Tensor = self.end(hidden_BTD, targets_BT.to(hidden_BTD.device), divisor=divisor).loss
        return loss

    def _auxiliary_loss(self, outputs: Any, loss: Tensor) -> Any:
        """Return the weighted loss of a mixture-of-experts router, if the model returns one."""
        auxiliary_loss = getattr(outputs, "aux_loss", None)
        weight = getattr(self.config.get_text_config(), "router_aux_loss_coef", None)
        if not isinstance(auxiliary_loss, Tensor) or weight is None:
            return 0.0
        return weight * auxiliary_loss.to(loss.device)

    def _compute_logits(self, hidden_BTD: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        """Return the log-probabilities of all tokens at some positions."""
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        log_probs = self.end.log_probs(hidden_BTD[:, positions])
        return log_probs if self.token_order is None else self.token_order.to_ids(log_probs)

    # -- embeddings ---------------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> Any:
        """Return the input embedding of the transformers model."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        """Raise an error, because the end may be tied to the embedding."""
        raise ArgumentError("the input embedding cannot be replaced after replace_head; replace it before")

    def get_output_embeddings(self) -> None:
        """Return None, because the end is not a linear layer. It is the attribute `end`."""

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """Change the number of tokens of the input embedding and of the end.

        New rows of tables that are not tied, and new biases, are the mean of the old ones.

        Args:
            new_num_tokens: New number of tokens. By default it does not change.
            pad_to_multiple_of: Round the number of tokens up to a multiple of this number.
            mean_resizing: Draw new rows of the input embedding around the mean of the old rows.
        """
        if new_num_tokens is None and pad_to_multiple_of is None:
            return self.get_input_embeddings()
        if self.end.bands > 1:
            raise ArgumentError(
                "resize_token_embeddings: the words of an adaptive end are in bands, which cannot be resized; resize "
                "the model before replace_head"
            )
        embedding = self.language_model.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        embedding.weight.grad = None  # a gradient of the old size
        self._resize_end(embedding)
        return embedding

    @torch.no_grad()
    def _resize_end(self, embedding: nn.Embedding) -> None:
        """Build the end for the new number of tokens, and copy its parameters."""
        old_end = self.end
        vocab_size = embedding.weight.shape[0]
        self.config.head = change_vocab_size(self.config.head, vocab_size)
        self.end = build_end(self.config.head, embedding, None).to(embedding.weight).train(old_end.training)
        old_parameters = dict(old_end.named_parameters(remove_duplicate=False))
        for name, parameter in self.end.named_parameters(remove_duplicate=False):
            if parameter is embedding.weight:
                continue
            old_parameter = old_parameters[name]
            parameter.requires_grad_(old_parameter.requires_grad)
            rows = min(len(parameter), len(old_parameter))
            parameter[:rows] = old_parameter[:rows]
            parameter[rows:] = old_parameter.mean(0)
        self._declare_ties()


class _PreparesGeneration:
    """Prepares the inputs of `generate` as the transformers model does."""

    language_model: Any

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inputs of the next step of `generate`, as the transformers model prepares them."""
        return self.language_model.prepare_inputs_for_generation(*args, **kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        self.language_model._validate_model_kwargs(model_kwargs)


class ReefknotHeadForCausalLM(_PreparesGeneration, ReefknotHeadModel, GenerationMixin):  # type: ignore[misc]
    """A causal language model of transformers with one of our output ends as its head.

    Args:
        config: The config of the model.
        language_model: The transformers model, without its output layer. By default it is built from the config.
        end: The output end. By default it is built from the config.
        token_order: The order of the tokens by frequency, for an adaptive end.
    """

    config_class = ReefknotHeadConfig

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss if there are labels, and the log-probabilities of the next token as `logits`.

        The output has the type that the transformers model returns. Arguments that are not listed have the meaning that
        they have for the transformers model.

        Args:
            input_ids: Token ids, with shape (B, T).
            attention_mask: Marks tokens that are not padding.
            position_ids: Position of each token.
            past_key_values: KV cache.
            inputs_embeds: Vectors instead of `input_ids`.
            labels: Token ids to predict, with shape (B, T). They are shifted here, so that position t predicts label
                t + 1, if the transformers model does this. Labels of -100 are ignored.
            use_cache: Return a KV cache.
            token_type_ids: Segment of each token, for models that have segments.
            logits_to_keep: Number of last positions whose logits are computed, or indices of positions. 0 means all.
            return_logits: Compute the logits. By default as in the config: only if there are no labels.
            return_dict: If false, return a tuple.
            num_items_in_batch: Number of labels in all micro-batches of an optimiser step, by which losses are divided.
            kwargs: Other arguments of the transformers model, and `shift_labels`: labels that are shifted already.
        """
        shift_labels = kwargs.pop("shift_labels", None)  # not in the signature, because Trainer would wait for it
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORE)[..., 1:] if self.config.shift_labels else labels
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache,
            "token_type_ids": token_type_ids, **kwargs,
        }  # fmt: skip
        return self._call_model(inputs, shift_labels, logits_to_keep, return_logits, return_dict, num_items_in_batch)


class ReefknotHeadForMaskedLM(ReefknotHeadModel):
    """A masked language model of transformers with one of our output ends as its head.

    Args:
        config: The config of the model.
        language_model: The transformers model, without its output layer. By default it is built from the config.
        end: The output end. By default it is built from the config.
        token_order: The order of the tokens by frequency, for an adaptive end.
    """

    config_class = ReefknotHeadMaskedLMConfig

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_logits: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss if there are labels, and the log-probabilities of the masked tokens as `logits`.

        The output has the type that the transformers model returns. Arguments that are not listed have the meaning that
        they have for the transformers model.

        Args:
            input_ids: Token ids, with shape (B, T).
            attention_mask: Marks tokens that are not padding.
            token_type_ids: Segment of each token.
            position_ids: Position of each token.
            inputs_embeds: Vectors instead of `input_ids`.
            labels: The token of each position, with shape (B, T). Labels of -100 are ignored.
            return_logits: Compute the logits. By default as in the config: only if there are no labels.
            return_dict: If false, return a tuple.
            num_items_in_batch: Number of labels in all micro-batches of an optimiser step, by which losses are divided.
            kwargs: Other arguments of the transformers model.
        """
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids,
            "position_ids": position_ids, "inputs_embeds": inputs_embeds, **kwargs,
        }  # fmt: skip
        return self._call_model(inputs, labels, 0, return_logits, return_dict, num_items_in_batch)


class ReefknotHeadForSeq2SeqLM(_PreparesGeneration, ReefknotHeadModel, GenerationMixin):  # type: ignore[misc]
    """An encoder-decoder model of transformers with one of our output ends as its head.

    Args:
        config: The config of the model.
        language_model: The transformers model, without its output layer. By default it is built from the config.
        end: The output end. By default it is built from the config.
        token_order: The order of the tokens by frequency, for an adaptive end.
    """

    config_class = ReefknotHeadSeq2SeqConfig

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss if there are labels, and the log-probabilities of the next target token as `logits`.

        The output has the type that the transformers model returns. Arguments that are not listed have the meaning that
        they have for the transformers model.

        Args:
            input_ids: Ids of the source tokens, with shape (B, S).
            attention_mask: Marks source tokens that are not padding.
            decoder_input_ids: Ids of the target tokens, with shape (B, T). By default, they are the labels, shifted by
                the transformers model.
            decoder_attention_mask: Marks target tokens that are not padding.
            encoder_outputs: The output of the encoder, if it is computed already.
            past_key_values: KV cache.
            inputs_embeds: Vectors instead of `input_ids`.
            decoder_inputs_embeds: Vectors instead of `decoder_input_ids`.
            labels: The token that each position of the target predicts, with shape (B, T). -100 is ignored.
            use_cache: Return a KV cache. By default only without labels.
            logits_to_keep: Number of last positions whose logits are computed, or indices of positions. 0 means all.
            return_logits: Compute the logits. By default as in the config: only if there are no labels.
            return_dict: If false, return a tuple.
            num_items_in_batch: Number of labels in all micro-batches of an optimiser step, by which losses are divided.
            kwargs: Other arguments of the transformers model.
        """
        if labels is not None:
            use_cache = bool(use_cache)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask, "encoder_outputs": encoder_outputs,
            "past_key_values": past_key_values, "inputs_embeds": inputs_embeds,
            "decoder_inputs_embeds": decoder_inputs_embeds, "use_cache": use_cache, **kwargs,
        }  # fmt: skip
        return self._call_model(inputs, labels, logits_to_keep, return_logits, return_dict, num_items_in_batch)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the labels shifted to the right, as the transformers model does. Collators of transformers call this.

        Args:
            labels: Ids of the target tokens, with shape (B, T).
        """
        prepare = getattr(self.language_model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is None:
            text_config = self.config.text_config
            start, padding = text_config.decoder_start_token_id, text_config.pad_token_id
            shifted: Tensor = shift_tokens_right(labels, padding, start)
            return shifted
        prepared: Tensor = prepare(labels)
        return prepared

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder of the transformers model."""
        return self.language_model.get_encoder(*args, **kwargs)

    def get_decoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return the decoder of the transformers model."""
        return self.language_model.get_decoder(*args, **kwargs)


def _build_language_model(config: PretrainedConfig) -> Any:
    """Build the transformers model from its config, with random weights."""
    name = (config.architectures or [""])[0] if config is not None else ""
    model_class: Any = getattr(transformers, name, None) if name else None
    is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
    if not is_model:
        raise DataError(f"the config of the model names the class {name!r}, which this transformers does not have")
    return model_class._from_config(config)


def _has_bands(head: Description) -> bool:
    """Return whether an end is described that has bands."""
    return any(part["class"] in ("BandedTable", "EmbeddingBands") for part in head["shared"])


def register_causal_model(config_class: Any, model_class: Any) -> None:
    """Register a causal language model with the Auto classes of transformers, and with its `Trainer`.

    Args:
        config_class: The class of the config.
        model_class: The class of the model.
    """
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    # With label smoothing, Trainer shifts the labels only of models whose class is named in this mapping.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config_class.model_type] = model_class.__name__


register_causal_model(ReefknotHeadConfig, ReefknotHeadForCausalLM)
for _config_class, _model_class, _auto_class in (
    (ReefknotHeadMaskedLMConfig, ReefknotHeadForMaskedLM, AutoModelForMaskedLM),
    (ReefknotHeadSeq2SeqConfig, ReefknotHeadForSeq2SeqLM, AutoModelForSeq2SeqLM),
):
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    _auto_class.register(_config_class, _model_class, exist_ok=True)
