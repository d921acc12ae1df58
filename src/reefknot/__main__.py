"""Runs the `reefknot` command as `python -m reefknot`, or in several processes as `torchrun -m reefknot`."""

from reefknot.lab.cli.main import main

if __name__ == "__main__":
    main()
