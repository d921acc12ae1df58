"""Hugging Face transformers models that compute their loss without the logits, or with one of our output ends.

    import reefknot as rk

    rk.hf.logits_free(model)                                     # any transformers model with an output layer
    loss = model(input_ids=tokens, labels=tokens).loss           # the same loss, without the N x V logits

    table = rk.WordTable.from_embedding(model.get_input_embeddings())
    model = rk.hf.replace_head(model, rk.Softmax(rk.Drill(table, depth=2)), start="same")

`logits_free` in `patch` is where to start. It makes the output layer return *deferred logits* (`deferred`): a tensor
that stands for the logits but stores only what they are computed from (`scores`). `operations` lists what works without
the logits, and `loss` is the loss function that the patched model calls. `traced` does the same in compiled models.

`replace_head` in `replace` puts an output end in the place of the output layer. The result is a model of `head_model`.
`score_tokens` in `evaluation` scores a text, so that `reefknot compare` can compare models.
`models` has our own models as transformers models, which `reefknot export RUN --format hf` writes. They need
transformers 5. Importing this package registers them with the Auto classes.

This package needs transformers 4.57 or newer: `pip install 'reefknot[hf]'`. It is imported when `rk.hf` is first used.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from reefknot.errors import ResourceError
from reefknot.extras import require_extra

require_extra("hf", "reefknot.hf")

from reefknot.hf.bands import EmbeddingBands  # noqa: E402
from reefknot.hf.deferred import DeferredLogits  # noqa: E402
from reefknot.hf.evaluation import score_tokens  # noqa: E402
from reefknot.hf.head_model import (  # noqa: E402
    ReefknotHeadConfig,
    ReefknotHeadForCausalLM,
    ReefknotHeadForMaskedLM,
    ReefknotHeadForSeq2SeqLM,
    ReefknotHeadMaskedLMConfig,
    ReefknotHeadSeq2SeqConfig,
)
from reefknot.hf.patch import LogitsFree, logits_free  # noqa: E402
from reefknot.hf.replace import replace_head  # noqa: E402

__all__ = [
    "DeferredLogits",
    "EmbeddingBands",
    "LogitsFree",
    "ReefknotHeadConfig",
    "ReefknotHeadForCausalLM",
    "ReefknotHeadForMaskedLM",
    "ReefknotHeadForSeq2SeqLM",
    "ReefknotHeadMaskedLMConfig",
    "ReefknotHeadSeq2SeqConfig",
    "logits_free",
    "replace_head",
    "score_tokens",
]

_MODELS = ("ReefknotConfig", "ReefknotForCausalLM", "ReefknotForSeq2SeqLM", "ReefknotSeq2SeqConfig")
"""Names of our own models, which need transformers 5."""
_TRANSFORMERS_VERSION = importlib.metadata.version("transformers")

if int(_TRANSFORMERS_VERSION.partition(".")[0]) >= 5:
    from reefknot.hf.models import ReefknotConfig as ReefknotConfig
    from reefknot.hf.models import ReefknotForCausalLM as ReefknotForCausalLM
    from reefknot.hf.models import ReefknotForSeq2SeqLM as ReefknotForSeq2SeqLM
    from reefknot.hf.models import ReefknotSeq2SeqConfig as ReefknotSeq2SeqConfig
    from reefknot.hf.models import register_models

    register_models()


def __getattr__(name: str) -> Any:
    """Raise an error that explains why one of our models is missing."""
    if name in _MODELS:
        raise ResourceError(
            f"reefknot.hf.{name} needs transformers 5, but transformers {_TRANSFORMERS_VERSION} is installed; run: "
            "pip install --upgrade 'transformers>=5'"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
