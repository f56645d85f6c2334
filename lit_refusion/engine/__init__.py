"""The decoding engine: one preallocated cache, one forward pass for the requests of all live rows."""
