//! What this machine can do: the limits that kernels and plans are held against.
