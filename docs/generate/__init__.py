"""Makes the pages that are read from the code and from measured results."""
