"""Arguments that several optimizers have, with values that move a run."""

from __future__ import annotations

import numpy as np

from .record import Argument

FLAG = Argument("flag", True)
COMMON = {
    "learning_rate": Argument("rate", 0.1),
    "weight_decay": Argument("decay", 0.3),
    "use_locking": Argument("flag"),
    "skip_nonfinite": Argument("flag"),
    "state_dtype": Argument("dtype", np.float16, in_states=True),
    "clipvalue": Argument("clip", 0.1),
    "clipnorm": Argument("clip", 0.1),
}
# Of optimizers that look at signs.
SIGNS = {
    "clipvalue": Argument("clip", 0.1, in_states=True),
    "clipnorm": Argument("clip", 0.1, in_states=True),
}
SCALED = {**COMMON, "loss_scale": Argument("loss scale", 4.0)}
# Without decay, a step with g = 0 may be no step.
ROWS = {
    "sparse_update": Argument("sparse update", "lazy", beside={"weight_decay": 0.3}, rows_only=True)
}
BETAS = {
    "beta1": Argument("open unit", 0.5),
    "beta2": Argument("open unit", 0.9),
    "eps": Argument("positive", 0.1),
}
L1_L2 = {"l1": Argument("not negative", 0.3), "l2": Argument("not negative", 0.9)}
