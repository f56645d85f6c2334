"""Side-by-side timings; never asserted in tests."""
