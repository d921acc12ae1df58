"""The command line: one file per verb. Nothing heavy is imported before the arguments are known to be right."""
