"""BLEU (Papineni et al. 2002) and chrF (Popovic 2015) of translations, computed by sacrebleu (Post 2018).

Start with `open_metrics(settings).score(hypotheses, references)`. The scores equal those of the command
`sacrebleu REFERENCES -i HYPOTHESES -m bleu chrf`. They carry sacrebleu's signatures, which record its version and
options.
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

BAND_BOUNDS = (10, 20, 30, 40, 50)
"""Upper bounds of the bands (ranges) of source lengths, in tokens. A last band has no upper bound."""


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

    def score(self, hypotheses: Sequence[str], references: Sequence[str]) -> TranslationScores:
        """Return BLEU and chrF of the translations (hypotheses) of a text, with their signatures."""
        bleu = self.bleu.corpus_score(hypotheses, [references])
        chrf = self.chrf.corpus_score(hypotheses, [references])
        return TranslationScores(
            bleu=bleu.score,
            chrf=chrf.score,
            bleu_signature=str(self.bleu.get_signature()),
            chrf_signature=str(self.chrf.get_signature()),
            brevity_penalty=bleu.bp,
            length_ratio=bleu.ratio,
        )

    def score_by_length(
        self, hypotheses: Sequence[str], references: Sequence[str], source_lengths: NDArray[np.int64]
    ) -> tuple[LengthBand, ...]:
        """Return BLEU for each band (range) of source lengths. Bands without sentences are left out."""
        shortest_lengths = (0, *(bound + 1 for bound in BAND_BOUNDS))
        longest_lengths = (*BAND_BOUNDS, None)
        bands = []
        for shortest, longest in zip(shortest_lengths, longest_lengths, strict=True):
            in_band = (source_lengths >= shortest) & (source_lengths <= (longest or np.inf))
            indices = np.flatnonzero(in_band).tolist()
            if indices:
                band_references = [references[index] for index in indices]
                score = self.bleu.corpus_score([hypotheses[index] for index in indices], [band_references])
                bands.append(LengthBand(low=shortest, high=longest, pairs=len(indices), bleu=score.score))
        return tuple(bands)


def open_metrics(settings: BleuSettings) -> Metrics:
    """Create the metrics. Raise an error if a package is missing, so call this before training, too."""
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise SettingsError("BLEU needs the package sacrebleu; pip install sacrebleu") from error
    # Without `force`, sacrebleu warns that the text looks tokenised.
    is_tokenised = settings.tokenize == "none"
    try:
        bleu = BLEU(lowercase=settings.lowercase, tokenize=settings.tokenize, force=is_tokenised)
        return Metrics(bleu, CHRF())
    except (ImportError, RuntimeError) as error:
        raise SettingsError(
            f"evaluation.bleu.tokenize = {settings.tokenize}: {' '.join(str(error).split())}"
        ) from error
