"""Controllers compared: the same episodes for each, a table, a picture."""
