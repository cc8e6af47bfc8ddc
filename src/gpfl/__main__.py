"""Entry point of `gpfl` and `python -m gpfl`."""

from gpfl.cli.interrupt import exit_on_interrupt


def main() -> None:
    """Run the command."""
    with exit_on_interrupt():
        from gpfl.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
