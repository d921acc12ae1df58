"""Settings of Sphinx. `script/docs` writes the source of the site to docs/_build/source and builds it from there."""

from pathlib import Path

import reefknot

project = "Reefknot"
author = "The Reefknot developers"
project_copyright = "The Reefknot developers"
version = release = reefknot.__version__

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 6
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"Reefknot {release}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "search_scorer.js")
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5f8b", "color-brand-content": "#1f5f8b"},
    "dark_css_variables": {"color-brand-primary": "#8cc4ec", "color-brand-content": "#8cc4ec"},
}
copybutton_exclude = ".linenos, .gp, .go"
