"""How the documentation is built: `make docs`."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # command_line; hpo as it is here

project = "hpo-islands"
author = "The hpo-islands developers"
release = version = version_of("hpo-islands")

extensions = ["command_line", "myst_parser", "sphinx.ext.autodoc"]
default_role = "code"  # docstrings have `names` in single backticks
highlight_language = "none"  # indented blocks are mostly what programs print
smartquotes = False  # they make one dash of the two of an option
myst_heading_anchors = 3

add_module_names = False
autodoc_default_options = {"member-order": "bysource"}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

html_theme = "furo"
pygments_dark_style = "github-dark"  # the theme's own underlines modules as if they were links
html_title = project
html_copy_source = False
html_show_copyright = False
html_domain_indices = html_use_index = False
