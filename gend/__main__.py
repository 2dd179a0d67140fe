"""`python -m gend`."""

from gend.cli import main

main()
