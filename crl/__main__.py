"""Entry point of `python -m crl`, which is the same as the command `crl`."""

from crl.cli.main import main

main()
