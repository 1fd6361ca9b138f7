"""The table of the rows and columns of matrices, as it lies on the device.

A line is a row or a column of a matrix. The table has the rows of each tensor, then the columns of
each.
"""

# Columns, int64 [2 T, COLUMNS].
(
    SUMS,
    PARTS,  # sums of a line
    STATE,
    FACTORS,
    HP,
    MATRICES,
    LENGTH,  # lines of a matrix
    COUNT,  # elements of a line
    LOG_LANES,  # lines that a group of threads has
    LOG_PARTS,  # threads that share a line
    SEGMENTS,  # groups of a matrix
    TOTALS,  # float64 [matrices, SEGMENTS]: sums of the states of rows; 0 for columns
    FIRST_BLOCK,
    CHUNKS,  # groups of a matrix once its mean is known; of rows alone
    FIRST_CHUNK_BLOCK,
    COLUMNS,
) = range(16)
ROW_BYTES = 8 * COLUMNS
