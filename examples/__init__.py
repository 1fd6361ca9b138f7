"""Complete programs on top of the library; `word2vec` is ``fusestep demo``.

``python -m fusestep.examples.recommender``, ``.sharded_recommender`` and ``.thor_digits`` run the
others.
"""
