"""Entry point of `python -m kvmosaic`: the command line."""

from kvmosaic.cli import main

main()
