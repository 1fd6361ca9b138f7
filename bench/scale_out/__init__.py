"""Tables that several processes own: what an iteration costs here, and a model of more."""
