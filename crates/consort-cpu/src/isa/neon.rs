//! NEON: what every AArch64 processor has; and its dot products of bytes, which most have since 2018 (Cortex-A76, Apple M1,
//! Neoverse N1). 16 lanes are four registers.

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use super::{E4M3_EXPONENT, E4M3_LOWER, E4M3_SMALL, Kernel, LANES, Quads, Simd};

/// Proof that the processor has NEON, and what `P` needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neon<P>(P);

impl Neon<Widening> {
    /// The proof, if the processor has NEON.
    pub fn detect() -> Option<Self> {
        is_aarch64_feature_detected!("neon").then_some(Self(Widening(())))
    }
}

impl Neon<Dot> {
    /// The proof, if the processor has NEON with dot products of bytes.
    pub fn detect() -> Option<Self> {
        let has = is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod");
        has.then_some(Self(Dot(())))
    }
}

impl<P: ByteProducts> Neon<P> {
    /// Runs a kernel compiled for these instructions.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        P::run(self, kernel)
    }
}

/// How bytes are multiplied: the one thing in which the two sets differ. Each method is that of [`Simd`].
pub trait ByteProducts: Copy + Send + Sync {
    type Sums: Copy;
    fn run<K: Kernel>(neon: Neon<Self>, kernel: K) -> K::Output;
    fn sums_hold(largest: u8) -> usize;
    fn start(self, start: [int32x4_t; 4]) -> Self::Sums;
    fn dot(self, sums: Self::Sums, w: [uint8x16_t; 4], x: [u8; 4]) -> Self::Sums;
    fn total(self, sums: Self::Sums, start: [int32x4_t; 4]) -> [int32x4_t; 4];
    fn dot_centered(self, sums: [int32x4_t; 4], w: [uint8x16_t; 4], x: [u8; 4]) -> [int32x4_t; 4];
}

/// Products of 16 bits, added up in pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widening(());

/// Dot products of four bytes. A value proves that the processor has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dot(());

const _: () = assert!(cfg!(target_feature = "neon"), "NEON is in the baseline of AArch64");

/// Calls intrinsics of NEON.
macro_rules! call {
    ($value:expr) => {
        // SAFETY: NEON is in the baseline. Loads and stores go through references to arrays of the size that they touch.
        unsafe { $value }
    };
}

/// A value that depends on a place.
macro_rules! place {
    ($i:ident = $place:literal, $value:expr) => {{
        let $i = $place;
        $value
    }};
}

/// The four registers of a value, one after the other.
macro_rules! four {
    ($i:ident => $value:expr) => {
        call!([place!($i = 0, $value), place!($i = 1, $value), place!($i = 2, $value), place!($i = 3, $value)])
    };
}

impl ByteProducts for Widening {
    type Sums = [int16x8_t; 4];

    #[inline(always)]
    fn run<K: Kernel>(neon: Neon<Self>, kernel: K) -> K::Output {
        #[target_feature(enable = "neon")]
        fn enter<K: Kernel>(neon: Neon<Widening>, kernel: K) -> K::Output {
            kernel.run(neon)
        }
        // SAFETY: `neon` proves that the processor has the features.
        unsafe { enter(neon, kernel) }
    }
    #[inline(always)]
    fn sums_hold(largest: u8) -> usize {
        // A sum takes two products for each quad, and an activation is at most 127. Weights are multiplied as signed bytes.
        if largest > SIGNED { 0 } else { i16::MAX as usize / (2 * 127 * usize::from(largest).max(1)) }
    }
    #[inline(always)]
    fn start(self, _start: [int32x4_t; 4]) -> [int16x8_t; 4] {
        call!([vdupq_n_s16(0); 4])
    }
    #[inline(always)]
    fn dot(self, sums: [int16x8_t; 4], w: [uint8x16_t; 4], x: [u8; 4]) -> [int16x8_t; 4] {
        let x = call!(vreinterpretq_s8_s32(vdupq_n_s32(i32::from_le_bytes(x))));
        four!(i => {
            vaddq_s16(sums[i], multiply_pairs(vreinterpretq_s8_u8(w[i]), x))
        })
    }
    #[inline(always)]
    fn total(self, sums: [int16x8_t; 4], start: [int32x4_t; 4]) -> [int32x4_t; 4] {
        four!(i => vpadalq_s16(start[i], sums[i]))
    }
    #[inline(always)]
    fn dot_centered(self, sums: [int32x4_t; 4], w: [uint8x16_t; 4], x: [u8; 4]) -> [int32x4_t; 4] {
        // Two products of at most 128 times 127 fit into 16 bits.
        let x = call!(vreinterpretq_s8_s32(vdupq_n_s32(i32::from_le_bytes(x))));
        four!(i => vpadalq_s16(sums[i], multiply_pairs(center(w[i]), x)))
    }
}

impl ByteProducts for Dot {
    type Sums = [int32x4_t; 4];

    #[inline(always)]
    fn run<K: Kernel>(neon: Neon<Self>, kernel: K) -> K::Output {
        #[target_feature(enable = "neon,dotprod")]
        fn enter<K: Kernel>(neon: Neon<Dot>, kernel: K) -> K::Output {
            kernel.run(neon)
        }
        // SAFETY: `neon` proves that the processor has the features.
        unsafe { enter(neon, kernel) }
    }
    #[inline(always)]
    fn sums_hold(largest: u8) -> usize {
        // Weights are multiplied as signed bytes.
        if largest > SIGNED { 0 } else { usize::MAX }
    }
    #[inline(always)]
    fn start(self, start: [int32x4_t; 4]) -> [int32x4_t; 4] {
        start
    }
    #[inline(always)]
    fn dot(self, sums: [int32x4_t; 4], w: [uint8x16_t; 4], x: [u8; 4]) -> [int32x4_t; 4] {
        // In the guise of a float, four bytes are loaded where they are needed: into a vector register.
        let x = f32::from_bits(u32::from_le_bytes(x));
        // `self` proves that the processor has the instruction.
        four!(i => dot(sums[i], vreinterpretq_s8_u8(w[i]), x))
    }
    #[inline(always)]
    fn total(self, sums: [int32x4_t; 4], _start: [int32x4_t; 4]) -> [int32x4_t; 4] {
        sums
    }
    #[inline(always)]
    fn dot_centered(self, sums: [int32x4_t; 4], w: [uint8x16_t; 4], x: [u8; 4]) -> [int32x4_t; 4] {
        let x = f32::from_bits(u32::from_le_bytes(x));
        four!(i => dot(sums[i], center(w[i]), x))
    }
}

/// The largest byte that is the same number signed and unsigned.
const SIGNED: u8 = i8::MAX as u8;

/// Unsigned bytes less [`CENTER`](super::CENTER).
#[inline(always)]
fn center(w: uint8x16_t) -> int8x16_t {
    call!(vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(0x80))))
}

/// The sum of each two products of bytes next to each other.
#[inline(always)]
fn multiply_pairs(w: int8x16_t, x: int8x16_t) -> int16x8_t {
    call!(vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x)))
}

/// Adds to each lane the products of its four signed bytes with the four of `x`. Its intrinsic is not stable.
#[inline]
#[target_feature(enable = "dotprod")]
fn dot(mut sums: int32x4_t, w: int8x16_t, x: f32) -> int32x4_t {
    // SAFETY: computes in registers alone.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {w:v}.16b, {x:v}.4b[0]",
            sums = inout(vreg) sums,
            w = in(vreg) w,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Asks for the lines of `bytes`, with an instruction whose intrinsic is not stable.
macro_rules! prefetch {
    ($instruction:literal, $bytes:expr) => {
        for line in $bytes.chunks(64) {
            // SAFETY: a hint that never faults.
            unsafe { asm!($instruction, in(reg) line.as_ptr().addr(), options(nomem, nostack, preserves_flags)) };
        }
    };
}

impl<P: ByteProducts> Simd for Neon<P> {
    type Floats = [float32x4_t; 4];
    type Ints = [int32x4_t; 4];
    type Bytes = [uint8x16_t; 4];
    type Sums = P::Sums;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        self.run(kernel)
    }
    #[inline(always)]
    fn sums_hold(largest: u8) -> usize {
        P::sums_hold(largest)
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8]) {
        prefetch!("prfm pldl1keep, [{}]", bytes);
    }
    #[inline(always)]
    fn prefetch_after(self, line: &Quads, bytes: usize) {
        let address = line.as_ptr().addr().wrapping_add(bytes);
        // SAFETY: a hint that never faults.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) address, options(nomem, nostack, preserves_flags)) };
    }
    #[inline(always)]
    fn prefetch_early(self, bytes: &[u8]) {
        prefetch!("prfm pldl2keep, [{}]", bytes);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [float32x4_t; 4] {
        call!([vdupq_n_f32(x); 4])
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> [float32x4_t; 4] {
        let (from, _) = from.as_chunks::<4>();
        four!(i => vld1q_f32(from[i].as_ptr()))
    }
    #[inline(always)]
    fn store(self, x: [float32x4_t; 4], to: &mut [f32; LANES]) {
        let (to, _) = to.as_chunks_mut::<4>();
        four!(i => vst1q_f32(to[i].as_mut_ptr(), x[i]));
    }
    #[inline(always)]
    fn load_f16(self, from: &[u8; 2 * LANES]) -> [float32x4_t; 4] {
        widen_f16(load_shorts(from))
    }
    #[inline(always)]
    fn load_bf16(self, from: &[u8; 2 * LANES]) -> [float32x4_t; 4] {
        let wide = widen_u16(load_shorts(from));
        four!(i => vreinterpretq_f32_u32(vshlq_n_u32::<16>(wide[i])))
    }
    #[inline(always)]
    fn load_e4m3_div_256(self, from: &[u8; LANES]) -> [float32x4_t; 4] {
        // Read as half precision, whose exponent's bias is larger by 8 and which has a bit more of it: that one, below the
        // sign, holds a copy of the sign.
        call!({
            let codes = vreinterpretq_s8_u8(load_bytes(from));
            let (low, high) = (vshll_n_s8::<7>(vget_low_s8(codes)), vshll_high_n_s8::<7>(codes));
            let keep = vdupq_n_u16(!(1 << 14));
            let halves = [vreinterpretq_u16_s16(low), vreinterpretq_u16_s16(high)];
            widen_f16([vandq_u16(halves[0], keep), vandq_u16(halves[1], keep)])
        })
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> [float32x4_t; 4] {
        let bytes = load_bytes(from);
        let wide = widen_u16(call!([vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)]));
        four!(i => vcvtq_f32_u32(wide[i]))
    }
    #[inline(always)]
    fn load_i8(self, from: &[u8; LANES]) -> [float32x4_t; 4] {
        let [low, high] = widen_i8(load_bytes(from));
        call!([
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
            vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
            vcvtq_f32_s32(vmovl_high_s16(high)),
        ])
    }
    #[inline(always)]
    fn load_e8m0(self, from: &[u8; LANES]) -> [float32x4_t; 4] {
        let codes = load_bytes(from);
        let wide = widen_u16(call!([vshll_n_u8::<7>(vget_low_u8(codes)), vshll_high_n_u8::<7>(codes)]));
        // Code 0 is 2^-127, a subnormal.
        four!(i => vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32::<16>(wide[i]), vdupq_n_u32(1 << 22))))
    }

    #[inline(always)]
    fn upper_bf16(self, x: [uint8x16_t; 4]) -> [float32x4_t; 4] {
        four!(i => vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(x[i]), vdupq_n_u32(0xFFFF_0000))))
    }
    #[inline(always)]
    fn lower_bf16(self, x: [uint8x16_t; 4]) -> [float32x4_t; 4] {
        four!(i => vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_u8(x[i]))))
    }
    #[inline(always)]
    fn pairs_of_e4m3(self, codes: [uint8x16_t; 4]) -> [[uint8x16_t; 4]; 2] {
        let [a, b, c, d] = four!(i => {
            let codes = codes[i];
            let small = vceqzq_u8(vandq_u8(codes, vdupq_n_u8(0x78)));
            let nibble = vandq_u8(codes, vdupq_n_u8(0x0F));
            let small_lower = vqtbl1q_u8(load_bytes(&E4M3_SMALL[0]), nibble);
            let lower = vbslq_u8(small, small_lower, vqtbl1q_u8(load_bytes(&E4M3_LOWER), nibble));
            let upper = vandq_u8(vshrq_n_u8::<4>(codes), vdupq_n_u8(0x07));
            let upper = vorrq_u8(upper, vdupq_n_u8(E4M3_EXPONENT as u8));
            let upper = vbslq_u8(small, vqtbl1q_u8(load_bytes(&E4M3_SMALL[1]), nibble), upper);
            let upper = vorrq_u8(upper, vandq_u8(codes, vdupq_n_u8(0x80)));
            [vzip1q_u8(lower, upper), vzip2q_u8(lower, upper)]
        });
        [[a[0], b[0], c[0], d[0]], [a[1], b[1], c[1], d[1]]]
    }

    #[inline(always)]
    fn add(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        four!(i => vaddq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn mul(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        four!(i => vmulq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn div(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        four!(i => vdivq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn fma(self, a: [float32x4_t; 4], b: [float32x4_t; 4], c: [float32x4_t; 4]) -> [float32x4_t; 4] {
        four!(i => vfmaq_f32(c[i], a[i], b[i]))
    }
    #[inline(always)]
    fn max(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // Not `fmax`, whose result is NaN if either is.
        four!(i => vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]))
    }
    #[inline(always)]
    fn min(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        four!(i => vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i]))
    }
    #[inline(always)]
    fn transpose(self, from: &[[f32; LANES]; LANES], to: &mut [[f32; LANES]; LANES]) {
        // Block by block of 4 by 4.
        for row in (0..LANES).step_by(4) {
            for column in (0..LANES).step_by(4) {
                let x = four!(i => vld1q_f32(from[row + i].as_chunks::<4>().0[column / 4].as_ptr()));
                let x = transpose_4(x);
                four!(i => vst1q_f32(to[column + i].as_chunks_mut::<4>().0[row / 4].as_mut_ptr(), x[i]));
            }
        }
    }
    #[inline(always)]
    fn to_floats(self, x: [int32x4_t; 4]) -> [float32x4_t; 4] {
        four!(i => vcvtq_f32_s32(x[i]))
    }
    #[inline(always)]
    fn exp2_whole(self, n: [float32x4_t; 4]) -> [float32x4_t; 4] {
        four!(i => {
            let exponent = vaddq_s32(vcvtq_s32_f32(n[i]), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
        })
    }
    #[inline(always)]
    fn round(self, x: [float32x4_t; 4]) -> [float32x4_t; 4] {
        four!(i => vrndnq_f32(x[i]))
    }
    #[inline(always)]
    fn sum(self, x: [float32x4_t; 4]) -> f32 {
        // Halves, as the other instruction sets add them up.
        call!({
            let four = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
            vaddv_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        })
    }
    #[inline(always)]
    fn largest(self, x: [float32x4_t; 4]) -> f32 {
        call!(vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x[0], x[1]), vmaxnmq_f32(x[2], x[3]))))
    }
    #[inline(always)]
    fn store_f16(self, x: [float32x4_t; 4], to: &mut [u8; 2 * LANES]) {
        call!({
            let halves = [vcvt_high_f16_f32(vcvt_f16_f32(x[0]), x[1]), vcvt_high_f16_f32(vcvt_f16_f32(x[2]), x[3])];
            store_shorts([vreinterpretq_u16_f16(halves[0]), vreinterpretq_u16_f16(halves[1])], to);
        });
    }
    #[inline(always)]
    fn store_bf16(self, x: [float32x4_t; 4], to: &mut [u8; 2 * LANES]) {
        let kept = four!(i => {
            // To nearest, ties to even: half of the last place that stays, less one where that place is even.
            let bits = vreinterpretq_u32_f32(x[i]);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
            vreinterpretq_u16_u32(vbslq_u32(vceqq_f32(x[i], x[i]), rounded, vdupq_n_u32(0x7FC0_0000)))
        });
        // The upper halves.
        store_shorts(call!([vuzp2q_u16(kept[0], kept[1]), vuzp2q_u16(kept[2], kept[3])]), to);
    }
    #[inline(always)]
    fn store_i8(self, x: [float32x4_t; 4], to: &mut [u8; LANES]) {
        let [low, high] = whole_shorts(x);
        call!(vst1q_u8(to.as_mut_ptr(), vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high))));
    }

    #[inline(always)]
    fn load_bytes(self, from: &Quads) -> [uint8x16_t; 4] {
        let (from, _) = from.as_chunks::<LANES>();
        four!(i => vld1q_u8(from[i].as_ptr()))
    }
    #[inline(always)]
    fn store_bytes(self, x: [uint8x16_t; 4], to: &mut Quads) {
        let (to, _) = to.as_chunks_mut::<LANES>();
        four!(i => vst1q_u8(to[i].as_mut_ptr(), x[i]));
    }
    #[inline(always)]
    fn field(self, x: [uint8x16_t; 4], right: u32, mask: u8) -> [uint8x16_t; 4] {
        let (left, mask) = call!((vdupq_n_s8(-(right as i8)), vdupq_n_u8(mask)));
        four!(i => vandq_u8(vshlq_u8(x[i], left), mask))
    }
    #[inline(always)]
    fn field_left(self, x: [uint8x16_t; 4], left: u32, mask: u8) -> [uint8x16_t; 4] {
        let (left, mask) = call!((vdupq_n_s8(left as i8), vdupq_n_u8(mask)));
        four!(i => vandq_u8(vshlq_u8(x[i], left), mask))
    }
    #[inline(always)]
    fn or(self, a: [uint8x16_t; 4], b: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        four!(i => vorrq_u8(a[i], b[i]))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], x: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        let table = load_bytes(table);
        four!(i => vqtbl1q_u8(table, x[i]))
    }

    #[inline(always)]
    fn byte_of_lane<const INDEX: u32>(self, x: [uint8x16_t; 4]) -> [int32x4_t; 4] {
        let left = call!(vdupq_n_s32(-8 * INDEX as i32));
        four!(i => {
            let shifted = vshlq_u32(vreinterpretq_u32_u8(x[i]), left);
            vreinterpretq_s32_u32(vandq_u32(shifted, vdupq_n_u32(0xFF)))
        })
    }
    #[inline(always)]
    fn splat_int(self, x: i32) -> [int32x4_t; 4] {
        call!([vdupq_n_s32(x); 4])
    }
    #[inline(always)]
    fn add_ints(self, a: [int32x4_t; 4], b: [int32x4_t; 4]) -> [int32x4_t; 4] {
        four!(i => vaddq_s32(a[i], b[i]))
    }

    #[inline(always)]
    fn start_sums(self, start: [int32x4_t; 4]) -> P::Sums {
        self.0.start(start)
    }
    #[inline(always)]
    fn dot_bytes(self, sums: P::Sums, w: [uint8x16_t; 4], x: [u8; 4]) -> P::Sums {
        self.0.dot(sums, w, x)
    }
    #[inline(always)]
    fn total(self, sums: P::Sums, start: [int32x4_t; 4]) -> [int32x4_t; 4] {
        self.0.total(sums, start)
    }
    #[inline(always)]
    fn dot_centered_bytes(self, sums: [int32x4_t; 4], w: [uint8x16_t; 4], x: [u8; 4]) -> [int32x4_t; 4] {
        self.0.dot_centered(sums, w, x)
    }
}

#[inline(always)]
fn load_bytes(from: &[u8; LANES]) -> uint8x16_t {
    call!(vld1q_u8(from.as_ptr()))
}

#[inline(always)]
fn load_shorts(from: &[u8; 2 * LANES]) -> [uint16x8_t; 2] {
    let (from, _) = from.as_chunks();
    call!([vreinterpretq_u16_u8(load_bytes(&from[0])), vreinterpretq_u16_u8(load_bytes(&from[1]))])
}

#[inline(always)]
fn store_shorts(x: [uint16x8_t; 2], to: &mut [u8; 2 * LANES]) {
    let (to, _) = to.as_chunks_mut::<LANES>();
    call!({
        vst1q_u8(to[0].as_mut_ptr(), vreinterpretq_u8_u16(x[0]));
        vst1q_u8(to[1].as_mut_ptr(), vreinterpretq_u8_u16(x[1]));
    });
}

#[inline(always)]
fn widen_u16(x: [uint16x8_t; 2]) -> [uint32x4_t; 4] {
    call!([vmovl_u16(vget_low_u16(x[0])), vmovl_high_u16(x[0]), vmovl_u16(vget_low_u16(x[1])), vmovl_high_u16(x[1])])
}

#[inline(always)]
fn widen_i8(x: uint8x16_t) -> [int16x8_t; 2] {
    call!({
        let x = vreinterpretq_s8_u8(x);
        [vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x)]
    })
}

#[inline(always)]
fn widen_f16(x: [uint16x8_t; 2]) -> [float32x4_t; 4] {
    call!({
        let [a, b] = [vreinterpretq_f16_u16(x[0]), vreinterpretq_f16_u16(x[1])];
        [vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)]
    })
}

/// Whole numbers, in 16 bits each.
#[inline(always)]
fn whole_shorts(x: [float32x4_t; 4]) -> [uint16x8_t; 2] {
    let ints = four!(i => vreinterpretq_u16_s32(vcvtq_s32_f32(x[i])));
    call!([vuzp1q_u16(ints[0], ints[1]), vuzp1q_u16(ints[2], ints[3])])
}

/// Transposes 4 rows of 4.
#[inline(always)]
fn transpose_4(x: [float32x4_t; 4]) -> [float32x4_t; 4] {
    call!({
        // Even and odd columns of two rows each, then their halves.
        let even = [vtrn1q_f32(x[0], x[1]), vtrn1q_f32(x[2], x[3])].map(|x| vreinterpretq_f64_f32(x));
        let odd = [vtrn2q_f32(x[0], x[1]), vtrn2q_f32(x[2], x[3])].map(|x| vreinterpretq_f64_f32(x));
        let columns = [
            vtrn1q_f64(even[0], even[1]),
            vtrn1q_f64(odd[0], odd[1]),
            vtrn2q_f64(even[0], even[1]),
            vtrn2q_f64(odd[0], odd[1]),
        ];
        columns.map(|column| vreinterpretq_f32_f64(column))
    })
}
