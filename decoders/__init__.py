"""Decoding methods, one file each."""
