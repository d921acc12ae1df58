"""`python -m reefknot` is the `reefknot` command, which is what torchrun can start."""

from reefknot.lab.cli.main import main

if __name__ == "__main__":
    main()
