"""Small models in fairseq's layout: their files, and an independent implementation of what fairseq computes with them.

    fairseq_model = FairseqModel(tied=True)
    checkpoint, dictionary = fairseq_model.save(folder)
    expected = fairseq_model.log_probs(ids_BT)

The words are divided into bands by frequency. The first band is the head of the adaptive softmax, and every other band
is one of its tails.

Shapes: B sentences, T steps, D dimensions, H classes of the head, E dimensions of a band.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DIM = 16
HEADS = 4
FFN_DIM = 24
LAYERS = 2
CUTOFFS = (10, 18, 31)  # ids at which the bands end: 4 special symbols and 27 words
BAND_STARTS = (0, *CUTOFFS[:-1])  # ids at which the bands begin
WORDS = [f"w{number}" for number in range(CUTOFFS[-1] - 4)]


@dataclass
class FairseqModel:
    """Random tensors under fairseq's names."""

    tied: bool = True
    tied_projections: bool = True
    joined: bool = False
    """Store queries, keys and values in one tensor, as older files do."""
    final_norm: bool = False
    seed: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        for band, (first_id, end_id) in enumerate(zip(BAND_STARTS, CUTOFFS, strict=True)):
            band_dim = DIM // 4**band
            self._draw(f"embed_tokens.embeddings.{band}.0.weight", end_id - first_id, band_dim)
            self._draw(f"embed_tokens.embeddings.{band}.1.weight", DIM, band_dim)
        for layer in range(LAYERS):
            self._draw_block(f"layers.{layer}")
        if self.final_norm:
            self._draw_layer("layer_norm", DIM)
        self._draw_softmax()
        for name in ("embed_tokens._float_tensor", "embed_positions._float_tensor"):
            self.tensors[f"decoder.{name}"] = torch.zeros(1)
        self.tensors["decoder.version"] = torch.tensor([3.0])
        self.tensors["decoder.adaptive_softmax.version"] = torch.tensor([1])

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor in float64, by its name without the prefix `decoder`."""
        return self.tensors[f"decoder.{name}"].double()

    def _draw(self, name: str, *shape: int) -> None:
        self.tensors[f"decoder.{name}"] = torch.randn(shape, generator=self.generator) * shape[-1] ** -0.5

    def _draw_layer(self, name: str, *shape: int) -> None:
        self._draw(f"{name}.weight", *shape)
        self._draw(f"{name}.bias", shape[0])

    def _draw_block(self, name: str) -> None:
        if self.joined:
            self._draw(f"{name}.self_attn.in_proj_weight", 3 * DIM, DIM)
            self._draw(f"{name}.self_attn.in_proj_bias", 3 * DIM)
        else:
            for letter in "qkv":
                self._draw_layer(f"{name}.self_attn.{letter}_proj", DIM, DIM)
        self._draw_layer(f"{name}.self_attn.out_proj", DIM, DIM)
        self._draw_layer(f"{name}.self_attn_layer_norm", DIM)
        self._draw_layer(f"{name}.final_layer_norm", DIM)
        self._draw_layer(f"{name}.fc1", FFN_DIM, DIM)
        self._draw_layer(f"{name}.fc2", DIM, FFN_DIM)

    def _draw_softmax(self) -> None:
        num_tails = len(CUTOFFS) - 1
        if self.tied:
            self._share("adaptive_softmax.head.word_proj.weight", "embed_tokens.embeddings.0.0.weight")
            self._draw("adaptive_softmax.head.class_proj.weight", num_tails, DIM)
            self.tensors["decoder.adaptive_softmax.head._float_tensor"] = torch.zeros(1)
        else:
            self._draw("adaptive_softmax.head.weight", CUTOFFS[0] + num_tails, DIM)
        for tail in range(num_tails):
            band = tail + 1
            band_dim = DIM // 4**band
            band_size = CUTOFFS[band] - BAND_STARTS[band]
            output_name = f"adaptive_softmax.tail.{tail}"
            input_name = f"embed_tokens.embeddings.{band}"
            if self.tied and self.tied_projections:
                self._share(f"{output_name}.0.weight", f"{input_name}.1.weight")
            else:
                self._draw(f"{output_name}.0.weight", band_dim, DIM)
            if self.tied:
                self._share(f"{output_name}.2.weight", f"{input_name}.0.weight")
            else:
                self._draw(f"{output_name}.2.weight", band_size, band_dim)

    def _share(self, name: str, shared_name: str) -> None:
        self.tensors[f"decoder.{name}"] = self.tensors[f"decoder.{shared_name}"]

    @property
    def arguments(self) -> dict[str, Any]:
        """The options of training that fairseq stores in a checkpoint."""
        return {
            "arch": "transformer_lm_wiki103",
            "decoder_attention_heads": HEADS,
            "decoder_embed_dim": DIM,
            "dropout": 0.3,
            "attention_dropout": 0.1,
            "relu_dropout": 0.2,
            "adaptive_softmax_dropout": 0.15,
            "adaptive_softmax_cutoff": "10,18",
            "adaptive_input": True,
            "tokens_per_sample": 6,
            "sample_break_mode": None,
            "lr": [1.0],
        }

    def save(self, folder: Path, **entries: Any) -> tuple[Path, Path]:
        """Write the checkpoint and the dictionary to a folder, and return their paths.

        Args:
            folder: The folder to create.
            entries: Entries of the checkpoint besides the tensors. By default, the options and an epoch.
        """
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = folder / "model.pt"
        entries = entries or {"args": Namespace(**self.arguments), "epoch": 3}
        torch.save({"model": self.tensors, **entries}, checkpoint)

        dictionary = folder / "dict.txt"
        lines = [f"{word} {100 - number}\n" for number, word in enumerate(WORDS)]
        dictionary.write_text("".join(lines), encoding="utf-8")
        return checkpoint, dictionary

    # -- what fairseq computes ---------------------------------------------------------------------------------------

    def log_probs(self, ids_BT: Tensor) -> Tensor:
        """Return the log-probabilities of all words after each step, in float64."""
        hidden_BTD = self._decode(ids_BT)
        if self.tied:
            words = self["adaptive_softmax.head.word_proj.weight"]
            clusters = self["adaptive_softmax.head.class_proj.weight"]
            head_HD = torch.cat([words, clusters])
        else:
            head_HD = self["adaptive_softmax.head.weight"]
        head_log_probs_BTH = (hidden_BTD @ head_HD.T).log_softmax(-1)

        head_size = CUTOFFS[0]
        log_probs_by_band = [head_log_probs_BTH[..., :head_size]]
        for tail in range(len(CUTOFFS) - 1):
            projection = self[f"adaptive_softmax.tail.{tail}.0.weight"]
            if not (self.tied and self.tied_projections):
                projection = projection.T
            band_hidden_BTE = hidden_BTD @ projection
            scores = band_hidden_BTE @ self[f"adaptive_softmax.tail.{tail}.2.weight"].T
            cluster_log_prob = head_log_probs_BTH[..., head_size + tail, None]
            log_probs_by_band.append(cluster_log_prob + scores.log_softmax(-1))
        return torch.cat(log_probs_by_band, -1)

    def _decode(self, ids_BT: Tensor) -> Tensor:
        """Return the hidden state after each step."""
        vectors = [self._embed(word_id) for word_id in ids_BT.flatten().tolist()]
        hidden_BTD = math.sqrt(DIM) * torch.stack(vectors).view(*ids_BT.shape, DIM)
        positions = [self._position(step) for step in range(ids_BT.shape[1])]
        hidden_BTD = hidden_BTD + torch.tensor(positions, dtype=torch.float64)

        for layer in range(LAYERS):
            name = f"layers.{layer}"
            normed_BTD = self._norm(hidden_BTD, f"{name}.self_attn_layer_norm")
            hidden_BTD = hidden_BTD + self._attend(normed_BTD, f"{name}.self_attn")
            normed_BTD = self._norm(hidden_BTD, f"{name}.final_layer_norm")
            activations = self._linear(normed_BTD, f"{name}.fc1").clamp(min=0)
            hidden_BTD = hidden_BTD + self._linear(activations, f"{name}.fc2")
        if self.final_norm:
            hidden_BTD = self._norm(hidden_BTD, "layer_norm")
        return hidden_BTD

    def _embed(self, word_id: int) -> Tensor:
        """Return the vector of a word: its row in the table of its band, projected to the dimension of the model."""
        band = find_band(word_id)
        vector = self[f"embed_tokens.embeddings.{band}.0.weight"][word_id - BAND_STARTS[band]]
        return self[f"embed_tokens.embeddings.{band}.1.weight"] @ vector

    def _position(self, step: int) -> list[float]:
        """Return the sinusoidal position vector of a step. Positions start from 2 in fairseq."""
        half = DIM // 2
        angles = [(step + 2) * math.exp(-index * math.log(10_000) / (half - 1)) for index in range(half)]
        return [*map(math.sin, angles), *map(math.cos, angles)]

    def _norm(self, inputs_BTD: Tensor, name: str) -> Tensor:
        centred_BTD = inputs_BTD - inputs_BTD.mean(-1, keepdim=True)
        normed_BTD = centred_BTD / (centred_BTD.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed_BTD * self[f"{name}.weight"] + self[f"{name}.bias"]

    def _linear(self, inputs: Tensor, name: str) -> Tensor:
        return inputs @ self[f"{name}.weight"].T + self[f"{name}.bias"]

    def _attend(self, inputs_BTD: Tensor, name: str) -> Tensor:
        if self.joined:
            joint = inputs_BTD @ self[f"{name}.in_proj_weight"].T + self[f"{name}.in_proj_bias"]
            queries_BTD, keys_BTD, values_BTD = joint.chunk(3, -1)
        else:
            queries_BTD = self._linear(inputs_BTD, f"{name}.q_proj")
            keys_BTD = self._linear(inputs_BTD, f"{name}.k_proj")
            values_BTD = self._linear(inputs_BTD, f"{name}.v_proj")

        steps = inputs_BTD.shape[1]
        head_dim = DIM // HEADS
        is_future = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        outputs = []
        for head in range(HEADS):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            queries = queries_BTD[..., columns] * head_dim**-0.5
            scores = queries @ keys_BTD[..., columns].transpose(1, 2)
            weights = scores.masked_fill(is_future, -math.inf).softmax(-1)
            outputs.append(weights @ values_BTD[..., columns])
        return self._linear(torch.cat(outputs, -1), f"{name}.out_proj")


def find_band(word_id: int) -> int:
    """Return the number of the band that a word belongs to."""
    return next(band for band, end_id in enumerate(CUTOFFS) if word_id < end_id)
