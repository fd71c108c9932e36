"""The expert daemon: it owns the shards' expert bytes, the arena and every read of them."""
