"""Inputs and labels for a tiny model of transformers.

`candidate_batches` yields inputs that fit the arguments of the model's `forward`, the simplest first: text alone, then
text with images or sound. Image tokens are placed into the text as often as the model expects.

Shapes: R texts, T tokens, C codebooks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tiny_models.configs import FIRST_SPECIAL_ID, nested_configs
from torch import Tensor

ROWS, STEPS = 3, 12
Batch = dict[str, Any]


def candidate_batches(model: Any) -> Iterator[Batch]:
    """Yield inputs with labels, of which the model may read the first, or a later one."""
    torch.manual_seed(2)
    ids = torch.randint(3, FIRST_SPECIAL_ID, (ROWS, STEPS))
    labels = ids.clone()
    labels[0, 5:] = -100
    names = inspect.signature(model.forward).parameters
    required = _required_inputs(names, ids)
    if "text_labels" in names:
        required["text_labels"] = labels
    text = {"input_ids": ids} | required
    codes = _number(model.config, "num_codebooks", "num_channels")

    if model.main_input_name in ("input_ids", "inputs"):
        yield text | {"labels": labels}
    media = list(_media(model, names))
    for sound_or_image in media:
        yield required | sound_or_image | {"labels": labels}
        if "decoder_input_ids" in names:
            yield required | sound_or_image | {"decoder_input_ids": ids, "labels": labels}
    for sound_or_image in media:
        for num_tokens in (0, 1):
            yield with_special_tokens(model, text | {"labels": labels}, num_tokens) | sound_or_image
    if codes:
        codes_RTC = torch.randint(3, 60, (ROWS, STEPS, codes))
        codes_text = codes_RTC.transpose(1, 2).reshape(-1, STEPS)
        yield {"input_ids": codes_text, "labels": codes_RTC}
        yield {"input_ids": ids, "decoder_input_ids": codes_text, "labels": codes_RTC}
        yield {"input_ids": ids, "decoder_input_ids": codes_RTC, "labels": codes_RTC.transpose(1, 2).flatten()}
        yield {"input_ids": codes_RTC, "labels": codes_RTC}
        yield {"input_ids": ids, "audio_codes": codes_RTC.transpose(1, 2), "labels": labels}
    embeds = torch.randn(ROWS, STEPS, _number(model.config, "hidden_size", "d_model") or 16)
    other_ids = {name: ids for name in names if name.endswith("_input_ids") and name != "decoder_input_ids"}
    yield required | {"inputs_embeds": embeds, "labels": labels}
    yield other_ids | {"inputs_embeds": embeds, "labels": labels}


def _required_inputs(names: Any, ids: Tensor) -> Batch:
    """Return values for the arguments of `forward` that have no default, and for boxes of words."""
    batch: Batch = {}
    for name, parameter in names.items():
        if parameter.default is parameter.empty and name.endswith("input_ids"):
            batch[name] = ids
    if "bbox" in names:
        batch["bbox"] = torch.zeros(ROWS, STEPS, 4, dtype=torch.long)
    return batch


def _number(config: Any, *names: str) -> int | None:
    """Return the first integer setting with one of these names, in the configuration or in one inside."""
    for name in names:
        for part in nested_configs(config):
            if isinstance(getattr(part, name, None), int):
                return int(getattr(part, name))
    return None


def _media(model: Any, names: Any) -> Iterator[Batch]:
    """Yield images or sound in the layouts that the arguments of `forward` suggest."""
    config = model.config
    mel_bands = _number(config, "num_mel_bins", "input_feat_per_channel", "feature_size") or 16
    size = _number(config, "image_size") or 32
    if "input_features" in names:
        for frames in (2 * (_number(config, "max_source_positions") or 32), 8 * STEPS):
            yield {"input_features": torch.randn(ROWS, mel_bands, frames)}
            yield {"input_features": torch.randn(ROWS, frames, mel_bands)}
    if "input_values" in names:
        yield {"input_values": torch.randn(ROWS, 2000)}
        yield {"input_values": torch.randn(ROWS, 1, 2000)}
    if "flattened_patches" in names:
        yield {"flattened_patches": torch.rand(ROWS, 9, 2 + (_number(config, "patch_embed_hidden_size") or 16))}
    if "pixel_values" in names:
        yield {"pixel_values": torch.randn(ROWS, 3, size, size)}
        yield {"pixel_values": torch.randn(ROWS, 4, 3, size, size)}
    if "image_embeds_position_mask" in names:  # Kosmos 2
        mask = (torch.arange(STEPS) < (_number(config, "latent_query_num") or 0)).long().expand(ROWS, -1)
        yield {"pixel_values": torch.randn(ROWS, 3, size, size), "image_embeds_position_mask": mask}


def with_special_tokens(model: Any, batch: Batch, num_tokens: int) -> Batch:
    """Put the special token of an image or of sound at the start of every text.

    Args:
        model: The model.
        batch: The inputs.
        num_tokens: Number of special tokens in a text.
    """
    special_id = _number(
        model.config, "image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id"
    )
    if special_id is None or not num_tokens:
        return batch
    ids, labels = batch["input_ids"], batch.get("labels")
    words = ids[:, ids[0].ge(FIRST_SPECIAL_ID).sum() :]
    specials = torch.full((len(ids), num_tokens), special_id)
    longer = batch | {name: torch.cat([specials, words], 1) for name in batch if name.endswith("input_ids")}
    if labels is not None:
        longer["labels"] = torch.cat([torch.full_like(specials, -100), labels[:, -words.shape[1] :]], 1)
    return longer


def read_batch(model: Any, batch: Batch, read: Callable[[Batch], Any]) -> tuple[Batch, Any]:
    """Return a batch and what `read` returns for it, after a second attempt with the number of special tokens that the
    model expects.

    Args:
        model: The model.
        batch: The inputs.
        read: Runs the model.
    """
    try:
        return batch, read(batch)
    except Exception as error:
        expected = re.search(r"features:?\s*(?:torch.Size\(\[)?(\d+)", str(error))
        if expected is None or "input_ids" not in batch or int(expected[1]) % ROWS:
            raise
        batch = with_special_tokens(model, batch, int(expected[1]) // ROWS)
        return batch, read(batch)
