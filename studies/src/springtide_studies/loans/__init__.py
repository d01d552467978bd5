"""`simulate --study loaning`: lent servers, as in FaPES."""
