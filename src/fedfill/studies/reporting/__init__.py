"""The page that `fedfill report` writes: what folders hold, drawings, words, template and style sheet."""
