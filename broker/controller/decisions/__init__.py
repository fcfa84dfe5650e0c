"""Decides what becomes of each request to change what exists."""
