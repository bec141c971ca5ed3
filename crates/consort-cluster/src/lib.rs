//! Hostfile, launch, supervision.
