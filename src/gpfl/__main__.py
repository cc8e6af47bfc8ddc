"""Entry point of `gpfl` and `python -m gpfl`."""

import gc

from gpfl.cli.interrupt import exit_on_interrupt


def main() -> None:
    """Run the command."""
    # Importing and tracing create a million objects that stay: looking for garbage every 700 takes a fifth of the start.
    gc.set_threshold(50_000)
    with exit_on_interrupt():
        from gpfl.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
