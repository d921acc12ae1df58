"""Export a run as a folder that Hugging Face transformers loads: `reefknot export RUN --format hf -o FOLDER`.

    FOLDER/config.json, generation_config.json     the settings of the run
    FOLDER/model.safetensors                       its best weights
    FOLDER/tokenizer.json, tokenizer_config.json   its vocabulary
    FOLDER/target/                                 the tokenizer of the target, if a translator has two vocabularies
    FOLDER/README.md                               the model card

`reefknot.hf.models` defines the models, and `model_card.py` writes the card.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, cast

from reefknot.errors import SettingsError
from reefknot.extras import require_extra
from reefknot.lab.config.parts import INPUTS
from reefknot.lab.interop.model_card import write_card
from reefknot.lab.interop.tokenizer import build_tokenizer
from reefknot.lab.tasks.contract import TrainedRun
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.constants import END_OF_LINE, UNKNOWN
from reefknot.storage.progress import Notify, silent

MAX_NEW_TOKENS = 60
"""Number of tokens that `generate` writes by default, as `reefknot generate` does."""
MAX_TARGET_TOKENS = 256
"""Maximum number of tokens of a translation, by default."""


def export_hf(trained: TrainedRun[Any, Any, Any], folder: Path, notify: Notify = silent) -> None:
    """Write a run into an existing folder, as a model of transformers.

    Args:
        trained: The run of a language model or a translator.
        folder: The folder to write into.
        notify: Called with notes for the user.
    """
    from transformers.utils import logging

    from reefknot.hf.models import ReefknotForCausalLM, ReefknotForSeq2SeqLM

    is_translator = trained.run.task == "translation"
    config = _build_translator_config(trained) if is_translator else _build_config(trained)
    model_class = ReefknotForSeq2SeqLM if is_translator else ReefknotForCausalLM
    model = model_class(config)
    model.model.load_state_dict(trained.model.state_dict())
    model.generation_config = _build_generation_config(trained)
    show_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if show_progress:
        logging.enable_progress_bar()

    source, target = trained.words.vocabularies
    sides = {folder: source}
    if target is not source:
        sides[folder / "target"] = target
    for side_folder, vocabulary in sides.items():
        if not vocabulary.has_exact_tokenizer:
            notify(
                f"{side_folder}: no tokenizer is written, because the sub-words of this vocabulary are restricted "
                "(joint_bpe, or bpe with min_count or max_size), which the tokenizers of transformers do not support; "
                "encode texts with Reefknot"
            )
            continue
        tokenizer = _build_tokenizer(vocabulary, is_translator)
        tokenizer.save_pretrained(side_folder)
    write_card(trained, folder)


def _build_tokenizer(vocabulary: Vocabulary, is_translator: bool) -> Any:
    """Return the tokenizer of transformers for a vocabulary."""
    from transformers import PreTrainedTokenizerFast

    names = {}
    if vocabulary.unk is not None:
        names["unk_token"] = UNKNOWN
    if vocabulary.eos is not None:
        names |= {"bos_token": END_OF_LINE, "eos_token": END_OF_LINE, "pad_token": END_OF_LINE}
    return PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(
            vocabulary, eos_at="end" if is_translator else "start", split_unknown=is_translator
        ),
        padding_side="right" if is_translator else "left",
        clean_up_tokenization_spaces=False,
        **names,
    )


def _build_config(trained: TrainedRun[Any, Any, Any]) -> Any:
    """Return the config of a language model."""
    from reefknot.hf.models import ReefknotConfig

    vocabulary = trained.vocabulary
    return ReefknotConfig(**_shared_values(trained), bos_token_id=vocabulary.eos)


def _build_translator_config(trained: TrainedRun[Any, Any, Any]) -> Any:
    """Return the config of a translator."""
    from reefknot.hf.models import ReefknotSeq2SeqConfig

    source, target = trained.words.vocabularies
    return ReefknotSeq2SeqConfig(
        **_shared_values(trained),
        source_vocab_size=len(source),
        source_words=_list_spelled(trained.experiment.source, source),
        decoder_start_token_id=target.eos,
        eos_token_id=target.eos,
        pad_token_id=target.eos,
    )


def _shared_values(trained: TrainedRun[Any, Any, Any]) -> dict[str, Any]:
    vocabulary = trained.vocabulary
    experiment = trained.experiment
    settings = experiment.without_files().model_dump(mode="json")
    # The folder of a text is of no use to others, and its path may be private.
    settings["corpus"]["name"] = Path(settings["corpus"]["name"]).name
    return {
        "settings": settings,
        "vocab_size": len(vocabulary),
        "words": _list_spelled(experiment.input, vocabulary),
        "window": None if trained.model.encoder.carries_state else experiment.training.steps,
        "unk_token_id": vocabulary.unk,
    }


def _list_spelled(input_settings: Any, vocabulary: Vocabulary) -> list[str] | None:
    """Return the words whose spellings an input end reads, or None if it does not read spellings."""
    if not INPUTS.has_argument(input_settings, "spellings"):
        return None
    return [*vocabulary.words, *vocabulary.spelled_words]


def _build_generation_config(trained: TrainedRun[Any, Any, Any]) -> Any:
    """Return the defaults of `generate`: those of `reefknot generate` at temperature 0, or of `reefknot translate`."""
    from transformers import GenerationConfig

    vocabulary = trained.vocabulary
    options: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "bos_token_id": vocabulary.eos, "do_sample": False}
    if trained.run.task == "translation":
        search = cast(Any, trained.experiment).search
        options = {
            "max_new_tokens": MAX_TARGET_TOKENS,
            "num_beams": search.beam,
            "length_penalty": search.length_penalty,
            "decoder_start_token_id": vocabulary.eos,
            "eos_token_id": vocabulary.eos,
            "pad_token_id": vocabulary.eos,
        }
    if vocabulary.unk is not None:
        options["suppress_tokens"] = [vocabulary.unk]
    return GenerationConfig(**options)


def check_transformers() -> None:
    """Raise an error unless transformers 5 is installed."""
    require_extra("hf", "--format hf")
    version = importlib.metadata.version("transformers")
    if int(version.partition(".")[0]) < 5:
        raise SettingsError(
            f"--format hf needs transformers 5, but transformers {version} is installed; run: pip install --upgrade "
            "'transformers>=5'"
        )
