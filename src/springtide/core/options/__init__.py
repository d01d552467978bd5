"""The options of jobs and services as tables, from which every face of the platform is made, and rules over them."""
