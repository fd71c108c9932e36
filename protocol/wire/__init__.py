"""The messages between the processes, their codec, and the client library."""
