"""What several commands say in the same way."""
