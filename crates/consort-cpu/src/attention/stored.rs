//! How the cache's numbers are read, in registers.

use consort_compute::KvFormat;

use crate::isa::{LANES, Simd};

/// What a number that was read is to be multiplied by: reading FP8 divides by a power of two, which the scale of a query and
/// that of a result absorb.
pub const fn unit(format: KvFormat) -> f32 {
    match format {
        KvFormat::FP8 => 256.0,
        _ => 1.0,
    }
}

/// A format, read where it lies.
pub trait Stored {
    /// Features of keys that lie together with their scales, of which the sum of products is multiplied by these.
    const FEATURES: usize;
    /// Whether there are scales.
    const SCALED: bool;
    /// Vectors of a value that share a scale.
    const VECTORS_OF_SCALE: usize;
    /// So many features of 16 keys, and their scales.
    type Keys;

    /// A panel, of which nothing is left over.
    fn keys(panel: &[u8]) -> &[Self::Keys];
    /// The scales of 16 keys.
    fn key_scales<S: Simd>(simd: S, keys: &Self::Keys) -> S::Floats;
    /// Feature `k` of 16 keys, without their scales.
    fn key<S: Simd>(simd: S, keys: &Self::Keys, k: usize) -> S::Floats;
    /// The scales of vector `vector` of a panel's 16 values.
    fn value_scales<S: Simd>(simd: S, panel: &[u8], vector: usize) -> S::Floats;
    /// Some vectors of one value, without their scales.
    fn values<S: Simd, const VECTORS: usize>(simd: S, value: &[u8], first: usize) -> [S::Floats; VECTORS];
}

/// How 16 numbers without a scale are read.
pub trait Numbers {
    /// Their bytes.
    type Packed;
    /// All of them.
    fn packed(bytes: &[u8]) -> &[Self::Packed];
    /// Reads them, in units.
    fn load<S: Simd>(simd: S, packed: &Self::Packed) -> S::Floats;
}

impl<F: Numbers> Stored for F {
    const FEATURES: usize = 1;
    const SCALED: bool = false;
    const VECTORS_OF_SCALE: usize = usize::MAX;
    type Keys = F::Packed;

    #[inline(always)]
    fn keys(panel: &[u8]) -> &[F::Packed] {
        F::packed(panel)
    }
    #[inline(always)]
    fn key_scales<S: Simd>(simd: S, _keys: &F::Packed) -> S::Floats {
        simd.splat(1.0)
    }
    #[inline(always)]
    fn key<S: Simd>(simd: S, keys: &F::Packed, _k: usize) -> S::Floats {
        F::load(simd, keys)
    }
    #[inline(always)]
    fn values<S: Simd, const VECTORS: usize>(simd: S, value: &[u8], first: usize) -> [S::Floats; VECTORS] {
        let packed = &F::packed(value)[first..first + VECTORS];
        let mut lanes = [simd.splat(0.0); VECTORS];
        for v in 0..VECTORS {
            lanes[v] = F::load(simd, &packed[v]);
        }
        lanes
    }
    #[inline(always)]
    fn value_scales<S: Simd>(simd: S, _panel: &[u8], _vector: usize) -> S::Floats {
        simd.splat(1.0)
    }
}

/// Signed bytes: for each 32 features, the scales of 16 keys and then their codes, or the scale of a value and its codes.
pub struct Q8;

impl Stored for Q8 {
    const FEATURES: usize = 32;
    const SCALED: bool = true;
    const VECTORS_OF_SCALE: usize = 2;
    type Keys = [[u8; LANES]; 2 + 32];

    #[inline(always)]
    fn keys(panel: &[u8]) -> &[Self::Keys] {
        panel.as_chunks().0.as_chunks().0
    }
    #[inline(always)]
    fn key_scales<S: Simd>(simd: S, keys: &Self::Keys) -> S::Floats {
        simd.load_f16(&keys.as_flattened().as_chunks().0[0])
    }
    #[inline(always)]
    fn key<S: Simd>(simd: S, keys: &Self::Keys, k: usize) -> S::Floats {
        simd.load_i8(&keys[2 + k])
    }
    #[inline(always)]
    fn values<S: Simd, const VECTORS: usize>(simd: S, value: &[u8], first: usize) -> [S::Floats; VECTORS] {
        let blocks = value.as_chunks::<{ 2 + 2 * LANES }>().0;
        let mut lanes = [simd.splat(0.0); VECTORS];
        for v in 0..VECTORS {
            let codes = &blocks[(first + v) / 2][2..];
            lanes[v] = simd.load_i8(&codes.as_chunks().0[(first + v) % 2]);
        }
        lanes
    }
    #[inline(always)]
    fn value_scales<S: Simd>(simd: S, panel: &[u8], vector: usize) -> S::Floats {
        let mut scales = [[0; 2]; LANES];
        for (scale, value) in scales.iter_mut().zip(panel.chunks_exact(panel.len() / LANES)) {
            let block = &value.as_chunks::<{ 2 + 2 * LANES }>().0[vector / 2];
            *scale = [block[0], block[1]];
        }
        simd.load_f16(&scales.as_flattened().as_chunks().0[0])
    }
}

/// IEEE half precision.
pub struct F16;
/// bfloat16.
pub struct BF16;
/// Single precision.
pub struct F32;
/// FP8 E4M3 that is [not NaN](has_nan).
pub struct FP8;
/// FP8 E4M3.
pub struct FP8OrNan;

impl Numbers for F16 {
    type Packed = [u8; 2 * LANES];
    #[inline(always)]
    fn packed(bytes: &[u8]) -> &[Self::Packed] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn load<S: Simd>(simd: S, packed: &Self::Packed) -> S::Floats {
        simd.load_f16(packed)
    }
}

impl Numbers for BF16 {
    type Packed = [u8; 2 * LANES];
    #[inline(always)]
    fn packed(bytes: &[u8]) -> &[Self::Packed] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn load<S: Simd>(simd: S, packed: &Self::Packed) -> S::Floats {
        simd.load_bf16(packed)
    }
}

impl Numbers for F32 {
    type Packed = [[u8; 4]; LANES];
    #[inline(always)]
    fn packed(bytes: &[u8]) -> &[Self::Packed] {
        bytes.as_chunks().0.as_chunks().0
    }
    #[inline(always)]
    fn load<S: Simd>(simd: S, packed: &Self::Packed) -> S::Floats {
        let mut numbers = [0.0; LANES];
        for lane in 0..LANES {
            numbers[lane] = f32::from_le_bytes(packed[lane]);
        }
        simd.load(&numbers)
    }
}

impl Numbers for FP8 {
    type Packed = [u8; LANES];
    #[inline(always)]
    fn packed(bytes: &[u8]) -> &[Self::Packed] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn load<S: Simd>(simd: S, packed: &Self::Packed) -> S::Floats {
        simd.load_e4m3_div_256(packed)
    }
}

impl Numbers for FP8OrNan {
    type Packed = [u8; LANES];
    #[inline(always)]
    fn packed(bytes: &[u8]) -> &[Self::Packed] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn load<S: Simd>(simd: S, packed: &Self::Packed) -> S::Floats {
        let numbers = simd.load_e4m3_div_256(packed);
        // The code of NaN reads as 480, the step after the largest number, 448: a factor that only the former overflows by
        // makes an infinity of it, and zero times that is NaN again.
        let overflowing = simd.mul(numbers, simd.splat(f32::MAX / 1.8));
        simd.fma(overflowing, simd.splat(0.0), numbers)
    }
}

/// Whether any FP8 code in some panels is that of NaN: looking at all of them costs less than minding each that is read.
#[inline(always)]
pub fn has_nan(panels: &[&[u8]]) -> bool {
    const MAGNITUDE: u8 = 0x7F;
    let mut largest = 0;
    for panel in panels {
        for code in *panel {
            largest = largest.max(code & MAGNITUDE);
        }
    }
    largest == MAGNITUDE
}
