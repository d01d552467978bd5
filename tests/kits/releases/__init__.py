"""State directories as earlier versions left them."""
