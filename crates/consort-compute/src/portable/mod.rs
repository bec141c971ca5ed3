//! Every operation as plain loops: the definition of what each one means.
/// The portable backend.
pub struct Portable;
