"""The `reefknot` command, also as `python -m reefknot`, or in several processes as `torchrun -m reefknot`."""

import sys

from reefknot.errors import SettingsError


def main() -> None:
    """Run one command and exit with its code. Without the extra `lab`, say how to install it."""
    try:
        from reefknot.lab.cli.main import main as run_command
    except SettingsError as error:
        print(f"reefknot: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    run_command()


if __name__ == "__main__":
    main()
