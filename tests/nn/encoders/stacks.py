"""What the encoder-decoder Transformer is measured against: torch's own layers with the same weights.

Shapes: B streams, S source steps, T target steps, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.encoders.transformer import sinusoids

STREAMS, SOURCE, STEPS, WIDTH, HEADS, UNITS, LAYERS = 3, 5, 7, 8, 2, 20, 2
LENGTHS = (5, 2, 3)
SMALL: dict[str, Any] = {"layers": LAYERS, "heads": HEADS, "ffn_dim": UNITS, "dropout": 0.0}


def build(**options: Any) -> EncoderDecoder:
    """In float64, with every parameter away from where it starts."""
    torch.manual_seed(0)
    encoder = EncoderDecoder(WIDTH, WIDTH, **SMALL | options).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return encoder


def vectors(steps: int = STEPS, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(STREAMS, steps, WIDTH, dtype=torch.float64)


def source() -> tuple[Tensor, Tensor]:
    """Vectors, and which of them are there."""
    return vectors(SOURCE, seed=2), torch.arange(SOURCE) < torch.tensor(LENGTHS)[:, None]


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weights).sum(), inputs)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# -- torch's layers --------------------------------------------------------------------------------------------------

SELF = {
    "self_attn.in_proj_": "attention_in.",
    "self_attn.out_proj.": "attention_out.",
    "linear1.": "ffn_in.",
    "linear2.": "ffn_out.",
    "norm1.": "attention_norm.",
}
SOURCE_NAMES = SELF | {"norm2.": "ffn_norm."}
TARGET_NAMES = SELF | {"multihead_attn.out_proj.": "cross_out.", "norm2.": "cross_norm.", "norm3.": "ffn_norm."}


def laid_in(layer: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    """torch's layer with these numbers: each is in the graph, so that gradients reach ours."""
    assert {name for name, _ in layer.named_parameters()} == set(parameters)
    for name, tensor in parameters.items():
        holder, _, last = name.rpartition(".")
        delattr(layer.get_submodule(holder), last)
        setattr(layer.get_submodule(holder), last, tensor)
    return layer


def torchs(encoder: EncoderDecoder) -> tuple[list[nn.Module], list[nn.Module]]:
    """Both stacks as torch's layers, with the encoder's own parameters."""
    norm_first = isinstance(encoder.source_norm, nn.LayerNorm)
    shape: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    stacks: tuple[list[nn.Module], list[nn.Module]] = ([], [])
    for block in encoder.source_blocks:
        ours: dict[str, Tensor] = dict(block.named_parameters())
        named = {f"{t}{kind}": ours[f"{o}{kind}"] for t, o in SOURCE_NAMES.items() for kind in ("weight", "bias")}
        assert len(named) == len(ours)
        stacks[0].append(laid_in(nn.TransformerEncoderLayer(WIDTH, HEADS, UNITS, **shape), named))
    for number, block in enumerate(encoder.target_blocks):
        ours = dict(block.named_parameters())
        named = {f"{t}{kind}": ours[f"{o}{kind}"] for t, o in TARGET_NAMES.items() for kind in ("weight", "bias")}
        assert len(named) + 2 == len(ours)
        for kind in ("weight", "bias"):
            keys_and_values = getattr(encoder.source_in, kind).chunk(LAYERS)[number]
            named[f"multihead_attn.in_proj_{kind}"] = torch.cat([ours[f"cross_in.{kind}"], keys_and_values])
        stacks[1].append(laid_in(nn.TransformerDecoderLayer(WIDTH, HEADS, UNITS, **shape), named))
    return stacks


def by_torch(encoder: EncoderDecoder, source_BSD: Tensor, there_BS: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """What comes out, and what the last block's cross-attention looks at."""
    sources, targets = torchs(encoder)
    memory = source_BSD + sinusoids(0, source_BSD.shape[1], WIDTH, x_BTD.device)
    for layer in sources:
        memory = layer(memory, src_key_padding_mask=~there_BS)
    memory = encoder.source_norm(memory)
    causal = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool).triu(1)
    seen: list[Tensor] = []
    looking = targets[-1].get_submodule("multihead_attn")
    look = looking.forward

    def watched(*given: Any, **named: Any) -> Any:
        h_BTD, weights_BTS = look(*given, **named | {"need_weights": True, "average_attn_weights": True})
        seen.append(weights_BTS)
        return h_BTD, weights_BTS

    looking.forward = watched
    y_BTD = x_BTD + sinusoids(0, x_BTD.shape[1], WIDTH, x_BTD.device)
    for layer in targets:
        y_BTD = layer(y_BTD, memory, tgt_mask=causal, memory_key_padding_mask=~there_BS)
    return encoder.target_norm(y_BTD), seen[0]
