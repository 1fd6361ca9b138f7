"""Steps, sums and checks of whole tensors, many in one launch."""
