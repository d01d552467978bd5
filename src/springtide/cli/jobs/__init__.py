"""What the commands about jobs share: options, offers, progress."""
