"""Tables and lines of text that commands print."""
