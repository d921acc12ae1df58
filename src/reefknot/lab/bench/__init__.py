"""Everything that `reefknot bench` and `reefknot advise` measure."""
