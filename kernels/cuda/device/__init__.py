"""What every kernel stands on: driver, memory, launches, intrinsics."""
