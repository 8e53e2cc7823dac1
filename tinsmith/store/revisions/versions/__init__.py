"""One module for each revision. Its number is the schema version that it leads to."""
