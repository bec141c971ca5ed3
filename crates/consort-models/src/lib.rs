//! Architectures: config, weight table with partitions, narrated forward pass.
