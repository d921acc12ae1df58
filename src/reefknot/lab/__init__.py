"""The laboratory: trains, measures and reports. The library never imports it."""
