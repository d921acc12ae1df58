"""Settings, the registry of parts, and overrides."""
