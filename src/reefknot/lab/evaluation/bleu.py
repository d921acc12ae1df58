"""BLEU (Papineni et al. 2002) and chrF (Popovic 2015) of translations, computed by sacrebleu (Post 2018).

The scores equal those of `sacrebleu REFERENCES -i TRANSLATIONS -m bleu chrf`. They carry sacrebleu's signatures, which
record its version and options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Settings
from reefknot.lab.runs.result import LengthBand, TranslationScores

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

BANDS = (10, 20, 30, 40, 50)
"""Upper bounds of the bands of source lengths. The last band has no upper bound."""


class BleuSettings(Settings):
    """How sacrebleu tokenises translations and references."""

    tokenize: Annotated[
        Literal["13a", "none", "intl", "char", "zh", "ja-mecab"],
        Field(description="Tokeniser of sacrebleu. Use none for text that is already tokenised."),
    ] = "13a"
    lowercase: Annotated[bool, Field(description="Ignore case.")] = False


class Metrics(NamedTuple):
    """BLEU and chrF, as implemented by sacrebleu."""

    bleu: BLEU
    chrf: CHRF

    def score(self, lines: Sequence[str], references: Sequence[str]) -> TranslationScores:
        """Return BLEU and chrF of a text, with their signatures."""
        bleu, chrf = self.bleu.corpus_score(lines, [references]), self.chrf.corpus_score(lines, [references])
        return TranslationScores(
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
        """Return BLEU for each band of source lengths. Bands without lines are left out."""
        bands = []
        for low, high in zip((0, *(bound + 1 for bound in BANDS)), (*BANDS, None), strict=True):
            inside = np.flatnonzero((lengths >= low) & (lengths <= (high or np.inf))).tolist()
            if inside:
                score = self.bleu.corpus_score([lines[i] for i in inside], [[references[i] for i in inside]])
                bands.append(LengthBand(low=low, high=high, pairs=len(inside), bleu=score.score))
        return tuple(bands)


def open_metrics(settings: BleuSettings) -> Metrics:
    """Create the metrics. Raise an error if a package is missing, so call this before training, too."""
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise SettingsError("BLEU needs the package sacrebleu; pip install sacrebleu") from error
    # Without `force`, sacrebleu warns that the text looks tokenised.
    tokenised = settings.tokenize == "none"
    try:
        return Metrics(BLEU(lowercase=settings.lowercase, tokenize=settings.tokenize, force=tokenised), CHRF())
    except (ImportError, RuntimeError) as error:
        raise SettingsError(
            f"evaluation.bleu.tokenize = {settings.tokenize}: {' '.join(str(error).split())}"
        ) from error
