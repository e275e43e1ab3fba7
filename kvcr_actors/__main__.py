"""`python -m kvcr_actors`, for where the script is not on the path."""

from kvcr_actors.cli import main

main()
