"""What an exchange costs on a set of devices: analytic models and a graph network."""
