"""The `atoll` command: thin, no logic of its own. Nothing heavy is imported before a command needs it."""

__all__ = ["main"]


def main() -> None:
    """Runs the command line and exits with a code of `atoll.cli.exit_codes`."""
    from atoll.cli.app import run

    run()
