"""Configure Sphinx, which `make docs` runs."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

import plotly

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's hpo

project = "hpo-islands"
author = "The hpo-islands developers"
release = version = version_of("hpo-islands")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["inventories"]
# The second is for the figures of the gallery, also without a network.
html_extra_path = ["llms.txt", str(Path(plotly.__path__[0], "package_data", "plotly.min.js"))]
default_role = "code"  # Docstrings have `names` in single backticks.
highlight_language = "none"  # Indented blocks are mostly output of programs.
smartquotes = False  # Smart quotes replace the two dashes of an option by one.
myst_heading_anchors = 3

add_module_names = False
autodoc_default_options = {"member-order": "bysource"}
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

# Builds are offline: docs/inventories/README.md describes these files.
intersphinx_mapping = {
    name: (url, f"inventories/{name}.txt")
    for name, url in {
        "mpi4py": "https://mpi4py.readthedocs.io/en/stable",
        "optuna": "https://optuna.readthedocs.io/en/stable",
        "python": "https://docs.python.org/3",
        "torch": "https://docs.pytorch.org/docs/stable",
    }.items()
}

html_theme = "furo"
pygments_dark_style = "github-dark"  # The theme's own style underlines modules like links.
html_title = project
html_copy_source = False
html_show_copyright = False
html_domain_indices = html_use_index = False
