"""What commands about jobs share: options, offers, progress."""
