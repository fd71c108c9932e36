"""Messages between processes, their encoding and the public client."""
