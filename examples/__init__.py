"""Complete programs on top of the library; `word2vec` is ``fusestep demo``.

`thor_digits` and `recommender` are run as ``python -m fusestep.examples.recommender``.
"""
