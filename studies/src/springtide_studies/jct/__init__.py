"""`bench jct`: mean completion times against Pollux, Sia, Optimus and Tiresias."""
