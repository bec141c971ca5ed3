//! AVX-512 with VNNI: servers since 2019 (Cascade Lake), desktops since 2022 (Zen 4). 16 lanes are one register.

use std::arch::x86_64::*;

use super::{E4M3_EXPONENT, E4M3_LOWER, E4M3_SMALL, Kernel, LANES, Quads, Simd};

/// Proof that the processor has AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(());

impl Avx512 {
    /// The proof, if the processor has them.
    pub fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    /// Runs a kernel compiled for these instructions.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")]
        fn enter<K: Kernel>(avx512: Avx512, kernel: K) -> K::Output {
            kernel.run(avx512)
        }
        // SAFETY: `self` proves that the processor has the features.
        unsafe { enter(self, kernel) }
    }
}

/// Calls intrinsics.
macro_rules! call {
    ($value:expr) => {
        // SAFETY: `Avx512` proves that the processor has the instructions. Loads and stores go through references to arrays
        // of the size that they touch.
        unsafe { $value }
    };
}

impl Avx512 {
    /// 16 whole numbers from memory.
    #[inline(always)]
    pub fn load_ints(self, from: &[i32; LANES]) -> __m512i {
        call!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    /// Asks for the line `bytes` behind this one, wherever that is, into the second-level cache.
    #[inline(always)]
    pub fn prefetch_early_after(self, line: &Quads, bytes: usize) {
        // A hint that never faults.
        call!(_mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(line).cast::<i8>().wrapping_add(bytes)));
    }

    /// Asks for memory that will be read after a while, into the second-level cache.
    #[inline(always)]
    pub fn prefetch_far<T>(self, value: &T) {
        for line in 0..size_of::<T>().div_ceil(64) {
            // A hint that never faults.
            call!(_mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(value).cast::<i8>().wrapping_add(64 * line)));
        }
    }
}

impl Simd for Avx512 {
    type Floats = __m512;
    type Ints = __m512i;
    type Bytes = __m512i;
    type Sums = __m512i;

    const REGISTERS: usize = 32;
    const NIBBLES: bool = true;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        self.run(kernel)
    }
    #[inline(always)]
    fn sums_hold(_largest: u8) -> usize {
        // `vpdpbusd` adds four products to 32 bits.
        usize::MAX
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8]) {
        for line in bytes.chunks(64) {
            // A hint that never faults.
            call!(_mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()));
        }
    }

    #[inline(always)]
    fn prefetch_after(self, line: &Quads, bytes: usize) {
        // SAFETY: a hint that never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(line).cast::<i8>().wrapping_add(bytes)) };
    }

    #[inline(always)]
    fn prefetch_early(self, bytes: &[u8]) {
        for line in bytes.chunks(64) {
            // A hint that never faults.
            call!(_mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()));
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        call!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        call!(_mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32; LANES]) {
        call!(_mm512_storeu_ps(to.as_mut_ptr(), x));
    }
    #[inline(always)]
    fn load_f16(self, from: &[u8; 2 * LANES]) -> __m512 {
        call!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_bf16(self, from: &[u8; 2 * LANES]) -> __m512 {
        call!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    fn load_e4m3_div_256(self, from: &[u8; LANES]) -> __m512 {
        call!({
            // Read as half precision, whose exponent's bias is larger by 8 and which has a bit more of it: that one, below the
            // sign, holds a copy of the sign.
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
            let half = _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(!0x4000));
            _mm512_cvtph_ps(half)
        })
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> __m512 {
        call!(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
    }
    #[inline(always)]
    fn load_i8(self, from: &[u8; LANES]) -> __m512 {
        call!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
    }
    #[inline(always)]
    fn load_e8m0(self, from: &[u8; LANES]) -> __m512 {
        call!({
            let code = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()));
            // Code 0 is 2^-127, a subnormal.
            _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32::<23>(code), _mm512_set1_epi32(1 << 22)))
        })
    }

    #[inline(always)]
    fn upper_bf16(self, x: __m512i) -> __m512 {
        call!(_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xFFFF_0000_u32 as i32))))
    }
    #[inline(always)]
    fn lower_bf16(self, x: __m512i) -> __m512 {
        call!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)))
    }
    #[inline(always)]
    fn pairs_of_e4m3(self, codes: __m512i) -> [__m512i; 2] {
        call!({
            let magnitude = _mm512_and_si512(codes, _mm512_set1_epi8(0x7F));
            let small = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78));
            let lower = _mm512_shuffle_epi8(sixteen(&E4M3_LOWER), magnitude);
            let lower = _mm512_mask_shuffle_epi8(lower, small, sixteen(&E4M3_SMALL[0]), magnitude);
            // (a & b) | c
            let upper = _mm512_ternarylogic_epi32::<0b1110_1010>(
                _mm512_srli_epi16::<4>(magnitude),
                _mm512_set1_epi8(0x07),
                _mm512_set1_epi8(E4M3_EXPONENT),
            );
            let upper = _mm512_mask_shuffle_epi8(upper, small, sixteen(&E4M3_SMALL[1]), magnitude);
            // a | (b & c)
            let upper = _mm512_ternarylogic_epi32::<0b1111_1000>(upper, codes, _mm512_set1_epi8(i8::MIN));
            [_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)]
        })
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        call!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn transpose(self, from: &[[f32; LANES]; LANES], to: &mut [[f32; LANES]; LANES]) {
        call!({
            let mut x = [_mm512_setzero_ps(); LANES];
            for i in 0..LANES {
                x[i] = _mm512_loadu_ps(from[i].as_ptr());
            }
            let x = transpose_16(x);
            for i in 0..LANES {
                _mm512_storeu_ps(to[i].as_mut_ptr(), x[i]);
            }
        });
    }
    #[inline(always)]
    fn to_floats(self, x: __m512i) -> __m512 {
        call!(_mm512_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn exp2_whole(self, n: __m512) -> __m512 {
        call!({
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        })
    }
    #[inline(always)]
    fn round(self, x: __m512) -> __m512 {
        call!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }
    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        // Halves, as the other instruction sets add them up.
        call!({
            let eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn largest(self, x: __m512) -> f32 {
        call!(_mm512_reduce_max_ps(x))
    }
    #[inline(always)]
    fn store_f16(self, x: __m512, to: &mut [u8; 2 * LANES]) {
        call!(_mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)));
    }
    #[inline(always)]
    fn store_bf16(self, x: __m512, to: &mut [u8; 2 * LANES]) {
        call!({
            // To nearest, ties to even: half of the last place that stays, less one where that place is even.
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0_0000));
            let shorts = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(kept));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), shorts);
        });
    }
    #[inline(always)]
    fn store_i8(self, x: __m512, to: &mut [u8; LANES]) {
        call!(_mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))));
    }

    #[inline(always)]
    fn load_bytes(self, from: &Quads) -> __m512i {
        call!(_mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn store_bytes(self, x: __m512i, to: &mut Quads) {
        call!(_mm512_storeu_si512(to.as_mut_ptr().cast(), x));
    }
    #[inline(always)]
    fn field(self, x: __m512i, right: u32, mask: u8) -> __m512i {
        call!({
            let shifted = _mm512_srl_epi16(x, _mm_cvtsi32_si128(right as i32));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask as i8))
        })
    }
    #[inline(always)]
    fn field_left(self, x: __m512i, left: u32, mask: u8) -> __m512i {
        call!({
            let shifted = _mm512_sll_epi16(x, _mm_cvtsi32_si128(left as i32));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask as i8))
        })
    }
    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        call!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], x: __m512i) -> __m512i {
        call!(_mm512_shuffle_epi8(sixteen(table), x))
    }

    #[inline(always)]
    fn lookup_nibble<const PLACE: u32>(self, table: __m512, x: __m512i) -> __m512 {
        // The permutation looks at the lowest four bits.
        call!(_mm512_permutexvar_ps(_mm512_srl_epi32(x, _mm_cvtsi32_si128(4 * PLACE as i32)), table))
    }
    #[inline(always)]
    fn byte_of_lane<const INDEX: u32>(self, x: __m512i) -> __m512i {
        call!({
            let shifted = _mm512_srl_epi32(x, _mm_cvtsi32_si128(8 * INDEX as i32));
            _mm512_and_si512(shifted, _mm512_set1_epi32(0xFF))
        })
    }
    #[inline(always)]
    fn splat_int(self, x: i32) -> __m512i {
        call!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn add_ints(self, a: __m512i, b: __m512i) -> __m512i {
        call!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn start_sums(self, start: __m512i) -> __m512i {
        start
    }
    #[inline(always)]
    fn dot_bytes(self, sums: __m512i, w: __m512i, x: [u8; 4]) -> __m512i {
        call!(_mm512_dpbusd_epi32(sums, w, _mm512_set1_epi32(i32::from_le_bytes(x))))
    }
    #[inline(always)]
    fn total(self, sums: __m512i, _start: __m512i) -> __m512i {
        sums
    }
}

/// A table in each quarter of a register.
#[inline(always)]
fn sixteen(table: &[u8; 16]) -> __m512i {
    call!(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())))
}

/// Transposes 16 rows of 16.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
unsafe fn transpose_16(x: [__m512; LANES]) -> [__m512; LANES] {
    // SAFETY: by the caller's promise.
    unsafe {
        // Inside the four quarters of the registers: pairs of rows, then fours.
        let mut pairs = x;
        for i in (0..LANES).step_by(2) {
            pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
            pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
        }
        // `fours[4j + k]` has in quarter `q` column `4q + k` of rows `4j..4j + 4`.
        let mut fours = pairs;
        for i in (0..LANES).step_by(4) {
            fours[i] = _mm512_shuffle_ps::<0b01_00_01_00>(pairs[i], pairs[i + 2]);
            fours[i + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(pairs[i], pairs[i + 2]);
            fours[i + 2] = _mm512_shuffle_ps::<0b01_00_01_00>(pairs[i + 1], pairs[i + 3]);
            fours[i + 3] = _mm512_shuffle_ps::<0b11_10_11_10>(pairs[i + 1], pairs[i + 3]);
        }
        // The quarters themselves are a matrix of 4 by 4, transposed by taking even and odd quarters of two registers twice.
        let mut columns = fours;
        for k in 0..4 {
            let [a, b, c, d] = [fours[k], fours[4 + k], fours[8 + k], fours[12 + k]];
            let even = [_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b10_00_10_00>(c, d)];
            let odd = [_mm512_shuffle_f32x4::<0b11_01_11_01>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d)];
            columns[k] = _mm512_shuffle_f32x4::<0b10_00_10_00>(even[0], even[1]);
            columns[4 + k] = _mm512_shuffle_f32x4::<0b10_00_10_00>(odd[0], odd[1]);
            columns[8 + k] = _mm512_shuffle_f32x4::<0b11_01_11_01>(even[0], even[1]);
            columns[12 + k] = _mm512_shuffle_f32x4::<0b11_01_11_01>(odd[0], odd[1]);
        }
        columns
    }
}
