"""`python -m gpfl` is the command."""

from gpfl.cli import main

if __name__ == "__main__":
    main()
