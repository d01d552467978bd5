"""`bench kubernetes`: a platform on a thousand modelled nodes."""
