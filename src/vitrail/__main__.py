"""`python -m vitrail` is `vitrail`."""

from vitrail.cli import main

main()
