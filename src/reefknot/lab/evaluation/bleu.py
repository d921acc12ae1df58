"""What translations are worth: BLEU (Papineni et al. 2002) and chrF (Popovic 2015) as sacrebleu counts them (Post
2018).

Figures are those of its command, `sacrebleu REFERENCES -i TRANSLATIONS -m bleu chrf`, and carry its signatures, which
say how they were counted and by which version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Settings
from reefknot.lab.runs.result import LengthBand, Translated

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

BANDS = (10, 20, 30, 40, 50)
"""The longest source of each band of lengths but the last."""


class BleuSettings(Settings):
    """How translations are cut into words where they are compared with the references."""

    tokenize: Annotated[
        Literal["13a", "none", "intl", "char", "zh", "ja-mecab"],
        Field(description="sacrebleu's tokeniser; none: a text that is tokenised already"),
    ] = "13a"
    lowercase: Annotated[bool, Field(description="BLEU does not tell capitals from small letters")] = False


class Metrics(NamedTuple):
    """sacrebleu's measures."""

    bleu: BLEU
    chrf: CHRF

    def figures(self, lines: Sequence[str], references: Sequence[str]) -> Translated:
        """Both of a text, each with its signature."""
        bleu, chrf = self.bleu.corpus_score(lines, [references]), self.chrf.corpus_score(lines, [references])
        return Translated(
            bleu=bleu.score,
            chrf=chrf.score,
            bleu_signature=str(self.bleu.get_signature()),
            chrf_signature=str(self.chrf.get_signature()),
            brevity_penalty=bleu.bp,
            length_ratio=bleu.ratio,
        )

    def by_length(
        self, lines: Sequence[str], references: Sequence[str], lengths: NDArray[np.int64]
    ) -> tuple[LengthBand, ...]:
        """BLEU of the lines whose source has so many tokens, band by band; bands without any are left out."""
        found = []
        for low, high in zip((0, *(each + 1 for each in BANDS)), (*BANDS, None), strict=True):
            inside = np.flatnonzero((lengths >= low) & (lengths <= (high or np.inf))).tolist()
            if inside:
                score = self.bleu.corpus_score([lines[i] for i in inside], [[references[i] for i in inside]])
                found.append(LengthBand(low=low, high=high, pairs=len(inside), bleu=score.score))
        return tuple(found)


def open_metrics(settings: BleuSettings) -> Metrics:
    """The measures, or an error where what they need is not installed: better before training than after it."""
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise SettingsError("BLEU needs the package sacrebleu; pip install sacrebleu") from error
    # Without `force` it takes a tokenised text for a mistake, and says so.
    tokenised = settings.tokenize == "none"
    try:
        return Metrics(BLEU(lowercase=settings.lowercase, tokenize=settings.tokenize, force=tokenised), CHRF())
    except (ImportError, RuntimeError) as error:
        raise SettingsError(
            f"evaluation.bleu.tokenize = {settings.tokenize}: {' '.join(str(error).split())}"
        ) from error
