"""The user's code as it is sent: a file, its neighbours, a cell of a notebook."""
