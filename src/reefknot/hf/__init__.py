"""Hugging Face transformers models that compute their loss without the logits, or with one of our output ends.

    import reefknot as rk

    rk.hf.logits_free(model)                                     # any transformers model with an output layer
    loss = model(input_ids=tokens, labels=tokens).loss           # the same loss, without the N x V logits

    table = rk.WordTable.from_embedding(model.get_input_embeddings())
    model = rk.hf.replace_head(model, rk.Softmax(rk.Drill(table, depth=2)), start="same")

`logits_free` in `patch` is where to start. It makes the output layer return *deferred logits* (`deferred`): a tensor
that stands for the logits but stores only what they are computed from (`scores`). `operations` lists what works without
the logits, and `loss` is the loss function that the patched model calls.

`replace_head` in `replace` puts an output end in the place of the output layer. The result is a model of `head_model`.
`score_tokens` in `evaluation` scores a text, so that `reefknot compare` can compare models.

This package needs transformers 4.57 or newer: `pip install 'reefknot[hf]'`. It is imported when `rk.hf` is first used.
"""

from __future__ import annotations

import importlib.util

from reefknot.errors import ResourceError

if importlib.util.find_spec("transformers") is None:
    raise ResourceError("reefknot.hf needs transformers, which is not installed; run: pip install 'reefknot[hf]'")

from reefknot.hf.bands import EmbeddingBands
from reefknot.hf.deferred import DeferredLogits
from reefknot.hf.evaluation import score_tokens
from reefknot.hf.head_model import ReefknotHeadConfig, ReefknotHeadForCausalLM
from reefknot.hf.patch import LogitsFree, logits_free
from reefknot.hf.replace import replace_head

__all__ = [
    "DeferredLogits",
    "EmbeddingBands",
    "LogitsFree",
    "ReefknotHeadConfig",
    "ReefknotHeadForCausalLM",
    "logits_free",
    "replace_head",
    "score_tokens",
]
