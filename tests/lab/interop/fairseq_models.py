"""Small models in fairseq's layout: their files, and an independent implementation of what fairseq computes with them.

Shapes: B sentences, T steps, D dimensions.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DIM, HEADS, FFN, LAYERS = 16, 4, 24, 2
CUTOFFS = (10, 18, 31)  # ids at which the bands end: 4 special symbols and 27 words
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
        starts = (0, *CUTOFFS[:-1])
        for band, (start, stop) in enumerate(zip(starts, CUTOFFS, strict=True)):
            self.draw(f"embed_tokens.embeddings.{band}.0.weight", stop - start, DIM // 4**band)
            self.draw(f"embed_tokens.embeddings.{band}.1.weight", DIM, DIM // 4**band)
        for number in range(LAYERS):
            self._draw_block(f"layers.{number}")
        if self.final_norm:
            self._draw_layer("layer_norm", DIM)
        self._draw_softmax()
        for name in ("embed_tokens._float_tensor", "embed_positions._float_tensor"):
            self.tensors[f"decoder.{name}"] = torch.zeros(1)
        self.tensors["decoder.version"] = torch.tensor([3.0])
        self.tensors["decoder.adaptive_softmax.version"] = torch.tensor([1])

    def draw(self, name: str, *shape: int) -> None:
        self.tensors[f"decoder.{name}"] = torch.randn(shape, generator=self.generator) * shape[-1] ** -0.5

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"decoder.{name}"].double()

    def _draw_layer(self, name: str, *shape: int) -> None:
        self.draw(f"{name}.weight", *shape)
        self.draw(f"{name}.bias", shape[0])

    def _draw_block(self, name: str) -> None:
        if self.joined:
            self.draw(f"{name}.self_attn.in_proj_weight", 3 * DIM, DIM)
            self.draw(f"{name}.self_attn.in_proj_bias", 3 * DIM)
        else:
            for part in "qkv":
                self._draw_layer(f"{name}.self_attn.{part}_proj", DIM, DIM)
        self._draw_layer(f"{name}.self_attn.out_proj", DIM, DIM)
        self._draw_layer(f"{name}.self_attn_layer_norm", DIM)
        self._draw_layer(f"{name}.final_layer_norm", DIM)
        self._draw_layer(f"{name}.fc1", FFN, DIM)
        self._draw_layer(f"{name}.fc2", DIM, FFN)

    def _draw_softmax(self) -> None:
        tails = len(CUTOFFS) - 1
        if self.tied:
            self._share("adaptive_softmax.head.word_proj.weight", "embed_tokens.embeddings.0.0.weight")
            self.draw("adaptive_softmax.head.class_proj.weight", tails, DIM)
            self.tensors["decoder.adaptive_softmax.head._float_tensor"] = torch.zeros(1)
        else:
            self.draw("adaptive_softmax.head.weight", CUTOFFS[0] + tails, DIM)
        for tail in range(tails):
            dim, size = DIM // 4 ** (tail + 1), CUTOFFS[tail + 1] - CUTOFFS[tail]
            output, source = f"adaptive_softmax.tail.{tail}", f"embed_tokens.embeddings.{tail + 1}"
            if self.tied and self.tied_projections:
                self._share(f"{output}.0.weight", f"{source}.1.weight")
            else:
                self.draw(f"{output}.0.weight", dim, DIM)
            if self.tied:
                self._share(f"{output}.2.weight", f"{source}.0.weight")
            else:
                self.draw(f"{output}.2.weight", size, dim)

    def _share(self, name: str, source: str) -> None:
        self.tensors[f"decoder.{name}"] = self.tensors[f"decoder.{source}"]

    @property
    def arguments(self) -> dict[str, Any]:
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

    def save(self, folder: Path, **contents: Any) -> tuple[Path, Path]:
        """Write the checkpoint and the dictionary to a folder. `contents` are the other entries of the checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        contents = contents or {"args": Namespace(**self.arguments), "epoch": 3}
        torch.save({"model": self.tensors, **contents}, folder / "model.pt")
        counts = "".join(f"{word} {100 - number}\n" for number, word in enumerate(WORDS))
        (folder / "dict.txt").write_text(counts, encoding="utf-8")
        return folder / "model.pt", folder / "dict.txt"

    # -- what fairseq computes ---------------------------------------------------------------------------------------

    def log_probs(self, ids_BT: Tensor) -> Tensor:
        """Return the log-probabilities of all words after each step, in float64."""
        hidden_BTD = self._decode(ids_BT)
        words, tails = CUTOFFS[0], range(len(CUTOFFS) - 1)
        if self.tied:
            classes = [self["adaptive_softmax.head.word_proj.weight"], self["adaptive_softmax.head.class_proj.weight"]]
            head = hidden_BTD @ torch.cat(classes).T
        else:
            head = hidden_BTD @ self["adaptive_softmax.head.weight"].T
        head = head.log_softmax(-1)
        bands = [head[..., :words]]
        for tail in tails:
            matrix = self[f"adaptive_softmax.tail.{tail}.0.weight"]
            narrow = hidden_BTD @ (matrix if self.tied and self.tied_projections else matrix.T)
            within = (narrow @ self[f"adaptive_softmax.tail.{tail}.2.weight"].T).log_softmax(-1)
            bands.append(head[..., words + tail, None] + within)
        return torch.cat(bands, -1)

    def _decode(self, ids_BT: Tensor) -> Tensor:
        rows = []
        for index in ids_BT.flatten().tolist():
            band = next(number for number, stop in enumerate(CUTOFFS) if index < stop)
            vector = self[f"embed_tokens.embeddings.{band}.0.weight"][index - (0, *CUTOFFS)[band]]
            rows.append(self[f"embed_tokens.embeddings.{band}.1.weight"] @ vector)
        inputs_BTD = math.sqrt(DIM) * torch.stack(rows).view(*ids_BT.shape, DIM)
        inputs_BTD = inputs_BTD + torch.tensor(
            [self._position(step) for step in range(ids_BT.shape[1])], dtype=torch.float64
        )
        for number in range(LAYERS):
            name = f"layers.{number}"
            inputs_BTD = inputs_BTD + self._attend(
                self._norm(inputs_BTD, f"{name}.self_attn_layer_norm"), f"{name}.self_attn"
            )
            inner = self._layer(self._norm(inputs_BTD, f"{name}.final_layer_norm"), f"{name}.fc1").clamp(min=0)
            inputs_BTD = inputs_BTD + self._layer(inner, f"{name}.fc2")
        return self._norm(inputs_BTD, "layer_norm") if self.final_norm else inputs_BTD

    def _position(self, step: int) -> list[float]:
        half = DIM // 2
        angles = [(step + 2) * math.exp(-number * math.log(10_000) / (half - 1)) for number in range(half)]
        return [*map(math.sin, angles), *map(math.cos, angles)]

    def _norm(self, inputs_BTD: Tensor, name: str) -> Tensor:
        centred = inputs_BTD - inputs_BTD.mean(-1, keepdim=True)
        unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return unit * self[f"{name}.weight"] + self[f"{name}.bias"]

    def _layer(self, inputs_BTD: Tensor, name: str) -> Tensor:
        return inputs_BTD @ self[f"{name}.weight"].T + self[f"{name}.bias"]

    def _attend(self, inputs_BTD: Tensor, name: str) -> Tensor:
        if self.joined:
            parts = (inputs_BTD @ self[f"{name}.in_proj_weight"].T + self[f"{name}.in_proj_bias"]).chunk(3, -1)
        else:
            parts = tuple(self._layer(inputs_BTD, f"{name}.{part}_proj") for part in "qkv")
        steps, head_dim = inputs_BTD.shape[1], DIM // HEADS
        heads = []
        for head in range(HEADS):
            q, k, v = (part[..., head * head_dim : (head + 1) * head_dim] for part in parts)
            scores = (q * head_dim**-0.5) @ k.transpose(1, 2)
            future = torch.ones(steps, steps, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
        return self._layer(torch.cat(heads, -1), f"{name}.out_proj")
