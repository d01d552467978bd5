"""`bench goals` and `bench smlt`: goals on functions against SMLT and other searches."""
