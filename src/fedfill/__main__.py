"""``python -m fedfill``."""

from fedfill.cli import main

main()
