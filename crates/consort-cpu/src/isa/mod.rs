//! Instruction sets: the vector operations that kernels are written in, and the one place where a set is chosen.
//!
//! A kernel is a [`Kernel`]: its mathematics, once, over a [`Simd`]. [`Isa::run`] compiles it for each instruction set and
//! enters the chosen one. All kernels work on 16 lanes, because 16 output features (or keys) lie side by side in memory: one
//! AVX-512 register, two of AVX2, four of NEON. Matrix products alone have other forms: in tiles ([`amx`]), and of bfloat16 pairs.

#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use std::fmt;

#[cfg(target_arch = "x86_64")]
pub use amx::Amx;
#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "x86_64")]
pub use avx512_bf16::{Avx512Bf16, PairKernel};
#[cfg(target_arch = "aarch64")]
pub use neon::{Dot, Neon, Widening};
pub use portable::Portable;

/// Lanes of every vector: output features, tokens or head features that are computed side by side.
pub const LANES: usize = 16;

/// What [`Simd::dot_centered_bytes`] takes from unsigned bytes to make them signed.
pub const CENTER: i16 = 128;

/// 16 values of four bytes each.
pub type Quads = [u8; 4 * LANES];

/// FP8 E4M3 divided by 256, in bfloat16. Below a normal number's sign its upper byte is this, and the upper three bits of the
/// code's exponent.
const E4M3_EXPONENT: i8 = (127 - 7 - 8) >> 1;
/// Its lower byte: what is left of the exponent, and the fraction.
const E4M3_LOWER: [u8; 16] = {
    let mut table = [0; 16];
    let mut code = 0;
    while code < 16 {
        table[code] = (code << 4) as u8;
        code += 1;
    }
    table
};
/// The lower and the upper byte of numbers too small to be normal, which are multiples of 2^-9, divided.
const E4M3_SMALL: [[u8; 16]; 2] = {
    let mut table = [[0; 16]; 2];
    let mut code = 1;
    while code < 8 {
        let bits = (code as f32 / 131_072.0).to_bits();
        (table[0][code], table[1][code]) = ((bits >> 16) as u8, (bits >> 24) as u8);
        code += 1;
    }
    table
};

/// The name of the variable that forces an instruction set.
pub const ISA_VARIABLE: &str = "CONSORT_ISA";

/// Vector operations on 16 lanes. A value of a type that implements this proves that the processor has the instructions.
pub trait Simd: Copy + Send + Sync {
    /// 16 f32 lanes.
    type Floats: Copy;
    /// 16 i32 lanes.
    type Ints: Copy;
    /// 64 bytes: four consecutive values for each of 16 lanes.
    type Bytes: Copy;
    /// Running sums of byte products, not yet one number for each lane.
    type Sums: Copy;
    /// Values of 16 f32 lanes that fit into registers.
    const REGISTERS: usize = 8;

    /// Whether [`lookup_nibble`](Self::lookup_nibble) is the way from codes of four bits to floats.
    const NIBBLES: bool = false;

    /// Runs a kernel as a function of its own, with these instructions: it is compiled apart from its caller.
    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    /// How many [`dot_bytes`](Self::dot_bytes) a sum holds if no weight byte is above `largest`; with none, the products of such
    /// bytes are those of [`dot_centered_bytes`](Self::dot_centered_bytes).
    fn sums_hold(largest: u8) -> usize;

    /// Asks for memory that will be read soon. A processor drops what is asked for while it waits for two dozen lines, so
    /// ask for little at a time, between other work.
    fn prefetch(self, bytes: &[u8]);

    /// Asks for the line `bytes` behind this one, wherever that is.
    fn prefetch_after(self, _line: &Quads, _bytes: usize) {}

    /// Asks for memory that will be read some microseconds from now: it goes to the second-level cache, which waits for twice
    /// as many lines and has room for them.
    fn prefetch_early(self, bytes: &[u8]);

    /// The same value in each lane.
    fn splat(self, x: f32) -> Self::Floats;
    /// 16 values from memory.
    fn load(self, from: &[f32; LANES]) -> Self::Floats;
    /// 16 values to memory.
    fn store(self, x: Self::Floats, to: &mut [f32; LANES]);
    /// Widens IEEE half precision.
    fn load_f16(self, from: &[u8; 2 * LANES]) -> Self::Floats;
    /// Widens bfloat16.
    fn load_bf16(self, from: &[u8; 2 * LANES]) -> Self::Floats;
    /// Widens FP8 E4M3 and divides by 256: the step up costs a multiplication that a scale can absorb. NaN is not kept.
    fn load_e4m3_div_256(self, from: &[u8; LANES]) -> Self::Floats;
    /// Converts unsigned bytes.
    fn load_u8(self, from: &[u8; LANES]) -> Self::Floats;
    /// Converts signed bytes.
    fn load_i8(self, from: &[u8; LANES]) -> Self::Floats;
    /// `2^(code - 127)`, for codes 0 to 254.
    fn load_e8m0(self, from: &[u8; LANES]) -> Self::Floats;

    /// The upper halves of the lanes, which are bfloat16, widened.
    fn upper_bf16(self, x: Self::Bytes) -> Self::Floats;
    /// The lower halves of the lanes, which are bfloat16, widened.
    fn lower_bf16(self, x: Self::Bytes) -> Self::Floats;
    /// FP8 E4M3 divided by 256, as bfloat16: of each 16 bytes the first eight become halves of the first vector's lanes, in
    /// order, and the others halves of the second's. NaN is not kept.
    fn pairs_of_e4m3(self, codes: Self::Bytes) -> [Self::Bytes; 2];

    /// `a + b`.
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a · b`.
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a / b`.
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a · b + c`, rounded once where the machine can.
    fn fma(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// The larger one; `b` if either is NaN.
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The smaller one; `b` if either is NaN.
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Rows to columns.
    fn transpose(self, from: &[[f32; LANES]; LANES], to: &mut [[f32; LANES]; LANES]);
    /// Converts to floats.
    fn to_floats(self, x: Self::Ints) -> Self::Floats;
    /// `2^n` for lanes that hold whole numbers from -126 to 127.
    fn exp2_whole(self, n: Self::Floats) -> Self::Floats;
    /// The nearest whole number.
    fn round(self, x: Self::Floats) -> Self::Floats;
    /// The sum of the lanes, in a fixed order.
    fn sum(self, x: Self::Floats) -> f32;
    /// The largest lane, if none is NaN.
    fn largest(self, x: Self::Floats) -> f32;
    /// Rounds to IEEE half precision.
    fn store_f16(self, x: Self::Floats, to: &mut [u8; 2 * LANES]);
    /// Rounds to bfloat16.
    fn store_bf16(self, x: Self::Floats, to: &mut [u8; 2 * LANES]);
    /// Whole numbers from -128 to 127 as signed bytes.
    fn store_i8(self, x: Self::Floats, to: &mut [u8; LANES]);

    /// 64 bytes from memory.
    fn load_bytes(self, from: &Quads) -> Self::Bytes;
    /// 64 bytes to memory.
    fn store_bytes(self, x: Self::Bytes, to: &mut Quads);
    /// `(x >> right) & mask` in each byte.
    fn field(self, x: Self::Bytes, right: u32, mask: u8) -> Self::Bytes;
    /// `(x << left) & mask` in each byte.
    fn field_left(self, x: Self::Bytes, left: u32, mask: u8) -> Self::Bytes;
    /// `a | b`.
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `table[x]` for bytes below 16.
    fn lookup(self, table: &[u8; 16], x: Self::Bytes) -> Self::Bytes;

    /// `table[nibble]`, where it is nibble `PLACE` of each lane, from the lowest on.
    fn lookup_nibble<const PLACE: u32>(self, _table: Self::Floats, _x: Self::Bytes) -> Self::Floats {
        unreachable!("nibbles are taken as bytes")
    }
    /// Byte `INDEX` of each lane, unsigned.
    fn byte_of_lane<const INDEX: u32>(self, x: Self::Bytes) -> Self::Ints;
    /// The same value in each lane.
    fn splat_int(self, x: i32) -> Self::Ints;
    /// `a + b`.
    fn add_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;

    /// No products yet, only `start` where sums are such numbers.
    fn start_sums(self, start: Self::Ints) -> Self::Sums;
    /// Adds the products of each lane's four unsigned bytes with the same four signed bytes `x`. A sum that is added to more
    /// often than [`sums_hold`](Self::sums_hold) overflows.
    fn dot_bytes(self, sums: Self::Sums, w: Self::Bytes, x: [u8; 4]) -> Self::Sums;
    /// Adds a sum that began with `start` up to one number for each lane.
    fn total(self, sums: Self::Sums, start: Self::Ints) -> Self::Ints;
    /// Adds the products of each lane's four unsigned bytes less [`CENTER`] with the same four signed bytes `x`.
    fn dot_centered_bytes(self, _sums: Self::Ints, _w: Self::Bytes, _x: [u8; 4]) -> Self::Ints {
        unreachable!("sums hold the products of any bytes")
    }
}

/// A computation over a [`Simd`].
pub trait Kernel {
    /// What it returns.
    type Output;
    /// Does it. Implementations are `#[inline(always)]`, as is every function on the way to a [`Simd`] operation: only then
    /// does the compiler use the instruction set's registers throughout. A closure cannot be marked so, and one that calls
    /// such operations costs a hundredfold: write loops.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Choice);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512Bf16),
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon<Widening>),
    #[cfg(target_arch = "aarch64")]
    NeonDot(Neon<Dot>),
}

/// The names of all instruction sets, of this processor or not.
const NAMES: [&str; 7] = ["portable", "avx2", "avx512", "avx512-bf16", "amx", "neon", "neon-dot"];

/// A forced instruction set that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{ISA_VARIABLE}={name}: {reason}; this machine has {}", available_names())]
pub struct IsaError {
    name: String,
    reason: &'static str,
}

impl Isa {
    /// Every instruction set that this processor has, the best last.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut sets = vec![Self(Choice::Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(Avx2::detect().map(|avx2| Self(Choice::Avx2(avx2))));
            sets.extend(Avx512::detect().map(|avx512| Self(Choice::Avx512(avx512))));
            sets.extend(Avx512Bf16::detect().map(|bf16| Self(Choice::Avx512Bf16(bf16))));
            sets.extend(Amx::detect().map(|amx| Self(Choice::Amx(amx))));
        }
        #[cfg(target_arch = "aarch64")]
        {
            sets.extend(Neon::<Widening>::detect().map(|neon| Self(Choice::Neon(neon))));
            sets.extend(Neon::<Dot>::detect().map(|neon| Self(Choice::NeonDot(neon))));
        }
        sets
    }

    /// The best one, or the one that the variable `CONSORT_ISA` names.
    ///
    /// # Errors
    /// When the variable names one that is unknown or that this processor lacks.
    pub fn from_environment() -> Result<Self, IsaError> {
        match std::env::var(ISA_VARIABLE) {
            Ok(name) => Self::named(&name),
            // `available` is never empty.
            Err(_) => Ok(*Self::available().last().expect("at least the portable one")),
        }
    }

    /// The one of this name.
    ///
    /// # Errors
    /// When there is none, or this processor lacks it.
    pub fn named(name: &str) -> Result<Self, IsaError> {
        let known = NAMES.contains(&name);
        let reason = if known { "the processor lacks it" } else { "unknown instruction set" };
        let found = Self::available().into_iter().find(|isa| isa.name() == name);
        found.ok_or_else(|| IsaError { name: name.to_owned(), reason })
    }

    /// The name that `CONSORT_ISA` uses.
    pub const fn name(self) -> &'static str {
        match self.0 {
            Choice::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Choice::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Bf16(_) => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Choice::Amx(_) => "amx",
            #[cfg(target_arch = "aarch64")]
            Choice::Neon(_) => "neon",
            #[cfg(target_arch = "aarch64")]
            Choice::NeonDot(_) => "neon-dot",
        }
    }

    /// Whether matrix products use tiles instead of vectors.
    pub const fn has_tiles(self) -> bool {
        self.amx().is_some()
    }

    /// The tiles that matrix products use instead of vectors, if this instruction set has them.
    #[cfg(target_arch = "x86_64")]
    pub const fn amx(self) -> Option<Amx> {
        match self.0 {
            Choice::Amx(amx) => Some(amx),
            _ => None,
        }
    }

    /// Other processors have none.
    #[cfg(not(target_arch = "x86_64"))]
    pub const fn amx(self) -> Option<std::convert::Infallible> {
        None
    }

    /// The products of bfloat16 pairs of this instruction set, where they are faster than those of f32.
    #[cfg(target_arch = "x86_64")]
    pub const fn bf16(self) -> Option<Avx512Bf16> {
        match self.0 {
            Choice::Avx512Bf16(bf16) => Some(bf16),
            _ => None,
        }
    }

    /// Other processors have none.
    #[cfg(not(target_arch = "x86_64"))]
    pub const fn bf16(self) -> Option<std::convert::Infallible> {
        None
    }

    /// Runs a kernel with this instruction set.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Choice::Portable => kernel.run(Portable),
            #[cfg(target_arch = "x86_64")]
            Choice::Avx2(avx2) => avx2.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512(avx512) => avx512.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Choice::Avx512Bf16(bf16) => bf16.vectors().run(kernel),
            #[cfg(target_arch = "x86_64")]
            Choice::Amx(amx) => amx.vectors().run(kernel),
            #[cfg(target_arch = "aarch64")]
            Choice::Neon(neon) => neon.run(kernel),
            #[cfg(target_arch = "aarch64")]
            Choice::NeonDot(neon) => neon.run(kernel),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn available_names() -> String {
    Isa::available().iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}
