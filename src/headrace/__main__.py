"""`python -m headrace`."""

from headrace.entry import main

main()
