"""Serve ranges of streams as Arrow by HTTP, from a process that reads the files of streams."""
