"""The supervisor as a script (`python packages/graders/coalign_graders/sandbox`), with the standard library alone."""

from supervisor import main  # pyright: ignore[reportAttributeAccessIssue]  (a stub of that name is on its path)

main()
