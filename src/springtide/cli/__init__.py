"""The `springtide` command: one file for each family of verbs, imported only when one of them is called."""
