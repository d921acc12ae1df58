"""The table of contents of the documentation site."""

from __future__ import annotations

SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("install", "your_text", "choose_ends", "compare"),
    "Notebooks": ("notebooks/choose_ends", "notebooks/drill_head", "notebooks/tied_vectors"),
    "How-to": (
        "training_frameworks",
        "hugging_face",
        "hugging_face_architectures",
        "replace_head",
        "your_model",
        "losses",
        "pretrained_vectors",
        "cutoffs",
        "evaluate_another_text",
        "several_gpus",
        "resume",
        "results",
        "export",
    ),
    "Ends": ("ends/index",),
    "Models and training": ("recurrent", "attention", "translation", "vectors", "runs", "commands"),
    "Papers": ("papers/index",),
    "Numbers": ("performance", "footguns", "reliability"),
    "Reference": ("reference/api/index", "reference/verbs/index", "reference/recipes/index"),
    "Inside": ("architecture", "decisions", "contributing", "stability", "changelog"),
}
"""The pages of every section, in the order of the sidebar. Most are files of docs/; others are split or generated."""

ROOT_PAGES = {"CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog"}
"""Files in the root of the repository that are pages."""

PAPERS = {
    "Baevski & Auli 2019": "baevski2019",
    "Inan et al. 2017": "inan2017",
    "Pappas & Henderson 2019": "pappas2019",
    "Press & Wolf 2017": "press2017",
}
"""The page of every paper, by the name that headings of PAPERS.md contain."""
