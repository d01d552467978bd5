"""`bench deadlines` and `bench figures`: ElasticFlow's figures."""
