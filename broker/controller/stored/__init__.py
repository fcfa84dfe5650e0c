"""Write the catalog to the files of a data directory and read it back."""
