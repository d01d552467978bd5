"""Who gets what: one policy, one file, and the named parts that policies are composed from."""
