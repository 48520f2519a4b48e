"""The data that every command works on, and what is computed of it without opening a file."""
