"""A run is a folder that describes itself: durable files, checkpoints, metrics and the environment."""
