//! How kernels read numbers that 16 rows have side by side, and columns of them.

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
#[derive(Clone, Copy)]
pub struct F32;
/// Half precision.
#[derive(Clone, Copy)]
pub struct F16;
/// bfloat16.
#[derive(Clone, Copy)]
pub struct BF16;
/// How four columns of 16 numbers are read.
pub trait LoadQuad {
    /// Of all four.
    const BYTES: usize;
    /// Reads them.
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> [S::Floats; 4];
}

/// Column after column.
pub struct Columns<N>(N);
/// Pairs of bfloat16: in each lane the first column above the second.
pub struct Pairs;
/// FP8 E4M3 in the order of such pairs, in units of 256.
pub struct PairsOfE4M3;

impl<N: LoadNumber> LoadQuad for Columns<N> {
    const BYTES: usize = 4 * LANES * N::BYTES;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> [S::Floats; 4] {
        let size = LANES * N::BYTES;
        [
            N::load(simd, &bytes[..size]),
            N::load(simd, &bytes[size..2 * size]),
            N::load(simd, &bytes[2 * size..3 * size]),
            N::load(simd, &bytes[3 * size..4 * size]),
        ]
    }
}

impl LoadQuad for Pairs {
    const BYTES: usize = 8 * LANES;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> [S::Floats; 4] {
        let (pairs, _) = bytes.as_chunks();
        columns_of_pairs(simd, [simd.load_bytes(&pairs[0]), simd.load_bytes(&pairs[1])])
    }
}

impl LoadQuad for PairsOfE4M3 {
    const BYTES: usize = 4 * LANES;
    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> [S::Floats; 4] {
        columns_of_pairs(simd, simd.pairs_of_e4m3(simd.load_bytes(&bytes.as_chunks().0[0])))
    }
}

#[inline(always)]
fn columns_of_pairs<S: Simd>(simd: S, [first, second]: [S::Bytes; 2]) -> [S::Floats; 4] {
    [simd.upper_bf16(first), simd.lower_bf16(first), simd.upper_bf16(second), simd.lower_bf16(second)]
}

/// FP8 E4M3, in units of 256.
#[derive(Clone, Copy)]
pub struct E4M3;
/// A power of two.
#[derive(Clone, Copy)]
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
