"""The error of files that say what exists."""


class DefinitionsError(Exception):
    """A file that says what exists cannot be read, so an operator must look."""
