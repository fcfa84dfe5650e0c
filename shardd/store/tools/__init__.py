"""Read the files of a stopped broker. README.md says what is found and how to use it."""
