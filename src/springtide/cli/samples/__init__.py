"""Small functions that `springtide hello` runs to prove that everything works; good to copy from, too."""
