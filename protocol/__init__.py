"""What two processes must agree on: messages, the arena's layout and the model's files."""
