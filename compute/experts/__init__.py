"""Where the experts are: slot table, arena view, and the client that asks for missing ones."""
