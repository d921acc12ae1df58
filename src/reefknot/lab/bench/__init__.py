"""Our output ends beside everyone else's: time over floor, memory over what must exist, gradient error."""
