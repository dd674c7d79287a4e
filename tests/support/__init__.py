"""What several test folders need."""
