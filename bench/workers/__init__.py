"""Scripts that run in the interpreters of other libraries; nothing here imports fusestep.

A script is started by its path, so its folder is first on ``sys.path`` and it finds
``worker_protocol`` beside itself.
"""
