"""One file a subcommand of headrace; alone may import every room, and only when it runs."""
