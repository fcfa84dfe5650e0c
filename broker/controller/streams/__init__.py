"""Streams as the controller knows them: their ranges, ended ones, calls to their reader."""
