"""A process of its own that reads the files of streams, for whoever wants whole ranges of them: as Arrow, by HTTP."""
