//! How kernels read the scales of a tile.

use super::layout::{Number, STEP};
use super::numbers::{BF16, E4M3, E8M0, F16, F32, LoadNumber};
use super::unpack::CHUNK;
use crate::isa::{LANES, Simd};

/// What the codes of a group are multiplied by, and what is added then, for 16 rows.
#[derive(Clone, Copy)]
pub struct Factor<S: Simd> {
    /// The factor.
    pub scale: S::Floats,
    /// Zero if there are no biases.
    pub bias: S::Floats,
}

/// How the scales of a tile are read: one of these for each of [`Scales`](super::Scales), with what is known when a kernel is
/// compiled as types and constants.
pub trait ReadScales: Copy {
    /// Whether there are biases.
    const BIAS: bool;
    /// Steps of a tile whose scales are its own: all of a chunk, or one, or some that share those of one.
    const STEPS: usize;
    /// Bytes of the scales of a tile with so many groups.
    fn bytes(self, groups: usize) -> usize;
    /// What all scales and all biases of a tile are multiplied by.
    fn heads<S: Simd>(self, simd: S, tile: &[u8]) -> [S::Floats; 2];
    /// The factors of group `group` of `groups`.
    fn group<S: Simd>(self, simd: S, heads: [S::Floats; 2], tile: &[u8], groups: usize, group: usize) -> Factor<S>;
}

/// A number for each group, then, if `BIAS`, another one for each.
#[derive(Clone, Copy)]
pub struct Plain<N, const BIAS: bool> {
    /// How they are stored.
    pub number: N,
    /// Multiplies all scales.
    pub factor: f32,
}

impl<N: ReadNumber, const BIAS: bool> ReadScales for Plain<N, BIAS> {
    const BIAS: bool = BIAS;
    const STEPS: usize = 1;

    #[inline(always)]
    fn bytes(self, groups: usize) -> usize {
        groups * (1 + usize::from(BIAS)) * self.number.bytes() * LANES
    }

    #[inline(always)]
    fn heads<S: Simd>(self, simd: S, _tile: &[u8]) -> [S::Floats; 2] {
        [simd.splat(self.factor * self.number.unit()), simd.splat(1.0)]
    }

    #[inline(always)]
    fn group<S: Simd>(self, simd: S, heads: [S::Floats; 2], tile: &[u8], groups: usize, group: usize) -> Factor<S> {
        let size = self.number.bytes() * LANES;
        let scale = simd.mul(self.number.read(simd, &tile[group * size..][..size]), heads[0]);
        let bias =
            if BIAS { self.number.read(simd, &tile[(groups + group) * size..][..size]) } else { simd.splat(0.0) };
        Factor { scale, bias }
    }
}

/// A factor of the tile in half precision, another one if `MINIMUM`, then a byte for each group, and another one if `MINIMUM`.
#[derive(Clone, Copy)]
pub struct Nested<const SIGNED: bool, const MINIMUM: bool>;

impl<const SIGNED: bool, const MINIMUM: bool> Nested<SIGNED, MINIMUM> {
    const HEAD_BYTES: usize = 2 * LANES * (1 + MINIMUM as usize);
}

impl<const SIGNED: bool, const MINIMUM: bool> ReadScales for Nested<SIGNED, MINIMUM> {
    const BIAS: bool = MINIMUM;
    const STEPS: usize = CHUNK / STEP;

    #[inline(always)]
    fn bytes(self, groups: usize) -> usize {
        Self::HEAD_BYTES + groups * (1 + usize::from(MINIMUM)) * LANES
    }

    #[inline(always)]
    fn heads<S: Simd>(self, simd: S, tile: &[u8]) -> [S::Floats; 2] {
        let (heads, _) = tile.as_chunks();
        let minimum = if MINIMUM { simd.mul(simd.load_f16(&heads[1]), simd.splat(-1.0)) } else { simd.splat(0.0) };
        [simd.load_f16(&heads[0]), minimum]
    }

    #[inline(always)]
    fn group<S: Simd>(self, simd: S, heads: [S::Floats; 2], tile: &[u8], groups: usize, group: usize) -> Factor<S> {
        let (bytes, _) = tile[Self::HEAD_BYTES..].as_chunks::<LANES>();
        let scale = if SIGNED { simd.load_i8(&bytes[group]) } else { simd.load_u8(&bytes[group]) };
        let bias = if MINIMUM { simd.mul(heads[1], simd.load_u8(&bytes[groups + group])) } else { simd.splat(0.0) };
        Factor { scale: simd.mul(heads[0], scale), bias }
    }
}

/// How numbers are read: a type that implements [`LoadNumber`], or a [`Number`] where kernels are many.
pub trait ReadNumber: Copy {
    /// Of one number.
    fn bytes(self) -> usize;
    /// What the numbers that `read` gives are counted in.
    fn unit(self) -> f32;
    /// Reads 16.
    fn read<S: Simd>(self, simd: S, bytes: &[u8]) -> S::Floats;
}

impl<N: LoadNumber + Copy> ReadNumber for N {
    #[inline(always)]
    fn bytes(self) -> usize {
        N::BYTES
    }
    #[inline(always)]
    fn unit(self) -> f32 {
        N::UNIT
    }
    #[inline(always)]
    fn read<S: Simd>(self, simd: S, bytes: &[u8]) -> S::Floats {
        N::load(simd, bytes)
    }
}

impl ReadNumber for Number {
    #[inline(always)]
    fn bytes(self) -> usize {
        Self::bytes(self)
    }
    #[inline(always)]
    fn unit(self) -> f32 {
        match self {
            Self::E4M3 => E4M3::UNIT,
            Self::F32 | Self::F16 | Self::BF16 | Self::E8M0 => 1.0,
        }
    }
    #[inline(always)]
    fn read<S: Simd>(self, simd: S, bytes: &[u8]) -> S::Floats {
        match self {
            Self::F32 => F32::load(simd, bytes),
            Self::F16 => F16::load(simd, bytes),
            Self::BF16 => BF16::load(simd, bytes),
            Self::E4M3 => E4M3::load(simd, bytes),
            Self::E8M0 => E8M0::load(simd, bytes),
        }
    }
}
