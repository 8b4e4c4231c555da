"""The site: ``make docs``. Sources are the Markdown files as they lie in the repository; nothing is fetched."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import fedfill

project = "fedfill"
author = copyright = "The fedfill contributors"
version = release = fedfill.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "pages"]

# the source folder is the whole repository, so that links between README, docs/ and experiments/ lead where they do there
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "experiments/**.md", "bench/*.md"]
exclude_patterns = ["README.md", "AGENTS.md", ".*", "**/.*", "build", "runs", "src", "tests"]
html_extra_path = ["_root"]  # index.html, which leads to docs/

myst_heading_anchors = 4  # `#a-heading`, as Git hosts make them
default_role = "code"  # docstrings write `name`
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "fedfill"
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
