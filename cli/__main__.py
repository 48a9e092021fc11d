"""`python -m atoll.cli`: the `atoll` command where its console script is not on the path."""

from atoll.cli import main

main()
