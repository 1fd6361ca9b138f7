"""The table of the tensors of a dense launch, as it lies on the device."""

# Columns, int64 [T, COLUMNS].
W, G, S0, S1, S2, SIZE, HP, FIRST_BLOCK, IS_ALIGNED, COLUMNS = range(10)
ROW_BYTES = 8 * COLUMNS
