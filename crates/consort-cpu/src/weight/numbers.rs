//! How kernels read numbers that 16 rows have side by side.

use crate::isa::{LANES, Simd};

/// How 16 numbers are read.
pub trait LoadNumber {
    /// Of each.
    const BYTES: usize;
    /// What the numbers that `load` gives are counted in.
    const UNIT: f32 = 1.0;
    /// Reads them.
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats;
}

/// f32.
pub struct F32;
/// Half precision.
pub struct F16;
/// bfloat16.
pub struct BF16;
/// FP8 E4M3, in units of 256.
pub struct E4M3;
/// A power of two.
pub struct E8M0;

impl LoadNumber for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        let (values, _) = bytes.as_chunks();
        let mut floats = [0.0; LANES];
        for (float, bytes) in floats.iter_mut().zip(values) {
            *float = f32::from_le_bytes(*bytes);
        }
        simd.load(&floats)
    }
}

impl LoadNumber for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        simd.load_f16(&bytes.as_chunks().0[0])
    }
}

impl LoadNumber for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        simd.load_bf16(&bytes.as_chunks().0[0])
    }
}

impl LoadNumber for E4M3 {
    const BYTES: usize = 1;
    const UNIT: f32 = 256.0;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        simd.load_e4m3_div_256(&bytes.as_chunks().0[0])
    }
}

impl LoadNumber for E8M0 {
    const BYTES: usize = 1;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> S::Floats {
        simd.load_e8m0(&bytes.as_chunks().0[0])
    }
}
