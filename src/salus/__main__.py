"""`python -m salus`."""

from salus.cli.main import main

main()
