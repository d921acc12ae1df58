"""Tiny configurations of the models of transformers.

`make_config` builds the default configuration of a class and makes it small: `SIZES` gives the values of settings by
their names, in the configuration and in all configurations in it. `OVERRIDES` has the settings of single architectures
that must fit together.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

V = 331
"""Number of tokens."""
FIRST_SPECIAL_ID = V - 20
"""Ids from here on are those of images, sounds and other special tokens."""

_COMMON: dict[str, Any] = {
    **dict.fromkeys(("codebook_size", "num_embeddings", "num_embeds"), 64),  # in CSM, another name of the next
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size", "t2u_vocab_size", "audio_vocab_size"), V),
    **dict.fromkeys(
        (
            "vocab_size_per_layer_input",
            "codebook_vocab_size",
            "entity_vocab_size",
            "ngram_vocab_size_base",
            "vision_vocab_size",
        ),
        V,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "depth", "num_blocks", "t2u_encoder_layers", "t2u_decoder_layers"), 2),
    **dict.fromkeys(("speech_encoder_layers", "layers", "num_self_attends_per_block"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input", "laurel_rank", "hc_lowrank"), 8),
    **dict.fromkeys(("embedding_rank", "entity_emb_size", "adapter_rank", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k", "num_experts_per_token", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("t2u_max_position_embeddings", "context_length"), 64),
    **dict.fromkeys(("rotary_dim",), 4),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel", "feature_size"), 16),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("index_topk", "index_block_size"), 8),
    **dict.fromkeys(("num_codebooks", "num_quantizers"), 16),
    **dict.fromkeys(("num_latents", "num_image_tokens", "num_query_tokens", "max_2d_position_embeddings"), 16),
    **dict.fromkeys(("latent_query_num",), 4),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id", "t2u_pad_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "t2u_bos_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "t2u_eos_token_id"), 2),
    **dict.fromkeys(("use_cache", "use_mamba_kernels"), False),
}


def _sizes(dim: int, heads: int) -> dict[str, Any]:
    """Return values of the settings that decide the size of a model. Names that a configuration lacks are ignored."""
    head_dim = dim // heads
    return {
        **_COMMON,
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "embed_dim", "emb_dim"), dim),
        **dict.fromkeys(("model_dim", "projection_dim", "out_hidden_size", "output_dim", "text_embed_dim"), dim),
        **dict.fromkeys(("decoder_hidden_size", "cross_hidden_size", "cross_attention_hidden_size"), dim),
        **dict.fromkeys(("attention_hidden_size", "embedding_dim", "lru_width", "encoder_hidden_size"), dim),
        **dict.fromkeys(("hidden_size_global", "backbone_hidden_size", "input_size", "d_latents"), dim),
        **dict.fromkeys(("projector_hidden_size", "text_hidden_size", "patch_embed_hidden_size"), dim),
        **dict.fromkeys(("upsample_groups", "vector_quantization_hidden_dimension", "codebook_dim"), dim),
        **dict.fromkeys(("image_token_embed_dim", "ple_embed_dim", "conv_channels"), dim),
        **dict.fromkeys(("adapter_in_dim", "adapter_out_dim", "adapter_input_size", "downsample_hidden_size"), dim),
        **dict.fromkeys(("latent_channels", "base_channels", "num_filters"), dim),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim"), 2 * dim),
        **dict.fromkeys(("decoder_ffn_dim", "t2u_encoder_ffn_dim", "t2u_decoder_ffn_dim"), 2 * dim),
        **dict.fromkeys(("dense_intermediate_size", "feed_forward_size", "speech_encoder_intermediate_size"), 2 * dim),
        **dict.fromkeys(("mlp_dim",), 2 * dim),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size", "dff"), dim),
        **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size", "share_expert_dim"), dim),
        **dict.fromkeys(("shared_experts_intermediate_size",), dim),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), heads),
        **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "num_kv_heads"), heads),
        **dict.fromkeys(("cross_num_attention_heads", "cross_num_key_value_heads", "index_n_heads"), heads),
        **dict.fromkeys(("attention_heads", "num_self_attention_heads", "num_cross_attention_heads"), heads),
        **dict.fromkeys(("t2u_encoder_attention_heads", "t2u_decoder_attention_heads"), heads),
        **dict.fromkeys(("num_sliding_attention_heads", "linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "qk_nope_head_dim", "v_head_dim"), head_dim),
        **dict.fromkeys(("qk_rope_head_dim", "cross_head_dim", "index_head_dim", "attention_head_size"), head_dim),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "attention_head_dim"), head_dim),
        "qk_head_dim": 2 * head_dim,
        "kv_n_heads": 1,
        "mamba_d_ssm": 2 * dim,
        # State-space layers have twice the dimension of the model.
        **dict.fromkeys(("mamba_n_heads", "n_mamba_heads"), 4),
        **dict.fromkeys(("mamba_d_head", "mamba_headdim"), dim // 2),
    }


SIZES = (_sizes(16, 2), _sizes(64, 4))
"""Two tables of sizes. The second is for models whose formulas give zero or no whole number with the first."""

MAY_BE_NONE = (
    "head_dim", "num_key_value_heads", "num_experts_per_tok", "pad_token_id", "topk_group", "n_group", "vocab_size",
    "n_routed_experts", "n_shared_experts",
)  # fmt: skip

_ONE_OF_EACH = ["linear_attention", "full_attention"]
_VISION_OF_TWO_STAGES = {
    "depths": (1, 1), "patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1),
    "patch_prenorm": (False, True), "embed_dim": (8, 16), "num_heads": (2, 2), "num_groups": (2, 2), "window_size": 4,
}  # fmt: skip
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
            "indexer_compress_ratio": 4, "hc_lowrank": 8, "split_ngram_parts": 1}  # fmt: skip
_TWO_DILATED_STAGES = {"depths": (1, 1, 1), "downsampling_ratios": (2, 2), "num_filters": 4}
_QUERIES = {"image_token_index": V - 1, "image_token_id": V - 1, "video_token_index": V - 2, "num_query_tokens": 4}
_TWICE_AS_WIDE = {"attention_hidden_size": 32, "attention_head_dim": 16}
_MUSIC = {"decoder": {"decoder_start_token_id": 0}, "text_encoder": {"is_encoder_decoder": False}}

OVERRIDES: dict[str, dict[str, Any]] = {
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2, "vocab_size": V},
    "bamba": {"attn_layer_indices": [1]},
    "bridgetower": {"text_config": {"hidden_size": 64}},
    "chameleon": {"vocabulary_map": {"<image>": V - 1}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "blip-2": _QUERIES,
    "blt": {
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
        "global_config": {"hidden_size": 32, "head_dim": 16},
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "emu3": {"vocabulary_map": {"<image>": V - 1, "<|extra_200|>": V - 2}},
    "esm": {"mask_token_id": 3},
    "florence2": {"vision_config": _VISION_OF_TWO_STAGES},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2",
    },
    "granitemoehybrid": {"layer_types": _ONE_OF_EACH},
    "instructblip": _QUERIES,
    "instructblipvideo": _QUERIES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kyutai_speech_to_text": {"audio_bos_token_id": 5},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 8, "num_key_value_heads": 1},
    "minimax_m3_vl": {"merged_hidden_size": 64},
    "mistral4": {"head_dim": 16},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "moshi": {"audio_vocab_size": V},
    "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC,
    "perceiver": {"max_position_embeddings": 12},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "seamless_m4t": {"max_position_embeddings": 64},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "vibevoice": {"audio_config": _TWO_DILATED_STAGES, "semantic_model_config": _TWO_DILATED_STAGES},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _TWO_DILATED_STAGES,
        "semantic_tokenizer_encoder_config": _TWO_DILATED_STAGES,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        **_TWICE_AS_WIDE,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], **_TWICE_AS_WIDE},
    "xmod": {"default_language": "en_XX"},
}
"""Settings of single architectures, by the `model_type` of their configuration, or by its class if it has none."""


def make_config(model_class: Any, sizes: dict[str, Any]) -> Any:
    """Return a tiny configuration of a class.

    Args:
        model_class: The class of the model.
        sizes: One of `SIZES`.
    """
    config = model_class.config_class()
    _shrink(config, sizes)
    for part in nested_configs(config):
        _apply(part, OVERRIDES.get(part.model_type or type(part).__name__, {}))
    if "ForCausalLM" in model_class.__name__ or "LMHead" in model_class.__name__:
        config.is_decoder = True
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 0
    return config


def nested_configs(config: Any) -> list[Any]:
    """Return a configuration and all configurations in it."""
    inner = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config, *(nested for value in inner for nested in nested_configs(value))]


def _apply(config: Any, overrides: dict[str, Any]) -> None:
    """Set settings, also of the configurations in a configuration."""
    for name, value in overrides.items():
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig):
            _apply(inner, value)
        else:
            setattr(config, name, value)


def _shrink(config: Any, sizes: dict[str, Any]) -> None:
    """Make a configuration, and the configurations in it, small."""
    next_id = FIRST_SPECIAL_ID
    for part in nested_configs(config):
        for name, value in sizes.items():
            try:
                is_size = isinstance(getattr(part, name, None), int)
                if is_size or (name in MAY_BE_NONE and getattr(part, name, 0) is None):
                    setattr(part, name, value)
            except Exception:  # a setting that each layer has
                continue
        _shorten_layer_types(part)
        _fit_rotary_sections(part)
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in name or "layerdrop" in name):
                setattr(part, name, 0.0)
            is_id = name.endswith(("_token_id", "_token_index", "_bos_id", "_eos_id"))
            if is_id and isinstance(value, int) and value >= V:
                setattr(part, name, next_id)
                next_id += 1


def _shorten_layer_types(config: Any) -> None:
    """Keep every kind of layer at least once."""
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        types = getattr(config, name, None)
        if isinstance(types, list) and types:
            distinct = list(dict.fromkeys(types))
            num_layers = max(len(distinct), 2)
            try:
                setattr(config, name, (distinct * 2)[:num_layers])
                config.num_hidden_layers = num_layers
            except AttributeError:  # computed from other settings
                continue


def _fit_rotary_sections(config: Any) -> None:
    """Divide the rotated dimensions of a head among time, height and width."""
    rope = getattr(config, "rope_parameters", None)
    head_dim = vars(config).get("head_dim") or _quotient(config, "hidden_size", "num_attention_heads")
    if not isinstance(rope, dict) or not head_dim or any(isinstance(value, dict) for value in rope.values()):
        return
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    if config.model_type.startswith(("ernie", "glm", "hunyuan_vl", "paddleocr", "qwen")) or "mrope_section" in rope:
        rope["mrope_section"] = [half // 4, half // 4, half - 2 * (half // 4)]


def _quotient(config: Any, numerator: str, denominator: str) -> int | None:
    values = getattr(config, numerator, None), getattr(config, denominator, None)
    return values[0] // values[1] if isinstance(values[0], int) and isinstance(values[1], int) else None
