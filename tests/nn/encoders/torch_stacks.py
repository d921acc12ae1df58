"""References for the encoder-decoder Transformer: torch's layers with the same weights.

Shapes: B streams, S source steps, T target steps, D dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reefknot.nn.encoders.encoder_decoder import EncoderDecoder
from reefknot.nn.encoders.transformer import sinusoids

STREAMS, SOURCE, STEPS, DIM, HEADS, UNITS, LAYERS = 3, 5, 7, 8, 2, 20, 2
LENGTHS = (5, 2, 3)
SMALL: dict[str, Any] = {"layers": LAYERS, "heads": HEADS, "ffn_dim": UNITS, "dropout": 0.0}


def build(**options: Any) -> EncoderDecoder:
    """Build a float64 encoder with noise added to every parameter, so that no bias is 0 and no norm is 1."""
    torch.manual_seed(0)
    encoder = EncoderDecoder(DIM, DIM, **SMALL | options).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return encoder


def vectors(steps: int = STEPS, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(STREAMS, steps, DIM, dtype=torch.float64)


def source() -> tuple[Tensor, Tensor]:
    """Return source vectors and a mask that is false at padding."""
    return vectors(SOURCE, seed=2), torch.arange(SOURCE) < torch.tensor(LENGTHS)[:, None]


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a weighted sum of the outputs."""
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weights).sum(), inputs)


def assert_near(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


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


def with_parameters(layer: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    """Replace the parameters of a torch layer by tensors, through which gradients flow to our parameters."""
    assert {name for name, _ in layer.named_parameters()} == set(parameters)
    for name, tensor in parameters.items():
        module, _, attribute = name.rpartition(".")
        delattr(layer.get_submodule(module), attribute)
        setattr(layer.get_submodule(module), attribute, tensor)
    return layer


def torch_layers(encoder: EncoderDecoder) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the source and target stacks as torch layers that use the encoder's parameters."""
    norm_first = isinstance(encoder.source_norm, nn.LayerNorm)
    shape: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    stacks: tuple[list[nn.Module], list[nn.Module]] = ([], [])
    for block in encoder.source_blocks:
        parameters: dict[str, Tensor] = dict(block.named_parameters())
        torch_parameters = {
            f"{torch_name}{kind}": parameters[f"{name}{kind}"]
            for torch_name, name in SOURCE_NAMES.items()
            for kind in ("weight", "bias")
        }
        assert len(torch_parameters) == len(parameters)
        stacks[0].append(with_parameters(nn.TransformerEncoderLayer(DIM, HEADS, UNITS, **shape), torch_parameters))
    for number, block in enumerate(encoder.target_blocks):
        parameters = dict(block.named_parameters())
        torch_parameters = {
            f"{torch_name}{kind}": parameters[f"{name}{kind}"]
            for torch_name, name in TARGET_NAMES.items()
            for kind in ("weight", "bias")
        }
        assert len(torch_parameters) + 2 == len(parameters)
        for kind in ("weight", "bias"):
            keys_and_values = getattr(encoder.source_in, kind).chunk(LAYERS)[number]
            torch_parameters[f"multihead_attn.in_proj_{kind}"] = torch.cat(
                [parameters[f"cross_in.{kind}"], keys_and_values]
            )
        stacks[1].append(with_parameters(nn.TransformerDecoderLayer(DIM, HEADS, UNITS, **shape), torch_parameters))
    return stacks


def torch_output_and_attention(
    encoder: EncoderDecoder, source_BSD: Tensor, mask_BS: Tensor, inputs_BTD: Tensor
) -> tuple[Tensor, Tensor]:
    """Return torch's output, and the cross-attention weights of the last block."""
    sources, targets = torch_layers(encoder)
    memory = source_BSD + sinusoids(0, source_BSD.shape[1], DIM, inputs_BTD.device)
    for layer in sources:
        memory = layer(memory, src_key_padding_mask=~mask_BS)
    memory = encoder.source_norm(memory)
    causal = torch.ones(inputs_BTD.shape[1], inputs_BTD.shape[1], dtype=torch.bool).triu(1)
    recorded: list[Tensor] = []
    cross_attention = targets[-1].get_submodule("multihead_attn")
    forward = cross_attention.forward

    def record_weights(*arguments: Any, **options: Any) -> Any:
        hidden_BTD, weights_BTS = forward(*arguments, **options | {"need_weights": True, "average_attn_weights": True})
        recorded.append(weights_BTS)
        return hidden_BTD, weights_BTS

    cross_attention.forward = record_weights
    targets_BTD = inputs_BTD + sinusoids(0, inputs_BTD.shape[1], DIM, inputs_BTD.device)
    for layer in targets:
        targets_BTD = layer(targets_BTD, memory, tgt_mask=causal, memory_key_padding_mask=~mask_BS)
    return encoder.target_norm(targets_BTD), recorded[0]
