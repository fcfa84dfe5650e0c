"""Encode and decode what lies on the disk. README.md draws the bytes."""
