"""Python objects as compiled code reads them: NumPy's arrays, PyTorch's tensors."""
