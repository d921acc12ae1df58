"""The laboratory: trains, measures and reports. The library never imports it."""

from reefknot.extras import require_extra

require_extra("lab", "the laboratory (reefknot.lab and the command line)")
