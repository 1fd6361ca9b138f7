"""Rules in the form of PyTorch's optimizers: epsilon after the correction of the bias."""
