"""`python -m peer.cli` is `potluck`."""

from peer.cli.main import main

main()
