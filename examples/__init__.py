"""Complete programs on top of the library; `word2vec` is ``fusestep demo``."""
