"""Studies of trained models."""
