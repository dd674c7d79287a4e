"""`python -m kvmosaic`: the command line."""

from kvmosaic.cli import main

main()
