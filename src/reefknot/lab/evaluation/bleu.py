"""BLEU (Papineni et al. 2002) and chrF (Popovic 2015) of translations, computed by sacrebleu (Post 2018).

Start with `create_metrics`:

    metrics = create_metrics(BleuSettings())
    scores = metrics.score(hypotheses=["the cat sat"], references=["the cat sat down"])
    scores.bleu, scores.chrf

A hypothesis is the translation of a sentence by the model. The scores equal the scores of the command
`sacrebleu REFERENCES -i HYPOTHESES -m bleu chrf`. They include sacrebleu's signatures, which record its version and
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
"""Maximum length of a source sentence in each length band, in tokens. A further band has all longer sentences."""


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
        bleu_score = self.bleu.corpus_score(hypotheses, [references])
        chrf_score = self.chrf.corpus_score(hypotheses, [references])
        return TranslationScores(
            bleu=bleu_score.score,
            chrf=chrf_score.score,
            bleu_signature=str(self.bleu.get_signature()),
            chrf_signature=str(self.chrf.get_signature()),
            brevity_penalty=bleu_score.bp,
            length_ratio=bleu_score.ratio,
        )

    def score_by_length(
        self, hypotheses: Sequence[str], references: Sequence[str], source_lengths: NDArray[np.int64]
    ) -> tuple[LengthBand, ...]:
        """Return BLEU for each band of source lengths, such as 11 to 20 tokens. Empty bands are left out."""
        bands = []
        low = 0
        for high in (*BAND_BOUNDS, None):  # the last band has no upper bound
            in_band = source_lengths >= low
            if high is not None:
                in_band &= source_lengths <= high
            indices = np.flatnonzero(in_band).tolist()
            if indices:
                band_hypotheses = [hypotheses[index] for index in indices]
                band_references = [references[index] for index in indices]
                bleu_score = self.bleu.corpus_score(band_hypotheses, [band_references])
                bands.append(LengthBand(low=low, high=high, pairs=len(indices), bleu=bleu_score.score))
            if high is not None:
                low = high + 1
        return tuple(bands)


def create_metrics(settings: BleuSettings) -> Metrics:
    """Create the metrics. Raise an error if the tokenizer needs a package that is missing.

    Training calls this function before its first step, so that a missing package does not fail at the end.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    # Without `force`, sacrebleu warns that the text looks tokenised.
    is_tokenised = settings.tokenize == "none"
    try:
        bleu = BLEU(lowercase=settings.lowercase, tokenize=settings.tokenize, force=is_tokenised)
        return Metrics(bleu, CHRF())
    except (ImportError, RuntimeError) as error:
        message = " ".join(str(error).split())  # on one line
        raise SettingsError(f"evaluation.bleu.tokenize = {settings.tokenize}: {message}") from error
