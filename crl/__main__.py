"""`python -m crl` is `crl`."""

from crl.cli.main import main

main()
