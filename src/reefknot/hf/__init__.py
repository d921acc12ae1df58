"""Hugging Face transformers models that compute their loss without the logits.

    import reefknot as rk

    rk.hf.logits_free(model)                                     # any transformers model with an output layer
    loss = model(input_ids=tokens, labels=tokens).loss           # the same loss, without the N x V logits

`logits_free` in `patch` is where to start. It makes the output layer return *deferred logits* (`deferred`): a tensor
that stands for the logits but stores only what they are computed from (`scores`). `operations` lists what works without
the logits, and `loss` is the loss function that the patched model calls. `traced` does the same in compiled models.

This package needs transformers 4.57 or newer: `pip install 'reefknot[hf]'`. It is imported when `rk.hf` is first used.
"""

from __future__ import annotations

import importlib.util

from reefknot.errors import ResourceError

if importlib.util.find_spec("transformers") is None:
    raise ResourceError("reefknot.hf needs transformers, which is not installed; run: pip install 'reefknot[hf]'")

from reefknot.hf.deferred import DeferredLogits
from reefknot.hf.patch import LogitsFree, logits_free

__all__ = ["DeferredLogits", "LogitsFree", "logits_free"]
